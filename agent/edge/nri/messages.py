"""NRI's messages ↔ our values.

Numbers that are 0 are not given: the runtime passes them on from CRI, where 0 means that.

Source: containerd/nri 0.12, pkg/api/api.proto; containerd 2.4, internal/cri/nri.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from agent import log
from agent.core.bitmap import Bitmap
from agent.core.runtime import Cpuset, CpuTime, RuntimeContainer, RuntimePod, Stage
from agent.core.strict_json import printable
from agent.core.topology import EMPTY
from agent.proto import nri_pb2 as pb

_VISIBLE_DEVICES: Final = "NVIDIA_VISIBLE_DEVICES="

_LONGEST_LIST: Final = 1 << 14
"""Characters. A list of every other of 1,024 CPUs has 2,500."""

_STAGES: Final = {
    pb.CONTAINER_UNKNOWN: Stage.RUNNING,  # who may run, may hold CPUs
    pb.CONTAINER_CREATED: Stage.CREATED,
    pb.CONTAINER_PAUSED: Stage.RUNNING,
    pb.CONTAINER_RUNNING: Stage.RUNNING,
    pb.CONTAINER_STOPPED: Stage.STOPPED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What somebody, mostly kubelet, wants a running container changed to; the rest stays."""

    cpu_time: CpuTime
    memory_bytes: int | None = None
    cpus: Bitmap = EMPTY
    mems: Bitmap = EMPTY


# --- from the runtime -----------------------------------------------------------------------------


def to_pod(pod: pb.PodSandbox) -> RuntimePod:
    resources = pod.linux.pod_resources
    return RuntimePod(
        id=pod.id,
        uid=pod.uid,
        pod=f"{pod.namespace}/{pod.name}",
        annotations=dict(pod.annotations),
        cgroup_parent=pod.linux.cgroup_parent,
        pid=pod.pid,
        cpu_time=_to_cpu_time(resources.cpu) if resources.HasField("cpu") else None,
        memory_bytes=_to_memory(resources.memory),
    )


def to_containers(containers: Iterable[pb.Container]) -> Iterator[RuntimeContainer]:
    """Those that have an id: nothing can be done to others."""
    for container in containers:
        if container.id:
            yield to_container(container)
        else:
            log.warning("container without id", container=printable(container.name, 80))


def to_container(container: pb.Container, stage: Stage | None = None) -> RuntimeContainer:
    """`stage` where the runtime does not say it. A cpuset that is no list is taken for none."""
    asked = to_asked(container.linux.resources)
    return RuntimeContainer(
        id=container.id,
        pod_id=container.pod_sandbox_id,
        name=container.name,
        stage=stage or _STAGES.get(container.state, Stage.RUNNING),
        annotations=dict(container.annotations),
        cpu_time=asked.cpu_time,
        memory_bytes=asked.memory_bytes,
        cpus=asked.cpus,
        mems=asked.mems,
        devices=tuple(device.path for device in container.linux.devices),
        visible_devices=_visible_devices(container.env),
    )


def to_asked(resources: pb.LinuxResources) -> Asked:
    return Asked(
        cpu_time=_to_cpu_time(resources.cpu),
        memory_bytes=_to_memory(resources.memory),
        cpus=_to_set("cpus", resources.cpu.cpus),
        mems=_to_set("mems", resources.cpu.mems),
    )


def _to_cpu_time(cpu: pb.LinuxCPU) -> CpuTime:
    return CpuTime(
        shares=cpu.shares.value or None,
        quota_us=cpu.quota.value or None,
        period_us=cpu.period.value or None,
    )


def _to_memory(memory: pb.LinuxMemory) -> int | None:
    return memory.limit.value if memory.limit.value > 0 else None


def _to_set(what: str, text: str) -> Bitmap:
    try:
        if len(text) > _LONGEST_LIST:
            raise ValueError(f"a list of {len(text):,} characters")
        return Bitmap.parse_list(text)
    except ValueError as reason:
        log.warning("cpuset not understood", of=what, reason=printable(str(reason), 200))
        return EMPTY


def _visible_devices(env: Iterable[str]) -> str | None:
    """The last one counts, as where the variables are put into a map."""
    values = [entry for entry in env if entry.startswith(_VISIBLE_DEVICES)]
    return values[-1].removeprefix(_VISIBLE_DEVICES) if values else None


# --- to the runtime -------------------------------------------------------------------------------


def to_adjustment(cpuset: Cpuset) -> pb.ContainerAdjustment:
    """Of a container that is being created."""
    linux = pb.LinuxContainerAdjustment(resources=_to_resources(cpuset))
    return pb.ContainerAdjustment(linux=linux)


def to_update(container_id: str, cpuset: Cpuset, ignore_failure: bool) -> pb.ContainerUpdate:
    """Of a container that is there. The runtime applies no update without the id."""
    return pb.ContainerUpdate(
        container_id=container_id,
        linux=pb.LinuxContainerUpdate(resources=_to_resources(cpuset)),
        ignore_failure=ignore_failure,
    )


def to_updates(cpusets: Mapping[str, Cpuset]) -> list[pb.ContainerUpdate]:
    """Of several containers, by id, in answer to Synchronize; those that can be told.

    Their failures are to be ignored: one container that cannot be updated, because it is just
    ending, would cost us the registration. Whether the kernel has what it should is looked up
    anyway.

    Source: syncPlugin in CRI-O's internal/nri fails with the first failure; containerd's logs it.
    """
    updates = []
    for container_id in sorted(cpusets):
        try:
            updates.append(to_update(container_id, cpusets[container_id], ignore_failure=True))
        except ValueError:
            log.crash("container not corrected")
    return updates


def _to_resources(cpuset: Cpuset) -> pb.LinuxResources:
    """An empty set would mean "no change" here, so it cannot be asked for. Raises ValueError.

    A quota of -1 is "no limit" all the way down; the period stays as it is.

    Source: WithResources in containerd 2.4's internal/cri/opts passes over 0 and empty texts only;
    runc writes -1 (v1) or "max" (v2), and infinity for systemd.
    """
    if not cpuset.cpus:
        raise ValueError("a container cannot be pinned to no CPUs")
    cpu = pb.LinuxCPU(cpus=str(cpuset.cpus), mems=str(cpuset.mems))
    if cpuset.lift_quota:
        cpu.quota.value = -1
    return pb.LinuxResources(cpu=cpu)
