"""What a server answers, and all that can go wrong with it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agent.fakes.apiserver.fields import Object
from agent.fakes.apiserver.store import StatusError


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    content_type: str = "application/json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens to an answer, the real one if `answer` is None.

    `cut_after` and `hang_after` are bytes of the body, after which the connection ends, or nothing
    comes any more; -1 is before anything. `pause_s` is waited for between pieces of `piece_bytes`.
    A `chunked` answer has no length, as a watch. The real answer to a watch can only be kept back
    (-1); for the rest of what watches can meet there is `events`.
    """

    answer: Answer | None = None
    cut_after: int | None = None
    hang_after: int | None = None
    pause_s: float = 0.0
    piece_bytes: int = 1 << 16
    chunked: bool = False


def refuse(status: int, retry_after_s: int | None = None, message: str = "not now") -> Fault:
    """A Status object."""
    reasons = {410: "Expired", 429: "TooManyRequests", 503: "ServiceUnavailable"}
    body = StatusError(status, reasons.get(status, "InternalError"), message).status
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return say(json.dumps(body), status, headers=headers)


def say(
    body: str | bytes,
    status: int = 200,
    content_type: str = "application/json",
    headers: Mapping[str, str] | None = None,
    **how: Any,
) -> Fault:
    """Anything at all."""
    raw = body.encode() if isinstance(body, str) else body
    answer = Answer(status=status, body=raw, headers=headers or {}, content_type=content_type)
    return Fault(answer=answer, **how)


def hang() -> Fault:
    """No answer, while the connection stays."""
    return Fault(hang_after=-1)


def disconnect() -> Fault:
    """The connection ends without an answer."""
    return Fault(cut_after=-1)


def cut(after: int) -> Fault:
    """The real answer, whose body ends too early."""
    return Fault(cut_after=after)


def slow(pause_s: float, piece_bytes: int = 1) -> Fault:
    """The real answer, piece by piece."""
    return Fault(pause_s=pause_s, piece_bytes=piece_bytes)


def events(*lines: object, **how: Any) -> Fault:
    """A watch that tells these (bytes and texts as they are) and ends."""
    told = [to_line(line) for line in lines]
    return say(b"".join(told), chunked=True, **how)


def watch_error(status: int, reason: str, message: str) -> Object:
    """An event for `events`."""
    return {"type": "ERROR", "object": StatusError(status, reason, message).status}


def to_line(line: object) -> bytes:
    if isinstance(line, bytes | str):
        return line.encode() if isinstance(line, str) else line
    return json.dumps(line).encode() + b"\n"
