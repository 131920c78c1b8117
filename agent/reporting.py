"""Telling the cluster: a thread that makes the objects in the API server follow what is said.

Each object is a duty of its own: one that is refused, or whose kind does not exist, is tried again
later and stops nothing else. Nothing is written unless it would change something.
"""

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from queue import Empty, SimpleQueue
from typing import Final, TypeVar

from agent import log
from agent.core import ack
from agent.core.backoff import doubled_s
from agent.core.health import FaultMarks
from agent.core.podevents import PodEvent, Told, admit, to_event
from agent.core.podspecs import trim_pod, uid_of
from agent.core.report import GROUP, PLURAL, VERSION, is_foreign, merge, shows
from agent.core.strict_json import Object
from agent.edge.kubeapi import (
    Api,
    Server,
    Watch,
    apply_config_map,
    apply_device,
    apply_topology,
    create_event,
    label_node,
    owner_of,
    read_config_map,
    read_device,
    read_marks,
    read_node,
    read_topology,
    replace_topology,
    untaint_node,
)
from agent.edge.status import Metrics
from agent.errors import KubeApiError
from agent.saying import Saying
from agent.troubles import Troubles

_T = TypeVar("_T")

_GAP_S: Final = 1.0
"""Between two writes of one object: many changes are written as one."""
_JITTER_S: Final = 0.3
"""At most so much later: the nodes of a cluster do not write in step."""
_CHECK_S: Final = 300.0
"""How often objects that are not watched are compared with what they should be."""
_MARKS_S: Final = 60.0
_FIRST_PAUSE_S: Final = 1.0
_LONGEST_PAUSE_S: Final = 30.0
_MOST_EVENTS: Final = 200
"""Kept for a while in which the API server does not answer; the oldest ones go."""
_CLOSE_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSettings:
    """Whom to tell, as which node. `taint` is the key of the one to be removed, or empty."""

    server: Server
    node: str
    ack: bool
    taint: str


@dataclass(slots=True, kw_only=True)
class _Duty:
    """What is done when it is due, at the latest `period_s` after it was done last. Times are of
    the monotonic clock."""

    act: Callable[[], object]
    period_s: float = _CHECK_S
    due_s: float = 0.0
    done_s: float = float("-inf")
    failures: int = 0

    def hurry(self, now_s: float) -> None:
        """It is due, unless it was done just now or fails."""
        if not self.failures:
            soon_s = max(now_s, self.done_s + _GAP_S) + random.uniform(0, _JITTER_S)
            self.due_s = min(self.due_s, soon_s)

    def done(self, now_s: float) -> None:
        self.failures, self.done_s = 0, now_s
        self.due_s = now_s + self.period_s * random.uniform(0.9, 1.1)

    def failed(self, now_s: float) -> None:
        pause_s = doubled_s(self.failures, _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        self.failures += 1
        self.due_s = now_s + pause_s * random.uniform(0.5, 1)


class Reporter:
    """Writes from its own thread until it is closed. `ring` is called when something is new that
    the API server tells."""

    def __init__(
        self, settings: ReportSettings, metrics: Metrics, ring: Callable[[], None]
    ) -> None:
        self._settings = settings
        self._metrics = metrics
        self._ring = ring
        self._troubles = Troubles(metrics.failed)
        self._api = Api(settings.server)
        self._bell: SimpleQueue[str] = SimpleQueue()  # names of duties; empty to end
        self._closing = False
        self._saying: Saying | None = None
        self._owner: tuple[Object, ...] = ()
        self._written: tuple[object, Object] | None = None
        """What the watch had seen when we wrote last, and what we wrote."""
        self._events: deque[tuple[PodEvent, str]] = deque(maxlen=_MOST_EVENTS)
        self._told, self._telling = Told(), threading.Lock()
        self._seen: tuple[object, Mapping[str, object]] = None, {}
        self.marks = FaultMarks()
        self._found: dict[str, FaultMarks] = {}
        self._duties = {
            "node": _Duty(act=self._look_at_node),
            "labels": _Duty(act=self._write_labels),
            "topology": _Duty(act=self._write_topology),
            "arena": _Duty(act=self._write_arena),
            "device": _Duty(act=self._write_device),
            "marks": _Duty(act=self._read_marks, period_s=_MARKS_S),
            "events": _Duty(act=self._write_events),
            "watches": _Duty(act=self._look_at_watches, period_s=_LONGEST_PAUSE_S),
        }
        node = settings.node
        self._pods = Watch(
            *(self._api, "/api/v1/pods", {"fieldSelector": f"spec.nodeName={node}"}),
            *(trim_pod, ring),
        )
        self._topologies = Watch(
            *(self._api, f"/apis/{GROUP}/{VERSION}/{PLURAL}"),
            *({"fieldSelector": f"metadata.name={node}"}, dict),
            lambda: self._bell.put("topology"),
        )
        self._thread = threading.Thread(target=self._follow, name="report", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """At once as a rule; three seconds at most."""
        self._closing = True
        self._bell.put("")
        self._api.close()
        self._pods.close()
        self._topologies.close()
        self._thread.join(_CLOSE_S)

    # --- for the pass -----------------------------------------------------------------------------

    @property
    def pods(self) -> Mapping[str, object] | None:
        """This node's pods by uid, as `trim_pod` leaves them; None while they are not known."""
        objects = self._pods.objects
        if objects is None:
            return None
        if self._seen[0] is not objects:
            by_own_uid = {uid: pod for uid, pod in objects.items() if uid_of(pod) == uid}
            self._seen = objects, {uid_of(pod): pod for pod in objects.values()} | by_own_uid
        return self._seen[1]

    def say(self, saying: Saying) -> None:
        """This is what the cluster is to know from now on."""
        before, self._saying = self._saying, saying
        for name, is_new in {
            "node": before is None or before.registered != saying.registered,
            "labels": before is None or before.labels != saying.labels,
            "topology": before is None or before.topology != saying.topology,
            "arena": before is None or before.arena != saying.arena,
            "device": before is None or before.device != saying.device,
        }.items():
            if is_new:
                self._bell.put(name)

    def tell(self, events: Sequence[PodEvent]) -> None:
        """These happened now. May be called by any thread, and takes no time."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        with self._telling:
            for event in events:
                self._told, admitted = admit(self._told, event, time.monotonic())
                if not admitted or len(self._events) == _MOST_EVENTS:
                    self._metrics.told("dropped")  # this one, or the oldest
                if admitted:
                    self._events.append((event, now))
        if events:
            self._bell.put("events")

    # --- the thread -------------------------------------------------------------------------------

    def _follow(self) -> None:
        while not self._closing:
            for name, duty in self._duties.items():
                if duty.due_s <= time.monotonic() and not self._closing:
                    self._do(name, duty)
            for name in self._rung(min(duty.due_s for duty in self._duties.values())):
                if name:
                    self._duties[name].hurry(time.monotonic())

    def _rung(self, until_s: float) -> Iterator[str]:
        """What rings until then, and with it what has rung already."""
        try:
            yield self._bell.get(timeout=max(0.0, until_s - time.monotonic()))
            while True:
                yield self._bell.get_nowait()
        except Empty:
            return

    def _do(self, name: str, duty: _Duty) -> None:
        try:
            duty.act()
        except KubeApiError as error:
            duty.failed(time.monotonic())
            self._metrics.failed(type(error).__name__)
            self._metrics.api(error.status is not None)
            self._troubles.tell(f"api server, {name}", str(error))
        except Exception:  # a bug in one duty must not end the others
            duty.failed(time.monotonic())
            log.crash(f"api server, {name}")
        else:
            duty.done(time.monotonic())
            self._troubles.tell(f"api server, {name}", "")

    def _write(self, kind: str, write: Callable[[], _T]) -> _T:
        try:
            written = write()
        except KubeApiError:
            self._metrics.reported(kind, "failed")
            raise
        self._metrics.api(True)
        self._metrics.reported(kind, "ok")
        return written

    # --- duties -----------------------------------------------------------------------------------

    def _look_at_node(self) -> None:
        node = self._read_node()
        self._metrics.api(True)
        self._troubles.tell("node label", ack.check_label(node["metadata"].get("labels")) or "")
        taint = self._settings.taint if self._saying and self._saying.registered else ""
        if taint and untaint_node(self._api, node, taint):
            log.info("taint removed", taint=taint)

    def _read_node(self) -> Object:
        """The node; from now on it is the owner of what is written."""
        node = read_node(self._api, self._settings.node)
        owner = owner_of(node)
        if self._owner != (owner,):
            self._owner = (owner,)
            self._bell.put("topology")
        return node

    def _write_labels(self) -> None:
        saying = self._saying
        if saying is not None and saying.labels:
            self._write("labels", lambda: label_node(self._api, self._settings.node, saying.labels))

    def _write_topology(self) -> None:
        if self._saying is None:
            return
        current = self._current()
        if current is None:
            self._find_owner()
        ours = dict(self._saying.topology)
        ours["metadata"] = {**ours["metadata"], "ownerReferences": list(self._owner)}
        if current is not None and is_foreign(current):
            self._merge(current, ours)
        elif not shows(current, ours):
            self._troubles.tell("report", "")
            self._write_object(lambda: apply_topology(self._api, ours))

    def _find_owner(self) -> None:
        """Before an object is made: what belongs to a node that is gone is removed at once. Raises
        KubeApiError if there is no node."""
        try:
            self._read_node()
        except KubeApiError as error:
            if error.status != 403:
                raise

    def _current(self) -> Object | None:
        """The object as it was last: the watch may not have heard yet of what we wrote."""
        objects = self._topologies.objects
        if objects is None:
            return read_topology(self._api, self._settings.node)
        seen = next(iter(objects.values()), None)
        if self._written is None:
            return seen
        before, ours = self._written
        is_older = seen is not None and _version(seen) < _version(ours)
        return ours if objects is before or is_older else seen

    def _merge(self, current: Object, ours: Object) -> None:
        """Puts our part into an object that somebody else writes, if nobody was faster."""
        sentence = "another reporter owns this node's NodeResourceTopology; ours is merged into it"
        self._troubles.tell("report", sentence)
        merged = merge(current, ours)
        if merged == current:
            return
        try:
            self._write_object(lambda: replace_topology(self._api, merged))
        except KubeApiError as error:
            newer = read_topology(self._api, self._settings.node) if error.status == 409 else None
            if newer is None:
                raise
            merged = merge(newer, ours)
            self._write_object(lambda: replace_topology(self._api, merged))

    def _write_object(self, write: Callable[[], Object]) -> None:
        seen = self._topologies.objects
        self._written = seen, self._write("topology", write)

    def _write_arena(self) -> None:
        saying = self._saying
        if saying is None or (arena := saying.arena) is None:
            return
        metadata = arena["metadata"]
        current = read_config_map(self._api, metadata["namespace"], metadata["name"])
        if not shows(current, arena):
            self._write("configmap", lambda: apply_config_map(self._api, arena))

    def _write_device(self) -> None:
        saying = self._saying
        if saying is None or (device := saying.device) is None:
            return
        owned = {**device, "metadata": {**device["metadata"], "ownerReferences": list(self._owner)}}
        if not shows(read_device(self._api, device["apiVersion"], self._settings.node), owned):
            self._write("device", lambda: apply_device(self._api, owned))

    def _look_at_watches(self) -> None:
        self._troubles.tell("watch of pods", self._pods.problem)
        self._troubles.tell("watch of the report", self._topologies.problem)
        if not self._pods.problem and self._pods.objects is not None:
            self._metrics.api(True)

    def _read_marks(self) -> None:
        if not self._settings.ack:
            return
        found, problem = read_marks(self._api, self._settings.node)
        self._metrics.api(True)
        self._troubles.tell("fault marks", problem)
        self._found |= found  # of what cannot be understood, what was there before
        marks = FaultMarks(
            indices=frozenset[int]().union(*(one.indices for one in self._found.values())),
            uuids=frozenset[str]().union(*(one.uuids for one in self._found.values())),
        )
        if marks != self.marks:
            self.marks = marks
            self._ring()

    def _write_events(self) -> None:
        problem = ""
        while self._events and not self._closing:
            event, when = self._events[0]
            try:
                create_event(self._api, to_event(event, self._settings.node, when))
                self._metrics.told("sent")
            except KubeApiError as error:
                if error.status == 409:
                    self._metrics.told("sent")  # before, and the answer was lost
                elif _is_final(error.status):
                    self._metrics.told("failed")
                    problem = str(error)
                else:
                    raise
            self._metrics.api(True)
            self._forget(event)
        self._troubles.tell("events that are not taken", problem)

    def _forget(self, event: PodEvent) -> None:
        """Unless it has gone already, for a newer one."""
        with self._telling:
            if self._events and self._events[0][0] is event:
                self._events.popleft()


def _is_final(status: int | None) -> bool:
    """Whether an object that was refused will never be taken."""
    return status is not None and 400 <= status < 500 and status not in (401, 408, 429)


def _version(thing: Object) -> int:
    """How new it is. Source: KEP-5504, resource versions are comparable numbers."""
    version = thing["metadata"].get("resourceVersion", "")
    return int(version) if isinstance(version, str) and version.isdecimal() else 0
