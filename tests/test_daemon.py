"""`numalet run` as a process of its own, between a fake kubelet and a fake GPU driver.

Expected values are those of the described machine and of kubelet's books. Waits are for conditions;
their deadlines are for a machine that is slow.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from agent.fakes import node, nvml
from agent.fakes.kubelet import FakeKubelet, RefusedError
from tests import machines

RESOURCE = "aliyun.com/gpu"
MACHINE = machines.load("a800x8")
CUBE = machines.load("v100x8-cube")
UUIDS = [gpu.uuid for gpu in MACHINE.gpus]
DEADLINE_S = 30.0
END_S = 5.0
"""An agent is to end within 2 s; the rest is for a machine that is slow."""
ROOM = Path(__file__).parent.parent
NOT_LOADED = "the NVIDIA driver is not loaded (nvmlInitWithFlags)"
DEVICE_NODES = ("nvidiactl", "nvidia-uvm", *(f"nvidia{minor}" for minor in range(8)))
"""Those that exist; a host without nvidia-uvm-tools."""


def healthy(machine: node.Description = MACHINE) -> dict[str, tuple[str, tuple[int, ...]]]:
    """All devices as kubelet is to know them."""
    return {gpu.uuid: ("Healthy", (gpu.node,)) for gpu in machine.gpus}


class Agent:
    """The agent and all that it sees; a killed one can be started again.

    `state` is the text file of its GPU driver, which is not loaded before it is written.
    """

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        self.folder = folder
        self.state = folder / "driver.txt"
        self.faults = folder / "faults.json"
        self.plugin_dir = folder / "dp"
        self.pod_resources = folder / "pr.sock"
        self.log = folder / "agent.log"
        self.config = folder / "numalet.toml"
        self.options = {
            "plugin_dir": str(self.plugin_dir),
            "pod_resources": str(self.pod_resources),
            "fault_file": str(self.faults),
            "nri_socket": str(folder / "nri.sock"),
            "kubelet_dir": str(folder / "kubelet"),
            "kubelet_config": str(folder / "kubelet.yaml"),
            "status_address": f"127.0.0.1:{free_port()}",
            "period_s": 0.2,
            **options,
        }
        self.configure()
        self.log.touch()

    def configure(self, **options: Any) -> None:
        """Writes the configuration, with these changes."""
        self.options |= options
        lines = [f"{name} = {json.dumps(value)}\n" for name, value in self.options.items()]
        self.config.write_text("".join(lines))

    def start(self) -> "Agent":
        environment = os.environ | {nvml.ENVIRONMENT: str(self.state)}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "agent", "run", "--config", self.config],
                stderr=log,
                cwd=ROOM,
                env=environment,
            )
        return self

    def load_driver(self, machine: node.Description = MACHINE, *lines: str) -> None:
        nvml.write_state(self.state, node.driver_state(machine, *lines))

    def wait(self, is_met: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not is_met():
            assert time.monotonic() < deadline, self.log.read_text()[-3000:]
            time.sleep(0.02)

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        """Asks the agent to end; its exit code."""
        self.process.terminate()
        return self.process.wait(END_S)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    # --- what is seen of it ---

    def get(self, path: str, address: str | None = None) -> tuple[int, str]:
        """Status and text; 0 where nobody answers."""
        try:
            url = f"http://{address or self.options['status_address']}{path}"
            with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def metric(self, name: str, **labels: str) -> float:
        """0 for a series that is not there; the sum of those with these labels."""
        _, text = self.get("/metrics")
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def is_ready(self) -> bool:
        return self.get("/readyz") == (200, "ok\n")

    def wait_for_passes(self, count: int = 5) -> None:
        """Until so many more passes have ended."""
        name = "numalet_pass_duration_seconds_count"
        start = self.metric(name)
        self.wait(lambda: self.metric(name) >= start + count)

    def said(self, words: str) -> list[str]:
        """The lines of its log with these words, without date and level."""
        lines = self.log.read_text().splitlines()
        return [line.split(maxsplit=2)[-1] for line in lines if words in line]

    def sockets(self) -> list[str]:
        return [path.name for path in self.plugin_dir.glob("numalet-*.sock")]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


Make = Callable[..., Agent]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The host's files: its sysfs, and device nodes that are none of a GPU's."""
    root = node.lay_out(MACHINE, tmp_path_factory.mktemp("host"))
    (root / "dev").mkdir()
    for name in DEVICE_NODES:
        (root / "dev" / name).symlink_to("/dev/null")
    return root


@pytest.fixture
def make(root: Path, library: str, tmp_path: Path) -> Iterator[Make]:
    """An agent that is not started yet."""
    made = []

    def make(name: str = "agent", **options: Any) -> Agent:
        folder = tmp_path / name
        folder.mkdir()
        made.append(Agent(folder, {"root": str(root), "nvml": library, **options}))
        return made[-1]

    yield make
    for agent in made:
        if hasattr(agent, "process"):
            agent.kill()
            assert "Traceback" not in agent.log.read_text()


@pytest.fixture
def agent(make: Make) -> Agent:
    return make()


@pytest.fixture
def kubelet(agent: Agent) -> Iterator[FakeKubelet]:
    with FakeKubelet(agent.plugin_dir, agent.pod_resources) as kubelet:
        yield kubelet


@pytest.fixture
def ready(agent: Agent, kubelet: FakeKubelet) -> Agent:
    """An agent whose GPUs kubelet knows, all of them healthy."""
    agent.load_driver()
    agent.start()
    agent.wait(agent.is_ready)
    agent.wait(lambda: kubelet.devices(RESOURCE) == healthy())
    return agent


def unhealthy(kubelet: FakeKubelet) -> set[str]:
    devices = kubelet.devices(RESOURCE)
    return {device for device, (health, _) in devices.items() if health == "Unhealthy"}


# --- offering and giving out ----------------------------------------------------------------------


def test_the_whole_life_of_an_agent_as_it_is_seen_from_outside(
    agent: Agent, kubelet: FakeKubelet
) -> None:
    agent.configure(gpu_recovery_s=0)
    agent.start()
    # no driver yet
    agent.wait(lambda: agent.get("/readyz") == (503, f"{NOT_LOADED}\n"))
    assert agent.get("/healthz") == (200, "ok\n")
    assert agent.metric("numalet_driver_up") == 0
    assert kubelet.registrations == []
    assert agent.sockets() == []
    assert len(agent.said(f'gpu driver reason="{NOT_LOADED}"')) == 1
    # the driver comes, and kubelet is told
    agent.load_driver()
    agent.wait(lambda: kubelet.devices(RESOURCE) == healthy())
    agent.wait(agent.is_ready)
    assert agent.metric("numalet_driver_up") == 1
    assert agent.metric("numalet_kubelet_stream_open") == 1
    agent.wait(lambda: agent.metric("numalet_kubelet_registrations_total", result="ok") == 1)
    for where in ("0", "1"):
        assert agent.metric("numalet_gpus", node=where, health="healthy") == 4
        assert agent.metric("numalet_gpus", node=where, health="unhealthy") == 0
        assert agent.metric("numalet_gpus_allocated", node=where) == 0
    # a pod comes
    given = kubelet.admit("default/pod", "main", 2)
    (where,) = {str(gpu.node) for gpu in MACHINE.gpus if gpu.uuid in given}
    agent.wait(lambda: agent.metric("numalet_gpus_allocated", node=where) == 2)
    assert agent.metric("numalet_gpus_allocated") == 2
    assert agent.metric("numalet_rpc_duration_seconds_count", method="Allocate") == 1
    with pytest.raises(RefusedError, match="there is no device"):
        kubelet.allocate(["GPU-of-somebody-else"])
    assert agent.metric("numalet_rpc_errors_total") == 1
    refused = {"method": "Allocate", "code": "INVALID_ARGUMENT"}
    assert agent.metric("numalet_rpc_errors_total", **refused) == 1
    # kubelet goes and comes back
    kubelet.kill()
    agent.wait(lambda: agent.get("/readyz") == (503, "kubelet does not read the devices\n"))
    assert agent.metric("numalet_kubelet_stream_open") == 0
    assert agent.get("/healthz") == (200, "ok\n")
    kubelet.start()
    agent.wait(agent.is_ready)
    agent.wait(lambda: agent.metric("numalet_kubelet_registrations_total", result="ok") == 2)
    # the pod goes
    kubelet.remove("default/pod")
    agent.wait(lambda: agent.metric("numalet_gpus_allocated") == 0)
    # the end
    assert agent.end() == 0
    assert agent.sockets() == []
    assert agent.get("/healthz") == (0, "")
    assert kubelet.most_streams_open == 1
    assert agent.said("ending") == ["ending"]


def nvlinks(gpus: list[str]) -> int:
    """Those inside a set of GPUs of the cube."""
    places = [i for i, gpu in enumerate(CUBE.gpus) if gpu.uuid in gpus]
    words = [CUBE.links[i][j] for i, j in combinations(places, 2)]
    return sum(int(word[2:]) for word in words if word.startswith("NV"))


def nodes_of(gpus: list[str], machine: node.Description = CUBE) -> set[int]:
    return {gpu.node for gpu in machine.gpus if gpu.uuid in gpus}


def test_pods_get_the_best_linked_gpus_of_as_few_nodes_as_can_be(
    agent: Agent, kubelet: FakeKubelet, tmp_path: Path
) -> None:
    agent.configure(root=str(node.lay_out(CUBE, tmp_path / "cube")))
    agent.load_driver(CUBE)
    agent.start()
    agent.wait(lambda: kubelet.devices(RESOURCE) == healthy(CUBE))
    halves = [[gpu.uuid for gpu in CUBE.gpus if gpu.node == where] for where in (0, 1)]

    two = kubelet.admit("default/two", "main", 2)
    (where,) = nodes_of(two)
    best = max(nvlinks(list(pair)) for half in halves for pair in combinations(half, 2))
    assert nvlinks(two) == best == 2
    one = kubelet.admit("default/one", "main", 1)
    assert nodes_of(one) == {where}  # the other node stays whole
    four = kubelet.admit("default/four", "main", 4)
    assert four == sorted(halves[1 - where])
    last = kubelet.admit("default/last", "main", 1)
    assert sorted(two + one + last) == sorted(halves[where])
    with pytest.raises(RefusedError, match="Available: 0"):
        kubelet.admit("default/none", "main", 1)
    agent.wait(lambda: agent.metric("numalet_gpus_allocated") == 8)

    for pod in ("two", "one", "four", "last"):
        kubelet.remove(f"default/{pod}")
    assert kubelet.admit("default/all", "main", 8) == sorted(gpu.uuid for gpu in CUBE.gpus)


def test_how_a_container_gets_at_its_gpus(ready: Agent, kubelet: FakeKubelet) -> None:
    answer = kubelet.allocate([UUIDS[5], UUIDS[1]])
    gpus = f"{UUIDS[1]},{UUIDS[5]}"
    assert answer.envs == {"NVIDIA_VISIBLE_DEVICES": gpus}
    assert answer.annotations == {"numalet.io/gpus": gpus, "numalet.io/nodes": "0-1"}
    paths = {f"/dev/{name}" for name in ("nvidia1", "nvidia5", "nvidiactl", "nvidia-uvm")}
    assert {spec.host_path for spec in answer.devices} == paths
    assert {spec.container_path for spec in answer.devices} == paths
    assert {spec.permissions for spec in answer.devices} == {"rw"}
    assert list(answer.cdi_devices) == []
    assert kubelet.allocate([UUIDS[1], UUIDS[5]]) == answer


def test_gpus_that_kubelet_and_containers_know_by_index(agent: Agent, kubelet: FakeKubelet) -> None:
    agent.configure(device_ids="index", visible_devices="index", cdi_kind="nvidia.com/gpu")
    agent.load_driver()
    agent.start()
    agent.wait(
        lambda: (
            kubelet.devices(RESOURCE)
            == {str(i): ("Healthy", (gpu.node,)) for i, gpu in enumerate(MACHINE.gpus)}
        )
    )
    four = kubelet.admit("default/pod", "main", 4)
    assert four in (["0", "1", "2", "3"], ["4", "5", "6", "7"])
    answer = kubelet.answer("default/pod", "main")
    assert [one.name for one in answer.cdi_devices] == [f"nvidia.com/gpu={i}" for i in four]
    assert answer.annotations["numalet.io/gpus"] == ",".join(UUIDS[int(i)] for i in four)
    assert not answer.envs
    agent.wait(lambda: agent.metric("numalet_gpus_allocated") == 4)


def test_kubelet_is_answered_while_the_driver_hangs(ready: Agent, kubelet: FakeKubelet) -> None:
    nvml.add_line(ready.state, nvml.hang("*"))
    for i in range(4):
        assert len(kubelet.admit(f"default/pod-{i}", "main", 2)) == 2
    assert ready.get("/healthz") == (200, "ok\n")
    ready.wait(lambda: ready.metric("numalet_gpus_allocated") == 8)
    assert nvml.hang("*") in ready.state.read_text()
    assert unhealthy(kubelet) == set()
    nvml.remove_line(ready.state, nvml.hang("*"))


# --- health ---------------------------------------------------------------------------------------


def test_a_gpu_that_is_lost_is_unhealthy_until_it_is_back(
    agent: Agent, kubelet: FakeKubelet
) -> None:
    agent.configure(gpu_recovery_s=0)
    agent.load_driver()
    agent.start()
    agent.wait(lambda: kubelet.devices(RESOURCE) == healthy())
    held = kubelet.admit("default/pod", "main", 4)
    lost = next(i for i, uuid in enumerate(UUIDS) if uuid not in held)
    nvml.add_line(agent.state, nvml.fail("*", 15, lost))
    agent.wait(lambda: unhealthy(kubelet) == {UUIDS[lost]})
    assert set(kubelet.devices(RESOURCE)) == set(UUIDS)
    agent.wait(lambda: agent.metric("numalet_gpu_healthy", gpu=UUIDS[lost]) == 0)
    assert agent.metric("numalet_gpu_healthy") == 7
    with pytest.raises(RefusedError, match="Requested: 4, Available: 3"):
        kubelet.admit("default/next", "main", 4)
    nvml.remove_line(agent.state, nvml.fail("*", 15, lost))
    agent.wait(lambda: unhealthy(kubelet) == set())
    assert len(kubelet.admit("default/next", "main", 4)) == 4
    assert (len(kubelet.registrations), kubelet.updates) == (1, 3)


def test_the_driver_can_be_asked_anew_while_kubelet_is_spoken_with(
    ready: Agent, kubelet: FakeKubelet
) -> None:
    for i, uuid in enumerate(UUIDS):  # a new session sees at once who is lost now
        ready.load_driver(MACHINE, nvml.fail("*", 15, i))
        ready.configure(gpu_recovery_s=0, driver_timeout_s=20 + i)
        ready.send(signal.SIGHUP)
        ready.wait(lambda lost=uuid: unhealthy(kubelet) == {lost})
    assert ready.said("gpu driver reason=") == []
    assert len(kubelet.registrations) == 1


def test_xids_are_counted_and_those_that_matter_make_a_gpu_unhealthy(
    ready: Agent, kubelet: FakeKubelet
) -> None:
    nvml.add_line(ready.state, nvml.event(2, 31))  # ignored: a program's
    nvml.add_line(ready.state, nvml.event(6, 79))
    ready.wait(lambda: unhealthy(kubelet) == {UUIDS[6]})
    counted = "numalet_gpu_xid_errors_total"
    ready.wait(lambda: ready.metric(counted, gpu=UUIDS[6], xid="79") == 1)
    assert ready.metric(counted, gpu=UUIDS[2], xid="31") == 1
    assert ready.metric(counted) == 2
    assert len(ready.said(f"gpu unhealthy gpu={UUIDS[6]}")) == 1


def test_an_administrators_marks_count_at_once_and_broken_ones_change_nothing(
    ready: Agent, kubelet: FakeKubelet
) -> None:
    ready.faults.write_text(json.dumps({"index": ["0"], "uuid": [UUIDS[7], "GPU-elsewhere"]}))
    ready.wait(lambda: unhealthy(kubelet) == {UUIDS[0], UUIDS[7]})
    ready.faults.write_text('{"index": ')
    ready.wait(lambda: len(ready.said("fault file reason=")) == 1)
    ready.wait_for_passes()
    assert unhealthy(kubelet) == {UUIDS[0], UUIDS[7]}
    (line,) = ready.said("fault file reason=")
    assert str(ready.faults) in line
    assert ready.metric("numalet_pass_errors_total", kind="ConfigError") >= 5
    ready.faults.write_text('{"index": [1]}')
    ready.wait(lambda: unhealthy(kubelet) == {UUIDS[1]})
    ready.wait(lambda: len(ready.said("fault file is well again")) == 1)
    ready.faults.unlink()
    ready.wait(lambda: unhealthy(kubelet) == set())
    assert len(kubelet.registrations) == 1


def test_kubelets_list_of_holders_that_is_missing_for_long(
    agent: Agent, kubelet: FakeKubelet
) -> None:
    path, kubelet.pod_resources = kubelet.pod_resources, None
    kubelet.restart()
    agent.pod_resources.unlink()
    agent.load_driver()
    agent.start()
    agent.wait(agent.is_ready)
    kubelet.admit("default/pod", "main", 4)
    agent.wait_for_passes()
    (line,) = agent.said("pod resources reason=")
    assert str(agent.pod_resources) in line
    assert agent.metric("numalet_pass_errors_total", kind="KubeletError") >= 5
    assert agent.metric("numalet_gpus_allocated") == 0
    kubelet.pod_resources = path
    kubelet.restart()
    agent.wait(lambda: agent.metric("numalet_gpus_allocated") == 4)
    assert len(agent.said("pod resources is well again")) == 1


# --- signals --------------------------------------------------------------------------------------


def test_sigterm_ends_the_agent_while_the_driver_hangs_from_the_start(
    agent: Agent, kubelet: FakeKubelet
) -> None:
    agent.load_driver(MACHINE, nvml.hang("*"))
    agent.start()
    agent.wait(lambda: agent.get("/readyz") == (503, "the machine is not read yet\n"))
    children = psutil.Process(agent.process.pid).children()
    assert agent.end() == 0
    agent.wait(lambda: not any(child.is_running() for child in children))


@pytest.mark.parametrize("gate", ["may_dial", "may_answer"])
def test_sigterm_ends_the_agent_while_kubelet_does_not_answer_register(
    agent: Agent, kubelet: FakeKubelet, gate: str
) -> None:
    getattr(kubelet, gate).clear()
    agent.load_driver()
    agent.start()
    kubelet.wait_for(lambda: len(kubelet.registrations) == 1, DEADLINE_S)
    assert agent.end() == 0
    assert agent.sockets() == []


def test_sigint_ends_the_agent_too(ready: Agent) -> None:
    nvml.add_line(ready.state, nvml.hang("*"))
    ready.send(signal.SIGINT)
    assert ready.process.wait(END_S) == 0
    assert ready.sockets() == []


def test_sighup_reads_the_configuration_anew(ready: Agent, kubelet: FakeKubelet) -> None:
    nvml.add_line(ready.state, nvml.event(3, 94))
    ready.wait(lambda: unhealthy(kubelet) == {UUIDS[3]})
    marks = ready.folder / "marks.json"
    marks.write_text(json.dumps({"index": [5]}))
    old = ready.options["status_address"]
    ready.configure(
        gpu_recovery_s=0,
        fault_file=str(marks),
        status_address=f"127.0.0.1:{free_port()}",
        log_level="debug",
    )
    ready.send(signal.SIGHUP)
    ready.wait(lambda: unhealthy(kubelet) == {UUIDS[5]})  # 3 was sound, 5 is marked
    ready.wait(ready.is_ready)
    assert ready.get("/readyz", old) == (0, "")
    assert ready.said("configuration read") == ["configuration read changed=True"]
    assert (len(kubelet.registrations), kubelet.most_streams_open) == (1, 1)
    assert ready.metric("numalet_kubelet_registrations_total", result="ok") == 1

    ready.configure(device_ids="index")
    ready.send(signal.SIGHUP)
    ready.wait(lambda: set(kubelet.devices(RESOURCE)) == set("01234567"))
    ready.wait(ready.is_ready)
    assert (len(kubelet.registrations), kubelet.most_streams_open) == (2, 1)
    assert unhealthy(kubelet) == {"5"}


BAD_OPTIONS: dict[str, dict[str, Any]] = {
    "a value without sense": {"period_s": "often", "fault_file": "/nowhere"},
    "an option that there is not": {"perod_s": 1, "fault_file": "/nowhere"},
    "a plugin directory that is none": {"plugin_dir": "/dev/null", "fault_file": "/nowhere"},
    "an address of somebody else": {"status_address": "127.0.0.1:9", "fault_file": "/nowhere"},
}


@pytest.fixture
def somebody(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Listens at the address that is somebody else's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setitem(BAD_OPTIONS["an address of somebody else"], "status_address", address)
        yield


def test_sighup_with_a_bad_configuration_changes_nothing(
    ready: Agent, kubelet: FakeKubelet, somebody: None
) -> None:
    ready.faults.write_text(json.dumps({"index": [5]}))
    ready.wait(lambda: unhealthy(kubelet) == {UUIDS[5]})
    for count, bad in enumerate(BAD_OPTIONS.values(), 1):
        good = ready.options.copy()
        ready.configure(**bad)
        ready.options = good
        ready.send(signal.SIGHUP)
        ready.wait(lambda n=count: len(ready.said("configuration is not changed reason=")) == n)
        ready.wait(ready.is_ready)
        ready.wait(lambda: unhealthy(kubelet) == {UUIDS[5]})
    assert ready.process.poll() is None
    assert kubelet.most_streams_open == 1
    assert len(kubelet.admit("default/pod", "main", 4)) == 4


def test_an_agent_that_is_killed_and_started_again_knows_all_that_it_knew(
    ready: Agent, kubelet: FakeKubelet
) -> None:
    first = kubelet.admit("default/first", "main", 2)
    ready.wait(lambda: ready.metric("numalet_gpus_allocated") == 2)
    children = psutil.Process(ready.process.pid).children()
    ready.kill()
    ready.wait(lambda: unhealthy(kubelet) == set(UUIDS))
    ready.wait(lambda: not any(child.is_running() for child in children))
    assert len(ready.sockets()) == 1  # nobody took it away
    ready.start()
    ready.wait(lambda: kubelet.devices(RESOURCE) == healthy())
    ready.wait(lambda: ready.metric("numalet_gpus_allocated") == 2)
    assert len(ready.sockets()) == 1
    second = kubelet.admit("default/second", "main", 4)
    assert nodes_of(first, MACHINE).isdisjoint(nodes_of(second, MACHINE))
    assert kubelet.most_streams_open == 1


# --- starts that are impossible -------------------------------------------------------------------


@pytest.mark.parametrize("options", BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_a_start_that_is_impossible_is_one_sentence_and_exit_code_2(
    agent: Agent, somebody: None, options: dict[str, Any]
) -> None:
    agent.configure(**options)
    agent.start()
    assert agent.process.wait(DEADLINE_S) == 2
    lines = agent.log.read_text().splitlines()
    (sentence,) = (line for line in lines if not re.match(r"\d{4}-", line))
    assert sentence.startswith("numalet: ")


def test_a_configuration_that_is_not_there(agent: Agent) -> None:
    agent.config.unlink()
    agent.start()
    assert agent.process.wait(DEADLINE_S) == 2
    sentence = f"numalet: {agent.config}: cannot be read: No such file or directory\n"
    assert agent.log.read_text() == sentence


def test_a_second_agent_gives_way_to_the_first(
    ready: Agent, kubelet: FakeKubelet, make: Make
) -> None:
    second = make("second", plugin_dir=str(ready.plugin_dir))
    second.load_driver()
    second.start()
    assert second.process.wait(DEADLINE_S) == 2
    (sentence,) = second.said("numalet: ")
    assert sentence.endswith("another numalet serves there")
    assert ready.process.poll() is None
    assert ready.is_ready()
    assert len(kubelet.registrations) == 1
    assert len(kubelet.admit("default/pod", "main", 8)) == 8
