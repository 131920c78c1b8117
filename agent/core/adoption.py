"""Which pods already run pinned as they may, and stay as they are.

After a restart of the agent, or where a pod was pinned before anybody placed it, what runs is the
truth: nothing is placed before all of it has what it runs on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from agent.core.bitmap import Bitmap
from agent.core.layout import Layout
from agent.core.ledger import Grant, Ledger, last_cores, withheld
from agent.core.request import Demand, Invalid, Policy
from agent.core.shares import Held, clashes, nearest_first, share_cpus
from agent.core.topology import EMPTY, union


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """CPUs and memory nodes (empty if not bound) that a running container is pinned to."""

    cpus: Bitmap
    mems: Bitmap = EMPTY


@dataclass(frozen=True, slots=True, kw_only=True)
class PodFact:
    """A pod that is on the node now.

    `given` are the keys of the GPUs that kubelet gave its containers, by name. `pinned` are the
    pins of an agent, this one or an earlier, found on its running containers.
    """

    demand: Demand | Invalid
    given: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    pinned: Mapping[str, Pin] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A pod that is invalid, or that could not have all that it asks; what runs of it stays."""

    uid: str
    pod: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Claim:
    """What a pod keeps: `found` are the CPUs of containers that have theirs, `own` are all that it
    holds or runs on."""

    fact: PodFact
    found: Held
    own: Bitmap
    prior: tuple[Grant, ...]


def adopt_all(
    ledger: Ledger,
    facts: Sequence[PodFact],
    before: Mapping[str, tuple[Grant, ...]] = MappingProxyType({}),
) -> tuple[Ledger, set[str], list[Refused]]:
    """The ledger with the pods that already run pinned as they may be, their uids, and those that
    have no room for their other containers. So are pods that held something `before`, by uid, and
    whose containers are others now: what they held stays theirs.

    What runs comes first: containers that do not run, before their start or after their end, get
    theirs when all those that do have what they run on.
    """
    claims: list[_Claim] = []
    free, gpus = ledger.free_cpus, {key for grant in ledger.grants for key in grant.gpus}
    for fact in facts:
        taken = {key for keys in fact.given.values() for key in keys}
        claim = None if taken & gpus else _claim(ledger, fact, before.get(fact.demand.uid, ()))
        if claim is not None and claim.own <= free:
            claims.append(claim)
            free, gpus = free - claim.own, gpus | taken
    ledger, left, free = _complete_all(ledger, claims, free)
    kept = {claim.fact.demand.uid for claim in claims} - {one.fact.demand.uid for one in left}
    cramped: list[Refused] = []
    for claim in left:
        demand = claim.fact.demand
        if claim.fact.pinned:  # else nothing of it runs, and it is placed anew
            ledger = ledger.with_grants(_running(ledger.layout, claim))
            why = "its other containers have no room beside those that run"
            if isinstance(demand, Invalid):
                why = demand.reason
            cramped.append(Refused(uid=demand.uid, pod=demand.pod, reason=why))
            kept.add(demand.uid)
    return ledger, kept, cramped


def _complete_all(
    ledger: Ledger, claims: Sequence[_Claim], free: Bitmap
) -> tuple[Ledger, list[_Claim], Bitmap]:
    """The ledger with those that have room for all their containers, the others, and what is free.

    What one gives back may be what another needs, so they are tried until that helps nobody.
    """
    left = list(claims)
    while True:
        waiting, left = left, []
        for claim in waiting:
            cpus = _complete(ledger, claim, free)
            if cpus is None:
                left.append(claim)
            else:
                free = (free | claim.own) - union(cpus.values())
                ledger = ledger.with_grants(_adopted(ledger.layout, claim, cpus))
        if len(left) in (0, len(waiting)):
            return ledger, left, free


def _claim(ledger: Ledger, fact: PodFact, prior: tuple[Grant, ...]) -> _Claim | None:
    """What the pod keeps, None for one that is to be placed as if it were new."""
    demand, layout = fact.demand, ledger.layout
    held = {grant.container: grant.cpus for grant in prior if grant.cpus}
    pins = {name: pin.cpus for name, pin in fact.pinned.items()}
    if isinstance(demand, Invalid):
        own = union(pins.values())
        return _Claim(fact=fact, found=pins, own=own, prior=prior) if pins else None
    if not demand.pinned:
        stays = _same_gpus(fact, prior) or _runs_as_asked(layout, fact)
        own = union(_decided(demand).values()) | union(pins.values())
        return _Claim(fact=fact, found=pins, own=own, prior=prior) if stays else None
    if not _runs_as_asked(layout, fact):
        moved = any(fact.given.values()) and not _same_gpus(fact, prior)
        if moved or not held or not _keeps_policy(layout, fact, union(held.values())):
            return None
        pins = {}
    asked = {container.name: container.cpus for container in demand.containers}
    same = {name: cpus for name, cpus in held.items() if len(cpus) == asked.get(name)}
    found = pins if clashes(demand.containers, same | pins) else same | pins
    own = union(held.values()) | union(pins.values())
    return _Claim(fact=fact, found=found, own=own, prior=prior)


def _same_gpus(fact: PodFact, prior: tuple[Grant, ...]) -> bool:
    """Whether a pod without CPUs holds what it held before, in whatever containers."""
    had = {key for grant in prior for key in grant.gpus}
    return bool(had) and had == {key for keys in fact.given.values() for key in keys}


def _runs_as_asked(layout: Layout, fact: PodFact) -> bool:
    """Whether the pins found are ones that the pod may have: its own containers, of the size asked,
    none shared by two that run side by side, where its policy or its scheduler wants them."""
    demand = fact.demand
    if isinstance(demand, Invalid) or not fact.pinned:
        return False
    found = {name: pin.cpus for name, pin in fact.pinned.items()}
    if not demand.pinned:
        return bool(demand.decided_cpus) and found.keys() <= _decided(demand).keys()
    asked = {container.name: container.cpus for container in demand.containers}
    sizes = all(len(cpus) == asked.get(name) for name, cpus in found.items())
    if not sizes or clashes(demand.containers, found):
        return False
    return _keeps_policy(layout, fact, union(found.values()))


def _keeps_policy(layout: Layout, fact: PodFact, cpus: Bitmap) -> bool:
    """Whether a pod whose policy is strict has these CPUs on the nodes of its GPUs; a scheduler may
    have decided otherwise."""
    demand = fact.demand
    assert isinstance(demand, Demand)
    if demand.decided_cpus or demand.policy is Policy.BEST_EFFORT:
        return True
    gpus = layout.places(key for keys in fact.given.values() for key in keys)
    wide = layout.seats_of(gpus, cpus)
    if demand.policy is Policy.SINGLE_NUMA_NODE:
        return len(wide) == 1
    return not gpus or wide == layout.seats_of(gpus)


def _decided(demand: Demand) -> Held:
    """The CPUs that a scheduler chose for each container; one set may be for all."""
    decided = dict(demand.decided_cpus or ())
    names = (container.name for container in demand.containers)
    return {name: cpus for name in names if (cpus := decided.get("") or decided.get(name))}


def _complete(ledger: Ledger, claim: _Claim, free: Bitmap) -> Held | None:
    """The CPUs of all containers of a pod: those found, and for the others some of its own, else
    some beside them; None if there are not enough. BestEffort takes them from further nodes too,
    and so does Restricted where no GPUs hold it to some."""
    fact, demand = claim.fact, claim.fact.demand
    if isinstance(demand, Invalid):
        return None
    if not demand.pinned:
        return _decided(demand) | claim.found
    layout = ledger.layout
    gpus = {name: layout.places(keys) for name, keys in fact.given.items()}
    every = union(gpus.values())
    seats = layout.seats_of(every, claim.own)
    named = {name: cpus for name, cpus in demand.decided_cpus or () if name}
    chosen = {name: cpus for name, cpus in named.items() if cpus <= free | claim.own}
    found = chosen | claim.found
    found = claim.found if clashes(demand.containers, found) else found
    of_own = share_cpus(layout, demand.containers, seats, claim.own, gpus, claim.found)
    if of_own is not None and found == claim.found:
        return of_own
    wider = [seats]
    if demand.policy is Policy.BEST_EFFORT or (demand.policy is Policy.RESTRICTED and not every):
        wider += nearest_first(layout, seats)
    cores = last_cores(ledger, free)
    for candidate in wider:
        usable = (free - withheld(cores, candidate, free)) | claim.own | union(found.values())
        cpus = share_cpus(layout, demand.containers, candidate, usable, gpus, found)
        if cpus is not None:
            return cpus
    return None


def _adopted(layout: Layout, claim: _Claim, cpus: Held) -> tuple[Grant, ...]:
    fact, demand = claim.fact, claim.fact.demand
    assert isinstance(demand, Demand)
    mems = union(pin.mems for pin in fact.pinned.values())
    mems = mems or union(grant.mems for grant in claim.prior)
    size = (demand.memory_bytes or 0) if mems else 0
    given = fact.given
    if not any(given.values()):
        given = {grant.container: grant.gpus for grant in claim.prior}
    return make_grants(layout, demand, demand.uid, given, cpus, mems, size)


def _running(layout: Layout, claim: _Claim) -> tuple[Grant, ...]:
    """What a pod holds that is refused while it runs."""
    fact, demand = claim.fact, claim.fact.demand
    if isinstance(demand, Demand):
        return tuple(replace(grant, placed=False) for grant in _adopted(layout, claim, claim.found))
    return tuple(
        Grant(
            uid=demand.uid,
            pod=demand.pod,
            container=name,
            gpus=layout.in_order(fact.given.get(name, ())),
            cpus=claim.found.get(name, EMPTY),
            mems=fact.pinned[name].mems if name in fact.pinned else EMPTY,
            placed=False,
        )
        for name in fact.given.keys() | claim.found.keys()
    )


def make_grants(
    layout: Layout,
    demand: Demand,
    uid: str,
    gpus: Mapping[str, tuple[str, ...]],
    cpus: Mapping[str, Bitmap],
    mems: Bitmap,
    bound_bytes: int,
) -> tuple[Grant, ...]:
    """A grant for each container that holds something."""
    return tuple(
        Grant(
            uid=uid,
            pod=demand.pod,
            container=container.name,
            gpus=layout.in_order(gpus.get(container.name, ())),
            cpus=cpus.get(container.name, EMPTY),
            mems=mems,
            bound_bytes=bound_bytes,
        )
        for container in demand.containers
        if gpus.get(container.name) or cpus.get(container.name)
    )
