"""A report beside other reporters: there is one NodeResourceTopology a node, whoever writes it.

Its lists are atomic for the API server, so whoever writes `zones` last owns all of them. Where
another reporter does, only what nobody else knows is put into its object: the resource of our GPUs
and our own attributes and annotations. Everything else stays as it is, in its place.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from agent.core.request import GPU_RESOURCE, parse_quantity
from agent.core.strict_json import Object, as_list, as_object

MANAGER = "numalet"
"""The field manager of our writes, and the value of MANAGED_BY on our objects."""
MANAGED_BY = "app.kubernetes.io/managed-by"
OWN_PREFIX = "numalet.io/"
"""Of all our annotations and attributes."""
ADDED_ATTRIBUTE = f"{OWN_PREFIX}added"
"""Attribute of a zone that the other reporter lacks: "true". All of it is ours, and stays true."""

_QUANTITIES = ("capacity", "allocatable", "available")


def is_foreign(current: Mapping[str, Any]) -> bool:
    """Whether the zones of this object belong to another reporter.

    They do if its label says so, or if field managers have them among which is not our server-side
    apply: who changes them takes them from us. What has no zones, or zones without an owner, may be
    taken. After `merge` the object is still foreign: a plain update, whoever makes it, is not our
    apply.
    """
    metadata = as_object(current.get("metadata"))
    if as_object(metadata.get("labels")).get(MANAGED_BY, MANAGER) != MANAGER:
        return True
    if not current.get("zones"):
        return False
    owners = [
        (entry.get("manager"), entry.get("operation"))
        for entry in map(as_object, as_list(metadata.get("managedFields")))
        if "f:zones" in as_object(entry.get("fieldsV1"))
    ]
    return bool(owners) and (MANAGER, "Apply") not in owners


def merge(current: Mapping[str, Any], ours: Mapping[str, Any]) -> Object:
    """The foreign object with what we add to it; equal to `current` where nothing changes.

    Into the zone of the same name go our resource and our attributes. Where they say nothing any
    more (the node has no GPU left, or is gone), they are taken out. A zone that the other reporter
    lacks is added whole, marked with ADDED_ATTRIBUTE, and kept as ours says. Zones that make no
    sense (no object, no list of resources, a name that occurs twice) are passed over. Quantities
    of the same value stay as they are spelled.
    """
    metadata = as_object(current.get("metadata"))
    own = {
        key: text
        for key, text in as_object(as_object(ours.get("metadata")).get("annotations")).items()
        if key.startswith(OWN_PREFIX)
    }
    annotations = as_object(metadata.get("annotations")) | own
    attributes = [one for one in ours["attributes"] if _is_own(one["name"])]
    return {
        **current,
        "metadata": {**metadata, "annotations": annotations},
        "attributes": _put(current.get("attributes"), attributes, _is_own),
        "zones": _merge_zones(as_list(current.get("zones")), ours["zones"]),
    }


def _merge_zones(theirs: list[Any], ours: Iterable[Object]) -> list[Any]:
    by_name = {zone["name"]: zone for zone in ours}
    names = [_name(zone) for zone in theirs]
    count = Counter(names)
    zones: list[Any] = []
    for zone, name in zip(theirs, names, strict=True):
        if name is None or count[name] > 1 or type(zone.get("resources")) is not list:
            zones.append(zone)
        elif not _is_added(zone):
            zones.append(_merge_zone(zone, by_name.get(name, {})))
        elif name in by_name:
            zones.append(_renew(zone, by_name[name]))
    return zones + [_renew({}, zone) for name, zone in by_name.items() if name not in count]


def _merge_zone(theirs: Object, ours: Object) -> Object:
    resources = [one for one in ours.get("resources", ()) if _is_gpu(one["name"])]
    zone = {**theirs, "resources": _put(theirs["resources"], resources, _is_gpu)}
    attributes = ours.get("attributes", ())
    if attributes or "attributes" in theirs:
        zone["attributes"] = _put(theirs.get("attributes"), attributes, _is_own)
    return zone


def _renew(theirs: Object, ours: Object) -> Object:
    """A zone that we added, as ours says now, and with the resources that others put into it."""
    mark = {"name": ADDED_ATTRIBUTE, "value": "true"}
    attributes = (*ours.get("attributes", ()), mark)
    return {
        **ours,
        "resources": _put(theirs.get("resources"), ours["resources"], _is_reported),
        "attributes": _put(theirs.get("attributes"), attributes, _is_own),
    }


def _put(theirs: object, ours: Iterable[Object], owned: Callable[[str], bool]) -> list[Any]:
    """A list of named objects in which those with an owned name are just ours."""
    by_name = {one["name"]: one for one in ours}
    merged: list[Any] = []
    found: set[str] = set()
    for item in as_list(theirs):
        name = _name(item)
        if name is None or not owned(name):
            merged.append(item)
        elif name in by_name:
            found.add(name)
            merged.append(item | _news(item, by_name[name]))
    return merged + [one for name, one in by_name.items() if name not in found]


def _news(theirs: Object, ours: Object) -> Object:
    return {
        key: value
        for key, value in ours.items()
        if key not in theirs or not _same(key, theirs[key], value)
    }


def _is_own(name: str) -> bool:
    return name.startswith(OWN_PREFIX)


def _is_gpu(name: str) -> bool:
    return name == GPU_RESOURCE


def _is_reported(name: str) -> bool:
    """Whether the resource is one of those that our zones have."""
    return name in ("cpu", "memory", GPU_RESOURCE) or name.startswith("hugepages-")


def _is_added(zone: Object) -> bool:
    return any(_name(one) == ADDED_ATTRIBUTE for one in as_list(zone.get("attributes")))


# --- what a write would change --------------------------------------------------------------------


def shows(current: Mapping[str, Any] | None, ours: Mapping[str, Any]) -> bool:
    """Whether an object of ours already says what `ours` says, so that nothing is to be written.

    What others added to its metadata does not count. All else is ours alone: more than we say there
    counts as well, and so does the order of lists. Quantities are compared by value.
    """
    if current is None:
        return False
    metadata = as_object(current.get("metadata"))
    return all(
        all(_covers(metadata.get(name), said) for name, said in value.items())
        if key == "metadata"
        else _same(key, current.get(key), value)
        for key, value in ours.items()
    )


def _covers(theirs: object, ours: object) -> bool:
    """Whether all that `ours` says is in `theirs`, which may say more."""
    if isinstance(ours, dict):
        there = as_object(theirs)
        return all(key in there and _covers(there[key], value) for key, value in ours.items())
    if isinstance(ours, list):
        return all(any(_covers(one, wanted) for one in as_list(theirs)) for wanted in ours)
    return _same("", theirs, ours)


def _same(key: str, theirs: object, ours: object) -> bool:
    if key in _QUANTITIES:
        return _value(theirs) == _value(ours)
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return theirs.keys() == ours.keys() and all(_same(k, theirs[k], ours[k]) for k in ours)
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(theirs) == len(ours) and all(
            _same("", one, other) for one, other in zip(theirs, ours, strict=True)
        )
    return theirs == ours


def _value(quantity: object) -> object:
    """The number that a quantity is; itself where it is none."""
    try:
        return quantity if quantity is None else parse_quantity(quantity)
    except ValueError:
        return quantity


# --- what a stranger wrote ------------------------------------------------------------------------


def _name(value: object) -> str | None:
    name = as_object(value).get("name")
    return name if isinstance(name, str) else None
