"""agent.edge.deviceplugin against the fake kubelet, over real gRPC on real sockets.

Expected values are those that the test hands to the plugin, and kubelet's demands as its source and
its issues tell them.
"""

import contextlib
import fcntl
import gc
import logging
import os
import random
import re
import shutil
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.core import registration
from agent.core.offer import Allocation, Device
from agent.core.placement import Refusal
from agent.edge.deviceplugin import Answers, DevicePlugin, plugin
from agent.errors import KubeletError
from agent.fakes.kubelet import FakeKubelet, RefusedError
from agent.proto import deviceplugin_pb2 as api

RESOURCE = "example.com/gpu"
PATIENCE_S = 20.0

FOUR = tuple(Device(id=name, healthy=True, nodes=(i // 2,)) for i, name in enumerate("abcd"))
ILL = (*FOUR[:3], Device(id="d", healthy=False, nodes=(1,)))
IDS = {device.id for device in FOUR}


class Host:
    """Whom the plugin asks and tells. Prefers the first of the sorted; gives out a to d."""

    def __init__(self) -> None:
        self.rpcs: list[tuple[str, float, str]] = []
        self.registrations: list[str] = []
        self.streams: list[bool] = []
        self.allocation: Callable[[Sequence[str]], Allocation] = lambda ids: Allocation(
            envs={"GPUS": ",".join(sorted(ids))}
        )
        self.preference: Callable[[Sequence[str], Sequence[str], int], Sequence[str]] = (
            lambda available, include, count: (
                sorted(include) + sorted(set(available) - set(include))
            )[:count]
        )
        self.answers = Answers(
            prefer=lambda available, include, count: self.preference(available, include, count),
            allocate=self._allocate,
            on_rpc=lambda *rpc: self.rpcs.append(rpc),
            on_registration=self.registrations.append,
            on_stream=self.streams.append,
        )

    def _allocate(self, ids: Sequence[str]) -> Allocation | Refusal:
        if strange := sorted(set(ids) - IDS):
            return Refusal(reason=f"there is no device {strange[0]} here")
        return self.allocation(ids)


Start = Callable[..., DevicePlugin]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "dp"


@pytest.fixture(autouse=True)
def log_lines() -> Iterator[list[str]]:
    """What the agent says, line by line, and what gRPC does. Nobody else hears it: pytest would
    keep the frames of exceptions, and what these hold open."""
    lines = list[str]()

    def keep(record: logging.LogRecord) -> bool:
        lines.append(record.getMessage())
        return False

    loggers = [logging.getLogger(name) for name in ("numalet", "grpc._server", "grpc._common")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addFilter(keep)
        logger.setLevel(logging.DEBUG)
    yield lines
    for logger, level in zip(loggers, levels, strict=True):
        logger.removeFilter(keep)
        logger.setLevel(level)


@pytest.fixture(autouse=True, scope="module")
def grpc_machinery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What gRPC starts once and keeps as long as any of it is in use: it is there before."""
    path = tmp_path_factory.mktemp("machinery") / "any.sock"
    with (
        FakeKubelet(path.parent),
        grpc.insecure_channel(f"unix:{path.with_name('kubelet.sock')}") as channel,
    ):
        grpc.channel_ready_future(channel).result(PATIENCE_S)
        yield


@pytest.fixture(autouse=True)
def nothing_left(grpc_machinery: None) -> Iterator[None]:
    """Fails the test that leaves threads or descriptors behind."""
    before = leavings()
    yield
    until_left(before)


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def start(
    folder: Path, host: Host, nothing_left: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Start]:
    """Starts a plugin with four devices, and looks more often than in real life."""
    monkeypatch.setattr(plugin, "_LOOK_S", 0.02)
    started = []

    def start(directory: Path = folder, devices: Sequence[Device] = FOUR) -> DevicePlugin:
        started.append(DevicePlugin(str(directory), RESOURCE, host.answers))
        if devices:
            started[-1].update(devices)
        return started[-1]

    yield start
    for one in started:
        with contextlib.suppress(OSError):  # the test closed it
            one.close()


@pytest.fixture
def kubelet(folder: Path, nothing_left: None) -> Iterator[FakeKubelet]:
    with FakeKubelet(folder) as kubelet:
        yield kubelet


@pytest.fixture
def served(kubelet: FakeKubelet, start: Start) -> DevicePlugin:
    """A plugin whose devices kubelet reads."""
    started = start()
    until_well(kubelet)
    return started


def until(predicate: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    """Waits for what happens in other threads."""
    deadline = time.monotonic() + timeout_s
    while not predicate():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.005)


def until_well(kubelet: FakeKubelet) -> None:
    """Kubelet knows our four devices, through one stream."""
    healthy = {device: ("Healthy", (i // 2,)) for i, device in enumerate("abcd")}
    kubelet.wait_for(
        lambda: kubelet.devices(RESOURCE) == healthy and kubelet.streams_open == 1, PATIENCE_S
    )


def leavings() -> list[str]:
    """Descriptors and threads: what they are. Not the threads of kubelet's pool, which come when
    they are needed."""
    names = [re.sub(r"\d+", "", thread.name) for thread in threading.enumerate()]
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            names.append(os.readlink(f"/proc/self/fd/{descriptor}").partition(":[")[0])
    return [name for name in names if not name.startswith("ThreadPoolExecutor")]


def until_left(before: list[str]) -> None:
    """Until there is no more than before; some of it ends a little later, or with its garbage."""
    deadline = time.monotonic() + PATIENCE_S
    while more := Counter(leavings()) - Counter(before):
        assert time.monotonic() < deadline, f"left behind: {more}"
        gc.collect()
        time.sleep(0.005)


def sockets(folder: Path) -> list[str]:
    """The plugin's sockets in the directory."""
    return sorted(path.name for path in folder.glob("*.sock") if path.name != "kubelet.sock")


@contextlib.contextmanager
def dialled(folder: Path) -> Iterator[grpc.Channel]:
    """A client of the one plugin that listens there."""
    (name,) = sockets(folder)
    options = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1))
    with grpc.insecure_channel(f"unix:{folder / name}", options=options) as channel:
        yield channel


def ask(folder: Path, method: str, request: Any, answer: Any) -> Any:
    with dialled(folder) as channel:
        return channel.unary_unary(
            f"/v1beta1.DevicePlugin/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )(request, timeout=PATIENCE_S)


def send_bytes(channel: grpc.Channel, method: str, body: bytes) -> grpc.StatusCode:
    try:
        channel.unary_unary(f"/v1beta1.DevicePlugin/{method}")(body, timeout=PATIENCE_S)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def watch(channel: grpc.Channel) -> Any:
    """A stream of devices."""
    return channel.unary_stream(
        "/v1beta1.DevicePlugin/ListAndWatch",
        request_serializer=api.Empty.SerializeToString,
        response_deserializer=api.ListAndWatchResponse.FromString,
    )(api.Empty(), timeout=PATIENCE_S)


def told(*devices: Device) -> api.ListAndWatchResponse:
    """What kubelet is to be told of these devices."""
    return api.ListAndWatchResponse(
        devices=[
            api.Device(
                ID=device.id,
                health="Healthy" if device.healthy else "Unhealthy",
                topology={"nodes": [{"ID": node} for node in device.nodes]}
                if device.nodes
                else None,
            )
            for device in devices
        ]
    )


# --- ListAndWatch ---------------------------------------------------------------------------------


def test_a_plugin_serves_and_then_registers_once(
    kubelet: FakeKubelet, served: DevicePlugin, host: Host, folder: Path
) -> None:
    (registered,) = kubelet.registrations  # kubelet had to dial it to accept it
    assert registered.request == api.RegisterRequest(
        version="v1beta1",
        endpoint=sockets(folder)[0],
        resource_name=RESOURCE,
        options={"get_preferred_allocation_available": True},
    )
    assert re.fullmatch(r"numalet-[0-9a-f]{8}\.sock", registered.request.endpoint)
    until(lambda: host.registrations == ["ok"])
    assert host.streams == [True]
    assert served.streaming


def test_two_plugins_of_one_name_never_share_a_socket(
    kubelet: FakeKubelet, served: DevicePlugin, start: Start, folder: Path
) -> None:
    first = sockets(folder)
    served.close()
    start()
    kubelet.wait_for(lambda: len(kubelet.registrations) == 2)
    until_well(kubelet)
    assert len(sockets(folder)) == 1
    assert sockets(folder) != first


def test_nothing_is_registered_before_there_are_devices(
    kubelet: FakeKubelet, start: Start, tmp_path: Path, folder: Path
) -> None:
    waiting = start(devices=())
    with FakeKubelet(tmp_path / "other") as other:
        start(tmp_path / "other")
        until_well(other)  # one that began later
        assert kubelet.registrations == []
        assert sockets(folder) == []
        waiting.update(FOUR)
        until_well(kubelet)


def test_the_devices_are_sent_only_when_they_change(
    kubelet: FakeKubelet, served: DevicePlugin
) -> None:
    for _ in range(100):
        served.update(list(FOUR))
    served.update(ILL)
    kubelet.wait_for(lambda: kubelet.devices(RESOURCE).get("d") == ("Unhealthy", (1,)))
    assert kubelet.updates == 2
    served.update(ILL)
    served.update(FOUR)
    until_well(kubelet)
    assert kubelet.updates == 3
    assert len(kubelet.registrations) == 1


DEVICES = {
    "healthy ones on their nodes": FOUR,
    "an unhealthy one stays listed": ILL,
    "node 0 is told": (Device(id="a", healthy=True, nodes=(0,)),),
    "no topology at all where no node is known": (Device(id="a", healthy=True, nodes=()),),
    "several nodes": (Device(id="a", healthy=True, nodes=(0, 3)),),
    "none": (),
}


@pytest.mark.parametrize("devices", DEVICES.values(), ids=DEVICES)
def test_what_kubelet_is_told_of_devices(
    kubelet: FakeKubelet, served: DevicePlugin, folder: Path, devices: tuple[Device, ...]
) -> None:
    served.update(devices)
    with dialled(folder) as channel:
        assert next(watch(channel)) == told(*devices)


def test_a_change_between_two_messages_is_not_lost(
    kubelet: FakeKubelet, served: DevicePlugin
) -> None:
    for i in range(100):
        served.update(ILL if i % 2 else FOUR)
    served.update(FOUR[:1])
    kubelet.wait_for(lambda: set(kubelet.devices(RESOURCE)) == {"a"})


def test_a_stream_ends_with_the_client_that_cancels_it(
    kubelet: FakeKubelet, served: DevicePlugin, host: Host
) -> None:
    kubelet.end_stream()
    until(lambda: False in host.streams)
    until_well(kubelet)
    assert host.streams == [True, False, True]


def test_a_stream_ends_when_the_plugin_closes(
    kubelet: FakeKubelet, served: DevicePlugin, host: Host, folder: Path
) -> None:
    served.close()
    assert not served.streaming
    assert sockets(folder) == []
    kubelet.wait_for(lambda: kubelet.streams_open == 0)
    assert {health for health, _ in kubelet.devices(RESOURCE).values()} == {"Unhealthy"}
    until(lambda: host.streams == [True, False])


def test_a_newer_stream_ends_the_older_one(
    kubelet: FakeKubelet, served: DevicePlugin, folder: Path
) -> None:
    with dialled(folder) as channel:
        older, newer = watch(channel), None
        assert next(older) == told(*FOUR)
        newer = watch(channel)
        assert next(newer) == told(*FOUR)
        assert list(older) == []
        assert older.code() == grpc.StatusCode.OK
        served.update(ILL)
        assert next(newer) == told(*ILL)
        assert served.streaming


def test_streams_that_nobody_reads_do_not_starve_allocate(
    kubelet: FakeKubelet, served: DevicePlugin, host: Host, folder: Path
) -> None:
    with dialled(folder) as channel:
        stale = [watch(channel) for _ in range(100)]
        answer = ask(
            folder,
            "Allocate",
            api.AllocateRequest(container_requests=[{"devices_ids": ["a"]}]),
            api.AllocateResponse,
        )
        assert answer.container_responses[0].envs == {"GPUS": "a"}
        until(lambda: len(host.streams) >= 101 + 100)  # all but the newest have ended
        assert next(stale[-1]) == told(*FOUR)
    until_well(kubelet)


# --- the other RPCs -------------------------------------------------------------------------------


def test_kubelet_is_told_that_there_are_preferences_and_nothing_before_a_start(
    kubelet: FakeKubelet, served: DevicePlugin, folder: Path
) -> None:
    options = ask(folder, "GetDevicePluginOptions", api.Empty(), api.DevicePluginOptions)
    assert options == api.DevicePluginOptions(
        pre_start_required=False, get_preferred_allocation_available=True
    )


def test_pre_start_container_is_answered_though_nobody_asks_for_it(
    kubelet: FakeKubelet, served: DevicePlugin, folder: Path
) -> None:
    request = api.PreStartContainerRequest(devices_ids=["a"])
    answer = ask(folder, "PreStartContainer", request, api.PreStartContainerResponse)
    assert answer == api.PreStartContainerResponse()


def test_kubelet_follows_the_preference(
    kubelet: FakeKubelet, served: DevicePlugin, host: Host
) -> None:
    asked = []

    def prefer(available: Sequence[str], include: Sequence[str], count: int) -> Sequence[str]:
        asked.append((sorted(available), sorted(include), count))
        return ("b", "d")

    host.preference = prefer
    assert kubelet.admit("default/pod", "main", 2) == ["b", "d"]
    assert asked == [(["a", "b", "c", "d"], [], 2)]


def test_a_preference_for_several_containers_and_for_none(
    kubelet: FakeKubelet, served: DevicePlugin, folder: Path
) -> None:
    request = api.PreferredAllocationRequest(
        container_requests=[
            {"available_deviceIDs": ["d", "b"], "allocation_size": 1},
            {
                "available_deviceIDs": ["a", "c", "d"],
                "must_include_deviceIDs": ["d"],
                "allocation_size": 2,
            },
        ]
    )
    answer = ask(folder, "GetPreferredAllocation", request, api.PreferredAllocationResponse)
    assert [list(one.deviceIDs) for one in answer.container_responses] == [["b"], ["d", "a"]]
    nobody = api.PreferredAllocationRequest()
    answer = ask(folder, "GetPreferredAllocation", nobody, api.PreferredAllocationResponse)
    assert answer == api.PreferredAllocationResponse()


def broken(*_: Any) -> Any:
    raise RuntimeError("a bug")


def test_a_preference_that_cannot_be_had_is_an_empty_answer_and_the_pod_gets_devices(
    kubelet: FakeKubelet, served: DevicePlugin, host: Host, log_lines: list[str]
) -> None:
    host.preference = broken
    assert kubelet.preferred("abcd", "", 2) == []
    assert len(kubelet.admit("default/pod", "main", 2)) == 2
    assert {code for method, _, code in host.rpcs if method == "GetPreferredAllocation"} == {"OK"}
    assert "no preference" in log_lines


def test_all_of_an_allocation_is_handed_over(
    kubelet: FakeKubelet, served: DevicePlugin, host: Host
) -> None:
    host.allocation = lambda ids: Allocation(
        envs={"NVIDIA_VISIBLE_DEVICES": ",".join(sorted(ids))},
        annotations={"numalet.io/nodes": "0-1"},
        device_nodes=(("/host/dev/nvidia0", "/dev/nvidia0"), ("/dev/nvidiactl", "/dev/nvidiactl")),
        cdi_devices=("nvidia.com/gpu=a", "nvidia.com/gpu=c"),
    )
    assert kubelet.allocate("ca") == api.ContainerAllocateResponse(
        envs={"NVIDIA_VISIBLE_DEVICES": "a,c"},
        annotations={"numalet.io/nodes": "0-1"},
        devices=[
            {
                "host_path": "/host/dev/nvidia0",
                "container_path": "/dev/nvidia0",
                "permissions": "rw",
            },
            {
                "host_path": "/dev/nvidiactl",
                "container_path": "/dev/nvidiactl",
                "permissions": "rw",
            },
        ],
        cdi_devices=[{"name": "nvidia.com/gpu=a"}, {"name": "nvidia.com/gpu=c"}],
    )


def test_each_container_of_a_request_gets_its_answer(
    kubelet: FakeKubelet, served: DevicePlugin, folder: Path
) -> None:
    request = api.AllocateRequest(
        container_requests=[{"devices_ids": ["b"]}, {"devices_ids": ["c", "a"]}]
    )
    answer = ask(folder, "Allocate", request, api.AllocateResponse)
    assert [one.envs["GPUS"] for one in answer.container_responses] == ["b", "a,c"]


def test_a_refusal_is_an_invalid_argument_with_its_sentence_and_changes_nothing(
    kubelet: FakeKubelet, served: DevicePlugin, host: Host, log_lines: list[str]
) -> None:
    with pytest.raises(RefusedError, match="there is no device x here") as caught:
        kubelet.allocate(["a", "x"])
    assert caught.value.code == grpc.StatusCode.INVALID_ARGUMENT
    assert 'allocation refused reason="there is no device x here"' in log_lines
    assert kubelet.admit("default/pod", "main", 4) == ["a", "b", "c", "d"]
    assert (kubelet.updates, kubelet.streams_open, len(kubelet.registrations)) == (1, 1, 1)
    assert host.rpcs[-3][::2] == ("Allocate", "INVALID_ARGUMENT")


def test_one_refused_container_refuses_the_request(
    kubelet: FakeKubelet, served: DevicePlugin, folder: Path
) -> None:
    request = api.AllocateRequest(container_requests=[{"devices_ids": ["a"]}, {"devices_ids": "x"}])
    with pytest.raises(grpc.RpcError) as caught:
        ask(folder, "Allocate", request, api.AllocateResponse)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]


def test_a_bug_in_allocate_is_one_failed_call(
    kubelet: FakeKubelet, served: DevicePlugin, host: Host
) -> None:
    host.allocation = broken
    with pytest.raises(RefusedError) as caught:
        kubelet.allocate("a")
    assert caught.value.code == grpc.StatusCode.UNKNOWN
    assert host.rpcs[-1][::2] == ("Allocate", "UNKNOWN")
    host.allocation = lambda ids: Allocation(envs={"A": "1"})
    assert kubelet.allocate("a").envs == {"A": "1"}


def test_every_call_is_told_of(kubelet: FakeKubelet, served: DevicePlugin, host: Host) -> None:
    kubelet.admit("default/pod", "main", 1)
    assert [(method, code) for method, _, code in host.rpcs] == [
        ("GetDevicePluginOptions", "OK"),
        ("GetPreferredAllocation", "OK"),
        ("Allocate", "OK"),
    ]
    assert all(0 <= seconds < PATIENCE_S for _, seconds, _ in host.rpcs)


def test_calls_are_answered_side_by_side(
    kubelet: FakeKubelet, served: DevicePlugin, host: Host, folder: Path
) -> None:
    both = threading.Barrier(2)

    def meet(ids: Sequence[str]) -> Allocation:
        both.wait(PATIENCE_S)
        return Allocation()

    host.allocation = meet
    second = threading.Thread(target=kubelet.allocate, args=("b",))
    second.start()
    kubelet.allocate("a")
    second.join()
    assert not both.broken


UNREADABLE = {grpc.StatusCode.INTERNAL, grpc.StatusCode.INVALID_ARGUMENT}
"""gRPC's own word for a body that is no message, and its receiver's."""

BODIES = {
    "a wire type that there is not": b"\xff\xff\xff\xff",
    "a text that is no UTF-8": b"\x0a\x04\x0a\x02\xff\xfe",
    "a length beyond the end": b"\x0a\x7f",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
@pytest.mark.parametrize("method", ["Allocate", "GetPreferredAllocation"])
def test_a_body_that_is_no_message_is_one_failed_call(
    kubelet: FakeKubelet, served: DevicePlugin, folder: Path, method: str, body: bytes
) -> None:
    with dialled(folder) as channel:
        assert send_bytes(channel, method, body) in UNREADABLE
    assert kubelet.allocate("a").envs == {"GPUS": "a"}


def test_bodies_that_are_no_messages_leave_nothing(
    kubelet: FakeKubelet, served: DevicePlugin, folder: Path
) -> None:
    def count_objects() -> int:
        gc.collect()
        return len(gc.get_objects())

    with dialled(folder) as channel:
        send_bytes(channel, "Allocate", b"\xff")
        before = count_objects()
        for _ in range(300):
            send_bytes(channel, "Allocate", b"\xff")
        until(lambda: count_objects() < before + 300)  # less than one for each


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(
            api.AllocateRequest(container_requests=[{"devices_ids": ["a" * (2 << 20)]}]),
            id="one id of 2 MiB",
        ),
        pytest.param(
            api.AllocateRequest(container_requests=[{"devices_ids": ["a" * 40] * 50_000}]),
            id="50,000 ids",
        ),
    ],
)
def test_a_request_that_is_too_large_is_not_read(
    kubelet: FakeKubelet, served: DevicePlugin, host: Host, folder: Path, request_: Any
) -> None:
    with dialled(folder) as channel:
        code = send_bytes(channel, "Allocate", request_.SerializeToString())
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "Allocate" not in [method for method, _, _ in host.rpcs]
        body = api.AllocateRequest(container_requests=[{"devices_ids": ["a"]}])
        assert send_bytes(channel, "Allocate", body.SerializeToString()) == grpc.StatusCode.OK
    assert kubelet.streams_open == 1


def test_a_call_that_there_is_not(kubelet: FakeKubelet, served: DevicePlugin, folder: Path) -> None:
    with dialled(folder) as channel:
        assert send_bytes(channel, "Deallocate", b"") == grpc.StatusCode.UNIMPLEMENTED
    assert kubelet.allocate("a").envs == {"GPUS": "a"}


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.binary(max_size=64))
def test_any_bytes_are_answered_and_leave_the_plugin_as_it_was(
    kubelet: FakeKubelet, served: DevicePlugin, folder: Path, body: bytes
) -> None:
    with dialled(folder) as channel:
        for method in ("Allocate", "GetPreferredAllocation"):
            assert send_bytes(channel, method, body) in {grpc.StatusCode.OK, *UNREADABLE}
    assert kubelet.allocate("a").envs == {"GPUS": "a"}


# --- registration ---------------------------------------------------------------------------------


def test_kubelet_that_comes_later(folder: Path, start: Start) -> None:
    folder.mkdir()
    start()
    with FakeKubelet(folder) as kubelet:
        until_well(kubelet)


def test_a_directory_that_comes_later(tmp_path: Path, start: Start) -> None:
    folder = tmp_path / "lib" / "kubelet"
    start(folder)
    with FakeKubelet(folder) as kubelet:
        until_well(kubelet)


def test_a_stale_socket_of_kubelets_is_no_kubelet(
    folder: Path, start: Start, host: Host, log_lines: list[str]
) -> None:
    kubelet = FakeKubelet(folder)
    kubelet.leave_stale_socket()
    start()
    until(lambda: host.registrations.count("failed") >= 3)
    with kubelet:
        until_well(kubelet)
    failed = [line for line in log_lines if line.startswith("registration failed")]
    assert len(failed) == 1
    assert "UNAVAILABLE" in failed[0]


@pytest.mark.parametrize(
    "name",
    ["a b", "100%41", "a#b", "a?b=c", "größe", "a:b"],
    ids=["a blank", "a percent sign", "a hash", "a question mark", "an umlaut", "a colon"],
)
def test_a_directory_with_odd_letters(tmp_path: Path, start: Start, name: str) -> None:
    with FakeKubelet(tmp_path / name) as kubelet:
        start(tmp_path / name)
        until_well(kubelet)


def test_fifty_restarts_of_kubelet_leave_one_registration_and_nothing_else(
    kubelet: FakeKubelet, served: DevicePlugin, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "SETTLING_S", 0.02)  # every kubelet here is a new one
    before = leavings()
    endpoints = {kubelet.registrations[-1].request.endpoint}
    for _ in range(50):
        kubelet.restart()
        until_well(kubelet)
        assert len(sockets(folder)) == 1
        endpoints.add(kubelet.registrations[-1].request.endpoint)
    assert len(endpoints) == 51  # a name that kubelet is still forgetting is never used again
    assert kubelet.most_streams_open == 1
    until_left(before)


def test_kubelet_that_was_killed_and_stays_away(
    kubelet: FakeKubelet, served: DevicePlugin, host: Host
) -> None:
    kubelet.kill()
    until(lambda: host.registrations.count("failed") >= 2)
    kubelet.start()
    until_well(kubelet)
    assert kubelet.most_streams_open == 1


def test_kubelet_that_stopped_and_stays_away(
    kubelet: FakeKubelet, served: DevicePlugin, host: Host
) -> None:
    kubelet.stop()
    until(lambda: host.streams == [True, False])
    kubelet.start()
    until_well(kubelet)
    assert kubelet.most_streams_open == 1


def test_our_own_socket_is_deleted(
    kubelet: FakeKubelet, served: DevicePlugin, folder: Path
) -> None:
    (name,) = sockets(folder)
    (folder / name).unlink()
    until(lambda: sockets(folder) not in ([], [name]))
    kubelet.wait_for(lambda: len(kubelet.registrations) == 2)
    until_well(kubelet)
    assert kubelet.most_streams_open == 1


def test_our_own_socket_is_replaced_by_anothers(
    kubelet: FakeKubelet, served: DevicePlugin, folder: Path
) -> None:
    (name,) = sockets(folder)
    (folder / name).unlink()
    (folder / name).touch()
    kubelet.wait_for(lambda: len(kubelet.registrations) == 2)
    until_well(kubelet)
    assert kubelet.registrations[-1].request.endpoint != name


def test_the_directory_is_wiped(kubelet: FakeKubelet, served: DevicePlugin, folder: Path) -> None:
    kubelet.wipe()
    kubelet.restart()
    until_well(kubelet)
    assert len(sockets(folder)) == 1
    assert kubelet.most_streams_open == 1


def test_the_directory_is_made_anew_and_is_still_ours_alone(
    kubelet: FakeKubelet, served: DevicePlugin, folder: Path, host: Host
) -> None:
    kubelet.stop()
    shutil.rmtree(folder)
    kubelet.start()
    until_well(kubelet)
    with pytest.raises(KubeletError, match="another numalet serves there"):
        DevicePlugin(str(folder), RESOURCE, host.answers)


def test_a_refused_registration_is_tried_again_and_said_once(
    kubelet: FakeKubelet, start: Start, host: Host, log_lines: list[str]
) -> None:
    kubelet.register_error = (grpc.StatusCode.UNKNOWN, "not today")
    start()
    kubelet.wait_for(lambda: len(kubelet.registrations) >= 3)
    kubelet.register_error = None
    until_well(kubelet)
    until(lambda: host.registrations[-1] == "ok")
    assert set(host.registrations[:-1]) == {"failed"}
    assert [line for line in log_lines if line.startswith("registration failed")] == [
        f'registration failed resource={RESOURCE} reason="UNKNOWN: not today"'
    ]


@pytest.mark.parametrize("gate", ["may_dial", "may_answer"])
def test_a_registration_that_is_never_answered_does_not_hinder_the_end(
    kubelet: FakeKubelet, start: Start, gate: str
) -> None:
    getattr(kubelet, gate).clear()
    started = start()
    kubelet.wait_for(lambda: len(kubelet.registrations) == 1)
    started.close()
    # On its own a registration would go on for longer.
    until(lambda: "kubelet" not in [thread.name for thread in threading.enumerate()], 8.0)


def test_a_registration_that_is_answered_late_is_the_only_one(
    kubelet: FakeKubelet, start: Start, host: Host
) -> None:
    kubelet.may_answer.clear()
    started = start()
    until(lambda: started.streaming)  # kubelet opens its stream meanwhile
    kubelet.may_answer.set()
    until_well(kubelet)
    until(lambda: host.registrations == ["ok"])
    assert len(kubelet.registrations) == 1


def test_a_stream_that_kubelet_never_opens_leads_to_another_registration(
    kubelet: FakeKubelet, start: Start, host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "OPENING_S", 0.1)
    kubelet.opens_streams = False
    started = start()
    kubelet.wait_for(lambda: len(kubelet.registrations) >= 3)
    assert not started.streaming
    kubelet.opens_streams = True
    until_well(kubelet)
    assert kubelet.most_streams_open == 1
    assert set(host.registrations) == {"ok"}


def test_a_stream_that_kubelet_ends_leads_to_another_registration(
    kubelet: FakeKubelet, served: DevicePlugin, folder: Path
) -> None:
    for registrations in (2, 3):
        kubelet.end_stream()
        kubelet.wait_for(lambda n=registrations: len(kubelet.registrations) == n)
        until_well(kubelet)
    endpoints = [one.request.endpoint for one in kubelet.registrations]
    assert len(set(endpoints)) == 3  # a late stream of an earlier one finds nobody
    assert sockets(folder) == endpoints[-1:]
    assert kubelet.most_streams_open == 1


@pytest.mark.parametrize("seed", range(2))
def test_whatever_happens_in_whatever_order_there_is_one_stream_in_the_end(
    kubelet: FakeKubelet,
    served: DevicePlugin,
    folder: Path,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registration, "OPENING_S", 0.3)
    chance = random.Random(seed)

    def delete() -> None:
        for name in sockets(folder):
            (folder / name).unlink(missing_ok=True)

    def break_stream() -> None:
        with contextlib.suppress(AttributeError, KeyError):  # there is none
            kubelet.end_stream(RESOURCE)

    def wipe() -> None:
        with contextlib.suppress(FileNotFoundError):  # the plugin took its socket away itself
            kubelet.wipe()
        kubelet.restart()

    def refuse() -> None:
        kubelet.register_error = (grpc.StatusCode.UNKNOWN, "no") if chance.random() < 0.5 else None

    def look_away() -> None:
        kubelet.opens_streams = chance.random() < 0.5

    for _ in range(10):
        chance.choice((kubelet.restart, delete, break_stream, wipe, refuse, look_away))()
        deadline = time.monotonic() + chance.random() * 0.2
        until(lambda deadline=deadline: time.monotonic() >= deadline)
    kubelet.register_error, kubelet.opens_streams = None, True
    until_well(kubelet)
    assert kubelet.most_streams_open == 1
    assert len(sockets(folder)) == 1


# --- the directory --------------------------------------------------------------------------------


def test_a_second_plugin_is_refused_until_the_first_is_closed(
    kubelet: FakeKubelet, served: DevicePlugin, start: Start, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(folder)
    for directory in (folder, tmp_path / "link"):
        with pytest.raises(KubeletError) as caught:
            start(directory)
        assert str(caught.value) == (
            f"{directory}: kubelet's plugin directory: another numalet serves there"
        )
    assert (kubelet.streams_open, len(kubelet.registrations)) == (1, 1)
    served.close()
    start()
    kubelet.wait_for(lambda: len(kubelet.registrations) == 2)
    until_well(kubelet)


def test_a_second_plugin_that_came_before_the_directory_gives_way(
    folder: Path, start: Start, log_lines: list[str]
) -> None:
    start()
    start()
    with FakeKubelet(folder) as kubelet:
        until_well(kubelet)
        until(lambda: any("another numalet serves there" in line for line in log_lines))
        assert kubelet.most_streams_open == 1
        assert len(sockets(folder)) == 1


def test_a_directory_that_is_a_file(folder: Path, start: Start) -> None:
    folder.touch()
    with pytest.raises(KubeletError) as caught:
        start()
    assert str(caught.value) == f"{folder}: kubelet's plugin directory: Not a directory"


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Without the rights of root, where we have them."""
    user = os.geteuid()
    if user == 0:
        os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        if user == 0:
            os.setresuid(0, 0, 0)


@pytest.mark.parametrize(
    "mode",
    [pytest.param(0o555, id="that may only be read"), pytest.param(0o300, id="that may not be")],
)
def test_a_directory_without_permission(host: Host, mode: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, mode)
        with as_nobody(), pytest.raises(KubeletError) as caught:
            DevicePlugin(folder, RESOURCE, host.answers)
        os.chmod(folder, 0o700)
    assert str(caught.value) == f"{folder}: kubelet's plugin directory: Permission denied"


def test_a_path_that_is_too_long_for_a_socket_is_said_once(
    kubelet: FakeKubelet, tmp_path: Path, start: Start, host: Host, log_lines: list[str]
) -> None:
    folder = tmp_path / ("d" * 100)
    folder.mkdir()
    (folder / "kubelet.sock").touch()
    start(folder)
    kubelet.register_error = (grpc.StatusCode.UNKNOWN, "not today")
    start()
    until(lambda: host.registrations.count("failed") >= 3)  # the first one has looked more often
    (line,) = (line for line in log_lines if line.startswith("plugin directory"))
    assert f"path={folder} " in line
    assert "cannot listen there" in line


def test_a_file_in_place_of_the_directory_is_said_once_and_waited_for(
    kubelet: FakeKubelet, served: DevicePlugin, folder: Path, tmp_path: Path, log_lines: list[str]
) -> None:
    kubelet.stop()
    shutil.rmtree(folder)
    folder.touch()
    until(lambda: log_lines[-1].startswith("plugin directory"))
    folder.unlink()
    kubelet.start()
    until_well(kubelet)
    assert [line for line in log_lines if line.startswith("plugin directory")] == [
        f"plugin directory path={folder} reason=\"{folder}: kubelet's plugin directory: "
        'Not a directory"'
    ]


def test_a_kubelet_socket_that_leads_nowhere_is_said_once_and_waited_for(
    folder: Path, start: Start, log_lines: list[str]
) -> None:
    folder.mkdir()
    (folder / "kubelet.sock").symlink_to("kubelet.sock")
    start()
    until(lambda: len(log_lines) > 0)
    with FakeKubelet(folder) as kubelet:
        until_well(kubelet)
    assert [line for line in log_lines if line.startswith("plugin directory")] == [
        f'plugin directory path={folder} reason="{folder}/kubelet.sock: '
        'Too many levels of symbolic links"'
    ]


def test_sockets_of_an_earlier_agent_are_removed_and_those_of_others_are_not(
    kubelet: FakeKubelet, start: Start, folder: Path
) -> None:
    for name in ("numalet-0badcafe.sock", "nvidia-gpu.sock"):
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / name))
    start()
    until_well(kubelet)
    names = sockets(folder)
    assert "nvidia-gpu.sock" in names
    assert "numalet-0badcafe.sock" not in names
    assert len(names) == 2


def test_a_folder_with_the_name_of_our_sockets_is_no_hindrance(
    kubelet: FakeKubelet, start: Start, folder: Path
) -> None:
    (folder / "numalet-folder.sock").mkdir()
    start()
    until_well(kubelet)


def test_fifty_plugins_leave_nothing(kubelet: FakeKubelet, start: Start, folder: Path) -> None:
    before = list[str]()
    for _ in range(50):
        started = start()
        until_well(kubelet)
        started.close()
        kubelet.wait_for(lambda: kubelet.streams_open == 0)
        before = before or leavings()
    assert sockets(folder) == []
    assert kubelet.most_streams_open == 1
    until_left(before)


def test_a_plugin_without_devices_can_be_closed(start: Start, folder: Path) -> None:
    folder.mkdir()
    start(devices=()).close()
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # it is free again
    os.close(descriptor)
