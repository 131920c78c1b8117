"""How a pod's share of a node is divided: tables by hand, properties, and memory by brute force."""

from dataclasses import replace
from itertools import chain, combinations
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.core.bitmap import Bitmap
from agent.core.layout import Layout, Seats, lay_out
from agent.core.request import ContainerDemand, Demand, Role
from agent.core.shares import fits_memory, nearest_first, share_cpus, share_gpus, take_cpus
from agent.core.topology import EMPTY, union
from tests.core.oracle import asks, build, demand_of

INIT, SIDECAR, APP = Role.INIT, Role.SIDECAR, Role.APP


def bits(text: str) -> Bitmap:
    return Bitmap.parse_list(text)


# --- one container --------------------------------------------------------------------------------


class Take(NamedTuple):
    """`gpus` near them, CPUs that are free and asked, and how many each seat gives, by hand."""

    layout: Layout
    gpus: str
    free: str
    cpus: int
    shares: list[int]


TWO = lay_out(build((4, 16), (4, 16)))  # CPUs 0-31 and 32-63
FAR = lay_out(build((2, 4), (0, 4), (0, 4), near={(0, 1): 32, (0, 2): 12}))  # 0-7, 8-15, 16-23
FLAT = lay_out(build((3, 8), (1, 8), threads=1))
BETWEEN = lay_out(
    build((1, 1), (1, 1), (0, 4), (0, 4), near={(0, 2): 12, (1, 2): 32, (0, 3): 20, (1, 3): 20})
)

TAKES = {
    "GPUs 3:1, 16 CPUs": Take(TWO, "0-2,4", "0-63", 16, [12, 4]),
    "GPUs 4:4, 16 CPUs": Take(TWO, "0-7", "0-63", 16, [8, 8]),
    "GPUs 2:3, 24 CPUs: 9.6 and 14.4 in whole cores": Take(TWO, "0-1,4-6", "0-63", 24, [10, 14]),
    "GPUs 2:1, 4 CPUs: 2.7 and 1.3 in whole cores": Take(TWO, "0-1,4", "0-63", 4, [2, 2]),
    "GPUs 3:1, 4 CPUs: both lack a thread, and who has none gets the core": Take(
        TWO, "0-2,4", "0-63", 4, [2, 2]
    ),
    "GPUs 1:1, 7 CPUs: only one core is broken": Take(TWO, "0,4", "0-63", 7, [4, 3]),
    "GPUs 1:1, 1 CPU": Take(TWO, "0,4", "0-63", 1, [1, 0]),
    "GPUs 4:0, 16 CPUs": Take(TWO, "0-3", "0-63", 16, [16, 0]),
    "GPUs 0:1, 16 CPUs": Take(TWO, "4", "0-63", 16, [0, 16]),
    "no GPUs: evenly": Take(TWO, "", "0-63", 16, [8, 8]),
    "no CPUs": Take(TWO, "0", "0-63", 0, [0, 0]),
    "all CPUs": Take(TWO, "0-2,4", "0-63", 64, [32, 32]),
    "GPUs 3:1, where the first has but 6 CPUs": Take(TWO, "0-2,4", "0-5,32-63", 16, [6, 10]),
    "GPUs 3:1, where the second has but 1 CPU": Take(TWO, "0-2,4", "0-31,32", 16, [15, 1]),
    "GPUs 1:1, where one has none": Take(TWO, "0,4", "32-63", 16, [0, 16]),
    "no GPUs, where one has but 3 CPUs": Take(TWO, "", "0-2,32-63", 16, [3, 13]),
    "the rest from the nearest node": Take(FAR, "0-1", "0-23", 10, [8, 0, 2]),
    "the rest of the rest from the farthest": Take(FAR, "0-1", "0-23", 18, [8, 2, 8]),
    "the rest from the nearest to all of the GPUs' nodes": Take(
        *(BETWEEN, "0-1", "0-19", 6, [2, 2, 0, 2])
    ),
    "cores of one thread: 3.75 and 1.25": Take(FLAT, "0-3", "0-15", 5, [4, 1]),
    "cores of one thread: 1.5 and 0.5": Take(FLAT, "0-3", "0-15", 2, [1, 1]),
}


@pytest.mark.parametrize("take", TAKES.values(), ids=TAKES)
def test_cpus_in_proportion(take: Take) -> None:
    seats = tuple(range(len(take.layout.seats)))
    taken = take_cpus(take.layout, seats, bits(take.free), bits(take.gpus), take.cpus)
    assert taken is not None
    assert taken <= bits(take.free)
    assert [len(taken & seat.cpus) for seat in take.layout.seats] == take.shares


def test_cpus_come_from_the_seats_only() -> None:
    taken = take_cpus(TWO, (1,), bits("0-63"), bits("0-3"), 4)
    assert taken == bits("32-35")


def test_more_cpus_than_the_seats_have_are_not_taken() -> None:
    assert take_cpus(TWO, (0,), bits("0-3,32-63"), EMPTY, 5) is None
    assert take_cpus(TWO, (), bits("0-63"), EMPTY, 1) is None


def test_the_odd_thread_comes_from_a_broken_core() -> None:
    assert take_cpus(TWO, (0,), bits("0-3,7-31"), EMPTY, 3) == bits("0-1,7")


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), min_size=1, max_size=4),
    st.integers(1, 3),
    st.integers(1, 40),
    st.data(),
)
def test_a_share_is_within_a_core_of_its_proportion(
    nodes: list[tuple[int, int]], threads: int, count: int, data: st.DataObject
) -> None:
    layout = lay_out(build(*nodes, threads=threads))
    seats, free = tuple(range(len(nodes))), layout.machine.cpus
    places = range(len(layout.machine.gpus))
    near = Bitmap(data.draw(st.sets(st.sampled_from(places)))) if places else EMPTY
    taken = take_cpus(layout, seats, free, near, count)
    if taken is None:
        assert count > len(free)
        return
    assert len(taken) == count
    assert sum(not core.cpus <= taken for core in layout.machine.cores if core.cpus & taken) <= 1
    weights = [len(seat.gpus & near) for seat in layout.seats]
    weights = weights if any(weights) else [1] * len(weights)
    exact = [count * weight / sum(weights) for weight in weights]
    if all(share <= len(seat.cpus) for share, seat in zip(exact, layout.seats, strict=True)):
        for share, seat in zip(exact, layout.seats, strict=True):
            assert abs(len(taken & seat.cpus) - share) < threads


# --- several containers ---------------------------------------------------------------------------


class Pod(NamedTuple):
    """Containers and what they hold, by hand: name → GPUs and CPUs."""

    containers: list[ContainerDemand]
    gpus: dict[str, str]
    cpus: dict[str, str]
    free: str = "0-63"
    held: dict[str, str] | None = None


PODS = {
    "two apps, each near its own GPUs": Pod(
        [asks("a", gpus=4, cpus=8), asks("b", gpus=4, cpus=8)],
        {"a": "0-3", "b": "4-7"},
        {"a": "0-7", "b": "32-39"},
    ),
    "a container without GPUs near those of its pod": Pod(
        [asks("a", gpus=2, cpus=2), asks("b", cpus=2)],
        {"a": "4-5", "b": ""},
        {"a": "32-33", "b": "34-35"},
    ),
    "a pod without GPUs": Pod(
        [asks("a", cpus=4), asks("b", cpus=2)],
        {"a": "", "b": ""},
        {"a": "0-1,32-33", "b": "2-3"},
    ),
    "an init container reuses its app's": Pod(
        [asks("i", INIT, gpus=1, cpus=4), asks("a", gpus=2, cpus=8)],
        {"a": "0-1", "i": "0"},
        {"a": "0-7", "i": "0-3"},
    ),
    "a larger init container has its app's and more": Pod(
        [asks("i", INIT, gpus=2, cpus=6), asks("a", gpus=2, cpus=4)],
        {"a": "0-1", "i": "0-1"},
        {"a": "0-3", "i": "0-5"},
    ),
    "two init containers reuse the same": Pod(
        [asks("i", INIT, cpus=4), asks("j", INIT, cpus=6), asks("a", gpus=1, cpus=2)],
        {"a": "0", "i": "", "j": ""},
        {"a": "0-1", "i": "0-3", "j": "0-5"},
    ),
    "an init container after a sidecar leaves it alone": Pod(
        [asks("s", SIDECAR, gpus=1, cpus=2), asks("i", INIT, gpus=1, cpus=4), asks("a", cpus=4)],
        {"s": "0", "i": "1", "a": ""},
        {"s": "0-1", "a": "2-5", "i": "2-5"},
    ),
    "an init container before a sidecar reuses its": Pod(
        [asks("i", INIT, cpus=4), asks("s", SIDECAR, cpus=2), asks("a", gpus=1, cpus=2)],
        {"a": "0", "i": "", "s": ""},
        {"s": "0-1", "a": "2-3", "i": "0-3"},
    ),
    "an init container between two sidecars leaves one alone": Pod(
        [
            *(asks("s", SIDECAR, cpus=2), asks("i", INIT, cpus=4)),
            *(asks("t", SIDECAR, cpus=2), asks("a", gpus=1, cpus=2)),
        ],
        {"a": "0", "i": "", "s": "", "t": ""},
        {"s": "0-1", "t": "2-3", "a": "4-5", "i": "2-5"},
    ),
    "an app that has its CPUs keeps them": Pod(
        [asks("i", INIT, cpus=2), asks("a", cpus=4), asks("b", gpus=1, cpus=4)],
        {"b": "0"},
        {"a": "0-3", "b": "4-7", "i": "0-1"},
        held={"a": "0-3"},
    ),
    "what an init container has goes on to the app after it": Pod(
        [asks("i", INIT, cpus=2), asks("a", gpus=1, cpus=4)],
        {"a": "0"},
        {"i": "8-9", "a": "0-1,8-9"},
        held={"i": "8-9"},
    ),
    "what a larger init container has is enough for the apps after it": Pod(
        [asks("i", INIT, cpus=6), asks("a", gpus=1, cpus=4), asks("b", cpus=1)],
        {"a": "0"},
        {"i": "8-13", "a": "8-11", "b": "12"},
        held={"i": "8-13"},
    ),
    "what an init container and an app both have does not go on": Pod(
        [asks("i", INIT, cpus=4), asks("a", gpus=1, cpus=2), asks("b", cpus=2)],
        {"a": "0"},
        {"i": "8-11", "a": "8-9", "b": "10-11"},
        held={"i": "8-11", "a": "8-9"},
    ),
    "what an init container has does not go to the sidecar that runs beside it": Pod(
        [asks("s", SIDECAR, cpus=2), asks("i", INIT, cpus=4), asks("a", gpus=1, cpus=4)],
        {"a": "0"},
        {"i": "8-11", "s": "0-1", "a": "8-11"},
        held={"i": "8-11"},
    ),
}


@pytest.mark.parametrize("pod", PODS.values(), ids=PODS)
def test_the_cpus_of(pod: Pod) -> None:
    held = {name: bits(text) for name, text in (pod.held or {}).items()}
    gpus = {name: bits(text) for name, text in pod.gpus.items()}
    shared = share_cpus(TWO, pod.containers, (0, 1), bits(pod.free), gpus, held)
    assert shared is not None
    assert {name: str(cpus) for name, cpus in shared.items()} == pod.cpus


WITH_GPUS = {name: pod for name, pod in PODS.items() if not pod.held}


@pytest.mark.parametrize("pod", WITH_GPUS.values(), ids=WITH_GPUS)
def test_the_gpus_of(pod: Pod) -> None:
    """All of a pod's GPUs are those that its containers hold by hand."""
    all_of_pod = union(bits(text) for text in pod.gpus.values())
    shared = share_gpus(TWO, pod.containers, all_of_pod)
    assert {name: str(gpus) for name, gpus in shared.items()} == pod.gpus


def test_the_first_container_gets_the_best_linked_gpus() -> None:
    layout = lay_out(build((4, 8), links={(1, 2): "NV8"}))
    containers = [asks("a", gpus=2, cpus=1), asks("b", gpus=2, cpus=1)]
    shared = share_gpus(layout, containers, bits("0-3"))
    assert shared == {"a": bits("1-2"), "b": bits("0,3")}


@pytest.mark.parametrize(
    "containers",
    [
        [asks("a", cpus=3), asks("b", cpus=2)],
        [asks("i", INIT, cpus=5), asks("a", cpus=1)],
        [asks("s", SIDECAR, cpus=2), asks("i", INIT, cpus=3), asks("a", cpus=1)],
    ],
    ids=["two apps", "an init container", "an init container beside a sidecar"],
)
def test_four_cpus_are_not_enough_for(containers: list[ContainerDemand]) -> None:
    assert share_cpus(TWO, containers, (0, 1), bits("0-3"), {}) is None
    assert share_cpus(TWO, containers, (0, 1), bits("0-4"), {}) is not None


@st.composite
def demands(draw: st.DrawFn) -> Demand:
    first = draw(st.lists(st.sampled_from([INIT, SIDECAR]), max_size=4))
    roles = [*first, *[APP] * draw(st.integers(1, 2))]
    amount, gpus = st.integers(1, 8), st.integers(0, 2)
    return demand_of(
        *(asks(f"c{at}", role, gpus=draw(gpus), cpus=draw(amount)) for at, role in enumerate(roles))
    )


@settings(max_examples=150, deadline=None)
@given(demands(), st.sets(st.integers(0, 63), max_size=40))
def test_containers_share_just_the_peak_of_their_pod(demand: Demand, taken: set[int]) -> None:
    free = bits("0-63") - Bitmap(taken)
    gpus = Bitmap(range(demand.gpus)) if demand.gpus <= 8 else EMPTY
    containers = demand.containers
    if not gpus:
        containers = tuple(replace(container, gpus=0) for container in containers)
    of_gpus = share_gpus(TWO, containers, gpus)
    of_cpus = share_cpus(TWO, containers, (0, 1), free, of_gpus)
    if of_cpus is None:
        assert demand.cpus > len(free)
        return
    assert len(union(of_cpus.values())) == demand.cpus
    assert union(of_cpus.values()) <= free
    assert union(of_gpus.values()) == gpus
    running = EMPTY, EMPTY
    for container in containers:
        own = of_cpus[container.name], of_gpus[container.name]
        assert (len(own[0]), len(own[1])) == (container.cpus, container.gpus)
        assert own[0].isdisjoint(running[0])
        assert own[1].isdisjoint(running[1])
        if container.role is not INIT:
            running = running[0] | own[0], running[1] | own[1]


@settings(max_examples=150, deadline=None)
@given(demands(), st.sets(st.integers(0, 6)))
def test_what_some_containers_hold_already_does_not_change_the_peak(
    demand: Demand, kept: set[int]
) -> None:
    """Some of the containers of a pod have been found as they were shared out."""
    first = share_cpus(TWO, demand.containers, (0, 1), bits("0-63"), {})
    assert first is not None
    names = [container.name for container in demand.containers]
    held = {name: first[name] for at, name in enumerate(names) if at in kept}
    again = share_cpus(TWO, demand.containers, (0, 1), bits("0-63"), {}, held)
    assert again is not None
    assert held.items() <= again.items()
    assert len(union(again.values())) == demand.cpus
    running = EMPTY
    for container in demand.containers:
        assert len(again[container.name]) == container.cpus
        assert again[container.name].isdisjoint(running)
        if container.role is not INIT:
            running |= again[container.name]


@pytest.mark.parametrize(
    ("seats", "wider"),
    [
        ((0,), [(0, 2), (0, 2, 3), (0, 1, 2, 3)]),
        ((1,), [(0, 1), (0, 1, 2), (0, 1, 2, 3)]),
        ((0, 1), [(0, 1, 3), (0, 1, 2, 3)]),
        ((0, 1, 2, 3), []),
    ],
    ids=["by distance", "at one distance by id", "by distance to both", "all there are already"],
)
def test_nearest_first_goes(seats: Seats, wider: list[Seats]) -> None:
    """From node 0: node 2 at 12, nodes 1 and 3 at 32 and 20. From node 1: all at 32."""
    near = {(0, 1): 32, (0, 2): 12, (0, 3): 20, (1, 2): 32, (1, 3): 32, (2, 3): 20}
    if seats == (0, 1):
        near |= {(1, 2): 50}  # 62 there are more than the 52 to node 3
    layout = lay_out(build(*[(0, 1)] * 4, near=near))
    assert list(nearest_first(layout, seats)) == wider


# --- memory ---------------------------------------------------------------------------------------


def fits_by_brute_force(memory: list[int], bound: dict[Bitmap, int]) -> bool:
    """Whether each set of nodes has room for all that may go nowhere else."""
    nodes = range(len(memory))
    sets = chain.from_iterable(combinations(nodes, width) for width in range(1, len(memory) + 1))
    return all(
        sum(size for mems, size in bound.items() if set(mems) <= set(chosen))
        <= sum(memory[node] for node in chosen)
        for chosen in sets
    )


def with_memory(memory: list[int]) -> Layout:
    machine = build(*[(0, 1)] * len(memory))
    return lay_out(
        replace(
            machine,
            nodes=tuple(
                replace(node, memory_bytes=size)
                for node, size in zip(machine.nodes, memory, strict=True)
            ),
        )
    )


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_memory_fits_where_brute_force_says_so(data: st.DataObject) -> None:
    memory = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=5))
    masks = st.integers(1, (1 << len(memory)) - 1).map(Bitmap.from_int)
    bound: dict[Bitmap, int] = {}
    for mems, size in data.draw(st.lists(st.tuples(masks, st.integers(0, 4)), max_size=6)):
        more = {**bound, mems: bound.get(mems, 0) + size}
        if fits_by_brute_force(memory, more):
            bound = more
    mems, size = data.draw(masks), data.draw(st.integers(0, 9))
    fits = fits_by_brute_force(memory, {**bound, mems: bound.get(mems, 0) + size})
    assert fits_memory(with_memory(memory), bound, mems, size) == fits


def test_memory_fits_beside_a_node_that_is_overfull_already() -> None:
    """Too much bound to node 1, by rule `bind` of old, takes nothing of node 0."""
    assert fits_memory(with_memory([4, 4]), {bits("1"): 9}, bits("0"), 4)
