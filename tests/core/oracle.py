"""A second opinion on placement, by brute force, and the small machines it is asked about.

Written from section 2 of the design alone: every set of nodes and every set of GPUs is tried, and
what is free, whole, single or shared is worked out here from the machine and the grants. Good for
4 nodes and 8 GPUs.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Any

from agent.core.bitmap import Bitmap
from agent.core.layout import lay_out
from agent.core.ledger import Grant, Ledger
from agent.core.request import ContainerDemand, Demand, Exclusive, Policy, Role
from agent.core.topology import (
    Core,
    Gpu,
    Link,
    Machine,
    NodeKind,
    NodeSource,
    NumaNode,
    parse_link,
)

# --- small machines, ledgers and demands ----------------------------------------------------------


def build(
    *nodes: tuple[int, int],
    threads: int = 2,
    near: Mapping[tuple[int, int], int] | None = None,
    links: Mapping[tuple[int, int], str] | None = None,
    seatless: int = 0,
    faulty: Iterable[int] = (),
    memory_gib: int = 64,
    no_memory: Iterable[int] = (),
    cores_per_l3: int | None = None,
) -> Machine:
    """A machine of (GPUs, cores) for each node 0, 1, …; CPUs, cores and GPUs are numbered node by
    node, the threads of a core side by side.

    Two nodes are 20 apart, there and back each, if `near` says nothing else; two GPUs are linked by
    NODE inside a node, else by SYS, if `links` says nothing else. `seatless` more GPUs come last;
    minors are 100 above the indices.
    """
    cores: list[Core] = []
    seats: list[int | None] = []
    for node, (gpus, count) in enumerate(nodes):
        seats += [node] * gpus
        for of_node in range(count):
            first = len(cores) * threads
            l3 = (node << 8) + (of_node // cores_per_l3 if cores_per_l3 else 0)
            cpus = Bitmap(range(first, first + threads))
            cores.append(Core(id=len(cores), socket=node, node=node, l3=l3, cpus=cpus))
    seats += [None] * seatless
    return Machine(
        name="built",
        nodes=tuple(
            NumaNode(
                id=node,
                kind=NodeKind.CPU,
                cpus=Bitmap(cpu for core in cores if core.node == node for cpu in core.cpus),
                memory_bytes=0 if node in no_memory else memory_gib << 30,
                distances=tuple(_slit(near or {}, node, other) for other in range(len(nodes))),
            )
            for node in range(len(nodes))
        ),
        cores=tuple(cores),
        gpus=tuple(
            Gpu(
                index=place,
                minor=100 + place,
                uuid=f"GPU-{place}",
                bdf=f"0000:{place:02x}:00.0",
                model="A800",
                memory_bytes=80 << 30,
                node=node,
                node_source=NodeSource.UNKNOWN if node is None else NodeSource.SYSFS,
                fault="lost" if place in faulty else None,
            )
            for place, node in enumerate(seats)
        ),
        links=tuple(
            tuple(_link(links or {}, seats, a, b) for b in range(len(seats)))
            for a in range(len(seats))
        ),
    )


def _slit(near: Mapping[tuple[int, int], int], a: int, b: int) -> int:
    return 10 if a == b else near.get((min(a, b), max(a, b)), 20)


def _link(
    links: Mapping[tuple[int, int], str], seats: Sequence[int | None], a: int, b: int
) -> Link | None:
    if a == b:
        return None
    usual = "NODE" if seats[a] == seats[b] is not None else "SYS"
    return parse_link(links.get((min(a, b), max(a, b)), usual))


def grant(
    uid: str, gpus: Iterable[int] = (), cpus: str = "", mems: str = "", bound_bytes: int = 0
) -> Grant:
    """What the one container of a pod holds on a built machine."""
    return Grant(
        uid=uid,
        pod=f"ns/{uid}",
        container="main",
        gpus=tuple(f"GPU-{place}" for place in gpus),
        cpus=Bitmap.parse_list(cpus),
        mems=Bitmap.parse_list(mems),
        bound_bytes=bound_bytes,
    )


def ledger_of(machine: Machine, *grants: Grant, reserved: str = "") -> Ledger:
    return Ledger(layout=lay_out(machine), reserved=Bitmap.parse_list(reserved), grants=grants)


def asks(
    name: str = "main",
    role: Role = Role.APP,
    *,
    gpus: int = 0,
    cpus: int = 0,
    memory_gib: int | None = None,
) -> ContainerDemand:
    """What one container asks."""
    size = None if memory_gib is None else memory_gib << 30
    return ContainerDemand(name=name, role=role, gpus=gpus, cpus=cpus, memory_bytes=size)


def demand_of(
    *containers: ContainerDemand,
    policy: Policy | str | None = Policy.BEST_EFFORT,
    exclusive: Exclusive | str = Exclusive.REQUIRED,
    pinned: bool | None = None,
    **more: Any,
) -> Demand:
    """A pod of these containers, pinned where not told otherwise if all have whole CPUs."""
    return Demand(
        pod="ns/new",
        uid="new",
        policy=None if policy is None else Policy(policy),
        exclusive=Exclusive(exclusive),
        pinned=all(container.cpus for container in containers) if pinned is None else pinned,
        containers=containers,
        **{"decided_cpus": None, "decided_gpus": None, "notes": (), **more},
    )


# --- the oracle -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The nodes that the pod touches and the places of its GPUs; `key` is why it is these."""

    nodes: Bitmap
    gpus: Bitmap
    key: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class _Node:
    id: int
    gpus: frozenset[int]
    """Free ones, by place."""
    cpus: frozenset[int]
    """Free ones."""
    state: str


_Set = tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Question:
    machine: Machine
    nodes: tuple[_Node, ...]
    pool: frozenset[int]
    """All free GPUs, those of unknown node too."""
    whole: tuple[frozenset[int], ...]
    """The cores that are wholly free, in order, if one of them must stay so."""
    keeps_core: bool
    exclusive: bool
    gpus: int
    cpus: int
    given: frozenset[int] | None

    def node_ids(self, gpus: Iterable[int]) -> set[int]:
        """The known nodes of GPUs."""
        seats = {self.machine.gpus[place].node for place in gpus}
        return {node for node in seats if node is not None}

    def holds_gpus(self, chosen: _Set) -> bool:
        if self.given is not None:
            return self.node_ids(self.given) <= {node.id for node in chosen}
        return sum(len(node.gpus) for node in chosen) >= self.gpus

    def holds_cpus(self, chosen: _Set) -> bool:
        """Without reserved CPUs, the last whole core stays: if none is elsewhere, one of these."""
        if not self.cpus:
            return True
        free = {cpu for node in chosen for cpu in node.cpus}
        if self.keeps_core:
            if not self.whole:
                return False
            if all(core <= free for core in self.whole):
                free -= max(self.whole, key=min)
        return len(free) >= self.cpus

    def violates(self, chosen: _Set) -> bool:
        unwanted = "shared" if len(chosen) == 1 else "single"
        return self.exclusive and unwanted in {node.state for node in chosen}

    def links(self, some: Iterable[int], others: Iterable[int]) -> int:
        """The sum over all pairs of two different GPUs, one of each."""
        matrix = self.machine.links
        pairs = [(a, b) for a in some for b in others if a != b]
        return sum(link.score for a, b in pairs if (link := matrix[a][b]))

    def distance(self, chosen: _Set) -> int:
        """There and back between all pairs; ACPI's remote default where the firmware is silent."""
        column = {node.id: at for at, node in enumerate(self.machine.nodes)}
        rows = {node.id: node.distances for node in self.machine.nodes}
        return sum(
            rows[a.id][column[b.id]] if rows[a.id] else 20
            for a in chosen
            for b in chosen
            if a is not b
        )

    def key(self, chosen: _Set, gpus: Sequence[int]) -> tuple[object, ...]:
        free_gpus = {place for node in chosen for place in node.gpus}
        inside = 0 if self.given is not None else self.links(gpus, gpus) // 2
        return (
            self.violates(chosen),
            len(chosen),
            self.distance(chosen),
            -inside,
            len(free_gpus - set(gpus)),
            sum(len(node.cpus) for node in chosen) - self.cpus,
            sorted(node.id for node in chosen),
            self.links(gpus, free_gpus - set(gpus)),
            sorted(gpus),
        )

    def choices(self, chosen: _Set) -> Iterable[tuple[int, ...]]:
        """The sets of GPUs that the pod may have there."""
        if self.given is not None:
            return [tuple(sorted(self.given))]
        return combinations(sorted(chain(*(node.gpus for node in chosen))), self.gpus)


def second_opinion(
    ledger: Ledger, demand: Demand, given: Mapping[str, Bitmap] | None = None
) -> Answer | None:
    """Where the pod goes by the rules of the design, None if nowhere; no scheduler decided."""
    question = _question(ledger, demand, given)
    if not question.gpus and not question.cpus:
        return Answer(nodes=Bitmap(), gpus=Bitmap(), key=())
    policy = demand.policy or Policy.BEST_EFFORT
    seatless = {place for place, gpu in enumerate(ledger.layout.machine.gpus) if gpu.node is None}
    if policy is not Policy.BEST_EFFORT and seatless & (question.given or set()):
        return None
    if found := _by_steps(question, policy):
        return found
    if policy is not Policy.BEST_EFFORT or question.given is not None:
        return None
    if not seatless & question.pool or len(question.pool) < question.gpus:
        return None
    best = min(combinations(sorted(question.pool), question.gpus), key=_linked(question))
    return _by_steps(_with_given(question, best), policy)


def _linked(question: _Question) -> Callable[[tuple[int, ...]], tuple[object, ...]]:
    def key(gpus: tuple[int, ...]) -> tuple[object, ...]:
        rest = question.pool - set(gpus)
        return -question.links(gpus, gpus), question.links(gpus, rest), gpus

    return key


def _with_given(question: _Question, gpus: Iterable[int]) -> _Question:
    fields = {name: getattr(question, name) for name in _Question.__slots__}
    return _Question(**{**fields, "given": frozenset(gpus)})


def _by_steps(question: _Question, policy: Policy) -> Answer | None:
    nodes = question.nodes
    sets = [s for width in range(1, len(nodes) + 1) for s in combinations(nodes, width)]
    feasible = [s for s in sets if question.holds_gpus(s) and question.holds_cpus(s)]
    holders = question.holds_gpus if question.gpus else question.holds_cpus
    least = min((len(s) for s in sets if holders(s)), default=0)
    if question.given is not None:
        least = len(question.node_ids(question.given))
    single = [s for s in feasible if len(s) == 1]
    restricted = [s for s in feasible if len(s) == least]
    steps = {
        Policy.SINGLE_NUMA_NODE: [single],
        Policy.RESTRICTED: [restricted],
        Policy.BEST_EFFORT: [single, restricted, feasible],
    }
    for step in steps[policy]:
        clean = [s for s in step if policy is Policy.BEST_EFFORT or not question.violates(s)]
        options = [(question.key(s, gpus), s, gpus) for s in clean for gpus in question.choices(s)]
        if options:
            key, chosen, gpus = min(options, key=lambda option: option[0])
            ids = {node.id for node in chosen} if question.cpus else question.node_ids(gpus)
            return Answer(nodes=Bitmap(ids), gpus=Bitmap(gpus), key=key)
    return None


def _question(ledger: Ledger, demand: Demand, given: Mapping[str, Bitmap] | None) -> _Question:
    machine = ledger.layout.machine
    held_cpus = {cpu for grant in ledger.grants for cpu in grant.cpus}
    held_gpus = {key for grant in ledger.grants for key in grant.gpus}
    free_cpus = set(machine.cpus) - held_cpus - set(ledger.reserved)
    pool = frozenset(
        place
        for place, gpu in enumerate(machine.gpus)
        if gpu.fault is None and not {gpu.uuid, gpu.bdf} & held_gpus
    )
    nodes = tuple(
        _Node(
            node.id,
            frozenset(place for place in pool if machine.gpus[place].node == node.id),
            frozenset(free_cpus & set(node.cpus)),
            _state(machine, ledger.grants, node),
        )
        for node in machine.nodes
        if node.kind is NodeKind.CPU
    )
    gpus = frozenset(place for places in (given or {}).values() for place in places)
    return _Question(
        machine=machine,
        nodes=nodes,
        pool=pool,
        whole=tuple(frozenset(core.cpus) for core in machine.cores if set(core.cpus) <= free_cpus),
        keeps_core=not ledger.reserved,
        exclusive=demand.exclusive is Exclusive.REQUIRED,
        gpus=len(gpus) or demand.gpus,
        cpus=demand.cpus if demand.pinned else 0,
        given=gpus or None,
    )


def _state(machine: Machine, grants: Sequence[Grant], node: NumaNode) -> str:
    """Of each pod that touches the node: whether it touches others."""
    touched: dict[str, set[int]] = {}
    for grant in grants:
        nodes = touched.setdefault(grant.uid, set())
        nodes |= {n.id for n in machine.nodes if set(n.cpus) & set(grant.cpus)}
        for gpu in machine.gpus:
            if gpu.node is not None and {gpu.uuid, gpu.bdf} & set(grant.gpus):
                nodes.add(gpu.node)
    widths = {len(nodes) for nodes in touched.values() if node.id in nodes}
    if widths - {1}:
        return "shared"
    return "single" if widths else "idle"
