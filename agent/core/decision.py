"""What a scheduler decided about a pod: CPUs and GPUs, from the annotations that it left there.

A decision that cannot be used is a note, never an error: the user did not write it.

Source: ACK, arena and Koordinator for the shapes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from agent.core.bitmap import Bitmap
from agent.core.strict_json import Object, parse_annotation, part, read_annotation, shown, typed
from agent.core.topology import union

CPUSET_KEY = "cpuset"
STATUS_KEY = "scheduling.koordinator.sh/resource-status"
GROUP_KEY = "topology.kubernetes.io/gpu-group"
DEVICES_KEY = "scheduling.koordinator.sh/device-allocated"


class GpuKey(StrEnum):
    """The number by which a scheduler names a GPU: NVML's index or the device's minor."""

    INDEX = "index"
    MINOR = "minor"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecidedGpus:
    """The GPUs that a scheduler chose; `numbers` ascend."""

    by: GpuKey
    numbers: tuple[int, ...]


def read_decided_cpus(
    annotations: Object, names: Sequence[str]
) -> tuple[tuple[tuple[str, Bitmap], ...] | None, list[str]]:
    """Demand's decided_cpus of a pod whose containers have these names, and notes."""
    found, notes = read_annotation(_parse_cpuset, annotations, CPUSET_KEY)
    shared, more = read_annotation(_parse_status, annotations, STATUS_KEY)
    notes += more
    each = found or {}
    if strange := sorted(each.keys() - set(names)):
        notes.append(
            f"annotation {CPUSET_KEY} is ignored for {shown(', '.join(strange))}, not in this pod"
        )
    decided = tuple((name, each[name]) for name in names if each.get(name))
    if not decided:
        return ((("", shared),) if shared else None), notes
    if shared and shared != union(cpus for _, cpus in decided):
        notes.append(f"annotation {STATUS_KEY} is ignored: it contradicts {CPUSET_KEY}")
    return decided, notes


def read_cpus_by_name(annotations: Object) -> dict[str, Bitmap]:
    """The CPUs that a scheduler chose for containers, by their names; empty if none can be read."""
    found, _ = read_annotation(_parse_cpuset, annotations, CPUSET_KEY)
    return found or {}


def _parse_cpuset(value: object) -> dict[str, Bitmap]:
    """`{"<container>":{"<numa>":{"elems":{"<cpu>":{}}}}}` → the CPUs of each container."""
    cpuset = parse_annotation(value)
    return {name: union(map(_read_elems, part(cpuset, name, dict).values())) for name in cpuset}


def _read_elems(node: object) -> Bitmap:
    elems = part(typed(node, dict, "a node"), "elems", dict)
    return Bitmap.parse_list(",".join(elems))


def _parse_status(value: object) -> Bitmap:
    """`{"cpuset":"0-3",…}` → the CPUs."""
    return Bitmap.parse_list(part(parse_annotation(value), "cpuset", str))


def read_decided_gpus(annotations: Object) -> tuple[DecidedGpus | None, list[str]]:
    """The GPUs, None where none are decided, and notes. An index counts before a minor."""
    indices, notes = read_annotation(_parse_group, annotations, GROUP_KEY)
    minors, more = read_annotation(_parse_devices, annotations, DEVICES_KEY)
    notes += more
    if indices and minors and indices != minors:
        notes.append(
            f"annotation {DEVICES_KEY} is ignored: its numbers are not those of {GROUP_KEY}"
        )
    if indices:
        return DecidedGpus(by=GpuKey.INDEX, numbers=tuple(indices)), notes
    return (DecidedGpus(by=GpuKey.MINOR, numbers=tuple(minors)) if minors else None), notes


def _parse_group(value: object) -> Bitmap:
    """`0,2` → the indices."""
    return Bitmap.parse_list(typed(value, str, "it"))


def _parse_devices(value: object) -> Bitmap:
    """`{"gpu":[{"minor":0,…},…],…}` → the minors."""
    devices = part(parse_annotation(value), "gpu", list)
    gpus = [typed(device, dict, "a GPU") for device in devices]
    return Bitmap([typed(gpu.get("minor"), int, "a minor") for gpu in gpus])
