"""Pods as kubelet has them, joined with cgroups: kubelet's own shapes, and JSON from anywhere."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.bitmap import Bitmap
from agent.core.podspecs import see_specs, uid_of
from agent.core.pool import ContainerGroup, Groups, PodGroup, Qos
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
