"""The report: one object written out by hand, the rules of its CRD and of its readers for any
ledger, and the way back."""

import base64
import json
import re
import zlib
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.core.bitmap import Bitmap
from agent.core.layout import key, lay_out
from agent.core.ledger import Grant, Ledger
from agent.core.report import (
    GRANTS_KEY,
    GROUP,
    MACHINE_KEY,
    PLURAL,
    TOPOLOGY_POLICIES,
    TOPOLOGY_SCOPES,
    VERSION,
    About,
    from_nrt,
    shows,
    to_nrt,
)
from agent.core.schema import to_json
from agent.core.topology import Machine
from tests.core.machines import described, random_machines
from tests.core.oracle import build, grant, ledger_of

Nrt = dict[str, Any]

# --- one object by hand ---------------------------------------------------------------------------

# GPU 7 is faulty. Pod a has two GPUs and eight CPUs of node 0 and binds 64 GiB there, pod b has a
# GPU and two CPUs of either node and binds 1 GiB and a byte to both.
A800 = described("a800x8")
A800 = replace(A800, gpus=(*A800.gpus[:7], replace(A800.gpus[7], fault="lost")))
UUIDS = [gpu.uuid or "" for gpu in A800.gpus]
GRANTS = (
    Grant(
        uid="uid-a",
        pod="team/a",
        container="main",
        gpus=(UUIDS[0], UUIDS[1]),
        cpus=Bitmap.parse_list("1-4,65-68"),
        mems=Bitmap([0]),
        bound_bytes=64 << 30,
    ),
    Grant(
        uid="uid-b",
        pod="team/b",
        container="main",
        gpus=(UUIDS[3], UUIDS[4]),
        cpus=Bitmap.parse_list("8-9,40-41"),
        mems=Bitmap([0, 1]),
        bound_bytes=(1 << 30) + 1,
    ),
    Grant(uid="uid-c", pod="team/c", container="side", placed=False),
)
LEDGER = Ledger(layout=lay_out(A800), reserved=Bitmap([0, 64]), grants=GRANTS)
ABOUT = About(
    node="gpu-1",
    pods=(),
    topology_policy="single-numa-node",
    topology_scope="pod",
    pinning="nri",
)


def resource(name: str, capacity: int, allocatable: int, available: int) -> dict[str, str]:
    return {
        "name": name,
        "capacity": str(capacity),
        "allocatable": str(allocatable),
        "available": str(available),
    }


EXPECTED = {
    "apiVersion": "topology.node.k8s.io/v1alpha2",
    "kind": "NodeResourceTopology",
    "metadata": {"name": "gpu-1", "labels": {"app.kubernetes.io/managed-by": "numalet"}},
    "topologyPolicies": ["SingleNUMANodePodLevel"],
    "attributes": [
        {"name": "nodeTopologyPodsFingerprint", "value": "pfp0v001ef46db3751d8e999"},
        {"name": "nodeTopologyPodsFingerprintMethod", "value": "all"},
        {"name": "numalet.io/cpus", "value": "52/62 62/64"},
        {"name": "numalet.io/gpus", "value": "1/4 2/3"},
        {"name": "numalet.io/pinning", "value": "nri"},
        {"name": "numalet.io/states", "value": "shared shared"},
        {"name": "topologyManagerPolicy", "value": "single-numa-node"},
        {"name": "topologyManagerScope", "value": "pod"},
    ],
    "zones": [
        {
            "name": "node-0",
            "type": "Node",
            "costs": [{"name": "node-0", "value": 10}, {"name": "node-1", "value": 20}],
            "attributes": [{"name": "numalet.io/state", "value": "shared"}],
            "resources": [
                resource("aliyun.com/gpu", 4, 4, 1),
                resource("cpu", 64, 62, 52),
                resource("memory", 549755813888, 549755813888, 480499466239),
            ],
        },
        {
            "name": "node-1",
            "type": "Node",
            "costs": [{"name": "node-0", "value": 20}, {"name": "node-1", "value": 10}],
            "attributes": [{"name": "numalet.io/state", "value": "shared"}],
            "resources": [
                resource("aliyun.com/gpu", 4, 3, 2),
                resource("cpu", 64, 64, 62),
                resource("memory", 549755813888, 549755813888, 549218942975),
            ],
        },
    ],
}
GRANTS_TEXT = (
    '{"reserved":"0,64","pods":['
    f'{{"uid":"uid-a","pod":"team/a","containers":[{{"name":"main","gpus":["{UUIDS[0]}","{UUIDS[1]}"],'
    '"cpus":"1-4,65-68","mems":"0","bound_bytes":68719476736}]},'
    f'{{"uid":"uid-b","pod":"team/b","containers":[{{"name":"main","gpus":["{UUIDS[3]}","{UUIDS[4]}"],'
    '"cpus":"8-9,40-41","mems":"0-1","bound_bytes":1073741825}]},'
    '{"uid":"uid-c","pod":"team/c","containers":[{"name":"side","placed":false}]}]}'
)


def test_one_object() -> None:
    nrt = to_nrt(LEDGER, ABOUT)
    annotations = nrt["metadata"].pop("annotations")
    assert nrt == EXPECTED
    assert annotations[GRANTS_KEY] == GRANTS_TEXT
    assert json.loads(unpack(annotations[MACHINE_KEY])) == to_json(A800)
    assert sorted(annotations) == [
        "kubelet.koordinator.sh/cpu-manager-policy",
        "node.koordinator.sh/be-cpu-shared-pools",
        "node.koordinator.sh/cpu-shared-pools",
        "node.koordinator.sh/cpu-topology",
        "node.koordinator.sh/pod-cpu-allocs",
        "numalet.io/grants",
        "numalet.io/machine",
    ]


def test_where_the_object_is() -> None:
    assert f"{PLURAL}.{GROUP}/{VERSION}" == ("noderesourcetopologies.topology.node.k8s.io/v1alpha2")


def test_the_packed_machine_has_no_blanks() -> None:
    text = unpack(to_nrt(LEDGER, ABOUT)["metadata"]["annotations"][MACHINE_KEY])
    assert '"schema":"numalet/machine/v1","name":"a800x8","nodes":[{"id":0,' in text


def test_an_idle_node_says_so() -> None:
    nrt = to_nrt(Ledger(layout=lay_out(A800)), About(node="n"))
    assert nrt["metadata"]["annotations"][GRANTS_KEY] == '{"pods":[]}'
    assert nrt["topologyPolicies"] == ["None"]
    assert attributes(nrt)["numalet.io/pinning"] == "none"
    assert [attributes(zone)["numalet.io/state"] for zone in nrt["zones"]] == ["idle", "idle"]


def test_the_fingerprint_is_that_of_the_pods() -> None:
    pods = tuple(("production", name) for name in ("envoy-g9m22", "jaeger-dpgjk", "nginx-rt684"))
    nrt = to_nrt(LEDGER, replace(ABOUT, pods=pods))
    assert attributes(nrt)["nodeTopologyPodsFingerprint"] == "pfp0v001607b76a0e9d3aeb4"


# --- zones ----------------------------------------------------------------------------------------

TWO = build((2, 2), (2, 2), faulty=[3])


def changed(machine: Machine, node: int, **facts: Any) -> Machine:
    nodes = tuple(replace(one, **facts) if one.id == node else one for one in machine.nodes)
    return replace(machine, nodes=nodes)


def without_uuid(machine: Machine, place: int) -> Machine:
    gpus = list(machine.gpus)
    gpus[place] = replace(gpus[place], uuid=None)
    return replace(machine, gpus=tuple(gpus))


# ledger → what the zones say of a resource: capacity/allocatable/available, or nothing
SAID: dict[str, tuple[Ledger, str, list[str | None]]] = {
    "CPUs are counted": (ledger_of(TWO), "cpu", ["4/4/4", "4/4/4"]),
    "reserved CPUs are there but not to be had": (
        ledger_of(TWO, reserved="0-1"),
        "cpu",
        ["4/2/2", "4/4/4"],
    ),
    "held CPUs are taken": (
        ledger_of(TWO, grant("a", cpus="1-2,7"), reserved="0"),
        "cpu",
        ["4/3/1", "4/4/3"],
    ),
    "GPUs are counted, faulty ones without use": (
        ledger_of(TWO),
        "aliyun.com/gpu",
        ["2/2/2", "2/1/1"],
    ),
    "held GPUs are taken, also by pods that are not pinned": (
        ledger_of(TWO, grant("a", gpus=[0, 2])),
        "aliyun.com/gpu",
        ["2/2/1", "2/1/0"],
    ),
    "a faulty GPU that is held is not counted twice": (
        ledger_of(TWO, grant("a", gpus=[3])),
        "aliyun.com/gpu",
        ["2/2/2", "2/1/1"],
    ),
    "a GPU that the driver never named is not offered": (
        ledger_of(without_uuid(TWO, 0)),
        "aliyun.com/gpu",
        ["1/1/1", "2/1/1"],
    ),
    "a node of such GPUs alone has none": (
        ledger_of(without_uuid(build((1, 1), (1, 1)), 0)),
        "aliyun.com/gpu",
        [None, "1/1/1"],
    ),
    "a node without GPUs has none": (
        ledger_of(build((1, 1), (0, 1))),
        "aliyun.com/gpu",
        ["1/1/1", None],
    ),
    "a GPU of unknown node takes them all away": (
        ledger_of(build((1, 1), (1, 1), seatless=1)),
        "aliyun.com/gpu",
        [None, None],
    ),
    "unless the driver never named it": (
        ledger_of(without_uuid(build((1, 1), (1, 1), seatless=1), 2)),
        "aliyun.com/gpu",
        ["1/1/1", "1/1/1"],
    ),
    "memory is what is bound less": (
        ledger_of(
            build((0, 2), (0, 2), memory_gib=1),
            grant("a", cpus="0", mems="0", bound_bytes=100),
            grant("b", cpus="1", mems="0", bound_bytes=10),
        ),
        "memory",
        ["1073741824/1073741824/1073741714", "1073741824/1073741824/1073741824"],
    ),
    "what is bound to several nodes is shared out, rounded up": (
        ledger_of(
            build((0, 2), (0, 2), (0, 2), memory_gib=1),
            grant("a", cpus="0,4,8", mems="0-2", bound_bytes=100),
        ),
        "memory",
        ["1073741824/1073741824/1073741790"] * 3,
    ),
    "more bound than there is leaves nothing": (
        ledger_of(
            build((0, 2), (0, 2), no_memory=[1]),
            grant("a", cpus="0,4", mems="0-1", bound_bytes=1 << 40),
        ),
        "memory",
        ["68719476736/68719476736/0", "0/0/0"],
    ),
    "memory is without huge pages": (
        ledger_of(changed(TWO, 1, memory_bytes=10 << 20, hugepages=((2 << 20, 3), (1 << 30, 0)))),
        "memory",
        ["68719476736/68719476736/68719476736", "4194304/4194304/4194304"],
    ),
    "more huge pages than memory leave nothing": (
        ledger_of(changed(TWO, 1, memory_bytes=1 << 20, hugepages=((2 << 20, 3),))),
        "memory",
        ["68719476736/68719476736/68719476736", "0/0/0"],
    ),
    "huge pages are told where there are any": (
        ledger_of(changed(TWO, 1, hugepages=((2 << 20, 3), (1 << 30, 0)))),
        "hugepages-2Mi",
        [None, "6291456/6291456/6291456"],
    ),
    "and not where there are none": (
        ledger_of(changed(TWO, 1, hugepages=((2 << 20, 3), (1 << 30, 0)))),
        "hugepages-1Gi",
        [None, None],
    ),
}


@pytest.mark.parametrize(("ledger", "name", "said"), SAID.values(), ids=SAID)
def test_what_zones_say(ledger: Ledger, name: str, said: list[str | None]) -> None:
    nrt = to_nrt(ledger, About(node="n"))
    check_schema(nrt)
    assert [amounts(zone).get(name) for zone in nrt["zones"]] == said


@pytest.mark.parametrize(
    ("size", "name"),
    {
        64 << 10: "64Ki",
        2 << 20: "2Mi",
        32 << 20: "32Mi",
        512 << 20: "512Mi",
        1 << 30: "1Gi",
        16 << 30: "16Gi",
        1 << 60: "1Ei",
        1536 << 10: "1536Ki",
        1000: "1000",
    }.items(),
)
def test_huge_pages_are_called_as_kubernetes_calls_them(size: int, name: str) -> None:
    nrt = to_nrt(ledger_of(changed(TWO, 0, hugepages=((size, 1),))), About(node="n"))
    assert f"hugepages-{name}" in amounts(nrt["zones"][0])


def test_what_kubelet_gave_away_is_not_available_but_for_its_static_policy() -> None:
    about = About(node="n", exclusive={"k": {"main": Bitmap([1])}})
    given = {
        policy: amounts(to_nrt(LEDGER, replace(about, cpu_manager_policy=policy))["zones"][0])[
            "cpu"
        ]
        for policy in ("none", "static")
    }
    free = replace(about, exclusive={"k": {"main": Bitmap([5])}}, cpu_manager_policy="static")
    assert given == {"none": "64/62/52", "static": "64/62/52"}  # pod a holds CPU 1 anyway
    assert amounts(to_nrt(LEDGER, free)["zones"][0])["cpu"] == "64/62/51"


def test_zones_follow_the_ids_and_not_their_names() -> None:
    nodes = build(*[(0, 1)] * 11)
    assert [zone["name"] for zone in to_nrt(ledger_of(nodes), About(node="n"))["zones"]] == [
        f"node-{id_}" for id_ in range(11)
    ]


def test_zones_without_known_distances_have_no_costs() -> None:
    nrt = to_nrt(ledger_of(changed(TWO, 1, distances=())), About(node="n"))
    assert ["costs" in zone for zone in nrt["zones"]] == [True, False]


def test_a_node_without_cpus_has_no_state() -> None:
    nrt = to_nrt(Ledger(layout=lay_out(described("cxl-expander"))), About(node="n"))
    zone = nrt["zones"][-1]
    assert "attributes" not in zone
    assert amounts(zone)["cpu"] == "0/0/0"


# --- any ledger -----------------------------------------------------------------------------------


@st.composite
def ledgers(draw: st.DrawFn, unique: bool = False) -> Ledger:
    """Any machine, and pods of up to two containers that hold anything of it, or of another. Unless
    `unique`, two containers of a pod may have one name."""
    machine = draw(random_machines())
    owner = st.sampled_from(["nobody", "a", "b", "ç"])
    gpus = {uid: ["GPU-gone-" + uid] * draw(st.integers(0, 1)) for uid in ("a", "b", "ç")}
    cpus: dict[str, set[int]] = {uid: set() for uid in gpus}
    for gpu in machine.gpus:
        gpus.get(draw(owner), []).append(key(gpu))
    for cpu in machine.cpus:
        cpus.get(draw(owner), set()).add(cpu)
    grants = [
        Grant(
            uid=uid,
            pod=f"{draw(st.text(max_size=4))}/{uid}",
            container=name,
            gpus=tuple(draw(st.permutations(gpus[uid]))),
            cpus=Bitmap(cpus[uid]) if draw(st.booleans()) else Bitmap(),
            mems=Bitmap(draw(st.sets(st.integers(0, 60), max_size=3))),
            bound_bytes=draw(st.integers(0, 1 << 62)),
            placed=draw(st.booleans()),
        )
        for uid in gpus
        for name in draw(st.lists(st.text(max_size=3), max_size=2, unique=unique))
    ]
    reserved = Bitmap(draw(st.sets(st.integers(0, 20), max_size=3)))
    return Ledger(layout=lay_out(machine), reserved=reserved, grants=tuple(grants))


words = st.text(max_size=4)
cpu_sets = st.builds(Bitmap, st.sets(st.integers(0, 20), max_size=4))
abouts = st.builds(
    About,
    node=st.just("n"),
    pods=st.lists(st.tuples(words, words), max_size=3).map(tuple),
    topology_policy=st.sampled_from(TOPOLOGY_POLICIES),
    topology_scope=st.sampled_from(TOPOLOGY_SCOPES),
    pinning=st.sampled_from(["nri", "cgroup", "none"]),
    cpu_manager_policy=st.sampled_from(["none", "static"]),
    reserved_cpus=cpu_sets,
    exclusive=st.dictionaries(words, st.dictionaries(words, cpu_sets, max_size=2), max_size=2),
)


@given(ledgers(), abouts)
@settings(deadline=None, max_examples=60)
def test_the_way_there_and_back(ledger: Ledger, about: About) -> None:
    nrt = to_nrt(ledger, about)
    back = from_nrt(json.loads(json.dumps(nrt)))
    assert back == ledger
    assert [one.placed for one in back.grants] == [one.placed for one in ledger.grants]
    assert to_nrt(back, about) == nrt


@given(ledgers(unique=True), abouts, st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=40)
def test_the_order_of_grants_does_not_matter(ledger: Ledger, about: About, random: Random) -> None:
    shuffled = tuple(random.sample(ledger.grants, len(ledger.grants)))
    again = Ledger(layout=ledger.layout, reserved=ledger.reserved, grants=shuffled)
    assert json.dumps(to_nrt(again, about)) == json.dumps(to_nrt(ledger, about))


@given(ledgers(), abouts)
@settings(deadline=None, max_examples=60)
def test_any_object_keeps_the_rules_of_crd_and_readers(ledger: Ledger, about: About) -> None:
    nrt = to_nrt(ledger, about)
    check_schema(nrt)
    check_readers(nrt)
    assert shows(json.loads(json.dumps(nrt)), nrt)


@given(ledgers())
@settings(deadline=None, max_examples=60)
def test_zones_together_have_what_is_free(ledger: Ledger) -> None:
    machine = ledger.layout.machine
    held = {name for one in ledger.grants for name in one.gpus}
    offered = [gpu for gpu in machine.gpus if gpu.uuid is not None]
    counts = {
        "capacity": len(offered),
        "allocatable": sum(gpu.fault is None for gpu in offered),
        "available": sum(gpu.fault is None and gpu.uuid not in held for gpu in offered),
    }
    taken = set(ledger.reserved).union(*(one.cpus for one in ledger.grants))
    zones = to_nrt(ledger, About(node="n"))["zones"]
    found = [one for zone in zones for one in zone["resources"] if one["name"] == "aliyun.com/gpu"]
    if any(gpu.node is None for gpu in offered):
        assert not found
    else:
        assert {field: sum(int(one[field]) for one in found) for field in counts} == counts
    for zone, node in zip(zones, machine.nodes, strict=True):
        left = set(node.cpus) - taken
        assert amounts(zone)["cpu"].rsplit("/")[-1] == str(len(left))


def check_schema(nrt: Nrt) -> None:
    """The CRD's schema of v1alpha2: which fields there may be, which must be, and of what type."""
    assert nrt.keys() == {
        "apiVersion",
        "kind",
        "metadata",
        "topologyPolicies",
        "attributes",
        "zones",
    }
    assert all(type(policy) is str for policy in nrt["topologyPolicies"])
    check_items(nrt["attributes"], {"name": str, "value": str})
    for zone in nrt["zones"]:
        assert zone.keys() <= {"name", "type", "parent", "costs", "attributes", "resources"}
        assert type(zone["name"]) is type(zone["type"]) is str
        check_items(zone.get("costs", []), {"name": str, "value": int})
        check_items(zone.get("attributes", []), {"name": str, "value": str})
        check_items(
            zone.get("resources", []),
            {"name": str, "capacity": str, "allocatable": str, "available": str},
        )
        for one in zone["resources"]:
            for field in ("capacity", "allocatable", "available"):
                assert QUANTITY.fullmatch(one[field])
    annotations = nrt["metadata"]["annotations"]
    assert sum(len(name) + len(text.encode()) for name, text in annotations.items()) <= 256 << 10


QUANTITY = re.compile(
    r"(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?[0-9]+))?"
)


def check_items(items: list[dict[str, Any]], types: dict[str, type]) -> None:
    for item in items:
        assert {name: type(value) for name, value in item.items()} == types


def check_readers(nrt: Nrt) -> None:
    """What schedulers rely on beyond the schema."""
    names = [zone["name"] for zone in nrt["zones"]]
    ids = [int(name.removeprefix("node-")) for name in names]
    assert names == [f"node-{id_}" for id_ in ids]
    assert ids == sorted(set(ids))
    assert in_order(nrt["attributes"])
    for zone in nrt["zones"]:
        assert zone["type"] == "Node"
        assert in_order(zone["resources"])
        costs = {one["name"]: one["value"] for one in zone.get("costs", [])}
        assert list(costs) in ([], names)
        for one in zone["resources"]:
            assert 0 <= int(one["available"]) <= int(one["allocatable"]) <= int(one["capacity"])


def in_order(items: list[dict[str, Any]]) -> bool:
    """Whether the names ascend, none of them twice."""
    names = [item["name"] for item in items]
    return names == sorted(set(names))


def attributes(part: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["value"] for one in part["attributes"]}


def amounts(zone: dict[str, Any]) -> dict[str, str]:
    return {
        one["name"]: f"{one['capacity']}/{one['allocatable']}/{one['available']}"
        for one in zone["resources"]
    }


# --- what makes no sense --------------------------------------------------------------------------


def pack(text: str | bytes) -> str:
    data = text.encode() if isinstance(text, str) else text
    return base64.b64encode(zlib.compress(data)).decode()


def unpack(text: str) -> str:
    return zlib.decompress(base64.b64decode(text)).decode()


MACHINE = to_nrt(LEDGER, ABOUT)["metadata"]["annotations"][MACHINE_KEY]


def report(machine: object = MACHINE, grants: object = GRANTS_TEXT) -> Nrt:
    return {"metadata": {"annotations": {MACHINE_KEY: machine, GRANTS_KEY: grants}}}


def in_pod(container: object) -> Nrt:
    return report(
        grants=json.dumps({"pods": [{"uid": "u", "pod": "p", "containers": [container]}]})
    )


BROKEN: dict[str, tuple[object, str]] = {
    "no object": ([], "the report is a list, not an object"),
    "no metadata": ({}, "the report has no annotation numalet.io/machine"),
    "metadata that are none": ({"metadata": 3}, "metadata is 3, not an object"),
    "annotations that are none": (
        {"metadata": {"annotations": "x"}},
        'annotations is "x", not an object',
    ),
    "one annotation only": (
        {"metadata": {"annotations": {MACHINE_KEY: MACHINE}}},
        "the report has no annotation numalet.io/grants",
    ),
    "a machine that is no text": (report(7), "annotation numalet.io/machine is 7, not a text"),
    "a machine of half a megabyte": (
        report("A" * (512 << 10)),
        "annotation numalet.io/machine has more than 262,144 characters",
    ),
    "no base64": (report("{}"), "numalet.io/machine cannot be used: it is not base64"),
    "letters that base64 has not": (report("ä"), "it is not base64"),
    "nothing": (report(""), "what is compressed does not end where it should"),
    "not compressed": (
        report(base64.b64encode(b"{}").decode()),
        "it is not compressed with zlib",
    ),
    "compressed and cut": (report(MACHINE[:1000]), "what is compressed does not end"),
    "more than what was compressed": (
        report(base64.b64encode(base64.b64decode(MACHINE) + b"x").decode()),
        "what is compressed does not end where it should",
    ),
    "a checksum that is wrong": (
        report(base64.b64encode(base64.b64decode(MACHINE)[:-1] + b"x").decode()),
        "it is not compressed with zlib",
    ),
    "what unpacks to more than there can be": (
        report(pack(b" " * (17 << 20))),
        "it unpacks to more than 16,777,216 bytes",
    ),
    "what is no text": (report(pack(b"\xff\xfe")), "it is not text in ASCII"),
    "what is no JSON": (report(pack("{")), "cannot be used: not JSON"),
    "what is no machine": (report(pack("{}")), 'schema is null, not "numalet/machine/v1"'),
    "grants that are no text": (report(grants={}), "grants is an object, not a text"),
    "grants that are no JSON": (
        report(grants="pods"),
        "annotation numalet.io/grants cannot be used: not JSON",
    ),
    "grants that are no object": (report(grants="[]"), "it is a list, not an object"),
    "reserved CPUs that are none": (report(grants='{"reserved":"x"}'), '"x" is no list of ids'),
    "reserved CPUs as a list": (report(grants='{"reserved":[1]}'), "reserved is a list, not"),
    "pods that are none": (report(grants='{"pods":{}}'), "pods is an object, not a list"),
    "a pod that is none": (report(grants='{"pods":[1]}'), "a pod is 1, not an object"),
    "containers that are none": (
        report(grants='{"pods":[{"containers":1}]}'),
        "containers is 1, not a list",
    ),
    "a container that is none": (in_pod(None), "a container is null, not an object"),
    "a pod without a uid": (
        report(grants='{"pods":[{"pod":"p","containers":[{"name":"c"}]}]}'),
        "uid is null, not a text",
    ),
    "a pod without a name": (
        report(grants='{"pods":[{"uid":"u","containers":[{"name":"c"}]}]}'),
        "pod is null, not a text",
    ),
    "a container without a name": (in_pod({}), "name is null, not a text"),
    "GPUs as a text": (in_pod({"name": "c", "gpus": "GPU-1"}), 'gpus is "GPU-1", not a list'),
    "a GPU that is none": (in_pod({"name": "c", "gpus": [0]}), "a GPU is 0, not a text"),
    "CPUs as a number": (in_pod({"name": "c", "cpus": 4}), "cpus is 4, not a text"),
    "CPUs that are none": (in_pod({"name": "c", "cpus": "4-"}), '"4-" is no list of ids'),
    "memory nodes that are none": (in_pod({"name": "c", "mems": "-1"}), '"-1" is no list of ids'),
    "less than no bytes": (
        in_pod({"name": "c", "bound_bytes": -1}),
        "bound_bytes is -1, no number",
    ),
    "more bytes than there can be": (
        in_pod({"name": "c", "bound_bytes": 10**30}),
        "bound_bytes is a huge number, no number of bytes",
    ),
    "bytes as a text": (
        in_pod({"name": "c", "bound_bytes": "1Gi"}),
        'bound_bytes is "1Gi", not a whole number',
    ),
    "maybe placed": (
        in_pod({"name": "c", "placed": "no"}),
        'placed is "no", neither true nor false',
    ),
    "placed is null": (in_pod({"name": "c", "placed": None}), "placed is null, neither"),
    "two pods on one CPU": (
        report(
            grants='{"pods":[{"uid":"a","pod":"p","containers":[{"name":"c","cpus":"1"}]},'
            '{"uid":"b","pod":"q","containers":[{"name":"c","cpus":"1"}]}]}'
        ),
        "annotation numalet.io/grants cannot be used: pod q (b) holds CPUs 1, which another holds",
    ),
}


@pytest.mark.parametrize(("nrt", "sentence"), BROKEN.values(), ids=BROKEN)
def test_a_report_that_makes_no_sense(nrt: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
        from_nrt(nrt)
    assert str(caught.value).isprintable()


def test_what_a_later_version_adds_is_passed_over() -> None:
    nrt = report(grants=json.dumps(json.loads(GRANTS_TEXT) | {"more": {}}))
    assert from_nrt(nrt) == LEDGER


def test_what_is_null_is_like_nothing() -> None:
    container = {"name": "c", "gpus": None, "cpus": None, "mems": None, "bound_bytes": None}
    assert from_nrt(in_pod(container)).grants == (Grant(uid="u", pod="p", container="c"),)


def test_equal_machines_are_one_object() -> None:
    first, second = from_nrt(report()), from_nrt(report(grants="{}"))
    assert first.layout is second.layout
    assert first.grants != second.grants


broken_texts: st.SearchStrategy[Callable[[str], str]] = st.one_of(
    st.tuples(st.integers(0, 2000), st.integers(0, 2000)).map(
        lambda cut: lambda text: text[: cut[0]] + text[cut[1] :]
    ),
    st.tuples(st.integers(0, 2000), st.characters(codec="utf-8")).map(
        lambda put: lambda text: text[: put[0]] + put[1] + text[put[0] + 1 :]
    ),
    st.text(max_size=20).map(lambda other: lambda _: other),
)


@given(broken_texts, broken_texts, broken_texts)
@settings(deadline=None, max_examples=150)
def test_whatever_becomes_of_the_texts_it_is_a_ledger_or_one_sentence(
    outer: Callable[[str], str], inner: Callable[[str], str], grants: Callable[[str], str]
) -> None:
    for nrt in (
        report(outer(MACHINE)),
        report(pack(inner(unpack(MACHINE)))),
        report(grants=grants(GRANTS_TEXT)),
    ):
        assert sentence_of(nrt).isprintable()


def sentence_of(nrt: Nrt) -> str:
    """Why it cannot be read; empty if it can."""
    try:
        from_nrt(nrt)
    except ValueError as reason:
        return str(reason)
    return ""
