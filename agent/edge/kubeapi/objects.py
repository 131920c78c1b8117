"""The objects that the agent reads and writes, by their kind: functions over Api.

All raise KubeApiError: with status 404 and a sentence that says so where a kind is not served, with
409 where an object has changed in between.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import quote

from agent.core import report
from agent.core.strict_json import Object, part, printable
from agent.edge.kubeapi.answers import RefusalError
from agent.edge.kubeapi.client import Api
from agent.errors import KubeApiError

_TRIES: Final = 5
"""Of a change to an object that others change too."""


# --- nodes ----------------------------------------------------------------------------------------


def read_node(api: Api, name: str) -> Object:
    return api.get(_path("v1", "nodes", name))


def owner_of(node: Object) -> Object:
    """What an object of the node refers to as its owner. Raises KubeApiError for nonsense."""
    try:
        metadata = part(node, "metadata", dict)
        name, uid = part(metadata, "name", str), part(metadata, "uid", str)
    except ValueError as error:
        raise KubeApiError(f"the answer about the node makes no sense: {error}") from error
    if not name or not uid:
        raise KubeApiError("the answer about the node makes no sense: it has no name or no uid")
    return {"apiVersion": "v1", "kind": "Node", "name": name, "uid": uid}


def label_node(api: Api, name: str, labels: Mapping[str, str | None]) -> bool:
    """Gives the node these labels, takes away those that are None; False if nothing was to do."""
    node = read_node(api, name)
    with _understood(api, f"node {name}"):
        current = part(part(node, "metadata", dict), "labels", dict)
    changes = {key: value for key, value in labels.items() if current.get(key) != value}
    if changes:
        api.merge_patch(_path("v1", "nodes", name), {"metadata": {"labels": changes}})
    return bool(changes)


def untaint_node(api: Api, node: Object, key: str) -> bool:
    """Takes all taints of this key from a node as it was read; False if it has none.

    A node that has changed since is read anew, so that nobody's taint is lost.
    """
    tries_left = _TRIES
    while True:
        with _understood(api, "the node"):
            name, version, taints = _read_taints(node)
        others = [taint for taint in taints if taint.get("key") != key]
        if len(others) == len(taints):
            return False
        body = {"metadata": {"resourceVersion": version}, "spec": {"taints": others}}
        try:
            api.merge_patch(_path("v1", "nodes", name), body)
            return True
        except KubeApiError as error:
            tries_left -= 1
            if error.status != 409 or not tries_left:
                raise
        node = read_node(api, name)


def _read_taints(node: Object) -> tuple[str, str, list[Object]]:
    """Name and version of the node, and its taints. Raises ValueError with a sentence."""
    metadata = part(node, "metadata", dict)
    name, version = part(metadata, "name", str), part(metadata, "resourceVersion", str)
    taints: list[Any] = part(part(node, "spec", dict), "taints", list)
    if not name or not version or not all(isinstance(taint, dict) for taint in taints):
        raise ValueError("it has no name or no version, or a taint that is none")
    return name, version, taints


# --- topologies and devices -----------------------------------------------------------------------


def read_topology(api: Api, name: str) -> Object | None:
    """The node's NodeResourceTopology; None if there is none."""
    api_version = f"{report.GROUP}/{report.VERSION}"
    with _expecting(api, api_version, report.PLURAL):
        return _read(api, _path(api_version, report.PLURAL, name), name)


def apply_topology(api: Api, body: Object) -> Object:
    """Server-side apply, forced; the object that there is then."""
    return _apply(api, body, report.PLURAL)


def replace_topology(api: Api, body: Object) -> Object:
    """As a whole, if it is still of the resourceVersion in `body`; the object that there is then.

    Status 409 if it is not.
    """
    api_version, name = body["apiVersion"], body["metadata"]["name"]
    with _expecting(api, api_version, report.PLURAL):
        return api.put(_path(api_version, report.PLURAL, name), body)


def read_device(api: Api, group_version: str, name: str) -> Object | None:
    """Koordinator's Device of a node; None if there is none."""
    with _expecting(api, group_version, "devices"):
        return _read(api, _path(group_version, "devices", name), name)


def apply_device(api: Api, body: Object) -> Object:
    """As `apply_topology`, Koordinator's Device of a node."""
    return _apply(api, body, "devices")


# --- in namespaces --------------------------------------------------------------------------------


def read_config_map(api: Api, namespace: str, name: str) -> Object | None:
    """None if there is none."""
    return _read(api, _path("v1", "configmaps", name, namespace), name)


def apply_config_map(api: Api, body: Object) -> Object:
    """Server-side apply, forced; the object that there is then."""
    return _apply(api, body, "configmaps")


def create_event(api: Api, event: Object) -> Object:
    """`event` is of v1 or events.k8s.io/v1. Status 409 if there is one of that name."""
    namespace = event["metadata"]["namespace"]
    return api.post(_path(event["apiVersion"], "events", namespace=namespace), event)


# --- what we may, and what there is ---------------------------------------------------------------


def may(
    api: Api,
    verb: str,
    group: str,
    resource: str,
    namespace: str = "",
    name: str = "",
    subresource: str = "",
) -> bool:
    """Whether the API server would let us. An empty namespace or name means: any."""
    api_version = "authorization.k8s.io/v1"
    attributes = {
        "verb": verb,
        "group": group,
        "resource": resource,
        "namespace": namespace,
        "name": name,
        "subresource": subresource,
    }
    body: Object = {
        "apiVersion": api_version,
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": {key: word for key, word in attributes.items() if word}},
    }
    answer = api.post(_path(api_version, "selfsubjectaccessreviews"), body)
    with _understood(api, "whether we may"):
        return part(answer, "status", dict).get("allowed") is True


def served(api: Api, group: str, version: str) -> tuple[str, ...]:
    """The resources of that group and version, as in URLs, sorted; empty if it is not served."""
    try:
        answer = api.get(_root(f"{group}/{version}" if group else version))
    except KubeApiError as error:
        if error.status == 404:
            return ()
        raise
    with _understood(api, f"what is served of {group or 'v1'}"):
        resources: list[Any] = part(answer, "resources", list)
        names = [
            part(resource, "name", str) for resource in resources if isinstance(resource, dict)
        ]
    return tuple(sorted({name for name in names if name and "/" not in name}))


# --- paths ----------------------------------------------------------------------------------------


def _root(api_version: str) -> str:
    """Source: Kubernetes API concepts; the first group has no name, and a root of its own."""
    root = "apis" if "/" in api_version else "api"
    return f"/{root}/{quote(api_version, errors='replace')}"


def _path(api_version: str, plural: str, name: str = "", namespace: str = "") -> str:
    parts = ["namespaces", namespace, plural] if namespace else [plural]
    parts += [name] if name else []
    return "/".join((_root(api_version), *(quote(word, "", errors="replace") for word in parts)))


def _read(api: Api, path: str, name: str) -> Object | None:
    """None if there is no object of that name; a kind that is not served is an error."""
    try:
        return api.get(path)
    except RefusalError as error:
        if error.status == 404 and error.missing == name:
            return None
        raise


def _apply(api: Api, body: Object, plural: str) -> Object:
    metadata = body["metadata"]
    path = _path(body["apiVersion"], plural, metadata["name"], metadata.get("namespace", ""))
    with _expecting(api, body["apiVersion"], plural):
        return api.apply(path, body)


# --- errors ---------------------------------------------------------------------------------------


@contextmanager
def _expecting(api: Api, api_version: str, plural: str) -> Iterator[None]:
    """Says it in our words when the API server does not know the kind."""
    try:
        yield
    except RefusalError as error:
        if error.status != 404 or error.missing:
            raise
        raise KubeApiError(
            f"{printable(api.server.url, 200)}: the API server does not serve {plural} of "
            f"{api_version}: its CustomResourceDefinition is missing, or has other versions",
            404,
        ) from error


@contextmanager
def _understood(api: Api, what: str) -> Iterator[None]:
    """Raises KubeApiError for an answer of another shape."""
    try:
        yield
    except ValueError as error:
        url = printable(api.server.url, 200)
        raise KubeApiError(f"{url}: the answer about {what} makes no sense: {error}") from error
