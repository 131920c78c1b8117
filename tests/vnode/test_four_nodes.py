"""4 nodes: node 0 with 3 GPUs, 1 without, 2 with 5, each with 8 CPUs; node 3 is memory alone.

What is expected was worked out by hand from the rules of placement.
"""

from tests.e2e.pinning import waiting
from tests.vnode.conftest import Seen
from tests.vnode.guest import PatientRig
from tests.vnode.placed import assert_others_keep_out, place, policy, run, run_shared

SAMPLE = {"gpus": 4, "cpu": "4", "annotations": policy("SingleNUMANode")}
"""ACK's page asks for 4 GPUs and 24 CPUs on a server of 128; here are 24."""


def test_acks_sample_takes_the_node_that_has_enough(rig: PatientRig, seen: Seen) -> None:
    """A second one finds 4 GPUs, but on two nodes."""
    run_shared(rig)
    first = run(rig, "sample", **SAMPLE)
    assert first.place == place("16-19", "2", "3-6")
    seen(str(first.place))
    second = rig.kubelet.add_pod("sample", **SAMPLE)
    said = rig.wait(lambda: waiting(rig, second), "the container waits")
    assert "SingleNUMANode: its GPUs 0-2,7 are on nodes 0,2; node 0 has 8 free CPUs" in said
    assert "asked 4 GPUs and 4 CPUs" in said
    seen(f"a second: {said}")
    assert_others_keep_out(rig, first)


def test_whole_nodes_are_kept_for_whom_they_fit(rig: PatientRig, seen: Seen) -> None:
    """CPUs alone go where no GPUs are; 3 GPUs go where 3 are, not where 5 are."""
    without = run(rig, "without", cpu="4", annotations=policy("BestEffort"))
    assert without.place == place("8-11", "1")
    three = run(rig, "three", gpus=3, cpu="4", annotations=policy("SingleNUMANode"))
    assert three.place == place("0-3", "0", "0-2")
    five = run(rig, "five", gpus=5, cpu="4", annotations=policy("SingleNUMANode"))
    assert five.place == place("16-19", "2", "3-7")
    seen(" · ".join(str(pod.place) for pod in (without, three, five)))
    assert_others_keep_out(rig, *(pod for pod in (without, three, five)))


def test_restricted_takes_cpus_of_its_gpus_nodes_only(rig: PatientRig, seen: Seen) -> None:
    """8 GPUs are 3 and 5, and so are 8 CPUs; node 1 between them gives none."""
    pod = run(rig, "restricted", gpus=8, cpu="8", annotations=policy("Restricted"))
    assert pod.place == place("0-2,16-20", "0,2", "0-7")
    seen(str(pod.place))


def test_best_effort_goes_on_to_the_nearest_node(rig: PatientRig, seen: Seen) -> None:
    """5 GPUs leave 12 CPUs no room on their node: the other 4 are of node 1, which is as near as
    node 0 and has no GPUs that would be left. Then 10 CPUs alone are those of nodes 0 and 1."""
    wide = run(rig, "wide", gpus=5, cpu="12", annotations=policy("BestEffort"))
    assert wide.place == place("8-11,16-23", "1-2", "3-7")
    seen(str(wide.place))
    narrow = run(rig, "narrow", cpu="4", annotations=policy("SingleNUMANode"))
    assert narrow.place == place("0-3", "0")
    seen(str(narrow.place))


def test_cpus_of_two_nodes_are_of_the_nearest_two(rig: PatientRig, seen: Seen) -> None:
    pod = run(rig, "two", cpu="10", annotations=policy("Restricted"))
    assert pod.place == place("0-4,8-12", "0-1")
    seen(str(pod.place))
