"""A Machine as the embedded node can show it. Whoever saved one may have written anything in it."""

import re
import uuid
from collections import Counter
from dataclasses import replace
from itertools import combinations
from typing import Final

from agent.core.strict_json import printable
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

_UUID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,79}")
_LONGEST_NAME: Final = 60
_MOST_LINKS: Final = 36
"""NVLinks of one GPU that its driver can tell."""


def make_showable(machine: Machine) -> Machine:
    """The machine numbered as kernel and driver number, with a UUID and a minor for each GPU. What
    was wrong where it was read is left behind. A machine that was read is as it was."""
    gpus = tuple(_showable_gpu(machine, place) for place in range(len(machine.gpus)))
    return replace(
        machine,
        name=_to_text(machine.name) or "node",
        nodes=tuple(map(_showable_node, machine.nodes)),
        cores=_showable_cores(machine.cores),
        gpus=gpus,
        links=_switched_links(machine) if has_nvswitch(machine) else machine.links,
        warnings=(),
    )


def _to_text(text: str) -> str:
    """On one line, without what a terminal or a driver could stumble over."""
    short = printable(text, _LONGEST_NAME).encode("ascii", "replace").decode()
    return " ".join(short.split())


def _showable_node(node: NumaNode) -> NumaNode:
    """The kernel tells memory in KiB, and only page sizes that are in use here."""
    memory = node.memory_bytes >> 10 << 10
    pages = tuple((size, count) for size, count in node.hugepages if size % 1024 == 0 and count > 0)
    nothing = node.kind is NodeKind.MEMORY_ONLY and not memory
    kind = NodeKind.DEVICE_ONLY if nothing else node.kind
    return replace(node, memory_bytes=memory, hugepages=pages, kind=kind)


def _showable_cores(cores: tuple[Core, ...]) -> tuple[Core, ...]:
    """In the order of their lowest CPUs, caches likewise; dies where a socket has several."""
    ordered = sorted(cores, key=lambda core: tuple(core.cpus))
    pairs = {(core.socket, core.die or 0) for core in cores}
    dies = Counter(socket for socket, _ in pairs)
    numbers: dict[int, int] = {}
    for core in ordered:
        if core.l3 is not None:
            numbers.setdefault(core.l3, len(numbers))
    return tuple(
        replace(
            core,
            id=id_,
            die=(core.die or 0) if dies[core.socket] > 1 else None,
            l3=None if core.l3 is None else numbers[core.l3],
        )
        for id_, core in enumerate(ordered)
    )


def _showable_gpu(machine: Machine, place: int) -> Gpu:
    gpu = machine.gpus[place]
    minor = place if any(one.minor is None for one in machine.gpus) else gpu.minor
    named = gpu.uuid is not None and _UUID.fullmatch(gpu.uuid)
    node, source = _showable_place(machine, gpu)
    return replace(
        gpu,
        index=place,
        minor=minor,
        uuid=gpu.uuid if named else f"GPU-{uuid.uuid5(uuid.NAMESPACE_OID, gpu.bdf)}",
        model=_to_text(gpu.model) or "GPU",
        memory_bytes=gpu.memory_bytes or None,
        node=node,
        node_source=source,
    )


def _showable_place(machine: Machine, gpu: Gpu) -> tuple[int | None, NodeSource]:
    """On a machine of one node, a GPU's node is never unknown; elsewhere, that is no source."""
    only = machine.cpu_nodes[0].id if len(machine.cpu_nodes) == 1 else None
    if gpu.node is None and only is not None:
        return only, NodeSource.SINGLE_NODE
    if gpu.node_source is NodeSource.SINGLE_NODE and only is None:
        return gpu.node, NodeSource.SYSFS
    return gpu.node, gpu.node_source


# --- NVLinks --------------------------------------------------------------------------------------


def has_nvswitch(machine: Machine) -> bool:
    """Whether the NVLinks lead to a switch: every pair has as many, or a GPU has too many."""
    counts = _counts(machine)
    pairs = {counts[i][j] for i, j in combinations(range(len(counts)), 2)}
    alike = len(counts) > 2 and len(pairs) == 1 and pairs != {0}
    return alike or any(sum(row) > _MOST_LINKS for row in counts)


def _counts(machine: Machine) -> list[list[int]]:
    return [[link.nvlinks if link else 0 for link in row] for row in machine.links]


def _switched_links(machine: Machine) -> tuple[tuple[Link | None, ...], ...]:
    """Through a switch, a pair has as many as the one of the two with fewer."""
    most = [min(max(row), _MOST_LINKS) for row in _counts(machine)]

    def link(i: int, j: int) -> Link | None:
        count = min(most[i], most[j])
        return Link(kind=LinkKind.NV, nvlinks=count) if count and i != j else machine.links[i][j]

    places = range(len(most))
    return tuple(tuple(link(i, j) for j in places) for i in places)
