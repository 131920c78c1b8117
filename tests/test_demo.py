"""`numalet demo` as people call it: what it shows, when it says that a promise is broken, and that
nothing is left of it.

A broken promise needs a broken agent: the real one with a bug, or with an option that takes the
promise back; or a stand-in whose state was tampered with after the fact.
"""

import argparse
import io
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings

from agent.core.bitmap import Bitmap
from agent.core.report import PLURAL
from agent.core.schema import parse_machine, to_json
from agent.core.topology import Core, Machine, NodeSource
from agent.demo import add_arguments, command, host, promises, run_demo, story
from agent.demo.ack import expect_of_ack
from agent.demo.node import Node, to_node_name
from agent.demo.picture import Holder, draw_nodes
from agent.demo.play import Played
from agent.demo.pods import parse_pod, quota_us
from agent.demo.promises import Promise
from agent.demo.running import while_running
from agent.demo.screen import Screen
from agent.demo.showable import make_showable
from agent.errors import ConfigError
from agent.fakes import nvml
from agent.observation import observe_machine
from tests import machines as descriptions
from tests.core.machines import described, random_machines

ROOM = Path(__file__).parent.parent
MAIN = (
    "import argparse, sys; from agent.demo import add_arguments, run_demo;"
    "parser = argparse.ArgumentParser(); add_arguments(parser);"
    "sys.exit(run_demo(parser.parse_args()))"
)
A800 = parse_machine((ROOM / "agent/demo/a800x8.json").read_text())
Capture = pytest.CaptureFixture[str]


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After each test, of processes and folders."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = set(psutil.Process().children(recursive=True))
    yield
    _, left = psutil.wait_procs(set(psutil.Process().children(recursive=True)) - before, timeout=5)
    assert not left
    assert not list(tmp_path.glob("numalet-demo-*"))


# --- the whole story ------------------------------------------------------------------------------


@pytest.fixture
def anywhere() -> Iterator[Path]:
    """A folder that everybody may use."""
    folder = Path(tempfile.mkdtemp(prefix="demo-", dir="/tmp"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def run_as_nobody(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """As a user without rights, not even a home; as whoever runs the tests, if that is no root or
    if nobody else can run this Python here."""
    site = [path for path in sys.path if path.endswith("site-packages")]
    environment = os.environ | {
        "HOME": "/nowhere",
        "TMPDIR": str(folder),
        "PYTHONPATH": os.pathsep.join([str(ROOM), *site]),
    }
    environment.pop("XDG_CACHE_HOME", None)
    nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    may_change = os.geteuid() == 0 and shutil.which("setpriv")

    def run(who: Sequence[str], code: str, *more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*who, "-c", code, *more], env=environment, capture_output=True, text=True, check=False
        )

    probe = (
        "import subprocess, sys, agent.demo.command as c; subprocess.check_call([*c.AGENT, '-h'])"
    )
    for python in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        if may_change and run((*nobody, python), probe).returncode == 0:
            return run((*nobody, python), MAIN, *arguments)
    return run((sys.executable,), MAIN, *arguments)


def test_everything_promised_is_kept_and_needs_no_root(anywhere: Path) -> None:
    picture = anywhere / "demo.svg"
    run = run_as_nobody(anywhere, "--svg", str(picture))
    assert (run.returncode, run.stderr) == (0, "")
    out = run.stdout
    assert "✗" not in out
    count = out.count("✓") - 1  # the last one is about all
    assert f"✓ {count} of {count} promises kept in " in out
    for line in (
        "a   tgi-0        -                0      0-3    shared: 0-31,44-95,108-127   any node",
        "b   tgi-numa-0   SingleNUMANode   1      4-7    32-43,96-107                 node 1",
        "[0 a] [1 a] [2 a] [3 a]             [4 b] [5 b] [6 b] [7 b]",
        "································    bbbbbbbbbbbb····················",
        "node-1   single   0 of 4      40 of 64    312 GiB of 512 GiB",
        "Pinned    tgi-numa-0   server: CPUs 32-43,96-107 of NUMA node 1, GPUs 4-7, memory bound",
        "aliyun.accelerator/nvidia_count=8",
    ):
        assert line in out
    words = " ".join(out.split())
    assert "node 0 (single) has 64 free CPUs, node 1 (single) has 40; asked 72 CPUs" in words
    assert max(map(len, out.splitlines())) <= 100
    assert len(out.splitlines()) < 80
    texts = [text.split()[0] for text in ET.parse(picture).getroot().itertext() if text.strip()]
    assert {"default/tgi-0", "default/tgi-numa-0"} <= set(texts)
    assert [path.name for path in anywhere.iterdir()] == ["demo.svg"]


PODS = """
kind: Pod
metadata:
  name: mixed
  annotations:
    cpuset-scheduler: required
    scheduling.alibabacloud.com/numa-topology-spec: '{"numaTopologyPolicy": "Restricted"}'
spec:
  initContainers:
    - {name: fetch, resources: {limits: {cpu: 2, memory: 1Gi}}}
    - {name: proxy, restartPolicy: Always, resources: {limits: {cpu: 1, memory: 1Gi}}}
  containers:
    - {name: a, resources: {limits: {cpu: 6, memory: 9Gi, aliyun.com/gpu: 2}}}
    - {name: b, resources: {limits: {cpu: 3, memory: 9Gi, aliyun.com/gpu: 1}}}
---
kind: Pod
metadata: {name: warm, namespace: other}
spec:
  initContainers: [{name: w, resources: {limits: {cpu: 1, aliyun.com/gpu: 1}}}]
  containers: [{name: a, resources: {limits: {cpu: 500m, aliyun.com/gpu: 1}}}]
---
kind: Pod
metadata: {name: half, annotations: {cpuset-scheduler: required}}
spec: {containers: [{name: a, resources: {requests: {cpu: 500m}}}]}
---
kind: Deployment
metadata: {name: other-gpu}
spec:
  replicas: 2
  template:
    spec: {containers: [{name: a, resources: {limits: {nvidia.com/gpu: 1}}}]}
---
kind: Pod
metadata: {name: mixed}
spec: {containers: [{name: a}]}
---
kind: Service
metadata: {name: s}
"""


def test_a_machine_and_pods_of_ones_own(tmp_path: Path, capsys: Capture) -> None:
    """A GPU with a fault, one whose node is unknown, a CPU without a node, and no distances."""
    gpus = A800.gpus
    odd = replace(
        A800,
        name="Odd_Node.",
        nodes=tuple(replace(one, distances=()) for one in A800.nodes),
        cores=(*A800.cores, Core(id=64, socket=0, node=None, l3=None, cpus=Bitmap([200]))),
        gpus=(
            replace(gpus[0], fault="lost"),
            replace(gpus[1], uuid=None, node=None, node_source=NodeSource.UNKNOWN),
            replace(gpus[2], node_source=NodeSource.NVML_MEMORY),
            replace(gpus[3], node_source=NodeSource.NVML_CPU),
            *gpus[4:],
        ),
        offline_cpus=Bitmap([300]),
    )
    machine, pods = tmp_path / "machine.json", tmp_path / "pods.yaml"
    machine.write_text(json.dumps(to_json(odd)))
    pods.write_text(PODS)
    assert run_demo(options("--machine", str(machine), "-f", str(pods))) == 2
    out, err = capsys.readouterr()
    words = " ".join(out.split())
    assert "✗ " not in out
    assert "kubelet has 7 healthy aliyun.com/gpu, without NUMA nodes: one is unknown" in out
    assert re.search(r"a +mixed +Restricted +1 +4-6 +32-36,96-100 +node 1\n", out)
    assert re.search(r"b +other/warm +- +1 +7 +shared: 0-31,37-95,101-127,200 +any node\n", out)
    assert 'not created: container "a": the request of cpu is "500m"' in words
    assert "unschedulable: 0/1 nodes are available: 1 Insufficient nvidia.com/gpu" in words
    assert "[0 ✗] [2 ·] [3 ·]" in out
    assert "GPUs of no known node" in out
    assert "mixed: no CPU outside the NUMA nodes of the GPUs" in out
    assert "numalet: pod default/mixed is there already: the other one is passed over" in err
    assert "it is a Service, which has no pods" in err


# --- broken promises ------------------------------------------------------------------------------

WRONG = """
import sys
from dataclasses import replace
from agent.books import Books
from agent.core.bitmap import Bitmap
from agent.core.runtime import Cpuset

right = Books.on_create

def wrong(self, *arguments):
    answer = right(self, *arguments)
    return replace(answer, cpus=Bitmap(range(8, 32))) if isinstance(answer, Cpuset) else answer

Books.on_create = wrong
from agent.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
"""An agent that tells the runtime other CPUs than those that it has chosen."""


def test_a_broken_agent_is_told_and_the_rest_is_shown(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(story, "_PATIENCE_S", 4.0)
    monkeypatch.setattr(story, "_LESS_PATIENCE_S", 0.5)
    wrong = tmp_path / "wrong.py"
    wrong.write_text(WRONG)
    flags = "--memory=leave", "--on-unsatisfied=warn"
    agent = [sys.executable, str(wrong), "run", *flags]
    monkeypatch.setenv("PYTHONPATH", str(ROOM))
    assert command.run(options(), agent) == 1
    out = capsys.readouterr().out
    broken = dict(re.findall(r"  ✗ (.*)\n +(.*)\n", out))
    for promise, why in {
        "tgi-numa-0, too-big-0: GPUs, CPUs and memory on one": "GPUs on 1, CPUs on 0",
        "tgi-numa has GPUs 4-7, 12 whole cores beside them": "CPUs 8-31, memory of node none",
        "too-big, which asks for 72 CPUs of one node of 64, does not start": "it is running",
    }.items():
        (found,) = [text for text in broken if text.startswith(promise)]
        assert why in broken[found]
    assert "✓ each container sees exactly the GPUs that kubelet gave it" in out
    assert f"✗ {len(broken)} promises of " in out
    assert "5  The pods end" in out


@pytest.mark.parametrize(
    ("agent", "words"),
    [
        (
            (sys.executable, "-c", "print('no more'); raise SystemExit(3)"),
            ("exit code 3", "no more"),
        ),
        (("/nowhere/agent",), ("the agent cannot be started", "/nowhere/agent")),
    ],
    ids=["it ends, and its log is shown", "it is not there"],
)
def test_an_agent_that_fails(agent: Sequence[str], words: Sequence[str], capsys: Capture) -> None:
    assert command.run(options(), agent) == 1
    out = capsys.readouterr().out
    assert all(word in out for word in words)
    assert "✗ " in out
    assert "promises kept" not in out


@dataclass(slots=True)
class Past:
    """A node on which everything is as promised; its agent is stopped, and mends nothing."""

    node: Node
    others: list[Played]
    pods: list[Played]

    @property
    def all(self) -> list[Played]:
        return [*self.others, *self.pods]

    def change(self, number: int, **cpu: str) -> list[Played]:
        """All pods, of which one has another cpuset from the runtime."""
        played = self.pods[number]
        (one,) = played.placed
        created = type(one.created).FromString(one.created.SerializeToString())
        for name, text in cpu.items():
            setattr(created.linux.resources.cpu, name, text)
        return self.having(number, replace(played, placed=(replace(one, created=created),)))

    def having(self, number: int, played: Played) -> list[Played]:
        pods = list(self.pods)
        pods[number] = played
        return [*self.others, *pods]


@pytest.fixture(scope="module")
def past(library: str) -> Iterator[Past]:
    folder = Path(tempfile.mkdtemp(prefix="demo-", dir="/tmp"))
    pods, _ = command._read_pods(None, "a800x8")
    agent = command.AGENT
    try:
        with Node(A800, folder, Path(library), agent, lambda: None) as node:
            told = story.Story(
                node=node,
                screen=Screen(io.StringIO(), False, False),
                pods=pods,
                expect=lambda *_: (),
            )
            for manifest in story._BACKGROUND:
                told._start_other(manifest)
            told._discover()
            told._apply()
            told._report()
            assert not told.broken
            assert node._agent
            os.killpg(node._agent.pid, signal.SIGSTOP)
            yield Past(node, told.others, told.played)
    finally:
        shutil.rmtree(folder)


def wrong(pledged: Iterator[Promise], words: str) -> str:
    """What is wrong with the one promise that has these words."""
    (promise,) = [one for one in pledged if words in one.text]
    return promise.find_wrong()


def restore(node: Node, plural: str, item: dict[str, Any]) -> None:
    """The object as it was, in a new version."""
    node.api.put(plural, item | {"metadata": item["metadata"] | {"resourceVersion": ""}})


def swap_gpu(**facts: object) -> Machine:
    return replace(A800, gpus=(replace(A800.gpus[0], **facts), *A800.gpus[1:]))


@pytest.mark.parametrize(
    ("machine", "words", "why"),
    [
        (swap_gpu(node=1), "kubelet has", "not so for GPUs 0"),
        (swap_gpu(fault="lost"), "kubelet has", "not so for GPUs 0"),
        (replace(A800, gpus=A800.gpus[1:], links=tuple(row[1:] for row in A800.links[1:])),
         "kubelet has", "too"),
        (swap_gpu(bdf="0000:01:00.0"), "tells this machine", "other GPUs"),
        (replace(A800, isolated_cpus=Bitmap([1])), "tells this machine", "other isolated_cpus"),
        (swap_gpu(model="other"), "labels", ""),
    ],
    ids=["another node", "an ill GPU", "a GPU less", "another address", "isolated CPUs", "a model"],
)  # fmt: skip
def test_promises_at_the_start_can_be_broken(
    past: Past, machine: Machine, words: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(past.node, "machine", machine)
    assert why in wrong(promises.after_start(past.node), words)


def test_a_node_that_is_still_tainted(past: Past) -> None:
    found = past.node.api.get("nodes", past.node.name)
    assert found
    taint = {"key": "numalet.io/starting", "effect": "NoSchedule"}
    past.node.api.put("nodes", found | {"spec": {"taints": [taint]}})
    assert "has the taint" in wrong(promises.after_start(past.node), "startup taint")
    bare = {"metadata": {"name": past.node.name}}
    past.node.api.put("nodes", bare)
    assert "it lacks aliyun.accelerator" in wrong(promises.after_start(past.node), "labels")
    restore(past.node, "nodes", found)
    assert not wrong(promises.after_start(past.node), "labels")


@pytest.mark.parametrize(
    ("number", "cpu", "words", "why"),
    [
        (1, {"cpus": "32-43,96-106"}, "whole CPUs", "server has 23 CPUs (32-43,96-106)"),
        (1, {"cpus": ""}, "whole CPUs", "server has 0 CPUs (none)"),
        (1, {"cpus": "0-23"}, "in force", "runs on CPUs 32-43,96-107, not on 0-23"),
        (1, {"mems": "0"}, "in force", "has memory of nodes 1, not of 0"),
        (1, {"cpus": "40-63"}, "kept off", "kube-system/log-agent/main runs on CPUs 44-63, too"),
        (1, {"cpus": "8-31"}, "one and the same", "GPUs on 1, CPUs on 0"),
        (1, {"mems": ""}, "one and the same", "CPUs on 1, memory on all nodes"),
        (1, {"cpus": "garbage"}, "whole CPUs", "it cannot be told: ValueError"),
    ],
    ids=[
        "a CPU too few", "not pinned", "other CPUs in the cgroup", "other memory in the cgroup",
        "somebody else there", "on the other node", "memory anywhere", "nonsense",
    ],
)  # fmt: skip
def test_promises_of_pods_can_be_broken(
    past: Past, number: int, cpu: dict[str, str], words: str, why: str
) -> None:
    assert not wrong(while_running(past.node, past.all), words)
    pods = past.change(number, **cpu)
    assert why in wrong(while_running(past.node, pods), words)


def test_two_pods_with_the_same_cpus(past: Past) -> None:
    twin = replace(past.pods[1], pod=replace(past.pods[1].pod, name="default/twin"))
    pods = [*past.all, twin]
    assert "and default/twin both have CPUs 32-43" in wrong(
        while_running(past.node, pods), "whole CPUs"
    )


def test_a_restricted_pod_with_a_cpu_elsewhere(past: Past) -> None:
    numa = past.change(1, cpus="31-43,96-106")[-2]
    spec = '{"numaTopologyPolicy": "Restricted"}'
    metadata = numa.pod.body["metadata"]
    annotations = {"cpuset-scheduler": "required", SPEC: spec}
    body = numa.pod.body | {"metadata": metadata | {"annotations": annotations}}
    pods = past.having(1, replace(numa, pod=replace(numa.pod, body=body)))
    assert "GPUs on 1, CPUs on 0-1" in wrong(while_running(past.node, pods), "no CPU outside")


SPEC = "scheduling.alibabacloud.com/numa-topology-spec"


@pytest.mark.parametrize(
    ("tamper", "why"),
    [
        (lambda created: created.env.append("NVIDIA_VISIBLE_DEVICES=all"), ""),
        (lambda created: created.env.insert(0, "NVIDIA_VISIBLE_DEVICES=all"), "_DEVICES is all"),
        (lambda created: created.linux.devices.pop(), "its device nodes are"),
        (lambda created: created.linux.devices.add(path="/dev/nvidia0"), "its device nodes are"),
    ],
    ids=["a later variable does not count", "all GPUs", "a node too few", "a node too many"],
)
def test_a_container_that_sees_other_gpus(
    past: Past, tamper: Callable[[object], None], why: str
) -> None:
    pods = past.change(1)
    tamper(pods[-2].placed[0].created)
    assert why in wrong(while_running(past.node, pods), "sees exactly")


def test_a_container_that_is_throttled(past: Past) -> None:
    pods = past.node.kubepods
    group = past.pods[1].pod.cgroup
    file = pods.root / "sys/fs/cgroup/kubepods" / group / "cpu.max"
    before = file.read_text()
    file.write_text("100000 100000\n")
    assert "has a CFS quota" in wrong(while_running(past.node, past.all), "throttled")
    file.write_text(before)
    assert not wrong(while_running(past.node, past.all), "throttled")


def test_a_refusal_without_a_reason(past: Past) -> None:
    pods = past.having(2, replace(past.pods[2], reason="no"))
    assert "is told only: no" in wrong(while_running(past.node, pods), "is told why")
    holds = replace(past.pods[2], placed=past.pods[1].placed)
    assert "has CPUs all the same" in wrong(
        while_running(past.node, past.having(2, holds)), "is told why"
    )


def test_a_report_that_is_wrong(past: Past) -> None:
    def told(pods: Sequence[Played]) -> Iterator[Promise]:
        return promises.while_reported(past.node, pods)

    assert "node 1 is told to have 40 cpu free, it has 41" in wrong(
        told(past.change(1, cpus="32-43,96-106")), "NodeResourceTopology"
    )
    lacking = [*past.others, *past.pods[1:]]
    assert "node 0 is told to have 0 aliyun.com/gpu free, it has 4" in wrong(
        told(lacking), "NodeResourceTopology"
    )
    assert "is told: Pinned: server: CPUs 32-43" in wrong(
        told(past.change(1, cpus="32-55")), "Event"
    )
    other = replace(past.pods[2], pod=replace(past.pods[2].pod, uid="other"))
    assert "default/too-big-0 is told: nothing" in wrong(told(past.having(2, other)), "Event")
    report = past.node.report
    assert report
    past.node.api.remove(PLURAL, past.node.name)
    assert wrong(told(past.all), "NodeResourceTopology") == "there is no such object"
    assert wrong(promises.after_start(past.node), "this machine") == "there is no such object"
    restore(past.node, PLURAL, report)
    assert not wrong(told(past.all), "NodeResourceTopology")


def test_a_restart_or_an_end_that_changes_something(past: Past) -> None:
    seen = promises.see_all(past.node, past.all)
    after = promises.after_restart(past.node, past.all, seen)
    assert not wrong(after, "asked again")
    past.node.runtime.stop()
    after = promises.after_restart(past.node, past.all, seen)
    assert wrong(after, "asked again") == "it is not asked"
    first = past.pods[1].placed[0].created.id
    before = seen | {first: ("0-23", *seen[first][1:])}
    assert wrong(promises.after_restart(past.node, past.all, before), "had before")
    assert not wrong(promises.after_restart(past.node, past.all, seen), "had before")
    assert "runs on 0-31,44-95,108-127" in wrong(
        promises.after_end(past.node, past.others), "on all CPUs again"
    )
    assert wrong(promises.after_end(past.node, past.others), "everything free")


@pytest.mark.parametrize(
    ("number", "cpu", "words", "why"),
    [
        (0, {"cpus": "0-23"}, "tgi asks for no", "CPUs 0-23"),
        (1, {"cpus": "44-55,108-119"}, "tgi-numa has", "CPUs 44-55,108-119"),
        (1, {"mems": "0-1"}, "tgi-numa has", "memory of node 0-1"),
    ],
    ids=["pinned unasked", "other CPUs", "other memory"],
)
def test_what_acks_pods_get_is_known(
    past: Past, number: int, cpu: dict[str, str], words: str, why: str
) -> None:
    assert not any(one.find_wrong() for one in expect_of_ack(past.node, past.pods))
    pods = past.change(number, **cpu)[len(past.others) :]
    assert why in wrong(iter(expect_of_ack(past.node, pods)), words)


# --- what cannot be shown -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--machine", "nowhere"], "nowhere: cannot be read: No such file or directory"),
        (["--machine", "text"], "text: not JSON: Expecting value at line 1, column 1"),
        (["--machine", "bytes"], "bytes: is not UTF-8 text: invalid start byte"),
        (["--machine", "-", "-f", "-"], "cannot both come from standard input"),
        (["-f", "nowhere"], "there is no pod to play"),
        (["-f", "text"], "there is no pod to play"),
        (["-f", "unnamed"], "there is no pod to play"),
        (["--svg", "nowhere/demo.svg"], "nowhere: there is no such folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_a_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text").write_text("hello")
    Path("bytes").write_bytes(b"\xff")
    Path("unnamed").write_text('{"kind": "Pod"}')
    with pytest.raises(ConfigError) as error:
        run_demo(options(*arguments))
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("compiler", "sentence"),
    [("nowhere-cc", "install gcc"), ("false", "install gcc and libc6-dev")],
    ids=["no compiler", "one that cannot compile"],
)
def test_without_a_compiler(
    compiler: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", compiler)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match=f"{sentence}$"):
        run_demo(options())


BAD_PODS = {
    "no name": ({"metadata": {}}, '"default/" is not a name'),
    "a path for a name": ({"metadata": {"name": "../x"}}, "is not a name"),
    "nothing in it": ({"metadata": {"name": "a"}}, "pod default/a: it has no containers"),
    "a spec that is a text": ({"metadata": {"name": "a"}, "spec": "x"}, 'spec is "x"'),
    "a number for an annotation": (
        {"metadata": {"name": "a", "annotations": {"b": 1}}},
        "an annotation is not a text",
    ),
    "an amount that is none": (
        {"metadata": {"name": "a"},
         "spec": {"containers": [{"name": "c", "resources": {"limits": {"cpu": "many"}}}]}},
        'cpu: "many" is not a quantity',
    ),
    "two containers of one name": (
        {"metadata": {"name": "a"}, "spec": {"containers": [{"name": "c"}, {"name": "c"}]}},
        "have the same name",
    ),
    "a container with a path for a name": (
        {"metadata": {"name": "a"}, "spec": {"containers": [{"name": "../c"}]}},
        '"../c" is not a name that a container can have',
    ),
}  # fmt: skip


@pytest.mark.parametrize(("manifest", "why"), BAD_PODS.values(), ids=BAD_PODS)
def test_pods_that_no_cluster_takes(manifest: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        parse_pod(manifest, "node", story.CREATED)


# --- the end before the end -----------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything(number: signal.Signals, tmp_path: Path) -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", MAIN],
        cwd=ROOM,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert run.stdout
    head = [run.stdout.readline() for _ in range(8)]
    demo = psutil.Process(run.pid)
    while not (children := demo.children()):
        assert run.poll() is None, head
    run.send_signal(number)
    rest = run.stdout.read()
    assert run.wait(20) == 128 + number
    assert "interrupted: the agent is ended, and nothing is left behind" in rest
    assert "Traceback" not in rest
    assert not any(child.is_running() for child in children)
    assert not list(tmp_path.glob("numalet-demo-*"))


def test_nobody_reads_to_the_end(tmp_path: Path) -> None:
    """As `numalet demo | head -1`: main knows what a broken pipe is."""
    code = MAIN.replace("sys.exit(", "import agent.__main__; sys.exit(")
    run = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOM,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert run.stdout
    run.stdout.readline()
    run.stdout.close()
    _, err = run.communicate(timeout=60)
    assert "BrokenPipeError" in err
    assert not list(tmp_path.glob("numalet-demo-*"))


# --- machines -------------------------------------------------------------------------------------


def read_back(machine: Machine, folder: Path, library: str) -> Machine:
    """What the agent finds where the machine is laid out."""
    host.lay_out(machine, folder / "host")
    nvml.write_state(folder / "driver.txt", host.driver_state(machine))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(nvml.ENVIRONMENT, str(folder / "driver.txt"))
        return observe_machine(str(folder / "host"), library)


@pytest.mark.parametrize("name", descriptions.names())
def test_a_machine_that_was_read_is_shown_as_it_was(
    name: str, tmp_path: Path, library: str
) -> None:
    machine = described(name)
    assert make_showable(machine) == machine
    assert read_back(machine, tmp_path, library) == machine


@settings(max_examples=25, deadline=None)
@given(random_machines())
def test_any_machine_can_be_shown(library: str, machine: Machine) -> None:
    shown = make_showable(machine)
    assert make_showable(shown) == shown
    with tempfile.TemporaryDirectory() as folder:
        seen = read_back(shown, Path(folder), library)
    faults = [gpu.fault for gpu in shown.gpus]
    gpus = tuple(replace(gpu, fault=fault) for gpu, fault in zip(seen.gpus, faults, strict=True))
    assert replace(seen, warnings=(), gpus=gpus) == shown


def test_the_machine_of_the_demo_is_the_described_one() -> None:
    assert described("a800x8") == A800


# --- on the screen --------------------------------------------------------------------------------


def test_on_a_terminal_steps_are_drawn_in_place() -> None:
    out = io.StringIO()
    screen = Screen(out, colour=True, live=True)
    with screen.step("1  Something"):
        screen.tick()
    screen.kept("kept")
    screen.broken("broken", "why\x1b[2J")
    text = out.getvalue()
    assert text.startswith("\r\x1b[K⠋ 1  Something 0.0 s")
    assert "\r\x1b[K\x1b[1m1  Something\x1b[0m" in text
    assert "\x1b[32m✓\x1b[0m kept" in text
    assert "\x1b[2J" not in text


def test_elsewhere_steps_are_plain_lines() -> None:
    out = io.StringIO()
    screen = Screen(out, colour=False, live=False)
    with screen.step("1  Something"):
        screen.tick()
    assert re.fullmatch(r"1  Something {2,}\d+\.\d s\n", out.getvalue())
    with pytest.raises(KeyError), screen.step("2  More"):
        raise KeyError
    assert out.getvalue().endswith("\n2  More\n")


@pytest.mark.parametrize(("given_", "coloured"), [("", True), ("1", False)], ids=["", "NO_COLOR"])
def test_colours_are_for_terminals(
    given_: str, coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", given_)
    monkeypatch.setenv("TERM", "xterm")
    controller, terminal = pty.openpty()
    with open(terminal, "w") as out, open(controller, "rb", buffering=0):
        monkeypatch.setattr(sys, "stdout", out)
        assert (command._screen().paint("x", "1") != "x") is coloured
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert command._screen().paint("x", "1") == "x"


def test_nodes_stand_side_by_side_as_far_as_they_fit() -> None:
    machine = described("a100x8-nps4")
    holders = [Holder(number=1, gpus=Bitmap([0]), cpus=Bitmap.parse_list("24-25,88"))]
    lines = ["".join(text for text, _ in cells).rstrip() for cells in draw_nodes(machine, holders)]
    assert [line[28:55].rstrip() for line in lines[:4]] == [
        "node 2      node 3",
        "········    [0 b] [1 ·]",
        "········    bb······",
        "            b·······",
    ]
    assert lines[4:] == ["", "node 7", "[4 ·] [5 ·]", "········", "········"]
    assert max(map(len, lines)) <= 94


@pytest.mark.parametrize(
    ("text", "name"),
    [("a800x8", "a800x8"), ("Odd_Node.", "odd-node"), ("..", "node"), ("é" * 80, "node")],
)
def test_names_of_nodes(text: str, name: str) -> None:
    assert to_node_name(text) == name


def pod_with(*containers: dict[str, object]) -> dict[str, object]:
    return {"metadata": {"name": "p"}, "spec": {"containers": [*containers]}}


def asking(name: str = "a", **resources: dict[str, object]) -> dict[str, object]:
    return {"name": name, "resources": resources}


FULL = {"cpu": 2, "memory": "1Gi"}


@pytest.mark.parametrize(
    ("containers", "folder"),
    [
        ([asking(limits=FULL)], ""),
        ([asking(limits=FULL, requests={"cpu": 1})], "burstable"),
        ([asking(limits=FULL), asking("b")], "burstable"),
        ([asking(limits={"cpu": 2})], "burstable"),
        ([asking()], "besteffort"),
    ],
    ids=["all limits", "a smaller request", "a second one", "no memory", "nothing"],
)
def test_classes_of_pods(containers: list[dict[str, object]], folder: str) -> None:
    assert parse_pod(pod_with(*containers), "node", story.CREATED).qos == folder


def test_what_the_runtime_is_told_of_a_pod() -> None:
    containers = asking(limits=FULL), asking("b", limits={"cpu": "500m", "memory": "1Gi"})
    pod = parse_pod(pod_with(*containers), "node", story.CREATED)
    cpu, memory = pod.resources.cpu, pod.resources.memory
    assert (cpu.shares.value, cpu.quota.value, cpu.period.value) == (2560, 250_000, 100_000)
    assert memory.limit.value == 2 << 30
    assert quota_us(0) == -1
