"""CPUs of a pod's own, given by containerd as the agent tells it through NRI."""

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import cpus
from tests.e2e.conftest import Note, rig_of_module, spread
from tests.e2e.containerd import Release
from tests.e2e.cpus import ALL, OWN
from tests.e2e.image import WAIT
from tests.e2e.kubelet import Pod
from tests.e2e.pinning import (
    LISTS,
    OPTIONS,
    PIN,
    ROUNDS,
    STATIC,
    assert_all_run_where_they_should,
    assert_nothing_is_pinned,
    container_id,
    drifts,
    other_agent,
    path,
    printed,
    remove_pinned,
    run_others,
    run_pinned,
    storm,
    time_a_pin,
    wait_until,
    waiting,
)
from tests.e2e.rig import Rig

CPU_LINE = f"Cpus_allowed_list:\t{cpus.show(OWN)}"


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
    remove_pinned(rig, pod)
    assert drifts(rig) == before
    assert rig.is_unchanged(others)


def test_a_container_that_starts_anew_gets_its_cpu_again(rig: Rig) -> None:
    run_others(rig)
    pod = run_pinned(rig, program=LISTS.replace(WAIT, "sleep 1; exit 1"))
    rig.wait(lambda: printed(rig, pod, "Cpus").count(CPU_LINE) > 1, "it has run twice")
    assert {line for line in printed(rig, pod, "Cpus") if "Cpus" in line} == {CPU_LINE}


def test_a_cpuset_that_somebody_else_wrote_is_put_right(rig: Rig) -> None:
    pod = run_pinned(rig)
    before = drifts(rig)
    (container,) = (one for one in cpus.read_containers() if one.id == container_id(pod))
    (container.folder.parent / "cpuset.cpus").write_text(cpus.show(ALL))
    (container.folder / "cpuset.cpus").write_text(cpus.show(ALL))
    rig.run_pods("other")
    assert_all_run_where_they_should(rig, pod)
    assert drifts(rig) == before + 1


NARROWED_S = 0.1
WIDENED_S = 1.0


def test_the_shared_pool_follows_at_once(rig: Rig, note: Note) -> None:
    run_others(rig)
    narrowed_s, widened_s = zip(*(time_a_pin(rig) for _ in range(5)), strict=True)
    note("shared pool narrowed, from the container's creation", spread(narrowed_s), "0.10 s")
    note("shared pool widened, from the pod's end", spread(widened_s), "1.00 s")
    assert statistics.median(narrowed_s) <= NARROWED_S
    assert statistics.median(widened_s) <= WIDENED_S


# --- what pods cannot get -------------------------------------------------------------------------


def test_a_pod_that_cannot_be_pinned_says_why(rig: Rig) -> None:
    others = rig.run_pods("other")
    name = rig.kubelet.add_pod("too-many", cpu=str(len(OWN) + 1), annotations=PIN)
    said = rig.wait(lambda: waiting(rig, name), "the container waits")
    assert said.startswith("CreateContainerError: ")
    assert "1 free CPU" in said
    assert "asked 2 CPUs" in said
    assert_all_run_where_they_should(rig)
    rig.kubelet.remove_pod(name)
    rig.wait(lambda: name not in rig.kubelet.pods(), "it is gone", 60)
    pinned = run_pinned(rig)
    late = rig.kubelet.add_pod("late", cpu="1", annotations=PIN)
    assert "0 free CPU" in rig.wait(lambda: waiting(rig, late), "the container waits")
    assert_all_run_where_they_should(rig, pinned)
    assert rig.is_unchanged([*others, pinned])


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
        other.wait(lambda: calls(other, "Synchronize") > 0, "containerd asks the agent")
        yield other


def test_a_pod_that_cannot_be_pinned_shares(lenient: Rig) -> None:
    pinned = run_pinned(lenient)
    lenient.run_pods("late", cpu="1", annotations=PIN)
    assert_all_run_where_they_should(lenient, pinned)


def test_nothing_is_pinned_where_kubelet_does_it_itself(rig: Rig) -> None:
    home = rig.folder / "static"
    home.mkdir()
    (home / "cpu_manager_state").write_text(STATIC)
    with other_agent(rig, "observer", kubelet_dir=str(home), period_s=1) as other:
        assert path(other) == "none"
        assert_nothing_is_pinned(other, "CPU manager policy is static")


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

LONG = bool(os.environ.get("NUMALET_E2E_LONG"))
"""Also what takes minutes: an agent that stands still for 30 s ten times."""


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


STANDSTILL_S = 30


def test_the_agent_stands_still(rig: Rig, note: Note) -> None:
    """By turns while a pod that is to be pinned is created, and while it runs."""
    others = run_others(rig)
    created_s, right_s = [], []
    for _ in range(ROUNDS // 2 if LONG else 1):
        took_s, (pinned,) = while_it_stands_still(rig, lambda: [run_pinned(rig)])
        created_s.append(took_s)
        right_s.append(time_until_right(rig, pinned))
        took_s, (other,) = while_it_stands_still(rig, lambda: rig.run_pods("other"))
        created_s.append(took_s)
        right_s.append(time_until_right(rig, pinned))
        assert rig.is_unchanged([*others, pinned, other])
        remove_pinned(rig, pinned)
    note(f"agent stopped for {STANDSTILL_S} s: pods created within", spread(created_s), "")
    note("  all right after it goes on", spread(right_s), "")


def while_it_stands_still(rig: Rig, run: Callable[[], list[Pod]]) -> tuple[float, list[Pod]]:
    """The pods that were run meanwhile, and how long they took, in seconds."""
    rig.agent.pause()
    start_s = time.monotonic()
    pods = run()
    took_s = time.monotonic() - start_s
    wait_until(start_s + STANDSTILL_S)
    rig.agent.resume()
    return took_s, pods


def time_until_right(rig: Rig, *pinned: Pod) -> float:
    start_s = time.monotonic()
    assert_all_run_where_they_should(rig, *pinned)
    return time.monotonic() - start_s


# --- what it costs --------------------------------------------------------------------------------

CROWD = 100
METHOD = "CreateContainer"


def test_a_pin_costs_little_on_a_full_node(rig: Rig, note: Note) -> None:
    start_s = time.monotonic()
    rig.run_pods(*["crowd"] * CROWD)
    note(f"{CROWD} pods", f"{time.monotonic() - start_s:.0f} s", "")
    before = bins(rig)
    for _ in range(5):
        remove_pinned(rig, run_pinned(rig))
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
