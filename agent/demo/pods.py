"""What a pod is for scheduler, kubelet and runtime.

Source: Kubernetes' resource model, and kubelet's pkg/kubelet/cm for classes and CPU time.
"""

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Final

from agent.core.request import GPU_RESOURCE, MAX_GPUS, Role, parse_quantity
from agent.core.strict_json import Object, part, shown, typed
from agent.proto import nri_pb2 as pb

_PERIOD_US: Final = 100_000
_SHARES_OF_CPU: Final = 1024
_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_NAME: Final = re.compile(rf"(?=.{{1,253}}\Z){_LABEL.pattern}(\.{_LABEL.pattern})*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """What a container asks: CPUs in thousandths, whole GPUs, `memory_bytes` of limit. A limit of 0
    is none."""

    name: str
    role: Role
    gpus: int
    request_m: int
    limit_m: int
    memory_request_bytes: int
    memory_bytes: int

    @property
    def resources(self) -> pb.LinuxResources:
        """What kubelet asks of the runtime for it."""
        return to_resources(self.request_m, self.limit_m, self.memory_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """`name` is "namespace/name". `foreign` are other extended resources that it asks for."""

    body: Object
    name: str
    uid: str
    annotations: Mapping[str, str]
    containers: tuple[Container, ...]
    foreign: tuple[str, ...] = ()

    @property
    def qos(self) -> str:
        """The folder of its class below kubepods."""
        asked = [
            (c.request_m, c.limit_m, c.memory_request_bytes, c.memory_bytes)
            for c in self.containers
        ]
        if not any(any(amounts) for amounts in asked):
            return "besteffort"
        equal = all(a[0] == a[1] > 0 and a[2] == a[3] > 0 for a in asked)
        return "" if equal else "burstable"

    @property
    def cgroup(self) -> str:
        return "/".join(filter(None, (self.qos, f"pod{self.uid}")))

    @property
    def is_pinned(self) -> bool:
        """Whether it asks for CPUs of its own."""
        return self.annotations.get("cpuset-scheduler") == "required"

    @property
    def resources(self) -> pb.LinuxResources:
        """What kubelet tells the runtime of the whole pod."""
        limits = [c.limit_m for c in self.containers], [c.memory_bytes for c in self.containers]
        cpu, memory = (
            self._peak(which) if all(values) else 0
            for which, values in zip(("limit_m", "memory_bytes"), limits, strict=True)
        )
        return to_resources(self._peak("request_m"), cpu, memory)

    @property
    def gpus(self) -> int:
        return self._peak("gpus")

    @property
    def request_m(self) -> int:
        return self._peak("request_m")

    @property
    def memory_request_bytes(self) -> int:
        return self._peak("memory_request_bytes")

    def _peak(self, what: str) -> int:
        """The most of something that it has at any time. Source: KEP-753, sidecar containers."""
        held = peak = 0
        for container in self.containers:
            amount: int = getattr(container, what)
            peak = max(peak, held + amount)
            held += 0 if container.role is Role.INIT else amount
        return peak


def to_resources(request_m: int, limit_m: int, memory_bytes: int) -> pb.LinuxResources:
    cpu = pb.LinuxCPU(
        shares={"value": max(2, request_m * _SHARES_OF_CPU // 1000)},
        period={"value": _PERIOD_US},
    )
    if limit_m:
        cpu.quota.value = quota_us(limit_m)
    memory = pb.LinuxMemory(limit={"value": memory_bytes}) if memory_bytes else None
    return pb.LinuxResources(cpu=cpu, memory=memory)


def quota_us(limit_m: int) -> int:
    """CPU time in each period, -1 for all."""
    return limit_m * _PERIOD_US // 1000 if limit_m else -1


# --- from a manifest ------------------------------------------------------------------------------


def parse_pod(manifest: Object, node: str, created: str) -> Pod:
    """The pod as the API server has it once it is bound to the node. Raises ValueError with the
    reason why it would not take it."""
    metadata = part(manifest, "metadata", dict)
    namespace, short = part(metadata, "namespace", str) or "default", part(metadata, "name", str)
    if not (_LABEL.fullmatch(namespace) and _NAME.fullmatch(short)):
        raise ValueError(f"{shown(f'{namespace}/{short}')} is not a name that a pod can have")
    try:
        return _parse_named(manifest, f"{namespace}/{short}", node, created)
    except ValueError as reason:
        raise ValueError(f"pod {namespace}/{short}: {reason}") from None


def _parse_named(manifest: Object, name: str, node: str, created: str) -> Pod:
    metadata, spec = part(manifest, "metadata", dict), part(manifest, "spec", dict)
    annotations = part(metadata, "annotations", dict)
    if not all(isinstance(value, str) for value in annotations.values()):
        raise ValueError("an annotation is not a text")
    containers, foreign = _parse_containers(spec)
    namespace, short = name.split("/")
    uid = str(uuid.uuid5(uuid.NAMESPACE_URL, name))
    own = {
        "namespace": namespace,
        "name": short,
        "uid": uid,
        "creationTimestamp": created,
        "annotations": annotations,
    }
    bound = {**spec, "nodeName": node}
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": own, "spec": bound}
    return Pod(
        body=body,
        name=name,
        uid=uid,
        annotations=annotations,
        containers=containers,
        foreign=foreign,
    )


def _parse_containers(spec: Object) -> tuple[tuple[Container, ...], tuple[str, ...]]:
    first, apps = part(spec, "initContainers", list), part(spec, "containers", list)
    if not apps:
        raise ValueError("it has no containers")
    containers, foreign = [], set()
    for at, item in enumerate((*first, *apps)):
        body = typed(item, dict, "a container")
        resources = part(body, "resources", dict)
        limits, requests = part(resources, "limits", dict), part(resources, "requests", dict)
        foreign |= {key for key in limits if "/" in key and key != GPU_RESOURCE and limits[key]}
        containers.append(_parse_container(body, at < len(first), limits, limits | requests))
    names = [container.name for container in containers]
    if bad := next((name for name in names if not _LABEL.fullmatch(name)), None):
        raise ValueError(f"{shown(bad)} is not a name that a container can have")
    if len(set(names)) < len(names):
        raise ValueError("two of its containers have the same name")
    return tuple(containers), tuple(sorted(foreign))


def _parse_container(body: Object, init: bool, limits: Object, requests: Object) -> Container:
    """A limit is the request, too, where none is given."""
    sidecar = init and body.get("restartPolicy") == "Always"
    return Container(
        name=part(body, "name", str),
        role=Role.SIDECAR if sidecar else Role.INIT if init else Role.APP,
        gpus=_amount(limits, GPU_RESOURCE, MAX_GPUS),
        request_m=_amount(requests, "cpu", 2**30, 1000),
        limit_m=_amount(limits, "cpu", 2**30, 1000),
        memory_request_bytes=_amount(requests, "memory", 2**50),
        memory_bytes=_amount(limits, "memory", 2**50),
    )


def _amount(resources: Object, name: str, most: int, scale: int = 1) -> int:
    """No more than `most`, which is too much anyway."""
    try:
        return ceil(min(parse_quantity(resources.get(name)), Fraction(most)) * scale)
    except ValueError as reason:
        raise ValueError(f"{name}: {reason}") from None
