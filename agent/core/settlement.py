"""What must change on a node, so that what is held is what the facts say.

`settle` is the only way from one ledger to the next: it keeps what still holds, adopts what already
runs pinned, drops what is gone and places what is new. It may be called again at any time; where
nothing happened nothing changes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import groupby

from agent.core.bitmap import Bitmap
from agent.core.layout import Layout, lay_out
from agent.core.ledger import Grant, Ledger, last_cores, withheld
from agent.core.placement import MemoryRule, Placement, Refusal, place
from agent.core.request import Demand, Invalid, Policy
from agent.core.shares import Held, clashes, nearest_first, share_cpus
from agent.core.topology import EMPTY, Machine, union


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


class ChangeKind(StrEnum):
    """What becomes of a pod's grants."""

    GRANT = "grant"
    """It held nothing: its containers are to be pinned, if they are not yet."""
    ADOPT = "adopt"
    """It runs pinned already and stays as it is."""
    MOVE = "move"
    """It held something else: its containers are to be pinned anew."""
    RELEASE = "release"
    """It holds nothing any more: it is gone, or refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """`grants` are those that hold from now on, none for a pod that is gone."""

    kind: ChangeKind
    uid: str
    pod: str
    grants: tuple[Grant, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A pod that is invalid, or that could not have all that it asks; what runs of it stays."""

    uid: str
    pod: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Settlement:
    """The ledger from now on, what is new in it by uid, and who could not be served.

    `notes` are (uid, sentence) about placements made just now, and about pods that hold nothing
    though somebody decided so. What a Demand notes itself is told by whoever reads it.
    """

    ledger: Ledger
    changes: tuple[Change, ...]
    refused: tuple[Refused, ...]
    notes: tuple[tuple[str, str], ...]


def settle(
    machine: Machine,
    ledger: Ledger,
    facts: Iterable[PodFact],
    memory: MemoryRule = MemoryRule.AUTO,
) -> Settlement:
    """The next ledger. The order of `facts` does not matter; no two are of one pod.

    Pods whose scheduler decided come before those that the node decides, each in the order of uids.
    A pod that is refused keeps the GPUs that kubelet gave it, and is tried again each time.
    """
    of_pod = {
        fact.demand.uid: fact
        for fact in sorted(facts, key=lambda fact: fact.demand.uid)
        if _concerns_us(fact)
    }
    before = {uid: tuple(g) for uid, g in groupby(ledger.grants, key=lambda grant: grant.uid)}
    layout = ledger.layout if machine is ledger.layout.machine else lay_out(machine)
    doubts = {
        uid: _doubt(layout, ledger.reserved, grants, of_pod[uid]) if uid in of_pod else "it is gone"
        for uid, grants in before.items()
    }
    if layout is not ledger.layout or any(doubts.values()):
        kept = tuple(grant for grant in ledger.grants if not doubts[grant.uid])
        ledger = Ledger(layout=layout, reserved=ledger.reserved, grants=kept)
    new = [fact for uid, fact in of_pod.items() if doubts.get(uid, _NEW)]
    ledger, adopted, cramped = _adopt_all(ledger, new)
    waiting = [fact for fact in new if fact.demand.uid not in adopted]
    ledger, refused, notes = _place_all(ledger, waiting, memory)
    after = {uid: tuple(g) for uid, g in groupby(ledger.grants, key=lambda grant: grant.uid)}
    changes = [
        _change(uid, before.get(uid, ()), after.get(uid, ()), uid in adopted, doubts.get(uid))
        for uid in sorted(before.keys() | after.keys())
        if before.get(uid) != after.get(uid)
    ]
    refused = tuple(sorted((*cramped, *refused), key=lambda one: one.uid))
    return Settlement(ledger=ledger, changes=tuple(changes), refused=refused, notes=notes)


_NEW = "it is new"


def _concerns_us(fact: PodFact) -> bool:
    """Whether the pod holds anything, or asks to: most pods of a node do not."""
    demand = fact.demand
    if isinstance(demand, Invalid) or any(fact.given.values()) or demand.pinned:
        return True
    return bool(demand.gpus or demand.decided_cpus)


def _change(
    uid: str, old: tuple[Grant, ...], new: tuple[Grant, ...], adopted: bool, doubt: str | None
) -> Change:
    kind = ChangeKind.MOVE if old and new else ChangeKind.RELEASE if old else ChangeKind.GRANT
    reason = doubt or _NEW
    if adopted:
        kind, reason = ChangeKind.ADOPT, "it was pinned already"
    return Change(kind=kind, uid=uid, pod=(new or old)[0].pod, grants=new, reason=reason)


def _doubt(
    layout: Layout, reserved: Bitmap, grants: tuple[Grant, ...], fact: PodFact
) -> str | None:
    """Why what a pod holds must be looked at again, None if it simply stays."""
    demand = fact.demand
    if isinstance(demand, Invalid):
        return "it is invalid"
    cpus = union(grant.cpus for grant in grants)
    if lost := cpus - union(seat.cpus for seat in layout.seats):
        return f"CPUs {lost} went offline"
    if lost := cpus & reserved:
        return f"CPUs {lost} are reserved now"
    held = {grant.container: grant.gpus for grant in grants}
    for container, keys in fact.given.items():
        if set(keys) != set(held.get(container, ())):
            return f"kubelet gave container {container} other GPUs"
    if not all(grant.placed for grant in grants):
        return "it was refused"
    return "it is not pinned yet" if demand.pinned and not cpus else None


# --- adopting -------------------------------------------------------------------------------------


def _adopt_all(ledger: Ledger, facts: Sequence[PodFact]) -> tuple[Ledger, set[str], list[Refused]]:
    """The ledger with the pods that already run pinned as they may be, their uids, and those that
    have no room for their other containers.

    What runs comes first: containers that do not run, before their start or after their end, get
    theirs when all those that do have what they run on.
    """
    running: list[PodFact] = []
    free, gpus = ledger.free_cpus, {key for grant in ledger.grants for key in grant.gpus}
    for fact in facts:
        own = {key for keys in fact.given.values() for key in keys}
        if not own & gpus and _runs_as_asked(ledger.layout, fact) and _claims(fact) <= free:
            running.append(fact)
            free, gpus = free - _claims(fact), gpus | own
    cramped: list[Refused] = []
    for fact in running:
        found = {name: pin.cpus for name, pin in fact.pinned.items()}
        cpus = _complete(ledger, fact, found, free)
        grants = _adopted(ledger.layout, fact, cpus or found)
        if cpus is None:
            grants = tuple(replace(grant, placed=False) for grant in grants)
            why = "its other containers have no room beside those that run"
            cramped.append(Refused(uid=fact.demand.uid, pod=fact.demand.pod, reason=why))
        free -= union((cpus or found).values())
        ledger = ledger.with_grants(grants)
    return ledger, {fact.demand.uid for fact in running}, cramped


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
    return sizes and not clashes(demand.containers, found) and _keeps_policy(layout, fact)


def _keeps_policy(layout: Layout, fact: PodFact) -> bool:
    """Whether a pod whose policy is strict runs on the nodes of its GPUs; a scheduler may have
    decided otherwise."""
    demand = fact.demand
    assert isinstance(demand, Demand)
    if demand.decided_cpus or demand.policy is Policy.BEST_EFFORT:
        return True
    gpus = layout.places(key for keys in fact.given.values() for key in keys)
    cpus = union(pin.cpus for pin in fact.pinned.values())
    wide = layout.seats_of(gpus, cpus)
    if demand.policy is Policy.SINGLE_NUMA_NODE:
        return len(wide) == 1
    return not gpus or wide == layout.seats_of(gpus)


def _claims(fact: PodFact) -> Bitmap:
    """The CPUs that an adopted pod holds for certain: what it runs on, and what is decided."""
    demand = fact.demand
    assert isinstance(demand, Demand)
    decided = EMPTY if demand.pinned else union(_decided(demand).values())
    return decided | union(pin.cpus for pin in fact.pinned.values())


def _decided(demand: Demand) -> Held:
    """The CPUs that a scheduler chose for each container; one set may be for all."""
    decided = dict(demand.decided_cpus or ())
    names = (container.name for container in demand.containers)
    return {name: cpus for name in names if (cpus := decided.get("") or decided.get(name))}


def _complete(ledger: Ledger, fact: PodFact, found: Held, free: Bitmap) -> Held | None:
    """The CPUs of all containers of a pod that runs pinned: those found, and for the others some
    beside them; None if there are not enough. BestEffort takes them from further nodes too."""
    demand = fact.demand
    assert isinstance(demand, Demand)
    if not demand.pinned:
        return _decided(demand) | found
    layout = ledger.layout
    gpus = {name: layout.places(keys) for name, keys in fact.given.items()}
    taken = union(found.values())
    seats = layout.seats_of(union(gpus.values()), taken)
    wider = [seats]
    if demand.policy is Policy.BEST_EFFORT:
        wider += nearest_first(layout, seats)
    cores = last_cores(ledger, free)
    for candidate in wider:
        usable = (free - withheld(cores, candidate, free)) | taken
        cpus = share_cpus(layout, demand.containers, candidate, usable, gpus, found)
        if cpus is not None:
            return cpus
    return None


def _adopted(layout: Layout, fact: PodFact, cpus: Held) -> tuple[Grant, ...]:
    demand = fact.demand
    assert isinstance(demand, Demand)
    mems = union(pin.mems for pin in fact.pinned.values())
    size = (demand.memory_bytes or 0) if mems else 0
    return _grants(layout, demand, demand.uid, fact.given, cpus, mems, size)


# --- placing --------------------------------------------------------------------------------------


def _place_all(
    ledger: Ledger, facts: Sequence[PodFact], memory: MemoryRule
) -> tuple[Ledger, tuple[Refused, ...], tuple[tuple[str, str], ...]]:
    """Places pod after pod, and those that were refused again, until nothing helps any of them."""
    waiting = sorted(facts, key=lambda fact: (not _is_decided(fact), fact.demand.uid))
    for fact in waiting:
        ledger = ledger.with_grants(_gpus_only(ledger, fact))
    notes: list[tuple[str, str]] = []
    while True:
        refused = []
        for fact in waiting:
            ledger, said, reason = _place(ledger, fact, memory)
            notes += [(fact.demand.uid, sentence) for sentence in said]
            if reason:
                refused.append((fact, reason))
        if len(refused) in (0, len(waiting)):
            break
        waiting = [fact for fact, _ in refused]
    reasons = (Refused(uid=f.demand.uid, pod=f.demand.pod, reason=why) for f, why in refused)
    return ledger, tuple(sorted(reasons, key=lambda one: one.uid)), tuple(sorted(notes))


def _is_decided(fact: PodFact) -> bool:
    demand = fact.demand
    return isinstance(demand, Demand) and bool(demand.decided_cpus or demand.decided_gpus)


def _place(
    ledger: Ledger, fact: PodFact, memory: MemoryRule
) -> tuple[Ledger, tuple[str, ...], str | None]:
    """(the ledger with the pod, notes, why it was refused)."""
    demand = fact.demand
    if isinstance(demand, Invalid):
        return ledger, (), demand.reason
    if others := _held_by_others(ledger, fact):
        return ledger, (), f"kubelet gave it GPU {others}, which another pod holds"
    layout = ledger.layout
    alone = ledger.without([demand.uid])
    given = {name: layout.places(keys) for name, keys in fact.given.items() if keys}
    placement = place(alone, demand, given, memory)
    if isinstance(placement, Refusal):
        return ledger, (), placement.reason
    gpus = {one.name: layout.keys(one.gpus) for one in placement.containers} | {
        name: keys for name, keys in fact.given.items() if keys
    }
    cpus = {one.name: one.cpus for one in placement.containers}
    size = placement.bound_bytes
    grants = _grants(layout, demand, demand.uid, gpus, cpus, placement.mems, size)
    return alone.with_grants(grants), placement.notes, None


def grants_of(layout: Layout, demand: Demand, placement: Placement, uid: str) -> tuple[Grant, ...]:
    """What a placed pod holds, under `uid`."""
    gpus = {one.name: layout.keys(one.gpus) for one in placement.containers}
    cpus = {one.name: one.cpus for one in placement.containers}
    return _grants(layout, demand, uid, gpus, cpus, placement.mems, placement.bound_bytes)


def _grants(
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


def _gpus_only(ledger: Ledger, fact: PodFact) -> tuple[Grant, ...]:
    """What a pod holds as long as nothing is decided: the GPUs that kubelet gave to it alone."""
    if not fact.given:
        return ()
    taken = {key for grant in ledger.grants for key in grant.gpus}
    own = {name: tuple(k for k in keys if k not in taken) for name, keys in fact.given.items()}
    return tuple(
        Grant(
            uid=fact.demand.uid,
            pod=fact.demand.pod,
            container=name,
            gpus=ledger.layout.in_order(keys),
            placed=False,
        )
        for name, keys in own.items()
        if keys
    )


def _held_by_others(ledger: Ledger, fact: PodFact) -> str:
    """The keys of the pod's GPUs that other pods hold, one after the other."""
    wanted = {key for keys in fact.given.values() for key in keys}
    if not wanted:
        return ""
    others = {key for grant in ledger.grants if grant.uid != fact.demand.uid for key in grant.gpus}
    return ", ".join(sorted(wanted & others))
