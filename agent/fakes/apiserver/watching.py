"""The events of a watch."""

import time
from collections.abc import Callable, Iterator

from agent.fakes.apiserver.answering import authenticate, authorize
from agent.fakes.apiserver.cluster import Cluster
from agent.fakes.apiserver.fields import Object
from agent.fakes.apiserver.requests import Request
from agent.fakes.apiserver.resources import selection
from agent.fakes.apiserver.store import Change, StatusError, gone
from agent.fakes.apiserver.targets import Target, find_target, split

_LOOK_S = 0.05
"""How often a watch looks whether its client is still there."""


def watch(
    cluster: Cluster, request: Request, goes_on: Callable[[], bool]
) -> Iterator[list[Object]] | None:
    """Events that come together, none when nothing came for a while; None for what is not served.

    It ends at `timeoutSeconds`, or once `goes_on()` is false. Raises StatusError.
    """
    user, path = authenticate(cluster, request), split(request.path)
    if not path:
        return None
    authorize(user, path, "watch")
    target = find_target(cluster.resources, path)
    if not target:
        return None
    matches = selection(target.resource, request.query)
    version = request.query.get("resourceVersion") or "0"
    if not version.isdigit():
        raise StatusError(500, "", f'resourceVersion: Invalid value: "{version}"')
    return _follow(cluster, request, target, matches, int(version), goes_on)


def _follow(
    cluster: Cluster,
    request: Request,
    target: Target,
    matches: Callable[[Object], bool],
    seen: int,
    goes_on: Callable[[], bool],
) -> Iterator[list[Object]]:
    """A watch from revision 0 begins with what there is. One from before the last compaction is
    told so by an event, not by the status."""
    store = cluster.store
    deadline = time.monotonic() + float(request.query.get("timeoutSeconds") or 1e9)
    bookmarks = request.query.get("allowWatchBookmarks") in ("true", "1")
    if not seen:
        seen, found = store.select(target.resource, target.namespace, matches)
        yield [_event("ADDED", target, item) for item in found]
    elif seen < store.compacted:
        refusal = gone(f"too old resource version: {seen} ({store.compacted})")
        yield [{"type": "ERROR", "object": refusal.status}]
        return
    ended = False
    while not ended:
        ended = not goes_on() or time.monotonic() >= deadline
        changes = store.since(target.resource, seen)
        batch = [_tell(change, target, matches, bookmarks) for change in changes]
        seen = changes[-1].revision if changes else seen
        yield [event for event in batch if event]
        with store.changed:
            if not ended and goes_on() and not store.since(target.resource, seen):
                store.changed.wait(min(_LOOK_S, max(0.0, deadline - time.monotonic())))
    if bookmarks:
        yield [_bookmark(target, seen)]


def _tell(
    change: Change, target: Target, matches: Callable[[Object], bool], bookmarks: bool
) -> Object | None:
    """To a watch with a selector, an object comes and goes as it is or is not selected."""
    latest = change.new or change.old
    if not latest:
        return _bookmark(target, change.revision) if bookmarks else None
    if target.namespace not in ("", latest["metadata"].get("namespace")):
        return None
    was = bool(change.old and matches(change.old))
    if change.new and matches(change.new):
        return _event("MODIFIED" if was else "ADDED", target, change.new)
    if not change.old or not was:
        return None
    meta = change.old["metadata"] | {"resourceVersion": str(change.revision)}
    return _event("DELETED", target, change.old | {"metadata": meta})


def _event(kind: str, target: Target, item: Object) -> Object:
    return {"type": kind, "object": target.show(item)}


def _bookmark(target: Target, revision: int) -> Object:
    meta = {"resourceVersion": str(revision), "creationTimestamp": None}
    return _event("BOOKMARK", target, {"metadata": meta})
