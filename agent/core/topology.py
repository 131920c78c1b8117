"""What a node is: its NUMA nodes, cores and GPUs, as immutable values that agree with each other.

A *node* here is a NUMA node. All CPU sets hold online CPUs only. Everything is checked once, when
the value is made; whoever holds a Machine need not check again.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from itertools import pairwise

from agent.core.bitmap import MAX_ID, Bitmap

EMPTY = Bitmap()
MAX_GPUS = 64
"""Of one machine: as many as the search for the best GPUs takes."""
_BDF = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


class NodeKind(StrEnum):
    """What a NUMA node holds. Only `cpu` nodes ever hold a pod's CPUs."""

    CPU = "cpu"
    MEMORY_ONLY = "memory-only"
    """No CPUs but system memory: CXL, HBM, persistent memory."""
    DEVICE_ONLY = "device-only"
    """Neither CPUs nor system memory: a generic initiator, or a GPU's own memory."""


class NodeSource(StrEnum):
    """How we know a GPU's node, best source first."""

    SYSFS = "sysfs"
    NVML_MEMORY = "nvml-memory"
    NVML_CPU = "nvml-cpu"
    SINGLE_NODE = "single-node"
    UNKNOWN = "unknown"


class LinkKind(IntEnum):
    """The path between two GPUs as `nvidia-smi topo -m` spells it; the value is its score.

    Source: the scores of the public ancestor of ACK's gputopo-device-plugin.
    """

    SYS = 10
    NODE = 20
    PHB = 30
    PXB = 40
    PIX = 50
    NV = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The best path between two GPUs; `nvlinks` counts NVLinks, direct or through NVSwitch."""

    kind: LinkKind
    nvlinks: int = 0

    def __post_init__(self) -> None:
        if (self.kind is LinkKind.NV) != (self.nvlinks > 0):
            raise ValueError(f"a {self.kind.name} link cannot have {self.nvlinks} NVLinks")

    @property
    def score(self) -> int:
        """Higher is better; 100 for each NVLink."""
        return self.kind * max(1, self.nvlinks)

    def __str__(self) -> str:
        return f"NV{self.nvlinks}" if self.nvlinks else self.kind.name


def parse_link(text: str) -> Link:
    """`NV8`, `PIX`, `SYS`, … → Link. Raises ValueError."""
    count = text.removeprefix("NV")
    if count != text and count.isascii() and count.isdecimal() and 0 < len(count) <= 3:
        return Link(kind=LinkKind.NV, nvlinks=int(count))
    if text != "NV" and text in LinkKind.__members__:
        return Link(kind=LinkKind[text])
    raise ValueError(f'"{text[:40]}" is not a link (NV<n>, PIX, PXB, PHB, NODE or SYS)')


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """One physical core.

    `id` is dense over the machine, in the order of the cores' lowest CPUs (the kernel's own
    `core_id` repeats from socket to socket). `socket` is the kernel's `physical_package_id`. `die`
    is the die inside the socket where a socket has several, else None. `node` is None for a core
    whose node is offline. `l3` numbers the last-level caches of the machine, None where unknown.
    """

    id: int
    socket: int
    die: int | None = None
    node: int | None
    l3: int | None
    cpus: Bitmap

    def __post_init__(self) -> None:
        _check_id(self.id, "core")
        if not self.cpus:
            raise ValueError(f"core {self.id} has no CPUs")


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaNode:
    """One online NUMA node.

    `distances` follow the machine's nodes in ascending order of ids (ACPI SLIT, self is 10), empty
    where unknown. `hugepages` are (page size in bytes, pages) in ascending order of size.
    """

    id: int
    kind: NodeKind
    cpus: Bitmap
    memory_bytes: int
    distances: tuple[int, ...] = ()
    hugepages: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        _check_id(self.id, "node")
        if self.memory_bytes < 0:
            raise ValueError(f"node {self.id} has {self.memory_bytes} bytes of memory")
        if bool(self.cpus) != (self.kind is NodeKind.CPU):
            raise ValueError(f'node {self.id} of kind "{self.kind}" has {len(self.cpus)} CPUs')


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One whole GPU, keyed by `uuid` and `bdf` (PCI address `dddd:bb:dd.f`, lower case).

    `index` is NVML's where it is known and may change at a reboot. `fault` says why the GPU cannot
    be given out; None when it can.
    """

    index: int
    minor: int | None
    uuid: str | None
    bdf: str
    model: str
    memory_bytes: int | None
    node: int | None
    node_source: NodeSource
    fault: str | None = None

    def __post_init__(self) -> None:
        if not _BDF.fullmatch(self.bdf):
            raise ValueError(f'"{self.bdf[:40]}" is not a PCI address (dddd:bb:dd.f, lower case)')
        if self.index > MAX_ID:
            raise ValueError(f"GPU {self.bdf} has the index {self.index}, over {MAX_ID}")
        for name, value in (("index", self.index), ("minor", self.minor)):
            if value is not None and value < 0:
                raise ValueError(f"GPU {self.bdf} has the {name} {value}")
        if (self.node is None) != (self.node_source is NodeSource.UNKNOWN):
            raise ValueError(f'GPU {self.bdf}: node {self.node} from source "{self.node_source}"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A whole node. `nodes` and `cores` ascend by id, `gpus` by index; `links` follow `gpus`.

    `links` is square and symmetric with None on the diagonal. `offline_cpus` are present but
    switched off; `isolated_cpus` are those of the `isolcpus` kernel parameter.
    """

    name: str
    nodes: tuple[NumaNode, ...]
    cores: tuple[Core, ...]
    gpus: tuple[Gpu, ...] = ()
    links: tuple[tuple[Link | None, ...], ...] = ()
    offline_cpus: Bitmap = EMPTY
    isolated_cpus: Bitmap = EMPTY
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_nodes(self.nodes)
        _check_cores(self)
        _check_gpus(self)
        _check_links(self.links, len(self.gpus))

    @property
    def cpus(self) -> Bitmap:
        """All online CPUs."""
        return union(core.cpus for core in self.cores)

    @property
    def cpu_nodes(self) -> tuple[NumaNode, ...]:
        """The nodes that have CPUs."""
        return tuple(node for node in self.nodes if node.kind is NodeKind.CPU)


def union(sets: Iterable[Bitmap]) -> Bitmap:
    """All members of all sets; empty for none."""
    total = EMPTY
    for cpus in sets:
        total |= cpus
    return total


def _check_id(number: int, what: str) -> None:
    if not 0 <= number <= MAX_ID:
        raise ValueError(f"{what} id {number} is outside 0-{MAX_ID}")


def _check_ascending(numbers: Sequence[int], what: str) -> None:
    for before, after in pairwise(numbers):
        if before == after:
            raise ValueError(f"{what} {after} is listed twice")
        if before > after:
            raise ValueError(f"{what} {after} is listed after {before}, not in ascending order")


def _check_nodes(nodes: tuple[NumaNode, ...]) -> None:
    _check_ascending([node.id for node in nodes], "node")
    if not any(node.kind is NodeKind.CPU for node in nodes):
        raise ValueError("no node has CPUs")
    _check_disjoint((f"node {node.id}", node.cpus) for node in nodes)
    for node in nodes:
        if node.distances and len(node.distances) != len(nodes):
            raise ValueError(
                f"node {node.id} has {len(node.distances)} distances for {len(nodes)} nodes"
            )
        if any(distance < 1 for distance in node.distances):
            raise ValueError(f"node {node.id} has a distance below 1: {node.distances}")


def _check_cores(machine: Machine) -> None:
    _check_ascending([core.id for core in machine.cores], "core")
    _check_disjoint((f"core {core.id}", core.cpus) for core in machine.cores)
    of_cores = {node.id: EMPTY for node in machine.nodes}
    for core in machine.cores:
        if core.node is not None:
            if core.node not in of_cores:
                raise ValueError(f"core {core.id} is on node {core.node}, which does not exist")
            of_cores[core.node] |= core.cpus
    for node in machine.nodes:
        if of_cores[node.id] != node.cpus:
            raise ValueError(
                f'node {node.id} has CPUs "{node.cpus}", but its cores have "{of_cores[node.id]}"'
            )
    if both := machine.cpus & machine.offline_cpus:
        raise ValueError(f"CPUs {both} are both online and offline")


def _check_gpus(machine: Machine) -> None:
    if len(machine.gpus) > MAX_GPUS:
        raise ValueError(f"{len(machine.gpus)} GPUs are more than the {MAX_GPUS} handled here")
    _check_ascending([gpu.index for gpu in machine.gpus], "GPU index")
    _check_unique("PCI address", (gpu.bdf for gpu in machine.gpus))
    _check_unique("UUID", (gpu.uuid for gpu in machine.gpus))
    _check_unique("minor", (gpu.minor for gpu in machine.gpus))
    with_cpus = {node.id for node in machine.cpu_nodes}
    for gpu in machine.gpus:
        if gpu.node is not None and gpu.node not in with_cpus:
            raise ValueError(f"GPU {gpu.bdf} is on node {gpu.node}, which has no CPUs here")


def _check_unique(what: str, keys: Iterable[str | int | None]) -> None:
    seen: set[str | int] = set()
    for key in keys:
        if key in seen:
            raise ValueError(f"two GPUs have the {what} {key}")
        if key is not None:
            seen.add(key)


def _check_links(links: tuple[tuple[Link | None, ...], ...], gpus: int) -> None:
    if len(links) != gpus or any(len(row) != gpus for row in links):
        raise ValueError(f"the link matrix is not {gpus} x {gpus}")
    for i, row in enumerate(links):
        for j, link in enumerate(row):
            if link != links[j][i] or (link is None) != (i == j):
                raise ValueError(f"links[{i}][{j}] is {link}, links[{j}][{i}] is {links[j][i]}")


def _check_disjoint(sets: Iterable[tuple[str, Bitmap]]) -> None:
    owner: dict[int, str] = {}
    for name, cpus in sets:
        for cpu in cpus:
            if cpu in owner:
                raise ValueError(f"CPU {cpu} is in {owner[cpu]} and in {name}")
            owner[cpu] = name
