"""`numalet run` as a process that tells the cluster: between a fake kubelet, a fake driver, a fake
container runtime, a tree of cgroups, and a fake API server that lets it do what its role does.

The machine is that of test_daemon_pinning: two nodes of four cores and two GPUs each. The fake API
server gives every object a uid of its own, so pods that are to be known by another one, the one
that kubelet and the runtime have, are likenesses of static pods.
"""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agent.core.ledger import Ledger
from agent.core.report import from_nrt
from agent.fakes.apiserver import (
    FakeApiServer,
    Request,
    Rule,
    User,
    hang,
    lay_out_account,
    refuse,
)
from tests.test_daemon import RESOURCE, free_port
from tests.test_daemon_pinning import FOUR, MACHINE, NODE_OF, Cluster, cluster
from tests.test_pinning import ALL, PIN, policy

__all__ = ["cluster"]

NODE = "node-1"
TOPOLOGY = "noderesourcetopologies"
STARTING = {"key": "numalet.io/starting", "effect": "NoSchedule"}
OTHER = {"key": "other", "effect": "NoExecute"}
MIRROR_KEY = "kubernetes.io/config.mirror"
GROUP_KEY = "topology.kubernetes.io/gpu-group"
UUIDS = [gpu.uuid for gpu in MACHINE.gpus]

ROLE = (
    Rule(verbs=("get", "patch"), resources=("nodes",), names=(NODE,)),
    Rule(verbs=("list", "watch"), resources=("pods",)),
    Rule(verbs=("create",), resources=("events",)),
    Rule(
        verbs=("get", "list", "watch", "create", "patch", "update"),
        groups=("topology.node.k8s.io",),
        resources=(TOPOLOGY,),
    ),
    Rule(verbs=("get", "create", "patch"), resources=("configmaps",), namespaces=("kube-system",)),
)
"""What the manifests let it do, and no more."""


@dataclass(slots=True)
class Told:
    """A node in a cluster, and what its API server knows."""

    node: Cluster
    api: FakeApiServer
    stray: set[str] = field(default_factory=set)

    def start(self) -> None:
        self.node.start()
        self.node.agent.wait(self.node.agent.is_ready)

    def wait(self, is_met: Any) -> None:
        self.node.agent.wait(is_met)

    def ledger(self) -> Ledger | None:
        """What the report says; None where there is none that can be read."""
        report = self.api.get(TOPOLOGY, NODE)
        try:
            return from_nrt(report)
        except ValueError:
            return None

    def held(self) -> dict[str, str]:
        """CPUs by pod and container, as the report has them."""
        ledger = self.ledger()
        return {
            f"{one.pod.removeprefix('ns/')}/{one.container}": str(one.cpus)
            for one in (ledger.grants if ledger else ())
        }

    def labels(self) -> dict[str, str]:
        """Of the node."""
        return (self.api.get("nodes", NODE) or {})["metadata"]["labels"]

    def taints(self) -> list[dict[str, str]]:
        return (self.api.get("nodes", NODE) or {})["spec"]["taints"]

    def free(self) -> list[str]:
        """GPUs that are available, by zone."""
        report = self.api.get(TOPOLOGY, NODE) or {"zones": []}
        return [
            one["available"]
            for zone in report["zones"]
            for one in zone["resources"]
            if one["name"] == RESOURCE
        ]

    def writes(self, part: str = TOPOLOGY) -> list[Request]:
        return [one for one in self.api.writes if part in one.path]

    def refused(self) -> set[str]:
        """What it asked for that its role does not let it have."""
        return {f"{one.method} {one.path}" for one in self.api.requests if one.status == 403}

    def events(self, reason: str = "") -> list[tuple[str, str]]:
        """(pod, message) of those with this reason."""
        return sorted(
            (one["involvedObject"]["name"], one["message"])
            for one in self.api.all("events")
            if reason in ("", one["reason"])
        )

    def put_pod(
        self, name: str, count: int, gpus: int = 0, phase: str = "Pending", **annotations: str
    ) -> dict[str, Any]:
        """A pinned pod with one container, whose uid on its node is its name."""
        amounts = {"cpu": str(count), "memory": "1Gi"} | ({RESOURCE: str(gpus)} if gpus else {})
        resources = {"requests": amounts, "limits": amounts}
        return self.put_parts(name, {"main": resources}, phase, PIN | annotations)

    def put_parts(
        self,
        name: str,
        resources: dict[str, Any],
        phase: str = "Pending",
        annotations: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        status = [
            {"name": one, "containerID": f"containerd://{name}_{one}", "state": {"running": {}}}
            for one in resources
        ]
        return self.api.put(
            "pods",
            {
                "metadata": {
                    "name": name,
                    "namespace": "ns",
                    "annotations": {**(annotations or {}), MIRROR_KEY: name},
                },
                "spec": {
                    "nodeName": NODE,
                    "containers": [
                        {"name": one, "resources": asked} for one, asked in resources.items()
                    ],
                },
                "status": {"phase": phase}
                | ({"containerStatuses": status} if phase == "Running" else {}),
            },
        )

    def gpus_of(self, uuids: list[str]) -> set[int]:
        """Their indices."""
        return {UUIDS.index(uuid) for uuid in uuids}


def put_node(api: FakeApiServer, *taints: dict[str, str]) -> None:
    labels = {"ack.node.gpu.schedule": "topology"}
    metadata = {"name": NODE, "labels": labels}
    api.put("nodes", {"metadata": metadata, "spec": {"taints": list(taints)}})


@pytest.fixture
def told(cluster: Cluster, tmp_path: Path) -> Iterator[Told]:
    """A node whose agent is not started yet."""
    account = tmp_path / "account"
    lay_out_account(account, "token")
    with FakeApiServer() as api:
        api.users["token"] = User(name="system:serviceaccount:numalet-system:numalet", rules=ROLE)
        api.put("namespaces", {"metadata": {"name": "ns"}})
        put_node(api, OTHER, STARTING)
        cluster.agent.configure(
            kube_api=api.url,
            service_account_dir=str(account),
            node_name=NODE,
            startup_taint=STARTING["key"],
        )
        one = Told(cluster, api)
        yield one
        if hasattr(cluster.agent, "process"):
            cluster.agent.kill()
        refused = {
            f"{request.method} {request.path}" for request in api.requests if request.status == 403
        }
        assert refused == one.stray


# --- what is told ---------------------------------------------------------------------------------


def test_the_life_of_a_node_as_its_cluster_sees_it(told: Told) -> None:
    told.start()
    # it is there
    told.wait(lambda: told.free() == ["2", "2"])
    report = told.api.get(TOPOLOGY, NODE)
    node = told.api.get("nodes", NODE)
    assert report is not None
    assert node is not None
    assert report["metadata"]["ownerReferences"][0]["uid"] == node["metadata"]["uid"]
    ledger = told.ledger()
    assert ledger is not None
    assert ledger.layout.machine.name == NODE
    assert str(ledger.reserved) == "0,8"
    told.wait(lambda: told.taints() == [OTHER])
    told.wait(lambda: len(told.writes("/configmaps/")) == 1)
    told.wait(lambda: len(told.labels()) == 4)
    assert told.labels()["aliyun.accelerator/nvidia_count"] == "4"
    assert told.labels()["aliyun.accelerator/nvidia_mem"] == "81920MiB"
    # a pod comes
    told.put_pod("a", 4, 2)
    told.node.run("a", 4, 2)
    own = told.node.has("a_main")
    told.wait(lambda: told.held() == {"a/main": str(own)})
    (where,) = {NODE_OF[gpu] for gpu in told.node.gpus["a"]}
    told.wait(lambda: told.free() == ["0" if zone == where else "2" for zone in (0, 1)])
    told.wait(lambda: len(told.events("Pinned")) == 1)
    ((pod, message),) = told.events("Pinned")
    assert pod == "a"
    assert message.startswith(f"main: CPUs {own} of NUMA node {where}, GPUs ")
    # somebody writes its cgroup
    told.node.host.make("poda/a_main", "0-15")
    told.node.start_pod("other", 1, 0, {})
    told.wait(lambda: [pod for pod, _ in told.events("CpusetDrift")] == ["a"])
    # one that cannot be
    told.put_pod("big", 99)
    with pytest.raises(Exception, match="99 CPUs"):
        told.node.run("big", 99)
    told.wait(lambda: [pod for pod, _ in told.events("Refused")] == ["big"])
    # it goes
    told.node.end("a")
    told.api.remove("pods", "a", "ns")
    told.wait(lambda: told.free() == ["2", "2"] and "a/main" not in told.held())
    assert told.events("PinMoved") == told.events("AnnotationIgnored") == []
    assert told.node.metric("kube_api_up") == 1
    assert told.node.agent.end() == 0


def test_a_new_agent_writes_nothing_that_is_there(told: Told) -> None:
    told.start()
    told.put_pod("a", 4, 2)
    told.node.run("a", 4, 2)
    own = str(told.node.has("a_main"))
    told.wait(lambda: told.held() == {"a/main": own})
    told.wait(lambda: told.taints() == [OTHER])
    assert told.node.agent.end() == 0
    before = len(told.writes("")), told.events("Pinned")
    told.start()
    lists = [one for one in told.api.requests if one.path == "/api/v1/pods" and one.is_watch]
    assert len(lists) >= 2
    told.node.agent.wait_for_passes(10)
    told.wait(lambda: told.held() == {"a/main": own})
    assert [one.path for one in told.writes("")[before[0] :] if TOPOLOGY in one.path] == []
    assert told.events("Pinned") == before[1]


def test_many_pods_at_once_cost_few_writes(told: Told) -> None:
    told.start()
    told.wait(lambda: told.free() == ["2", "2"])
    before, start_s = len(told.writes()), time.monotonic()
    for number in range(50):
        told.node.run(f"p{number}", 1)
        told.node.end(f"p{number}")
    told.node.run("last", 2, 2)
    told.wait(lambda: told.held() == {"last/main": str(told.node.has("last_main"))})
    told.node.agent.wait_for_passes(5)
    assert len(told.writes()) - before <= time.monotonic() - start_s + 2  # one a second


def test_idle_costs_no_write(told: Told) -> None:
    told.start()
    told.wait(lambda: told.free() == ["2", "2"])
    told.wait(lambda: told.taints() == [OTHER])
    told.wait(lambda: len(told.writes("/configmaps/")) == 1)
    told.node.agent.wait_for_passes(5)
    before = len(told.writes(""))
    told.node.agent.wait_for_passes(15)
    assert len(told.writes("")) == before


# --- the API server away --------------------------------------------------------------------------


@pytest.mark.parametrize("from_the_start", [True, False], ids=["from the start", "later"])
@pytest.mark.parametrize("how", ["stopped", "silent"])
def test_without_the_api_server_pods_are_pinned_all_the_same(
    told: Told, how: str, from_the_start: bool
) -> None:
    if not from_the_start:
        told.start()
        told.wait(lambda: told.free() == ["2", "2"])
    if how == "stopped":
        told.api.stop()
    else:
        told.api.fail(hang())
    if from_the_start:
        told.start()
    created = told.node.run("a", 4, 2, **policy("SingleNUMANode"))
    own = told.node.has("a_main")
    assert created.linux.resources.cpu.cpus == str(own)
    told.node.wait_for_pool(ALL - own)
    other = told.node.run("d", 4, 2)
    assert other.linux.resources.cpu.cpus
    told.node.end("d")
    told.node.wait_for_pool(ALL - own)
    told.node.agent.wait_for_passes(5)
    if how == "stopped":
        told.api.start()
    else:
        told.api.heal()
        told.api.drop_connections()
    told.wait(lambda: told.held() == {"a/main": str(own)})
    assert told.node.has("a_main") == own
    told.wait(lambda: any(pod == "a" for pod, _ in told.events("Pinned")))


@pytest.mark.parametrize("how", ["stopped", "silent", "refusing"])
def test_the_end_while_the_api_server_is_away(told: Told, how: str) -> None:
    told.start()
    told.wait(lambda: told.free() == ["2", "2"])
    if how == "stopped":
        told.api.stop()
    else:
        told.api.fail(hang() if how == "silent" else refuse(500))
    told.node.run("a", 4, 2)
    asked = len(told.api.requests)
    told.wait(lambda: how == "stopped" or len(told.api.requests) > asked)
    assert told.node.agent.end() == 0


def test_an_agent_without_an_api_server_asks_nobody(told: Told) -> None:
    told.node.agent.configure(kube_api="")
    told.start()
    told.node.run("a", 4, 2)
    told.node.agent.wait_for_passes(5)
    assert told.api.requests == []


def test_the_api_server_may_come_and_go_with_the_configuration(told: Told) -> None:
    url = told.node.agent.options["kube_api"]
    told.node.agent.configure(kube_api="")
    told.start()
    told.node.run("a", 4, 2)
    own = told.node.has("a_main")
    told.node.agent.configure(kube_api=url)
    told.node.agent.send(signal.SIGHUP)
    told.wait(lambda: told.held() == {"a/main": str(own)})
    told.node.agent.configure(kube_api="")
    told.node.agent.send(signal.SIGHUP)
    told.wait(lambda: told.api.watches == 0)
    told.node.agent.configure(kube_api="not a url")
    told.node.agent.send(signal.SIGHUP)
    told.wait(lambda: bool(told.node.agent.said("configuration is not changed")))
    assert told.node.has("a_main") == own
    assert told.node.run("d", 2).linux.resources.cpu.cpus


def test_the_node_has_the_name_that_the_environment_says(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "NODE_NAME", NODE)
    told.node.agent.configure(node_name="")
    told.start()
    told.wait(lambda: told.free() == ["2", "2"])
    ledger = told.ledger()
    assert ledger is not None
    assert ledger.layout.machine.name == NODE


# --- what the cluster tells -----------------------------------------------------------------------


def known(told: Told) -> None:
    """Until passes have seen the pods that there are."""
    told.wait(lambda: any(one.is_watch and "pods" in one.path for one in told.api.requests))
    told.node.agent.wait_for_passes(5)


def test_two_equal_pods_get_what_their_scheduler_decided(told: Told) -> None:
    told.start()
    told.put_pod("a", 2, 1, **{GROUP_KEY: "3"})
    told.put_pod("b", 2, 1, **{GROUP_KEY: "1"})
    known(told)
    told.node.run("a", 2, 1, **{GROUP_KEY: "3"})
    told.node.run("b", 2, 1, **{GROUP_KEY: "1"})
    assert told.gpus_of(told.node.gpus["a"]) == {3}
    assert told.gpus_of(told.node.gpus["b"]) == {1}
    told.wait(lambda: set(told.held()) == {"a/main", "b/main"})
    assert told.events("PlacedOtherwise") == []


def test_each_container_of_a_pod_gets_its_part_of_the_decision(told: Told) -> None:
    """Kubelet asks for one after the other; a pass comes in between."""
    told.start()
    resources = {"limits": {"cpu": "1", RESOURCE: "1"}}
    annotations = {GROUP_KEY: "1,3"}
    told.put_parts("a", {"one": resources, "two": resources}, annotations=annotations)
    known(told)
    kubelet = told.node.kubelet
    told.wait(lambda: len(kubelet.devices(RESOURCE)) == len(NODE_OF))
    first = kubelet.admit("ns/a", "one", 1)
    told.node.agent.wait_for_passes(3)
    second = kubelet.admit("ns/a", "two", 1)
    assert told.gpus_of(first) | told.gpus_of(second) == {1, 3}


def test_a_pod_that_waits_gets_gpus_that_its_policy_can_use(told: Told) -> None:
    """One GPU of node 0 is held, and two of three kinds of pairs would be refused."""
    told.start()
    told.wait(lambda: len(told.node.kubelet.devices(RESOURCE)) == len(NODE_OF))
    told.node.kubelet.give("ns/old", "main", RESOURCE, {UUIDS[0]: (0,)})
    told.node.agent.wait_for_passes(3)
    single = policy("SingleNUMANode")
    told.put_pod("a", 4, 2, **single)
    known(told)
    told.node.run("a", 4, 2, **single)
    assert told.gpus_of(told.node.gpus["a"]) == {2, 3}
    assert told.node.has("a_main") == FOUR[1]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_specification_that_comes_after_the_start_moves_nobody(told: Told, when: str) -> None:
    told.start()
    if when == "before":
        told.put_pod("a", 4, 2, **policy("SingleNUMANode"))
        known(told)
    told.node.run("a", 4, 2, **policy("SingleNUMANode"))
    own = told.node.has("a_main")
    told.node.wait_for_pool(ALL - own)
    told.put_pod("a", 4, 2, phase="Running", **policy("SingleNUMANode"))
    told.wait(lambda: told.held() == {"a/main": str(own)})
    told.node.agent.wait_for_passes(3)
    told.api.remove("pods", "a", "ns")
    told.node.agent.wait_for_passes(5)
    assert told.node.has("a_main") == own
    assert told.node.host.effective("poda/a_main") == own
    assert told.held() == {"a/main": str(own)}
    assert told.events("PinMoved") == told.events("CpusetDrift") == []
    assert len(told.events("Pinned")) == 1


def test_gpus_that_an_administrator_marks_are_not_given_out(told: Told) -> None:
    """Read a minute later at most; here, at the start."""
    data = {"devices": "- {deviceId: 1, deviceType: gpu, healthy: false}"}
    name = f"{NODE}-device-status"
    metadata = {"name": name, "namespace": "kube-system"}
    told.api.put("configmaps", {"metadata": metadata, "data": data})
    told.start()
    ill = {UUIDS[1]: "Unhealthy"}
    told.wait(
        lambda: (
            {
                gpu: health
                for gpu, (health, _) in told.node.kubelet.devices(RESOURCE).items()
                if health != "Healthy"
            }
            == ill
        )
    )
    told.wait(lambda: told.free() == ["1", "2"])


def test_without_a_runtime_that_asks_the_pods_are_those_of_the_api_server(told: Told) -> None:
    """No NRI, and no kubelet that is asked: the cgroups are written."""
    told.node.runtime.stop()
    told.node.agent.start()
    told.wait(lambda: told.node.metric("pinning_path", path="cgroup") == 1)
    told.wait(lambda: len(told.node.kubelet.devices(RESOURCE)) == len(NODE_OF))
    told.put_pod("a", 4, 1)
    known(told)
    (gpu,) = told.node.kubelet.admit("ns/a", "main", 1)
    own = FOUR[NODE_OF[gpu]]
    host = told.node.host
    host.make("poda", quota_us=400_000)
    host.make("poda/a_main", quota_us=400_000)
    told.put_pod("a", 4, 1, phase="Running")
    told.wait(lambda: host.effective("poda/a_main") == own)
    told.node.wait_for_pool(ALL - own)
    told.wait(lambda: told.held() == {"a/main": str(own)})
    # while the API server is away all stays as it is
    told.api.stop()
    told.node.agent.wait_for_passes(5)
    assert host.effective("poda/a_main") == own
    told.api.start()
    # it goes
    told.api.remove("pods", "a", "ns")
    told.node.kubelet.remove("ns/a")
    shutil.rmtree(host.file("poda", "cpuset.cpus").parent)
    told.node.wait_for_pool(ALL)
    told.wait(lambda: told.held() == {})
    assert told.node.metric("cpuset_drifts_total") == 0


def lay_out_pinned(told: Told) -> None:
    """What an agent before had pinned."""
    told.node.host.make("poda")
    told.node.host.make("poda/a_main", str(FOUR[1]))
    for path in ("burstable", "besteffort"):
        told.node.host.make(path, str(ALL - FOUR[1]))


def is_left_alone(told: Told) -> bool:
    host = told.node.host
    classes = {str(host.effective(path)) for path in ("burstable", "besteffort")}
    return host.effective("poda/a_main") == FOUR[1] and classes == {str(ALL - FOUR[1])}


def test_before_the_api_server_tells_of_pods_what_runs_pinned_is_left_alone(told: Told) -> None:
    """Without NRI nobody else knows them."""
    told.node.runtime.stop()
    told.api.stop()
    lay_out_pinned(told)
    told.node.agent.start()
    told.wait(lambda: bool(told.node.agent.said("pods are not known")))
    told.node.agent.wait_for_passes(5)
    assert is_left_alone(told)
    told.put_pod("a", 4, phase="Running")
    told.api.start()
    told.wait(lambda: told.held() == {"a/main": str(FOUR[1])})
    assert is_left_alone(told)


def test_before_kubelet_tells_of_pods_what_runs_pinned_is_left_alone(told: Told) -> None:
    """It is asked first where there is no NRI."""
    told.node.runtime.stop()
    told.node.agent.configure(kubelet_url=f"http://127.0.0.1:{free_port()}", kube_api="")
    lay_out_pinned(told)
    told.node.agent.start()
    told.wait(lambda: bool(told.node.agent.said("kubelet's pods")))
    told.node.agent.wait_for_passes(5)
    assert is_left_alone(told)


def test_before_the_runtime_tells_of_pods_what_runs_pinned_is_left_alone(told: Told) -> None:
    """As at every start of an agent, for as long as the runtime takes to synchronize."""
    lay_out_pinned(told)
    told.node.runtime.may_synchronize.clear()
    told.node.agent.start()
    told.wait(lambda: bool(told.node.runtime.masks))
    told.node.agent.wait_for_passes(5)
    assert is_left_alone(told)


def test_a_new_agent_reports_no_cpus_as_free_that_are_held(told: Told) -> None:
    """The runtime takes its time to synchronize, as while a container is being stopped."""
    told.start()
    told.node.run("a", 4, 2)
    own = str(told.node.has("a_main"))
    told.wait(lambda: told.held() == {"a/main": own})
    told.node.agent.kill()
    told.node.runtime.wait_for(lambda: told.node.runtime.plugins == [])
    told.node.runtime.may_synchronize.clear()
    told.node.agent.start()
    told.node.agent.wait_for_passes(15)
    assert told.held() == {"a/main": own}


def test_a_new_agent_moves_nobody(told: Told) -> None:
    """It knows what pods ask, and which of them have GPUs, before it is told who runs where."""
    told.start()
    for name in ("a", "b", "d"):
        told.put_pod(name, 2, 1)
        told.node.run(name, 2, 1)
    told.node.end("a")  # so that nobody would choose the CPUs of the others again
    told.api.remove("pods", "a", "ns")
    before = {name: told.node.has(f"{name}_main") for name in ("b", "d")}
    told.wait(lambda: told.held() == {f"{name}/main": str(own) for name, own in before.items()})
    told.node.agent.kill()
    told.node.runtime.wait_for(lambda: told.node.runtime.plugins == [])
    told.start()
    told.node.agent.wait_for_passes(5)
    assert {name: told.node.has(f"{name}_main") for name in before} == before
    assert told.held() == {f"{name}/main": str(own) for name, own in before.items()}
    assert told.events("PinMoved") == []


def test_a_new_agent_finds_no_drift(told: Told) -> None:
    """Its own, from before the runtime told it of the pods."""
    told.start()
    told.node.run("a", 4, 2)
    own = told.node.has("a_main")
    told.node.wait_for_pool(ALL - own)
    told.node.agent.kill()
    told.node.runtime.wait_for(lambda: told.node.runtime.plugins == [])
    told.node.runtime.may_synchronize.clear()
    told.node.agent.start()
    told.node.agent.wait_for_passes(3)
    told.node.runtime.may_synchronize.set()
    told.wait(told.node.is_asked)
    told.wait(lambda: told.held() == {"a/main": str(own)})
    told.node.agent.wait_for_passes(3)
    assert told.node.metric("cpuset_drifts_total") == 0


def test_where_kubelet_pins_the_report_says_so(told: Told) -> None:
    state = told.node.agent.folder / "cpu_manager_state"
    state.write_text('{"policyName": "static", "defaultCpuSet": "0-15", "checksum": 1}')
    told.node.agent.start()
    told.wait(lambda: told.free() == ["2", "2"])
    report = told.api.get(TOPOLOGY, NODE)
    assert report is not None
    attributes = {one["name"]: one["value"] for one in report["attributes"]}
    assert attributes["numalet.io/pinning"] == "none"
    annotations = report["metadata"]["annotations"]
    assert '"static"' in annotations["kubelet.koordinator.sh/cpu-manager-policy"]


# --- rights ---------------------------------------------------------------------------------------


def test_what_is_forbidden_is_said_once_and_the_rest_goes_on(told: Told) -> None:
    """An agent that may only look at its pods."""
    rules = tuple(rule for rule in ROLE if rule.resources == ("pods",))
    told.api.users["token"] = User(name="agent", rules=rules)
    told.start()
    told.put_pod("a", 2, 1, **{GROUP_KEY: "3"})
    known(told)
    told.node.run("a", 2, 1, **{GROUP_KEY: "3"})
    assert told.gpus_of(told.node.gpus["a"]) == {3}
    told.wait(lambda: len([one for one in told.api.requests if one.status == 403]) >= 8)
    said = told.node.agent.said("forbidden")
    assert len(said) == len(set(said))
    told.api.users["token"] = User(name="agent", rules=ROLE)
    told.wait(lambda: set(told.held()) == {"a/main"})
    told.stray = {f"{one.method} {one.path}" for one in told.api.requests if one.status == 403}
