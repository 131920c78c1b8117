"""What a node tells people and ACK's tools through a real API server, and what it reads there."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.e2e.agent import Agent, node_options
from tests.e2e.cluster import SCHEDULE_LABEL, THIS_NODE, Cluster
from tests.e2e.conftest import Note
from tests.e2e.kubelet import NODE, RESOURCE
from tests.e2e.machine import make_machine
from tests.e2e.pinning import OPTIONS, PIN, waiting
from tests.e2e.report import TOPOLOGIES, TOPOLOGY, attributes
from tests.e2e.rig import MACHINE

CONFIG_MAPS = "/api/v1/namespaces/kube-system/configmaps"
ARENA = f"{CONFIG_MAPS}/numalet-topology-{NODE}"

MARKS_S = 75
"""Within how long an administrator's marks must be seen."""


# --- labels, arena, taint, marks ------------------------------------------------------------------


def test_the_node_says_which_cards_it_has(cluster: Cluster) -> None:
    def labels() -> dict[str, str]:
        said = cluster.node()["metadata"]["labels"]
        prefix = "aliyun.accelerator/nvidia_"
        return {key.removeprefix(prefix): said[key] for key in said if key.startswith(prefix)}

    cards = {"name": "NVIDIA-A800-SXM4-80GB", "mem": f"{80 << 10}MiB", "count": "8"}
    cluster.wait(lambda: labels() == cards, "the node has its labels")


def test_arena_finds_devices_and_links(cluster: Cluster) -> None:
    machine = cluster.rig.machine.facts
    found: dict[str, Any] = cluster.wait(lambda: cluster.admin.find(ARENA), "it is there")
    assert found["metadata"]["labels"].items() >= {
        ("ack.node.gpu.schedule", "topology"),
        ("nodename", NODE),
    }
    count = len(machine.gpus)
    assert json.loads(found["data"]["devices"]) == {str(i): "Healthy" for i in range(count)}
    links = json.loads(found["data"]["linkType"])
    assert [[links[i][j] for j in range(count) if j != i] for i in range(count)] == [
        [machine.links[i][j] for j in range(count) if j != i] for i in range(count)
    ]
    bandwidth = json.loads(found["data"]["bandwidth"])
    assert [len(row) for row in bandwidth] == [count] * count
    assert all(isinstance(cell, int | float) and cell > 0 for row in bandwidth for cell in row)


def test_marks_of_an_administrator_take_gpus_away(cluster: Cluster, note: Note) -> None:
    gpus = cluster.rig.machine.facts.gpus
    marked = {gpus[3].uuid, gpus[5].uuid}
    device = "- deviceId: 3\n  deviceType: gpu\n  healthy: false\n"
    marks = {
        f"{NODE}-device-status": {"devices": device},
        f"unhealthy-gpu-{NODE}": {"gpus": "5"},
    }
    for name, data in marks.items():
        cluster.admin.post(CONFIG_MAPS, {"metadata": {"name": name}, "data": data})
    start = time.monotonic()
    try:
        cluster.wait(
            lambda: {gpu.uuid for gpu in gpus} - set(cluster.rig.healthy()) == marked,
            "the marked GPUs are unhealthy",
            MARKS_S,
        )
        seen_s = time.monotonic() - start
        cluster.wait_until_right()
        assert sorted(cluster.reported_gpus().values()) == [(4, 3, 3), (4, 3, 3)]
        cluster.wait(
            lambda: cluster.node()["status"]["allocatable"][RESOURCE] == "6", "the node has 6"
        )
        cluster.wait(
            lambda: "Healthy" not in marked_in_arena(cluster), "arena sees them unhealthy", 30
        )
    finally:
        for name in marks:
            cluster.admin.delete(f"{CONFIG_MAPS}/{name}")
    note("marks in ConfigMaps: GPUs unhealthy after", f"{seen_s:.0f} s", f"{MARKS_S} s")
    cluster.rig.agent.stop()
    cluster.rig.agent.start()
    cluster.rig.wait_until_whole()


def marked_in_arena(cluster: Cluster) -> set[str]:
    devices = json.loads(cluster.admin.get(ARENA)["data"]["devices"])
    return {devices["3"], devices["5"]}


def test_the_startup_taint_goes_once_there_are_gpus(cluster: Cluster) -> None:
    other = {"key": "other", "value": "kept", "effect": "NoSchedule"}
    ours = [{"key": "numalet.io/starting", "effect": effect} for effect in ("NoSchedule",)]
    cluster.rig.agent.stop()
    cluster.admin.patch(THIS_NODE, {"spec": {"taints": [*ours, other]}})
    cluster.rig.agent.start()
    cluster.wait(lambda: cluster.node()["spec"]["taints"] == [other], "the taint is gone", 30)
    assert cluster.rig.is_whole()
    cluster.admin.patch(THIS_NODE, {"spec": {"taints": None}})


# --- what it says on pods -------------------------------------------------------------------------


@pytest.fixture
def pinning(cluster: Cluster) -> Iterator[Cluster]:
    """The same node with its GPUs in this machine, whose last CPU the agent may give away."""
    rig = cluster.rig
    rig.agent.stop()
    number = next(cluster.numbers)
    machine = make_machine(MACHINE, rig.library, rig.folder / f"here-{number}", here=True)
    options = node_options(machine, rig.kubelet, rig.containerd) | dict(cluster.options) | OPTIONS
    agent = Agent(machine, rig.folder / f"agent-here-{number}", options)
    agent.start()
    other = replace(cluster, rig=replace(rig, machine=machine, agent=agent))
    try:
        other.rig.wait_until_whole()
        other.wait(lambda: len((other.topology() or {"zones": []})["zones"]) == 1, "one zone")
        yield other
        other.remove_pods()
    finally:
        agent.stop()


def test_pods_are_told_what_they_got(pinning: Cluster) -> None:
    (pod,) = pinning.run_pods("pinned", cpu="1", gpus=1, annotations=PIN)
    (event,) = pinning.wait(lambda: pinning.events(pod.name), "there is an Event")
    assert event["type"] == "Normal"
    assert event["reason"] == "Pinned"
    assert "CPUs 1 " in event["message"]
    assert event["involvedObject"]["uid"] == uid(pinning, pod.name)
    assert event["source"] == {"component": "numalet", "host": NODE}
    pinning.remove_pod(pod)
    refused = pinning.post_pod("refused", cpu="2", annotations=PIN)
    (event,) = pinning.wait(lambda: pinning.events(refused), "there is an Event")
    assert (event["type"], event["reason"]) == ("Warning", "Refused")
    assert "asked 2 CPUs" in event["message"]
    assert event["message"] in pinning.wait(lambda: waiting(pinning.rig, refused), "it waits")
    assert "Refused" in pinning.kubectl("describe", "pod", refused)


def uid(cluster: Cluster, name: str) -> str:
    return str(cluster.admin.get(f"/api/v1/namespaces/default/pods/{name}")["metadata"]["uid"])


def test_a_refused_pod_is_not_told_every_time_it_tries(pinning: Cluster) -> None:
    pinning.run_pods("pinned", cpu="1", annotations=PIN)
    refused = pinning.post_pod("refused", cpu="1", annotations=PIN)

    def tries() -> float:
        calls = 'numalet_rpc_duration_seconds_count{method="CreateContainer"}'
        return pinning.rig.agent.metrics().get(calls, 0)

    before = tries()
    pinning.wait(lambda: tries() >= before + 3, "kubelet has tried three times", 60)
    assert len(pinning.events(refused)) == 1


def test_the_report_shows_pinned_cpus(pinning: Cluster) -> None:
    def cpus() -> list[tuple[str, str, str]]:
        return [
            (one["capacity"], one["allocatable"], one["available"])
            for zone in (pinning.topology() or {})["zones"]
            for one in zone["resources"]
            if one["name"] == "cpu"
        ]

    pinning.wait(lambda: cpus() == [("2", "1", "1")], "all is free")
    (pod,) = pinning.run_pods("pinned", cpu="1", annotations=PIN)
    pinning.wait(lambda: cpus() == [("2", "1", "0")], "the CPU is held")
    pinning.remove_pod(pod)
    pinning.wait(lambda: cpus() == [("2", "1", "1")], "all is free again")


# --- its own commands -----------------------------------------------------------------------------


def test_the_doctor_finds_nothing_wrong_with_the_cluster(pinning: Cluster) -> None:
    found = pinning.rig.agent.examine()
    assert {"api server", "node label", "crd", "access", "report", "nri", "agent"} <= found.keys()
    wrong = {name: one for name, one in found.items() if one["verdict"] == "failed"}
    assert wrong == {}


@pytest.mark.parametrize("arguments", [[], ["-d"], ["-o", "wide"]], ids=" ".join)
def test_the_cluster_in_one_table(cluster: Cluster, arguments: list[str]) -> None:
    (pod,) = cluster.run_pods("one", gpus=3)
    cluster.wait_until_right()
    program = "import sys; from agent.inspect import main; sys.exit(main())"
    command = [sys.executable, "-c", program, f"--kubeconfig={cluster.kubectl.kubeconfig}"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60)
    print(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert "3/8" in done.stdout
    assert "3/4" in done.stdout
    assert (pod.name in done.stdout) == (arguments == ["-d"])


# --- what is missing stops nothing else -----------------------------------------------------------


def said(cluster: Cluster, since: int, *words: str) -> list[str]:
    """Lines of the agent's log from this size on with all of these words."""
    with cluster.rig.agent.log.open() as log:
        log.seek(since)
        return [line for line in log if all(word in line for word in words)]


def test_rights_that_are_missing_are_named_once_and_stop_nothing(cluster: Cluster) -> None:
    path = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"
    binding = cluster.admin.get(f"{path}/numalet")
    for name in ("uid", "resourceVersion", "creationTimestamp", "managedFields"):
        binding["metadata"].pop(name, None)
    since, before = cluster.rig.agent.log.stat().st_size, refusals(cluster)
    cluster.admin.delete(f"{path}/numalet")
    try:
        pods = cluster.run_pods("one", "two", gpus=2)
        cluster.wait(lambda: refusals(cluster) >= before + 3, "it has been refused three times", 60)
        pods += cluster.run_pods("three", gpus=1)
        (line,) = said(cluster, since, "api server, topology", "403")
        assert 'cannot patch resource \\"noderesourcetopologies\\"' in line
        assert cluster.rig.is_unchanged(pods)
        assert cluster.rig.agent.is_ready()
    finally:
        cluster.admin.post(path, binding)
    cluster.wait_until_right(60)
    assert len(said(cluster, since, "api server, topology is well again")) == 1


def refusals(cluster: Cluster) -> int:
    """How often the agent was not allowed to write its report."""
    return sum(deed.status == 403 for deed in cluster.deeds(["patch"], TOPOLOGIES))


def test_a_kind_that_is_missing_is_named_once_and_stops_nothing(cluster: Cluster) -> None:
    path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    name = "noderesourcetopologies.topology.node.k8s.io"
    found = cluster.admin.get(f"{path}/{name}")
    kind = {key: found[key] for key in ("apiVersion", "kind", "spec")}
    kind["metadata"] = {key: found["metadata"][key] for key in ("name", "annotations")}
    since = cluster.rig.agent.log.stat().st_size
    cluster.admin.delete(f"{path}/{name}")
    cluster.wait(lambda: cluster.admin.status("GET", TOPOLOGY) == 404, "the kind is gone", 60)
    try:
        (pod,) = cluster.run_pods("one", gpus=2)
        cluster.wait(lambda: said(cluster, since, "CustomResourceDefinition"), "it is said", 60)
        assert (
            "topology.node.k8s.io/v1alpha2" in said(cluster, since, "CustomResourceDefinition")[0]
        )
        assert cluster.rig.is_unchanged([pod])
        assert cluster.rig.agent.is_ready()
    finally:
        cluster.admin.post(path, kind)
    cluster.wait_until_right(60)
    assert attributes(cluster.topology() or {})["numalet.io/pinning"] == "nri"


def test_a_node_without_the_label_is_told_of_once(cluster: Cluster) -> None:
    since = cluster.rig.agent.log.stat().st_size
    cluster.admin.patch(THIS_NODE, {"metadata": {"labels": {SCHEDULE_LABEL: "share"}}})
    cluster.rig.agent.stop()
    cluster.rig.agent.start()
    try:
        cluster.wait(lambda: said(cluster, since, SCHEDULE_LABEL), "it is said", 60)
        cluster.rig.wait_until_whole()
        cluster.run_pods("one", gpus=1)
        cluster.wait_until_right()
        assert len(said(cluster, since, SCHEDULE_LABEL)) == 1
    finally:
        cluster.admin.patch(THIS_NODE, {"metadata": {"labels": {SCHEDULE_LABEL: "topology"}}})
