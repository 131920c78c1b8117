"""The objects of a small kube-apiserver, and the rules by which they change.

Objects are plain JSON values. One that is stored is never changed, only replaced: what is handed
out may be kept, and must not be written to.

Source: Kubernetes API conventions, and apiserver and apimachinery of Kubernetes 1.36.
"""

import copy
import random
import re
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from agent.fakes.apiserver.fields import (
    ConflictError,
    Object,
    Owner,
    Owners,
    PatchError,
    json_patch,
    merge_patch,
)

_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_WORD = re.compile(r"(?=.{1,63}\Z)[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?", re.ASCII)
_MOST_ANNOTATION_BYTES = 256 << 10
_MOST_CHANGES = 10_000
"""That are remembered for watches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """A kind of object that is served in these versions. `built_in`: not by a CRD.

    `fields` are those that a fieldSelector may name beside metadata's name and namespace.
    """

    group: str = ""
    versions: tuple[str, ...] = ("v1",)
    plural: str
    kind: str
    namespaced: bool = False
    built_in: bool = False
    fields: tuple[str, ...] = ()
    has_status: bool = False

    def __str__(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def api_version(self, version: str) -> str:
        return f"{self.group}/{version}" if self.group else version


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """`old` is None for a new object, `new` for a deleted one; both for a bookmark."""

    revision: int
    resource: Resource | None
    old: Object | None = None
    new: Object | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """Who writes, in managedFields' words, and in which version of the resource.

    `everything`: status and the rest at once, as only a test does.
    """

    manager: str
    version: str
    subresource: str = ""
    everything: bool = False

    def owner(self, resource: Resource, operation: str) -> Owner:
        return (self.manager, operation, resource.api_version(self.version), self.subresource)


class StatusError(Exception):
    """A refusal, as a Status object."""

    def __init__(self, code: int, reason: str, message: str, **details: Any) -> None:
        super().__init__(message)
        self.code = code
        self.status: Object = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": message,
            "reason": reason,
            "code": code,
        }
        if details:
            self.status["details"] = details


def gone(message: str) -> StatusError:
    return StatusError(410, "Expired", message)


def bad_request(message: str) -> StatusError:
    return StatusError(400, "BadRequest", message)


class Store:
    """`changed` guards everything and is told of every change."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.revision = 100
        self.compacted = 0
        self.changes: list[Change] = []
        self._objects: dict[tuple[str, str], dict[tuple[str, str], Object]] = {}
        self._pages: dict[str, tuple[int, list[Object]]] = {}
        self._random = random.Random(0)

    # --- reading ----------------------------------------------------------------------------------

    def get(self, resource: Resource, namespace: str, name: str) -> Object:
        with self.changed:
            try:
                return self._of(resource)[namespace, name]
            except KeyError:
                raise _refusal(404, "NotFound", resource, name, "not found") from None

    def find(self, resource: Resource, namespace: str, name: str) -> Object | None:
        with self.changed:
            return self._of(resource).get((namespace, name))

    def select(
        self, resource: Resource, namespace: str, matches: Callable[[Object], bool]
    ) -> tuple[int, list[Object]]:
        """The revision, and the objects of a namespace ("" for all) by namespace and name."""
        with self.changed:
            objects = self._of(resource)
            found = [objects[key] for key in sorted(objects) if namespace in ("", key[0])]
            return self.revision, [item for item in found if matches(item)]

    def keep_page(self, revision: int, rest: list[Object]) -> str:
        """A `continue` token for what is left of a list."""
        with self.changed:
            token = f"page-{len(self._pages)}-{self._random.getrandbits(32):x}"
            self._pages[token] = revision, rest
            return token

    def page(self, token: str) -> tuple[int, list[Object]]:
        with self.changed:
            if not token.startswith("page-"):
                raise bad_request("invalid continue token: continue key is not valid")
            if token not in self._pages:
                raise gone(
                    "The provided continue parameter is too old to display a consistent list"
                )
            return self._pages[token]

    def since(self, resource: Resource, revision: int) -> list[Change]:
        """Changes of a resource after a revision, bookmarks included."""
        with self.changed:
            recent = []
            for change in reversed(self.changes):
                if change.revision <= revision:
                    break
                if change.resource in (resource, None):
                    recent.append(change)
            return recent[::-1]

    def _of(self, resource: Resource) -> dict[tuple[str, str], Object]:
        return self._objects.setdefault((resource.group, resource.plural), {})

    # --- writing ----------------------------------------------------------------------------------

    def create(self, resource: Resource, namespace: str, body: Object, writer: Writer) -> Object:
        with self.changed:
            if body.get("metadata", {}).get("resourceVersion"):
                text = "resourceVersion should not be set on objects to be created"
                raise StatusError(500, "", text)
            new = self._new(resource, namespace, body)
            if writer.everything and body["metadata"].get("uid"):
                new["metadata"]["uid"] = body["metadata"]["uid"]
            owners = Owners(())
            owners.update(writer.owner(resource, "Update"), {}, new, _now())
            _set_owners(new, owners)
            return self._add(resource, new)

    def _new(self, resource: Resource, namespace: str, body: Object) -> Object:
        new = copy.deepcopy(body)
        meta = _metadata(new)
        if not meta.get("name") and meta.get("generateName"):
            letters = self._random.choices("bcdfghjklmnpqrstvwxz2456789", k=5)
            meta["name"] = meta["generateName"] + "".join(letters)
        if not meta.get("name"):
            raise _invalid(resource, "", "name", "Required value: name or generateName is required")
        if namespace and meta.setdefault("namespace", namespace) != namespace:
            raise bad_request(
                "the namespace of the provided object does not match the namespace sent on the "
                "request"
            )
        meta.pop("resourceVersion", None)
        meta.update(uid=str(uuid.uuid4()), creationTimestamp=_now())
        if not resource.built_in:
            meta["generation"] = 1
        return new

    def _add(self, resource: Resource, new: Object) -> Object:
        name = new["metadata"]["name"]
        if (new["metadata"].get("namespace", ""), name) in self._of(resource):
            raise _refusal(409, "AlreadyExists", resource, name, "already exists")
        _check(resource, new)
        return self._save(resource, None, new)

    def replace(
        self, resource: Resource, namespace: str, name: str, body: Object, writer: Writer
    ) -> Object:
        with self.changed:
            old = self.get(resource, namespace, name)
            new = copy.deepcopy(body)
            version = _metadata(new).get("resourceVersion")
            if not version and not resource.built_in:
                text = "Invalid value: 0: must be specified for an update"
                raise _invalid(resource, name, "resourceVersion", text)
            return self._update(resource, old, new, writer)

    def patch(
        self, resource: Resource, namespace: str, name: str, patch: Any, writer: Writer
    ) -> Object:
        """A merge patch if it is a map, a JSON patch if it is a list."""
        with self.changed:
            old = self.get(resource, namespace, name)
            try:
                patched = (json_patch if isinstance(patch, list) else merge_patch)(old, patch)
            except PatchError as error:
                raise StatusError(
                    422, "Invalid", f"the server rejected our request: {error}"
                ) from None
            return self._update(resource, old, patched, writer)

    def _update(self, resource: Resource, old: Object, new: Object, writer: Writer) -> Object:
        self._check_identity(resource, old, new)
        if resource.has_status and not writer.everything:
            _keep(new, old, "status" if not writer.subresource else "spec")
        new["metadata"] |= _kept(old)
        reset = new["metadata"].get("managedFields") == [{}]
        owners = Owners(() if reset else old["metadata"].get("managedFields", ()))
        owners.update(writer.owner(resource, "Update"), old, new, _now())
        return self._replace(resource, old, new, owners)

    def _check_identity(self, resource: Resource, old: Object, new: Object) -> None:
        meta, stored = _metadata(new), old["metadata"]
        if meta.get("name") != stored["name"]:
            raise bad_request(
                f"the name of the object ({meta.get('name')}) does not match the name on the URL "
                f"({stored['name']})"
            )
        if (meta.get("namespace") or stored.get("namespace")) != stored.get("namespace"):
            raise bad_request("the namespace of the object does not match the namespace on the URL")
        if meta.get("uid") not in (None, "", stored["uid"]):
            why = f"Precondition failed: UID in precondition: {meta['uid']}, UID in object meta: "
            raise _conflict(resource, stored["name"], why + stored["uid"])
        if meta.get("resourceVersion") not in (None, "", stored["resourceVersion"]):
            why = "the object has been modified; please apply your changes to the latest version"
            raise _conflict(resource, stored["name"], f"{why} and try again")

    def apply(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        body: Object,
        writer: Writer,
        force: bool,
    ) -> Object:
        """Server-side apply; a new object if there is none."""
        with self.changed:
            if _metadata(body).get("managedFields") is not None:
                raise bad_request("metadata.managedFields must be nil")
            named = body | {"metadata": {"name": name} | body["metadata"]}
            old = self.find(resource, namespace, name)
            base = old or {}
            if old:
                self._check_identity(resource, old, copy.deepcopy(named))
            owners = Owners(old["metadata"].get("managedFields", ()) if old else ())
            try:
                new = owners.apply(writer.owner(resource, "Apply"), base, named, _now(), force)
            except ConflictError as error:
                raise _apply_conflict(error) from None
            if old:
                return self._replace(resource, old, new, owners)
            new = self._new(resource, namespace, named)
            _set_owners(new, owners)
            return self._add(resource, new)

    def _replace(self, resource: Resource, old: Object, new: Object, owners: Owners) -> Object:
        """Writes nothing where nothing but times differs."""
        meta, stored = new["metadata"], old["metadata"]
        _set_owners(new, owners)
        if _timeless(new) == _timeless(old):
            return old
        _check(resource, new)
        if not resource.built_in and _content(new) != _content(old):
            meta["generation"] = stored["generation"] + 1
        if meta.get("deletionTimestamp") and not meta.get("finalizers"):
            return self._save(resource, old, None)
        return self._save(resource, old, new)

    def delete(
        self, resource: Resource, namespace: str, name: str, preconditions: Mapping[str, str]
    ) -> Object:
        """The object as it was. One with finalizers stays until these are gone."""
        with self.changed:
            old = self.get(resource, namespace, name)
            for key, wanted in preconditions.items():
                if old["metadata"].get(key) != wanted:
                    raise _conflict(resource, name, f"Precondition failed: {key}")
            if not old["metadata"].get("finalizers"):
                return self._save(resource, old, None)
            new = copy.deepcopy(old)
            new["metadata"].setdefault("deletionTimestamp", _now())
            return old if new == old else self._save(resource, old, new)

    def _save(self, resource: Resource, old: Object | None, new: Object | None) -> Object:
        self.revision += 1
        last = new or copy.deepcopy(old)
        assert last
        last["metadata"]["resourceVersion"] = str(self.revision)
        key = last["metadata"].get("namespace", ""), last["metadata"]["name"]
        if new:
            self._of(resource)[key] = new
            self._tell(Change(revision=self.revision, resource=resource, old=old, new=new))
        else:
            del self._of(resource)[key]
            self._tell(Change(revision=self.revision, resource=resource, old=last))
        return last

    def _tell(self, change: Change) -> None:
        self.changes.append(change)
        if len(self.changes) > _MOST_CHANGES:
            self.compacted = self.changes.pop(0).revision
        self.changed.notify_all()

    # --- upkeep -----------------------------------------------------------------------------------

    def compact(self) -> None:
        """Forgets what was: watches from before, and lists that are half read, get 410."""
        with self.changed:
            self.revision += 1
            self.compacted = self.revision
            self._pages.clear()

    def bookmark(self) -> None:
        """Tells every watch that wants it where it stands."""
        with self.changed:
            self.revision += 1
            self._tell(Change(revision=self.revision, resource=None))


# --- rules ----------------------------------------------------------------------------------------


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _metadata(body: Object) -> Object:
    meta = body.setdefault("metadata", {})
    if not isinstance(meta, dict):
        raise bad_request("the object provided is unrecognized: metadata is no map")
    return meta


def _kept(old: Object) -> Object:
    """What no client can change."""
    keys = (
        "name", "namespace", "uid", "creationTimestamp", "generation", "resourceVersion",
        "deletionTimestamp",
    )  # fmt: skip
    return {key: old["metadata"][key] for key in keys if key in old["metadata"]}


def _set_owners(item: Object, owners: Owners) -> None:
    item["metadata"].pop("managedFields", None)
    if entries := owners.entries():
        item["metadata"]["managedFields"] = entries


def _keep(new: Object, old: Object, key: str) -> None:
    new.pop(key, None)
    if key in old:
        new[key] = old[key]


def _timeless(item: Object) -> Object:
    entries = [entry | {"time": ""} for entry in item["metadata"].get("managedFields", ())]
    return item | {"metadata": item["metadata"] | {"managedFields": entries}}


def _content(item: Object) -> Object:
    return {key: item[key] for key in item if key not in ("metadata", "status")}


def _check(resource: Resource, item: Object) -> None:
    """Source: validation of ObjectMeta. The texts are shortened."""
    meta = item["metadata"]
    name, annotations = meta["name"], meta.get("annotations") or {}
    if len(name) > 253 or not _SUBDOMAIN.fullmatch(name):
        raise _invalid(resource, name, "name", f'Invalid value: "{name}": no RFC 1123 subdomain')
    for key, value in [*annotations.items(), *(meta.get("labels") or {}).items()]:
        if not isinstance(value, str):
            raise bad_request(f"{resource.kind} cannot be handled: {key} is no string")
        if not _is_key(key):
            raise _invalid(resource, name, "labels", f'Invalid value: "{key}": no qualified name')
    for value in (meta.get("labels") or {}).values():
        if value and not _WORD.fullmatch(value):
            raise _invalid(resource, name, "labels", f'Invalid value: "{value}": no label value')
    if (
        sum(len(f"{key}{annotations[key]}".encode()) for key in annotations)
        > _MOST_ANNOTATION_BYTES
    ):
        text = f"Too long: may not be more than {_MOST_ANNOTATION_BYTES} bytes"
        raise _invalid(resource, name, "annotations", text)


def _is_key(key: str) -> bool:
    prefix, slash, word = key.rpartition("/")
    return bool((not slash or _SUBDOMAIN.fullmatch(prefix)) and _WORD.fullmatch(word))


# --- refusals -------------------------------------------------------------------------------------


def _details(resource: Resource, name: str) -> Object:
    group = {"group": resource.group} if resource.group else {}
    return {"name": name, **group, "kind": resource.plural}


def _refusal(code: int, reason: str, resource: Resource, name: str, why: str) -> StatusError:
    return StatusError(code, reason, f'{resource} "{name}" {why}', **_details(resource, name))


def _conflict(resource: Resource, name: str, why: str) -> StatusError:
    message = f'Operation cannot be fulfilled on {resource} "{name}": {why}'
    return StatusError(409, "Conflict", message, **_details(resource, name))


def _invalid(resource: Resource, name: str, field: str, why: str) -> StatusError:
    kind = f"{resource.kind}.{resource.group}" if resource.group else resource.kind
    message = f'{kind} "{name}" is invalid: metadata.{field}: {why}'
    causes = [{"reason": "FieldValueInvalid", "message": why, "field": f"metadata.{field}"}]
    details = {"name": name, "group": resource.group, "kind": resource.kind, "causes": causes}
    return StatusError(422, "Invalid", message, **details)


def _apply_conflict(error: ConflictError) -> StatusError:
    causes = [
        {
            "reason": "FieldManagerConflict",
            "message": f"conflict with {_manager(owner)}",
            "field": _dotted(path),
        }
        for owner, path in error.conflicts
    ]
    count = len(causes)
    told = "; ".join(f"{cause['message']}: {cause['field']}" for cause in causes)
    message = f"Apply failed with {count} conflict{'s' * (count > 1)}: {told}"
    return StatusError(409, "Conflict", message, causes=causes)


def _manager(owner: Owner) -> str:
    manager, operation, version, _ = owner
    return f'"{manager}"' + (f" using {version}" if operation == "Update" else "")


def _dotted(path: Iterable[str]) -> str:
    return "".join(f".{part[2:]}" if part.startswith("f:") else f"[{part[2:]}]" for part in path)
