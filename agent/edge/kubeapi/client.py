"""Calls of the Kubernetes API, with JSON in and out.

Source: Kubernetes API conventions; the writer's name (`fieldManager`) is what tells whose a field
is.
"""

import json
import time
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlencode

from urllib3 import BaseHTTPResponse

from agent.core.strict_json import Object, printable
from agent.edge.kubeapi.answers import check_json, read_events, read_object, to_refusal, translated
from agent.edge.kubeapi.server import Credentials, Server
from agent.edge.kubeapi.sockets import Sockets, bear_silence

MANAGER: Final = "numalet"
_JSON: Final = "application/json"
_MERGE_PATCH: Final = "application/merge-patch+json"
_APPLY_PATCH: Final = "application/apply-patch+yaml"
"""JSON is YAML; this is the one type that every API server knows for it."""
_SILENCE_S: Final = 390.0

Query = Mapping[str, str | int | bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    where: str
    """The URL, for people."""
    method: str
    target: str
    body: bytes | None
    content_type: str


class Api:
    """One API server. For any thread; a call takes about `timeout_s` at most.

    All raise KubeApiError with one sentence that names the URL, and with the HTTP status if there
    was an answer. `path` is that of the URL; what in it comes from elsewhere must be quoted.
    """

    def __init__(
        self, server: Server, timeout_s: float = 10.0, credentials: Credentials | None = None
    ) -> None:
        self.server = server
        self.timeout_s = timeout_s
        self._credentials = credentials or Credentials(server)
        self._sockets = Sockets(server.url, self._credentials)

    def twin(self) -> "Api":
        """The same server over connections of its own, to be closed for itself."""
        return Api(self.server, self.timeout_s, self._credentials)

    def close(self) -> None:
        """Ends what is under way, in any thread; every call fails from now on."""
        self._sockets.close()

    def get(self, path: str, **query: str | int | bool) -> Object:
        return self._call(self._request("GET", path, query))

    def post(self, path: str, body: Object, **query: str | int | bool) -> Object:
        return self._call(self._request("POST", path, _signed(query), body))

    def put(self, path: str, body: Object, **query: str | int | bool) -> Object:
        """With a resourceVersion in the body: status 409 if the object is another one by now."""
        return self._call(self._request("PUT", path, _signed(query), body))

    def merge_patch(self, path: str, body: Object) -> Object:
        """Lists are replaced as a whole, null takes away. Source: RFC 7386."""
        return self._call(self._request("PATCH", path, _signed({}), body, _MERGE_PATCH))

    def apply(self, path: str, body: Object, force: bool = True) -> Object:
        """Server-side apply: makes the object if there is none. Unless forced, status 409 where a
        field is another writer's and would change."""
        query = _signed({"force": force})
        return self._call(self._request("PATCH", path, query, body, _APPLY_PATCH))

    def stream(self, path: str, query: Query, silence_s: float = _SILENCE_S) -> Iterator[Object]:
        """The events of a watch, which is open when this returns, until the API server ends it.

        So much silence is taken for a dead connection.
        """
        return (event for events in self.batches(path, query, silence_s) for event in events)

    def batches(
        self, path: str, query: Query, silence_s: float = _SILENCE_S
    ) -> Generator[list[Object], None, None]:
        """The same, those that came together in one list."""
        request = self._request("GET", path, {**query, "watch": True})
        with translated(request.where, self.timeout_s):
            response = self._open(request, time.monotonic() + self.timeout_s)
            check_json(response)
            bear_silence(response, silence_s)
        return _follow(response, request.where, silence_s)

    # --- one call ---------------------------------------------------------------------------------

    def _request(
        self,
        method: str,
        path: str,
        query: Query,
        body: Object | None = None,
        content_type: str = _JSON,
    ) -> _Request:
        words = {key: _to_word(value) for key, value in query.items()}
        return _Request(
            where=printable(self.server.url + path, 400),
            method=method,
            target=f"{path}?{urlencode(words, errors='replace')}" if words else path,
            body=None if body is None else _encode(body),
            content_type=content_type,
        )

    def _call(self, request: _Request) -> Object:
        deadline_s = time.monotonic() + self.timeout_s
        with (
            translated(request.where, self.timeout_s),
            self._open(request, deadline_s) as response,
        ):
            return read_object(response, deadline_s)

    def _open(self, request: _Request, deadline_s: float) -> BaseHTTPResponse:
        """A success. What may have been refused for a moment only is tried once more."""
        response = self._send(request, deadline_s)
        wait_s = _wait_s(request, response)
        if response.status == 401 or wait_s is not None:
            response.close()
            if response.status == 401:
                self._credentials.doubt_token()
            self._sockets.closed.wait(wait_s or 0.0)
            response = self._send(request, deadline_s)
        if not 200 <= response.status < 300:
            with response:
                raise to_refusal(response, request.where, request.method, deadline_s)
        return response

    def _send(self, request: _Request, deadline_s: float) -> BaseHTTPResponse:
        headers = {"Accept": _JSON, "User-Agent": MANAGER}
        if token := self._credentials.token():
            headers["Authorization"] = f"Bearer {token}"
        if request.body is not None:
            headers["Content-Type"] = request.content_type
        left_s = max(0.001, deadline_s - time.monotonic())
        return self._sockets.send(request.method, request.target, headers, request.body, left_s)


def _follow(
    response: BaseHTTPResponse, where: str, silence_s: float
) -> Generator[list[Object], None, None]:
    with translated(where, silence_s), response:
        yield from read_events(response)


def _wait_s(request: _Request, response: BaseHTTPResponse) -> int | None:
    """How long the API server asks to wait before this call; None if it does not, or too long."""
    asked = response.headers.get("Retry-After", "")
    if request.method != "GET" or response.status not in (429, 503):
        return None
    return int(asked) if asked in ("0", "1") else None


def _signed(query: Query) -> Query:
    return {"fieldManager": MANAGER, **query}


def _to_word(value: str | int | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _encode(body: Object) -> bytes:
    """Not in ASCII: as YAML, a pair of surrogates could not be escaped."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
