"""What holds on every virtual node: what is seen of it, and what stays over restarts."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent.fakes import nvml
from agent.fakes.node import kernel_list
from tests.captured import parse_bitmap
from tests.e2e import cpus
from tests.e2e.cpus import Cpus
from tests.e2e.image import WAIT
from tests.e2e.kubelet import Pod
from tests.e2e.pinning import container_id, path
from tests.vnode.conftest import Seen
from tests.vnode.guest import PatientRig
from tests.vnode.placed import SHOW, assert_others_keep_out, policy, run, run_shared, where

Matrix = dict[tuple[int, int], int]


LSTOPO = "lstopo-no-graphics"


@pytest.mark.skipif(not shutil.which(LSTOPO), reason=f"there is no {LSTOPO}")
def test_show_says_what_hwloc_says(rig: PatientRig, seen: Seen) -> None:
    """hwloc gives a node without CPUs those that are near it; the description gives it none."""
    show = [sys.executable, "-m", "agent", "show", "--json", "--nvml", rig.library]
    shown = json.loads(_call(show, rig))
    topology = ET.fromstring(_call([LSTOPO, "--of", "xml"], rig))
    theirs = {
        int(one.attrib["os_index"]): one
        for one in topology.iter("object")
        if one.get("type") == "NUMANode"
    }
    memory = {id_: int(one.attrib["local_memory"]) for id_, one in theirs.items()}
    assert {one["id"]: one["memory_bytes"] for one in shown["nodes"]} == memory

    ours = {one["id"]: cpus.parse(one["cpus"]) for one in shown["nodes"]}
    assert ours == {one.id: frozenset(one.cpus) for one in rig.machine.facts.nodes}
    near = {id_: parse_bitmap(one.attrib["cpuset"]) for id_, one in theirs.items()}
    assert {id_: its or near[id_] for id_, its in ours.items()} == near

    gpus = {one["bdf"]: one["node"] for one in shown["gpus"]}
    assert {bdf: ours[node] for bdf, node in gpus.items()} == dict(_gpus(topology, frozenset()))
    assert gpus == {gpu.bdf: gpu.node for gpu in rig.machine.facts.gpus}

    distances = {
        (one["id"], int(other)): distance
        for one in shown["nodes"]
        for other, distance in one["distances"].items()
    }
    assert distances == _distances(topology)
    lists = (kernel_list(list(its)) or "none" for its in ours.values())
    seen(f"CPUs by node {' · '.join(lists)}; GPUs on nodes {' '.join(map(str, gpus.values()))}")


def _call(command: list[str], rig: PatientRig) -> str:
    told = os.environ | {nvml.ENVIRONMENT: str(rig.machine.state)}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=told).stdout


def _gpus(element: ET.Element, near: Cpus) -> Iterator[tuple[str, Cpus]]:
    """Address and CPUs of each: those of its nearest ancestor that has some."""
    near = parse_bitmap(element.attrib["cpuset"]) if "cpuset" in element.attrib else near
    if element.get("type") == "PCIDev" and element.attrib["pci_type"].startswith("0302 [10de"):
        yield element.attrib["pci_busid"], near
    for child in element:
        yield from _gpus(child, near)


def _distances(topology: ET.Element) -> Matrix:
    """hwloc's matrix of latencies."""
    (matrix,) = (
        one
        for one in topology.iter("distances2")
        if one.get("type") == "NUMANode" and one.get("name") == "NUMALatency"
    )
    ids = [int(word) for one in matrix.iter("indexes") for word in (one.text or "").split()]
    values = [int(word) for one in matrix.iter("u64values") for word in (one.text or "").split()]
    pairs = [(a, b) for a in ids for b in ids]
    return dict(zip(pairs, values, strict=True))


_ON_NODE = re.compile(r"\bN(\d+)=(\d+)")

TOUCHED_BYTES = 16 << 20
TOUCH = SHOW.replace(WAIT, f"dd if=/dev/zero bs={TOUCHED_BYTES} count=1 | while :; do {WAIT}; done")
"""A program reads that much at once, and then waits for somebody to take it."""


def test_memory_that_a_pod_touches_lies_on_its_node(rig: PatientRig, seen: Seen) -> None:
    how = {"cpu": "2", "program": TOUCH, "annotations": policy("SingleNUMANode")}
    for gpus in (3, 4):
        pod = run(rig, "touching", gpus=gpus, **how)
        (node,) = {rig.machine.facts.gpus[gpu].node for gpu in pod.place.gpus}
        assert pod.place.mems == {node}
        pages = rig.wait(lambda pod=pod.pod: _touched(pod), "it has touched its memory")
        assert pages.keys() == {node}
        seen(f"{pages[node] * os.sysconf('SC_PAGE_SIZE') >> 20} MiB, all on node {node}")


def _touched(pod: Pod) -> Counter[int]:
    """Pages of no file by node, once they are as many as the pod was to touch.

    Source: the kernel's Documentation/filesystems/proc.rst, numa_maps.
    """
    (folder,) = (one for one in cpus.folders() if one.name == container_id(pod))
    pages: Counter[int] = Counter()
    for pid in (folder / "cgroup.procs").read_text().split():
        for line in Path(f"/proc/{pid}/numa_maps").read_text().splitlines():
            if "anon=" in line and "file=" not in line:
                pages.update({int(node): int(count) for node, count in _ON_NODE.findall(line)})
    return pages if pages.total() * os.sysconf("SC_PAGE_SIZE") >= TOUCHED_BYTES else Counter()


def test_all_is_as_before_when_everything_was_restarted(rig: PatientRig, seen: Seen) -> None:
    others = run_shared(rig)
    sample = run(rig, "sample", gpus=4, cpu="4", annotations=policy("SingleNUMANode"))
    without = run(rig, "without", cpu="2", annotations=policy("BestEffort"))
    held = rig.held()
    assert_others_keep_out(rig, sample, without)
    restarts: dict[str, Callable[[], object]] = {
        "agent": rig.agent.kill,
        "containerd": rig.containerd.stop,
        "kubelet": rig.kubelet.kill,
    }
    for name, end in restarts.items():
        start_s = time.monotonic()
        end()
        rig.revive()
        rig.wait(lambda: rig.agent.is_ready() and path(rig) == "nri", "the agent is connected")
        rig.wait_until_whole()
        everybody = [*others, sample.pod, without.pod]
        rig.wait(lambda all_=everybody: rig.is_unchanged(all_), "all run in their containers", 60)
        rig.wait(lambda: rig.held() == held, "kubelet's list is as before")
        assert [where(rig, one.pod) for one in (sample, without)] == [sample.place, without.place]
        assert_others_keep_out(rig, sample, without)
        seen(f"{name}: {time.monotonic() - start_s:.0f} s")
    late = run(rig, "late", cpu="2", annotations=policy("BestEffort"))
    assert_others_keep_out(rig, sample, without, late)
