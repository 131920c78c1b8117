"""A Machine seen as placement sees it: what each node has, laid out once for many decisions.

Nodes with CPUs are counted 0, 1, … in ascending order of ids; such a number is a *seat*. GPUs are
counted as they stand in `machine.gpus`; sets of GPUs are Bitmaps of these places. Sets of seats are
ascending tuples.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from agent.core.bitmap import Bitmap
from agent.core.topology import EMPTY, Core, Gpu, Machine, NumaNode, union

Seats = tuple[int, ...]

_UNKNOWN_DISTANCE = 20
"""Between nodes whose distance the firmware does not tell. Source: ACPI's remote default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A node with CPUs: `cores` and `caches` are sets of CPUs in ascending order of numbers."""

    id: int
    cpus: Bitmap
    gpus: Bitmap
    cores: tuple[Bitmap, ...]
    caches: tuple[Bitmap, ...]
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """`distances[a][b]` are there and back between two seats, 0 on the diagonal. `scores[a][b]` are
    those of the links between two GPUs. `seatless` are the GPUs whose node is unknown, `sound`
    those without a fault. `threads` is how many CPUs most of the cores have."""

    machine: Machine
    seats: tuple[Seat, ...]
    distances: tuple[tuple[int, ...], ...]
    scores: tuple[tuple[int, ...], ...]
    seatless: Bitmap
    sound: Bitmap
    threads: int
    place_of: dict[str, int]
    """GPU key → place."""

    def seats_of(self, gpus: Bitmap, cpus: Bitmap = EMPTY) -> Seats:
        """The seats that these GPUs and CPUs touch."""
        return tuple(
            number
            for number, seat in enumerate(self.seats)
            if not seat.gpus.isdisjoint(gpus) or not seat.cpus.isdisjoint(cpus)
        )

    def gpus_at(self, seats: Seats) -> Bitmap:
        return union(self.seats[seat].gpus for seat in seats)

    def ids(self, seats: Seats) -> Bitmap:
        """The NUMA node ids of seats."""
        return Bitmap(self.seats[seat].id for seat in seats)

    def indices(self, gpus: Bitmap) -> Bitmap:
        """What people call these GPUs."""
        return Bitmap(self.machine.gpus[place].index for place in gpus)

    def keys(self, gpus: Bitmap) -> tuple[str, ...]:
        return tuple(key(self.machine.gpus[place]) for place in gpus)

    def in_order(self, keys: Iterable[str]) -> tuple[str, ...]:
        """The keys in the order of the machine, those that it does not have last."""
        beyond = len(self.machine.gpus)
        return tuple(sorted(keys, key=lambda key: (self.place_of.get(key, beyond), key)))

    def places(self, keys: Iterable[str]) -> Bitmap:
        """The places of those GPUs that the machine has."""
        return Bitmap(self.place_of[key] for key in keys if key in self.place_of)


def key(gpu: Gpu) -> str:
    """What a GPU is known by: its UUID or, where no driver told it, its PCI address."""
    return gpu.uuid or gpu.bdf


def lay_out(machine: Machine) -> Layout:
    """The layout of a machine. Costs about a millisecond, so it is kept while the machine is."""
    sizes = [len(core.cpus) for core in machine.cores]
    nodes = machine.cpu_nodes
    return Layout(
        machine=machine,
        seats=tuple(_seat(machine, node) for node in nodes),
        distances=tuple(tuple(_distance(machine, a, b) for b in nodes) for a in nodes),
        scores=tuple(tuple(link.score if link else 0 for link in row) for row in machine.links),
        seatless=Bitmap(i for i, gpu in enumerate(machine.gpus) if gpu.node is None),
        sound=Bitmap(i for i, gpu in enumerate(machine.gpus) if gpu.fault is None),
        threads=max(sizes, key=lambda size: (sizes.count(size), size)),
        place_of={key(gpu): place for place, gpu in enumerate(machine.gpus)},
    )


def _seat(machine: Machine, node: NumaNode) -> Seat:
    cores = [core for core in machine.cores if core.node == node.id]
    return Seat(
        id=node.id,
        cpus=node.cpus,
        gpus=Bitmap(i for i, gpu in enumerate(machine.gpus) if gpu.node == node.id),
        cores=tuple(core.cpus for core in cores),
        caches=_caches(cores),
        memory_bytes=node.memory_bytes,
    )


def _caches(cores: Iterable[Core]) -> tuple[Bitmap, ...]:
    cpus_of: dict[int, Bitmap] = {}
    for core in cores:
        if core.l3 is not None:
            cpus_of[core.l3] = cpus_of.get(core.l3, EMPTY) | core.cpus
    return tuple(cpus_of[l3] for l3 in sorted(cpus_of))


def _distance(machine: Machine, a: NumaNode, b: NumaNode) -> int:
    if a is b:
        return 0
    column_a, column_b = machine.nodes.index(a), machine.nodes.index(b)
    there = a.distances[column_b] if a.distances else _UNKNOWN_DISTANCE
    back = b.distances[column_a] if b.distances else _UNKNOWN_DISTANCE
    return there + back
