"""CPUs of a pod's own, given by containerd as the agent tells it through NRI.

The machine is this one. All its CPUs but the last are reserved, so that one pod at a time can have
one CPU, and everybody else runs on the others.
"""

import contextlib
import json
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import cpus
from tests.e2e.agent import Agent, Option, node_options
from tests.e2e.conftest import Note, rig_of_module, spread
from tests.e2e.containerd import Release
from tests.e2e.cpus import ALL, OWN, POOL
from tests.e2e.image import WAIT
from tests.e2e.kubelet import Pod
from tests.e2e.process import wait_for
from tests.e2e.rig import Rig

OPTIONS = {"reserved_cpus": cpus.show(POOL)}

PIN = {"cpuset-scheduler": "required"}

LISTS = (
    'while read -r line; do case "$line" in *_allowed_list:*) echo "$line";; esac; '
    f"done < /proc/self/status; {WAIT}"
)
"""The shell reads its own status before it does anything else; it starts no other program for
it."""


@pytest.fixture(scope="module")
def module_rig(library: str) -> Iterator[Rig]:
    with rig_of_module(library, Release.BUILT, here=True, **OPTIONS) as rig:
        yield rig


@pytest.fixture(autouse=True)
def asked(rig: Rig) -> None:
    """The agent is containerd's plugin."""
    rig.wait(lambda: calls(rig, "Synchronize") > 0, "containerd asks the agent")


def calls(rig: Rig, method: str) -> float:
    """How often containerd has called this since the agent was started."""
    return rig.agent.metrics().get(f'numalet_rpc_duration_seconds_count{{method="{method}"}}', 0)


def drifts(rig: Rig) -> float:
    return rig.agent.metrics()["numalet_cpuset_drifts_total"]


def container_id(pod: Pod) -> str:
    return pod.container.removeprefix("containerd://")


def run_pinned(rig: Rig, **how: Any) -> Pod:
    (pod,) = rig.run_pods("pinned", **({"cpu": "1", "annotations": PIN, "program": LISTS} | how))
    return pod


def run_others(rig: Rig) -> list[Pod]:
    """A pod of each class that asks for no CPUs of its own."""
    return [
        *rig.run_pods("best-effort"),
        *rig.run_pods("burstable", request="100m"),
        *rig.run_pods("guaranteed", cpu="100m"),
    ]


def assert_all_run_where_they_should(rig: Rig, *pinned: Pod, timeout_s: float = 10) -> None:
    own = {container_id(pod): OWN for pod in pinned}
    pool = POOL if pinned else ALL

    def right() -> bool:
        nonlocal wrong
        wrong = cpus.find_wrong(own, pool)
        return not wrong

    wrong: list[str] = []
    try:
        rig.wait(right, "everybody runs where they should", timeout_s)
    except AssertionError as error:
        raise AssertionError("\n".join([*wrong, str(error)])) from None


def printed(rig: Rig, pod: Pod, words: str) -> list[str]:
    rig.wait(lambda: words in rig.kubelet.output(pod.name), f"{pod.name} prints {words}")
    return rig.kubelet.output(pod.name).splitlines()


# --- what pods get --------------------------------------------------------------------------------


@pytest.mark.parametrize("gpus", [0, 2], ids=["without GPUs", "with 2 GPUs"])
def test_a_pinned_pod_has_its_cpu_from_the_first_instruction(rig: Rig, gpus: int) -> None:
    others = run_others(rig)
    before = drifts(rig)
    pod = run_pinned(rig, gpus=gpus)
    lists = dict(line.split(":\t") for line in printed(rig, pod, "Mems_allowed_list"))
    assert cpus.parse(lists["Cpus_allowed_list"]) == OWN
    nodes = Path("/sys/devices/system/node").glob("node*")
    own_nodes = [node for node in nodes if (node / f"cpu{max(OWN)}").exists()]
    assert [f"node{lists['Mems_allowed_list']}"] == [node.name for node in own_nodes]
    assert_all_run_where_they_should(rig, pod)
    rig.remove_pod(pod)
    assert_all_run_where_they_should(rig)
    assert drifts(rig) == before
    assert rig.is_unchanged(others)


def test_a_container_that_starts_anew_gets_its_cpu_again(rig: Rig) -> None:
    run_others(rig)
    pod = run_pinned(rig, program=LISTS.replace(WAIT, "sleep 1; exit 1"))
    rig.wait(lambda: rig.kubelet.output(pod.name).count("Cpus") >= 3, "it has run three times", 60)
    lines = rig.kubelet.output(pod.name).splitlines()
    assert {line for line in lines if "Cpus" in line} == {f"Cpus_allowed_list:\t{max(OWN)}"}


def test_a_cpuset_that_somebody_else_wrote_is_put_right(rig: Rig) -> None:
    pod = run_pinned(rig)
    before = drifts(rig)
    (container,) = (one for one in cpus.read_containers() if one.id == container_id(pod))
    (container.folder.parent / "cpuset.cpus").write_text(cpus.show(ALL))
    (container.folder / "cpuset.cpus").write_text(cpus.show(ALL))
    rig.run_pods("other")
    assert_all_run_where_they_should(rig, pod)
    assert drifts(rig) == before + 1


POOL_BAR_S = 0.1


def test_the_shared_pool_follows_at_once(rig: Rig, note: Note) -> None:
    run_others(rig)
    narrowed_s, widened_s = zip(*(time_a_pin(rig) for _ in range(5)), strict=True)
    note("shared pool narrowed, from the container's creation", spread(narrowed_s), "0.10 s")
    note("shared pool widened, from the pod's end", spread(widened_s), "0.10 s")
    assert max(narrowed_s) <= POOL_BAR_S
    assert max(widened_s) <= POOL_BAR_S


def time_a_pin(rig: Rig) -> tuple[float, float]:
    """How long it took until nobody else had the CPU of a pinned pod after its container had a
    cgroup, and until everybody had it after the pod's last cgroup was gone; in seconds, less than
    nothing where it was before."""
    shared = {pid for one in cpus.read_containers() for pid in one.processes}
    before = set(cpus.folders())
    moments_s: dict[str, float] = {}

    def see(**seen: bool) -> bool:
        for what in (what for what, is_so in seen.items() if is_so):
            moments_s.setdefault(what, time.monotonic())
        return seen.keys() <= moments_s.keys()

    pod = rig.kubelet.add_pod("pinned", cpu="1", annotations=PIN)
    watch(lambda: see(made=len({*cpus.folders()} - before) > 1, narrow=all_on(shared, POOL)))
    rig.wait_until_running([pod])
    rig.kubelet.remove_pod(pod)
    watch(lambda: see(gone={*cpus.folders()} == before, wide=all_on(shared, ALL)))
    rig.wait(lambda: pod not in rig.kubelet.pods(), f"{pod} is gone", 60)
    return moments_s["narrow"] - moments_s["made"], moments_s["wide"] - moments_s["gone"]


def watch(condition: Callable[[], bool]) -> None:
    wait_for(condition, "the shared pool follows", 60, poll_s=0.001)


def all_on(pids: set[int], want: cpus.Cpus) -> bool:
    return all(cpus.of_process(pid) == want for pid in pids)


# --- what pods cannot get -------------------------------------------------------------------------

TOO_MANY = {"cpu": str(len(OWN) + 1), "annotations": PIN}


def test_a_pod_that_cannot_be_pinned_says_why(rig: Rig) -> None:
    others = run_others(rig)
    name = rig.kubelet.add_pod("too-many", **TOO_MANY)
    said = rig.wait(lambda: waiting(rig, name), "the container waits")
    assert said.startswith("CreateContainerError: ")
    assert "1 free CPU" in said
    assert "asked 2 CPUs" in said
    assert_all_run_where_they_should(rig)
    pod = run_pinned(rig)
    assert_all_run_where_they_should(rig, pod)
    assert rig.is_unchanged(others)


def waiting(rig: Rig, name: str) -> str:
    """Why the pod's container does not run, beside that it is being created."""
    pods = rig.kubelet.pods()
    said = pods[name].waiting if name in pods else ""
    return said if ": " in said else ""


INVALID = [
    pytest.param(
        {"cpu": "100m", "annotations": PIN},
        'the request of cpu is "100m" and its limit "100m"',
        id="a part of a CPU",
    ),
    pytest.param({"annotations": PIN}, "a pinned pod needs whole CPUs", id="no CPUs"),
    pytest.param(
        {
            "cpu": "1",
            "annotations": PIN
            | {"scheduling.alibabacloud.com/numa-topology-spec": '{"numaTopologyPolicy":"Any"}'},
        },
        'numaTopologyPolicy is "Any"',
        id="an unknown policy",
    ),
    pytest.param(
        {
            "cpu": "1",
            "annotations": PIN | {"scheduling.alibabacloud.com/numa-topology-spec": "[" * 60_000},
        },
        "numa-topology-spec",
        id="a huge annotation",
    ),
]


@pytest.mark.parametrize(("how", "why"), INVALID)
def test_an_invalid_pod_says_why(rig: Rig, how: dict[str, Any], why: str) -> None:
    name = rig.kubelet.add_pod("invalid", **how)
    said = rig.wait(lambda: waiting(rig, name), "the container waits")
    assert why in said
    assert_all_run_where_they_should(rig)


def test_an_unknown_value_pins_nothing(rig: Rig) -> None:
    (pod,) = rig.run_pods("unknown", cpu="1", annotations={"cpuset-scheduler": "yes"})
    assert_all_run_where_they_should(rig)
    pinned = run_pinned(rig)
    assert_all_run_where_they_should(rig, pinned)
    assert rig.is_unchanged([pod])


@pytest.fixture
def lenient(rig: Rig) -> Iterator[Rig]:
    """The same agent, but for what it does with pods that cannot be pinned."""
    with other_agent(rig, "lenient", on_unsatisfied="warn") as other:
        yield other


def test_a_pod_that_cannot_be_pinned_shares(lenient: Rig) -> None:
    pinned = run_pinned(lenient)
    lenient.run_pods("too-many", request="100m", annotations=PIN)
    assert_all_run_where_they_should(lenient, pinned)


@contextlib.contextmanager
def other_agent(rig: Rig, name: str, **options: Option) -> Iterator[Rig]:
    """The rig with another agent, instead of its own."""
    rig.agent.stop()
    usual = node_options(rig.machine, rig.kubelet, rig.containerd) | OPTIONS
    agent = Agent(rig.machine, rig.folder / name, usual | options)
    agent.start()
    other = replace(rig, agent=agent)
    try:
        other.wait(lambda: calls(other, "Synchronize") > 0, "containerd asks the agent")
        yield other
        other.remove_pods()
    finally:
        agent.stop()


# --- what a scheduler decided ---------------------------------------------------------------------


def decision(*chosen: int) -> dict[str, str]:
    elements = {str(cpu): {} for cpu in chosen}
    return PIN | {"cpuset": json.dumps({"main": {"0": {"elems": elements}}})}


@pytest.mark.parametrize(
    ("chosen", "conflict"),
    [
        pytest.param(OWN, "", id="a free CPU"),
        pytest.param([0], "the scheduler chose CPUs 0", id="a reserved CPU"),
        pytest.param([1000], "the scheduler chose CPUs 1000", id="a CPU that is not there"),
    ],
)
def test_a_schedulers_decision(rig: Rig, chosen: list[int], conflict: str) -> None:
    """Where it cannot be obeyed the node decides."""
    pod = run_pinned(rig, annotations=decision(*chosen))
    assert_all_run_where_they_should(rig, pod)
    said = [line for line in rig.agent.log.read_text().splitlines() if f"{pod.name} " in line]
    assert any(conflict in line for line in said)
    assert any("the scheduler chose" in line for line in said) == bool(conflict)


# --- faults ---------------------------------------------------------------------------------------

ROUNDS = 10
LONG = bool(os.environ.get("NUMALET_E2E_LONG"))
"""Also what takes minutes: an agent that stands still for 30 s ten times."""


def storm(
    rig: Rig, note: Note, what: str, fault: Callable[[], object], rounds: int = ROUNDS
) -> None:
    """The fault comes while pods run and one is being created: by turns one that is pinned, and one
    that is not. Afterwards everybody must run where they should, and as before."""
    chance = random.Random(what)
    pods = run_others(rig)
    pinned: list[Pod] = []
    times_s = []
    for round_ in range(rounds):
        if pins := round_ % 2 == 0:
            for pod in pinned:
                rig.remove_pod(pod)
        how = {"cpu": "1", "annotations": PIN} if pins else {"request": "10m"}
        new = rig.kubelet.add_pod("pinned" if pins else "other", **how)
        wait_until(time.monotonic() + chance.uniform(0, 1))
        fault()
        start_s = time.monotonic()
        rig.revive()
        added = rig.wait_until_running([new])
        pinned, pods = (added, pods) if pins else (pinned, pods + added)
        assert_all_run_where_they_should(rig, *pinned, timeout_s=30)
        times_s.append(time.monotonic() - start_s)
        wait_until_unchanged(rig, [*pods, *pinned])
    note(f"{what}, {rounds} times: all right after", spread(times_s), "")
    for pod in pinned:
        rig.remove_pod(pod)
    assert_all_run_where_they_should(rig)


def wait_until(moment_s: float) -> None:
    wait_for(lambda: time.monotonic() >= moment_s, "the moment has come", 60)


def wait_until_unchanged(rig: Rig, pods: Sequence[Pod]) -> None:
    rig.wait(lambda: rig.is_unchanged(pods), "all pods run as before")


def test_the_agent_is_killed(rig: Rig, note: Note) -> None:
    storm(rig, note, "agent killed", rig.agent.kill)


def test_containerd_is_restarted(rig: Rig, note: Note) -> None:
    storm(rig, note, "containerd restarted", rig.containerd.stop)


def test_containerd_is_killed(rig: Rig, note: Note) -> None:
    storm(rig, note, "containerd killed", rig.containerd.kill)


def test_kubelet_is_killed(rig: Rig, note: Note) -> None:
    storm(rig, note, "kubelet killed", rig.kubelet.kill)


def test_the_socket_of_plugins_is_gone(rig: Rig, note: Note) -> None:
    """The agent goes the other way, and back when containerd serves the socket again."""

    def fault() -> None:
        if rig.containerd.nri_socket.exists():
            rig.containerd.nri_socket.unlink()
            rig.agent.kill()
        else:
            rig.containerd.kill()

    storm(rig, note, "socket of plugins deleted and served again", fault, 2 * ROUNDS)


def test_the_agent_stands_still(rig: Rig, note: Note) -> None:
    def fault() -> None:
        rig.agent.pause()
        start_s = time.monotonic()
        (pod,) = rig.run_pods("meanwhile")
        wait_until(start_s + 30)
        rig.kubelet.remove_pod(pod.name)
        rig.agent.resume()

    storm(rig, note, "agent stopped for 30 s", fault, ROUNDS if LONG else 2)


# --- what it costs --------------------------------------------------------------------------------

CROWD = 100
METHOD = "CreateContainer"


def test_a_pin_costs_little_on_a_full_node(rig: Rig, note: Note) -> None:
    start_s = time.monotonic()
    rig.run_pods(*["crowd"] * CROWD)
    note(f"{CROWD} pods", f"{time.monotonic() - start_s:.0f} s", "")
    before = bins(rig)
    for _ in range(5):
        rig.remove_pod(run_pinned(rig))
    counts = {bound: count - before.get(bound, 0) for bound, count in bins(rig).items()}
    total = max(counts.values())
    assert total >= 5
    for share, bar_s in ((0.5, 0.005), (0.99, 0.020)):
        within_s = min(bound for bound, count in counts.items() if count >= share * total)
        note(
            f"  a pin takes, {share:.0%} of them",
            f"up to {within_s * 1e3:g} ms",
            f"{bar_s * 1e3:g} ms",
        )
        assert within_s <= bar_s


def bins(rig: Rig) -> dict[float, float]:
    """How many creations were answered within how many seconds, since the agent was started."""
    prefix = 'numalet_rpc_duration_seconds_bucket{le="'
    found = {}
    for name, count in rig.agent.metrics().items():
        if name.startswith(prefix) and METHOD in name:
            found[float(name.removeprefix(prefix).partition('"')[0])] = count
    return found
