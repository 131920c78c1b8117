"""What must be so while pods run: sizes, places, cgroups, devices, and why others do not run.

As in promises.py, what counts is what the stand-ins have.
"""

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Final

from agent.core.bitmap import Bitmap
from agent.core.request import Demand, Policy, read_demand
from agent.core.topology import EMPTY, union
from agent.demo.node import Node
from agent.demo.play import Played, Stage
from agent.demo.promises import (
    Promise,
    cpus_of,
    first,
    held_gpus,
    mems_of,
    nodes_of,
    pinned_cpus,
)

_VISIBLE: Final = "NVIDIA_VISIBLE_DEVICES"
_OF_ALL: Final = ("/dev/nvidiactl", "/dev/nvidia-uvm")
"""Device nodes that every container with a GPU gets."""


def while_running(node: Node, pods: Sequence[Played]) -> Iterator[Promise]:
    running = [one for one in pods if one.stage is Stage.RUNNING]
    pinned = [one for one in running if one.pod.is_pinned]
    free = [one for one in pinned if not _is_decided(one)]
    if any(one.held for one in running):
        yield Promise(
            text="each container sees exactly the GPUs that kubelet gave it",
            check=lambda: first(_check_sight(node, one) for one in running),
        )
    if pinned:
        yield Promise(
            text="each pinned container has the whole CPUs that it asks for, shared with nobody",
            check=lambda: _check_sizes(free) or _check_apart(pinned),
        )
        yield Promise(
            text="its cgroup has them in force from its first instruction, and is not throttled",
            check=lambda: first(_check_cgroups(node, one) for one in pinned),
        )
        yield keep_off(node, pods, "everybody else is kept off these CPUs by their cgroups")
        yield from _promise_policies(node, free, pinned)
    refused = [one for one in pods if one.stage is Stage.NOT_CREATED]
    if refused:
        yield Promise(
            text="who cannot have what it asks for is told why in a sentence, and holds no CPUs",
            check=lambda: first(_check_refusal(one) for one in refused),
        )


def keep_off(node: Node, pods: Sequence[Played], text: str) -> Promise:
    """Nobody who is not pinned runs where somebody is."""
    return Promise(text=text, check=lambda: _check_pool(node, pods))


def _is_decided(played: Played) -> bool:
    """Whether a scheduler has chosen its CPUs, by an annotation."""
    asked = read_demand(played.pod.body)
    return isinstance(asked, Demand) and asked.decided_cpus is not None


def _promise_policies(
    node: Node, free: Sequence[Played], pinned: Sequence[Played]
) -> Iterator[Promise]:
    def of(policy: Policy) -> list[Played]:
        asked = ((one, read_demand(one.pod.body)) for one in free)
        return [one for one, it in asked if isinstance(it, Demand) and it.policy is policy]

    if single := of(Policy.SINGLE_NUMA_NODE):
        yield Promise(
            text=f"{_names(single)}: GPUs, CPUs and memory on one and the same NUMA node",
            check=lambda: first(_check_single(node, one, pinned) for one in single),
        )
    if restricted := of(Policy.RESTRICTED):
        yield Promise(
            text=f"{_names(restricted)}: no CPU outside the NUMA nodes of the GPUs",
            check=lambda: first(_check_restricted(node, one) for one in restricted),
        )


def _names(pods: Sequence[Played]) -> str:
    names = [one.pod.name.removeprefix("default/") for one in pods]
    return (
        ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:2])} and {len(names) - 2} more"
    )


def _check_sight(node: Node, played: Played) -> str:
    minors = {gpu.uuid: gpu.minor for gpu in node.machine.gpus}
    for one in played.placed:
        created = one.created
        visible = [text for text in created.env if text.startswith(f"{_VISIBLE}=")]
        told = visible[0].partition("=")[2].split(",") if visible else []
        paths = sorted(device.path for device in created.linux.devices)
        nodes = [f"/dev/nvidia{minors[uuid]}" for uuid in one.gpus]
        if sorted(told) != sorted(one.gpus):
            return f"{played.pod.name}: {_VISIBLE} is {','.join(told)}"
        if paths != sorted([*nodes, *(_OF_ALL if nodes else ())]):
            return f"{played.pod.name}: its device nodes are {' '.join(paths)}"
    return ""


def _check_sizes(pinned: Sequence[Played]) -> str:
    for played in pinned:
        for one in played.placed:
            if 1000 * len(cpus_of(one)) != one.asked.request_m:
                return (
                    f"{played.pod.name}: {one.asked.name} has {len(cpus_of(one))} CPUs "
                    f"({cpus_of(one) or 'none'})"
                )
    return ""


def _check_apart(pinned: Sequence[Played]) -> str:
    for a, b in combinations(pinned, 2):
        if both := pinned_cpus(a) & pinned_cpus(b):
            return f"{a.pod.name} and {b.pod.name} both have CPUs {both}"
    return ""


def _check_cgroups(node: Node, played: Played) -> str:
    for one in played.placed:
        name = f"{played.pod.name}/{one.asked.name}"
        if (cpus := node.kubepods.cpus_of(one.cgroup)) != cpus_of(one):
            return f"{name} runs on CPUs {cpus}, not on {cpus_of(one)}"
        if mems_of(one) and (mems := node.kubepods.mems_of(one.cgroup)) != mems_of(one):
            return f"{name} has memory of nodes {mems}, not of {mems_of(one)}"
        if node.kubepods.is_throttled(one.cgroup):
            return f"{name} has a CFS quota"
    return ""


def _check_pool(node: Node, pods: Sequence[Played]) -> str:
    taken = union(pinned_cpus(one) for one in pods)
    for played in pods:
        for one in () if played.pod.is_pinned else played.placed:
            if both := node.kubepods.cpus_of(one.cgroup) & taken:
                return f"{played.pod.name}/{one.asked.name} runs on CPUs {both}, too"
    return ""


def _check_single(node: Node, played: Played, pinned: Sequence[Played]) -> str:
    gpus = Bitmap(gpu.node for gpu in held_gpus(node.machine, played) if gpu.node is not None)
    cpus = nodes_of(node.machine, pinned_cpus(played))
    mems = union(mems_of(one) for one in played.placed)
    wanted_mems = EMPTY if any(not c.memory_bytes for c in played.pod.containers) else cpus
    if len(gpus | cpus) != 1:
        return f"{played.pod.name}: GPUs on {gpus or 'none'}, CPUs on {cpus or 'none'}"
    if mems != wanted_mems and _fits(node, pinned, cpus):
        return f"{played.pod.name}: CPUs on {cpus}, memory on {mems or 'all nodes'}"
    return ""


def _fits(node: Node, pinned: Sequence[Played], ids: Bitmap) -> bool:
    """Whether the memory of all that is pinned there has room on the NUMA node."""
    here = [one for one in node.machine.nodes if one.id in ids]
    huge = sum(size * pages for one in here for size, pages in one.hugepages)
    asked = [
        sum(container.memory_bytes for container in one.pod.containers)
        for one in pinned
        if pinned_cpus(one) & union(one.cpus for one in here)
    ]
    return sum(asked) <= sum(one.memory_bytes for one in here) - huge


def _check_restricted(node: Node, played: Played) -> str:
    gpus = Bitmap(gpu.node for gpu in held_gpus(node.machine, played) if gpu.node is not None)
    cpus = nodes_of(node.machine, pinned_cpus(played))
    outside = cpus - gpus if gpus else EMPTY
    return f"{played.pod.name}: GPUs on {gpus}, CPUs on {cpus}" if outside else ""


def _check_refusal(played: Played) -> str:
    if played.placed and any(cpus_of(one) for one in played.placed):
        return f"{played.pod.name} has CPUs all the same"
    return "" if len(played.reason) > 20 else f"{played.pod.name} is told only: {played.reason}"
