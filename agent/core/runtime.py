"""Pods and containers as the node sees them, from the container runtime or from the cgroups."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from agent.core.bitmap import Bitmap
from agent.core.topology import EMPTY


class Stage(StrEnum):
    """Where a container is in its life."""

    CREATING = "creating"
    CREATED = "created"
    RUNNING = "running"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuTime:
    """What the kernel's scheduler is told: cgroup v1's `shares`, and `quota_us` of `period_us`.

    None where the runtime does not say; a quota of -1 or None is no limit.
    """

    shares: int | None = None
    quota_us: int | None = None
    period_us: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimePod:
    """A pod sandbox. `id` is the runtime's, `pod` is "namespace/name". `cpu_time` and
    `memory_bytes` (its limit) are those of the whole pod, None where the runtime does not say.
    `cgroup_parent` is kubelet's cgroup of the pod as the runtime was told it. `pid` is that of the
    sandbox, 0 where it has no process or has ended."""

    id: str
    uid: str
    pod: str
    annotations: Mapping[str, str] = field(default_factory=dict)
    cgroup_parent: str = ""
    pid: int = 0
    cpu_time: CpuTime | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeContainer:
    """A container of a pod sandbox. `annotations` are its own, among them those of Allocate.

    `cpus` and `mems` are the cpuset that the runtime has for it, empty for none. `devices` are the
    paths of its device nodes, `visible_devices` what NVIDIA_VISIBLE_DEVICES is, None without it.
    """

    id: str
    pod_id: str
    name: str
    stage: Stage
    annotations: Mapping[str, str] = field(default_factory=dict)
    cpu_time: CpuTime = CpuTime()
    memory_bytes: int | None = None
    cpus: Bitmap = EMPTY
    mems: Bitmap = EMPTY
    devices: tuple[str, ...] = ()
    visible_devices: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpuset:
    """What a container is pinned to. `mems` is empty where memory is left alone. `lift_quota`: the
    CFS quota is taken off, which would throttle it below its own CPUs."""

    cpus: Bitmap
    mems: Bitmap = EMPTY
    lift_quota: bool = True


class OnUnsatisfied(StrEnum):
    """What becomes of a container whose pod asks for a pin that it cannot have."""

    FAIL = "fail"
    WARN = "warn"


class Unannotated(StrEnum):
    """What becomes of GPU pods that ask for nothing."""

    LEAVE = "leave"
    NEAR = "near"
