"""What the API server answers: bodies, bounded, and refusals; here foreign errors end."""

import http.client
import json
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from urllib3 import BaseHTTPResponse
from urllib3.exceptions import (
    ConnectTimeoutError,
    HTTPError,
    NewConnectionError,
    ReadTimeoutError,
    SSLError,
)

from agent.core.strict_json import Object, printable
from agent.errors import KubeApiError

_LARGEST: Final = 64 << 20
"""Bytes of an answer."""
_LARGEST_REFUSAL: Final = 256 << 10
_LARGEST_EVENT: Final = 4 << 20
"""Bytes of a watch's line. The API server takes no object of more than about 1.5 MiB."""
_PART: Final = 64 << 10
_MESSAGE_LENGTH: Final = 200


class RefusalError(KubeApiError):
    """An answer that is no success. `missing` is the name of the object that there is not, empty
    where it is its kind that is not served."""

    def __init__(self, sentence: str, status: int, missing: str) -> None:
        super().__init__(sentence, status)
        self.missing = missing


@contextmanager
def translated(where: str, timeout_s: float) -> Iterator[None]:
    """Raises KubeApiError for whatever urllib3 and what is below it raise."""
    try:
        yield
    except (HTTPError, http.client.HTTPException, OSError, ValueError, RecursionError) as error:
        raise KubeApiError(f"{where}: {_reason(error, timeout_s)}") from error


def _reason(error: Exception, timeout_s: float) -> str:
    """urllib3's errors first: some are ValueErrors too, and one that nobody listens is a timeout
    to it."""
    is_timeout = isinstance(error, ConnectTimeoutError | ReadTimeoutError | TimeoutError)
    if is_timeout and not isinstance(error, NewConnectionError):
        return f"no answer within {timeout_s:g} s"
    if isinstance(error, SSLError):
        return _tls_reason(error.args[0] if error.args else error)
    if isinstance(error, HTTPError | http.client.HTTPException):
        return f"the API server cannot be asked: {_innermost(error)}"
    if isinstance(error, OSError):
        file = f"{printable(str(error.filename), 400)}: " if error.filename else ""
        return f"the API server cannot be asked: {file}{error.strerror or error}"
    if isinstance(error, RecursionError):
        return "the answer is nested too deeply"
    return printable(str(error), 600)


def _tls_reason(error: object) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        why = error.verify_message
        return f"the certificate of the API server is not trusted: {printable(why, 200)}"
    return f"no TLS with the API server: {printable(str(error), 200)}"


def _innermost(error: BaseException) -> str:
    """What was at the bottom of it: the kernel's words where there are any."""
    below = error.__cause__ or (error.args[-1] if error.args else None)
    if isinstance(below, BaseException):
        return _innermost(below)
    if isinstance(error, http.client.IncompleteRead):
        return "the connection broke in the middle of the answer"
    text = error.strerror if isinstance(error, OSError) else ""
    return printable(text or str(error) or type(error).__name__, 200)


# --- one object -----------------------------------------------------------------------------------


def read_object(response: BaseHTTPResponse, deadline_s: float) -> Object:
    """The JSON object of a success. Raises ValueError with a sentence, and what urllib3 does."""
    check_json(response)
    return _to_object(_read(response, _LARGEST, deadline_s))


def check_json(response: BaseHTTPResponse) -> None:
    """Raises ValueError with a sentence."""
    kind = response.headers.get("Content-Type", "nothing")
    if kind.partition(";")[0].strip().lower() != "application/json":
        raise ValueError(f"the answer is {printable(kind, 60)}, not JSON")
    if response.headers.get("Content-Encoding", "identity") != "identity":
        raise ValueError("the answer is compressed, which was not asked for")


def _read(response: BaseHTTPResponse, largest: int, deadline_s: float) -> bytearray:
    body = bytearray()
    while part := response.read1(_PART):
        body += part
        if len(body) > largest:
            raise ValueError(f"the answer is larger than {largest >> 10:,} KiB")
        if time.monotonic() > deadline_s:
            raise TimeoutError
    return body


def _to_object(text: bytearray) -> Object:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ValueError(f"the answer is not JSON: {printable(str(error), 100)}") from None
    if not isinstance(data, dict):
        raise ValueError("the answer is JSON, but no object")
    return data


# --- the events of a watch ------------------------------------------------------------------------


def read_events(response: BaseHTTPResponse) -> Iterator[list[Object]]:
    """Those that came together, one list after the other, until the API server ends it.

    Raises ValueError with a sentence, and what urllib3 does.
    """
    rest = bytearray()
    while part := response.read1(_PART):
        rest += part
        if b"\n" in part:
            *lines, rest = rest.split(b"\n")
            yield [_to_object(line) for line in lines if line.strip()]
        if len(rest) > _LARGEST_EVENT:
            raise ValueError(f"an event is larger than {_LARGEST_EVENT >> 10:,} KiB")
    if rest.strip():
        yield [_to_object(rest)]


# --- refusals -------------------------------------------------------------------------------------


def to_refusal(
    response: BaseHTTPResponse, where: str, method: str, deadline_s: float
) -> RefusalError:
    """What an answer that is no success says. Its body matters little: whatever fails in it is
    passed over."""
    status = response.status
    try:
        body = _read(response, _LARGEST_REFUSAL, deadline_s)
    except (HTTPError, http.client.HTTPException, OSError, ValueError):
        body = bytearray()
    message, missing = _read_status(response, body)
    said = f": {message}" if message else ""
    if 300 <= status < 400:
        said = ": a redirection, which is not followed"
    return RefusalError(f"{where}: {method} is refused with {status}{said}", status, missing)


def _read_status(response: BaseHTTPResponse, body: bytearray) -> tuple[str, str]:
    """The message of a refusal, and the name of the object that is missing.

    Source: Kubernetes, meta/v1 Status. What is not served is answered with a plain text.
    """
    kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    try:
        status = _to_object(body)
        details = status.get("details")
    except (ValueError, RecursionError):
        text = body.decode(errors="replace").strip() if kind == "text/plain" else ""
        return _plain(text or response.reason or ""), ""
    name = details.get("name") if isinstance(details, dict) else None
    message = status.get("message")
    return (
        _plain(message if isinstance(message, str) else response.reason or ""),
        name if isinstance(name, str) else "",
    )


def _plain(text: str) -> str:
    return printable(" ".join(text.split()), _MESSAGE_LENGTH)
