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
from agent.core.strict_json import as_list, as_object
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
    metadata = as_object(as_object(pod).get("metadata"))
    uid = as_object(metadata.get("annotations")).get(_MIRROR_KEY) or metadata.get("uid")
    return uid if isinstance(uid, str) else ""


def name_of(pod: object) -> str:
    """Namespace and name, as `namespace/name`."""
    metadata = as_object(as_object(pod).get("metadata"))
    return f"{metadata.get('namespace', 'default')}/{metadata.get('name', '?')}"


def is_leaving(pod: object) -> bool:
    """Whether it has ended, or is to end."""
    metadata = as_object(as_object(pod).get("metadata"))
    status = as_object(as_object(pod).get("status"))
    return "deletionTimestamp" in metadata or status.get("phase") in _ENDED


def trim_pod(pod: Mapping[str, Any]) -> dict[str, Any] | None:
    """The pod without what nobody here reads, under the uid that it has on its node: a tenth of it.
    None for what is no pod."""
    metadata, spec, status = (as_object(pod.get(key)) for key in ("metadata", "spec", "status"))
    uid, annotations = uid_of(pod), as_object(metadata.get("annotations"))
    if not uid:
        return None
    kept = ("namespace", "name", "creationTimestamp", "deletionTimestamp")
    return {
        "metadata": {
            **_pick(metadata, kept),
            "uid": uid,
            "annotations": _pick(annotations, _KEYS),
        },
        "spec": {
            key: [_trim_container(one) for one in as_list(part)]
            for key, part in _pick(spec, ("initContainers", "containers")).items()
        },
        "status": {
            **_pick(status, ("phase",)),
            **{
                key: [_trim_status(one) for one in as_list(part)]
                for key, part in _pick(status, _STATUSES).items()
            },
        },
    }


def _trim_container(container: object) -> dict[str, Any]:
    facts = as_object(container)
    kept = _pick(facts, ("name", "restartPolicy"))
    resources = as_object(facts.get("resources"))
    return {**kept, "resources": _pick(resources, ("requests", "limits"))}


def _trim_status(status: object) -> dict[str, Any]:
    facts = as_object(status)
    state = dict.fromkeys(as_object(facts.get("state")))
    return {**_pick(facts, ("name", "containerID")), "state": state}


def _pick(source: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    return {key: source[key] for key in keys if key in source}


def waiting_for_gpus(pods: Iterable[object], holdings: Iterable[Holding]) -> tuple[Demand, ...]:
    """What pods ask that wait for GPUs, in the order in which kubelet admits pods, that of their
    creation. Kubelet gives them container by container."""
    held = {holding.pod: holding.devices for holding in holdings}
    waiting = []
    for pod in pods:
        if as_object(as_object(pod).get("status")).get("phase") == "Pending" and not is_leaving(
            pod
        ):
            demand = read_demand(pod)
            if isinstance(demand, Demand) and _lacks_gpus(demand, held.get(demand.pod, {})):
                created = as_object(as_object(pod).get("metadata")).get("creationTimestamp")
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
        if uid in there and as_object(as_object(pod).get("status")).get("phase") not in _ENDED:
            seen.append(_pod(uid, as_object(pod)))
            containers += _containers(uid, as_object(pod), sets)
    return tuple(seen), tuple(containers)


def _pod(uid: str, pod: Mapping[str, Any]) -> RuntimePod:
    metadata = as_object(pod.get("metadata"))
    return RuntimePod(
        id=uid,
        uid=uid,
        pod=name_of(pod),
        annotations={
            key: value
            for key, value in as_object(metadata.get("annotations")).items()
            if isinstance(value, str)
        },
    )


def _containers(
    uid: str, pod: Mapping[str, Any], sets: Mapping[str, Bitmap]
) -> Iterator[RuntimeContainer]:
    status = as_object(pod.get("status"))
    for key in _STATUSES:
        for one in as_list(status.get(key)):
            facts = as_object(one)
            _, _, id_ = str(facts.get("containerID") or "").rpartition("://")
            if id_:
                yield RuntimeContainer(
                    id=id_,
                    pod_id=uid,
                    name=str(facts.get("name", "")),
                    stage=_stage(as_object(facts.get("state"))),
                    cpus=sets.get(id_, EMPTY),
                )


def _stage(state: Mapping[str, Any]) -> Stage:
    return Stage.STOPPED if "terminated" in state else Stage.RUNNING
