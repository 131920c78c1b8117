"""Which pods already run pinned as they may, and stay as they are.

After a restart of the agent, or where a pod was pinned before anybody placed it, what runs is the
truth: nothing is placed before all of it has what it runs on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

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


def adopt_all(ledger: Ledger, facts: Sequence[PodFact]) -> tuple[Ledger, set[str], list[Refused]]:
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
    return make_grants(layout, demand, demand.uid, fact.given, cpus, mems, size)


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
