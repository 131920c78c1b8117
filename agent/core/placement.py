"""Who gets which GPUs and CPUs: the rules of placement.

A pod is placed as one: its containers share one set of seats (nodes), and each gets its own GPUs
and CPUs inside it. A policy is a sequence of steps, a step is a choice among sets of seats, and
every choice is the least of one key:

    exclusivity violated · width · sum of distances · link sum, more first · GPUs left over ·
    CPUs left over · lowest ids

The key is worked out from the left, and each part only for the sets that are equal so far.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import combinations
from math import comb
from typing import TypeVar

from agent.core.bitmap import Bitmap, choose_subset
from agent.core.layout import Layout, Seats
from agent.core.ledger import Ledger, NodeState, last_cores, withheld
from agent.core.obey import obey
from agent.core.picture import count_of, format_bytes
from agent.core.request import Demand, Exclusive, Policy
from agent.core.shares import fits_memory, share_cpus, share_gpus
from agent.core.topology import EMPTY, union

_T = TypeVar("_T")

MAX_SETS = 1_000
"""Sets of one width up to which all are looked at: always with 12 nodes. Beyond that, each seat
with its nearest ones, so that an answer never takes longer than a runtime waits."""


class MemoryRule(StrEnum):
    """When a pinned pod's memory is bound to its nodes."""

    AUTO = "auto"
    """When it has a limit and that fits: a strict bind that does not fit ends in an OOM kill."""
    BIND = "bind"
    LEAVE = "leave"


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerPlacement:
    """One container's places of GPUs and its CPUs, empty if it is not pinned."""

    name: str
    gpus: Bitmap
    cpus: Bitmap


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a pod goes.

    `nodes` are the ids that its GPUs and CPUs touch. `mems` are those that its memory, at most
    `bound_bytes`, is bound to, empty if it is not. `notes` are sentences about what was not obeyed
    or left alone.
    """

    nodes: Bitmap
    mems: Bitmap
    bound_bytes: int
    containers: tuple[ContainerPlacement, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a pod cannot be placed, in one sentence with numbers."""

    reason: str


def place(
    ledger: Ledger,
    demand: Demand,
    given: Mapping[str, Bitmap] | None = None,
    memory: MemoryRule = MemoryRule.AUTO,
) -> Placement | Refusal:
    """Places a pod as its scheduler decided, if that can be, else by its policy.

    `given` are the places of the GPUs that kubelet has given its containers, by name; they are the
    truth about GPUs, free or not.
    """
    layout = ledger.layout
    decided = obey(ledger, demand, given or {})
    ask = _ask(
        ledger,
        policy=demand.policy or Policy.BEST_EFFORT,
        exclusive=demand.exclusive,
        gpus=demand.gpus if decided.gpus is None else len(decided.gpus),
        cpus=demand.cpus if demand.pinned and decided.cpus is None else 0,
        given=decided.gpus,
    )
    found = _choose(ask)
    if isinstance(found, Refusal):
        return Refusal(reason="; ".join([found.reason, *decided.conflicts]))
    gpus: Mapping[str, Bitmap] = given or share_gpus(layout, demand.containers, found.gpus)
    cpus = decided.cpus or {}
    if ask.cpus:
        usable = ledger.free_cpus - ask.withheld(found.seats)
        shared = share_cpus(layout, demand.containers, found.seats, usable, gpus)
        assert shared is not None
        cpus = shared
    containers = tuple(
        ContainerPlacement(name=c.name, gpus=gpus.get(c.name, EMPTY), cpus=cpus.get(c.name, EMPTY))
        for c in demand.containers
    )
    return _bind(ledger, demand, containers, memory, decided.conflicts)


def _bind(
    ledger: Ledger,
    demand: Demand,
    containers: tuple[ContainerPlacement, ...],
    rule: MemoryRule,
    notes: tuple[str, ...],
) -> Placement:
    """The placement, with its memory bound to its nodes if the rule and the pod's limit allow."""
    gpus, cpus = union(c.gpus for c in containers), union(c.cpus for c in containers)
    layout = ledger.layout
    nodes = layout.ids(layout.seats_of(gpus, cpus))
    mems = Bitmap(
        node.id for node in layout.machine.nodes if node.id in nodes and node.memory_bytes
    )
    size = demand.memory_bytes or 0
    why = None
    if not cpus or not mems or rule is MemoryRule.LEAVE:
        mems = EMPTY
    elif rule is MemoryRule.AUTO and not size:
        why = "memory is not bound: not every container has a memory limit"
    elif rule is MemoryRule.AUTO and not fits_memory(layout, ledger.bound, mems, size):
        why = (
            f"memory is not bound: a limit of {format_bytes(size)} does not fit nodes {mems} "
            "beside what is bound there"
        )
    return Placement(
        nodes=nodes,
        mems=EMPTY if why else mems,
        bound_bytes=0 if why or not mems else size,
        containers=containers,
        notes=(*notes, why) if why else notes,
    )


def choose_gpus(ledger: Ledger, available: Bitmap, include: Bitmap, count: int) -> Bitmap:
    """The `count` best GPUs among `available`, with all of `include`; all are places.

    For whom no policy is known: as BestEffort would, in the fewest and nearest nodes. Raises
    ValueError if the numbers cannot be.
    """
    layout = ledger.layout
    if not include <= available or not len(include) <= count <= len(available):
        raise ValueError(f"{count} of {len(available)} GPUs cannot hold the {len(include)} set")
    if not include & layout.seatless:
        base = layout.seats_of(include)
        ask = _ask(ledger, Policy.BEST_EFFORT, Exclusive.REQUIRED, count, pool=available, base=base)
        if best := _best(ask, _narrowest(ask), True, include):
            return best.gpus
    return choose_subset(layout.scores, available, include, count)[0]


# --- steps ----------------------------------------------------------------------------------------


def _choose(ask: "_Ask") -> "_Found | Refusal":
    """The best set of the first step that has one."""
    if not ask.gpus and not ask.cpus:
        return _Found(seats=(), gpus=EMPTY)
    if ask.given and ask.policy is not Policy.BEST_EFFORT and ask.given & ask.layout.seatless:
        return _refuse(ask)
    for sets, soft in _steps(ask):
        if best := _best(ask, sets, soft):
            return best
    seatless = ask.pool & ask.layout.seatless
    free_choice = ask.given is None and ask.policy is Policy.BEST_EFFORT
    if free_choice and seatless and len(ask.pool) >= ask.gpus:
        chosen, _ = choose_subset(ask.layout.scores, ask.pool, EMPTY, ask.gpus)
        found = _choose(replace(ask, given=chosen, base=ask.layout.seats_of(chosen)))
        if isinstance(found, _Found):
            return found
    return _refuse(ask)


def _steps(ask: "_Ask") -> Iterator[tuple[list[Seats], bool]]:
    """(sets of one width that fit, whether exclusivity is only a wish).

    The narrowest sets of BestEffort are those of one seat, where any holds what is asked.
    """
    if ask.policy is Policy.SINGLE_NUMA_NODE:
        yield _sets(ask, 1), False
        return
    soft = ask.policy is Policy.BEST_EFFORT
    yield _narrowest(ask), soft
    if soft:
        yield _any(ask), soft


def _sets(ask: "_Ask", width: int) -> list[Seats]:
    """The sets of that width with all that is asked."""
    return [seats for seats in _holding(ask, width) if ask.fits_cpus(seats)]


def _narrowest(ask: "_Ask") -> list[Seats]:
    """The sets that fit among the narrowest that hold the GPUs; without GPUs, the CPUs."""
    return [seats for seats in _narrowest_holding(ask) if ask.fits_cpus(seats)]


def _narrowest_holding(ask: "_Ask") -> list[Seats]:
    for width in range(1, len(ask.layout.seats) + 1):
        if holding := list(_holding(ask, width)) if ask.gpus else _sets(ask, width):
            return holding
    return []


def _any(ask: "_Ask") -> list[Seats]:
    """The narrowest sets that fit and keep exclusivity; if none does, the narrowest that fit.

    Wider ones need not be looked at: width comes before all but exclusivity in the key.
    """
    unclean: list[Seats] = []
    for width in range(1, len(ask.layout.seats) + 1):
        sets = _sets(ask, width)
        if clean := [seats for seats in sets if not ask.violates(seats)]:
            return clean
        unclean = unclean or sets
    return unclean


def _holding(ask: "_Ask", width: int) -> Iterator[Seats]:
    """The sets of that width that hold the GPUs: those given, or enough to choose from."""
    need = 0 if ask.given is not None else ask.gpus
    if sum(sorted(ask.free_gpus)[-width:]) < need or width < len(ask.base):
        return
    for seats in _combinations(ask, width):
        if sum(ask.free_gpus[seat] for seat in seats) >= need:
            yield seats


def _combinations(ask: "_Ask", width: int) -> Iterator[Seats]:
    others = [seat for seat in range(len(ask.layout.seats)) if seat not in ask.base]
    more = width - len(ask.base)
    if comb(len(others), more) <= MAX_SETS:
        yield from (tuple(sorted((*ask.base, *added))) for added in combinations(others, more))
        return
    for centre in ask.base or others:
        nearest = sorted(others, key=lambda seat: ask.layout.distances[centre][seat])
        yield tuple(sorted((*ask.base, *nearest[:more])))


# --- the key --------------------------------------------------------------------------------------


def _best(ask: "_Ask", sets: list[Seats], soft: bool, include: Bitmap = EMPTY) -> "_Found | None":
    """The set with the least key, and its GPUs."""
    if not soft:
        sets = [seats for seats in sets if not ask.violates(seats)]
    if not sets:
        return None
    sets = _least(sets, ask.violates)
    sets = _least(sets, ask.distance)
    return min((_found(ask, seats, include) for seats in sets), key=lambda found: found.rest)


def _least(items: list[_T], key: Callable[[_T], int]) -> list[_T]:
    if len(items) == 1:
        return items
    keys = [key(item) for item in items]
    least = min(keys)
    return [item for item, its in zip(items, keys, strict=True) if its == least]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A set of seats with its best GPUs, and what is left of the key."""

    seats: Seats
    gpus: Bitmap
    rest: tuple[object, ...] = ()


def _found(ask: "_Ask", seats: Seats, include: Bitmap) -> _Found:
    if ask.given is not None:
        gpus, links = ask.given, 0
    else:
        among = ask.pool & ask.layout.gpus_at(seats)
        gpus, links = choose_subset(ask.layout.scores, among, include, ask.gpus)
    gpus_left = sum(ask.free_gpus[seat] for seat in seats)
    cpus_left = sum(ask.free_cpus[seat] for seat in seats)
    return _Found(seats=seats, gpus=gpus, rest=(-links, gpus_left, cpus_left, seats))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ask:
    """What is to be placed now, and what each seat has for it.

    `given` are GPUs that are decided, on the seats `base`; None if the choice among the `pool` is
    free. `last_cores` are the last whole free core of each seat, where one must stay free.
    """

    ledger: Ledger
    policy: Policy
    exclusive: Exclusive
    gpus: int
    cpus: int
    pool: Bitmap
    given: Bitmap | None
    base: Seats
    free_gpus: tuple[int, ...]
    free_cpus: tuple[int, ...]
    last_cores: tuple[Bitmap, ...] | None

    @property
    def layout(self) -> Layout:
        return self.ledger.layout

    def fits_cpus(self, seats: Seats) -> bool:
        if not self.cpus:
            return True
        free = sum(self.free_cpus[seat] for seat in seats)
        return free >= self.cpus and free - len(self.withheld(seats)) >= self.cpus

    def withheld(self, seats: Seats) -> Bitmap:
        """The CPUs of these seats that stay free, so that the shared pool keeps a core."""
        return withheld(self.last_cores, seats, self.ledger.free_cpus)

    def violates(self, seats: Seats) -> bool:
        """Whether pods of one node and of several would meet, if that matters."""
        if self.exclusive is Exclusive.PREFERRED:
            return False
        unwanted = NodeState.SHARED if len(seats) == 1 else NodeState.SINGLE
        return any(self.ledger.states[seat] is unwanted for seat in seats)

    def distance(self, seats: Seats) -> int:
        return sum(self.layout.distances[a][b] for a, b in combinations(seats, 2))


def _ask(
    ledger: Ledger,
    policy: Policy,
    exclusive: Exclusive,
    gpus: int,
    cpus: int = 0,
    given: Bitmap | None = None,
    pool: Bitmap | None = None,
    base: Seats | None = None,
) -> _Ask:
    layout = ledger.layout
    pool = ledger.free_gpus if pool is None else pool
    return _Ask(
        ledger=ledger,
        policy=policy,
        exclusive=exclusive,
        gpus=gpus,
        cpus=cpus,
        pool=pool,
        given=given,
        base=layout.seats_of(given or EMPTY) if base is None else base,
        free_gpus=tuple(len(seat.gpus & pool) for seat in layout.seats),
        free_cpus=tuple(len(seat.cpus & ledger.free_cpus) for seat in layout.seats),
        last_cores=last_cores(ledger, ledger.free_cpus) if cpus else None,
    )


# --- refusals -------------------------------------------------------------------------------------


def _refuse(ask: _Ask) -> Refusal:
    asked = [count_of(ask.gpus, "GPU")] if ask.gpus else []
    asked += [count_of(ask.cpus, "CPU")] if ask.cpus else []
    facts = [*_seat_facts(ask), f"asked {' and '.join(asked)}", *_obstacles(ask)]
    return Refusal(reason=f"{ask.policy}: {'; '.join(facts)}")


def _seat_facts(ask: _Ask) -> list[str]:
    if ask.given is None:
        return [_seats_text(ask)]
    on = f"on nodes {ask.layout.ids(ask.base)}" if ask.base else "on no known node"
    return [
        f"its GPUs {ask.layout.indices(ask.given)} are {on}",
        *([_seats_text(ask)] if ask.cpus else []),
    ]


def _seats_text(ask: _Ask) -> str:
    """`node 0 has 3 free GPUs and 40 free CPUs, node 1 (shared) has 4 and 12`."""
    texts: list[str] = []
    for seat, place in enumerate(ask.layout.seats):
        state = ask.ledger.states[seat]
        hint = ask.exclusive is Exclusive.REQUIRED and state is not NodeState.IDLE
        counts = [(ask.free_gpus[seat], "free GPU")] if ask.gpus and ask.given is None else []
        counts += [(ask.free_cpus[seat], "free CPU")] if ask.cpus else []
        words = [str(n) if texts else count_of(n, what) for n, what in counts]
        name = f"node {place.id} ({state})" if hint else f"node {place.id}"
        texts.append(f"{name} has {' and '.join(words)}")
    return ", ".join(texts)


def _obstacles(ask: _Ask) -> Iterator[str]:
    """What stood in the way beside the numbers."""
    seatless = len(ask.layout.seatless & (ask.pool if ask.given is None else ask.given))
    if seatless and ask.policy is not Policy.BEST_EFFORT:
        yield f"{count_of(seatless, 'GPU')} of unknown NUMA node cannot count"
    if any(ask.violates(seats) for sets, soft in _steps(ask) for seats in sets if not soft):
        yield "singleNUMANodeExclusive is Required"
    if ask.last_cores is not None and any(
        sum(ask.free_cpus[seat] for seat in seats) >= ask.cpus and not ask.fits_cpus(seats)
        for seats in _considered(ask)
    ):
        yield "one core stays with everybody else"


def _considered(ask: _Ask) -> list[Seats]:
    """The sets that a refused pod could have had, were there more CPUs."""
    if ask.policy is Policy.SINGLE_NUMA_NODE:
        return list(_holding(ask, 1))
    if ask.policy is Policy.RESTRICTED:
        return _narrowest_holding(ask)
    return list(_holding(ask, len(ask.layout.seats)))
