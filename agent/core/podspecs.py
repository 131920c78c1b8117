"""Pods as kubelet or the API server has them: what of them matters here, which of them wait for
GPUs, and which run in which cgroups."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from agent.core.bitmap import Bitmap
from agent.core.decision import CPUSET_KEY, DEVICES_KEY, GROUP_KEY, STATUS_KEY
from agent.core.offer import Holding
from agent.core.pool import Groups
from agent.core.request import PIN_KEY, SPEC_KEYS, Demand, Role, read_demand
from agent.core.runtime import RuntimeContainer, RuntimePod, Stage
from agent.core.topology import EMPTY

Pods = tuple[RuntimePod, ...]
Containers = tuple[RuntimeContainer, ...]

_ENDED = ("Succeeded", "Failed")
_STATUSES = ("initContainerStatuses", "containerStatuses", "ephemeralContainerStatuses")


_MIRROR_KEY = "kubernetes.io/config.mirror"
"""Annotation of a static pod's likeness in the API server: the uid that it has with kubelet.

Source: kubelet, pkg/kubelet/types.
"""
_KEYS = (*SPEC_KEYS, PIN_KEY, CPUSET_KEY, STATUS_KEY, GROUP_KEY, DEVICES_KEY, _MIRROR_KEY)


def uid_of(pod: object) -> str:
    """The uid that the pod has on its node, empty for what is no pod."""
    metadata = _dict(_dict(pod).get("metadata"))
    uid = _dict(metadata.get("annotations")).get(_MIRROR_KEY) or metadata.get("uid")
    return uid if isinstance(uid, str) else ""


def name_of(pod: object) -> str:
    """Namespace and name, as `namespace/name`."""
    metadata = _dict(_dict(pod).get("metadata"))
    return f"{metadata.get('namespace', 'default')}/{metadata.get('name', '?')}"


def is_leaving(pod: object) -> bool:
    """Whether it has ended, or is to end."""
    metadata, status = _dict(_dict(pod).get("metadata")), _dict(_dict(pod).get("status"))
    return "deletionTimestamp" in metadata or status.get("phase") in _ENDED


def trim_pod(pod: Mapping[str, Any]) -> dict[str, Any] | None:
    """The pod without what nobody here reads, under the uid that it has on its node: a tenth of it.
    None for what is no pod."""
    metadata, spec, status = (_dict(pod.get(key)) for key in ("metadata", "spec", "status"))
    uid, annotations = uid_of(pod), _dict(metadata.get("annotations"))
    if not uid:
        return None
    kept = ("namespace", "name", "creationTimestamp", "deletionTimestamp")
    return {
        "metadata": {
            **{key: metadata[key] for key in kept if key in metadata},
            "uid": uid,
            "annotations": {key: annotations[key] for key in _KEYS if key in annotations},
        },
        "spec": {
            key: [_trim_container(one) for one in _list(spec[key])]
            for key in ("initContainers", "containers")
            if key in spec
        },
        "status": {
            **({"phase": status["phase"]} if "phase" in status else {}),
            **{
                key: [_trim_status(one) for one in _list(status[key])]
                for key in _STATUSES
                if key in status
            },
        },
    }


def _trim_container(container: object) -> dict[str, Any]:
    resources = _dict(_dict(container).get("resources"))
    kept = {key: resources[key] for key in ("requests", "limits") if key in resources}
    rest = {
        key: _dict(container)[key] for key in ("name", "restartPolicy") if key in _dict(container)
    }
    return {**rest, "resources": kept}


def _trim_status(status: object) -> dict[str, Any]:
    facts = _dict(status)
    kept = {key: facts[key] for key in ("name", "containerID") if key in facts}
    return {**kept, "state": dict.fromkeys(_dict(facts.get("state")))}


def waiting_for_gpus(pods: Iterable[object], holdings: Iterable[Holding]) -> tuple[Demand, ...]:
    """What pods ask that wait for GPUs, in the order in which kubelet admits pods, that of their
    creation. Kubelet gives them container by container."""
    held = {holding.pod: holding.devices for holding in holdings}
    waiting = []
    for pod in pods:
        if _dict(_dict(pod).get("status")).get("phase") == "Pending" and not is_leaving(pod):
            demand = read_demand(pod)
            if isinstance(demand, Demand) and _lacks_gpus(demand, held.get(demand.pod, {})):
                created = _dict(_dict(pod).get("metadata")).get("creationTimestamp")
                waiting.append((str(created or ""), demand))
    return tuple(demand for _, demand in sorted(waiting, key=lambda one: (one[0], one[1].pod)))


def _lacks_gpus(demand: Demand, devices: Mapping[str, Collection[str]]) -> bool:
    """Whether a container is without its GPUs. Kubelet does not list those of init containers,
    which count only while nothing is listed of the pod."""
    return any(
        container.gpus > len(devices.get(container.name, ()))
        for container in demand.containers
        if container.role is not Role.INIT or not devices
    )


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
        pod=name_of(pod),
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
