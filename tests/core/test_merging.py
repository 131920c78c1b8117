"""Our report inside another reporter's object: by hand on an object as koordlet writes it, and the
promise to change nothing else on any object."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.core.report import About, is_foreign, merge, shows, to_nrt
from tests.core.oracle import build, grant, ledger_of

Nrt = dict[str, Any]

# Node 0 has two GPUs, one of them held, node 1 has none.
OURS = to_nrt(
    ledger_of(build((2, 2), (0, 2)), grant("a", [0], "0-1")), About(node="n1", pinning="nri")
)
OWN = {
    key: OURS["metadata"]["annotations"][key] for key in ("numalet.io/grants", "numalet.io/machine")
}


def resource(name: str, *amounts: object) -> Nrt:
    return {
        "name": name,
        **dict(zip(("capacity", "allocatable", "available"), amounts, strict=True)),
    }


def named(name: str, value: object) -> Nrt:
    return {"name": name, "value": value}


def zone(name: str, *resources: object, **more: object) -> Nrt:
    return {"name": name, "type": "Node", "resources": list(resources), **more}


def foreign(*zones: object, **more: object) -> Nrt:
    """An object as koordlet writes it, with these zones."""
    return {
        "apiVersion": "topology.node.k8s.io/v1alpha2",
        "kind": "NodeResourceTopology",
        "metadata": {
            "name": "n1",
            "resourceVersion": "7",
            "labels": {"app.kubernetes.io/managed-by": "Koordinator"},
            "annotations": {"node.koordinator.sh/cpu-topology": '{"detail": []}'},
            "managedFields": [owner("koordlet")],
        },
        "topologyPolicies": ["None"],
        "zones": list(zones),
        **more,
    }


def owner(manager: str, operation: str = "Update", field: str = "f:zones") -> Nrt:
    return {"manager": manager, "operation": operation, "fieldsV1": {field: {}}}


CPU0 = resource("cpu", "4", "4", "4")
BATCH = resource("kubernetes.io/batch-cpu", "1k", "1k", "1k")
CPU1 = resource("cpu", 4, 4, 4)
GPU0 = resource("aliyun.com/gpu", "2", "2", "1")
SINGLE, IDLE = named("numalet.io/state", "single"), named("numalet.io/state", "idle")
ADDED = named("numalet.io/added", "true")
PINNING = named("numalet.io/pinning", "nri")
CPUS, GPUS = named("numalet.io/cpus", "2/4 4/4"), named("numalet.io/gpus", "1/2 -")
STATES = named("numalet.io/states", "single idle")
KOORDLET = foreign(zone("node-1", CPU1), zone("node-0", CPU0, BATCH))


def test_an_object_of_koordlets() -> None:
    before = copy.deepcopy(KOORDLET)
    merged = merge(KOORDLET, OURS)
    assert before == KOORDLET
    assert merged == {
        **KOORDLET,
        "metadata": {
            **KOORDLET["metadata"],
            "annotations": {"node.koordinator.sh/cpu-topology": '{"detail": []}', **OWN},
        },
        "attributes": [CPUS, GPUS, PINNING, STATES],
        "zones": [
            zone("node-1", CPU1, attributes=[IDLE]),
            zone("node-0", CPU0, BATCH, GPU0, attributes=[SINGLE]),
        ],
    }
    assert merge(merged, OURS) == merged
    assert is_foreign(merged)


# --- zones ----------------------------------------------------------------------------------------

# what it is about → their zones, the zones after the merge
ZONE0, ZONE1 = OURS["zones"]
WHOLE0, WHOLE1 = ({**one, "attributes": [*one["attributes"], ADDED]} for one in OURS["zones"])
DONE1 = zone("node-1", attributes=[IDLE])
ZONES: dict[str, tuple[list[object], list[object]]] = {
    "zones that they lack are added whole, after theirs": (
        [zone("socket-0", CPU0)],
        [zone("socket-0", CPU0), WHOLE0, WHOLE1],
    ),
    "our values take the place of others": (
        [zone("node-0", resource("aliyun.com/gpu", "8", "8", "8"), CPU0), DONE1],
        [zone("node-0", GPU0, CPU0, attributes=[SINGLE]), DONE1],
    ),
    "a quantity of the same value stays as it is spelled": (
        [zone("node-0", resource("aliyun.com/gpu", 2, "2000m", "2"), CPU0), DONE1],
        [
            zone("node-0", resource("aliyun.com/gpu", 2, "2000m", "1"), CPU0, attributes=[SINGLE]),
            DONE1,
        ],
    ),
    "a quantity that is none, or is missing, is put right": (
        [zone("node-0", {"name": "aliyun.com/gpu", "capacity": "?", "available": None}), DONE1],
        [
            zone(
                "node-0",
                {"name": "aliyun.com/gpu", "capacity": "2", "available": "1", "allocatable": "2"},
                attributes=[SINGLE],
            ),
            DONE1,
        ],
    ),
    "their attributes stay where they are, ours are put right": (
        [
            zone("node-0", GPU0, attributes=[named("x", "1"), IDLE, named("y", "2")]),
            DONE1,
        ],
        [
            zone("node-0", GPU0, attributes=[named("x", "1"), SINGLE, named("y", "2")]),
            DONE1,
        ],
    ),
    "a node that has no GPU any more loses ours only": (
        [
            zone("node-0", GPU0, attributes=[SINGLE]),
            zone("node-1", CPU1, GPU0, BATCH, attributes=[IDLE]),
        ],
        [
            zone("node-0", GPU0, attributes=[SINGLE]),
            zone("node-1", CPU1, BATCH, attributes=[IDLE]),
        ],
    ),
    "so does a node that we do not know any more": (
        [
            zone("node-0", GPU0, attributes=[SINGLE]),
            DONE1,
            zone("node-9", CPU1, GPU0, attributes=[named("x", "1"), IDLE]),
            zone("node-8", CPU1),
        ],
        [
            zone("node-0", GPU0, attributes=[SINGLE]),
            DONE1,
            zone("node-9", CPU1, attributes=[named("x", "1")]),
            zone("node-8", CPU1),
        ],
    ),
    "a zone that we added is renewed whole, but for what others put into it": (
        [
            zone("node-0", GPU0, attributes=[SINGLE]),
            {
                **WHOLE1,
                "costs": [],
                "attributes": [named("x", "1"), ADDED],
                "resources": [
                    BATCH,
                    resource("cpu", "9", "9", "9"),
                    resource("hugepages-2Mi", "9", "9", "9"),
                    resource("aliyun.com/gpu", "9", "9", "9"),
                ],
            },
        ],
        [
            zone("node-0", GPU0, attributes=[SINGLE]),
            {
                **ZONE1,
                "attributes": [named("x", "1"), ADDED, IDLE],
                "resources": [BATCH, *ZONE1["resources"]],
            },
        ],
    ),
    "a zone that we added goes with its node": (
        [zone("node-0", GPU0, attributes=[SINGLE]), DONE1, {**WHOLE1, "name": "node-9"}],
        [zone("node-0", GPU0, attributes=[SINGLE]), DONE1],
    ),
    "what is no zone is passed over": (
        [None, "node-0", 7, [], {}, {"name": 3}, {"type": "Node", "resources": []}],
        [None, "node-0", 7, [], {}, {"name": 3}, {"type": "Node", "resources": []}, WHOLE0, WHOLE1],
    ),
    "zones of one name are passed over": (
        [zone("node-0", CPU0), zone("node-0"), DONE1],
        [zone("node-0", CPU0), zone("node-0"), DONE1],
    ),
    "zones without resources are passed over": (
        [{"name": "node-0", "type": "Node"}, {"name": "node-1", "resources": {}}],
        [{"name": "node-0", "type": "Node"}, {"name": "node-1", "resources": {}}],
    ),
    "what is no resource is passed over": (
        [zone("node-0", None, {"capacity": "1"}, "cpu", {"name": 1}), DONE1],
        [
            zone("node-0", None, {"capacity": "1"}, "cpu", {"name": 1}, GPU0, attributes=[SINGLE]),
            DONE1,
        ],
    ),
    "a resource that they have twice is ours twice": (
        [zone("node-0", GPU0, resource("aliyun.com/gpu", "1", "1", "0")), DONE1],
        [zone("node-0", GPU0, GPU0, attributes=[SINGLE]), DONE1],
    ),
    "attributes that are none are replaced": (
        [zone("node-0", GPU0, attributes=None), zone("node-1", attributes="x")],
        [zone("node-0", GPU0, attributes=[SINGLE]), DONE1],
    ),
}


@pytest.mark.parametrize(("theirs", "merged"), ZONES.values(), ids=ZONES)
def test_zones(theirs: list[object], merged: list[object]) -> None:
    once = merge(foreign(*theirs), OURS)
    assert once["zones"] == merged
    assert merge(once, OURS) == once


def test_a_zone_of_ours_without_attributes_adds_none() -> None:
    ours = {**OURS, "zones": [{"name": "node-1", "type": "Node", "resources": []}]}
    assert merge(foreign(zone("node-1", CPU1)), ours)["zones"] == [zone("node-1", CPU1)]
    added = {**zone("node-1"), "attributes": [ADDED]}
    assert merge(foreign(), ours)["zones"] == [added]


def test_the_objects_own_attributes_stay_but_for_ours() -> None:
    theirs = [named("topologyManagerPolicy", "restricted"), named("numalet.io/pinning", "none")]
    merged = merge(foreign(attributes=theirs), OURS)
    assert merged["attributes"] == [theirs[0], PINNING, CPUS, GPUS, STATES]


BARE: dict[str, Nrt] = {
    "nothing at all": {},
    "nulls": {"metadata": None, "attributes": None, "zones": None},
    "other types": {"metadata": "x", "attributes": {}, "zones": 7},
    "metadata of other types": {"metadata": {"annotations": "x"}},
}


@pytest.mark.parametrize("bare", BARE.values(), ids=BARE)
def test_an_object_that_has_hardly_anything(bare: Nrt) -> None:
    assert merge(bare, OURS) == {
        "metadata": {"annotations": OWN},
        "attributes": [CPUS, GPUS, PINNING, STATES],
        "zones": [WHOLE0, WHOLE1],
    }


# --- any object -----------------------------------------------------------------------------------

anything = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
names = st.sampled_from(
    ["node-0", "node-1", "node-7", "cpu", "aliyun.com/gpu", "numalet.io/x", "x"]
)
items = st.lists(
    anything
    | st.fixed_dictionaries(
        {"name": names | anything},
        optional={"value": anything, "capacity": anything, "available": st.sampled_from(["1", 1])},
    ),
    max_size=4,
)
zones = st.lists(
    anything
    | st.fixed_dictionaries(
        {"name": names | anything},
        optional={"resources": items | anything, "attributes": items | anything, "costs": anything},
    ),
    max_size=4,
)
objects = st.fixed_dictionaries(
    {},
    optional={
        "metadata": st.dictionaries(
            st.sampled_from(["annotations", "labels", "managedFields"]), anything
        ),
        "zones": zones,
        "attributes": items,
        "topologyPolicies": anything,
    },
)


@given(objects)
@settings(deadline=None, max_examples=300)
def test_merging_twice_is_merging_once(current: Nrt) -> None:
    before = json.dumps(current)
    once = merge(current, OURS)
    assert json.dumps(current) == before
    assert json.dumps(merge(once, OURS)) == json.dumps(once)


@given(objects)
@settings(deadline=None, max_examples=300)
def test_whatever_is_theirs_stays_byte_for_byte(current: Nrt) -> None:
    assert json.dumps(theirs_of(merge(current, OURS))) == json.dumps(theirs_of(current))


def theirs_of(nrt: Nrt) -> object:
    """What of an object is not ours, in its order."""
    left = copy.deepcopy(nrt)
    metadata = left.setdefault("metadata", {})
    if not isinstance(metadata.get("annotations"), dict):
        metadata["annotations"] = {}
    annotations = {k: v for k, v in metadata["annotations"].items() if k[:11] != "numalet.io/"}
    attributes = foreign_items(
        left.pop("attributes", None), lambda name: name[:11] == "numalet.io/"
    )
    found = [one for one in left.pop("zones", []) if ADDED not in attributes_of(one)]
    rest = {key: value for key, value in metadata.items() if key != "annotations"}
    left.pop("metadata")
    return [left, rest, annotations, attributes, [foreign_zone(one) for one in found]]


def attributes_of(item: object) -> list[object]:
    found = item.get("attributes") if isinstance(item, dict) else None
    return found if isinstance(found, list) else []


def foreign_zone(item: object) -> object:
    if not isinstance(item, dict) or not isinstance(item.get("resources"), list):
        return item
    rest = {k: v for k, v in item.items() if k not in ("resources", "attributes")}
    attributes = foreign_items(item.get("attributes"), lambda name: name[:11] == "numalet.io/")
    return [rest, attributes, foreign_items(item["resources"], "aliyun.com/gpu".__eq__)]


def foreign_items(found: object, ours: Callable[[str], bool]) -> list[object]:
    """The items of a list but those that are ours by name."""
    return [
        one
        for one in (found if isinstance(found, list) else [])
        if not (isinstance(one, dict) and isinstance(one.get("name"), str) and ours(one["name"]))
    ]


# --- whose it is ----------------------------------------------------------------------------------


def owned(*entries: object, **more: object) -> Nrt:
    return {"metadata": {"managedFields": list(entries), **more}, "zones": [{}]}


OWNERS: dict[str, tuple[Nrt, bool]] = {
    "an object as we apply it": (owned(owner("numalet", "Apply")), False),
    "what we merged is still theirs": (owned(owner("numalet", "Update")), True),
    "koordlet's": (owned(owner("koordlet")), True),
    "another's by server-side apply": (owned(owner("node-feature-discovery", "Apply")), True),
    "ours, and another wrote the same": (
        owned(owner("numalet", "Apply"), owner("before-first-apply")),
        False,
    ),
    "ours, with another's labels": (
        owned(owner("numalet", "Apply"), owner("kubectl", field="f:metadata")),
        False,
    ),
    "nobody's": (owned(), False),
    "without any owners": ({"zones": [{}]}, False),
    "another's without zones": ({**owned(owner("koordlet")), "zones": []}, False),
    "another's before it has zones, by its label": (foreign(), True),
    "our own label": (
        owned(owner("numalet", "Apply"), labels={"app.kubernetes.io/managed-by": "numalet"}),
        False,
    ),
    "another's label on our zones": (
        owned(owner("numalet", "Apply"), labels={"app.kubernetes.io/managed-by": "helm"}),
        True,
    ),
    "owners that make no sense": (
        owned(None, 7, "numalet", {}, {"fieldsV1": "f:zones"}, {"fieldsV1": None}),
        False,
    ),
    "an owner without a name": (owned({"fieldsV1": {"f:zones": {}}}), True),
    "owners that are no list": ({"metadata": {"managedFields": "x"}, "zones": [{}]}, False),
    "metadata that are none": ({"metadata": [], "zones": [{}]}, False),
    "labels that are none": (owned(labels="Koordinator"), False),
}


@pytest.mark.parametrize(("current", "whether"), OWNERS.values(), ids=OWNERS)
def test_whether_it_is_foreign(current: Nrt, whether: bool) -> None:
    assert is_foreign(current) is whether


# --- whether there is anything to write -----------------------------------------------------------

Edit = Callable[[Nrt], object]
SERVED = {
    **OURS,
    "metadata": {
        **OURS["metadata"],
        "uid": "1",
        "resourceVersion": "2",
        "managedFields": [owner("numalet", "Apply")],
    },
}
# an edit of what the API server has → whether it still says all of ours
EDITS: dict[str, tuple[Edit, bool]] = {
    "as we wrote it": (lambda nrt: None, True),
    "a label of another": (lambda nrt: nrt["metadata"]["labels"].update(x="y"), True),
    "an annotation of another": (lambda nrt: nrt["metadata"]["annotations"].update(x="y"), True),
    "our label is gone": (lambda nrt: nrt["metadata"].pop("labels"), False),
    "our label is another": (
        lambda nrt: nrt["metadata"]["labels"].update({"app.kubernetes.io/managed-by": "x"}),
        False,
    ),
    "an annotation of ours is gone": (
        lambda nrt: nrt["metadata"]["annotations"].pop("numalet.io/grants"),
        False,
    ),
    "metadata that are none": (lambda nrt: nrt.update(metadata=None), False),
    "another policy": (lambda nrt: nrt.update(topologyPolicies=["Restricted"]), False),
    "no policy": (lambda nrt: nrt.pop("topologyPolicies"), False),
    "a policy more": (lambda nrt: nrt["topologyPolicies"].append("x"), False),
    "an attribute more": (lambda nrt: nrt["attributes"].append(named("x", "y")), False),
    "no attributes": (lambda nrt: nrt.pop("attributes"), False),
    "a zone more": (lambda nrt: nrt["zones"].append(ZONE0), False),
    "a zone less": (lambda nrt: nrt["zones"].pop(), False),
    "zones the other way round": (lambda nrt: nrt["zones"].reverse(), False),
    "a resource more": (lambda nrt: nrt["zones"][0]["resources"].append(BATCH), False),
    "a field more in a zone": (lambda nrt: nrt["zones"][0].update(parent="x"), False),
    "costs are gone": (lambda nrt: nrt["zones"][0].pop("costs"), False),
    "a cost as a text": (lambda nrt: nrt["zones"][0]["costs"][0].update(value="10"), False),
    "another amount": (
        lambda nrt: nrt["zones"][0]["resources"][0].update(available="2"),
        False,
    ),
    "the same amount as a number": (
        lambda nrt: nrt["zones"][0]["resources"][0].update(available=1),
        True,
    ),
    "the same amount of memory": (
        lambda nrt: nrt["zones"][0]["resources"][2].update(capacity="64Gi"),
        True,
    ),
    "an amount that is none": (
        lambda nrt: nrt["zones"][0]["resources"][0].update(available="one"),
        False,
    ),
    "an amount of null": (
        lambda nrt: nrt["zones"][0]["resources"][0].update(available=None),
        False,
    ),
    "another version": (lambda nrt: nrt.update(apiVersion="topology.node.k8s.io/v1"), False),
}


@pytest.mark.parametrize(("edit", "says"), EDITS.values(), ids=EDITS)
def test_whether_all_is_said(edit: Edit, says: bool) -> None:
    current = copy.deepcopy(SERVED)
    edit(current)
    assert shows(current, OURS) is says


def test_what_is_not_there_says_nothing() -> None:
    assert not shows(None, OURS)
    assert not shows({}, OURS)


def test_null_is_not_zero() -> None:
    ours = {"zones": [zone("node-0", resource("cpu", "0", "0", "0"))]}
    assert not shows({"zones": [zone("node-0", resource("cpu", "0", "0", None))]}, ours)
    assert shows({"zones": [zone("node-0", resource("cpu", "0", 0, "0Gi"))]}, ours)


OWNER = {"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "u"}
REFERENCES: dict[str, tuple[object, bool]] = {
    "none": (None, False),
    "ours": ([OWNER], True),
    "ours with what the server adds": ([{**OWNER, "controller": False}], True),
    "ours among others": ([{**OWNER, "uid": "x"}, OWNER], True),
    "another's": ([{**OWNER, "uid": "x"}], False),
    "one without a uid": ([{"apiVersion": "v1", "kind": "Node", "name": "n1"}], False),
    "no list": ("ours", False),
}


@pytest.mark.parametrize(("found", "says"), REFERENCES.values(), ids=REFERENCES)
def test_owners_of_others_do_not_matter(found: object, says: bool) -> None:
    ours = {"metadata": {"ownerReferences": [OWNER]}}
    assert shows({"metadata": {"ownerReferences": found}}, ours) is says
