"""The agent's rights on a real API server: that it needs each of them, and gets no others."""

import os
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import yaml

from tests.e2e.account import SYSTEM, mint_token
from tests.e2e.apiclient import APPLY, ApiError, Client
from tests.e2e.cluster import OVERLAYS, THIS_NODE, Cluster
from tests.e2e.kubelet import NODE
from tests.e2e.report import TOPOLOGY, make_foreign

OTHER = "other-node"
CONFIG_MAPS = "/api/v1/namespaces/kube-system/configmaps"
EVENTS = "/api/v1/namespaces/default/events"


# --- its own node's objects only ------------------------------------------------------------------


def make_topology(node: str) -> dict[str, Any]:
    return make_foreign(["node-0"]) | {"metadata": {"name": node}}


def make_config_map(node: str) -> dict[str, Any]:
    name, labels = f"numalet-topology-{node}", {"nodename": node}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "labels": labels},
        "data": {"devices": "{}"},
    }


def make_event(node: str) -> dict[str, Any]:
    return {
        "metadata": {"generateName": "one."},
        "involvedObject": {"kind": "Pod", "namespace": "default", "name": "one"},
        "source": {"component": "numalet", "host": node},
    }


_LABELS = {"metadata": {"labels": {"aliyun.accelerator/nvidia_count": "9"}}}

WRITES = [
    pytest.param("POST", TOPOLOGY, make_topology, id="create a report"),
    pytest.param("PATCH", f"{TOPOLOGY}/{{}}", make_topology, id="apply a report"),
    pytest.param("PATCH", "/api/v1/nodes/{}", lambda node: _LABELS, id="label a node"),
    pytest.param("POST", CONFIG_MAPS, make_config_map, id="create a ConfigMap for arena"),
    pytest.param(
        "PATCH",
        f"{CONFIG_MAPS}/numalet-topology-{{}}",
        make_config_map,
        id="apply a ConfigMap for arena",
    ),
    pytest.param("POST", EVENTS, make_event, id="say something on a pod"),
]


@pytest.fixture
def others(cluster: Cluster) -> None:
    """Another node, and its objects."""
    for path, body in [
        ("/api/v1/nodes", {"metadata": {"name": OTHER}}),
        (TOPOLOGY, make_topology(OTHER)),
        (CONFIG_MAPS, make_config_map(OTHER)),
    ]:
        assert cluster.admin.status("POST", path, body) in (200, 409)


def attempt(client: Client, method: str, path: str, body: Any) -> str:
    """What is said against it; nothing where it is done. Nothing is kept of it."""
    applied = "/nodes/" not in path
    try:
        if method == "PATCH" and applied:
            client.ask(method, f"{path}?dryRun=All&fieldManager=numalet&force=true", body, APPLY)
        elif method == "PATCH":
            client.patch(f"{path}?dryRun=All", body)
        else:
            client.ask(method, f"{path}?dryRun=All", body)
    except ApiError as error:
        return f"{error.status} {error.message}"
    return ""


def is_policys(answer: str) -> bool:
    return "ValidatingAdmissionPolicy" in answer


@pytest.mark.parametrize(("method", "path", "make"), WRITES)
def test_a_policy_refuses_what_is_about_another_node(
    cluster: Cluster, others: None, method: str, path: str, make: Callable[[str], Any]
) -> None:
    agent = cluster.account.client()

    def refused() -> bool:
        return is_policys(attempt(agent, method, path.format(OTHER), make(OTHER)))

    cluster.wait(refused, "it is refused", 30)
    assert attempt(agent, method, path.format(NODE), make(NODE))[:3] in ("", "409")


def test_a_policy_refuses_to_replace_another_nodes_report(cluster: Cluster, others: None) -> None:
    agent = cluster.account.client()
    for node, answer in ((OTHER, True), (NODE, False)):
        path = f"{TOPOLOGY}/{node}"
        body = agent.get(path)
        cluster.wait(
            lambda path=path, body=body, answer=answer: (
                is_policys(attempt(agent, "PUT", path, body)) == answer
            ),
            f"the policy has spoken about {node}",
        )


def test_a_token_that_is_bound_to_no_node_writes_nothing(cluster: Cluster) -> None:
    path = f"/api/v1/namespaces/{SYSTEM}/serviceaccounts/numalet/token"
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    token = cluster.admin.post(path, request)["status"]["token"]
    answer = attempt(
        cluster.server.client(token), "PATCH", f"{TOPOLOGY}/{NODE}", make_topology(NODE)
    )
    assert is_policys(answer)


def test_another_nodes_agent_may_write_what_this_one_may_not(
    cluster: Cluster, others: None
) -> None:
    other = cluster.server.client(mint_token(cluster.admin, "agent-elsewhere", OTHER))
    assert attempt(other, "PATCH", f"{TOPOLOGY}/{OTHER}", make_topology(OTHER)) == ""
    assert is_policys(attempt(other, "PATCH", f"{TOPOLOGY}/{NODE}", make_topology(NODE)))


@pytest.mark.parametrize("name", [f"unhealthy-gpu-{NODE}", f"{NODE}-device-status", "other"])
def test_a_policy_refuses_other_config_maps(cluster: Cluster, name: str) -> None:
    body = make_config_map(NODE)
    body["metadata"]["name"] = name
    answer = attempt(cluster.account.client(), "PATCH", f"{CONFIG_MAPS}/{name}", body)
    assert is_policys(answer)


CHANGES = [
    pytest.param({"metadata": {"labels": {"team": "a"}}}, id="another label"),
    pytest.param({"metadata": {"labels": {"ack.node.gpu.schedule": None}}}, id="a label removed"),
    pytest.param({"metadata": {"annotations": {"a": "b"}}}, id="an annotation"),
    pytest.param({"metadata": {"finalizers": ["a/b"]}}, id="a finalizer"),
    pytest.param({"spec": {"unschedulable": True}}, id="cordoned"),
    pytest.param({"spec": {"taints": [{"key": "a", "effect": "NoExecute"}]}}, id="a taint"),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_policy_refuses_other_changes_of_its_own_node(
    cluster: Cluster, change: dict[str, Any]
) -> None:
    assert is_policys(attempt(cluster.account.client(), "PATCH", THIS_NODE, change))


FORBIDDEN = [
    ("GET", "/api/v1/secrets"),
    ("GET", "/api/v1/namespaces/default/secrets/any"),
    ("GET", "/api/v1/nodes"),
    ("GET", CONFIG_MAPS),
    ("GET", f"/api/v1/namespaces/{SYSTEM}/configmaps/numalet"),
    ("POST", "/api/v1/namespaces/default/pods"),
    ("GET", "/api/v1/namespaces/default/pods/any"),
    ("DELETE", "/api/v1/namespaces/default/pods/any"),
    ("DELETE", THIS_NODE),
    ("DELETE", f"{TOPOLOGY}/{NODE}"),
    ("PATCH", f"{THIS_NODE}/status"),
    ("GET", f"{THIS_NODE}/proxy/pods"),
    ("GET", EVENTS),
    ("POST", f"/api/v1/namespaces/{SYSTEM}/serviceaccounts/numalet/token"),
]


@pytest.mark.parametrize(("method", "path"), FORBIDDEN, ids=lambda value: value)
def test_the_agent_may_not(cluster: Cluster, method: str, path: str) -> None:
    assert attempt(cluster.account.client(), method, path, {}).startswith("403")


# --- each right is needed -------------------------------------------------------------------------


def granted(cluster: Cluster) -> set[tuple[str, str]]:
    """(verb, resource) of the agent's roles."""
    path = "/apis/rbac.authorization.k8s.io/v1"
    roles = [
        cluster.admin.get(f"{path}/clusterroles/numalet"),
        cluster.admin.get(f"{path}/namespaces/kube-system/roles/numalet"),
    ]
    return {
        (verb, f"{resource}.{group}".rstrip("."))
        for role in roles
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_the_agent_uses_every_right_that_it_has(cluster: Cluster) -> None:
    """An agent that comes to a new node with a startup taint, and to an object of another's, and
    its doctor.

    Whoever applies what is not there yet creates it, which is a right of its own, as the test after
    this one shows.
    """
    config_map = f"{CONFIG_MAPS}/numalet-topology-{NODE}"
    cluster.rig.agent.stop()
    for path in (f"{TOPOLOGY}/{NODE}", config_map):
        cluster.admin.delete(path)
    taint = {"key": "numalet.io/starting", "effect": "NoSchedule"}
    cluster.admin.patch(THIS_NODE, {"spec": {"taints": [taint]}})
    before = len(cluster.deeds())
    cluster.rig.agent.start()
    cluster.wait_until_right()
    invalid = cluster.post_pod("invalid", annotations={"cpuset-scheduler": "required"})
    cluster.wait(lambda: cluster.events(invalid), "there is an Event", 60)
    cluster.wait(lambda: cluster.admin.find(config_map), "there is arena's ConfigMap", 60)
    cluster.wait(lambda: not cluster.node()["spec"].get("taints"), "the taint is gone", 60)
    cluster.rig.agent.examine()
    cluster.rig.agent.stop()
    cluster.admin.delete(f"{TOPOLOGY}/{NODE}")
    cluster.admin.post(f"{TOPOLOGY}?fieldManager=koordlet", make_foreign(["node-0", "node-1"]))
    cluster.rig.agent.start()
    cluster.wait(lambda: cluster.reported_gpus() == cluster.gpus(), "our GPUs are in it", 60)
    cluster.admin.delete(f"{TOPOLOGY}/{NODE}")
    deeds = cluster.deeds()[before:]
    used = {(deed.verb, deed.resource) for deed in deeds if deed.status < 400 or deed.status == 404}
    used |= {("create", deed.resource) for deed in deeds if deed.status == 201}
    assert granted(cluster) - used == set()
    assert [deed for deed in deeds if deed.status == 403] == []


ROLES = [
    pytest.param("clusterroles", f"{TOPOLOGY}/{NODE}", make_topology(NODE), id="a report"),
    pytest.param(
        "namespaces/kube-system/roles",
        f"{CONFIG_MAPS}/numalet-topology-{NODE}",
        make_config_map(NODE),
        id="a ConfigMap",
    ),
]


@pytest.mark.parametrize(("roles", "path", "body"), ROLES)
def test_what_is_not_there_cannot_be_applied_without_the_right_to_create_it(
    cluster: Cluster, roles: str, path: str, body: Any
) -> None:
    role = cluster.admin.get(f"/apis/rbac.authorization.k8s.io/v1/{roles}/numalet")
    fewer = [
        rule | {"verbs": [verb for verb in rule["verbs"] if verb != "create"]}
        for rule in role["rules"]
        if rule["verbs"] != ["create"]
    ]
    cluster.rig.agent.stop()
    cluster.admin.delete(path)
    where = f"/apis/rbac.authorization.k8s.io/v1/{roles}/numalet"
    try:
        cluster.admin.patch(where, {"rules": fewer})
        cluster.wait(
            lambda: attempt(cluster.account.client(), "PATCH", path, body).startswith("403"),
            "it is refused",
        )
    finally:
        cluster.admin.patch(where, {"rules": role["rules"]})
    cluster.wait(
        lambda: attempt(cluster.account.client(), "PATCH", path, body) == "", "it is taken"
    )


# --- what an administrator applies ----------------------------------------------------------------


def kustomize(cluster: Cluster, overlay: str, component: str = "") -> str:
    """What the API server says to the overlay and a component, without keeping it."""
    folder = cluster.rig.folder / f"overlay-{next(cluster.numbers)}"
    folder.mkdir()
    wanted: Mapping[str, list[str]] = {
        "resources": [os.path.relpath(OVERLAYS / overlay, folder)],
        "components": [
            os.path.relpath(OVERLAYS.parent / "components" / name, folder)
            for name in filter(None, [component])
        ],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(dict(wanted)))
    return cluster.kubectl("apply", "--dry-run=server", "--kustomize", folder)


@pytest.mark.parametrize("overlay", sorted(path.name for path in OVERLAYS.iterdir()))
def test_the_server_accepts_every_overlay(cluster: Cluster, overlay: str) -> None:
    assert "daemonset.apps/numalet " in kustomize(cluster, overlay)


COMPONENTS = ("without-nri", "runtime-class", "koordinator-device")


@pytest.mark.parametrize("component", COMPONENTS)
def test_the_server_accepts_the_components(cluster: Cluster, component: str) -> None:
    overlay = "koordinator" if component.startswith("koordinator") else "vanilla"
    assert "daemonset.apps/numalet " in kustomize(cluster, overlay, component)
