"""What Koordinator's scheduler reads of a node: annotations on its report, and the Device object.

Source: Koordinator 1.7, what koordlet writes; the shapes and their order are the same here. CPUs on
a node that is offline, and devices that cannot be told in full, are left out rather than guessed.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from agent.core.ack import common_model, to_label_value
from agent.core.bitmap import Bitmap
from agent.core.ledger import Ledger
from agent.core.strict_json import Object
from agent.core.topology import Gpu, Machine, union

if TYPE_CHECKING:
    from agent.core.report import About

CPU_TOPOLOGY_KEY: Final = "node.koordinator.sh/cpu-topology"
SHARED_POOLS_KEY: Final = "node.koordinator.sh/cpu-shared-pools"
BE_SHARED_POOLS_KEY: Final = "node.koordinator.sh/be-cpu-shared-pools"
CPU_MANAGER_KEY: Final = "kubelet.koordinator.sh/cpu-manager-policy"
POD_CPUS_KEY: Final = "node.koordinator.sh/pod-cpu-allocs"

DEVICE_GROUP: Final = "scheduling.koordinator.sh"
DEVICE_VERSION: Final = "v1alpha1"
DEVICE_PLURAL: Final = "devices"

_STATIC: Final = "static"
_POLICIES: Final = {
    "single-numa-node": "SingleNUMANode",
    "restricted": "Restricted",
    "best-effort": "BestEffort",
}
_LEVELS: Final = {"container": "ContainerLevel", "pod": "PodLevel"}
_UNKNOWN_SOCKET: Final = -1
_WHOLE: Final = "100"


class _OfMachine(NamedTuple):
    """What depends on the machine alone: the annotation of its CPUs, and (socket, node id, CPUs) of
    each node with CPUs, sorted."""

    cpu_topology: str
    pools: tuple[tuple[int, int, Bitmap], ...]


def annotations(ledger: Ledger, about: "About") -> dict[str, str]:
    """The annotations by key.

    `cpu-basic-info` is not among them: of the CPUs' model and speed nothing is known here, and what
    the annotation does not say is read as "no". Both shared pools are all CPUs that nobody holds:
    pins are exclusive for everybody.
    """
    of_machine = _look_at(ledger.layout.machine)
    shared = ledger.shared_pool - kubelet_held(about)
    pools = _compact(
        [
            {"socket": socket, "node": node, "cpuset": str(cpus & shared)}
            for socket, node, cpus in of_machine.pools
            if cpus & shared
        ]
        or None
    )
    return {
        CPU_TOPOLOGY_KEY: of_machine.cpu_topology,
        SHARED_POOLS_KEY: pools,
        BE_SHARED_POOLS_KEY: pools,
        CPU_MANAGER_KEY: _compact(_cpu_manager(about)),
        POD_CPUS_KEY: _compact(_pod_cpus(ledger, about)),
    }


def kubelet_held(about: "About") -> Bitmap:
    """The CPUs that kubelet itself gave to containers for their own."""
    return union(cpus for sets in _exclusive(about).values() for cpus in sets.values())


def _exclusive(about: "About") -> Mapping[str, Mapping[str, Bitmap]]:
    """Only the static policy gives any; what a former one left behind does not count."""
    return about.exclusive if about.cpu_manager_policy == _STATIC else {}


@lru_cache(maxsize=4)
def _look_at(machine: Machine) -> _OfMachine:
    detail = [
        {"id": cpu, "core": core.id, "socket": core.socket, "node": core.node}
        for core in machine.cores
        if core.node is not None
        for cpu in core.cpus
    ]
    sockets = {core.node: core.socket for core in reversed(machine.cores)}
    pools = ((sockets[node.id], node.id, node.cpus) for node in machine.cpu_nodes)
    return _OfMachine(
        cpu_topology=_compact({"detail": sorted(detail, key=lambda cpu: cpu["id"] or 0)}),
        pools=tuple(sorted(pools, key=lambda pool: pool[:2])),
    )


def _cpu_manager(about: "About") -> Object:
    reserved = about.reserved_cpus
    told = {"reservedCPUs": str(reserved)} if about.cpu_manager_policy == _STATIC else {}
    return {"policy": about.cpu_manager_policy} | (told if reserved else {})


def _pod_cpus(ledger: Ledger, about: "About") -> list[Object] | None:
    """The pods that kubelet pinned, sorted by uid; None for none, as koordlet writes it."""
    pods = []
    for uid, sets in sorted(_exclusive(about).items()):
        if cpus := union(sets.values()):
            name = _pod_name(ledger, uid)
            pods.append(name | {"uid": uid, "cpuset": str(cpus), "managedByKubelet": True})
    return pods or None


def _pod_name(ledger: Ledger, uid: str) -> Object:
    """Nothing for a pod that holds nothing of us: kubelet's state names uids only."""
    grants = ledger.of_pod(uid)
    if not grants:
        return {}
    namespace, _, name = grants[0].pod.partition("/")
    return {"namespace": namespace, "name": name}


def topology_policies(policy: str, scope: str) -> list[str]:
    """Kubelet's topology policy and scope as the one old name for both; None for what has none."""
    name = _POLICIES.get(policy)
    return [f"{name}{_LEVELS[scope]}" if name and scope in _LEVELS else "None"]


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


# --- devices --------------------------------------------------------------------------------------


def to_device(ledger: Ledger, about: "About") -> Object:
    """The Device object of the node, without owner: the GPUs that are offered, by minor.

    A GPU is left out as long as its minor or its memory is unknown: Koordinator counts both. What
    says since when a device is ill is left out too, as nothing here knows the time.
    """
    machine = ledger.layout.machine
    gpus = [gpu for gpu in machine.gpus if gpu.uuid]
    devices = [_device(gpu) for gpu in gpus if gpu.minor is not None and gpu.memory_bytes]
    return {
        "apiVersion": f"{DEVICE_GROUP}/{DEVICE_VERSION}",
        "kind": "Device",
        "metadata": {"name": about.node, "labels": _device_labels(machine) if devices else {}},
        "spec": {"devices": sorted(devices, key=lambda device: device["minor"])},
    }


def _device(gpu: Gpu) -> dict[str, Any]:
    device: dict[str, Any] = {
        "type": "gpu",
        "id": gpu.uuid,
        "minor": gpu.minor,
        "health": gpu.fault is None,
        "resources": {
            "koordinator.sh/gpu-core": _WHOLE,
            "koordinator.sh/gpu-memory": str(gpu.memory_bytes),
            "koordinator.sh/gpu-memory-ratio": _WHOLE,
        },
    }
    return device if gpu.node is None else device | {"topology": _topology(gpu, gpu.node)}


def _topology(gpu: Gpu, node: int) -> Object:
    """Where the device is. Of PCIe only its own address is known, so each GPU is a PCIe of its own:
    nobody is told that two share one. The socket is as koordlet has it."""
    return {
        "socketID": _UNKNOWN_SOCKET,
        "nodeID": node,
        "pcieID": gpu.bdf,
        "busID": gpu.bdf,
    }


def _device_labels(machine: Machine) -> dict[str, str]:
    """The driver's version is not known here."""
    labels = {"node.koordinator.sh/gpu-vendor": "nvidia"}
    if model := to_label_value((common_model(machine) or "").removeprefix("NVIDIA ")):
        labels["node.koordinator.sh/gpu-model"] = model
    return labels
