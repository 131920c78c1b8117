"""Our plugin of the container runtime: registered as long as there is a runtime.

    connect ── RegisterPlugin ── Configure ── Synchronize ── calls and events … ── connect anew

Source: containerd/nri 0.12, pkg/adaptation: a plugin is asked for creations only after its
Synchronize, whose updates are then applied. Up to NRI 0.11 most events come as StateChange, since
0.12 as a call each, and as StateChange where that is answered with "unimplemented".
"""

import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from agent import log
from agent.core.backoff import doubled_s
from agent.core.placement import Refusal
from agent.core.runtime import Cpuset, RuntimeContainer, RuntimePod, Stage
from agent.core.strict_json import printable
from agent.edge.nri.connection import Connection, Method, RefusedError
from agent.edge.nri.endpoint import check_identity, connect, identify
from agent.edge.nri.frames import ProtocolError
from agent.edge.nri.messages import (
    Asked,
    to_adjustment,
    to_asked,
    to_container,
    to_containers,
    to_pod,
    to_update,
    to_updates,
)
from agent.errors import ContainerRuntimeError
from agent.proto import nri_pb2 as pb

_REGISTER_S: Final = 60.0
"""How long the runtime may take to take us on: it does so with one plugin at a time, and before
that waits for the end of what it is doing, such as a container's 30 s to end."""
_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 5.0
_STEADY_S: Final = 10.0
"""A connection this old shows that all is well: the next trouble is a new one."""
_LOOK_S: Final = 0.5
"""How often the socket's inode is looked at in a pause: a new one is tried at once."""

_MOST_OBJECTS: Final = 20_000
_MOST_BYTES: Final = 128 << 20
"""Of all parts of one Synchronize. A part counts as an object, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Callbacks:
    """Whom the plugin asks and tells, always in its own thread. All must answer from memory, and
    none may call the plugin's `close`.

    on_synchronize  everything that is there, at each connection; answers what is to be corrected
                    now, by container id
    on_create       answers what to pin the container to, why it must not be created, or None to
                    leave it alone
    on_update       of a container that somebody wants changed; answers what it is to keep
    on_start, on_stop, on_remove
                    of a container's id; it runs, it has ended, it is gone. A container that is
                    removed was stopped before, a creation that failed is stopped and removed
    on_run_pod, on_end_pod
                    of a sandbox; the second is told its id, when it stops and when it is removed,
                    which may be long after
    on_connection   True after each Synchronize, False when that connection has ended
    on_rpc          each call that was answered: method, seconds, name of the gRPC code
    """

    on_synchronize: Callable[
        [Sequence[RuntimePod], Sequence[RuntimeContainer]], Mapping[str, Cpuset]
    ]
    on_create: Callable[[RuntimePod, RuntimeContainer], Cpuset | Refusal | None]
    on_update: Callable[[RuntimePod, RuntimeContainer, Asked], Cpuset | None]
    on_start: Callable[[str], None]
    on_stop: Callable[[str], None]
    on_remove: Callable[[str], None]
    on_run_pod: Callable[[RuntimePod], None]
    on_end_pod: Callable[[str], None]
    on_connection: Callable[[bool], None]
    on_rpc: Callable[[str, float, str], None]


class _Subject(Protocol):
    """What an event is about, in either way that it comes."""

    @property
    def pod(self) -> pb.PodSandbox: ...

    @property
    def container(self) -> pb.Container: ...


class NriPlugin:
    """Serves from now on until it is closed. The socket need not be there yet, or ever.

    The runtime asks its plugins in the order of their `index`: two digits, "00" is left to others.

    Raises ConfigError for a path, a name or an index that no plugin can have.
    """

    def __init__(self, socket_path: str, name: str, index: str, callbacks: Callbacks) -> None:
        check_identity(socket_path, name, index)
        self._path = socket_path
        self._request = pb.RegisterPluginRequest(plugin_name=name, plugin_idx=index)
        self._callbacks = callbacks
        self._events = _events(callbacks)
        self._parts: list[pb.SynchronizeRequest] = []
        self._parts_size = (0, 0)
        self._registered = self._connected = False
        self._trouble: str | None = None
        self._closing = threading.Event()
        self._connection: Connection | None = None
        self._thread = threading.Thread(target=self._run, name="nri", daemon=True)
        self._thread.start()

    @property
    def registered(self) -> bool:
        """Whether a runtime has taken us on; its Synchronize may still be to come."""
        return self._registered

    @property
    def connected(self) -> bool:
        """Whether containers are created as we say."""
        return self._connected

    def close(self) -> None:
        """Ends the connection. Takes a second at most."""
        self._closing.set()
        connection = self._connection
        if connection is not None:
            connection.close()
        self._thread.join(1.0)

    # --- connections, one after the other ---------------------------------------------------------

    def _run(self) -> None:
        failures = 0
        while not self._closing.is_set():
            seen, start_s = identify(self._path), time.monotonic()
            try:
                self._connect()
            except ContainerRuntimeError as error:
                self._report(str(error))
            except Exception:
                log.crash("connection to the container runtime")
            failures = 1 if time.monotonic() - start_s >= _STEADY_S else failures + 1
            self._pause(failures, seen)

    def _connect(self) -> None:
        """Raises ContainerRuntimeError when the connection is over, or cannot be had."""
        with connect(self._path) as peer:
            connection = Connection(peer, self._methods(), self._callbacks.on_rpc)
            self._connection = connection
            try:
                if not self._closing.is_set():
                    connection.call("RegisterPlugin", self._request, pb.Empty, _REGISTER_S)
                    connection.serve()
            finally:
                self._connection = None
                self._take_parts()
                self._registered = False
                self._set_connected(False)

    def _report(self, trouble: str) -> None:
        """Once for each change."""
        if trouble != self._trouble and not self._closing.is_set():
            self._trouble = trouble
            log.warning("no container runtime", socket=self._path, reason=trouble)

    def _pause(self, failures: int, seen: object) -> None:
        """Until it is time to try again, or there is another socket."""
        end_s = time.monotonic() + pause_s(failures, random.random())
        while time.monotonic() < end_s and identify(self._path) == seen:
            if self._closing.wait(min(_LOOK_S, max(0.0, end_s - time.monotonic()))):
                return

    def _set_connected(self, connected: bool) -> None:
        if connected == self._connected:
            return
        self._connected = connected
        try:
            self._callbacks.on_connection(connected)
        except Exception:
            log.crash("connection not told")

    # --- calls ------------------------------------------------------------------------------------

    def _methods(self) -> Mapping[str, Method[Any, Any]]:
        """All calls that we subscribe to, and those that a runtime may make anyway."""
        methods: dict[str, Method[Any, Any]] = {
            _EVENT_METHODS[event]: Method(
                request=pb.EventRequest, answer=self._events[event], otherwise=pb.Empty()
            )
            for event in self._events
        }
        for name, request, answer, otherwise in (
            ("Configure", pb.ConfigureRequest, self._configure, _CONFIGURED),
            ("Synchronize", pb.SynchronizeRequest, self._synchronize, pb.SynchronizeResponse()),
            ("CreateContainer", pb.CreateContainerRequest, self._create, pb.Empty()),
            ("UpdateContainer", pb.UpdateContainerRequest, self._update, pb.Empty()),
            ("StateChange", pb.StateChangeEvent, self._state_change, pb.Empty()),
            ("Shutdown", pb.Empty, self._shut_down, pb.Empty()),
        ):
            methods[name] = Method(request=request, answer=answer, otherwise=otherwise)
        return methods

    def _configure(self, request: pb.ConfigureRequest) -> pb.ConfigureResponse:
        self._registered = True
        log.info(
            "registered with the container runtime",
            runtime=printable(request.runtime_name, 80),
            version=printable(request.runtime_version, 80),
            nri=printable(request.nri_version, 80) or None,
        )
        return _CONFIGURED

    def _synchronize(self, request: pb.SynchronizeRequest) -> pb.SynchronizeResponse:
        """The last part of the runtime's state is answered for all."""
        self._add_part(request)
        if request.more:
            return pb.SynchronizeResponse(more=True)
        parts = self._take_parts()
        pods = [to_pod(pod) for part in parts for pod in part.pods]
        containers = [c for part in parts for c in to_containers(part.containers)]
        log.info(
            "synchronized with the container runtime", pods=len(pods), containers=len(containers)
        )
        try:
            updates = to_updates(self._callbacks.on_synchronize(pods, containers))
        finally:
            self._trouble = None
            self._set_connected(True)
        return pb.SynchronizeResponse(update=updates)

    def _add_part(self, part: pb.SynchronizeRequest) -> None:
        """Raises ProtocolError if there is no end of them."""
        objects, size = self._parts_size
        objects, size = objects + 1 + len(part.pods) + len(part.containers), size + part.ByteSize()
        if objects > _MOST_OBJECTS or size > _MOST_BYTES:
            raise ProtocolError(
                f"the container runtime has more than {_MOST_OBJECTS:,} pods and containers, "
                f"or more than {_MOST_BYTES >> 20} MiB of them"
            )
        self._parts.append(part)
        self._parts_size = objects, size

    def _take_parts(self) -> list[pb.SynchronizeRequest]:
        parts, self._parts, self._parts_size = self._parts, [], (0, 0)
        return parts

    def _create(self, request: pb.CreateContainerRequest) -> pb.CreateContainerResponse | None:
        container = to_container(request.container, Stage.CREATING)
        answer = self._callbacks.on_create(to_pod(request.pod), container)
        if isinstance(answer, Refusal):
            raise RefusedError(answer.reason)
        if answer is None:
            return None
        return pb.CreateContainerResponse(adjust=to_adjustment(answer))

    def _update(self, request: pb.UpdateContainerRequest) -> pb.UpdateContainerResponse | None:
        """Ours goes over what was asked, the rest stays as asked. Another plugin that wants the
        same fails the call, which leaves the container as it is."""
        container = to_container(request.container)
        asked = to_asked(request.linux_resources)
        kept = self._callbacks.on_update(to_pod(request.pod), container, asked)
        if kept is None:
            return None
        update = to_update(container.id, kept, ignore_failure=False)
        return pb.UpdateContainerResponse(update=[update])

    def _state_change(self, event: pb.StateChangeEvent) -> None:
        answer = self._events.get(event.event)
        if answer is not None:
            answer(event)

    def _shut_down(self, request: pb.Empty) -> None:
        log.info("container runtime ends")


def pause_s(failures: int, chance: float) -> float:
    """How long to wait after so many failures in a row. `chance` is between 0 and 1, so that the
    plugins of a node do not come all at once."""
    whole_s = doubled_s(failures - 1, _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
    return whole_s * (0.5 + 0.5 * chance)


# --- events ---------------------------------------------------------------------------------------

_EVENT_METHODS: Final[Mapping[int, str]] = {
    pb.RUN_POD_SANDBOX: "RunPodSandbox",
    pb.STOP_POD_SANDBOX: "StopPodSandbox",
    pb.REMOVE_POD_SANDBOX: "RemovePodSandbox",
    pb.POST_START_CONTAINER: "PostStartContainer",
    pb.STOP_CONTAINER: "StopContainer",
    pb.REMOVE_CONTAINER: "RemoveContainer",
}
"""Those that are only told, with the names of their calls, whose empty responses are all alike."""

_CONFIGURED: Final = pb.ConfigureResponse(
    events=sum(
        1 << (event - 1) for event in (*_EVENT_METHODS, pb.CREATE_CONTAINER, pb.UPDATE_CONTAINER)
    )
)
"""What we subscribe to. No bit would mean all events, and one over 10 is refused by runtimes before
NRI 0.10."""


def _events(callbacks: Callbacks) -> Mapping[int, Callable[[_Subject], None]]:
    return {
        pb.RUN_POD_SANDBOX: lambda subject: callbacks.on_run_pod(to_pod(subject.pod)),
        pb.STOP_POD_SANDBOX: lambda subject: callbacks.on_end_pod(subject.pod.id),
        pb.REMOVE_POD_SANDBOX: lambda subject: callbacks.on_end_pod(subject.pod.id),
        pb.POST_START_CONTAINER: lambda subject: callbacks.on_start(subject.container.id),
        pb.STOP_CONTAINER: lambda subject: callbacks.on_stop(subject.container.id),
        pb.REMOVE_CONTAINER: lambda subject: callbacks.on_remove(subject.container.id),
    }
