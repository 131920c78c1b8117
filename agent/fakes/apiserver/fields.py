"""What kube-apiserver does to an object's fields: patches, and who owns which field.

A field's path is written as in `fieldsV1`: "f:name" in a map, 'k:{"uid":"1"}' and 'v:"x"' in the
two lists whose elements are known by their values. All other lists are atomic, as they are in
resources of a CRD that says nothing else; of built-in resources that is a simplification.

Source: RFC 7386 (merge patch), RFC 6902 (JSON patch), Kubernetes 1.36 "Server-Side Apply", and
sigs.k8s.io/structured-merge-diff v6.
"""

import copy
import json
from collections.abc import Iterable, Mapping
from typing import Any

Path = tuple[str, ...]
Object = dict[str, Any]
Owner = tuple[str, str, str, str]
"""Manager, operation, apiVersion, subresource."""

_KEPT_BY_THE_SERVER = frozenset(
    {
        *((f"f:{name}",) for name in ("apiVersion", "kind")),
        *(
            ("f:metadata", f"f:{name}")
            for name in (
                "name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp",
                "deletionTimestamp", "deletionGracePeriodSeconds", "selfLink", "managedFields",
            )
        ),
    }
)  # fmt: skip
_OWNER_REFERENCES = ("f:metadata", "f:ownerReferences")
_ATOMIC_MAPS = frozenset({("f:involvedObject",)})
_FINALIZERS = ("f:metadata", "f:finalizers")
_NOTHING = object()


class PatchError(Exception):
    """A JSON patch that cannot be carried out on this object."""


class ConflictError(Exception):
    """Fields that others own and want otherwise."""

    def __init__(self, conflicts: list[tuple[Owner, Path]]) -> None:
        super().__init__(str(conflicts))
        self.conflicts = conflicts


# --- patches --------------------------------------------------------------------------------------


def merge_patch(target: Any, patch: Any) -> Any:
    """A new value; both arguments stay as they are."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    merged = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge_patch(merged.get(key), value)
    return merged


def json_patch(target: Any, patch: Iterable[Mapping[str, Any]]) -> Any:
    """A new value. Raises PatchError."""
    document = {"": copy.deepcopy(target)}
    for step in patch:
        try:
            _carry_out(document, step)
        except (KeyError, IndexError, ValueError, TypeError) as error:
            raise PatchError(f"{step.get('op')} operation does not apply: {error!r}") from error
    return document[""]


def _carry_out(document: Any, step: Mapping[str, Any]) -> None:
    match step["op"]:
        case "add":
            _insert(document, step["path"], step["value"])
        case "remove":
            _take(document, step["path"])
        case "replace":
            _take(document, step["path"])
            _insert(document, step["path"], step["value"])
        case "move":
            _insert(document, step["path"], _take(document, step["from"]))
        case "copy":
            _insert(document, step["path"], copy.deepcopy(_look(document, step["from"])))
        case "test":
            if _look(document, step["path"]) != step["value"]:
                raise ValueError(f"testing value {step['path']} failed")
        case other:
            raise ValueError(f"unexpected kind {other}")


def _split(pointer: str) -> list[str]:
    if pointer and not pointer.startswith("/"):
        raise ValueError(f"no pointer: {pointer}")
    return [part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")]


def _step(value: Any, part: str) -> Any:
    return value[int(part)] if isinstance(value, list) else value[part]


def _look(document: Any, pointer: str) -> Any:
    for part in _split(pointer):
        document = _step(document, part)
    return document


def _parent(document: Any, pointer: str) -> tuple[Any, str]:
    *parents, last = _split(pointer)
    for part in parents:
        document = _step(document, part)
    return document, last


def _take(document: Any, pointer: str) -> Any:
    parent, last = _parent(document, pointer)
    return parent.pop(int(last) if isinstance(parent, list) else last)


def _insert(document: Any, pointer: str, value: Any) -> None:
    parent, last = _parent(document, pointer)
    if not isinstance(parent, list):
        parent[last] = value
    elif last == "-":
        parent.append(value)
    elif int(last) <= len(parent):
        parent.insert(int(last), value)
    else:
        raise IndexError(last)


# --- fields ---------------------------------------------------------------------------------------


def leaves(value: object) -> dict[Path, Any]:
    """Of an object, without what the server itself keeps in it."""
    found: dict[Path, Any] = {}
    _collect(value, (), found)
    return {path: found[path] for path in found if path not in _KEPT_BY_THE_SERVER}


def _collect(value: Any, path: Path, found: dict[Path, Any]) -> None:
    if value is None or path in _KEPT_BY_THE_SERVER:
        return
    if isinstance(value, dict) and value and path not in _ATOMIC_MAPS:
        for key in value:
            _collect(value[key], (*path, f"f:{key}"), found)
    elif isinstance(value, list) and path == _OWNER_REFERENCES:
        for item in value:
            found[*path, f"k:{_compact({'uid': item['uid']})}"] = item
    elif isinstance(value, list) and path == _FINALIZERS:
        for item in value:
            found[*path, f"v:{_compact(item)}"] = item
    elif path:
        found[path] = value


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _maps(paths: Iterable[Path]) -> set[Path]:
    """The fields that have fields, told by "." at the end."""
    above = {path[:depth] for path in paths for depth in range(1, len(path))}
    return {(*path, ".") for path in above if path != ("f:metadata",)}


def _put(target: Object, path: Path, value: Any) -> None:
    *parents, last = path
    inside: Any = target
    if last.startswith("f:"):
        for part in parents:
            inside = inside.setdefault(part[2:], {})
        inside[last[2:]] = copy.deepcopy(value)
        return
    items = target.setdefault("metadata", {}).setdefault(parents[-1][2:], [])
    same = [at for at, item in enumerate(items) if _is_same(item, last)]
    for at in same:
        items[at] = copy.deepcopy(value)
    if not same:
        items.append(copy.deepcopy(value))


def _drop(target: Object, path: Path) -> None:
    *parents, last = path
    inside: Any = target
    for part in parents:
        inside = inside.get(part[2:]) if isinstance(inside, dict) else None
    if isinstance(inside, dict):
        inside.pop(last[2:], None)
    elif isinstance(inside, list):
        inside[:] = [item for item in inside if not _is_same(item, last)]
    if not inside and path[0] == "f:metadata" and len(path) == 3:
        target["metadata"].pop(path[1][2:], None)


def _is_same(item: Any, part: str) -> bool:
    kind, _, key = part.partition(":")
    return bool((item if kind == "v" else {"uid": item.get("uid")}) == json.loads(key))


# --- owners ---------------------------------------------------------------------------------------


class Owners:
    """An object's managedFields, unfolded."""

    def __init__(self, entries: Iterable[Mapping[str, Any]]) -> None:
        self.fields: dict[Owner, set[Path]] = {}
        self.times: dict[Owner, str] = {}
        for entry in entries:
            owner = (
                entry["manager"], entry["operation"], entry["apiVersion"],
                entry.get("subresource", ""),
            )  # fmt: skip
            self.fields[owner] = set(_unfold(entry["fieldsV1"]))
            self.times[owner] = entry.get("time", "")

    def update(self, owner: Owner, old: object, new: object, now: str) -> None:
        """After a write that says nothing of owners: who changed a field has it alone.

        An object that nobody owns a field of when it is changed has no owners until it is applied.
        """
        if old and not self.fields:
            return
        before, after = leaves(old), leaves(new)
        changed = {path for path in after if before.get(path, _NOTHING) != after[path]}
        changed |= _maps(after) - _maps(before)
        gone = (before.keys() - after.keys()) | (_maps(before) - _maps(after))
        if changed or gone:
            for paths in self.fields.values():
                paths -= changed | gone
            self.fields.setdefault(owner, set()).update(changed)
            self.times[owner] = now

    def apply(self, owner: Owner, live: Object, body: object, now: str, force: bool) -> Object:
        """The object as applied, new. Raises ConflictError.

        What is there without an owner at the first apply gets one. Who changes nothing gets no
        time.
        """
        wanted, have = leaves(body), leaves(live)
        if have and not self.fields:
            before = ("before-first-apply", "Update", owner[2], "")
            self.fields[before], self.times[before] = set(have) | _maps(have), now
        conflicts = [
            (other, path)
            for other, paths in sorted(self.fields.items())
            for path in sorted(paths)
            if other != owner and path in wanted and have.get(path) != wanted[path]
        ]
        if conflicts and not force:
            raise ConflictError(conflicts)
        for other, path in conflicts:
            self.fields[other].discard(path)
        mine = self.fields.get(owner, set())
        self.fields[owner] = set(wanted)
        merged = self._merge(live, wanted, mine)
        if leaves(merged) != have:
            self.times[owner] = now
        return merged

    def _merge(self, live: Object, wanted: Mapping[Path, Any], mine: Iterable[Path]) -> Object:
        merged = copy.deepcopy(live)
        owned = set().union(*self.fields.values())
        for path in sorted(mine):
            if path not in owned:
                _drop(merged, path)
        for path in wanted:
            _put(merged, path, wanted[path])
        return merged

    def entries(self) -> list[Object]:
        """As managedFields has them: Apply first, then by time and name."""
        owners = [owner for owner in self.fields if self.fields[owner]]
        owners.sort(key=lambda owner: (owner[1], self.times.get(owner, ""), owner))
        return [self._entry(owner) for owner in owners]

    def _entry(self, owner: Owner) -> Object:
        manager, operation, version, subresource = owner
        entry: Object = {"manager": manager, "operation": operation, "apiVersion": version}
        if self.times.get(owner):
            entry["time"] = self.times[owner]
        entry |= {"fieldsType": "FieldsV1", "fieldsV1": _fold(self.fields[owner])}
        return entry | ({"subresource": subresource} if subresource else {})


def _fold(paths: Iterable[Path]) -> Object:
    folded: Object = {}
    for path in sorted(paths):
        inside = folded
        for part in path:
            inside = inside.setdefault(part, {})
    return folded


def _unfold(fields: Mapping[str, Any], above: Path = ()) -> Iterable[Path]:
    for part, below in fields.items():
        if below:
            yield from _unfold(below, (*above, part))
        else:
            yield (*above, part)
