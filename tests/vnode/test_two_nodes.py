"""2 nodes with 16 CPUs in 8 cores and 4 GPUs each: what pods get there.

What is expected was worked out by hand from the rules of placement.
"""

from tests.e2e.pinning import waiting
from tests.vnode.conftest import Seen
from tests.vnode.guest import PatientRig
from tests.vnode.placed import assert_others_keep_out, place, policy, run, run_shared

SAMPLE = {"gpus": 4, "cpu": "6", "annotations": policy("SingleNUMANode")}
"""ACK's page asks for 4 GPUs and 24 CPUs on a server of 128; here are 32."""


def test_two_of_acks_sample_take_a_node_each(rig: PatientRig, seen: Seen) -> None:
    run_shared(rig)
    first = run(rig, "sample", **SAMPLE)
    assert first.place == place("0-5", "0", "0-3")
    second = run(rig, "sample", **SAMPLE)
    assert second.place == place("16-21", "1", "4-7")
    seen(f"{first.place} · {second.place}")
    assert_others_keep_out(rig, first, second)
    third = rig.kubelet.add_pod("sample", **SAMPLE)
    rig.wait(lambda: third in rig.kubelet.pods(), "kubelet has seen the third")
    rig.wait(lambda: rig.kubelet.pods()[third].phase == "Failed", "kubelet refuses the third")
    refusal = rig.kubelet.pods()[third].message
    assert "aliyun.com/gpu. Requested: 4, Available: 0" in refusal
    seen(f"a third: {refusal}")


def test_a_pod_of_several_nodes_does_not_join_a_pod_of_one(rig: PatientRig, seen: Seen) -> None:
    """3 GPUs on each node leave one on each, which kubelet gives to whoever asks for 2."""
    pair = {"gpus": 2, "cpu": "4"}
    first = run(rig, "single", **SAMPLE | {"gpus": 3})
    second = run(rig, "single", **SAMPLE | {"gpus": 3})
    assert first.place == place("0-5", "0", "0-2")
    assert second.place == place("16-21", "1", "4-6")

    narrow = rig.kubelet.add_pod("narrow", **pair, annotations=policy("SingleNUMANode"))
    said = rig.wait(lambda: waiting(rig, narrow), "the container waits")
    assert "SingleNUMANode: its GPUs 3,7 are on nodes 0-1; node 0 (single) has 10 free CPUs" in said
    assert "node 1 (single) has 10; asked 2 GPUs and 4 CPUs" in said
    seen(said)
    rig.kubelet.remove_pod(narrow)
    rig.wait(lambda: not any("narrow" in pod for pod in rig.held()), "it holds nothing")

    strict = rig.kubelet.add_pod("strict", **pair, annotations=policy("Restricted"))
    said = rig.wait(lambda: waiting(rig, strict), "the container waits")
    assert "singleNUMANodeExclusive is Required" in said
    seen(said)
    rig.kubelet.remove_pod(strict)
    rig.wait(lambda: not any("strict" in pod for pod in rig.held()), "it holds nothing")

    lenient = run(rig, "lenient", **pair, annotations=policy("Restricted", "Preferred"))
    assert lenient.place == place("6-7,22-23", "0-1", "3,7")
    seen(f"Preferred: {lenient.place}")


def test_restricted_spans_both_nodes_in_proportion(rig: PatientRig, seen: Seen) -> None:
    """6 GPUs are 4 of a node and 2 of the other, and so are 12 CPUs 8 and 4."""
    pod = run(rig, "restricted", gpus=6, cpu="12", annotations=policy("Restricted"))
    assert pod.place == place("0-7,16-19", "0-1", "0-5")
    seen(str(pod.place))
    assert_others_keep_out(rig, pod)


def test_best_effort_goes_where_it_can(rig: PatientRig, seen: Seen) -> None:
    """Beside 3 GPUs of node 0: 2 GPUs fit node 1; 3 more are the rest of both nodes, with CPUs in
    proportion 1 to 2 although node 0 is another's; CPUs alone go where the least GPUs are left."""
    single = run(rig, "single", **SAMPLE | {"gpus": 3})
    assert single.place == place("0-5", "0", "0-2")
    narrow = run(rig, "narrow", gpus=2, cpu="4", annotations=policy("BestEffort"))
    assert narrow.place == place("16-19", "1", "4-5")
    wide = run(rig, "wide", gpus=3, cpu="6", annotations=policy("BestEffort"))
    assert wide.place == place("6-7,20-23", "0-1", "3,6-7")
    seen(f"{narrow.place} · {wide.place}")
    assert_others_keep_out(rig, single, narrow, wide)
