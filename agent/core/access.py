"""What the agent may ask of the Kubernetes API: each verb, and what it is for.

`numalet doctor` asks for these, and the ClusterRole grants these.
"""

from collections.abc import Set
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from agent.core.koordinator import DEVICE_GROUP, DEVICE_PLURAL
from agent.core.report import GROUP, PLURAL


class Duty(StrEnum):
    """What access is needed for; the configuration turns all but the first off."""

    REPORT = "report"
    ACK = "ack"
    KOORDINATOR = "koordinator"
    TAINT = "taint"
    CGROUP = "cgroup"
    """Pinning through the cgroups, which do not tell what pods ask: kubelet is asked for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """One verb on one resource, needed for any of the duties. An empty `namespace` is all of them,
    or none for what is in none."""

    verb: str
    group: str
    resource: str
    duties: frozenset[Duty]
    why: str
    subresource: str = ""
    namespace: str = ""

    def __str__(self) -> str:
        """As `kubectl auth can-i` takes it: `patch noderesourcetopologies.topology.node.k8s.io`."""
        group = f".{self.group}" if self.group else ""
        subresource = f"/{self.subresource}" if self.subresource else ""
        where = f" in {self.namespace}" if self.namespace else ""
        return f"{self.verb} {self.resource}{group}{subresource}{where}"


def _access(
    verbs: str, group: str, resource: str, duties: Set[Duty], why: str, **where: str
) -> tuple[Access, ...]:
    of = frozenset(duties)
    return tuple(
        Access(verb=verb, group=group, resource=resource, duties=of, why=why, **where)
        for verb in verbs.split()
    )


ACCESS: Final[tuple[Access, ...]] = (
    *_access("get", "", "nodes", {Duty.REPORT}, "whose the report is, its labels and taints"),
    *_access("patch", "", "nodes", {Duty.ACK, Duty.TAINT}, "labels, and the startup taint"),
    *_access("list watch", "", "pods", {Duty.REPORT}, "the pods of this node"),
    *_access("create", "", "events", {Duty.REPORT}, "what became of a pod"),
    *_access("get list watch create patch update", GROUP, PLURAL, {Duty.REPORT}, "the report"),
    *_access(
        *("get create patch", DEVICE_GROUP, DEVICE_PLURAL, {Duty.KOORDINATOR}),
        "Koordinator's Device object",
    ),
    *_access(
        *("get create patch", "", "configmaps", {Duty.ACK}),
        "arena's picture of the node, and marks of faulty GPUs",
        namespace="kube-system",
    ),
    *_access(
        *("get", "", "nodes", {Duty.CGROUP}),
        "what pods ask, from kubelet, which before 1.33 wants nodes/proxy",
        subresource="pods",
    ),
)


def needed(duties: Set[Duty]) -> tuple[Access, ...]:
    """What an agent with these duties needs, in the order of ACCESS."""
    return tuple(access for access in ACCESS if access.duties & duties)
