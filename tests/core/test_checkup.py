"""The doctor's verdicts against tables: what is seen, and what to do; and how it is printed."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.access import ACCESS, Duty, needed
from agent.core.checkup import (
    judge_agent,
    judge_cgroups,
    judge_cpu_manager,
    judge_device_nodes,
    judge_driver,
    judge_gpu_nodes,
    judge_gpus,
    judge_host,
    judge_no_nri,
    judge_plugin_sockets,
    judge_topology_manager,
)
from agent.core.checkup_api import (
    judge_access,
    judge_crd,
    judge_koordinator_crd,
    judge_label,
    judge_report,
    judge_rivals,
    judge_runtime,
    judge_taint,
)
from agent.core.discovery import DriverGpu, DriverReading, Host
from agent.core.findings import Finding, Verdict, draw, has_failed, skip, to_json
from agent.core.topology import Gpu, Machine, NodeSource
from tests.core.machines import described

OK, WARNING, FAILED, SKIPPED = Verdict
A800 = described("a800x8")


def check(finding: Finding, verdict: Verdict, *texts: str) -> None:
    """Its verdict; all texts are in what it says; there is advice if, and only if, it is bad."""
    assert finding.verdict is verdict, finding
    for text in texts:
        assert text in f"{finding.seen} {finding.advice}"
    assert bool(finding.advice) is (verdict in (WARNING, FAILED)), finding


def with_gpus(**changes: object) -> Machine:
    """The A800 server, some of its GPUs changed: `gpu3={"fault": …}`."""
    gpus: list[Gpu] = list(A800.gpus)
    for name, change in changes.items():
        place = int(name.removeprefix("gpu"))
        assert isinstance(change, dict)
        gpus[place] = replace(gpus[place], **change)
    return replace(A800, gpus=tuple(gpus))


WITHOUT_GPUS = replace(A800, gpus=(), links=())
UNKNOWN = {"node": None, "node_source": NodeSource.UNKNOWN}


# --- the machine ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("a800x8", "2 NUMA nodes, 64 cores, 128 CPUs"),
        ("laptop", "1 NUMA node, "),
    ],
)
def test_a_host_is_summed_up(name: str, seen: str) -> None:
    machine = described(name)
    host = Host(name=name, nodes=machine.nodes, cores=machine.cores)
    check(judge_host(host), OK, seen)
    check(judge_host(replace(host, warnings=("a", "b"))), WARNING, seen, "; a; b")


ONE = DriverReading(gpus=(DriverGpu(index=0),))
TWO = DriverReading(gpus=(DriverGpu(index=0), DriverGpu(index=1)))
SILENT = DriverReading(problem="the driver sleeps")


@pytest.mark.parametrize(
    ("reading", "version", "on_bus", "verdict", "texts"),
    [
        pytest.param(ONE, "550.1", 1, OK, ["NVIDIA 550.1; NVML", "1 GPU"], id="one GPU"),
        pytest.param(TWO, "", 2, OK, ["of unknown version", "2 GPUs"], id="no version"),
        pytest.param(ONE, "550.1", 0, OK, ["1 GPU"], id="a GPU that the bus does not show"),
        pytest.param(
            *(DriverReading(), "550.1", 0, FAILED),
            ["no NVIDIA GPUs on the PCI bus; NVML answers, and lists no GPU", "off this node"],
            id="a host without GPUs, with a driver",
        ),
        pytest.param(
            *(SILENT, "", 0, FAILED, ["no NVIDIA GPUs", "the driver sleeps", "off this node"]),
            id="a host without GPUs and driver",
        ),
        pytest.param(
            *(DriverReading(), "550.1", 4, FAILED, ["4 NVIDIA GPUs", "NVML lists none"]),
            id="GPUs that the driver does not list",
        ),
        pytest.param(
            *(SILENT, "550.1", 1, FAILED, ["1 NVIDIA GPU on", "the driver sleeps", "nvidia-smi"]),
            id="a driver that does not answer",
        ),
        pytest.param(
            *(SILENT, "", 1, FAILED, ["the driver sleeps", "Install the NVIDIA driver"]),
            id="a driver that is not loaded",
        ),
    ],
)
def test_a_driver_is_judged_with_what_is_on_the_bus(
    reading: DriverReading, version: str, on_bus: int, verdict: Verdict, texts: list[str]
) -> None:
    check(judge_driver(reading, version, on_bus), verdict, *texts)


@pytest.mark.parametrize(
    ("machine", "verdict", "texts"),
    [
        pytest.param(A800, OK, ["8 GPUs can be given out", A800.gpus[0].model], id="sound"),
        pytest.param(WITHOUT_GPUS, SKIPPED, ["there are none"], id="none"),
        pytest.param(
            with_gpus(gpu2={"fault": "hot"}, gpu5={"uuid": None}),
            WARNING,
            ["2 of 8 GPUs", "GPU 2: hot; GPU 5: the driver does not name it"],
            id="some are ill",
        ),
        pytest.param(
            with_gpus(**{f"gpu{n}": {"fault": "hot"} for n in range(8)}),
            FAILED,
            ["8 of 8 GPUs", "GPU 7: hot"],
            id="all are ill",
        ),
    ],
)
def test_gpus_are_judged_by_how_many_can_be_given_out(
    machine: Machine, verdict: Verdict, texts: list[str]
) -> None:
    check(judge_gpus(machine), verdict, *texts)


@pytest.mark.parametrize(
    ("machine", "verdict", "text"),
    [
        pytest.param(A800, OK, "of every GPU is known", id="all"),
        pytest.param(
            replace(A800, gpus=A800.gpus[:1], links=((None,),)), OK, "the GPU is known", id="one"
        ),
        pytest.param(WITHOUT_GPUS, SKIPPED, "no GPUs", id="no GPUs"),
        pytest.param(
            with_gpus(gpu6=UNKNOWN), FAILED, f"1 GPU is not known: 6 ({A800.gpus[6].bdf})", id="1"
        ),
        pytest.param(with_gpus(gpu0=UNKNOWN, gpu1=UNKNOWN), FAILED, "2 GPUs is", id="2 unknown"),
    ],
)
def test_one_gpu_without_a_node_is_a_failure(machine: Machine, verdict: Verdict, text: str) -> None:
    check(judge_gpu_nodes(machine), verdict, text)


ALL_NODES = {"nvidiactl", "nvidia-uvm", *(f"nvidia{minor}" for minor in range(8))}
NUMBERED = with_gpus(**{f"gpu{n}": {"minor": n} for n in range(8)})


@pytest.mark.parametrize(
    ("machine", "present", "cdi_kind", "verdict", "text"),
    [
        pytest.param(NUMBERED, ALL_NODES, "", OK, "/dev has those of 8 GPUs", id="all"),
        pytest.param(NUMBERED, set(), "", FAILED, "lacks nvidia0, nvidia1, ", id="none"),
        pytest.param(
            NUMBERED, ALL_NODES - {"nvidia-uvm"}, "", FAILED, "lacks nvidia-uvm", id="no uvm"
        ),
        pytest.param(NUMBERED, set(), "a.com/gpu", SKIPPED, "CDI names of a.com/gpu", id="CDI"),
        pytest.param(WITHOUT_GPUS, set(), "", SKIPPED, "no GPUs", id="no GPUs"),
    ],
)
def test_each_gpu_needs_its_device_node(
    machine: Machine, present: set[str], cdi_kind: str, verdict: Verdict, text: str
) -> None:
    check(judge_device_nodes(machine, present, "/dev", cdi_kind), verdict, text)


# --- kubelet --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "verdict", "text"),
    [
        ("none", OK, "the agent pins"),
        ("static", FAILED, "cpuManagerPolicy: none"),
        (None, WARNING, "is assumed"),
    ],
)
def test_kubelets_cpu_manager_must_not_pin(policy: str | None, verdict: Verdict, text: str) -> None:
    check(judge_cpu_manager(policy), verdict, text)


@pytest.mark.parametrize(
    ("file", "policy", "scope", "verdict", "text"),
    [
        ("/c.yaml", None, None, OK, "is not set, so none"),
        ("/c.yaml", "none", "container", OK, "is none"),
        ("/c.yaml", "best-effort", None, OK, "is best-effort"),
        ("/c.yaml", "restricted", None, WARNING, "policy is restricted: "),
        ("/c.yaml", "single-numa-node", "pod", WARNING, "single-numa-node per pod: "),
        ("", None, None, WARNING, "Set kubelet_config"),
    ],
)
def test_kubelets_topology_manager_must_not_reject(
    file: str, policy: str | None, scope: str | None, verdict: Verdict, text: str
) -> None:
    check(judge_topology_manager(file, policy, scope), verdict, text)


@pytest.mark.parametrize(
    ("names", "verdict", "text"),
    [
        pytest.param([], OK, "no other device plugin for GPUs", id="none"),
        pytest.param(["z.sock", "kvm.sock"], OK, "beside kvm.sock, z.sock", id="others"),
        pytest.param(["nvidia-gpu.sock", "z.sock"], WARNING, ": nvidia-gpu.sock", id="NVIDIA's"),
        pytest.param(["aliyungpushare.sock"], WARNING, "aliyungpushare.sock", id="shared GPUs"),
        pytest.param(["gputopology.sock"], WARNING, "gputopology.sock", id="the one we replace"),
        pytest.param(["nvidia-mig-1g.10gb.sock"], WARNING, "mig", id="parts of GPUs"),
    ],
)
def test_other_plugins_are_known_by_their_sockets(
    names: list[str], verdict: Verdict, text: str
) -> None:
    check(judge_plugin_sockets(names), verdict, text)


# --- who pins -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "driver", "kubelets", "writable", "verdict", "text"),
    [
        pytest.param(2, "systemd", None, True, OK, "v2, systemd driver, kubepods", id="v2"),
        pytest.param(2, "cgroupfs", "cgroupfs", True, OK, "v2, cgroupfs driver", id="as told"),
        pytest.param(2, "cgroupfs", "systemd", True, WARNING, "says systemd", id="another driver"),
        pytest.param(1, "cgroupfs", None, True, WARNING, "Kubernetes 1.35", id="v1"),
        pytest.param(1, "cgroupfs", "systemd", False, FAILED, "cannot be written", id="read-only"),
    ],
)
def test_cgroups_must_be_writable_and_kubelets_own(
    version: int, driver: str, kubelets: str | None, writable: bool, verdict: Verdict, text: str
) -> None:
    check(judge_cgroups(version, driver, "kubepods", kubelets, writable), verdict, text)


def test_without_nri_somebody_else_must_tell_of_pods() -> None:
    check(judge_no_nri(is_told=True), WARNING, "a moment after the start", "Switch NRI on")
    check(judge_no_nri(is_told=False), FAILED, "nothing is pinned", "kubelet_url")


@pytest.mark.parametrize(
    ("text", "verdict", "seen"),
    [
        ("containerd://2.1.4", OK, "containerd 2.1.4 has NRI, on by default"),
        ("containerd://v2.0.0-rc.1", OK, "on by default"),
        ("containerd://1.7.27", OK, "off unless its configuration switches it on"),
        ("containerd://1.6.36", WARNING, "NRI comes with containerd 1.7."),
        ("cri-o://1.36.0", OK, "on by default"),
        ("cri-o://1.29.3", OK, "off unless"),
        ("cri-o://1.25.0", WARNING, "NRI comes with cri-o 1.26."),
        ("docker://27.1.0", WARNING, "docker 27.1.0: whether it has NRI is not known"),
        ("containerd://unknown", WARNING, "is not known"),
        ("", WARNING, "not told: whether"),
    ],
)
def test_a_runtime_has_nri_from_some_version_on(text: str, verdict: Verdict, seen: str) -> None:
    check(judge_runtime(text), verdict, seen)


def test_an_agent_is_alive_ready_or_neither() -> None:
    check(judge_agent("1.2.3.4:5", None, None), OK, "ready, at 1.2.3.4:5")
    check(judge_agent("1.2.3.4:5", None, "no GPU"), WARNING, "not ready: no GPU")
    check(judge_agent("1.2.3.4:5", "stuck", "no GPU"), FAILED, "is stuck: stuck")


# --- the Kubernetes API ---------------------------------------------------------------------------


def test_a_label_comes_with_the_command_that_sets_it() -> None:
    check(judge_label(None, "a/b", "n-1"), OK, "a/b=topology")
    check(judge_label("it is x", "a/b", "n-1"), FAILED, "it is x", "kubectl label node n-1 a/b=top")


@pytest.mark.parametrize(
    ("node", "key", "verdict"),
    [
        pytest.param({"spec": {}}, "k", OK, id="no taints"),
        pytest.param({}, "k", OK, id="no spec"),
        pytest.param({"spec": {"taints": None}}, "k", OK, id="taints of null"),
        pytest.param({"spec": {"taints": [{"key": "j"}, "k"]}}, "k", OK, id="others, and nonsense"),
        pytest.param({"spec": {"taints": [{"key": "k"}]}}, "k", WARNING, id="ours"),
        pytest.param({"spec": {"taints": [{"key": "k"}]}}, "", SKIPPED, id="none of ours"),
    ],
)
def test_only_our_own_taint_counts(node: dict[str, Any], key: str, verdict: Verdict) -> None:
    check(judge_taint(node, key), verdict)


@pytest.mark.parametrize(
    ("allocatable", "verdict", "text"),
    [
        pytest.param({"aliyun.com/gpu": "8"}, OK, "aliyun.com/gpu: 8, and no other", id="ours"),
        pytest.param({}, OK, "aliyun.com/gpu: 0", id="nothing"),
        pytest.param(
            {"nvidia.com/gpu": "0", "aliyun.com/gpu-mem": 0}, OK, "no other", id="others at 0"
        ),
        pytest.param(
            {"cpu": "8", "rdma/hca": "1", "aliyun.com/eni": "3"}, OK, "no other", id="no GPUs"
        ),
        pytest.param({"nvidia.com/gpu": "8"}, FAILED, "nvidia.com/gpu: 8 beside", id="NVIDIA's"),
        pytest.param({"nvidia.com/gpu.shared": "8"}, FAILED, "gpu.shared: 8", id="shared"),
        pytest.param({"nvidia.com/mig-1g.5gb": 7}, FAILED, "mig-1g.5gb: 7", id="parts of GPUs"),
        pytest.param(
            {"aliyun.com/gpu-core.percentage": "80", "aliyun.com/gpu-mem": "6"},
            FAILED,
            "aliyun.com/gpu-core.percentage: 80, aliyun.com/gpu-mem: 6 beside aliyun.com/gpu: 0",
            id="ACK's shared GPUs",
        ),
        pytest.param({"koordinator.sh/gpu-core": "100"}, FAILED, "gpu-core", id="Koordinator's"),
    ],
)
def test_gpus_must_not_be_offered_twice(
    allocatable: dict[str, Any], verdict: Verdict, text: str
) -> None:
    check(judge_rivals(allocatable), verdict, text)


def test_the_crd_must_be_served_as_our_version() -> None:
    plural = "noderesourcetopologies"
    check(judge_crd(["v1alpha1", "v1alpha2"], [plural]), OK, "served as v1alpha1, v1alpha2")
    check(judge_crd(["v1alpha1"], []), FAILED, "served as v1alpha1 only, not as v1alpha2")
    check(judge_crd([], []), FAILED, "is not there", "kubectl apply -k daemonset/crd")
    check(judge_koordinator_crd(["devices"]), OK, "devices.scheduling.koordinator.sh is served")
    check(judge_koordinator_crd(["reservations"]), FAILED, "is not served as v1alpha1")


def test_verbs_that_are_not_granted_are_named_with_their_reasons() -> None:
    check(judge_access(ACCESS, ()), OK, f"all {len(ACCESS)} verbs")
    denied = [access for access in ACCESS if access.resource == "configmaps"]
    text = "get configmaps in kube-system (arena's picture of the node"
    check(judge_access(ACCESS, denied), FAILED, f"3 of {len(ACCESS)} verbs", text)


TOPOLOGY = "topology.node.k8s.io"


@pytest.mark.parametrize(
    ("duties", "verbs"),
    [
        pytest.param(
            {Duty.REPORT},
            {
                ("", "nodes", "get"),
                ("", "pods", "list watch"),
                ("", "events", "create"),
                (TOPOLOGY, "noderesourcetopologies", "get list watch create patch update"),
            },
            id="the report alone",
        ),
        pytest.param({Duty.TAINT}, {("", "nodes", "patch")}, id="the taint"),
        pytest.param(
            {Duty.ACK},
            {("", "nodes", "patch"), ("", "configmaps", "get create patch")},
            id="ACK's objects",
        ),
        pytest.param(
            {Duty.KOORDINATOR},
            {("scheduling.koordinator.sh", "devices", "get create patch")},
            id="Koordinator's Device",
        ),
        pytest.param({Duty.CGROUP}, {("", "nodes", "get")}, id="kubelet's pods"),
    ],
)
def test_only_the_verbs_that_are_due_are_needed(
    duties: set[Duty], verbs: set[tuple[str, str, str]]
) -> None:
    """Source of the table: what the agent asks, as its policies and its e2e tests list it."""
    expected = [(group, of, verb) for group, of, words in verbs for verb in words.split()]
    found = [(access.group, access.resource, access.verb) for access in needed(duties)]
    assert sorted(found) == sorted(expected)


def test_no_verb_is_listed_twice() -> None:
    assert len({str(access) for access in ACCESS}) == len(ACCESS)
    assert [str(access) for access in needed({Duty.CGROUP})] == ["get nodes/pods"]


def owned(*managers: str, label: str = "", fields: str = "f:zones") -> dict[str, Any]:
    entries = [{"manager": name, "fieldsV1": {fields: {}}} for name in managers]
    labels = {"app.kubernetes.io/managed-by": label} if label else {}
    return {"metadata": {"managedFields": entries, "labels": labels}}


@pytest.mark.parametrize(
    ("current", "foreign", "verdict", "text"),
    [
        pytest.param(None, False, OK, "there is none of this node yet", id="none yet"),
        pytest.param(owned("numalet"), False, OK, "the agent's own", id="ours"),
        pytest.param(owned("koordlet"), True, OK, "belongs to koordlet;", id="Koordinator's"),
        pytest.param(
            owned("koordlet", label="Koordinator"), True, OK, "Koordinator, koordlet", id="both"
        ),
        pytest.param(
            owned("nfd-master", "numalet"), True, WARNING, "belongs to nfd-master;", id="NFD's"
        ),
        pytest.param(
            owned("koordlet", "rte"), True, WARNING, "belongs to koordlet, rte;", id="several"
        ),
        pytest.param(owned(label="Koordinator"), True, OK, "to Koordinator;", id="by its label"),
        pytest.param(
            owned("rte", fields="f:attributes"), True, WARNING, "to rte;", id="of other fields"
        ),
        pytest.param(owned("numalet"), True, WARNING, "to another writer", id="merged by us"),
        pytest.param({}, True, WARNING, "to another writer", id="no metadata"),
        pytest.param(
            {"metadata": {"managedFields": ["x", {"manager": 7, "fieldsV1": 7}], "labels": []}},
            True,
            WARNING,
            "to another writer",
            id="nonsense",
        ),
    ],
)
def test_a_report_of_another_writer_is_named(
    current: dict[str, Any] | None, foreign: bool, verdict: Verdict, text: str
) -> None:
    check(judge_report(current, foreign), verdict, text)


# --- findings, printed ----------------------------------------------------------------------------

SOME = (
    Finding(name="sysfs", verdict=OK, seen="2 NUMA nodes", advice="never shown"),
    Finding(name="gpu driver", verdict=WARNING, seen="it is slow", advice="Wait."),
    Finding(name="kubelet", verdict=FAILED, seen="it is gone", advice=" ".join(["start"] * 20)),
    *skip(["node", "crd", "access"], "there is no API server"),
    Finding(name="agent", verdict=SKIPPED, seen="nowhere"),
)


def test_findings_are_printed_in_columns_and_advice_below() -> None:
    assert draw(SOME, colour=False) == (
        "✓ ok       sysfs       2 NUMA nodes\n"
        "! warning  gpu driver  it is slow\n"
        "                       → Wait.\n"
        "✗ failed   kubelet     it is gone\n"
        f"                       → {' '.join(['start'] * 12)}\n"
        f"                         {' '.join(['start'] * 8)}\n"
        "– skipped  node        there is no API server; nor are checked: crd, access\n"
        "– skipped  agent       nowhere\n"
        "\n"
        "1 ok, 1 warning, 1 failed, 4 skipped\n"
    )


def test_colour_adds_escapes_and_nothing_else() -> None:
    coloured = draw(SOME, colour=True)
    assert coloured.count("\x1b[0m") == coloured.count("\x1b[") / 2 > len(SOME)
    assert re.sub(r"\x1b\[\d+m", "", coloured) == draw(SOME, colour=False)


@pytest.mark.parametrize(
    ("verdicts", "line"),
    [
        ([], "0 ok"),
        ([OK, OK], "2 ok"),
        ([WARNING, WARNING], "0 ok, 2 warnings"),
        ([FAILED, OK, SKIPPED], "1 ok, 1 failed, 1 skipped"),
    ],
)
def test_the_last_line_counts(verdicts: list[Verdict], line: str) -> None:
    findings = [Finding(name=f"{n}", verdict=v, seen=f"{n}") for n, v in enumerate(verdicts)]
    assert draw(findings, colour=False).splitlines()[-1] == line


def test_json_has_every_finding_by_itself() -> None:
    data = to_json(SOME)
    assert list(data) == ["ok", "counts", "findings"]
    assert data["ok"] is False
    assert data["counts"] == {"ok": 1, "warning": 1, "failed": 1, "skipped": 4}
    assert data["findings"][1] == {
        "name": "gpu driver",
        "verdict": "warning",
        "seen": "it is slow",
        "advice": "Wait.",
    }
    assert [one["name"] for one in data["findings"]] == [one.name for one in SOME]
    assert has_failed(SOME)
    assert not has_failed(SOME[:2])
    assert to_json(SOME[:2])["ok"] is True


FINDINGS = st.lists(
    st.builds(
        Finding,
        name=st.sampled_from(["sysfs", "gpu driver", "topology manager"]),
        verdict=st.sampled_from(Verdict),
        seen=st.text(max_size=300),
        advice=st.text(max_size=300),
    ),
    max_size=8,
)


@given(FINDINGS)
def test_whatever_neighbours_say_the_lines_are_safe_and_begin_alike(
    findings: list[Finding],
) -> None:
    *lines, empty, count, end = draw(findings, colour=False).split("\n")
    assert (empty, end) == ("", "")
    assert all(line.isprintable() for line in (*lines, count))
    heads = [line for line in lines if not line.startswith(" ")]
    own = [one for one in findings if one.verdict is not SKIPPED]
    assert len(own) <= len(heads) <= len(findings)
    assert sum(map(int, re.findall(r"\d+", count))) == len(findings)
