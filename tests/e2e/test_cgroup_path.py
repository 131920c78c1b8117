"""CPUs of a pod's own where the container runtime has no NRI: the agent writes them to the cgroups.

A container gets its CPU when it runs already.
"""

from collections.abc import Iterator

import pytest

from tests.e2e import cpus
from tests.e2e.conftest import Note, rig_of_module, spread
from tests.e2e.containerd import Release
from tests.e2e.cpus import OWN
from tests.e2e.kubelet import Pod
from tests.e2e.pinning import (
    OPTIONS,
    PIN,
    STATIC,
    assert_all_run_where_they_should,
    assert_nothing_is_pinned,
    container_id,
    other_agent,
    path,
    remove_pinned,
    run_others,
    run_pinned,
    storm,
    time_a_pin,
)
from tests.e2e.rig import Rig


@pytest.fixture(scope="module")
def module_rig(library: str) -> Iterator[Rig]:
    with rig_of_module(library, Release.PACKAGED, here=True, **OPTIONS) as rig:
        yield rig


@pytest.mark.parametrize("gpus", [0, 2], ids=["without GPUs", "with 2 GPUs"])
def test_the_agent_pins_what_runs(rig: Rig, gpus: int) -> None:
    assert path(rig) == "cgroup"
    others = run_others(rig)
    pod = run_pinned(rig, gpus=gpus)
    assert_all_run_where_they_should(rig, pod)
    assert rig.is_unchanged([*others, pod])
    remove_pinned(rig, pod)
    assert rig.is_unchanged(others)


def test_the_shared_pool_follows(rig: Rig, note: Note) -> None:
    run_others(rig)
    narrowed_s, widened_s = zip(*(time_a_pin(rig) for _ in range(5)), strict=True)
    note("no NRI: shared pool narrowed, from the container's creation", spread(narrowed_s), "")
    note("no NRI: shared pool widened, from the pod's end", spread(widened_s), "")


def test_a_pod_that_cannot_be_pinned_shares(rig: Rig) -> None:
    """Nobody can keep its container from being created."""
    pinned = run_pinned(rig)
    assert_all_run_where_they_should(rig, pinned)
    (late,) = rig.run_pods("late", cpu="1", annotations=PIN)
    rig.wait(lambda: "0 free CPU" in rig.agent.log.read_text(), "the agent says why")
    assert_all_run_where_they_should(rig, pinned)
    assert rig.is_unchanged([pinned, late])


def test_a_new_agent_adopts_what_is_pinned(rig: Rig) -> None:
    others = run_others(rig)
    pod = run_pinned(rig)
    assert_all_run_where_they_should(rig, pod)
    before = rig.agent.pid
    rig.agent.kill()
    rig.agent.start()

    def adopted() -> bool:
        assert processes(pod) == {OWN}
        return rig.agent.pid != before and path(rig) == "cgroup" and rig.is_whole()

    rig.wait(adopted, "the new agent is at work")
    assert_all_run_where_they_should(rig, pod)
    assert rig.is_unchanged([*others, pod])


def processes(pod: Pod) -> set[cpus.Cpus]:
    """The CPUs of the processes in the pod's container."""
    containers = [one for one in cpus.read_containers() if one.id == container_id(pod)]
    return {own for container in containers for own in container.processes.values()}


def test_nothing_is_pinned_where_kubelet_does_it_itself(rig: Rig) -> None:
    home = rig.folder / "static"
    home.mkdir()
    (home / "cpu_manager_state").write_text(STATIC)
    with other_agent(rig, "observer", kubelet_dir=str(home), period_s=1) as other:
        assert path(other) == "none"
        assert_nothing_is_pinned(other, "CPU manager policy is static")


def test_nothing_is_pinned_where_nobody_tells_what_pods_ask(rig: Rig) -> None:
    with other_agent(rig, "blind", kubelet_url="", period_s=1) as other:
        assert_nothing_is_pinned(
            other, "neither the Kubernetes API nor a kubelet_url tells what pods ask"
        )


def test_the_agent_is_killed(rig: Rig, note: Note) -> None:
    storm(rig, note, "no NRI: agent killed", rig.agent.kill)


def test_containerd_is_restarted(rig: Rig, note: Note) -> None:
    storm(rig, note, "no NRI: containerd restarted", rig.containerd.stop)
