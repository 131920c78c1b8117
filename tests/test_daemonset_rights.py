"""What the agent may do in a cluster: rights and policies, held against what it asks for."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest

from agent.config import Config
from agent.core import ack
from agent.core.access import ACCESS, Access, Duty
from tests.manifests import BASE, COMPONENTS, FOLDER, OVERLAYS, Object, objects_in, one_of

# --- rights ---------------------------------------------------------------------------------------

ROLES: Final[Mapping[Path, tuple[str, frozenset[Duty]]]] = {
    BASE: ("", frozenset({Duty.REPORT, Duty.TAINT})),
    OVERLAYS / "ack": (ack.NAMESPACE, frozenset({Duty.ACK})),
    COMPONENTS / "koordinator-device": ("", frozenset({Duty.KOORDINATOR})),
    COMPONENTS / "without-nri": ("", frozenset({Duty.CGROUP})),
}
"""Folder → the namespace where it grants rights, none for everywhere, and what they are for."""


def _granted(role: Object) -> list[tuple[str, str, str]]:
    return [
        (verb, group, resource)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    ]


def _wanted(access: Access) -> tuple[str, str, str]:
    subresource = f"/{access.subresource}" if access.subresource else ""
    return access.verb, access.group, f"{access.resource}{subresource}"


@pytest.mark.parametrize("folder", ROLES, ids=lambda folder: folder.name)
def test_what_is_granted_is_what_the_agent_asks_for_and_no_more(folder: Path) -> None:
    namespace, duties = ROLES[folder]
    objects = objects_in(folder)
    role = one_of(objects, "Role" if namespace else "ClusterRole")
    binding = one_of(objects, "RoleBinding" if namespace else "ClusterRoleBinding")
    needed = [a for a in ACCESS if a.duties & duties and a.namespace == namespace]
    assert sorted(_granted(role)) == sorted(map(_wanted, needed))
    assert role["metadata"].get("namespace", "") == namespace
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": "numalet", "namespace": "numalet-system"}
    ]


def test_every_right_that_is_asked_for_is_granted_somewhere() -> None:
    granted = [right for folder in ROLES for role in _roles(folder) for right in _granted(role)]
    assert sorted(granted) == sorted(map(_wanted, ACCESS))


def _roles(*folders: Path) -> list[Object]:
    return [one for one in objects_in(*folders) if one["kind"] in ("Role", "ClusterRole")]


# --- policies -------------------------------------------------------------------------------------

POLICIES: Final = {
    one["spec"]["matchConstraints"]["resourceRules"][0]["resources"][0]: one
    for one in objects_in(FOLDER / "policy", *ROLES)
    if one["kind"] == "ValidatingAdmissionPolicy"
}


def test_whatever_an_agent_may_write_is_checked_for_its_node() -> None:
    writes = {a.resource for a in ACCESS if a.verb in ("create", "update", "patch")}
    assert set(POLICIES) == writes


@pytest.mark.parametrize("resource", POLICIES)
def test_a_policy_holds_for_the_agent_alone_and_fails_closed(resource: str) -> None:
    spec = POLICIES[resource]["spec"]
    (rule,) = spec["matchConstraints"]["resourceRules"]
    verbs = {a.verb for a in ACCESS if a.resource == resource}
    groups = {a.group for a in ACCESS if a.resource == resource}
    operations = {"CREATE"} & {verb.upper() for verb in verbs} | {"UPDATE"} & (
        {"UPDATE"} if verbs & {"patch", "update"} else set()
    )
    assert (spec["failurePolicy"], set(rule["apiGroups"])) == ("Fail", groups)
    assert set(rule["operations"]) >= operations
    (condition,) = spec["matchConditions"]
    (quoted,) = re.findall("'(.*)'", condition["expression"])
    assert re.search(quoted, "system:serviceaccount:numalet-system:numalet")
    assert not re.search(quoted, "system:serviceaccount:numalet:other")
    assert not re.search(quoted, "system:serviceaccount:kube-system:not-numalet")
    assert spec["variables"][0] == {
        "name": "node",
        "expression": "request.userInfo.?extra[?'authentication.kubernetes.io/node-name'][?0]"
        ".orValue('')",
    }
    assert "variables.node != ''" in spec["validations"][0]["expression"]
    assert all(one["reason"] == "Forbidden" for one in spec["validations"])


@pytest.mark.parametrize("resource", POLICIES)
def test_a_policy_is_in_force(resource: str) -> None:
    name = POLICIES[resource]["metadata"]["name"]
    bindings = [
        one["spec"]
        for one in objects_in(FOLDER / "policy", *ROLES)
        if one["kind"] == "ValidatingAdmissionPolicyBinding"
    ]
    assert [one for one in bindings if one["policyName"] == name] == [
        {"policyName": name, "validationActions": ["Deny"]}
    ]


def test_the_policies_know_the_names_that_the_agent_writes() -> None:
    our_labels = POLICIES["nodes"]["spec"]["variables"][-1]["expression"]
    assert set(re.findall(r"'(.*?)'", our_labels)) == {
        ack.NAME_LABEL,
        ack.MEMORY_LABEL,
        ack.COUNT_LABEL,
    }
    assert f"taint.key == '{Config().startup_taint}'" in _checks("nodes")
    assert f"'{ack.arena_name('')}' + variables.node" in _checks("configmaps")
    assert f"namespace == '{ack.NAMESPACE}'" in _checks("configmaps")


def _checks(resource: str) -> str:
    return " ".join(one["expression"] for one in POLICIES[resource]["spec"]["validations"])
