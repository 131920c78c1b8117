"""How a pod's GPUs and CPUs are shared out among its containers, and its memory bound.

Sidecars and apps hold theirs side by side. An init container runs before them, beside the sidecars
listed earlier only, so it reuses what the others will hold later.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from agent.core.bitmap import Bitmap, choose_cpus, choose_subset
from agent.core.layout import Layout, Seats
from agent.core.request import ContainerDemand, Role
from agent.core.topology import EMPTY, union

Held = dict[str, Bitmap]
"""Container name → what it holds."""


@dataclass(frozen=True, slots=True)
class _Order:
    """Holders first, as listed, so that init containers find what they can reuse."""

    holders: tuple[ContainerDemand, ...]
    inits: tuple[tuple[ContainerDemand, tuple[str, ...]], ...]
    """Each init container and the sidecars that already run beside it."""


def _order(containers: Sequence[ContainerDemand]) -> _Order:
    sidecars: tuple[str, ...] = ()
    inits = []
    for container in containers:
        if container.role is Role.SIDECAR:
            sidecars = (*sidecars, container.name)
        elif container.role is Role.INIT:
            inits.append((container, sidecars))
    holders = tuple(container for container in containers if container.role is not Role.INIT)
    return _Order(holders, tuple(inits))


def clashes(containers: Sequence[ContainerDemand], held: Mapping[str, Bitmap]) -> Bitmap:
    """The CPUs or GPUs that two containers hold which run side by side."""
    order = _order(containers)
    both = taken = EMPTY
    for container in order.holders:
        both |= held.get(container.name, EMPTY) & taken
        taken |= held.get(container.name, EMPTY)
    for container, beside in order.inits:
        both |= held.get(container.name, EMPTY) & union(held.get(name, EMPTY) for name in beside)
    return both


def share_gpus(layout: Layout, containers: Sequence[ContainerDemand], gpus: Bitmap) -> Held:
    """Each container's part of the pod's `gpus`: in order, the best linked of those left."""
    order = _order(containers)
    held: Held = {}
    left = gpus
    for container in order.holders:
        held[container.name], _ = choose_subset(layout.scores, left, EMPTY, container.gpus)
        left -= held[container.name]
    for container, beside in order.inits:
        among = gpus - union(held[name] for name in beside)
        held[container.name], _ = choose_subset(layout.scores, among, EMPTY, container.gpus)
    return held


def share_cpus(
    layout: Layout,
    containers: Sequence[ContainerDemand],
    seats: Seats,
    free: Bitmap,
    gpus: Mapping[str, Bitmap],
    held: Mapping[str, Bitmap] = MappingProxyType({}),
) -> Held | None:
    """Each container's CPUs out of `free` on `seats`, near its own GPUs, else near its pod's.

    `held` are those that have theirs already, out of `free` too; what an init container holds goes
    on to those after it. What the pod holds together is no more than its peak. None if `free` has
    not enough.
    """
    order = _order(containers)
    of_pod = union(gpus.values())
    free -= union(held.values())
    shared = dict(held)
    idle = union(shared[init.name] for init, _ in order.inits if init.name in shared)
    idle -= union(shared[one.name] for one in order.holders if one.name in shared)
    for container in order.holders:
        if container.name not in shared:
            near = gpus.get(container.name) or of_pod
            usable = idle - union(
                shared.get(init.name, EMPTY)
                for init, beside in order.inits
                if container.name in beside
            )
            again = usable.lowest(min(len(usable), container.cpus))
            more = take_cpus(layout, seats, free, near, container.cpus - len(again))
            if more is None:
                return None
            shared[container.name] = again | more
            idle, free = idle - again, free - more
    return _share_inits(layout, order, seats, free, gpus, shared)


def _share_inits(
    layout: Layout,
    order: _Order,
    seats: Seats,
    free: Bitmap,
    gpus: Mapping[str, Bitmap],
    shared: Held,
) -> Held | None:
    """`shared` with the init containers, whose CPUs are first those that the pod has anyway."""
    of_pod = union(gpus.values())
    pool = union(shared.values())
    for container, beside in order.inits:
        if container.name not in shared:
            near = gpus.get(container.name) or of_pod
            usable = pool - union(shared[name] for name in beside)
            missing = max(0, container.cpus - len(usable))
            more = take_cpus(layout, seats, free, near, missing)
            if more is None:
                return None
            free, pool = free - more, pool | more
            everywhere = tuple(range(len(layout.seats)))
            cpus = take_cpus(layout, everywhere, usable | more, near, container.cpus)
            assert cpus is not None
            shared[container.name] = cpus
    return shared


def take_cpus(
    layout: Layout, seats: Seats, free: Bitmap, near: Bitmap, count: int
) -> Bitmap | None:
    """`count` of the `free` CPUs of `seats`, in proportion to the GPUs `near` them; None if there
    are not that many."""
    caps = [len(layout.seats[seat].cpus & free) for seat in seats]
    if count > sum(caps):
        return None
    weights = [len(layout.seats[seat].gpus & near) for seat in seats]
    taken = EMPTY
    for seat, share in zip(seats, _apportion(layout, seats, weights, caps, count), strict=True):
        if share:
            here = layout.seats[seat]
            taken |= choose_cpus(here.cpus & free, here.cores, here.caches, share)
    return taken


def _apportion(
    layout: Layout, seats: Seats, weights: list[int], caps: list[int], count: int
) -> list[int]:
    """How many CPUs each seat gives: in proportion to its weight, in whole cores as far as these
    go, never more than its cap; what does not fit goes to the nearest seats without a weight."""
    if not any(weights):
        weights = [1] * len(seats)
    total, unit = sum(weights), layout.threads
    shares = [
        min(cap, count * weight // total) // unit * unit
        for weight, cap in zip(weights, caps, strict=True)
    ]
    left = count - sum(shares)
    while left:
        lacking = [i for i, weight in enumerate(weights) if weight and shares[i] < caps[i]]
        if not lacking:
            break
        most = max(lacking, key=lambda i: (count * weights[i] - shares[i] * total, -shares[i], -i))
        more = min(unit, left, caps[most] - shares[most])
        shares[most] += more
        left -= more
    for i in _by_nearness(layout, seats, weights):
        more = min(left, caps[i] - shares[i])
        shares[i] += more
        left -= more
    return shares


def nearest_first(layout: Layout, seats: Seats) -> Iterator[Seats]:
    """`seats` with the nearest other seat, with the two nearest, and so on to all."""
    wider = seats
    others = [seat for seat in range(len(layout.seats)) if seat not in seats]
    for seat in sorted(others, key=lambda seat: sum(layout.distances[seat][s] for s in seats)):
        wider = tuple(sorted((*wider, seat)))
        yield wider


def _by_nearness(layout: Layout, seats: Seats, weights: list[int]) -> list[int]:
    """The places in `seats` without a weight, nearest first to those that have one."""
    anchors = [seat for seat, weight in zip(seats, weights, strict=True) if weight]

    def distance(i: int) -> int:
        return sum(layout.distances[seats[i]][anchor] for anchor in anchors)

    return sorted((i for i, weight in enumerate(weights) if not weight), key=distance)


def fits_memory(layout: Layout, bound: Mapping[Bitmap, int], mems: Bitmap, size: int) -> bool:
    """Whether `size` more bytes may be bound to the nodes `mems` beside what is `bound` already.

    Bound memory fits if every set of nodes has room for what is bound inside it. Only sets that
    grow from `mems` by what is bound across their edge can have lost their room. Source: Hall's
    theorem.
    """
    memory = {node.id: node.memory_bytes for node in layout.machine.nodes}
    amounts = {**bound, mems: bound.get(mems, 0) + size}
    sets, grown = {mems}, [mems]
    while grown:
        nodes = grown.pop()
        wider = {nodes | other for other in bound if nodes & other} - sets
        sets |= wider
        grown += wider
    return all(
        sum(amount for inside, amount in amounts.items() if inside <= nodes)
        <= sum(memory.get(node, 0) for node in nodes)
        for nodes in sets
    )
