"""Machines described in XML by others, laid out as trees: GPUs are on the nodes that they name."""

import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.core.discovery import build_machine
from agent.edge.sysfs import read_host
from agent.fakes import node
from tests.captured import captured, parse_bitmap

Gpus = dict[str, int]
"""PCI address → NUMA node."""
Cpus = dict[int, frozenset[int]]


def read_nccl(system: ET.Element) -> tuple[Cpus, Gpus]:
    """NCCL's topology files: `cpu` elements with the PCI tree of their node inside."""
    cpus = {int(c.attrib["numaid"]): parse_bitmap(c.attrib["affinity"]) for c in system.iter("cpu")}
    gpus = {
        pci.attrib["busid"]: int(cpu.attrib["numaid"])
        for cpu in system.iter("cpu")
        for pci in cpu.iter("pci")
        if pci.attrib["class"] == "0x030200"
    }
    return cpus, gpus


def read_hwloc(topology: ET.Element) -> tuple[Cpus, Gpus]:
    """hwloc's XML: a device is on the node of its nearest ancestor that has one."""
    nodes = [o for o in topology.iter("object") if o.get("type") == "NUMANode"]
    cpus = {int(o.attrib["os_index"]): parse_bitmap(o.attrib["cpuset"]) for o in nodes}
    return cpus, dict(_devices(topology, None))


def _devices(element: ET.Element, nodeset: str | None) -> Iterator[tuple[str, int]]:
    nodeset = element.get("nodeset", nodeset)
    if element.get("type") == "PCIDev" and element.attrib["pci_type"].startswith("0302 [10de"):
        assert nodeset is not None
        (on,) = parse_bitmap(nodeset)
        yield element.attrib["pci_busid"], on
    for child in element:
        yield from _devices(child, nodeset)


def lay_out(cpus: Cpus, gpus: Gpus, name: str, root: Path) -> Path:
    facts = {
        "model": "",
        "device": "0x20b0",
        "gpu_memory_gib": 40,
        "siblings": "none",
        "nodes": [
            {
                "id": id_,
                "socket": id_,
                "cpus": node.kernel_list(sorted(members)),
                "memory_gib": 1,
                "distances": [10 if id_ == other else 20 for other in sorted(cpus)],
            }
            for id_, members in sorted(cpus.items())
        ],
        "gpus": [{"bdf": bdf, "node": on} for bdf, on in gpus.items()],
    }
    return node.lay_out(node.describe(facts, name), root)


# By hand from the files: how many GPUs each node has, in the order of the nodes.
FILES = {
    "xml/azure-ndv4-topo.xml": [2, 2, 2, 2],
    "xml/azure-ndv5-topo.xml": [4, 4],
    "xml/aws-p4d-24xl-topo.xml": [4, 4],
    "xml/hwloc-nvidiaDGX2.xml": [8, 8],
    "xml/mpibind-g4dnmetal.xml": [4, 4],
}


@pytest.mark.parametrize(("name", "count"), FILES.items(), ids=FILES)
def test_gpus_are_on_the_nodes_that_the_xml_says(
    name: str, count: list[int], tmp_path: Path
) -> None:
    root = ET.parse(captured(name)).getroot()
    cpus, gpus = read_nccl(root) if root.tag == "system" else read_hwloc(root)
    machine = build_machine(read_host(str(lay_out(cpus, gpus, "xml", tmp_path))), None)
    assert {n.id: frozenset(n.cpus) for n in machine.nodes} == cpus
    assert {gpu.bdf: gpu.node for gpu in machine.gpus} == gpus
    assert [sum(g.node == n.id for g in machine.gpus) for n in machine.nodes] == count


def test_the_crossed_order_of_ndv4_is_kept(tmp_path: Path) -> None:
    cpus, gpus = read_nccl(ET.parse(captured("xml/azure-ndv4-topo.xml")).getroot())
    machine = build_machine(read_host(str(lay_out(cpus, gpus, "ndv4", tmp_path))), None)
    assert [(gpu.bdf[:4], gpu.node) for gpu in machine.gpus] == [
        ("0001", 1),
        ("0002", 1),
        ("0003", 0),
        ("0004", 0),
        ("000b", 3),
        ("000c", 3),
        ("000d", 2),
        ("000e", 2),
    ]
