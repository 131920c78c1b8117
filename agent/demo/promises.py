"""What must be so, looked at from the side of those that the agent talks to.

Each check gives a sentence on what is wrong, or "" when all is as promised. Nothing is asked of the
agent itself: what counts is what kubelet, container runtime, cgroup files and API server have.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from agent.core.ack import node_labels
from agent.core.bitmap import Bitmap
from agent.core.report import from_nrt
from agent.core.topology import Gpu, Machine, union
from agent.demo.node import STARTUP_TAINT, Node
from agent.demo.play import Placed, Played, Stage

_MOST_EVENTS: Final = 40
"""The agent writes no more than 50 at once, one for each container."""
_COMPARED: Final = ("nodes", "cores", "links", "offline_cpus", "isolated_cpus")


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """A sentence, and what is wrong with it at the moment."""

    text: str
    check: Callable[[], str]

    def find_wrong(self) -> str:
        """As `check`, for anything that the agent may have left."""
        try:
            return self.check()
        except (LookupError, ValueError, OSError) as error:
            return f"it cannot be told: {type(error).__name__}: {error}"


def cpus_of(one: Placed) -> Bitmap:
    """The CPUs that the runtime has for a container; empty for all shared ones."""
    return Bitmap.parse_list(one.created.linux.resources.cpu.cpus)


def mems_of(one: Placed) -> Bitmap:
    return Bitmap.parse_list(one.created.linux.resources.cpu.mems)


def pinned_cpus(played: Played) -> Bitmap:
    return union(cpus_of(one) for one in played.placed if played.pod.is_pinned)


def held_gpus(machine: Machine, played: Played) -> tuple[Gpu, ...]:
    """In the order of the machine."""
    held = {uuid for gpus in played.held.values() for uuid in gpus}
    return tuple(gpu for gpu in machine.gpus if gpu.uuid in held)


def nodes_of(machine: Machine, cpus: Bitmap) -> Bitmap:
    return Bitmap(node.id for node in machine.nodes if node.cpus & cpus)


def first(problems: Iterator[str]) -> str:
    return next(filter(None, problems), "")


# --- once the agent runs --------------------------------------------------------------------------


def after_start(node: Node) -> Iterator[Promise]:
    gpus = node.machine.gpus
    if gpus:
        sound = sum(gpu.fault is None for gpu in gpus)
        where = (
            "each on its NUMA node" if _are_known(gpus) else "without NUMA nodes: one is unknown"
        )
        yield Promise(
            text=f"kubelet has {sound} healthy aliyun.com/gpu, {where}",
            check=lambda: _check_devices(node),
        )
    yield Promise(
        text="the NodeResourceTopology tells this machine, CPU by CPU and link by link",
        check=lambda: _check_machine(node),
    )
    if gpus:
        yield Promise(
            text="the node has its labels, and lost its startup taint",
            check=lambda: _check_node(node),
        )


def _are_known(gpus: Sequence[Gpu]) -> bool:
    return all(gpu.node is not None for gpu in gpus)


def _check_devices(node: Node) -> str:
    gpus = node.machine.gpus
    known = _are_known(gpus)
    expected = {
        gpu.uuid: ("Unhealthy" if gpu.fault else "Healthy", (gpu.node,) if known else ())
        for gpu in gpus
    }
    wrong = [gpu.index for gpu in gpus if node.devices.get(gpu.uuid or "") != expected[gpu.uuid]]
    more = node.devices.keys() - expected.keys()
    return f"not so for GPUs {Bitmap(wrong)}" if wrong else f"it has {more} too" if more else ""


def _check_machine(node: Node) -> str:
    if node.report is None:
        return "there is no such object"
    told = from_nrt(node.report).layout.machine
    wrong = [name for name in _COMPARED if getattr(told, name) != getattr(node.machine, name)]
    facts = [one.name for one in fields(Gpu) if one.name != "fault"]
    if [[getattr(gpu, fact) for fact in facts] for gpu in told.gpus] != [
        [getattr(gpu, fact) for fact in facts] for gpu in node.machine.gpus
    ]:
        wrong.append("GPUs")
    return f"it tells other {', '.join(wrong)}" if wrong else ""


def _check_node(node: Node) -> str:
    found = node.api.get("nodes", node.name) or {}
    labels = found["metadata"].get("labels", {})
    lacking = node_labels(node.machine).items() - labels.items()
    taints = [taint["key"] for taint in found.get("spec", {}).get("taints") or ()]
    if lacking:
        return f"it lacks {', '.join(f'{key}={value}' for key, value in sorted(lacking))}"
    return f"it has the taint {STARTUP_TAINT}" if STARTUP_TAINT in taints else ""


# --- what the cluster is told ---------------------------------------------------------------------


def while_reported(node: Node, pods: Sequence[Played]) -> Iterator[Promise]:
    yield Promise(
        text="the NodeResourceTopology has the free GPUs and CPUs that kubelet and runtime have",
        check=lambda: _check_zones(node, pods),
    )
    concerned = [
        one for one in pods if one.pod.is_pinned and one.stage in (Stage.RUNNING, Stage.NOT_CREATED)
    ]
    told = [
        one
        for number, one in enumerate(concerned)
        if sum(len(before.pod.containers) for before in concerned[: number + 1]) <= _MOST_EVENTS
    ]
    which = "each of these pods" if told == concerned else f"each of the first {len(told)} pods"
    if told:
        yield Promise(
            text=f"{which} has an Event: its CPUs, or why it is refused",
            check=lambda: first(_check_event(node, one) for one in told),
        )


def _check_zones(node: Node, pods: Sequence[Played]) -> str:
    if node.report is None:
        return "there is no such object"
    told = {zone["name"]: zone for zone in node.report["zones"]}
    taken = union(pinned_cpus(one) for one in pods)
    held = {gpu.uuid for one in pods for gpu in held_gpus(node.machine, one)}
    for one in node.machine.nodes:
        free = [g for g in node.machine.gpus if g.node == one.id and g.uuid not in held]
        sound = [gpu for gpu in free if gpu.fault is None]
        expected = {"cpu": len(one.cpus - taken), "aliyun.com/gpu": len(sound)}
        available = _available(told.get(f"node-{one.id}", {}))
        for resource, count in expected.items():
            if available.get(resource, count) != count:
                is_told = f"{available[resource]} {resource}"
                return f"node {one.id} is told to have {is_told} free, it has {count}"
    return ""


def _available(zone: dict[str, Any]) -> dict[str, int]:
    counted = ("cpu", "aliyun.com/gpu")
    resources = zone.get("resources", ())
    return {one["name"]: int(one["available"]) for one in resources if one["name"] in counted}


def _check_event(node: Node, played: Played) -> str:
    mine = [one for one in node.events if one["involvedObject"]["uid"] == played.pod.uid]
    told = " ".join(f"{one['reason']}: {one['message']}" for one in mine)
    if played.stage is Stage.NOT_CREATED:
        wanted = ["Refused: "]  # the first reason: a later one may have other numbers
    else:
        wanted = [f": CPUs {cpus_of(one)} " for one in played.placed]
    lacking = next((text for text in wanted if text not in told), "")
    return f"{played.pod.name} is told: {told or 'nothing'}" if lacking else ""


# --- later ----------------------------------------------------------------------------------------


def after_restart(node: Node, pods: Sequence[Played], before: dict[str, Any]) -> Iterator[Promise]:
    yield Promise(
        text="the agent is asked again, and kubelet has its GPUs again",
        check=lambda: ("" if node.is_asked else "it is not asked") or _check_devices(node),
    )
    yield Promise(
        text="every pod has the CPUs and GPUs that it had before",
        check=lambda: "" if see_all(node, pods) == before else "some have others",
    )


def see_all(node: Node, pods: Sequence[Played]) -> dict[str, Any]:
    """What the pods have: of the runtime, of the cgroups, of kubelet."""
    return {
        one.created.id: (
            node.runtime.containers[one.created.id].linux.resources.cpu.cpus,
            node.runtime.containers[one.created.id].linux.resources.cpu.mems,
            str(node.kubepods.cpus_of(one.cgroup)),
            one.gpus,
        )
        for played in pods
        for one in played.placed
    }


def after_end(node: Node, others: Sequence[Played]) -> Iterator[Promise]:
    yield Promise(
        text="everybody else runs on all CPUs again",
        check=lambda: first(
            f"{played.pod.name} runs on {cpus}"
            for played in others
            for one in played.placed
            if (cpus := node.kubepods.cpus_of(one.cgroup)) != node.machine.cpus
        ),
    )
    yield Promise(
        text="the NodeResourceTopology has everything free",
        check=lambda: _check_zones(node, ()),
    )
