"""What Koordinator reads: expected texts are written by hand in the shapes that koordlet writes."""

import json
from dataclasses import replace
from typing import Any

import pytest

from agent.core.bitmap import Bitmap
from agent.core.koordinator import (
    DEVICE_GROUP,
    DEVICE_PLURAL,
    DEVICE_VERSION,
    annotations,
    to_device,
    topology_policies,
)
from agent.core.report import About
from agent.core.topology import Core, Gpu, Machine, NodeSource
from tests.core.machines import described
from tests.core.oracle import build, grant, ledger_of

# 8 CPUs: node 0 has 0-3, node 1 has 4-7, the threads of a core are side by side.
SMALL = build((0, 2), (0, 2))
IDLE = ledger_of(SMALL)
# Three pods that hold CPUs 3, 4 and 5.
BUSY = ledger_of(SMALL, grant("a", cpus="3"), grant("b", cpus="4"), grant("c", cpus="5"))
NOBODY = About(node="n1")
STATIC = About(
    node="n1",
    cpu_manager_policy="static",
    reserved_cpus=Bitmap([0, 1]),
    exclusive={"k": {"main": Bitmap([1])}},
)


def pools(ledger: Any, about: About = NOBODY) -> str:
    """The shared pools; both are the same."""
    said = annotations(ledger, about)
    assert (
        said["node.koordinator.sh/be-cpu-shared-pools"]
        == (said["node.koordinator.sh/cpu-shared-pools"])
    )
    return said["node.koordinator.sh/cpu-shared-pools"]


def test_the_annotations_are_these_five() -> None:
    assert sorted(annotations(IDLE, NOBODY)) == [
        "kubelet.koordinator.sh/cpu-manager-policy",
        "node.koordinator.sh/be-cpu-shared-pools",
        "node.koordinator.sh/cpu-shared-pools",
        "node.koordinator.sh/cpu-topology",
        "node.koordinator.sh/pod-cpu-allocs",
    ]


# --- CPUs -----------------------------------------------------------------------------------------


def test_cpu_topology_is_sorted_by_cpu() -> None:
    said = annotations(ledger_of(build((0, 1), (0, 1))), NOBODY)
    assert said["node.koordinator.sh/cpu-topology"] == (
        '{"detail":[{"id":0,"core":0,"socket":0,"node":0},{"id":1,"core":0,"socket":0,"node":0},'
        '{"id":2,"core":1,"socket":1,"node":1},{"id":3,"core":1,"socket":1,"node":1}]}'
    )


def test_cpu_topology_of_a_server_whose_threads_are_apart() -> None:
    """Core i of 64 has the CPUs i and i + 64; sockets and nodes are halves."""
    said = annotations(ledger_of(described("a800x8")), NOBODY)
    assert json.loads(said["node.koordinator.sh/cpu-topology"]) == {
        "detail": [
            {"id": cpu, "core": cpu % 64, "socket": cpu % 64 // 32, "node": cpu % 64 // 32}
            for cpu in range(128)
        ]
    }


def test_cpus_on_an_offline_node_are_left_out() -> None:
    lost = Core(id=4, socket=1, node=None, l3=None, cpus=Bitmap([8]))
    said = annotations(ledger_of(replace(SMALL, cores=(*SMALL.cores, lost))), NOBODY)
    assert '"id":8' not in said["node.koordinator.sh/cpu-topology"]
    assert said["node.koordinator.sh/cpu-shared-pools"] == (
        '[{"socket":0,"node":0,"cpuset":"0-3"},{"socket":1,"node":1,"cpuset":"4-7"}]'
    )


def test_pools_are_what_nobody_holds() -> None:
    assert pools(BUSY) == (
        '[{"socket":0,"node":0,"cpuset":"0-2"},{"socket":1,"node":1,"cpuset":"6-7"}]'
    )


def test_pools_lack_what_kubelet_gave_but_not_what_it_reserves() -> None:
    assert pools(BUSY, STATIC) == (
        '[{"socket":0,"node":0,"cpuset":"0,2"},{"socket":1,"node":1,"cpuset":"6-7"}]'
    )


def test_our_own_reserved_cpus_stay_in_the_pools() -> None:
    assert pools(ledger_of(SMALL, reserved="0-1")) == pools(IDLE)


def test_a_node_that_is_held_whole_has_no_pool() -> None:
    assert pools(ledger_of(SMALL, grant("a", cpus="0-3"))) == (
        '[{"socket":1,"node":1,"cpuset":"4-7"}]'
    )
    assert pools(ledger_of(SMALL, grant("a", cpus="0-7"))) == "null"


def test_pools_are_sorted_by_socket_first() -> None:
    cores = tuple(replace(core, socket=1 - core.socket) for core in SMALL.cores)
    assert pools(ledger_of(replace(SMALL, cores=cores))) == (
        '[{"socket":0,"node":1,"cpuset":"4-7"},{"socket":1,"node":0,"cpuset":"0-3"}]'
    )


def test_a_node_of_two_sockets_is_on_that_of_its_first_core() -> None:
    first, second = build((0, 2)).cores
    machine = replace(build((0, 2)), cores=(first, replace(second, socket=1)))
    assert pools(ledger_of(machine)) == '[{"socket":0,"node":0,"cpuset":"0-3"}]'


# --- kubelet --------------------------------------------------------------------------------------

# About → the CPU manager's policy, the pods that kubelet pinned
KUBELET = {
    "a policy that pins nobody": (NOBODY, '{"policy":"none"}', "null"),
    "nothing is told of reserved CPUs that do nothing": (
        replace(NOBODY, reserved_cpus=Bitmap([0])),
        '{"policy":"none"}',
        "null",
    ),
    "what a former policy left behind does not count": (
        replace(STATIC, cpu_manager_policy="none"),
        '{"policy":"none"}',
        "null",
    ),
    "a static policy with a pod of its own": (
        STATIC,
        '{"policy":"static","reservedCPUs":"0-1"}',
        '[{"uid":"k","cpuset":"1","managedByKubelet":true}]',
    ),
    "a static policy whose reserved CPUs nobody told": (
        replace(STATIC, reserved_cpus=Bitmap(), exclusive={}),
        '{"policy":"static"}',
        "null",
    ),
    "pods come by uid, each with all its containers, and not without CPUs": (
        replace(
            STATIC,
            exclusive={
                "z": {"one": Bitmap([6]), "two": Bitmap([7])},
                "k": {"": Bitmap([1, 2])},
                "empty": {"one": Bitmap()},
                "none": {},
            },
        ),
        '{"policy":"static","reservedCPUs":"0-1"}',
        '[{"uid":"k","cpuset":"1-2","managedByKubelet":true},'
        '{"uid":"z","cpuset":"6-7","managedByKubelet":true}]',
    ),
    "a pod that we know too has a name": (
        replace(STATIC, exclusive={"a": {"main": Bitmap([1])}}),
        '{"policy":"static","reservedCPUs":"0-1"}',
        '[{"namespace":"ns","name":"a","uid":"a","cpuset":"1","managedByKubelet":true}]',
    ),
}


@pytest.mark.parametrize(("about", "policy", "pods"), KUBELET.values(), ids=KUBELET)
def test_kubelet(about: About, policy: str, pods: str) -> None:
    said = annotations(BUSY, about)
    assert said["kubelet.koordinator.sh/cpu-manager-policy"] == policy
    assert said["node.koordinator.sh/pod-cpu-allocs"] == pods


POLICIES = {
    ("single-numa-node", "container"): "SingleNUMANodeContainerLevel",
    ("single-numa-node", "pod"): "SingleNUMANodePodLevel",
    ("restricted", "container"): "RestrictedContainerLevel",
    ("restricted", "pod"): "RestrictedPodLevel",
    ("best-effort", "container"): "BestEffortContainerLevel",
    ("best-effort", "pod"): "BestEffortPodLevel",
    ("none", "container"): "None",
    ("none", "pod"): "None",
    ("of the future", "pod"): "None",
    ("restricted", "of the future"): "None",
}


@pytest.mark.parametrize(("kubelet", "old"), POLICIES.items(), ids=map(" ".join, POLICIES))
def test_topology_policies(kubelet: tuple[str, str], old: str) -> None:
    assert topology_policies(*kubelet) == [old]


# --- devices --------------------------------------------------------------------------------------


def with_gpus(*gpus: Gpu) -> Machine:
    """A machine of two nodes with these GPUs."""
    links = build((len(gpus), 1)).links
    return replace(build((0, 2), (0, 2)), gpus=gpus, links=links)


def gpu(index: int, **more: Any) -> Gpu:
    facts: dict[str, Any] = {
        "index": index,
        "minor": index,
        "uuid": f"GPU-{index}",
        "bdf": f"0000:{index:02x}:00.0",
        "model": "NVIDIA A800-SXM4-80GB",
        "memory_bytes": 80 << 30,
        "node": 1,
        "node_source": NodeSource.SYSFS,
        **more,
    }
    return Gpu(**facts)


def device(*gpus: Gpu) -> dict[str, Any]:
    return to_device(ledger_of(with_gpus(*gpus)), NOBODY)


def test_a_device_object() -> None:
    seatless = gpu(1, minor=0, node=None, node_source=NodeSource.UNKNOWN, fault="Xid 79: gone")
    assert device(gpu(0, minor=1), seatless) == {
        "apiVersion": "scheduling.koordinator.sh/v1alpha1",
        "kind": "Device",
        "metadata": {
            "name": "n1",
            "labels": {
                "node.koordinator.sh/gpu-vendor": "nvidia",
                "node.koordinator.sh/gpu-model": "A800-SXM4-80GB",
            },
        },
        "spec": {
            "devices": [
                {
                    "type": "gpu",
                    "id": "GPU-1",
                    "minor": 0,
                    "health": False,
                    "resources": {
                        "koordinator.sh/gpu-core": "100",
                        "koordinator.sh/gpu-memory": "85899345920",
                        "koordinator.sh/gpu-memory-ratio": "100",
                    },
                },
                {
                    "type": "gpu",
                    "id": "GPU-0",
                    "minor": 1,
                    "health": True,
                    "resources": {
                        "koordinator.sh/gpu-core": "100",
                        "koordinator.sh/gpu-memory": "85899345920",
                        "koordinator.sh/gpu-memory-ratio": "100",
                    },
                    "topology": {
                        "socketID": -1,
                        "nodeID": 1,
                        "pcieID": "0000:00:00.0",
                        "busID": "0000:00:00.0",
                    },
                },
            ]
        },
    }


def test_where_devices_are() -> None:
    assert f"{DEVICE_PLURAL}.{DEVICE_GROUP}/{DEVICE_VERSION}" == (
        "devices.scheduling.koordinator.sh/v1alpha1"
    )


UNTOLD = {
    "one that the driver never named": gpu(1, uuid=None),
    "one without a minor": gpu(1, minor=None),
    "one of unknown memory": gpu(1, memory_bytes=None),
    "one of no memory": gpu(1, memory_bytes=0),
}


@pytest.mark.parametrize("untold", UNTOLD.values(), ids=UNTOLD)
def test_gpus_that_are_left_out(untold: Gpu) -> None:
    assert [one["id"] for one in device(gpu(0), untold)["spec"]["devices"]] == ["GPU-0"]


def test_no_gpus_no_labels() -> None:
    assert device()["metadata"]["labels"] == {}
    assert device()["spec"] == {"devices": []}


MODELS = {
    "as the driver spells it, without the maker": (
        ["NVIDIA GeForce RTX 4090"] * 2,
        "GeForce-RTX-4090",
    ),
    "without a maker": (["Tesla T4"], "Tesla-T4"),
    "different models are none": (["NVIDIA L20", "NVIDIA L40"], None),
    "a model that nobody knows is none": (["PCI 10de:20f3"], None),
    "a model of the maker alone is none": (["NVIDIA "], None),
}


@pytest.mark.parametrize(("models", "label"), MODELS.values(), ids=MODELS)
def test_the_model(models: list[str], label: str | None) -> None:
    gpus = [gpu(index, model=model) for index, model in enumerate(models)]
    vendor = {"node.koordinator.sh/gpu-vendor": "nvidia"}
    known = {"node.koordinator.sh/gpu-model": label} if label else {}
    assert device(*gpus)["metadata"]["labels"] == vendor | known
