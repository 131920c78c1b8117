"""Where pods go: against a brute-force oracle, and by tables computed by hand."""

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from typing import NamedTuple, TypeVar

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from agent.core.bitmap import Bitmap
from agent.core.decision import DecidedGpus, GpuKey
from agent.core.layout import key, lay_out
from agent.core.ledger import Grant, Ledger, NodeState
from agent.core.placement import MemoryRule, Placement, Refusal, choose_gpus, place
from agent.core.request import ContainerDemand, Demand, Exclusive, Policy, Role
from agent.core.topology import Machine, union
from tests.core.machines import described, random_machines
from tests.core.oracle import asks, build, demand_of, grant, ledger_of, second_opinion

SINGLE, RESTRICTED, BEST_EFFORT = Policy
REQUIRED, PREFERRED = Exclusive
T = TypeVar("T")


def bits(text: str) -> Bitmap:
    return Bitmap.parse_list(text)


def placed(ledger: Ledger, demand: Demand, *more: object) -> Placement:
    placement = place(ledger, demand, *more)  # type: ignore[arg-type]
    assert isinstance(placement, Placement), placement
    return placement


def refused(ledger: Ledger, demand: Demand, *more: object) -> str:
    refusal = place(ledger, demand, *more)  # type: ignore[arg-type]
    assert isinstance(refusal, Refusal), refusal
    return refusal.reason


# --- properties -----------------------------------------------------------------------------------


class Case(NamedTuple):
    ledger: Ledger
    demand: Demand
    given: dict[str, Bitmap]


def picks(draw: st.DrawFn, count: int, options: Sequence[T]) -> list[T]:
    """`count` of the options, with one draw for all: much faster than one draw each."""
    return [
        options[byte % len(options)] for byte in draw(st.binary(min_size=count, max_size=count))
    ]


@st.composite
def tidy_machines(draw: st.DrawFn) -> Machine:
    """Machines whose GPUs mostly work and whose nodes all have CPUs: there is more to choose."""
    count = draw(st.integers(1, 4))
    gpus = picks(draw, count, [1, 2, 0, 2])
    seatless = draw(st.sampled_from([0, 0, 0, 1])) if sum(gpus) < 8 else 0
    pairs = list(combinations(range(sum(gpus) + seatless), 2))
    apart = list(combinations(range(count), 2))
    return build(
        *zip(gpus, picks(draw, count, [3, 2, 4, 1]), strict=True),
        threads=draw(st.integers(1, 2)),
        near=dict(zip(apart, picks(draw, len(apart), [20, 12, 20, 32]), strict=True)),
        links=dict(zip(pairs, picks(draw, len(pairs), ["SYS", "PIX", "NV1", "NV2"]), strict=True))
        if draw(st.booleans())
        else None,
        seatless=seatless,
        faulty=[0] if pairs and draw(st.integers(0, 5)) == 5 else [],
    )


@st.composite
def ledgers(draw: st.DrawFn) -> Ledger:
    """Machines on which up to three pods hold something, on one node or on several."""
    machine = draw(tidy_machines() | tidy_machines() | random_machines(most_gpus=8))
    owners = [*[""] * 8, *"abc"]
    of_gpus = picks(draw, len(machine.gpus), owners)
    of_cores = picks(draw, len(machine.cores), owners)
    whole = draw(st.booleans())
    cores = [core.cpus if whole else core.cpus.lowest(1) for core in machine.cores]
    grants = tuple(
        Grant(
            uid=pod,
            pod=f"ns/{pod}",
            container="main",
            gpus=tuple(key(machine.gpus[at]) for at, owner in enumerate(of_gpus) if owner == pod),
            cpus=union(cores[at] for at, owner in enumerate(of_cores) if owner == pod),
        )
        for pod in "abc"
    )
    held = union(grant.cpus for grant in grants)
    reserved = Bitmap(picks(draw, draw(st.integers(0, 2)), list(machine.cpus)))
    return Ledger(layout=lay_out(machine), reserved=reserved - held, grants=grants)


@st.composite
def demands(draw: st.DrawFn) -> Demand:
    """Pods of one container or of several, pinned or not."""
    pinned = draw(st.sampled_from([True, True, False]))
    init, sidecar, app = Role.INIT, Role.SIDECAR, Role.APP
    one = [[app], [app], [app], [init, app]]
    roles = draw(st.sampled_from([*one, [app, app], [sidecar, app], [sidecar, init, app, app]]))
    gpus = [0, 1, 2, 1, 2, 3, 4, 5] if len(roles) == 1 else [0, 1, 0, 2]
    cpus = [1, 2, 3, 4, 5, 6, 8, 11] if len(roles) == 1 else [1, 2, 3, 1, 5]
    amounts = zip(picks(draw, len(roles), gpus), picks(draw, len(roles), cpus), strict=True)
    return demand_of(
        *(
            asks(f"c{at}", role, gpus=gpu, cpus=cpu if pinned else 0)
            for at, (role, (gpu, cpu)) in enumerate(zip(roles, amounts, strict=True))
        ),
        policy=draw(st.sampled_from([BEST_EFFORT, RESTRICTED, SINGLE, *[None] * (not pinned)])),
        exclusive=draw(st.sampled_from(Exclusive)),
        pinned=pinned,
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Half of the pods have their GPUs from kubelet already, which may give any."""
    ledger, demand = draw(ledgers()), draw(demands())
    places = list(range(len(ledger.layout.machine.gpus)))
    if draw(st.booleans()) or demand.gpus > len(places):
        return Case(ledger, demand, {})
    left = draw(st.permutations(places))
    held: dict[str, Bitmap] = {}
    for container in demand.containers:
        if container.role is not Role.INIT:
            held[container.name] = Bitmap(left[: container.gpus])
            left = left[container.gpus :]
    for container in demand.containers:
        if container.role is Role.INIT:
            beside = union(held[name] for name in earlier_sidecars(demand, container))
            among = [place for place in places if place not in beside]
            held[container.name] = Bitmap(among[: container.gpus])
    return Case(ledger, demand, held)


def earlier_sidecars(demand: Demand, init: ContainerDemand) -> list[str]:
    earlier = demand.containers[: demand.containers.index(init)]
    return [container.name for container in earlier if container.role is Role.SIDECAR]


PROPERTY = settings(max_examples=120, deadline=None)


@settings(max_examples=300, deadline=None)
@given(cases())
def test_a_pod_goes_where_brute_force_says_or_nowhere(case: Case) -> None:
    expected = second_opinion(case.ledger, case.demand, case.given)
    placement = place(case.ledger, case.demand, case.given)
    event(f"{case.demand.policy}: {'refused' if expected is None else len(expected.nodes)}")
    if expected is None:
        assert isinstance(placement, Refusal)
    else:
        assert isinstance(placement, Placement), placement
        assert placement.nodes == expected.nodes, expected.key
        if not case.given:
            assert union(c.gpus for c in placement.containers) == expected.gpus, expected.key


@PROPERTY
@given(cases())
def test_best_effort_refuses_only_if_the_machine_has_not_enough(case: Case) -> None:
    ledger, demand, given_ = case
    if demand.policy not in (BEST_EFFORT, None):
        return
    whole = [core.cpus for core in ledger.layout.machine.cores if core.cpus <= ledger.free_cpus]
    stays = len(max(whole, key=Bitmap.first, default=ledger.free_cpus))
    free = len(ledger.free_cpus) - (0 if ledger.reserved else stays)
    enough = not demand.pinned or free >= demand.cpus
    enough &= bool(given_) or len(ledger.free_gpus) >= demand.gpus
    assert isinstance(place(*case), Placement) == enough


@PROPERTY
@given(cases())
def test_each_container_gets_its_numbers_and_nothing_of_others(case: Case) -> None:
    ledger, demand, _ = case
    placement = place(*case)
    if isinstance(placement, Refusal):
        return
    machine = ledger.layout.machine
    assert [c.name for c in placement.containers] == [c.name for c in demand.containers]
    for got, asked in zip(placement.containers, demand.containers, strict=True):
        assert len(got.gpus) == asked.gpus
        assert len(got.cpus) == (asked.cpus if demand.pinned else 0)
    cpus = union(c.cpus for c in placement.containers)
    gpus = union(c.gpus for c in placement.containers)
    assert len(cpus) == (demand.cpus if demand.pinned else 0)
    assert not cpus & (ledger.reserved | machine.offline_cpus)
    assert not cpus & union(g.cpus for g in ledger.grants)
    assert cpus <= union(node.cpus for node in machine.nodes)
    if not case.given:
        assert len(gpus) == demand.gpus
        assert all(machine.gpus[at].fault is None for at in gpus)
        held = {name for g in ledger.grants for name in g.gpus}
        assert not {key(machine.gpus[at]) for at in gpus} & held
    touched = {machine.gpus[at].node for at in gpus} - {None}
    touched |= {node.id for node in machine.nodes if node.cpus & cpus}
    assert set(placement.nodes) == touched
    if demand.policy is SINGLE:
        assert len(placement.nodes) <= 1
    if demand.policy is RESTRICTED and gpus:
        assert touched == {machine.gpus[at].node for at in gpus}


@PROPERTY
@given(cases())
def test_containers_that_run_side_by_side_share_nothing(case: Case) -> None:
    placement = place(*case)
    if isinstance(placement, Refusal):
        return
    got = {container.name: container for container in placement.containers}
    holders = [got[c.name] for c in case.demand.containers if c.role is not Role.INIT]
    assert sum(len(c.cpus) for c in holders) == len(union(c.cpus for c in holders))
    assert sum(len(c.gpus) for c in holders) == len(union(c.gpus for c in holders))
    for container in case.demand.containers:
        if container.role is Role.INIT:
            for name in earlier_sidecars(case.demand, container):
                assert not got[name].cpus & got[container.name].cpus
                assert not got[name].gpus & got[container.name].gpus


@PROPERTY
@given(cases(), st.randoms(use_true_random=False))
def test_the_order_of_the_lists_changes_nothing(case: Case, random) -> None:  # type: ignore[no-untyped-def]
    grants, given_ = list(case.ledger.grants), list(case.given.items())
    random.shuffle(grants)
    random.shuffle(given_)
    shuffled = replace(case.ledger, grants=tuple(grants))
    assert place(shuffled, case.demand, dict(given_)) == place(*case)


@PROPERTY
@given(cases())
def test_without_reserved_cpus_a_whole_core_stays_free(case: Case) -> None:
    placement = place(*case)
    if isinstance(placement, Refusal) or case.ledger.reserved or not case.demand.pinned:
        return
    free = case.ledger.free_cpus - union(c.cpus for c in placement.containers)
    assert any(core.cpus <= free for core in case.ledger.layout.machine.cores)


@PROPERTY
@given(cases())
def test_a_refusal_is_one_sentence_with_the_numbers(case: Case) -> None:
    refusal = place(*case)
    if isinstance(refusal, Placement):
        return
    ledger, demand, _ = case
    assert "\n" not in refusal.reason
    assert refusal.reason.startswith(f"{demand.policy or BEST_EFFORT}: ")
    if gpus := len(union(case.given.values())) or demand.gpus:
        assert re.search(rf"asked {gpus} GPUs?\b", refusal.reason)
    if demand.pinned:
        assert re.search(rf"\b{demand.cpus} CPUs?\b", refusal.reason)
        for seat in ledger.layout.seats:
            free = len(seat.cpus & ledger.free_cpus)
            assert re.search(rf"node {seat.id}\b[^,;]* {free}\b", refusal.reason)


# --- examples of the design and of ACK ------------------------------------------------------------


class Row(NamedTuple):
    """What is asked where, and the nodes, GPUs and CPUs computed by hand; no nodes: refused."""

    ledger: Ledger
    demand: Demand
    nodes: str | None
    gpus: str | None = None
    cpus: str | None = None
    given: dict[str, Bitmap] | None = None


def check(row: Row) -> None:
    if row.nodes is None:
        refused(row.ledger, row.demand, row.given)
        return
    placement = placed(row.ledger, row.demand, row.given)
    assert str(placement.nodes) == row.nodes
    if row.gpus is not None:
        assert str(union(c.gpus for c in placement.containers)) == row.gpus
    if row.cpus is not None:
        assert str(union(c.cpus for c in placement.containers)) == row.cpus


def one(policy: Policy | None, exclusive: Exclusive = REQUIRED, **amounts: int) -> Demand:
    """A pod of one container; it is pinned if it asks for CPUs."""
    return demand_of(asks(**amounts), policy=policy, exclusive=exclusive)


def test_the_sample_of_ack_gets_four_gpus_and_twelve_whole_cores_of_one_socket() -> None:
    """Threads i and i + 64 are siblings; node 0 is 0-31 and 64-95 with GPUs 0-3."""
    placement = placed(ledger_of(described("a800x8")), one(SINGLE, gpus=4, cpus=24))
    assert str(placement.nodes) == "0"
    [container] = placement.containers
    assert str(container.gpus) == "0-3"
    assert str(container.cpus) == "0-11,64-75"


def test_the_second_sample_of_ack_gets_the_other_socket_and_the_third_is_refused() -> None:
    ledger = ledger_of(described("a800x8"))
    demand = one(SINGLE, gpus=4, cpus=24)
    for uid, nodes, cpus in (("a", "0", "0-11,64-75"), ("b", "1", "32-43,96-107")):
        placement = placed(ledger, demand)
        assert str(placement.nodes) == nodes
        [container] = placement.containers
        assert str(container.cpus) == cpus
        keys = ledger.layout.keys(container.gpus)
        grant_ = Grant(uid=uid, pod=uid, container="main", gpus=keys, cpus=container.cpus)
        ledger = ledger.with_grants([grant_])
    assert refused(ledger, demand) == (
        "SingleNUMANode: node 0 (single) has 0 free GPUs and 40 free CPUs, "
        "node 1 (single) has 0 and 40; asked 4 GPUs and 24 CPUs"
    )


def test_the_refusal_of_the_design_word_for_word() -> None:
    """Node 0: 4 GPUs, one faulty, 20 cores. Node 1: 4 GPUs, 20 cores, 28 of its CPUs reserved."""
    ledger = ledger_of(build((4, 20), (4, 20), faulty=[3]), reserved="52-79")
    assert refused(ledger, one(SINGLE, gpus=4, cpus=24)) == (
        "SingleNUMANode: node 0 has 3 free GPUs and 40 free CPUs, node 1 has 4 and 12; "
        "asked 4 GPUs and 24 CPUs"
    )


PAIRS_FAR = dict.fromkeys(combinations(range(4), 2), 32)
TIES = {
    "nodes 1 and 3 are the nearest pair": Row(
        ledger_of(build((2, 4), (2, 4), (2, 4), (2, 4), near={**PAIRS_FAR, (1, 3): 12})),
        one(RESTRICTED, gpus=4),
        "1,3",
        "2-3,6-7",
    ),
    "distance comes before links": Row(
        ledger_of(build((1, 4), (1, 4), (1, 4), near={(0, 1): 12}, links={(1, 2): "NV8"})),
        one(RESTRICTED, gpus=2),
        "0-1",
    ),
    "links come before best fit": Row(
        ledger_of(build((2, 4), (4, 4), links={(3, 5): "NV1"})),
        one(SINGLE, gpus=2),
        "1",
        "3,5",
    ),
    "the fewest GPUs are left over": Row(
        ledger_of(build((4, 4), (2, 4))), one(SINGLE, gpus=2), "1", "4-5"
    ),
    "a whole node stays for a big pod": Row(
        ledger_of(build((4, 8), (4, 8)), grant("a", [4, 5])), one(BEST_EFFORT, gpus=2), "1", "6-7"
    ),
    "GPUs left over come before CPUs left over": Row(
        ledger_of(build((3, 2), (2, 8))), one(SINGLE, gpus=1, cpus=2), "1"
    ),
    "the fewest CPUs are left over": Row(
        ledger_of(build((2, 8), (2, 4), (2, 6))), one(SINGLE, gpus=1, cpus=2), "1"
    ),
    "the lowest ids, when all else is equal": Row(
        ledger_of(build((2, 4), (2, 4), (2, 4))), one(RESTRICTED, gpus=4, cpus=4), "0-1"
    ),
    "inside a node, the best linked GPUs": Row(
        ledger_of(build((4, 4), links={(1, 3): "NV2", (0, 2): "NV1"})),
        one(SINGLE, gpus=2),
        "0",
        "1,3",
    ),
    "one GPU breaks no pair, when a loner is free": Row(
        ledger_of(build((3, 4), links={(0, 2): "NV4"})), one(SINGLE, gpus=1), "0", "1"
    ),
    "a broken pair is broken further before a whole one": Row(
        ledger_of(build((4, 4), links={(0, 1): "NV4", (2, 3): "NV4"}), grant("a", [2])),
        one(SINGLE, gpus=1),
        "0",
        "3",
    ),
    "BestEffort prefers the clean node to the better fit, which Koordinator only logs": Row(
        ledger_of(build((2, 4), (4, 4), (1, 4)), grant("a", [0, 6])),
        one(BEST_EFFORT, gpus=1, cpus=2),
        "1",
    ),
    "BestEffort takes the better fit where exclusivity is only preferred": Row(
        ledger_of(build((2, 4), (4, 4), (1, 4)), grant("a", [0, 6])),
        one(BEST_EFFORT, PREFERRED, gpus=1, cpus=2),
        "0",
    ),
    "one unclean node comes before two clean ones: they are a later step": Row(
        ledger_of(build((3, 4), (1, 4), (1, 4), (1, 4)), grant("a", [0, 5])),
        one(BEST_EFFORT, gpus=2),
        "0",
    ),
    "three clean nodes come before an unclean pair of the same step": Row(
        ledger_of(build((1, 4), (1, 4), (0, 4), (0, 4)), grant("a", [1]), reserved="18-23,26-31"),
        one(BEST_EFFORT, gpus=1, cpus=12),
        "0,2-3",
        "0",
        "0-7,16-17,24-25",
    ),
    "but not where exclusivity is only preferred": Row(
        ledger_of(build((1, 4), (1, 4), (0, 4), (0, 4)), grant("a", [1]), reserved="18-23,26-31"),
        one(BEST_EFFORT, PREFERRED, gpus=1, cpus=12),
        "0-1",
    ),
    "an unclean pair serves where no clean set fits": Row(
        ledger_of(build((1, 4), (1, 4)), grant("a", [1])), one(BEST_EFFORT, gpus=1, cpus=12), "0-1"
    ),
    "the narrowest unclean set serves where no clean set fits": Row(
        ledger_of(build((1, 4), (1, 4), (0, 4)), grant("a", [1]), grant("b", cpus="16-17")),
        one(BEST_EFFORT, gpus=1, cpus=12),
        "0,2",
    ),
}


@pytest.mark.parametrize("row", TIES.values(), ids=TIES)
def test_the_choice_among_sets(row: Row) -> None:
    check(row)


CPUS = {
    "whole cores inside one cache, though lower ones are free in another": Row(
        ledger_of(build((1, 4), (0, 4), cores_per_l3=2), grant("a", cpus="0-1")),
        one(SINGLE, gpus=1, cpus=4),
        "0",
        cpus="4-7",
    ),
    "an odd thread from a core that is broken already": Row(
        ledger_of(build((1, 4), (0, 4)), grant("a", cpus="2")),
        one(SINGLE, gpus=1, cpus=3),
        "0",
        cpus="0-1,3",
    ),
    "never a reserved CPU": Row(
        ledger_of(build((1, 4)), reserved="0-3"), one(SINGLE, gpus=1, cpus=4), "0", cpus="4-7"
    ),
    "with reserved CPUs, all others": Row(
        ledger_of(build((1, 4)), reserved="0"), one(SINGLE, gpus=1, cpus=7), "0", cpus="1-7"
    ),
    "without reserved CPUs, all but the last core": Row(
        ledger_of(build((1, 4))), one(SINGLE, gpus=1, cpus=6), "0", cpus="0-5"
    ),
    "without reserved CPUs, not the last core": Row(
        ledger_of(build((1, 4))), one(BEST_EFFORT, gpus=1, cpus=7), None
    ),
    "a whole node, while a core is free on another": Row(
        ledger_of(build((1, 4), (0, 1))), one(SINGLE, gpus=1, cpus=8), "0", cpus="0-7"
    ),
    "not a whole node, when only half a core is free on another": Row(
        ledger_of(build((1, 4), (0, 1)), grant("a", cpus="8")), one(SINGLE, gpus=1, cpus=8), None
    ),
    "nothing, when no whole core is left to stay": Row(
        ledger_of(build((1, 2)), grant("a", cpus="0,2")), one(BEST_EFFORT, gpus=1, cpus=1), None
    ),
    "halves of cores rather than the last whole one": Row(
        ledger_of(build((1, 3)), grant("a", cpus="3,5")),
        one(SINGLE, gpus=1, cpus=2),
        "0",
        cpus="2,4",
    ),
    "half a core beside the one that stays": Row(
        ledger_of(build((1, 2)), grant("a", cpus="0")), one(SINGLE, gpus=1, cpus=1), "0", cpus="1"
    ),
    "the last core of both nodes stays": Row(
        ledger_of(build((1, 2), (1, 2))), one(RESTRICTED, gpus=2, cpus=6), "0-1", cpus="0-5"
    ),
    "CPUs alone, on the fewest nodes": Row(
        ledger_of(build((1, 2), (1, 2), (1, 2))), one(RESTRICTED, cpus=6), "0-1"
    ),
    "CPUs alone, on one node": Row(
        ledger_of(build((1, 2), (1, 3))), one(SINGLE, cpus=5), "1", cpus="4-8"
    ),
    "GPUs alone: a policy without pinning": Row(
        ledger_of(build((1, 2), (2, 2))), one(SINGLE, gpus=2), "1", "1-2", ""
    ),
    "GPUs alone: no policy": Row(
        ledger_of(build((1, 2), (2, 2))), one(None, gpus=3), "0-1", "0-2", ""
    ),
    "nothing at all": Row(ledger_of(build((1, 2))), one(None), "", "", ""),
    "no CPUs of a node without CPUs": Row(
        ledger_of(described("cxl-expander")), one(BEST_EFFORT, cpus=2), "0"
    ),
}


@pytest.mark.parametrize("row", CPUS.values(), ids=CPUS)
def test_a_pod_gets(row: Row) -> None:
    check(row)


# --- the worked examples of Koordinator -----------------------------------------------------------
# Their hints became machines on which just these sets fit; CPUs that are not to be had are
# reserved, so that no node changes its state. What has no counterpart:
# T19 allocates RDMA functions; T26 merges a pod's policy with its node's, and our nodes have none.

SOCKETS = build((1, 26), (1, 26))
FOUR = build((0, 13), (0, 13), (0, 13), (0, 13))
USED = [grant(f"u{k}", cpus=c) for k, c in enumerate(("0-23", "26-48", "52-55", "78-85"))]
EIGHT = build((4, 24), (4, 24))
THREADS = "1,3,5,7-103"
SOME = ledger_of(build((0, 26), (0, 26)), grant("a", cpus="0-3"), grant("b", cpus="52-91"))

KOORDINATOR = {
    "T1: GPUs on one node and CPUs on another are not Restricted": Row(
        ledger_of(build((1, 2), (0, 2), (0, 2), (0, 2)), reserved="0-3,8-15"),
        one(RESTRICTED, gpus=1, cpus=2),
        None,
    ),
    "T2, differs: unequal sets make the nearest set that fits, not all nodes": Row(
        ledger_of(build((1, 1), (0, 1), (0, 1), (0, 1)), reserved="4-7"),
        one(BEST_EFFORT, gpus=1, cpus=4),
        "0-1",
    ),
    "T3: CPUs of a wider set than the GPUs' are not Restricted": Row(
        ledger_of(build((0, 1), (1, 1), (0, 1)), reserved="4-5"),
        one(RESTRICTED, gpus=1, cpus=4),
        None,
    ),
    "T4: of two equal sets, the lower": Row(
        ledger_of(build((2, 2), (1, 1), (1, 1))), one(RESTRICTED, gpus=3, cpus=6), "0-1"
    ),
    "T5: GPUs of two nodes are not single": Row(
        ledger_of(build((1, 4), (1, 4))), one(SINGLE, gpus=2, cpus=2), None
    ),
    **{
        f"T6: the node that both resources allow, {policy}": Row(
            ledger_of(build((1, 2), (1, 2)), reserved="4-7"), one(policy, gpus=1, cpus=2), "0"
        )
        for policy in Policy
    },
    "T7: the fuller node, as their MostAllocated": Row(SOME, one(SINGLE, cpus=4), "1"),
    "T8, differs: their LeastAllocated takes the emptier node 0, we keep it whole": Row(
        SOME, one(SINGLE, cpus=4), "1"
    ),
    "T9: the full node is none": Row(
        ledger_of(build((0, 26), (0, 26)), grant("a", cpus="0-3"), grant("b", cpus="52-103")),
        one(SINGLE, cpus=4),
        "0",
    ),
    "T10: with 2, 3, 22 and 18 CPUs free, the fullest that fits": Row(
        ledger_of(FOUR, *USED), one(RESTRICTED, cpus=4), "3"
    ),
    "T11, differs: their LeastAllocated takes node 2, we keep it": Row(
        ledger_of(FOUR, *USED), one(RESTRICTED, cpus=4), "3"
    ),
    "T12: four CPUs fit either node": Row(ledger_of(SOCKETS), one(BEST_EFFORT, cpus=4), "0"),
    "T13, differs: nobody asks for whole cores only, so four broken ones serve": Row(
        ledger_of(SOCKETS, reserved=THREADS), one(BEST_EFFORT, cpus=4), "0", cpus="0,2,4,6"
    ),
    "T13: four threads, and no whole core that could stay": Row(
        ledger_of(SOCKETS, grant("a", cpus=THREADS)), one(BEST_EFFORT, cpus=4), None
    ),
    "T14: the threads of four cores": Row(
        ledger_of(SOCKETS, reserved=THREADS), one(SINGLE, cpus=4), "0", cpus="0,2,4,6"
    ),
    "T15: an even split in whole cores": Row(
        ledger_of(SOCKETS), one(RESTRICTED, gpus=2, cpus=4), "0-1", cpus="0-1,52-53"
    ),
    "T16: an even split as far as it goes": Row(
        ledger_of(SOCKETS, reserved="1,3,5,7-101,103"),
        one(RESTRICTED, gpus=2, cpus=4),
        "0-1",
        cpus="0,2,4,102",
    ),
    **{
        f"T17: the node that still has four GPUs, {policy}": Row(
            ledger_of(EIGHT, grant("a", [0])), one(policy, gpus=4), "1", "4-7"
        )
        for policy in Policy
    },
    "T18, without its RDMA: one GPU on an idle machine": Row(
        ledger_of(EIGHT), one(RESTRICTED, gpus=1), "0", "0"
    ),
    "T20: more GPUs than there are": Row(ledger_of(EIGHT), one(BEST_EFFORT, gpus=17), None),
    "T21: one node, shared": Row(
        ledger_of(build((2, 2), (1, 2), (1, 2)), grant("a", [0, 3]), grant("b", [2])),
        one(SINGLE, gpus=1),
        None,
    ),
    "T22: one node, single": Row(
        ledger_of(build((2, 2), (1, 2), (1, 2)), grant("a", [0]), grant("b", [2, 3])),
        one(SINGLE, gpus=1),
        "0",
    ),
    "T23: two nodes, shared and single": Row(
        ledger_of(build((2, 2), (2, 2), (1, 2)), grant("a", [0, 4]), grant("b", [2])),
        one(RESTRICTED, gpus=2),
        None,
    ),
    "T24: two nodes, both shared": Row(
        ledger_of(build((2, 2), (2, 2)), grant("a", [0, 2])), one(RESTRICTED, gpus=2), "0-1"
    ),
    "T25: two nodes, idle and single, where exclusivity is preferred": Row(
        ledger_of(build((1, 2), (2, 2)), grant("b", [1])),
        one(RESTRICTED, PREFERRED, gpus=2),
        "0-1",
    ),
    "D1: two GPUs of an idle machine": Row(ledger_of(EIGHT), one(SINGLE, gpus=2, cpus=8), "0"),
    "D2: eight GPUs are not single": Row(ledger_of(EIGHT), one(SINGLE, gpus=8, cpus=16), None),
    "D3: eight GPUs take eight CPUs from each node": Row(
        ledger_of(EIGHT), one(RESTRICTED, gpus=8, cpus=16), "0-1", cpus="0-7,48-55"
    ),
    "D4: CPUs only beside the GPUs are not Restricted": Row(
        ledger_of(build((1, 2), (0, 2)), reserved="0-3"), one(RESTRICTED, gpus=1, cpus=2), None
    ),
    "D5: CPUs only beside the GPUs serve BestEffort": Row(
        ledger_of(build((1, 2), (0, 2)), reserved="0-3"),
        one(BEST_EFFORT, gpus=1, cpus=2),
        "0-1",
        cpus="4-5",
    ),
    "D6: two GPUs do not span nodes for the sake of 60 CPUs": Row(
        ledger_of(EIGHT), one(RESTRICTED, gpus=2, cpus=60), None
    ),
    "D7: four GPUs of three and three": Row(
        ledger_of(build((3, 24), (3, 24))), one(RESTRICTED, gpus=4, cpus=8), "0-1"
    ),
    "D8: four GPUs of three and three are not single": Row(
        ledger_of(build((3, 24), (3, 24))), one(SINGLE, gpus=4, cpus=8), None
    ),
    "D9: four GPUs of nodes with two each": Row(
        ledger_of(build(*[(2, 8)] * 4)), one(RESTRICTED, gpus=4, cpus=16), "0-1"
    ),
    "D10: six GPUs, where a node is single": Row(
        ledger_of(EIGHT, grant("a", [0])), one(RESTRICTED, gpus=6), None
    ),
    "D11: six GPUs, where a node is single but exclusivity preferred": Row(
        ledger_of(EIGHT, grant("a", [0])), one(RESTRICTED, PREFERRED, gpus=6), "0-1"
    ),
    "D12: one GPU, where all nodes are shared (by a pod without CPUs, which they do not see)": Row(
        ledger_of(EIGHT, grant("a", [0, 4])), one(SINGLE, gpus=1), None
    ),
    "D13: one GPU, where all nodes are shared, BestEffort": Row(
        ledger_of(EIGHT, grant("a", [0, 4])), one(BEST_EFFORT, gpus=1), "0"
    ),
}


@pytest.mark.parametrize("row", KOORDINATOR.values(), ids=KOORDINATOR)
def test_koordinator(row: Row) -> None:
    check(row)


def test_koordinator_t27_two_pods_of_a_quarter_go_to_one_node_each() -> None:
    """28 % of 64 CPUs are 18 of a node's 32: a second pod does not fit beside the first."""
    ledger = ledger_of(build((0, 16), (0, 16)))
    demand = one(SINGLE, cpus=18)
    first = placed(ledger, demand)
    ledger = ledger.with_grants([grant("a", cpus=str(first.containers[0].cpus))])
    assert [str(first.nodes), str(placed(ledger, demand).nodes)] == ["0", "1"]


# --- exclusivity ----------------------------------------------------------------------------------
# GPUs 0 and 1 are on node 0, GPU 2 on node 1, GPUs 3 on node 2, which stays idle.

STATES = {"idle": [], "single": [grant("a", [0])], "shared": [grant("a", [0, 2])]}
ONE_NODE = {
    # state of node 0, exclusive: who may place one GPU there, the only one left
    ("idle", REQUIRED): {SINGLE, RESTRICTED, BEST_EFFORT},
    ("idle", PREFERRED): {SINGLE, RESTRICTED, BEST_EFFORT},
    ("single", REQUIRED): {SINGLE, RESTRICTED, BEST_EFFORT},
    ("single", PREFERRED): {SINGLE, RESTRICTED, BEST_EFFORT},
    ("shared", REQUIRED): {BEST_EFFORT},
    ("shared", PREFERRED): {SINGLE, RESTRICTED, BEST_EFFORT},
}
TWO_NODES = {
    # state of node 0, exclusive: who may place two GPUs there and on node 2, which is idle
    ("idle", REQUIRED): {RESTRICTED, BEST_EFFORT},
    ("idle", PREFERRED): {RESTRICTED, BEST_EFFORT},
    ("single", REQUIRED): {BEST_EFFORT},
    ("single", PREFERRED): {RESTRICTED, BEST_EFFORT},
    ("shared", REQUIRED): {RESTRICTED, BEST_EFFORT},
    ("shared", PREFERRED): {RESTRICTED, BEST_EFFORT},
}


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize(("state", "exclusive"), ONE_NODE)
def test_one_gpu_goes_to_a_node_that_is(state: str, exclusive: Exclusive, policy: Policy) -> None:
    ledger = ledger_of(build((2, 4), (1, 4), (1, 4), faulty=[2, 3]), *STATES[state])
    assert ledger.states[0] is NodeState(state)
    placement = place(ledger, one(policy, exclusive, gpus=1, cpus=2))
    assert isinstance(placement, Placement) == (policy in ONE_NODE[state, exclusive])
    if isinstance(placement, Refusal):
        assert "node 0 (shared) has 1 free GPU" in placement.reason
        assert "singleNUMANodeExclusive is Required" in placement.reason


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize(("state", "exclusive"), TWO_NODES)
def test_two_gpus_go_to_an_idle_node_and_one_that_is(
    state: str, exclusive: Exclusive, policy: Policy
) -> None:
    faulty = [1, 2] if state == "idle" else [2]
    ledger = ledger_of(build((2, 4), (1, 4), (1, 4), faulty=faulty), *STATES[state])
    assert ledger.states[0] is NodeState(state)
    placement = place(ledger, one(policy, exclusive, gpus=2, cpus=2))
    assert isinstance(placement, Placement) == (policy in TWO_NODES[state, exclusive])
    if isinstance(placement, Placement):
        assert str(placement.nodes) == "0,2"


@pytest.mark.parametrize("exclusive", Exclusive)
def test_exclusivity_counts_cpus_as_well_as_gpus(exclusive: Exclusive) -> None:
    """Pod a has its GPU on node 0 and CPUs on node 1: both nodes are shared."""
    ledger = ledger_of(build((2, 4), (1, 4)), grant("a", [0], "8-9"))
    placement = place(ledger, one(SINGLE, exclusive, gpus=1, cpus=2))
    assert isinstance(placement, Placement) == (exclusive is PREFERRED)


# --- GPUs that kubelet or a scheduler chose -------------------------------------------------------

THREE = build((2, 2), (0, 2), (0, 2), near={(0, 1): 32, (0, 2): 12})
GIVEN = {
    "their one node": Row(
        ledger_of(EIGHT), one(SINGLE, gpus=2, cpus=4), "1", "5-6", "48-51", {"main": bits("5-6")}
    ),
    "not two nodes for SingleNUMANode": Row(
        ledger_of(EIGHT), one(SINGLE, gpus=2, cpus=4), None, given={"main": bits("3-4")}
    ),
    "their two nodes in proportion": Row(
        ledger_of(EIGHT),
        one(RESTRICTED, gpus=4, cpus=8),
        "0-1",
        "1-4",
        "0-5,48-49",
        {"main": bits("1-4")},
    ),
    "two nodes for Restricted, though one would have held the GPUs": Row(
        ledger_of(EIGHT), one(RESTRICTED, gpus=2, cpus=4), "0-1", given={"main": bits("3-4")}
    ),
    "not another node for Restricted": Row(
        ledger_of(THREE), one(RESTRICTED, gpus=1, cpus=6), None, given={"main": bits("0")}
    ),
    "all of their node and the rest of the nearest, for BestEffort": Row(
        ledger_of(THREE),
        one(BEST_EFFORT, gpus=1, cpus=6),
        "0,2",
        "0",
        "0-3,8-9",
        {"main": bits("0")},
    ),
    "a farther clean node rather than a nearer unclean one, for BestEffort": Row(
        ledger_of(THREE, grant("a", cpus="8-9")),
        one(BEST_EFFORT, gpus=1, cpus=6),
        "0-1",
        "0",
        "0-5",
        {"main": bits("0")},
    ),
    "the node of GPUs that the ledger thinks held": Row(
        ledger_of(EIGHT, grant("a", [4])),
        one(SINGLE, gpus=1, cpus=2),
        "1",
        "4",
        "48-49",
        {"main": bits("4")},
    ),
    "not their shared node": Row(
        ledger_of(EIGHT, grant("a", [3, 4])),
        one(SINGLE, gpus=1, cpus=2),
        None,
        given={"main": bits("0")},
    ),
    "their shared node, for BestEffort": Row(
        ledger_of(EIGHT, grant("a", [3, 4])),
        one(BEST_EFFORT, gpus=1, cpus=2),
        "0",
        given={"main": bits("0")},
    ),
    "nothing more, when no CPUs are asked": Row(
        ledger_of(EIGHT), one(None, gpus=2), "0-1", "0,7", "", {"main": bits("0,7")}
    ),
    "CPUs alone, when their node is unknown": Row(
        ledger_of(build((0, 2), (0, 1), seatless=1)),
        one(BEST_EFFORT, gpus=1, cpus=2),
        "1",
        "0",
        "4-5",
        {"main": bits("0")},
    ),
    "nothing for SingleNUMANode, when their node is unknown": Row(
        ledger_of(build((0, 2), seatless=1)),
        one(SINGLE, gpus=1, cpus=2),
        None,
        given={"main": bits("0")},
    ),
    "nothing for Restricted, when one of their nodes is unknown": Row(
        ledger_of(build((1, 2), seatless=1)),
        one(RESTRICTED, gpus=2, cpus=2),
        None,
        given={"main": bits("0-1")},
    ),
    "the node of the one that is known, for BestEffort": Row(
        ledger_of(build((0, 1), (1, 2), seatless=1)),
        one(BEST_EFFORT, gpus=2, cpus=2),
        "1",
        "0-1",
        "2-3",
        {"main": bits("0-1")},
    ),
}


@pytest.mark.parametrize("row", GIVEN.values(), ids=GIVEN)
def test_a_pod_with_gpus_from_kubelet_gets(row: Row) -> None:
    check(row)


UNKNOWN = build((2, 4), seatless=2, links={(2, 3): "NV8"})
SEATLESS = {
    "SingleNUMANode does without them": Row(
        ledger_of(UNKNOWN), one(SINGLE, gpus=2, cpus=2), "0", "0-1"
    ),
    "SingleNUMANode does not count them": Row(ledger_of(UNKNOWN), one(SINGLE, gpus=3), None),
    "Restricted does not count them": Row(ledger_of(UNKNOWN), one(RESTRICTED, gpus=3), None),
    "BestEffort leaves them to the last, however well they are linked": Row(
        ledger_of(UNKNOWN), one(BEST_EFFORT, gpus=2, cpus=2), "0", "0-1"
    ),
    "BestEffort takes them when no node has enough": Row(
        ledger_of(UNKNOWN, grant("a", [0])), one(BEST_EFFORT, gpus=3, cpus=2), "0", "1-3", "0-1"
    ),
    "BestEffort takes none but them": Row(
        ledger_of(UNKNOWN, grant("a", [0, 1])), one(BEST_EFFORT, gpus=2, cpus=2), "0", "2-3"
    ),
    "who is not pinned is then on no node": Row(
        ledger_of(UNKNOWN, grant("a", [0, 1])), one(None, gpus=1), "", "2"
    ),
    "BestEffort has not enough even so": Row(ledger_of(UNKNOWN), one(BEST_EFFORT, gpus=5), None),
}


@pytest.mark.parametrize("row", SEATLESS.values(), ids=SEATLESS)
def test_gpus_of_unknown_node(row: Row) -> None:
    check(row)


def decided(by: GpuKey, *numbers: int) -> DecidedGpus:
    return DecidedGpus(by=by, numbers=numbers)


def test_a_scheduler_that_chose_both_is_obeyed() -> None:
    demand = demand_of(
        asks(gpus=2, cpus=4),
        decided_gpus=decided(GpuKey.MINOR, 101, 106),
        decided_cpus=(("main", bits("40-43")),),
    )
    placement = placed(ledger_of(EIGHT), demand)
    [container] = placement.containers
    assert (str(container.gpus), str(container.cpus)) == ("1,6", "40-43")
    assert str(placement.nodes) == "0-1"


def test_cpus_are_placed_around_the_gpus_that_a_scheduler_chose() -> None:
    demand = demand_of(asks(gpus=2, cpus=4), decided_gpus=decided(GpuKey.INDEX, 5, 7))
    placement = placed(ledger_of(EIGHT), demand)
    [container] = placement.containers
    assert (str(container.gpus), str(container.cpus)) == ("5,7", "48-51")


def test_what_cannot_be_obeyed_is_told_and_placed_anew() -> None:
    demand = demand_of(
        asks(gpus=2, cpus=4),
        decided_gpus=decided(GpuKey.INDEX, 0, 1),
        decided_cpus=(("main", bits("0-3")),),
        notes=("a note on the pod",),
    )
    ledger = ledger_of(EIGHT, grant("a", [0], "0-1"))
    placement = placed(ledger, demand, {}, MemoryRule.LEAVE)
    assert str(placement.nodes) == "0"
    assert str(placement.containers[0].gpus) == "1-2"
    assert str(placement.containers[0].cpus) == "2-5"
    assert placement.notes == (  # without the demand's own
        "the scheduler chose GPUs 0-1, but GPU 0 is held or faulty",
        "the scheduler chose CPUs 0-3, but 0-1 are not free here",
    )


def test_a_refusal_tells_what_could_not_be_obeyed() -> None:
    demand = demand_of(
        asks(gpus=9, cpus=4), policy=SINGLE, decided_gpus=decided(GpuKey.INDEX, 0, 9)
    )
    reason = refused(ledger_of(EIGHT), demand)
    assert reason.startswith("SingleNUMANode: ")
    assert reason.endswith("; the scheduler chose GPUs 0,9, but there is no GPU 9")


# --- what a refusal says --------------------------------------------------------------------------

REASONS = {
    "the state of nodes, where exclusivity is required": (
        ledger_of(build((2, 4), (1, 4)), grant("a", [0, 2])),
        one(SINGLE, gpus=1),
        None,
        "SingleNUMANode: node 0 (shared) has 1 free GPU, node 1 (shared) has 0; asked 1 GPU; "
        "singleNUMANodeExclusive is Required",
    ),
    "no state, where it is only preferred": (
        ledger_of(build((2, 4), (1, 4)), grant("a", [0, 2])),
        one(SINGLE, PREFERRED, gpus=2),
        None,
        "SingleNUMANode: node 0 has 1 free GPU, node 1 has 0; asked 2 GPUs",
    ),
    "CPUs alone": (
        ledger_of(build((2, 4), (1, 1))),
        one(SINGLE, cpus=9),
        None,
        "SingleNUMANode: node 0 has 8 free CPUs, node 1 has 2; asked 9 CPUs",
    ),
    "GPUs of unknown node, to SingleNUMANode": (
        ledger_of(UNKNOWN),
        one(SINGLE, gpus=3),
        None,
        "SingleNUMANode: node 0 has 2 free GPUs; asked 3 GPUs; "
        "2 GPUs of unknown NUMA node cannot count",
    ),
    "a given GPU of unknown node, to Restricted": (
        ledger_of(UNKNOWN),
        one(RESTRICTED, gpus=1, cpus=2),
        {"main": bits("2")},
        "Restricted: its GPUs 2 are on no known node; node 0 has 8 free CPUs; "
        "asked 1 GPU and 2 CPUs; 1 GPU of unknown NUMA node cannot count",
    ),
    "given GPUs of two nodes, without CPUs": (
        ledger_of(EIGHT),
        one(SINGLE, gpus=2),
        {"main": bits("3-4")},
        "SingleNUMANode: its GPUs 3-4 are on nodes 0-1; asked 2 GPUs",
    ),
    **{
        f"the core that stays, to {policy}": (
            ledger_of(build((1, 4))),
            one(policy, gpus=1, cpus=8),
            None,
            f"{policy}: node 0 has 1 free GPU and 8 free CPUs; asked 1 GPU and 8 CPUs; "
            "one core stays with everybody else",
        )
        for policy in Policy
    },
    "both obstacles": (
        ledger_of(build((1, 4), (2, 4)), grant("a", [1], "0-7")),
        one(SINGLE, gpus=1, cpus=8),
        None,
        "SingleNUMANode: node 0 (shared) has 1 free GPU and 0 free CPUs, "
        "node 1 (shared) has 1 and 8; asked 1 GPU and 8 CPUs; one core stays with everybody else",
    ),
    "exclusivity in the way of given GPUs": (
        ledger_of(EIGHT, grant("a", [0, 4])),
        one(SINGLE, gpus=1, cpus=2),
        {"main": bits("1")},
        "SingleNUMANode: its GPUs 1 are on nodes 0; "
        "node 0 (shared) has 48 free CPUs, node 1 (shared) has 48; asked 1 GPU and 2 CPUs; "
        "singleNUMANodeExclusive is Required",
    ),
    "free GPUs, not given ones, where one of unknown node was tried in vain": (
        ledger_of(build((1, 4), seatless=1)),
        one(BEST_EFFORT, gpus=1, cpus=9),
        None,
        "BestEffort: node 0 has 1 free GPU and 8 free CPUs; asked 1 GPU and 9 CPUs",
    ),
}


@pytest.mark.parametrize(("ledger", "demand", "given_", "reason"), REASONS.values(), ids=REASONS)
def test_a_refusal_tells(
    ledger: Ledger, demand: Demand, given_: dict[str, Bitmap] | None, reason: str
) -> None:
    assert refused(ledger, demand, given_) == reason


# --- more nodes than can be tried -----------------------------------------------------------------


def test_among_18_nodes_a_wide_pod_gets_those_that_are_near_each_other() -> None:
    """18 over 7 are 31,824 sets; nodes 9 to 15 are near each other."""
    near = dict.fromkeys(combinations(range(9, 16), 2), 12)
    ledger = ledger_of(build(*[(1, 1)] * 18, near=near))
    placement = placed(ledger, one(BEST_EFFORT, gpus=7, cpus=14))
    assert str(placement.nodes) == "9-15"


def test_among_too_many_sets_given_gpus_get_the_nodes_near_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("agent.core.placement.MAX_SETS", 2)
    ledger = ledger_of(build((1, 1), (0, 1), (0, 1), (0, 1), near={(0, 1): 32, (0, 3): 12}))
    placement = placed(ledger, one(BEST_EFFORT, gpus=1, cpus=6), {"main": bits("0")})
    assert str(placement.nodes) == "0,2-3"


# --- memory ---------------------------------------------------------------------------------------

GIB = 1 << 30
AUTO, BIND, LEAVE = MemoryRule
NO_LIMIT = "memory is not bound: not every container has a memory limit"


def too_big(size: str, nodes: str) -> str:
    return (
        f"memory is not bound: a limit of {size} does not fit nodes {nodes} "
        "beside what is bound there"
    )


MEMORY = {
    # GPUs, CPUs, limit in GiB, rule, bound beside it: (nodes, GiB): mems, GiB bound, note
    "auto: a limit that fits": (1, 2, 32, AUTO, [], "0", 32, None),
    "auto: a limit as large as the node": (1, 2, 64, AUTO, [], "0", 64, None),
    "auto: a limit larger than the node": (1, 2, 65, AUTO, [], "", 0, too_big("65 GiB", "0")),
    "auto: no limit": (1, 2, None, AUTO, [], "", 0, NO_LIMIT),
    "auto: just room beside others": (1, 2, 40, AUTO, [("0", 24)], "0", 40, None),
    "auto: no room beside others": (1, 2, 40, AUTO, [("0", 25)], "", 0, too_big("40 GiB", "0")),
    "auto: two others on the same nodes": (
        *(1, 2, 40, AUTO, [("0", 12), ("0", 13)], "", 0, too_big("40 GiB", "0")),
    ),
    "auto: others bound elsewhere": (1, 2, 64, AUTO, [("1", 64)], "0", 64, None),
    "auto: others bound to both nodes can go to the other": (
        *(1, 2, 64, AUTO, [("0-1", 64)], "0", 64, None),
    ),
    "auto: others bound to both nodes cannot": (
        *(1, 2, 64, AUTO, [("0-1", 65)], "", 0, too_big("64 GiB", "0")),
    ),
    "auto: two nodes": (5, 2, 128, AUTO, [], "0-1", 128, None),
    "auto: no room on two nodes": (5, 2, 90, AUTO, [("0", 39)], "", 0, too_big("90 GiB", "0-1")),
    "auto: no pinned CPUs": (1, 0, 32, AUTO, [], "", 0, None),
    "bind: a limit that fits": (1, 2, 32, BIND, [], "0", 32, None),
    "bind: no limit": (1, 2, None, BIND, [], "0", 0, None),
    "bind: a limit larger than the node": (1, 2, 65, BIND, [], "0", 65, None),
    "bind: no room beside others": (1, 2, 40, BIND, [("0", 64)], "0", 40, None),
    "bind: no pinned CPUs": (1, 0, 32, BIND, [], "", 0, None),
    "leave: a limit that fits": (1, 2, 32, LEAVE, [], "", 0, None),
    "leave: no limit": (1, 2, None, LEAVE, [], "", 0, None),
}


@pytest.mark.parametrize(
    ("gpus", "cpus", "limit", "rule", "beside", "mems", "bound", "note"),
    MEMORY.values(),
    ids=MEMORY,
)
def test_memory(  # type: ignore[no-untyped-def]
    gpus, cpus, limit, rule, beside, mems, bound, note
) -> None:
    others = [
        grant(f"u{at}", mems=nodes, bound_bytes=size * GIB)
        for at, (nodes, size) in enumerate(beside)
    ]
    ledger = ledger_of(build((4, 8), (4, 8), memory_gib=64), *others)
    demand = demand_of(asks(gpus=gpus, cpus=cpus, memory_gib=limit))
    placement = placed(ledger, demand, None, rule)
    assert str(placement.mems) == mems
    assert placement.bound_bytes == bound * GIB
    assert placement.notes == ((note,) if note else ())


def test_memory_is_not_bound_if_one_container_has_no_limit() -> None:
    demand = demand_of(asks("a", cpus=2, memory_gib=1), asks("b", cpus=2))
    placement = placed(ledger_of(build((4, 8))), demand)
    assert placement.notes == (NO_LIMIT,)


def test_memory_is_bound_at_the_peak_of_the_limits() -> None:
    demand = demand_of(
        asks("first", Role.INIT, cpus=2, memory_gib=9),
        asks("a", cpus=2, memory_gib=3),
        asks("b", cpus=2, memory_gib=4),
    )
    assert placed(ledger_of(build((4, 8))), demand).bound_bytes == 9 * GIB


@pytest.mark.parametrize(
    ("without", "mems"), [([0], "1"), ([1], "0"), ([0, 1], "")], ids=["one", "other", "both"]
)
def test_memory_is_not_bound_to_nodes_without_any(without: list[int], mems: str) -> None:
    ledger = ledger_of(build((1, 8), (1, 8), no_memory=without))
    demand = demand_of(asks(gpus=2, cpus=4, memory_gib=1))
    placement = placed(ledger, demand)
    assert str(placement.mems) == mems
    assert placement.bound_bytes == (GIB if mems else 0)
    assert placement.notes == ()


# --- GPUs for whom no policy is known -------------------------------------------------------------

PLAIN = ledger_of(EIGHT)
LINKED = ledger_of(build((4, 4), (4, 4), links={(1, 3): "NV4", (4, 6): "NV2", (3, 4): "NV8"}))
GPUS = {
    "two of an idle machine": (PLAIN, "0-7", "", 2, "0-1"),
    "all of them": (PLAIN, "0-7", "", 8, "0-7"),
    "none": (PLAIN, "0-7", "", 0, ""),
    "none of none": (PLAIN, "", "", 0, ""),
    "the set ones and no more": (PLAIN, "0-7", "2,5", 2, "2,5"),
    "one beside the set one, on its node": (PLAIN, "0-7", "5", 2, "4-5"),
    "one beside the set ones, on their nodes": (PLAIN, "0-7", "0,4", 3, "0-1,4"),
    "the node that has enough, though lower ones are free": (PLAIN, "3-7", "", 2, "4-5"),
    "the node that is the better fit": (PLAIN, "0-2,4-5", "", 2, "4-5"),
    "two nodes if one has not enough": (PLAIN, "2-5", "", 3, "2-4"),
    "the best linked of one node": (LINKED, "0-7", "", 2, "1,3"),
    "the best linked beside the set one": (LINKED, "0-7", "6", 2, "4,6"),
    "one node before better links across": (LINKED, "0-7", "3", 2, "1,3"),
    "those available, though the ledger says held": (
        *(ledger_of(EIGHT, grant("a", [0, 1])), "0-1", "", 2, "0-1"),
    ),
    "the node without pods that span nodes": (
        *(ledger_of(build((2, 4), (3, 4), (1, 4)), grant("a", [0, 5])), "1-4", "", 1, "2"),
    ),
    "one node, though all have pods that span nodes": (
        *(ledger_of(build((3, 4), (3, 4), links={(2, 4): "NV8"}), grant("a", [0, 3])),),
        *("1-2,4-5", "", 2, "1-2"),
    ),
    "known nodes before unknown": (ledger_of(UNKNOWN), "0-3", "", 2, "0-1"),
    "the best linked of all, if known nodes have not enough": (
        *(ledger_of(UNKNOWN), "1-3", "", 2, "2-3"),
    ),
    "the best linked beside one of unknown node": (ledger_of(UNKNOWN), "0-3", "2", 2, "2-3"),
    "the nearest node beside the set one": (
        *(ledger_of(build((1, 1), (1, 1), (1, 1), near={(0, 2): 12})), "0-2", "0", 2, "0,2"),
    ),
}


@pytest.mark.parametrize(
    ("ledger", "available", "include", "count", "best"), GPUS.values(), ids=GPUS
)
def test_the_gpus_preferred_are(
    ledger: Ledger, available: str, include: str, count: int, best: str
) -> None:
    assert str(choose_gpus(ledger, bits(available), bits(include), count)) == best


@pytest.mark.parametrize(
    ("available", "include", "count"),
    [("0-3", "4", 2), ("0-3", "0-2", 2), ("0-3", "", 5), ("0-3", "", -1)],
    ids=["a set one not available", "fewer than are set", "more than there are", "less than none"],
)
def test_no_gpus_can_be_chosen_for(available: str, include: str, count: int) -> None:
    with pytest.raises(ValueError, match="GPUs cannot hold"):
        choose_gpus(PLAIN, bits(available), bits(include), count)
