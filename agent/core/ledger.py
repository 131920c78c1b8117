"""Who holds what on a node: Grants, and what they leave for others.

A Ledger never stores what can be derived: free sets and node states follow from the grants, and are
worked out once, when the ledger is made.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import groupby
from operator import is_

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
    `placed` is False for what a refused pod holds all the same: the GPUs that kubelet gave it, and
    CPUs that it runs on. It does not change what is held, so it does not count in comparisons.
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
class _Holding:
    """What one pod's grants come to: places of GPUs, CPUs, the seats that these touch."""

    grants: tuple[Grant, ...]
    gpus: Bitmap
    cpus: Bitmap
    seats: Seats


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
    pods: Mapping[str, _Holding] = field(default_factory=dict, repr=False, compare=False)
    """By uid. What is passed in is used for pods whose grants are still the very same."""
    free_gpus: Bitmap = field(init=False, repr=False, compare=False)
    free_cpus: Bitmap = field(init=False, repr=False, compare=False)
    states: tuple[NodeState, ...] = field(init=False, repr=False, compare=False)
    bound: dict[Bitmap, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        grants = tuple(sorted(self.grants, key=lambda grant: (grant.uid, grant.container)))
        pods = {
            uid: self._hold(uid, tuple(of_pod))
            for uid, of_pod in groupby(grants, key=lambda grant: grant.uid)
        }
        gpus, cpus = _disjoint(pods)
        on_nodes = union(seat.cpus for seat in self.layout.seats)
        for name, value in {
            "grants": grants,
            "pods": pods,
            "free_gpus": self.layout.sound - gpus,
            "free_cpus": on_nodes - self.reserved - cpus,
            "states": _states(self.layout, [pod.seats for pod in pods.values()]),
            "bound": _bound(pods),
        }.items():
            object.__setattr__(self, name, value)

    def _hold(self, uid: str, grants: tuple[Grant, ...]) -> _Holding:
        known = self.pods.get(uid)
        if known and len(known.grants) == len(grants) and all(map(is_, known.grants, grants)):
            return known
        gpus = self.layout.places(key for grant in grants for key in grant.gpus)
        cpus = union(grant.cpus for grant in grants)
        seats = self.layout.seats_of(gpus, cpus)
        return _Holding(grants=grants, gpus=gpus, cpus=cpus, seats=seats)

    @property
    def shared_pool(self) -> Bitmap:
        """The CPUs of everybody who is not pinned: online, held by nobody."""
        return self.layout.machine.cpus - union(grant.cpus for grant in self.grants)

    def of_pod(self, uid: str) -> tuple[Grant, ...]:
        return self.pods[uid].grants if uid in self.pods else ()

    def pin_of(self, uid: str, container: str) -> Grant | None:
        """What this container of a pod holds, if it holds CPUs."""
        grants = (grant for grant in self.of_pod(uid) if grant.container == container)
        return next((grant for grant in grants if grant.cpus), None)

    def with_grants(self, grants: Iterable[Grant]) -> "Ledger":
        more = tuple(grants)
        return replace(self, grants=(*self.grants, *more)) if more else self

    def without(self, uids: Iterable[str]) -> "Ledger":
        """The ledger after these pods have left."""
        gone = self.pods.keys() & set(uids)
        if not gone:
            return self
        return replace(self, grants=tuple(g for g in self.grants if g.uid not in gone))


def _disjoint(pods: Mapping[str, _Holding]) -> tuple[Bitmap, Bitmap]:
    """All GPUs and all CPUs that are held. Raises ValueError where two pods hold the same."""
    gpus = cpus = EMPTY
    for uid, pod in pods.items():
        for what, both in (("GPUs", gpus & pod.gpus), ("CPUs", cpus & pod.cpus)):
            if both:
                name = pod.grants[0].pod
                raise ValueError(f"pod {name} ({uid}) holds {what} {both}, which another holds")
        gpus, cpus = gpus | pod.gpus, cpus | pod.cpus
    return gpus, cpus


def _bound(pods: Mapping[str, _Holding]) -> dict[Bitmap, int]:
    bound: dict[Bitmap, int] = {}
    for pod in pods.values():
        first = pod.grants[0]
        if first.mems:
            bound[first.mems] = bound.get(first.mems, 0) + first.bound_bytes
    return bound


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
