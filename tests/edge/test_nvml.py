"""agent.edge.nvml against the real pynvml and a fake of the driver's library; the fake itself, too.

Expected values are those that the test wrote into the fake's text file, turned by hand.
"""

import contextlib
import ctypes
import dataclasses
import functools
import multiprocessing
import os
import resource
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pynvml
import pytest

from agent.core.bitmap import Bitmap
from agent.core.discovery import DriverGpu, DriverReading
from agent.core.topology import Link, LinkKind
from agent.edge.nvml import read_driver
from agent.edge.nvml.child import stuck
from agent.fakes import nvml as fake

pytestmark = pytest.mark.usefixtures("no_leftovers")

BDFS = [f"0000:{bus:02x}:00.0" for bus in (0x1A, 0x1B, 0x3D, 0x3E, 0x88, 0x89, 0xB1, 0xB2)]

EIGHT = [
    fake.FakeGpu(
        bdf=bdf,
        uuid=f"GPU-0000000{i}",
        minor=7 - i,
        memory=80 << 30,
        memory_nodes=str(i // 4),
        cpus="0-31,64-95" if i < 4 else "32-63,96-127",
        mig=0,
        name="NVIDIA A800-SXM4-80GB",
    )
    for i, bdf in enumerate(BDFS)
]

TWO = EIGHT[:2]
CUBE_MESH = """
X   NV1 NV1 NV2 SYS SYS NV2 SYS
NV1 X   NV2 NV1 SYS SYS SYS NV2
NV1 NV2 X   NV2 NV1 SYS SYS SYS
NV2 NV1 NV2 X   SYS NV1 SYS SYS
SYS SYS NV1 SYS X   NV2 NV1 NV2
SYS SYS SYS NV1 NV2 X   NV2 NV1
NV2 SYS SYS SYS NV1 NV2 X   NV1
SYS NV2 SYS SYS NV2 NV1 NV1 X
"""
LOST = "the GPU fell off the bus or was lost; it needs a reset or the machine a reboot"

Ask = Callable[..., DriverReading]


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "nvml.txt"
    monkeypatch.setenv(fake.ENVIRONMENT, str(path))
    return path


@pytest.fixture
def ask(library: str, state: Path) -> Ask:
    """The reading of a driver that the given lines describe."""

    def read(*lines: str, gpus: list[fake.FakeGpu] = EIGHT, timeout_s: float = 10) -> DriverReading:
        fake.write_state(state, fake.format_state(gpus, lines))
        return read_driver(library, timeout_s)

    return read


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


def words(reading: DriverReading) -> list[list[str]]:
    """The link matrix as `nvidia-smi topo -m` prints it, `?` for what the driver does not say."""
    return [
        ["X" if i == j else str(link or "?") for j, link in enumerate(row)]
        for i, row in enumerate(reading.links)
    ]


def table(text: str) -> list[list[str]]:
    return [line.split() for line in text.strip().splitlines()]


def links_of_two(reading: DriverReading) -> str:
    assert reading.links[0][1] == reading.links[1][0]
    return words(reading)[0][1]


# --- facts ----------------------------------------------------------------------------------------


def test_every_fact_of_eight_gpus(ask: Ask) -> None:
    reading = ask()
    assert reading.problem is None
    assert reading.warnings == ()
    assert reading.gpus == tuple(
        DriverGpu(
            index=i,
            bdf=BDFS[i],
            uuid=f"GPU-0000000{i}",
            minor=7 - i,
            model="NVIDIA A800-SXM4-80GB",
            memory_bytes=85_899_345_920,
            memory_nodes=Bitmap([i // 4]),
            cpus=Bitmap(
                [*range(32), *range(64, 96)] if i < 4 else [*range(32, 64), *range(96, 128)]
            ),
        )
        for i in range(8)
    )


def test_a_gpu_of_which_the_driver_tells_only_what_it_must(ask: Ask) -> None:
    reading = ask(gpus=[fake.FakeGpu(bdf=BDFS[0], uuid="GPU-0")])
    assert reading.gpus == (DriverGpu(index=0, bdf=BDFS[0], uuid="GPU-0"),)
    assert reading.links == ((None,),)
    assert reading.warnings == ()


def test_no_gpus(ask: Ask) -> None:
    assert ask(gpus=[]) == DriverReading()


@pytest.mark.parametrize(
    ("said", "name", "value"),
    [
        pytest.param({"bdf": "10001:0a:1f.0"}, "bdf", "10001:0a:1f.0", id="a long PCI domain"),
        pytest.param({"bdf": "ffffffff:ff:00.0"}, "bdf", "ffffffff:ff:00.0", id="the last domain"),
        pytest.param({"bdf": "0000:AF:00.0"}, "bdf", "0000:af:00.0", id="lower-case addresses"),
        pytest.param({"cpus": "512-1023"}, "cpus", Bitmap(range(512, 1024)), id="1,024 CPUs"),
        pytest.param({"cpus": "63-64"}, "cpus", Bitmap([63, 64]), id="CPUs on two words"),
        pytest.param({"memory_nodes": "0,65"}, "memory_nodes", Bitmap([0, 65]), id="node 65"),
        pytest.param({"memory_nodes": ""}, "memory_nodes", None, id="an empty set says nothing"),
        pytest.param({"minor": 200}, "minor", 200, id="a high minor number"),
    ],
)
def test_facts(ask: Ask, said: dict[str, object], name: str, value: object) -> None:
    reading = ask(gpus=[dataclasses.replace(EIGHT[0], **said)])
    assert getattr(reading.gpus[0], name) == value
    assert reading.warnings == ()


def test_an_answer_larger_than_a_pipe_holds(ask: Ask) -> None:
    gpus = [fake.FakeGpu(bdf=f"{i:04x}:01:00.0", uuid=f"GPU-{i}") for i in range(64)]
    reading = ask(*(fake.nvlink(i, 0, "switch") for i in range(64)), gpus=gpus)
    assert len(reading.gpus) == 64
    assert {link for row in reading.links for link in row} == {
        None,
        Link(kind=LinkKind.NV, nvlinks=1),
    }


# --- links ----------------------------------------------------------------------------------------


def test_a_cube_mesh_of_single_and_double_nvlinks(ask: Ask) -> None:
    cube = table(CUBE_MESH)
    assert words(ask(*fake.links(cube, BDFS, nvswitch=False))) == cube


def test_nvswitches_join_all_gpus(ask: Ask) -> None:
    switched = [["X" if i == j else "NV8" for j in range(8)] for i in range(8)]
    assert words(ask(*fake.links(switched, BDFS, nvswitch=True))) == switched


def test_all_pci_paths(ask: Ask) -> None:
    paths = table("""
        X    PIX  PXB  NODE SYS  SYS
        PIX  X    PXB  PHB  SYS  SYS
        PXB  PXB  X    PHB  SYS  SYS
        NODE PHB  PHB  X    SYS  SYS
        SYS  SYS  SYS  SYS  X    NODE
        SYS  SYS  SYS  SYS  NODE X
    """)
    assert words(ask(*fake.links(paths, BDFS[:6], nvswitch=False), gpus=EIGHT[:6])) == paths


ANCESTOR = "nvmlDeviceGetTopologyCommonAncestor"
REMOTE_TYPE = "nvmlDeviceGetNvLinkRemoteDeviceType"
DIRECT = fake.nvlinks({(0, 1): 2}, BDFS)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        pytest.param([], "?", id="a driver that does not say"),
        pytest.param([fake.ancestor(0, 1, 0)], "PIX", id="two GPUs of one board"),
        pytest.param([fake.ancestor(0, 1, 60)], "SYS", id="a level of a later NVML"),
        pytest.param([fake.fail(ANCESTOR, 999, 1)], "SYS", id="a board with unknown bridges"),
        pytest.param([fake.fail(ANCESTOR, 13)], "?", id="a driver without the call"),
        pytest.param([*DIRECT, fake.ancestor(0, 1, 10)], "NV2", id="NVLinks before PCI"),
        pytest.param(
            [*DIRECT, fake.nvlink(0, 2, "gpu", BDFS[1])], "NV2", id="the ends disagree: the fewer"
        ),
        pytest.param(
            [fake.nvlink(0, 0, "gpu", BDFS[1]), fake.ancestor(0, 1, 50)],
            "SYS",
            id="only one end knows of it",
        ),
        pytest.param([*DIRECT, fake.nvlink(0, 1, "off")], "NV1", id="one end is down"),
        pytest.param([*DIRECT, fake.nvlink(0, 5, "gpu", BDFS[1])], "NV2", id="numbers with gaps"),
        pytest.param([*DIRECT, fake.fail(REMOTE_TYPE, 13)], "NV2", id="a driver without types"),
        pytest.param(
            [fake.nvlink(gpu, 0, "npu", "0004:04:00.0") for gpu in (0, 1)], "?", id="links to CPUs"
        ),
        pytest.param(
            [fake.nvlink(gpu, 0, "switch", "0000:c5:00.0") for gpu in (0, 1)]
            + [fake.fail(REMOTE_TYPE, 13)],
            "?",
            id="a switch that the driver does not tell from others",
        ),
        pytest.param(
            [fake.nvlink(gpu, 0, "gpu", BDFS[5]) for gpu in (0, 1)], "?", id="a GPU not given to us"
        ),
        pytest.param([fake.nvlink(gpu, 0, "gpu") for gpu in (0, 1)], "?", id="a hidden remote end"),
        pytest.param(
            [fake.nvlink(gpu, link, "switch") for gpu, count in ((0, 18), (1, 17))
             for link in range(count)],
            "NV17",
            id="a GPU with a switch link down",
        ),
        pytest.param([fake.nvlink(0, 0, "switch")], "?", id="one GPU off the switches"),
        pytest.param(
            [fake.nvlink(gpu, link, "switch") for gpu in (0, 1) for link in range(18)],
            "NV18",
            id="all links of a large GPU",
        ),
    ],
)  # fmt: skip
def test_links(ask: Ask, lines: list[str], expected: str) -> None:
    reading = ask(*lines, gpus=TWO)
    assert links_of_two(reading) == expected
    assert [gpu.fault for gpu in reading.gpus] == [None, None]
    assert reading.warnings == ()


def test_a_gpu_without_an_answer_has_no_links(ask: Ask) -> None:
    lines = [*fake.nvlinks({(0, 1): 2, (0, 2): 1, (1, 2): 1}, BDFS)]
    reading = ask(*lines, fake.fail("nvmlDeviceGetUUID", 15, 1), gpus=EIGHT[:3])
    assert words(reading) == table("""
        X   ?   NV1
        ?   X   ?
        NV1 ?   X
    """)


# --- the driver's errors --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (fake.fail("nvmlInitWithFlags", 9), "the NVIDIA driver is not loaded"),
        (
            fake.fail("nvmlInitWithFlags", 18),
            "the driver and its library differ in version; restart after the driver upgrade",
        ),
        (
            fake.fail("nvmlInitWithFlags", 4),
            "no permission to open /dev/nvidiactl or the GPU's device",
        ),
        (
            fake.fail("nvmlInitWithFlags", 999),
            "an unknown error; often /dev/nvidiactl may not be opened, or see the kernel log",
        ),
        (fake.fail("nvmlInitWithFlags", 20), "NVML error 20, Insufficient Memory"),
        (fake.fail("nvmlInitWithFlags", 777), "NVML error 777, Unknown Error"),
        (fake.fail("nvmlDeviceGetCount", 13), "the driver is too old for this"),
        (fake.fail("nvmlDeviceGetCount", 3), "the driver does not support this"),
    ],
)
def test_a_driver_that_cannot_be_asked(ask: Ask, line: str, problem: str) -> None:
    call = line.split()[2]
    assert ask(line) == DriverReading(problem=f"{problem} ({call})")


def test_a_driver_that_is_not_loaded(library: str, state: Path) -> None:
    assert not state.exists()
    assert read_driver(library).problem == "the NVIDIA driver is not loaded (nvmlInitWithFlags)"


REQUIRED = ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetPciInfo", "nvmlDeviceGetUUID"]
OPTIONAL = {
    "nvmlDeviceGetMinorNumber": "minor",
    "nvmlDeviceGetName": "model",
    "nvmlDeviceGetMemoryInfo": "memory_bytes",
    "nvmlDeviceGetMemoryAffinity": "memory_nodes",
    "nvmlDeviceGetCpuAffinityWithinScope": "cpus",
    "nvmlDeviceGetMigMode": "fault",
    "nvmlDeviceGetNvLinkState": "fault",
}


@pytest.mark.parametrize("call", [*REQUIRED, *OPTIONAL])
@pytest.mark.parametrize(("code", "meaning"), [(15, LOST), (16, "the GPU needs a reset")])
def test_a_gpu_that_is_gone_costs_nothing_but_itself(
    ask: Ask, call: str, code: int, meaning: str
) -> None:
    reading = ask(fake.fail(call, code, 3))
    assert reading.gpus[3].fault == f"{meaning} ({call})"
    assert reading.gpus[3].bdf == (None if call in REQUIRED[:2] else BDFS[3])
    assert reading.gpus[:3] + reading.gpus[4:] == ask().gpus[:3] + ask().gpus[4:]
    assert reading.warnings == ()


@pytest.mark.parametrize("call", REQUIRED)
@pytest.mark.parametrize(
    ("code", "meaning"),
    [
        (3, "the driver does not support this"),
        (4, "no permission to open /dev/nvidiactl or the GPU's device"),
        (17, "the operating system blocked it; may this container use the GPU's device?"),
        (999, "an unknown error; often /dev/nvidiactl may not be opened, or see the kernel log"),
    ],
)
def test_a_gpu_that_does_not_tell_what_it_must(
    ask: Ask, call: str, code: int, meaning: str
) -> None:
    reading = ask(fake.fail(call, code, 1), gpus=TWO)
    assert [gpu.fault for gpu in reading.gpus] == [None, f"{meaning} ({call})"]


@pytest.mark.parametrize(("call", "name"), OPTIONAL.items())
@pytest.mark.parametrize("code", [3, 13, 999])
def test_what_a_gpu_need_not_tell(ask: Ask, call: str, name: str, code: int) -> None:
    reading = ask(fake.fail(call, code, 1), gpus=TWO)
    assert getattr(reading.gpus[1], name) is None
    assert [gpu.fault for gpu in reading.gpus] == [None, None]
    assert reading.warnings == ()


@pytest.mark.parametrize(("call", "name"), OPTIONAL.items())
def test_what_a_gpu_fails_to_tell_is_a_warning(ask: Ask, call: str, name: str) -> None:
    reading = ask(fake.nvlink(1, 1, "off"), fake.fail(call, 4, 1), gpus=TWO)
    assert getattr(reading.gpus[1], name) is None
    meaning = "no permission to open /dev/nvidiactl or the GPU's device"
    assert reading.warnings == (f"GPU 1 ({BDFS[1]}): {call} failed: {meaning}",)


@pytest.mark.parametrize(
    "call", ["nvmlDeviceGetMemoryAffinity", "nvmlDeviceGetCpuAffinityWithinScope"]
)
def test_more_ids_than_we_have_room_for_are_unknown(ask: Ask, call: str) -> None:
    reading = ask(fake.fail(call, 7, 0), gpus=TWO)
    assert getattr(reading.gpus[0], OPTIONAL[call]) is None
    assert reading.warnings == ()


@pytest.mark.parametrize(
    ("code", "meaning"),
    [(4, "no permission to open /dev/nvidiactl or the GPU's device"), (15, LOST)],
)
def test_a_pci_path_that_fails_blames_neither_gpu(ask: Ask, code: int, meaning: str) -> None:
    reading = ask(fake.fail(ANCESTOR, code, 2), fake.ancestor(0, 1, 20), gpus=EIGHT[:3])
    assert [gpu.fault for gpu in reading.gpus] == [None, None, None]
    assert words(reading)[0] == ["X", "PXB", "?"]
    assert reading.warnings == tuple(
        f"GPU {i} ({BDFS[i]}): {ANCESTOR} with GPU 2 failed: {meaning}" for i in (0, 1)
    )


def test_mig_is_a_fault_of_a_gpu_that_is_otherwise_known(ask: Ask) -> None:
    reading = ask(*DIRECT, gpus=[EIGHT[0], dataclasses.replace(EIGHT[1], mig=1)])
    assert reading.gpus[1] == dataclasses.replace(
        ask(gpus=TWO).gpus[1], fault="MIG is enabled: it cannot be given out as a whole GPU"
    )
    assert links_of_two(reading) == "NV2"


def test_a_name_that_is_no_text(ask: Ask, library: str, state: Path) -> None:
    ask(gpus=TWO)
    state.write_bytes(state.read_bytes().replace(b"A800", b"\xff800", 1))
    reading = read_driver(library)
    assert reading.gpus[0].model is None
    assert reading.warnings[0].startswith(
        f"GPU 0 ({BDFS[0]}): nvmlDeviceGetName failed: the answer makes no sense: 'utf-8' codec"
    )


def values(thing: object) -> Iterator[object]:
    """The plain values that a reading is made of."""
    if dataclasses.is_dataclass(thing):
        thing = tuple(getattr(thing, field.name) for field in dataclasses.fields(thing))
    if isinstance(thing, tuple):
        for part in thing:
            yield from values(part)
    else:
        yield thing


@pytest.mark.parametrize(
    "call", ["nvmlInitWithFlags", "nvmlDeviceGetCount", "nvmlDeviceGetUUID", "*"]
)
def test_nothing_foreign_leaks(ask: Ask, call: str) -> None:
    for code in (*range(1, 31), 999):
        reading = ask(fake.fail(call, code), gpus=TWO)
        assert "did not answer" not in str(reading)
        assert {type(value) for value in values(reading)} <= {
            type(None), str, int, Bitmap, LinkKind,
        }  # fmt: skip


# --- the library ----------------------------------------------------------------------------------


def test_a_path_without_a_library() -> None:
    assert read_driver("/nowhere/libnvidia-ml.so.1").problem == (
        "the GPU driver's library cannot be loaded: /nowhere/libnvidia-ml.so.1: "
        "cannot open shared object file: No such file or directory (dlopen)"
    )


def test_a_file_that_is_no_library(tmp_path: Path) -> None:
    path = tmp_path / "libnvidia-ml.so.1"
    path.write_text("not a library")
    problem = read_driver(str(path)).problem
    assert problem is not None
    assert problem.startswith(f"the GPU driver's library cannot be loaded: {path}: ")


def test_a_library_that_pynvml_would_not_take(library: str) -> None:
    path = fake.build(Path(library).parent, soname="libnvidia-ml.so.2")
    assert read_driver(str(path)).problem == (
        f"{path} is another library: its soname is not libnvidia-ml.so.1 (dlopen)"
    )


def is_installed() -> bool:
    return subprocess.run(["ldconfig", "-p"], capture_output=True).stdout.count(b"libnvidia-ml") > 0


@pytest.mark.skipif(is_installed(), reason="this machine has the driver's library")
def test_a_machine_without_the_driver() -> None:
    assert read_driver(None).problem == (
        "libnvidia-ml.so.1 is not installed: there is no NVIDIA driver here, "
        "or the container does not see it (nvmlInitWithFlags)"
    )


# --- a driver that hangs or crashes ---------------------------------------------------------------


@pytest.mark.parametrize("call", ["nvmlInitWithFlags", "nvmlDeviceGetCount"])
def test_a_driver_that_hangs(ask: Ask, call: str) -> None:
    reading = ask(fake.hang(call), timeout_s=0.5)
    assert reading == DriverReading(problem=f"the driver did not answer {call} within 0.25 s")


@pytest.mark.parametrize(
    "call", ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetNvLinkState"]
)
def test_a_gpu_that_hangs_costs_nothing_but_itself(ask: Ask, call: str) -> None:
    reading = ask(fake.hang(call, 2), *DIRECT, timeout_s=0.75)
    healthy = ask(*DIRECT)
    assert reading.gpus[2].fault == f"the driver did not answer {call} within 0.6 s"
    assert reading.gpus[:2] + reading.gpus[3:] == healthy.gpus[:2] + healthy.gpus[3:]
    assert words(reading) == words(healthy)


def test_a_pci_path_that_hangs_is_a_warning(ask: Ask) -> None:
    paths = [fake.ancestor(0, 1, 10), fake.ancestor(1, 2, 20)]
    reading = ask(fake.hang(ANCESTOR, 0), *paths, gpus=EIGHT[:3], timeout_s=0.75)
    assert words(reading) == table("""
        X ?   ?
        ? X   PXB
        ? PXB X
    """)
    assert [gpu.fault for gpu in reading.gpus] == [None, None, None]
    assert reading.warnings == (
        f"GPU 0 ({BDFS[0]}): the driver did not answer {ANCESTOR} within 0.675 s",
    )


@pytest.mark.parametrize(
    "line", [fake.crash("nvmlInitWithFlags"), fake.crash("nvmlDeviceGetName", 5)]
)
def test_a_library_that_crashes(ask: Ask, line: str) -> None:
    assert ask(line) == DriverReading(
        problem="the process that asked the GPU driver ended without an answer: signal 6, Aborted"
    )


Load = Callable[[str], DriverReading]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """The reading with a library that runs the given C statement when it is loaded."""

    def read(statement: str) -> DriverReading:
        source, library = tmp_path / "library.c", tmp_path / "libnvidia-ml.so.1"
        source.write_text(
            "#include <signal.h>\n#include <stdlib.h>\n"
            f"__attribute__((constructor)) static void start(void) {{ {statement} }}\n"
        )
        subprocess.run(["cc", "-w", "-shared", "-fPIC", "-o", library, source], check=True)
        return read_driver(str(library), 0.5)

    return read


def test_a_child_that_does_not_answer_at_all_is_killed(load: Load) -> None:
    assert load("raise(SIGSTOP);").problem == "the GPU driver did not answer within 0.5 s"


def test_a_library_that_exits(load: Load) -> None:
    assert load("_Exit(3);").problem == (
        "the process that asked the GPU driver ended without an answer: exit status 3"
    )


def test_the_child_runs_no_signal_handlers_of_ours(load: Load) -> None:
    ran: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: ran.append(number))
    try:
        problem = load("raise(SIGTERM);").problem
    finally:
        signal.signal(signal.SIGTERM, before)
    assert problem is not None
    assert problem.endswith("signal 15, Terminated")
    assert ran == []


def test_the_child_holds_no_files_of_ours(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HELD", str(tmp_path / "held"))
    with open(tmp_path / "ours", "w"):
        load('system("readlink /proc/$PPID/fd/* > $HELD");')
    held = [name.partition(":")[0] for name in (tmp_path / "held").read_text().split()]
    assert set(held) - {"anon_inode"} == {"/dev/null", "pipe"}
    assert held.count("pipe") == 1


def test_an_interrupted_read_leaves_nothing_behind(ask: Ask) -> None:
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(KeyboardInterrupt):
            ask(fake.hang("nvmlInitWithFlags"))
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_process_that_ignores_its_children(ask: Ask) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert ask(gpus=TWO).problem is None
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_twenty_reads_leave_nothing_behind(ask: Ask) -> None:
    lines = [fake.crash("nvmlInitWithFlags"), fake.fail("*", 15, 1), "# nothing", "# nothing"]
    problems = [ask(line, gpus=TWO).problem for line in lines * 5]
    assert [problem is None for problem in problems] == [False, True, True, True] * 5


def test_no_process_can_be_started(ask: Ask) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    ask(gpus=TWO)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        reading = read_driver()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert reading.problem == (
        "no process can be started to ask the GPU driver: [Errno 24] Too many open files"
    )


def test_a_driver_that_holds_too_many_processes_is_not_asked_again(ask: Ask) -> None:
    """A process that even SIGKILL does not end cannot be made here; sleepers stand in."""
    sleepers = [subprocess.Popen(["sleep", "600"]) for _ in range(8)]
    stuck.update(sleeper.pid for sleeper in sleepers)
    assert ask().problem == "the GPU driver is not asked again: 8 processes are stuck in it"
    for sleeper in sleepers:
        sleeper.kill()
        os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert ask().problem is None
    assert stuck == set()
    for sleeper in sleepers:
        sleeper.wait()


# --- the fake itself ------------------------------------------------------------------------------


def in_child(test: Callable[..., None]) -> Callable[..., None]:
    """Runs the test in a forked child: pynvml keeps a library for the life of its process."""

    @functools.wraps(test)
    def run(**fixtures: object) -> None:
        child = multiprocessing.get_context("fork").Process(target=test, kwargs=fixtures)
        child.start()
        child.join()
        code = child.exitcode
        child.close()
        assert code == 0

    return run


@pytest.fixture
def driver(library: str, state: Path) -> Callable[..., Path]:
    """Writes a state and opens the driver in this process; for tests in a child."""

    def open_driver(*lines: str, gpus: list[fake.FakeGpu] = EIGHT) -> Path:
        fake.write_state(state, fake.format_state(gpus, lines))
        ctypes.CDLL(library)
        pynvml.nvmlInit()
        return state

    return open_driver


Driver = Callable[..., Path]


def error_of(call: str, *arguments: object) -> int:
    with pytest.raises(pynvml.NVMLError) as caught:
        getattr(pynvml, call)(*arguments)
    return int(caught.value.value)


@in_child
def test_fake_counts_its_users(driver: Driver) -> None:
    driver()
    pynvml.nvmlInit()
    pynvml.nvmlShutdown()
    assert pynvml.nvmlDeviceGetCount() == 8
    pynvml.nvmlShutdown()
    assert error_of("nvmlDeviceGetCount") == pynvml.NVML_ERROR_UNINITIALIZED
    assert error_of("nvmlShutdown") == pynvml.NVML_ERROR_UNINITIALIZED


@in_child
def test_fake_knows_its_versions(driver: Driver) -> None:
    driver()
    assert pynvml.nvmlSystemGetDriverVersion() == "550.54.15"
    assert pynvml.nvmlSystemGetNVMLVersion() == "12.550.54.15"


@in_child
def test_fake_finds_gpus_by_every_key(driver: Driver) -> None:
    driver()
    third = address_of(pynvml.nvmlDeviceGetHandleByIndex(2))
    assert address_of(pynvml.nvmlDeviceGetHandleByUUID("GPU-00000002")) == third
    assert address_of(pynvml.nvmlDeviceGetHandleByPciBusId("0000:3d:00.0")) == third
    assert address_of(pynvml.nvmlDeviceGetHandleByPciBusId("00000000:3D:00.0")) == third
    assert error_of("nvmlDeviceGetHandleByUUID", "GPU-9") == pynvml.NVML_ERROR_NOT_FOUND
    assert error_of("nvmlDeviceGetHandleByPciBusId", "0:0:0.0") == pynvml.NVML_ERROR_NOT_FOUND
    assert error_of("nvmlDeviceGetHandleByPciBusId", "x") == pynvml.NVML_ERROR_INVALID_ARGUMENT
    assert error_of("nvmlDeviceGetHandleByIndex", 8) == pynvml.NVML_ERROR_INVALID_ARGUMENT
    assert error_of("nvmlDeviceGetUUID", None) == pynvml.NVML_ERROR_INVALID_ARGUMENT


def address_of(device: object) -> object:
    """Handles that are equal point to the same place, but do not compare as equal."""
    return ctypes.cast(device, ctypes.c_void_p).value


@in_child
def test_fake_fills_its_structs(driver: Driver) -> None:
    driver(gpus=[dataclasses.replace(EIGHT[0], bdf="10001:0a:1f.0")])
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    pci = pynvml.nvmlDeviceGetPciInfo(gpu)
    assert (pci.domain, pci.bus, pci.device) == (0x10001, 0x0A, 0x1F)
    assert (pci.busId, pci.busIdLegacy) == ("00010001:0A:1F.0", "0001:0A:1F.0")
    assert pynvml.nvmlDeviceGetMemoryInfo(gpu).total == 80 << 30
    assert pynvml.nvmlDeviceGetMemoryInfo(gpu, pynvml.nvmlMemory_v2).total == 80 << 30
    assert pynvml.nvmlDeviceGetMigMode(gpu) == [0, 0]


@in_child
def test_fake_minds_sizes_and_scopes(driver: Driver) -> None:
    driver()
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    both = [0xFFFFFFFF, 0xFFFFFFFF]
    assert list(pynvml.nvmlDeviceGetCpuAffinity(gpu, 2)) == both
    assert list(pynvml.nvmlDeviceGetCpuAffinityWithinScope(gpu, 3, 1)) == [*both, 0]
    assert list(pynvml.nvmlDeviceGetMemoryAffinity(gpu, 1, 0)) == [1]
    assert error_of("nvmlDeviceGetCpuAffinity", gpu, 1) == pynvml.NVML_ERROR_INSUFFICIENT_SIZE
    assert error_of("nvmlDeviceGetMemoryAffinity", gpu, 1, 2) == pynvml.NVML_ERROR_INVALID_ARGUMENT


@in_child
def test_fake_breaks_and_mends_under_a_running_process(driver: Driver) -> None:
    state = driver()
    lost = fake.fail("nvmlDeviceGetName", pynvml.NVML_ERROR_GPU_IS_LOST, 1)
    gpus = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in (0, 1)]
    fake.add_line(state, lost)
    assert error_of("nvmlDeviceGetName", gpus[1]) == pynvml.NVML_ERROR_GPU_IS_LOST
    assert pynvml.nvmlDeviceGetName(gpus[0]) == "NVIDIA A800-SXM4-80GB"
    fake.remove_line(state, lost)
    assert pynvml.nvmlDeviceGetName(gpus[1]) == "NVIDIA A800-SXM4-80GB"
    state.unlink()
    assert error_of("nvmlDeviceGetName", gpus[0]) == pynvml.NVML_ERROR_DRIVER_NOT_LOADED


@in_child
def test_fake_hangs_until_the_line_is_gone(driver: Driver) -> None:
    line = fake.hang("nvmlDeviceGetUUID", 1)
    state = driver(line)
    gpus = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in (0, 1)]
    hanging = threading.Thread(target=pynvml.nvmlDeviceGetUUID, args=(gpus[1],), daemon=True)
    hanging.start()
    assert pynvml.nvmlDeviceGetUUID(gpus[0]) == "GPU-00000000"
    assert hanging.is_alive()
    fake.remove_line(state, line)
    hanging.join()


XID, ECC = 8, 2


@in_child
def test_fake_delivers_events_once_and_in_order(driver: Driver) -> None:
    state = driver(fake.event(0, 62))
    events = pynvml.nvmlEventSetCreate()
    gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
    pynvml.nvmlDeviceRegisterEvents(gpu, XID, events)
    for line in (fake.event(0, 79), fake.event(1, 48), fake.event(0, 0, ECC), fake.event(0, 31)):
        fake.add_line(state, line)
    seen = [pynvml.nvmlEventSetWait(events, 0) for _ in range(2)]
    assert [(event.eventType, event.eventData) for event in seen] == [(XID, 79), (XID, 31)]
    assert {address_of(event.device) for event in seen} == {address_of(gpu)}
    assert error_of("nvmlEventSetWait", events, 0) == pynvml.NVML_ERROR_TIMEOUT
    pynvml.nvmlEventSetFree(events)
    assert error_of("nvmlEventSetWait", events, 0) == pynvml.NVML_ERROR_INVALID_ARGUMENT


@in_child
def test_fake_wakes_who_waits_for_an_event(driver: Driver) -> None:
    state = driver()
    events = pynvml.nvmlEventSetCreate()
    pynvml.nvmlDeviceRegisterEvents(pynvml.nvmlDeviceGetHandleByIndex(5), XID | ECC, events)
    writer = threading.Thread(target=fake.add_line, args=(state, fake.event(5, 79)))
    writer.start()
    assert pynvml.nvmlEventSetWait(events, 60_000).eventData == 79
    writer.join()


@in_child
def test_fake_delivers_events_of_no_gpu(driver: Driver) -> None:
    state = driver()
    sets = [pynvml.nvmlEventSetCreate() for _ in range(2)]
    pynvml.nvmlDeviceRegisterEvents(pynvml.nvmlDeviceGetHandleByIndex(3), XID, sets[0])
    fake.add_line(state, fake.event("*", 79))
    event = pynvml.nvmlEventSetWait(sets[0], 0)
    assert (event.eventData, address_of(event.device)) == (79, None)
    assert error_of("nvmlEventSetWait", sets[1], 0) == pynvml.NVML_ERROR_TIMEOUT


@in_child
def test_fake_registers_only_what_a_gpu_supports(driver: Driver) -> None:
    driver(gpus=[EIGHT[0], dataclasses.replace(EIGHT[1], events=None)])
    gpus = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in (0, 1)]
    events = pynvml.nvmlEventSetCreate()
    assert pynvml.nvmlDeviceGetSupportedEventTypes(gpus[0]) == 0x1F
    register = "nvmlDeviceRegisterEvents"
    assert error_of(register, gpus[0], 0x4000, events) == pynvml.NVML_ERROR_NOT_SUPPORTED
    assert error_of(register, gpus[1], XID, events) == pynvml.NVML_ERROR_NOT_SUPPORTED


@pytest.mark.parametrize(
    "line",
    [
        "gup 0",
        "gpu 9",
        "nvlink 0 99 gpu",
        "nvlink 0 0 cpu",
        "fail 0 nvmlInit",
        "event 0 8",
        "gpu 8 a",
    ],
)
def test_fake_does_not_take_a_slip_for_an_answer(ask: Ask, line: str) -> None:
    problem = ask(line).problem
    assert problem is not None
    assert problem.endswith("signal 6, Aborted")
