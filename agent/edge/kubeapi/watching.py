"""The objects of one list, kept up to date by one thread.

Source: Kubernetes API concepts, "Efficient detection of changes": list, then watch from the
resourceVersion of the list; after the end of a watch, watch on from the last version seen; after
410, list anew.
"""

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from types import MappingProxyType
from typing import Final, Generic, TypeVar

from agent import log
from agent.core.backoff import doubled_s
from agent.core.strict_json import Object, printable
from agent.edge.kubeapi.client import Api, Query
from agent.errors import KubeApiError

_PAGE: Final = 100
_MOST_PAGES: Final = 1_000
_FIRST_S: Final = 0.5
_LONGEST_S: Final = 30.0
_LIVED_S: Final = 5.0
"""A watch that ends sooner did not work."""
_WATCH_S: Final = (240, 360)
"""How long the API server is asked to go on; drawn anew each time, as all nodes watch."""
_SLACK_S: Final = 30.0
"""Silence after that is taken for a dead connection."""
_CLOSE_S: Final = 1.0
_CHANGES: Final = frozenset({"ADDED", "MODIFIED", "DELETED"})
_RESUMABLE: Final = frozenset({401, 403, 429})
"""Refusals after which a watch can go on where it was, beside those from 500 on."""

T = TypeVar("T")


class Watch(Generic[T]):
    """Keeps what `trim` makes of each object of a list; None leaves the object out.

    `on_change` is called by the watch's thread after `objects` changed, once for all that came
    together. Nothing is called once `close` has returned, save what was under way for longer than
    it waits.
    """

    objects: Mapping[str, T] | None
    """By uid. None until it was listed; replaced as a whole; kept while the server is away."""

    def __init__(
        self,
        api: Api,
        path: str,
        query: Mapping[str, str],
        trim: Callable[[Object], T | None],
        on_change: Callable[[], None],
    ) -> None:
        self.objects = None
        self._problem = ""
        self._api = api.twin()
        self._path = path
        self._query = query
        self._trim = trim
        self._on_change = on_change
        self._closed = threading.Event()
        self._version = ""
        self._opened_s = 0.0
        self._failures = 0
        self._cut_short = 0
        self._thread = threading.Thread(target=self._run, name=f"watch {path}", daemon=True)
        self._thread.start()

    @property
    def problem(self) -> str:
        """A sentence while it cannot list or watch, else empty."""
        return "" if self._lived() else self._problem

    def close(self) -> None:
        """Ends it, within a second. From any thread."""
        self._closed.set()
        self._api.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_S)

    # --- its thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed.is_set():
            self._opened_s = 0.0
            try:
                self._follow()
                error = None
            except KubeApiError as reason:
                error = reason
            except Exception as bug:
                log.crash(f"watch crashed path={self._path}")
                error = KubeApiError(f"{self._path}: the watch crashed: {bug!r:.200}")
            if not self._closed.is_set():
                self._closed.wait(self._judge(error))

    def _follow(self) -> None:
        """From where it was, or from a new list, to the end of a watch. Raises KubeApiError."""
        if not self._version:
            self._list()
        seconds = random.randint(*_WATCH_S)
        query: Query = {
            **self._query,
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": seconds,
        }
        with closing(self._api.batches(self._path, query, seconds + _SLACK_S)) as batches:
            self._opened_s = time.monotonic()
            if self._cut_short < 2:
                self._problem = ""
            for events in batches:
                self._take(events)
        if not self._lived():
            raise self._error("the API server ends the watch at once")

    def _lived(self) -> bool:
        return self._opened_s > 0.0 and time.monotonic() - self._opened_s >= _LIVED_S

    def _judge(self, error: KubeApiError | None) -> float:
        """Draws conclusions from the end of a watch; seconds until the next one.

        One that was opened may break; it is a problem if that happens again at once.
        """
        lived, opened = self._lived(), self._opened_s > 0.0
        self._problem = "" if lived else self._problem
        self._failures = 0 if lived else self._failures + 1
        self._cut_short = self._cut_short + 1 if opened and not lived else 0
        if error:
            is_expected = opened or error.status == 410
            if not is_expected or self._failures > 1:
                self._problem = str(error)
            if self._cut_short > 1 or not _is_resumable(error.status):
                self._version = ""
        wait_s = doubled_s(max(0, self._failures - 1), _FIRST_S, _LONGEST_S)
        return wait_s * random.uniform(0.5, 1.0)

    # --- the list ---------------------------------------------------------------------------------

    def _list(self) -> None:
        """Raises KubeApiError; then everything stays as it was."""
        objects: dict[str, T] = {}
        version = ""
        for page in self._pages():
            version = version or _text(page.get("metadata"), "resourceVersion")
            items = page.get("items", "")
            if not version or not (items is None or isinstance(items, list)):
                raise self._error("the answer is no list")
            for item in items or ():
                self._put(objects, _key(item), item)
        self._version = version
        self._publish(objects)

    def _pages(self) -> Iterator[Object]:
        query: dict[str, str | int] = {**self._query, "limit": _PAGE}
        for _ in range(_MOST_PAGES):
            page = self._api.get(self._path, **query)
            yield page
            query["continue"] = _text(page.get("metadata"), "continue")
            if not query["continue"]:
                return
        raise self._error(f"the list has no end after {_MOST_PAGES:,} pages")

    # --- events -----------------------------------------------------------------------------------

    def _take(self, events: Iterable[Object]) -> None:
        """Raises KubeApiError for an event after which nothing can be relied on."""
        objects = dict(self.objects or {})
        for event in events:
            kind, thing = _text(event, "type"), event.get("object")
            if kind == "ERROR":
                raise self._refused(thing)
            if kind not in _CHANGES and kind != "BOOKMARK":
                continue
            metadata = thing.get("metadata") if isinstance(thing, dict) else None
            version, key = _text(metadata, "resourceVersion"), _key(thing)
            if not version or not (key or kind == "BOOKMARK"):
                raise self._lost("an event of the watch makes no sense")
            if kind == "DELETED":
                objects.pop(key, None)
            elif kind != "BOOKMARK":
                self._put(objects, key, thing)
            self._version = version
        self._publish(objects)

    def _put(self, objects: dict[str, T], key: str, thing: object) -> None:
        if not key or not isinstance(thing, dict):
            return
        try:
            value = self._trim(thing)
        except Exception:
            log.crash(f"object not understood path={self._path}")
            value = None
        objects.pop(key, None)
        if value is not None:
            objects[key] = value

    def _publish(self, objects: dict[str, T]) -> None:
        if objects == self.objects or self._closed.is_set():
            return
        self.objects = MappingProxyType(objects)
        try:
            self._on_change()
        except Exception:
            log.crash(f"change not told path={self._path}")

    # --- errors -----------------------------------------------------------------------------------

    def _error(self, why: str) -> KubeApiError:
        return KubeApiError(f"{printable(self._api.server.url + self._path, 400)}: {why}")

    def _refused(self, status: object) -> KubeApiError:
        """For an ERROR event, which carries a Status."""
        code = status.get("code") if isinstance(status, dict) else None
        error = self._lost(
            f"the watch is refused with {code}: {printable(_text(status, 'message'), 200)}"
        )
        error.status = code if type(code) is int else None
        return error

    def _lost(self, why: str) -> KubeApiError:
        """After which it lists anew: what came in between was not taken."""
        self._version = ""
        return self._error(why)


def _is_resumable(status: int | None) -> bool:
    return status is None or status in _RESUMABLE or not 400 <= status < 500


def _key(thing: object) -> str:
    """The object's uid; empty for nonsense."""
    return _text(thing.get("metadata"), "uid") if isinstance(thing, dict) else ""


def _text(parent: object, key: str) -> str:
    value = parent.get(key) if isinstance(parent, dict) else None
    return value if isinstance(value, str) else ""
