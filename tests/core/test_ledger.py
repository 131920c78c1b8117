"""Who holds what, and what that leaves: every expected set is counted by hand on one machine."""

import re
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.core.bitmap import Bitmap
from agent.core.layout import key, lay_out
from agent.core.ledger import Grant, Ledger, NodeState
from agent.core.topology import Core, Machine
from tests.core.machines import random_machines
from tests.core.oracle import build

# Node 0 has CPUs 0-7 and GPUs 0 and 1, node 1 has CPUs 8-15 and GPUs 2 and 3. Of GPU 4 no node is
# known, GPU 3 is faulty, CPU 16 is on a node that is offline, and CPU 17 is offline itself.
_TWO = build((2, 4), (2, 4), seatless=1, faulty=[3])
MACHINE = replace(
    _TWO,
    cores=(*_TWO.cores, Core(id=8, socket=1, node=None, l3=None, cpus=Bitmap([16]))),
    offline_cpus=Bitmap([17]),
)
LAYOUT = lay_out(MACHINE)
IDLE, SINGLE, SHARED = NodeState


def grant(
    uid: str,
    gpus: Iterable[int] = (),
    cpus: str = "",
    *,
    container: str = "main",
    mems: str = "",
    bound_bytes: int = 0,
) -> Grant:
    return Grant(
        uid=uid,
        pod=f"ns/{uid}",
        container=container,
        gpus=tuple(f"GPU-{place}" for place in gpus),
        cpus=Bitmap.parse_list(cpus),
        mems=Bitmap.parse_list(mems),
        bound_bytes=bound_bytes,
    )


def ledger(*grants: Grant, reserved: str = "") -> Ledger:
    return Ledger(layout=LAYOUT, reserved=Bitmap.parse_list(reserved), grants=grants)


# --- states ---------------------------------------------------------------------------------------

STATES = {
    "nobody: both are idle": ([], (IDLE, IDLE)),
    "GPUs and CPUs of one node: it is single, the other idle": (
        [grant("a", [0, 1], "0-3")],
        (SINGLE, IDLE),
    ),
    "a GPU holder that is not pinned counts": ([grant("a", [2])], (IDLE, SINGLE)),
    "a pod of CPUs alone counts": ([grant("a", cpus="8-9")], (IDLE, SINGLE)),
    "GPUs of two nodes: both are shared": ([grant("a", [0, 2])], (SHARED, SHARED)),
    "GPUs of one node and CPUs of the other: both are shared": (
        [grant("a", [0], "8-9")],
        (SHARED, SHARED),
    ),
    "GPUs of one node, CPUs of both: both are shared": (
        [grant("a", [0], "0-1,8-9")],
        (SHARED, SHARED),
    ),
    "two pods of one node each: both are single": (
        [grant("a", [0]), grant("b", [2])],
        (SINGLE, SINGLE),
    ),
    "two containers of one pod on a node each: the pod spans both": (
        [grant("a", [0], container="one"), grant("a", [2], container="two")],
        (SHARED, SHARED),
    ),
    "where a pod of one node meets one of two, the node is shared": (
        [grant("a", [0]), grant("b", [1, 2])],
        (SHARED, SHARED),
    ),
    "whoever came first": ([grant("b", [0]), grant("a", [1, 2])], (SHARED, SHARED)),
    "a faulty GPU's holder counts": ([grant("a", [3])], (IDLE, SINGLE)),
    "a GPU of unknown node touches none": ([grant("a", [4])], (IDLE, IDLE)),
    "a GPU of unknown node adds none to what its pod touches": (
        [grant("a", [0, 4])],
        (SINGLE, IDLE),
    ),
    "a GPU that the machine no longer has touches none": ([grant("a", [9])], (IDLE, IDLE)),
}


@pytest.mark.parametrize(("grants", "states"), STATES.values(), ids=STATES)
def test_states(grants: list[Grant], states: tuple[NodeState, ...]) -> None:
    assert ledger(*grants).states == states


# --- what is left ---------------------------------------------------------------------------------

# (grants, reserved) → free CPUs, free GPUs, shared pool
LEFT = {
    "nobody: all CPUs on nodes, all sound GPUs, all that is online": (
        [],
        "",
        ("0-15", "0-2,4", "0-16"),
    ),
    "reserved CPUs are not free, but everybody's": ([], "0-1,8", ("2-7,9-15", "0-2,4", "0-16")),
    "what is held is neither": (
        [grant("a", [0, 2], "0-3"), grant("b", [1], "8-9")],
        "",
        ("4-7,10-15", "4", "4-7,10-16"),
    ),
    "a faulty GPU is not free, held or not": ([grant("a", [3])], "", ("0-15", "0-2,4", "0-16")),
    "a GPU of unknown node can be held": ([grant("a", [4])], "", ("0-15", "0-2", "0-16")),
    "what containers of a pod hold one after the other counts once": (
        [grant("a", [0], "2-5", container="first"), grant("a", [0], "2-3", container="main")],
        "0-1",
        ("6-15", "1-2,4", "0-1,6-16"),
    ),
    "a GPU that the machine no longer has leaves the others": (
        [grant("a", [0, 9])],
        "",
        ("0-15", "1-2,4", "0-16"),
    ),
    "held CPUs that went offline leave the others": (
        [grant("a", cpus="15,17")],
        "",
        ("0-14", "0-2,4", "0-14,16"),
    ),
    "reserved CPUs may be held since before they were": (
        [grant("a", cpus="0-3")],
        "0-1",
        ("4-15", "0-2,4", "4-16"),
    ),
    "nothing may be left": (
        [grant("a", [0, 1, 2, 4], "0-15")],
        "",
        ("", "", "16"),
    ),
}


@pytest.mark.parametrize(("grants", "reserved", "left"), LEFT.values(), ids=LEFT)
def test_what_is_left(grants: list[Grant], reserved: str, left: tuple[str, str, str]) -> None:
    made = ledger(*grants, reserved=reserved)
    assert (str(made.free_cpus), str(made.free_gpus), str(made.shared_pool)) == left


OVERLAPS = {
    "the same GPU": ([grant("a", [0]), grant("b", [1, 0])], "pod ns/b (b) holds GPUs 0, which"),
    "the same CPUs": (
        [grant("a", cpus="2-5"), grant("b", cpus="4-7")],
        "(b) holds CPUs 4-5, which",
    ),
    "the same CPUs as the last of several containers": (
        [
            grant("a", cpus="2-3", container="one"),
            grant("a", cpus="4-5", container="two"),
            grant("b", cpus="5-6"),
        ],
        "(b) holds CPUs 5, which",
    ),
    "the same faulty GPU": ([grant("a", [3]), grant("b", [3])], "(b) holds GPUs 3, which"),
}


@pytest.mark.parametrize(("grants", "message"), OVERLAPS.values(), ids=OVERLAPS)
def test_two_pods_never_hold(grants: list[Grant], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ledger(*grants)
    with pytest.raises(ValueError, match=re.escape(message)):
        ledger(grants[0]).with_grants(grants[1:])


# --- memory ---------------------------------------------------------------------------------------

BOUND = {
    "nothing where nothing is bound": ([grant("a", [0], "2-3")], {}),
    "a pod's limit, once, however many containers": (
        [
            grant("a", cpus="2-3", container="one", mems="0", bound_bytes=5),
            grant("a", cpus="4-5", container="two", mems="0", bound_bytes=5),
        ],
        {"0": 5},
    ),
    "the sum of the pods on the same nodes": (
        [
            grant("a", cpus="2", mems="0", bound_bytes=5),
            grant("b", cpus="3", mems="0", bound_bytes=7),
        ],
        {"0": 12},
    ),
    "each set of nodes on its own": (
        [
            grant("a", cpus="2", mems="0", bound_bytes=5),
            grant("b", cpus="8", mems="1", bound_bytes=6),
            grant("c", cpus="3,9", mems="0-1", bound_bytes=7),
        ],
        {"0": 5, "1": 6, "0-1": 7},
    ),
    "a pod that is bound without a limit": ([grant("a", cpus="2", mems="0")], {"0": 0}),
}


@pytest.mark.parametrize(("grants", "bound"), BOUND.values(), ids=BOUND)
def test_bound_memory(grants: list[Grant], bound: dict[str, int]) -> None:
    assert {str(nodes): size for nodes, size in ledger(*grants).bound.items()} == bound


# --- from one ledger to the next ------------------------------------------------------------------

A1 = grant("a", [0], "2-3", container="one")
A2 = grant("a", [1], "4-5", container="two")
B = grant("b", cpus="8-9")


def test_grants_are_in_order_whatever_the_order_they_came_in() -> None:
    assert ledger(B, A2, A1).grants == (A1, A2, B)
    assert ledger(B, A2, A1) == ledger(A1, B, A2)


def test_of_pod() -> None:
    made = ledger(A1, A2, B)
    assert (made.of_pod("a"), made.of_pod("b"), made.of_pod("c")) == ((A1, A2), (B,), ())


def test_with_grants_is_another_ledger_worked_out_anew() -> None:
    before = ledger(A1, reserved="0-1")
    assert before.with_grants([B, A2]) == ledger(A1, A2, B, reserved="0-1")
    assert str(before.with_grants([B]).free_cpus) == "4-7,10-15"
    assert str(before.free_cpus) == "4-15"


def test_without_gives_back_what_pods_held() -> None:
    before = ledger(A1, A2, B, reserved="0-1")
    after = before.without(["a", "nobody"])
    assert after == ledger(B, reserved="0-1")
    assert (str(after.free_cpus), str(after.free_gpus)) == ("2-7,10-15", "0-2,4")
    assert after.states == (IDLE, SINGLE)
    assert before.without([]) == before


# --- any machine ----------------------------------------------------------------------------------


@st.composite
def held(draw: st.DrawFn) -> tuple[Machine, dict[str, tuple[set[int], set[int]]], set[int]]:
    """A machine, what pods hold of its GPUs (by place) and CPUs, and what is reserved."""
    machine = draw(random_machines())
    owner = st.sampled_from(["nobody", "a", "b", "c"])
    pods: dict[str, tuple[set[int], set[int]]] = {uid: (set(), set()) for uid in "abc"}
    reserved = {cpu for cpu in machine.cpus if draw(st.integers(0, 9)) == 0}
    for place in range(len(machine.gpus)):
        if (uid := draw(owner)) in pods:
            pods[uid][0].add(place)
    for cpu in set(machine.cpus) - reserved:
        if (uid := draw(owner)) in pods:
            pods[uid][1].add(cpu)
    return machine, pods, reserved


@given(held())
@settings(deadline=None, max_examples=60)
def test_any_ledger_is_as_counted_by_hand(
    case: tuple[Machine, dict[str, tuple[set[int], set[int]]], set[int]],
) -> None:
    machine, pods, reserved = case
    grants = tuple(
        Grant(
            uid=uid,
            pod=f"ns/{uid}",
            container="main",
            gpus=tuple(key(machine.gpus[place]) for place in sorted(gpus)),
            cpus=Bitmap(cpus),
        )
        for uid, (gpus, cpus) in pods.items()
    )
    made = Ledger(layout=lay_out(machine), reserved=Bitmap(reserved), grants=grants)
    held_gpus = set().union(*(gpus for gpus, _ in pods.values()))
    held_cpus = set().union(*(cpus for _, cpus in pods.values()))
    sound = {place for place, gpu in enumerate(machine.gpus) if not gpu.fault}
    assert set(made.free_gpus) == sound - held_gpus
    assert set(made.free_cpus) == set(machine.cpus) - held_cpus - reserved
    assert set(made.shared_pool) == set(machine.cpus) - held_cpus
    widths: dict[int, set[int]] = {node.id: set() for node in machine.cpu_nodes}
    for gpus, cpus in pods.values():
        nodes = {machine.gpus[place].node for place in gpus} - {None}
        nodes |= {node.id for node in machine.cpu_nodes if cpus & set(node.cpus)}
        for node in nodes:
            assert node is not None
            widths[node].add(len(nodes))
    assert made.states == tuple(
        IDLE if not found else SINGLE if found == {1} else SHARED for found in widths.values()
    )
