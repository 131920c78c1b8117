"""Following the GPU driver: the thread that hears it, and what is known of its GPUs."""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from agent import log
from agent.core.backoff import doubled_s
from agent.core.continuity import remember
from agent.core.discovery import DriverReading
from agent.core.health import (
    HEALTHY,
    Health,
    HealthPolicy,
    Sighting,
    Xid,
    describe_xid,
    judge_all,
    see_reading,
)
from agent.edge.nvml import watch_driver

_PATIENCE = 3
"""How often in a row the driver as a whole must fail before its GPUs count as unusable."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 10.0
"""How soon a driver that failed is asked again; doubled each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What the driver has told so far; `healths` are by UUID. `failures` of the driver as a whole
    are those in a row."""

    reading: DriverReading | None = None
    healths: dict[str, Health] = field(default_factory=dict)
    failures: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverSettings:
    """`library` is empty for the one that the loader finds. `by_index`: kubelet knows GPUs so."""

    library: str
    timeout_s: float
    policy: HealthPolicy
    by_index: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """Whom to tell: that something is known that was not, whether the driver answers, each Xid."""

    on_news: Callable[[], None]
    on_answer: Callable[[bool], None]
    on_xid: Callable[[Xid], None]


class Driver:
    """Follows the driver in a thread of its own until it is closed; goes on from what is `known`,
    which is replaced whenever something changes."""

    def __init__(self, settings: DriverSettings, known: Known, listener: Listener) -> None:
        self.known = known
        self._settings = settings
        self._listener = listener
        self._stop = os.eventfd(0)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="driver", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Takes half a second at most, even if the driver hangs."""
        self._stopping.set()
        os.eventfd_write(self._stop, 1)
        self._thread.join(1.0)
        if not self._thread.is_alive():
            os.close(self._stop)

    def _follow(self) -> None:
        said = None
        while not self._stopping.is_set():
            library, timeout_s = self._settings.library or None, self._settings.timeout_s
            why = watch_driver(library, self._hear, self._stop, timeout_s=timeout_s)
            failures = self.known.failures
            if why != said and failures:
                log.warning("gpu driver", reason=why)
            said = why if failures else None
            self._stopping.wait(doubled_s(failures, _FIRST_PAUSE_S, _LONGEST_PAUSE_S))

    def _hear(self, message: DriverReading | Sighting) -> None:
        before = self.known
        if isinstance(message, Sighting):
            sighting, known = message, before
        else:
            self._listener.on_answer(message.problem is None)
            sighting, known = _take(before, message, self._settings.by_index)
        healths = judge_all(known.healths, sighting, time.monotonic(), self._settings.policy)
        self.known = Known(reading=known.reading, healths=healths, failures=known.failures)
        for xid in sighting.xids:
            log.warning("xid", gpu=xid.uuid, xid=xid.code, meaning=describe_xid(xid.code))
            self._listener.on_xid(xid)
        changed = {
            uuid: health
            for uuid, health in healths.items()
            if health.reason != before.healths.get(uuid, HEALTHY).reason
        }
        for uuid, health in changed.items():
            _log_health(uuid, health)
        if changed or known.reading is not before.reading:
            self._listener.on_news()


def _take(before: Known, reading: DriverReading, by_index: bool) -> tuple[Sighting, Known]:
    """What a reading says of the GPUs' health, and what is known then.

    A driver that fails as a whole must do so several times before that counts: it may be this
    process that cannot ask.
    """
    failures = before.failures + 1 if reading.problem else 0
    if reading.problem and before.reading and before.reading.gpus and failures < _PATIENCE:
        return Sighting(), Known(reading=before.reading, healths=before.healths, failures=failures)
    merged = remember(before.reading, reading, by_index)
    kept = before.reading if merged == before.reading else merged
    sighting = see_reading(before.healths, reading)
    return sighting, Known(reading=kept, healths=before.healths, failures=failures)


def _log_health(uuid: str, health: Health) -> None:
    if health.reason:
        log.error("gpu unhealthy", gpu=uuid, trouble=health.trouble, reason=health.reason)
    else:
        log.info("gpu healthy", gpu=uuid)
