"""The reporter against a fake API server: what it writes, how often, and what may go wrong there.

The machine has two nodes of four cores with two threads and two GPUs each. Pauses are shortened;
what is waited for are conditions at the API server.
"""

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from agent import reporting
from agent.books import Node, Rules
from agent.config import Config
from agent.core.bitmap import Bitmap
from agent.core.health import FaultMarks
from agent.core.ledger import Ledger
from agent.core.offer import Manner
from agent.core.podevents import PodEvent, Reason
from agent.core.report import About, from_nrt, is_foreign
from agent.edge.kubeapi import Server, watching
from agent.edge.kubeletfiles import KubeletFacts
from agent.edge.status import Metrics
from agent.fakes.apiserver import (
    KOORDINATOR_DEVICES,
    TOPOLOGIES,
    FakeApiServer,
    Fault,
    Request,
    Rule,
    User,
    disconnect,
    hang,
    refuse,
    say,
)
from agent.observing import Facts
from agent.reporting import Reporter, ReportSettings
from agent.saying import Saying, to_about, to_saying
from tests.core.oracle import build, grant, ledger_of

NODE = "node-1"
ACK = "topology"
TOPOLOGY = "noderesourcetopologies"
MACHINE = replace(build((2, 4), (2, 4)), name=NODE)
CONFIG = Config(node_name=NODE, ack_objects="no")
WITH_ACK = replace(CONFIG, ack_objects="yes")
FREE: Ledger = ledger_of(MACHINE)
BUSY: Ledger = ledger_of(MACHINE, grant("a", [2, 3], "8-11", mems="1", bound_bytes=1 << 30))


def saying(ledger: Ledger = FREE, config: Config = CONFIG, registered: bool = True) -> Saying:
    return to_saying(ledger, About(node=NODE), config, registered)


def node_object(**labels: str) -> dict[str, Any]:
    labels = {"ack.node.gpu.schedule": "topology", "zone": "z"} | labels
    return {"metadata": {"name": NODE, "labels": labels}}


class Said(logging.Handler):
    """What is said, whatever else listens."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.crashes: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        if record.exc_info:
            self.crashes.append(record.getMessage())


@dataclass(slots=True)
class Desk:
    """A reporter, what it counts, and what it rang and said."""

    server: FakeApiServer
    folder: Path
    log: Said
    metrics: Metrics = field(default_factory=Metrics)
    rings: list[None] = field(default_factory=list)
    reporters: list[Reporter] = field(default_factory=list)

    def start(self, saying: Saying | None = None, ack: bool = False, taint: str = "") -> Reporter:
        server = Server(url=self.server.url, folder=str(self.folder))
        settings = ReportSettings(server=server, node=NODE, ack=ack, taint=taint)
        reporter = Reporter(settings, self.metrics, lambda: self.rings.append(None))
        self.reporters.append(reporter)
        if saying:
            reporter.say(saying)
        return reporter

    def said(self, words: str) -> list[str]:
        return [line for line in self.log.lines if words in line]

    def wait(self, is_met: Callable[[], object], timeout_s: float = 20.0) -> None:
        self.server.wait_for(is_met, timeout_s)

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"numalet_{name}", labels) or 0.0

    def forbid(self, *verbs: str, resource: str) -> None:
        """From now on, to everybody; all else is allowed."""
        plurals = [one.plural for one in self.server.resources]
        others = Rule(
            verbs=("*",), groups=("*",), resources=tuple({*plurals, "nodes"} - {resource})
        )
        known = {"get", "list", "watch", "create", "update", "patch", "delete"}
        rest = Rule(verbs=tuple(known - set(verbs)), groups=("*",), resources=(resource,))
        self.server.users = {"token": User(name="agent", rules=(others, rest))}

    # --- at the API server ---

    def report(self) -> dict[str, Any] | None:
        return self.server.get(TOPOLOGY, NODE)

    def shows(self, ledger: Ledger) -> bool:
        with contextlib.suppress(ValueError):
            report = self.report()
            return report is not None and from_nrt(report) == ledger
        return False

    def node(self) -> dict[str, Any]:
        found = self.server.get("nodes", NODE)
        assert found is not None
        return found

    def writes(self, part: str = TOPOLOGY) -> list[Request]:
        return [one for one in self.server.writes if part in one.path]

    def events(self) -> list[dict[str, Any]]:
        """In the order in which they were written."""
        return sorted(
            self.server.all("events"), key=lambda one: int(one["metadata"]["resourceVersion"])
        )

    def settle(self) -> None:
        """Until nothing is due for a while, or, where something always is, all was done again."""
        start_s = time.monotonic()
        busy_s = [start_s]
        reporter = self.reporters[-1]
        duties = [duty for name, duty in reporter._duties.items() if name != "watches"]

        def is_settled() -> bool:
            now_s = time.monotonic()
            if not reporter._bell.empty() or any(duty.due_s < now_s + 0.5 for duty in duties):
                busy_s[0] = now_s
            again = all(duty.done_s > start_s + 0.3 for duty in duties)
            return again or now_s > busy_s[0] + 0.3

        self.wait(is_settled)


def event_of(name: str, message: str = "m", **more: Any) -> PodEvent:
    facts = {"uid": name, "pod": f"ns/{name}", "reason": Reason.REFUSED, "message": message}
    return PodEvent(**(facts | more))


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses that a test can wait for."""
    for name, seconds in {
        "_GAP_S": 0.1,
        "_JITTER_S": 0.02,
        "_FIRST_PAUSE_S": 0.05,
        "_LONGEST_PAUSE_S": 0.2,
    }.items():
        monkeypatch.setattr(reporting, name, seconds)
    monkeypatch.setattr(watching, "_FIRST_S", 0.05)
    monkeypatch.setattr(watching, "_LONGEST_S", 0.2)


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody tells of is looked at all the time."""
    for duty in ("_CHECK_S", "_MARKS_S"):
        monkeypatch.setattr(reporting, duty, 0.2)
    monkeypatch.setattr(reporting._Duty.__init__, "__kwdefaults__", _defaults(0.2))


def _defaults(period_s: float) -> dict[str, Any]:
    return {**(reporting._Duty.__init__.__kwdefaults__ or {}), "period_s": period_s}


@pytest.fixture
def server() -> Iterator[FakeApiServer]:
    with FakeApiServer() as server:
        server.put("nodes", node_object())
        server.put("namespaces", {"metadata": {"name": "ns"}})
        yield server


@pytest.fixture
def desk(server: FakeApiServer, tmp_path: Path) -> Iterator[Desk]:
    (tmp_path / "token").write_text("token")
    logger, said = logging.getLogger("numalet"), Said()
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(said)
    desk = Desk(server, tmp_path, said)
    yield desk
    for reporter in desk.reporters:
        reporter.close()
    logger.removeHandler(said)
    logger.setLevel(level)
    assert said.crashes == []


def node_uid(desk: Desk) -> str:
    return str(desk.node()["metadata"]["uid"])


def pod_names(reporter: Reporter) -> set[str]:
    """Of the pods that it knows."""
    pods: Mapping[str, Any] = reporter.pods or {}
    return {pod["metadata"]["name"] for pod in pods.values()}


# --- the report -----------------------------------------------------------------------------------


def test_what_is_said_is_written_once(desk: Desk) -> None:
    desk.start(saying(BUSY))
    desk.wait(lambda: desk.shows(BUSY))
    desk.settle()
    (write,) = desk.writes()
    assert (write.method, write.query["fieldManager"], write.query["force"]) == (
        "PATCH",
        "numalet",
        "true",
    )
    report = desk.report()
    assert report is not None
    assert report["metadata"]["ownerReferences"] == [
        {"apiVersion": "v1", "kind": "Node", "name": NODE, "uid": node_uid(desk)}
    ]
    assert [zone["name"] for zone in report["zones"]] == ["node-0", "node-1"]
    assert not is_foreign(report)
    assert desk.metric("report_writes_total", object="topology", result="ok") == 1


def test_what_is_said_again_costs_nothing(desk: Desk) -> None:
    reporter = desk.start(saying(BUSY))
    desk.wait(lambda: desk.shows(BUSY))
    desk.settle()
    for _ in range(5):
        reporter.say(saying(BUSY))
    desk.settle()
    assert len(desk.writes("")) == 1


def test_a_change_is_written_once(desk: Desk) -> None:
    reporter = desk.start(saying(FREE))
    for count, ledger in enumerate((BUSY, FREE, BUSY), 2):
        desk.settle()
        reporter.say(saying(ledger))
        desk.wait(lambda ledger=ledger: desk.shows(ledger))
        desk.settle()
        assert len(desk.writes()) == count


def test_a_hundred_changes_in_a_burst_cost_a_few_writes(desk: Desk) -> None:
    reporter = desk.start(saying(FREE))
    desk.wait(lambda: desk.shows(FREE))
    desk.settle()
    for number in range(100):
        reporter.say(saying(ledger_of(MACHINE, grant(f"p{number}", cpus="2"))))
    reporter.say(saying(BUSY))
    desk.wait(lambda: desk.shows(BUSY))
    desk.settle()
    assert len(desk.writes()) <= 5


def test_a_new_agent_finds_what_the_old_one_wrote(desk: Desk) -> None:
    desk.start(saying(BUSY)).close()
    desk.start(saying(BUSY))
    desk.wait(lambda: desk.shows(BUSY))
    desk.settle()
    desk.start(saying(BUSY))
    desk.settle()
    assert len(desk.writes()) == 1


def test_a_report_that_was_deleted_is_written_again(desk: Desk) -> None:
    desk.start(saying(BUSY))
    for _ in range(3):
        desk.wait(lambda: desk.shows(BUSY))
        desk.settle()
        desk.server.remove(TOPOLOGY, NODE)
    desk.wait(lambda: desk.shows(BUSY))
    desk.settle()
    assert len(desk.writes()) == 4


def test_a_report_that_was_deleted_just_after_it_was_written_is_written_again(desk: Desk) -> None:
    """The watch may not have heard that it is there."""
    desk.start(saying(BUSY))
    desk.wait(lambda: desk.report())
    desk.server.remove(TOPOLOGY, NODE)
    desk.wait(lambda: desk.shows(BUSY))


def put_report(desk: Desk, change: Callable[[dict[str, Any]], object], manager: str) -> None:
    """Somebody else's update of the report."""
    report = desk.report()
    assert report is not None
    report = json.loads(json.dumps(report))
    change(report)
    desk.server.put(TOPOLOGY, report, manager)


def test_what_others_change_of_ours_is_put_right(desk: Desk) -> None:
    desk.start(saying(BUSY))
    desk.wait(lambda: desk.shows(BUSY))
    desk.settle()
    put_report(desk, lambda one: one["metadata"]["annotations"].clear(), "kubectl")
    desk.wait(lambda: desk.shows(BUSY))
    desk.settle()
    assert len(desk.writes()) == 2


def test_what_others_add_to_it_is_left_alone(desk: Desk) -> None:
    desk.start(saying(BUSY))
    desk.wait(lambda: desk.shows(BUSY))
    desk.settle()

    def add(report: dict[str, Any]) -> None:
        report["metadata"]["labels"]["team"] = "a"
        report["metadata"]["annotations"]["note"] = "b"
        report["metadata"]["finalizers"] = ["example.com/keep"]

    put_report(desk, add, "kubectl")
    desk.settle()
    assert len(desk.writes()) == 1
    report = desk.report()
    assert report is not None
    assert report["metadata"]["labels"]["team"] == "a"


# --- somebody else's report -----------------------------------------------------------------------


def foreign(cpus: str = "16") -> dict[str, Any]:
    """As koordlet writes it, with what no schema of ours knows."""
    resource = {"name": "cpu", "capacity": cpus, "allocatable": cpus, "available": cpus}
    return {
        "metadata": {
            "name": NODE,
            "labels": {"owner": "koordlet"},
            "annotations": {"node.koordinator.sh/cpu-topology": '{"detail": []}'},
        },
        "topologyPolicies": ["None"],
        "attributes": [{"name": "theirs", "value": "1"}],
        "zones": [
            {"name": "node-1", "type": "Node", "resources": [resource], "costs": []},
            {"name": "node-0", "type": "Node", "parent": "p", "resources": [resource]},
        ],
    }


def without_ours(report: Mapping[str, Any] | None) -> dict[str, Any]:
    """What is left of a merged report when all that is numalet's is taken out again."""
    assert report is not None
    whole = json.loads(json.dumps(report))
    meta = whole["metadata"]
    meta["annotations"] = {
        key: text for key, text in meta["annotations"].items() if not key.startswith("numalet.io/")
    }
    kept = ("name", "labels", "annotations")
    zones = []
    for zone in whole["zones"]:
        zone["resources"] = [one for one in zone["resources"] if one["name"] != "aliyun.com/gpu"]
        if zone.pop("attributes", None):
            pass  # they had none
        zones.append(zone)
    return {
        "metadata": {key: meta[key] for key in kept},
        "topologyPolicies": whole["topologyPolicies"],
        "attributes": [
            one for one in whole["attributes"] if not one["name"].startswith("numalet.io/")
        ],
        "zones": zones,
    }


def gpus_free(desk: Desk) -> dict[str, str]:
    """By zone."""
    return {
        zone["name"]: one["available"]
        for zone in (desk.report() or {}).get("zones", ())
        for one in zone["resources"]
        if one["name"] == "aliyun.com/gpu"
    }


def test_ours_is_merged_into_the_report_of_another(desk: Desk) -> None:
    desk.server.put(TOPOLOGY, foreign(), "koordlet")
    reporter = desk.start(saying(BUSY))
    desk.wait(lambda: gpus_free(desk) == {"node-0": "2", "node-1": "0"})
    desk.settle()
    assert without_ours(desk.report()) == foreign()
    assert desk.shows(BUSY)
    assert [one.method for one in desk.writes()] == ["PUT"]
    reporter.say(saying(FREE))
    desk.wait(lambda: gpus_free(desk) == {"node-0": "2", "node-1": "2"})
    desk.settle()
    assert without_ours(desk.report()) == foreign()
    assert len(desk.writes()) == 2
    assert len(desk.said("another reporter")) == 1


def test_what_another_writes_anew_is_merged_again_and_no_more(desk: Desk) -> None:
    desk.server.put(TOPOLOGY, foreign(), "koordlet")
    desk.start(saying(BUSY))
    for cpus in ("16", "15", "14"):
        desk.server.put(TOPOLOGY, foreign(cpus), "koordlet")
        desk.wait(lambda: gpus_free(desk) == {"node-0": "2", "node-1": "0"})
        desk.settle()
        assert without_ours(desk.report()) == foreign(cpus)
    assert len(desk.writes()) <= 4
    assert len(desk.said("another reporter")) == 1


def test_a_report_of_ours_that_another_takes_over_is_merged(desk: Desk) -> None:
    desk.start(saying(BUSY))
    desk.wait(lambda: desk.shows(BUSY))
    desk.settle()
    put_report(desk, lambda one: one.update(zones=foreign()["zones"]), "koordlet")
    desk.wait(lambda: gpus_free(desk) == {"node-0": "2", "node-1": "0"})
    desk.settle()
    assert [one.method for one in desk.writes()] == ["PATCH", "PUT"]


def is_put(request: Request) -> bool:
    return request.method == "PUT"


def test_a_merge_that_comes_too_late_is_tried_again(desk: Desk) -> None:
    """Another was faster, three times."""
    desk.server.put(TOPOLOGY, foreign(), "koordlet")
    desk.server.fail(refuse(409), times=3, concerns=is_put)
    desk.start(saying(BUSY))
    desk.wait(lambda: desk.shows(BUSY))
    desk.settle()
    assert without_ours(desk.report()) == foreign()
    assert [one.status for one in desk.writes()] == [409, 409, 409, 200]


def test_who_writes_all_the_time_loses_nothing(desk: Desk) -> None:
    desk.server.put(TOPOLOGY, foreign(), "koordlet")
    reporter = desk.start(saying(FREE))
    for number in range(60):
        desk.server.put(TOPOLOGY, foreign(str(number)), "koordlet")
        reporter.say(saying((FREE, BUSY)[number % 2]))
    desk.wait(lambda: desk.shows(BUSY))
    desk.settle()
    assert without_ours(desk.report()) == foreign("59")


def is_watch_of(plural: str) -> Callable[[Request], bool]:
    return lambda request: request.is_watch and plural in request.path


def test_a_merge_that_comes_too_late_does_not_wait_for_a_watch_that_is_silent(desk: Desk) -> None:
    desk.server.put(TOPOLOGY, foreign(), "koordlet")
    desk.server.fail(hang(), concerns=is_watch_of(TOPOLOGY))
    desk.start(saying(BUSY))
    desk.wait(lambda: desk.shows(BUSY))
    desk.server.put(TOPOLOGY, foreign("15"), "koordlet")
    desk.reporters[-1].say(saying(FREE))
    desk.wait(lambda: desk.shows(FREE), timeout_s=3.0)


# --- the API server away --------------------------------------------------------------------------


def test_while_the_api_server_is_away_nothing_is_lost(desk: Desk) -> None:
    desk.server.put("pods", pod_object("a"))
    reporter = desk.start(saying(FREE))
    desk.wait(lambda: desk.shows(FREE) and reporter.pods)
    desk.settle()
    desk.server.stop()
    reporter.say(saying(BUSY))
    reporter.tell([event_of("a"), event_of("b")])
    desk.wait(lambda: desk.said("api server, topology"))
    assert pod_names(reporter) == {"a"}
    desk.server.put("pods", pod_object("b"))
    desk.server.start()
    desk.wait(lambda: desk.shows(BUSY) and len(desk.events()) == 2)
    desk.wait(lambda: pod_names(reporter) == {"a", "b"})
    assert event_names(desk) == ["a", "b"]
    desk.wait(lambda: desk.said("api server, topology is well again"))
    assert len(desk.said("api server, topology")) == 2  # once that it fails, once that it is well


def test_an_agent_that_starts_while_the_api_server_is_away_catches_up(desk: Desk) -> None:
    desk.server.stop()
    reporter = desk.start(saying(BUSY))
    desk.wait(lambda: desk.said("api server, node"))
    assert reporter.pods is None
    assert desk.metric("kube_api_up") == 0
    desk.server.start()
    desk.wait(lambda: desk.shows(BUSY) and reporter.pods == {})
    desk.wait(lambda: desk.metric("kube_api_up") == 1)


def test_the_metric_tells_that_the_api_server_is_back(desk: Desk) -> None:
    reporter = desk.start(saying(FREE))
    desk.wait(lambda: desk.shows(FREE))
    desk.settle()
    assert desk.metric("kube_api_up") == 1
    desk.server.stop()
    reporter.say(saying(BUSY))
    desk.wait(lambda: desk.metric("kube_api_up") == 0)
    desk.server.start()
    desk.wait(lambda: desk.shows(BUSY))
    desk.settle()
    desk.wait(lambda: desk.metric("kube_api_up") == 1, timeout_s=3.0)


# --- what is refused ------------------------------------------------------------------------------

FORBIDDEN = {
    "the node": (("get",), "nodes"),
    "labels": (("patch",), "nodes"),
    "reading the report": (("get", "list", "watch"), TOPOLOGY),
    "writing the report": (("create", "update", "patch"), TOPOLOGY),
    "ConfigMaps": (("get", "create", "patch"), "configmaps"),
    "Events": (("create",), "events"),
    "pods": (("list", "watch"), "pods"),
    "devices": (("get", "create", "patch"), "devices"),
}


def is_done(desk: Desk, reporter: Reporter) -> dict[str, bool]:
    """What of all that is to be done at the API server has been done."""
    labels, device = desk.node()["metadata"]["labels"], desk.server.get("devices", NODE)
    arena = desk.server.get("configmaps", f"numalet-topology-{NODE}", "kube-system")
    return {
        "labels": labels.get("aliyun.accelerator/nvidia_count") == "4",
        "report": desk.shows(BUSY),
        "ConfigMap": arena is not None and arena["data"]["nodeName"] == NODE,
        "device": device is not None,
        "Event": [one["message"] for one in desk.events()] == ["m"],
        "pods": pod_names(reporter) == {"a"},
        "taint": desk.node().get("spec", {}).get("taints", []) == [],
    }


@pytest.mark.parametrize(
    ("name", "undone"),
    [
        ("the node", {"labels", "taint"}),
        ("labels", {"labels", "taint"}),
        ("reading the report", {"report"}),
        ("writing the report", {"report"}),
        ("ConfigMaps", {"ConfigMap"}),
        ("Events", {"Event"}),
        ("pods", {"pods"}),
        ("devices", {"device"}),
    ],
)
def test_what_is_forbidden_is_said_once_and_stops_nothing_else(
    desk: Desk, often: None, name: str, undone: set[str]
) -> None:
    desk.server.resources.append(KOORDINATOR_DEVICES)
    desk.server.put(
        "nodes", node_object() | {"spec": {"taints": [{"key": "x", "effect": "NoSchedule"}]}}
    )
    desk.server.put("pods", pod_object("a"))
    verbs, resource = FORBIDDEN[name]
    desk.forbid(*verbs, resource=resource)
    config = replace(WITH_ACK, koordinator_device="yes")
    reporter = desk.start(saying(BUSY, config), ack=True, taint="x")
    reporter.tell([event_of("a")])
    done = {*is_done(desk, reporter)} - undone
    desk.wait(lambda: {key for key, value in is_done(desk, reporter).items() if value} == done)
    desk.wait(lambda: desk.said("forbidden"))
    tries = 1 if name == "Events" else 4
    refused = desk.server.requests
    desk.wait(lambda: sum(one.status == 403 for one in list(refused)) >= tries)
    said = desk.said("forbidden")
    assert len(said) == len(set(said)) <= 2
    # an administrator allows it
    desk.server.users = {}
    again = undone - {"Event"}  # it was taken for one that will never be
    desk.wait(lambda: all(is_done(desk, reporter)[key] for key in again))


def test_a_missing_crd_is_said_once_and_the_report_comes_with_it(desk: Desk) -> None:
    desk.server.resources.remove(TOPOLOGIES)
    reporter = desk.start(saying(BUSY, WITH_ACK), ack=True)
    desk.wait(lambda: desk.node()["metadata"]["labels"].get("aliyun.accelerator/nvidia_count"))
    desk.wait(lambda: desk.said("its CustomResourceDefinition is missing"))
    reads = [one for one in desk.server.requests if TOPOLOGY in one.path and not one.is_watch]
    desk.wait(
        lambda: sum(TOPOLOGY in one.path for one in list(desk.server.requests)) >= len(reads) + 6
    )
    reporter.tell([event_of("a")])
    desk.wait(lambda: len(desk.events()) == 1)
    assert len(desk.said("its CustomResourceDefinition is missing")) == 1
    desk.server.resources.append(TOPOLOGIES)
    desk.wait(lambda: desk.shows(BUSY))


# --- the node -------------------------------------------------------------------------------------


def owner_uids(desk: Desk) -> list[str]:
    report = desk.report() or {"metadata": {}}
    return [one["uid"] for one in report["metadata"].get("ownerReferences", [])]


def test_the_owner_is_the_node_that_there_is(desk: Desk, often: None) -> None:
    desk.start(saying(BUSY))
    desk.wait(lambda: owner_uids(desk) == [node_uid(desk)])
    desk.server.remove("nodes", NODE)
    desk.server.put("nodes", node_object())
    desk.wait(lambda: owner_uids(desk) == [node_uid(desk)])
    desk.settle()
    assert desk.shows(BUSY)
    assert len(desk.writes()) == 2


def test_without_a_node_there_is_no_report(desk: Desk, often: None) -> None:
    """It would be removed at once, as what belongs to a node that is gone."""
    desk.server.remove("nodes", NODE)
    reporter = desk.start(saying(BUSY))
    reporter.tell([event_of("a")])
    desk.wait(lambda: desk.said("api server, topology") and desk.events())
    assert desk.writes() == []
    assert len(desk.said("api server, node")) == 1
    desk.server.put("nodes", node_object())
    desk.wait(lambda: owner_uids(desk) == [node_uid(desk)])


def test_a_node_that_may_not_be_read_has_a_report_without_owner(desk: Desk) -> None:
    desk.forbid("get", resource="nodes")
    desk.start(saying(BUSY))
    desk.wait(lambda: desk.shows(BUSY))
    assert owner_uids(desk) == []


def test_a_report_that_was_deleted_with_its_node_is_not_written_for_the_old_one(
    desk: Desk,
) -> None:
    """The garbage collector deletes what has an owner that is gone; the node was made anew."""
    desk.start(saying(BUSY))
    desk.wait(lambda: owner_uids(desk) == [node_uid(desk)])
    desk.settle()
    desk.server.remove("nodes", NODE)
    desk.server.put("nodes", node_object())

    def is_right() -> bool:
        if owner_uids(desk) not in ([], [node_uid(desk)]):
            desk.server.remove(TOPOLOGY, NODE)
        return owner_uids(desk) == [node_uid(desk)]

    desk.wait(is_right, timeout_s=3.0)


def taints(desk: Desk) -> list[str]:
    return [one["key"] for one in desk.node().get("spec", {}).get("taints", [])]


TAINTS = [
    {"key": key, "effect": effect}
    for key, effect in (
        ("before", "NoSchedule"),
        ("numalet.io/starting", "NoSchedule"),
        ("numalet.io/starting", "NoExecute"),
        ("after", "NoExecute"),
    )
]


def test_the_taint_goes_once_kubelet_has_our_gpus(desk: Desk) -> None:
    desk.server.put("nodes", node_object() | {"spec": {"taints": TAINTS}})
    reporter = desk.start(saying(BUSY, registered=False), taint="numalet.io/starting")
    desk.wait(lambda: desk.shows(BUSY))
    desk.settle()
    assert len(taints(desk)) == 4
    reporter.say(saying(BUSY))
    desk.wait(lambda: taints(desk) == ["before", "after"])
    desk.wait(lambda: len(desk.said("taint removed")) == 1)
    reporter.say(saying(BUSY, registered=False))
    desk.settle()
    assert len(desk.writes("/nodes/")) == 1


def test_a_taint_of_another_that_comes_at_the_same_time_stays(desk: Desk) -> None:
    desk.server.put("nodes", node_object() | {"spec": {"taints": TAINTS}})
    desk.server.fail(refuse(409), times=2, concerns=lambda one: one.method == "PATCH")
    desk.start(saying(BUSY), taint="numalet.io/starting")
    desk.wait(lambda: taints(desk) == ["before", "after"])


@pytest.mark.parametrize("taint", ["", "another"])
def test_no_other_taint_is_touched(desk: Desk, often: None, taint: str) -> None:
    desk.server.put("nodes", node_object() | {"spec": {"taints": TAINTS}})
    desk.start(saying(BUSY), taint=taint)
    desk.wait(lambda: desk.shows(BUSY))
    desk.settle()
    assert len(taints(desk)) == 4
    assert desk.writes("/nodes/") == []


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        pytest.param({}, "has no label ack.node.gpu.schedule=topology", id="missing"),
        pytest.param({"ack.node.gpu.schedule": "share"}, "share", id="another value"),
    ],
)
def test_a_wrong_label_of_the_node_is_said_once(
    desk: Desk, often: None, labels: dict[str, str], words: str
) -> None:
    desk.server.put("nodes", {"metadata": {"name": NODE, "labels": labels}})
    desk.start(saying(BUSY))
    desk.wait(lambda: desk.said(words))
    desk.wait(lambda: desk.shows(BUSY))
    reads = len(desk.server.requests)
    desk.wait(lambda: len(desk.server.requests) > reads + 5)
    assert len(desk.said("node label")) == 1
    desk.server.put("nodes", node_object())
    desk.wait(lambda: desk.said("node label is well again"))


# --- ACK's objects, and Koordinator's -------------------------------------------------------------


def test_what_acks_tools_read_of_a_node(desk: Desk) -> None:
    desk.start(saying(BUSY, WITH_ACK), ack=True)
    desk.wait(lambda: desk.writes("/nodes/") and desk.writes("/configmaps/"))
    desk.settle()
    labels = desk.node()["metadata"]["labels"]
    assert labels == node_object()["metadata"]["labels"] | {
        "aliyun.accelerator/nvidia_count": "4",
        "aliyun.accelerator/nvidia_name": "A800",
        "aliyun.accelerator/nvidia_mem": "81920MiB",
    }
    arena = desk.server.get("configmaps", f"numalet-topology-{NODE}", "kube-system")
    assert arena is not None
    assert arena["metadata"]["labels"] == {"ack.node.gpu.schedule": "topology", "nodename": NODE}
    assert json.loads(arena["data"]["devices"]) == dict.fromkeys("0123", "Healthy")
    assert len(desk.writes("/nodes/")) == len(desk.writes("/configmaps/")) == 1


def test_without_ack_nothing_of_it_is_written_or_read(desk: Desk, often: None) -> None:
    desk.start(saying(BUSY))
    desk.wait(lambda: desk.shows(BUSY))
    desk.settle()
    assert desk.writes("/nodes/") == desk.writes("/configmaps/") == []
    assert not [one for one in desk.server.requests if "configmaps" in one.path]


def test_what_others_change_of_acks_objects_is_put_right(desk: Desk, often: None) -> None:
    desk.start(saying(BUSY, WITH_ACK), ack=True)
    name = f"numalet-topology-{NODE}"
    desk.wait(lambda: desk.server.get("configmaps", name, "kube-system"))
    desk.wait(lambda: desk.node()["metadata"]["labels"].get("aliyun.accelerator/nvidia_count"))
    broken = {"metadata": {"name": name, "namespace": "kube-system"}, "data": {"devices": "?"}}
    desk.server.put("configmaps", broken)
    desk.server.put("nodes", node_object())

    def is_right() -> bool:
        arena = desk.server.get("configmaps", name, "kube-system")
        labels = desk.node()["metadata"]["labels"]
        return (
            arena is not None
            and arena["data"]["devices"] != "?"
            and labels.get("aliyun.accelerator/nvidia_count") == "4"
        )

    desk.wait(is_right)


def mark(desk: Desk, devices: str | None, name: str = f"{NODE}-device-status") -> None:
    data = {} if devices is None else {"devices": devices, "gpus": devices}
    desk.server.put(
        "configmaps", {"metadata": {"name": name, "namespace": "kube-system"}, "data": data}
    )


FAULTY = "- deviceType: gpu\n  deviceId: {}\n  healthy: false\n"


def test_gpus_that_an_administrator_marks_are_known(desk: Desk, often: None) -> None:
    reporter = desk.start(saying(BUSY, WITH_ACK), ack=True)
    mark(desk, FAULTY.format(3))
    desk.wait(lambda: reporter.marks == FaultMarks(indices=frozenset({3})))
    assert desk.rings
    mark(desk, "0, 2", f"unhealthy-gpu-{NODE}")
    desk.wait(lambda: reporter.marks == FaultMarks(indices=frozenset({0, 2, 3})))
    desk.server.remove("configmaps", f"{NODE}-device-status", "kube-system")
    desk.server.remove("configmaps", f"unhealthy-gpu-{NODE}", "kube-system")
    desk.wait(lambda: reporter.marks == FaultMarks())


def test_marks_that_make_no_sense_are_said_once_and_change_nothing(desk: Desk, often: None) -> None:
    mark(desk, FAULTY.format(3))
    reporter = desk.start(saying(BUSY, WITH_ACK), ack=True)
    desk.wait(lambda: reporter.marks.indices == {3})
    mark(desk, "{")
    desk.wait(lambda: desk.said("device-status"))
    reads = len(desk.server.requests)
    desk.wait(lambda: len(desk.server.requests) > reads + 8)
    assert reporter.marks.indices == {3}
    assert len(desk.said("fault marks")) == 1
    mark(desk, FAULTY.format(1))
    desk.wait(lambda: reporter.marks.indices == {1})
    assert desk.said("fault marks is well again")


def test_marks_that_make_no_sense_do_not_hide_others(desk: Desk, often: None) -> None:
    mark(desk, "{")
    mark(desk, "2", f"unhealthy-gpu-{NODE}")
    reporter = desk.start(saying(BUSY, WITH_ACK), ack=True)
    desk.wait(lambda: desk.said("device-status"))
    desk.settle()
    assert reporter.marks.indices == {2}


def test_koordinators_device_is_written_where_it_is_served(desk: Desk, often: None) -> None:
    desk.start(saying(BUSY, replace(CONFIG, koordinator_device="yes")))
    desk.wait(lambda: desk.shows(BUSY) and desk.said("api server, device"))
    desk.server.resources.append(KOORDINATOR_DEVICES)
    desk.wait(lambda: desk.server.get("devices", NODE))
    desk.wait(lambda: desk.said("api server, device is well again"))
    desk.settle()
    device = desk.server.get("devices", NODE)
    assert device is not None
    assert device["metadata"]["ownerReferences"][0]["uid"] == node_uid(desk)
    assert [one["type"] for one in device["spec"]["devices"]] == ["gpu"] * 4
    served = [one for one in desk.writes("/devices/") if one.status in (200, 201)]
    assert len(served) == 1


# --- Events ---------------------------------------------------------------------------------------


def test_what_happens_to_pods_is_told(desk: Desk) -> None:
    reporter = desk.start()
    reporter.tell([event_of("a", "no room"), event_of("b", "pinned", reason=Reason.PINNED)])
    desk.wait(lambda: len(desk.events()) == 2)
    one, other = desk.events()
    assert one["involvedObject"] == {
        "apiVersion": "v1",
        "kind": "Pod",
        "namespace": "ns",
        "name": "a",
        "uid": "a",
    }
    assert (one["reason"], one["message"], one["type"]) == ("Refused", "no room", "Warning")
    assert (other["reason"], other["message"], other["type"]) == ("Pinned", "pinned", "Normal")
    assert one["source"] == {"component": "numalet", "host": NODE}
    assert one["firstTimestamp"].endswith("Z")
    desk.wait(lambda: desk.metric("events_total", result="sent") == 2)


def test_the_same_is_told_once(desk: Desk) -> None:
    reporter = desk.start()
    for _ in range(10):
        reporter.tell([event_of("a")])
    desk.settle()
    assert len(desk.events()) == 1
    assert desk.metric("events_total", result="dropped") == 9


def test_too_much_at_once_is_cut(desk: Desk) -> None:
    reporter = desk.start()
    reporter.tell([event_of(f"p{number}") for number in range(80)])
    desk.wait(lambda: len(desk.events()) == 50)
    assert desk.metric("events_total", result="dropped") == 30


def test_while_nobody_takes_them_the_newest_are_kept(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "_MOST_EVENTS", 5)
    desk.server.stop()
    reporter = desk.start()
    for number in range(20):
        reporter.tell([event_of(f"p{number}")])
    desk.wait(lambda: desk.said("api server, events"))
    desk.server.start()
    desk.wait(lambda: len(desk.events()) == 5)
    names = event_names(desk)
    assert names == ["p15", "p16", "p17", "p18", "p19"]


def event_names(desk: Desk) -> list[str]:
    return [one["involvedObject"]["name"] for one in desk.events()]


def is_event(request: Request) -> bool:
    return request.method == "POST" and request.path.endswith("/events")


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(refuse(500), id="500"),
        pytest.param(refuse(429), id="429"),
        pytest.param(disconnect(), id="taken, but the answer is lost"),
        pytest.param(refuse(401), id="401, a token that is being renewed"),
    ],
)
def test_an_event_that_was_not_taken_is_told_again(desk: Desk, fault: Fault) -> None:
    desk.server.fail(fault, times=4, concerns=is_event)
    desk.start().tell([event_of("a"), event_of("b")])
    desk.wait(lambda: event_names(desk)[-1:] == ["b"], timeout_s=5.0)
    assert event_names(desk) == ["a", "b"]


def test_an_event_that_will_never_be_taken_is_given_up(desk: Desk) -> None:
    """Its namespace is gone, or it is none."""
    desk.server.fail(refuse(422), times=1, concerns=is_event)
    gone = event_of("b", pod="gone/b")
    desk.start().tell([event_of("a"), gone, event_of("c")])
    desk.wait(lambda: len(desk.events()) == 1)
    assert event_names(desk) == ["c"]
    desk.settle()
    assert len([one for one in desk.server.requests if "/gone/" in one.path]) == 1


def test_an_event_that_will_never_be_taken_keeps_nobody_waiting(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "_FIRST_PAUSE_S", 60.0)
    monkeypatch.setattr(reporting, "_LONGEST_PAUSE_S", 60.0)
    desk.start().tell([event_of("a", pod="gone/a"), event_of("b")])
    desk.wait(lambda: len(desk.events()) == 1, timeout_s=3.0)


# --- pods -----------------------------------------------------------------------------------------


def pod_object(name: str, node: str = NODE, **annotations: str) -> dict[str, Any]:
    return {
        "metadata": {
            "name": name,
            "namespace": "ns",
            "labels": {"a": "b"},
            "annotations": annotations,
        },
        "spec": {
            "nodeName": node,
            "containers": [{"name": "main", "image": "i", "resources": {"limits": {"cpu": "2"}}}],
        },
        "status": {"phase": "Running"},
    }


def test_the_pods_of_this_node_are_known_by_uid(desk: Desk) -> None:
    desk.server.put("pods", pod_object("a"))
    desk.server.put("pods", pod_object("other", node="node-2"))
    reporter = desk.start()
    desk.wait(lambda: reporter.pods is not None)
    assert pod_names(reporter) == {"a"}
    rings = len(desk.rings)
    desk.server.put("pods", pod_object("b"))
    desk.wait(lambda: pod_names(reporter) == {"a", "b"})
    desk.server.remove("pods", "a", "ns")
    desk.wait(lambda: pod_names(reporter) == {"b"})
    desk.wait(lambda: len(desk.rings) >= rings + 2)
    pod = desk.server.get("pods", "b", "ns")
    assert pod is not None
    metadata = {key: pod["metadata"][key] for key in ("name", "namespace", "creationTimestamp")}
    uid = pod["metadata"]["uid"]
    assert reporter.pods == {
        uid: {
            "metadata": {**metadata, "uid": uid, "annotations": {}},
            "spec": {"containers": [{"name": "main", "resources": {"limits": {"cpu": "2"}}}]},
            "status": {"phase": "Running"},
        }
    }


def test_what_nobody_reads_of_a_pod_rings_no_bell(desk: Desk) -> None:
    desk.server.put("pods", pod_object("a"))
    reporter = desk.start()
    desk.wait(lambda: reporter.pods)
    rings = len(desk.rings)
    pod = pod_object("a")
    pod["metadata"]["labels"]["c"] = "d"
    pod["status"]["podIP"] = "10.0.0.1"
    desk.server.put("pods", pod)
    desk.server.put("pods", pod_object("b"))
    desk.wait(lambda: pod_names(reporter) == {"a", "b"})
    assert len(desk.rings) == rings + 1


MIRROR_KEY = "kubernetes.io/config.mirror"


def test_a_static_pod_is_known_by_the_uid_that_kubelet_gave_it(desk: Desk) -> None:
    desk.server.put("pods", pod_object("web-node-1", **{MIRROR_KEY: "0123abc"}))
    reporter = desk.start()
    desk.wait(lambda: reporter.pods)
    assert set(reporter.pods or {}) == {"0123abc"}


def test_a_likeness_does_not_take_the_place_of_a_pod(desk: Desk) -> None:
    """Anybody may write that annotation."""
    uid = desk.server.put("pods", pod_object("a"))["metadata"]["uid"]
    desk.server.put("pods", pod_object("evil", **{MIRROR_KEY: uid}))
    reporter = desk.start()
    desk.wait(lambda: reporter.pods)
    assert pod_names(reporter) == {"a"}


# --- what must not happen -------------------------------------------------------------------------


class Trap(dict[str, str]):
    """Labels that cannot be read."""

    def items(self) -> Any:
        raise RuntimeError("a bug")


def test_a_bug_in_one_duty_ends_no_other(desk: Desk) -> None:
    trap = Trap(a="b")
    reporter = desk.start(replace(saying(BUSY), labels=trap))
    desk.wait(lambda: desk.shows(BUSY))
    desk.wait(lambda: len(desk.log.crashes) >= 2)
    reporter.tell([event_of("a")])
    desk.wait(lambda: len(desk.events()) == 1)
    assert set(desk.log.crashes) == {"api server, labels"}
    reporter.say(saying(BUSY))
    desk.wait(lambda: desk.said("api server, labels"))
    desk.log.crashes.clear()


NONSENSE = {
    "no object": "[]",
    "nothing in it": "{}",
    "a page": "<html>",
    "no metadata": '{"kind": "Node"}',
    "metadata that is none": '{"metadata": 5}',
    "labels that are none": '{"metadata": {"name": "node-1", "uid": "u", "labels": 5}}',
    "a uid that is none": '{"metadata": {"name": "node-1", "uid": {}}}',
}


@pytest.mark.parametrize("name", NONSENSE)
def test_a_node_that_makes_no_sense_stops_nothing_else(desk: Desk, name: str) -> None:
    is_node = lambda one: one.method == "GET" and one.path.endswith(f"/nodes/{NODE}")  # noqa: E731
    desk.server.fail(say(NONSENSE[name]), concerns=is_node)
    reporter = desk.start(saying(BUSY, WITH_ACK), ack=True)
    desk.wait(lambda: desk.writes("/configmaps/"))
    reporter.tell([event_of("a")])
    desk.wait(lambda: len(desk.events()) == 1)
    desk.server.heal()
    desk.wait(lambda: desk.node()["metadata"]["labels"].get("aliyun.accelerator/nvidia_count"))
    desk.wait(lambda: desk.shows(BUSY) and owner_uids(desk) == [node_uid(desk)])


STATES: dict[str, Callable[[Desk], None]] = {
    "all is well": lambda desk: None,
    "nothing is answered": lambda desk: desk.server.fail(hang()),
    "all is refused": lambda desk: desk.server.fail(refuse(503)),
    "the server is away": lambda desk: desk.server.stop(),
    "watches are silent": lambda desk: desk.server.fail(hang(), concerns=lambda one: one.is_watch),
}


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("late", [False, True], ids=["at once", "after a while"])
def test_it_ends_whatever_the_api_server_does(desk: Desk, name: str, late: bool) -> None:
    before = set(threading.enumerate())
    if late:
        desk.start(saying(FREE)).close()
        reporter = desk.start(saying(FREE))
        desk.wait(lambda: desk.shows(FREE))
        STATES[name](desk)
        reporter.say(saying(BUSY))
    else:
        STATES[name](desk)
        reporter = desk.start(saying(BUSY))
    asked = len(desk.server.requests)
    desk.wait(lambda: not desk.server.running or len(desk.server.requests) > asked or late)
    start_s = time.monotonic()
    reporter.close()
    assert time.monotonic() - start_s < 5.0  # said to be three at most
    rings = len(desk.rings)
    left = {thread for thread in set(threading.enumerate()) - before if is_ours(thread)}
    assert left == set()
    desk.server.heal()
    assert len(desk.rings) == rings
    with contextlib.suppress(OSError):
        reporter.close()  # twice is no trouble


def is_ours(thread: threading.Thread) -> bool:
    return thread.name == "report" or thread.name.startswith("watch ")


def test_what_is_said_by_many_threads_is_told_once(desk: Desk) -> None:
    reporter = desk.start(saying(FREE))
    threads = [
        threading.Thread(target=reporter.tell, args=([event_of(f"p{number % 10}")],))
        for number in range(40)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    desk.settle()
    assert sorted(one["involvedObject"]["name"] for one in desk.events()) == [
        f"p{number}" for number in range(10)
    ]


# --- what there is to say -------------------------------------------------------------------------


def facts_of(**kubelet: Any) -> Facts:
    return Facts(
        node=Node(machine=MACHINE),
        manner=Manner(),
        rules=Rules(),
        kubelet=KubeletFacts(**kubelet),
        pods=(("ns", "a"),),
    )


@pytest.mark.parametrize(
    ("config", "kubelet", "policy", "scope"),
    [
        pytest.param({}, {}, "none", "container", id="neither says anything"),
        pytest.param(
            {},
            {"topology_policy": "restricted", "topology_scope": "pod"},
            "restricted",
            "pod",
            id="kubelet's",
        ),
        pytest.param(
            {"topology_policy": "single-numa-node", "topology_scope": "pod"},
            {"topology_policy": "none", "topology_scope": "container"},
            "single-numa-node",
            "pod",
            id="an administrator's",
        ),
        pytest.param(
            {"topology_policy": "none"},
            {"topology_policy": "best-effort"},
            "none",
            "container",
            id="an administrator's none",
        ),
    ],
)
def test_which_policy_is_reported(
    config: dict[str, Any], kubelet: dict[str, Any], policy: str, scope: str
) -> None:
    about = to_about(replace(CONFIG, **config), facts_of(**kubelet), "nri")
    assert (about.topology_policy, about.topology_scope) == (policy, scope)
    assert (about.node, about.pods, about.pinning) == (NODE, (("ns", "a"),), "nri")


def test_what_kubelet_keeps_for_itself_is_reported() -> None:
    exclusive = {"uid": {"main": Bitmap([4])}}
    kubelet = {
        "cpu_manager_policy": "static",
        "reserved_cpus": Bitmap([0]),
        "exclusive": exclusive,
    }
    about = to_about(CONFIG, facts_of(**kubelet), "none")
    assert (about.cpu_manager_policy, about.reserved_cpus) == ("static", Bitmap([0]))
    assert about.exclusive == exclusive
    plain = to_about(CONFIG, facts_of(), "cgroup")
    assert (plain.cpu_manager_policy, plain.reserved_cpus) == ("none", Bitmap([]))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        pytest.param({"ack_objects": "no"}, set(), id="the report only"),
        pytest.param({"ack_objects": "yes"}, {"labels", "arena"}, id="ACK's too"),
        pytest.param(
            {"ack_objects": "no", "koordinator_device": "yes"}, {"device"}, id="Koordinator's too"
        ),
    ],
)
def test_which_objects_are_written(config: dict[str, str], said: set[str]) -> None:
    one = saying(BUSY, replace(CONFIG, **config), registered=False)
    assert {name for name in ("labels", "arena", "device") if getattr(one, name)} == said
    assert from_nrt(one.topology) == BUSY
    assert not one.registered
