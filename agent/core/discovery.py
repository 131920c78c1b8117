"""What sysfs and the GPU driver say, joined into one Machine.

The two are read by edges that do not know each other; this is where they meet. Nothing is guessed:
a GPU whose node nobody knows has node None, and what contradicts becomes a warning.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agent.core.bitmap import Bitmap
from agent.core.topology import (
    EMPTY,
    Core,
    Gpu,
    Link,
    LinkKind,
    Machine,
    NodeKind,
    NodeSource,
    NumaNode,
)

Links = tuple[tuple[Link | None, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PciGpu:
    """A GPU as the PCI bus shows it.

    `node` is sysfs' `numa_node`, None for -1 or absent. `bridges` is the way from the host bridge
    (`pci0000:17`) down to the device's parent. `device` is `<vendor>:<device>` in hexadecimal.
    """

    bdf: str
    node: int | None
    bridges: tuple[str, ...]
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverGpu:
    """A GPU as its driver shows it; None where the driver does not say.

    `memory_nodes` and `cpus` are NVML's memory and CPU affinity at node scope. A GPU with a `fault`
    may lack any other fact, even its address.
    """

    index: int
    bdf: str | None = None
    uuid: str | None = None
    minor: int | None = None
    model: str | None = None
    memory_bytes: int | None = None
    memory_nodes: Bitmap | None = None
    cpus: Bitmap | None = None
    fault: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverReading:
    """All that the GPU driver said. `links` follow `gpus`, None where the driver does not say.

    `problem` is the sentence for a driver that could not be asked at all; then `gpus` is empty.
    """

    gpus: tuple[DriverGpu, ...] = ()
    links: Links = ()
    warnings: tuple[str, ...] = ()
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """All that sysfs said; see Machine for the fields of the same names."""

    name: str
    nodes: tuple[NumaNode, ...]
    cores: tuple[Core, ...]
    gpus: tuple[PciGpu, ...] = ()
    offline_cpus: Bitmap = EMPTY
    isolated_cpus: Bitmap = EMPTY
    warnings: tuple[str, ...] = ()


Pair = tuple[PciGpu | None, DriverGpu | None]


def build_machine(host: Host, driver: DriverReading | None) -> Machine:
    """The machine that `host` and `driver` describe together; `driver` is None if not asked.

    Raises ValueError where they contradict themselves.
    """
    reading = driver or DriverReading()
    answered = driver is not None and driver.problem is None
    pairs = _match(host.gpus, reading.gpus)
    joined = [_join(index, pair, host.nodes, answered) for index, pair in _number(pairs)]
    gpus = [gpu for gpu, _ in joined]
    warnings = [*host.warnings, *reading.warnings, *_group(joined)]
    if reading.problem:
        warnings.append(reading.problem)
    shown = {driven.index for _, driven in pairs if driven}
    warnings += [
        f"GPU index {driven.index} is not shown, its PCI address is unknown: {driven.fault}"
        for driven in reading.gpus
        if driven.index not in shown
    ]
    return Machine(
        name=host.name,
        nodes=host.nodes,
        cores=host.cores,
        gpus=tuple(gpus),
        links=_links(pairs, gpus, reading),
        offline_cpus=host.offline_cpus,
        isolated_cpus=host.isolated_cpus,
        warnings=tuple(warnings),
    )


def _match(pci: Sequence[PciGpu], driven: Sequence[DriverGpu]) -> list[Pair]:
    """Both views of each GPU, in the order of the driver's indices, then of PCI addresses.

    GPUs so lost that the driver cannot tell their addresses are the PCI devices that no other GPU
    claimed, if there are as many of those.
    """
    left = {gpu.bdf: gpu for gpu in sorted(pci, key=lambda gpu: _bdf_key(gpu.bdf))}
    pairs: list[Pair] = [(left.pop(gpu.bdf, None), gpu) for gpu in driven if gpu.bdf is not None]
    nameless = [gpu for gpu in driven if gpu.bdf is None]
    if len(nameless) == len(left):
        pairs += zip(left.values(), nameless, strict=True)
        return sorted(pairs, key=lambda pair: pair[1].index if pair[1] else 0)
    return pairs + [(gpu, None) for gpu in left.values()]


def _number(pairs: Sequence[Pair]) -> Iterable[tuple[int, Pair]]:
    """Each pair with the driver's index; those without one are counted on from there."""
    following = max((driven.index + 1 for _, driven in pairs if driven), default=0)
    for pci, driven in pairs:
        if driven:
            yield driven.index, (pci, driven)
        else:
            yield following, (pci, driven)
            following += 1


def _join(
    index: int, pair: Pair, nodes: Sequence[NumaNode], answered: bool
) -> tuple[Gpu, list[str]]:
    """One GPU and what is doubtful about it; `answered`: the driver could be asked."""
    pci, driven = pair
    bdf = pci.bdf if pci else (driven and driven.bdf)
    assert bdf
    facts = driven or DriverGpu(
        index=index, fault="the driver does not list it" if answered else None
    )
    node, source, doubts = choose_node(pci.node if pci else None, facts, nodes)
    gpu = Gpu(
        index=index,
        minor=facts.minor,
        uuid=facts.uuid,
        bdf=bdf,
        model=facts.model or (f"PCI {pci.device}" if pci else "unknown"),
        memory_bytes=facts.memory_bytes,
        node=node,
        node_source=source,
        fault=facts.fault,
    )
    if facts.fault:
        doubts.append(f"not given out: {facts.fault}")
    return gpu, doubts


def _group(joined: Iterable[tuple[Gpu, list[str]]]) -> Iterable[str]:
    """One warning for each doubt, however many GPUs it is about."""
    about: dict[str, list[Gpu]] = {}
    for gpu, doubts in joined:
        for doubt in doubts:
            about.setdefault(doubt, []).append(gpu)
    for doubt, gpus in about.items():
        if len(gpus) == 1:
            yield f"GPU {gpus[0].index} ({gpus[0].bdf}): {doubt}"
        else:
            yield f"GPUs {', '.join(str(gpu.index) for gpu in gpus)}: {doubt}"


def choose_node(
    sysfs_node: int | None, driven: DriverGpu, nodes: Sequence[NumaNode]
) -> tuple[int | None, NodeSource, list[str]]:
    """The node of a GPU, where that is known from, and what is doubtful about it.

    Only nodes with CPUs count. The order: sysfs, NVML memory affinity, NVML CPU affinity, the
    machine's only node; nothing is ever guessed.
    """
    with_cpus = {node.id: node.cpus for node in nodes if node.kind is NodeKind.CPU}
    doubts: list[str] = []
    by_memory = [node for node in driven.memory_nodes or () if node in with_cpus]
    if sysfs_node in with_cpus:
        if by_memory and sysfs_node not in by_memory:
            doubts.append(
                f"sysfs says NUMA node {sysfs_node}, the driver says {by_memory[0]}; "
                f"{sysfs_node} is taken"
            )
        return sysfs_node, NodeSource.SYSFS, doubts
    if sysfs_node is not None:
        doubts.append(f"sysfs says NUMA node {sysfs_node}, which has no online CPUs")
    if len(by_memory) == 1:
        return by_memory[0], NodeSource.NVML_MEMORY, doubts
    for node, cpus in with_cpus.items():
        if driven.cpus and driven.cpus <= cpus:
            return node, NodeSource.NVML_CPU, doubts
    if len(with_cpus) == 1:
        return next(iter(with_cpus)), NodeSource.SINGLE_NODE, doubts
    doubts.append("NUMA node unknown, so no NUMA policy can use it")
    return None, NodeSource.UNKNOWN, doubts


def _links(pairs: Sequence[Pair], gpus: Sequence[Gpu], reading: DriverReading) -> Links:
    """The square matrix; what the driver does not say is read from the PCI tree."""
    row_of = {driven.index: row for row, driven in enumerate(reading.gpus)}

    def between(i: int, j: int) -> Link | None:
        if i == j:
            return None
        (pci_i, driven_i), (pci_j, driven_j) = pairs[i], pairs[j]
        said = (
            reading.links[row_of[driven_i.index]][row_of[driven_j.index]]
            if driven_i and driven_j
            else None
        )
        return said or _pci_link(pci_i, pci_j, gpus[i].node, gpus[j].node)

    size = range(len(gpus))
    return tuple(tuple(between(i, j) for j in size) for i in size)


def _pci_link(a: PciGpu | None, b: PciGpu | None, node_a: int | None, node_b: int | None) -> Link:
    """The path between two devices, from the bridges above them.

    A PCIe switch shows as one upstream bridge with a downstream bridge for each device.
    Source: the legend of `nvidia-smi topo -m`.
    """
    shared = 0
    if a and b:
        for bridge_a, bridge_b in zip(a.bridges, b.bridges, strict=False):
            if bridge_a != bridge_b:
                break
            shared += 1
        if shared > 1:
            below = max(len(a.bridges), len(b.bridges)) - shared
            return Link(kind=LinkKind.PIX if below <= 1 else LinkKind.PXB)
    if shared == 1:
        return Link(kind=LinkKind.PHB)
    same_node = node_a is not None and node_a == node_b
    return Link(kind=LinkKind.NODE if same_node else LinkKind.SYS)


def _bdf_key(bdf: str) -> tuple[int, str]:
    domain, _, rest = bdf.partition(":")
    return int(domain, 16), rest
