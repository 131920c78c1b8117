"""The text that people read, compared whole."""

from dataclasses import replace

import pytest
from hypothesis import given, settings

from agent.core.bitmap import Bitmap
from agent.core.picture import count_of, draw_text, format_bytes
from agent.core.topology import (
    Core,
    Gpu,
    Link,
    LinkKind,
    Machine,
    NodeKind,
    NodeSource,
    NumaNode,
)
from tests.core.machines import random_machines

NV2 = Link(kind=LinkKind.NV, nvlinks=2)
SYS = Link(kind=LinkKind.SYS)


def gpu(index: int, node: int | None, **facts: object) -> Gpu:
    return Gpu(
        **{  # type: ignore[arg-type]
            "index": index,
            "minor": index,
            "uuid": f"GPU-{index}",
            "bdf": f"0000:0{index}:00.0",
            "model": "A100",
            "memory_bytes": 40 << 30,
            "node": node,
            "node_source": NodeSource.UNKNOWN if node is None else NodeSource.SYSFS,
        }
        | facts
    )


MACHINE = Machine(
    name="box",
    nodes=(
        NumaNode(
            id=0,
            kind=NodeKind.CPU,
            cpus=Bitmap(range(8)),
            memory_bytes=512 << 30,
            distances=(10, 20, 17),
            hugepages=((2 << 20, 512),),
        ),
        NumaNode(id=1, kind=NodeKind.CPU, cpus=Bitmap([8, 9]), memory_bytes=3 << 29),
        NumaNode(id=2, kind=NodeKind.MEMORY_ONLY, cpus=Bitmap(), memory_bytes=2 << 40),
    ),
    cores=(
        Core(id=0, socket=0, node=0, l3=0, cpus=Bitmap([0, 4])),
        Core(id=1, socket=0, node=0, l3=0, cpus=Bitmap([1, 5])),
        Core(id=2, socket=0, node=0, l3=1, cpus=Bitmap([2, 6])),
        Core(id=3, socket=0, node=0, l3=1, cpus=Bitmap([3, 7])),
        Core(id=4, socket=1, node=1, l3=2, cpus=Bitmap([8])),
        Core(id=5, socket=1, node=1, l3=3, cpus=Bitmap([9])),
        Core(id=6, socket=1, node=None, l3=None, cpus=Bitmap([11])),
    ),
    gpus=(
        gpu(0, 0),
        gpu(1, 1, node_source=NodeSource.NVML_MEMORY, fault="lost"),
        gpu(2, None, minor=None, uuid=None, memory_bytes=None),
    ),
    links=((None, NV2, SYS), (NV2, None, SYS), (SYS, SYS, None)),
    offline_cpus=Bitmap([10]),
    isolated_cpus=Bitmap([7]),
    warnings=("GPU 1 (0000:01:00.0): not given out: lost",),
)

TEXT = """\
box   3 NUMA nodes · 7 cores · 11 CPUs · 2.5 TiB · 3 GPUs · CPUs 10 offline · CPUs 7 isolated

socket 0
└─ node 0   512 GiB   CPUs 0-7   distances 10 20 17   512 hugepages of 2 MiB
   ├─ L3 0   2 cores of 2 threads (0,4 …)   CPUs 0-1,4-5
   ├─ L3 1   2 cores of 2 threads (2,6 …)   CPUs 2-3,6-7
   └─ GPU 0   0000:00:00.0   /dev/nvidia0   A100   40 GiB   GPU-0
socket 1
└─ node 1   1.5 GiB   CPUs 8-9
   ├─ 2 cores, each with its own last-level cache
   └─ GPU 1   0000:01:00.0   /dev/nvidia1   A100   40 GiB   GPU-1   node from nvml-memory   not given out
no socket
└─ node 2   2.0 TiB   memory-only
no known node
├─ cache unknown   1 core   CPUs 11
└─ GPU 2   0000:02:00.0                  A100

        GPU0   GPU1   GPU2   CPU affinity  node
GPU0     X     NV2    SYS    0-7           0
GPU1    NV2     X     SYS    8-9           1
GPU2    SYS    SYS     X     ?             ?
NVn = n NVLinks, direct or through NVSwitch · SYS = across NUMA nodes

! GPU 1 (0000:01:00.0): not given out: lost
"""  # noqa: E501


def test_the_whole_picture() -> None:
    assert draw_text(MACHINE) == TEXT


def test_colours_add_nothing_but_escapes() -> None:
    coloured = draw_text(MACHINE, colour=True)
    assert "\x1b[31mnot given out\x1b[0m" in coloured
    plain = coloured
    for code in ("0", "1", "2", "31", "32", "33", "36"):
        plain = plain.replace(f"\x1b[{code}m", "")
    assert plain == TEXT


def test_a_node_across_sockets_names_them_all() -> None:
    cores = (*MACHINE.cores[:3], replace(MACHINE.cores[3], socket=1), *MACHINE.cores[4:])
    assert "sockets 0, 1\n└─ node 0" in draw_text(replace(MACHINE, cores=cores))


def test_without_gpus_there_is_no_matrix() -> None:
    text = draw_text(replace(MACHINE, gpus=(), links=(), warnings=()))
    assert text.endswith("└─ cache unknown   1 core   CPUs 11\n")


def test_a_hostile_name_cannot_steer_the_terminal() -> None:
    hostile = replace(MACHINE, name="a\x1b[2Jb\rc\n", warnings=("\x1b]0;x\x07",))
    text = draw_text(hostile)
    assert text.startswith("a?[2Jb?c?   3 NUMA")
    assert text.endswith("! ?]0;x?\n")


@given(random_machines())
@settings(deadline=None)
def test_any_machine_can_be_drawn_and_shows_every_gpu(machine: Machine) -> None:
    text = draw_text(machine)
    assert all(gpu.bdf in text for gpu in machine.gpus)
    assert all(f"node {node.id} " in text for node in machine.nodes)
    assert all(line.isprintable() for line in text.split("\n"))


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.98 KiB"),
        (1536, "1.5 KiB"),
        (80 << 30, "80 GiB"),
        (999 << 30, "999 GiB"),
        (1000 << 30, "1.0 TiB"),
        (1 << 50, "1024.0 TiB"),
    ],
)
def test_bytes_are_written_short(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_one_of_a_thing_is_singular() -> None:
    assert [count_of(n, "GPU") for n in (0, 1, 2)] == ["0 GPUs", "1 GPU", "2 GPUs"]
