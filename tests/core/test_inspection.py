"""Reports of a cluster as people see them: expected texts are written by hand for a machine whose
sets can be counted on fingers."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.core.bitmap import Bitmap
from agent.core.inspection import KubeNode, NodeView, count_all, inspect_cluster, see_node
from agent.core.inspection_text import draw_cluster, draw_details, inspection_to_json
from agent.core.inspection_zones import natural
from agent.core.layout import lay_out
from agent.core.ledger import Grant, Ledger
from agent.core.report import GRANTS_KEY, MACHINE_KEY, About, merge, to_nrt
from agent.core.topology import Machine, NumaNode
from tests.core.machines import described, random_machines
from tests.core.oracle import build

Json = dict[str, Any]

# Node 0 has CPUs 0-7 and GPUs 0 and 1, node 1 has CPUs 8-15 and GPUs 2 and 3.
TWO = build((2, 4), (2, 4))
OURS = {"manager": "numalet", "operation": "Apply", "fieldsV1": {"f:zones": {}}}
THEIRS = {"manager": "koordlet", "operation": "Update", "fieldsV1": {"f:zones": {}}}


def grant(
    pod: str, gpus: Iterable[int] = (), cpus: str = "", container: str = "main", **how: Any
) -> Grant:
    return Grant(
        uid=f"uid-{pod}",
        pod=pod,
        container=container,
        gpus=tuple(f"GPU-{place}" for place in gpus),
        cpus=Bitmap.parse_list(cpus),
        **how,
    )


def report(
    name: str, *grants: Grant, machine: Machine = TWO, reserved: str = "", **about: Any
) -> Json:
    """As the agent writes it and the API server keeps it."""
    layout = lay_out(machine)
    ledger = Ledger(layout=layout, reserved=Bitmap.parse_list(reserved), grants=grants)
    nrt = to_nrt(ledger, About(**({"node": name, "pinning": "nri"} | about)))
    nrt["metadata"]["managedFields"] = [OURS]
    return nrt


def foreign(name: str, *zones: object, **top: Any) -> Json:
    meta = {"name": name, "managedFields": [THEIRS]}
    return {"metadata": meta, "zones": list(zones)} | top


def zone(name: str, kind: str = "Node", **amounts: tuple[object, object, object]) -> Json:
    """`gpu` stands for aliyun.com/gpu; capacity, allocatable, available."""
    names = {"gpu": "aliyun.com/gpu"}
    keys = ("capacity", "allocatable", "available")
    return {
        "name": name,
        "type": kind,
        "resources": [
            {"name": names.get(resource, resource)} | dict(zip(keys, three, strict=True))
            for resource, three in amounts.items()
        ],
    }


def node(name: str, gpus: int = 4, **facts: Any) -> KubeNode:
    return KubeNode(**({"name": name, "status": "Ready", "gpus": gpus, "ours": True} | facts))


def see(
    *reports: object, nodes: Iterable[KubeNode] | None = None, **how: bool
) -> tuple[NodeView, ...]:
    by_name = None if nodes is None else {one.name: one for one in nodes}
    return inspect_cluster(reports, by_name, **how)


def lines(views: Iterable[NodeView], **how: Any) -> list[str]:
    """Of the table, without trailing newline."""
    return draw_cluster(tuple(views), **how).splitlines()


def cells(view: NodeView, **how: Any) -> dict[str, str]:
    """The row of one node, by title."""
    head, row = lines([view], **how)[:2]
    titles = list(re.finditer(r"\S+(?: \S+)*", head))
    ends = [title.start() for title in titles[1:]] + [len(row)]
    return {
        title[0]: row[title.start() : end].strip() for title, end in zip(titles, ends, strict=True)
    }


# --- the table ------------------------------------------------------------------------------------

FIVE = (
    report("gpu-10", grant("ml/ddp-0", range(4), "1-15"), reserved="0",
           topology_policy="restricted", topology_scope="pod"),
    report("gpu-2", grant("ml/a", [0, 1], "0-3"), grant("ml/b", [2])),
    report("gpu-1"),
    report("cpu-1", machine=build((0, 2)), pinning="cgroup"),
    foreign("old-1", zone("node-0", cpu=("8", "7", "6500m"), gpu=(4, 3, 1))),
)  # fmt: skip
FIVE_NODES = (
    *(node("gpu-10"), node("gpu-2"), node("gpu-1"), node("cpu-1", 0)),
    *(node("old-1"), node("gpu-3")),
)
TABLE = """\
NODE     GPUS   NUMA GPUS   FREE CPUS   STATE    POLICY       PINNING   WARNINGS
cpu-1    -      -           4           idle     none         cgroup    -
gpu-1    0/4    0/2,0/2     8,8         idle     none         nri       -
gpu-2    3/4    2/2,1/2     4,8         single   none         nri       -
gpu-3    ?/4    -           -           -        -            -         kubelet offers 4 aliyun.com/gpu, but no report tells where they are: is the agent running there?
gpu-10   4/4    2/2,2/2     0,0         shared   restricted   nri       -
old-1    2/4    2/4         6           -        -            -         not reported by numalet: is the agent running there?

Allocated/total GPUs in the cluster: 9/16 (56.2%), 1 unhealthy; 4 more without a report
"""  # noqa: E501


def test_the_whole_table() -> None:
    assert draw_cluster(see(*FIVE, nodes=FIVE_NODES)) == TABLE


def test_the_wide_table_tells_more() -> None:
    gpus = tuple(replace(gpu, model="NVIDIA H100  HBM3") for gpu in TWO.gpus)
    machine = replace(TWO, gpus=gpus, warnings=("one thing", "another thing"))
    bound = grant("ml/a", [0], mems=Bitmap([0]), bound_bytes=4 << 30)
    view = see(report("gpu-1", bound, machine=machine), nodes=[node("gpu-1")])[0]
    assert cells(view, wide=True) == {
        "NODE": "gpu-1",
        "STATUS": "Ready",
        "MODEL": "NVIDIA-H100-HBM3",
        "GPUS": "1/4",
        "NUMA GPUS": "1/2,0/2",
        "FREE CPUS": "8,8",
        "FREE MEMORY": "60GiB,64GiB",
        "STATE": "single,idle",
        "POLICY": "none",
        "SCOPE": "container",
        "PINNING": "nri",
        "REPORTER": "numalet",
        "WARNINGS": "one thing; another thing",
    }
    assert cells(view)["WARNINGS"] == "one thing (+1)"


ODD = {
    "four NUMA nodes, two without GPUs": (
        report("n", grant("a", [2], "8-9,12"), machine=build((2, 2), (0, 2), (1, 2), (0, 4))),
        {"GPUS": "1/3", "NUMA GPUS": "0/2,-,1/1,-", "FREE CPUS": "4,4,2,7",
         "STATE": "idle,idle,shared,shared"},
    ),
    "a GPU that is not sound is counted, and told": (
        report("n", grant("a", [0]), machine=build((2, 2), faulty=[1])),
        {"GPUS": "1/2", "NUMA GPUS": "1/2", "WARNINGS": "GPU 1: lost"},
    ),
    "a fault that the machine warns of is told once": (
        report("n", machine=replace(build((2, 2), faulty=[1]), warnings=("GPU 1 (x): lost",))),
        {"WARNINGS": "GPU 1 (x): lost"},
    ),
    "a GPU of unknown node stands apart": (
        report("n", grant("a", [4]), machine=build((2, 2), (2, 2), seatless=1)),
        {"GPUS": "1/5", "NUMA GPUS": "0/2,0/2,?:1/1", "FREE CPUS": "4,4", "STATE": "idle"},
    ),
    "GPUs that the driver never named are not offered": (
        report("n", machine=replace(TWO, gpus=tuple(replace(g, uuid=None) for g in TWO.gpus))),
        {"GPUS": "-", "NUMA GPUS": "-", "FREE CPUS": "8,8"},
    ),
    "no free CPUs is 0, not unknown": (
        report("n", grant("a", cpus="1-3"), machine=build((0, 2)), reserved="0"),
        {"GPUS": "-", "FREE CPUS": "0", "STATE": "single"},
    ),
    "CPUs that kubelet gave away are not free": (
        report("n", cpu_manager_policy="static",
               exclusive={"uid": {"main": Bitmap.parse_list("2-4")}}),
        {"FREE CPUS": "5,8"},
    ),
    "a refused pod is told": (
        report("n", grant("ml/a", [0], placed=False), grant("ml/b", [1])),
        {"GPUS": "2/4", "WARNINGS": "pod ml/a was refused, and holds what it has all the same"},
    ),
    "a pod whose GPU is no more is told": (
        report("n", grant("ml/a", [9]), grant("ml/b", [1])),
        {"GPUS": "1/4", "WARNINGS": "pod ml/a holds a GPU that the machine has no more"},
    ),
    "a foreign report has what its zones have": (
        foreign("n", zone("node-0", gpu=("4", "4", "1"), cpu=(8, 8, 8)),
                zone("node-1", cpu=(8, 8, 2)), topologyPolicies=["SingleNUMANodePodLevel"]),
        {"GPUS": "3/4", "NUMA GPUS": "3/4,-", "FREE CPUS": "8,2", "STATE": "-", "PINNING": "-",
         "POLICY": "single-numa-node", "SCOPE": "pod", "REPORTER": "koordlet", "WARNINGS": "-"},
    ),
    "zones are in the order of numbers, and named where they are not 0, 1, …": (
        foreign("n", zone("node-10", cpu=(8, 8, 1)), zone("node-2", cpu=(8, 8, 2))),
        {"FREE CPUS": "2:2,10:1"},
    ),
    "zones of strange names keep them": (
        foreign("n", zone("numa-node-0", memory=("4Gi", "4Gi", "2Gi"))),
        {"FREE CPUS": "-", "FREE MEMORY": "numa-node-0:2GiB"},
    ),
    "zones that are no NUMA nodes are left out": (
        foreign("n", zone("node-0", cpu=(8, 8, 1)), zone("socket", "Socket", cpu=(8, 8, 2))),
        {"FREE CPUS": "1"},
    ),
    "more available than allocatable is nothing held": (
        foreign("n", zone("node-0", gpu=(2, 1, 3))),
        {"GPUS": "0/2", "NUMA GPUS": "0/2"},
    ),
    "no zones at all": (foreign("n"), {"GPUS": "-", "STATE": "-", "WARNINGS": "-"}),
    "an attribute goes before the old field, and the first of a name counts": (
        foreign("n", topologyPolicies=["None"], attributes=[
            {"name": "topologyManagerPolicy", "value": "restricted"},
            {"name": "topologyManagerPolicy", "value": "none"}, {"name": "x", "value": 1}, 7]),
        {"POLICY": "restricted", "SCOPE": "-"},
    ),
    "an old policy without scope": (
        foreign("n", topologyPolicies=["BestEffort"]),
        {"POLICY": "best-effort", "SCOPE": "-"},
    ),
    "a policy that nobody knows": (
        foreign("n", topologyPolicies=["Best\x1b[2JPodLevel"]),
        {"POLICY": "Best?[2JPodLevel", "SCOPE": "pod"},
    ),
    "attributes and policies that make no sense": (
        foreign("n", topologyPolicies=[7], attributes={}), {"POLICY": "-", "SCOPE": "-"},
    ),
    "nobody wrote the zones": (
        {"metadata": {"name": "n", "managedFields": [7, {"fieldsV1": {"f:zones": {}}}]}},
        {"REPORTER": "unknown"},
    ),
    "the label tells the reporter where the server does not": (
        {"metadata": {"name": "n", "labels": {"app.kubernetes.io/managed-by": "Koordinator"}}},
        {"REPORTER": "Koordinator"},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("nrt", "expected"), ODD.values(), ids=ODD)
def test_an_odd_machine_or_report(nrt: Json, expected: Mapping[str, str]) -> None:
    row = cells(see(nrt)[0], wide=True)
    assert {title: row[title] for title in expected} == expected


def test_what_numalet_adds_to_a_foreign_report_is_read_exactly() -> None:
    theirs = foreign("n", zone("node-0", cpu=(8, 8, 8)), zone("node-1", cpu=(8, 8, 8)))
    theirs["metadata"]["labels"] = {"app.kubernetes.io/managed-by": "Koordinator"}
    merged = merge(theirs, report("n", grant("ml/a", [0], "0-3")))
    row = cells(see(merged)[0], wide=True)
    assert row["GPUS"] == "1/4"
    assert row["FREE CPUS"] == "4,8"
    assert row["REPORTER"] == "koordlet,numalet"


def test_who_is_said_to_report_after_numalet_wrote_into_zones_of_others() -> None:
    theirs = report("n")
    theirs["metadata"]["managedFields"] = [OURS | {"operation": "Update"}]
    theirs["metadata"]["labels"] = {"app.kubernetes.io/managed-by": "Koordinator"}
    assert cells(see(theirs)[0], wide=True)["REPORTER"] == "numalet,Koordinator"


# --- reports that cannot be read ------------------------------------------------------------------


def broken(**annotations: object) -> Json:
    nrt = report("n", grant("a", [0]))
    keys = {"machine": MACHINE_KEY, "grants": GRANTS_KEY}
    for key, value in annotations.items():
        nrt["metadata"]["annotations"][keys[key]] = value
    return nrt


BROKEN = {
    "zones that are none": (
        foreign("n", 7),
        "the report cannot be read: a zone is 7, not an object",
    ),
    "zones that are no list": (
        {"metadata": {"name": "n"}, "zones": "no"},
        'the report cannot be read: zones is "no", not a list',
    ),
    "a zone without a name": (
        foreign("n", {"type": "Node"}),
        "the report cannot be read: the name of a zone is null, not a text",
    ),
    "a resource that is none": (
        foreign("n", {"name": "node-0", "type": "Node", "resources": [7]}),
        "the report cannot be read: a resource of node-0 is 7, not an object",
    ),
    "an amount that is none": (
        foreign("n", zone("node-0", cpu=(8, 8, "many"))),
        'the report cannot be read: "cpu" of zone node-0: "many" is not a quantity of 0 or more',
    ),
}  # fmt: skip


@pytest.mark.parametrize(("nrt", "sentence"), BROKEN.values(), ids=BROKEN)
def test_a_malformed_report_is_one_row_with_a_sentence(nrt: Json, sentence: str) -> None:
    row = cells(see(nrt, nodes=[node("n")])[0])
    assert row["WARNINGS"] == sentence
    assert row["GPUS"] == "?/4"
    assert {row[title] for title in ("NUMA GPUS", "FREE CPUS", "STATE", "POLICY")} == {"-"}


@pytest.mark.parametrize(
    "nrt",
    [broken(machine="no"), broken(grants="no"), broken(grants=7)],
    ids=["a machine that is none", "grants that are none", "grants that are no text"],
)
def test_a_report_without_its_exact_part_is_shown_by_its_zones(nrt: Json) -> None:
    row = cells(see(nrt, nodes=[node("n")])[0])
    assert row["NUMA GPUS"] == "1/2,0/2"
    assert row["FREE CPUS"] == "8,8"
    assert row["STATE"] == "single,idle"
    assert row["WARNINGS"].startswith("annotation numalet.io/")
    assert row["WARNINGS"].endswith("; shown by its zones")


def test_the_exact_part_is_enough_where_the_zones_cannot_be_read() -> None:
    row = cells(see(report("n", grant("a", [0])) | {"zones": [7]})[0], wide=True)
    assert row["NUMA GPUS"] == "1/2,0/2"
    assert row["FREE MEMORY"] == "-"


def test_what_has_no_name_is_nobodys_report() -> None:
    nameless = [None, 7, {}, {"metadata": 7}, {"metadata": {"name": 7}}, {"metadata": {"name": ""}}]
    assert see(*nameless) == ()


# --- reports and nodes ----------------------------------------------------------------------------

DOUBTS = {
    "a node that is gone": ([], "there is no such node (any more)"),
    "a node that is not ready": (
        [node("n", status="NotReady")],
        "the node is not ready: what is reported may be old",
    ),
    "kubelet offers less": (
        [node("n", 3)],
        "kubelet offers 3 aliyun.com/gpu, the report has 4",
    ),
    "all is well": ([node("n")], "-"),
    "nobody may list nodes": (None, "-"),
}


@pytest.mark.parametrize(("nodes", "sentence"), DOUBTS.values(), ids=DOUBTS)
def test_what_the_node_says_against_its_report(nodes: list[KubeNode] | None, sentence: str) -> None:
    assert cells(see(report("n"), nodes=nodes)[0])["WARNINGS"] == sentence


SILENT = {
    "GPUs of kubelet's and no report": (
        node("n"),
        "kubelet offers 4 aliyun.com/gpu, but no report tells where they are: is the agent running "
        "there?",
    ),
    "our label and no report": (
        node("n", 0),
        "label ack.node.gpu.schedule=topology, but no report: is the agent running there?",
    ),
    "neither": (node("n", 0, ours=False), None),
}


@pytest.mark.parametrize(("silent", "sentence"), SILENT.values(), ids=SILENT)
def test_a_node_without_a_report_is_told_if_it_should_have_one(
    silent: KubeNode, sentence: str | None
) -> None:
    views = see(nodes=[silent])
    assert [view.warnings for view in views] == ([(sentence,)] if sentence else [])


def test_a_node_that_was_asked_for_is_shown_in_any_case() -> None:
    views = see(nodes=[node("n", 0, ours=False)], each=True)
    assert [view.warnings for view in views] == [("no report",)]


def test_reports_of_nodes_that_were_not_selected_are_left_out() -> None:
    views = see(report("a"), report("b"), nodes=[node("b")], only_these=True)
    assert [view.name for view in views] == ["b"]
    assert "of these nodes: 0/4 (0.0%)" in draw_cluster(views, whole=False)


def test_the_gpus_of_a_node_that_is_gone_do_not_count() -> None:
    views = see(report("gone", grant("a", [0])), report("there"), nodes=[node("there")])
    assert cells(views[0])["GPUS"] == "1/4"
    assert (count_all(views).held, count_all(views).total) == (0, 4)


def test_without_gpus_there_is_no_share_of_them() -> None:
    text = draw_cluster(see(report("n", machine=build((0, 2)))))
    assert text.endswith("GPUs in the cluster: 0/0\n")


def test_of_reports_that_come_twice_the_last_one_counts() -> None:
    views = see(report("n"), report("n", grant("a", [0])))
    assert [cells(view)["GPUS"] for view in views] == ["1/4"]


def test_nodes_are_in_the_order_of_their_numbers() -> None:
    names = ["node-10", "node-2", "a", "node-2a", "10", "9", "node-02"]
    views = see(*(report(name) for name in names))
    assert [view.name for view in views] == [
        *("9", "10", "a", "node-02", "node-2", "node-2a", "node-10")
    ]


@given(st.text(max_size=8), st.lists(st.integers(0, 10**12), max_size=8))
def test_after_any_beginning_numbers_count_as_numbers(text: str, numbers: list[int]) -> None:
    names = [f"{text}-{number}" for number in numbers]
    assert sorted(names, key=natural) == [f"{text}-{number}" for number in sorted(numbers)]


NODES = {
    "ready": ({"type": "Ready", "status": "True"}, {}, "Ready"),
    "not ready": ({"type": "Ready", "status": "False"}, {}, "NotReady"),
    "kubelet is silent": ({"type": "Ready", "status": "Unknown"}, {}, "NotReady"),
    "cordoned": (
        {"type": "Ready", "status": "True"},
        {"unschedulable": True},
        "Ready,SchedulingDisabled",
    ),
    "never heard of": ({"type": "DiskPressure", "status": "False"}, {}, "Unknown"),
    "nonsense": (7, 7, "Unknown"),
}


@pytest.mark.parametrize(("condition", "spec", "status"), NODES.values(), ids=NODES)
def test_a_nodes_status_is_worded_as_kubectl_does(
    condition: object, spec: object, status: str
) -> None:
    kube = {"metadata": {"name": "n"}, "spec": spec, "status": {"conditions": [condition]}}
    assert see_node(kube) == KubeNode(name="n", status=status)


def test_a_nodes_gpus_and_label() -> None:
    labels = {"ack.node.gpu.schedule": "topology"}
    kube: Json = {
        "metadata": {"name": "n", "labels": labels},
        "status": {"capacity": {"aliyun.com/gpu": "8"}, "conditions": 7},
    }
    assert see_node(kube) == KubeNode(name="n", status="Unknown", gpus=8, ours=True)
    kube["status"]["capacity"]["aliyun.com/gpu"] = "many"
    labels["ack.node.gpu.schedule"] = "share"
    assert see_node(kube) == KubeNode(name="n", status="Unknown")
    assert see_node({"metadata": {}}) is None
    assert see_node(7) is None


# --- how it looks ---------------------------------------------------------------------------------


def test_hundreds_of_nodes_stay_in_columns() -> None:
    views = see(*(report(f"gpu-{number}", grant("a", [0])) for number in range(300)))
    head, *rows = lines(views)[:-2]
    assert len(rows) == 300
    for title in ("GPUS", "STATE", "PINNING"):
        assert all(row[head.index(title) - 1] == " " != row[head.index(title)] for row in rows)
    assert all(len(row.split()) == len(rows[0].split()) for row in rows)


@pytest.mark.parametrize("width", [0, 40, 100, 130, 1000])
def test_warnings_are_cut_to_the_width_of_a_terminal(width: int) -> None:
    views = see(*FIVE, nodes=FIVE_NODES)
    whole, cut = (lines(views, width=w)[:-2] for w in (None, width))
    taken = whole[0].index("WARNINGS")
    longest = max(width, taken + 24)
    assert [line if len(line) <= longest else line[: longest - 1] + "…" for line in whole] == cut
    assert draw_cluster(views, wide=True, width=width) == draw_cluster(views, wide=True)


def uncoloured(text: str) -> str:
    return re.sub("\x1b\\[\\d+m", "", text)


def test_colours_add_nothing_but_escapes() -> None:
    ill = [report("n", grant("ml/a", [0], placed=False)), report("m", grant("a", [0, 2]))]
    views = see(*FIVE, *ill, nodes=[*FIVE_NODES, node("n", status="NotReady"), node("m")])
    for draw in (draw_cluster, draw_details):
        coloured = draw(views, colour=True)
        assert "\x1b[33mshared\x1b[0m" in coloured
        assert "\x1b[2midle\x1b[0m" in coloured
        assert uncoloured(coloured) == draw(views)


def test_hostile_texts_cannot_steer_the_terminal() -> None:
    pod = grant("ml/\x1b[2Jb", [0], container="\r\n")
    nrt = report("a\x1b[2J", pod, machine=replace(TWO, warnings=("\x1b]0;x\x07\n",)))
    views = see(nrt)
    for text in (draw_cluster(views, wide=True), draw_details(views)):
        assert all(line.isprintable() for line in text.split("\n"))
        assert "a?[2J" in text


# --- node by node ---------------------------------------------------------------------------------

DETAILS = """gpu-1   4 × A800 · 2 NUMA nodes · 16 CPUs · CPUs 0-1 reserved · Ready · kubelet policy none · scope container · pinning nri
! GPU 3: lost
! pod ml/wide-10 was refused, and holds what it has all the same
! pod ml/wide-10 holds a GPU that the machine has no more
  NUMA   GPUS   FREE GPUS   FREE CPUS               FREE MEMORY   STATE
  0      1/2    0           4           2-3,6-7     48GiB         shared
  1      1/2    -           6           8-9,12-15   64GiB         shared
  NAMESPACE   POD       CONTAINER   NUMA   GPUS           CPUS   MEMORY NODES
  ml          narrow    main        0      -              4-5    0
  ml          wide-9    main        1      -              10     -
  ml          wide-9    sidecar     1      -              11     -
  ml          wide-10   main        0-1    1-2,GPU-gone   -      -              refused

n   Unknown · reported by koordlet
! not reported by numalet: is the agent running there?
  NUMA   GPUS   FREE GPUS   FREE CPUS   FREE MEMORY   STATE
  0      1/4    -           6           -             -

silent
! no report

Allocated/total GPUs of these nodes: 3/8 (37.5%), 1 unhealthy
"""  # noqa: E501


def test_the_whole_text_node_by_node() -> None:
    grants = (
        replace(grant("ml/wide-10", [1, 2], placed=False), gpus=("GPU-1", "GPU-2", "GPU-gone")),
        grant("ml/wide-9", cpus="11", container="sidecar"),
        grant("ml/wide-9", cpus="10"),
        grant("ml/narrow", cpus="4-5", mems=Bitmap([0]), bound_bytes=16 << 30),
    )
    ours = report("gpu-1", *grants, machine=build((2, 4), (2, 4), faulty=[3]), reserved="0-1")
    theirs = foreign("n", zone("node-0", gpu=(4, 4, 3), cpu=(8, 8, 6)))
    nodes = [node("gpu-1"), node("n", status="Unknown"), node("silent", 0, ours=False, status="")]
    views = see(ours, theirs, nodes=nodes, each=True)
    assert draw_details(views, whole=False) == DETAILS


def test_the_json_has_everything_in_its_documented_order() -> None:
    bound = grant("ml/a", [0], "2-3", mems=Bitmap([0]), bound_bytes=4 << 30)
    ours = report("gpu-1", bound, machine=build((2, 2)), reserved="0")
    data = inspection_to_json(see(ours, nodes=[node("gpu-1", 2), node("gpu-2", 1)]))
    assert list(data) == ["gpus", "nodes"]
    assert data["gpus"] == {"allocated": 1, "total": 2, "unhealthy": 0, "unreported": 1}
    assert json.loads(json.dumps(data))["nodes"][0] == {
        "name": "gpu-1",
        "status": "Ready",
        "reporter": "numalet",
        "topology_policy": "none",
        "topology_scope": "container",
        "pinning": "nri",
        "gpus": {"allocated": 1, "total": 2, "unhealthy": 0},
        "numa_nodes": [
            {
                "name": "0",
                "state": "single",
                "gpus": 2,
                "allocated_gpus": 1,
                "unhealthy_gpus": 0,
                "free_gpus": [1],
                "cpus": 4,
                "free_cpus": 1,
                "free_cpu_list": "1",
                "free_memory_bytes": 60 << 30,
            }
        ],
        "pods": [
            {
                "uid": "uid-ml/a",
                "pod": "ml/a",
                "containers": [
                    {
                        "name": "main",
                        "numa_nodes": [0],
                        "gpus": [0],
                        "lost_gpus": [],
                        "cpus": "2-3",
                        "memory_nodes": [0],
                        "placed": True,
                    }
                ],
            }
        ],
        "warnings": [],
    }
    assert data["nodes"][1]["numa_nodes"] == []


# --- any machine ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "gpus", "cpus"),
    [
        ("a800x8", "0/4,0/4", "64,64"),
        ("a100x8-nps4", "-,0/2,-,0/2,-,0/2,-,0/2", ",".join(["16"] * 8)),
        ("h100x8-384", "0/4,0/4", "192,192"),
        ("laptop", "-", "8"),
    ],
)
def test_described_machines(name: str, gpus: str, cpus: str) -> None:
    row = cells(see(report("n", machine=described(name)))[0])
    assert (row["NUMA GPUS"], row["FREE CPUS"], row["STATE"]) == (gpus, cpus, "idle")


def nodes_with_cpus(machine: Machine) -> list[NumaNode]:
    return [one for one in machine.nodes if one.cpus]


@given(random_machines())
@settings(deadline=None)
def test_any_machine_can_be_shown_and_its_zones_agree_with_the_exact_part(
    machine: Machine,
) -> None:
    nrt = report("n", machine=machine)
    exact = see(nrt)[0]
    assert [zone.name for zone in exact.zones if zone.name != "?"] == [
        str(one.id) for one in nodes_with_cpus(machine)
    ]
    del nrt["metadata"]["annotations"][MACHINE_KEY]
    by_zones = {zone.name: zone for zone in see(nrt)[0].zones}
    for zone in exact.zones:
        if zone.name != "?":
            other = by_zones[zone.name]
            assert (zone.free_cpus, zone.state) == (other.free_cpus, other.state)
            assert all(one.name != "?" for one in exact.zones) <= (zone.gpus == other.gpus)
    for text in (draw_cluster((exact,), wide=True), draw_details((exact,))):
        assert all(line.isprintable() for line in text.split("\n"))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["name", "type", "value", "resources"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)


@given(
    st.fixed_dictionaries(
        {"metadata": st.fixed_dictionaries({"name": st.just("n")}, optional={"labels": JSON,
         "annotations": JSON, "managedFields": JSON})},
        optional={"zones": JSON, "attributes": JSON, "topologyPolicies": JSON},
    )
)  # fmt: skip
def test_whatever_a_report_is_it_gets_its_row(nrt: Json) -> None:
    (view,) = see(nrt, nodes=[node("n")])
    assert lines([view])[1].startswith("n  ")
