"""Scheduler, kubelet and container runtime, played for one pod at a time.

What they would do with the agent's answers is done here: the sandbox, the cgroups, the containers.
"""

import contextlib
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final

from agent.core.request import Role
from agent.demo.node import FailedError, Node
from agent.demo.pods import Container, Pod, quota_us
from agent.fakes.kubelet import RefusedError
from agent.fakes.runtime import CallFailedError
from agent.proto import deviceplugin_pb2 as deviceplugin
from agent.proto import nri_pb2 as pb

_MOST_PODS: Final = 110
"""Source: kubelet's default for maxPods."""
_HEARD_S: Final = 0.05
"""Kubelet and agent hear of a pod at the same time; kubelet first makes folders for it."""


class Stage(StrEnum):
    """How far a pod has come."""

    RUNNING = "running"
    UNSCHEDULABLE = "unschedulable"
    """The scheduler has no room for it: it never comes to the node."""
    NOT_ADMITTED = "not admitted"
    """Kubelet could not get its devices."""
    NOT_CREATED = "not created"
    """A container was refused when it was created."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A container that was created: `gpus` and `answer` are what kubelet got for it, `created` is
    what the runtime made."""

    asked: Container
    gpus: tuple[str, ...]
    answer: deviceplugin.ContainerAllocateResponse
    created: pb.Container
    cgroup: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """A pod and what became of it; `reason` is why it does not run. `placed` are the containers
    that stay, `ended` init containers that are through."""

    pod: Pod
    stage: Stage
    reason: str = ""
    placed: tuple[Placed, ...] = ()
    ended: tuple[Placed, ...] = ()
    held: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """GPUs that kubelet gave, by container, whether it was created or not."""


def start(node: Node, pod: Pod, before: list[Played]) -> Played:
    """From the scheduler to the last container. `before` are the pods that came earlier."""
    if reason := _find_no_room(node, pod, before):
        return Played(pod=pod, stage=Stage.UNSCHEDULABLE, reason=reason)
    _tell(node, pod, phase="Pending")
    time.sleep(_HEARD_S)
    try:
        held = _admit(node, pod)
    except RefusedError as error:
        _tell(node, pod, phase="Failed", reason="UnexpectedAdmissionError", message=str(error))
        return Played(pod=pod, stage=Stage.NOT_ADMITTED, reason=str(error))
    played = Played(pod=pod, stage=Stage.RUNNING, held=held)
    try:
        node.runtime.run_pod(_sandbox(pod))
        node.kubepods.make(pod.cgroup, quota_us=pod.resources.cpu.quota.value or -1)
        for container in pod.containers:
            played = _create(node, played, container)
    except CallFailedError as error:
        waiting = {"waiting": {"reason": "CreateContainerError", "message": str(error)}}
        statuses = [{"name": pod.containers[-1].name, "state": waiting}]
        _tell(node, pod, phase="Pending", containerStatuses=statuses)
        return replace(played, stage=Stage.NOT_CREATED, reason=str(error))
    _tell(node, pod, phase="Running", **_statuses(played))
    return played


def end(node: Node, played: Played) -> None:
    """The pod is deleted; what it had is free."""
    pod = played.pod
    if played.stage is Stage.UNSCHEDULABLE:
        return
    try:
        for one in (*played.placed, *played.ended):
            node.runtime.remove_container(one.created.id)
        if pod.uid in node.runtime.pods:
            node.runtime.remove_pod(pod.uid)
    except CallFailedError as error:
        raise FailedError(
            f"the end of pod {pod.name} is answered with an error: {error}"
        ) from error
    with contextlib.suppress(KeyError):  # kubelet forgets those that it does not admit
        node.kubelet.remove(pod.name)
    node.kubepods.remove(pod.cgroup)
    namespace, name = pod.name.split("/")
    node.api.remove("pods", name, namespace)


# --- the scheduler --------------------------------------------------------------------------------


def _find_no_room(node: Node, pod: Pod, before: list[Played]) -> str:
    """Why the node cannot have it, in the scheduler's words; empty if it can."""
    here = [one.pod for one in before if one.stage in (Stage.RUNNING, Stage.NOT_CREATED)]
    healthy = sum(health == "Healthy" for health, _ in node.devices.values())
    has = {
        "cpu": (1000 * len(node.machine.cpus), "request_m"),
        "memory": (sum(one.memory_bytes for one in node.machine.nodes), "memory_request_bytes"),
        "aliyun.com/gpu": (healthy, "gpus"),
    }
    lacks = [
        name
        for name, (total, what) in has.items()
        if sum(getattr(one, what) for one in (*here, pod)) > total and getattr(pod, what)
    ]
    if len(here) >= _MOST_PODS:
        return "0/1 nodes are available: 1 Too many pods"
    lacks += pod.foreign
    return f"0/1 nodes are available: 1 Insufficient {', '.join(lacks)}" if lacks else ""


# --- kubelet --------------------------------------------------------------------------------------


def _tell(node: Node, pod: Pod, **status: Any) -> None:
    """The pod and its status, for the API server."""
    node.api.put("pods", pod.body | {"status": status}, manager="kubelet")


def _statuses(played: Played) -> dict[str, Any]:
    def to_status(one: Placed, state: str) -> dict[str, Any]:
        id_ = f"containerd://{one.created.id}"
        return {"name": one.asked.name, "containerID": id_, "state": {state: {}}}

    first = [to_status(one, "terminated") for one in played.ended]
    first += [to_status(one, "running") for one in played.placed if one.asked.role is not Role.APP]
    apps = [to_status(one, "running") for one in played.placed if one.asked.role is Role.APP]
    return {"initContainerStatuses": first, "containerStatuses": apps}


def _admit(node: Node, pod: Pod) -> dict[str, tuple[str, ...]]:
    """Devices for each container that asks for some; those that ask for none are known, too."""
    held = {}
    for one in pod.containers:
        if one.gpus:
            given = node.kubelet.admit(pod.name, one.name, one.gpus, init=one.role is Role.INIT)
            held[one.name] = tuple(given)
        elif one.role is not Role.INIT:
            node.kubelet.give(pod.name, one.name, "", {})
    return held


# --- the runtime ----------------------------------------------------------------------------------


def _sandbox(pod: Pod) -> pb.PodSandbox:
    namespace, name = pod.name.split("/")
    return pb.PodSandbox(
        id=pod.uid,
        name=name,
        uid=pod.uid,
        namespace=namespace,
        pid=1,
        annotations=pod.annotations,
        linux=pb.LinuxPodSandbox(
            cgroup_parent=f"/kubepods/{pod.cgroup}", pod_resources=pod.resources
        ),
    )


def _create(node: Node, played: Played, asked: Container) -> Played:
    """Creates and starts a container; an init container also ends. Raises CallFailedError."""
    pod, gpus = played.pod, played.held.get(asked.name, ())
    none = deviceplugin.ContainerAllocateResponse()
    answer = node.kubelet.answer(pod.name, asked.name) if gpus else none
    id_ = uuid.uuid5(uuid.UUID(pod.uid), asked.name).hex
    created = node.runtime.create(
        pb.Container(
            id=id_,
            pod_sandbox_id=pod.uid,
            name=asked.name,
            annotations=dict(answer.annotations),
            env=[f"{key}={value}" for key, value in answer.envs.items()],
            linux=pb.LinuxContainer(
                resources=asked.resources,
                devices=[pb.LinuxDevice(path=one.container_path) for one in answer.devices],
            ),
        )
    )
    cpu = created.linux.resources.cpu
    cgroup = f"{pod.cgroup}/{id_}"
    node.kubepods.make(cgroup, cpu.cpus, cpu.mems, cpu.quota.value or quota_us(asked.limit_m))
    node.runtime.start_container(id_)
    placed = Placed(asked=asked, gpus=gpus, answer=answer, created=created, cgroup=cgroup)
    if asked.role is Role.INIT:
        node.runtime.stop_container(id_)
        node.kubepods.remove(cgroup)
        return replace(played, ended=(*played.ended, placed))
    return replace(played, placed=(*played.placed, placed))
