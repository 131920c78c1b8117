"""What ACK's tools read of a node and write for it: labels, arena's ConfigMap, marks of faults.

Source: arena and ACK's scheduler for what is read. GPUs count as far as they are offered, that is,
once their driver has named them.
"""

import json
import re
from typing import Final

from agent.core.bitmap import MAX_ID
from agent.core.health import FaultMarks
from agent.core.strict_json import Object, part, shown, typed
from agent.core.topology import Gpu, Link, LinkKind, Machine

SCHEDULE_LABEL: Final = "ack.node.gpu.schedule"
SCHEDULE_VALUE: Final = "topology"
NAMESPACE: Final = "kube-system"
"""Of all ConfigMaps here."""
NAME_LABEL: Final = "aliyun.accelerator/nvidia_name"
MEMORY_LABEL: Final = "aliyun.accelerator/nvidia_mem"
COUNT_LABEL: Final = "aliyun.accelerator/nvidia_count"

_LONGEST_VALUE: Final = 63
"""Characters of a label's value. Source: Kubernetes, as is which characters those may be."""
_NOT_IN_VALUES: Final = re.compile(r"[^A-Za-z0-9._-]")

_NVLINK_GBPS: Final = 48.0
_OWN_MEMORY_GBPS: Final = 750.0
_BANDWIDTH_GBPS: Final = {
    LinkKind.PIX: 17.0,
    LinkKind.PXB: 16.5,
    LinkKind.PHB: 16.0,
    LinkKind.NODE: 15.5,
    LinkKind.SYS: 15.0,
}


# --- labels ---------------------------------------------------------------------------------------


def node_labels(machine: Machine) -> dict[str, str]:
    """The labels that tell model, memory (`81920MiB`, as nvidia-smi prints it) and number of GPUs.

    None without GPUs; model and memory only where all GPUs have the same and it is known.
    """
    gpus = _offered(machine)
    if not gpus:
        return {}
    labels = {COUNT_LABEL: str(len(gpus))}
    if name := to_label_value(common_model(machine) or ""):
        labels[NAME_LABEL] = name
    sizes = {gpu.memory_bytes for gpu in gpus}
    if len(sizes) == 1 and (size := sizes.pop()):
        labels[MEMORY_LABEL] = f"{size >> 20}MiB"
    return labels


def common_model(machine: Machine) -> str | None:
    """The model of all GPUs as the driver spells it, None where they differ or it is unknown."""
    models = {gpu.model for gpu in _offered(machine)}
    if len(models) != 1 or (model := models.pop()) in ("", "unknown") or model.startswith("PCI "):
        return None
    return model


def to_label_value(text: str) -> str:
    """The text as a label's value: a dash for each character that cannot be, maybe cut; may end
    up empty."""
    return _NOT_IN_VALUES.sub("-", text).lstrip("-._")[:_LONGEST_VALUE].rstrip("-._")


def check_label(labels: object) -> str | None:
    """A sentence if the labels of the node do not give it to us; None if they do."""
    value = labels.get(SCHEDULE_LABEL) if isinstance(labels, dict) else None
    if value == SCHEDULE_VALUE:
        return None
    wanted = f"{SCHEDULE_LABEL}={SCHEDULE_VALUE}"
    if value is None:
        return (
            f"the node has no label {wanted}, by which ACK knows that its GPUs are given out here"
        )
    return (
        f"the node's label {SCHEDULE_LABEL} is {shown(value)} and not {SCHEDULE_VALUE}, "
        "so its GPUs may be given out by another device plugin as well"
    )


def _offered(machine: Machine) -> list[Gpu]:
    return [gpu for gpu in machine.gpus if gpu.uuid]


# --- arena's ConfigMap ----------------------------------------------------------------------------


def arena_name(node: str) -> str:
    return f"numalet-topology-{node}"


def arena_config_map(machine: Machine, node: str) -> Object:
    """The ConfigMap that `arena top node` shows: the GPUs by index, their links and bandwidths.

    The rows of both matrices are the GPUs in the order of their indices. Bandwidths are in GB/s and
    typical for the kind of link, not measured: 48 for each NVLink (both directions of a V100's), 17
    and less through PCIe. They stand under two keys, as arena reads `bandwith` and others, such as
    ACK's scheduler, `bandwidth`.
    """
    places = [place for place, gpu in enumerate(machine.gpus) if gpu.uuid]
    links = [[machine.links[a][b] for b in places] for a in places]
    healths = {
        str(gpu.index): "Healthy" if gpu.fault is None else "Unhealthy" for gpu in _offered(machine)
    }
    bandwidth = json.dumps([[_bandwidth_gbps(link) for link in row] for row in links])
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": arena_name(node),
            "namespace": NAMESPACE,
            "labels": {SCHEDULE_LABEL: SCHEDULE_VALUE, "nodename": node},
        },
        "data": {
            "nodeName": node,
            "devices": json.dumps(healths),
            "linkType": json.dumps([[str(link) if link else "N-A" for link in r] for r in links]),
            "bandwidth": bandwidth,
            "bandwith": bandwidth,
        },
    }


def _bandwidth_gbps(link: Link | None) -> float:
    if link is None:
        return _OWN_MEMORY_GBPS
    return _NVLINK_GBPS * link.nvlinks if link.nvlinks else _BANDWIDTH_GBPS[link.kind]


# --- the administrator's marks --------------------------------------------------------------------


def device_status_name(node: str) -> str:
    return f"{node}-device-status"


def unhealthy_name(node: str) -> str:
    return f"unhealthy-gpu-{node}"


def parse_device_status(devices: object) -> FaultMarks:
    """The marks in a list of `{deviceId: 0, deviceType: gpu, healthy: false}`; None marks nothing.

    Devices of other types and healthy ones are passed over. Raises ValueError with one sentence.
    """
    if devices is None:
        return FaultMarks()
    marked = [_marked(typed(one, dict, "a device")) for one in typed(devices, list, "devices")]
    return FaultMarks(indices=frozenset(index for index in marked if index is not None))


def _marked(device: Object) -> int | None:
    """The index of a GPU that is marked as faulty."""
    if typed(device.get("deviceType"), str, "deviceType") != "gpu":
        return None
    index = _parse_index(device.get("deviceId"))
    healthy = device.get("healthy")
    if type(healthy) is not bool:
        raise ValueError(f"healthy of GPU {index} is {shown(healthy)}, neither true nor false")
    return None if healthy else index


def parse_unhealthy_gpus(config_map: object) -> FaultMarks:
    """The marks in a ConfigMap whose `data.gpus` is like "0,2".

    Raises ValueError with one sentence.
    """
    data = part(typed(config_map, dict, "it"), "data", dict)
    items = [item.strip() for item in part(data, "gpus", str).split(",")]
    return FaultMarks(indices=frozenset(_parse_index(item) for item in items if item))


def _parse_index(value: object) -> int:
    """A number, or a text of digits."""
    number = value
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 5:
        number = int(value)
    if type(number) is not int or not 0 <= number <= MAX_ID:
        raise ValueError(f"{shown(value)} is no GPU's index")
    return number
