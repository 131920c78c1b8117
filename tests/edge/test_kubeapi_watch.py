"""agent.edge.kubeapi's Watch against a fake API server, and against watches that go wrong."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from agent.edge.kubeapi import Api, Server, Watch, answers, watching
from agent.fakes.apiserver import (
    FakeApiServer,
    Fault,
    Request,
    Rule,
    User,
    cut,
    disconnect,
    events,
    hang,
    refuse,
    say,
    slow,
    watch_error,
)

PATIENCE_S = 20.0
PODS = "/api/v1/pods"
MINE = {"fieldSelector": "spec.nodeName=n1"}
Trim = Callable[[dict[str, Any]], Any]


def pod(name: str, node: str = "n1", **meta: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "uid": f"u-{name}", **meta}, "spec": {"nodeName": node}}


def event(kind: str, name: str, version: str = "1000") -> dict[str, Any]:
    return {"type": kind, "object": pod(name, resourceVersion=version)}


def name_and_label(item: dict[str, Any]) -> tuple[str, str]:
    meta = item["metadata"]
    return meta["name"], meta.get("labels", {}).get("a", "")


def is_list(request: Request) -> bool:
    return not request.is_watch


def is_watch(request: Request) -> bool:
    return request.is_watch


@pytest.fixture
def server() -> Iterator[FakeApiServer]:
    with FakeApiServer() as server:
        yield server


@pytest.fixture
def api(server: FakeApiServer, tmp_path: Path) -> Iterator[Api]:
    api = Api(Server(url=server.url, folder=str(tmp_path)), PATIENCE_S)
    yield api
    api.close()


@pytest.fixture
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses between tries are as short as a test wants them; no watch lived long enough to be
    well again after several that did not."""
    monkeypatch.setattr(watching, "_FIRST_S", 0.005)
    monkeypatch.setattr(watching, "_LONGEST_S", 0.02)
    monkeypatch.setattr(watching, "_LIVED_S", 1000.0)


class Seen:
    """A watch, and what it told: a list of snapshots by name."""

    def __init__(self, api: Api, trim: Trim = name_and_label, path: str = PODS) -> None:
        self.told: list[dict[str, str]] = []
        self.ready = threading.Event()
        self.watch: Watch[Any] = Watch(api, path, MINE, trim, self._note)
        self.ready.set()

    def _note(self) -> None:
        self.ready.wait(PATIENCE_S)
        self.told.append(self.now)

    @property
    def now(self) -> dict[str, str]:
        assert self.watch.objects is not None
        return dict(sorted(self.watch.objects.values()))


@contextlib.contextmanager
def seeing(api: Api, trim: Trim = name_and_label) -> Iterator[Seen]:
    seen = Seen(api, trim)
    try:
        yield seen
    finally:
        seen.watch.close()


@pytest.fixture
def seen(server: FakeApiServer, api: Api) -> Iterator[Seen]:
    """A watch that is open, on one pod."""
    server.put("pods", pod("a"))
    server.put("pods", pod("x", node="n2"))
    with seeing(api) as seen:
        server.wait_for(lambda: server.watches == 1 and seen.told)
        yield seen


def lists(server: FakeApiServer) -> list[Request]:
    return [request for request in list(server.requests) if not request.is_watch]


def watches(server: FakeApiServer) -> list[Request]:
    return [request for request in list(server.requests) if request.is_watch]


# --- when all is well -----------------------------------------------------------------------------


def test_what_is_asked(server: FakeApiServer, seen: Seen) -> None:
    listed, watched = server.requests
    assert (listed.path, listed.query) == (PODS, MINE | {"limit": "100"})
    assert watched.path == PODS
    seconds = int(watched.query.pop("timeoutSeconds"))
    assert 240 <= seconds <= 360
    assert watched.query == MINE | {
        "watch": "true",
        "allowWatchBookmarks": "true",
        "resourceVersion": str(server.store.revision),
    }


def test_what_is_told(server: FakeApiServer, seen: Seen) -> None:
    assert seen.told == [{"a": ""}]
    server.put("pods", pod("b"))
    server.wait_for(lambda: seen.now == {"a": "", "b": ""})
    server.put("pods", pod("a", labels={"a": "1"}))
    server.wait_for(lambda: seen.now == {"a": "1", "b": ""})
    server.remove("pods", "b")
    server.wait_for(lambda: seen.now == {"a": "1"})
    server.put("pods", pod("x", node="n2", labels={"a": "1"}))
    server.put("pods", pod("a", node="n2"))
    server.wait_for(lambda: seen.now == {})
    assert seen.told == [
        {"a": ""}, {"a": "", "b": ""}, {"a": "1", "b": ""}, {"a": "1"}, {}
    ]  # fmt: skip
    assert seen.watch.problem == ""
    assert len(server.requests) == 2


def test_a_pod_of_the_same_name_is_another_pod(server: FakeApiServer, seen: Seen) -> None:
    assert seen.watch.objects is not None
    before = set(seen.watch.objects)
    server.remove("pods", "a")
    server.put("pods", pod("a", uid="another"))
    server.wait_for(lambda: seen.watch.objects and not before & set(seen.watch.objects))
    assert seen.now == {"a": ""}


def test_nothing_is_told_of_what_is_trimmed(server: FakeApiServer, seen: Seen) -> None:
    server.put("pods", pod("a", annotations={"b": "1"}))
    server.put("pods", pod("a", annotations={"b": "2"}))
    server.put("pods", pod("a", labels={"a": "1"}))
    server.wait_for(lambda: len(seen.told) == 2)
    assert seen.told == [{"a": ""}, {"a": "1"}]


def test_a_snapshot_stays_as_it_is(server: FakeApiServer, seen: Seen) -> None:
    snapshot = seen.watch.objects
    assert isinstance(snapshot, Mapping)
    before = dict(snapshot)
    with pytest.raises(TypeError):
        snapshot["b"] = None  # type: ignore[index]
    server.put("pods", pod("b"))
    server.wait_for(lambda: "b" in seen.now)
    assert dict(snapshot) == before


def test_nothing_is_known_before_the_first_list(server: FakeApiServer, api: Api) -> None:
    server.put("pods", pod("a"))
    server.fail(hang())
    with seeing(api) as seen:
        server.wait_for(lambda: server.requests)
        assert (seen.watch.objects, seen.told) == (None, [])


def test_an_empty_list_is_known_too(server: FakeApiServer, api: Api) -> None:
    with seeing(api) as seen:
        server.wait_for(lambda: seen.told)
        assert seen.told == [{}]


def test_what_is_trimmed_to_nothing_is_left_out(server: FakeApiServer, api: Api) -> None:
    def trim(item: dict[str, Any]) -> tuple[str, str] | None:
        return None if "labels" in item["metadata"] else name_and_label(item)

    server.put("pods", pod("a", labels={"a": "1"}))
    server.put("pods", pod("b"))
    with seeing(api, trim) as seen:
        server.wait_for(lambda: seen.told == [{"b": ""}])
        server.put("pods", pod("b", labels={"a": "1"}))
        server.wait_for(lambda: seen.told == [{"b": ""}, {}])
        server.put("pods", pod("a"))
        server.wait_for(lambda: seen.told == [{"b": ""}, {}, {"a": ""}])


def test_what_cannot_be_trimmed_is_left_out(server: FakeApiServer, api: Api) -> None:
    def trim(item: dict[str, Any]) -> tuple[str, str]:
        if "labels" in item["metadata"]:
            raise KeyError("a bug")
        return name_and_label(item)

    server.put("pods", pod("a", labels={"a": "1"}))
    server.put("pods", pod("b"))
    with seeing(api, trim) as seen:
        server.wait_for(lambda: seen.told == [{"b": ""}])
        server.put("pods", pod("c", labels={"a": "1"}))
        server.put("pods", pod("d"))
        server.wait_for(lambda: seen.now == {"b": "", "d": ""})


def test_who_is_told_may_fail(server: FakeApiServer, api: Api) -> None:
    rings: list[int] = []

    def ring() -> None:
        rings.append(1)
        raise RuntimeError("a bug")

    watch: Watch[Any] = Watch(api, PODS, MINE, name_and_label, ring)
    server.wait_for(lambda: server.watches == 1)
    server.put("pods", pod("a"))
    server.wait_for(lambda: len(rings) == 2)
    watch.close()


# --- pages ----------------------------------------------------------------------------------------


def test_a_list_in_pages(server: FakeApiServer, api: Api) -> None:
    for at in range(250):
        server.put("pods", pod(f"p{at:03}"))
    with seeing(api) as seen:
        server.wait_for(lambda: server.watches == 1 and seen.told)
        assert [list(names) for names in seen.told] == [[f"p{at:03}" for at in range(250)]]
        queries = [request.query for request in lists(server)]
        assert [query.get("limit") for query in queries] == ["100"] * 3
        assert [bool(query.get("continue")) for query in queries] == [False, True, True]
        assert watches(server)[0].query["resourceVersion"] == str(server.store.revision)


@pytest.mark.usefixtures("hurry")
@pytest.mark.parametrize(
    "fault", [refuse(410), refuse(500), disconnect(), say("[]"), say('{"items":5}')]
)
def test_a_list_that_breaks_between_pages(server: FakeApiServer, api: Api, fault: Fault) -> None:
    for at in range(150):
        server.put("pods", pod(f"p{at:03}"))
    server.fail(fault, times=3, concerns=lambda request: bool(request.query.get("continue")))
    with seeing(api) as seen:
        server.wait_for(lambda: seen.told)
        assert [len(names) for names in seen.told] == [150]


@pytest.mark.usefixtures("hurry")
def test_a_list_without_an_end(
    server: FakeApiServer, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "_MOST_PAGES", 5)
    page = {"metadata": {"resourceVersion": "1", "continue": "on"}, "items": []}
    server.fail(say(json.dumps(page)))
    with seeing(api) as seen:
        server.wait_for(lambda: seen.watch.problem)
        assert seen.watch.objects is None
        assert PODS in seen.watch.problem


@pytest.mark.usefixtures("hurry")
@pytest.mark.parametrize(
    "body",
    [
        "{}",
        '{"items":[]}',
        '{"metadata":{},"items":[]}',
        '{"metadata":{"resourceVersion":5},"items":[]}',
        '{"metadata":{"resourceVersion":""},"items":[]}',
        '{"metadata":[],"items":[]}',
        '{"metadata":{"resourceVersion":"5"},"items":{}}',
        '{"kind":"Pod","metadata":{"resourceVersion":"5","name":"a"}}',
        '{"metadata":{"resourceVersion":"5"},"items":"ab"}',
        '{"kind":"Status","status":"Failure","metadata":{},"code":500}',
    ],
)
def test_lists_that_are_none(server: FakeApiServer, api: Api, body: str) -> None:
    server.put("pods", pod("a"))
    server.fail(say(body))
    with seeing(api) as seen:
        server.wait_for(lambda: seen.watch.problem)
        assert (seen.watch.objects, watches(server)) == (None, [])
        server.heal()
        server.wait_for(lambda: seen.told == [{"a": ""}])
        server.wait_for(lambda: seen.watch.problem == "")


@pytest.mark.parametrize(
    "items", [None, [None], [5], [{}], [{"metadata": 5}], [{"metadata": {"uid": 5}}]]
)
def test_items_that_are_none(server: FakeApiServer, api: Api, items: Any) -> None:
    good = [pod("a", resourceVersion="1")] if items else []
    listed = None if items is None else [*items, *good]
    body = {"metadata": {"resourceVersion": str(server.store.revision)}, "items": listed}
    server.fail(say(json.dumps(body)), times=1)
    with seeing(api) as seen:
        server.wait_for(lambda: server.watches == 1)
        assert seen.now == ({"a": ""} if items else {})


# --- going on -------------------------------------------------------------------------------------


def test_a_watch_that_ends_is_gone_on_with(
    server: FakeApiServer, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "_LIVED_S", 0.0)
    for name in "bcd":
        server.fail(hang(), times=1, concerns=is_watch)
        server.end_watches()
        server.wait_for(lambda: server.watches == 0)
        server.put("pods", pod(name))
        server.heal()
        server.wait_for(lambda name=name: name in seen.now)  # type: ignore[misc]
    assert len(lists(server)) == 1
    assert seen.told[-1] == {"a": "", "b": "", "c": "", "d": ""}
    assert seen.watch.problem == ""


@pytest.mark.usefixtures("hurry")
def test_a_bookmark_is_where_it_goes_on(server: FakeApiServer, seen: Seen) -> None:
    server.put("pods", pod("x", node="n2", labels={"a": "1"}))
    server.store.bookmark()
    marked = str(server.store.revision)
    server.store.compact()  # from before the bookmark, there would be no going on
    server.store.compacted = server.store.revision - 1
    server.end_watches()
    server.wait_for(lambda: len(watches(server)) == 2 and server.watches == 1)
    assert watches(server)[1].query["resourceVersion"] == marked
    assert len(lists(server)) == 1
    assert len(seen.told) == 1


@pytest.mark.usefixtures("hurry")
def test_versions_that_are_forgotten(server: FakeApiServer, seen: Seen) -> None:
    """The watch is told by an event; while it cannot list, the old snapshot stays."""
    server.fail(refuse(503), concerns=is_list)
    server.put("pods", pod("b", node="n2"))
    server.store.compact()
    server.fail(disconnect(), times=1, concerns=is_watch)
    server.end_watches()
    server.wait_for(lambda: len(lists(server)) >= 3)
    assert seen.now == {"a": ""}
    server.remove("pods", "a")
    server.put("pods", pod("c"))
    server.wait_for(lambda: seen.watch.problem)
    assert seen.now == {"a": ""}
    server.heal()
    server.wait_for(lambda: seen.now == {"c": ""})
    server.wait_for(lambda: seen.watch.problem == "")
    assert seen.told == [{"a": ""}, {"c": ""}]


WATCH_FAULTS: dict[str, Fault] = {
    "410": refuse(410),
    "429": refuse(429),
    "429, at once again": refuse(429, retry_after_s=0),
    "429, in an hour": refuse(429, retry_after_s=3600),
    "500": refuse(500),
    "503": refuse(503),
    "504": refuse(504),
    "400": refuse(400),
    "401": refuse(401),
    "403": refuse(403),
    "404": refuse(404),
    "a text": say("404 page not found\n", 404, "text/plain"),
    "a redirection": say("", 302, headers={"Location": PODS}),
    "no watch at all": say("{}"),
    "an end at once": events(),
    "an end in the middle": events(event("ADDED", "b"), hang_after=None, cut_after=20),
    "an error 410": events(watch_error(410, "Expired", "too old resource version")),
    "an error 429": events(watch_error(429, "TooManyRequests", "slow down")),
    "an error 500": events(watch_error(500, "InternalError", "etcd is away")),
    "an error without a code": events({"type": "ERROR", "object": {}}),
    "an error that is none": events({"type": "ERROR", "object": [5]}),
    "an error with nonsense in it": events(
        {"type": "ERROR", "object": {"code": "410", "message": {"a": "\x1b"}}}
    ),
    "no JSON": events(b"{]\n"),
    "half a line": events(b'{"type":"ADDED"'),
    "no object": events(b"[]\n", b"5\n", b"null\n"),
    "no text": events(b'{"type":"\xff"}\n'),
    "HTML": say("<html>", content_type="text/html"),
    "protobuf": say(b"k8s\0", content_type="application/vnd.kubernetes.protobuf;stream=watch"),
    "compressed": say(b"\x1f\x8b\x08", headers={"Content-Encoding": "gzip"}),
    "deep nesting": events(b'{"a":' * 100_000 + b"\n"),
    "a long number": events(b'{"type":"ADDED","object":' + b"1" * 10_000 + b"}\n"),
    "an object without metadata": events({"type": "ADDED", "object": {}}),
    "an object that is none": events({"type": "MODIFIED", "object": "pod"}),
    "an object without a version": events({"type": "ADDED", "object": pod("b")}),
    "an object without a uid": events(
        {"type": "DELETED", "object": {"metadata": {"name": "b", "resourceVersion": "1000"}}}
    ),
    "a bookmark without a version": events({"type": "BOOKMARK", "object": {"metadata": {}}}),
    "no answer": disconnect(),
    "wrong chunks": say("zz\r\n", headers={"Transfer-Encoding": "chunked"}, cut_after=4),
}


@pytest.mark.usefixtures("hurry")
@pytest.mark.parametrize("fault", WATCH_FAULTS.values(), ids=WATCH_FAULTS)
def test_a_watch_goes_wrong_once(
    server: FakeApiServer, seen: Seen, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After one that lived: what happened meanwhile is seen, and nobody stays alarmed."""

    def concerns(request: Request) -> bool:
        monkeypatch.setattr(watching, "_LIVED_S", 1000.0)
        return request.is_watch

    monkeypatch.setattr(watching, "_LIVED_S", 0.0)
    server.fail(fault, times=1, concerns=concerns)
    server.end_watches()
    server.wait_for(lambda: len(watches(server)) >= 2)
    server.put("pods", pod("c"))
    server.wait_for(lambda: seen.now == {"a": "", "c": ""})
    server.wait_for(lambda: server.watches == 1)
    server.wait_for(lambda: seen.watch.problem == "")
    assert all("a" in names for names in seen.told)


@pytest.mark.usefixtures("hurry")
@pytest.mark.parametrize("fault", WATCH_FAULTS.values(), ids=WATCH_FAULTS)
def test_a_watch_goes_wrong_for_long(
    server: FakeApiServer, seen: Seen, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again, each time later, and said in one sentence."""
    server.fail(fault, concerns=is_watch)
    server.end_watches()
    server.wait_for(lambda: len(watches(server)) >= 8 and seen.watch.problem)
    problem = seen.watch.problem
    assert problem.isprintable()
    assert 10 < len(problem) < 1500
    assert PODS in problem
    assert "a" in seen.now
    assert "crashed" not in problem
    assert not is_busy(server)
    server.heal()
    server.put("pods", pod("c"))
    server.wait_for(lambda: seen.now == {"a": "", "c": ""})
    server.wait_for(lambda: server.watches == 1)
    monkeypatch.setattr(watching, "_LIVED_S", 0.0)
    server.wait_for(lambda: seen.watch.problem == "")


def is_busy(server: FakeApiServer) -> bool:
    """Whether more was asked than back-off allows: with `hurry`, the pauses after the first tries
    are at least 2.5, 5, 10, 10, … ms, and each try is at most 4 requests."""
    asked = [request.at_s for request in list(server.requests)[2:]]
    pauses = max(0, len(asked) // 4 - 1)
    least_s = sum([0.0025, 0.005, *[0.01] * pauses][:pauses])
    return asked[-1] - asked[0] < least_s


LIST_FAULTS: dict[str, Fault] = {
    **{name: WATCH_FAULTS[name] for name in (
        "400", "401", "403", "404", "410", "429", "429, at once again", "500", "503", "a text",
        "a redirection", "HTML", "compressed", "no answer", "wrong chunks", "deep nesting",
    )},
    "no list": say("{}"),
    "half a list": cut(30),
}  # fmt: skip


@pytest.mark.usefixtures("hurry")
@pytest.mark.parametrize("fault", LIST_FAULTS.values(), ids=LIST_FAULTS)
def test_a_list_goes_wrong_for_long(server: FakeApiServer, api: Api, fault: Fault) -> None:
    server.put("pods", pod("a"))
    server.fail(fault, concerns=is_list)
    with seeing(api) as seen:
        server.wait_for(lambda: len(lists(server)) >= 8 and seen.watch.problem)
        assert seen.watch.problem.isprintable()
        assert PODS in seen.watch.problem
        assert (seen.watch.objects, seen.told, watches(server)) == (None, [], [])
        assert not is_busy(server)
        server.heal()
        server.wait_for(lambda: seen.told == [{"a": ""}])
        server.wait_for(lambda: seen.watch.problem == "")


def test_pauses_grow_as_promised(
    server: FakeApiServer, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 0.5 s to 30 s: between one and two of them have gone when the third request comes."""
    assert (watching._FIRST_S, watching._LONGEST_S) == (0.5, 30.0)
    server.fail(refuse(500))
    with seeing(api):
        server.wait_for(lambda: len(server.requests) >= 3)
        first, _, third = (request.at_s for request in server.requests[:3])
        assert third - first >= 0.25 + 0.25


@pytest.mark.usefixtures("hurry")
def test_events_of_an_unknown_type_are_passed_over(server: FakeApiServer, seen: Seen) -> None:
    unknown = [{"type": "RENAMED", "object": pod("z")}, {"type": 5}, {}, {"type": None}]
    told = events(*unknown, event("ADDED", "b"), hang_after=1 << 20)
    server.fail(told, times=1, concerns=is_watch)
    server.end_watches()
    server.wait_for(lambda: seen.now == {"a": "", "b": ""})
    assert len(lists(server)) == 1


@pytest.mark.usefixtures("hurry")
@pytest.mark.parametrize("kind", [["ADDED"], {}])
def test_a_type_that_is_no_text(
    server: FakeApiServer, seen: Seen, kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    told = events({"type": kind, "object": pod("z")}, event("ADDED", "b"), hang_after=1 << 20)
    server.fail(told, times=1, concerns=is_watch)
    server.end_watches()
    server.wait_for(lambda: len(watches(server)) >= 2)
    server.wait_for(lambda: seen.now != {"a": ""} or "crashed" in caplog.text)
    assert "crashed" not in caplog.text


@pytest.mark.usefixtures("hurry")
def test_what_comes_together_is_told_once(server: FakeApiServer, seen: Seen) -> None:
    several = [event("ADDED", name) for name in "bcdef"]
    server.fail(events(*several, hang_after=1 << 20), times=1, concerns=is_watch)
    server.end_watches()
    server.wait_for(lambda: "f" in seen.now)
    assert len(seen.told) == 2


@pytest.mark.usefixtures("hurry")
def test_events_in_small_pieces(server: FakeApiServer, seen: Seen) -> None:
    b = event("ADDED", "b")
    b["object"]["metadata"]["labels"] = {"a": "€😀"}
    text = json.dumps(b, ensure_ascii=False).encode() + b"\n\n \r\n"
    told = events(text, event("ADDED", "c"), pause_s=0.0001, piece_bytes=1, hang_after=1 << 20)
    server.fail(told, times=1, concerns=is_watch)
    server.end_watches()
    server.wait_for(lambda: seen.now == {"a": "", "b": "€😀", "c": ""})
    assert len(lists(server)) == 1


@pytest.mark.usefixtures("hurry")
def test_a_last_event_without_a_newline(server: FakeApiServer, seen: Seen) -> None:
    last = json.dumps(event("ADDED", "b", str(server.store.revision)))
    server.fail(events(last), times=1, concerns=is_watch)
    server.end_watches()
    server.wait_for(lambda: any("b" in names for names in seen.told))


@pytest.mark.usefixtures("hurry")
def test_a_large_event(server: FakeApiServer, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "_LARGEST_EVENT", 1 << 16)
    large = event("ADDED", "b")
    large["object"]["spec"]["large"] = "x" * (1 << 18)
    server.fail(events(large), concerns=is_watch)
    server.end_watches()
    server.wait_for(lambda: "an event is larger than 64 KiB" in seen.watch.problem)
    server.wait_for(lambda: len(watches(server)) >= 12)
    assert seen.now == {"a": ""}
    assert not is_busy(server)


@pytest.mark.usefixtures("hurry")
def test_a_dead_connection_is_found(
    server: FakeApiServer, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "_WATCH_S", (0, 0))
    monkeypatch.setattr(watching, "_SLACK_S", 0.1)
    server.fail(events(hang_after=0), times=1, concerns=is_watch)
    with seeing(api) as seen:
        server.wait_for(lambda: len(watches(server)) >= 2)
        server.put("pods", pod("a"))
        server.wait_for(lambda: seen.now == {"a": ""})


@pytest.mark.usefixtures("hurry")
@pytest.mark.parametrize("disturb", ["restart", "drop_connections"])
def test_a_server_that_goes_and_comes(
    server: FakeApiServer, seen: Seen, disturb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "bcd":
        getattr(server, disturb)()
        server.put("pods", pod(name))
        server.wait_for(lambda name=name: name in seen.now)  # type: ignore[misc]
    monkeypatch.setattr(watching, "_LIVED_S", 0.0)
    server.wait_for(lambda: seen.watch.problem == "" and server.watches == 1)
    assert all("a" in names for names in seen.told)


@pytest.mark.usefixtures("hurry")
def test_a_server_that_is_away(server: FakeApiServer, seen: Seen) -> None:
    server.stop()
    server.wait_for(lambda: "Connection refused" in seen.watch.problem)
    assert seen.now == {"a": ""}
    server.remove("pods", "a")
    server.put("pods", pod("b"))
    server.start()
    server.wait_for(lambda: seen.now == {"b": ""})
    server.wait_for(lambda: seen.watch.problem == "")


@pytest.mark.usefixtures("hurry")
def test_a_server_that_lost_its_memory(server: FakeApiServer, seen: Seen) -> None:
    """Restored from a backup, versions begin anew: what is known is listed anew after 410."""
    server.stop()
    store = type(server.store)()
    store.compacted = server.store.revision + 1
    server.store = store
    server.put("namespaces", {"metadata": {"name": "default"}})
    server.put("pods", pod("z"))
    store.revision = store.compacted + 10
    server.start()
    server.wait_for(lambda: seen.now == {"z": ""})


@pytest.mark.usefixtures("hurry")
def test_rights_that_come_later(server: FakeApiServer, api: Api) -> None:
    server.put("pods", pod("a"))
    server.users = {"": User(name="agent", rules=())}
    with seeing(api) as seen:
        server.wait_for(lambda: 'User "agent" cannot list' in seen.watch.problem)
        may_list = Rule(verbs=("list",), resources=("pods",))
        server.users = {"": User(name="agent", rules=(may_list,))}
        server.wait_for(lambda: 'User "agent" cannot watch' in seen.watch.problem)
        assert seen.now == {"a": ""}
        server.users = {}
        server.wait_for(lambda: seen.watch.problem == "" and server.watches == 1)


@pytest.mark.usefixtures("hurry")
def test_a_crd_that_comes_later(server: FakeApiServer, api: Api) -> None:
    topologies = server.resources.pop()
    path = f"/apis/{topologies.group}/v1alpha2/{topologies.plural}"
    watch: Watch[Any] = Watch(api, path, {}, name_and_label, lambda: None)
    server.wait_for(lambda: "404" in watch.problem)
    server.resources.append(topologies)
    server.wait_for(lambda: watch.objects == {} and watch.problem == "")
    watch.close()


# --- closing --------------------------------------------------------------------------------------


def threads(path: str = PODS) -> list[str]:
    return [thread.name for thread in threading.enumerate() if path in thread.name]


CLOSED_WHILE: dict[str, tuple[Fault | None, Callable[[Request], bool]]] = {
    "nothing happens": (None, is_watch),
    "a list does not begin": (hang(), is_list),
    "a list does not end": (say('{"metadata":', hang_after=3), is_list),
    "a list comes slowly": (slow(30.0), is_list),
    "a watch does not begin": (hang(), is_watch),
    "a watch is silent": (events(hang_after=0), is_watch),
    "an event is half told": (events(b'{"type":', hang_after=4), is_watch),
    "it waits for a better time": (refuse(500), is_list),
    "it is asked to wait": (refuse(429, retry_after_s=1), is_list),
}


@pytest.mark.parametrize("fault", CLOSED_WHILE.values(), ids=CLOSED_WHILE)
def test_closing(
    server: FakeApiServer,
    api: Api,
    fault: tuple[Fault | None, Callable[[Request], bool]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watching, "_FIRST_S", 1000.0)
    monkeypatch.setattr(watching, "_LONGEST_S", 1000.0)
    what, concerns = fault
    if what:
        server.fail(what, concerns=concerns)
    seen = Seen(api)
    server.wait_for(lambda: any(map(concerns, list(server.requests))))
    seen.watch.close()
    server.wait_for(lambda: not threads() and server.watches == 0)
    seen.watch.close()
    told = len(seen.told)
    server.heal()
    server.put("pods", pod("b"))
    assert len(seen.told) == told
    assert len(server.requests) <= 2


def test_closing_where_nobody_answers(server: FakeApiServer, tmp_path: Path) -> None:
    server.stop()
    api = Api(Server(url=server.url, folder=str(tmp_path)))
    seen = Seen(api)
    server.wait_for(lambda: seen.watch.problem)
    seen.watch.close()
    server.wait_for(lambda: not threads())


def test_closing_from_within(server: FakeApiServer, api: Api) -> None:
    closed = threading.Event()
    made: list[Watch[Any]] = []

    def ring() -> None:
        server.wait_for(lambda: made)
        made[0].close()
        closed.set()

    made.append(Watch(api, PODS, MINE, name_and_label, ring))
    assert closed.wait(PATIENCE_S)
    server.wait_for(lambda: not threads())


def test_closing_while_somebody_is_told(
    server: FakeApiServer, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not wait for them for ever."""
    monkeypatch.setattr(watching, "_CLOSE_S", 0.05)
    told, may_go_on = threading.Event(), threading.Event()

    def ring() -> None:
        told.set()
        may_go_on.wait(PATIENCE_S)

    watch: Watch[Any] = Watch(api, PODS, MINE, name_and_label, ring)
    assert told.wait(PATIENCE_S)
    watch.close()
    assert threads() != []
    may_go_on.set()
    server.wait_for(lambda: not threads())


def test_closing_the_api_leaves_the_watch(server: FakeApiServer, api: Api, seen: Seen) -> None:
    api.close()
    server.put("pods", pod("b"))
    server.wait_for(lambda: "b" in seen.now)


def test_many_watches(server: FakeApiServer, api: Api) -> None:
    server.put("pods", pod("a"))
    several = [Seen(api) for _ in range(8)]
    server.wait_for(lambda: server.watches == 8)
    server.put("pods", pod("b"))
    server.wait_for(lambda: all(seen.now == {"a": "", "b": ""} for seen in several))
    for seen in several:
        seen.watch.close()
    server.wait_for(lambda: server.watches == 0 and not threads())
    server.wait_for(lambda: server.open == 0)
