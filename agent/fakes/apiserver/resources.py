"""What is served: kinds of objects, and which of them a selector picks."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from agent.fakes.apiserver.fields import Object
from agent.fakes.apiserver.store import Resource, bad_request

TOPOLOGIES = Resource(
    group="topology.node.k8s.io",
    versions=("v1alpha1", "v1alpha2"),
    plural="noderesourcetopologies",
    kind="NodeResourceTopology",
)
KOORDINATOR_DEVICES = Resource(
    group="scheduling.koordinator.sh", versions=("v1alpha1",), plural="devices", kind="Device"
)
BUILT_IN = (
    Resource(
        plural="nodes", kind="Node", built_in=True, has_status=True, fields=("spec.unschedulable",)
    ),
    Resource(
        plural="pods", kind="Pod", namespaced=True, built_in=True, has_status=True,
        fields=("spec.nodeName", "spec.schedulerName", "status.phase"),
    ),
    Resource(plural="configmaps", kind="ConfigMap", namespaced=True, built_in=True),
    Resource(plural="namespaces", kind="Namespace", built_in=True, fields=("status.phase",)),
    Resource(
        plural="events", kind="Event", namespaced=True, built_in=True,
        fields=("involvedObject.kind", "involvedObject.name", "involvedObject.namespace",
                "involvedObject.uid", "reason", "type"),
    ),
    Resource(
        group="events.k8s.io", plural="events", kind="Event", namespaced=True, built_in=True
    ),
    Resource(
        group="apiextensions.k8s.io", plural="customresourcedefinitions",
        kind="CustomResourceDefinition", built_in=True,
    ),
)  # fmt: skip
NAMESPACES = ("default", "kube-node-lease", "kube-public", "kube-system")

_SELECTOR = re.compile(
    r"(?P<negated>!)?(?P<key>[^\s=!()]+)(?:\s*(?P<op>==|=|!=|\bin\b|\bnotin\b)\s*"
    r"(?:\((?P<set>[^()]*)\)|(?P<value>[^\s()]*)))?"
)


def selection(resource: Resource, query: Mapping[str, str]) -> Callable[[Object], bool]:
    fields = [_requirement(part) for part in _parts(query.get("fieldSelector", ""))]
    labels = [_requirement(part) for part in _parts(query.get("labelSelector", ""))]
    for key, _, _ in fields:
        if key not in ("metadata.name", "metadata.namespace", *resource.fields):
            raise bad_request(f"field label not supported: {key}")

    def matches(item: Object) -> bool:
        has = item["metadata"].get("labels") or {}
        return all(
            _agrees(_field(item, key) or "", op, values) for key, op, values in fields
        ) and all(_agrees(has.get(key), op, values) for key, op, values in labels)

    return matches


def _parts(selector: str) -> list[str]:
    return [part for part in re.split(r",(?![^(]*\))", selector) if part]


def _requirement(part: str) -> tuple[str, str, tuple[str, ...]]:
    """Key, one of "in", "notin", "exists" and "absent", and values."""
    found = _SELECTOR.fullmatch(part.strip())
    if not found:
        raise bad_request(f"unable to parse requirement: {part}")
    op = found["op"]
    if not op:
        return found["key"], "absent" if found["negated"] else "exists", ()
    values = found["value"] if found["set"] is None else found["set"]
    listed = tuple(value.strip() for value in values.split(","))
    return found["key"], "notin" if op in ("!=", "notin") else "in", listed


def _agrees(value: str | None, op: str, values: tuple[str, ...]) -> bool:
    match op:
        case "exists" | "absent":
            return (value is not None) == (op == "exists")
        case "in":
            return value in values
    return value not in values


def _field(item: Any, key: str) -> str | None:
    for part in key.split("."):
        item = item.get(part) if isinstance(item, dict) else None
    return item if item is None or isinstance(item, str) else json.dumps(item)
