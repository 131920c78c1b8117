"""How sysfs and the GPU driver become one machine."""

import pytest

from agent.core.bitmap import Bitmap
from agent.core.discovery import DriverGpu, DriverReading, Host, PciGpu, build_machine, choose_node
from agent.core.topology import Core, Link, LinkKind, NodeKind, NodeSource, NumaNode, parse_link


def nodes(*cpus: str, without_cpus: int = 0) -> tuple[NumaNode, ...]:
    """Nodes 0, 1, … with these CPUs, then `without_cpus` memory-only ones."""
    sets = [Bitmap.parse_list(text) for text in cpus] + [Bitmap()] * without_cpus
    return tuple(
        NumaNode(
            id=id_,
            kind=NodeKind.CPU if members else NodeKind.MEMORY_ONLY,
            cpus=members,
            memory_bytes=1,
        )
        for id_, members in enumerate(sets)
    )


TWO = nodes("0-3", "4-7", without_cpus=1)


def driven(index: int = 0, **facts: object) -> DriverGpu:
    sets = {
        key: Bitmap.parse_list(str(facts.pop(key)))
        for key in ("memory_nodes", "cpus") & facts.keys()
    }
    return DriverGpu(index=index, **sets, **facts)  # type: ignore[arg-type]


NODE_RULES = {
    "sysfs is believed first": (0, driven(), TWO, (0, "sysfs", [])),
    "sysfs wins over a driver that says otherwise, and that is told": (
        0,
        driven(memory_nodes="1"),
        TWO,
        (0, "sysfs", ["sysfs says NUMA node 0, the driver says 1; 0 is taken"]),
    ),
    "a driver that agrees is not worth a word": (
        1,
        driven(memory_nodes="1", cpus="0-3"),
        TWO,
        (1, "sysfs", []),
    ),
    "a driver that names several nodes does not contradict": (
        1,
        driven(memory_nodes="0-1"),
        TWO,
        (1, "sysfs", []),
    ),
    "memory affinity comes second": (
        None,
        driven(memory_nodes="1", cpus="0-3"),
        TWO,
        (1, "nvml-memory", []),
    ),
    "a node without CPUs in the memory affinity is the GPU's own memory": (
        None,
        driven(memory_nodes="1-2"),
        TWO,
        (1, "nvml-memory", []),
    ),
    "memory affinity to two nodes decides nothing, CPU affinity may": (
        None,
        driven(memory_nodes="0-1", cpus="4-5"),
        TWO,
        (1, "nvml-cpu", []),
    ),
    "CPU affinity across nodes decides nothing": (
        None,
        driven(cpus="2-5"),
        TWO,
        (None, "unknown", ["NUMA node unknown, so no NUMA policy can use it"]),
    ),
    "an empty CPU affinity decides nothing": (
        None,
        driven(cpus=""),
        TWO,
        (None, "unknown", ["NUMA node unknown, so no NUMA policy can use it"]),
    ),
    "the only node with CPUs is the node": (
        None,
        driven(),
        nodes("0-3", without_cpus=2),
        (0, "single-node", []),
    ),
    "sysfs is not believed about a node without CPUs": (
        2,
        driven(memory_nodes="0"),
        TWO,
        (0, "nvml-memory", ["sysfs says NUMA node 2, which has no online CPUs"]),
    ),
    "sysfs is not believed about an offline node": (
        9,
        driven(),
        TWO,
        (
            None,
            "unknown",
            [
                "sysfs says NUMA node 9, which has no online CPUs",
                "NUMA node unknown, so no NUMA policy can use it",
            ],
        ),
    ),
}


@pytest.mark.parametrize(
    ("sysfs", "driver", "machine", "expected"), NODE_RULES.values(), ids=NODE_RULES
)
def test_the_node_of_a_gpu(
    sysfs: int | None, driver: DriverGpu, machine: tuple[NumaNode, ...], expected: object
) -> None:
    node, source, doubts = choose_node(sysfs, driver, machine)
    assert (node, source.value, doubts) == expected


def host(*gpus: PciGpu) -> Host:
    return Host(
        name="host",
        nodes=nodes("0-3", "4-7"),
        cores=tuple(
            Core(id=n, socket=n, node=n, l3=n, cpus=Bitmap(range(4 * n, 4 * n + 4))) for n in (0, 1)
        ),
        gpus=gpus,
        warnings=("from sysfs",),
    )


def pci(bdf: str, node: int | None = 0, *bridges: str) -> PciGpu:
    return PciGpu(bdf=bdf, node=node, bridges=bridges, device="10de:20b2")


A, B, C = "0000:0a:00.0", "0000:0b:00.0", "10000:0c:00.0"


def test_without_a_driver_gpus_are_counted_in_the_order_of_their_addresses() -> None:
    machine = build_machine(host(pci(C), pci(B), pci(A)), None)
    assert [(gpu.index, gpu.bdf, gpu.model, gpu.uuid) for gpu in machine.gpus] == [
        (0, A, "PCI 10de:20b2", None),
        (1, B, "PCI 10de:20b2", None),
        (2, C, "PCI 10de:20b2", None),
    ]
    assert machine.warnings == ("from sysfs",)


def test_the_driver_gives_the_index_and_the_facts() -> None:
    facts = driven(1, bdf=A, uuid="GPU-a", minor=5, model="A800", memory_bytes=80)
    reading = DriverReading(
        gpus=(driven(0, bdf=B, uuid="GPU-b"), facts), links=((None, None), (None, None))
    )
    machine = build_machine(host(pci(A), pci(B)), reading)
    assert [
        (gpu.index, gpu.bdf, gpu.uuid, gpu.minor, gpu.model, gpu.memory_bytes)
        for gpu in machine.gpus
    ] == [
        (0, B, "GPU-b", None, "PCI 10de:20b2", None),
        (1, A, "GPU-a", 5, "A800", 80),
    ]


def test_a_driver_that_cannot_be_asked_leaves_the_gpus_and_says_why() -> None:
    machine = build_machine(host(pci(A)), DriverReading(problem="no library"))
    assert [(gpu.bdf, gpu.fault) for gpu in machine.gpus] == [(A, None)]
    assert machine.warnings == ("from sysfs", "no library")


def test_a_gpu_that_the_driver_does_not_list_is_shown_but_not_given_out() -> None:
    reading = DriverReading(gpus=(driven(0, bdf=B),), links=((None,),), warnings=("from nvml",))
    machine = build_machine(host(pci(A), pci(B)), reading)
    assert [(gpu.index, gpu.bdf, gpu.fault) for gpu in machine.gpus] == [
        (0, B, None),
        (1, A, "the driver does not list it"),
    ]
    assert machine.warnings == (
        "from sysfs",
        "from nvml",
        f"GPU 1 ({A}): not given out: the driver does not list it",
    )


def test_a_gpu_that_only_the_driver_sees_is_shown() -> None:
    reading = DriverReading(gpus=(driven(0, bdf=A, memory_nodes="1"),), links=((None,),))
    machine = build_machine(host(), reading)
    assert [(gpu.bdf, gpu.model, gpu.node) for gpu in machine.gpus] == [(A, "unknown", 1)]


def test_lost_gpus_without_an_address_are_the_devices_that_nobody_claims() -> None:
    reading = DriverReading(
        gpus=(driven(0, fault="lost"), driven(1, bdf=B), driven(2, fault="lost")),
        links=((None,) * 3,) * 3,
    )
    machine = build_machine(host(pci(A), pci(B), pci(C)), reading)
    assert [(gpu.index, gpu.bdf, gpu.fault) for gpu in machine.gpus] == [
        (0, A, "lost"),
        (1, B, None),
        (2, C, "lost"),
    ]
    assert machine.warnings == ("from sysfs", "GPUs 0, 2: not given out: lost")


def test_a_lost_gpu_that_could_be_any_of_two_devices_is_told_apart_from_them() -> None:
    reading = DriverReading(gpus=(driven(0, fault="lost"),), links=((None,),))
    machine = build_machine(host(pci(A), pci(B)), reading)
    assert [(gpu.index, gpu.bdf) for gpu in machine.gpus] == [(0, A), (1, B)]
    assert "GPU index 0 is not shown, its PCI address is unknown: lost" in machine.warnings


def test_one_doubt_about_many_gpus_is_one_warning() -> None:
    machine = build_machine(host(pci(A, None), pci(B, None)), None)
    assert machine.warnings == (
        "from sysfs",
        "GPUs 0, 1: NUMA node unknown, so no NUMA policy can use it",
    )


# The legend of `nvidia-smi topo -m`, on bridge paths drawn by hand.
PATHS = {
    "one switch is PIX": (
        pci(A, 0, "pci0000:00", "port", "up", "down-a"),
        pci(B, 0, "pci0000:00", "port", "up", "down-b"),
        "PIX",
    ),
    "two functions of one board are PIX": (
        pci(A, 0, "pci0000:00", "port"),
        pci(B, 0, "pci0000:00", "port"),
        "PIX",
    ),
    "a switch below a switch is PXB": (
        pci(A, 0, "pci0000:00", "port", "up", "down-a"),
        pci(B, 0, "pci0000:00", "port", "up", "down-b", "up-2", "down-2"),
        "PXB",
    ),
    "only the host bridge is PHB": (
        pci(A, 0, "pci0000:00", "port-a"),
        pci(B, 0, "pci0000:00", "port-b"),
        "PHB",
    ),
    "two host bridges of one node are NODE": (
        pci(A, 1, "pci0000:00", "port"),
        pci(B, 1, "pci0000:80", "port"),
        "NODE",
    ),
    "two nodes are SYS": (pci(A, 0, "pci0000:00", "port"), pci(B, 1, "pci0000:80", "port"), "SYS"),
    "unknown nodes are SYS": (pci(A, None, "pci0000:00"), pci(B, None, "pci0000:80"), "SYS"),
    "no paths on one node is NODE": (pci(A, 0), pci(B, 0), "NODE"),
}


@pytest.mark.parametrize(("a", "b", "expected"), PATHS.values(), ids=PATHS)
def test_the_link_where_the_driver_says_nothing(a: PciGpu, b: PciGpu, expected: str) -> None:
    machine = build_machine(host(a, b), None)
    assert machine.links == ((None, parse_link(expected)), (parse_link(expected), None))


def test_the_driver_knows_links_better_than_the_bus() -> None:
    nv = Link(kind=LinkKind.NV, nvlinks=8)
    reading = DriverReading(
        gpus=(driven(0, bdf=A), driven(1, bdf=B)), links=((None, nv), (nv, None))
    )
    machine = build_machine(host(pci(A, 0, "pci0000:00"), pci(B, 1, "pci0000:80")), reading)
    assert machine.links == ((None, nv), (nv, None))


def test_a_contradiction_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="two GPUs have the UUID GPU-a"):
        build_machine(
            host(),
            DriverReading(
                gpus=(driven(0, bdf=A, uuid="GPU-a"), driven(1, bdf=B, uuid="GPU-a")),
                links=((None, None), (None, None)),
            ),
        )


def test_the_source_of_a_node_is_spelled_as_the_json_spells_it() -> None:
    assert [source.value for source in NodeSource] == [
        "sysfs",
        "nvml-memory",
        "nvml-cpu",
        "single-node",
        "unknown",
    ]
