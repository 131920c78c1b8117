"""Who holds what on a node: Grants, and what they leave for others.

A Ledger never stores what can be derived: free sets and node states follow from the grants, and are
worked out once, when the ledger is made.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import groupby

from agent.core.bitmap import Bitmap
from agent.core.layout import Layout, Seats
from agent.core.topology import EMPTY, union


class NodeState(StrEnum):
    """What the placements on a node are like.

    Every holder of a GPU counts, pinned or not, by the nodes that its pod got, not by those it
    asked for.
    """

    IDLE = "idle"
    SINGLE = "single"
    """Only placements on this one node."""
    SHARED = "shared"
    """At least one placement that spans nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """What one container holds.

    `gpus` are keys (UUID, or PCI address), in the order of the machine. `cpus` are exclusively the
    pod's; empty for a container that is not pinned. Containers of a pod that run one after the
    other may hold the same. `mems` are the nodes that its memory is bound to, empty if it is not;
    `bound_bytes` is the memory limit of its whole pod, counted once a pod, 0 without a binding.
    `placed` is False for GPUs that kubelet gave a pod which is refused; it does not change what is
    held, so it does not count when grants are compared.
    """

    uid: str
    pod: str
    container: str
    gpus: tuple[str, ...] = ()
    cpus: Bitmap = EMPTY
    mems: Bitmap = EMPTY
    bound_bytes: int = 0
    placed: bool = field(default=True, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The grants on one machine, in the order (uid, container), and what they leave.

    `reserved` CPUs stay in the shared pool for ever. `free_gpus` are places of sound GPUs that
    nobody holds, `free_cpus` CPUs on nodes that nobody holds and that are not reserved. `states`
    and `bound` (node ids → bytes bound to exactly these) are by seat and by set.

    Raises ValueError if two pods hold the same GPU or CPU.
    """

    layout: Layout
    reserved: Bitmap = EMPTY
    grants: tuple[Grant, ...] = ()
    free_gpus: Bitmap = field(init=False, repr=False, compare=False)
    free_cpus: Bitmap = field(init=False, repr=False, compare=False)
    states: tuple[NodeState, ...] = field(init=False, repr=False, compare=False)
    bound: dict[Bitmap, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        layout = self.layout
        grants = tuple(sorted(self.grants, key=lambda grant: (grant.uid, grant.container)))
        gpus = cpus = EMPTY
        widths: list[tuple[Seats, str]] = []
        bound: dict[Bitmap, int] = {}
        for uid, of_pod in groupby(grants, key=lambda grant: grant.uid):
            pod = list(of_pod)
            own_gpus = layout.places(key for grant in pod for key in grant.gpus)
            own_cpus = union(grant.cpus for grant in pod)
            if both := gpus & own_gpus or cpus & own_cpus:
                raise ValueError(f"pod {pod[0].pod} ({uid}) holds {both}, which another holds")
            gpus, cpus = gpus | own_gpus, cpus | own_cpus
            widths.append((layout.seats_of(own_gpus, own_cpus), uid))
            if pod[0].mems:
                bound[pod[0].mems] = bound.get(pod[0].mems, 0) + pod[0].bound_bytes
        on_nodes = union(seat.cpus for seat in layout.seats)
        for name, value in {
            "grants": grants,
            "free_gpus": layout.sound - gpus,
            "free_cpus": on_nodes - self.reserved - cpus,
            "states": _states(layout, [seats for seats, _ in widths]),
            "bound": bound,
        }.items():
            object.__setattr__(self, name, value)

    @property
    def shared_pool(self) -> Bitmap:
        """The CPUs of everybody who is not pinned: online, held by nobody."""
        return self.layout.machine.cpus - union(grant.cpus for grant in self.grants)

    def of_pod(self, uid: str) -> tuple[Grant, ...]:
        return tuple(grant for grant in self.grants if grant.uid == uid)

    def with_grants(self, grants: Iterable[Grant]) -> "Ledger":
        return replace(self, grants=(*self.grants, *grants))

    def without(self, uids: Iterable[str]) -> "Ledger":
        """The ledger after these pods have left."""
        gone = frozenset(uids)
        return replace(self, grants=tuple(g for g in self.grants if g.uid not in gone))


def _states(layout: Layout, placements: list[Seats]) -> tuple[NodeState, ...]:
    shared = {seat for seats in placements if len(seats) > 1 for seat in seats}
    single = {seat for seats in placements if len(seats) == 1 for seat in seats}
    return tuple(
        NodeState.SHARED
        if seat in shared
        else NodeState.SINGLE
        if seat in single
        else NodeState.IDLE
        for seat in range(len(layout.seats))
    )


def last_cores(ledger: Ledger, free: Bitmap) -> tuple[Bitmap, ...] | None:
    """The last whole core of each seat that is in `free`; None where CPUs are reserved, so that the
    shared pool needs no core."""
    if ledger.reserved:
        return None
    return tuple(
        next((core for core in reversed(seat.cores) if core <= free), EMPTY)
        for seat in ledger.layout.seats
    )


def withheld(cores: tuple[Bitmap, ...] | None, seats: Seats, free: Bitmap) -> Bitmap:
    """The CPUs of `seats` that may not be given away: the last whole core, if there is none on
    other seats; all, if there is none at all. `cores` are those of last_cores."""
    if cores is None or any(core for seat, core in enumerate(cores) if seat not in seats):
        return EMPTY
    return max((cores[seat] for seat in seats), key=tuple) or free
