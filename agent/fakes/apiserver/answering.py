"""From a request to its answer, watches apart. Refusals are raised as StatusError."""

import json
from typing import Any

import yaml

from agent.fakes.apiserver.access import ADMIN, Access, User
from agent.fakes.apiserver.cluster import Cluster
from agent.fakes.apiserver.faults import Answer
from agent.fakes.apiserver.fields import Object
from agent.fakes.apiserver.requests import REVIEW, Request
from agent.fakes.apiserver.resources import selection
from agent.fakes.apiserver.store import StatusError, Writer, bad_request
from agent.fakes.apiserver.targets import Path, Target, discover, find_target, split

_HEALTH = ("/healthz", "/livez", "/readyz")
_LARGEST_BODY = 3 << 20
_JSON_PATCH = "application/json-patch+json"
_APPLY_PATCH = "application/apply-patch+yaml"
_PATCHES = (_JSON_PATCH, "application/merge-patch+json", _APPLY_PATCH)


def answer(cluster: Cluster, request: Request) -> Answer:
    user = authenticate(cluster, request)
    if request.path in _HEALTH:
        return Answer(status=200, body=b"ok", content_type="text/plain; charset=utf-8")
    if len(request.raw) > _LARGEST_BODY:
        text = f"Request entity too large: limit is {_LARGEST_BODY}"
        raise StatusError(413, "RequestEntityTooLarge", text)
    if request.path == REVIEW and request.method == "POST":
        return to_answer(201, _review(user, _parse(request)))
    found = discover(cluster.resources, request.path) if request.method == "GET" else None
    return to_answer(200, found) if found else _ask_resource(cluster, request, user)


def authenticate(cluster: Cluster, request: Request) -> User:
    user = cluster.users.get(request.token or "") if cluster.users else ADMIN
    if not user:
        raise StatusError(401, "Unauthorized", "Unauthorized")
    request.user = user.name
    return user


def to_answer(status: int, body: object) -> Answer:
    return Answer(status=status, body=json.dumps(body).encode())


def not_served(group: str | None = None) -> Answer:
    """As for any path that nobody knows, such as one of a CRD that is not installed; where the
    group is built in, with a Status."""
    if group == "":
        text = "the server could not find the requested resource"
        return to_answer(404, StatusError(404, "NotFound", text).status | {"details": {}})
    page = b"404 page not found\n"
    return Answer(status=404, body=page, content_type="text/plain; charset=utf-8")


def authorize(user: User, path: Path, verb: str) -> None:
    if not user.may(path.access(verb)):
        raise path.access(verb).refused(user.name)


def _ask_resource(cluster: Cluster, request: Request, user: User) -> Answer:
    path = split(request.path)
    if not path:
        return not_served()
    verb = _verb(request, path)
    authorize(user, path, verb)
    target = find_target(cluster.resources, path)
    if target:
        return to_answer(*_act(cluster, request, user, target, verb))
    return not_served(path.group)


def _verb(request: Request, path: Path) -> str:
    match request.method:
        case "GET":
            return "get" if path.name else "list"
        case "DELETE" if not path.name:
            return "deletecollection"
    verbs = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
    return verbs.get(request.method, request.method.lower())


def _act(
    cluster: Cluster, request: Request, user: User, target: Target, verb: str
) -> tuple[int, Object]:
    match verb:
        case "get":
            return 200, target.show(cluster.store.get(*target.key))
        case "list":
            return 200, _list(cluster, request, target)
        case "create" if not target.name:
            return 201, _create(cluster, request, target)
        case "update":
            body, writer = _object(request, target), _writer(request, target)
            return 200, target.show(cluster.store.replace(*target.key, body, writer))
        case "patch" if request.content_type == _APPLY_PATCH:
            return _apply(cluster, request, user, target)
        case "patch":
            return 200, _patch(cluster, request, target)
        case "delete":
            return 200, _delete(cluster, request, target)
    text = "the server does not allow this method on the requested resource"
    raise StatusError(405, "MethodNotAllowed", text)


# --- verbs ----------------------------------------------------------------------------------------


def _list(cluster: Cluster, request: Request, target: Target) -> Object:
    """Items of built-in resources come without kind and apiVersion."""
    limit, token = _limit(request), request.query.get("continue")
    if token:
        revision, found = cluster.store.page(token)
    else:
        matches = selection(target.resource, request.query)
        revision, found = cluster.store.select(target.resource, target.namespace, matches)
    meta: Object = {"resourceVersion": str(revision)}
    if not target.resource.built_in:
        meta["continue"] = ""
    if limit and len(found) > limit:
        meta["continue"] = cluster.store.keep_page(revision, found[limit:])
        meta["remainingItemCount"] = len(found) - limit
        found = found[:limit]
    shown = [target.show(item) for item in found]
    if target.resource.built_in:
        for item in shown:
            del item["apiVersion"], item["kind"]
    kind = {"kind": f"{target.resource.kind}List", "apiVersion": target.api_version}
    return kind | {"metadata": meta, "items": shown}


def _limit(request: Request) -> int:
    try:
        return int(request.query.get("limit", 0))
    except ValueError as error:
        raise bad_request(str(error)) from None


def _create(cluster: Cluster, request: Request, target: Target) -> Object:
    body, writer = _object(request, target), _writer(request, target)
    _check_namespace(cluster, target.namespace)
    made = cluster.store.create(target.resource, target.namespace, body, writer)
    return target.show(made)


def _check_namespace(cluster: Cluster, namespace: str) -> None:
    if namespace:
        cluster.store.get(cluster.resource("namespaces"), "", namespace)


def _patch(cluster: Cluster, request: Request, target: Target) -> Object:
    if request.content_type not in _PATCHES:
        known = ", ".join(_PATCHES)
        text = f"the body of the request was in an unknown format - accepted media types: {known}"
        raise StatusError(415, "UnsupportedMediaType", text)
    body = _parse(request)
    if isinstance(body, list) != (request.content_type == _JSON_PATCH):
        raise bad_request("the patch is not what its content type says")
    return target.show(cluster.store.patch(*target.key, body, _writer(request, target)))


def _apply(cluster: Cluster, request: Request, user: User, target: Target) -> tuple[int, Object]:
    """Who makes an object this way needs the right to create it, too."""
    if not request.query.get("fieldManager"):
        text = 'PatchOptions.meta.k8s.io "" is invalid: fieldManager: Required value'
        raise StatusError(422, "Invalid", text)
    body = _object(request, target)
    exists = cluster.store.find(*target.key)
    if not exists:
        authorize(user, target.path, "create")
        _check_namespace(cluster, target.namespace)
    force = request.query.get("force") in ("true", "1")
    made = cluster.store.apply(*target.key, body, _writer(request, target), force)
    return (200 if exists else 201), target.show(made)


def _delete(cluster: Cluster, request: Request, target: Target) -> Object:
    options = _parse(request) or {}
    was = cluster.store.delete(*target.key, options.get("preconditions") or {})
    details = {"name": target.name, "kind": target.path.plural, "uid": was["metadata"]["uid"]}
    kind = {"kind": "Status", "apiVersion": "v1", "metadata": {}}
    return kind | {"status": "Success", "details": details}


def _review(user: User, body: Object) -> Object:
    """Whether the user may do what the body asks about."""
    wanted = body["spec"]["resourceAttributes"]
    keys = ("verb", "group", "resource", "subresource", "namespace", "name")
    access = Access(**{key: wanted.get(key, "") for key in keys})
    return body | {"metadata": {}, "status": {"allowed": user.may(access)}}


# --- a request's parts ----------------------------------------------------------------------------


def _parse(request: Request) -> Any:
    try:
        return request.body
    except yaml.YAMLError as error:
        raise bad_request(f"unable to parse the body: {error}") from None


def _object(request: Request, target: Target) -> Object:
    body = _parse(request)
    if not isinstance(body, dict):
        raise bad_request("the object provided is unrecognized")
    for key, wanted in (("apiVersion", target.api_version), ("kind", target.resource.kind)):
        if body.get(key) != wanted:
            found = f"the {key} in the data ({body.get(key)})"
            raise bad_request(f"{found} does not match the expected {key} ({wanted})")
    return body


def _writer(request: Request, target: Target) -> Writer:
    """Without `fieldManager`, the user agent's first word."""
    agent = request.headers.get("User-Agent", "unknown").partition("/")[0]
    return Writer(
        manager=request.query.get("fieldManager") or agent,
        version=target.path.version,
        subresource=target.path.subresource,
    )
