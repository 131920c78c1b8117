"""agent.fakes.apiserver against what is known of the real one, with a client that knows nothing.

Expected values are Kubernetes' own: its API conventions, and what kube-apiserver 1.36 answers.
"""

import http.client
import json
import shutil
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.fakes.apiserver import (
    TOPOLOGIES,
    FakeApiServer,
    Fault,
    Rule,
    User,
    cut,
    disconnect,
    events,
    hang,
    lay_out_account,
    refuse,
    say,
    slow,
    watch_error,
)
from agent.fakes.certificates import Certificate, issue, make_authority

PATIENCE_S = 20.0
NODES = "/api/v1/nodes"
PODS = "/api/v1/namespaces/default/pods"
NRT = "/apis/topology.node.k8s.io/v1alpha2/noderesourcetopologies"
NRT_KIND = {"apiVersion": "topology.node.k8s.io/v1alpha2", "kind": "NodeResourceTopology"}
APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"


@pytest.fixture
def server() -> Iterator[FakeApiServer]:
    with FakeApiServer() as server:
        yield server


def connect(
    server: FakeApiServer, authority: Certificate | None = None, timeout_s: float = PATIENCE_S
) -> http.client.HTTPConnection:
    if authority:
        context = ssl.create_default_context(cafile=authority.chain)
        return http.client.HTTPSConnection(
            "127.0.0.1", server.port, timeout=timeout_s, context=context
        )
    return http.client.HTTPConnection("127.0.0.1", server.port, timeout=timeout_s)


def ask(
    server: FakeApiServer,
    method: str,
    path: str,
    body: object = None,
    content_type: str = "application/json",
    token: str = "",
    **how: Any,
) -> tuple[int, Any]:
    """Status and what the body says: JSON if it can be, else the text."""
    connection = connect(server, **how)
    headers = {"Content-Type": content_type, "User-Agent": "curl/8.0"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        text = response.read().decode()
    finally:
        connection.close()
    is_json = response.headers["Content-Type"] == "application/json"
    return response.status, json.loads(text) if is_json else text


def refusal(server: FakeApiServer, *request: Any, **how: Any) -> tuple[int, str, str]:
    code, body = ask(server, *request, **how)
    assert (body["kind"], body["status"], body["code"]) == ("Status", "Failure", code)
    return code, body["reason"], body["message"]


def node(name: str, **meta: Any) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, **meta}}


def pod(name: str, node: str) -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": {"nodeName": node}}


def topology(name: str = "n1", **fields: Any) -> dict[str, Any]:
    return {**NRT_KIND, "metadata": {"name": name}, **fields}


def apply(
    server: FakeApiServer, manager: str, body: object, force: bool = False
) -> tuple[int, dict[str, Any]]:
    query = f"fieldManager={manager}&force={str(force).lower()}"
    return ask(server, "PATCH", f"{NRT}/n1?{query}", body, APPLY)


def owned(item: dict[str, Any]) -> dict[tuple[str, str], Any]:
    entries = item["metadata"]["managedFields"]
    return {(entry["manager"], entry["operation"]): entry["fieldsV1"] for entry in entries}


# --- objects --------------------------------------------------------------------------------------


def test_an_object_s_life(server: FakeApiServer) -> None:
    code, made = ask(server, "POST", NODES, node("n1"))
    assert code == 201
    assert made["metadata"].keys() >= {"uid", "resourceVersion", "creationTimestamp"}
    assert ask(server, "GET", f"{NODES}/n1") == (200, made)
    made["metadata"]["labels"] = {"a": "b"}
    code, changed = ask(server, "PUT", f"{NODES}/n1", made)
    assert (code, changed["metadata"]["labels"]) == (200, {"a": "b"})
    assert changed["metadata"]["uid"] == made["metadata"]["uid"]
    assert int(changed["metadata"]["resourceVersion"]) > int(made["metadata"]["resourceVersion"])
    code, gone = ask(server, "DELETE", f"{NODES}/n1")
    assert (code, gone["status"]) == (200, "Success")
    assert refusal(server, "GET", f"{NODES}/n1") == (404, "NotFound", 'nodes "n1" not found')


def test_a_write_that_changes_nothing_makes_no_version(server: FakeApiServer) -> None:
    before = server.put("nodes", node("n1", labels={"a": "b"}))
    patch = {"metadata": {"labels": {"a": "b"}}}
    assert ask(server, "PATCH", f"{NODES}/n1", patch, MERGE) == (200, before)


def test_an_old_version_is_refused(server: FakeApiServer) -> None:
    old = server.put("nodes", node("n1"))
    server.put("nodes", node("n1", labels={"a": "b"}))
    code, reason, message = refusal(server, "PUT", f"{NODES}/n1", old)
    assert (code, reason) == (409, "Conflict")
    assert message.startswith('Operation cannot be fulfilled on nodes "n1": the object has been')
    patch = {"metadata": {"resourceVersion": old["metadata"]["resourceVersion"]}}
    assert refusal(server, "PATCH", f"{NODES}/n1", patch, MERGE)[0] == 409


def test_only_built_in_resources_are_updated_without_a_version(server: FakeApiServer) -> None:
    server.put("nodes", node("n1"))
    server.put("noderesourcetopologies", topology(zones=[]))
    assert ask(server, "PUT", f"{NODES}/n1", node("n1", labels={"a": "b"}))[0] == 200
    code, _, message = refusal(server, "PUT", f"{NRT}/n1", topology(zones=[]))
    assert (code, message.endswith("must be specified for an update")) == (422, True)


def test_generated_names_and_generations(server: FakeApiServer) -> None:
    body = {**NRT_KIND, "metadata": {"generateName": "n-"}, "zones": []}
    names = {ask(server, "POST", NRT, body)[1]["metadata"]["name"] for _ in range(3)}
    assert len(names) == 3
    assert all(name.startswith("n-") and len(name) == 7 for name in names)
    made = server.put("noderesourcetopologies", topology(zones=[]))
    relabelled = server.put("noderesourcetopologies", made | {"zones": []})
    changed = server.put("noderesourcetopologies", topology(zones=[{"name": "node-0"}]))
    generations = [item["metadata"]["generation"] for item in (made, relabelled, changed)]
    assert generations == [1, 1, 2]


@pytest.mark.parametrize(
    ("request_", "code", "reason"),
    [
        pytest.param(("POST", NODES, node("n1")), 409, "AlreadyExists", id="a name that is taken"),
        pytest.param(("POST", NODES, node("N_1")), 422, "Invalid", id="a name that is none"),
        pytest.param(("POST", NODES, node("n2", labels={"a": "b c"})), 422, "Invalid",
                     id="a label with a blank"),
        pytest.param(("POST", NODES, node("n2", annotations={"a": "x" * (256 << 10)})), 422,
                     "Invalid", id="annotations that are too long"),
        pytest.param(("POST", NODES, topology()), 400, "BadRequest", id="another kind"),
        pytest.param(("POST", NODES, []), 400, "BadRequest", id="no object"),
        pytest.param(("PUT", f"{NODES}/n1", node("n2")), 400, "BadRequest", id="another name"),
        pytest.param(("PATCH", f"{NODES}/n1", {}, "text/plain"), 415, "UnsupportedMediaType",
                     id="no patch"),
        pytest.param(("POST", "/api/v1/namespaces/none/configmaps",
                      {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}}),
                     404, "NotFound", id="a namespace that is missing"),
        pytest.param(("POST", f"{NODES}/n1", node("n1")), 405, "MethodNotAllowed",
                     id="no such verb"),
        pytest.param(("GET", f"{NODES}?fieldSelector=spec.x%3D1"), 400, "BadRequest",
                     id="a field that cannot be selected"),
        pytest.param(("POST", NODES, node("n2", annotations={"a": "x" * (4 << 20)})), 413,
                     "RequestEntityTooLarge", id="a body that is too large"),
        pytest.param(("PATCH", f"{NRT}/n1", topology(), APPLY), 422, "Invalid",
                     id="apply without a manager"),
    ],
)  # fmt: skip
def test_refusals(server: FakeApiServer, request_: Any, code: int, reason: str) -> None:
    server.put("nodes", node("n1"))
    assert refusal(server, *request_)[:2] == (code, reason)


@pytest.mark.parametrize(
    ("content_type", "patch", "taints"),
    [
        pytest.param(MERGE, {"spec": {"taints": [{"key": "c"}]}}, [{"key": "c"}], id="a merge"),
        pytest.param(MERGE, {"spec": {"taints": None}}, None, id="a merge that takes away"),
        pytest.param(JSON_PATCH, [{"op": "test", "path": "/spec/taints/0/key", "value": "a"},
                                  {"op": "remove", "path": "/spec/taints/0"}], [{"key": "b"}],
                     id="a tested removal"),
        pytest.param(JSON_PATCH, [{"op": "add", "path": "/spec/taints/-", "value": {"key": "c"}}],
                     [{"key": "a"}, {"key": "b"}, {"key": "c"}], id="an addition"),
    ],
)  # fmt: skip
def test_patches(server: FakeApiServer, content_type: str, patch: Any, taints: Any) -> None:
    server.put("nodes", node("n1") | {"spec": {"taints": [{"key": "a"}, {"key": "b"}]}})
    code, patched = ask(server, "PATCH", f"{NODES}/n1", patch, content_type)
    assert (code, patched["spec"].get("taints")) == (200, taints)


def test_a_json_patch_whose_test_fails(server: FakeApiServer) -> None:
    before = server.put("nodes", node("n1", labels={"a": "b"}))
    patch = [{"op": "test", "path": "/metadata/labels/a", "value": "c"}]
    assert refusal(server, "PATCH", f"{NODES}/n1", patch, JSON_PATCH)[:2] == (422, "Invalid")
    assert server.get("nodes", "n1") == before


def test_status_is_written_apart(server: FakeApiServer) -> None:
    server.put("nodes", node("n1") | {"status": {"phase": "a"}})
    changed = node("n1", labels={"a": "b"}) | {"status": {"phase": "b"}}
    assert ask(server, "PUT", f"{NODES}/n1", changed)[1]["status"] == {"phase": "a"}
    assert ask(server, "PUT", f"{NODES}/n1/status", changed)[1]["status"] == {"phase": "b"}


def test_an_object_with_a_finalizer_goes_with_it(server: FakeApiServer) -> None:
    server.put("nodes", node("n1", finalizers=["a/b"]))
    ask(server, "DELETE", f"{NODES}/n1")
    assert "deletionTimestamp" in ask(server, "GET", f"{NODES}/n1")[1]["metadata"]
    ask(server, "PATCH", f"{NODES}/n1", {"metadata": {"finalizers": None}}, MERGE)
    assert ask(server, "GET", f"{NODES}/n1")[0] == 404


# --- server-side apply ----------------------------------------------------------------------------


def test_apply_makes_and_owns(server: FakeApiServer) -> None:
    owner = {"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "u1"}
    body = topology(zones=[{"name": "node-0"}], topologyPolicies=["None"])
    body["metadata"] |= {"labels": {"a": "b"}, "ownerReferences": [owner]}
    code, made = apply(server, "numalet", body)
    assert (code, made["zones"]) == (201, [{"name": "node-0"}])
    assert owned(made) == {
        ("numalet", "Apply"): {
            "f:metadata": {"f:labels": {"f:a": {}},
                           "f:ownerReferences": {'k:{"uid":"u1"}': {}}},
            "f:topologyPolicies": {},
            "f:zones": {},
        }
    }  # fmt: skip
    assert apply(server, "numalet", body) == (200, made)


def test_what_is_not_applied_any_more_goes(server: FakeApiServer) -> None:
    body = topology(zones=[], attributes=[{"name": "a", "value": "b"}])
    body["metadata"]["labels"] = {"a": "b"}
    apply(server, "numalet", body)
    _, changed = apply(server, "numalet", topology(zones=[]))
    assert ("attributes" in changed, "labels" in changed["metadata"]) == (False, False)


def test_what_somebody_else_owns_too_stays(server: FakeApiServer) -> None:
    apply(server, "numalet", topology(zones=[], attributes=[]))
    assert apply(server, "other", topology(attributes=[]))[0] == 200
    _, changed = apply(server, "numalet", topology(zones=[]))
    assert changed["attributes"] == []
    assert owned(changed)["other", "Apply"] == {"f:attributes": {}}


def test_apply_meets_another_owner(server: FakeApiServer) -> None:
    zones = [{"name": "node-0"}]
    server.put("noderesourcetopologies", topology(zones=[]), manager="koordlet")
    code, refused = apply(server, "numalet", topology(zones=zones))
    assert (code, refused["reason"]) == (409, "Conflict")
    cause = refused["details"]["causes"][0]
    assert (cause["reason"], cause["field"]) == ("FieldManagerConflict", ".zones")
    assert cause["message"] == 'conflict with "koordlet" using topology.node.k8s.io/v1alpha2'
    code, taken = apply(server, "numalet", topology(zones=zones), force=True)
    assert (code, taken["zones"]) == (200, zones)
    assert owned(taken) == {("numalet", "Apply"): {"f:zones": {}}}


def test_an_update_takes_what_it_changes(server: FakeApiServer) -> None:
    apply(server, "numalet", topology(zones=[], topologyPolicies=["None"]))
    patch = {"zones": [{"name": "node-0"}], "metadata": {"labels": {"a": "b"}}}
    _, changed = ask(server, "PATCH", f"{NRT}/n1", patch, MERGE)
    assert owned(changed) == {
        ("numalet", "Apply"): {"f:topologyPolicies": {}},
        ("curl", "Update"): {"f:metadata": {"f:labels": {".": {}, "f:a": {}}}, "f:zones": {}},
    }
    assert apply(server, "numalet", topology(zones=[]))[0] == 409


def test_what_nobody_owned_before_the_first_apply(server: FakeApiServer) -> None:
    server.put("noderesourcetopologies", topology())
    _, changed = ask(server, "PATCH", f"{NRT}/n1", {"zones": []}, MERGE)
    assert "managedFields" not in changed["metadata"]
    code, refused = apply(server, "numalet", topology(zones=[{"name": "node-0"}]))
    assert (code, "before-first-apply" in refused["message"]) == (409, True)
    _, applied = apply(server, "numalet", topology(zones=[], topologyPolicies=[]))
    assert owned(applied) == {
        ("numalet", "Apply"): {"f:topologyPolicies": {}, "f:zones": {}},
        ("before-first-apply", "Update"): {"f:zones": {}},
    }


# --- lists and watches ----------------------------------------------------------------------------


def test_pages(server: FakeApiServer) -> None:
    for at in range(5):
        server.put("nodes", node(f"n{at}"))
    _, page = ask(server, "GET", f"{NODES}?limit=2")
    assert [item["metadata"]["name"] for item in page["items"]] == ["n0", "n1"]
    assert page["metadata"]["remainingItemCount"] == 3
    server.remove("nodes", "n2")
    following = f"{NODES}?limit=2&continue={page['metadata']['continue']}"
    _, second = ask(server, "GET", following)
    assert [item["metadata"]["name"] for item in second["items"]] == ["n2", "n3"]
    assert second["metadata"]["resourceVersion"] == page["metadata"]["resourceVersion"]
    server.store.compact()
    assert refusal(server, "GET", following)[:2] == (410, "Expired")


def test_items_of_built_in_lists_have_no_kind(server: FakeApiServer) -> None:
    server.put("nodes", node("n1"))
    server.put("noderesourcetopologies", topology(zones=[]))
    _, nodes = ask(server, "GET", NODES)
    _, topologies = ask(server, "GET", NRT)
    assert (nodes["kind"], "kind" in nodes["items"][0]) == ("NodeList", False)
    assert topologies["items"][0]["kind"] == "NodeResourceTopology"


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("fieldSelector=spec.nodeName%3Dn1", ["a", "b"]),
        ("fieldSelector=spec.nodeName!%3Dn1", ["c"]),
        ("fieldSelector=metadata.name%3Dc", ["c"]),
        ("labelSelector=x%3D1", ["a"]),
        ("labelSelector=x", ["a", "b"]),
        ("labelSelector=!x", ["c"]),
        ("labelSelector=x+in+(1,2),x!%3D2", ["a"]),
        ("labelSelector=x+notin+(1)", ["b", "c"]),
    ],
)
def test_selectors(server: FakeApiServer, query: str, names: list[str]) -> None:
    for name, where, labels in (("a", "n1", {"x": "1"}), ("b", "n1", {"x": "2"}), ("c", "n2", {})):
        item = pod(name, where)
        item["metadata"]["labels"] = labels
        server.put("pods", item)
    _, found = ask(server, "GET", f"{PODS}?{query}")
    assert [item["metadata"]["name"] for item in found["items"]] == names


class Watching:
    """A watch's events, one after the other."""

    def __init__(self, server: FakeApiServer, path: str) -> None:
        self.connection = connect(server)
        self.connection.request("GET", path)
        self.response = self.connection.getresponse()

    def next(self) -> tuple[str, Any] | None:
        line = self.response.readline()
        if not line:
            return None
        event = json.loads(line)
        meta = event["object"].get("metadata", {})
        return event["type"], meta.get("name", event["object"].get("code"))


def test_a_watch(server: FakeApiServer) -> None:
    _, listed = ask(server, "GET", PODS)
    version = listed["metadata"]["resourceVersion"]
    server.put("pods", pod("a", "n1"))
    watching = Watching(
        server,
        f"{PODS}?watch=true&allowWatchBookmarks=true&resourceVersion={version}"
        "&fieldSelector=spec.nodeName%3Dn1",
    )
    assert watching.next() == ("ADDED", "a")
    server.put("pods", pod("b", "n2"))
    server.put("pods", pod("a", "n1") | {"status": {"phase": "Running"}})
    assert watching.next() == ("MODIFIED", "a")
    server.store.bookmark()
    assert watching.next() == ("BOOKMARK", None)
    server.put("pods", pod("a", "n2"))
    assert watching.next() == ("DELETED", "a")
    server.put("pods", pod("b", "n1"))
    assert watching.next() == ("ADDED", "b")
    server.remove("pods", "b")
    assert watching.next() == ("DELETED", "b")
    server.end_watches()
    assert [watching.next(), watching.next()] == [("BOOKMARK", None), None]
    server.wait_for(lambda: server.watches == 0)


def test_a_watch_from_nowhere_begins_with_what_there_is(server: FakeApiServer) -> None:
    server.put("pods", pod("a", "n1"))
    watching = Watching(server, f"{PODS}?watch=1&timeoutSeconds=0.2")
    assert [watching.next(), watching.next()] == [("ADDED", "a"), None]


def test_a_watch_from_long_ago(server: FakeApiServer) -> None:
    server.put("pods", pod("a", "n1"))
    server.store.compact()
    watching = Watching(server, f"{PODS}?watch=1&resourceVersion=1")
    assert [watching.next(), watching.next()] == [("ERROR", 410), None]


def test_a_client_that_leaves_its_watch(server: FakeApiServer) -> None:
    watching = Watching(server, f"{PODS}?watch=1")
    server.wait_for(lambda: server.watches == 1)
    watching.response.close()
    watching.connection.close()
    server.wait_for(lambda: server.watches == 0)


# --- who may, and what there is -------------------------------------------------------------------


def test_headers_come_in_any_case(server: FakeApiServer) -> None:
    server.users = {"secret": User(name="agent")}
    connection = connect(server)
    connection.request("GET", NODES, headers={"authorization": "bearer secret"})
    assert connection.getresponse().status == 200
    connection.close()


def test_users(server: FakeApiServer) -> None:
    topologies = Rule(
        verbs=("get", "patch"), groups=(TOPOLOGIES.group,), resources=(TOPOLOGIES.plural,)
    )
    server.users = {"secret": User(name="agent", rules=(topologies,)), "root": User(name="root")}
    assert refusal(server, "GET", NODES)[:2] == (401, "Unauthorized")
    assert refusal(server, "GET", NODES, token="wrong")[:2] == (401, "Unauthorized")
    assert ask(server, "GET", NODES, token="root")[0] == 200
    assert refusal(server, "GET", f"{NODES}/n1", token="secret") == (
        403, "Forbidden",
        'nodes "n1" is forbidden: User "agent" cannot get resource "nodes" in API group "" at the '
        "cluster scope",
    )  # fmt: skip
    assert refusal(server, "GET", f"{PODS}?watch=1", token="secret")[2] == (
        'pods is forbidden: User "agent" cannot watch resource "pods" in API group "" in the '
        'namespace "default"'
    )
    path = f"{NRT}/n1?fieldManager=agent"
    message = refusal(server, "PATCH", path, topology(), APPLY, token="secret")[2]
    assert 'User "agent" cannot create resource' in message
    assert [request.user for request in server.requests] == [
        None, None, "root", "agent", "agent", "agent"
    ]  # fmt: skip
    assert [request.path for request in server.writes] == [f"{NRT}/n1"]


@pytest.mark.parametrize("verb", ["get", "delete"])
def test_reviews(server: FakeApiServer, verb: str) -> None:
    rule = Rule(verbs=("get",), resources=("nodes",))
    server.users = {"secret": User(name="agent", rules=(rule,))}
    body = {"spec": {"resourceAttributes": {"verb": verb, "resource": "nodes"}}}
    path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    code, review = ask(server, "POST", path, body, token="secret")
    assert (code, review["status"]["allowed"]) == (201, verb == "get")
    assert server.writes == []


def test_a_resource_that_is_not_served(server: FakeApiServer) -> None:
    assert ask(server, "GET", "/apis/topology.node.k8s.io/v1alpha2")[1]["groupVersion"] == (
        "topology.node.k8s.io/v1alpha2"
    )
    server.resources.remove(TOPOLOGIES)
    for path in ("/apis/topology.node.k8s.io/v1alpha2", NRT, f"{NRT}/n1"):
        assert ask(server, "GET", path) == (404, "404 page not found\n")
    groups = ask(server, "GET", "/apis")[1]["groups"]
    assert TOPOLOGIES.group not in [group["name"] for group in groups]


# --- faults ---------------------------------------------------------------------------------------


def test_faults_end_by_number(server: FakeApiServer) -> None:
    server.fail(refuse(429, retry_after_s=3), times=2, concerns=lambda one: one.method == "GET")
    codes = [ask(server, method, NODES)[0] for method in ("POST", "GET", "GET", "GET")]
    assert codes == [400, 429, 429, 200]
    server.fail(say("<html>", content_type="text/html"))
    assert ask(server, "GET", NODES) == (200, "<html>")
    server.heal()
    assert ask(server, "GET", NODES)[0] == 200


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        pytest.param(cut(10), http.client.IncompleteRead, id="cut in the body"),
        pytest.param(disconnect(), http.client.RemoteDisconnected, id="closed at once"),
        pytest.param(hang(), TimeoutError, id="silent"),
    ],
)
def test_faults_of_connections(server: FakeApiServer, fault: Fault, error: type[Exception]) -> None:
    server.fail(fault)
    with pytest.raises(error):
        ask(server, "GET", NODES, timeout_s=0.2 if error is TimeoutError else 20)


def test_a_slow_answer(server: FakeApiServer) -> None:
    server.fail(slow(1.0, piece_bytes=5))
    connection = connect(server)
    connection.request("GET", NODES)
    assert connection.getresponse().read1(1000) == b'{"kin'
    server.heal()
    connection.close()


def test_a_watch_that_is_told_what_to_say(server: FakeApiServer) -> None:
    server.fail(events(watch_error(410, "Expired", "too old"), "{]\n"))
    watching = Watching(server, f"{PODS}?watch=1&resourceVersion=1")
    assert watching.next() == ("ERROR", 410)
    assert watching.response.read() == b"{]\n"


def test_stopped_and_started_again(server: FakeApiServer) -> None:
    before, made = server.url, server.put("nodes", node("n1"))
    watching = Watching(server, f"{PODS}?watch=1")
    server.stop()
    with pytest.raises(http.client.IncompleteRead):
        watching.response.read()
    with pytest.raises(ConnectionRefusedError):
        ask(server, "GET", NODES)
    server.start()
    assert server.url == before
    assert ask(server, "GET", f"{NODES}/n1") == (200, made)


@pytest.mark.skipif(not shutil.which("openssl"), reason="openssl is not installed")
def test_certificates(tmp_path: Path) -> None:
    authority, other = make_authority(tmp_path / "a"), make_authority(tmp_path / "b")
    with FakeApiServer(issue(authority, "server")) as server:
        assert ask(server, "GET", NODES, authority=authority)[0] == 200
        server.rotate(issue(other, "server"))
        with pytest.raises(ssl.SSLCertVerificationError):
            ask(server, "GET", NODES, authority=authority)
        assert ask(server, "GET", NODES, authority=other)[0] == 200
        server.wait_for(lambda: server.tls_failures)
    lay_out_account(tmp_path / "account", "secret", other)
    assert (tmp_path / "account" / "ca.crt").read_bytes() == other.chain.read_bytes()
