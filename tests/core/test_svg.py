"""The drawing: well-formed, complete, inside its frame, everything in its box."""

import itertools
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from hypothesis import given, settings

from agent.core.svg import draw_svg
from agent.core.topology import Link, LinkKind, Machine
from tests import machines
from tests.core.machines import described, random_machines
from tests.core.test_picture import MACHINE

SVG = "{http://www.w3.org/2000/svg}"


def parse(machine: Machine) -> ET.Element:
    return ET.fromstring(draw_svg(machine))


def texts(root: ET.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def rects(root: ET.Element, **attributes: str) -> list[tuple[float, float, float, float]]:
    return [
        tuple(float(r.attrib[key]) for key in ("x", "y", "width", "height"))  # type: ignore[misc]
        for r in root.iter(f"{SVG}rect")
        if r.get("x") and all(r.get(key) == value for key, value in attributes.items())
    ]


def boxes(root: ET.Element) -> list[tuple[float, float, float, float]]:
    return rects(root, rx="8")


def cards(root: ET.Element) -> list[tuple[float, float, float, float]]:
    return rects(root, rx="5")


def contains(outer: tuple[float, ...], inner: tuple[float, ...]) -> bool:
    return (
        outer[0] <= inner[0]
        and outer[1] <= inner[1]
        and inner[0] + inner[2] <= outer[0] + outer[2]
        and inner[1] + inner[3] <= outer[1] + outer[3]
    )


def disjoint(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] + a[2] <= b[0] or b[0] + b[2] <= a[0] or a[1] + a[3] <= b[1] or b[1] + b[3] <= a[1]


@pytest.mark.parametrize("name", machines.names())
def test_each_described_machine_is_drawn_with_each_gpu_in_the_box_of_its_node(name: str) -> None:
    machine = described(name)
    root = parse(machine)
    frame = (0.0, 0.0, float(root.attrib["width"]), float(root.attrib["height"]))
    for box in boxes(root):
        assert contains(frame, box)
    assert len(boxes(root)) == len(machine.cpu_nodes)
    assert len(cards(root)) == len(machine.gpus)
    order = [n.id for n in machine.cpu_nodes]
    for gpu, card in zip(machine.gpus, cards(root), strict=True):
        assert gpu.node is not None
        assert contains(boxes(root)[order.index(gpu.node)], card)
    for a, b in itertools.combinations(cards(root), 2):
        assert disjoint(a, b)
    for a, b in itertools.combinations(boxes(root), 2):
        assert disjoint(a, b)


def cells(root: ET.Element) -> list[tuple[float, float, float, float]]:
    return rects(root, width="9", height="9")


@pytest.mark.parametrize("name", machines.names())
def test_each_cpu_is_one_cell_inside_a_box_and_hides_nothing(name: str) -> None:
    machine = described(name)
    root = parse(machine)
    assert len(cells(root)) == len(machine.cpus)
    for cell in cells(root):
        assert any(contains(box, cell) for box in boxes(root))
        assert all(disjoint(cell, card) for card in cards(root))
    assert len(set(cells(root))) == len(machine.cpus)


def strokes(root: ET.Element) -> list[str]:
    return [path.attrib["stroke-width"] for path in root.iter(f"{SVG}path")]


def test_nvswitch_is_one_bar_with_a_line_from_each_gpu() -> None:
    root = parse(described("a800x8"))
    assert "every pair NV8" in texts(root)
    assert len(strokes(root)) == 8


def test_a_cube_mesh_is_a_curve_for_each_linked_pair_as_wide_as_its_links() -> None:
    root = parse(described("v100x8-cube"))
    matrix = machines.load("v100x8-cube").links
    pairs = [matrix[i][j] for i, j in itertools.combinations(range(8), 2)]
    assert strokes(root).count("2.5") == pairs.count("NV1") == 8
    assert strokes(root).count("4") == pairs.count("NV2") == 8


def test_pcie_links_stand_in_the_matrix_only() -> None:
    root = parse(described("pcie8-pairs"))
    assert strokes(root) == []
    assert texts(root).count("PIX") == 8


def test_links_between_two_rows_of_nodes_are_curves_too() -> None:
    nv = Link(kind=LinkKind.NV, nvlinks=1)
    machine = described("a100x8-nps4")
    links = [[None if i == j else Link(kind=LinkKind.SYS) for j in range(8)] for i in range(8)]
    links[0][4] = links[4][0] = nv
    links[2][4] = links[4][2] = nv
    root = parse(replace(machine, links=tuple(map(tuple, links))))
    assert len(strokes(root)) == 2


def test_what_has_no_node_and_what_is_faulty_is_drawn_too() -> None:
    root = parse(MACHINE)
    assert "no known node" in texts(root)
    assert "faulty" in texts(root)
    assert "node 2 · memory-only · 2.0 TiB" in texts(root)
    assert any(text.startswith("! GPU 1") for text in texts(root))


@given(random_machines())
@settings(deadline=None)
def test_any_machine_is_drawn_as_well_formed_xml_with_all_its_gpus(machine: Machine) -> None:
    root = parse(machine)
    assert len(cards(root)) == len(machine.gpus)
    assert len(cells(root)) == len(machine.cpus)
