"""What kubelet is offered, what is preferred and how it is given out: tables computed by hand,
brute force over all sets of GPUs, and whatever kubelet may send."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import combinations, permutations
from typing import NamedTuple

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from agent.core.bitmap import Bitmap
from agent.core.decision import DecidedGpus, GpuKey
from agent.core.layout import lay_out
from agent.core.ledger import Grant, Ledger
from agent.core.offer import (
    Allocation,
    Device,
    Holding,
    IdKind,
    Manner,
    Offer,
    allocate,
    keys_by_id,
    make_offer,
    prefer,
    to_fact,
)
from agent.core.placement import Refusal
from agent.core.request import Demand, Exclusive, Invalid, Policy, Role
from agent.core.settlement import settle
from agent.core.topology import Machine
from tests.core.machines import described
from tests.core.oracle import asks, build, demand_of, grant, ledger_of

UUID, INDEX = IdKind.UUID, IdKind.INDEX
BY_UUID, BY_INDEX = Manner(), Manner(ids=INDEX, visible=INDEX)


def offer_of(machine: Machine, manner: Manner = BY_UUID) -> Offer:
    return make_offer(lay_out(machine), manner)


def changed(machine: Machine, place: int, **facts: object) -> Machine:
    """The machine with other facts of one GPU."""
    gpus = list(machine.gpus)
    gpus[place] = replace(gpus[place], **facts)  # type: ignore[arg-type]
    return replace(machine, gpus=tuple(gpus))


# --- what is offered ------------------------------------------------------------------------------

SIX = build((2, 2), (2, 2), (2, 2))
SPARSE = replace(SIX, gpus=tuple(replace(gpu, index=2 * gpu.index + 1) for gpu in SIX.gpus))
NODES = [(0,), (0,), (1,), (1,), (2,), (2,)]


class Offered(NamedTuple):
    """A machine, and the ids, the nodes and the faulty ones of the devices."""

    machine: Machine
    ids: list[str]
    nodes: list[tuple[int, ...]]
    manner: Manner = BY_UUID
    unhealthy: tuple[str, ...] = ()


OFFERED = {
    "all GPUs, by UUID": Offered(SIX, [f"GPU-{i}" for i in range(6)], NODES),
    "all GPUs, by index": Offered(SIX, list("012345"), NODES, BY_INDEX),
    "by an index with gaps": Offered(SPARSE, ["1", "3", "5", "7", "9", "11"], NODES, BY_INDEX),
    "what containers see has no part in it": Offered(
        SIX, list("012345"), NODES, Manner(ids=INDEX, visible=UUID)
    ),
    "faulty GPUs, as unhealthy": Offered(
        build((2, 2), (2, 2), faulty=[1, 2]),
        ["GPU-0", "GPU-1", "GPU-2", "GPU-3"],
        NODES[:4],
        unhealthy=("GPU-1", "GPU-2"),
    ),
    "no GPU that the driver never named": Offered(
        changed(SIX, 1, uuid=None),
        ["GPU-0", "GPU-2", "GPU-3", "GPU-4", "GPU-5"],
        [(0,), (1,), (1,), (2,), (2,)],
    ),
    "no GPU that the driver never named, by index": Offered(
        changed(SIX, 1, uuid=None),
        ["0", "2", "3", "4", "5"],
        [(0,), (1,), (1,), (2,), (2,)],
        BY_INDEX,
    ),
    "no nodes at all where one is unknown": Offered(
        build((2, 2), (1, 2), seatless=1), ["GPU-0", "GPU-1", "GPU-2", "GPU-3"], [()] * 4
    ),
    "no nodes at all where that of a faulty one is unknown": Offered(
        build((2, 2), seatless=1, faulty=[2]),
        ["GPU-0", "GPU-1", "GPU-2"],
        [()] * 3,
        unhealthy=("GPU-2",),
    ),
    "nodes, where the one of unknown node is not offered": Offered(
        changed(build((2, 2), seatless=1), 2, uuid=None), ["GPU-0", "GPU-1"], [(0,), (0,)]
    ),
    "node 0 of the only node": Offered(build((1, 2)), ["GPU-0"], [(0,)]),
    "nothing where nothing is": Offered(build((0, 2)), [], []),
}


@pytest.mark.parametrize("row", OFFERED.values(), ids=OFFERED)
def test_what_is_offered(row: Offered) -> None:
    assert offer_of(row.machine, row.manner).devices == tuple(
        Device(id=name, healthy=name not in row.unhealthy, nodes=nodes)
        for name, nodes in zip(row.ids, row.nodes, strict=True)
    )


def test_the_devices_of_a_real_machine() -> None:
    devices = offer_of(described("a800x8")).devices
    assert [device.nodes for device in devices] == [(0,)] * 4 + [(1,)] * 4
    assert all(device.healthy and len(device.id) == 40 for device in devices)
    assert len({device.id for device in devices}) == 8


@pytest.mark.parametrize(
    ("manner", "ids"),
    [(BY_UUID, ("GPU-0", "GPU-3")), (BY_INDEX, ("1", "7"))],
    ids=["by UUID", "by index"],
)
def test_ids_and_places_of_gpus(manner: Manner, ids: tuple[str, ...]) -> None:
    offer = offer_of(changed(SPARSE, 1, uuid=None), manner)
    assert offer.ids(Bitmap([0, 3])) == ids
    assert offer.places(reversed(ids)) == Bitmap([0, 3])
    assert offer.places([*ids, *ids, "", "GPU-1", "3", "GPU-99"]) == Bitmap([0, 3])


# --- whatever kubelet sends -----------------------------------------------------------------------


@st.composite
def ledgers(draw: st.DrawFn) -> Ledger:
    """Up to eight GPUs on up to three nodes; some are held, faulty, of unknown node or unnamed."""
    shape = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), min_size=1, max_size=3))
    seatless = draw(st.sampled_from([0, 0, 0, 2])) if sum(gpus for gpus, _ in shape) < 7 else 0
    count = sum(gpus for gpus, _ in shape) + seatless
    pairs, apart = combinations(range(count), 2), combinations(range(len(shape)), 2)
    machine = build(
        *shape,
        near={pair: draw(st.sampled_from([20, 12, 32])) for pair in apart},
        links={pair: draw(st.sampled_from(["SYS", "PIX", "NV1", "NV2"])) for pair in pairs}
        if draw(st.booleans())
        else None,
        seatless=seatless,
        faulty=draw(st.sets(st.sampled_from(range(8)), max_size=1)),
    )
    for place in draw(st.sampled_from([[], [], [], [0]])):
        machine = changed(machine, place, uuid=None) if count else machine
    owners = draw(st.lists(st.sampled_from(["", "", "a", "b"]), min_size=count, max_size=count))
    cores = draw(st.permutations(machine.cores))
    return ledger_of(
        machine,
        *(
            grant(uid, [at for at, owner in enumerate(owners) if owner == uid], str(core.cpus))
            for uid, core in zip("ab", cores, strict=False)
        ),
    )


@st.composite
def pods(draw: st.DrawFn) -> Demand:
    """Pods of one container or two, with a policy or a scheduler's decision or neither."""
    pinned = draw(st.booleans())
    roles = draw(st.sampled_from([[Role.APP], [Role.APP, Role.APP], [Role.INIT, Role.APP]]))
    policies = list(Policy) if pinned else [None, *Policy]
    numbers = draw(st.none() | st.sets(st.integers(0, 8), min_size=1, max_size=4))
    by = draw(st.sampled_from(GpuKey))
    first = 100 if by is GpuKey.MINOR else 0
    return demand_of(
        *(
            asks(
                f"c{at}",
                role,
                gpus=draw(st.integers(0, 4)),
                cpus=draw(st.integers(1, 4)) if pinned else 0,
            )
            for at, role in enumerate(roles)
        ),
        policy=draw(st.sampled_from(policies)),
        exclusive=draw(st.sampled_from(Exclusive)),
        pinned=pinned,
        decided_gpus=numbers
        and DecidedGpus(by=by, numbers=tuple(first + n for n in sorted(numbers))),
    )


IDS = st.sampled_from([f"GPU-{i}" for i in range(9)] + [str(i) for i in range(9)])
SENT = st.lists(IDS | IDS | st.text(max_size=5), max_size=14)
COUNTS = st.integers(-3, 9) | st.integers(0, 9) | st.integers(-(2**31), 2**31 - 1)


@settings(max_examples=250, deadline=None)
@given(ledgers(), st.lists(pods(), max_size=3), SENT, SENT, COUNTS, st.sampled_from(IdKind))
def test_whatever_kubelet_sends_it_gets_what_can_be(
    ledger: Ledger,
    pending: list[Demand],
    available: list[str],
    include: list[str],
    count: int,
    ids: IdKind,
) -> None:
    offer = make_offer(ledger.layout, Manner(ids=ids))
    known = {device.id for device in offer.devices}
    pending = [replace(pod, pod=f"ns/{at}", uid=str(at)) for at, pod in enumerate(pending)]
    must, among = set(include) & known, (set(available) | set(include)) & known
    chosen = prefer(offer, ledger, pending, available, include, count)
    event(f"{len(chosen)} of {len(among)} with {len(must)}")
    assert len(set(chosen)) == len(chosen) == max(0, min(count, len(among)))
    assert set(chosen) <= among
    assert set(chosen) <= must if count < len(must) else set(chosen) >= must
    assert prefer(offer, ledger, pending, available[::-1], include[::-1], count) == chosen
    assert prefer(offer, ledger, pending, available * 2, include * 2, count) == chosen


# --- the best sets, by brute force ----------------------------------------------------------------


def best_set(
    ledger: Ledger, available: Iterable[int], include: Iterable[int], count: int
) -> tuple[int, ...]:
    """All sets of that many GPUs are looked at. Without a policy, the design wants: the fewest
    nodes; then exclusivity kept (one node without pods that span nodes, or several of which none
    has only pods of one node); then nodes that are near, good links, few GPUs left over, few CPUs
    left over, low ids; then few links to what is left, low places."""
    machine, must = ledger.layout.machine, set(include)
    pool = set(available) | must
    sets = [some for some in combinations(sorted(pool), count) if must <= set(some)]
    known = [s for s in sets if all(machine.gpus[place].node is not None for place in s)]
    if known:
        return min(known, key=lambda some: _key(ledger, pool, some))
    return min(sets, key=lambda some: (-_links(machine, some, some), *_rest(machine, pool, some)))


def _key(ledger: Ledger, pool: set[int], some: tuple[int, ...]) -> tuple[object, ...]:
    machine = ledger.layout.machine
    nodes = sorted({machine.gpus[place].node for place in some}, key=str)
    there = {place for place in pool if machine.gpus[place].node in nodes}
    widths = [{len(held) for held in _holders(ledger) if node in held} for node in nodes]
    cpus = {cpu for node in machine.nodes if node.id in nodes for cpu in node.cpus}
    at = {node.id: i for i, node in enumerate(machine.nodes)}
    return (
        len(nodes),
        bool(widths[0] - {1}) if len(nodes) == 1 else {1} in widths,
        sum(
            n.distances[at[m]] for n in machine.nodes for m in nodes if n.id in nodes and n.id != m
        ),
        -_links(machine, some, some),
        len(there) - len(some),
        len(cpus - {cpu for grant_ in ledger.grants for cpu in grant_.cpus} - set(ledger.reserved)),
        nodes,
        *_rest(machine, there, some),
    )


def _holders(ledger: Ledger) -> list[set[int | None]]:
    """The nodes of each pod that holds anything."""
    machine = ledger.layout.machine
    return [
        {gpu.node for gpu in machine.gpus if gpu.uuid in held.gpus and gpu.node is not None}
        | {node.id for node in machine.nodes if set(node.cpus) & set(held.cpus)}
        for held in ledger.grants
    ]


def _rest(machine: Machine, pool: set[int], some: tuple[int, ...]) -> tuple[object, ...]:
    return _links(machine, some, pool - set(some)), some


def _links(machine: Machine, some: Iterable[int], others: Iterable[int]) -> int:
    links = [machine.links[a][b] for a in some for b in others]
    return sum(link.score for link in links if link)


@settings(max_examples=200, deadline=None)
@given(ledgers(), st.data())
def test_the_preferred_set_is_what_brute_force_says(ledger: Ledger, data: st.DataObject) -> None:
    offer = make_offer(ledger.layout, BY_UUID)
    places = sorted(offer.place_of.values())
    if not places:
        return
    available = data.draw(st.sets(st.sampled_from(places), min_size=1))
    include = data.draw(st.sets(st.sampled_from(sorted(available)), max_size=2))
    count = data.draw(st.integers(max(1, len(include)), len(available)))
    chosen = prefer(offer, ledger, (), to_ids(available), to_ids(include), count)
    sound = {place for place in available if ledger.layout.machine.gpus[place].fault is None}
    among = sound | include if len(sound | include) >= count else available
    assert chosen == to_ids(best_set(ledger, among, include, count))


def to_ids(places: Iterable[int]) -> tuple[str, ...]:
    return tuple(f"GPU-{place}" for place in places)


SERVERS = ["a800x8", "v100x8-cube", "pcie8-pairs", "l20x8-5plus3", "rtx4090x8", "b200x8-snc3"]


@pytest.mark.parametrize("name", SERVERS)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_on_real_servers_it_is_what_brute_force_says(name: str, data: st.DataObject) -> None:
    machine = described(name)
    ids = [gpu.uuid or "" for gpu in machine.gpus]
    owners = data.draw(st.lists(st.sampled_from(["", "", "a", "b"]), min_size=8, max_size=8))
    grants = [
        Grant(
            uid=uid,
            pod=f"ns/{uid}",
            container="main",
            gpus=tuple(one for one, owner in zip(ids, owners, strict=True) if owner == uid),
        )
        for uid in "ab"
    ]
    ledger = ledger_of(machine, *grants)
    free = [place for place, owner in enumerate(owners) if not owner] or [0]
    count = data.draw(st.integers(1, len(free)))
    include = data.draw(st.sampled_from([[], [], [free[-1]]]))
    chosen = prefer(
        offer_of(machine),
        ledger,
        (),
        [ids[place] for place in free],
        [ids[place] for place in include],
        count,
    )
    assert [ids.index(one) for one in chosen] == list(best_set(ledger, free, include, count))


class Best(NamedTuple):
    """Of eight A800 (0-3 on node 0, 4-7 on node 1), all linked alike."""

    held: dict[str, list[int]]
    available: list[int]
    include: list[int]
    count: int
    expected: list[int]


ALL = list(range(8))
BEST = {
    "one of all": Best({}, ALL, [], 1, [0]),
    "one where a node is broken already": Best({"a": [4]}, [0, 1, 2, 3, 5, 6, 7], [], 1, [5]),
    "four of all": Best({}, ALL, [], 4, [0, 1, 2, 3]),
    "four where one of a node is held": Best({"a": [0]}, ALL[1:], [], 4, [4, 5, 6, 7]),
    "three where one of a node is held": Best({"a": [4]}, [*ALL[:4], 5, 6, 7], [], 3, [5, 6, 7]),
    "five of all": Best({}, ALL, [], 5, [0, 1, 2, 3, 4]),
    "all": Best({}, ALL, [], 8, ALL),
    "two beside one of the other node": Best({}, ALL, [6], 2, [4, 6]),
    "three beside two of both nodes": Best({}, ALL, [3, 7], 3, [0, 3, 7]),
    "what is available, though the ledger says that it is held": Best(
        {"a": [0, 1]}, ALL, [], 2, [0, 1]
    ),
    "the only one that is available": Best({}, [5], [], 1, [5]),
    "none": Best({}, ALL, [], 0, []),
    "none, though some must be in it": Best({}, ALL, [1, 3, 7], 0, []),
    "less than none, though some must be in it": Best({}, ALL, [1, 3, 7], -1, []),
    "fewer than must be in it": Best({}, ALL, [7, 3], 1, [3]),
    "as many as must be in it": Best({}, ALL, [7, 3], 2, [3, 7]),
    "more than there are": Best({}, [5, 2], [], 3, [2, 5]),
}


@pytest.mark.parametrize("row", BEST.values(), ids=BEST)
def test_the_best_of_eight_a800(row: Best) -> None:
    machine = described("a800x8")
    offer = offer_of(machine, BY_INDEX)
    grants = [
        Grant(
            uid=uid,
            pod=f"ns/{uid}",
            container="main",
            gpus=tuple(machine.gpus[place].uuid or "" for place in places),
        )
        for uid, places in row.held.items()
    ]
    available, include = list(map(str, row.available)), list(map(str, row.include))
    chosen = prefer(offer, ledger_of(machine, *grants), (), available, include, row.count)
    assert chosen == tuple(map(str, row.expected))


# --- pods that wait -------------------------------------------------------------------------------

UNEVEN = ledger_of(build((4, 2), (4, 8), (4, 8)), reserved="0")  # 3, 16 and 16 free CPUs
SINGLE, RESTRICTED, BEST_EFFORT = Policy


def decided(*numbers: int, by: GpuKey = GpuKey.INDEX) -> DecidedGpus:
    return DecidedGpus(by=by, numbers=numbers)


def simple(policy: Policy | None = None, **more: object) -> Demand:
    """A pod of two GPUs that is not pinned."""
    return demand_of(asks(gpus=2), policy=policy, pinned=False, **more)


def second(demand: Demand) -> Demand:
    """Another pod that asks for the same."""
    return replace(demand, pod="ns/second", uid="second")


WIDE = demand_of(asks(gpus=2, cpus=8), policy=SINGLE)  # does not fit node 0
HUGE = demand_of(asks(gpus=2, cpus=17), policy=SINGLE)
SIDE_BY_SIDE = demand_of(asks("a", gpus=1, cpus=4), asks("b", gpus=2, cpus=8), policy=SINGLE)
TWINS = demand_of(asks("a", gpus=2, cpus=4), asks("b", gpus=2, cpus=4), policy=SINGLE)


class Pending(NamedTuple):
    """Who waits, what is available beside held ones, and the places of the preferred devices."""

    pods: Sequence[Demand]
    expected: str
    available: str = "0-11"
    include: str = ""
    count: int = 2
    ledger: Ledger = UNEVEN


PENDING = {
    "nobody waits": Pending([], "0-1"),
    "somebody waits for whom nothing was chosen": Pending([simple()], "0-1"),
    "somebody waits whose first container has another size: beside that one": Pending(
        [demand_of(asks("a", gpus=1), asks("b", gpus=2), policy=None, pinned=False)], "1-2"
    ),
    "a scheduler chose": Pending([simple(decided_gpus=decided(5, 10))], "5,10"),
    "a scheduler chose by minor": Pending(
        [simple(decided_gpus=decided(105, 110, by=GpuKey.MINOR))], "5,10"
    ),
    "a scheduler chose, and so does the policy": Pending(
        [demand_of(asks(gpus=2, cpus=8), policy=SINGLE, decided_gpus=decided(9, 10))], "9-10"
    ),
    "a scheduler chose GPUs that are not available": Pending(
        [simple(decided_gpus=decided(5, 10))], "4,6", available="0-4,6-11"
    ),
    "a scheduler chose GPUs that are not there": Pending(
        [simple(decided_gpus=decided(5, 40))], "0-1"
    ),
    "a scheduler chose GPUs that another holds": Pending(
        [simple(decided_gpus=decided(5, 10))],
        "4,6",
        available="0-4,6-11",
        ledger=UNEVEN.with_grants([grant("a", [5])]),
    ),
    "a scheduler chose, but not what must be in it": Pending(
        [simple(decided_gpus=decided(5, 10))], "4,6", include="6"
    ),
    "a scheduler chose what must be in it": Pending(
        [simple(decided_gpus=decided(5, 10))], "5,10", include="10"
    ),
    "a scheduler chose what must be in it and is not available": Pending(
        [simple(decided_gpus=decided(5, 10))], "5,10", available="0-9", include="10"
    ),
    "a scheduler chose for another number": Pending(
        [simple(decided_gpus=decided(5, 10))], "0-2", count=3
    ),
    "two for whom a scheduler chose: the first one": Pending(
        [simple(decided_gpus=decided(5, 10)), second(simple(decided_gpus=decided(4, 11)))], "5,10"
    ),
    "two for whom a scheduler chose, after the first one": Pending(
        [simple(decided_gpus=decided(5, 10)), second(simple(decided_gpus=decided(4, 11)))],
        "4,11",
        available="0-4,6-9,11",
    ),
    "a policy looks for CPUs too": Pending([WIDE], "4-5"),
    "a policy cannot have what it wants": Pending([HUGE], "0-1"),
    "a policy cannot have what it wants, and a scheduler chose for the next": Pending(
        [HUGE, second(simple(decided_gpus=decided(5, 10)))], "5,10"
    ),
    "the first container of a pod": Pending([SIDE_BY_SIDE], "4", count=1),
    "the second container of a pod": Pending([SIDE_BY_SIDE], "5-6", available="0-3,5-11"),
    "containers alike: the first": Pending([TWINS], "4-5"),
    "containers alike: the second goes beside the first": Pending(
        [TWINS], "6-7", available="0-3,6-11"
    ),
    "an init container before its app": Pending(
        [demand_of(asks("i", Role.INIT, gpus=1, cpus=8), asks("a", gpus=2, cpus=8), policy=SINGLE)],
        "4",
        count=1,
    ),
    "an app that must take what its init container had": Pending(
        [demand_of(asks("i", Role.INIT, gpus=1, cpus=8), asks("a", gpus=2, cpus=8), policy=SINGLE)],
        "4-5",
        include="4",
    ),
    "equal pods: the first": Pending([simple(SINGLE), second(simple(SINGLE))], "0-1"),
    "equal pods: the second": Pending(
        [simple(SINGLE), second(simple(SINGLE))], "2-3", available="2-11"
    ),
    "equal pods: the second, when the ledger has the first": Pending(
        [WIDE], "6-7", "0-3,6-11", ledger=UNEVEN.with_grants([grant("a", [4, 5], "4-11")])
    ),
}


def check(row: Pending) -> None:
    offer = make_offer(row.ledger.layout, BY_INDEX)
    available, include = (
        list(map(str, Bitmap.parse_list(s))) for s in (row.available, row.include)
    )
    chosen = prefer(offer, row.ledger, row.pods, available, include, row.count)
    assert chosen == tuple(map(str, Bitmap.parse_list(row.expected)))


@pytest.mark.parametrize("row", PENDING.values(), ids=PENDING)
def test_pods_that_wait_get_what_was_chosen_for_them(row: Pending) -> None:
    check(row)


def test_the_second_container_goes_beside_the_first_once_the_ledger_has_that() -> None:
    first = Grant(uid="ns/new", pod="ns/new", container="a", gpus=("GPU-4", "GPU-5"))
    ledger = UNEVEN.with_grants([first])
    check(Pending([TWINS], "6-7", available="0-3,6-11", ledger=ledger))


def test_the_second_equal_pod_gets_a_set_of_its_policy_before_the_ledger_has_the_first() -> None:
    big = demand_of(asks(gpus=4, cpus=12), policy=SINGLE)
    check(Pending([big, second(big)], "8-11", available="0-3,8-11", count=4))


# --- how devices are given out --------------------------------------------------------------------

PAIR = build((2, 2), (2, 2))  # minors are 100 above the indices
THERE = frozenset({"nvidia100", "nvidia103", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"})
OTHERS = (
    ("/dev/nvidiactl", "/dev/nvidiactl"),
    ("/dev/nvidia-uvm", "/dev/nvidia-uvm"),
    ("/dev/nvidia-uvm-tools", "/dev/nvidia-uvm-tools"),
)


class Given(NamedTuple):
    """Devices, how they are given out, and what the container gets."""

    manner: Manner
    ids: list[str]
    expected: Allocation
    machine: Machine = PAIR


def annotations(gpus: str, nodes: str | None) -> dict[str, str]:
    return {"numalet.io/gpus": gpus} | ({"numalet.io/nodes": nodes} if nodes is not None else {})


GIVEN = {
    "one, by UUID": Given(
        Manner(device_nodes=THERE),
        ["GPU-3"],
        Allocation(
            envs={"NVIDIA_VISIBLE_DEVICES": "GPU-3"},
            annotations=annotations("GPU-3", "1"),
            device_nodes=(("/dev/nvidia103", "/dev/nvidia103"), *OTHERS),
        ),
    ),
    "two on two nodes, in the order of the machine": Given(
        Manner(device_nodes=THERE),
        ["GPU-3", "GPU-0"],
        Allocation(
            envs={"NVIDIA_VISIBLE_DEVICES": "GPU-0,GPU-3"},
            annotations=annotations("GPU-0,GPU-3", "0-1"),
            device_nodes=(
                ("/dev/nvidia100", "/dev/nvidia100"),
                ("/dev/nvidia103", "/dev/nvidia103"),
                *OTHERS,
            ),
        ),
    ),
    "on nodes that do not follow each other": Given(
        Manner(),
        ["GPU-0", "GPU-4", "GPU-5"],
        Allocation(
            envs={"NVIDIA_VISIBLE_DEVICES": "GPU-0,GPU-4,GPU-5"},
            annotations=annotations("GPU-0,GPU-4,GPU-5", "0,2"),
        ),
        SIX,
    ),
    "named and shown by index; annotations name UUIDs all the same": Given(
        BY_INDEX,
        ["5", "3"],
        Allocation(
            envs={"NVIDIA_VISIBLE_DEVICES": "3,5"}, annotations=annotations("GPU-1,GPU-2", "0-1")
        ),
        SPARSE,
    ),
    "named by index, shown by UUID": Given(
        Manner(ids=INDEX, visible=UUID),
        ["3"],
        Allocation(envs={"NVIDIA_VISIBLE_DEVICES": "GPU-1"}, annotations=annotations("GPU-1", "0")),
        SPARSE,
    ),
    "named by UUID, shown by index": Given(
        Manner(ids=UUID, visible=INDEX),
        ["GPU-1"],
        Allocation(envs={"NVIDIA_VISIBLE_DEVICES": "3"}, annotations=annotations("GPU-1", "0")),
        SPARSE,
    ),
    "without device nodes, where none exist": Given(
        Manner(),
        ["GPU-0"],
        Allocation(envs={"NVIDIA_VISIBLE_DEVICES": "GPU-0"}, annotations=annotations("GPU-0", "0")),
    ),
    "only device nodes that exist": Given(
        Manner(device_nodes=frozenset({"nvidia0", "nvidia101", "nvidia-uvm", "nvidia-modeset"})),
        ["GPU-0", "GPU-1"],
        Allocation(
            envs={"NVIDIA_VISIBLE_DEVICES": "GPU-0,GPU-1"},
            annotations=annotations("GPU-0,GPU-1", "0"),
            device_nodes=(
                ("/dev/nvidia101", "/dev/nvidia101"),
                ("/dev/nvidia-uvm", "/dev/nvidia-uvm"),
            ),
        ),
    ),
    "a GPU whose minor nobody told": Given(
        Manner(device_nodes=THERE),
        ["GPU-0"],
        Allocation(
            envs={"NVIDIA_VISIBLE_DEVICES": "GPU-0"},
            annotations=annotations("GPU-0", "0"),
            device_nodes=OTHERS,
        ),
        changed(PAIR, 0, minor=None),
    ),
    "from another folder of the host": Given(
        Manner(dev_dir="/run/nvidia/driver/dev", device_nodes=frozenset({"nvidia103"})),
        ["GPU-3"],
        Allocation(
            envs={"NVIDIA_VISIBLE_DEVICES": "GPU-3"},
            annotations=annotations("GPU-3", "1"),
            device_nodes=(("/run/nvidia/driver/dev/nvidia103", "/dev/nvidia103"),),
        ),
    ),
    "through CDI, and nothing else": Given(
        Manner(cdi_kind="nvidia.com/gpu", device_nodes=THERE),
        ["GPU-3", "GPU-0"],
        Allocation(
            annotations=annotations("GPU-0,GPU-3", "0-1"),
            cdi_devices=("nvidia.com/gpu=GPU-0", "nvidia.com/gpu=GPU-3"),
        ),
    ),
    "through CDI, by index": Given(
        Manner(cdi_kind="example.org/card", visible=INDEX),
        ["GPU-1"],
        Allocation(annotations=annotations("GPU-1", "0"), cdi_devices=("example.org/card=3",)),
        SPARSE,
    ),
    "on an unknown node": Given(
        Manner(),
        ["GPU-0", "GPU-2"],
        Allocation(
            envs={"NVIDIA_VISIBLE_DEVICES": "GPU-0,GPU-2"},
            annotations=annotations("GPU-0,GPU-2", None),
        ),
        build((2, 2), seatless=1),
    ),
    "with a fault that came since: kubelet may ask anew for what runs": Given(
        Manner(),
        ["GPU-1"],
        Allocation(envs={"NVIDIA_VISIBLE_DEVICES": "GPU-1"}, annotations=annotations("GPU-1", "0")),
        changed(PAIR, 1, fault="lost"),
    ),
}


@pytest.mark.parametrize("row", GIVEN.values(), ids=GIVEN)
def test_how_devices_are_given_out_in_whatever_order_they_are_named(row: Given) -> None:
    offer = offer_of(row.machine, row.manner)
    for ids in permutations(row.ids):
        assert allocate(offer, ids) == row.expected


REFUSED = {
    "nothing": ([], "no device is asked for"),
    "an unknown device": (["GPU-9"], 'there is no device "GPU-9" here'),
    "an unknown device beside known ones": (
        ["GPU-1", "GPU-9", "GPU-0", "GPU-8"],
        'there is no device "GPU-8" here',
    ),
    "an unknown device twice": (["GPU-9", "GPU-9"], 'there is no device "GPU-9" here'),
    "a device twice": (["GPU-1", "GPU-0", "GPU-1"], "a device is asked for twice"),
    "a device by its index": (["1"], 'there is no device "1" here'),
    "a device that was never named": (["GPU-2"], 'there is no device "GPU-2" here'),
    "its address": (["0000:02:00.0"], 'there is no device "0000:02:00.0" here'),
    "an empty id": ([""], 'there is no device "" here'),
    "an odd id, which is cut and shown in one line": (
        ["\n" + "x" * 99],
        f'there is no device "?{39 * "x"}…" here',
    ),
}


@pytest.mark.parametrize(("ids", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_given_out(ids: list[str], reason: str) -> None:
    offer = offer_of(changed(PAIR, 2, uuid=None))
    assert allocate(offer, ids) == Refusal(reason=reason)


# --- who holds what -------------------------------------------------------------------------------


def test_the_keys_of_gpus_by_device_id() -> None:
    machine = changed(SPARSE, 1, uuid=None)
    bdf = machine.gpus[1].bdf
    others = ["GPU-2", "GPU-3", "GPU-4", "GPU-5"]
    keys = ["GPU-0", bdf, *others]
    assert keys_by_id(machine, UUID) == dict(zip(keys, keys, strict=True))
    assert keys_by_id(machine, INDEX) == dict(
        zip(["1", "3", "5", "7", "9", "11"], keys, strict=True)
    )


def test_a_pod_of_which_only_its_devices_are_known() -> None:
    holding = Holding(pod="ns/a", devices={"main": ("3", "1"), "side": ("11",)})
    fact = to_fact(keys_by_id(SPARSE, INDEX), holding)
    assert fact.given == {"main": ("GPU-1", "GPU-0"), "side": ("GPU-5",)}
    assert fact.pinned == {}
    demand = fact.demand
    assert isinstance(demand, Demand)
    assert (demand.pod, demand.uid) == ("ns/a", "ns/a")
    assert (demand.policy, demand.pinned, demand.cpus, demand.gpus) == (None, False, 0, 3)
    assert [(c.name, c.role, c.gpus, c.memory_bytes) for c in demand.containers] == [
        ("main", Role.APP, 2, None),
        ("side", Role.APP, 1, None),
    ]


def test_a_device_that_is_not_there_any_more_is_its_own_key() -> None:
    holding = Holding(pod="ns/a", devices={"main": ("1", "99", "GPU-old")})
    fact = to_fact(keys_by_id(SPARSE, INDEX), holding)
    assert fact.given == {"main": ("GPU-0", "99", "GPU-old")}
    assert fact.demand.pod == "ns/a"
    ledger = settle(SPARSE, ledger_of(SPARSE), [fact]).ledger
    assert ledger.free_gpus == Bitmap(range(1, 6))
    [held] = ledger.grants
    assert held.gpus == ("GPU-0", "99", "GPU-old")


ODD = {
    "a container of no DNS label": {"Main!": ("GPU-0", "GPU-1")},
    "a container without a name": {"": ("GPU-0",), "main": ("GPU-1",)},
    "a name of many lines": {"a\nb" * 50: ("GPU-0", "GPU-1")},
}


@pytest.mark.parametrize("devices", ODD.values(), ids=ODD)
def test_whoever_is_named_oddly_holds_its_devices_all_the_same(
    devices: dict[str, tuple[str, ...]],
) -> None:
    fact = to_fact(keys_by_id(PAIR, UUID), Holding(pod="ns/odd", devices=devices))
    assert isinstance(fact.demand, Invalid)
    assert (fact.demand.pod, fact.demand.uid) == ("ns/odd", "ns/odd")
    assert fact.demand.reason.endswith("is not a container's name (a DNS label)")
    assert "\n" not in fact.demand.reason
    assert len(fact.demand.reason) < 100
    assert fact.given == devices
    settlement = settle(PAIR, ledger_of(PAIR), [fact])
    assert settlement.ledger.free_gpus == Bitmap([2, 3])
    assert [one.pod for one in settlement.refused] == ["ns/odd"]


def test_a_pod_without_devices_holds_nothing() -> None:
    fact = to_fact({}, Holding(pod="ns/a", devices={}))
    assert fact.demand == Invalid(pod="ns/a", uid="ns/a", reason="the pod has no containers")
    assert fact.given == {}


def test_the_devices_of_a_pod_are_its_own_until_it_is_gone() -> None:
    fact = to_fact(
        keys_by_id(PAIR, UUID), Holding(pod="ns/a", devices={"main": ("GPU-2", "GPU-1")})
    )
    settlement = settle(PAIR, ledger_of(PAIR), [fact])
    assert settlement.ledger.free_gpus == Bitmap([0, 3])
    assert not settlement.refused
    assert settle(PAIR, settlement.ledger, []).ledger.free_gpus == Bitmap(range(4))
