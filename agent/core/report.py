"""Machine + Ledger ↔ NodeResourceTopology (topology.node.k8s.io/v1alpha2), with its annotations.

A zone for each NUMA node tells schedulers what is there and what is left. Two annotations tell all
of it: `numalet.io/machine`, the JSON of schema.py, packed (zlib, base64), and `numalet.io/grants`,
JSON to be read by people too:

    {"reserved": "0-1", "pods": [{"uid": …, "pod": "ns/name", "containers": [
        {"name": …, "gpus": ["GPU-…"], "cpus": "2-5", "mems": "0", "bound_bytes": 8589934592}]}]}

where what is empty is left out, and `"placed": false` says that it was refused. The same ledger
always gives the same text.
"""

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from typing import Any

from agent.core import koordinator
from agent.core.bitmap import Bitmap
from agent.core.fingerprint import fingerprint
from agent.core.layout import Layout, lay_out
from agent.core.ledger import Grant, Ledger
from agent.core.merging import MANAGED_BY, MANAGER, OWN_PREFIX, is_foreign, merge, shows
from agent.core.request import GPU_RESOURCE
from agent.core.schema import MAX_MACHINE_LENGTH, parse_machine, to_json
from agent.core.strict_json import Object, parse_json, part, shown, typed
from agent.core.topology import EMPTY, Machine, NumaNode

__all__ = [
    "CPUS_ATTRIBUTE",
    "GPUS_ATTRIBUTE",
    "GRANTS_KEY",
    "GROUP",
    "MACHINE_KEY",
    "PINNING_ATTRIBUTE",
    "PLURAL",
    "STATES_ATTRIBUTE",
    "STATE_ATTRIBUTE",
    "TOPOLOGY_POLICIES",
    "TOPOLOGY_SCOPES",
    "VERSION",
    "About",
    "from_nrt",
    "is_foreign",
    "merge",
    "shows",
    "to_nrt",
]

GROUP = "topology.node.k8s.io"
VERSION = "v1alpha2"
PLURAL = "noderesourcetopologies"

MACHINE_KEY = f"{OWN_PREFIX}machine"
GRANTS_KEY = f"{OWN_PREFIX}grants"
PINNING_ATTRIBUTE = f"{OWN_PREFIX}pinning"
"""Of the node: who pins CPUs, `nri`, `cgroup` or `none`."""
STATE_ATTRIBUTE = f"{OWN_PREFIX}state"
"""Of a zone with CPUs: its NodeState."""
GPUS_ATTRIBUTE = f"{OWN_PREFIX}gpus"
CPUS_ATTRIBUTE = f"{OWN_PREFIX}cpus"
"""Of the node: what is available of what is allocatable in each zone, in their order; a dash where
there is none. For the columns of kubectl, which cannot join zones."""
STATES_ATTRIBUTE = f"{OWN_PREFIX}states"
"""Of the node: the states of its zones, likewise."""

TOPOLOGY_POLICIES = ("none", "best-effort", "restricted", "single-numa-node")
"""Of kubelet's topology manager, as kubelet and the report spell them."""
TOPOLOGY_SCOPES = ("container", "pod")

_MAX_ANNOTATIONS = 256 << 10
"""Bytes of all annotations of an object together. Source: Kubernetes."""
_UNITS = tuple((1 << 10 * power, f"{prefix}i") for power, prefix in enumerate("KMGTPE", 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """What a report says beside the ledger.

    `node` is the Kubernetes node, and the name of the object. `pods` are those of the answer of
    kubelet's that the ledger follows. `cpu_manager_policy` and `reserved_cpus` are kubelet's own;
    `exclusive` are the CPUs that its static CPU manager gave, by uid and container.
    """

    node: str
    pods: tuple[tuple[str, str], ...] = ()
    topology_policy: str = "none"
    topology_scope: str = "container"
    pinning: str = "none"
    cpu_manager_policy: str = "none"
    reserved_cpus: Bitmap = EMPTY
    exclusive: Mapping[str, Mapping[str, Bitmap]] = field(default_factory=dict)


def to_nrt(ledger: Ledger, about: About) -> dict[str, Any]:
    """The whole object, without owner."""
    own = {
        MACHINE_KEY: _pack_machine(ledger.layout.machine),
        GRANTS_KEY: _write_grants(ledger),
    }
    zones = _zones(ledger, about)
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": "NodeResourceTopology",
        "metadata": {
            "name": about.node,
            "labels": {MANAGED_BY: MANAGER},
            "annotations": koordinator.annotations(ledger, about) | own,
        },
        "topologyPolicies": koordinator.topology_policies(
            about.topology_policy, about.topology_scope
        ),
        "attributes": _named(
            {
                "nodeTopologyPodsFingerprint": fingerprint(about.pods),
                "nodeTopologyPodsFingerprintMethod": "all",
                PINNING_ATTRIBUTE: about.pinning,
                "topologyManagerPolicy": about.topology_policy,
                "topologyManagerScope": about.topology_scope,
            }
            | _overview(zones)
        ),
        "zones": zones,
    }


def _overview(zones: Sequence[Object]) -> dict[str, str]:
    """What the columns of kubectl show; what no zone has is left out."""
    resources = [{one["name"]: one for one in zone["resources"]} for zone in zones]
    states = [{one["name"]: one["value"] for one in zone.get("attributes", ())} for zone in zones]
    columns = {
        GPUS_ATTRIBUTE: [_free(of_zone.get(GPU_RESOURCE)) for of_zone in resources],
        CPUS_ATTRIBUTE: [_free(of_zone.get("cpu")) for of_zone in resources],
        STATES_ATTRIBUTE: [of_zone.get(STATE_ATTRIBUTE, "-") for of_zone in states],
    }
    return {name: " ".join(cells) for name, cells in columns.items() if set(cells) != {"-"}}


def _free(resource: Object | None) -> str:
    return f"{resource['available']}/{resource['allocatable']}" if resource else "-"


def _named(values: Mapping[str, Any]) -> list[Object]:
    return [{"name": name, "value": values[name]} for name in sorted(values)]


# --- zones ----------------------------------------------------------------------------------------


def _zones(ledger: Ledger, about: About) -> list[Object]:
    """By ascending node id."""
    free = ledger.free_cpus - koordinator.kubelet_held(about)
    gpus = _offered_on(ledger.layout)
    states = {
        seat.id: state for seat, state in zip(ledger.layout.seats, ledger.states, strict=True)
    }
    zones = []
    for node in ledger.layout.machine.nodes:
        resources = _own_resources(ledger, node, free)
        if node.id in gpus:
            resources.append(_gpu_resource(ledger, gpus[node.id]))
        zone = _empty_zone(ledger.layout.machine, node)
        if node.id in states:
            zone["attributes"] = _named({STATE_ATTRIBUTE: states[node.id].value})
        zone["resources"] = sorted(resources, key=lambda resource: resource["name"])
        zones.append(zone)
    return zones


def _empty_zone(machine: Machine, node: NumaNode) -> Object:
    """What never changes of a zone. `costs` are to all nodes or, where distances are unknown, not
    there."""
    zone: Object = {"name": _zone_name(node), "type": "Node"}
    if node.distances:
        distances = zip(machine.nodes, node.distances, strict=True)
        zone["costs"] = [{"name": _zone_name(other), "value": far} for other, far in distances]
    return zone


def _zone_name(node: NumaNode) -> str:
    return f"node-{node.id}"


def _resource(name: str, capacity: int, allocatable: int, available: int) -> Object:
    return {
        "name": name,
        "capacity": str(capacity),
        "allocatable": str(allocatable),
        "available": str(available),
    }


def _own_resources(ledger: Ledger, node: NumaNode, free: Bitmap) -> list[Object]:
    """CPUs and memory. Whoever uses huge pages is not known, so all are available."""
    huge = {size: size * pages for size, pages in node.hugepages}
    memory = max(0, node.memory_bytes - sum(huge.values()))
    bound = sum(-(-size // len(ids)) for ids, size in ledger.bound.items() if node.id in ids)
    allocatable = node.cpus - ledger.reserved
    return [
        _resource("cpu", len(node.cpus), len(allocatable), len(free & node.cpus)),
        _resource("memory", memory, memory, max(0, memory - bound)),
        *(
            _resource(f"hugepages-{_size(size)}", total, total, total)
            for size, total in huge.items()
            if total
        ),
    ]


def _size(size: int) -> str:
    """A number of bytes as short as can be: 2097152 → 2Mi."""
    unit, suffix = max((one for one in _UNITS if size % one[0] == 0), default=(1, ""))
    return f"{size // unit}{suffix}"


def _offered_on(layout: Layout) -> dict[int, Bitmap]:
    """The places of the GPUs that kubelet is offered, by node id.

    Empty as soon as the node of one is unknown: a scheduler takes GPUs that are in no zone for
    GPUs that are in none, as kubelet does.
    """
    gpus = layout.machine.gpus
    offered = Bitmap(place for place, gpu in enumerate(gpus) if gpu.uuid)
    if offered & layout.seatless:
        return {}
    return {seat.id: offered & seat.gpus for seat in layout.seats if offered & seat.gpus}


def _gpu_resource(ledger: Ledger, gpus: Bitmap) -> Object:
    sound, free = gpus & ledger.layout.sound, gpus & ledger.free_gpus
    return _resource(GPU_RESOURCE, len(gpus), len(sound), len(free))


# --- the annotations ------------------------------------------------------------------------------


@lru_cache(maxsize=4)
def _pack_machine(machine: Machine) -> str:
    packed = zlib.compress(_compact(to_json(machine)).encode("ascii"), 9)
    return base64.b64encode(packed).decode("ascii")


def _write_grants(ledger: Ledger) -> str:
    pods = [
        {"uid": uid, "pod": pod, "containers": [_grant_to_json(grant) for grant in grants]}
        for (uid, pod), grants in groupby(ledger.grants, key=lambda grant: (grant.uid, grant.pod))
    ]
    reserved = {"reserved": str(ledger.reserved)} if ledger.reserved else {}
    return _compact(reserved | {"pods": pods})


def _grant_to_json(grant: Grant) -> Object:
    told = {
        "name": grant.container,
        "gpus": list(grant.gpus),
        "cpus": str(grant.cpus),
        "mems": str(grant.mems),
        "bound_bytes": grant.bound_bytes,
    }
    container: Object = {key: value for key, value in told.items() if value or key == "name"}
    return container if grant.placed else container | {"placed": False}


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


# --- and back -------------------------------------------------------------------------------------


def from_nrt(nrt: object) -> Ledger:
    """The ledger, with its machine, that a report was made of. Raises ValueError with one sentence.

    Reports with the same machine share one Layout, as long as few others are read in between.
    """
    annotations = part(part(typed(nrt, dict, "the report"), "metadata", dict), "annotations", dict)
    texts = [_text(annotations, key) for key in (MACHINE_KEY, GRANTS_KEY)]
    key = MACHINE_KEY
    try:
        layout = _parse_layout(texts[0])
        key = GRANTS_KEY
        reserved, grants = _parse_grants(texts[1])
        return Ledger(layout=layout, reserved=reserved, grants=grants)
    except ValueError as reason:
        raise ValueError(f"annotation {key} cannot be used: {reason}") from None


def _text(annotations: Object, key: str) -> str:
    if key not in annotations:
        raise ValueError(f"the report has no annotation {key}")
    text = typed(annotations[key], str, f"annotation {key}")
    if len(text) > _MAX_ANNOTATIONS:
        raise ValueError(f"annotation {key} has more than {_MAX_ANNOTATIONS:,} characters")
    return text


@lru_cache(maxsize=64)
def _parse_layout(text: str) -> Layout:
    return lay_out(parse_machine(_unpack(text)))


def _unpack(text: str) -> str:
    """The text that was packed, MAX_MACHINE_LENGTH bytes of it at most."""
    reader = zlib.decompressobj()
    try:
        plain = reader.decompress(base64.b64decode(text, validate=True), MAX_MACHINE_LENGTH + 1)
    except zlib.error:
        raise ValueError("it is not compressed with zlib") from None
    except ValueError:
        raise ValueError("it is not base64") from None
    if len(plain) > MAX_MACHINE_LENGTH:
        raise ValueError(f"it unpacks to more than {MAX_MACHINE_LENGTH:,} bytes")
    if not reader.eof or reader.unused_data:
        raise ValueError("what is compressed does not end where it should")
    try:
        return plain.decode("ascii")
    except UnicodeDecodeError:
        raise ValueError("it is not text in ASCII") from None


def _parse_grants(text: str) -> tuple[Bitmap, tuple[Grant, ...]]:
    data = typed(parse_json(text, _MAX_ANNOTATIONS), dict, "it")
    pods = [typed(pod, dict, "a pod") for pod in part(data, "pods", list)]
    grants = tuple(
        _parse_grant(pod, typed(container, dict, "a container"))
        for pod in pods
        for container in part(pod, "containers", list)
    )
    return Bitmap.parse_list(part(data, "reserved", str)), grants


def _parse_grant(pod: Object, container: Object) -> Grant:
    placed, bound_bytes = container.get("placed", True), part(container, "bound_bytes", int)
    if type(placed) is not bool:
        raise ValueError(f"placed is {shown(placed)}, neither true nor false")
    if not 0 <= bound_bytes < 1 << 63:
        raise ValueError(f"bound_bytes is {shown(bound_bytes)}, no number of bytes")
    return Grant(
        uid=typed(pod.get("uid"), str, "uid"),
        pod=typed(pod.get("pod"), str, "pod"),
        container=typed(container.get("name"), str, "name"),
        gpus=tuple(typed(key, str, "a GPU") for key in part(container, "gpus", list)),
        cpus=Bitmap.parse_list(part(container, "cpus", str)),
        mems=Bitmap.parse_list(part(container, "mems", str)),
        bound_bytes=bound_bytes,
        placed=placed,
    )
