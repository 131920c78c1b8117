"""What became of pods, as Events on them in Kubernetes.

Source: Kubernetes' core/v1 Event, with the limits that its API server checks.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from agent.core.ledger import Grant, Ledger
from agent.core.settlement import Change, ChangeKind, Settlement
from agent.core.strict_json import printable

COMPONENT: Final = "numalet"
"""Who says so."""
_LONGEST_MESSAGE: Final = 1024
"""Characters, as for other components' messages."""
_LONGEST_NAME: Final = 200
"""Characters of a pod's name in the name of its Event, which has 253 in all."""

_AGAIN_S: Final = 600.0
"""Not before this is the same said again."""
_PAUSE_S: Final = 30.0
"""Not before this is something else said of the same pod for the same reason."""
_BURST: Final = 50.0
"""Events that may be written at once: as many as a machine starts pods in a few seconds."""
_REFILL_S: Final = 2.0
"""After which there is room for one Event more."""


class Reason(StrEnum):
    """What an Event is about, for machines."""

    PINNED = "Pinned"
    MOVED = "PinMoved"
    REFUSED = "Refused"
    """It cannot be served as it asks."""
    OTHERWISE = "PlacedOtherwise"
    """Not as a scheduler decided, or not all of it."""
    IGNORED = "AnnotationIgnored"
    DRIFTED = "CpusetDrift"
    """A container was on other CPUs than its own, and was put back."""


_NORMAL: Final = (Reason.PINNED, Reason.MOVED)


@dataclass(frozen=True, slots=True, kw_only=True)
class PodEvent:
    """`pod` is "namespace/name", `uid` the one that it has on its node."""

    uid: str
    pod: str
    reason: Reason
    message: str


# --- what there is to tell ------------------------------------------------------------------------


def see_events(settlement: Settlement, names: Mapping[str, str]) -> Iterator[PodEvent]:
    """What a settlement did to pods; `names` are those of pods by uid, others are not told of."""
    for change in settlement.changes:
        if change.uid in names and (message := _describe(settlement.ledger, change)):
            moved = change.kind is ChangeKind.MOVE
            reason = Reason.MOVED if moved else Reason.PINNED
            yield PodEvent(uid=change.uid, pod=change.pod, reason=reason, message=message)
    for uid, note in settlement.notes:
        if uid in names:
            yield PodEvent(uid=uid, pod=names[uid], reason=Reason.OTHERWISE, message=note)
    for one in settlement.refused:
        if one.uid in names:
            yield PodEvent(uid=one.uid, pod=one.pod, reason=Reason.REFUSED, message=one.reason)


def _describe(ledger: Ledger, change: Change) -> str:
    """Where its containers are now; empty where none is pinned, or nothing new was done."""
    pinned = [grant for grant in change.grants if grant.cpus and grant.placed]
    if not pinned or change.kind not in (ChangeKind.GRANT, ChangeKind.MOVE):
        return ""
    return "; ".join(_describe_grant(ledger, grant) for grant in pinned)


def _describe_grant(ledger: Ledger, grant: Grant) -> str:
    layout = ledger.layout
    gpus = layout.places(grant.gpus)
    nodes = layout.ids(layout.seats_of(gpus, grant.cpus))
    parts = [f"{grant.container}: CPUs {grant.cpus} of NUMA node {nodes}"]
    if gpus:
        parts.append(f"GPUs {layout.indices(gpus)}")
    if grant.mems:
        parts.append(f"memory bound to {grant.mems}")
    return ", ".join(parts)


# --- how often ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What was told lately: (message, when) by uid and reason; `budget` Events may follow at
    once. Times are of one monotonic clock."""

    lately: Mapping[tuple[str, Reason], tuple[str, float]] = field(default_factory=dict)
    budget: float = _BURST
    counted_s: float = 0.0


def admit(told: Told, event: PodEvent, now_s: float) -> tuple[Told, bool]:
    """Whether the Event is to be told now, and what was told lately from now on."""
    budget = min(_BURST, told.budget + max(0.0, now_s - told.counted_s) / _REFILL_S)
    lately = {key: one for key, one in told.lately.items() if now_s - one[1] < _AGAIN_S}
    message, at_s = lately.get((event.uid, event.reason), (None, now_s))
    repeated = message is not None and (message == event.message or now_s - at_s < _PAUSE_S)
    admitted = not repeated and budget >= 1
    if admitted:
        budget -= 1
        lately[event.uid, event.reason] = event.message, now_s
    return Told(lately=lately, budget=budget, counted_s=now_s), admitted


def to_event(event: PodEvent, node: str, time: str) -> dict[str, Any]:
    """The Event for the API server; `time` as 2026-11-30T14:00:00Z."""
    namespace, _, name = event.pod.partition("/")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"namespace": namespace, "generateName": f"{name[:_LONGEST_NAME]}."},
        "involvedObject": {
            "apiVersion": "v1",
            "kind": "Pod",
            "namespace": namespace,
            "name": name,
            "uid": event.uid,
        },
        "reason": event.reason.value,
        "message": printable(event.message, _LONGEST_MESSAGE),
        "type": "Normal" if event.reason in _NORMAL else "Warning",
        "firstTimestamp": time,
        "lastTimestamp": time,
        "count": 1,
        "source": {"component": COMPONENT, "host": node},
        "reportingComponent": COMPONENT,
        "reportingInstance": node,
    }
