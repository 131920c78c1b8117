"""`numalet run` as a process that pins: between a fake kubelet, a fake driver, a fake container
runtime and a tree of cgroups.

The machine has two nodes of four cores with two threads and two GPUs each: CPUs 0-3,8-11 and
4-7,12-15. Core 0,8 is reserved. Expected CPUs are worked out by hand from the design's rules.
"""

import json
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from agent.core.bitmap import Bitmap
from agent.fakes import node
from agent.fakes.kubelet import FakeKubelet
from agent.fakes.runtime import CallFailedError, FakeRuntime
from agent.proto import nri_pb2 as pb
from tests.test_daemon import RESOURCE, Agent
from tests.test_pinning import ALL, PIN, UNPINNED, Host, cpus, make_host, policy, spec_of

MACHINE = node.describe(
    {
        "model": "NVIDIA A800-SXM4-80GB",
        "device": "0x20f3",
        "gpu_memory_gib": 80,
        "links": "NV8",
        "gpus": [
            {"bdf": f"0000:{bus}:00.0", "node": place // 2}
            for place, bus in enumerate(("1a", "1f", "9b", "a0"))
        ],
        "nodes": [
            {"id": 0, "cpus": "0-3,8-11", "socket": 0, "memory_gib": 64, "distances": [10, 20]},
            {"id": 1, "cpus": "4-7,12-15", "socket": 1, "memory_gib": 64, "distances": [20, 10]},
        ],
    },
    "small",
)
NODE_OF = {gpu.uuid: gpu.node for gpu in MACHINE.gpus}
FOUR = {0: cpus("1-2,9-10"), 1: cpus("4-5,12-13")}
"""The first four CPUs that are free on each node: two whole cores."""
ME = "10-numalet"


@dataclass(slots=True)
class Cluster:
    """A node with all that runs on it. Ids of containers are those of their pods with `_main`."""

    agent: Agent
    kubelet: FakeKubelet
    runtime: FakeRuntime
    host: Host
    gpus: dict[str, list[str]] = field(default_factory=dict)

    def start(self) -> None:
        self.agent.start()
        self.agent.wait(self.is_asked)

    def is_asked(self) -> bool:
        return self.runtime.plugins == [ME]

    def run(self, name: str, count: int, gpus: int = 0, **annotations: str) -> pb.Container:
        """A pinned pod with one container, as kubelet and the runtime start it."""
        return self.start_pod(name, count, gpus, PIN | annotations)

    def start_pod(
        self, name: str, count: int, gpus: int, annotations: dict[str, str]
    ) -> pb.Container:
        if gpus:
            self.agent.wait(lambda: len(self.kubelet.devices(RESOURCE)) == len(NODE_OF))
            self.gpus[name] = self.kubelet.admit(f"ns/{name}", "main", gpus)
        resources = amounts(count)
        self.runtime.run_pod(
            pb.PodSandbox(
                id=f"sandbox-{name}",
                name=name,
                uid=name,
                namespace="ns",
                pid=7,
                annotations=annotations,
                linux=pb.LinuxPodSandbox(pod_resources=resources),
            )
        )
        self.host.make(f"pod{name}", quota_us=count * 100_000)
        return self.create(name, count)

    def create(self, name: str, count: int, id_: str = "") -> pb.Container:
        """A container of a pod that is there, with the GPUs that its pod was given."""
        answer = self.kubelet.answer(f"ns/{name}", "main") if name in self.gpus else None
        container = pb.Container(
            id=id_ or f"{name}_main",
            pod_sandbox_id=f"sandbox-{name}",
            name="main",
            annotations=dict(answer.annotations) if answer else {},
            env=[f"{key}={value}" for key, value in answer.envs.items()] if answer else [],
            linux=pb.LinuxContainer(
                resources=amounts(count),
                devices=[pb.LinuxDevice(path="/dev/nvidia0")] if answer else [],
            ),
        )
        created = self.runtime.create(container)
        cpu = created.linux.resources.cpu
        self.host.make(f"pod{name}/{container.id}", cpu.cpus, cpu.quota.value, cpu.mems)
        self.runtime.start_container(container.id)
        return created

    def end(self, name: str) -> None:
        """The pod is gone, with all that it had."""
        for one in list(self.runtime.containers.values()):
            if one.pod_sandbox_id == f"sandbox-{name}":
                self.runtime.remove_container(one.id)
        self.runtime.remove_pod(f"sandbox-{name}")
        if self.gpus.pop(name, None):
            self.kubelet.remove(f"ns/{name}")
        shutil.rmtree(self.host.file(f"pod{name}", "cpuset.cpus").parent)

    def has(self, container_id: str) -> Bitmap:
        """The cpuset that the runtime has for a container."""
        return cpus(self.runtime.containers[container_id].linux.resources.cpu.cpus)

    def wait_for_pool(self, pool: Bitmap) -> None:
        self.agent.wait(lambda: self.pools() == {str(pool)})

    def pools(self) -> set[str]:
        """What everybody else runs on."""
        return {str(self.host.effective(path)) for path in UNPINNED}

    def metric(self, name: str, **labels: str) -> float:
        return self.agent.metric(f"numalet_{name}", **labels)


def amounts(count: int) -> pb.LinuxResources:
    """What kubelet asks of the runtime for whole CPUs and 1 GiB."""
    cpu = pb.LinuxCPU(
        shares={"value": count * 1024}, quota={"value": count * 100_000}, period={"value": 100_000}
    )
    return pb.LinuxResources(cpu=cpu, memory=pb.LinuxMemory(limit={"value": 1 << 30}))


@pytest.fixture
def cluster(library: str, tmp_path: Path) -> Iterator[Cluster]:
    """A node whose agent is not started yet, with the unpinned pods of UNPINNED."""
    host = make_host(node.lay_out(MACHINE, tmp_path / "host"), 2)
    (host.root / "dev").mkdir()
    folder = tmp_path / "agent"
    folder.mkdir()
    options = {
        "root": str(host.root),
        "nvml": library,
        "nri_socket": str(tmp_path / "nri.sock"),
        "kubelet_dir": str(folder),
        "kubelet_config": str(folder / "config.yaml"),
        "reserved_cpus": "0,8",
    }
    agent = Agent(folder, options)
    agent.load_driver(MACHINE)
    runtime = FakeRuntime(tmp_path / "nri.sock")
    with FakeKubelet(agent.plugin_dir, agent.pod_resources) as kubelet:
        try:
            with runtime:
                yield Cluster(agent, kubelet, runtime, host)
        finally:
            if hasattr(agent, "process"):
                agent.kill()
    assert "Traceback" not in agent.log.read_text()


@pytest.fixture
def pinning(cluster: Cluster) -> Cluster:
    """A node whose agent is asked by the container runtime."""
    cluster.start()
    return cluster


# --- what pods get --------------------------------------------------------------------------------


def test_the_life_of_pinned_pods(pinning: Cluster) -> None:
    single = policy("SingleNUMANode")
    # one pod, beside its GPUs from the first instruction
    first = pinning.run("a", 4, 2, **single).linux.resources.cpu
    (where,) = {NODE_OF[gpu] for gpu in pinning.gpus["a"]}
    own = FOUR[where]
    assert (cpus(first.cpus), first.mems, first.quota.value) == (own, str(where), -1)
    pinning.wait_for_pool(ALL - own)
    # another, on the other node
    second = pinning.run("d", 4, 2, **single).linux.resources.cpu
    other = FOUR[1 - where]
    assert (cpus(second.cpus), second.mems) == (other, str(1 - where))
    pinning.wait_for_pool(ALL - own - other)
    # none is left for a third, which is told why
    with pytest.raises(CallFailedError) as refusal:
        pinning.run("c", 6, **single)
    assert "SingleNUMANode" in str(refusal.value)
    assert "asked 6 CPUs" in str(refusal.value)
    assert "node 0 (single) has 2 free CPUs, node 1 (single) has 4" in str(refusal.value)
    assert "c_main" not in pinning.runtime.containers
    assert pinning.pools() == {str(ALL - own - other)}
    # nobody takes away what they have
    pinning.runtime.update("a_main", pb.LinuxResources(cpu=pb.LinuxCPU(cpus="0-15", mems="0-1")))
    assert pinning.has("a_main") == own
    # the kernel has what was asked for
    assert pinning.host.effective("poda/a_main") == own
    assert pinning.host.effective("podd/d_main") == other
    assert pinning.host.quota("poda/a_main") == "max"
    pinning.agent.wait(lambda: pinning.host.quota("poda") == "max")
    # each gives back what it had
    pinning.end("c")
    pinning.end("a")
    pinning.wait_for_pool(ALL - other)
    pinning.end("d")
    pinning.wait_for_pool(ALL)
    assert pinning.metric("cpuset_drifts_total") == 0
    assert pinning.metric("pinning_path", path="nri") == 1
    assert pinning.runtime.lost == []


def test_what_somebody_else_wrote_is_put_right(pinning: Cluster) -> None:
    pinning.run("a", 4, 2)
    own = pinning.has("a_main")
    pinning.wait_for_pool(ALL - own)
    for path in ("poda", "poda/a_main", "burstable"):
        pinning.host.make(path, "0-15")
    pinning.start_pod("other", 1, 0, {})  # something happens
    pinning.agent.wait(lambda: pinning.host.effective("poda/a_main") == own)
    pinning.wait_for_pool(ALL - own)
    pinning.agent.wait(lambda: pinning.metric("cpuset_drifts_total") == 1)
    assert pinning.agent.said("drift") == ["drift repaired container=ns/a/main"]


SPEC_KEY = "scheduling.alibabacloud.com/numa-topology-spec"
NONSENSE: dict[str, tuple[dict[str, str], int, str]] = {
    "a spec that is no JSON": (PIN | {SPEC_KEY: "{"}, 2, SPEC_KEY),
    "a policy that is none": (PIN | policy("Sometimes"), 2, '"Sometimes"'),
    "no whole CPUs": (PIN, 0, "whole CPUs"),
    "a huge spec": (PIN | {SPEC_KEY: "x" * 100_000}, 2, SPEC_KEY),
    "more CPUs than there are": (PIN, 99, "99 CPUs"),
}


def test_pods_that_ask_for_nonsense_are_told_so_and_the_others_go_on(pinning: Cluster) -> None:
    for number, (name, (annotations, count, words)) in enumerate(NONSENSE.items()):
        with pytest.raises(CallFailedError) as refusal:
            pinning.start_pod(f"bad{number}", count, 0, annotations)
        assert words in str(refusal.value), name
        assert len(str(refusal.value)) < 1000, name
    created = pinning.start_pod("ignored", 2, 0, {"cpuset-scheduler": "yes"})
    assert created.linux.resources.cpu.cpus == ""
    assert pinning.run("good", 4, 2).linux.resources.cpu.cpus
    assert pinning.runtime.lost == []


def test_at_warn_pods_run_where_everybody_runs(cluster: Cluster) -> None:
    cluster.agent.configure(on_unsatisfied="warn")
    cluster.start()
    cluster.run("a", 4, 2)
    pool = ALL - cluster.has("a_main")
    created = cluster.run("big", 99)
    assert created.linux.resources.cpu.cpus == ""
    assert created.linux.resources.cpu.quota.value == 99 * 100_000
    cluster.wait_for_pool(pool)
    cluster.agent.wait(lambda: cluster.host.effective("podbig/big_main") == pool)
    (line,) = cluster.agent.said("not pinned")
    assert "pod=ns/big" in line
    assert "99 CPUs" in line


# --- ends and restarts ----------------------------------------------------------------------------


def test_an_agent_that_was_killed_changes_nothing_for_who_runs(pinning: Cluster) -> None:
    pinning.run("a", 4, 2)
    pinning.run("d", 2, 1)
    before = {id_: pinning.has(id_) for id_ in ("a_main", "d_main")}
    held = before["a_main"] | before["d_main"]
    pinning.wait_for_pool(ALL - held)
    pinning.agent.kill()
    pinning.runtime.wait_for(lambda: pinning.runtime.plugins == [])
    late = pinning.run("late", 2)  # nobody pins it
    assert late.linux.resources.cpu.cpus == ""
    assert pinning.pools() == {str(ALL - held)}
    pinning.start()
    assert {id_: pinning.has(id_) for id_ in before} == before
    own = pinning.has("late_main")
    assert len(own) == 2
    assert not own & (held | cpus("0,8"))
    pinning.host.make("podlate/late_main", str(own))  # as the runtime updates it
    pinning.wait_for_pool(ALL - held - own)
    pinning.runtime.stop_container("a_main")
    again = pinning.create("a", 4, "a_again")
    assert cpus(again.linux.resources.cpu.cpus) == before["a_main"]
    assert pinning.run("new", 2).linux.resources.cpu.cpus
    assert not pinning.has("new_main") & (held | own)


@pytest.mark.parametrize(
    "end",
    [
        pytest.param(FakeRuntime.kill, id="killed"),
        pytest.param(
            FakeRuntime.stop,
            id="stopped, its socket removed",
        ),
    ],
)
def test_while_the_runtime_is_away_all_stays_as_it_is(
    pinning: Cluster, end: Callable[[FakeRuntime], None]
) -> None:
    pinning.run("a", 4, 2)
    own = pinning.has("a_main")
    pinning.wait_for_pool(ALL - own)
    end(pinning.runtime)
    pinning.agent.wait(lambda: bool(pinning.agent.said("no container runtime")))
    pinning.agent.wait_for_passes(5)
    assert pinning.pools() == {str(ALL - own)}
    pinning.runtime.start()
    pinning.agent.wait(pinning.is_asked)
    assert pinning.has("a_main") == own
    assert not cpus(pinning.run("d", 4, 2).linux.resources.cpu.cpus) & own
    pinning.wait_for_pool(ALL - own - pinning.has("d_main"))
    assert pinning.metric("cpuset_drifts_total") == 0


@pytest.mark.parametrize("synchronized", [True, False], ids=["asked", "still to be asked"])
def test_the_end_while_the_runtime_is_connected(cluster: Cluster, synchronized: bool) -> None:
    if synchronized:
        cluster.start()
    else:
        cluster.runtime.may_synchronize.clear()
        cluster.agent.start()
        cluster.agent.wait(lambda: bool(cluster.runtime.masks))
    assert cluster.agent.end() == 0
    cluster.runtime.wait_for(lambda: cluster.runtime.plugins == [])
    assert cluster.agent.said("ending") == ["ending"]


# --- who pins -------------------------------------------------------------------------------------


def test_where_kubelet_pins_the_agent_only_watches(cluster: Cluster) -> None:
    state = cluster.agent.folder / "cpu_manager_state"
    state.write_text(json.dumps({"policyName": "static", "defaultCpuSet": "0-15", "checksum": 1}))
    cluster.host.make("burstable", "3")
    cluster.agent.start()
    cluster.agent.wait(lambda: cluster.metric("pinning_path", path="none") == 1)
    cluster.agent.wait_for_passes(3)
    assert cluster.runtime.registrations == []
    assert cluster.host.read("burstable") == "3"
    (line,) = cluster.agent.said("nothing is pinned")
    assert "static" in line
    assert cluster.run("a", 4, 2).linux.resources.cpu.cpus == ""
    # an administrator turns it off
    state.write_text(json.dumps({"policyName": "none", "defaultCpuSet": "", "checksum": 1}))
    cluster.agent.send(signal.SIGHUP)
    cluster.agent.wait(cluster.is_asked)
    assert cluster.has("a_main") in FOUR.values()
    cluster.wait_for_pool(ALL - cluster.has("a_main"))
    assert cluster.metric("pinning_path", path="nri") == 1


class Answer(BaseHTTPRequestHandler):
    """Kubelet's list of pods."""

    server: "Pods"

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"items": self.server.pods}).encode())

    def log_message(self, *_: object) -> None:
        """Says nothing."""


class Pods(ThreadingHTTPServer):
    """What kubelet tells at /pods."""

    pods: list[object]


@pytest.fixture
def pods() -> Iterator[Pods]:
    server = Pods(("127.0.0.1", 0), Answer)
    server.pods = []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_without_a_runtime_that_asks_the_cgroups_are_written(cluster: Cluster, pods: Pods) -> None:
    cluster.runtime.stop()
    url = f"http://127.0.0.1:{pods.server_address[1]}"
    cluster.agent.configure(kubelet_url=url)
    cluster.agent.start()
    cluster.agent.wait(lambda: cluster.metric("pinning_path", path="cgroup") == 1)
    cluster.agent.wait(lambda: len(cluster.kubelet.devices(RESOURCE)) == len(NODE_OF))
    (gpu,) = cluster.kubelet.admit("ns/a", "main", 1)
    own = FOUR[NODE_OF[gpu]]
    cluster.host.make("poda", quota_us=400_000)
    cluster.host.make("poda/a_main", quota_us=400_000)
    pods.pods = [spec_of("a")]
    cluster.agent.wait(lambda: cluster.host.effective("poda/a_main") == own)
    cluster.wait_for_pool(ALL - own)
    cluster.agent.wait(lambda: cluster.host.quota("poda/a_main") == "max")
    # another agent finds it there, and then notices by itself who is gone
    cluster.agent.kill()
    cluster.agent.configure(period_s=60)
    cluster.agent.start()
    cluster.agent.wait(lambda: bool(cluster.agent.said("adopt pod=ns/a")))
    assert cluster.host.read("poda/a_main") == str(own)
    pods.pods = []
    cluster.kubelet.remove("ns/a")
    shutil.rmtree(cluster.host.file("poda", "cpuset.cpus").parent)
    cluster.wait_for_pool(ALL)
    assert cluster.metric("cpuset_drifts_total") == 0
