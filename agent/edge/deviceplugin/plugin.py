"""Kubelet's device plugin API: our devices, told and given out.

Every RPC is answered from memory: kubelet admits pods one at a time and sets no deadline.

    watcher thread   the plugin directory every `_LOOK_S` → listen, register (core.registration)
    gRPC threads     one open ListAndWatch at a time, a newer one ends the older; the other RPCs

Source: kubelet 1.36, k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1.
"""

import os
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from agent import log
from agent.core.offer import Allocation, Device
from agent.core.placement import Refusal
from agent.core.registration import Registration, Seen, SocketId, Step, after_attempt, next_step
from agent.core.strict_json import printable
from agent.edge.deviceplugin.calls import RefusedError, answer_call
from agent.edge.deviceplugin.directory import identify, keep_lock, to_target
from agent.edge.deviceplugin.messages import to_allocation, to_response
from agent.errors import KubeletError
from agent.proto import deviceplugin_pb2 as pb

VERSION: Final = "v1beta1"
KUBELET_SOCKET: Final = "kubelet.sock"

_LOOK_S: Final = 0.5
"""How often the plugin directory is looked at. Two calls of stat: cheaper than being told."""
_LONGEST_PAUSE_S: Final = 10.0
"""How seldom it is looked at where that fails."""
_REGISTER_S: Final = 12.0
"""How long a registration may take: in it kubelet dials us, for up to 10 s."""
_THREADS: Final = 8
"""One for the stream, one for a stream that is being ended; the others for RPCs."""
_LARGEST_MESSAGE: Final = 1 << 20
"""Bytes. A request for 64 devices has about 3,000."""

_CHANNEL_OPTIONS: Final = (
    ("grpc.use_local_subchannel_pool", 1),  # else a refused connection delays the next channel's
    ("grpc.enable_http_proxy", 0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What the plugin asks others: whom to prefer among (available, must include, count), and how
    to give out devices; and whom it tells: of each RPC (method, seconds, code), of each
    registration ("ok" or "failed"), and whether kubelet reads the devices."""

    prefer: Callable[[Sequence[str], Sequence[str], int], Sequence[str]]
    allocate: Callable[[Sequence[str]], Allocation | Refusal]
    on_rpc: Callable[[str, float, str], None]
    on_registration: Callable[[str], None]
    on_stream: Callable[[bool], None]


class DevicePlugin:
    """Serves `resource` in kubelet's plugin directory, from the first update until it is closed.

    The directory need not be there yet. Raises KubeletError where that can never work: no
    permission, or another agent is there.
    """

    def __init__(self, directory: str, resource: str, answers: Answers) -> None:
        self._directory = Path(directory)
        self._resource = resource
        self._answers = answers
        self._lock = keep_lock(None, self._directory)
        self._server: grpc.Server | None = None
        self._endpoint: tuple[Path, SocketId] | None = None
        self._devices: tuple[Device, ...] = ()
        self._begun = threading.Event()
        self._changed = threading.Condition()
        self._streams = self._opened = 0
        self._current = 0
        self._closing = threading.Event()
        self._registering: grpc.Future[pb.Empty] | None = None
        self._watcher = threading.Thread(target=self._watch, name="kubelet", daemon=True)
        self._watcher.start()

    @property
    def streaming(self) -> bool:
        """Whether kubelet reads our devices."""
        return self._streams > 0

    def update(self, devices: Sequence[Device]) -> None:
        """Tells kubelet, if anything changed: each message costs it a write to its disk."""
        with self._changed:
            self._devices = tuple(devices)
            self._changed.notify_all()
        self._begun.set()

    def close(self) -> None:
        """Ends the stream and takes the socket away. Takes a second at most."""
        self._closing.set()
        self._begun.set()
        if (registering := self._registering) is not None:
            registering.cancel()
        self._watcher.join(1.0)
        self._stop_server()
        if self._lock is not None:
            os.close(self._lock)

    # --- registration -----------------------------------------------------------------------------

    def _watch(self) -> None:
        state = Registration()
        trouble, pause_s = None, _LOOK_S
        self._begun.wait()
        while not self._closing.is_set():
            try:
                state = self._take_step(state)
                trouble, pause_s = None, _LOOK_S
            except Exception as error:
                if str(error) != trouble:
                    log.error("plugin directory", path=self._directory, reason=error)
                trouble, pause_s = str(error), min(2 * pause_s, _LONGEST_PAUSE_S)
            self._closing.wait(pause_s)

    def _take_step(self, state: Registration) -> Registration:
        """Steps until there is nothing to do but wait."""
        while not self._closing.is_set():
            self._lock = keep_lock(self._lock, self._directory)
            seen = self._look()
            state, step = next_step(state, seen)
            if step is Step.WAIT:
                return state
            if step is Step.REGISTER:
                problem = self._register()
                if self._closing.is_set():
                    return state
                now_s = time.monotonic()
                state = after_attempt(state, seen, now_s, problem is None, random.random())
                self._report(problem, state)
            elif step is Step.LISTEN:
                self._listen()
            else:
                self._stop_server()
        return state

    def _look(self) -> Seen:
        with self._changed:
            streams, opened = self._streams, self._opened
        return Seen(
            now_s=time.monotonic(),
            kubelet=identify(self._directory / KUBELET_SOCKET),
            listening=self._endpoint is not None
            and identify(self._endpoint[0]) == self._endpoint[1],
            streams=streams,
            opened=opened,
        )

    def _register(self) -> str | None:
        """Asks kubelet to dial us. What went wrong, None if nothing."""
        assert self._endpoint is not None
        request = pb.RegisterRequest(
            version=VERSION,
            endpoint=self._endpoint[0].name,
            resource_name=self._resource,
            options=_OPTIONS,
        )
        target = to_target(self._directory / KUBELET_SOCKET)
        with grpc.insecure_channel(target, options=_CHANNEL_OPTIONS) as channel:
            call = channel.unary_unary(
                f"/{VERSION}.Registration/Register",
                request_serializer=pb.RegisterRequest.SerializeToString,
                response_deserializer=pb.Empty.FromString,
            )
            self._registering = call.future(request, timeout=_REGISTER_S)
            if self._closing.is_set():
                self._registering.cancel()
            try:
                self._registering.result()
            except grpc.FutureCancelledError:
                return "the agent ends"
            except grpc.RpcError as error:
                return printable(f"{error.code().name}: {error.details()}", 300)
            finally:
                self._registering = None
        return None

    def _report(self, problem: str | None, state: Registration) -> None:
        self._answers.on_registration("failed" if problem else "ok")
        if problem is None:
            log.info("registered", resource=self._resource, devices=len(self._devices))
        elif state.failures == 1:
            log.warning("registration failed", resource=self._resource, reason=problem)

    # --- the server -------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Serves on a socket of a new name: kubelet may still be forgetting the old one."""
        self._stop_server()
        for stale in self._directory.glob("numalet-*.sock"):
            with suppress(IsADirectoryError):
                stale.unlink(missing_ok=True)
        path = self._directory / f"numalet-{uuid.uuid4().hex[:8]}.sock"
        server = grpc.server(
            futures.ThreadPoolExecutor(_THREADS, thread_name_prefix="rpc"),
            options=[
                ("grpc.max_receive_message_length", _LARGEST_MESSAGE),
                ("grpc.so_reuseport", 0),
            ],
        )
        server.add_generic_rpc_handlers([self._handlers()])
        try:
            server.add_insecure_port(to_target(path))
        except RuntimeError as error:
            server.stop(None)
            raise KubeletError(f"{self._directory}: cannot listen there") from error
        server.start()
        identity = identify(path)
        if identity is None:
            server.stop(None)
            raise KubeletError(f"{path}: the socket is gone as soon as it is made")
        self._server, self._endpoint = server, (path, identity)

    def _stop_server(self) -> None:
        with self._changed:
            self._current += 1  # ends the stream
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._streams, 0.5)
        if self._server is not None:
            self._server.stop(0.2).wait(1.0)
            self._server = None
        if self._endpoint is not None:
            with suppress(OSError):
                self._endpoint[0].unlink(missing_ok=True)
            self._endpoint = None

    def _handlers(self) -> grpc.GenericRpcHandler:
        def unary(name: str, answer: Callable[[Any], Any], request: Any, response: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(
                answer_call(name, request, answer, self._answers.on_rpc),
                response_serializer=response.SerializeToString,
            )

        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "ListAndWatch": grpc.unary_stream_rpc_method_handler(
                self._list_and_watch,
                response_serializer=pb.ListAndWatchResponse.SerializeToString,
            )
        }
        for name, answer, request, response in (
            ("GetDevicePluginOptions", _options, pb.Empty, pb.DevicePluginOptions),
            (
                "GetPreferredAllocation",
                self._prefer,
                pb.PreferredAllocationRequest,
                pb.PreferredAllocationResponse,
            ),
            ("Allocate", self._allocate, pb.AllocateRequest, pb.AllocateResponse),
            (
                "PreStartContainer",
                _pre_start,
                pb.PreStartContainerRequest,
                pb.PreStartContainerResponse,
            ),
        ):
            methods[name] = unary(name, answer, request, response)
        return grpc.method_handlers_generic_handler(f"{VERSION}.DevicePlugin", methods)

    # --- the RPCs ---------------------------------------------------------------------------------

    def _list_and_watch(
        self, request: bytes, context: grpc.ServicerContext
    ) -> Iterator[pb.ListAndWatchResponse]:
        """All devices now, and all of them again whenever one changed."""
        with self._changed:
            self._current += 1
            mine = self._current
            self._streams += 1
            self._opened += 1
            self._changed.notify_all()
        self._answers.on_stream(True)
        try:
            context.add_callback(self._wake)
            log.info("kubelet reads the devices", resource=self._resource)
            sent: tuple[Device, ...] | None = None
            while (devices := self._next(sent, mine, context)) is not None:
                yield to_response(devices)
                sent = devices
        finally:
            with self._changed:
                self._streams -= 1
                self._changed.notify_all()
            self._answers.on_stream(self.streaming)
            log.info("kubelet reads the devices no more", resource=self._resource)

    def _next(
        self, sent: tuple[Device, ...] | None, mine: int, context: grpc.ServicerContext
    ) -> tuple[Device, ...] | None:
        """The devices when they are others than those `sent`; None when the stream is to end."""

        def over() -> bool:
            return self._current != mine or not context.is_active()

        with self._changed:
            self._changed.wait_for(lambda: over() or self._devices != sent)
            return None if over() else self._devices

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _prefer(self, request: pb.PreferredAllocationRequest) -> pb.PreferredAllocationResponse:
        """Never an error: kubelet would reject the pod, and may lose devices."""
        response = pb.PreferredAllocationResponse()
        for asked in request.container_requests:
            available, include = asked.available_deviceIDs, asked.must_include_deviceIDs
            try:
                chosen = self._answers.prefer(available, include, asked.allocation_size)
            except Exception:
                log.crash("no preference")
                chosen = ()
            response.container_responses.add(deviceIDs=chosen)
        return response

    def _allocate(self, request: pb.AllocateRequest) -> pb.AllocateResponse:
        response = pb.AllocateResponse()
        for asked in request.container_requests:
            allocation = self._answers.allocate(asked.devices_ids)
            if isinstance(allocation, Refusal):
                log.warning("allocation refused", reason=allocation.reason)
                raise RefusedError(allocation.reason)
            response.container_responses.append(to_allocation(allocation))
        return response


# --- RPCs that need no plugin ---------------------------------------------------------------------

_OPTIONS: Final = pb.DevicePluginOptions(get_preferred_allocation_available=True)


def _options(request: pb.Empty) -> pb.DevicePluginOptions:
    return _OPTIONS


def _pre_start(request: pb.PreStartContainerRequest) -> pb.PreStartContainerResponse:
    return pb.PreStartContainerResponse()
