"""Pods as kubelet has them, joined with cgroups: kubelet's own shapes, and JSON from anywhere."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.bitmap import Bitmap
from agent.core.offer import Holding
from agent.core.podspecs import see_specs, trim_pod, uid_of, waiting_for_gpus
from agent.core.pool import ContainerGroup, Groups, PodGroup, Qos
from agent.core.request import Demand, read_demand
from agent.core.runtime import RuntimeContainer, RuntimePod, Stage
from agent.core.topology import EMPTY

ALL = Bitmap(range(8))
UID = "0a1b2c3d-0000-4000-8000-00000000000a"
RUNS = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
ENDED = {"terminated": {"exitCode": 0}}
WAITS = {"waiting": {"reason": "ContainerCreating"}}


def group_of(uid: str, **cpus: str) -> PodGroup:
    """A pod's group with these containers: their CPUs by id."""
    return PodGroup(
        path=f"kubepods/pod{uid}",
        cpus=EMPTY,
        uid=uid,
        qos=Qos.GUARANTEED,
        containers=tuple(
            ContainerGroup(path=f"kubepods/pod{uid}/{id_}", cpus=Bitmap.parse_list(text), id=id_)
            for id_, text in cpus.items()
        ),
    )


def groups_of(*pods: PodGroup) -> Groups:
    return Groups(version=2, path="kubepods", cpus=ALL, pods=pods)


def status_of(name: str, id_: str | None, state: object = RUNS) -> dict[str, Any]:
    """A container's status as kubelet has it; one that never started has no id."""
    return {"name": name, "state": state} | ({"containerID": id_} if id_ is not None else {})


def pod_of(uid: str = UID, **status: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": "web",
            "namespace": "shop",
            "uid": uid,
            "annotations": {"cpuset-scheduler": "required"},
        },
        "status": {"phase": "Running", **status},
    }


def see(pod: object, *groups: PodGroup) -> tuple[tuple[RuntimePod, ...], list[RuntimeContainer]]:
    pods, containers = see_specs([pod], groups_of(*(groups or (group_of(UID),))))
    return pods, list(containers)


# --- as kubelet has them --------------------------------------------------------------------------


def test_a_pod_is_known_by_its_uid() -> None:
    pods, containers = see(pod_of())
    annotations = {"cpuset-scheduler": "required"}
    assert pods == (RuntimePod(id=UID, uid=UID, pod="shop/web", annotations=annotations),)
    assert containers == []


def test_all_kinds_of_containers_are_seen_in_their_order() -> None:
    pod = pod_of(
        containerStatuses=[status_of("app", "containerd://c2"), status_of("log", "cri-o://c3")],
        ephemeralContainerStatuses=[status_of("debug", "docker://c4")],
        initContainerStatuses=[status_of("init", "containerd://c1", ENDED)],
    )
    _, containers = see(pod)
    assert [(one.name, one.id, one.pod_id) for one in containers] == [
        ("init", "c1", UID),
        ("app", "c2", UID),
        ("log", "c3", UID),
        ("debug", "c4", UID),
    ]


@pytest.mark.parametrize(
    ("state", "stage"),
    [
        pytest.param(RUNS, Stage.RUNNING, id="one that runs"),
        pytest.param(ENDED, Stage.STOPPED, id="one that has ended"),
        pytest.param(WAITS, Stage.RUNNING, id="one that waits, for it may be there already"),
        pytest.param({}, Stage.RUNNING, id="one of which kubelet does not say"),
        pytest.param(None, Stage.RUNNING, id="one without a state"),
    ],
)
def test_the_stage_of_a_container(state: object, stage: Stage) -> None:
    _, (container,) = see(pod_of(containerStatuses=[status_of("app", "containerd://c1", state)]))
    assert container.stage is stage


@pytest.mark.parametrize(
    ("written", "cpus"),
    [
        pytest.param("2-3", Bitmap([2, 3]), id="narrower than kubepods"),
        pytest.param("0-7", EMPTY, id="all that kubepods has"),
        pytest.param("", EMPTY, id="nothing, as where cgroup v2 inherits"),
        pytest.param(None, EMPTY, id="no cgroup yet"),
    ],
)
def test_the_cpuset_of_a_container(written: str | None, cpus: Bitmap) -> None:
    group = group_of(UID, **({} if written is None else {"c1": written}))
    _, (container,) = see(pod_of(containerStatuses=[status_of("app", "containerd://c1")]), group)
    assert container.cpus == cpus


@pytest.mark.parametrize("id_", [None, "", "containerd://"], ids=["none", "empty", "no id in it"])
def test_a_container_that_was_never_made_is_not_seen(id_: str | None) -> None:
    _, containers = see(pod_of(containerStatuses=[status_of("app", id_, WAITS)]))
    assert containers == []


@pytest.mark.parametrize(
    ("phase", "seen"),
    [("Pending", 1), ("Running", 1), ("Unknown", 1), ("Succeeded", 0), ("Failed", 0), (None, 1)],
)
def test_pods_that_have_ended_are_not_seen(phase: str | None, seen: int) -> None:
    pod = pod_of(phase=phase, containerStatuses=[status_of("app", "containerd://c1")])
    pods, containers = see(pod)
    assert (len(pods), len(containers)) == (seen, seen)


def test_a_pod_without_cgroups_is_not_seen() -> None:
    pod = pod_of(uid="other", containerStatuses=[status_of("app", "containerd://c1")])
    assert see(pod) == ((), [])


def test_pods_that_differ_in_their_uid_only_are_two() -> None:
    """As where a StatefulSet's pod is made anew before the old one is gone."""
    old = pod_of("old", containerStatuses=[status_of("app", "containerd://c1")])
    new = pod_of("new", containerStatuses=[status_of("app", "containerd://c2")])
    groups = groups_of(group_of("old", c1="2"), group_of("new", c2="3"))
    pods, containers = see_specs([old, new], groups)
    assert [pod.id for pod in pods] == ["old", "new"]
    assert [(one.pod_id, one.cpus) for one in containers] == [
        ("old", Bitmap([2])),
        ("new", Bitmap([3])),
    ]


# --- JSON from anywhere ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pod",
    [
        None,
        17,
        "a pod",
        [],
        {},
        {"metadata": None},
        {"metadata": []},
        {"metadata": {}},
        {"metadata": {"uid": None}},
        {"metadata": {"uid": 5}},
        {"metadata": {"uid": [UID]}},
        {"metadata": {"uid": {UID: UID}}},
        {"metadata": {"uid": ""}},
    ],
    ids=repr,
)
def test_what_is_no_pod_has_no_uid_and_is_not_seen(pod: object) -> None:
    assert uid_of(pod) == ""
    assert see(pod) == ((), [])


@pytest.mark.parametrize(
    ("metadata", "name"),
    [
        pytest.param({}, "default/?", id="no names"),
        pytest.param({"name": "a"}, "default/a", id="no namespace"),
        pytest.param({"namespace": "ns"}, "ns/?", id="no name"),
    ],
)
def test_the_name_of_a_pod(metadata: dict[str, str], name: str) -> None:
    (pod,), _ = see({"metadata": {"uid": UID, **metadata}})
    assert pod.pod == name


@pytest.mark.parametrize(
    ("annotations", "kept"),
    [
        pytest.param(None, {}, id="none"),
        pytest.param("required", {}, id="a text"),
        pytest.param(["a"], {}, id="a list"),
        pytest.param({"a": "1", "b": 2, "c": None, "d": {"e": "f"}}, {"a": "1"}, id="mixed"),
    ],
)
def test_annotations_that_are_no_texts_are_left_out(
    annotations: object, kept: dict[str, str]
) -> None:
    (pod,), _ = see({"metadata": {"uid": UID, "annotations": annotations}})
    assert pod.annotations == kept


@pytest.mark.parametrize(
    ("statuses", "ids"),
    [
        pytest.param(None, [], id="none"),
        pytest.param({"c1": {}}, [], id="a mapping"),
        pytest.param("c1", [], id="a text"),
        pytest.param([None, 5, "c1", [], {}], [], id="items that are none"),
        pytest.param([{"name": "app", "containerID": "c1"}], ["c1"], id="an id without runtime"),
        pytest.param([{"containerID": "a://b://c1"}], ["c1"], id="two runtimes"),
        pytest.param([{"name": None, "containerID": "a://c1"}], ["c1"], id="no name"),
        pytest.param([{"name": "x", "containerID": "a://c1", "state": 5}], ["c1"], id="no state"),
        pytest.param([5, {"name": "app", "containerID": "a://c1"}], ["c1"], id="one is sound"),
    ],
)
def test_statuses_that_are_none_are_left_out(statuses: object, ids: list[str]) -> None:
    (_,), containers = see(pod_of(containerStatuses=statuses))
    assert [one.id for one in containers] == ids


def test_one_pod_that_is_none_does_not_cost_the_others() -> None:
    groups = groups_of(group_of(UID, c1="2-3"))
    good = pod_of(containerStatuses=[status_of("app", "containerd://c1")])
    pods, containers = see_specs([None, {"metadata": 5}, good, {"status": []}], groups)
    assert [pod.uid for pod in pods] == [UID]
    assert [one.cpus for one in containers] == [Bitmap([2, 3])]


texts = st.text(max_size=4) | st.sampled_from(
    [
        "metadata",
        "uid",
        "name",
        "status",
        "state",
        "terminated",
        "containerID",
        UID,
        "containerd://c",
    ]
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)


@given(
    metadata=st.dictionaries(st.sampled_from(["name", "namespace", "annotations"]), json_values),
    phase=json_values,
    statuses=st.dictionaries(
        st.sampled_from(
            ["containerStatuses", "initContainerStatuses", "ephemeralContainerStatuses"]
        ),
        json_values
        | st.lists(
            st.dictionaries(st.sampled_from(["name", "containerID", "state"]), json_values),
            max_size=3,
        ),
    ),
)
def test_any_json_is_taken_for_what_it_is(
    metadata: dict[str, Any], phase: object, statuses: dict[str, Any]
) -> None:
    pod = {"metadata": {**metadata, "uid": UID}, "status": {"phase": phase, **statuses}}
    pods, containers = see(pod)
    ended = phase in ("Succeeded", "Failed")
    assert [one.uid for one in pods] == ([] if ended else [UID])
    for one in pods:
        assert all(isinstance(text, str) for text in (one.pod, *one.annotations.values()))
    for container in containers:
        assert container.id
        assert {type(container.id), type(container.name)} == {str}
        assert container.pod_id == UID


@given(json_values)
def test_any_json_at_all(value: object) -> None:
    uid = uid_of(value)
    pods, _ = see_specs([value], groups_of(group_of(UID)))
    assert len(pods) == (uid == UID)


# --- what is kept of a pod ------------------------------------------------------------------------

MIRROR_KEY = "kubernetes.io/config.mirror"
READ = (
    "cpuset-scheduler",
    "scheduling.alibabacloud.com/numa-topology-spec",
    "scheduling.alibabacloud.com/resource-spec",
    "scheduling.koordinator.sh/numa-topology-spec",
    "cpuset",
    "scheduling.koordinator.sh/resource-status",
    "topology.kubernetes.io/gpu-group",
    "scheduling.koordinator.sh/device-allocated",
)
"""The annotations that the design names."""
WHOLE: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {
        "name": "web",
        "namespace": "shop",
        "uid": UID,
        "resourceVersion": "17",
        "creationTimestamp": "2026-11-30T14:00:00Z",
        "labels": {"app": "web"},
        "annotations": dict.fromkeys(READ, "x") | {"note": "y" * 10_000},
        "ownerReferences": [{"kind": "ReplicaSet", "name": "web-1", "uid": "r"}],
        "managedFields": [{"manager": "kubectl", "fieldsV1": {"f:spec": {}}}],
    },
    "spec": {
        "nodeName": "node-1",
        "volumes": [{"name": "data", "emptyDir": {}}],
        "initContainers": [
            {"name": "proxy", "image": "proxy:1", "restartPolicy": "Always", "resources": {}}
        ],
        "containers": [
            {
                "name": "app",
                "image": "web:1",
                "env": [{"name": "A", "value": "b"}],
                "resources": {
                    "limits": {"cpu": "2", "aliyun.com/gpu": "1"},
                    "requests": {"cpu": "2", "aliyun.com/gpu": "1"},
                    "claims": [{"name": "c"}],
                },
            }
        ],
    },
    "status": {
        "phase": "Running",
        "podIP": "10.0.0.1",
        "conditions": [{"type": "Ready", "status": "True"}],
        "containerStatuses": [
            {
                "name": "app",
                "image": "web:1",
                "containerID": "containerd://c1",
                "ready": True,
                "state": {"running": {"startedAt": "2026-11-30T14:00:01Z"}},
                "lastState": {"terminated": {"exitCode": 1}},
            }
        ],
    },
}


def whole(**metadata: Any) -> dict[str, Any]:
    return {**WHOLE, "metadata": WHOLE["metadata"] | metadata}


def test_what_is_kept_of_a_pod() -> None:
    assert trim_pod(WHOLE) == {
        "metadata": {
            "name": "web",
            "namespace": "shop",
            "uid": UID,
            "creationTimestamp": "2026-11-30T14:00:00Z",
            "annotations": dict.fromkeys(READ, "x"),
        },
        "spec": {
            "initContainers": [{"name": "proxy", "restartPolicy": "Always", "resources": {}}],
            "containers": [
                {
                    "name": "app",
                    "resources": {
                        "limits": {"cpu": "2", "aliyun.com/gpu": "1"},
                        "requests": {"cpu": "2", "aliyun.com/gpu": "1"},
                    },
                }
            ],
        },
        "status": {
            "phase": "Running",
            "containerStatuses": [
                {"name": "app", "containerID": "containerd://c1", "state": {"running": None}}
            ],
        },
    }


def test_what_is_kept_is_kept_again() -> None:
    once = trim_pod(whole(deletionTimestamp="2026-11-30T15:00:00Z"))
    assert once is not None
    assert once["metadata"]["deletionTimestamp"] == "2026-11-30T15:00:00Z"
    assert trim_pod(once) == once


def test_a_static_pod_is_known_by_the_uid_that_kubelet_gave_it() -> None:
    """The API server shows its likeness, which has a uid of its own."""
    likeness = whole(annotations={MIRROR_KEY: "0123abc", "cpuset-scheduler": "required"})
    assert uid_of(likeness) == "0123abc"
    trimmed = trim_pod(likeness)
    assert trimmed is not None
    assert trimmed["metadata"]["uid"] == uid_of(trimmed) == read_demand(trimmed).uid == "0123abc"


@pytest.mark.parametrize(
    "mirrored",
    [
        pytest.param("", id="empty"),
        pytest.param(None, id="null"),
    ],
)
def test_an_annotation_without_a_uid_is_no_likeness(mirrored: object) -> None:
    assert uid_of(whole(annotations={MIRROR_KEY: mirrored})) == UID


@pytest.mark.parametrize(
    "pod",
    [
        {},
        {"metadata": None},
        {"metadata": {}},
        {"metadata": {"uid": 5}},
        {"metadata": {"annotations": {MIRROR_KEY: 5}, "uid": UID}},
        {"spec": WHOLE["spec"], "status": WHOLE["status"]},
    ],
    ids=repr,
)
def test_nothing_is_kept_of_what_is_no_pod(pod: dict[str, Any]) -> None:
    assert trim_pod(pod) is None


PARTS = ["metadata", "spec", "status"]


@given(st.dictionaries(st.sampled_from(PARTS), json_values), json_values)
def test_any_json_is_trimmed(pod: dict[str, Any], containers: object) -> None:
    trimmed = trim_pod(
        {**pod, "metadata": {"uid": UID}, "spec": {"containers": containers, "volumes": []}}
    )
    assert trimmed is not None
    assert trimmed["spec"].keys() == {"containers"}
    assert isinstance(trimmed["spec"]["containers"], list)
    assert set(trim_pod(pod) or {}) <= set(PARTS)


quantities = st.sampled_from(["1", "2", "500m", "4Gi", "1.5", "", "many", "-1", 3, 0.5, None, "0"])
amounts = st.dictionaries(
    st.sampled_from(["cpu", "memory", "aliyun.com/gpu", "nvidia.com/gpu", "ephemeral-storage"]),
    quantities,
)
containers = st.fixed_dictionaries(
    {"name": st.sampled_from(["app", "log", "proxy", "Not_A_Label", ""])},
    optional={
        "image": texts,
        "restartPolicy": st.sampled_from(["Always", "Never", None]),
        "resources": st.fixed_dictionaries(
            {}, optional={"requests": amounts, "limits": amounts, "claims": st.just([])}
        ),
        "env": st.just([{"name": "A", "value": "b"}]),
    },
)
said = st.sampled_from(
    [
        "required",
        "preferred",
        '{"numaTopologyPolicy":"SingleNUMANode"}',
        '{"numaTopologyPolicy":"Restricted","singleNUMANodeExclusive":"Preferred",}',
        "{",
        "0,2",
        '{"gpu":[{"minor":1}]}',
        '{"cpuset":"0-3"}',
        '{"app":{"0":{"elems":{"2":{},"3":{}}}}}',
    ]
)
pods_as_they_come = st.fixed_dictionaries(
    {
        "metadata": st.fixed_dictionaries(
            {"uid": st.just(UID)},
            optional={
                "name": st.just("web"),
                "namespace": st.just("shop"),
                "labels": st.just({"a": "b"}),
                "creationTimestamp": st.sampled_from(["2026-11-30T14:00:00Z", None]),
                "deletionTimestamp": st.just("2026-11-30T15:00:00Z"),
                "annotations": st.dictionaries(st.sampled_from([*READ, "note"]), said),
            },
        ),
        "spec": st.fixed_dictionaries(
            {"containers": st.lists(containers, max_size=3)},
            optional={"initContainers": st.lists(containers, max_size=2), "volumes": st.just([])},
        ),
    },
    optional={
        "status": st.fixed_dictionaries(
            {"phase": st.sampled_from(["Pending", "Running", "Failed"])},
            optional={
                "containerStatuses": st.just(WHOLE["status"]["containerStatuses"]),
                "conditions": st.just([]),
            },
        )
    },
)


@given(pods_as_they_come)
def test_a_trimmed_pod_asks_for_the_same(pod: dict[str, Any]) -> None:
    trimmed = trim_pod(pod)
    assert read_demand(trimmed) == read_demand(pod)
    assert waiting_for_gpus([trimmed], ()) == waiting_for_gpus([pod], ())
    seen, whole_seen = see(trimmed, group_of(UID, c1="2")), see(pod, group_of(UID, c1="2"))
    assert seen[1] == whole_seen[1]
    assert [one.uid for one in seen[0]] == [one.uid for one in whole_seen[0]]


@given(pods_as_they_come)
def test_a_trimmed_likeness_asks_for_the_same_under_the_uid_of_its_pod(pod: dict[str, Any]) -> None:
    annotations = {**pod["metadata"].get("annotations", {}), MIRROR_KEY: "0123abc"}
    likeness = {**pod, "metadata": {**pod["metadata"], "annotations": annotations}}
    assert read_demand(trim_pod(likeness)) == replace(read_demand(pod), uid="0123abc")


# --- pods that wait for GPUs ----------------------------------------------------------------------


def waiting(name: str = "a", gpus: int = 1, **more: Any) -> dict[str, Any]:
    """A pod as the API server has it before kubelet has given it anything."""
    limits = {"cpu": "1"} | ({"aliyun.com/gpu": str(gpus)} if gpus else {})
    metadata = {"creationTimestamp": "2026-11-30T14:00:00Z", **more.pop("metadata", {})}
    return {
        "metadata": {"namespace": "ns", "name": name, "uid": name, **metadata},
        "spec": {"containers": [{"name": "main", "resources": {"limits": limits}}]},
        "status": {"phase": "Pending"},
        **more,
    }


def names(demands: tuple[Demand, ...]) -> list[str]:
    return [one.pod for one in demands]


@pytest.mark.parametrize(
    ("pod", "waits"),
    [
        pytest.param(waiting(), True, id="one that is to be admitted"),
        pytest.param(waiting(gpus=0), False, id="one without GPUs"),
        pytest.param(waiting(status={"phase": "Running"}), False, id="one that runs"),
        pytest.param(waiting(status={"phase": "Failed"}), False, id="one that was refused"),
        pytest.param(waiting(status={}), False, id="one without a phase"),
        pytest.param(
            waiting(metadata={"deletionTimestamp": "2026-11-30T14:00:01Z"}),
            False,
            id="one that is on its way out",
        ),
        pytest.param(
            waiting(metadata={"annotations": {READ[0]: "required", READ[1]: "{"}}),
            False,
            id="one that makes no sense",
        ),
        pytest.param(None, False, id="none at all"),
        pytest.param({"metadata": [], "status": "Pending"}, False, id="nonsense"),
    ],
)
def test_which_pods_wait_for_gpus(pod: object, waits: bool) -> None:
    assert names(waiting_for_gpus([pod], ())) == (["ns/a"] if waits else [])


def holding_of(name: str, **devices: int) -> Holding:
    """So many devices for each container."""
    of = {container: tuple(f"GPU-{one}" for one in range(n)) for container, n in devices.items()}
    return Holding(pod=name, devices=of)


def test_pods_that_have_theirs_wait_no_more() -> None:
    pods = [waiting("a"), waiting("b")]
    holdings = [holding_of("ns/a", main=1), holding_of("other/b", main=1)]
    assert names(waiting_for_gpus(pods, holdings)) == ["ns/b"]


def parts(*init: dict[str, Any], **gpus: int) -> dict[str, Any]:
    """A pod's containers, with so many GPUs each."""
    apps = [
        {"name": name, "resources": {"limits": {"aliyun.com/gpu": str(n)}}}
        for name, n in gpus.items()
    ]
    return {"spec": {"initContainers": list(init), "containers": apps}}


def init_of(gpus: int, **more: str) -> dict[str, Any]:
    return {"name": "init", "resources": {"limits": {"aliyun.com/gpu": str(gpus)}}, **more}


@pytest.mark.parametrize(
    ("pod", "devices", "waits"),
    [
        pytest.param(parts(one=1, two=1), {"one": 1}, True, id="the second has none yet"),
        pytest.param(parts(one=1, two=1), {"one": 1, "two": 1}, False, id="both have theirs"),
        pytest.param(parts(one=1, two=0), {"one": 1}, False, id="the second asks for none"),
        pytest.param(parts(one=2), {"one": 1}, True, id="it has one of two"),
        pytest.param(parts(init_of(2), one=2), {}, True, id="an init container has none yet"),
        pytest.param(
            parts(init_of(2), one=2), {"one": 2}, False, id="an init container is not listed"
        ),
        pytest.param(parts(init_of(2), one=0), {}, True, id="only an init container asks"),
        pytest.param(
            parts(init_of(1, restartPolicy="Always"), one=1),
            {"one": 1},
            True,
            id="a sidecar has none yet",
        ),
        pytest.param(
            parts(init_of(1, restartPolicy="Always"), one=1),
            {"init": 1},
            True,
            id="a sidecar has its own",
        ),
    ],
)
def test_a_pod_waits_until_each_container_has_its_own(
    pod: dict[str, Any], devices: dict[str, int], waits: bool
) -> None:
    found = waiting_for_gpus([waiting(**pod)], [holding_of("ns/a", **devices)] if devices else [])
    assert names(found) == (["ns/a"] if waits else [])


def test_pods_wait_in_the_order_of_their_creation_then_of_their_names() -> None:
    first = {"creationTimestamp": "2026-11-30T13:59:59Z"}
    pods = [waiting("c"), waiting("b"), waiting("d", metadata=first), waiting("a")]
    assert names(waiting_for_gpus(pods, ())) == ["ns/d", "ns/a", "ns/b", "ns/c"]


def test_what_waiting_pods_ask_is_all_that_they_ask() -> None:
    pod = waiting(gpus=2, metadata={"annotations": {"topology.kubernetes.io/gpu-group": "1,3"}})
    assert waiting_for_gpus([pod], ()) == (read_demand(pod),)
