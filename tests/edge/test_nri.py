"""agent.edge.nri against the fake runtime, over a real socket, and against peers that misbehave.

Expected values are those that the test gives its pods and containers or has its daemon answer, and
the demands of NRI's source. The fake has a framing of its own.
"""

import contextlib
import itertools
import logging
import os
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.bitmap import Bitmap
from agent.core.placement import Refusal
from agent.core.runtime import Cpuset, CpuTime, RuntimeContainer, RuntimePod, Stage
from agent.edge.nri import Asked, Callbacks, NriPlugin, connection, plugin
from agent.edge.nri.messages import to_adjustment, to_container, to_pod, to_update
from agent.errors import ConfigError
from agent.fakes.runtime import (
    PLUGIN,
    REQUEST,
    RESPONSE,
    TO_PLUGIN,
    TO_RUNTIME,
    CallFailedError,
    FakeRuntime,
    go_frames,
    read_frame,
)
from agent.proto import nri_pb2 as pb
from agent.proto import ttrpc_pb2 as ttrpc

ME = "42-numalet"
PATIENCE_S = 20.0
VERSIONS = ("0.9", "0.11", "0.12")

TWO = Cpuset(cpus=Bitmap([2, 3]), mems=Bitmap([1]))


class Daemon:
    """Whom the plugin asks and tells. `told` is what happened, in order. Leaves containers alone
    unless a test says otherwise."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.rpcs: list[tuple[str, str]] = []
        self.correct: Callable[..., Mapping[str, Cpuset]] = lambda pods, containers: {}
        self.pin: Callable[..., Cpuset | Refusal | None] = lambda pod, container: None
        self.keep: Callable[..., Cpuset | None] = lambda pod, container, asked: None
        self.hear: Callable[[str], None] = lambda event: None
        self.callbacks = Callbacks(
            on_synchronize=self._synchronize,
            on_create=self._create,
            on_update=self._update,
            on_start=lambda container: self._hear("start", container),
            on_stop=lambda container: self._hear("stop", container),
            on_remove=lambda container: self._hear("remove", container),
            on_run_pod=lambda pod: self._hear("run pod", pod),
            on_end_pod=lambda pod: self._hear("end pod", pod),
            on_connection=lambda connected: self._hear("connection", connected),
            on_rpc=lambda method, seconds, code: self.rpcs.append((method, code)),
        )

    def _synchronize(
        self, pods: Sequence[RuntimePod], containers: Sequence[RuntimeContainer]
    ) -> Mapping[str, Cpuset]:
        self.told.append(("synchronize", pods, containers))
        return self.correct(pods, containers)

    def _create(self, pod: RuntimePod, container: RuntimeContainer) -> Cpuset | Refusal | None:
        self.told.append(("create", pod, container))
        return self.pin(pod, container)

    def _update(self, pod: RuntimePod, container: RuntimeContainer, asked: Asked) -> Cpuset | None:
        self.told.append(("update", pod, container, asked))
        return self.keep(pod, container, asked)

    def _hear(self, event: str, what: Any) -> None:
        self.told.append((event, what))
        self.hear(event)

    def heard(self, *events: str) -> list[tuple[Any, ...]]:
        return [each for each in self.told if each[0] in events]


Start = Callable[[], NriPlugin]


@pytest.fixture(autouse=True)
def log_lines() -> Iterator[list[str]]:
    """What the agent says, line by line."""
    lines = list[str]()

    def keep(record: logging.LogRecord) -> bool:
        lines.append(record.getMessage())
        print(lines[-1])
        return False

    logger = logging.getLogger("numalet")
    level = logger.level
    logger.addFilter(keep)
    logger.setLevel(logging.DEBUG)
    yield lines
    logger.removeFilter(keep)
    logger.setLevel(level)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Fails the test that leaves threads or descriptors behind."""
    before = Counter(leavings())
    yield
    until(lambda: not Counter(leavings()) - before)


@pytest.fixture
def daemon() -> Daemon:
    return Daemon()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "nri" / "nri.sock"


@pytest.fixture
def runtime(path: Path, nothing_left: None) -> Iterator[FakeRuntime]:
    with FakeRuntime(path) as runtime:
        yield runtime


@pytest.fixture
def start(
    path: Path, daemon: Daemon, nothing_left: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Start]:
    """Starts a plugin that comes back sooner than in real life."""
    for bound in ("_FIRST_PAUSE_S", "_LONGEST_PAUSE_S", "_LOOK_S"):
        monkeypatch.setattr(plugin, bound, 0.02)
    started = []

    def start() -> NriPlugin:
        started.append(NriPlugin(str(path), "numalet", "42", daemon.callbacks))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture
def served(runtime: FakeRuntime, start: Start) -> NriPlugin:
    """A plugin that the runtime asks."""
    started = start()
    until_served(runtime)
    return started


def until(predicate: Callable[[], bool]) -> None:
    """Waits for what happens in other threads."""
    deadline = time.monotonic() + PATIENCE_S
    while not predicate():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.005)


def until_served(runtime: FakeRuntime) -> None:
    runtime.wait_for(lambda: runtime.plugins == [ME])


def leavings() -> list[str]:
    """Descriptors and threads: what they are."""
    names = [thread.name.partition("-")[0] for thread in threading.enumerate()]
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            names.append(os.readlink(f"/proc/self/fd/{descriptor}").partition(":[")[0])
    return names


def pod_message(pod_id: str = "p1", **fields: Any) -> pb.PodSandbox:
    return pb.PodSandbox(id=pod_id, name="train", uid="u1", namespace="prod", **fields)


def container_message(container_id: str = "c1", **fields: Any) -> pb.Container:
    return pb.Container(id=container_id, pod_sandbox_id="p1", name="main", **fields)


def cpu_message(**fields: int | str) -> pb.LinuxResources:
    numbers = {name: {"value": fields[name]} for name in fields if name not in ("cpus", "mems")}
    texts = {name: fields[name] for name in fields if name in ("cpus", "mems")}
    return pb.LinuxResources(cpu=pb.LinuxCPU(**numbers, **texts))


POD = RuntimePod(id="p1", uid="u1", pod="prod/train")
CONTAINER = RuntimeContainer(id="c1", pod_id="p1", name="main", stage=Stage.CREATING)


# --- registration ---------------------------------------------------------------------------------


@pytest.mark.parametrize("nri", VERSIONS)
def test_a_plugin_registers_and_is_asked_for_what_it_wants(
    path: Path, start: Start, daemon: Daemon, nri: Any
) -> None:
    with FakeRuntime(path, nri) as runtime:
        started = start()
        until_served(runtime)
        assert runtime.registrations == [
            pb.RegisterPluginRequest(plugin_name="numalet", plugin_idx="42")
        ]
        # RunPodSandbox, StopPodSandbox, RemovePodSandbox, CreateContainer, PostStartContainer,
        # UpdateContainer, StopContainer, RemoveContainer: bit = number of the event - 1.
        assert runtime.masks == [0b110_1100_1111]
        assert started.registered
        assert started.connected
        assert daemon.told == [("synchronize", [], []), ("connection", True)]
        assert runtime.lost == []
    until(lambda: not started.connected and not started.registered)


def test_it_is_not_connected_before_it_is_synchronized(
    runtime: FakeRuntime, start: Start, daemon: Daemon
) -> None:
    """The runtime may first have to wait for a container that takes its time to end."""
    runtime.may_synchronize.clear()
    started = start()
    runtime.wait_for(lambda: bool(runtime.masks))
    assert (started.registered, started.connected, daemon.told) == (True, False, [])
    runtime.may_synchronize.set()
    until_served(runtime)
    assert started.connected


def test_a_runtime_that_refuses_us_is_asked_again(
    runtime: FakeRuntime, start: Start, log_lines: list[str]
) -> None:
    runtime.register_error = "invalid plugin name"
    start()
    runtime.wait_for(lambda: len(runtime.registrations) >= 3)
    refusals = [line for line in log_lines if "refuses RegisterPlugin: invalid plugin name" in line]
    assert len(refusals) == 1
    runtime.register_error = None
    until_served(runtime)


INVALID = {
    "an index of one digit": ("nri.sock", "numalet", "7"),
    "an index of three digits": ("nri.sock", "numalet", "007"),
    "the first index, which is for others": ("nri.sock", "numalet", "00"),
    "an index of other digits": ("nri.sock", "numalet", "٤٢"),
    "an index with a line end": ("nri.sock", "numalet", "42\n"),
    "no index": ("nri.sock", "numalet", ""),
    "a name with a slash": ("nri.sock", "a/b", "42"),
    "a name with a line end": ("nri.sock", "numalet\n", "42"),
    "a name with a letter of another script": ("nri.sock", "numalét", "42"),
    "no name": ("nri.sock", "", "42"),
    "no path": ("", "numalet", "42"),
    "a path that is too long": ("/" + "a" * 107, "numalet", "42"),
    "a path with a NUL": ("nri\0sock", "numalet", "42"),
}


@pytest.mark.parametrize(("path", "name", "index"), INVALID.values(), ids=INVALID)
def test_what_no_plugin_can_be_is_refused(path: str, name: str, index: str, daemon: Daemon) -> None:
    with pytest.raises(ConfigError, match="cannot be"):
        NriPlugin(path, name, index, daemon.callbacks)


@pytest.mark.parametrize("index", ["01", "10", "99"])
def test_name_and_index_are_told_as_given(
    runtime: FakeRuntime, daemon: Daemon, path: Path, index: str
) -> None:
    one = NriPlugin(str(path), "a.B_c+d-9", index, daemon.callbacks)
    runtime.wait_for(lambda: runtime.plugins == [f"{index}-a.B_c+d-9"])
    one.close()


# --- synchronization ------------------------------------------------------------------------------


def fill(runtime: FakeRuntime, count: int) -> None:
    runtime.pods = {f"p{n}": pod_message(f"p{n}") for n in range(count)}
    runtime.containers = {
        f"c{n}": container_message(f"c{n}", state=pb.CONTAINER_RUNNING) for n in range(2 * count)
    }


@pytest.mark.parametrize("part", [1, 7, 1000], ids="in parts of {} objects".format)
def test_everything_is_told_once_and_corrected(
    runtime: FakeRuntime, start: Start, daemon: Daemon, part: int
) -> None:
    fill(runtime, 20)
    runtime.objects_per_part = part
    daemon.correct = lambda pods, containers: {c.id: TWO for c in containers if c.id != "c5"}
    start()
    until_served(runtime)
    ((_, pods, containers),) = daemon.heard("synchronize")
    assert [pod.id for pod in pods] == [f"p{n}" for n in range(20)]
    assert [(c.id, c.stage) for c in containers] == [(f"c{n}", Stage.RUNNING) for n in range(40)]
    for container in runtime.containers.values():
        pinned = cpu_message(cpus="2-3", mems="1", quota=-1)
        expected = pb.LinuxResources() if container.id == "c5" else pinned
        assert container.linux.resources == expected
    assert runtime.lost == []


def test_a_thousand_corrections_in_one_answer(
    runtime: FakeRuntime, start: Start, daemon: Daemon
) -> None:
    fill(runtime, 1000)
    daemon.correct = lambda pods, containers: {c.id: TWO for c in containers}
    start()
    until_served(runtime)
    assert {c.linux.resources.cpu.cpus for c in runtime.containers.values()} == {"2-3"}


def test_a_container_that_cannot_be_corrected_does_not_cost_the_registration(
    runtime: FakeRuntime, start: Start, daemon: Daemon
) -> None:
    fill(runtime, 1)
    runtime.is_strict = True
    runtime.unchangeable = {"c0"}
    daemon.correct = lambda pods, containers: {"c0": TWO, "c1": TWO, "gone": TWO}
    start()
    until_served(runtime)
    assert runtime.containers["c1"].linux.resources.cpu.cpus == "2-3"
    assert runtime.lost == []


def test_a_correction_that_makes_no_sense_leaves_the_others(
    runtime: FakeRuntime, start: Start, daemon: Daemon, log_lines: list[str]
) -> None:
    fill(runtime, 1)
    daemon.correct = lambda pods, containers: {"c0": Cpuset(cpus=Bitmap()), "c1": TWO}
    start()
    until_served(runtime)
    assert runtime.containers["c0"].linux.resources == pb.LinuxResources()
    assert runtime.containers["c1"].linux.resources.cpu.cpus == "2-3"
    assert "container not corrected" in log_lines


def test_a_container_without_id_is_passed_over(
    runtime: FakeRuntime, start: Start, daemon: Daemon, log_lines: list[str]
) -> None:
    runtime.containers = {name: container_message(name) for name in ("", "c1")}
    start()
    until_served(runtime)
    ((_, _, containers),) = daemon.heard("synchronize")
    assert [container.id for container in containers] == ["c1"]
    assert "container without id container=main" in log_lines


TOO_MUCH = {
    "more pods and containers than there can be": ([19_998, 2], 0),
    "parts without end": ([99] * 200 + [0], 0),
    "more bytes than there can be": ([1] * 33, 4_150_000),
}


@pytest.mark.parametrize(("parts", "size"), TOO_MUCH.values(), ids=TOO_MUCH)
def test_a_state_without_end_ends_the_connection(
    runtime: FakeRuntime,
    start: Start,
    daemon: Daemon,
    log_lines: list[str],
    parts: list[int],
    size: int,
) -> None:
    """`parts` are numbers of containers, `size` is that of their annotations."""

    def talk(peer: socket.socket) -> None:
        register(peer)
        for n, containers in enumerate(parts):
            part = pb.SynchronizeRequest(more=True, containers=[container] * containers)
            peer.sendall(go_frames(TO_PLUGIN, 2 * n + 1, REQUEST, request("Synchronize", part)))
            _, answer = read_frame(peer)
            assert answer.endswith(b"\x12\x02\x10\x01")  # payload, 2 bytes: more = true
            answered.append(n)

    container, answered = container_message(annotations={"a": "x" * size}), list[int]()
    runtime.converse = talk
    start()
    reason = "the container runtime has more than 20,000 pods and containers"
    until(lambda: any(reason in line for line in log_lines))
    runtime.converse = None
    until_served(runtime)
    assert answered[: len(parts) - 1] == list(range(len(parts) - 1))
    assert len(parts) - 1 not in answered
    assert daemon.heard("synchronize") == [("synchronize", [], [])]


def register(peer: socket.socket) -> None:
    """Takes the plugin on."""
    number, payload = read_frame(peer)
    assert number == TO_RUNTIME
    assert payload[4:10] == struct.pack(">IBB", 1, REQUEST, 0)
    peer.sendall(go_frames(TO_RUNTIME, 1, RESPONSE, b""))


def request(method: str, message: Any = None, service: str = PLUGIN) -> bytes:
    payload = message.SerializeToString() if message is not None else b""
    return ttrpc.Request(service=service, method=method, payload=payload).SerializeToString()


# --- creation -------------------------------------------------------------------------------------


def test_a_container_is_created_with_its_cpus(
    runtime: FakeRuntime, served: NriPlugin, daemon: Daemon
) -> None:
    daemon.pin = lambda pod, container: TWO
    runtime.run_pod(pod_message(annotations={"cpuset-scheduler": "required"}))
    asked = cpu_message(shares=2048, quota=200_000, period=100_000)
    created = runtime.create(
        container_message(annotations={"gpus": "GPU-1"}, linux={"resources": asked})
    )
    expected = cpu_message(shares=2048, quota=-1, period=100_000, cpus="2-3", mems="1")
    assert created.linux.resources == expected
    assert daemon.heard("run pod", "create") == [
        (
            "run pod",
            RuntimePod(
                id="p1",
                uid="u1",
                pod="prod/train",
                annotations={"cpuset-scheduler": "required"},
            ),
        ),
        (
            "create",
            RuntimePod(
                id="p1",
                uid="u1",
                pod="prod/train",
                annotations={"cpuset-scheduler": "required"},
            ),
            RuntimeContainer(
                id="c1",
                pod_id="p1",
                name="main",
                stage=Stage.CREATING,
                annotations={"gpus": "GPU-1"},
                cpu_time=CpuTime(shares=2048, quota_us=200_000, period_us=100_000),
            ),
        ),
    ]


def test_a_container_that_is_none_of_our_business_stays_as_it_is(
    runtime: FakeRuntime, served: NriPlugin
) -> None:
    runtime.run_pod(pod_message())
    linux = {"resources": cpu_message(shares=2, cpus="0-1")}
    assert runtime.create(container_message(linux=linux)).linux == pb.LinuxContainer(**linux)


def test_a_refusal_fails_the_creation_with_its_sentence(
    runtime: FakeRuntime, served: NriPlugin, daemon: Daemon
) -> None:
    reason = "SingleNUMANode: node 0 has 3 free GPUs; asked 4 GPUs"
    daemon.pin = lambda pod, container: Refusal(reason=reason)
    runtime.run_pod(pod_message())
    with pytest.raises(CallFailedError, match=re.escape(reason)) as failed:
        runtime.create(container_message())
    assert failed.value.code != 12
    assert runtime.containers == {}
    assert runtime.plugins == [ME]
    assert daemon.told[-2:] == [("stop", "c1"), ("remove", "c1")]
    assert ("CreateContainer", "FAILED_PRECONDITION") in daemon.rpcs


def test_a_long_refusal_is_told_in_one_line(
    runtime: FakeRuntime, served: NriPlugin, daemon: Daemon
) -> None:
    daemon.pin = lambda pod, container: Refusal(reason="no\nroom\ud800" + "!" * 5_000_000)
    runtime.run_pod(pod_message())
    with pytest.raises(CallFailedError) as failed:
        runtime.create(container_message())
    assert str(failed.value) == "no?room?" + "!" * 992 + "…"


def test_an_answer_of_more_than_4096_bytes(
    runtime: FakeRuntime, served: NriPlugin, daemon: Daemon
) -> None:
    cpuset = Cpuset(cpus=Bitmap(range(0, 1024, 2)), mems=Bitmap(range(1, 1024, 2)))
    daemon.pin = lambda pod, container: cpuset
    runtime.run_pod(pod_message())
    cpu = runtime.create(container_message()).linux.resources.cpu
    assert cpu.cpus == ",".join(map(str, range(0, 1024, 2)))
    assert cpu.mems == ",".join(map(str, range(1, 1024, 2)))


@pytest.mark.parametrize("size", [4000, 4096, 70_000, 3_000_000])
def test_a_request_with_huge_annotations(
    runtime: FakeRuntime, served: NriPlugin, daemon: Daemon, size: int
) -> None:
    runtime.run_pod(pod_message())
    runtime.create(container_message(annotations={"a": "x" * size}))
    ((_, _, container),) = daemon.heard("create")
    assert container.annotations == {"a": "x" * size}


# --- updates --------------------------------------------------------------------------------------


@pytest.fixture
def running(runtime: FakeRuntime, served: NriPlugin) -> str:
    """A container that somebody wants changed."""
    runtime.run_pod(pod_message())
    runtime.create(container_message(linux={"resources": cpu_message(shares=4, cpus="2-3")}))
    runtime.start_container("c1")
    return "c1"


def test_an_update_keeps_our_cpus(runtime: FakeRuntime, running: str, daemon: Daemon) -> None:
    daemon.keep = lambda pod, container, asked: TWO
    asked = cpu_message(shares=8, quota=50_000, period=100_000, cpus="0-7")
    asked.memory.limit.value = 1 << 30
    runtime.update(running, asked)
    expected = cpu_message(shares=8, quota=-1, period=100_000, cpus="2-3", mems="1")
    expected.memory.limit.value = 1 << 30
    assert runtime.containers[running].linux.resources == expected
    ((_, pod, container, told),) = daemon.heard("update")
    assert pod == POD
    assert (container.id, container.stage) == ("c1", Stage.RUNNING)
    assert container.cpus == Bitmap([2, 3])
    assert told == Asked(
        cpu_time=CpuTime(shares=8, quota_us=50_000, period_us=100_000),
        memory_bytes=1 << 30,
        cpus=Bitmap(range(8)),
    )


def test_an_update_that_is_none_of_our_business_goes_through(
    runtime: FakeRuntime, running: str
) -> None:
    runtime.update(running, cpu_message(shares=8, cpus="0-7"))
    assert runtime.containers[running].linux.resources == cpu_message(shares=8, cpus="0-7")


def test_numbers_that_are_not_asked_for(runtime: FakeRuntime, running: str, daemon: Daemon) -> None:
    """Kubelet's CPU manager asks for a cpuset only; CRI has 0 for the rest."""
    runtime.update(running, cpu_message(shares=0, quota=0, period=0, cpus="0"))
    ((_, _, _, told),) = daemon.heard("update")
    assert told == Asked(cpu_time=CpuTime(), cpus=Bitmap([0]))


# --- events ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("nri", VERSIONS)
def test_a_life_is_told_in_order(path: Path, start: Start, daemon: Daemon, nri: Any) -> None:
    """Up to NRI 0.11 as state changes, since 0.12 as calls of their own."""
    with FakeRuntime(path, nri) as runtime:
        start()
        until_served(runtime)
        runtime.run_pod(pod_message())
        runtime.create(container_message())
        runtime.start_container("c1")
        runtime.stop_container("c1")
        runtime.remove_container("c1")
        runtime.remove_pod("p1")
        assert daemon.told[2:] == [
            ("run pod", POD),
            ("create", POD, CONTAINER),
            ("start", "c1"),
            ("stop", "c1"),
            ("remove", "c1"),
            ("end pod", "p1"),
            ("end pod", "p1"),
        ]
        assert ("StateChange" in runtime.calls) == (nri != "0.12")
        assert {code for _, code in daemon.rpcs} == {"OK"}
        assert runtime.plugins == [ME]


STATE_CHANGES = {
    "an event that we know": pb.StateChangeEvent(event=pb.RUN_POD_SANDBOX, pod=pod_message()),
    "an event of no interest": pb.StateChangeEvent(event=pb.POST_UPDATE_CONTAINER),
    "an event that comes as a call": pb.StateChangeEvent(event=pb.CREATE_CONTAINER),
    "an event without pod and container": pb.StateChangeEvent(event=pb.REMOVE_CONTAINER),
    "no event": pb.StateChangeEvent(),
    "an event of the future": pb.StateChangeEvent(event=99),
}


@pytest.mark.parametrize("event", STATE_CHANGES.values(), ids=STATE_CHANGES)
@pytest.mark.parametrize("fails", [False, True], ids=["", "whose handling crashes"])
def test_a_state_change_always_succeeds(
    runtime: FakeRuntime,
    served: NriPlugin,
    daemon: Daemon,
    event: pb.StateChangeEvent,
    fails: bool,
) -> None:
    """An error would fail every pod of the node."""

    def crash(event: str) -> None:
        raise RuntimeError("a bug")

    daemon.hear = crash if fails else daemon.hear
    assert runtime.ask("StateChange", event.SerializeToString()) == ttrpc.Response()


@pytest.mark.parametrize(
    "method",
    ["StateChange", "RunPodSandbox", "StopContainer", "CreateContainer", "UpdateContainer"],
)
def test_a_call_that_is_not_understood_changes_nothing(
    runtime: FakeRuntime, served: NriPlugin, daemon: Daemon, log_lines: list[str], method: str
) -> None:
    for _ in range(3):
        assert runtime.ask(method, b"\xff\xff\xff") == ttrpc.Response()
    assert log_lines.count(f"call not understood method={method} bytes=3") == 1
    assert daemon.rpcs[-1] == (method, "INVALID_ARGUMENT")


def test_not_even_noise_subscribes_us_to_everything(
    runtime: FakeRuntime, served: NriPlugin
) -> None:
    """No mask would mean all events, also those whose failure fails creations."""
    answer = runtime.ask("Configure", b"\xff")
    assert pb.ConfigureResponse.FromString(answer.payload).events == runtime.masks[0]


UNKNOWN = {
    "an event of no interest": ("PostUpdateContainer", PLUGIN),
    "a call of the future": ("ThinkTwice", PLUGIN),
    "another service": ("CreateContainer", "nri.pkg.api.v1beta1.Plugin"),
    "no name": ("", ""),
}


@pytest.mark.parametrize(("method", "service"), UNKNOWN.values(), ids=UNKNOWN)
def test_unknown_calls_are_not_implemented(
    runtime: FakeRuntime, served: NriPlugin, method: str, service: str
) -> None:
    """The runtime relies on that code to fall back to StateChange."""
    assert runtime.ask(method, b"", service).status.code == 12


def test_shutdown_is_answered(runtime: FakeRuntime, served: NriPlugin) -> None:
    assert runtime.ask("Shutdown", b"") == ttrpc.Response()
    assert runtime.plugins == [ME]


# --- bugs and delays of our own -------------------------------------------------------------------


def test_a_bug_leaves_the_container_alone(
    runtime: FakeRuntime, running: str, daemon: Daemon, log_lines: list[str]
) -> None:
    def crash(*facts: object) -> None:
        raise OSError("a bug")

    daemon.pin = daemon.keep = daemon.hear = crash
    assert runtime.create(container_message("c2")).linux == pb.LinuxContainer()
    runtime.update(running, cpu_message(shares=16))
    runtime.stop_container(running)
    assert runtime.containers[running].linux.resources == cpu_message(shares=16, cpus="2-3")
    assert runtime.plugins == [ME]
    for method in ("CreateContainer", "UpdateContainer", "StopContainer"):
        assert f"call not answered method={method}" in log_lines
        assert (method, "INTERNAL") in daemon.rpcs


def test_an_empty_cpuset_is_never_told(
    runtime: FakeRuntime, running: str, daemon: Daemon, log_lines: list[str]
) -> None:
    """It would mean "no change" there."""
    daemon.pin = lambda pod, container: Cpuset(cpus=Bitmap(), mems=Bitmap([0]))
    assert runtime.create(container_message("c2")).linux == pb.LinuxContainer()
    assert "call not answered method=CreateContainer" in log_lines


def test_a_bug_in_synchronize_keeps_the_connection(
    runtime: FakeRuntime, start: Start, daemon: Daemon, log_lines: list[str]
) -> None:
    fill(runtime, 1)
    daemon.correct = lambda pods, containers: 1 / 0  # type: ignore[return-value]
    started = start()
    until_served(runtime)
    assert started.connected
    assert "call not answered method=Synchronize" in log_lines


def test_a_bug_in_what_is_told_of_connections_keeps_them(
    runtime: FakeRuntime, start: Start, daemon: Daemon
) -> None:
    def crash(event: str) -> None:
        raise RuntimeError("a bug")

    daemon.hear = crash
    start()
    until_served(runtime)
    runtime.restart()
    until_served(runtime)
    assert daemon.heard("connection") == [("connection", on) for on in (True, False, True)]


def test_a_bug_in_what_counts_calls_costs_nothing(
    runtime: FakeRuntime, served: NriPlugin, daemon: Daemon, log_lines: list[str]
) -> None:
    daemon.rpcs = None  # type: ignore[assignment]
    assert runtime.ask("Shutdown", b"") == ttrpc.Response()
    assert "call not counted" in log_lines


def test_an_answer_that_is_too_large_is_an_error(
    runtime: FakeRuntime, start: Start, daemon: Daemon
) -> None:
    """The runtime would drop the connection in the middle of it."""
    daemon.correct = lambda pods, containers: {"c" * 5_000_000: TWO}
    start()
    runtime.wait_for(lambda: bool(runtime.lost))
    daemon.correct = lambda pods, containers: {}
    until_served(runtime)
    assert re.fullmatch(r"an answer of 5,000,\d\d\d bytes", runtime.lost[0])


def test_a_late_answer_costs_the_connection_and_it_comes_back(
    path: Path, start: Start, daemon: Daemon
) -> None:
    """The runtime goes on without us, and synchronizes us when we are back."""
    answering = threading.Event()

    def wait(pod: RuntimePod, container: RuntimeContainer) -> Cpuset:
        assert answering.wait(PATIENCE_S)
        return TWO

    with FakeRuntime(path) as runtime:
        start()
        until_served(runtime)
        runtime.run_pod(pod_message())
        daemon.pin = wait
        runtime.request_timeout_s = 0.1
        assert runtime.create(container_message()).linux == pb.LinuxContainer()
        assert runtime.plugins == []
        assert runtime.lost == ["CreateContainer: deadline exceeded"]
        runtime.request_timeout_s = PATIENCE_S
        daemon.correct = lambda pods, containers: {c.id: TWO for c in containers}
        answering.set()
        until_served(runtime)
        assert runtime.containers["c1"].linux.resources.cpu.cpus == "2-3"
        assert daemon.heard("connection") == [("connection", on) for on in (True, False, True)]


# --- runtimes that come and go --------------------------------------------------------------------


def test_the_socket_may_come_later(path: Path, start: Start, log_lines: list[str]) -> None:
    started = start()
    absent = f'no container runtime socket={path} reason="there is no such socket'
    until(lambda: any(line.startswith(absent) for line in log_lines))
    assert (started.registered, started.connected) == (False, False)
    with FakeRuntime(path) as runtime:
        until_served(runtime)
    assert sum(line.startswith(absent) for line in log_lines) <= 2  # before, and after


@pytest.mark.parametrize("how", ["restart", "kill and start", "stop and start"])
def test_a_runtime_that_restarts_gets_us_back(
    runtime: FakeRuntime, served: NriPlugin, daemon: Daemon, how: str
) -> None:
    fill(runtime, 3)
    for _ in range(3):
        if how == "restart":
            runtime.restart()
        else:
            (runtime.kill if how.startswith("kill") else runtime.stop)()
            until(lambda: not served.connected)
            runtime.start()
        until_served(runtime)
        assert served.connected
    assert [len(each[2]) for each in daemon.heard("synchronize")] == [0, 6, 6, 6]
    assert daemon.heard("connection") == [("connection", on) for on in (True, *(False, True) * 3)]
    assert len(runtime.registrations) == 4


def test_the_next_runtime_is_found_at_once(
    runtime: FakeRuntime, served: NriPlugin, monkeypatch: pytest.MonkeyPatch, daemon: Daemon
) -> None:
    """However long the pause is, a new socket ends it."""
    monkeypatch.setattr(plugin, "_FIRST_PAUSE_S", 3600.0)
    monkeypatch.setattr(plugin, "_LONGEST_PAUSE_S", 3600.0)
    runtime.kill()
    until(lambda: not served.connected)
    runtime.start()
    until_served(runtime)


def test_the_same_trouble_is_told_once(
    runtime: FakeRuntime, start: Start, log_lines: list[str]
) -> None:
    runtime.converse = hang_up
    start()
    runtime.wait_for(lambda: runtime.connections >= 5)
    assert [line for line in log_lines if line.startswith("no container runtime")] == [
        f"no container runtime socket={runtime.path} "
        'reason="the container runtime closed the connection"'
    ]


@pytest.mark.parametrize(
    ("failures", "longest_s"),
    [(1, 0.1), (2, 0.2), (3, 0.4), (6, 3.2), (7, 5.0), (8, 5.0), (10**9, 5.0)],
)
def test_pauses_grow_to_five_seconds(failures: int, longest_s: float) -> None:
    assert plugin.pause_s(failures, 1.0) == pytest.approx(longest_s)
    assert plugin.pause_s(failures, 0.0) == pytest.approx(longest_s / 2)


def test_a_directory_that_nobody_may_enter_is_like_none(
    tmp_path: Path, daemon: Daemon, log_lines: list[str]
) -> None:
    (tmp_path / "file").touch()
    one = NriPlugin(str(tmp_path / "file" / "nri.sock"), "numalet", "42", daemon.callbacks)
    until(lambda: any("Not a directory" in line for line in log_lines))
    one.close()


# --- the end --------------------------------------------------------------------------------------


def wait_for_end(peer: socket.socket) -> None:
    while peer.recv(1 << 16):
        pass


def test_closing_without_a_socket(start: Start, daemon: Daemon) -> None:
    start().close()
    assert daemon.told == []


def test_closing_while_nobody_serves_the_socket(
    runtime: FakeRuntime, start: Start, log_lines: list[str]
) -> None:
    runtime.kill()
    started = start()
    until(lambda: any("nobody serves the socket" in line for line in log_lines))
    started.close()


def test_closing_while_a_registration_is_not_answered(runtime: FakeRuntime, start: Start) -> None:
    runtime.converse = wait_for_end
    started = start()
    runtime.wait_for(lambda: runtime.connections == 1)
    started.close()


def test_closing_before_the_synchronization(runtime: FakeRuntime, start: Start) -> None:
    runtime.may_synchronize.clear()
    started = start()
    runtime.wait_for(lambda: bool(runtime.masks))
    started.close()
    assert not started.registered


def test_closing_ends_the_connection_and_nobody_comes_back(
    runtime: FakeRuntime, served: NriPlugin, daemon: Daemon, log_lines: list[str]
) -> None:
    served.close()
    runtime.wait_for(lambda: runtime.plugins == [])
    assert not served.connected
    assert daemon.told[-1] == ("connection", False)
    assert runtime.connections == 1
    assert not any(line.startswith("no container runtime") for line in log_lines)
    served.close()


def test_closing_does_not_wait_for_an_answer_that_hangs(
    runtime: FakeRuntime, served: NriPlugin, daemon: Daemon
) -> None:
    asked, answering = threading.Event(), threading.Event()

    def hang(pod: RuntimePod, container: RuntimeContainer) -> None:
        asked.set()
        assert answering.wait(PATIENCE_S)

    daemon.pin = hang
    runtime.run_pod(pod_message())
    creating = threading.Thread(target=runtime.create, args=(container_message(),))
    creating.start()
    assert asked.wait(PATIENCE_S)
    served.close()
    assert not answering.is_set()
    answering.set()
    creating.join()


# --- peers that misbehave -------------------------------------------------------------------------


def test_answers_by_stream_id(runtime: FakeRuntime, start: Start) -> None:
    """Ids are odd and rise; what is no call is passed over."""
    calls = [
        (TO_PLUGIN, 1, REQUEST, request("Shutdown")),
        (TO_PLUGIN, 1, REQUEST, request("Shutdown")),
        (TO_PLUGIN, 7, REQUEST, request("Shutdown")),
        (TO_PLUGIN, 3, REQUEST, request("Shutdown")),
        (TO_PLUGIN, 8, REQUEST, request("Shutdown")),
        (TO_PLUGIN, 0, REQUEST, request("Shutdown")),
        (TO_PLUGIN, 9, REQUEST, b"\xff\xff no request"),
        (TO_PLUGIN, 11, REQUEST, b""),
        (TO_PLUGIN, 13, RESPONSE, request("Shutdown")),
        (TO_PLUGIN, 15, 3, request("Shutdown")),
        (TO_PLUGIN, 17, 0, request("Shutdown")),
        (TO_RUNTIME, 19, REQUEST, request("Shutdown")),
        (TO_RUNTIME, 1, RESPONSE, b""),
        (TO_RUNTIME, 3, RESPONSE, b"\xff"),
        (0, 21, REQUEST, request("Shutdown")),
        (3, 23, REQUEST, request("Shutdown")),
        (TO_PLUGIN, (1 << 32) - 1, REQUEST, request("Shutdown")),
    ]
    answers = list[tuple[int, int]]()

    def talk(peer: socket.socket) -> None:
        register(peer)
        peer.sendall(b"".join(go_frames(*call) for call in calls))
        while not answers or answers[-1][0] != (1 << 32) - 1:
            number, payload = read_frame(peer)
            assert number == TO_PLUGIN
            stream, kind = struct.unpack(">IB", payload[4:9])
            assert kind == RESPONSE
            answers.append((stream, ttrpc.Response.FromString(payload[10:]).status.code))
        runtime.converse = None

    runtime.converse = talk
    start()
    until_served(runtime)
    assert answers == [
        (1, 0),
        (1, 3),
        (7, 0),
        (3, 3),
        (8, 3),
        (0, 3),
        (9, 3),
        (11, 12),
        ((1 << 32) - 1, 0),
    ]


def say(data: bytes) -> Callable[[socket.socket], None]:
    def converse(peer: socket.socket) -> None:
        register(peer)
        peer.sendall(data)
        wait_for_end(peer)

    return converse


def answer(data: bytes, stream: int = 1) -> Callable[[socket.socket], None]:
    """To RegisterPlugin."""

    def converse(peer: socket.socket) -> None:
        read_frame(peer)
        peer.sendall(go_frames(TO_RUNTIME, stream, RESPONSE, data))
        wait_for_end(peer)

    return converse


def dribble(peer: socket.socket) -> None:
    """One byte now and then, which is never the last."""
    register(peer)
    peer.sendall(struct.pack(">II", TO_PLUGIN, 1 << 20))
    while True:
        peer.sendall(b"x")
        threading.Event().wait(0.01)


def talk_and_never_listen(peer: socket.socket) -> None:
    register(peer)
    for stream in itertools.count(1, 2):
        peer.sendall(go_frames(TO_PLUGIN, stream, REQUEST, request("ThinkTwice")))


def hang_up(peer: socket.socket) -> None:
    read_frame(peer)


def hang_up_in_a_head(peer: socket.socket) -> None:
    register(peer)
    peer.sendall(bytes(7))


HOSTILE: dict[str, tuple[Callable[[socket.socket], None], str]] = {
    "hangs up before it reads": (lambda peer: None, "closed the connection|broke: "),
    "hangs up before it answers": (hang_up, "closed the connection"),
    "hangs up in the head of a frame": (hang_up_in_a_head, "closed the connection"),
    "sends ones": (say(b"\xff" * 64), "sent a frame of 4,294,967,295 bytes"),
    "speaks HTTP": (say(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "sent a frame of 791,752,241 bytes"),
    "sends a message that is too large": (
        say(struct.pack(">IIIIBB", 1, 10, 5 << 20, 1, 1, 0)),
        "sent a message of 5,242,880 bytes",
    ),
    "stops in a frame": (say(struct.pack(">II", 1, 10)), "stopped in the middle of a message"),
    "stops in a message": (
        say(struct.pack(">IIIIBB", 1, 10, 100, 1, 1, 0)),
        "stopped in the middle of a message",
    ),
    "stops between frames of a message": (
        say(go_frames(1, 1, 1, bytes(5000))[: 8 + 4096]),
        "stopped in the middle of a message",
    ),
    "never gets to the end": (dribble, "stopped in the middle of a message"),
    "does not listen": (talk_and_never_listen, "does not read what it is sent"),
    "does not answer": (wait_for_end, "does not answer RegisterPlugin within 0.2 s"),
    "answers another call": (answer(b"", 3), "does not answer RegisterPlugin within 0.2 s"),
    "answers with noise": (answer(b"\xff\xff"), "answer to RegisterPlugin makes no sense"),
    "answers with noise inside": (
        answer(ttrpc.Response(payload=b"\xff").SerializeToString()),
        "answer to RegisterPlugin makes no sense",
    ),
    "refuses at length": (
        answer(ttrpc.Response(status={"code": 2, "message": "no\n" * 10**6}).SerializeToString()),
        r"refuses RegisterPlugin: (no\?){333}n…",
    ),
}


@pytest.mark.parametrize(("converse", "trouble"), HOSTILE.values(), ids=HOSTILE)
def test_a_peer_that_misbehaves_is_left_and_tried_again(
    runtime: FakeRuntime,
    start: Start,
    daemon: Daemon,
    log_lines: list[str],
    converse: Callable[[socket.socket], None],
    trouble: str,
) -> None:
    runtime.converse = converse
    with pytest.MonkeyPatch.context() as bounds:
        bounds.setattr(connection, "_SEND_S", 0.2)
        bounds.setattr(connection, "_WHOLE_S", 0.2)
        bounds.setattr(plugin, "_REGISTER_S", 0.2)
        started = start()
        until(lambda: any(re.search(trouble, line) for line in log_lines))
    assert not started.connected
    assert daemon.told == []
    runtime.converse = None
    until_served(runtime)


# --- messages ↔ values ----------------------------------------------------------------------------


def test_all_that_is_known_of_a_pod() -> None:
    resources = cpu_message(shares=1024, quota=400_000, period=100_000)
    resources.memory.limit.value = 8 << 30
    message = pod_message(
        annotations={"a": "1"},
        labels={"b": "2"},
        linux={
            "cgroup_parent": "/kubepods/podu1",
            "pod_resources": resources,
            "resources": cpu_message(shares=2),  # those of the sandbox's own container
        },
    )
    assert to_pod(message) == RuntimePod(
        id="p1",
        uid="u1",
        pod="prod/train",
        annotations={"a": "1"},
        cgroup_parent="/kubepods/podu1",
        cpu_time=CpuTime(shares=1024, quota_us=400_000, period_us=100_000),
        memory_bytes=8 << 30,
    )


def test_all_that_is_known_of_a_container() -> None:
    resources = cpu_message(shares=1024, quota=-1, period=100_000, cpus="0-1,4", mems="1")
    resources.memory.limit.value = 1 << 30
    message = container_message(
        state=pb.CONTAINER_RUNNING,
        annotations={"a": "1"},
        args=["sleep"],
        env=["PATH=/bin", "NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_VISIBLE_DEVICES=GPU-1,GPU-2"],
        linux={
            "resources": resources,
            "devices": [{"path": "/dev/nvidia0", "type": "c"}, {"path": "/dev/nvidiactl"}],
        },
    )
    assert to_container(message) == RuntimeContainer(
        id="c1",
        pod_id="p1",
        name="main",
        stage=Stage.RUNNING,
        annotations={"a": "1"},
        cpu_time=CpuTime(shares=1024, quota_us=-1, period_us=100_000),
        memory_bytes=1 << 30,
        cpus=Bitmap([0, 1, 4]),
        mems=Bitmap([1]),
        devices=("/dev/nvidia0", "/dev/nvidiactl"),
        visible_devices="GPU-1,GPU-2",
    )


STAGES = [
    (pb.CONTAINER_UNKNOWN, Stage.RUNNING),
    (pb.CONTAINER_CREATED, Stage.CREATED),
    (pb.CONTAINER_PAUSED, Stage.RUNNING),
    (pb.CONTAINER_RUNNING, Stage.RUNNING),
    (pb.CONTAINER_STOPPED, Stage.STOPPED),
    (99, Stage.RUNNING),
]


@pytest.mark.parametrize(("state", "stage"), STAGES)
def test_a_container_that_may_run_runs(state: Any, stage: Stage) -> None:
    assert to_container(container_message(state=state)).stage is stage


@pytest.mark.parametrize(
    ("env", "visible"),
    [
        ([], None),
        (["NVIDIA_VISIBLE_DEVICES=void"], "void"),
        (["NVIDIA_VISIBLE_DEVICES="], ""),
        (["NVIDIA_VISIBLE_DEVICES"], None),
        (["NVIDIA_VISIBLE_DEVICES_=a", "MY_NVIDIA_VISIBLE_DEVICES=b"], None),
        (["NVIDIA_VISIBLE_DEVICES=a=b"], "a=b"),
    ],
)
def test_visible_devices(env: list[str], visible: str | None) -> None:
    assert to_container(container_message(env=env)).visible_devices == visible


NO_LISTS = {
    "words": "all of them",
    "a range backwards": "3-1",
    "an id that no machine has": "0-4096",
    "a list without end": "0," * 20_000 + "0",
    "a negative id": "-1",
}


@pytest.mark.parametrize("text", NO_LISTS.values(), ids=NO_LISTS)
def test_a_cpuset_that_is_no_list_is_none_and_a_warning(text: str, log_lines: list[str]) -> None:
    container = to_container(container_message(linux={"resources": cpu_message(cpus=text)}))
    assert (container.cpus, container.mems) == (Bitmap(), Bitmap())
    assert len(log_lines) == 1
    assert log_lines[0].startswith("cpuset not understood of=cpus reason=")
    assert len(log_lines[0]) < 300


@pytest.mark.parametrize("limit", [0, -1])
def test_no_memory_limit(limit: int) -> None:
    resources = pb.LinuxResources(memory={"limit": {"value": limit}})
    assert to_container(container_message(linux={"resources": resources})).memory_bytes is None


ids = st.sets(st.integers(0, 1023), max_size=40)


@given(cpus=ids.filter(bool), mems=ids, lift_quota=st.booleans(), ignore=st.booleans())
def test_a_cpuset_is_told_as_the_kernel_spells_it(
    cpus: set[int], mems: set[int], lift_quota: bool, ignore: bool
) -> None:
    cpuset = Cpuset(cpus=Bitmap(cpus), mems=Bitmap(mems), lift_quota=lift_quota)
    expected = cpu_message(cpus=kernel_list(cpus), mems=kernel_list(mems))
    if lift_quota:
        expected.cpu.quota.value = -1
    assert to_adjustment(cpuset) == pb.ContainerAdjustment(linux={"resources": expected})
    assert to_update("c1", cpuset, ignore) == pb.ContainerUpdate(
        container_id="c1", linux={"resources": expected}, ignore_failure=ignore
    )


def kernel_list(numbers: set[int]) -> str:
    """As the kernel prints a set, by its runs."""
    texts = []
    for first in sorted(n for n in numbers if n - 1 not in numbers):
        last = first
        while last + 1 in numbers:
            last += 1
        texts.append(str(first) if first == last else f"{first}-{last}")
    return ",".join(texts)
