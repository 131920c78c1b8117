"""agent.edge.kubecluster against a fake API server, and kubeconfigs of all kinds."""

import json
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.edge import kubecluster
from agent.edge.kubecluster import Cluster, connect, list_nodes, list_topologies
from agent.errors import ConfigError, KubeApiError
from agent.fakes import certificates
from agent.fakes.apiserver import (
    TOPOLOGIES,
    FakeApiServer,
    Fault,
    Resource,
    Rule,
    User,
    cut,
    disconnect,
    hang,
    refuse,
    say,
)

PATIENCE_S = 20.0
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
Json = dict[str, Any]


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (*PROXIES, *map(str.upper, PROXIES), "KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture
def server() -> Iterator[FakeApiServer]:
    with FakeApiServer() as server:
        yield server


def config(url: str, name: str = "one", cluster: Json | None = None, **user: Any) -> Json:
    """A kubeconfig of one context."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": name,
        "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
        "clusters": [{"name": name, "cluster": {"server": url} | (cluster or {})}],
        "users": [{"name": name, "user": user}],
    }


def save(path: Path, content: object) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return str(path)


def reach(server: FakeApiServer, folder: Path, **user: Any) -> Cluster:
    return connect(save(folder / "config", config(server.url, **user)), timeout_s=PATIENCE_S)


def fill(server: FakeApiServer, count: int) -> list[str]:
    """So many nodes and reports; their names in order."""
    names = [f"gpu-{number:03}" for number in range(count)]
    for name in names:
        labels = {"odd": "yes"} if int(name[-1]) % 2 else {}
        server.put("nodes", {"metadata": {"name": name, "labels": labels}})
        server.put("noderesourcetopologies", {"metadata": {"name": name}, "zones": []})
    return names


def names_of(objects: Iterator[Json]) -> list[str]:
    return [one["metadata"]["name"] for one in objects]


LISTS: dict[str, Callable[[Cluster], Iterator[Json]]] = {
    "nodes": list_nodes,
    "noderesourcetopologies": list_topologies,
}
of_each_list = pytest.mark.parametrize("what", LISTS)


# --- what is there --------------------------------------------------------------------------------


@of_each_list
def test_everything_is_listed_page_by_page(
    server: FakeApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(kubecluster, "_PAGE", 3)
    names = fill(server, 7)
    assert names_of(LISTS[what](reach(server, tmp_path))) == names
    assert [request.query["limit"] for request in server.requests] == ["3"] * 3


@of_each_list
def test_an_empty_cluster_has_nothing(server: FakeApiServer, tmp_path: Path, what: str) -> None:
    assert names_of(LISTS[what](reach(server, tmp_path))) == []


@of_each_list
def test_one_is_asked_for_by_name(server: FakeApiServer, tmp_path: Path, what: str) -> None:
    fill(server, 3)
    cluster = reach(server, tmp_path)
    found = list_nodes if what == "nodes" else list_topologies
    assert names_of(found(cluster, name="gpu-001")) == ["gpu-001"]
    assert names_of(found(cluster, name="gpu-1")) == []


def test_nodes_are_selected_by_label(server: FakeApiServer, tmp_path: Path) -> None:
    fill(server, 4)
    assert names_of(list_nodes(reach(server, tmp_path), "odd=yes")) == ["gpu-001", "gpu-003"]


@of_each_list
def test_a_list_that_expires_between_pages_begins_anew(
    server: FakeApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(kubecluster, "_PAGE", 3)
    names = fill(server, 5)
    server.fail(refuse(410), times=1, concerns=lambda request: "continue" in request.query)
    assert names_of(LISTS[what](reach(server, tmp_path))) == [*names[:3], *names]


@of_each_list
def test_a_list_that_keeps_expiring_is_an_error(
    server: FakeApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(kubecluster, "_PAGE", 3)
    fill(server, 5)
    server.fail(refuse(410), concerns=lambda request: "continue" in request.query)
    assert complaint(server, tmp_path, what) == f"it refuses to list {what} (410): not now"


def test_where_only_the_older_version_is_served_that_is_read(
    server: FakeApiServer, tmp_path: Path
) -> None:
    server.resources.remove(TOPOLOGIES)
    server.resources.append(
        Resource(
            group=TOPOLOGIES.group,
            versions=("v1alpha1",),
            plural=TOPOLOGIES.plural,
            kind=TOPOLOGIES.kind,
        )
    )
    names = fill(server, 2)
    assert names_of(list_topologies(reach(server, tmp_path))) == names


def test_without_the_definition_of_the_resource_that_is_said(
    server: FakeApiServer, tmp_path: Path
) -> None:
    server.resources.remove(TOPOLOGIES)
    assert complaint(server, tmp_path, "noderesourcetopologies") == (
        "it has no noderesourcetopologies.topology.node.k8s.io: that definition (CRD) is not "
        "installed"
    )


# --- what can go wrong with the server ------------------------------------------------------------


def complaint(
    server: FakeApiServer, folder: Path, what: str, timeout_s: float = PATIENCE_S, **user: Any
) -> str:
    """The error's text after the URL, which is one line."""
    path = save(folder / "config", config(server.url, **user))
    cluster = connect(path, timeout_s=timeout_s)
    with pytest.raises(KubeApiError) as caught:
        list(LISTS[what](cluster))
    text = str(caught.value)
    assert text.startswith(f"{cluster.server}: ")
    assert text.isprintable()
    assert len(text) < 600
    return text.removeprefix(f"{cluster.server}: ")


FAULTS = {
    "it is overloaded": (refuse(429), "it refuses to list {what} (429): not now"),
    "it is broken": (refuse(500), "it refuses to list {what} (500): not now"),
    "it is starting": (refuse(503, 5), "it refuses to list {what} (503): not now"),
    "it speaks no Kubernetes": (
        say("<html>\r\nno\x1b[2J</html>", 502, "text/html"),
        "it refuses to list {what} (502): <html> no?[2J</html>",
    ),
    "it answers HTML": (say("<html>"), "its answer is not JSON; is this an API server?"),
    "it answers no object": (say("[]"), "its answer is no list of objects; is this an API server?"),
    "it answers an abyss": (
        say("[" * 100_000),
        "its answer is not JSON; is this an API server?",
    ),
    "it hangs up": (disconnect(), "the connection broke: "),
    "it breaks off": (cut(20), "the connection broke: "),
    "its list never ends": (
        say('{"metadata":{"continue":"same"},"items":[]}'),
        "the list of {what} does not end",
    ),
    "it redirects": (
        say("", 302, headers={"Location": "http://127.0.0.1:9/"}),
        "it refuses to list {what} (302)",
    ),
}


@of_each_list
@pytest.mark.parametrize(("fault", "sentence"), FAULTS.values(), ids=FAULTS)
def test_a_server_that_does_not_answer_well(
    server: FakeApiServer, tmp_path: Path, fault: Fault, sentence: str, what: str
) -> None:
    server.fail(fault)
    assert complaint(server, tmp_path, what).startswith(sentence.format(what=what))


def test_an_answer_without_end_is_not_read_to_the_end(
    server: FakeApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubecluster, "_LARGEST_PAGE", 2 << 20)
    server.fail(say(" " * (3 << 20)))
    assert complaint(server, tmp_path, "nodes") == "its answer is larger than 2 MiB"


@pytest.mark.parametrize("items", [None, 7, [7, None]])
def test_items_that_are_no_objects_are_none(
    server: FakeApiServer, tmp_path: Path, items: object
) -> None:
    server.fail(say(json.dumps({"metadata": 7, "items": items})))
    assert names_of(list_nodes(reach(server, tmp_path))) == []


def test_a_server_that_hangs_is_given_up(server: FakeApiServer, tmp_path: Path) -> None:
    server.fail(hang())
    assert complaint(server, tmp_path, "nodes", 0.2) == "it does not answer within 0.2 s"


def test_a_server_that_is_not_there(server: FakeApiServer, tmp_path: Path) -> None:
    server.stop()
    sentence = "it cannot be reached: nobody listens there"
    assert complaint(server, tmp_path, "nodes") == sentence


@pytest.mark.parametrize(
    ("url", "cluster", "sentence"),
    [
        ("http://a..b", {}, "Failed to parse: 'a..b'"),
        ("http://127.0.0.1:1", {"proxy-url": "http://127.0.0.1:9"}, "the proxy cannot be reached"),
    ],
    ids=["a host that is none", "a proxy that is not there"],
)
def test_a_way_that_leads_nowhere(tmp_path: Path, url: str, cluster: Json, sentence: str) -> None:
    path = save(tmp_path / "config", config(url, cluster=cluster))
    with pytest.raises(KubeApiError) as caught:
        list(list_nodes(connect(path, timeout_s=PATIENCE_S)))
    assert str(caught.value).startswith(f"{url}: {sentence}")


def test_nothing_is_tried_twice(server: FakeApiServer, tmp_path: Path) -> None:
    server.fail(disconnect())
    complaint(server, tmp_path, "nodes")
    server.fail(refuse(429, 1))
    complaint(server, tmp_path, "nodes")
    assert len(server.requests) == 2


# --- who we are -----------------------------------------------------------------------------------


def test_a_token_tells_who_we_are(server: FakeApiServer, tmp_path: Path) -> None:
    server.users["secret"] = User(name="ann")
    names = fill(server, 1)
    assert names_of(list_nodes(reach(server, tmp_path, token="secret"))) == names
    assert server.requests[0].user == "ann"


def test_a_stranger_is_told_to_log_in(server: FakeApiServer, tmp_path: Path) -> None:
    server.users["secret"] = User(name="ann")
    assert complaint(server, tmp_path, "nodes", token="guess") == (
        "it does not know who we are (401); log in anew, or give --context: Unauthorized"
    )


@of_each_list
def test_one_who_may_not_is_told_so(server: FakeApiServer, tmp_path: Path, what: str) -> None:
    rule = Rule(verbs=("get",), resources=("*",), groups=("*",))
    server.users["secret"] = User(name="ann", rules=(rule,))
    said = complaint(server, tmp_path, what, token="secret")
    assert said.startswith(f"we may not list {what} (403): {what}")
    assert 'User "ann" cannot list resource' in said


PLUGIN = """#!{python}
import json, os, sys
{body}
"""


def plugin(folder: Path, body: str) -> Json:
    path = folder / "plugin"
    path.write_text(PLUGIN.format(python=sys.executable, body=body))
    path.chmod(stat.S_IRWXU)
    return {"apiVersion": "client.authentication.k8s.io/v1", "command": str(path), "args": ["x"],
            "interactiveMode": "Never"}  # fmt: skip


def test_a_plugin_gives_the_token(server: FakeApiServer, tmp_path: Path) -> None:
    body = (
        "print(json.dumps({'apiVersion': 'client.authentication.k8s.io/v1', "
        "'kind': 'ExecCredential', 'status': {'token': 'secret'}}))"
    )
    server.users["secret"] = User(name="ann")
    names = fill(server, 1)
    assert names_of(list_nodes(reach(server, tmp_path, exec=plugin(tmp_path, body)))) == names


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("sys.exit('log in\\nfirst')", "exec: process returned 1. log in?first"),
        ("print('no')", "exec: failed to decode process output"),
        ("print('{}')", "exec: malformed response"),
    ],
    ids=["it fails", "it prints no JSON", "it prints too little"],
)
def test_a_plugin_that_gives_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], body: str, reason: str
) -> None:
    path = save(tmp_path / "config", config("http://127.0.0.1:9", exec=plugin(tmp_path, body)))
    with pytest.raises(ConfigError) as caught:
        connect(path)
    assert str(caught.value).startswith(f"{path}: it gives no credentials: {reason}")
    assert capfd.readouterr().err == ""


def test_a_plugin_that_is_not_installed(tmp_path: Path) -> None:
    exec_ = {"apiVersion": "client.authentication.k8s.io/v1", "command": "/no/such-plugin"}
    path = save(tmp_path / "config", config("http://127.0.0.1:9", exec=exec_))
    with pytest.raises(ConfigError, match=r"gives no credentials: .*'/no/such-plugin'$"):
        connect(path)


# --- a secure connection --------------------------------------------------------------------------


def test_the_servers_certificate_is_checked(tmp_path: Path) -> None:
    authority = certificates.make_authority(tmp_path / "ca")
    with FakeApiServer(certificates.issue(authority, "server")) as server:
        names = fill(server, 1)
        trusting = config(server.url, cluster={"certificate-authority": str(authority.chain)})
        good = connect(save(tmp_path / "good", trusting), timeout_s=PATIENCE_S)
        assert names_of(list_nodes(good)) == names
        said = complaint(server, tmp_path, "nodes")
        assert said.startswith("no secure connection to it: ")
        assert "CERTIFICATE_VERIFY_FAILED" in said


@pytest.mark.filterwarnings("error")
def test_a_certificate_is_not_checked_if_the_kubeconfig_says_so(tmp_path: Path) -> None:
    authority = certificates.make_authority(tmp_path / "ca")
    with FakeApiServer(certificates.issue(authority, "server")) as server:
        names = fill(server, 1)
        careless = config(server.url, cluster={"insecure-skip-tls-verify": True})
        cluster = connect(save(tmp_path / "config", careless), timeout_s=PATIENCE_S)
        assert names_of(list_nodes(cluster)) == names


# --- kubeconfigs ----------------------------------------------------------------------------------

A, B = "http://127.0.0.1:1", "http://127.0.0.1:2"


def test_the_current_context_or_a_named_one(tmp_path: Path) -> None:
    both, other = config(A, "a"), config(B, "b")
    for key in ("contexts", "clusters", "users"):
        both[key] += other[key]
    path = save(tmp_path / "config", both)
    assert connect(path).server == A
    assert connect(path, "b").server == B


def test_the_environment_names_one_or_several_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [save(tmp_path / "a", config(A, "a")), save(tmp_path / "b", config(B, "b"))]
    monkeypatch.setenv("KUBECONFIG", os.pathsep.join([str(tmp_path / "no"), *files]))
    assert connect("", "a").server == A
    assert connect("", "b").server == B
    assert connect(files[0]).server == A


def test_the_file_in_the_home_directory_comes_last(tmp_path: Path) -> None:
    save(tmp_path / "home" / ".kube" / "config", config(A))
    assert connect().server == A


def test_a_path_may_begin_at_home(tmp_path: Path) -> None:
    save(tmp_path / "home" / "mine", config(A))
    assert connect("~/mine").server == A


BAD_FILES = {
    "empty": ("", "it is no kubeconfig that can be used: Invalid kube-config."),
    "not YAML": ("a: [", "it is no kubeconfig that can be used: while parsing"),
    "a list": ("- 1", "it is no kubeconfig that can be used: "),
    "a text": ("no", "it is no kubeconfig that can be used: "),
    "a number": ("7", "it is no kubeconfig that can be used: "),
    "not text": ("\x00", "it is no kubeconfig that can be used: "),
    "contexts that are none": (
        config(A) | {"contexts": [7]},
        "it is no kubeconfig that can be used: ",
    ),
    "no current context": (
        {k: v for k, v in config(A).items() if k != "current-context"},
        "it has no current context; give --context",
    ),
    "a current context that is not there": (
        config(A) | {"current-context": "x"},
        "it is no kubeconfig that can be used: Invalid kube-config file. Expected object with name",
    ),
    "a cluster that is not there": (
        config(A) | {"clusters": []},
        "it is no kubeconfig that can be used: ",
    ),
    "an authority that is not there": (
        config("https://127.0.0.1:1", cluster={"certificate-authority": "/no/ca.crt"}),
        "it is no kubeconfig that can be used: File does not exist: /no/ca.crt",
    ),
    "a server that is no URL": (
        config("somewhere"),
        'the server "somewhere" is no URL like https://10.0.0.1:6443',
    ),
}


@pytest.mark.parametrize(("content", "sentence"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_kubeconfig_that_is_none(tmp_path: Path, content: object, sentence: str) -> None:
    path = save(tmp_path / "config", content)
    with pytest.raises(ConfigError) as caught:
        connect(path)
    assert str(caught.value).startswith(f"{path}: {sentence}")
    assert str(caught.value).isprintable()


def test_a_kubeconfig_that_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="it cannot be read: Is a directory"):
        connect(str(tmp_path))


def test_a_context_that_is_not_there(tmp_path: Path) -> None:
    path = save(tmp_path / "config", config(A))
    with pytest.raises(ConfigError, match=f'^{path}: there is no context "prod"$'):
        connect(path, "prod")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^{tmp_path}/x: there is no such file$"):
        connect(f"{tmp_path}/x")


@pytest.mark.parametrize("context", ["", "a"])
def test_no_kubeconfig_at_all(context: str) -> None:
    with pytest.raises(ConfigError, match=r"^~/\.kube/config: there is no such kubeconfig; give"):
        connect("", context)


def test_a_pod_without_service_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    if Path("/var/run/secrets/kubernetes.io/serviceaccount/token").exists():
        pytest.skip("this is a pod")
    with pytest.raises(ConfigError, match=r"^no kubeconfig, and no service account of a pod: "):
        connect()


def test_a_pods_service_account_serves_where_there_is_no_kubeconfig(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kubernetes.config import incluster_config

    authority = certificates.make_authority(tmp_path / "ca")
    with FakeApiServer(certificates.issue(authority, "server")) as server:
        names = fill(server, 1)
        server.users["secret"] = User(name="ann")
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.port))
        token = save(tmp_path / "token", "secret")
        monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", token)
        monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(authority.chain))
        assert names_of(list_nodes(connect(timeout_s=PATIENCE_S))) == names
