"""`numalet doctor` between fakes of all its neighbours: a host where all is well, and then not.

Each disturbance must show in the findings that it concerns, and in no other.
"""

import json
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from agent import clusterchecks, doctor
from agent.config import Config
from agent.core.access import ACCESS, needed
from agent.core.findings import Finding, Verdict
from agent.doctor import draw, has_failed, run_doctor, to_json
from agent.edge.status import Metrics, start_status
from agent.fakes import cgroups, node, nvml
from agent.fakes.apiserver import (
    KOORDINATOR_DEVICES,
    TOPOLOGIES,
    FakeApiServer,
    Rule,
    User,
    hang,
    lay_out_account,
    refuse,
    say,
)
from agent.fakes.kubelet import FakeKubelet
from agent.fakes.runtime import FakeRuntime
from tests import machines

OK, WARNING, FAILED, SKIPPED = Verdict
MACHINE = machines.load("a800x8")
NODE = "gpu-node-1"
TOKEN = "a-token"
GIVEN = {"UUID": MACHINE.gpus[0].uuid}
NAMES = [
    *("sysfs", "gpu driver", "gpus", "gpu nodes", "device nodes", "fault file"),
    *("kubelet", "plugin directory", "pod resources", "cpu manager", "topology manager"),
    *("other plugins", "cgroups", "nri", "kubelet's pods"),
    *("api server", "node", "runtime version", "node label", "startup taint", "gpu resources"),
    *("crd", "access", "report", "agent"),
]
"""In the order in which they are told, for ever: scripts read them."""
CLUSTER = NAMES[NAMES.index("api server") : NAMES.index("agent")]


@dataclass(slots=True, kw_only=True)
class Host:
    """A node with a working neighbour of every kind. A test breaks one, or changes the config."""

    folder: Path
    config: Config
    kubelet: FakeKubelet
    runtime: FakeRuntime
    api: FakeApiServer
    stack: ExitStack
    ready: list[str] = field(default_factory=list)
    """What /readyz complains of."""
    alive: list[str] = field(default_factory=list)

    def path(self, name: str) -> Path:
        return self.folder / name

    def set(self, **options: Any) -> None:
        self.config = replace(self.config, **options)

    def drive(self, *lines: str, machine: node.Description = MACHINE) -> None:
        nvml.write_state(self.path("driver"), node.driver_state(machine, *lines))

    def put_node(self, **changes: Any) -> None:
        """The Node object, with these in place of what is in it."""
        whole: dict[str, Any] = {
            "metadata": {"name": NODE, "labels": {"ack.node.gpu.schedule": "topology"}},
            "spec": {},
            "status": {
                "nodeInfo": {
                    "kubeletVersion": "v1.34.1",
                    "containerRuntimeVersion": "containerd://2.1.4",
                },
                "allocatable": {"cpu": "128", "aliyun.com/gpu": "8", "nvidia.com/gpu": "0"},
            },
        }
        for path, value in changes.items():
            *above, last = path.split("__")
            place = whole
            for part in above:
                place = place[part]
            place[last] = value
        self.api.put("nodes", whole)

    def serve(self, path: Path) -> None:
        """A socket that takes connections, and says nothing."""
        listener = self.stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(path))
        listener.listen()

    def serve_datagrams(self, path: Path) -> None:
        peer = self.stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        peer.bind(str(path))


@pytest.fixture
def host(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setenv(nvml.ENVIRONMENT, str(tmp_path / "driver"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    root = lay_out_root(tmp_path / "root")
    kubelet_dir = lay_out_kubelet(tmp_path / "kubelet")
    lay_out_account(tmp_path / "account", TOKEN)
    with ExitStack() as stack:
        kubelet = stack.enter_context(FakeKubelet(tmp_path / "dp", tmp_path / "pr.sock"))
        runtime = stack.enter_context(FakeRuntime(tmp_path / "nri.sock"))
        api = stack.enter_context(FakeApiServer())
        config = Config(
            root=str(root),
            nvml=library,
            plugin_dir=str(tmp_path / "dp"),
            pod_resources=str(tmp_path / "pr.sock"),
            fault_file=str(tmp_path / "faults.json"),
            nri_socket=str(tmp_path / "nri.sock"),
            kubelet_dir=str(kubelet_dir),
            kubelet_config=str(kubelet_dir / "config.yaml"),
            kube_api=api.url,
            service_account_dir=str(tmp_path / "account"),
            node_name=NODE,
        )
        made = Host(
            folder=tmp_path, config=config, kubelet=kubelet, runtime=runtime, api=api, stack=stack
        )
        status = start_status(
            "127.0.0.1:0",
            Metrics(),
            lambda: made.alive[0] if made.alive else None,
            lambda: made.ready[0] if made.ready else None,
        )
        stack.callback(status.close)
        made.set(status_address=status.address)
        made.drive()
        made.put_node()
        yield made


def lay_out_root(root: Path) -> Path:
    node.lay_out(MACHINE, root)
    (root / "dev").mkdir()
    for name in ("nvidiactl", "nvidia-uvm", *(f"nvidia{minor}" for minor in range(8))):
        (root / "dev" / name).symlink_to("/dev/null")
    files = {
        "sys/module/nvidia/version": "550.54.15\n",
        "sys/fs/cgroup/cgroup.controllers": "cpuset cpu memory\n",
        "sys/fs/cgroup/kubepods.slice/cpuset.cpus": "",
    }
    return cgroups.lay_out(root, files)


def lay_out_kubelet(folder: Path) -> Path:
    state = {"policyName": "none", "defaultCpuSet": "", "checksum": 1}
    files = {
        "cpu_manager_state": json.dumps(state),
        "config.yaml": "kind: KubeletConfiguration\ncgroupDriver: systemd\n",
    }
    return cgroups.lay_out(folder, files)


def by_name(findings: tuple[Finding, ...]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


# --- all is well ----------------------------------------------------------------------------------


def test_a_host_where_all_is_well_has_nothing_to_do(host: Host) -> None:
    findings = run_doctor(host.config)
    assert [finding.name for finding in findings] == NAMES
    verdicts = {finding.name: finding.verdict for finding in findings}
    assert verdicts == dict.fromkeys(NAMES, OK) | {"kubelet's pods": SKIPPED}
    assert not any(finding.advice for finding in findings)
    assert not has_failed(findings)
    seen = {finding.name: finding.seen for finding in findings}
    assert seen["sysfs"] == "2 NUMA nodes, 64 cores, 128 CPUs"
    assert seen["gpu driver"] == "NVIDIA 550.54.15; NVML answers, with 8 GPUs"
    assert seen["node"] == f"{NODE}, kubelet v1.34.1"
    assert "v1alpha2" in seen["crd"]


def test_nothing_is_registered_and_nothing_is_written(host: Host) -> None:
    before = sorted(os.listdir(host.config.plugin_dir))
    run_doctor(host.config)
    assert host.runtime.registrations == []
    assert host.runtime.connections == 1
    assert host.kubelet.registrations == []
    assert sorted(os.listdir(host.config.plugin_dir)) == before
    assert host.api.writes == []


def test_a_runtime_takes_plugins_on_after_a_visit(host: Host) -> None:
    """A visitor that hangs up ends its own connection only."""
    run_doctor(host.config)
    host.runtime.wait_for(lambda: len(host.runtime.lost) == 1)
    with socket.socket(socket.AF_UNIX) as other:
        other.connect(str(host.runtime.path))
        host.runtime.wait_for(lambda: host.runtime.connections == 2)


# --- one neighbour is not as it should be ---------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """What is done to the host, and the findings that this changes: name → verdict, and a text in
    what was seen or in the advice."""

    do: Callable[[Host], object]
    shows: dict[str, tuple[Verdict, str]]


def all_skipped(names: list[str], why: str) -> dict[str, tuple[Verdict, str]]:
    return dict.fromkeys(names, (SKIPPED, why))


def write(name: str, text: str) -> Callable[[Host], object]:
    return lambda host: host.path(name).write_text(text)


def no_numa_folder(host: Host) -> None:
    (host.path("root") / "sys").rename(host.path("sys"))


def forget_gpu_nodes(host: Host) -> None:
    """Neither sysfs nor the driver knows where two of the GPUs are."""
    for gpu in MACHINE.gpus[:2]:
        file = host.path("root") / "sys/bus/pci/devices" / gpu.bdf / "numa_node"
        file.resolve().write_text("-1\n")
    state = host.path("driver")
    lost = [
        nvml.fail(call, 3, gpu=gpu)
        for gpu in (0, 1)
        for call in ("nvmlDeviceGetMemoryAffinity", "nvmlDeviceGetCpuAffinityWithinScope")
    ]
    nvml.write_state(state, node.driver_state(MACHINE, *lost))


def own_by(manager: str, **metadata: Any) -> Callable[[Host], object]:
    zones = [{"name": "node-0", "type": "Node"}]
    body = {"metadata": {"name": NODE, **metadata}, "zones": zones}
    return lambda host: host.api.put("noderesourcetopologies", body, manager=manager)


def grant_all_but(*denied: str) -> Callable[[Host], object]:
    """Every verb of the default configuration but those that are written like this."""
    duties = {duty for access in ACCESS for duty in access.duties}
    rules = tuple(
        Rule(
            verbs=(access.verb,),
            resources=("/".join(filter(None, (access.resource, access.subresource))),),
            groups=(access.group,),
            namespaces=(access.namespace,) if access.namespace else (),
        )
        for access in needed(duties)
        if str(access) not in denied
    )
    own = Rule(
        verbs=("create",), resources=("selfsubjectaccessreviews",), groups=("authorization.k8s.io",)
    )
    user = User(name="system:serviceaccount:numalet-system:numalet", rules=(*rules, own))
    return lambda host: host.api.users.update({TOKEN: user})


def without_crd(host: Host) -> None:
    host.api.resources.remove(TOPOLOGIES)


def with_old_crd(host: Host) -> None:
    without_crd(host)
    host.api.resources.append(replace(TOPOLOGIES, versions=("v1alpha1",)))


def cgroup_v1(host: Host) -> None:
    fs = host.path("root") / "sys/fs"
    (fs / "cgroup").rename(host.path("cgroup"))
    files = {"cpuset.cpus": "0-127\n", "kubepods.slice/cpuset.cpus": "0-127\n"}
    cgroups.lay_out(fs / "cgroup/cpuset", files)


def serve_nri_by_another(host: Host) -> None:
    host.runtime.stop()

    def greet() -> None:
        peer, _ = listener.accept()
        with peer:
            peer.sendall(b"220 mail.example.org ESMTP\r\n" * 4)

    listener = host.stack.enter_context(socket.socket(socket.AF_UNIX))
    listener.bind(host.config.nri_socket)
    listener.listen()
    threading.Thread(target=greet, daemon=True).start()


def abandon(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()


def serve_status_by_another(host: Host) -> None:
    """The API server stands for any other program."""
    host.set(status_address=f"127.0.0.1:{host.api.port}")


def take_a_free_port(host: Host) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        host.set(status_address=f"127.0.0.1:{probe.getsockname()[1]}")


NO_ANSWER = "the API server does not answer us"
KUBELET_POD_LIST = '{"kind": "PodList", "items": [{}, {}]}'
DISTURBANCES = {
    "no sysfs": Disturbance(
        do=no_numa_folder,
        shows={
            "sysfs": (FAILED, 'no folder "sys"'),
            **all_skipped(NAMES[1:5], "the machine cannot be read"),
            "cgroups": (FAILED, "sys/fs/cgroup"),
        },
    ),
    "a distance that is no number": Disturbance(
        do=lambda host: (host.path("root") / "sys/devices/system/node/node0/distance").write_text(
            "near\n"
        ),
        shows={"sysfs": (WARNING, "node0/distance")},
    ),
    "the driver's library is not there": Disturbance(
        do=lambda host: host.set(nvml="/nowhere/libnvidia-ml.so.1"),
        shows={
            "gpu driver": (FAILED, "8 NVIDIA GPUs on the PCI bus; the GPU driver's library"),
            "gpus": (SKIPPED, "the driver does not answer"),
            "device nodes": (SKIPPED, "the driver does not answer"),
        },
    ),
    "the driver is not installed": Disturbance(
        do=lambda host: (
            (host.path("root") / "sys/module/nvidia/version").unlink(),
            host.set(nvml="/nowhere/libnvidia-ml.so.1"),
        ),
        shows={
            "gpu driver": (FAILED, "Install the NVIDIA driver"),
            "gpus": (SKIPPED, "the driver does not answer"),
            "device nodes": (SKIPPED, "the driver does not answer"),
        },
    ),
    "one GPU is lost": Disturbance(
        do=lambda host: host.drive(nvml.fail("*", 15, gpu=3)),
        shows={
            "gpus": (WARNING, "1 of 8 GPUs cannot be given out: GPU 3: "),
            "device nodes": (OK, "those of 7 GPUs"),
        },
    ),
    "two GPUs have one uuid": Disturbance(
        do=lambda host: host.drive(
            machine=replace(MACHINE, gpus=tuple(replace(g, uuid="GPU-1") for g in MACHINE.gpus))
        ),
        shows={
            "gpus": (FAILED, "two GPUs have the UUID GPU-1"),
            "gpu nodes": (SKIPPED, "the machine contradicts itself"),
            "device nodes": (SKIPPED, "the machine contradicts itself"),
        },
    ),
    "nobody knows where two GPUs are": Disturbance(
        do=forget_gpu_nodes,
        shows={"gpu nodes": (FAILED, f"2 GPUs is not known: 0 ({MACHINE.gpus[0].bdf}), 1 (")},
    ),
    "a device node is missing": Disturbance(
        do=lambda host: (host.path("root") / "dev/nvidia5").unlink(),
        shows={"device nodes": (FAILED, "/dev lacks nvidia5")},
    ),
    "CDI instead of device nodes": Disturbance(
        do=lambda host: host.set(cdi_kind="nvidia.com/gpu"),
        shows={"device nodes": (SKIPPED, "CDI names of nvidia.com/gpu")},
    ),
    "a marked GPU": Disturbance(
        do=write("faults.json", json.dumps({"index": ["7"], "uuid": ["GPU-x"]})),
        shows={"fault file": (OK, "GPU-x, index 7")},
    ),
    "a fault file that is none": Disturbance(
        do=write("faults.json", "[]"), shows={"fault file": (FAILED, "faults.json")}
    ),
    "kubelet ended in order": Disturbance(
        do=lambda host: host.kubelet.stop(),
        shows={
            "kubelet": (FAILED, "there is no such socket"),
            "pod resources": (SKIPPED, "kubelet does not run"),
        },
    ),
    "kubelet was killed": Disturbance(
        do=lambda host: host.kubelet.kill(),
        shows={
            "kubelet": (FAILED, "nobody serves this socket"),
            "pod resources": (SKIPPED, "kubelet does not run"),
        },
    ),
    "a kubelet socket of another type": Disturbance(
        do=lambda host: (host.kubelet.stop(), host.serve_datagrams(host.path("dp/kubelet.sock"))),
        shows={
            "kubelet": (FAILED, "Protocol wrong type for socket"),
            "pod resources": (SKIPPED, "kubelet does not run"),
        },
    ),
    "another plugin directory": Disturbance(
        do=lambda host: host.set(plugin_dir="/nowhere/device-plugins"),
        shows={
            "kubelet": (FAILED, "/nowhere/device-plugins/kubelet.sock: there is no such socket"),
            "plugin directory": (SKIPPED, "/nowhere/device-plugins"),
            "other plugins": (SKIPPED, "there is no plugin directory"),
        },
    ),
    "a kubelet socket that is a file": Disturbance(
        do=lambda host: host.set(pod_resources=host.config.kubelet_config),
        shows={"pod resources": (FAILED, "kubelet's List failed")},
    ),
    "kubelet's CPU manager is static": Disturbance(
        do=write("kubelet/cpu_manager_state", '{"policyName": "static", "entries": {}}'),
        shows={"cpu manager": (FAILED, "cpuManagerPolicy: none")},
    ),
    "a CPU manager's state that is none": Disturbance(
        do=write("kubelet/cpu_manager_state", "{"),
        shows={
            "cpu manager": (FAILED, "cpu_manager_state"),
            "topology manager": (SKIPPED, "kubelet's files cannot be read"),
        },
    ),
    "no files of kubelet's": Disturbance(
        do=lambda host: host.set(kubelet_dir="/nowhere", kubelet_config="/nowhere/config.yaml"),
        shows={
            "cpu manager": (WARNING, "Check kubelet_dir"),
            "topology manager": (WARNING, "Set kubelet_config"),
        },
    ),
    "kubelet aligns by itself": Disturbance(
        do=write(
            "kubelet/config.yaml",
            "topologyManagerPolicy: single-numa-node\ntopologyManagerScope: pod\n",
        ),
        shows={"topology manager": (WARNING, "single-numa-node per pod")},
    ),
    "another plugin for GPUs": Disturbance(
        do=lambda host: host.serve(host.path("dp/nvidia-gpu.sock")),
        shows={"other plugins": (WARNING, "nvidia-gpu.sock")},
    ),
    "a socket that another plugin left behind": Disturbance(
        do=lambda host: abandon(host.path("dp/nvidia-gpu.sock")), shows={}
    ),
    "another plugin, of network cards": Disturbance(
        do=lambda host: host.serve(host.path("dp/rdma.sock")),
        shows={"other plugins": (OK, "beside rdma.sock")},
    ),
    "cgroup v1": Disturbance(do=cgroup_v1, shows={"cgroups": (WARNING, "v1, systemd driver")}),
    "another cgroup driver": Disturbance(
        do=write("kubelet/config.yaml", "cgroupDriver: cgroupfs\n"),
        shows={"cgroups": (WARNING, "kubelet's configuration says cgroupfs")},
    ),
    "no kubepods": Disturbance(
        do=lambda host: (host.path("root") / "sys/fs/cgroup/kubepods.slice").rename(
            host.path("gone")
        ),
        shows={"cgroups": (FAILED, "there is no group kubepods")},
    ),
    "the container runtime was killed": Disturbance(
        do=lambda host: host.runtime.kill(), shows={"nri": (FAILED, "nobody serves the socket")}
    ),
    "no NRI": Disturbance(
        do=lambda host: host.runtime.stop(),
        shows={
            "nri": (WARNING, "through the cgroups"),
            "kubelet's pods": (SKIPPED, "kubelet_url is empty"),
        },
    ),
    "no NRI, and nobody who tells of pods": Disturbance(
        do=lambda host: (host.runtime.stop(), host.set(kube_api="")),
        shows={
            "nri": (FAILED, "nothing is pinned"),
            "kubelet's pods": (SKIPPED, "kubelet_url is empty"),
            "api server": (WARNING, "nothing is reported"),
            **all_skipped(CLUSTER[1:], "there is no API server to ask"),
        },
    ),
    "no NRI, and a kubelet that tells of pods": Disturbance(
        do=lambda host: (
            host.runtime.stop(),
            host.set(kubelet_url=host.api.url),
            host.api.fail(say(KUBELET_POD_LIST), concerns=lambda asked: asked.path == "/pods"),
        ),
        shows={
            "nri": (WARNING, "through the cgroups"),
            "kubelet's pods": (OK, "tells of 2 pods"),
            "access": (OK, "all 15 verbs"),
        },
    ),
    "no NRI, and a kubelet_url where nobody is": Disturbance(
        do=lambda host: (host.runtime.stop(), host.set(kubelet_url="http://127.0.0.1:1")),
        shows={
            "nri": (WARNING, "through the cgroups"),
            "kubelet's pods": (FAILED, "nobody listens there"),
            "access": (OK, "all 15 verbs"),
        },
    ),
    "an NRI socket of another program": Disturbance(
        do=serve_nri_by_another, shows={"nri": (FAILED, "nri.sock")}
    ),
    "the API server is gone": Disturbance(
        do=lambda host: host.api.stop(),
        shows={
            "api server": (FAILED, "cannot be asked"),
            **all_skipped(CLUSTER[1:], NO_ANSWER),
        },
    ),
    "the API server is ill": Disturbance(
        do=lambda host: host.api.fail(refuse(500)),
        shows={"api server": (FAILED, "500"), **all_skipped(CLUSTER[1:], NO_ANSWER)},
    ),
    "an API server that does not know the token": Disturbance(
        do=lambda host: host.api.users.update(other=User(name="somebody")),
        shows={"api server": (FAILED, "401"), **all_skipped(CLUSTER[1:], NO_ANSWER)},
    ),
    "a node of another name": Disturbance(
        do=lambda host: host.set(node_name="gpu-node-2"),
        shows={
            "node": (FAILED, "Is gpu-node-2 what Kubernetes calls this node?"),
            **all_skipped(CLUSTER[2:6], "the node cannot be read"),
        },
    ),
    "a node without the label": Disturbance(
        do=lambda host: host.put_node(metadata__labels={}),
        shows={"node label": (FAILED, f"kubectl label node {NODE} ack.node.gpu.schedule=topology")},
    ),
    "a startup taint": Disturbance(
        do=lambda host: host.put_node(
            spec={"taints": [{"key": "numalet.io/starting", "effect": "NoSchedule"}]}
        ),
        shows={"startup taint": (WARNING, "numalet.io/starting is still on the node")},
    ),
    "another resource of the same GPUs": Disturbance(
        do=lambda host: host.put_node(
            status__allocatable={"nvidia.com/gpu": "8", "aliyun.com/gpu-mem": "640", "cpu": "1"}
        ),
        shows={"gpu resources": (FAILED, "aliyun.com/gpu-mem: 640, nvidia.com/gpu: 8")},
    ),
    "a container runtime without NRI": Disturbance(
        do=lambda host: host.put_node(
            status__nodeInfo={"containerRuntimeVersion": "containerd://1.6.36"}
        ),
        shows={
            "node": (OK, "of unknown version"),
            "runtime version": (WARNING, "containerd 1.6.36 has no NRI"),
        },
    ),
    "no CRD": Disturbance(
        do=without_crd,
        shows={"crd": (FAILED, "is not there"), "report": (SKIPPED, "see crd")},
    ),
    "a CRD of an older version": Disturbance(
        do=with_old_crd,
        shows={
            "crd": (FAILED, "served as v1alpha1 only, not as v1alpha2"),
            "report": (SKIPPED, "see crd"),
        },
    ),
    "discovery that is ill": Disturbance(
        do=lambda host: host.api.fail(
            refuse(500), concerns=lambda asked: asked.path == "/apis/topology.node.k8s.io"
        ),
        shows={"crd": (FAILED, "500")},
    ),
    "Koordinator's Device, and no CRD for it": Disturbance(
        do=lambda host: host.set(koordinator_device="yes"),
        shows={
            "koordinator crd": (FAILED, "devices.scheduling.koordinator.sh is not served"),
            "access": (OK, "all 17 verbs"),
        },
    ),
    "Koordinator's Device, and a CRD for it": Disturbance(
        do=lambda host: (
            host.set(koordinator_device="yes"),
            host.api.resources.append(KOORDINATOR_DEVICES),
        ),
        shows={
            "koordinator crd": (OK, "devices.scheduling.koordinator.sh is served"),
            "access": (OK, "all 17 verbs"),
        },
    ),
    "all verbs, and no more": Disturbance(do=grant_all_but(), shows={}),
    "two verbs are not granted": Disturbance(
        do=grant_all_but("patch configmaps in kube-system", "create events"),
        shows={
            "access": (FAILED, "2 of 14 verbs that the agent needs are not granted: create eve")
        },
    ),
    "the node may not be read": Disturbance(
        do=grant_all_but("get nodes"),
        shows={
            "node": (FAILED, "403"),
            **all_skipped(CLUSTER[2:6], "the node cannot be read"),
            "access": (FAILED, "get nodes (whose the report is"),
        },
    ),
    "a report may not be read": Disturbance(
        do=grant_all_but("get noderesourcetopologies.topology.node.k8s.io"),
        shows={
            "access": (FAILED, "get noderesourcetopologies.topology.node.k8s.io"),
            "report": (FAILED, "see the finding access"),
        },
    ),
    "a report of another writer": Disturbance(
        do=own_by("nfd-topology-updater"),
        shows={"report": (WARNING, "it belongs to nfd-topology-updater")},
    ),
    "a report of Koordinator's": Disturbance(
        do=own_by("koordlet"), shows={"report": (OK, "it belongs to koordlet")}
    ),
    "no duties but the report": Disturbance(
        do=lambda host: host.set(ack_objects="no", startup_taint=""),
        shows={
            "startup taint": (SKIPPED, "startup_taint is empty"),
            "access": (OK, "all 10 verbs"),
        },
    ),
    "an agent that does not run": Disturbance(
        do=take_a_free_port, shows={"agent": (WARNING, "nobody listens at 127.0.0.1:")}
    ),
    "an agent that is not ready": Disturbance(
        do=lambda host: host.ready.append("kubelet does not read the devices"),
        shows={"agent": (WARNING, "not ready: kubelet does not read the devices")},
    ),
    "an agent that is stuck": Disturbance(
        do=lambda host: host.alive.append("the last pass began 100 s ago"),
        shows={"agent": (FAILED, "stuck: the last pass began 100 s ago")},
    ),
    "another program at the agent's address": Disturbance(
        do=serve_status_by_another, shows={"agent": (FAILED, "another program answers there")}
    ),
    "an agent that answers nowhere": Disturbance(
        do=lambda host: host.set(status_address=""),
        shows={"agent": (SKIPPED, "status_address does not tell")},
    ),
}


@pytest.mark.parametrize("name", DISTURBANCES)
def test_a_disturbance_shows_where_it_concerns_and_nowhere_else(name: str, host: Host) -> None:
    disturbance = DISTURBANCES[name]
    before = by_name(run_doctor(host.config))
    disturbance.do(host)
    findings = run_doctor(host.config)
    after = by_name(findings)
    changed = {name for name, finding in after.items() if before.get(name) != finding}
    assert changed == set(disturbance.shows)
    for name, (verdict, text) in disturbance.shows.items():
        finding = after[name]
        assert finding.verdict is verdict, finding
        assert text in finding.seen or text in finding.advice, finding
        assert bool(finding.advice) is (verdict in (WARNING, FAILED)), finding
    verdicts = {verdict for verdict, _ in disturbance.shows.values()}
    assert has_failed(findings) is (FAILED in verdicts)


# --- what hangs or breaks costs itself only -------------------------------------------------------


def test_an_api_server_that_hangs_is_not_waited_for_long(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clusterchecks, "_CALL_S", 0.2)
    host.api.fail(hang())
    finding = by_name(run_doctor(host.config))["api server"]
    assert (finding.verdict, "no answer within 0.2 s" in finding.seen) == (FAILED, True)


def test_a_group_of_checks_that_does_not_end_keeps_what_it_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    end = threading.Event()

    def hang_after_one(config: Config) -> Iterator[Finding]:
        yield Finding(name="first", verdict=OK, seen="it")
        end.wait()

    for name in ("check_machine", "check_pinning", "check_cluster", "check_agent"):
        monkeypatch.setattr(doctor, name, lambda config: iter(()))
    monkeypatch.setattr(doctor, "check_kubelet", hang_after_one)
    monkeypatch.setattr(doctor, "_ALL_S", 1.0)
    first, hung = run_doctor(Config())
    end.set()
    assert (first.name, hung.name, hung.verdict) == ("first", "kubelet checks", FAILED)
    assert "did not end within 1 s" in hung.seen


def test_a_bug_in_a_check_is_a_finding(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(config: Config) -> Iterator[Finding]:
        yield Finding(name="first", verdict=OK, seen="it")
        raise KeyError("nobody thought of it")

    monkeypatch.setattr(doctor, "check_pinning", check)
    findings = run_doctor(host.config)
    bug = by_name(findings)["pinning checks"]
    assert (bug.verdict, bug.seen) == (
        FAILED,
        "a bug in the check: KeyError: 'nobody thought of it'",
    )
    assert [f.name for f in findings][-len(CLUSTER) - 1 :] == [*CLUSTER, "agent"]


def test_a_host_with_nothing_at_all_is_told_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    nowhere = str(tmp_path / "nowhere")
    config = Config(
        root=nowhere,
        nvml=f"{nowhere}/libnvidia-ml.so.1",
        plugin_dir=nowhere,
        pod_resources=f"{nowhere}/pr.sock",
        fault_file=f"{nowhere}/faults.json",
        nri_socket=f"{nowhere}/nri.sock",
        kubelet_dir=nowhere,
        kubelet_config=f"{nowhere}/config.yaml",
        status_address="",
    )
    findings = run_doctor(config)
    assert [finding.name for finding in findings] == NAMES
    assert {finding.verdict for finding in findings if finding.name != "fault file"} == {
        WARNING,
        FAILED,
        SKIPPED,
    }
    assert capfd.readouterr() == ("", "")


# --- what is printed ------------------------------------------------------------------------------


def test_what_is_printed_has_a_line_for_each_finding_and_the_count(host: Host) -> None:
    host.runtime.kill()
    text = draw(run_doctor(host.config), colour=False)
    first = re.findall(r"^[✓!✗–] (\w+) +(\S+(?: \S+)*?)  +\S", text, re.MULTILINE)
    assert [name for _, name in first] == NAMES
    assert text.endswith(f"\n\n{len(NAMES) - 2} ok, 1 failed, 1 skipped\n")


def test_the_json_can_be_read_by_a_script(host: Host) -> None:
    data = json.loads(json.dumps(to_json(run_doctor(host.config))))
    assert data["ok"] is True
    assert data["counts"] == {"ok": len(NAMES) - 1, "warning": 0, "failed": 0, "skipped": 1}
    assert [finding["name"] for finding in data["findings"]] == NAMES
