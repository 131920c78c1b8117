"""agent.edge.nvml.watch_driver against the real pynvml and a fake of the driver's library.

A watch runs in a thread, as in the daemon. What it tells is waited for, never slept for.
"""

import contextlib
import dataclasses
import os
import pickle
import select
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from agent.core.discovery import DriverReading
from agent.core.health import Probe, Sighting
from agent.edge.nvml import Pace, read_driver, watch_driver
from agent.edge.nvml.child import Child, Silence, receive, stuck
from agent.fakes import nvml as fake

DEADLINE_S = 20.0
"""After which a test gives up; nothing waits for it to pass."""

FOUR = [
    fake.FakeGpu(bdf=f"0000:{0x1A + i:02x}:00.0", uuid=f"GPU-{i}", memory=80 << 30, mig=0)
    for i in range(4)
]
UUIDS = [f"GPU-{i}" for i in range(4)]
MEMORY = "nvmlDeviceGetMemoryInfo"
LOST = f"the GPU fell off the bus or was lost; it needs a reset or the machine a reboot ({MEMORY})"
SILENT = f"the driver did not answer {MEMORY} within 1 s"
MIG = "MIG is enabled: it cannot be given out as a whole GPU"

PATIENT = Pace(probe_s=0.02, silent_s=60, renew_s=600)
"""Probes often; is never too impatient for a slow machine, and never begins a new session."""
BRISK = dataclasses.replace(PATIENT, renew_s=0)
"""Ends the session as soon as a new one is worth while."""
SHARP = dataclasses.replace(PATIENT, silent_s=1)
"""Notices silence soon."""

Message = DriverReading | Sighting


@dataclass
class Watch:
    """A watch in a thread, and what it told; `why` is what it returned."""

    library: str
    pace: Pace
    stop: int
    told: list[Message] = field(default_factory=list)
    why: str | None = "it still runs"
    news: threading.Condition = field(default_factory=threading.Condition)
    thread: threading.Thread = field(default_factory=threading.Thread)

    def run(self) -> None:
        why = watch_driver(self.library, self.hear, self.stop, pace=self.pace)
        with self.news:
            self.why = why
            self.news.notify_all()

    def hear(self, message: Message) -> None:
        with self.news:
            self.told.append(message)
            self.news.notify_all()

    def wait(self, is_met: Callable[[], bool]) -> None:
        with self.news:
            assert self.news.wait_for(is_met, DEADLINE_S), self.told[-3:]

    def end(self) -> str | None:
        """What the watch returns when it ends by itself."""
        self.thread.join(DEADLINE_S)
        assert not self.thread.is_alive()
        return self.why

    def sightings(self) -> list[Sighting]:
        return [message for message in self.told if isinstance(message, Sighting)]

    def faults(self) -> dict[str, str | None]:
        """The last that was told of each GPU."""
        return {p.uuid: p.fault for sighting in self.sightings() for p in sighting.probes}

    def xids(self) -> list[tuple[str | None, int]]:
        return [(xid.uuid, xid.code) for sighting in self.sightings() for xid in sighting.xids]

    def wait_for_faults(self, **faults: str | None) -> None:
        """Until the GPUs are told as these faults say, all others as sound. GPU-1 is `GPU1`."""
        expected = {uuid: faults.get(uuid.replace("-", "")) for uuid in UUIDS}
        self.wait(lambda: self.faults() == expected)

    def wait_for_rounds(self, count: int = 3) -> None:
        """Until all GPUs have been told so often again."""
        start = len(self.sightings())
        self.wait(
            lambda: sum(len(s.probes) == len(UUIDS) for s in self.sightings()[start:]) >= count
        )


Start = Callable[..., Watch]


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "nvml.txt"
    monkeypatch.setenv(fake.ENVIRONMENT, str(path))
    return path


@pytest.fixture
def start(library: str, state: Path, no_leftovers: None) -> Iterator[Start]:
    """Starts a watch of a driver that the given lines describe, or the file as it is."""
    watches: list[Watch] = []

    def start_watch(
        *lines: str, gpus: list[fake.FakeGpu] | None = FOUR, pace: Pace = PATIENT
    ) -> Watch:
        if gpus is not None:
            fake.write_state(state, fake.format_state(gpus, lines))
        watch = Watch(library=library, pace=pace, stop=os.eventfd(0))
        watch.thread = threading.Thread(target=watch.run)
        watch.thread.start()
        watches.append(watch)
        return watch

    yield start_watch
    for watch in watches:
        os.eventfd_write(watch.stop, 1)
        watch.thread.join(DEADLINE_S)
        os.close(watch.stop)
        assert not watch.thread.is_alive()


def pipes() -> set[str]:
    """Those that this process holds; other descriptors may be other threads'."""
    held = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            held.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    return {name for name in held if name.startswith("pipe:")}


@pytest.fixture
def no_leftovers() -> Iterator[None]:
    """Fails the test that leaves a child, a zombie or a pipe behind."""
    before = pipes()
    yield
    assert pipes() <= before
    with pytest.raises(ChildProcessError):
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)


def child_of(process: psutil.Process) -> psutil.Process:
    (child,) = process.children()
    return child


# --- the reading, and GPUs that are sound ---------------------------------------------------------


def test_the_reading_comes_first_and_then_sound_probes_of_all_gpus(
    start: Start, library: str
) -> None:
    watch = start(fake.ancestor(0, 1, 20))
    watch.wait_for_rounds()
    assert watch.told[0] == read_driver(library)
    assert set(watch.sightings()) == {
        Sighting(probes=tuple(Probe(uuid=uuid, fault=None) for uuid in UUIDS))
    }


def test_the_process_that_watches_loads_the_library_and_ours_does_not(start: Start) -> None:
    watch = start()
    watch.wait_for_rounds(1)
    maps = Path(f"/proc/{child_of(psutil.Process()).pid}/maps").read_text()
    assert fake.SONAME in maps
    assert fake.SONAME not in Path("/proc/self/maps").read_text()


def test_a_driver_that_cannot_be_asked(start: Start, state: Path) -> None:
    watch = start(gpus=None)
    problem = "the NVIDIA driver is not loaded (nvmlInitWithFlags)"
    assert watch.end() == problem
    assert watch.told == [DriverReading(problem=problem)]


def test_a_library_that_crashes_in_the_reading(start: Start) -> None:
    watch = start(fake.crash("nvmlDeviceGetUUID", 2))
    problem = "the process that asked the GPU driver ended without an answer: signal 6, Aborted"
    assert watch.end() == problem
    assert watch.told == [DriverReading(problem=problem)]


def test_a_driver_that_holds_too_many_processes(start: Start) -> None:
    """A process that even SIGKILL does not end cannot be made here; sleepers stand in."""
    sleepers = [subprocess.Popen(["sleep", "600"]) for _ in range(8)]
    stuck.update(sleeper.pid for sleeper in sleepers)
    try:
        watch = start()
        problem = "the GPU driver is not asked again: 8 processes are stuck in it"
        assert watch.end() == problem
        assert watch.told == [DriverReading(problem=problem)]
    finally:
        stuck.clear()
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()


# --- GPUs that fail -------------------------------------------------------------------------------


def test_a_gpu_that_is_lost_and_comes_back(start: Start, state: Path) -> None:
    watch = start()
    watch.wait_for_rounds(1)
    line = fake.fail("*", 15, 1)
    fake.add_line(state, line)
    watch.wait_for_faults(GPU1=LOST)
    lost = next(p for s in watch.sightings() for p in s.probes if p.fault is not None)
    assert lost == Probe(uuid="GPU-1", fault=LOST, gone=True)
    fake.remove_line(state, line)
    watch.wait_for_faults()


def test_a_lost_gpu_is_worth_a_new_session(start: Start, state: Path) -> None:
    watch = start(pace=BRISK)
    watch.wait_for_rounds()
    fake.add_line(state, fake.fail(MEMORY, 15, 1))
    assert watch.end() == "the GPU driver is asked anew: a fault came or went at GPU 1"
    assert watch.faults() == {"GPU-0": None, "GPU-1": LOST, "GPU-2": None, "GPU-3": None}


def test_a_gpu_without_a_name_is_worth_a_new_session(start: Start) -> None:
    watch = start(fake.fail("nvmlDeviceGetHandleByIndex", 15, 2), pace=BRISK)
    assert watch.end() == "the GPU driver is asked anew: a fault came or went at GPU 2"
    assert {probe.uuid for sighting in watch.sightings() for probe in sighting.probes} <= {
        "GPU-0", "GPU-1", "GPU-3",
    }  # fmt: skip


def test_a_machine_without_gpus_is_worth_a_new_session(start: Start) -> None:
    watch = start(gpus=[], pace=BRISK)
    assert watch.end() == "the GPU driver is asked anew: it listed no GPUs"
    assert watch.told[0] == DriverReading()


@pytest.mark.parametrize("call", ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetName", MEMORY])
def test_a_gpu_is_sound_again_when_it_tells_all_that_it_must(
    start: Start, state: Path, call: str
) -> None:
    watch = start()
    watch.wait_for_rounds(1)
    fake.write_state(state, fake.format_state(FOUR, [fake.fail("*", 15, 3)]))
    watch.wait_for_faults(GPU3=LOST)
    fake.write_state(state, fake.format_state(FOUR, [fake.fail(call, 16, 3)]))
    watch.wait_for_faults(GPU3=f"the GPU needs a reset ({call})")
    fake.write_state(state, fake.format_state(FOUR))
    watch.wait_for_faults()


def test_a_gpu_that_was_lost_in_the_reading(start: Start, state: Path) -> None:
    line = fake.fail("nvmlDeviceGetName", 15, 1)
    watch = start(line)
    watch.wait_for_faults(GPU1=LOST.replace(MEMORY, "nvmlDeviceGetName"))
    fake.remove_line(state, line)
    watch.wait_for_faults()


@pytest.mark.parametrize("code", [3, 13, 999])
def test_a_gpu_that_never_told_its_memory_is_not_lost(start: Start, code: int) -> None:
    watch = start(fake.fail(MEMORY, code, 0))
    watch.wait_for_rounds()
    watch.wait_for_faults()


@pytest.mark.parametrize("code", [3, 999])
def test_a_gpu_that_tells_its_memory_no_more_is_lost(start: Start, state: Path, code: int) -> None:
    watch = start()
    watch.wait_for_rounds(1)
    fake.add_line(state, fake.fail(MEMORY, code, 0))
    watch.wait(lambda: watch.faults()["GPU-0"] is not None)


def test_mig_is_a_fault_while_it_is_enabled(start: Start, state: Path) -> None:
    gpus = [dataclasses.replace(FOUR[0], mig=1), *FOUR[1:]]
    watch = start()
    watch.wait_for_rounds(1)
    fake.write_state(state, fake.format_state(gpus))
    watch.wait_for_faults(GPU0=MIG)
    assert Probe(uuid="GPU-0", fault=MIG, gone=False) in watch.sightings()[-1].probes
    fake.write_state(state, fake.format_state(FOUR))
    watch.wait_for_faults()


def test_only_the_end_of_mig_is_worth_a_new_session(start: Start, state: Path) -> None:
    gpus = [dataclasses.replace(FOUR[0], mig=1), *FOUR[1:]]
    watch = start(gpus=gpus, pace=BRISK)
    watch.wait_for_rounds(10)
    assert watch.faults()["GPU-0"] == MIG
    fake.write_state(state, fake.format_state(FOUR))
    assert watch.end() == "the GPU driver is asked anew: a fault came or went at GPU 0"


# --- a driver that hangs, crashes or goes away ----------------------------------------------------


def test_a_gpu_that_hangs_costs_nothing_but_itself(start: Start, state: Path) -> None:
    watch = start(pace=dataclasses.replace(SHARP, renew_s=0))
    watch.wait_for_rounds(1)
    line = fake.hang(MEMORY, 2)
    fake.add_line(state, line)
    watch.wait_for_faults(GPU2=SILENT)
    assert Probe(uuid="GPU-2", fault=SILENT, gone=False) in watch.sightings()[-1].probes
    fake.add_line(state, fake.fail(MEMORY, 15, 0))
    watch.wait_for_faults(GPU0=LOST, GPU2=SILENT)
    watch.wait_for_rounds(5)  # a session is not renewed while a call hangs
    fake.remove_line(state, line)
    assert watch.end() == "the GPU driver is asked anew: a fault came or went at GPU 0"
    assert watch.faults()["GPU-2"] is None


def test_all_calls_hang(start: Start, state: Path) -> None:
    watch = start(pace=SHARP)
    watch.wait_for_rounds(1)
    fake.add_line(state, fake.hang("*"))
    watch.wait_for_faults(GPU0=SILENT, GPU1=SILENT, GPU2=SILENT, GPU3=SILENT)


def test_a_child_that_is_stuck(start: Start) -> None:
    watch = start(pace=SHARP)
    watch.wait_for_rounds(1)
    child_of(psutil.Process()).suspend()
    why = "the process that watches the GPU driver does not answer"
    assert watch.end() == why
    assert watch.told[-1] == Sighting(probes=tuple(Probe(uuid=u, fault=why) for u in UUIDS))


def test_a_library_that_crashes(start: Start, state: Path) -> None:
    watch = start()
    watch.wait_for_rounds(1)
    fake.add_line(state, fake.crash(MEMORY, 3))
    why = "the process that watches the GPU driver ended: signal 6, Aborted"
    assert watch.end() == why
    assert watch.told[-1] == Sighting(probes=tuple(Probe(uuid=u, fault=why) for u in UUIDS))


def test_a_child_that_somebody_kills_says_nothing_about_gpus(start: Start) -> None:
    watch = start()
    watch.wait_for_rounds(1)
    child_of(psutil.Process()).kill()
    assert watch.end() == "the process that watches the GPU driver ended: signal 9, Killed"
    watch.wait_for_faults()


GONE = {
    1: "NVML error 1, Uninitialized",
    9: "the NVIDIA driver is not loaded",
    18: "the driver and its library differ in version; restart after the driver upgrade",
}


@pytest.mark.parametrize(("code", "meaning"), GONE.items())
def test_a_driver_that_goes_away(start: Start, state: Path, code: int, meaning: str) -> None:
    watch = start()
    watch.wait_for_rounds(1)
    fake.add_line(state, fake.fail("*", code))
    fault = f"{meaning} ({MEMORY})"
    assert watch.end() == f"the GPU driver went away: {fault}"
    assert watch.told[-1] == Sighting(
        probes=tuple(Probe(uuid=uuid, fault=fault, gone=True) for uuid in UUIDS)
    )


def test_a_driver_that_is_unloaded_and_loaded_again(start: Start, state: Path) -> None:
    watch = start()
    watch.wait_for_rounds(1)
    hidden = state.rename(state.with_suffix(".hidden"))
    assert watch.end() == f"the GPU driver went away: the NVIDIA driver is not loaded ({MEMORY})"
    assert start(gpus=None).end() == "the NVIDIA driver is not loaded (nvmlInitWithFlags)"
    hidden.rename(state)
    start(gpus=None).wait_for_faults()


# --- Xids -----------------------------------------------------------------------------------------


def test_xids_are_told_whatever_they_mean(start: Start, state: Path) -> None:
    watch = start(fake.event(0, 62))
    watch.wait_for_rounds(1)
    for line in (fake.event(2, 31), fake.event(0, 0, event_type=2), fake.event(1, 79)):
        fake.add_line(state, line)
    watch.wait(lambda: watch.xids() == [("GPU-2", 31), ("GPU-1", 79)])
    fake.add_line(state, fake.event("*", 48))
    watch.wait(lambda: watch.xids() == [("GPU-2", 31), ("GPU-1", 79), (None, 48)])
    watch.wait_for_faults()


def test_an_xid_just_after_the_reading(start: Start, state: Path) -> None:
    watch = start()
    watch.wait(lambda: bool(watch.told))
    fake.add_line(state, fake.event(3, 95))
    watch.wait(lambda: watch.xids() == [("GPU-3", 95)])


def test_gpus_that_tell_no_events(start: Start, state: Path) -> None:
    gpus = [dataclasses.replace(FOUR[0], events=None), *FOUR[1:]]
    watch = start(gpus=gpus)
    watch.wait_for_rounds(1)
    fake.add_line(state, fake.event(1, 79))
    watch.wait(lambda: watch.xids() == [("GPU-1", 79)])


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param([fake.fail("nvmlEventSetCreate", 13)], id="a driver without events"),
        pytest.param([fake.fail("nvmlDeviceRegisterEvents", 3)], id="GPUs without events"),
        pytest.param([fake.fail("nvmlEventSetWait", 999)], id="a driver that cannot wait"),
    ],
)
def test_a_driver_that_tells_no_events(start: Start, lines: list[str]) -> None:
    watch = start(*lines)
    watch.wait_for_rounds()
    watch.wait_for_faults()


def test_a_wait_for_events_that_fails_for_a_while(start: Start, state: Path) -> None:
    watch = start()
    watch.wait_for_rounds(1)
    line = fake.fail("nvmlEventSetWait", 15)
    fake.add_line(state, line)
    watch.wait_for_rounds()
    fake.remove_line(state, line)
    fake.add_line(state, fake.event(1, 79))
    watch.wait(lambda: watch.xids() == [("GPU-1", 79)])


# --- the two processes ----------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["nvmlInitWithFlags", "nvmlDeviceGetMigMode"])
def test_it_stops_while_the_driver_hangs(start: Start, call: str) -> None:
    watch = start(fake.hang(call))
    os.eventfd_write(watch.stop, 1)
    assert watch.end() is None
    assert watch.told == []


def test_it_stops_while_all_is_well(start: Start) -> None:
    watch = start()
    watch.wait_for_rounds(1)
    os.eventfd_write(watch.stop, 1)
    assert watch.end() is None
    watch.wait_for_faults()


def test_a_listener_that_fails_leaves_nothing_behind(
    library: str, state: Path, no_leftovers: None
) -> None:
    fake.write_state(state, fake.format_state(FOUR))

    def hear(message: Message) -> None:
        raise ZeroDivisionError

    stop = os.eventfd(0)
    with open(stop, "rb"), pytest.raises(ZeroDivisionError):
        watch_driver(library, hear, stop)


def test_twenty_sessions_leave_nothing_behind(start: Start, state: Path) -> None:
    fake.write_state(state, fake.format_state(FOUR))
    watches = [start(gpus=None) for _ in range(20)]
    for watch in watches:
        watch.wait_for_rounds(1)
        os.eventfd_write(watch.stop, 1)
        assert watch.end() is None


PARENT = """
import os, psutil, sys, threading
from agent.edge.nvml import Pace, watch_driver
def hear(message):
    print(*[child.pid for child in psutil.Process().children()], flush=True)
watch_driver(sys.argv[1], hear, os.eventfd(0), pace=Pace(probe_s=0.02))
"""


@contextlib.contextmanager
def parent(script: str, library: str) -> Iterator[subprocess.Popen[str]]:
    root = Path(__file__).parent.parent.parent
    command = [sys.executable, "-c", script, library]
    process = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    "line", [pytest.param("# nothing", id="all well"), pytest.param(fake.hang(MEMORY), id="a hang")]
)
def test_the_child_dies_with_a_parent_that_is_killed(library: str, state: Path, line: str) -> None:
    fake.write_state(state, fake.format_state(FOUR))
    with parent(PARENT, library) as process:
        assert process.stdout
        pid = int(process.stdout.readline())
        fake.add_line(state, line)
        process.stdout.readline()
        with open(os.pidfd_open(pid), "rb") as child:
            assert select.select([child], [], [], 0)[0] == []
            process.send_signal(signal.SIGKILL)
            assert select.select([child], [], [], DEADLINE_S)[0] == [child]


WITH_GRPC = """
import os, sys, threading
from concurrent.futures import ThreadPoolExecutor
import grpc
from agent.core.health import Sighting
from agent.edge.nvml import Pace, watch_driver

server = grpc.server(ThreadPoolExecutor(2))
answer = grpc.unary_unary_rpc_method_handler(lambda request, context: request)
server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("s", {"m": answer})])
port = server.add_insecure_port("127.0.0.1:0")
server.start()
channel = grpc.insecure_channel(f"127.0.0.1:{port}")
call = channel.unary_unary("/s/m")
assert call(b"before", timeout=60) == b"before"

for _ in range(3):
    stop, seen = os.eventfd(0), threading.Event()
    def hear(message):
        if isinstance(message, Sighting):
            seen.set()
    watch = threading.Thread(
        target=watch_driver, args=(sys.argv[1], hear, stop), kwargs={"pace": Pace(probe_s=0.02)}
    )
    watch.start()
    assert seen.wait(60)
    assert call(b"meanwhile", timeout=60) == b"meanwhile"
    os.eventfd_write(stop, 1)
    watch.join()
assert call(b"after", timeout=60) == b"after"
channel.close()
server.stop(None).wait()
print("well")
"""


@pytest.mark.parametrize("forks", ["0", "1"], ids=["gRPC that minds no forks", "gRPC that does"])
def test_it_works_beside_a_grpc_server_and_an_open_channel(
    library: str, state: Path, monkeypatch: pytest.MonkeyPatch, forks: str
) -> None:
    monkeypatch.setenv("GRPC_ENABLE_FORK_SUPPORT", forks)
    fake.write_state(state, fake.format_state(FOUR))
    with parent(WITH_GRPC, library) as process:
        assert process.stdout
        assert process.stdout.read() == "well\n"


# --- what comes through the pipe ------------------------------------------------------------------


def frame(data: bytes) -> bytes:
    return struct.pack("!I", len(data)) + data


@pytest.mark.parametrize(
    ("sent", "answers"),
    [
        pytest.param(frame(pickle.dumps("one")), ["one", Silence.ENDED], id="a message"),
        pytest.param(
            frame(pickle.dumps("one")) + frame(pickle.dumps("two")),
            ["one", "two", Silence.ENDED],
            id="two at once",
        ),
        pytest.param(b"", [Silence.ENDED], id="nothing"),
        pytest.param(frame(pickle.dumps("one"))[:-1], [Silence.ENDED], id="a part of a message"),
        pytest.param(b"\xff\xff\xff\xff", [Silence.LATE], id="a message of 4 GiB"),
        pytest.param(frame(b"\0\0\0"), [Silence.LATE], id="a message that is nonsense"),
    ],
)
def test_messages(sent: bytes, answers: list[object]) -> None:
    receiver, sender = os.pipe()
    with open(receiver, "rb"), open(sender, "wb") as pipe:
        pipe.write(sent)
        pipe.close()
        child = Child(pid=0, pipe=receiver)
        assert [receive(child, DEADLINE_S) for _ in answers] == answers


def test_a_stop_comes_before_a_message() -> None:
    receiver, sender = os.pipe()
    stop = os.eventfd(1)
    with open(receiver, "rb"), open(sender, "wb") as pipe, open(stop, "rb"):
        pipe.write(frame(pickle.dumps("one")))
        pipe.flush()
        child = Child(pid=0, pipe=receiver)
        assert receive(child, DEADLINE_S, stop) is Silence.STOPPED
        assert receive(child, DEADLINE_S) == "one"
        assert receive(child, 0) is Silence.LATE
