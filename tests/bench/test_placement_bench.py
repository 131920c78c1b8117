"""What a decision costs: one pod's placement, and a pass over all pods of a node."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from agent.core.bitmap import Bitmap
from agent.core.layout import Layout, lay_out
from agent.core.ledger import Grant, Ledger
from agent.core.placement import Placement, place
from agent.core.request import Demand, Exclusive, Policy, Role
from agent.core.settlement import Pin, PodFact, settle
from tests.core.machines import described
from tests.core.oracle import asks

PLACE_BARS_US = {"a800x8": 100, "pcie16-nps4": 400}
SETTLE_BAR_MS = 2


def demand(
    uid: str,
    gpus: int,
    cpus: int,
    policy: Policy | None = None,
    *,
    exclusive: Exclusive = Exclusive.REQUIRED,
    sidecar: bool = False,
) -> Demand:
    """A pod that is pinned if it has a policy."""
    containers = [asks("main", gpus=gpus, cpus=cpus, memory_gib=1)]
    if sidecar:
        containers.insert(0, asks("side", Role.SIDECAR, cpus=2, memory_gib=1))
    return Demand(
        pod=f"ns/{uid}",
        uid=uid,
        policy=policy,
        exclusive=exclusive,
        pinned=policy is not None,
        containers=tuple(containers),
        decided_cpus=None,
        decided_gpus=None,
        notes=(),
    )


def measure(benchmark: BenchmarkFixture, group: str, call: Callable[[], object]) -> None:
    """Runs the call often, under a table of that name."""
    benchmark.group = group
    benchmark(call)


# --- place ----------------------------------------------------------------------------------------

DEMANDS = {
    "1 GPU and 8 CPUs, SingleNUMANode": demand("a", 1, 8, Policy.SINGLE_NUMA_NODE),
    "2 GPUs and 16 CPUs, SingleNUMANode": demand("a", 2, 16, Policy.SINGLE_NUMA_NODE),
    "4 GPUs and 24 CPUs, Restricted": demand(
        "a", 4, 24, Policy.RESTRICTED, exclusive=Exclusive.PREFERRED
    ),
    "4 GPUs and 24 CPUs, BestEffort": demand("a", 4, 24, Policy.BEST_EFFORT),
    "6 GPUs and 48 CPUs, BestEffort": demand("a", 6, 48, Policy.BEST_EFFORT),
    "2 GPUs and 15 CPUs, a sidecar with 2": demand("a", 2, 15, Policy.BEST_EFFORT, sidecar=True),
    "24 CPUs, BestEffort": demand("a", 0, 24, Policy.BEST_EFFORT),
    "2 GPUs, not pinned": demand("a", 2, 0),
}


def busy(layout: Layout) -> Ledger:
    """Pods with a GPU and 8 CPUs on every other node, and on all nodes some CPUs in pieces."""
    grants = []
    for number, seat in enumerate(layout.seats):
        held = Bitmap(list(seat.cpus)[1:8:2])
        grants.append(Grant(uid=f"cpus-{number}", pod="ns/c", container="main", cpus=held))
        if number % 2 == 0:
            cpus = (seat.cpus - held).lowest(8)
            gpus = layout.keys(seat.gpus.lowest(1))
            uid = f"gpus-{number}"
            grants.append(Grant(uid=uid, pod="ns/g", container="main", gpus=gpus, cpus=cpus))
    return Ledger(layout=layout, reserved=Bitmap([0, 1]) - grants[0].cpus, grants=tuple(grants))


@pytest.mark.parametrize("asked", DEMANDS.values(), ids=DEMANDS)
@pytest.mark.parametrize("state", ["idle", "busy"])
@pytest.mark.parametrize("name", PLACE_BARS_US)
def test_place(benchmark: BenchmarkFixture, name: str, state: str, asked: Demand) -> None:
    layout = lay_out(described(name))
    ledger = busy(layout) if state == "busy" else Ledger(layout=layout, reserved=Bitmap([0, 1]))
    assert isinstance(place(ledger, asked), Placement)
    bar = f"place on {name}, {state} (bar {PLACE_BARS_US[name]} µs)"
    measure(benchmark, bar, lambda: place(ledger, asked))


@pytest.mark.parametrize("name", PLACE_BARS_US)
def test_place_around_given_gpus(benchmark: BenchmarkFixture, name: str) -> None:
    """As kubelet's choice comes most often: before the node's."""
    ledger = busy(lay_out(described(name)))
    given = {"main": ledger.free_gpus.lowest(2)}
    asked = demand("a", 2, 16, Policy.BEST_EFFORT)
    assert isinstance(place(ledger, asked, given), Placement)
    bar = f"place on {name}, around given GPUs (bar {PLACE_BARS_US[name]} µs)"
    measure(benchmark, bar, lambda: place(ledger, asked, given))


@pytest.mark.parametrize("name", PLACE_BARS_US)
def test_refuse(benchmark: BenchmarkFixture, name: str) -> None:
    """With its sentence."""
    ledger = busy(lay_out(described(name)))
    asked = demand("a", 8, 999, Policy.RESTRICTED)
    bar = f"refuse on {name} (bar {PLACE_BARS_US[name]} µs)"
    measure(benchmark, bar, lambda: place(ledger, asked))


# --- settle ---------------------------------------------------------------------------------------


def node_with(containers: int) -> tuple[Ledger, list[PodFact]]:
    """A settled node with that many pods of one container on a wide machine, and the facts with one
    more: of 20, 14 are not pinned, 1 has a GPU unpinned, as long as there are any, 5 are pinned."""
    machine = described("pcie16-nps4")
    layout = lay_out(machine)
    facts = []
    for at in range(containers):
        uid = f"{at:04d}"
        if at % 4 == 0:
            facts.append(PodFact(demand=demand(uid, 0, 1, Policy.BEST_EFFORT)))
        elif at % 20 == 1 and at // 20 < 12:
            given = {"main": layout.keys(Bitmap([at // 20]))}
            facts.append(PodFact(demand=demand(uid, 1, 0), given=given))
        else:
            facts.append(PodFact(demand=demand(uid, 0, 0)))
    ledger = settle(machine, Ledger(layout=layout, reserved=Bitmap([0, 192])), facts).ledger
    new = demand("new", 2, 16, Policy.BEST_EFFORT)
    return ledger, [*facts, PodFact(demand=new, given={"main": layout.keys(Bitmap([14, 15]))})]


def test_settle_250_containers_of_which_one_is_new(benchmark: BenchmarkFixture) -> None:
    ledger, facts = node_with(250)
    machine = ledger.layout.machine
    assert [change.uid for change in settle(machine, ledger, facts).changes] == ["new"]
    bar = f"settle 250 containers, one new (bar {SETTLE_BAR_MS} ms)"
    measure(benchmark, bar, lambda: settle(machine, ledger, facts))


def test_settle_250_containers_of_which_none_is_new(benchmark: BenchmarkFixture) -> None:
    ledger, facts = node_with(250)
    machine = ledger.layout.machine
    assert settle(machine, ledger, facts[:-1]).changes == ()
    bar = f"settle 250 containers, none new (bar {SETTLE_BAR_MS} ms)"
    measure(benchmark, bar, lambda: settle(machine, ledger, facts[:-1]))


def test_restart_with_250_containers(benchmark: BenchmarkFixture) -> None:
    """Nothing is held yet; all that is pinned is adopted."""
    ledger, facts = node_with(250)
    machine, held = ledger.layout.machine, {grant.uid: grant for grant in ledger.grants}
    found = [
        replace(fact, pinned={"main": Pin(cpus=held[fact.demand.uid].cpus)})
        if isinstance(fact.demand, Demand) and fact.demand.pinned
        else fact
        for fact in facts[:-1]
    ]
    empty = Ledger(layout=ledger.layout, reserved=ledger.reserved)
    assert [(one.uid, one.cpus) for one in settle(machine, empty, found).ledger.grants] == [
        (one.uid, one.cpus) for one in ledger.grants
    ]
    measure(benchmark, "restart with 250 containers", lambda: settle(machine, empty, found))


@pytest.mark.parametrize("containers", [50, 100, 200, 400, 800])
def test_settle_grows_with_containers(
    benchmark: BenchmarkFixture, containers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prints µs per container: the same in each line if the growth is linear."""
    ledger, facts = node_with(containers)
    machine = ledger.layout.machine
    benchmark.group = "settle, one new of so many containers"
    times = []

    def timed() -> None:
        start = time.perf_counter()
        settle(machine, ledger, facts)
        times.append(time.perf_counter() - start)

    benchmark.pedantic(timed, rounds=7, warmup_rounds=1)
    each = statistics.median(times) / containers * 1e6
    with capsys.disabled():
        print(f"settle {containers:4} containers, one new: {each:8.1f} µs per container")
