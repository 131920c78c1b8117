"""From facts to the next ledger: each case by hand, and lives of random nodes."""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
)

from agent.core.bitmap import Bitmap
from agent.core.decision import DecidedGpus, GpuKey
from agent.core.layout import key, lay_out
from agent.core.ledger import Grant, Ledger
from agent.core.placement import MemoryRule, Placement, Refusal, place
from agent.core.request import ContainerDemand, Demand, Exclusive, Invalid, Policy, Role
from agent.core.settlement import ChangeKind, Pin, PodFact, Settlement, grants_of, settle
from agent.core.topology import Machine, union
from tests.core.machines import random_machines
from tests.core.oracle import asks, build

SINGLE, RESTRICTED, BEST_EFFORT = Policy
INIT, SIDECAR = Role.INIT, Role.SIDECAR

# Node 0 has CPUs 0-7 and GPUs 0 and 1, node 1 has CPUs 8-15 and GPUs 2 and 3; the threads of a core
# are neighbours. CPUs 0-1 are reserved where a case says nothing else.
TWO = build((2, 4), (2, 4))


def without_cpus(machine: Machine, gone: Iterable[int]) -> Machine:
    """The machine after these CPUs went offline; every node keeps one."""
    lost = Bitmap(gone) & machine.cpus
    cores = [replace(core, cpus=core.cpus - lost) for core in machine.cores if core.cpus - lost]
    return replace(
        machine,
        cores=tuple(cores),
        nodes=tuple(replace(node, cpus=node.cpus - lost) for node in machine.nodes),
        offline_cpus=machine.offline_cpus | lost,
    )


def with_faults(machine: Machine, places: Iterable[int]) -> Machine:
    """The machine with these GPUs lost, by place."""
    gone = set(places)
    return replace(
        machine,
        gpus=tuple(
            replace(gpu, fault="lost") if place in gone else gpu
            for place, gpu in enumerate(machine.gpus)
        ),
    )


def without_last_gpu(machine: Machine) -> Machine:
    """The machine after its last GPU fell off the bus."""
    links = tuple(row[:-1] for row in machine.links[:-1])
    return replace(machine, gpus=machine.gpus[:-1], links=links)


def demand(
    uid: str,
    *containers: ContainerDemand,
    policy: Policy | None = BEST_EFFORT,
    exclusive: Exclusive = Exclusive.REQUIRED,
    pinned: bool = True,
    cpus: Mapping[str, str] | None = None,
    gpus: Sequence[int] | None = None,
    notes: tuple[str, ...] = (),
) -> Demand:
    """A pod that is pinned, if not told otherwise; `cpus` and `gpus` are its scheduler's choice."""
    decided = tuple((name, Bitmap.parse_list(text)) for name, text in (cpus or {}).items())
    return Demand(
        pod=f"ns/{uid}",
        uid=uid,
        policy=policy,
        exclusive=exclusive,
        pinned=pinned,
        containers=containers,
        decided_cpus=decided or None,
        decided_gpus=gpus and DecidedGpus(by=GpuKey.INDEX, numbers=tuple(gpus)),
        notes=notes,
    )


def invalid(uid: str) -> Invalid:
    return Invalid(pod=f"ns/{uid}", uid=uid, reason="it cannot be read")


def fact(
    asked: Demand | Invalid,
    *,
    given: Mapping[str, Iterable[int]] | None = None,
    found: Mapping[str, str] | None = None,
    mems: str = "",
) -> PodFact:
    """`given` are places of GPUs, `found` the CPUs of running containers, bound to `mems`."""
    nodes = Bitmap.parse_list(mems)
    return PodFact(
        demand=asked,
        given={name: tuple(f"GPU-{at}" for at in gpus) for name, gpus in (given or {}).items()},
        pinned={
            name: Pin(cpus=Bitmap.parse_list(text), mems=nodes)
            for name, text in (found or {}).items()
        },
    )


def grant(uid: str, gpus: Iterable[int] = (), cpus: str = "", container: str = "main") -> Grant:
    return Grant(
        uid=uid,
        pod=f"ns/{uid}",
        container=container,
        gpus=tuple(f"GPU-{at}" for at in gpus),
        cpus=Bitmap.parse_list(cpus),
    )


def shown(grants: Iterable[Grant]) -> dict[str, str]:
    """uid/container → GPUs and CPUs, each behind its letter."""
    texts = {}
    for one in grants:
        gpus = "G" + ",".join(gpu.removeprefix("GPU-") for gpu in one.gpus) if one.gpus else ""
        cpus = f"C{one.cpus}" if one.cpus else ""
        texts[f"{one.uid}/{one.container}"] = f"{gpus} {cpus}".strip()
    return texts


@dataclass(frozen=True, kw_only=True)
class Case:
    """What was held, what is there now, and what becomes of it."""

    before: tuple[Grant, ...] = ()
    facts: tuple[PodFact, ...] = ()
    machine: Machine = TWO
    first: Machine = TWO
    """The machine when `before` was granted."""
    reserved: str = "0-1"
    after: Mapping[str, str] = field(default_factory=dict)
    changes: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    """Part of each reason."""


TWO_CPUS = asks(cpus=2)
A = demand("a", TWO_CPUS)
B = demand("b", TWO_CPUS)
C_FOUR = demand("c", asks(cpus=4))
GPU_A = demand("a", asks(gpus=1, cpus=2))
LOOSE_A = demand("a", asks(gpus=1), policy=None, pinned=False)
LOOSE_B = demand("b", asks(gpus=1), policy=None, pinned=False)

COMING_AND_GOING = {
    "nothing is there: nothing happens": Case(),
    "a new pod gets whole free cores of the fuller node": Case(
        facts=(fact(A),), after={"a/main": "C2-3"}, changes=("grant a: it is new",)
    ),
    "a new pod gets CPUs beside the GPUs that kubelet gave it": Case(
        facts=(fact(GPU_A, given={"main": [2]}),),
        after={"a/main": "G2 C8-9"},
        changes=("grant a: it is new",),
    ),
    "a new pod that kubelet gave nothing yet gets GPUs and CPUs": Case(
        facts=(fact(GPU_A),), after={"a/main": "G0 C2-3"}, changes=("grant a: it is new",)
    ),
    "given no GPUs by name is the same as not given": Case(
        facts=(fact(GPU_A, given={"main": []}),),
        after={"a/main": "G0 C2-3"},
        changes=("grant a: it is new",),
    ),
    "new pods are placed in the order of uids": Case(
        facts=(fact(B), fact(A)),
        after={"a/main": "C2-3", "b/main": "C4-5"},
        changes=("grant a: it is new", "grant b: it is new"),
    ),
    "pods whose scheduler decided on CPUs come first": Case(
        facts=(fact(A), fact(demand("b", TWO_CPUS, cpus={"main": "2-3"}))),
        after={"a/main": "C4-5", "b/main": "C2-3"},
        changes=("grant a: it is new", "grant b: it is new"),
    ),
    "pods whose scheduler decided on GPUs come first": Case(
        facts=(fact(GPU_A), fact(demand("b", asks(gpus=1, cpus=2), gpus=[0]))),
        after={"a/main": "G1 C4-5", "b/main": "G0 C2-3"},
        changes=("grant a: it is new", "grant b: it is new"),
    ),
    "a pod that is gone holds nothing": Case(
        before=(grant("a", [0], "2-3"),), changes=("release a: it is gone",)
    ),
    "what a pod leaves is there for the next at once": Case(
        before=(grant("a", [0, 1, 2, 3], "2-15"),),
        facts=(fact(demand("b", asks(gpus=2, cpus=6), policy=SINGLE)),),
        after={"b/main": "G0,1 C2-7"},
        changes=("release a: it is gone", "grant b: it is new"),
    ),
    "what holds is kept, where a better place is free too": Case(
        before=(grant("a", cpus="9-10"),), facts=(fact(A),), after={"a/main": "C9-10"}
    ),
    "what holds is kept, whatever runs": Case(
        before=(grant("a", cpus="4-5"),),
        facts=(fact(A, found={"main": "6-7"}),),
        after={"a/main": "C4-5"},
    ),
    "GPUs in another order are the same GPUs": Case(
        before=(grant("a", [0, 1], "2-3"),),
        facts=(fact(demand("a", asks(gpus=2, cpus=2)), given={"main": [1, 0]}),),
        after={"a/main": "G0,1 C2-3"},
    ),
    "a pod that is not pinned and has no GPUs holds nothing": Case(
        facts=(fact(demand("a", asks(cpus=2), policy=None, pinned=False)),)
    ),
    "a pod that is not pinned holds its GPUs alone": Case(
        facts=(fact(LOOSE_A, given={"main": [1]}),),
        after={"a/main": "G1"},
        changes=("grant a: it is new",),
    ),
    "a pod that is not pinned holds GPUs that kubelet has not given yet": Case(
        facts=(fact(LOOSE_A),), after={"a/main": "G0"}, changes=("grant a: it is new",)
    ),
    "a pod that says later that it is to be pinned": Case(
        before=(grant("a", [2]),),
        facts=(fact(GPU_A, given={"main": [2]}),),
        after={"a/main": "G2 C8-9"},
        changes=("move a: it is not pinned yet",),
    ),
}

ADOPTING = {
    "a pod that runs pinned keeps its CPUs, though others would be better": Case(
        facts=(fact(A, found={"main": "12-13"}),),
        after={"a/main": "C12-13"},
        changes=("adopt a: it was pinned already",),
    ),
    "with the GPUs that kubelet gave it": Case(
        facts=(fact(GPU_A, given={"main": [2]}, found={"main": "12-13"}),),
        after={"a/main": "G2 C12-13"},
        changes=("adopt a: it was pinned already",),
    ),
    "GPUs are in the order of the machine, whatever kubelet's is": Case(
        facts=(
            fact(demand("a", asks(gpus=2, cpus=2)), given={"main": [1, 0]}, found={"main": "6-7"}),
        ),
        after={"a/main": "G0,1 C6-7"},
        changes=("adopt a: it was pinned already",),
    ),
    "before new pods, of lower uid too": Case(
        facts=(fact(A), fact(B, found={"main": "2-3"})),
        after={"a/main": "C4-5", "b/main": "C2-3"},
        changes=("grant a: it is new", "adopt b: it was pinned already"),
    ),
    "before what a scheduler decided": Case(
        facts=(
            fact(demand("a", TWO_CPUS, cpus={"main": "2-3"})),
            fact(B, found={"main": "2-3"}),
        ),
        after={"a/main": "C4-5", "b/main": "C2-3"},
        changes=("grant a: it is new", "adopt b: it was pinned already"),
    ),
    "a container that does not run yet gets its CPUs beside the others": Case(
        facts=(fact(demand("a", TWO_CPUS, asks("side", cpus=2)), found={"main": "12-13"}),),
        after={"a/main": "C12-13", "a/side": "C8-9"},
        changes=("adopt a: it was pinned already",),
    ),
    "an init container that is over has what its pod has anyway": Case(
        facts=(fact(demand("a", asks("init", INIT, cpus=2), TWO_CPUS), found={"main": "12-13"}),),
        after={"a/init": "C12-13", "a/main": "C12-13"},
        changes=("adopt a: it was pinned already",),
    ),
    "a container that runs after an init container gets the same": Case(
        facts=(fact(demand("a", asks("init", INIT, cpus=2), TWO_CPUS), found={"init": "12-13"}),),
        after={"a/init": "C12-13", "a/main": "C12-13"},
        changes=("adopt a: it was pinned already",),
    ),
    "a container that does not run yet leaves alone what the next pod runs on": Case(
        facts=(
            fact(demand("a", TWO_CPUS, asks("side", cpus=2)), found={"main": "8-9"}),
            fact(B, found={"main": "10-11"}),
        ),
        after={"a/main": "C8-9", "a/side": "C12-13", "b/main": "C10-11"},
        changes=("adopt a: it was pinned already", "adopt b: it was pinned already"),
    ),
    "a container that runs stays, where another has room on another node only": Case(
        facts=(
            fact(demand("a", asks(cpus=6), asks("side", cpus=2)), found={"main": "2-7"}),
            fact(demand("b", asks(cpus=6)), found={"main": "10-15"}),
        ),
        after={"a/main": "C2-7", "a/side": "C8-9", "b/main": "C10-15"},
        changes=("adopt a: it was pinned already", "adopt b: it was pinned already"),
    ),
    "where no CPU is reserved, one whole core stays with everybody else": Case(
        machine=build((0, 4)),
        first=build((0, 4)),
        reserved="",
        before=(grant("b", cpus="0"), grant("c", cpus="2")),
        facts=(
            fact(demand("a", TWO_CPUS, asks("side", cpus=2)), found={"main": "4-5"}),
            fact(demand("b", asks(cpus=1))),
            fact(demand("c", asks(cpus=1))),
        ),
        after={"a/main": "C4-5", "a/side": "C1,3", "b/main": "C0", "c/main": "C2"},
        changes=("adopt a: it was pinned already",),
    ),
    "a pod that its scheduler pinned without its asking": Case(
        facts=tuple(
            fact(
                demand(uid, TWO_CPUS, policy=None, pinned=False, cpus={"main": "4-5"}),
                found=found,
            )
            for uid, found in (("a", {}), ("b", {"main": "4-5"}))
        ),
        after={"b/main": "C4-5"},
        changes=("adopt b: it was pinned already",),
    ),
    "containers that do not run yet of a pod that its scheduler pinned without its asking": Case(
        facts=(
            fact(
                demand(
                    "a",
                    TWO_CPUS,
                    asks("side", cpus=2),
                    policy=None,
                    pinned=False,
                    cpus={"main": "4-5", "side": "8-9"},
                ),
                found={"main": "4-5"},
            ),
        ),
        after={"a/main": "C4-5", "a/side": "C8-9"},
        changes=("adopt a: it was pinned already",),
    ),
    "a sidecar that is away does not get what the init container beside it runs on": Case(
        facts=(
            fact(
                demand("a", asks("side", SIDECAR, cpus=2), asks("init", INIT, cpus=2), TWO_CPUS),
                found={"init": "12-13"},
            ),
        ),
        after={"a/side": "C8-9", "a/init": "C12-13", "a/main": "C12-13"},
        changes=("adopt a: it was pinned already",),
    ),
    "not where an init container runs on the CPUs of a sidecar beside it": Case(
        facts=(
            fact(
                demand("a", asks("side", SIDECAR, cpus=2), asks("init", INIT, cpus=2), TWO_CPUS),
                found={"side": "12-13", "init": "12-13"},
            ),
        ),
        after={"a/side": "C2-3", "a/init": "C4-5", "a/main": "C4-5"},
        changes=("grant a: it is new",),
    ),
    "not on reserved CPUs": Case(
        facts=(fact(A, found={"main": "1-2"}),),
        after={"a/main": "C2-3"},
        changes=("grant a: it is new",),
    ),
    "not on CPUs that another pod holds": Case(
        before=(grant("b", cpus="2-3"),),
        facts=(fact(A, found={"main": "3-4"}), fact(B)),
        after={"a/main": "C4-5", "b/main": "C2-3"},
        changes=("grant a: it is new",),
    ),
    "not on CPUs that another pod runs on, of lower uid": Case(
        facts=(fact(A, found={"main": "4-5"}), fact(B, found={"main": "5-6"})),
        after={"a/main": "C4-5", "b/main": "C2-3"},
        changes=("adopt a: it was pinned already", "grant b: it is new"),
    ),
    "not on CPUs that are offline": Case(
        machine=without_cpus(TWO, [13]),
        facts=(fact(A, found={"main": "12-13"}),),
        after={"a/main": "C2-3"},
        changes=("grant a: it is new",),
    ),
    "not with more CPUs than it asks for": Case(
        facts=(fact(A, found={"main": "8-11"}),),
        after={"a/main": "C2-3"},
        changes=("grant a: it is new",),
    ),
    "not with fewer CPUs than it asks for": Case(
        facts=(fact(A, found={"main": "8"}),),
        after={"a/main": "C2-3"},
        changes=("grant a: it is new",),
    ),
    "not with a container that its pod does not have": Case(
        facts=(fact(A, found={"strange": "8-9"}),),
        after={"a/main": "C2-3"},
        changes=("grant a: it is new",),
    ),
    "not where two containers run on the same CPUs side by side": Case(
        facts=(
            fact(
                demand("a", TWO_CPUS, asks("side", cpus=2)),
                found={"main": "8-9", "side": "8-9"},
            ),
        ),
        after={"a/main": "C2-3", "a/side": "C4-5"},
        changes=("grant a: it is new",),
    ),
    "alone, where another container has no room any more": Case(
        before=(grant("b", cpus="2-7"), grant("c", cpus="10-15")),
        facts=(
            fact(demand("a", TWO_CPUS, asks("side", cpus=2)), found={"main": "8-9"}),
            fact(demand("b", asks(cpus=6))),
            fact(demand("c", asks(cpus=6))),
        ),
        after={"a/main": "C8-9", "b/main": "C2-7", "c/main": "C10-15"},
        changes=("adopt a: it was pinned already",),
        refused={"a": "its other containers have no room beside those that run"},
    ),
    "alone, where another container has room outside the policy only": Case(
        before=(grant("b", cpus="2-7"),),
        facts=(
            fact(
                demand("a", asks(cpus=4), asks("side", cpus=6), policy=SINGLE),
                found={"main": "8-11"},
            ),
            fact(demand("b", asks(cpus=6))),
        ),
        after={"a/main": "C8-11", "b/main": "C2-7"},
        changes=("adopt a: it was pinned already",),
        refused={"a": "its other containers have no room beside those that run"},
    ),
    "alone, where another init container has no room any more": Case(
        before=(grant("b", cpus="2-7"), grant("c", cpus="10-15")),
        facts=(
            fact(demand("a", asks("init", INIT, cpus=4), TWO_CPUS), found={"main": "8-9"}),
            fact(demand("b", asks(cpus=6))),
            fact(demand("c", asks(cpus=6))),
        ),
        after={"a/main": "C8-9", "b/main": "C2-7", "c/main": "C10-15"},
        changes=("adopt a: it was pinned already",),
        refused={"a": "its other containers have no room beside those that run"},
    ),
    "not a pod that does not ask to be pinned any more": Case(
        facts=(fact(LOOSE_A, given={"main": [1]}, found={"main": "2-3"}),),
        after={"a/main": "G1"},
        changes=("grant a: it is new",),
    ),
    "an invalid pod stays on what it runs on, and is refused": Case(
        facts=(fact(invalid("a"), given={"main": [1]}, found={"main": "2-3"}),),
        after={"a/main": "G1 C2-3"},
        changes=("adopt a: it was pinned already",),
        refused={"a": "it cannot be read"},
    ),
    "not an invalid pod of which nothing runs": Case(
        facts=(fact(invalid("a"), given={"main": [1]}),),
        after={"a/main": "G1"},
        changes=("grant a: it is new",),
        refused={"a": "it cannot be read"},
    ),
}

HARDWARE = {
    # b had CPUs of one node, and now spreads. Had a been refused, it would not hold GPU 0.
    "a pod spreads over both nodes: who was admitted before and is not pinned stays": Case(
        before=(grant("a", [0]), grant("b", cpus="2-7")),
        machine=without_cpus(TWO, [7, 13, 14, 15]),
        facts=(
            fact(demand("a", asks(gpus=1), policy=SINGLE, pinned=False)),
            fact(demand("b", asks(cpus=6))),
        ),
        after={"a/main": "G0", "b/main": "C2-5,8-9"},
        changes=("move b: CPUs 7 went offline",),
    ),
    "a pod spreads over both nodes: who has its GPU from kubelet stays admitted too": Case(
        before=(grant("a", [0]), grant("b", cpus="2-7")),
        machine=without_cpus(TWO, [7, 13, 14, 15]),
        facts=(
            fact(demand("a", asks(gpus=1), policy=SINGLE, pinned=False), given={"main": [0]}),
            fact(demand("b", asks(cpus=6))),
        ),
        after={"a/main": "G0", "b/main": "C2-5,8-9"},
        changes=("move b: CPUs 7 went offline",),
    ),
    "a CPU that a scheduler chose goes offline: who does not ask for pinning has none": Case(
        before=(grant("a", cpus="2", container="init"), grant("a", cpus="3")),
        machine=without_cpus(TWO, [3]),
        facts=(
            fact(
                demand(
                    "a",
                    asks("init", INIT, cpus=1),
                    asks(cpus=1),
                    policy=None,
                    pinned=False,
                    cpus={"init": "2", "main": "3"},
                ),
                found={"init": "2"},
            ),
        ),
        changes=("release a: CPUs 3 went offline",),
    ),
    "a CPU goes offline and there is no room: what still runs is not adopted later": Case(
        before=(
            grant("a", cpus="2,8", container="init"),
            grant("a", cpus="2-6,8"),
            grant("b", cpus="9-15"),
        ),
        machine=without_cpus(TWO, [6]),
        facts=(
            fact(
                demand("a", asks("init", INIT, cpus=2), asks(cpus=6), policy=SINGLE),
                found={"init": "2,8"},
            ),
            fact(demand("b", asks(cpus=7))),
        ),
        after={"b/main": "C9-15"},
        changes=("release a: CPUs 6 went offline",),
        refused={"a": "asked 6 CPUs"},
    ),
    "a CPU goes offline and there is no room: GPUs that kubelet has not given are free again": Case(
        before=(grant("a", [0, 1], "2-3"), grant("b", cpus="4-7")),
        machine=without_cpus(TWO, [3]),
        facts=(
            fact(demand("a", asks(gpus=2, cpus=12), policy=SINGLE)),
            fact(demand("b", asks(cpus=4))),
            fact(demand("c", asks(gpus=1), policy=None, pinned=False)),
        ),
        after={"b/main": "C4-7", "c/main": "G0"},
        changes=("release a: CPUs 3 went offline", "grant c: it is new"),
        refused={"a": "asked 2 GPUs and 12 CPUs"},
    ),
    "a CPU goes offline: who holds it moves, nobody else": Case(
        before=(grant("a", cpus="2-3"), grant("b", cpus="4-5")),
        machine=without_cpus(TWO, [3]),
        facts=(fact(A, found={"main": "2-3"}), fact(B, found={"main": "4-5"})),
        after={"a/main": "C6-7", "b/main": "C4-5"},
        changes=("move a: CPUs 3 went offline",),
    ),
    "a CPU goes offline and there is no room: the pod keeps its GPUs and is refused": Case(
        before=(grant("a", [0], "2-3"), grant("b", cpus="4-7")),
        machine=without_cpus(TWO, [3]),
        facts=(
            fact(
                demand("a", asks(gpus=1, cpus=2), policy=SINGLE),
                given={"main": [0]},
                found={"main": "2-3"},
            ),
            fact(demand("b", asks(cpus=4))),
        ),
        after={"a/main": "G0", "b/main": "C4-7"},
        changes=("move a: CPUs 3 went offline",),
        refused={"a": "asked 1 GPU and 2 CPUs"},
    ),
    "a CPU that nobody holds goes offline: nobody moves": Case(
        before=(grant("a", cpus="2-3"),),
        machine=without_cpus(TWO, [12]),
        facts=(fact(A),),
        after={"a/main": "C2-3"},
    ),
    "a CPU comes back: nobody moves": Case(
        first=without_cpus(TWO, [2, 3]),
        before=(grant("a", cpus="4-5"),),
        facts=(fact(A),),
        after={"a/main": "C4-5"},
    ),
    "CPUs become reserved: who holds them moves": Case(
        before=(grant("a", cpus="2-3"), grant("b", cpus="4-5")),
        reserved="0-2",
        facts=(fact(A, found={"main": "2-3"}), fact(B)),
        after={"a/main": "C6-7", "b/main": "C4-5"},
        changes=("move a: CPUs 2 are reserved now",),
    ),
    "a GPU becomes faulty: its pod keeps it": Case(
        before=(grant("a", [0], "2-3"),),
        machine=with_faults(TWO, [0]),
        facts=(fact(GPU_A, given={"main": [0]}),),
        after={"a/main": "G0 C2-3"},
    ),
    "a GPU becomes faulty: its pod keeps it over a restart": Case(
        machine=with_faults(TWO, [0]),
        facts=(fact(GPU_A, given={"main": [0]}, found={"main": "6-7"}),),
        after={"a/main": "G0 C6-7"},
        changes=("adopt a: it was pinned already",),
    ),
    "a GPU becomes faulty: nobody else gets it": Case(
        machine=with_faults(TWO, [0]),
        facts=(fact(LOOSE_A), fact(LOOSE_B)),
        after={"a/main": "G1", "b/main": "G2"},
        changes=("grant a: it is new", "grant b: it is new"),
    ),
    "a GPU is gone from the machine: its pod keeps it": Case(
        before=(grant("a", [3], "8-9"),),
        machine=without_last_gpu(TWO),
        facts=(fact(GPU_A, given={"main": [3]}),),
        after={"a/main": "G3 C8-9"},
    ),
}

KUBELET = {
    "kubelet gives what was chosen for the pod: it is kept": Case(
        before=(grant("a", [0], "2-3"),),
        facts=(fact(GPU_A, given={"main": [0]}),),
        after={"a/main": "G0 C2-3"},
    ),
    "kubelet gave other GPUs: the pod moves to them": Case(
        before=(grant("a", [0], "2-3"),),
        facts=(fact(GPU_A, given={"main": [2]}),),
        after={"a/main": "G2 C8-9"},
        changes=("move a: kubelet gave container main other GPUs",),
    ),
    "kubelet gave other GPUs: what runs on the old node's CPUs moves too": Case(
        before=(grant("a", [0], "2-3"),),
        facts=(
            fact(
                demand("a", asks(gpus=1, cpus=2), policy=SINGLE),
                given={"main": [2]},
                found={"main": "2-3"},
            ),
        ),
        after={"a/main": "G2 C8-9"},
        changes=("move a: kubelet gave container main other GPUs",),
    ),
    "kubelet gave other GPUs, and there is no room: nor in the next pass": Case(
        before=(grant("a", [0], "2-3"), grant("b", cpus="8-15")),
        facts=(
            fact(
                demand("a", asks(gpus=1, cpus=2), policy=SINGLE),
                given={"main": [2]},
                found={"main": "2-3"},
            ),
            fact(demand("b", asks(cpus=8))),
        ),
        after={"a/main": "G2", "b/main": "C8-15"},
        changes=("move a: kubelet gave container main other GPUs",),
        refused={"a": "asked 1 GPU and 2 CPUs"},
    ),
    "kubelet gave a container GPUs that had none: they are the pod's": Case(
        before=(grant("a", [0], container="one"),),
        facts=(
            fact(
                demand("a", asks("one", gpus=1), asks("two", gpus=1), policy=None, pinned=False),
                given={"one": [0], "two": [1]},
            ),
        ),
        after={"a/one": "G0", "a/two": "G1"},
        changes=("move a: kubelet gave container two other GPUs",),
    ),
    "kubelet gave a GPU that another pod holds: refused, and nothing is shared": Case(
        before=(grant("a", [0], "2-3"),),
        facts=(
            fact(GPU_A, given={"main": [0]}),
            fact(demand("b", asks(gpus=1, cpus=2)), given={"main": [0]}),
        ),
        after={"a/main": "G0 C2-3"},
        refused={"b": "kubelet gave it GPU GPU-0, which another pod holds"},
    ),
    "kubelet gave a GPU that another pod holds: the pod keeps the GPUs that are its own": Case(
        before=(grant("a", [0], "2-3"),),
        facts=(
            fact(GPU_A, given={"main": [0]}),
            fact(demand("b", asks(gpus=2, cpus=2)), given={"main": [0, 2]}),
        ),
        after={"a/main": "G0 C2-3", "b/main": "G2"},
        changes=("grant b: it is new",),
        refused={"b": "kubelet gave it GPU GPU-0, which another pod holds"},
    ),
    "kubelet gave a GPU that another pod holds: what runs is not adopted with it": Case(
        before=(grant("a", [0], "2-3"),),
        facts=(
            fact(GPU_A, given={"main": [0]}),
            fact(demand("b", asks(gpus=1, cpus=2)), given={"main": [0]}, found={"main": "8-9"}),
        ),
        after={"a/main": "G0 C2-3"},
        refused={"b": "kubelet gave it GPU GPU-0, which another pod holds"},
    ),
    "kubelet gave two new pods the same GPU: the first has it": Case(
        facts=(fact(LOOSE_A, given={"main": [0]}), fact(LOOSE_B, given={"main": [0]})),
        after={"a/main": "G0"},
        changes=("grant a: it is new",),
        refused={"b": "kubelet gave it GPU GPU-0, which another pod holds"},
    ),
    "kubelet gave a pod's chosen GPU to another and it another: both have what kubelet gave": Case(
        before=(grant("a", [0], "2-3"),),
        facts=(fact(GPU_A, given={"main": [2]}), fact(LOOSE_B, given={"main": [0]})),
        after={"a/main": "G2 C8-9", "b/main": "G0"},
        changes=("move a: kubelet gave container main other GPUs", "grant b: it is new"),
    ),
    "a given GPU of a pod yet to be placed is not chosen for one before it": Case(
        facts=(fact(LOOSE_A), fact(LOOSE_B, given={"main": [0]})),
        after={"a/main": "G1", "b/main": "G0"},
        changes=("grant a: it is new", "grant b: it is new"),
    ),
}

DECIDED = {"main": "4-5", "side": "6-7"}
SIZES = {
    "a container more, and the others run: they stay, it is beside them": Case(
        before=(grant("a", cpus="8-9"),),
        facts=(fact(demand("a", TWO_CPUS, asks("side", cpus=2)), found={"main": "8-9"}),),
        after={"a/main": "C8-9", "a/side": "C10-11"},
        changes=("adopt a: it was pinned already",),
    ),
    "a container more, and nothing runs: the pod is placed anew": Case(
        before=(grant("a", cpus="2-3"),),
        facts=(fact(demand("a", TWO_CPUS, asks("side", cpus=2))),),
        after={"a/main": "C2-3", "a/side": "C4-5"},
        changes=("move a: container side asks for 2 CPUs now",),
    ),
    "a container more, for which there is no room: what runs stays": Case(
        before=(grant("a", cpus="2-3"), grant("b", cpus="4-7,8-15")),
        facts=(
            fact(demand("a", TWO_CPUS, asks("side", cpus=2)), found={"main": "2-3"}),
            fact(demand("b", asks(cpus=12)), found={"main": "4-15"}),
        ),
        after={"a/main": "C2-3", "b/main": "C4-15"},
        refused={"a": "its other containers have no room beside those that run"},
    ),
    "a container more, for which there is no room, and nothing runs: all is given back": Case(
        before=(grant("a", cpus="2-3"),),
        facts=(fact(demand("a", TWO_CPUS, asks("side", cpus=99))),),
        changes=("release a: container side asks for 99 CPUs now",),
        refused={"a": "asked 101 CPUs"},
    ),
    "a container less, and the others run: they stay": Case(
        before=(grant("a", cpus="4-5"), grant("a", cpus="2-3", container="side")),
        facts=(fact(A, found={"main": "4-5"}),),
        after={"a/main": "C4-5"},
        changes=("adopt a: it was pinned already",),
    ),
    "a container less, and nothing runs: what it had is given back": Case(
        before=(grant("a", cpus="2-3"), grant("a", cpus="4-5", container="side")),
        facts=(fact(A),),
        after={"a/main": "C2-3"},
        changes=("move a: container side asks for 0 CPUs now",),
    ),
    "a container asks for more": Case(
        before=(grant("a", cpus="2-3"),),
        facts=(fact(demand("a", asks(cpus=4)), found={"main": "2-3"}),),
        after={"a/main": "C2-5"},
        changes=("move a: container main asks for 4 CPUs now",),
    ),
    "a container asks for less": Case(
        before=(grant("a", cpus="2-5"),),
        facts=(fact(A, found={"main": "2-5"}),),
        after={"a/main": "C2-3"},
        changes=("move a: container main asks for 2 CPUs now",),
    ),
    "what a pod gives back is there for the next at once": Case(
        before=(grant("a", cpus="2-7"), grant("b", cpus="8-15")),
        facts=(fact(A, found={"main": "2-7"}), fact(demand("b", asks(cpus=8))), fact(C_FOUR)),
        after={"a/main": "C2-3", "b/main": "C8-15", "c/main": "C4-7"},
        changes=("move a: container main asks for 2 CPUs now", "grant c: it is new"),
    ),
    "what a pod gives back is there for a container more of one before it": Case(
        before=(grant("a", cpus="2-3"), grant("b", cpus="4-7")),
        facts=(
            fact(demand("a", TWO_CPUS, asks("side", cpus=2), policy=SINGLE), found={"main": "2-3"}),
            fact(B, found={"main": "4-7"}),
        ),
        after={"a/main": "C2-3", "a/side": "C6-7", "b/main": "C4-5"},
        changes=("adopt a: it was pinned already", "move b: container main asks for 2 CPUs now"),
    ),
    "an init container runs on what the others hold: nothing is asked anew": Case(
        before=(grant("a", cpus="2-3", container="init"), grant("a", cpus="2-3")),
        facts=(fact(demand("a", asks("init", INIT, cpus=2), TWO_CPUS), found={"init": "2-3"}),),
        after={"a/init": "C2-3", "a/main": "C2-3"},
    ),
    "who is not pinned may ask for other CPUs: it is not placed anew beside one of two nodes": Case(
        before=(grant("a", [0]), grant("b", cpus="4-5,8-15")),
        facts=(
            fact(
                demand("a", asks(gpus=1, cpus=9), policy=SINGLE, pinned=False), given={"main": [0]}
            ),
            fact(demand("b", asks(cpus=10))),
        ),
        after={"a/main": "G0", "b/main": "C4-5,8-15"},
    ),
    "a scheduler decides anew: what is held is kept": Case(
        before=(grant("a", cpus="4-5"),),
        facts=(fact(demand("a", TWO_CPUS, cpus={"main": "2-3"}), found={"main": "4-5"}),),
        after={"a/main": "C4-5"},
    ),
    "the rest of a pod gets its name: it is held on": Case(
        before=(grant("a", cpus="8-9"), grant("a", cpus="10-11", container="rest")),
        facts=(fact(demand("a", TWO_CPUS, asks("side", cpus=2)), found={"main": "8-9"}),),
        after={"a/main": "C8-9", "a/side": "C10-11"},
        changes=("adopt a: it was pinned already",),
    ),
    "one that waits has no part in what a container more gets beside those that run": Case(
        before=(grant("b", cpus="2-3"), grant("b", cpus="4-5", container="rest")),
        facts=(
            fact(demand("a", asks(cpus=12))),
            fact(demand("b", TWO_CPUS, asks("side", cpus=2)), found={"main": "2-3"}),
        ),
        after={"b/main": "C2-3", "b/side": "C4-5"},
        changes=("adopt b: it was pinned already",),
        refused={"a": "asked 12 CPUs"},
    ),
    "one of which nothing runs asks for more than there is": Case(
        before=(grant("a", cpus="2-3"),),
        facts=(fact(demand("a", asks(cpus=16))),),
        after={},
        changes=("release a: container main asks for 16 CPUs now",),
        refused={"a": "asked 16 CPUs"},
    ),
    "a container more of those that a scheduler chose CPUs for": Case(
        before=(grant("a", cpus="4-5"),),
        facts=(
            fact(demand("a", TWO_CPUS, asks("side", cpus=2), cpus=DECIDED), found={"main": "4-5"}),
        ),
        after={"a/main": "C4-5", "a/side": "C6-7"},
        changes=("adopt a: it was pinned already",),
    ),
    "one that waits gets nothing of a pod that asks for less, and of which nothing runs": Case(
        before=(grant("b", cpus="2-3"), grant("b", cpus="4-5", container="rest")),
        facts=(fact(demand("a", asks(cpus=14))), fact(B)),
        after={"b/main": "C2-3"},
        changes=("move b: container rest asks for 0 CPUs now",),
        refused={"a": "asked 14 CPUs"},
    ),
    "one of one node stays beside one of two, under another name": Case(
        before=(grant("a", [0], "2-3", container="rest"), grant("b", cpus="4-5,8-15")),
        facts=(
            fact(demand("a", asks(gpus=1, cpus=2), policy=SINGLE), given={"main": [0]}),
            fact(demand("b", asks(cpus=10))),
        ),
        after={"a/main": "G0 C2-3", "b/main": "C4-5,8-15"},
        changes=("move a: kubelet gave container main other GPUs",),
    ),
    "one that is not pinned stays beside one of two nodes, with its GPU in another container": Case(
        before=(grant("a", [0], container="rest"), grant("b", cpus="4-5,8-15")),
        facts=(
            fact(demand("a", asks(gpus=1), policy=SINGLE, pinned=False), given={"main": [0]}),
            fact(demand("b", asks(cpus=10))),
        ),
        after={"a/main": "G0", "b/main": "C4-5,8-15"},
        changes=("move a: kubelet gave container main other GPUs",),
    ),
    "Restricted without GPUs has CPUs of two nodes: after a restart too": Case(
        facts=(
            fact(
                demand("a", TWO_CPUS, asks("side", cpus=10), policy=RESTRICTED),
                found={"main": "2-3"},
            ),
        ),
        after={"a/main": "C2-3", "a/side": "C4-13"},
        changes=("adopt a: it was pinned already",),
    ),
}

REFUSING = {
    "an invalid pod is refused with its reason": Case(
        facts=(fact(invalid("a")),), refused={"a": "it cannot be read"}
    ),
    "an invalid pod's GPUs are counted": Case(
        facts=(
            fact(invalid("a"), given={"main": [0]}),
            fact(demand("b", asks(gpus=2), policy=SINGLE, pinned=False)),
        ),
        after={"a/main": "G0", "b/main": "G2,3"},
        changes=("grant a: it is new", "grant b: it is new"),
        refused={"a": "it cannot be read"},
    ),
    "an invalid pod stays refused, and keeps its GPUs": Case(
        before=(replace(grant("a", [0]), placed=False),),
        facts=(fact(invalid("a"), given={"main": [0]}),),
        after={"a/main": "G0"},
        refused={"a": "it cannot be read"},
    ),
    "an invalid pod's GPUs are in the order of the machine": Case(
        facts=(fact(invalid("a"), given={"main": [1, 0]}),),
        after={"a/main": "G0,1"},
        changes=("grant a: it is new",),
        refused={"a": "it cannot be read"},
    ),
    "who finds no room is refused with numbers": Case(
        before=(grant("b", cpus="2-6"),),
        facts=(
            fact(demand("a", asks(gpus=1, cpus=2), policy=SINGLE), given={"main": [1]}),
            fact(demand("b", asks(cpus=5))),
        ),
        after={"a/main": "G1", "b/main": "C2-6"},
        changes=("grant a: it is new",),
        refused={"a": "node 0 (single) has 1 free CPU, node 1 has 8; asked 1 GPU and 2 CPUs"},
    ),
    "who is refused is tried again: no room yet": Case(
        before=(replace(grant("a", [1]), placed=False), grant("b", cpus="2-6")),
        facts=(
            fact(demand("a", asks(gpus=1, cpus=2), policy=SINGLE), given={"main": [1]}),
            fact(demand("b", asks(cpus=5))),
        ),
        after={"a/main": "G1", "b/main": "C2-6"},
        refused={"a": "asked 1 GPU and 2 CPUs"},
    ),
    "who is refused is tried again, and admitted when there is room": Case(
        before=(replace(grant("a", [1]), placed=False), grant("b", cpus="2-6")),
        facts=(fact(demand("a", asks(gpus=1, cpus=2), policy=SINGLE), given={"main": [1]}),),
        after={"a/main": "G1 C2-3"},
        changes=("move a: it was refused", "release b: it is gone"),
    ),
    "who is refused and not pinned stays refused as long as its policy is broken": Case(
        before=(replace(grant("a", [1, 2]), placed=False),),
        facts=(
            fact(demand("a", asks(gpus=2), policy=SINGLE, pinned=False), given={"main": [1, 2]}),
        ),
        after={"a/main": "G1,2"},
        refused={"a": "its GPUs 1-2 are on nodes 0-1"},
    ),
    "who is refused and not pinned is admitted when its policy is kept": Case(
        before=(replace(grant("a", [1]), placed=False), grant("b", cpus="2-7,14-15")),
        facts=(fact(demand("a", asks(gpus=1), policy=SINGLE, pinned=False), given={"main": [1]}),),
        after={"a/main": "G1"},
        changes=("release b: it is gone",),
    ),
    "a pod that was admitted and becomes invalid is refused and keeps what it runs on": Case(
        before=(grant("a", [0], "2-3"),),
        facts=(fact(invalid("a"), given={"main": [0]}, found={"main": "2-3"}),),
        after={"a/main": "G0 C2-3"},
        changes=(),
        refused={"a": "it cannot be read"},
    ),
    "a pod that was admitted, becomes invalid and does not run keeps its GPUs only": Case(
        before=(grant("a", [0], "2-3"),),
        facts=(fact(invalid("a"), given={"main": [0]}),),
        after={"a/main": "G0"},
        changes=("move a: it is invalid",),
        refused={"a": "it cannot be read"},
    ),
    "who is refused keeps its GPUs, and that counts for the states": Case(
        facts=(
            fact(demand("a", asks(gpus=2, cpus=2), policy=SINGLE), given={"main": [1, 2]}),
            fact(demand("b", TWO_CPUS, policy=SINGLE)),
        ),
        after={"a/main": "G1,2"},
        changes=("grant a: it is new",),
        refused={
            "a": "its GPUs 1-2 are on nodes 0-1",
            "b": "singleNUMANodeExclusive is Required",
        },
    ),
    # b needs more CPUs than its node has and spreads over both: then a no longer meets a pod of one
    # node.
    "who is refused is tried again after those placed later": Case(
        facts=(
            fact(demand("a", asks(gpus=2, cpus=2), policy=RESTRICTED), given={"main": [1, 2]}),
            fact(demand("b", asks(gpus=1, cpus=8)), given={"main": [0]}),
        ),
        after={"a/main": "G1,2 C10-11", "b/main": "G0 C2-9"},
        changes=("grant a: it is new", "grant b: it is new"),
    ),
    "one that nothing helps does not keep the others waiting": Case(
        facts=(
            fact(demand("a", asks(gpus=2, cpus=2), policy=RESTRICTED), given={"main": [1, 2]}),
            fact(demand("b", asks(gpus=1, cpus=8)), given={"main": [0]}),
            fact(demand("c", asks(cpus=99))),
        ),
        after={"a/main": "G1,2 C10-11", "b/main": "G0 C2-9"},
        changes=("grant a: it is new", "grant b: it is new"),
        refused={"c": "asked 99 CPUs"},
    ),
}

CASES = {
    f"{subject}: {name}": case
    for subject, cases in (
        ("coming and going", COMING_AND_GOING),
        ("adopted", ADOPTING),
        ("hardware", HARDWARE),
        ("kubelet", KUBELET),
        ("sizes", SIZES),
        ("refused", REFUSING),
    )
    for name, case in cases.items()
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_settle(case: Case) -> None:
    reserved = Bitmap.parse_list(case.reserved)
    before = Ledger(layout=lay_out(case.first), reserved=reserved, grants=case.before)
    settlement = settle(case.machine, before, case.facts)
    assert shown(settlement.ledger.grants) == case.after
    told = [f"{one.kind} {one.uid}: {one.reason}" for one in settlement.changes]
    assert sorted(told) == sorted(case.changes)
    assert [one.uid for one in settlement.refused] == sorted(case.refused)
    for one in settlement.refused:
        assert one.pod == f"ns/{one.uid}"
        assert case.refused[one.uid] in one.reason
    check_changes(before, settlement)
    assert settlement.ledger.layout.machine == case.machine
    assert settle(case.machine, before, reversed(case.facts)) == settlement
    again = settle(case.machine, settlement.ledger, case.facts)
    assert (again.ledger, again.changes) == (settlement.ledger, ())


def check_changes(before: Ledger, settlement: Settlement) -> None:
    """The changes are exactly the difference between the ledgers."""
    uids = {one.uid for one in (*before.grants, *settlement.ledger.grants)}
    expected = {}
    for uid in sorted(uids):
        old, new = before.of_pod(uid), settlement.ledger.of_pod(uid)
        if old != new:
            expected[uid] = (f"ns/{uid}", new, bool(old), bool(new))
    kinds = {
        (True, True): {ChangeKind.MOVE, ChangeKind.ADOPT},
        (True, False): {ChangeKind.RELEASE},
        (False, True): {ChangeKind.GRANT, ChangeKind.ADOPT},
    }
    assert [one.uid for one in settlement.changes] == list(expected)
    for one in settlement.changes:
        pod, new, *had_and_has = expected[one.uid]
        assert (one.pod, one.grants) == (pod, new)
        assert one.kind in kinds[had_and_has[0], had_and_has[1]]
        assert one.reason


def test_the_layout_is_kept_while_the_machine_is() -> None:
    before = Ledger(layout=lay_out(TWO))
    assert settle(TWO, before, [fact(A)]).ledger.layout is before.layout


def test_a_pod_that_was_given_a_gpu_that_is_gone_is_kept() -> None:
    """Else each pass would place it anew, and it would move whenever others leave."""
    there = fact(demand("a", asks(gpus=2, cpus=2)), given={"main": [2, 9]})
    first = settle(
        TWO, Ledger(layout=lay_out(TWO), grants=(grant("b", cpus="8-9"),)), [there, fact(B)]
    )
    assert shown(first.ledger.of_pod("a"))["a/main"].endswith("C10-11")
    second = settle(TWO, first.ledger, [there])
    assert second.ledger.of_pod("a") == first.ledger.of_pod("a")


def test_grants_of_a_placement() -> None:
    """For whoever places outside of a pass."""
    asked = demand(
        "a", asks("one", gpus=1, cpus=2, memory_gib=1), asks("two", cpus=2, memory_gib=1)
    )
    placement = place(Ledger(layout=lay_out(TWO)), asked)
    assert isinstance(placement, Placement)
    grants = grants_of(lay_out(TWO), asked, placement, "other")
    assert shown(grants) == {"other/one": "G0 C0-1", "other/two": "C2-3"}
    assert {(one.pod, str(one.mems), one.bound_bytes) for one in grants} == {("ns/a", "0", 2 << 30)}


# --- memory and notes -----------------------------------------------------------------------------

LIMITED = demand("a", asks("one", cpus=2, memory_gib=3), asks("two", cpus=2, memory_gib=4))


def test_a_new_pod_has_its_memory_bound_by_the_rule() -> None:
    ledger = Ledger(layout=lay_out(TWO))
    for memory, bound in ((MemoryRule.AUTO, ("0", 7 << 30)), (MemoryRule.LEAVE, ("", 0))):
        after = settle(TWO, ledger, [fact(LIMITED)], memory).ledger
        assert {(str(one.mems), one.bound_bytes) for one in after.grants} == {bound}


ADOPTED_MEMORY = {
    "bound as it was found, with the pod's limit": (LIMITED, "1", ("1", 7 << 30)),
    "not bound if it was not": (LIMITED, "", ("", 0)),
    "bound as it was found, without a limit": (A, "0-1", ("0-1", 0)),
}


@pytest.mark.parametrize(("asked", "mems", "bound"), ADOPTED_MEMORY.values(), ids=ADOPTED_MEMORY)
def test_an_adopted_pods_memory_is(asked: Demand, mems: str, bound: tuple[str, int]) -> None:
    found = {asked.containers[0].name: "8-9"}
    after = settle(TWO, Ledger(layout=lay_out(TWO)), [fact(asked, found=found, mems=mems)]).ledger
    assert {(str(one.mems), one.bound_bytes) for one in after.grants} == {bound}
    assert len(after.grants) == len(asked.containers)


def test_notes_on_a_placement_are_told_when_it_is_made_and_not_again() -> None:
    noted = demand("b", TWO_CPUS, notes=("what its reader tells",))
    facts = [fact(noted), fact(LIMITED), fact(demand("c", asks(cpus=99)))]
    first = settle(TWO, Ledger(layout=lay_out(TWO)), facts)
    assert first.notes == (("b", "memory is not bound: not every container has a memory limit"),)
    assert settle(TWO, first.ledger, facts).notes == ()


def test_a_pod_that_holds_nothing_against_a_decision_is_told_of_each_time() -> None:
    """Its scheduler chose CPUs that are held, and it does not ask to be pinned."""
    loose = demand("a", asks(), policy=None, pinned=False, cpus={"main": "2-3"})
    ledger = Ledger(layout=lay_out(TWO), grants=(grant("b", cpus="2-3"),))
    for _ in range(2):
        settlement = settle(TWO, ledger, [fact(loose), fact(B)])
        ledger = settlement.ledger
        assert settlement.notes == (
            ("a", "the scheduler chose CPUs 2-3, but 2-3 are not free here"),
        )


# --- lives of nodes -------------------------------------------------------------------------------


@dataclass
class Pod:
    """A pod on the simulated node; `pins` are on its running containers.

    `later` are GPUs that kubelet gives the pod's later containers. `over` are how many of its init
    containers have ended.
    """

    asked: Demand | Invalid
    given: dict[str, tuple[str, ...]] = field(default_factory=dict)
    pins: dict[str, Pin] = field(default_factory=dict)
    later: dict[str, tuple[str, ...]] = field(default_factory=dict)
    over: int = 0

    @property
    def containers(self) -> tuple[ContainerDemand, ...]:
        return self.asked.containers if isinstance(self.asked, Demand) else ()

    def fact(self) -> PodFact:
        return PodFact(demand=self.asked, given=dict(self.given), pinned=dict(self.pins))


SMALL = [
    TWO,
    build((2, 3), (1, 2), (0, 2), seatless=1),
    build((1, 2), (1, 2), (1, 2), threads=1, faulty=[2]),
]


@st.composite
def demands(draw: st.DrawFn, uid: str, loose_decided: bool) -> Demand:
    """Pods of up to three containers; a scheduler may have decided well or badly."""
    pinned = draw(st.booleans())
    roles = draw(st.lists(st.sampled_from([INIT, SIDECAR]), max_size=2))
    containers = tuple(
        asks(
            f"c{at}",
            role,
            gpus=draw(st.sampled_from([0, 0, 1, 2])),
            cpus=draw(st.integers(1 if pinned else 0, 4)),
            memory_gib=draw(st.sampled_from([None, 1, 300])),
        )
        for at, role in enumerate([*roles, Role.APP])
    )
    plain = demand(
        uid,
        *containers,
        policy=draw(st.sampled_from(Policy) if pinned else st.none() | st.sampled_from(Policy)),
        exclusive=draw(st.sampled_from(Exclusive)),
        pinned=pinned,
    )
    if (pinned or loose_decided) and draw(st.integers(0, 3)) == 0:
        cpus = st.integers(0, 12)
        chosen = {c.name: draw(st.sets(cpus, min_size=c.cpus, max_size=c.cpus)) for c in containers}
        decided = tuple((name, Bitmap(ids)) for name, ids in chosen.items() if ids)
        plain = replace(plain, decided_cpus=decided or None)
    if draw(st.integers(0, 3)) == 0:
        numbers = draw(st.sets(st.integers(0, 7), min_size=plain.gpus, max_size=plain.gpus))
        by = DecidedGpus(by=GpuKey.INDEX, numbers=tuple(sorted(numbers)))
        plain = replace(plain, decided_gpus=by if numbers else None)
    return plain


class Life(RuleBasedStateMachine):
    """A node on which pods come and go, GPUs and CPUs fail and return, and the agent restarts.

    Kubelet gives each pod all its GPUs at once, on arrival or later, and keeps its own books. A pod
    runs, all containers at once, when it has its GPUs and is not refused; then it is pinned.
    """

    loose_decided = False

    @initialize(
        machine=st.sampled_from(SMALL) | random_machines(most_nodes=3, most_gpus=4),
        reserved=st.integers(0, 2),
    )
    def boot(self, machine: Machine, reserved: int) -> None:
        self.whole = self.machine = machine
        self.offline: set[int] = set()
        self.lost: set[int] = set()
        self.pods: dict[str, Pod] = {}
        self.arrived = 0
        self.reserved = Bitmap(sorted(machine.cpus)[:reserved])
        self.ledger = Ledger(layout=lay_out(machine), reserved=self.reserved)

    # What happens.

    @rule(data=st.data(), count=st.integers(1, 3))
    def arrive(self, data: st.DataObject, count: int) -> None:
        for _ in range(count):
            self.arrived += 1
            uid = f"{data.draw(st.integers(0, 9))}-{self.arrived}"
            kind, now = data.draw(st.integers(0, 7)), data.draw(st.booleans())
            self.pods[uid] = Pod(
                data.draw(demands(uid, self.loose_decided)) if kind else invalid(uid)
            )
            if now and kind:
                self.give(self.pods[uid])
            elif now:
                self.pods[uid].given = {"c0": tuple(self.kubelets_free()[:1])}
        self.settle()

    @rule(data=st.data())
    @precondition(lambda self: any(self.ungiven()))
    def kubelet_gives_gpus(self, data: st.DataObject) -> None:
        self.give(self.pods[data.draw(st.sampled_from(self.ungiven()))])
        self.settle()

    @rule(data=st.data())
    @precondition(lambda self: self.pods)
    def leave(self, data: st.DataObject) -> None:
        del self.pods[data.draw(st.sampled_from(sorted(self.pods)))]
        self.settle()

    @rule(place=st.integers(0, 3))
    @precondition(lambda self: self.pods)
    def a_gpu_is_lost_or_found(self, place: int) -> None:
        self.lost ^= {place}
        self.rebuild()

    @rule(data=st.data())
    @precondition(lambda self: self.pods)
    def a_cpu_goes_offline_or_comes_back(self, data: st.DataObject) -> None:
        kept = {node.cpus.first() for node in self.whole.cpu_nodes}
        if others := sorted(set(self.whole.cpus) - kept):
            self.offline ^= {data.draw(st.sampled_from(others))}
            self.rebuild()

    @rule()
    @precondition(lambda self: self.pods)
    def restart(self) -> None:
        """The agent forgets all; nothing that runs may feel it."""
        had = {uid: self.ledger.of_pod(uid) for uid, pod in self.pods.items() if pod.pins}
        pins = {uid: self.pods[uid].pins for uid in had}
        self.ledger = Ledger(layout=lay_out(self.machine), reserved=self.reserved)
        self.settle()
        assert {uid: self.pods[uid].pins for uid in had} == pins
        self.check_restart(had)

    def check_restart(self, had: Mapping[str, tuple[Grant, ...]]) -> None:
        """What was held is held, by containers that do not run too."""
        for uid, grants in had.items():
            assert self.ledger.of_pod(uid) == grants

    # What others do.

    def rebuild(self) -> None:
        self.machine = with_faults(without_cpus(self.whole, self.offline), self.lost)
        self.settle()

    def kubelets_free(self) -> list[str]:
        """The keys of healthy GPUs that kubelet has given to nobody, in the machine's order."""
        pods = self.pods.values()
        books = [books for pod in pods for books in (pod.given, pod.later)]
        given = {gpu for gpus_of in books for gpus in gpus_of.values() for gpu in gpus}
        return [key(gpu) for gpu in self.machine.gpus if not gpu.fault and key(gpu) not in given]

    def ungiven(self) -> list[str]:
        """Pods that wait for GPUs."""
        return [
            uid
            for uid, pod in self.pods.items()
            if any(
                container.gpus and not pod.given.get(container.name) for container in pod.containers
            )
        ]

    def give(self, pod: Pod) -> None:
        """Gives a pod its GPUs as kubelet does, those of its init containers again; or none."""
        free = self.kubelets_free()
        random.shuffle(free)
        reusable: list[str] = []
        given = {}
        for container in pod.containers:
            fresh = [gpu for gpu in free if gpu not in reusable]
            taken = [*reusable, *fresh][: container.gpus]
            if len(taken) < container.gpus:
                return
            free = [gpu for gpu in free if gpu not in taken]
            reusable = [gpu for gpu in reusable if gpu not in taken]
            if container.role is INIT:
                reusable += taken
            if taken:
                order = [key(gpu) for gpu in self.machine.gpus]
                given[container.name] = tuple(sorted(taken, key=order.index))
        pod.given = given

    def run(self, uid: str) -> None:
        """Pins the containers of a pod that run; what runs of a refused one stays."""
        pod = self.pods[uid]
        pod.pins = {}
        if uid not in self.ungiven():
            pod.pins = {
                one.container: Pin(cpus=one.cpus, mems=one.mems)
                for one in self.ledger.of_pod(uid)
                if one.cpus and one.container in self.running(pod)
            }

    def running(self, pod: Pod) -> set[str]:
        """The containers of a pod that run."""
        return {container.name for container in pod.containers}

    # What the agent does, and what must hold then.

    def settle(self) -> None:
        facts = [pod.fact() for pod in self.pods.values()]
        before = self.ledger
        settlement = settle(self.machine, before, facts)
        self.ledger = settlement.ledger
        assert settle(self.machine, before, random.sample(facts, len(facts))) == settlement
        self.check_again(settlement, facts)
        check_changes(before, settlement)
        self.check_sets(before)
        for uid in self.pods:
            self.check_pod(uid, {one.uid for one in settlement.refused})
        for uid in self.pods:
            self.run(uid)
        self.check_again(settlement, [pod.fact() for pod in self.pods.values()])

    def check_again(self, first: Settlement, facts: list[PodFact]) -> None:
        """Where nothing happened nothing changes."""
        second = settle(self.machine, first.ledger, facts)
        assert (second.ledger, second.changes) == (first.ledger, ())

    def check_sets(self, before: Ledger) -> None:
        """Nothing is held twice, and only what may be given away is."""
        held: list[tuple[str, object]] = []
        for uid in sorted({one.uid for one in self.ledger.grants}):
            grants = self.ledger.of_pod(uid)
            gpus = {gpu for one in grants for gpu in one.gpus}
            cpus = {cpu for one in grants for cpu in one.cpus}
            held += [("GPU", gpu) for gpu in gpus] + [("CPU", cpu) for cpu in cpus]
            given = {gpu for keys in self.pods[uid].given.values() for gpu in keys}
            had = {gpu for one in before.of_pod(uid) for gpu in one.gpus}
            faulty = {key(gpu) for gpu in self.machine.gpus if gpu.fault}
            assert not (gpus - given - had) & faulty
        assert len(held) == len(set(held))
        cpus = {number for kind, number in held if kind == "CPU"}
        assert cpus <= set(self.machine.cpus) - set(self.reserved)
        assert set(self.ledger.shared_pool) == set(self.machine.cpus) - cpus
        free = set(self.ledger.layout.keys(self.ledger.free_gpus))
        assert not free & {
            gpu for pod in self.pods.values() for keys in pod.given.values() for gpu in keys
        }

    def check_pod(self, uid: str, refused: set[str]) -> None:
        """A pod has exactly what it asks for, or is refused and could not have it."""
        pod, grants = self.pods[uid], self.ledger.of_pod(uid)
        given = {name: keys for name, keys in pod.given.items() if keys}
        cpus = {one.container: one.cpus for one in grants if one.cpus}
        gpus = {one.container: one.gpus for one in grants if one.gpus}
        if isinstance(pod.asked, Invalid):
            others = {gpu for one in self.ledger.without([uid]).grants for gpu in one.gpus}
            own = {name: tuple(k for k in keys if k not in others) for name, keys in given.items()}
            assert (cpus, gpus) == ({}, {name: keys for name, keys in own.items() if keys})
        elif uid in refused:
            assert cpus.items() <= {name: pin.cpus for name, pin in pod.pins.items()}.items()
            assert {(name, gpu) for name, keys in gpus.items() for gpu in keys} <= {
                (name, gpu) for name, keys in given.items() for gpu in keys
            }
            if not cpus:
                self.check_refusable(uid, pod.asked, given)
        else:
            assert {name: gpus.get(name) for name in given} == given
            counts = {c.name: c.gpus for c in pod.containers if c.gpus}
            if not given:
                assert {name: len(keys) for name, keys in gpus.items()} == counts
                assert len({gpu for keys in gpus.values() for gpu in keys}) == pod.asked.gpus
            if pod.asked.pinned:
                counts = {c.name: c.cpus for c in pod.containers}
                assert {name: len(ids) for name, ids in cpus.items()} == counts
                if not pod.asked.decided_cpus:
                    assert len(union(cpus.values())) == pod.asked.cpus
            elif not pod.asked.decided_cpus:
                assert not cpus

    def check_refusable(
        self, uid: str, asked: Demand, given: Mapping[str, tuple[str, ...]]
    ) -> None:
        others = self.ledger.without([uid])
        held = {gpu for one in others.grants for gpu in one.gpus}
        if not held & {gpu for keys in given.values() for gpu in keys}:
            places = {name: others.layout.places(keys) for name, keys in given.items()}
            assert isinstance(place(others, asked, places), Refusal)


class LifeInPieces(Life):
    """As above, but kubelet gives container by container, containers run one after another, and a
    scheduler decides about pods that do not ask for it. A restart may find any of these."""

    loose_decided = True

    @rule(data=st.data())
    @precondition(lambda self: self.pods)
    def an_init_container_ends(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from(sorted(self.pods)))
        self.pods[uid].over += 1
        self.run(uid)
        self.settle()

    def give(self, pod: Pod) -> None:
        """The first container's GPUs now, the others' the next time."""
        if pod.later:
            pod.given, pod.later = pod.given | pod.later, {}
        else:
            super().give(pod)
            first = list(pod.given)[:1]
            pod.later = {name: keys for name, keys in pod.given.items() if name not in first}
            pod.given = {name: keys for name, keys in pod.given.items() if name in first}

    def running(self, pod: Pod) -> set[str]:
        names = set()
        inits = 0
        for container in pod.containers:
            inits += container.role is INIT
            if container.role is INIT and inits == pod.over + 1:
                return names | {container.name}
            if container.role is not INIT:
                names.add(container.name)
        return names

    def check_restart(self, had: Mapping[str, tuple[Grant, ...]]) -> None:
        """That the running containers have their pins is all that is promised."""

    def check_again(self, first: Settlement, facts: list[PodFact]) -> None:
        super().check_again(first, facts)
        second = settle(self.machine, first.ledger, facts)
        assert second.refused == first.refused


TestLife = Life.TestCase
TestLifeInPieces = LifeInPieces.TestCase
TestLife.settings = TestLifeInPieces.settings = settings(
    deadline=None, max_examples=150, stateful_step_count=20
)
