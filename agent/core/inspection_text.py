"""Views of a cluster's nodes as a table, as a text node by node with the pods, as JSON."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Final

from agent.core.inspection import OURS, NodeView, count_all, count_gpus
from agent.core.inspection_zones import Holder, Zone
from agent.core.picture import format_bytes
from agent.core.strict_json import Object

Cell = tuple[str, str]
"""(text, ANSI code or "")."""

_RESET = "\x1b[0m"
_BOLD, _DIM, _RED, _GREEN, _YELLOW = (f"\x1b[{code}m" for code in ("1", "2", "31", "32", "33"))
_STATES: Final = {"idle": _DIM, "single": _GREEN, "shared": _YELLOW}
_GAP: Final = "   "
_NARROWEST: Final = 24
"""Columns that warnings get on the narrowest terminal."""
_UNKNOWN: Final = "-"


def draw_cluster(
    views: Sequence[NodeView],
    *,
    wide: bool = False,
    colour: bool = False,
    width: int | None = None,
    whole: bool = True,
) -> str:
    """One line a node, then what all have together; lines end with a newline.

    Only the last column, warnings, has blanks in its cells. It is cut to the `width` of a terminal
    if there is one; `wide` tells all. `whole`: these are all nodes of the cluster.
    """
    head = _WIDE_HEAD if wide else _HEAD
    rows = [[(title, _BOLD) for title in head], *(_row(view, wide) for view in views)]
    return "".join(
        [*_lines(rows, colour, None if wide else width), "\n", f"{_footer(views, whole)}\n"]
    )


def draw_details(views: Sequence[NodeView], *, colour: bool = False, whole: bool = True) -> str:
    """Node by node: its NUMA nodes, then which container holds what; what all have together."""
    parts = ["".join(_detail(view, colour)) for view in views]
    return "\n".join([*parts, f"{_footer(views, whole)}\n"])


def _footer(views: Iterable[NodeView], whole: bool) -> str:
    gpus = count_all(views)
    share = f" ({100 * gpus.held / gpus.total:.1f}%)" if gpus.total else ""
    where = "in the cluster" if whole else "of these nodes"
    text = f"Allocated/total GPUs {where}: {gpus.held}/{gpus.total}{share}"
    if gpus.unhealthy:
        text += f", {gpus.unhealthy} unhealthy"
    if gpus.untold:
        text += f"; {gpus.untold} more without a report"
    return text


# --- the table ------------------------------------------------------------------------------------

_HEAD: Final = (
    *("NODE", "GPUS", "NUMA GPUS", "FREE CPUS", "STATE"),
    *("POLICY", "PINNING", "WARNINGS"),
)
_WIDE_HEAD: Final = (
    *("NODE", "STATUS", "MODEL", "GPUS", "NUMA GPUS", "FREE CPUS", "FREE MEMORY", "STATE"),
    *("POLICY", "SCOPE", "PINNING", "REPORTER", "WARNINGS"),
)


def _row(view: NodeView, wide: bool) -> list[Cell]:
    free = any(zone.gpus and zone.held + zone.unhealthy < zone.gpus for zone in view.zones)
    row = {
        "NODE": (view.name, ""),
        "STATUS": (view.status or _UNKNOWN, _RED if view.status.startswith("NotReady") else ""),
        "MODEL": (_models(view), ""),
        "GPUS": (_gpus(view), _GREEN if free else ""),
        "NUMA GPUS": (_by_zone(view.zones, _zone_gpus), ""),
        "FREE CPUS": (_by_zone(view.zones, lambda zone: _number(zone.free_cpus)), ""),
        "FREE MEMORY": (_by_zone(view.zones, _memory), ""),
        "STATE": _states(view.zones),
        "POLICY": (view.policy or _UNKNOWN, ""),
        "SCOPE": (view.scope or _UNKNOWN, ""),
        "PINNING": (view.pinning or _UNKNOWN, ""),
        "REPORTER": (view.reporter or _UNKNOWN, ""),
        "WARNINGS": (_warnings(view, wide), _YELLOW if view.warnings else ""),
    }
    return [row[title] for title in (_WIDE_HEAD if wide else _HEAD)]


def _gpus(view: NodeView) -> str:
    gpus = count_gpus([view])
    if gpus.untold:
        return f"?/{gpus.untold}"
    return f"{gpus.held}/{gpus.total}" if gpus.total else _UNKNOWN


def _models(view: NodeView) -> str:
    return ",".join("-".join(model.split()) for model in view.models) or _UNKNOWN


def _zone_gpus(zone: Zone) -> str:
    return _UNKNOWN if zone.gpus is None else f"{zone.held}/{zone.gpus}"


def _number(count: int | None) -> str:
    return _UNKNOWN if count is None else str(count)


def _memory(zone: Zone) -> str:
    count = zone.free_memory_bytes
    return _UNKNOWN if count is None else format_bytes(count).replace(" ", "")


def _states(zones: Sequence[Zone]) -> Cell:
    """One word where all are in the same state."""
    states = [zone.state for zone in zones if zone.name != "?"]
    if len(set(states)) == 1:
        return states[0] or _UNKNOWN, _STATES.get(states[0], "")
    shared = _YELLOW if "shared" in states else ""
    return _by_zone(
        [z for z in zones if z.name != "?"], lambda zone: zone.state or _UNKNOWN
    ), shared


def _by_zone(zones: Sequence[Zone], describe: Callable[[Zone], str]) -> str:
    """`4/4,1/4`, and `0:4/4,8:1/4` where nodes are not 0, 1, …; one `-` where all have none."""
    names = [zone.name for zone in zones if zone.name != "?"]
    dense = names == [str(place) for place in range(len(names))]
    cells = [(zone.name, describe(zone)) for zone in zones]
    cells = [(name, text) for name, text in cells if name != "?" or text != _UNKNOWN]
    if all(text == _UNKNOWN for _, text in cells):
        return _UNKNOWN
    return ",".join(text if dense and name != "?" else f"{name}:{text}" for name, text in cells)


def _warnings(view: NodeView, wide: bool) -> str:
    if wide or len(view.warnings) < 2:
        return "; ".join(view.warnings) or _UNKNOWN
    return f"{view.warnings[0]} (+{len(view.warnings) - 1})"


# --- the details ----------------------------------------------------------------------------------

_ZONE_HEAD: Final = ("NUMA", "GPUS", "FREE GPUS", "FREE CPUS", "", "FREE MEMORY", "STATE")
_HOLDER_HEAD: Final = ("NAMESPACE", "POD", "CONTAINER", "NUMA", "GPUS", "CPUS", "MEMORY NODES", "")


def _detail(view: NodeView, colour: bool) -> Iterator[str]:
    policy = f"kubelet policy {view.policy}" if view.policy else ""
    scope = f"scope {view.scope}" if view.scope else ""
    pinning = f"pinning {view.pinning}" if view.pinning else ""
    foreign = f"reported by {view.reporter}" if view.reporter not in ("", OURS) else ""
    facts = (view.machine, view.status, policy, scope, pinning, foreign)
    head: list[Cell] = [(view.name, _BOLD), (" · ".join(fact for fact in facts if fact), "")]
    yield from _lines([head], colour)
    yield from _lines([[(f"! {warning}", _YELLOW)] for warning in view.warnings], colour)
    if view.zones:
        rows = [_titles(_ZONE_HEAD), *map(_zone_row, view.zones)]
        yield from _lines(rows, colour, indent="  ")
    if view.holders:
        rows = [_titles(_HOLDER_HEAD), *map(_holder_row, view.holders)]
        yield from _lines(rows, colour, indent="  ")


def _titles(titles: Iterable[str]) -> list[Cell]:
    return [(title, _BOLD) for title in titles]


def _zone_row(zone: Zone) -> list[Cell]:
    return [
        (zone.name, ""),
        (_zone_gpus(zone), ""),
        (str(zone.free_gpus) or _UNKNOWN, ""),
        (_number(zone.free_cpus), ""),
        (str(zone.free_cpu_set), ""),
        (_memory(zone), ""),
        (zone.state or _UNKNOWN, _STATES.get(zone.state, "")),
    ]


def _holder_row(holder: Holder) -> list[Cell]:
    namespace, _, pod = holder.pod.rpartition("/")
    gpus = [str(holder.gpus)] * bool(holder.gpus) + list(holder.lost_gpus)
    return [
        (namespace or _UNKNOWN, ""),
        (pod, ""),
        (holder.container, ""),
        (str(holder.nodes) or _UNKNOWN, ""),
        (",".join(gpus) or _UNKNOWN, ""),
        (str(holder.cpus) or _UNKNOWN, ""),
        (str(holder.mems) or _UNKNOWN, ""),
        ("" if holder.placed else "refused", _YELLOW),
    ]


# --- lines ----------------------------------------------------------------------------------------


def _lines(
    rows: Sequence[Sequence[Cell]], colour: bool, width: int | None = None, indent: str = ""
) -> Iterator[str]:
    """Columns as wide as their widest cell; empty ones are left out. Any text is safe to print."""
    columns = [column for column in zip(*rows, strict=True) if any(text for text, _ in column)]
    widths = [max(len(text) for text, _ in column) for column in columns]
    if width is not None and widths:
        taken = sum(widths[:-1]) + len(_GAP) * (len(widths) - 1)
        widths[-1] = min(widths[-1], max(_NARROWEST, width - taken))
    for row in zip(*columns, strict=True):
        cells = [
            _cell(text, code, size, colour) for (text, code), size in zip(row, widths, strict=True)
        ]
        yield (indent + _GAP.join(cells)).rstrip() + "\n"


def _cell(text: str, code: str, width: int, colour: bool) -> str:
    clean = "".join(char if char.isprintable() else "?" for char in text)
    if len(clean) > width:
        clean = clean[: width - 1] + "…"
    blank = " " * (width - len(clean))
    return f"{code}{clean}{_RESET}{blank}" if colour and code and clean else clean + blank


# --- JSON -----------------------------------------------------------------------------------------


def inspection_to_json(views: Iterable[NodeView]) -> Object:
    """Keys in their documented order; null for what no report tells."""
    nodes = list(views)
    gpus = count_all(nodes)
    return {
        "gpus": {
            "allocated": gpus.held,
            "total": gpus.total,
            "unhealthy": gpus.unhealthy,
            "unreported": gpus.untold,
        },
        "nodes": [_view_to_json(view) for view in nodes],
    }


def _view_to_json(view: NodeView) -> Object:
    gpus = count_gpus([view])
    return {
        "name": view.name,
        "status": view.status,
        "reporter": view.reporter,
        "topology_policy": view.policy,
        "topology_scope": view.scope,
        "pinning": view.pinning,
        "gpus": {"allocated": gpus.held, "total": gpus.total, "unhealthy": gpus.unhealthy},
        "numa_nodes": [_zone_to_json(zone) for zone in view.zones],
        "pods": [
            {"uid": uid, "pod": pod, "containers": [_holder_to_json(one) for one in of_pod]}
            for (uid, pod), of_pod in groupby(view.holders, key=lambda one: (one.uid, one.pod))
        ],
        "warnings": list(view.warnings),
    }


def _zone_to_json(zone: Zone) -> Object:
    return {
        "name": zone.name,
        "state": zone.state,
        "gpus": zone.gpus or 0,
        "allocated_gpus": zone.held,
        "unhealthy_gpus": zone.unhealthy,
        "free_gpus": list(zone.free_gpus),
        "cpus": zone.cpus,
        "free_cpus": zone.free_cpus,
        "free_cpu_list": str(zone.free_cpu_set),
        "free_memory_bytes": zone.free_memory_bytes,
    }


def _holder_to_json(holder: Holder) -> Object:
    return {
        "name": holder.container,
        "numa_nodes": list(holder.nodes),
        "gpus": list(holder.gpus),
        "lost_gpus": list(holder.lost_gpus),
        "cpus": str(holder.cpus),
        "memory_nodes": list(holder.mems),
        "placed": holder.placed,
    }
