"""A small kubelet: its device manager and its pod resources, over real gRPC on real sockets.

It does what kubelet 1.36 does, faults included, and lets a test see and disturb it:

    a plugin  ── Register ──▶ dial, GetDevicePluginOptions; a thread reads ListAndWatch
    the test  ── admit ─────▶ GetPreferredAllocation, Allocate ──▶ what List and Get tell

Source: pkg/kubelet/cm/devicemanager and pkg/kubelet/apis/podresources, Kubernetes 1.36.
"""

import contextlib
import os
import random
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import quote

import grpc

from agent.proto import deviceplugin_pb2 as api
from agent.proto import podresources_pb2 as podresources

SOCKET = "kubelet.sock"
CHECKPOINT = "kubelet_internal_checkpoint"
VERSION = "v1beta1"

_DIAL_S = 10.0
_PATIENCE_S = 30.0
"""Kubelet waits for a plugin for ever; a test should end."""

_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_DOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_CHANNEL = (("grpc.use_local_subchannel_pool", 1), ("grpc.default_authority", "localhost"))


class RefusedError(Exception):
    """The plugin, or kubelet itself, said no; `code` is the plugin's gRPC status, else None."""

    def __init__(self, text: str, code: grpc.StatusCode | None = None) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """A Register call, accepted or not; `at_s` is on the monotonic clock."""

    request: api.RegisterRequest
    at_s: float


@dataclass(slots=True, eq=False)
class _Client:
    """Kubelet's side of one registration."""

    resource: str
    channel: grpc.Channel
    closed: threading.Event = field(default_factory=threading.Event)
    stream: Any = None

    def call(self, name: str, request: Any, answer: Any, **how: Any) -> Any:
        method = self.channel.unary_unary(
            f"/v1beta1.DevicePlugin/{name}", type(request).SerializeToString, answer.FromString
        )
        return method.future(request, **how)

    def close(self) -> None:
        self.closed.set()
        self.channel.close()


@dataclass(slots=True)
class _Endpoint:
    """What is known of a resource's plugin; without a client after a restart."""

    client: _Client | None = None
    options: api.DevicePluginOptions = field(default_factory=api.DevicePluginOptions)
    stopped: bool = False


@dataclass(slots=True)
class _Held:
    """Devices of one resource that a container holds: their nodes, and what Allocate answered."""

    nodes: dict[str, tuple[int, ...]]
    answer: api.ContainerAllocateResponse


class FakeKubelet:
    """A context manager that starts and stops it; the same object is kubelet after a restart too.

    `plugin_dir` is the device plugin directory, `pod_resources` the other API's socket, None for
    none. What a test may switch at any time:

    register_error        answer Register with this status
    may_dial, may_answer  gates: Register waits for them, before it dials and before it answers
    opens_streams         False: registered plugins are never asked for ListAndWatch
    get                   "off" and "missing" as in kubelets where Get is no standard yet
    pod_resources_error   answer every call of the pod resources API with this status
    """

    def __init__(self, plugin_dir: Path, pod_resources: Path | None = None) -> None:
        self.plugin_dir = plugin_dir
        self.pod_resources = pod_resources
        self.register_error: tuple[grpc.StatusCode, str] | None = None
        self.may_dial, self.may_answer = threading.Event(), threading.Event()
        self.may_dial.set()
        self.may_answer.set()
        self.opens_streams = True
        self.get: Literal["on", "off", "missing"] = "on"
        self.pod_resources_error: tuple[grpc.StatusCode, str] | None = None
        self.registrations: list[Registration] = []
        self.updates = self.streams_open = self.most_streams_open = 0
        self._state = threading.Condition()
        self._admission = threading.Lock()
        self._random = random.Random(0)
        self._pods: dict[str, list[str]] = {}
        self._listeners: list[_Listener] = []
        self._forget()

    def _forget(self) -> None:
        self._clients: dict[str, _Client] = {}
        self._endpoints: dict[str, _Endpoint] = {}
        self._nodes: dict[str, dict[str, tuple[int, ...]]] = {}
        self._healthy: dict[str, set[str]] = {}
        self._unhealthy: dict[str, set[str]] = {}
        self._held: dict[tuple[str, str, str], _Held] = {}
        self._allocated: dict[str, set[str]] = {}
        self._reusable: dict[str, set[str]] = {}
        self._connections: list[tuple[_Client, threading.Thread]] = []

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

    @property
    def running(self) -> bool:
        return bool(self._listeners)

    def start(self) -> None:
        """Reads the checkpoint, deletes every socket in the plugin directory and listens."""
        assert not self.running
        with self._state:
            self._read_checkpoint()
        self.plugin_dir.mkdir(mode=0o750, parents=True, exist_ok=True)
        (self.plugin_dir / "DEPRECATION").touch()
        for path in self.plugin_dir.iterdir():
            if path.is_socket():
                path.unlink()
        self._listeners = [_listen(self.plugin_dir / SOCKET, self._registration_service())]
        if self.pod_resources:
            self.pod_resources.parent.mkdir(parents=True, exist_ok=True)
            self._listeners.append(_listen(self.pod_resources, self._pod_resources_service()))

    def stop(self) -> None:
        """An orderly end: plugins are disconnected and kubelet.sock is removed. (The other API's
        socket stays at any end.)"""
        self._end(unlink=True)

    def kill(self) -> None:
        """As SIGKILL: plugins lose their connections, and the sockets' files stay."""
        self._end(unlink=False)

    def restart(self) -> None:
        """Ends and starts as real kubelets do, which never remove their sockets at the end."""
        self.kill()
        self.start()

    def wipe(self) -> None:
        """Deletes all that the plugin directory holds, the checkpoint and plugins' sockets too."""
        for path in self.plugin_dir.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def leave_stale_socket(self) -> None:
        """A kubelet.sock that nobody serves, while this kubelet does not run."""
        assert not self.running
        self.plugin_dir.mkdir(parents=True, exist_ok=True)
        (self.plugin_dir / SOCKET).unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self.plugin_dir / SOCKET))

    def _end(self, unlink: bool) -> None:
        listeners, self._listeners = self._listeners, []
        if unlink and listeners:
            (self.plugin_dir / SOCKET).unlink(missing_ok=True)
        for listener in listeners:
            _shut(listener)
        with self._state:
            connections = list(self._connections)
        for client, thread in connections:
            client.close()
            thread.join(_PATIENCE_S)

    # --- what a test sees -------------------------------------------------------------------------

    def wait_for(self, predicate: Callable[[], bool], timeout_s: float = 20.0) -> None:
        """Until `predicate()`, which may be about this kubelet or about anything else.

        Raises:
            TimeoutError: it did not come true; the text says how things stand here.
        """
        deadline = time.monotonic() + timeout_s
        while not predicate():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not so within {timeout_s:g} s: {self}")
            with self._state:
                self._state.wait(0.02)

    def devices(self, resource: str) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Of the last ListAndWatch message: health in kubelet's eyes, and nodes, by device id."""
        with self._state:
            healthy = self._healthy.get(resource, ())
            return {
                device: ("Healthy" if device in healthy else "Unhealthy", nodes)
                for device, nodes in self._nodes.get(resource, {}).items()
            }

    def __str__(self) -> str:
        with self._state:
            devices = {resource: self.devices(resource) for resource in self._healthy}
            return (
                f"running={self.running} registrations={len(self.registrations)} "
                f"streams_open={self.streams_open} most={self.most_streams_open} "
                f"updates={self.updates} devices={devices} pods={self._pods}"
            )

    # --- registration -----------------------------------------------------------------------------

    def _registration_service(self) -> grpc.GenericRpcHandler:
        register = grpc.unary_unary_rpc_method_handler(
            self._register, api.RegisterRequest.FromString, api.Empty.SerializeToString
        )
        return grpc.method_handlers_generic_handler("v1beta1.Registration", {"Register": register})

    def _register(self, request: api.RegisterRequest, context: grpc.ServicerContext) -> api.Empty:
        with self._state:
            self.registrations.append(Registration(request=request, at_s=time.monotonic()))
            self._state.notify_all()
        if self.register_error:
            context.abort(*self.register_error)
        self._pass(self.may_dial, context)
        if request.version != VERSION:
            _abort(context, f"version {request.version!r} is not supported, only {VERSION}")
        if not is_extended_resource(request.resource_name):
            _abort(context, f"the resource name {request.resource_name!r} is invalid")
        self._connect(request, context)
        self._pass(self.may_answer, context)
        return api.Empty()

    def _pass(self, gate: threading.Event, context: grpc.ServicerContext) -> None:
        while not gate.wait(0.02):
            if not self.running or not context.is_active():
                context.abort(grpc.StatusCode.CANCELLED, "the wait at a gate was cut short")

    def _connect(self, request: api.RegisterRequest, context: grpc.ServicerContext) -> None:
        """The newest client of a resource takes the name, whatever happens to the one before."""
        resource, path = request.resource_name, self.plugin_dir / request.endpoint.lstrip("/")
        client = _Client(resource, grpc.insecure_channel(_target(path), options=_CHANNEL))
        with self._state:
            self._clients[resource] = client
        try:
            call = client.call(
                "GetDevicePluginOptions",
                api.Empty(),
                api.DevicePluginOptions,
                timeout=min(_DIAL_S, context.time_remaining() or _DIAL_S),
                wait_for_ready=True,
            )
            if not context.add_callback(call.cancel):
                call.cancel()
            options = call.result()
        except (grpc.RpcError, grpc.FutureCancelledError) as error:
            with self._state:
                self._clients.pop(resource, None)
            client.close()
            _abort(context, f"failed to dial device plugin {request.endpoint}: {error}")
        thread = threading.Thread(target=self._run, args=(client,), daemon=True)
        with self._state:
            self._endpoints[resource] = _Endpoint(client, options)
            self._connections.append((client, thread))
            self._state.notify_all()
        thread.start()

    def _run(self, client: _Client) -> None:
        """Reads the stream to its end, and then disconnects whoever has the resource's name.

        That may be a newer registration of the same plugin: the race is kubelet's.
        """
        if self.opens_streams:
            self._watch(client)
        else:
            client.closed.wait()
        with self._state:
            current = self._clients.pop(client.resource, None)
            if current:
                current.close()
                self._disconnected(client.resource)
            self._state.notify_all()

    def _watch(self, client: _Client) -> None:
        with self._state:
            self.streams_open += 1
            self.most_streams_open = max(self.most_streams_open, self.streams_open)
            self._state.notify_all()
        # A closed channel raises ValueError, a broken stream RpcError.
        with contextlib.suppress(grpc.RpcError, ValueError):
            client.stream = client.channel.unary_stream(
                "/v1beta1.DevicePlugin/ListAndWatch",
                api.Empty.SerializeToString,
                api.ListAndWatchResponse.FromString,
            )(api.Empty())
            for message in client.stream:
                self._receive(client.resource, message.devices)
        with self._state:
            self.streams_open -= 1

    def _receive(self, resource: str, devices: Iterable[api.Device]) -> None:
        """Every message replaces all devices of the resource, and rewrites the checkpoint."""
        with self._state:
            listed = {device.ID: device for device in devices}
            self._nodes[resource] = {
                device.ID: tuple(node.ID for node in device.topology.nodes)
                for device in listed.values()
            }
            self._healthy[resource] = {i for i in listed if listed[i].health == "Healthy"}
            self._unhealthy[resource] = set(listed) - self._healthy[resource]
            self.updates += 1
            self._write_checkpoint()
            self._state.notify_all()

    def _disconnected(self, resource: str) -> None:
        if resource in self._endpoints:
            self._unhealthy.setdefault(resource, set()).update(self._healthy.get(resource, ()))
            self._healthy[resource] = set()
            self._endpoints[resource].stopped = True

    def end_stream(self, resource: str | None = None) -> None:
        """Breaks the ListAndWatch stream of the newest registration."""
        with self._state:
            stream = self._clients[self._only(resource)].stream
        stream.cancel()

    # --- the test as a pod ------------------------------------------------------------------------

    def preferred(
        self,
        available: Collection[str],
        must_include: Collection[str],
        size: int,
        resource: str | None = None,
    ) -> list[str]:
        """GetPreferredAllocation as kubelet calls it: one container, ids in random order."""
        request = api.ContainerPreferredAllocationRequest(
            available_deviceIDs=self._shuffle(available),
            must_include_deviceIDs=self._shuffle(must_include),
            allocation_size=size,
        )
        answer = self._call(
            resource,
            "GetPreferredAllocation",
            api.PreferredAllocationRequest(container_requests=[request]),
            api.PreferredAllocationResponse,
        )
        return list(answer.container_responses[0].deviceIDs) if answer.container_responses else []

    def allocate(
        self, ids: Collection[str], resource: str | None = None
    ) -> api.ContainerAllocateResponse:
        """Allocate as kubelet calls it: one container, ids in random order."""
        request = api.ContainerAllocateRequest(devices_ids=self._shuffle(ids))
        answer = self._call(
            resource,
            "Allocate",
            api.AllocateRequest(container_requests=[request]),
            api.AllocateResponse,
        )
        if not answer.container_responses:
            raise RefusedError("Allocate answered nothing for the container")
        given: api.ContainerAllocateResponse = answer.container_responses[0]
        return given

    def admit(
        self,
        pod: str,
        container: str,
        count: int,
        resource: str | None = None,
        *,
        nodes: Collection[int] | None = None,
        init: bool = False,
    ) -> list[str]:
        """The ids, sorted, that a container gets; `pod` is "namespace/name". One pod at a time.

        `nodes` are those that a topology manager chose. What an ordinary init container gets, its
        pod's later containers get first. A pod that is refused is gone.
        """
        with self._admission:
            self._add(pod, None if init else container)
            try:
                return self._admit((pod, container, self._only(resource)), count, nodes, init)
            except RefusedError:
                self.remove(pod)
                raise

    def _admit(
        self, key: tuple[str, str, str], count: int, nodes: Collection[int] | None, init: bool
    ) -> list[str]:
        pod, _, resource = key
        with self._state:
            self._drop_gone()
            self._reusable = {pod: self._reusable.get(pod, set())}
            held = self._held.get(key)
            self._check(resource, set(held.nodes) if held else set(), count if held else None)
        if held is None:
            ids = self._choose(pod, resource, count, nodes)
            try:
                answer = self.allocate(ids, resource)
            except RefusedError:
                self._recount()
                raise
            with self._state:
                held = _Held({i: self._nodes[resource].get(i, ()) for i in ids}, answer)
                self._held[key] = held
                self._write_checkpoint()
        if init:
            self._reusable[pod] |= set(held.nodes)
        else:
            self._reusable[pod] -= set(held.nodes)
        return sorted(held.nodes)

    def _check(self, resource: str, held: set[str], count: int | None) -> None:
        if count is not None and count != len(held):
            raise RefusedError(f"changed request for {resource} from {len(held)} to {count}")
        if resource not in self._healthy:
            raise RefusedError(f"cannot allocate unregistered device {resource}")
        if not self._healthy[resource]:
            raise RefusedError(f"no healthy devices present of {resource}")
        if not held <= self._healthy[resource]:
            raise RefusedError("previously allocated devices are no longer healthy")

    def _choose(
        self, pod: str, resource: str, count: int, nodes: Collection[int] | None
    ) -> set[str]:
        """What GetPreferredAllocation can change. An error from it leaks what is taken so far."""
        taken: set[str] = set()

        def take(ids: Iterable[str]) -> None:
            with self._state:
                for device in self._shuffle(set(ids) - taken)[: count - len(taken)]:
                    self._allocated.setdefault(resource, set()).add(device)
                    taken.add(device)

        take(self._reusable[pod])
        with self._state:
            available = self._healthy[resource] - self._allocated.get(resource, set())
            aligned, unaligned, anywhere = self._split(resource, available, nodes)
            endpoint = self._endpoints[resource]
        needed = count - len(taken)
        if len(available) < needed:
            raise RefusedError(
                f"requested number of devices unavailable for {resource}. "
                f"Requested: {needed}, Available: {len(available)}"
            )
        if needed >= len(aligned):
            take(aligned)
        if len(taken) < count:
            pool = aligned if needed < len(aligned) else available
            if endpoint.options.get_preferred_allocation_available:
                take(pool & set(self.preferred(pool | taken, taken, count, resource)))
            for rest in (aligned, unaligned, anywhere):
                take(rest)
        return taken

    def _split(
        self, resource: str, available: set[str], nodes: Collection[int] | None
    ) -> tuple[set[str], set[str], set[str]]:
        """Devices on `nodes`, on others, and on none known; all the last if nothing is known."""
        of = self._nodes[resource]
        if nodes is None or not any(of.values()):
            return set(), set(), available
        aligned = {device for device in available if set(of[device]) & set(nodes)}
        anywhere = {device for device in available if not of[device]}
        return aligned, available - aligned - anywhere, anywhere

    def answer(
        self, pod: str, container: str, resource: str | None = None
    ) -> api.ContainerAllocateResponse:
        """What Allocate answered for a container that was admitted."""
        return self._held[pod, container, self._only(resource)].answer

    def remove(self, pod: str) -> None:
        """The pod ends; its devices are free when next somebody asks."""
        with self._state:
            del self._pods[pod]

    def _add(self, pod: str, container: str | None) -> None:
        with self._state:
            containers = self._pods.setdefault(pod, [])
            if container and container not in containers:
                containers.append(container)

    def give(
        self, pod: str, container: str, resource: str, devices: Mapping[str, Collection[int]]
    ) -> None:
        """A pod from before: it holds these devices, by id and with their nodes, unasked."""
        self._add(pod, container)
        with self._state:
            if devices:
                nodes = {device: tuple(devices[device]) for device in devices}
                held = _Held(nodes, api.ContainerAllocateResponse())
                self._held[pod, container, resource] = held
            self._recount()
            self._write_checkpoint()

    def _call(self, resource: str | None, name: str, request: Any, answer: Any) -> Any:
        resource = self._only(resource)
        with self._state:
            endpoint = self._endpoints.get(resource)
        if endpoint is None or endpoint.client is None or endpoint.stopped:
            raise RefusedError(f"the endpoint of {resource} has been stopped")
        try:
            return endpoint.client.call(name, request, answer, timeout=_PATIENCE_S).result()
        except grpc.RpcError as error:
            text = f"{name} failed: {error.code().name} {error.details()}"
            raise RefusedError(text, error.code()) from error
        except (grpc.FutureCancelledError, ValueError) as error:  # disconnected meanwhile
            raise RefusedError(f"{name} failed", grpc.StatusCode.CANCELLED) from error

    def _only(self, resource: str | None) -> str:
        """The resource, by default the one that there is."""
        if resource is None:
            with self._state:
                known = {*self._healthy, *self._endpoints}
            if len(known) != 1:
                raise RefusedError(f"which resource is meant? there are {sorted(known)}")
            (resource,) = known
        return resource

    def _shuffle(self, ids: Iterable[str]) -> list[str]:
        with self._state:
            return self._random.sample(sorted(ids), len(set(ids)))

    def _drop_gone(self) -> None:
        """Frees what pods that are gone held; only then is anything counted anew."""
        gone = [key for key in self._held if key[0] not in self._pods]
        for key in gone:
            del self._held[key]
        if gone:
            self._recount()

    def _recount(self) -> None:
        with self._state:
            self._allocated = {}
            for (_, _, resource), held in self._held.items():
                self._allocated.setdefault(resource, set()).update(held.nodes)

    # --- the checkpoint ---------------------------------------------------------------------------

    def _write_checkpoint(self) -> None:
        """A file as kubelet writes it, a new one each time; what it would say is kept in memory."""
        fresh = self.plugin_dir / f".{threading.get_ident()}"
        with contextlib.suppress(FileNotFoundError):  # somebody removed the directory
            fresh.touch()
            fresh.replace(self.plugin_dir / CHECKPOINT)

    def _read_checkpoint(self) -> None:
        """Resources come back without devices and with stopped plugins, allocations as they were;
        nothing comes back where the file is gone."""
        known = (self.plugin_dir / CHECKPOINT).exists()
        resources, held = (set(self._healthy), self._held) if known else (set(), {})
        self._forget()
        for resource in resources:
            self._healthy[resource], self._unhealthy[resource] = set(), set()
            self._nodes[resource] = {}
            self._endpoints[resource] = _Endpoint(stopped=True)
        self._held = held
        self._recount()

    # --- pod resources ----------------------------------------------------------------------------

    def _pod_resources_service(self) -> grpc.GenericRpcHandler:
        methods: dict[str, tuple[Callable[..., Any], Any]] = {
            "List": (self._list, podresources.ListPodResourcesRequest),
            "Get": (self._get, podresources.GetPodResourcesRequest),
            "GetAllocatableResources": (
                self._allocatable,
                podresources.AllocatableResourcesRequest,
            ),
        }
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            name: grpc.unary_unary_rpc_method_handler(
                behaviour, request.FromString, lambda answer: answer.SerializeToString()
            )
            for name, (behaviour, request) in methods.items()
        }
        return grpc.method_handlers_generic_handler("v1.PodResourcesLister", handlers)

    def _list(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._disturb(context)
        with self._state:
            self._drop_gone()
            pods = self._random.sample(sorted(self._pods), len(self._pods))
            return podresources.ListPodResourcesResponse(pod_resources=map(self._describe, pods))

    def _get(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._disturb(context)
        if self.get == "missing":
            text = "unknown method Get for service v1.PodResourcesLister"
            context.abort(grpc.StatusCode.UNIMPLEMENTED, text)
        if self.get == "off":
            _abort(context, "PodResources API Get method disabled")
        pod = f"{request.pod_namespace}/{request.pod_name}"
        with self._state:
            if pod in self._pods:
                return podresources.GetPodResourcesResponse(pod_resources=self._describe(pod))
        return _abort(
            context, f"pod {request.pod_name} in namespace {request.pod_namespace} not found"
        )

    def _allocatable(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._disturb(context)
        with self._state:
            entries = [
                entry
                for resource, ids in self._healthy.items()
                for entry in _entries(resource, {i: self._nodes[resource][i] for i in ids})
            ]
        return podresources.AllocatableResourcesResponse(devices=entries)

    def _disturb(self, context: grpc.ServicerContext) -> None:
        if self.pod_resources_error:
            context.abort(*self.pod_resources_error)

    def _describe(self, pod: str) -> podresources.PodResources:
        namespace, name = pod.split("/")
        containers = []
        for container in self._pods[pod]:
            entries = [
                entry
                for (holder, part, resource), held in self._held.items()
                if (holder, part) == (pod, container)
                for entry in _entries(resource, held.nodes)
            ]
            self._random.shuffle(entries)
            containers.append(podresources.ContainerResources(name=container, devices=entries))
        return podresources.PodResources(name=name, namespace=namespace, containers=containers)


def is_extended_resource(name: str) -> bool:
    """Whether kubelet takes a device plugin's resource of this name."""
    domain, slash, rest = name.partition("/")
    if not slash or "kubernetes.io/" in name or name.startswith("requests."):
        return False
    domain = f"requests.{domain}"
    return bool(_DOMAIN.fullmatch(domain) and len(domain) <= 253 and _NAME.fullmatch(rest))


def _entries(
    resource: str, nodes: Mapping[str, tuple[int, ...]]
) -> Iterator[podresources.ContainerDevices]:
    """One for each device and node of it; no topology for a device whose node is unknown."""
    for device in nodes:
        for node in nodes[device] or (None,):
            topology = None if node is None else {"nodes": [{"ID": node}]}
            yield podresources.ContainerDevices(
                resource_name=resource, device_ids=[device], topology=topology
            )


def _abort(context: grpc.ServicerContext, text: str) -> Any:
    """A plain error of a Go server."""
    context.abort(grpc.StatusCode.UNKNOWN, text)


def _target(path: Path) -> str:
    return f"unix://{quote(os.fsencode(path))}"


# --- listening ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listener:
    """A gRPC server on a socket; `folder` and `file` are descriptors of where and what it is."""

    server: grpc.Server
    pool: ThreadPoolExecutor
    folder: int
    file: int


def _listen(path: Path, service: grpc.GenericRpcHandler) -> _Listener:
    """Listens below a descriptor of the folder, so that `_shut` can take the name from grpc, which
    unlinks its socket at some time after its end."""
    path.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_PATH)
    pool = ThreadPoolExecutor(8)
    server = grpc.server(pool, handlers=[service])
    server.add_insecure_port(_target(Path(f"/proc/self/fd/{folder}/{path.name}")))
    server.start()
    return _Listener(server=server, pool=pool, folder=folder, file=os.open(path, os.O_PATH))


def _shut(listener: _Listener) -> None:
    """Returns when nobody can connect any more; the file stays, if it is still there."""
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, listener.folder, inheritable=False)
    listener.server.stop(None).wait(_PATIENCE_S)
    listener.pool.shutdown()
    deadline = time.monotonic() + _PATIENCE_S
    while _accepts(listener.file) and time.monotonic() < deadline:
        time.sleep(0.001)
    for descriptor in (nowhere, listener.folder, listener.file):
        os.close(descriptor)


def _accepts(file: int) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(f"/proc/self/fd/{file}") == 0
