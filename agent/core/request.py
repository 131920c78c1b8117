"""What a pod asks: its annotations and resources → Demand, or the reason why it is invalid.

A user's mistake makes the pod Invalid; a scheduler's is a note, and so is what is said twice or in
vain. A pod may come from anyone: long texts are refused unread, and what a sentence quotes is short
and printable.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from itertools import pairwise
from math import ceil
from typing import TypeVar

from agent.core.bitmap import Bitmap
from agent.core.decision import DecidedGpus, read_decided_cpus, read_decided_gpus
from agent.core.strict_json import (
    Object,
    parse_annotation,
    part,
    printable,
    read_annotation,
    shown,
    typed,
)

GPU_RESOURCE = "aliyun.com/gpu"
PIN_KEY = "cpuset-scheduler"
SPEC_KEYS = (
    "scheduling.alibabacloud.com/numa-topology-spec",
    "scheduling.alibabacloud.com/resource-spec",
    "scheduling.koordinator.sh/numa-topology-spec",
)
MAX_CONTAINERS = 1000
MAX_GPUS = 1024
_MAX_QUANTITY = 2**63 - 1
_QUANTITY = re.compile(
    r"\+?([0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE]([+-]?[0-9]{1,3})|([numkMGTPE]?|[KMGTPE]i))"
)
_SCALES = {
    **{suffix: Fraction(1000) ** n for n, suffix in enumerate(("n", "u", "m", "", *"kMGTPE"), -3)},
    **{f"{prefix}i": Fraction(1024) ** n for n, prefix in enumerate("KMGTPE", 1)},
}
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")

_E = TypeVar("_E", bound=StrEnum)


class Policy(StrEnum):
    """How strictly a pod wants its GPUs and CPUs together."""

    SINGLE_NUMA_NODE = "SingleNUMANode"
    RESTRICTED = "Restricted"
    BEST_EFFORT = "BestEffort"


class Exclusive(StrEnum):
    """Whether a pod minds nodes where pods of one node and pods of several would meet."""

    REQUIRED = "Required"
    PREFERRED = "Preferred"


class Role(StrEnum):
    """When a container runs."""

    APP = "app"
    INIT = "init"
    SIDECAR = "sidecar"
    """An init container with restartPolicy Always: it stays to the end of the pod's life."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerDemand:
    """What one container asks.

    `gpus` are whole GPUs. `cpus` are whole CPUs with request = limit, 0 for anything else.
    `memory_bytes` is the memory limit, None without one.
    """

    name: str
    role: Role
    gpus: int
    cpus: int
    memory_bytes: int | None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"{shown(self.name)} is not a container's name (a DNS label)")
        if min(self.gpus, self.cpus, self.memory_bytes or 0) < 0:
            raise ValueError(f'container "{self.name}" asks for less than nothing')


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a pod asks, and what a scheduler decided about it.

    `pod` is "namespace/name". `policy` is None where none is given; a pinned pod always has one.
    `containers` are in order of start: init containers and sidecars as listed, then apps.
    `decided_cpus` are (container, its CPUs) in that order, or one pair with the name "" for CPUs
    that all containers share; a container may be missing, no set is empty. Both `decided_` are None
    where no scheduler decided. `notes` are sentences about what was ignored or put right.
    """

    pod: str
    uid: str
    policy: Policy | None
    exclusive: Exclusive
    pinned: bool
    containers: tuple[ContainerDemand, ...]
    decided_cpus: tuple[tuple[str, Bitmap], ...] | None
    decided_gpus: DecidedGpus | None
    notes: tuple[str, ...]

    def __post_init__(self) -> None:
        _check_containers(self.containers)
        if self.pinned and self.policy is None:
            raise ValueError("a pinned pod has no policy")
        if self.pinned and not all(container.cpus for container in self.containers):
            raise ValueError("a pinned pod has a container without whole CPUs")

    @property
    def gpus(self) -> int:
        """The most GPUs that the pod holds at any time of its life."""
        return _peak([(container.role, container.gpus) for container in self.containers])

    @property
    def cpus(self) -> int:
        """The most whole CPUs that the pod holds at any time of its life."""
        return _peak([(container.role, container.cpus) for container in self.containers])

    @property
    def memory_bytes(self) -> int | None:
        """The memory limit of the pod at its peak, None if any container has none."""
        limits = [(c.role, c.memory_bytes) for c in self.containers if c.memory_bytes is not None]
        return _peak(limits) if len(limits) == len(self.containers) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Invalid:
    """A pod that cannot be served as it is; `reason` is one sentence for people."""

    pod: str
    uid: str
    reason: str


def read_demand(pod: object) -> Demand | Invalid:
    """What a Kubernetes Pod, as parsed JSON, asks. Never raises, whatever `pod` is.

    Source: ACK's page on NUMA topology-aware scheduling for the user's keys and values.
    """
    name, uid = _read_identity(pod)
    try:
        return _read_pod(typed(pod, dict, "the pod"), name, uid)
    except ValueError as reason:
        return Invalid(pod=name, uid=uid, reason=str(reason))


def parse_quantity(value: object) -> Fraction:
    """`"1.5"`, `"500m"`, `"2e1"`, `"8Gi"`, `24`, `None` (0), … → the exact number.

    More than 2**63 - 1 is 2**63 - 1. Raises ValueError, also for a negative number, which no
    resource may have.

    Source: Kubernetes' Quantity, its grammar. It caps numbers with a binary suffix only; a cap on
    all, 64 characters and three digits of exponent are ours.
    """
    text = value
    if value is None or type(value) is int:
        text = str(max(-1, min(value or 0, _MAX_QUANTITY)))  # str refuses an int of 4,301 digits
    elif type(value) is float:
        text = str(value)
    match = _QUANTITY.fullmatch(text) if type(text) is str and len(text) <= 64 else None
    if match is None:
        raise ValueError(f"{shown(value)} is not a quantity of 0 or more")
    number = Fraction(match[1]) * Fraction(10) ** int(match[2] or 0) * _SCALES[match[3] or ""]
    return min(number, Fraction(_MAX_QUANTITY))


def _read_identity(pod: object) -> tuple[str, str]:
    """Namespace/name and uid, with stand-ins for what is missing."""
    metadata = pod.get("metadata") if type(pod) is dict else None
    known = metadata if type(metadata) is dict else {}

    def read(key: str, default: str) -> str:
        text = known.get(key)
        return printable(text, 253) if type(text) is str and text else default

    return f"{read('namespace', 'default')}/{read('name', '?')}", read("uid", "")


def _read_pod(pod: Object, name: str, uid: str) -> Demand:
    annotations = part(part(pod, "metadata", dict), "annotations", dict)
    pinned, pin_notes = _read_pinned(annotations)
    policy, exclusive, spec_notes = _read_spec(annotations)
    containers = _read_containers(part(pod, "spec", dict), pinned)
    cpus, cpu_notes = read_decided_cpus(annotations, [container.name for container in containers])
    gpus, gpu_notes = read_decided_gpus(annotations)
    return Demand(
        pod=name,
        uid=uid,
        policy=policy or (Policy.BEST_EFFORT if pinned else None),
        exclusive=exclusive,
        pinned=pinned,
        containers=containers,
        decided_cpus=cpus,
        decided_gpus=gpus,
        notes=(*pin_notes, *spec_notes, *cpu_notes, *gpu_notes),
    )


def _read_pinned(annotations: Object) -> tuple[bool, list[str]]:
    value = annotations.get(PIN_KEY)
    if value is None or value == "required":
        return value is not None, []
    return False, [f'annotation {PIN_KEY} is ignored: it is {shown(value)}, not "required"']


def _read_spec(annotations: Object) -> tuple[Policy | None, Exclusive, list[str]]:
    """The first spec with a policy counts; one that cannot be read is fatal only before it."""
    counting: tuple[Policy | None, Exclusive] | None = None
    notes: list[str] = []
    for key in SPEC_KEYS:
        given, said = read_annotation(_parse_spec, annotations, key)
        notes += said
        if said and given is None and counting is None:
            raise ValueError(said[0])
        policy, exclusive = given or (None, None)
        spec = policy, exclusive or Exclusive.REQUIRED
        if policy is None and exclusive:
            notes.append(f"annotation {key} is ignored: it has no numaTopologyPolicy")
        elif policy and counting not in (None, spec):
            notes.append(f"annotation {key} is ignored: it contradicts one that comes first")
        counting = counting or (spec if policy else None)
    return *(counting or (None, Exclusive.REQUIRED)), notes


def _parse_spec(value: object) -> tuple[Policy | None, Exclusive | None]:
    spec = parse_annotation(value)
    return (
        _choice(Policy, spec, "numaTopologyPolicy"),
        _choice(Exclusive, spec, "singleNUMANodeExclusive"),
    )


def _choice(kind: type[_E], spec: Object, key: str) -> _E | None:
    value = spec.get(key)
    if value is None or value == "":
        return None
    if value not in list(kind):
        raise ValueError(f"{key} is {shown(value)}, not one of {', '.join(kind)}")
    return kind(value)


def _read_containers(spec: Object, pinned: bool) -> tuple[ContainerDemand, ...]:
    first = part(spec, "initContainers", list)
    apps = part(spec, "containers", list)
    if (count := len(first) + len(apps)) > MAX_CONTAINERS:
        raise ValueError(f"the pod has {count:,} containers, more than {MAX_CONTAINERS:,}")
    return tuple(
        _read_container(typed(item, dict, "a container"), at < len(first), pinned)
        for at, item in enumerate((*first, *apps))
    )


def _read_container(container: Object, init: bool, pinned: bool) -> ContainerDemand:
    name = part(container, "name", str)
    try:
        resources = part(container, "resources", dict)
        requests, limits = part(resources, "requests", dict), part(resources, "limits", dict)
        _, memory_limit = _read_amounts(requests, limits, "memory")
        return ContainerDemand(
            name=name,
            role=_role(container, init),
            gpus=_read_gpus(requests, limits),
            cpus=_read_cpus(requests, limits, pinned),
            memory_bytes=ceil(memory_limit) or None,  # to kubelet, 0 is no limit
        )
    except ValueError as reason:
        raise ValueError(f"container {shown(name)}: {reason}") from None


def _role(container: Object, init: bool) -> Role:
    if not init:
        return Role.APP
    return Role.SIDECAR if container.get("restartPolicy") == "Always" else Role.INIT


def _read_gpus(requests: Object, limits: Object) -> int:
    request, limit = _read_amounts(requests, limits, GPU_RESOURCE)
    if request != limit:
        raise ValueError(f"{_compare(requests, limits, GPU_RESOURCE)}; they must be equal")
    if limit.denominator != 1 or limit > MAX_GPUS:
        asked = shown(limits[GPU_RESOURCE])
        raise ValueError(f"{asked} of {GPU_RESOURCE} is not a whole number up to {MAX_GPUS:,}")
    return int(limit)


def _read_cpus(requests: Object, limits: Object, pinned: bool) -> int:
    request, limit = _read_amounts(requests, limits, "cpu")
    whole = int(limit) if request == limit and limit.denominator == 1 else 0
    if pinned and not whole:
        raise ValueError(
            f"{_compare(requests, limits, 'cpu')}; "
            "a pinned pod needs whole CPUs with request = limit in every container"
        )
    return whole


def _read_amounts(requests: Object, limits: Object, resource: str) -> tuple[Fraction, Fraction]:
    """Request and limit. Kubernetes takes the limit for a missing request."""
    limit = limits.get(resource, 0)
    try:
        return parse_quantity(requests.get(resource, limit)), parse_quantity(limit)
    except ValueError as reason:
        raise ValueError(f"{resource}: {reason}") from None


def _compare(requests: Object, limits: Object, resource: str) -> str:
    limit = limits.get(resource, 0)
    request = requests.get(resource, limit)
    return f"the request of {resource} is {shown(request)} and its limit {shown(limit)}"


def _check_containers(containers: Sequence[ContainerDemand]) -> None:
    apps = [container.role is Role.APP for container in containers]
    if not any(apps):
        raise ValueError("the pod has no containers")
    if apps != sorted(apps):
        raise ValueError("an init container is listed after a container")
    names = sorted(container.name for container in containers)
    for name, other in pairwise(names):
        if name == other:
            raise ValueError(f'two containers have the name "{name}"')


def _peak(amounts: Sequence[tuple[Role, int]]) -> int:
    """The most held at once, given what each container holds, in order of start.

    Source: KEP-753, sidecar containers: an init container runs alone but for the sidecars listed
    before it, the apps run beside all sidecars.
    """
    peak = held = 0
    for role, amount in amounts:
        peak = max(peak, held + amount)
        held += 0 if role is Role.INIT else amount
    return peak
