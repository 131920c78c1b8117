"""A Machine as an SVG: nodes as boxes, GPUs inside the node they belong to, links between them.

Boxes stand in one row or, from four on, in two whose GPUs face each other; the band below the first
row carries the NVLinks. Where every pair has the same number (NVSwitch) they are one bar, elsewhere
curves as wide as their number. Below come nodes without CPUs, the link matrix and the warnings; or,
where it is shown who holds what, the owners' colours in place of the matrix.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import combinations

from agent.core.bitmap import Bitmap
from agent.core.picture import LEGEND, count_of, format_bytes
from agent.core.topology import Core, Gpu, Link, LinkKind, Machine

_FONT = "DejaVu Sans, Verdana, Arial, sans-serif"
_INK, _FAINT, _LINE, _BOX = "#1b2733", "#5b6b7a", "#9fb0c0", "#f4f7fa"
_GPU, _FAULT, _CACHES, _NVLINK = "#d5ecd8", "#f8d7d3", ("#9dbbdc", "#c3d5ea"), "#5d9732"
_LINK_FILL = {
    LinkKind.NV: "#a9d18e",
    LinkKind.PIX: "#8fd0d8",
    LinkKind.PXB: "#b5dfe4",
    LinkKind.PHB: "#c9d3dc",
    LinkKind.NODE: "#dbe2e8",
    LinkKind.SYS: "#f1f3f5",
}
_OWNERS = (
    *("#e4572e", "#2e86ab", "#f2a541", "#7b4ea3", "#3caea3", "#c2477f", "#8c6d46", "#5c7cfa"),
    *("#b5bd3a", "#6b7280"),
)
"""The colours of pods, in turn."""
_MARGIN, _GAP, _PAD, _LINE_HEIGHT = 28, 24, 14, 20
_CARD_WIDTH, _CARD_HEIGHT, _CARD_GAP, _CARDS_ACROSS = 96, 56, 8, 8
_CELL, _CELL_GAP, _CACHE_GAP = 9, 2, 6
_BAND_HEIGHT = 120
_MATRIX_WIDTH, _MATRIX_HEIGHT = 42, 24
_LEAST_WIDTH = 760


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """A pod that holds GPUs (indices) and CPUs."""

    name: str
    gpus: Bitmap
    cpus: Bitmap


@dataclass(frozen=True, slots=True)
class _Colours:
    """Whose colour a GPU (by index) or a CPU has; those of nobody are missing."""

    gpus: dict[int, str]
    cpus: dict[int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Box:
    """A node, or the GPUs that have none."""

    title: str
    facts: str
    cores: tuple[Core, ...]
    gpus: tuple[Gpu, ...]


@dataclass(frozen=True, slots=True)
class _Spot:
    """A GPU's card (its top left corner) and the side of the band: 1 below the card, -1 above."""

    x: float
    y: float
    side: int

    @property
    def anchor(self) -> tuple[float, float]:
        """Where the GPU's links start."""
        return self.x + _CARD_WIDTH / 2, self.y + (_CARD_HEIGHT if self.side > 0 else 0)


def draw_svg(machine: Machine, owners: Sequence[Owner] = ()) -> str:
    """The picture as one SVG document; what `owners` hold has their colours."""
    colours = _colour(owners)
    boxes = _boxes(machine)
    across = len(boxes) if len(boxes) <= 3 else (len(boxes) + 1) // 2
    width = max(_box_width(box) for box in boxes)
    height = max(_box_height(box, width) for box in boxes)
    band = _BAND_HEIGHT if _nvlinks(machine) else _GAP
    top = _MARGIN + 2 * _LINE_HEIGHT + _GAP

    parts = list(_draw_title(machine))
    spots: dict[int, _Spot] = {}
    for place, box in enumerate(boxes):
        row, column = divmod(place, across)
        x, y = _MARGIN + column * (width + _GAP), top + row * (height + band)
        side = -1 if row else 1
        parts += _draw_box(box, x, y, width, height, side, colours)
        spots.update(_spots(box, x, y, width, height, side))
    parts += _draw_nvlinks(machine, spots, top + height + band // 2)
    parts += [_draw_card(gpu, spots[gpu.index], colours) for gpu in machine.gpus]
    bottom = top + height + (band + height if len(boxes) > across else band) + _GAP
    legend, bottom = _draw_legend(owners, bottom)
    rest, bottom = _draw_rest(machine, bottom, matrix=not owners)
    least = max(_LEAST_WIDTH, _MATRIX_WIDTH * (len(machine.gpus) + 2) + 2 * _MARGIN)
    total = max(least, 2 * _MARGIN + across * (width + _GAP) - _GAP)
    return _document(total, bottom + _MARGIN, [*parts, *legend, *rest])


# --- SVG in a few words ---------------------------------------------------------------------------


def _document(width: float, height: float, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" font-family="{_FONT}" fill="{_INK}">\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n'
    )
    return head + "\n".join(parts) + "\n</svg>\n"


def _text(x: float, y: float, text: str, size: int = 13, **style: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}"{_style(style)}>{_escape(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, hint: str = "", **style: str) -> str:
    shape = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"{_style(style)}'
    return f"{shape}><title>{_escape(hint)}</title></rect>" if hint else f"{shape}/>"


def _style(style: dict[str, str]) -> str:
    return "".join(f' {name.replace("_", "-")}="{value}"' for name, value in style.items())


def _escape(text: str) -> str:
    return escape("".join(c if c.isprintable() else "?" for c in text))


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


# --- boxes ----------------------------------------------------------------------------------------


def _colour(owners: Sequence[Owner]) -> _Colours:
    gpus: dict[int, str] = {}
    cpus: dict[int, str] = {}
    for i, owner in enumerate(owners):
        gpus |= dict.fromkeys(owner.gpus, _OWNERS[i % len(_OWNERS)])
        cpus |= dict.fromkeys(owner.cpus, _OWNERS[i % len(_OWNERS)])
    return _Colours(gpus, cpus)


def _boxes(machine: Machine) -> list[_Box]:
    boxes = [
        _Box(
            title=f"node {node.id} · {format_bytes(node.memory_bytes)}",
            facts=f"CPUs {node.cpus}",
            cores=tuple(core for core in machine.cores if core.node == node.id),
            gpus=tuple(gpu for gpu in machine.gpus if gpu.node == node.id),
        )
        for node in machine.cpu_nodes
    ]
    cores = tuple(core for core in machine.cores if core.node is None)
    gpus = tuple(gpu for gpu in machine.gpus if gpu.node is None)
    if cores or gpus:
        boxes.append(_Box(title="no known node", facts="", cores=cores, gpus=gpus))
    return boxes


def _box_width(box: _Box) -> int:
    cards = min(max(len(box.gpus), 3), _CARDS_ACROSS)
    return 2 * _PAD + cards * (_CARD_WIDTH + _CARD_GAP) - _CARD_GAP


def _box_height(box: _Box, width: int) -> int:
    lowest = max((y for _, _, y in _core_places(box.cores, width)), default=0)
    threads = max((len(core.cpus) for core in box.cores), default=0)
    cores = lowest + threads * (_CELL + 1) + _PAD if box.cores else 0
    return _PAD + 2 * _LINE_HEIGHT + cores + _cards_height(box) + _PAD


def _core_places(cores: Sequence[Core], width: int) -> Iterator[tuple[Core, int, int]]:
    """Each core with its place in the box: columns of threads, a wider gap between caches."""
    x = y = 0
    line = max((len(core.cpus) for core in cores), default=0) * (_CELL + 1) + _CACHE_GAP
    cache: int | None = cores[0].l3 if cores else None
    for core in sorted(cores, key=lambda core: (-1 if core.l3 is None else core.l3, core.id)):
        x += _CACHE_GAP if core.l3 != cache and x else 0
        cache = core.l3
        if x + _CELL > width - 2 * _PAD:
            x, y = 0, y + line
        yield core, x, y
        x += _CELL + _CELL_GAP


def _cards_height(box: _Box) -> int:
    return -(-len(box.gpus) // _CARDS_ACROSS) * (_CARD_HEIGHT + _CARD_GAP)


def _draw_box(
    box: _Box, x: float, y: float, width: int, height: int, side: int, colours: _Colours
) -> Iterator[str]:
    """The frame, the head and the cores; cards are drawn last, over the links."""
    yield _rect(x, y, width, height, rx="8", fill=_BOX, stroke=_LINE, stroke_width="1.5")
    x += _PAD
    y += _PAD + (0 if side > 0 else _cards_height(box))
    yield _text(x, y + 14, box.title, 15, font_weight="bold")
    cores = count_of(len(box.cores), "core")
    yield _text(x, y + 14 + _LINE_HEIGHT, _short(f"{cores} · {box.facts}", width // 8), fill=_FAINT)
    y += 2 * _LINE_HEIGHT
    for core, dx, dy in _core_places(box.cores, width):
        free = _CACHES[(core.l3 or 0) % 2]
        for thread, cpu in enumerate(core.cpus):
            hint = f"CPU {cpu} · core {core.id} · L3 {core.l3}"
            top = y + dy + thread * (_CELL + 1)
            fill = colours.cpus.get(cpu, free)
            yield _rect(x + dx, top, _CELL, _CELL, hint, fill=fill)


def _spots(
    box: _Box, x: float, y: float, width: int, height: int, side: int
) -> Iterator[tuple[int, _Spot]]:
    """The cards of a box at the edge towards the band, each row centred."""
    for i, gpu in enumerate(box.gpus):
        row, column = divmod(i, _CARDS_ACROSS)
        in_row = min(len(box.gpus) - row * _CARDS_ACROSS, _CARDS_ACROSS)
        row_width = in_row * (_CARD_WIDTH + _CARD_GAP) - _CARD_GAP
        left = x + (width - row_width) / 2 + column * (_CARD_WIDTH + _CARD_GAP)
        from_edge = _PAD + row * (_CARD_HEIGHT + _CARD_GAP)
        top = y + (height - from_edge - _CARD_HEIGHT if side > 0 else from_edge)
        yield gpu.index, _Spot(left, top, side)


def _draw_card(gpu: Gpu, spot: _Spot, colours: _Colours) -> str:
    facts = [f"{gpu.bdf} {gpu.model}", gpu.uuid or "", gpu.fault or ""]
    memory = "" if gpu.memory_bytes is None else format_bytes(gpu.memory_bytes)
    fill = colours.gpus.get(gpu.index, _FAULT if gpu.fault else _GPU)
    ink, fact = ("#ffffff",) * 2 if gpu.index in colours.gpus else (_INK, _FAINT)
    return "".join(
        (
            _rect(
                *(spot.x, spot.y, _CARD_WIDTH, _CARD_HEIGHT, " · ".join(filter(None, facts))),
                rx="5",
                fill=fill,
                stroke=_NVLINK,
            ),
            _text(spot.x + 8, spot.y + 18, f"GPU {gpu.index}", font_weight="bold", fill=ink),
            _text(spot.x + 8, spot.y + 33, gpu.bdf.removeprefix("0000:"), 11, fill=fact),
            _text(spot.x + 8, spot.y + 48, "faulty" if gpu.fault else memory, 11, fill=fact),
        )
    )


# --- links ----------------------------------------------------------------------------------------


def _nvlinks(machine: Machine) -> dict[tuple[int, int], int]:
    """(GPU index, GPU index) → NVLinks between them, for the pairs that have some."""
    pairs = combinations(range(len(machine.gpus)), 2)
    return {
        (machine.gpus[i].index, machine.gpus[j].index): link.nvlinks
        for i, j in pairs
        if (link := machine.links[i][j]) and link.nvlinks
    }


def _draw_nvlinks(machine: Machine, spots: dict[int, _Spot], band_y: float) -> Iterator[str]:
    links = _nvlinks(machine)
    every_pair = len(machine.gpus) * (len(machine.gpus) - 1) / 2
    if len(links) == every_pair > 1 and len(set(links.values())) == 1:
        yield from _draw_bus(spots, band_y, f"every pair NV{min(links.values())}")
        return
    for (a, b), count in links.items():
        yield _draw_curve(spots[a], spots[b], f"GPU {a} – GPU {b}: NV{count}", 1 + 1.5 * count)


def _draw_bus(spots: dict[int, _Spot], band_y: float, label: str) -> Iterator[str]:
    ends = [spot.anchor for spot in spots.values()]
    for x, y in ends:
        yield f'<path d="M{x:g} {y:g}V{band_y:g}" stroke="{_NVLINK}" stroke-width="3"/>'
    left, right = min(x for x, _ in ends) - 20, max(x for x, _ in ends) + 20
    yield _rect(left, band_y - 13, right - left, 26, rx="13", fill=_NVLINK)
    x = (left + right) / 2
    yield _text(x, band_y + 5, label, text_anchor="middle", font_weight="bold", fill="#ffffff")


def _draw_curve(a: _Spot, b: _Spot, hint: str, width: float) -> str:
    """Deep for GPUs far apart in one row; slanted between rows."""
    (ax, ay), (bx, by) = a.anchor, b.anchor
    depth = min(20 + abs(ax - bx) / 6, _BAND_HEIGHT * 1.25) if a.side == b.side else 50
    return (
        f'<path d="M{ax:g} {ay:g}C{ax:g} {ay + a.side * depth:g} {bx:g} {by + b.side * depth:g} '
        f'{bx:g} {by:g}" fill="none" stroke="{_NVLINK}" stroke-opacity="0.7" '
        f'stroke-width="{width:g}"><title>{_escape(hint)}</title></path>'
    )


# --- head and foot --------------------------------------------------------------------------------


def _draw_title(machine: Machine) -> Iterator[str]:
    yield _text(_MARGIN, _MARGIN + 18, machine.name, 20, font_weight="bold")
    models = sorted({gpu.model for gpu in machine.gpus})
    gpus = count_of(len(machine.gpus), "GPU") + (f" ({', '.join(models)})" if models else "")
    memory = format_bytes(sum(node.memory_bytes for node in machine.nodes))
    nodes = count_of(len(machine.nodes), "NUMA node")
    facts = [nodes, f"{len(machine.cores)} cores, {len(machine.cpus)} CPUs", memory, gpus]
    yield _text(_MARGIN, _MARGIN + 18 + _LINE_HEIGHT, " · ".join(facts), fill=_FAINT)


def _draw_legend(owners: Sequence[Owner], y: int) -> tuple[list[str], int]:
    """Whose colour is whose, and where that ends."""
    parts: list[str] = []
    for i, owner in enumerate(owners):
        parts.append(_rect(_MARGIN, y, 14, 14, fill=_OWNERS[i % len(_OWNERS)]))
        holds = f"GPUs {owner.gpus}" if owner.gpus else "no GPUs"
        holds += f" · CPUs {owner.cpus}" if owner.cpus else " · shared CPUs"
        parts.append(_text(_MARGIN + 22, y + 12, _short(f"{owner.name}   {holds}", 110)))
        y += _LINE_HEIGHT
    return parts, y + (_GAP if owners else 0)


def _draw_rest(machine: Machine, y: int, matrix: bool) -> tuple[list[str], int]:
    """What stands below the boxes, and where it ends."""
    parts: list[str] = []
    without = [node for node in machine.nodes if not node.cpus]
    for node in without:
        text = f"node {node.id} · {node.kind} · {format_bytes(node.memory_bytes)}"
        parts.append(_text(_MARGIN, y + 14, text))
        y += _LINE_HEIGHT
    if matrix and len(machine.gpus) > 1:
        y += _GAP if without else 0
        parts += _draw_matrix(machine, y)
        y += _MATRIX_HEIGHT * (len(machine.gpus) + 1) + _GAP
        used = {link.kind for row in machine.links for link in row if link}
        parts.append(_text(_MARGIN, y, " · ".join(LEGEND[k] for k in sorted(used)[::-1]), 11))
        y += _GAP
    for warning in machine.warnings:
        parts.append(_text(_MARGIN, y + 14, f"! {_short(warning, 110)}", fill="#9a5b00"))
        y += _LINE_HEIGHT
    return parts, y


def _draw_matrix(machine: Machine, y: float) -> Iterator[str]:
    x = _MARGIN + 60
    for i, gpu in enumerate(machine.gpus):
        column = x + (i + 0.5) * _MATRIX_WIDTH
        row = y + (i + 1) * _MATRIX_HEIGHT
        yield _text(column, y + 16, str(gpu.index), 12, text_anchor="middle", fill=_FAINT)
        yield _text(_MARGIN, row + 16, f"GPU {gpu.index}", 12, fill=_FAINT)
        for j, link in enumerate(machine.links[i]):
            yield _draw_cell(x + j * _MATRIX_WIDTH, row, link)


def _draw_cell(x: float, y: float, link: Link | None) -> str:
    width, height = _MATRIX_WIDTH - 2, _MATRIX_HEIGHT - 2
    if link is None:
        return _rect(x, y, width, height, fill="#ffffff")
    label = _text(x + width / 2, y + 15, str(link), 11, text_anchor="middle")
    return _rect(x, y, width, height, fill=_LINK_FILL[link.kind]) + label
