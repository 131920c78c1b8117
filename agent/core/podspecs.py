"""Pods as kubelet or the API server has them, joined with the cgroups they run in."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from agent.core.bitmap import Bitmap
from agent.core.pool import Groups
from agent.core.runtime import RuntimeContainer, RuntimePod, Stage
from agent.core.topology import EMPTY

Pods = tuple[RuntimePod, ...]
Containers = tuple[RuntimeContainer, ...]

_ENDED = ("Succeeded", "Failed")
_STATUSES = ("initContainerStatuses", "containerStatuses", "ephemeralContainerStatuses")


def uid_of(pod: object) -> str:
    """The pod's uid, empty for what is no pod."""
    uid = _dict(_dict(pod).get("metadata")).get("uid")
    return uid if isinstance(uid, str) else ""


def see_specs(
    pods: Iterable[object], groups: Groups, pool: Bitmap = EMPTY
) -> tuple[Pods, Containers]:
    """The pods that have not ended, and their containers that have a cgroup, as the container
    runtime would show them. A container's cpuset does not count where it is the one of everybody:
    kubepods', a class', or the shared `pool`."""
    common = {groups.cpus, pool, *(group.cpus for group in groups.classes.values())}
    sets = {
        container.id: container.cpus
        for pod in groups.pods
        for container in pod.containers
        if container.cpus not in common
    }
    seen: list[RuntimePod] = []
    containers: list[RuntimeContainer] = []
    there = {pod.uid for pod in groups.pods}
    for pod in pods:
        uid = uid_of(pod)
        if uid in there and _dict(_dict(pod).get("status")).get("phase") not in _ENDED:
            seen.append(_pod(uid, _dict(pod)))
            containers += _containers(uid, _dict(pod), sets)
    return tuple(seen), tuple(containers)


def _pod(uid: str, pod: Mapping[str, Any]) -> RuntimePod:
    metadata = _dict(pod.get("metadata"))
    return RuntimePod(
        id=uid,
        uid=uid,
        pod=f"{metadata.get('namespace', 'default')}/{metadata.get('name', '?')}",
        annotations={
            key: value
            for key, value in _dict(metadata.get("annotations")).items()
            if isinstance(value, str)
        },
    )


def _containers(
    uid: str, pod: Mapping[str, Any], sets: Mapping[str, Bitmap]
) -> Iterator[RuntimeContainer]:
    status = _dict(pod.get("status"))
    for key in _STATUSES:
        for one in _list(status.get(key)):
            facts = _dict(one)
            _, _, id_ = str(facts.get("containerID") or "").rpartition("://")
            if id_:
                yield RuntimeContainer(
                    id=id_,
                    pod_id=uid,
                    name=str(facts.get("name", "")),
                    stage=_stage(_dict(facts.get("state"))),
                    cpus=sets.get(id_, EMPTY),
                )


def _stage(state: Mapping[str, Any]) -> Stage:
    return Stage.STOPPED if "terminated" in state else Stage.RUNNING


def _dict(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []
