"""agent.fakes.kubelet against what is known of the real one, with a plugin as small as can be.

Expected values are kubelet's behaviour as its source and its issues tell it.
"""

import contextlib
import os
import queue
import socket
import stat
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from agent.fakes.kubelet import FakeKubelet, RefusedError, is_extended_resource
from agent.proto import deviceplugin_pb2 as api
from agent.proto import podresources_pb2 as podresources

RESOURCE = "example.com/thing"
Nodes = dict[str, Collection[int]]
FOUR: Nodes = {"a": [0], "b": [0], "c": [1], "d": [1]}
PLAIN: Nodes = {"a": [], "b": [], "c": [], "d": []}


class Plugin:
    """Serves what it is told; `calls` are the names of the calls that it got, in order.

    `preferred` and `allocate` turn a container's request into its response; they may raise a
    Status.
    """

    def __init__(self, path: Path, prefers: bool = True) -> None:
        self.path = path
        self.options = api.DevicePluginOptions(get_preferred_allocation_available=prefers)
        self.calls: list[str] = []
        self.asked: list[api.ContainerPreferredAllocationRequest] = []
        self.streams: list[queue.Queue[api.ListAndWatchResponse | None]] = []
        self.cancelled: list[int] = []
        self.preferred: Callable[[Any], Any] = choose_first
        self.allocate: Callable[[Any], Any] = lambda request: api.ContainerAllocateResponse(
            envs={"THINGS": ",".join(sorted(request.devices_ids))}
        )
        self.pool = ThreadPoolExecutor(8)
        self.server = grpc.server(self.pool)
        unary = grpc.unary_unary_rpc_method_handler
        self.server.add_generic_rpc_handlers(
            [
                grpc.method_handlers_generic_handler(
                    "v1beta1.DevicePlugin",
                    {
                        "GetDevicePluginOptions": unary(
                            self._options, api.Empty.FromString, to_bytes
                        ),
                        "ListAndWatch": grpc.unary_stream_rpc_method_handler(
                            self._watch, api.Empty.FromString, to_bytes
                        ),
                        "GetPreferredAllocation": unary(
                            self._preferred, api.PreferredAllocationRequest.FromString, to_bytes
                        ),
                        "Allocate": unary(self._allocate, api.AllocateRequest.FromString, to_bytes),
                    },
                )
            ]
        )
        self.server.add_insecure_port(f"unix://{path}")

    def __enter__(self) -> "Plugin":
        self.server.start()
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self.streams:
            stream.put(None)
        self.server.stop(None).wait()
        self.pool.shutdown()

    def register(self, timeout_s: float = 20, **other: Any) -> None:
        request = {"version": "v1beta1", "endpoint": self.path.name, "resource_name": RESOURCE}
        register(self.path.parent, timeout_s, **request | other)

    def send(self, health: str = "Healthy", stream: int = -1, /, **nodes: Collection[int]) -> None:
        devices = [
            api.Device(
                ID=name,
                health=health,
                topology={"nodes": [{"ID": node} for node in nodes[name]]} if nodes[name] else None,
            )
            for name in nodes
        ]
        self.streams[stream].put(api.ListAndWatchResponse(devices=devices))

    def _options(self, _: Any, context: grpc.ServicerContext) -> api.DevicePluginOptions:
        self.calls.append("GetDevicePluginOptions")
        return self.options

    def _watch(self, _: Any, context: grpc.ServicerContext) -> Iterator[api.ListAndWatchResponse]:
        number, stream = len(self.streams), queue.Queue[Any]()

        def cancel() -> None:
            if stream.empty():
                self.cancelled.append(number)
            stream.put(None)

        if not context.add_callback(cancel):  # it has ended already
            cancel()
        self.streams.append(stream)
        self.calls.append("ListAndWatch")
        yield from iter(stream.get, None)
        stream.put(None)

    def _preferred(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.calls.append("GetPreferredAllocation")
        (container,) = request.container_requests
        self.asked.append(container)
        return api.PreferredAllocationResponse(
            container_responses=answer(self.preferred, container, context)
        )

    def _allocate(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.calls.append("Allocate")
        (container,) = request.container_requests
        return api.AllocateResponse(container_responses=answer(self.allocate, container, context))


class Status(Exception):  # noqa: N818
    """Raised by what a test plugs in: the gRPC status to end with."""


def answer(how: Callable[[Any], Any], request: Any, context: grpc.ServicerContext) -> list[Any]:
    try:
        response = how(request)
    except Status as status:
        context.abort(*status.args)
    return [] if response is None else [response]


def choose(ids: Collection[str]) -> api.ContainerPreferredAllocationResponse:
    return api.ContainerPreferredAllocationResponse(deviceIDs=ids)


def choose_first(request: api.ContainerPreferredAllocationRequest) -> Any:
    must = sorted(request.must_include_deviceIDs)
    rest = sorted(set(request.available_deviceIDs) - set(must))
    return choose((must + rest)[: request.allocation_size])


def to_bytes(message: Any) -> bytes:
    body: bytes = message.SerializeToString()
    return body


def register(folder: Path, timeout_s: float = 20, **request: Any) -> None:
    with grpc.insecure_channel(f"unix://{folder / 'kubelet.sock'}", LOCAL) as channel:
        channel.unary_unary("/v1beta1.Registration/Register", to_bytes, api.Empty.FromString)(
            api.RegisterRequest(**request), timeout=timeout_s
        )


LOCAL = (("grpc.use_local_subchannel_pool", 1),)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "dp"


@pytest.fixture
def kubelet(folder: Path, tmp_path: Path) -> Iterator[FakeKubelet]:
    with FakeKubelet(folder, tmp_path / "pr" / "kubelet.sock") as kubelet:
        yield kubelet


@pytest.fixture
def plugin(kubelet: FakeKubelet) -> Iterator[Plugin]:
    with Plugin(kubelet.plugin_dir / "tiny.sock") as plugin:
        yield plugin


@pytest.fixture
def offer(kubelet: FakeKubelet, plugin: Plugin) -> Callable[..., None]:
    """Registers the plugin and waits until kubelet knows the devices."""

    def offer(nodes: Nodes = PLAIN) -> None:
        before = kubelet.updates
        streams = len(plugin.streams)
        plugin.register()
        kubelet.wait_for(lambda: len(plugin.streams) > streams)
        plugin.send(**nodes)
        kubelet.wait_for(lambda: kubelet.updates > before)

    return offer


def refused(code: grpc.StatusCode, text: str, call: Callable[..., None], **how: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        call(**how)
    assert caught.value.code() == code
    assert text in caught.value.details()


def connect(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


@contextlib.contextmanager
def kept(path: Path) -> Iterator[int]:
    """The inode of a file, which no other file gets meanwhile."""
    descriptor = os.open(path, os.O_PATH)
    try:
        yield os.fstat(descriptor).st_ino
    finally:
        os.close(descriptor)


# --- life -----------------------------------------------------------------------------------------


def test_starting_deletes_sockets_and_nothing_else(folder: Path) -> None:
    folder.mkdir()
    (folder / "notes").write_text("kept")
    (folder / "folder").mkdir()
    (folder / "link").symlink_to("stale.sock")
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(folder / "stale.sock"))
    with FakeKubelet(folder):
        names = sorted(os.listdir(folder))
        assert names in (
            ["DEPRECATION", "folder", "kubelet.sock", "notes"],
            ["DEPRECATION", "folder", "kubelet.sock", "link", "notes"],  # deleted its target first
        )


def test_starting_makes_the_directory(tmp_path: Path) -> None:
    with FakeKubelet(tmp_path / "far" / "away"):
        connect(tmp_path / "far" / "away" / "kubelet.sock")
    mode = (tmp_path / "far" / "away").stat().st_mode
    assert stat.S_IMODE(mode) & ~0o750 == 0


def test_stopping_removes_the_socket(kubelet: FakeKubelet, folder: Path) -> None:
    kubelet.stop()
    assert not (folder / "kubelet.sock").exists()


def test_killing_leaves_the_very_same_socket_and_nobody_serves_it(
    kubelet: FakeKubelet, folder: Path
) -> None:
    before = (folder / "kubelet.sock").stat()
    kubelet.kill()
    after = (folder / "kubelet.sock").stat()
    assert (after.st_ino, after.st_ctime_ns) == (before.st_ino, before.st_ctime_ns)
    with pytest.raises(ConnectionRefusedError):
        connect(folder / "kubelet.sock")


def test_a_stale_socket(kubelet: FakeKubelet, folder: Path) -> None:
    kubelet.stop()
    kubelet.leave_stale_socket()
    with pytest.raises(ConnectionRefusedError):
        connect(folder / "kubelet.sock")
    kubelet.start()
    connect(folder / "kubelet.sock")


def test_a_restart_deletes_plugins_sockets_and_knows_resources_without_devices(
    kubelet: FakeKubelet, plugin: Plugin, offer: Callable[..., None], folder: Path
) -> None:
    offer()
    with kept(folder / "kubelet.sock") as before:
        kubelet.restart()
        assert (folder / "kubelet.sock").stat().st_ino != before
    assert not plugin.path.exists()
    assert kubelet.devices(RESOURCE) == {}
    with pytest.raises(RefusedError, match="no healthy devices"):
        kubelet.admit("ns/pod", "main", 1)


def test_allocations_outlive_a_restart_but_not_the_checkpoint(
    kubelet: FakeKubelet, offer: Callable[..., None]
) -> None:
    offer(FOUR)
    kubelet.admit("ns/pod", "main", 2)
    kubelet.restart()
    assert held_by(kubelet, "ns/pod") == {"main": [("a", (0,)), ("b", (0,))]}
    kubelet.wipe()
    kubelet.restart()
    assert held_by(kubelet, "ns/pod") == {"main": []}
    with pytest.raises(RefusedError, match="unregistered"):
        kubelet.admit("ns/other", "main", 1, RESOURCE)


def test_wiping_leaves_nothing(kubelet: FakeKubelet, plugin: Plugin, folder: Path) -> None:
    (folder / "deep" / "er").mkdir(parents=True)
    kubelet.wipe()
    assert os.listdir(folder) == []


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_plugins_lose_their_stream_when_kubelet_ends(
    kubelet: FakeKubelet, plugin: Plugin, offer: Callable[..., None], how: str
) -> None:
    offer()
    getattr(kubelet, how)()
    kubelet.wait_for(lambda: plugin.cancelled == [0])
    assert kubelet.streams_open == 0


def test_nothing_is_left_after_many_lives(tmp_path: Path) -> None:
    def sockets() -> list[str]:
        found = []
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        return sorted(name for name in found if not name.startswith(("anon", "pipe")))

    kubelet = FakeKubelet(tmp_path / "dp", tmp_path / "pr.sock")
    before, threads = sockets(), threading.active_count()
    for end in (kubelet.stop, kubelet.kill, kubelet.stop):
        kubelet.start()
        end()
    kubelet.wait_for(lambda: sockets() == before and threading.active_count() <= threads)


# --- registration ---------------------------------------------------------------------------------


def test_register_asks_the_plugin_for_its_options_and_then_watches_it(
    kubelet: FakeKubelet, plugin: Plugin
) -> None:
    plugin.register()
    assert plugin.calls[0] == "GetDevicePluginOptions"
    kubelet.wait_for(lambda: plugin.calls == ["GetDevicePluginOptions", "ListAndWatch"])
    (registration,) = kubelet.registrations
    assert registration.request == api.RegisterRequest(
        version="v1beta1", endpoint="tiny.sock", resource_name=RESOURCE
    )


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        pytest.param({"version": "v1alpha1"}, "version", id="another version"),
        pytest.param({"version": ""}, "version", id="no version"),
        pytest.param({"resource_name": "thing"}, "resource name", id="a name without a domain"),
    ],
)
def test_register_refuses(
    kubelet: FakeKubelet, plugin: Plugin, request_: dict[str, str], text: str
) -> None:
    refused(grpc.StatusCode.UNKNOWN, text, plugin.register, **request_)
    assert plugin.calls == []
    assert len(kubelet.registrations) == 1


@pytest.mark.parametrize(
    ("name", "valid"),
    [
        pytest.param("aliyun.com/gpu", True, id="ours"),
        pytest.param("nvidia.com/mig-1g.5gb", True, id="dots and dashes"),
        pytest.param("gpu", False, id="no domain"),
        pytest.param("kubernetes.io/gpu", False, id="a native domain"),
        pytest.param("x.kubernetes.io/gpu", False, id="below a native domain"),
        pytest.param("requests.aliyun.com/gpu", False, id="a quota's name"),
        pytest.param("aliyun.com/", False, id="no name"),
        pytest.param("/gpu", False, id="an empty domain"),
        pytest.param("aliyun.com/g/pu", False, id="two slashes"),
        pytest.param("Aliyun.com/gpu", False, id="an upper-case domain"),
        pytest.param("aliyun.com/" + "g" * 63, True, id="the longest name"),
        pytest.param("aliyun.com/" + "g" * 64, False, id="a name too long"),
        pytest.param("a" * 244 + "/gpu", True, id="the longest domain"),
        pytest.param("a" * 245 + "/gpu", False, id="a domain too long for a quota's name"),
    ],
)
def test_names_of_resources(name: str, valid: bool) -> None:
    assert is_extended_resource(name) is valid


def test_register_with_a_plugin_that_does_not_serve_waits_for_it(
    kubelet: FakeKubelet, folder: Path
) -> None:
    with ThreadPoolExecutor(1) as pool:
        plugin = Plugin(folder / "late.sock")
        plugin.path.rename(folder / "hidden")  # it is bound, but nobody finds it
        call = pool.submit(plugin.register)
        kubelet.wait_for(lambda: len(kubelet.registrations) == 1)
        assert not call.done()
        with plugin:
            (folder / "hidden").rename(plugin.path)
            call.result(timeout=20)
        assert plugin.calls[0] == "GetDevicePluginOptions"


def test_register_with_a_plugin_that_nobody_serves_ends_with_the_callers_patience(
    kubelet: FakeKubelet, folder: Path
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        register(folder, 0.2, version="v1beta1", endpoint="nobody.sock", resource_name=RESOURCE)
    assert caught.value.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNKNOWN)
    assert kubelet.streams_open == 0


def test_register_can_be_made_to_fail(kubelet: FakeKubelet, plugin: Plugin) -> None:
    kubelet.register_error = (grpc.StatusCode.UNAVAILABLE, "not today")
    refused(grpc.StatusCode.UNAVAILABLE, "not today", plugin.register)
    kubelet.register_error = None
    plugin.register()


WATCHED = ["GetDevicePluginOptions", "ListAndWatch"]


def test_register_can_be_held_up_before_it_dials(kubelet: FakeKubelet, plugin: Plugin) -> None:
    kubelet.may_dial.clear()
    refused(grpc.StatusCode.DEADLINE_EXCEEDED, "", plugin.register, timeout_s=0.2)
    assert plugin.calls == []


@pytest.mark.parametrize("gate", ["may_dial", "may_answer"])
def test_register_goes_on_when_the_gate_opens(
    kubelet: FakeKubelet, plugin: Plugin, gate: str
) -> None:
    getattr(kubelet, gate).clear()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(plugin.register)
        kubelet.wait_for(lambda: len(kubelet.registrations) == 1)
        getattr(kubelet, gate).set()
        call.result(timeout=20)
    kubelet.wait_for(lambda: plugin.calls == WATCHED)


@pytest.mark.parametrize(
    ("gate", "calls"),
    [
        pytest.param("may_dial", [], id="before it dials"),
        pytest.param("may_answer", WATCHED, id="when the plugin is watched already"),
    ],
)
def test_kubelet_can_end_before_register_is_answered(
    kubelet: FakeKubelet, plugin: Plugin, gate: str, calls: list[str]
) -> None:
    getattr(kubelet, gate).clear()
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(plugin.register)
        kubelet.wait_for(lambda: len(kubelet.registrations) == 1 and plugin.calls == calls)
        kubelet.kill()
        with pytest.raises(grpc.RpcError):
            call.result(timeout=20)


def test_a_kubelet_that_never_opens_the_stream(kubelet: FakeKubelet, plugin: Plugin) -> None:
    kubelet.opens_streams = False
    plugin.register()
    kubelet.stop()  # waits for all that could still call the plugin
    assert plugin.calls == ["GetDevicePluginOptions"]
    assert kubelet.most_streams_open == 0


# --- the stream -----------------------------------------------------------------------------------


def test_each_message_replaces_the_devices(
    kubelet: FakeKubelet, plugin: Plugin, offer: Callable[..., None], folder: Path
) -> None:
    offer({"a": [0], "b": [0, 1], "c": []})
    assert kubelet.devices(RESOURCE) == {
        "a": ("Healthy", (0,)),
        "b": ("Healthy", (0, 1)),
        "c": ("Healthy", ()),
    }
    with kept(folder / "kubelet_internal_checkpoint") as before:
        plugin.send("Sick", a=[1])
        kubelet.wait_for(lambda: kubelet.updates == 2)
        assert (folder / "kubelet_internal_checkpoint").stat().st_ino != before
    assert kubelet.devices(RESOURCE) == {"a": ("Unhealthy", (1,))}


def test_a_stream_that_ends_is_not_opened_again(
    kubelet: FakeKubelet, plugin: Plugin, offer: Callable[..., None]
) -> None:
    offer({"a": [0]})
    plugin.streams[0].put(None)
    kubelet.wait_for(lambda: kubelet.devices(RESOURCE) == {"a": ("Unhealthy", (0,))})
    assert kubelet.streams_open == 0
    with pytest.raises(RefusedError, match="no healthy devices"):
        kubelet.admit("ns/pod", "main", 1)
    with pytest.raises(RefusedError, match="stopped"):
        kubelet.allocate(["a"])
    offer({"a": [0]})
    assert kubelet.admit("ns/pod", "main", 1) == ["a"]
    assert plugin.calls.count("ListAndWatch") == 2
    assert kubelet.most_streams_open == 1


def test_a_stream_can_be_broken(
    kubelet: FakeKubelet, plugin: Plugin, offer: Callable[..., None]
) -> None:
    offer({"a": [0]})
    kubelet.end_stream()
    kubelet.wait_for(lambda: plugin.cancelled == [0])
    kubelet.wait_for(lambda: kubelet.devices(RESOURCE) == {"a": ("Unhealthy", (0,))})


def test_the_end_of_an_old_stream_disconnects_the_new_registration(
    kubelet: FakeKubelet, plugin: Plugin, offer: Callable[..., None]
) -> None:
    offer({"a": [0]})
    offer({"a": [0]})
    assert (kubelet.streams_open, kubelet.most_streams_open) == (2, 2)
    plugin.streams[0].put(None)
    kubelet.wait_for(lambda: plugin.cancelled == [1])
    kubelet.wait_for(lambda: kubelet.devices(RESOURCE) == {"a": ("Unhealthy", (0,))})
    kubelet.wait_for(lambda: kubelet.streams_open == 0)
    assert kubelet.most_streams_open == 2


def test_two_resources_do_not_disturb_each_other(
    kubelet: FakeKubelet, plugin: Plugin, offer: Callable[..., None], folder: Path
) -> None:
    offer({"a": [0]})
    with Plugin(folder / "other.sock") as other:
        other.register(resource_name="example.com/other")
        kubelet.wait_for(lambda: len(other.streams) == 1)
        other.send(a=[1])
        kubelet.wait_for(lambda: kubelet.updates == 2)
        assert kubelet.admit("ns/pod", "main", 1, "example.com/other") == ["a"]
        assert kubelet.admit("ns/pod", "main", 1, RESOURCE) == ["a"]
        other.streams[0].put(None)
        kubelet.wait_for(lambda: kubelet.devices("example.com/other") == {"a": ("Unhealthy", (1,))})
        assert kubelet.devices(RESOURCE) == {"a": ("Healthy", (0,))}
    with pytest.raises(RefusedError, match="which resource"):
        kubelet.admit("ns/pod", "second", 1)


# --- admission ------------------------------------------------------------------------------------


def test_a_pod_gets_what_the_plugin_prefers(
    kubelet: FakeKubelet, plugin: Plugin, offer: Callable[..., None]
) -> None:
    offer()
    plugin.preferred = lambda _: choose(["d", "b"])
    assert kubelet.admit("ns/pod", "main", 2) == ["b", "d"]
    assert plugin.calls[-2:] == ["GetPreferredAllocation", "Allocate"]
    assert sorted(plugin.asked[0].available_deviceIDs) == ["a", "b", "c", "d"]
    assert list(plugin.asked[0].must_include_deviceIDs) == []
    assert plugin.asked[0].allocation_size == 2
    assert kubelet.answer("ns/pod", "main").envs == {"THINGS": "b,d"}


def test_held_devices_are_not_available_to_the_next_pod(
    kubelet: FakeKubelet, plugin: Plugin, offer: Callable[..., None]
) -> None:
    offer()
    kubelet.admit("ns/one", "main", 3)
    assert kubelet.admit("ns/two", "main", 1) == ["d"]
    assert list(plugin.asked[1].available_deviceIDs) == ["d"]  # asked, though there is no choice


@pytest.mark.parametrize(
    "preferred",
    [
        pytest.param(None, id="no answer for the container"),
        pytest.param(choose([]), id="an empty answer"),
        pytest.param(choose(["a", "x", "a"]), id="one that is held, one unknown"),
        pytest.param(choose(["b"]), id="too few"),
        pytest.param(choose(["b", "c", "d"]), id="too many"),
    ],
)
def test_what_is_preferred_is_a_wish(
    kubelet: FakeKubelet, plugin: Plugin, offer: Callable[..., None], preferred: Any
) -> None:
    offer()
    plugin.preferred = lambda _: choose(["a"])
    kubelet.admit("ns/first", "main", 1)
    plugin.preferred = lambda _: preferred
    ids = kubelet.admit("ns/pod", "main", 2)
    assert len(ids) == 2
    assert set(ids) <= {"b", "c", "d"}
    if preferred == choose(["b"]):
        assert "b" in ids


@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param(False, True, id="the plugin does not, Register says it does"),
        pytest.param(True, False, id="the plugin does, Register says it does not"),
    ],
)
def test_only_the_plugins_own_options_count(
    kubelet: FakeKubelet, plugin: Plugin, options: bool, said: bool
) -> None:
    plugin.options = api.DevicePluginOptions(get_preferred_allocation_available=options)
    plugin.register(options={"get_preferred_allocation_available": said})
    kubelet.wait_for(lambda: len(plugin.streams) == 1)
    plugin.send(**PLAIN)
    kubelet.wait_for(lambda: kubelet.updates == 1)
    kubelet.admit("ns/pod", "main", 1)
    assert ("GetPreferredAllocation" in plugin.calls) is options


@pytest.mark.parametrize(
    ("count", "asked", "must"),
    [
        pytest.param(1, "ab", "", id="fewer than are aligned: the plugin chooses among these"),
        pytest.param(2, None, None, id="as many as are aligned: nobody is asked"),
        pytest.param(3, "abcde", "ab", id="more than are aligned: these and others"),
    ],
)
def test_a_topology_managers_choice_comes_first(
    kubelet: FakeKubelet,
    plugin: Plugin,
    offer: Callable[..., None],
    count: int,
    asked: str | None,
    must: str | None,
) -> None:
    offer({**FOUR, "e": []})
    ids = kubelet.admit("ns/pod", "main", count, nodes=[0])
    assert set(ids) <= {"a", "b"} or set(ids) > {"a", "b"}
    assert len(ids) == count
    sets = [(sorted(r.available_deviceIDs), sorted(r.must_include_deviceIDs)) for r in plugin.asked]
    assert sets == ([] if asked is None or must is None else [(list(asked), list(must))])


def test_an_init_containers_devices_are_its_pods_next(
    kubelet: FakeKubelet, plugin: Plugin, offer: Callable[..., None]
) -> None:
    offer()
    plugin.preferred = lambda _: choose(["c"])
    assert kubelet.admit("ns/pod", "init", 1, init=True) == ["c"]
    plugin.preferred = choose_first
    assert kubelet.admit("ns/pod", "main", 2) == ["a", "c"]
    assert list(plugin.asked[-1].must_include_deviceIDs) == ["c"]
    assert kubelet.admit("ns/pod", "second", 1) == ["b"]
    assert set(held_by(kubelet, "ns/pod")) == {"main", "second"}


def test_a_container_that_comes_again_keeps_its_devices(
    kubelet: FakeKubelet, plugin: Plugin, offer: Callable[..., None]
) -> None:
    offer()
    first = kubelet.admit("ns/pod", "main", 2)
    calls = list(plugin.calls)
    assert kubelet.admit("ns/pod", "main", 2) == first
    assert plugin.calls == calls


def test_a_container_cannot_come_again_with_another_wish(
    kubelet: FakeKubelet, offer: Callable[..., None]
) -> None:
    offer()
    kubelet.admit("ns/pod", "main", 2)
    with pytest.raises(RefusedError, match="from 2 to 1"):
        kubelet.admit("ns/pod", "main", 1)


def test_what_was_held_before_a_restart_is_not_given_again(
    kubelet: FakeKubelet, folder: Path, plugin: Plugin, offer: Callable[..., None]
) -> None:
    offer()
    assert kubelet.admit("ns/pod", "main", 3) == ["a", "b", "c"]
    kubelet.restart()
    with Plugin(folder / "again.sock") as again:
        again.register()
        kubelet.wait_for(lambda: len(again.streams) == 1)
        again.send(**PLAIN)
        kubelet.wait_for(lambda: kubelet.devices(RESOURCE) != {})
        assert kubelet.admit("ns/next", "main", 1) == ["d"]
        assert kubelet.admit("ns/pod", "main", 3) == ["a", "b", "c"]


def test_a_container_whose_device_fell_ill_cannot_come_again(
    kubelet: FakeKubelet, plugin: Plugin, offer: Callable[..., None]
) -> None:
    offer({"a": [], "b": []})
    assert kubelet.admit("ns/pod", "main", 1) == ["a"]
    plugin.send(b=[])
    kubelet.wait_for(lambda: kubelet.updates == 2)
    assert held_by(kubelet, "ns/pod") == {"main": [("a", ())]}
    with pytest.raises(RefusedError, match="no longer healthy"):
        kubelet.admit("ns/pod", "main", 1)


def test_devices_are_free_when_their_pod_is_gone(
    kubelet: FakeKubelet, plugin: Plugin, offer: Callable[..., None]
) -> None:
    offer({"a": [], "b": []})
    kubelet.admit("ns/pod", "main", 2)
    with pytest.raises(RefusedError, match="Requested: 1, Available: 0"):
        kubelet.admit("ns/next", "main", 1)
    kubelet.remove("ns/pod")
    assert kubelet.admit("ns/next", "main", 2) == ["a", "b"]


def fail(_: Any) -> Any:
    raise Status(grpc.StatusCode.INVALID_ARGUMENT, "no such thing")


def test_an_error_of_allocate_refuses_the_pod_and_frees_its_devices(
    kubelet: FakeKubelet, plugin: Plugin, offer: Callable[..., None]
) -> None:
    offer({"a": [0]})
    allocate, plugin.allocate = plugin.allocate, fail
    with pytest.raises(RefusedError, match="no such thing") as caught:
        kubelet.admit("ns/pod", "main", 1)
    assert caught.value.code == grpc.StatusCode.INVALID_ARGUMENT
    plugin.allocate = allocate
    assert kubelet.admit("ns/next", "main", 1) == ["a"]
    assert held_by(kubelet, "ns/pod") is None


def test_an_empty_answer_of_allocate_refuses_the_pod(
    kubelet: FakeKubelet, plugin: Plugin, offer: Callable[..., None]
) -> None:
    offer({"a": [0]})
    plugin.allocate = lambda _: None
    with pytest.raises(RefusedError, match="nothing for the container"):
        kubelet.admit("ns/pod", "main", 1)


def test_an_error_of_get_preferred_allocation_refuses_the_pod_and_leaks_devices(
    kubelet: FakeKubelet, plugin: Plugin, offer: Callable[..., None]
) -> None:
    offer(FOUR)
    plugin.preferred = fail
    with pytest.raises(RefusedError, match="no such thing") as caught:
        kubelet.admit("ns/pod", "main", 3, nodes=[0])  # takes a and b, then asks
    assert caught.value.code == grpc.StatusCode.INVALID_ARGUMENT
    plugin.preferred = choose_first
    with pytest.raises(RefusedError, match="Requested: 3, Available: 2"):
        kubelet.admit("ns/next", "main", 3)


def test_the_calls_alone(kubelet: FakeKubelet, plugin: Plugin, offer: Callable[..., None]) -> None:
    offer()
    assert kubelet.preferred(["c", "b", "d"], ["d"], 2) == ["d", "b"]
    assert kubelet.allocate(["b", "a"]).envs == {"THINGS": "a,b"}
    assert held_by(kubelet, "ns/pod") is None


# --- pod resources --------------------------------------------------------------------------------


def ask(kubelet: FakeKubelet, name: str, request: Any, response: Any) -> Any:
    with grpc.insecure_channel(f"unix://{kubelet.pod_resources}", LOCAL) as channel:
        return channel.unary_unary(f"/v1.PodResourcesLister/{name}", to_bytes, response.FromString)(
            request, timeout=20
        )


def ask_get(kubelet: FakeKubelet, namespace: str, name: str) -> podresources.PodResources:
    request = podresources.GetPodResourcesRequest(pod_namespace=namespace, pod_name=name)
    answer = ask(kubelet, "Get", request, podresources.GetPodResourcesResponse)
    assert isinstance(answer, podresources.GetPodResourcesResponse)
    return answer.pod_resources


def flat(entries: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Sorted (device, nodes) as listed; each entry is of one device."""
    assert all(len(entry.device_ids) == 1 for entry in entries)
    return sorted(
        (entry.device_ids[0], tuple(node.ID for node in entry.topology.nodes)) for entry in entries
    )


def held_by(kubelet: FakeKubelet, pod: str) -> dict[str, list[tuple[str, tuple[int, ...]]]] | None:
    """What List tells of a pod, by container; None if it is not listed."""
    request = podresources.ListPodResourcesRequest()
    answer = ask(kubelet, "List", request, podresources.ListPodResourcesResponse)
    pods = {f"{p.namespace}/{p.name}": p for p in answer.pod_resources}
    if pod not in pods:
        return None
    return {container.name: flat(container.devices) for container in pods[pod].containers}


def test_list_has_one_entry_for_each_device_and_node(kubelet: FakeKubelet) -> None:
    kubelet.give("ns/pod", "main", RESOURCE, {"a": [0, 1], "b": [1], "c": []})
    kubelet.give("ns/pod", "side", RESOURCE, {})
    assert held_by(kubelet, "ns/pod") == {
        "main": [("a", (0,)), ("a", (1,)), ("b", (1,)), ("c", ())],
        "side": [],
    }


def test_get_tells_the_same_of_one_pod(kubelet: FakeKubelet) -> None:
    kubelet.give("ns/pod", "main", RESOURCE, {"a": [0, 1]})
    kubelet.give("ns/other", "main", RESOURCE, {"b": [0]})
    pod = ask_get(kubelet, "ns", "pod")
    assert (pod.namespace, pod.name) == ("ns", "pod")
    assert [flat(container.devices) for container in pod.containers] == [[("a", (0,)), ("a", (1,))]]


@pytest.mark.parametrize(
    ("mode", "code", "text"),
    [
        pytest.param("on", grpc.StatusCode.UNKNOWN, "pod x in namespace ns not found", id="on"),
        pytest.param(
            "off", grpc.StatusCode.UNKNOWN, "PodResources API Get method disabled", id="off"
        ),
        pytest.param("missing", grpc.StatusCode.UNIMPLEMENTED, "unknown method", id="missing"),
    ],
)
def test_get_of_an_unknown_pod(
    kubelet: FakeKubelet, mode: Any, code: grpc.StatusCode, text: str
) -> None:
    kubelet.get = mode
    refused(code, text, ask_get, kubelet=kubelet, namespace="ns", name="x")


def test_allocatable_are_the_healthy_devices_whoever_holds_them(
    kubelet: FakeKubelet, plugin: Plugin, offer: Callable[..., None]
) -> None:
    offer({"a": [0, 1], "b": []})
    kubelet.admit("ns/pod", "main", 1)

    def allocatable() -> list[tuple[str, tuple[int, ...]]]:
        request = podresources.AllocatableResourcesRequest()
        response = podresources.AllocatableResourcesResponse
        return flat(ask(kubelet, "GetAllocatableResources", request, response).devices)

    assert allocatable() == [("a", (0,)), ("a", (1,)), ("b", ())]
    plugin.streams[0].put(None)
    kubelet.wait_for(lambda: kubelet.devices(RESOURCE)["a"][0] == "Unhealthy")
    assert allocatable() == []


def test_pod_resources_can_be_made_to_fail(kubelet: FakeKubelet) -> None:
    status = (grpc.StatusCode.RESOURCE_EXHAUSTED, "rejected by rate limit")
    kubelet.pod_resources_error = status
    refused(*status, held_by, kubelet=kubelet, pod="ns/pod")
    refused(*status, ask_get, kubelet=kubelet, namespace="ns", name="pod")


def test_what_does_not_come_true_in_time_says_how_things_stand(kubelet: FakeKubelet) -> None:
    with pytest.raises(TimeoutError, match="streams_open=0"):
        kubelet.wait_for(lambda: False, timeout_s=0)
