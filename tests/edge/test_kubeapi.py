"""agent.edge.kubeapi's calls against a fake API server, and against whatever can go wrong with one.

Watches are in test_kubeapi_watch.py; certificates and tokens in test_kubeapi_trust.py.
"""

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agent.edge import kubeapi
from agent.edge.kubeapi import Api, Server, answers
from agent.errors import KubeApiError
from agent.fakes.apiserver import (
    KOORDINATOR_DEVICES,
    TOPOLOGIES,
    FakeApiServer,
    Fault,
    Rule,
    User,
    cut,
    disconnect,
    hang,
    refuse,
    say,
    slow,
)

PATIENCE_S = 20.0
NODE = "node-1"
NODES = "/api/v1/nodes"
NRT_VERSION = "topology.node.k8s.io/v1alpha2"
NRT = f"/apis/{NRT_VERSION}/noderesourcetopologies"
DEVICE_VERSION = "scheduling.koordinator.sh/v1alpha1"
EVENT = {
    "apiVersion": "v1",
    "kind": "Event",
    "metadata": {"name": "pod.1", "namespace": "default"},
    "involvedObject": {"kind": "Pod", "name": "pod"},
    "reason": "Pinned",
}


def topology(**fields: Any) -> dict[str, Any]:
    body = {"apiVersion": NRT_VERSION, "kind": "NodeResourceTopology", "metadata": {"name": NODE}}
    return body | {"zones": []} | fields


def config_map(**data: str) -> dict[str, Any]:
    meta = {"name": "cm", "namespace": "kube-system"}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": meta, "data": data}


def device() -> dict[str, Any]:
    return {"apiVersion": DEVICE_VERSION, "kind": "Device", "metadata": {"name": NODE}, "spec": {}}


@pytest.fixture
def server() -> Iterator[FakeApiServer]:
    with FakeApiServer() as server:
        server.resources.append(KOORDINATOR_DEVICES)
        server.put("nodes", {"metadata": {"name": NODE}})
        yield server


@contextlib.contextmanager
def talking(url: str, folder: Path, timeout_s: float = PATIENCE_S) -> Iterator[Api]:
    api = Api(Server(url=url, folder=str(folder)), timeout_s)
    try:
        yield api
    finally:
        api.close()


@pytest.fixture
def api(server: FakeApiServer, tmp_path: Path) -> Iterator[Api]:
    with talking(server.url, tmp_path) as api:
        yield api


def flaw(call: Callable[[], Any]) -> tuple[KubeApiError | None, str]:
    """The error, and what is wrong with it: one that is right is one line for people."""
    try:
        answer = call()
    except KubeApiError as error:
        text = str(error)
        is_right = text.isprintable() and 10 < len(text) < 1500
        return error, "" if is_right else f"no sentence: {text!r}"
    except BaseException as error:
        return None, f"a foreign error: {error!r}"
    return None, f"no error but {answer!r}"


def complaint(call: Callable[[], Any]) -> KubeApiError:
    error, wrong = flaw(call)
    assert wrong == ""
    assert error
    return error


CALLS: dict[str, Callable[[Api], Any]] = {
    "get": lambda api: api.get(f"{NODES}/{NODE}"),
    "list": lambda api: api.get(NODES, limit=5),
    "post": lambda api: api.post("/api/v1/namespaces/default/events", EVENT),
    "put": lambda api: api.put(f"{NRT}/{NODE}", topology()),
    "merge patch": lambda api: api.merge_patch(f"{NODES}/{NODE}", {"metadata": {}}),
    "apply": lambda api: api.apply(f"{NRT}/{NODE}", topology()),
    "stream": lambda api: list(api.stream(NODES, {})),
    "read node": lambda api: kubeapi.read_node(api, NODE),
    "label node": lambda api: kubeapi.label_node(api, NODE, {"a": "b"}),
    "untaint node": lambda api: kubeapi.untaint_node(
        api, kubeapi.read_node(api, NODE), "numalet.io/starting"
    ),
    "read topology": lambda api: kubeapi.read_topology(api, NODE),
    "apply topology": lambda api: kubeapi.apply_topology(api, topology()),
    "replace topology": lambda api: kubeapi.replace_topology(api, topology()),
    "read device": lambda api: kubeapi.read_device(api, DEVICE_VERSION, NODE),
    "apply device": lambda api: kubeapi.apply_device(api, device()),
    "read config map": lambda api: kubeapi.read_config_map(api, "kube-system", "cm"),
    "apply config map": lambda api: kubeapi.apply_config_map(api, config_map()),
    "create event": lambda api: kubeapi.create_event(api, EVENT),
    "may": lambda api: kubeapi.may(api, "get", "", "nodes"),
    "served": lambda api: kubeapi.served(api, "topology.node.k8s.io", "v1alpha2"),
    "read marks": lambda api: kubeapi.read_marks(api, NODE),
}

FAULTS: dict[str, Fault] = {
    "400": refuse(400),
    "401": refuse(401),
    "403": refuse(403),
    "409": refuse(409),
    "410": refuse(410),
    "422": refuse(422),
    "429": refuse(429),
    "429, wait for an hour": refuse(429, retry_after_s=3600),
    "500": refuse(500),
    "503": refuse(503),
    "504": refuse(504),
    "a status nobody knows": refuse(799),
    "a page of a proxy": say("<html>\n<b>Bad\x1b[31m gateway</b>", 502, "text/html"),
    "a refusal that is no JSON": say("{", 500),
    "a refusal in a list": say("[]", 500),
    "a refusal with nonsense in it": say('{"message":{},"details":[],"code":"x"}', 500),
    "a refusal in half a surrogate": say('{"message":"\\ud800\\n\\u001b[0m","details":{}}', 500),
    "a refusal that is nested deeply": say('{"message":' * 100_000, 500),
    "an endless refusal": say("x" * (1 << 20), 500, "text/plain"),
    "a redirection": say("", 302, headers={"Location": "/api/v1/nodes"}),
    "a redirection to itself": say("", 307, headers={"Location": f"{NODES}/{NODE}"}),
    "an answer that is empty": say(""),
    "an answer without content": say("", 204),
    "an answer that is no JSON": say("{"),
    "an answer that is a list": say("[]"),
    "an answer that is null": say("null"),
    "an answer that is a number": say("1" * 10_000),
    "an answer that is no text": say(b'{"a":"\xff\xfe"}'),
    "an answer that is nested deeply": say('{"a":' * 100_000 + "1" + "}" * 100_000),
    "an answer that is HTML": say("<html></html>", content_type="text/html"),
    "an answer of protobuf": say(b"k8s\0...", content_type="application/vnd.kubernetes.protobuf"),
    "an answer that is compressed": say(b"\x1f\x8b\x08", headers={"Content-Encoding": "gzip"}),
    "an answer with too many headers": say("{}", headers={f"a{at}": "b" for at in range(200)}),
    "an answer with an endless header": say("{}", headers={"a": "b" * (1 << 17)}),
    "an answer in chunks that are none": say("zz\r\n", headers={"Transfer-Encoding": "chunked"}),
    "a connection that ends": disconnect(),
    "a connection that ends in the body": say('{"a":"bcd"}', cut_after=5),
    "a connection that ends before the body": say("{}", cut_after=0),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_whatever_is_answered_is_a_sentence(server: FakeApiServer, api: Api, fault: Fault) -> None:
    """And the connections are fit for what comes next."""
    wrong = {}
    for name, call in CALLS.items():
        server.fail(fault)
        error, wrong[name] = flaw(lambda call=call: call(api))  # type: ignore[misc]
        if error and server.url not in str(error):
            wrong[name] = f"no URL: {error}"
        server.heal()
        kubeapi.read_node(api, NODE)
    if wrong["stream"] == "no error but []":  # a watch that ends
        wrong["stream"] = ""
    assert {name: text for name, text in wrong.items() if text} == {}


SHAPES = ("{}", '{"metadata":[]}', '{"metadata":{"labels":[],"name":1,"resourceVersion":{}}}',
          '{"spec":5,"status":[]}', '{"spec":{"taints":[1]},"metadata":{"name":"a"}}',
          '{"resources":[1,{},{"name":5}],"status":{"allowed":"yes"}}', '{"data":{"devices":5}}',
          '{"data":{"devices":"[","unhealthy":"{"}}', '{"type":5,"object":[]}')  # fmt: skip


@pytest.mark.parametrize("body", SHAPES)
def test_objects_that_are_none_of_kubernetes(server: FakeApiServer, api: Api, body: str) -> None:
    server.fail(say(body))
    wrong = [flaw(lambda call=call: call(api))[1] for call in CALLS.values()]  # type: ignore[misc]
    assert [text for text in wrong if text and not text.startswith("no error but")] == []


def test_strange_shapes_are_not_taken_for_a_yes(server: FakeApiServer, api: Api) -> None:
    for body in ('{"status":{"allowed":"yes"}}', '{"status":{"allowed":1}}'):
        server.heal()
        server.fail(say(body))
        assert kubeapi.may(api, "get", "", "nodes") is False


# --- how often is asked ---------------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 403, 404, 409, 410, 422, 429, 500, 503])
def test_a_refusal_is_not_asked_again(server: FakeApiServer, api: Api, status: int) -> None:
    counts = {}
    for name, call in CALLS.items():
        before = len(server.requests)
        server.fail(refuse(status))
        with contextlib.suppress(KubeApiError):
            call(api)
        server.heal()
        counts[name] = len(server.requests) - before
    assert counts == dict.fromkeys(CALLS, 1)


@pytest.mark.parametrize("status", [429, 503])
def test_a_reading_waits_a_second_once_if_asked_to(
    server: FakeApiServer, api: Api, status: int
) -> None:
    server.fail(refuse(status, retry_after_s=0), times=1)
    assert kubeapi.read_node(api, NODE)["metadata"]["name"] == NODE
    server.fail(refuse(status, retry_after_s=0))
    assert complaint(lambda: kubeapi.read_node(api, NODE)).status == status
    assert len(server.requests) == 4


@pytest.mark.parametrize("call", ["post", "put", "merge patch", "apply"])
def test_a_write_is_never_sent_twice_after_an_answer(
    server: FakeApiServer, api: Api, call: str
) -> None:
    server.fail(refuse(429, retry_after_s=0))
    assert complaint(lambda: CALLS[call](api)).status == 429
    assert len(server.requests) == 1


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_connection_that_was_dropped_meanwhile(
    server: FakeApiServer, api: Api, call: Callable[[Api], Any]
) -> None:
    kubeapi.read_node(api, NODE)
    server.drop_connections()
    server.wait_for(lambda: not server.open)
    thing = {"metadata": {"name": "a", "resourceVersion": "1"}, "status": {}, "resources": []}
    server.fail(say(json.dumps(thing)))
    call(api)


def test_connections_are_kept(server: FakeApiServer, api: Api) -> None:
    for _ in range(20):
        kubeapi.read_node(api, NODE)
    kubeapi.apply_topology(api, topology())
    assert server.connections == 1


def test_connections_are_kept_after_refusals(server: FakeApiServer, api: Api) -> None:
    for _ in range(20):
        kubeapi.read_topology(api, NODE)
    assert server.connections == 1


def test_many_threads(server: FakeApiServer, api: Api) -> None:
    def work(at: int) -> str:
        name = f"n{at % 16}"
        meta = {"name": name, "namespace": "kube-system"}
        kubeapi.apply_config_map(api, config_map() | {"metadata": meta})
        found = kubeapi.read_config_map(api, "kube-system", name)
        assert found
        return str(found["metadata"]["name"])

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(work, range(64))) == [f"n{at % 16}" for at in range(64)]


# --- no answer ------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["get", "post", "apply"])
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(hang(), id="silence"),
        pytest.param(say("{}", headers={"Content-Length": "x"}), id="no length"),
        pytest.param(say("{}", headers={"Content-Length": "-5"}), id="a negative length"),
        pytest.param(say("{}", headers={"Content-Length": "50"}), id="too large a length"),
        pytest.param(say('{"a":"b"}', hang_after=3), id="half an answer"),
        pytest.param(say(" " * 1000, pause_s=0.05, piece_bytes=1), id="blank after blank"),
    ],
)
def test_a_server_is_not_waited_for(
    server: FakeApiServer, tmp_path: Path, call: str, fault: Fault
) -> None:
    server.fail(fault)
    with talking(server.url, tmp_path, timeout_s=0.1) as api:
        error = complaint(lambda: CALLS[call](api))
        assert str(error).endswith("no answer within 0.1 s")


@pytest.mark.parametrize("call", ["get", "stream"])
def test_a_refusal_is_not_waited_for(server: FakeApiServer, tmp_path: Path, call: str) -> None:
    server.fail(say(" " * 1000, 500, pause_s=0.05, piece_bytes=1))
    with talking(server.url, tmp_path, timeout_s=0.5) as api:
        assert complaint(lambda: CALLS[call](api)).status == 500


def test_a_watch_must_begin_in_time(server: FakeApiServer, tmp_path: Path) -> None:
    server.fail(hang())
    with talking(server.url, tmp_path, timeout_s=0.1) as api:
        assert "no answer within 0.1 s" in str(complaint(lambda: list(api.stream(NODES, {}))))


@pytest.mark.parametrize("call", ["get", "apply", "stream"])
@pytest.mark.parametrize(
    "fault",
    [hang(), say('{"a":"b"}', hang_after=3), slow(30.0)],
    ids=["silence", "half an answer", "a slow one"],
)
def test_closing_ends_what_is_under_way(
    server: FakeApiServer, api: Api, call: str, fault: Fault
) -> None:
    server.fail(fault, concerns=lambda request: request.method != "PUT")
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(CALLS[call], api)
        server.wait_for(lambda: server.requests)
        api.close()
        complaint(lambda: asked.result(timeout=PATIENCE_S))


def test_what_is_closed_is_not_asked(server: FakeApiServer, api: Api) -> None:
    kubeapi.read_node(api, NODE)
    api.close()
    api.close()
    for call in CALLS.values():
        complaint(lambda call=call: call(api))  # type: ignore[misc]
    assert len(server.requests) == 1


def test_nobody_listens(server: FakeApiServer, tmp_path: Path) -> None:
    server.stop()
    with talking(server.url, tmp_path) as api:
        error = complaint(lambda: kubeapi.read_node(api, NODE))
        assert (error.status, "Connection refused" in str(error)) == (None, True)
        server.start()
        kubeapi.read_node(api, NODE)


@pytest.mark.parametrize(
    "url",
    ["", "x", "127.0.0.1:6443", "ftp://127.0.0.1", "https://", "http://127.0.0.1:x",
     "http://127.0.0.1:0", "http://127.0.0.1:99999", "http://[::1", "http://a b", "http://\x1b[1m",
     "http://" + "a" * 300, "http://.invalid", "http://ü.invalid", "http://127.0.0.1:1/a?b#c"],
)  # fmt: skip
@pytest.mark.parametrize("call", ["get", "stream"])
def test_urls_that_are_none(url: str, call: str, tmp_path: Path) -> None:
    with talking(url, tmp_path, timeout_s=5.0) as api:
        assert complaint(lambda: CALLS[call](api)).status is None


def test_no_proxy_is_asked(
    server: FakeApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
        monkeypatch.setenv(name.upper(), "http://127.0.0.1:9")
    with talking(server.url, tmp_path) as api:
        kubeapi.read_node(api, NODE)


@contextlib.contextmanager
def peer(answer: bytes) -> Iterator[str]:
    """Says `answer` to everybody who asked, and hangs up."""
    listener = socket.create_server(("127.0.0.1", 0))

    def talk() -> None:
        while True:
            try:
                client = listener.accept()[0]
            except OSError:
                return
            with contextlib.suppress(OSError), client:
                client.recv(100_000)
                client.sendall(answer)

    thread = threading.Thread(target=talk)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


@pytest.mark.parametrize(
    "answer",
    [b"", b"\r\n", b"hello\r\n\r\n", b"HTTP/1.1 2x0 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\n",
     b"HTTP/9.9 200 OK\r\n\r\n{}", b"HTTP/1.1 100 Continue\r\n\r\n" * 3, b"\x16\x03\x01\x02\x00",
     b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\nzz",
     b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
     b"-5\r\n{}\r\n0\r\n\r\n",
     b"HTTP/1.1 200 OK\r\n\xff\xfe: \xff\r\n\r\n", b"HTTP/1.1 200 \xff\xff\r\n\r\n"],
)  # fmt: skip
@pytest.mark.parametrize("call", ["get", "post", "stream"])
def test_peers_that_do_not_speak_http(answer: bytes, call: str, tmp_path: Path) -> None:
    with peer(answer) as url, talking(url, tmp_path) as api:
        assert url in str(complaint(lambda: CALLS[call](api)))


def test_nothing_stays_open(server: FakeApiServer, tmp_path: Path) -> None:
    def work() -> None:
        with talking(server.url, tmp_path, timeout_s=0.1) as api:
            for fault in (refuse(500), disconnect(), cut(3), hang(), say("[]"), say("", 302)):
                server.fail(fault)
                for call in ("get", "apply", "stream"):
                    with contextlib.suppress(KubeApiError):
                        CALLS[call](api)
                server.heal()

    work()
    server.wait_for(lambda: not server.open)
    before = len(os.listdir("/proc/self/fd"))
    work()
    server.wait_for(lambda: not server.open)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_large_answer_is_bounded(
    server: FakeApiServer, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    length = 1 << 20
    body = json.dumps({"a": "x" * (length - 9)})
    monkeypatch.setattr(answers, "_LARGEST", length)
    server.fail(say(body), times=1)
    assert len(api.get(NODES)["a"]) == length - 9
    server.fail(say(f"{body} "), times=1)
    assert "the answer is larger than 1,024 KiB" in str(complaint(lambda: api.get(NODES)))


# --- what refusals say ----------------------------------------------------------------------------


def test_a_refusal_says_who_said_what(server: FakeApiServer, api: Api) -> None:
    server.users = {"": User(name="agent", rules=())}
    error = complaint(lambda: kubeapi.read_node(api, NODE))
    assert error.status == 403
    assert f"{server.url}{NODES}/{NODE}" in str(error)
    assert "403" in str(error)
    assert 'User "agent" cannot get resource "nodes"' in str(error)


def test_a_redirection_is_not_followed(server: FakeApiServer, api: Api) -> None:
    with FakeApiServer() as other:
        server.fail(say("", 302, headers={"Location": f"{other.url}{NODES}"}))
        assert complaint(lambda: api.get(NODES)).status == 302
        assert other.requests == []


def test_a_missing_crd_is_told_from_a_missing_object(server: FakeApiServer, api: Api) -> None:
    assert kubeapi.read_topology(api, NODE) is None
    server.resources.remove(TOPOLOGIES)
    for call in ("read topology", "apply topology", "replace topology"):
        error = complaint(lambda call=call: CALLS[call](api))  # type: ignore[misc]
        assert error.status == 404
        assert "CustomResourceDefinition" in str(error)
    assert kubeapi.served(api, TOPOLOGIES.group, "v1alpha2") == ()


# --- what is written ------------------------------------------------------------------------------


def test_a_topology(server: FakeApiServer, api: Api) -> None:
    zones = [{"name": "node-0", "type": "Node"}]
    made = kubeapi.apply_topology(api, topology(zones=zones))
    assert server.get("noderesourcetopologies", NODE) == made
    assert made["zones"] == zones
    entry = made["metadata"]["managedFields"][0]
    assert (entry["manager"], entry["operation"]) == ("numalet", "Apply")
    assert kubeapi.read_topology(api, NODE) == made


def test_a_topology_is_taken_from_its_owner(server: FakeApiServer, api: Api) -> None:
    server.put("noderesourcetopologies", topology(), manager="koordlet")
    kubeapi.apply_topology(api, topology(zones=[{"name": "node-0"}]))
    current = kubeapi.read_topology(api, NODE)
    assert current
    assert current["zones"] == [{"name": "node-0"}]


def test_a_replaced_topology(server: FakeApiServer, api: Api) -> None:
    old = server.put("noderesourcetopologies", topology(), manager="koordlet")
    new = kubeapi.replace_topology(api, old | {"zones": [{"name": "node-0"}]})
    assert new["metadata"]["managedFields"][-1]["manager"] == "numalet"
    assert complaint(lambda: kubeapi.replace_topology(api, old)).status == 409
    server.remove("noderesourcetopologies", NODE)
    assert complaint(lambda: kubeapi.replace_topology(api, new)).status == 404


def test_strange_letters_arrive(server: FakeApiServer, api: Api) -> None:
    text = 'ü€😀\u2028\x7f"\\\n\t{}'
    kubeapi.apply_config_map(api, config_map(a=text))
    found = server.get("configmaps", "cm", "kube-system")
    assert found
    assert found["data"]["a"] == text


def test_names_are_quoted(server: FakeApiServer, api: Api) -> None:
    for name in ("../../secrets", "a?b=c", "a%2Fb", "a/b", "ü", "a\nb"):
        with contextlib.suppress(KubeApiError):
            kubeapi.read_node(api, name)
    assert [request.path.count("/") for request in server.requests] == [4] * 6
    assert [request.query for request in server.requests] == [{}] * 6


def test_config_maps(server: FakeApiServer, api: Api) -> None:
    assert kubeapi.read_config_map(api, "kube-system", "cm") is None
    assert kubeapi.read_config_map(api, "none", "cm") is None
    kubeapi.apply_config_map(api, config_map(a="1", b="2"))
    kubeapi.apply_config_map(api, config_map(a="2"))
    found = kubeapi.read_config_map(api, "kube-system", "cm")
    assert found
    assert found["data"] == {"a": "2"}


def test_devices(server: FakeApiServer, api: Api) -> None:
    assert kubeapi.read_device(api, DEVICE_VERSION, NODE) is None
    made = kubeapi.apply_device(api, device())
    assert kubeapi.read_device(api, DEVICE_VERSION, NODE) == made
    server.resources.remove(KOORDINATOR_DEVICES)
    for call in ("read device", "apply device"):
        error = complaint(lambda call=call: CALLS[call](api))  # type: ignore[misc]
        assert (error.status, "CustomResourceDefinition" in str(error)) == (404, True)


def test_events(server: FakeApiServer, api: Api) -> None:
    kubeapi.create_event(api, EVENT)
    assert [item["reason"] for item in server.all("events", "default")] == ["Pinned"]
    assert complaint(lambda: kubeapi.create_event(api, EVENT)).status == 409
    elsewhere = EVENT | {"metadata": {"name": "pod.2", "namespace": "gone"}}
    assert complaint(lambda: kubeapi.create_event(api, elsewhere)).status == 404


def test_a_node_owns_what_is_told_of_it(server: FakeApiServer, api: Api) -> None:
    node = kubeapi.read_node(api, NODE)
    assert kubeapi.owner_of(node) == {
        "apiVersion": "v1", "kind": "Node", "name": NODE, "uid": node["metadata"]["uid"]
    }  # fmt: skip


@pytest.mark.parametrize(
    "node",
    [{}, {"metadata": []}, {"metadata": {"name": NODE}}, {"metadata": {"name": 1, "uid": "a"}},
     {"metadata": {"name": NODE, "uid": None}}, {"metadata": {"name": "", "uid": "a"}}],
)  # fmt: skip
def test_a_node_that_can_own_nothing(node: dict[str, Any]) -> None:
    complaint(lambda: kubeapi.owner_of(node))


def test_labels(server: FakeApiServer, api: Api) -> None:
    server.put("nodes", {"metadata": {"name": NODE, "labels": {"a": "1", "b": "1", "c": "1"}}})
    assert kubeapi.label_node(api, NODE, {"a": "1", "b": "2", "c": None, "d": None}) is True
    assert server.writes[0].body == {"metadata": {"labels": {"b": "2", "c": None}}}
    node = server.get("nodes", NODE)
    assert node
    assert node["metadata"]["labels"] == {"a": "1", "b": "2"}
    assert kubeapi.label_node(api, NODE, {"a": "1", "b": "2"}) is False
    assert len(server.writes) == 1


def test_a_label_that_kubernetes_refuses(server: FakeApiServer, api: Api) -> None:
    assert complaint(lambda: kubeapi.label_node(api, NODE, {"a": "b c"})).status == 422


STARTING = {"key": "numalet.io/starting", "effect": "NoSchedule"}
OTHER = {"key": "other", "effect": "NoExecute"}


def taint(server: FakeApiServer, *taints: dict[str, str]) -> dict[str, Any]:
    return server.put("nodes", {"metadata": {"name": NODE}, "spec": {"taints": list(taints)}})


def taints(server: FakeApiServer) -> list[dict[str, str]]:
    node = server.get("nodes", NODE)
    assert node
    return node["spec"].get("taints") or []


def test_a_taint_is_taken(server: FakeApiServer, api: Api) -> None:
    both = [STARTING, OTHER, STARTING | {"effect": "NoExecute"}]
    node = taint(server, *both)
    assert kubeapi.untaint_node(api, node, STARTING["key"]) is True
    assert taints(server) == [OTHER]
    assert kubeapi.untaint_node(api, kubeapi.read_node(api, NODE), STARTING["key"]) is False
    assert len(server.writes) == 1


def test_a_taint_that_came_meanwhile_stays(server: FakeApiServer, api: Api) -> None:
    old = taint(server, STARTING)
    taint(server, STARTING, OTHER)
    assert kubeapi.untaint_node(api, old, STARTING["key"]) is True
    assert taints(server) == [OTHER]


def test_a_node_that_changes_all_the_time(server: FakeApiServer, api: Api) -> None:
    node = taint(server, STARTING)
    server.fail(refuse(409), concerns=lambda request: request.method == "PATCH")
    error = complaint(lambda: kubeapi.untaint_node(api, node, STARTING["key"]))
    assert error.status == 409
    assert len(server.writes) <= 10


@pytest.mark.parametrize("spec", [{}, {"taints": None}, {"taints": []}])
def test_a_node_without_taints(server: FakeApiServer, api: Api, spec: dict[str, Any]) -> None:
    node = server.put("nodes", {"metadata": {"name": NODE}, "spec": spec})
    assert kubeapi.untaint_node(api, node, STARTING["key"]) is False
    assert server.writes == []


# --- what we may, and what there is ---------------------------------------------------------------


def test_rights(server: FakeApiServer, api: Api) -> None:
    rule = Rule(verbs=("patch",), resources=("nodes/status",), names=(NODE,))
    server.users = {"": User(name="agent", rules=(rule,))}
    asked = ("patch", "", "nodes")
    assert kubeapi.may(api, *asked, name=NODE, subresource="status") is True
    assert kubeapi.may(api, *asked, name=NODE) is False
    assert kubeapi.may(api, *asked, name="other", subresource="status") is False
    assert kubeapi.may(api, "get", "", "nodes", name=NODE, subresource="status") is False


def test_what_is_served(server: FakeApiServer, api: Api) -> None:
    assert kubeapi.served(api, TOPOLOGIES.group, "v1alpha2") == ("noderesourcetopologies",)
    assert kubeapi.served(api, TOPOLOGIES.group, "v1beta1") == ()
    assert kubeapi.served(api, "none.example.com", "v1") == ()
    assert set(kubeapi.served(api, "", "v1")) == {
        "configmaps", "events", "namespaces", "nodes", "pods"
    }  # fmt: skip
