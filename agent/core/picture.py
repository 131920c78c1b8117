"""A Machine as text: a tree of sockets, nodes, caches and GPUs, the link matrix, warnings last."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from agent.core.topology import Core, Gpu, Link, LinkKind, Machine, NodeSource, NumaNode, union

_RESET = "\x1b[0m"
_BOLD, _DIM, _RED, _GREEN, _YELLOW, _CYAN = (
    f"\x1b[{code}m" for code in ("1", "2", "31", "32", "33", "36")
)
_COLOURS = {LinkKind.NV: _GREEN, LinkKind.PIX: _CYAN, LinkKind.PXB: _CYAN, LinkKind.SYS: _DIM}
LEGEND = {
    LinkKind.NV: "NVn = n NVLinks, direct or through NVSwitch",
    LinkKind.PIX: "PIX = one PCIe switch",
    LinkKind.PXB: "PXB = several PCIe switches",
    LinkKind.PHB: "PHB = one PCIe host bridge",
    LinkKind.NODE: "NODE = host bridges of one NUMA node",
    LinkKind.SYS: "SYS = across NUMA nodes",
}
_USUAL = (NodeSource.SYSFS, NodeSource.UNKNOWN)
_Paint = Callable[[str, str], str]
"""(text, ANSI code) → what is printed; makes any text safe for a terminal."""


@dataclass(frozen=True, slots=True)
class _Branch:
    label: str
    children: "Sequence[_Branch]" = ()


def draw_text(machine: Machine, *, colour: bool = False) -> str:
    """The picture, lines ending with a newline; `colour` adds ANSI escapes."""

    def paint(text: str, code: str) -> str:
        clean = "".join(c if c.isprintable() else "?" for c in text)
        return f"{code}{clean}{_RESET}" if colour and code else clean

    lines = [_headline(machine, paint), "", *_draw(_tree(machine, paint))]
    if machine.gpus:
        lines += ["", *_matrix(machine, paint)]
    if machine.warnings:
        lines += ["", *(paint(f"! {warning}", _YELLOW) for warning in machine.warnings)]
    return "".join(f"{line}\n" for line in lines)


def format_bytes(count: int) -> str:
    """`512 GiB`, `1.5 TiB`: two digits or more, in the largest fitting binary unit."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if value >= 9.95 else f"{value:.2g} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def count_of(count: int, noun: str) -> str:
    """`1 core`, `2 cores`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _headline(machine: Machine, paint: _Paint) -> str:
    facts = [
        count_of(len(machine.nodes), "NUMA node"),
        count_of(len(machine.cores), "core"),
        count_of(len(machine.cpus), "CPU"),
        format_bytes(sum(node.memory_bytes for node in machine.nodes)),
        count_of(len(machine.gpus), "GPU"),
    ]
    if machine.offline_cpus:
        facts.append(f"CPUs {machine.offline_cpus} offline")
    if machine.isolated_cpus:
        facts.append(f"CPUs {machine.isolated_cpus} isolated")
    return f"{paint(machine.name, _BOLD)}   {' · '.join(facts)}"


# --- the tree -------------------------------------------------------------------------------------


def _draw(branches: Sequence[_Branch], indent: str = "", top: bool = True) -> Iterator[str]:
    for branch in branches:
        last = branch is branches[-1]
        stem, below = ("", "") if top else ("└─ ", "   ") if last else ("├─ ", "│  ")
        yield f"{indent}{stem}{branch.label}"
        yield from _draw(branch.children, indent + below, top=False)


def _tree(machine: Machine, paint: _Paint) -> list[_Branch]:
    """Nodes under their sockets, then nodes without CPUs, then what has no node."""
    gpu_lines = dict(zip(machine.gpus, _gpu_lines(machine.gpus, paint), strict=True))
    by_socket: dict[tuple[int, ...], list[_Branch]] = {}
    for node in machine.nodes:
        cores = [core for core in machine.cores if core.node == node.id]
        sockets = tuple(sorted({core.socket for core in cores}))
        children = [_Branch(label) for label in _core_lines(cores)]
        children += [_Branch(gpu_lines[gpu]) for gpu in machine.gpus if gpu.node == node.id]
        by_socket.setdefault(sockets, []).append(_Branch(_node_line(node, paint), children))
    homeless = [core for core in machine.cores if core.node is None]
    lost = [_Branch(label) for label in _core_lines(homeless)]
    lost += [_Branch(gpu_lines[gpu]) for gpu in machine.gpus if gpu.node is None]
    branches = [
        _Branch(paint(_socket_name(sockets), _BOLD), nodes)
        for sockets, nodes in sorted(by_socket.items(), key=lambda item: item[0] or (1 << 31,))
    ]
    return branches + ([_Branch(paint("no known node", _BOLD), lost)] if lost else [])


def _socket_name(sockets: tuple[int, ...]) -> str:
    if not sockets:
        return "no socket"
    return f"socket{'s' if len(sockets) > 1 else ''} {', '.join(map(str, sockets))}"


def _node_line(node: NumaNode, paint: _Paint) -> str:
    facts = [format_bytes(node.memory_bytes)]
    facts += [f"CPUs {node.cpus}"] if node.cpus else [str(node.kind)]
    if node.distances:
        facts.append(f"distances {' '.join(map(str, node.distances))}")
    facts += [f"{pages} hugepages of {format_bytes(size)}" for size, pages in node.hugepages]
    return f"{paint(f'node {node.id}', _BOLD)}   {'   '.join(facts)}"


def _core_lines(cores: Sequence[Core]) -> Iterator[str]:
    """A line for each last-level cache, or one for all where no two cores share one."""
    caches: dict[int | None, list[Core]] = {}
    for core in cores:
        caches.setdefault(core.l3, []).append(core)
    if len(caches) == len(cores) > 1:
        yield f"{_cores(cores)}, each with its own last-level cache"
        return
    for cache, members in caches.items():
        name = "cache unknown" if cache is None else f"L3 {cache}"
        cpus = union(core.cpus for core in members)
        yield f"{name}   {_cores(members)}   CPUs {cpus}"


def _cores(cores: Sequence[Core]) -> str:
    threads = {len(core.cpus) for core in cores}
    each = f" of {threads.pop()} threads ({cores[0].cpus} …)" if threads not in ({1}, set()) else ""
    return count_of(len(cores), "core") + each


def _gpu_lines(gpus: Sequence[Gpu], paint: _Paint) -> list[str]:
    """One line a GPU, in columns as wide as their widest entry."""
    rows = [
        (
            f"GPU {gpu.index}",
            gpu.bdf,
            "" if gpu.minor is None else f"/dev/nvidia{gpu.minor}",
            gpu.model,
            "" if gpu.memory_bytes is None else format_bytes(gpu.memory_bytes),
            gpu.uuid or "",
            "" if gpu.node_source in _USUAL else f"node from {gpu.node_source}",
        )
        for gpu in gpus
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "   ".join(
            paint(cell.ljust(width), _GREEN if i == 0 else "")
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            if width
        ).rstrip()
        + (f"   {paint('not given out', _RED)}" if gpu.fault else "")
        for gpu, row in zip(gpus, rows, strict=True)
    ]


# --- the link matrix ------------------------------------------------------------------------------


def _matrix(machine: Machine, paint: _Paint) -> Iterator[str]:
    """As `nvidia-smi topo -m` prints it, with the CPUs and the node of each GPU at the end."""
    names = [f"GPU{gpu.index}" for gpu in machine.gpus]
    cpus = {node.id: str(node.cpus) for node in machine.nodes}
    affinity = ["?" if gpu.node is None else cpus[gpu.node] for gpu in machine.gpus]
    wide = max(len("CPU affinity"), *map(len, affinity))
    head = " " * 8 + "".join(f"{name:<7}" for name in names) + f"{'CPU affinity':<{wide}}  node"
    yield paint(head, _BOLD)
    for gpu, name, row, near in zip(machine.gpus, names, machine.links, affinity, strict=True):
        cells = "".join(_matrix_cell(link, paint) for link in row)
        node = "?" if gpu.node is None else gpu.node
        yield f"{paint(f'{name:<8}', _BOLD)}{cells}{near:<{wide}}  {node}"
    if used := {link.kind for row in machine.links for link in row if link}:
        yield paint(" · ".join(LEGEND[kind] for kind in sorted(used, reverse=True)), _DIM)


def _matrix_cell(link: Link | None, paint: _Paint) -> str:
    return f"{' X':<7}" if link is None else paint(f"{link!s:<7}", _COLOURS.get(link.kind, ""))
