"""Watching the GPUs of an open session: probes, Xids, and when to begin anew. In the child only.

What a driver says of a lost GPU changes, if at all, in a new session. So a session in which a GPU
was refused ends at the age of `renew_s`, and one whose driver is gone ends at once. It does not end
while a call hangs: the process could not, and the next one would hang in the same place.
"""

import ctypes
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import pynvml

from agent.core.health import Probe, Sighting, Xid
from agent.edge.nvml.child import send
from agent.edge.nvml.reading import interrogate, read_fault, read_gpu
from agent.edge.nvml.talk import RefusalError, Talk, converse, describe_silence

_EVENT_SHARE: Final = 0.95
"""By which part of the time for the reading Xids are subscribed to, if they can be at all."""

_EVENT_WAIT_MS: Final = 10_000

_DRIVER_GONE: Final = frozenset(
    {
        pynvml.NVML_ERROR_UNINITIALIZED,
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
    }
)
"""Errors of a driver that went away as a whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """`probe_s` lies between two probes of a GPU. After `silent_s`, which is longer, a call without
    an answer is a fault. `renew_s` is the age at which a session ends that saw a GPU refused.
    """

    probe_s: float = 2.0
    silent_s: float = 10.0
    renew_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Finding:
    """How a probe ended. `gone`: the driver refused to speak to the GPU; `code` is NVML's error."""

    fault: str | None
    gone: bool = False
    code: int | None = None


@dataclass(slots=True, kw_only=True)
class _Watch:
    """One GPU: its prober writes here, the main thread reads while a call may hang.

    `asked_at` is when the probe began that is under way. `unread`: the facts of the GPU are not
    known or may have changed. `stale`: the session's reading is no longer what a new one would be.
    """

    talk: Talk
    uuid: str | None
    found: _Finding
    unread: bool
    asked_at: float | None = None
    stale: bool = False


News = queue.SimpleQueue[_Watch | Xid]


def read_and_watch(library: str | None, timeout_s: float, pace: Pace, pipe: int) -> None:
    """Sends the reading, then Sightings, then a sentence on why the session ends.

    Every Xid that comes after the reading was sent is in a Sighting.
    """
    start = time.monotonic()
    reading, talks = interrogate(library, timeout_s)
    watches = [
        _Watch(
            talk=talk,
            uuid=gpu.uuid,
            found=_Finding(fault=gpu.fault),
            unread=gpu.fault != talk.facts.get("fault"),
        )
        for talk, gpu in zip(talks, reading.gpus, strict=True)
    ]
    events = _subscribe(watches, start, _EVENT_SHARE * timeout_s)
    send(pipe, reading)
    if reading.problem is None:
        send(pipe, _watch(watches, events, pace, pipe))


def _watch(watches: Sequence[_Watch], events: Any, pace: Pace, pipe: int) -> str:
    """Sends all GPUs every `probe_s`, and at once what is news; why the session ends."""
    news: News = queue.SimpleQueue()
    named = {_address(watch.talk.handle): watch.uuid for watch in watches if watch.talk.handle}
    for watch in watches:
        _start(partial(_probe_forever, watch, pace, news))
    if events is not None:
        _start(partial(_listen_forever, events, named, pace, news))
    start = time.monotonic()
    due = start + pace.probe_s
    while True:
        fresh = _gather(news, due)
        end = _why_end(watches, start, pace)
        if end or time.monotonic() >= due:
            due = time.monotonic() + pace.probe_s
            fresh = [*watches, *(item for item in fresh if isinstance(item, Xid))]
        send(pipe, _sight(fresh, pace))
        if end:
            return end


def _start(run: Callable[[], None]) -> None:
    threading.Thread(target=run, daemon=True).start()


def _gather(news: News, due: float) -> list[_Watch | Xid]:
    """All that is new; waits for something until `due`."""
    fresh: list[_Watch | Xid] = []
    try:
        fresh.append(news.get(timeout=max(0.0, due - time.monotonic())))
        while True:
            fresh.append(news.get_nowait())
    except queue.Empty:
        return fresh


def _sight(fresh: Iterable[_Watch | Xid], pace: Pace) -> Sighting:
    probes = {
        item.uuid: _look(item, item.uuid, pace)
        for item in fresh
        if isinstance(item, _Watch) and item.uuid is not None
    }
    xids = tuple(item for item in fresh if isinstance(item, Xid))
    return Sighting(probes=tuple(probes.values()), xids=xids)


def _look(watch: _Watch, uuid: str, pace: Pace) -> Probe:
    if _is_waiting(watch, pace.silent_s):
        return Probe(uuid=uuid, fault=describe_silence(watch.talk.call, pace.silent_s))
    found = watch.found
    return Probe(uuid=uuid, fault=found.fault, gone=found.gone)


def _is_waiting(watch: _Watch, patience_s: float) -> bool:
    asked_at = watch.asked_at
    return asked_at is not None and time.monotonic() - asked_at > patience_s


def _why_end(watches: Sequence[_Watch], start: float, pace: Pace) -> str | None:
    """A machine without GPUs may have some in a new session."""
    if any(_is_waiting(watch, pace.probe_s) for watch in watches):
        return None
    if watches and all(watch.found.code in _DRIVER_GONE for watch in watches):
        return f"the GPU driver went away: {watches[0].found.fault}"
    if time.monotonic() - start < pace.renew_s:
        return None
    if not watches:
        return "the GPU driver is asked anew: it listed no GPUs"
    if any(watch.stale for watch in watches):
        stale = ", ".join(str(watch.talk.index) for watch in watches if watch.stale)
        return f"the GPU driver is asked anew: a fault came or went at GPU {stale}"
    return None


# --- probing --------------------------------------------------------------------------------------


def _probe_forever(watch: _Watch, pace: Pace, news: News) -> None:
    while True:
        watch.asked_at = time.monotonic()
        found = _probe(watch)
        recovered = found.fault is None and watch.found.fault is not None
        is_news = found != watch.found or _is_waiting(watch, pace.silent_s)
        watch.stale = watch.stale or found.gone or recovered
        watch.found = found
        watch.asked_at = None
        if is_news:
            news.put(watch)
        time.sleep(pace.probe_s)


def _probe(watch: _Watch) -> _Finding:
    """A GPU that was refused is only sound when it tells all that it must, from its handle on."""
    try:
        if watch.unread:
            watch.talk = Talk(index=watch.talk.index)
            read_gpu(watch.talk)
        _ask_memory(watch.talk)
        fault = read_fault(watch.talk)
    except RefusalError as refusal:
        watch.unread = True
        if watch.found.gone and refusal.code == watch.found.code:
            return watch.found  # the same error, met at another call
        return _Finding(fault=str(refusal), gone=True, code=refusal.code)
    watch.unread = False
    return _Finding(fault=fault)


def _ask_memory(talk: Talk) -> None:
    """A cheap call that the driver cannot answer for a lost GPU; not all GPUs support it."""
    ask = talk.ask if talk.facts.get("memory_bytes") else talk.ask_optional
    ask("nvmlDeviceGetMemoryInfo", talk.handle)


# --- Xids -----------------------------------------------------------------------------------------


def _subscribe(watches: Sequence[_Watch], start: float, limit_s: float) -> Any:
    """A set of events that gets the Xids of all sound GPUs that tell of any.

    None where no GPU does, as on virtual machines, or by `limit_s` after `start`.
    """
    talk = Talk()
    talks = [
        Talk(index=watch.talk.index, handle=watch.talk.handle)
        for watch in watches
        if not watch.unread
    ]
    if not talks or converse([talk], _create_events, start, limit_s)[0]:
        return None
    refusals = converse(talks, partial(_register, talk.handle), start, limit_s)
    return None if all(refusals.values()) else talk.handle


def _create_events(talk: Talk) -> None:
    talk.handle = talk.ask("nvmlEventSetCreate")


def _register(events: Any, talk: Talk) -> None:
    talk.ask("nvmlDeviceRegisterEvents", talk.handle, pynvml.nvmlEventTypeXidCriticalError, events)


def _listen_forever(
    events: Any, named: Mapping[int | None, str | None], pace: Pace, news: News
) -> None:
    """`named` are the UUIDs of all GPUs by the address of their handles."""
    talk = Talk()
    while True:
        try:
            event = talk.ask("nvmlEventSetWait_v2", events, _EVENT_WAIT_MS)
        except RefusalError as refusal:
            if refusal.code != pynvml.NVML_ERROR_TIMEOUT:
                time.sleep(pace.probe_s)  # such an error may come back at once, for ever
            continue
        if event.eventType & pynvml.nvmlEventTypeXidCriticalError:
            news.put(Xid(uuid=named.get(_address(event.device)), code=event.eventData))


def _address(handle: Any) -> int | None:
    """Handles of one GPU point to the same place, but do not compare as equal."""
    return ctypes.cast(handle, ctypes.c_void_p).value
