"""A small container runtime as NRI plugins see it, over a real socket.

It does what containerd does with NRI, faults included, and it frames, chunks and reads as Go does,
in code of its own:

    a plugin  ── RegisterPlugin ──▶ Configure, Synchronize, updates applied, asked from then on
    the test  ── run_pod, create, start, update, stop, remove ──▶ what containers there are

Source: containerd/nri 0.12, pkg/adaptation and pkg/net/multiplex; containerd/ttrpc 1.2;
containerd 2.4, internal/nri.
"""

import contextlib
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, InvalidStateError
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, cast

from agent.proto import nri_pb2 as pb
from agent.proto import ttrpc_pb2 as ttrpc

PLUGIN = "nri.pkg.api.v1alpha1.Plugin"
RUNTIME = "nri.pkg.api.v1alpha1.Runtime"

TO_PLUGIN, TO_RUNTIME = 1, 2
"""The multiplexer's connections, by who is called there."""
REQUEST, RESPONSE = 1, 2
INVALID_ARGUMENT, UNIMPLEMENTED = 3, 12

_BUFFER = 4096
"""Bytes of Go's bufio.Reader and bufio.Writer where nothing else is said."""
_QUEUE = 256
_REGISTER_S = 5.0
_PATIENCE_S = 20.0

_EVENTS = {
    1: "RunPodSandbox",
    2: "StopPodSandbox",
    3: "RemovePodSandbox",
    4: "CreateContainer",
    5: "PostCreateContainer",
    6: "StartContainer",
    7: "PostStartContainer",
    8: "UpdateContainer",
    9: "PostUpdateContainer",
    10: "StopContainer",
    11: "RemoveContainer",
}
_KNOWN_BITS = {"0.9": 11, "0.11": 14, "0.12": 14}


class CallFailedError(Exception):
    """A plugin answered with an error, and so what the call was about failed."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class PluginLostError(Exception):
    """A plugin did not answer in time, broke the protocol or hung up: it is thrown out."""


# --- bytes ----------------------------------------------------------------------------------------


class GoReader:
    """One of the multiplexer's connections as ttrpc reads it.

    `receive` returns the payload of the next frame. A payload that is larger than the room for it
    ends the connection.
    """

    def __init__(self, receive: Callable[[], bytes]) -> None:
        self._receive = receive
        self._buffered = b""

    def read_message(self) -> tuple[int, int, bytes]:
        """Stream id, type, data. Raises PluginLostError, and what `receive` raises."""
        length, stream, kind, _ = struct.unpack(">IIBB", self._read_full(10))
        if length > 4 << 20:
            raise PluginLostError(f"a message of {length} bytes")
        return stream, kind, self._read_full(length)

    def _read_full(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            data += self._read(size - len(data))
        return bytes(data)

    def _read(self, room: int) -> bytes:
        """As bufio.Reader.Read: a large read goes past the buffer, a small one fills it once."""
        if not self._buffered:
            payload = self._receive()
            if len(payload) > max(room, _BUFFER):
                raise PluginLostError("cannot allocate memory")
            if room >= _BUFFER:
                return payload
            self._buffered = payload
        data, self._buffered = self._buffered[:room], self._buffered[room:]
        return data


def go_frames(connection: int, stream: int, kind: int, data: bytes) -> bytes:
    """A message as bufio.Writer and the multiplexer write it: a full buffer, then all the rest."""
    message = struct.pack(">IIBB", len(data), stream, kind, 0) + data
    parts = [message[:_BUFFER], message[_BUFFER:]]
    return b"".join(struct.pack(">II", connection, len(part)) + part for part in parts if part)


def read_frame(peer: socket.socket) -> tuple[int, bytes]:
    """Connection id and payload. Raises EOFError at the end, and OSError."""
    connection, length = struct.unpack(">II", _read_exactly(peer, 8))
    return connection, _read_exactly(peer, length)


def _read_exactly(peer: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = peer.recv(min(size - len(data), 1 << 16))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


# --- one plugin -----------------------------------------------------------------------------------


class _Plugin:
    """The runtime's end of one connection: a thread that reads, and one for each direction."""

    def __init__(
        self, peer: socket.socket, register: Callable[[pb.RegisterPluginRequest], str | None]
    ) -> None:
        self.events = 0
        self.registered: Future[pb.RegisterPluginRequest] = Future()
        self.lost: str | None = None
        self._peer = peer
        self._register = register
        self._stream = -1
        self._calls: dict[int, Future[ttrpc.Response]] = {}
        self._state = threading.Lock()
        self._writing = threading.Lock()
        self._payloads: dict[int, queue.SimpleQueue[bytes | None]] = {
            connection: queue.SimpleQueue() for connection in (TO_PLUGIN, TO_RUNTIME)
        }
        targets = (self._read_trunk, self._read_answers, self._read_calls)
        self._threads = [threading.Thread(target=target, daemon=True) for target in targets]
        for thread in self._threads:
            thread.start()

    def close(self, why: str) -> None:
        with self._state:
            self.lost = self.lost or why
            futures: list[Future[Any]] = [*self._calls.values(), self.registered]
        with contextlib.suppress(OSError):
            self._peer.shutdown(socket.SHUT_RDWR)
        for future in futures:
            future.cancel()
        for payloads in self._payloads.values():
            payloads.put(None)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(_PATIENCE_S)
            assert not thread.is_alive()
        self._peer.close()

    def call(self, method: str, request: Any, response: Any, timeout_s: float) -> Any:
        """Raises CallFailedError, and PluginLostError when the plugin is closed."""
        answer = self.ask(PLUGIN, method, request.SerializeToString(), timeout_s)
        if answer.status.code:
            raise CallFailedError(answer.status.code, answer.status.message)
        return response.FromString(answer.payload)

    def ask(self, service: str, method: str, payload: bytes, timeout_s: float) -> ttrpc.Response:
        request = ttrpc.Request(
            service=service, method=method, payload=payload, timeout_nano=int(timeout_s * 1e9)
        )
        future: Future[ttrpc.Response] = Future()
        with self._state:
            if self.lost:
                raise PluginLostError(self.lost)
            self._stream += 2
            stream = self._stream
            self._calls[stream] = future
        self.write(go_frames(TO_PLUGIN, stream, REQUEST, request.SerializeToString()))
        try:
            return future.result(timeout_s)
        except CancelledError:
            pass
        except TimeoutError:
            self.close(f"{method}: deadline exceeded")
        raise PluginLostError(self.lost)

    def write(self, data: bytes) -> None:
        with self._writing, contextlib.suppress(OSError):  # the reader notices too
            self._peer.sendall(data)

    def _read_trunk(self) -> None:
        try:
            while True:
                connection, payload = read_frame(self._peer)
                payloads = self._payloads.get(connection)
                if payloads is not None:
                    payloads.put(payload)
                    if payloads.qsize() > _QUEUE:
                        self.close("failed to queue payload for reading")
        except (EOFError, OSError):
            self.close("the plugin closed the connection")

    def _read_answers(self) -> None:
        for stream, kind, data in self._messages(TO_PLUGIN):
            future = self._calls.get(stream)
            if future is not None and kind == RESPONSE:
                with contextlib.suppress(InvalidStateError):
                    future.set_result(ttrpc.Response.FromString(data))

    def _read_calls(self) -> None:
        last = 0
        for stream, kind, data in self._messages(TO_RUNTIME):
            if kind != REQUEST:
                continue
            if stream % 2 == 0 or stream <= last:
                answer = _failed(INVALID_ARGUMENT, "StreamID")
            else:
                last = stream
                answer = self._answer(ttrpc.Request.FromString(data))
            self.write(go_frames(TO_RUNTIME, stream, RESPONSE, answer.SerializeToString()))

    def _messages(self, connection: int) -> Iterator[tuple[int, int, bytes]]:
        def receive() -> bytes:
            payload = self._payloads[connection].get()
            if payload is None:
                raise EOFError
            return payload

        reader = GoReader(receive)
        try:
            while True:
                yield reader.read_message()
        except EOFError:
            return
        except PluginLostError as error:
            self.close(str(error))

    def _answer(self, request: ttrpc.Request) -> ttrpc.Response:
        if (request.service, request.method) != (RUNTIME, "RegisterPlugin"):
            return _failed(UNIMPLEMENTED, f"{request.service}/{request.method}")
        asked = pb.RegisterPluginRequest.FromString(request.payload)
        problem = self._register(asked)
        with contextlib.suppress(InvalidStateError):
            if problem:
                self.registered.set_exception(PluginLostError(problem))
            else:
                self.registered.set_result(asked)
        return _failed(INVALID_ARGUMENT, problem) if problem else ttrpc.Response()


def _failed(code: int, text: str) -> ttrpc.Response:
    return ttrpc.Response(status=ttrpc.Status(code=code, message=text))


# --- the runtime ----------------------------------------------------------------------------------


class FakeRuntime:
    """A context manager that starts and stops it; the same object is the runtime after a restart.

    `nri` is its version: "0.12" makes a call of each event, and StateChange where that is not
    implemented, the others make StateChange only. What a test may switch at any time:

    register_error     what is wrong with every plugin's name
    may_synchronize    a gate that Synchronize waits for
    objects_per_part   Synchronize comes in parts of so many pods and as many containers
    unchangeable       ids of containers whose updates fail
    is_strict          a failed update in answer to Synchronize ends the registration, as in CRI-O
    converse           is given the next connections instead, one after the other
    """

    def __init__(
        self,
        path: Path,
        nri: Literal["0.9", "0.11", "0.12"] = "0.12",
        request_timeout_s: float = 10.0,
    ) -> None:
        self.path = path
        self.nri = nri
        self.request_timeout_s = request_timeout_s
        self.register_error: str | None = None
        self.may_synchronize = threading.Event()
        self.may_synchronize.set()
        self.objects_per_part = 1_000_000
        self.unchangeable: set[str] = set()
        self.is_strict = False
        self.converse: Callable[[socket.socket], None] | None = None
        self.pods: dict[str, pb.PodSandbox] = {}
        self.containers: dict[str, pb.Container] = {}
        self.registrations: list[pb.RegisterPluginRequest] = []
        self.masks: list[int] = []
        self.lost: list[str] = []
        self.calls: list[str] = []
        self.connections = 0
        self._lock = threading.RLock()
        self._plugins: list[_Plugin] = []
        self._all: list[_Plugin] = []
        self._listener: socket.socket | None = None
        self._acceptor: threading.Thread | None = None

    # --- life -------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        assert self._listener is None
        """The socket takes its place when it is served already: a test may count on that."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{self.path}~")
        self._listener.listen()
        Path(f"{self.path}~").rename(self.path)
        self._acceptor = threading.Thread(target=self._accept, args=(self._listener,), daemon=True)
        self._acceptor.start()

    def stop(self) -> None:
        """An orderly end: the socket is removed."""
        self.kill()
        self.path.unlink(missing_ok=True)

    def kill(self) -> None:
        """As SIGKILL: the socket's file stays, and nobody serves it. Containers run on."""
        listener, self._listener = self._listener, None
        if listener is None:
            return
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        for plugin in list(self._all):
            plugin.close("the runtime ended")
        assert self._acceptor is not None
        self._acceptor.join(_PATIENCE_S)
        assert not self._acceptor.is_alive()
        listener.close()
        for plugin in self._all:
            plugin.close("the runtime ended")
            plugin.join()
        self._all, self._plugins = [], []

    def restart(self) -> None:
        self.kill()
        self.start()

    @property
    def plugins(self) -> list[str]:
        """Names of the plugins that are asked, in order."""
        with self._lock:
            return [_name(plugin) for plugin in self._plugins if not plugin.lost]

    def wait_for(self, predicate: Callable[[], bool], timeout_s: float = _PATIENCE_S) -> None:
        """Until `predicate()`, which may be about anything. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while not predicate():
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"not so within {timeout_s:g} s: plugins={self.plugins} lost={self.lost} "
                    f"connections={self.connections} calls={self.calls}"
                )
            threading.Event().wait(0.01)

    # --- plugins ----------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        """One plugin after the other, each to the end of its registration."""
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            self.connections += 1
            if self.converse is not None:
                with peer, contextlib.suppress(OSError, EOFError):
                    self.converse(peer)
                continue
            plugin = _Plugin(peer, self._register)
            self._all.append(plugin)
            try:
                self._take_on(plugin)
            except (PluginLostError, CallFailedError) as error:
                self.lost.append(str(error))
                if self.register_error is None:  # else it is forgotten, and stays open
                    plugin.close(str(error))

    def _register(self, request: pb.RegisterPluginRequest) -> str | None:
        self.registrations.append(request)
        return self.register_error

    def _take_on(self, plugin: _Plugin) -> None:
        try:
            plugin.registered.result(_REGISTER_S)
        except (TimeoutError, CancelledError) as error:
            raise PluginLostError("plugin registration timed out") from error
        configuration = pb.ConfigureRequest(
            runtime_name="fake",
            runtime_version="v1.2.3",
            registration_timeout=int(_REGISTER_S * 1e3),
            request_timeout=int(self.request_timeout_s * 1e3),
        )
        answer = self._call(plugin, "Configure", configuration, pb.ConfigureResponse)
        known = (1 << _KNOWN_BITS[self.nri]) - 1
        self.masks.append(answer.events)
        if answer.events & ~known:
            raise PluginLostError(f"invalid plugin events: {answer.events & ~known:#x}")
        plugin.events = answer.events or known
        while not self.may_synchronize.wait(0.02):
            if plugin.lost:
                raise PluginLostError(plugin.lost)
        with self._lock:
            self._update(self._synchronize(plugin))
            self._plugins = sorted([*self._plugins, plugin], key=_name)

    def _synchronize(self, plugin: _Plugin) -> list[pb.ContainerUpdate]:
        pods, containers = list(self.pods.values()), list(self.containers.values())
        size = self.objects_per_part
        while True:
            request = pb.SynchronizeRequest(
                pods=pods[:size],
                containers=containers[:size],
                more=max(len(pods), len(containers)) > size,
            )
            answer = self._call(plugin, "Synchronize", request, pb.SynchronizeResponse)
            if not request.more:
                return list(answer.update)
            if answer.update or not answer.more:
                raise PluginLostError("plugin does not handle split sync requests")
            pods, containers = pods[size:], containers[size:]

    def _update(self, updates: list[pb.ContainerUpdate]) -> None:
        for update in updates:
            container = self.containers.get(update.container_id)
            if container is None:
                continue
            if update.container_id not in self.unchangeable:
                _change(container.linux.resources, update.linux.resources)
            elif self.is_strict and not update.ignore_failure:
                raise PluginLostError(f"failed to update container {update.container_id}")

    def _call(self, plugin: _Plugin, method: str, request: Any, response: Any) -> Any:
        self.calls.append(method)
        return plugin.call(method, request, response, self.request_timeout_s)

    def _lose(self, plugin: _Plugin, why: str) -> None:
        plugin.close(why)
        self.lost.append(why)

    # --- the test as kubelet ----------------------------------------------------------------------

    def run_pod(self, pod: pb.PodSandbox) -> None:
        """As all of these, raises CallFailedError where a plugin's error fails it."""
        self.pods[pod.id] = pod
        self._tell(1, pod)

    def remove_pod(self, pod_id: str) -> None:
        self._tell(2, self.pods[pod_id])
        self._tell(3, self.pods.pop(pod_id))

    def create(self, container: pb.Container) -> pb.Container:
        """The container as the plugins have adjusted it; what they refuse is undone with them."""
        pod = self.pods[container.pod_sandbox_id]
        request = pb.CreateContainerRequest(pod=pod, container=container)
        created = pb.Container()
        created.CopyFrom(container)
        with self._lock:
            try:
                for answer in self._ask(4, request, pb.CreateContainerResponse):
                    _change(created.linux.resources, answer.adjust.linux.resources)
            except CallFailedError:
                self._tell(10, pod, container)
                self._tell(11, pod, container)
                raise
            created.state = pb.CONTAINER_CREATED
            self.containers[created.id] = created
            self._tell(5, pod, created)
        return created

    def start_container(self, container_id: str) -> None:
        container = self.containers[container_id]
        self._tell(6, self._pod_of(container), container)
        container.state = pb.CONTAINER_RUNNING
        self._tell(7, self._pod_of(container), container)

    def update(self, container_id: str, resources: pb.LinuxResources) -> None:
        """What is asked, with what the plugins say over it."""
        container = self.containers[container_id]
        request = pb.UpdateContainerRequest(
            pod=self._pod_of(container), container=container, linux_resources=resources
        )
        asked = pb.LinuxResources()
        asked.CopyFrom(resources)
        for answer in self._ask(8, request, pb.UpdateContainerResponse):
            for update in answer.update:
                if update.container_id == container_id:
                    _change(asked, update.linux.resources)
        _change(container.linux.resources, asked)

    def stop_container(self, container_id: str) -> None:
        container = self.containers[container_id]
        container.state = pb.CONTAINER_STOPPED
        self._tell(10, self._pod_of(container), container)

    def remove_container(self, container_id: str) -> None:
        if self.containers[container_id].state != pb.CONTAINER_STOPPED:
            self.stop_container(container_id)
        container = self.containers.pop(container_id)
        self._tell(11, self._pod_of(container), container)

    def ask(self, method: str, payload: bytes, service: str = PLUGIN) -> ttrpc.Response:
        """Any call of the first plugin. Raises PluginLostError."""
        return self._plugins[0].ask(service, method, payload, self.request_timeout_s)

    def write(self, data: bytes) -> None:
        """Any bytes to the first plugin."""
        self._plugins[0].write(data)

    def _pod_of(self, container: pb.Container) -> pb.PodSandbox:
        return self.pods.get(container.pod_sandbox_id, pb.PodSandbox())

    def _tell(self, event: int, pod: pb.PodSandbox, container: pb.Container | None = None) -> None:
        name = _EVENTS[event]
        dedicated = pb.EventRequest(pod=pod, container=container)
        change = pb.StateChangeEvent(event=cast("pb.Event", event), pod=pod, container=container)
        with self._lock:
            for plugin in self._asked(event):
                with self._losing(plugin):
                    if self.nri == "0.12" or event == 10:
                        try:
                            self._call(plugin, name, dedicated, pb.Empty)
                            continue
                        except CallFailedError as error:
                            if error.code != UNIMPLEMENTED:
                                raise
                    self._call(plugin, "StateChange", change, pb.Empty)

    def _ask(self, event: int, request: Any, response: Any) -> list[Any]:
        answers = []
        with self._lock:
            for plugin in self._asked(event):
                with self._losing(plugin):
                    answers.append(self._call(plugin, _EVENTS[event], request, response))
        return answers

    def _asked(self, event: int) -> list[_Plugin]:
        self._plugins = [plugin for plugin in self._plugins if not plugin.lost]
        return [plugin for plugin in self._plugins if plugin.events & 1 << (event - 1)]

    @contextlib.contextmanager
    def _losing(self, plugin: _Plugin) -> Iterator[None]:
        """What is lost is thrown out, and what it was asked goes on without it."""
        try:
            yield
        except PluginLostError as error:
            self._lose(plugin, str(error))


def _name(plugin: _Plugin) -> str:
    request = plugin.registered.result()
    return f"{request.plugin_idx}-{request.plugin_name}"


def _change(resources: pb.LinuxResources, change: pb.LinuxResources) -> None:
    """Empty texts and numbers that are 0 change nothing."""
    for name in ("cpus", "mems"):
        if text := getattr(change.cpu, name):
            setattr(resources.cpu, name, text)
    for name in ("shares", "quota", "period"):
        if value := getattr(change.cpu, name).value:
            getattr(resources.cpu, name).value = value
    if change.memory.limit.value:
        resources.memory.limit.value = change.memory.limit.value
