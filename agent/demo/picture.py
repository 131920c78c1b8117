"""Who has what on a machine, as text: a table of pods, and the cores with the letters of pods."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from string import ascii_lowercase, ascii_uppercase
from typing import Final

from agent.core.bitmap import Bitmap
from agent.core.topology import Core, Gpu, Machine, NumaNode

_WIDTH: Final = 94
_GAP: Final = 4
_MOST_CORES: Final = 64
"""In one row."""
_FREE: Final = "·"
_LETTERS: Final = ascii_lowercase + ascii_uppercase
_COLOURS: Final = ("34", "33", "35", "36", "32", "31")


def letter(number: int) -> str:
    """What the pod of this number is drawn as."""
    return _LETTERS[number] if number < len(_LETTERS) else "#"


def colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A pod that holds GPUs (indices) and CPUs; `number` is its letter's."""

    number: int
    gpus: Bitmap
    cpus: Bitmap


Cell = tuple[str, str]
"""A text and its ANSI colour, empty for none."""


def draw_nodes(machine: Machine, holders: Sequence[Holder]) -> Iterator[list[Cell]]:
    """The lines as cells: NUMA nodes side by side as far as they fit, GPUs above cores."""
    owners = {cpu: one.number for one in holders for cpu in one.cpus}
    cards = {index: one.number for one in holders for index in one.gpus}
    blocks = [_draw_node(machine, node, owners, cards) for node in machine.cpu_nodes]
    if lost := [gpu for gpu in machine.gpus if gpu.node is None]:
        blocks.append([[("GPUs of no known node", "")], _draw_cards(lost, cards)])
    row: list[list[list[Cell]]] = []
    for block in blocks:
        if row and sum(map(_width, row)) + len(row) * _GAP + _width(block) > _WIDTH:
            yield from _beside(row)
            yield []
            row = []
        row.append(block)
    yield from _beside(row)


def _draw_node(
    machine: Machine, node: NumaNode, owners: Mapping[int, int], cards: Mapping[int, int]
) -> list[list[Cell]]:
    cores = [core for core in machine.cores if core.node == node.id]
    gpus = [gpu for gpu in machine.gpus if gpu.node == node.id]
    block = [[(f"node {node.id}", "1")]]
    if gpus:
        block.append(_draw_cards(gpus, cards))
    for start in range(0, len(cores), _MOST_CORES):
        block += _draw_cores(cores[start : start + _MOST_CORES], owners)
    return block


def _draw_cards(gpus: Sequence[Gpu], cards: Mapping[int, int]) -> list[Cell]:
    cells: list[Cell] = []
    for gpu in gpus:
        number = cards.get(gpu.index)
        if number is not None:
            cells.append((f"[{gpu.index} {letter(number)}] ", colour(number)))
        else:
            cells.append((f"[{gpu.index} {'✗' if gpu.fault else _FREE}] ", ""))
    return cells


def _draw_cores(cores: Sequence[Core], owners: Mapping[int, int]) -> list[list[Cell]]:
    """A column for each core, a row for each of its threads."""
    rows: list[list[Cell]] = []
    for threads in zip_longest(*(core.cpus for core in cores)):
        rows.append([_draw_cpu(cpu, owners) for cpu in threads])
    return rows


def _draw_cpu(cpu: int | None, owners: Mapping[int, int]) -> Cell:
    number = owners.get(cpu) if cpu is not None else None
    if number is None:
        return (" " if cpu is None else _FREE, "")
    return letter(number), colour(number)


def _width(block: list[list[Cell]]) -> int:
    return max(sum(len(text) for text, _ in line) for line in block)


def _beside(blocks: Sequence[list[list[Cell]]]) -> Iterator[list[Cell]]:
    for lines in zip_longest(*blocks, fillvalue=[]):
        row: list[Cell] = []
        for line, block in zip(lines, blocks, strict=True):
            width = sum(len(text) for text, _ in line)
            row += [*line, (" " * (_width(block) - width + _GAP), "")]
        yield row


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell; the last cell of a row may take several lines."""
    widths: dict[int, int] = {}
    for row in rows:
        for column, cell in enumerate(row[:-1]):
            widths[column] = max(widths.get(column, 0), len(cell))
    return [line for row in rows for line in _wrap(row, widths)]


def _wrap(row: Sequence[str], widths: Mapping[int, int]) -> Iterator[str]:
    """One line, or more where the last cell is long."""
    start = "".join(f"{cell:<{widths[i]}}   " for i, cell in enumerate(row[:-1]))
    lines = textwrap.wrap(row[-1], max(30, _WIDTH - len(start)), break_on_hyphens=False) or [""]
    for line in lines:
        yield f"{start}{line}".rstrip()
        start = " " * len(start)
