"""What became of pods, as Events on them in Kubernetes.

Source: Kubernetes' core/v1 Event, with the limits that its API server checks.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2s
from typing import Any, Final

from agent.core.bitmap import Bitmap
from agent.core.ledger import Grant, Ledger
from agent.core.runtime import RuntimeContainer, RuntimePod, Stage
from agent.core.settlement import Settlement
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
    """`pod` is "namespace/name", `uid` the one that it has on its node. `container` is empty for
    what concerns the whole pod."""

    uid: str
    pod: str
    reason: Reason
    message: str
    container: str = ""


# --- what there is to tell ------------------------------------------------------------------------


def see_verdicts(
    settlement: Settlement, names: Mapping[str, str], known: Collection[str]
) -> Iterator[PodEvent]:
    """Who was refused, and what was not done as somebody decided, of pods with `names` by uid.

    Notes count for the `known` pods only, those whose specification was there: what is only seen
    of a pod so far may lack what the note misses.
    """
    for uid, note in settlement.notes:
        if uid in names and uid in known:
            yield PodEvent(uid=uid, pod=names[uid], reason=Reason.OTHERWISE, message=note)
    for one in settlement.refused:
        if one.uid in names:
            yield PodEvent(uid=one.uid, pod=one.pod, reason=Reason.REFUSED, message=one.reason)


Pins = Mapping[str, Bitmap]
"""The CPUs that were told of containers, by container id."""


def see_pins(
    ledger: Ledger,
    pods: Mapping[str, RuntimePod],
    containers: Iterable[RuntimeContainer],
    told: Pins,
) -> tuple[list[PodEvent], Pins]:
    """Which containers get CPUs of their own now, or others than were told; and what is told then.

    `pods` are by sandbox id. A container that has them already when it is first seen is not told
    of: it was pinned before.
    """
    events: list[PodEvent] = []
    now: dict[str, Bitmap] = {}
    for container in containers:
        pod = pods.get(container.pod_id)
        grant = ledger.pin_of(pod.uid, container.name) if pod else None
        if pod is None or grant is None or container.stage is Stage.STOPPED:
            continue
        before = told.get(container.id)
        now[container.id] = grant.cpus
        if grant.cpus == (container.cpus if before is None else before):
            continue
        reason = Reason.PINNED if before is None else Reason.MOVED
        events.append(
            PodEvent(
                uid=pod.uid,
                pod=pod.pod,
                reason=reason,
                message=_describe_grant(ledger, grant),
                container=container.name,
            )
        )
    return events, now


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
    """What was told lately: (message, when) by uid, container and reason; `budget` Events may
    follow at once. Times are of one monotonic clock."""

    lately: Mapping[tuple[str, str, Reason], tuple[str, float]] = field(default_factory=dict)
    budget: float = _BURST
    counted_s: float = 0.0


def admit(told: Told, event: PodEvent, now_s: float) -> tuple[Told, bool]:
    """Whether the Event is to be told now, and what was told lately from now on."""
    budget = min(_BURST, told.budget + max(0.0, now_s - told.counted_s) / _REFILL_S)
    lately = {about: one for about, one in told.lately.items() if now_s - one[1] < _AGAIN_S}
    key = event.uid, event.container, event.reason
    message, at_s = lately.get(key, (None, now_s))
    repeated = message is not None and (message == event.message or now_s - at_s < _PAUSE_S)
    admitted = not repeated and budget >= 1
    if admitted:
        budget -= 1
        lately[key] = event.message, now_s
    return Told(lately=lately, budget=budget, counted_s=now_s), admitted


def to_event(event: PodEvent, node: str, time: str) -> dict[str, Any]:
    """The Event for the API server; `time` as 2026-11-30T14:00:00Z. The same has the same name, so
    that it is not written twice where the answer was lost."""
    namespace, _, name = event.pod.partition("/")
    what = "\0".join((event.uid, event.container, event.reason, event.message, time))
    number = blake2s(what.encode(errors="replace"), digest_size=8).hexdigest()
    prefix = name[:_LONGEST_NAME].rstrip("-.")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"namespace": namespace, "name": f"{prefix}.{number}"},
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
