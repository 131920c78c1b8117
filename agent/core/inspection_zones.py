"""What a topology report says of one machine: its NUMA nodes, and who holds what there."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from agent.core.bitmap import Bitmap
from agent.core.layout import Layout
from agent.core.ledger import Grant, Ledger
from agent.core.picture import count_of
from agent.core.report import STATE_ATTRIBUTE
from agent.core.request import GPU_RESOURCE, parse_quantity
from agent.core.strict_json import Object, part, printable, shown, typed
from agent.core.topology import EMPTY


@dataclass(frozen=True, slots=True, kw_only=True)
class Zone:
    """One NUMA node with CPUs; `gpus` are those offered there, None where there are none.

    `name` is the id, in a foreign report maybe any name, and `?` for the GPUs whose node is
    unknown. `held` and `unhealthy` are counts of its GPUs. Sets are empty and counts None where the
    report does not tell.
    """

    name: str
    state: str = ""
    gpus: int | None = None
    held: int = 0
    unhealthy: int = 0
    free_gpus: Bitmap = EMPTY
    cpus: int | None = None
    free_cpus: int | None = None
    free_cpu_set: Bitmap = EMPTY
    free_memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """What one container holds: GPUs by index (and by key, where the machine has them no more), its
    NUMA nodes, its own CPUs, the nodes that its memory is bound to. `placed` as in Grant."""

    uid: str
    pod: str
    container: str
    nodes: Bitmap
    gpus: Bitmap
    lost_gpus: tuple[str, ...] = ()
    cpus: Bitmap
    mems: Bitmap
    placed: bool = True


def as_object(value: object) -> Object:
    """The value itself if it is a JSON object, else an empty one."""
    return value if type(value) is dict else {}


def natural(name: str) -> list[tuple[int, int, str]]:
    """The sort key that counts numbers in a name as numbers."""
    return [
        (1, int(piece), piece) if piece.isdecimal() else (0, 0, piece)
        for piece in re.split(r"(\d{1,18})", name)
    ]


def read_attributes(value: object) -> dict[str, str]:
    """By name; of two with one name the first, as consumers read them."""
    found: dict[str, str] = {}
    for one in value if type(value) is list else []:
        name, text = as_object(one).get("name"), as_object(one).get("value")
        if type(name) is str and type(text) is str:
            found.setdefault(name, printable(text, 40))
    return found


# --- what numalet wrote ---------------------------------------------------------------------------


def models_of(ledger: Ledger) -> tuple[str, ...]:
    return tuple(sorted({printable(gpu.model, 60) for gpu in ledger.layout.machine.gpus}))


def describe_machine(ledger: Ledger) -> str:
    """`8 × NVIDIA A800-SXM4-80GB · 2 NUMA nodes · 128 CPUs`."""
    machine = ledger.layout.machine
    models = [printable(gpu.model, 60) for gpu in machine.gpus]
    gpus = [f"{models.count(model)} × {model}" for model in models_of(ledger)]
    sizes = [count_of(len(machine.nodes), "NUMA node"), count_of(len(machine.cpus), "CPU")]
    reserved = [f"CPUs {ledger.reserved} reserved"] if ledger.reserved else []
    return " · ".join([*gpus, *sizes, *reserved])


def zones_of(ledger: Ledger, told: Mapping[str, Zone], exact: bool) -> tuple[Zone, ...]:
    """`told` are the report's own zones by name, `exact` where numalet wrote them: they know of
    memory that is bound, and of CPUs that kubelet's static CPU manager gave away."""
    layout = ledger.layout
    gpus = layout.machine.gpus
    offered = Bitmap(place for place, gpu in enumerate(gpus) if gpu.uuid)
    held = layout.places(key for grant in ledger.grants for key in grant.gpus)
    zones = []
    for number, seat in enumerate(layout.seats):
        zone = _gpu_zone(ledger, str(seat.id), seat.gpus & offered, held)
        zones.append(replace(zone, **_seat_facts(ledger, number, told.get(zone.name), exact)))
    if lost := layout.seatless & offered:
        zones.append(_gpu_zone(ledger, "?", lost, held))
    return tuple(zones)


def _gpu_zone(ledger: Ledger, name: str, gpus: Bitmap, held: Bitmap) -> Zone:
    layout = ledger.layout
    return Zone(
        name=name,
        gpus=len(gpus) or None,
        held=len(gpus & held),
        unhealthy=len(gpus - layout.sound),
        free_gpus=layout.indices(gpus & ledger.free_gpus),
    )


def _seat_facts(ledger: Ledger, number: int, told: Zone | None, exact: bool) -> dict[str, Any]:
    seat = ledger.layout.seats[number]
    free = seat.cpus & ledger.free_cpus
    known = len(free)
    if told and told.free_cpus is not None and exact:
        known = min(known, told.free_cpus)
    return {
        "state": ledger.states[number].value,
        "cpus": len(seat.cpus),
        "free_cpus": known,
        "free_cpu_set": free if known == len(free) else EMPTY,
        "free_memory_bytes": told.free_memory_bytes if told else None,
    }


def holders_of(ledger: Ledger) -> Iterator[Holder]:
    """In the order of the pods' names."""
    for grant in sorted(ledger.grants, key=lambda grant: (natural(grant.pod), grant.uid)):
        yield _holder(ledger.layout, grant)


def _holder(layout: Layout, grant: Grant) -> Holder:
    places = layout.places(grant.gpus)
    return Holder(
        uid=grant.uid,
        pod=printable(grant.pod, 400),
        container=printable(grant.container, 80),
        nodes=layout.ids(layout.seats_of(places, grant.cpus)),
        gpus=layout.indices(places),
        lost_gpus=tuple(printable(key, 60) for key in grant.gpus if key not in layout.place_of),
        cpus=grant.cpus,
        mems=grant.mems,
        placed=grant.placed,
    )


def doubts_of(ledger: Ledger) -> Iterator[str]:
    machine = ledger.layout.machine
    told = "\n".join(machine.warnings)
    for gpu in machine.gpus:
        if gpu.fault and gpu.fault not in told:
            yield f"GPU {gpu.index}: {gpu.fault}"
    yield from machine.warnings
    for pod, grants in groupby(sorted(ledger.grants, key=_pod_of), key=_pod_of):
        some = list(grants)
        if any(not grant.placed for grant in some):
            yield f"pod {pod} was refused, and holds what it has all the same"
        if any(key not in ledger.layout.place_of for grant in some for key in grant.gpus):
            yield f"pod {pod} holds a GPU that the machine has no more"


def _pod_of(grant: Grant) -> str:
    return grant.pod


# --- what others wrote ----------------------------------------------------------------------------


def parse_zones(zones: Iterable[object]) -> Iterator[Zone]:
    """Those that are NUMA nodes, in the order of their names. Raises ValueError with a sentence."""
    found = [_parse_zone(zone) for value in zones if _is_node(zone := typed(value, dict, "a zone"))]
    yield from sorted(found, key=lambda zone: natural(zone.name))


def _is_node(zone: Object) -> bool:
    return zone.get("type") == "Node"


def _parse_zone(zone: Object) -> Zone:
    name = printable(typed(zone.get("name"), str, "the name of a zone"), 40)
    has: dict[object, tuple[int, int, int]] = {}
    for value in part(zone, "resources", list):
        resource = typed(value, dict, f"a resource of {name}")
        has.setdefault(resource.get("name"), _amounts(name, resource))
    gpus = has.get(GPU_RESOURCE, (0, 0, 0))
    cpus, memory = has.get("cpu"), has.get("memory")
    return Zone(
        name=name.removeprefix("node-") if re.fullmatch(r"node-\d+", name) else name,
        state=read_attributes(zone.get("attributes")).get(STATE_ATTRIBUTE, ""),
        gpus=gpus[0] or None,
        held=max(0, gpus[1] - gpus[2]),
        unhealthy=max(0, gpus[0] - gpus[1]),
        cpus=cpus[0] if cpus else None,
        free_cpus=cpus[2] if cpus else None,
        free_memory_bytes=memory[2] if memory else None,
    )


def _amounts(zone: str, resource: Object) -> tuple[int, int, int]:
    """Capacity, allocatable, available, in whole numbers."""
    try:
        capacity, allocatable, available = (
            int(parse_quantity(resource.get(key)))
            for key in ("capacity", "allocatable", "available")
        )
    except ValueError as why:
        raise ValueError(f"{shown(resource.get('name'))} of zone {zone}: {why}") from None
    return capacity, allocatable, available
