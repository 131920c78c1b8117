"""When a device plugin must listen anew or register anew with kubelet, decided from what is seen.

    LISTEN ── the socket is ours ── REGISTER ── kubelet opens its stream ── WAIT

Kubelet never retries a stream that broke, deletes all sockets when it starts, and closes the newer
of two streams when the older one ends. So whatever goes wrong leads back to a registration, one at
a time, after the old stream has ended.

Source: kubelet 1.36, pkg/kubelet/cm/devicemanager.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from agent.core.backoff import doubled_s

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
OPENING_S = 3.0
"""How long kubelet may take from a registration to opening the stream; it does so at once."""
SETTLING_S = 0.5
"""How long after the end of a stream kubelet may still be busy forgetting it."""
STEADY_S = 10.0
"""A stream this old shows that all is well: the next trouble is a new one."""

SocketId = tuple[int, int]
"""Inode and ctime in nanoseconds: two sockets at one path differ in one of them."""


class Step(StrEnum):
    """What is to be done now."""

    WAIT = "wait"
    LISTEN = "listen"
    END_STREAM = "end stream"
    REGISTER = "register"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What is seen now. `kubelet` is kubelet's socket, None if there is none. `listening` tells
    whether our socket still is where we made it. `streams` counts those open, `opened` all ever."""

    now_s: float
    kubelet: SocketId | None
    listening: bool
    streams: int
    opened: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """What was done. `tried` is the kubelet of the last attempt, `registered` that of the last
    success, None when it must be made anew. `opened` are the streams seen before it. `failures`
    count since all was well, `not_before_s` is when the next attempt may be made.

    `spent`: our socket was registered. A socket serves one registration, so that a stream that
    kubelet opens late cannot be taken for one of a later registration.
    """

    tried: SocketId | None = None
    registered: SocketId | None = None
    registered_s: float = 0.0
    opened: int = 0
    failures: int = 0
    not_before_s: float = 0.0
    streaming: bool = False
    spent: bool = False


def next_step(state: Registration, seen: Seen) -> tuple[Registration, Step]:
    """The state after what is seen, and what to do now."""
    state = _notice(state, seen)
    if seen.kubelet is None:
        return state, Step.WAIT
    if seen.listening and state.registered == seen.kubelet:
        return state, Step.WAIT
    if seen.streams:
        return state, Step.END_STREAM
    if not seen.listening:
        return replace(state, spent=False), Step.LISTEN
    if seen.now_s < state.not_before_s:
        return state, Step.WAIT
    return (replace(state, spent=False), Step.LISTEN) if state.spent else (state, Step.REGISTER)


def _notice(state: Registration, seen: Seen) -> Registration:
    """What follows from a new kubelet, from streams that opened and ended, and from silence."""
    if seen.kubelet != state.tried and seen.kubelet is not None:
        state = replace(state, tried=seen.kubelet, registered=None, failures=0, not_before_s=0.0)
    if not seen.listening:
        state = replace(state, registered=None)
    if seen.streams:
        steady = seen.now_s - state.registered_s >= STEADY_S
        return replace(state, streaming=True, failures=0 if steady else state.failures)
    if state.streaming:
        return _lost(replace(state, streaming=False), seen, SETTLING_S)
    waited = seen.now_s - state.registered_s
    if state.registered and (seen.opened > state.opened or waited >= OPENING_S):
        return _lost(state, seen, SETTLING_S if seen.opened > state.opened else 0.0)
    return state


def _lost(state: Registration, seen: Seen, at_least_s: float) -> Registration:
    pause = max(at_least_s, pause_s(state.failures) if state.registered else 0.0)
    failures = state.failures + (1 if state.registered else 0)
    return replace(state, registered=None, failures=failures, not_before_s=seen.now_s + pause)


def after_attempt(
    state: Registration, seen: Seen, now_s: float, ok: bool, jitter: float
) -> Registration:
    """The state after a registration that kubelet `seen` accepted or not; `jitter` is 0 to 1."""
    if ok:
        return replace(
            state, registered=seen.kubelet, registered_s=now_s, opened=seen.opened, spent=True
        )
    pause = pause_s(state.failures) * (0.5 + jitter / 2)
    return replace(state, failures=state.failures + 1, not_before_s=now_s + pause)


def pause_s(failures: int) -> float:
    """How long to wait after so many failures in a row, without jitter: doubled each time."""
    return doubled_s(failures, FIRST_PAUSE_S, LONGEST_PAUSE_S)
