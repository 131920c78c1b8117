"""What a machine may be, and how each contradiction is refused."""

from dataclasses import replace

import pytest

from agent.core.bitmap import Bitmap
from agent.core.topology import (
    Core,
    Gpu,
    Link,
    LinkKind,
    Machine,
    NodeKind,
    NodeSource,
    NumaNode,
    parse_link,
    union,
)

NODES = tuple(
    NumaNode(
        id=n,
        kind=NodeKind.CPU,
        cpus=Bitmap([2 * n, 2 * n + 1]),
        memory_bytes=1 << 30,
        distances=((10, 20), (20, 10))[n],
    )
    for n in (0, 1)
)
CORES = tuple(Core(id=c, socket=c // 2, node=c // 2, l3=c // 2, cpus=Bitmap([c])) for c in range(4))
GPUS = tuple(
    Gpu(
        index=i,
        minor=i,
        uuid=f"GPU-{i}",
        bdf=f"0000:0{i}:00.0",
        model="A800",
        memory_bytes=80 << 30,
        node=i,
        node_source=NodeSource.SYSFS,
    )
    for i in (0, 1)
)
SYS = Link(kind=LinkKind.SYS)
MACHINE = Machine(name="two", nodes=NODES, cores=CORES, gpus=GPUS, links=((None, SYS), (SYS, None)))
EXPANDER = NumaNode(id=2, kind=NodeKind.MEMORY_ONLY, cpus=Bitmap(), memory_bytes=1)


def test_a_machine_knows_its_cpus_and_its_nodes_with_cpus() -> None:
    machine = replace(MACHINE, nodes=(*(replace(n, distances=()) for n in NODES), EXPANDER))
    assert machine.cpus == Bitmap(range(4))
    assert [node.id for node in machine.cpu_nodes] == [0, 1]


def test_the_union_of_no_sets_is_empty() -> None:
    assert union([]) == Bitmap()


CONTRADICTIONS = {
    "no node with CPUs": (
        lambda: replace(MACHINE, nodes=(EXPANDER,), cores=(), gpus=(), links=()),
        "no node has CPUs",
    ),
    "a node twice": (
        lambda: replace(MACHINE, nodes=(NODES[0], NODES[0])),
        "node 0 is listed twice",
    ),
    "nodes out of order": (
        lambda: replace(MACHINE, nodes=NODES[::-1]),
        "node 0 is listed after 1, not in ascending order",
    ),
    "a CPU on two nodes": (
        lambda: replace(MACHINE, nodes=(NODES[0], replace(NODES[1], cpus=Bitmap([1, 2])))),
        "CPU 1 is in node 0 and in node 1",
    ),
    "a distance too few": (
        lambda: replace(MACHINE, nodes=(NODES[0], replace(NODES[1], distances=(10,)))),
        "node 1 has 1 distances for 2 nodes",
    ),
    "a distance of nothing": (
        lambda: replace(MACHINE, nodes=(NODES[0], replace(NODES[1], distances=(0, 10)))),
        "node 1 has a distance below 1: (0, 10)",
    ),
    "a CPU in two cores": (
        lambda: replace(MACHINE, cores=(*CORES[:3], replace(CORES[3], cpus=Bitmap([2, 3])))),
        "CPU 2 is in core 2 and in core 3",
    ),
    "a core on a node that is not there": (
        lambda: replace(MACHINE, cores=(*CORES[:3], replace(CORES[3], node=9))),
        "core 3 is on node 9, which does not exist",
    ),
    "a node with a CPU that no core has": (
        lambda: replace(MACHINE, cores=CORES[:3]),
        'node 1 has CPUs "2-3", but its cores have "2"',
    ),
    "a CPU online and offline": (
        lambda: replace(MACHINE, offline_cpus=Bitmap([3, 4])),
        "CPUs 3 are both online and offline",
    ),
    "two GPUs at one index": (
        lambda: replace(MACHINE, gpus=(GPUS[0], replace(GPUS[1], index=0))),
        "GPU index 0 is listed twice",
    ),
    "two GPUs at one address": (
        lambda: replace(MACHINE, gpus=(GPUS[0], replace(GPUS[1], bdf=GPUS[0].bdf))),
        "two GPUs have the PCI address 0000:00:00.0",
    ),
    "two GPUs of one UUID": (
        lambda: replace(MACHINE, gpus=(GPUS[0], replace(GPUS[1], uuid="GPU-0"))),
        "two GPUs have the UUID GPU-0",
    ),
    "two GPUs of one minor": (
        lambda: replace(MACHINE, gpus=(GPUS[0], replace(GPUS[1], minor=0))),
        "two GPUs have the minor 0",
    ),
    "a GPU on a node that is not there": (
        lambda: replace(MACHINE, gpus=(GPUS[0], replace(GPUS[1], node=5))),
        "GPU 0000:01:00.0 is on node 5, which has no CPUs here",
    ),
    "a matrix of the wrong size": (
        lambda: replace(MACHINE, links=((None,),)),
        "the link matrix is not 2 x 2",
    ),
    "a ragged matrix": (
        lambda: replace(MACHINE, links=((None, SYS), (SYS,))),
        "the link matrix is not 2 x 2",
    ),
    "a link that differs on the way back": (
        lambda: replace(MACHINE, links=((None, SYS), (Link(kind=LinkKind.PIX), None))),
        "links[0][1] is SYS, links[1][0] is PIX",
    ),
    "a pair without a link": (
        lambda: replace(MACHINE, links=((None, None), (None, None))),
        "links[0][1] is None, links[1][0] is None",
    ),
    "a core without CPUs": (
        lambda: replace(CORES[0], cpus=Bitmap()),
        "core 0 has no CPUs",
    ),
    "a core id over 1,023": (
        lambda: replace(CORES[0], id=1024),
        "core id 1024 is outside 0-1023",
    ),
    "a negative node id": (
        lambda: replace(NODES[0], id=-1),
        "node id -1 is outside 0-1023",
    ),
    "negative memory": (
        lambda: replace(NODES[0], memory_bytes=-1),
        "node 0 has -1 bytes of memory",
    ),
    "a CPU node without CPUs": (
        lambda: replace(NODES[0], cpus=Bitmap()),
        'node 0 of kind "cpu" has 0 CPUs',
    ),
    "a memory-only node with CPUs": (
        lambda: replace(EXPANDER, cpus=Bitmap([7])),
        'node 2 of kind "memory-only" has 1 CPUs',
    ),
    "a GPU at no PCI address": (
        lambda: replace(GPUS[0], bdf="1A:00.0"),
        '"1A:00.0" is not a PCI address (dddd:bb:dd.f, lower case)',
    ),
    "a GPU index over 1,023": (
        lambda: replace(GPUS[0], index=1024),
        "GPU 0000:00:00.0 has the index 1024, over 1023",
    ),
    "more GPUs than the search takes": (
        lambda: replace(MACHINE, gpus=GPUS[:1] * 65),
        "65 GPUs are more than the 64 handled here",
    ),
    "a GPU with a negative minor": (
        lambda: replace(GPUS[0], minor=-1),
        "GPU 0000:00:00.0 has the minor -1",
    ),
    "a known node from an unknown source": (
        lambda: replace(GPUS[0], node_source=NodeSource.UNKNOWN),
        'GPU 0000:00:00.0: node 0 from source "unknown"',
    ),
    "an unknown node from sysfs": (
        lambda: replace(GPUS[0], node=None),
        'GPU 0000:00:00.0: node None from source "sysfs"',
    ),
    "NVLinks on a PCIe path": (
        lambda: Link(kind=LinkKind.PIX, nvlinks=2),
        "a PIX link cannot have 2 NVLinks",
    ),
    "an NVLink path of no links": (
        lambda: Link(kind=LinkKind.NV),
        "a NV link cannot have 0 NVLinks",
    ),
}


@pytest.mark.parametrize(("make", "sentence"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_a_contradiction_is_refused_with(make, sentence) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        make()
    assert str(caught.value) == sentence


# The scores of the public ancestor of ACK's device plugin.
@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("SYS", 10),
        ("NODE", 20),
        ("PHB", 30),
        ("PXB", 40),
        ("PIX", 50),
        ("NV1", 100),
        ("NV18", 1800),
    ],
)
def test_a_link_is_read_written_and_scored(text: str, score: int) -> None:
    link = parse_link(text)
    assert str(link) == text
    assert link.score == score


@pytest.mark.parametrize(
    "text", ["", "X", "NV", "NV0", "NV-1", "NV１", "NV1000", "nv1", "sys", "N"]
)
def test_no_link_is_read_from(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a link|cannot have 0"):
        parse_link(text)
