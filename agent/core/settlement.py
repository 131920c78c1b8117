"""What must change on a node, so that what is held is what the facts say.

`settle` is the only way from one ledger to the next: it keeps what still holds, adopts what already
runs pinned, drops what is gone and places what is new. It may be called again at any time; where
nothing happened nothing changes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from agent.core.adoption import Pin, PodFact, Refused, adopt_all, make_grants
from agent.core.bitmap import Bitmap
from agent.core.layout import Layout, lay_out
from agent.core.ledger import Grant, Ledger
from agent.core.placement import MemoryRule, Placement, Refusal, place
from agent.core.request import Demand, Invalid
from agent.core.topology import Machine, union

__all__ = [
    "Change",
    "ChangeKind",
    "Pin",
    "PodFact",
    "Refused",
    "Settlement",
    "grants_of",
    "settle",
]


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
    before = {uid: pod.grants for uid, pod in ledger.pods.items()}
    doubts, ledger, refused, notes = _settle_once(machine, ledger, of_pod, memory)
    was, rounds = None, 0
    while refused and ledger != was and rounds < _MOST_ROUNDS:  # others may have left room by now
        was, rounds = ledger, rounds + 1
        _, ledger, refused, more = _settle_once(machine, ledger, of_pod, memory)
        notes += more
    after = {uid: pod.grants for uid, pod in ledger.pods.items()}
    changes = tuple(
        _change(of_pod.get(uid), uid, before.get(uid, ()), after.get(uid, ()), doubts.get(uid))
        for uid in sorted(before.keys() | after.keys())
        if before.get(uid) != after.get(uid)
    )
    return Settlement(ledger=ledger, changes=changes, refused=refused, notes=tuple(sorted(notes)))


def _settle_once(
    machine: Machine, ledger: Ledger, of_pod: Mapping[str, PodFact], memory: MemoryRule
) -> tuple[Mapping[str, str | None], Ledger, tuple[Refused, ...], tuple[tuple[str, str], ...]]:
    """(why pods were looked at again, the next ledger, who was refused, notes)."""
    before = {uid: pod.grants for uid, pod in ledger.pods.items()}
    layout = ledger.layout if machine is ledger.layout.machine else lay_out(machine)
    doubts = {
        uid: _doubt(layout, ledger.reserved, grants, of_pod[uid]) if uid in of_pod else "it is gone"
        for uid, grants in before.items()
    }
    if layout is not ledger.layout or any(doubts.values()):
        sure = tuple(grant for grant in ledger.grants if not doubts[grant.uid])
        ledger = Ledger(layout=layout, reserved=ledger.reserved, grants=sure)
    new = [fact for uid, fact in of_pod.items() if doubts.get(uid, _NEW)]
    doubted = {
        uid: grants
        for uid, grants in before.items()
        if doubts[uid] and all(grant.placed for grant in grants)
    }
    ledger, kept, cramped = adopt_all(ledger, new, doubted)
    waiting = [fact for fact in new if fact.demand.uid not in kept]
    ledger, refused, notes = _place_all(ledger, waiting, memory)
    refused = tuple(sorted((*cramped, *refused), key=lambda one: one.uid))
    return doubts, ledger, refused, notes


def _runs_on(fact: PodFact, grants: tuple[Grant, ...]) -> bool:
    """Whether the pod runs pinned, on just what it holds."""
    cpus = {grant.container: grant.cpus for grant in grants}
    return bool(fact.pinned) and all(cpus.get(n) == pin.cpus for n, pin in fact.pinned.items())


_NEW = "it is new"
_MOST_ROUNDS = 8
"""A bound; one round after the first changes nothing as a rule."""


def _concerns_us(fact: PodFact) -> bool:
    """Whether the pod holds anything, or asks to: most pods of a node do not."""
    demand = fact.demand
    if isinstance(demand, Invalid) or any(fact.given.values()) or demand.pinned:
        return True
    return bool(demand.gpus or demand.decided_cpus)


def _change(
    fact: PodFact | None,
    uid: str,
    old: tuple[Grant, ...],
    new: tuple[Grant, ...],
    doubt: str | None,
) -> Change:
    kind = ChangeKind.MOVE if old and new else ChangeKind.RELEASE if old else ChangeKind.GRANT
    reason = doubt or _NEW
    if fact is not None and new and _runs_on(fact, new):
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
        if keys and set(keys) != set(held.get(container, ())):
            return f"kubelet gave container {container} other GPUs"
    if not all(grant.placed for grant in grants):
        return "it was refused"
    if demand.pinned and not cpus:
        return "it is not pinned yet"
    if not demand.pinned:
        return None
    return _doubt_decided(demand, grants) if demand.decided_cpus else _doubt_sizes(demand, grants)


def _doubt_decided(demand: Demand, grants: tuple[Grant, ...]) -> str | None:
    """Whether a pod with a scheduler's decision has a container more than it had."""
    held = {grant.container for grant in grants if grant.cpus}
    for container in demand.containers:
        if container.name not in held:
            return f"container {container.name} is new"
    return None


def _doubt_sizes(demand: Demand, grants: tuple[Grant, ...]) -> str | None:
    """Whether a pinned pod has other containers now, or they another size."""
    asked = {container.name: container.cpus for container in demand.containers}
    held = {grant.container: len(grant.cpus) for grant in grants if grant.cpus}
    for container in sorted(asked.keys() | held.keys()):
        if (want := asked.get(container, 0)) != held.get(container, 0):
            return f"container {container} asks for {want} CPUs now"
    return None


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
    grants = grants_of(layout, demand, placement, demand.uid, fact.given)
    return alone.with_grants(grants), placement.notes, None


def grants_of(
    layout: Layout,
    demand: Demand,
    placement: Placement,
    uid: str,
    given: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> tuple[Grant, ...]:
    """What a placed pod holds, under `uid`; `given` are the keys that kubelet named, which may be
    unknown to the machine."""
    gpus = {one.name: layout.keys(one.gpus) for one in placement.containers}
    gpus |= {name: keys for name, keys in given.items() if keys}
    cpus = {one.name: one.cpus for one in placement.containers}
    return make_grants(layout, demand, uid, gpus, cpus, placement.mems, placement.bound_bytes)


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
