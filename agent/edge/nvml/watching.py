"""Following, in the parent, the child that watches the GPU driver."""

import signal
from collections.abc import Callable
from functools import partial
from typing import Final

from agent.core.discovery import DriverReading
from agent.core.health import Sighting, see_silence
from agent.edge.nvml.child import (
    GRACE_S,
    Child,
    NoChildError,
    Silence,
    describe_end,
    end_child,
    receive,
    start_child,
)
from agent.edge.nvml.probing import Pace, read_and_watch
from agent.edge.nvml.reading import judge_answer

Tell = Callable[[DriverReading | Sighting], None]

_FROM_OUTSIDE: Final = frozenset(
    {-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP, -signal.SIGQUIT}
)
"""Ends of a child that say nothing about GPUs."""

DEFAULT_PACE: Final = Pace()


def watch_driver(
    library: str | None,
    tell: Tell,
    stop: int,
    *,
    timeout_s: float = 30.0,
    pace: Pace = DEFAULT_PACE,
) -> str | None:
    """Tells one DriverReading, made as by `read_driver`, then Sightings of its GPUs.

    Every GPU with a UUID is in a Sighting at least every `pace.probe_s`; each change and each Xid
    is told at once. Returns a sentence when the session is over, and is then to be called again:
    after a reading with a problem, when a fault makes a new session worth while, when the child
    ends by itself or does not answer. Where that may lie in the driver, all GPUs are told as faulty
    before. Never raises for the driver's trouble.

    `stop` is a descriptor, such as an eventfd, that becomes readable to stop: then it returns None,
    within half a second though the driver hang. `tell` is called in this thread.
    """
    try:
        child = start_child(partial(read_and_watch, library, timeout_s, pace))
    except NoChildError as error:
        tell(DriverReading(problem=str(error)))
        return str(error)
    try:
        return _follow(child, tell, stop, timeout_s, pace)
    finally:
        end_child(child, 0)


def _follow(child: Child, tell: Tell, stop: int, timeout_s: float, pace: Pace) -> str | None:
    answer = receive(child, timeout_s, stop)
    if answer is Silence.STOPPED:
        return None
    status = end_child(child, GRACE_S) if answer is Silence.ENDED else None
    reading = judge_answer(answer, timeout_s, status)
    tell(reading)
    if reading.problem is not None:
        return reading.problem
    uuids = [gpu.uuid for gpu in reading.gpus if gpu.uuid is not None]
    while isinstance(news := _receive_sighting(child, stop, pace), Sighting):
        tell(news)
    if news is Silence.STOPPED:
        return None
    if isinstance(news, str):
        end_child(child, GRACE_S)
        return news
    fault, is_outside = _explain(child, news)
    if not is_outside:
        tell(see_silence(uuids, fault))
    return fault


def _receive_sighting(child: Child, stop: int, pace: Pace) -> object:
    """Asks twice: after both processes were frozen for long, the child's word is yet to come."""
    news = receive(child, pace.silent_s, stop)
    if news is Silence.LATE:
        news = receive(child, pace.silent_s / 2, stop)
    return news


def _explain(child: Child, news: object) -> tuple[str, bool]:
    """Why the child tells nothing more, and whether somebody else ended it."""
    if news is Silence.LATE:
        return "the process that watches the GPU driver does not answer", False
    status = end_child(child, GRACE_S)
    return f"the process that watches the GPU driver ended: {describe_end(status)}", (
        status in _FROM_OUTSIDE
    )
