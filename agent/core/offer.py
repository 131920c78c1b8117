"""What a node offers to kubelet: its GPUs as devices, the best of them, and how to use them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from agent.core.bitmap import Bitmap
from agent.core.layout import Layout, key
from agent.core.ledger import Ledger
from agent.core.placement import Refusal, choose_gpus, place
from agent.core.request import ContainerDemand, Demand, Exclusive, Invalid, Role
from agent.core.settlement import PodFact, grants_of
from agent.core.strict_json import shown
from agent.core.topology import Gpu, Machine

GPUS_KEY = "numalet.io/gpus"
"""Annotation of a container: the keys of its GPUs, one after the other, as `GPU-1,GPU-2`."""
NODES_KEY = "numalet.io/nodes"
"""Annotation of a container: the nodes of its GPUs as a list, `0` or `0-1`; absent if unknown."""
VISIBLE_DEVICES = "NVIDIA_VISIBLE_DEVICES"
"""Source: the environment variable that NVIDIA's container runtime reads."""

_CONTROL_NODES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")


class IdKind(StrEnum):
    """What a GPU is called by."""

    UUID = "uuid"
    INDEX = "index"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How devices are named, and how a container gets at them.

    `device_nodes` are those that exist, by their names below `dev_dir` on the host (`nvidia0`).
    With a `cdi_kind` (`nvidia.com/gpu`) the runtime is given CDI names, and nothing else.
    """

    ids: IdKind = IdKind.UUID
    visible: IdKind = IdKind.UUID
    cdi_kind: str = ""
    dev_dir: str = "/dev"
    device_nodes: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU as kubelet sees it; `nodes` are NUMA node ids, empty where they are not told."""

    id: str
    healthy: bool
    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """What a container is given. `device_nodes` are (path on the host, path in the container)."""

    envs: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    device_nodes: tuple[tuple[str, str], ...] = ()
    cdi_devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """All devices of a machine, in its order. `place_of` is the place of a GPU by device id."""

    layout: Layout
    manner: Manner
    devices: tuple[Device, ...]
    place_of: Mapping[str, int]

    def places(self, ids: Iterable[str]) -> Bitmap:
        """The places of those ids that are offered."""
        return Bitmap(self.place_of[one] for one in ids if one in self.place_of)

    def ids(self, places: Bitmap) -> tuple[str, ...]:
        gpus = self.layout.machine.gpus
        return tuple(_name(gpus[place], self.manner.ids) for place in places)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """The devices that kubelet gave one pod: ids by container name. `pod` is "namespace/name"."""

    pod: str
    devices: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PodList:
    """What kubelet told in one answer: who holds devices, by pod, and (namespace, name) of all
    pods that it has, both sorted."""

    holdings: tuple[Holding, ...] = ()
    pods: tuple[tuple[str, str], ...] = ()


def make_offer(layout: Layout, manner: Manner) -> Offer:
    """GPUs that the driver never named are not offered; those with a fault are, as unhealthy.

    Nodes are told for all devices or for none: kubelet takes a device without one for a device on
    no node, and refuses pods that would fit.
    """
    offered = {
        _name(gpu, manner.ids): place for place, gpu in enumerate(layout.machine.gpus) if gpu.uuid
    }
    gpus = {name: layout.machine.gpus[place] for name, place in offered.items()}
    known = all(gpu.node is not None for gpu in gpus.values())
    devices = tuple(
        Device(
            id=name,
            healthy=gpu.fault is None,
            nodes=(gpu.node,) if known and gpu.node is not None else (),
        )
        for name, gpu in gpus.items()
    )
    return Offer(layout=layout, manner=manner, devices=devices, place_of=offered)


def _name(gpu: Gpu, kind: IdKind) -> str:
    return str(gpu.index) if kind is IdKind.INDEX else key(gpu)


def prefer(
    offer: Offer,
    ledger: Ledger,
    pending: Sequence[Demand],
    available: Sequence[str],
    include: Sequence[str],
    count: int,
) -> tuple[str, ...]:
    """The `count` best of the `available` devices, with all of `include`. Never raises.

    `pending` are pods that wait for devices, in the order of their admission: the first one with a
    container of that size gets what its scheduler or its policy chose for it. What cannot be is
    answered with what comes nearest: unknown devices are not preferred, nor are those with a fault
    that kubelet has not heard of yet; more than there are is all there are.
    """
    must = offer.places(include)
    among = offer.places(available) | must
    count = min(count, len(among))
    if count <= len(must):
        return offer.ids(must)[: max(count, 0)]
    sound = (among & ledger.layout.sound) | must
    if len(sound) >= count:
        among = sound
    for gpus in _planned(ledger, pending, count):
        if must <= gpus <= among:
            return offer.ids(gpus)
    return offer.ids(choose_gpus(ledger, among, must, count))


def _planned(ledger: Ledger, pending: Sequence[Demand], count: int) -> Iterator[Bitmap]:
    """The sets of that many GPUs that containers of pending pods should get, in the order of pods.

    All pending pods are placed beside each other, those that a scheduler decided first. What one of
    them has already is a part of its place.
    """
    names = {demand.pod for demand in pending}
    ledger = ledger.without({grant.uid for grant in ledger.grants if grant.pod in names})
    sets: dict[str, list[Bitmap]] = {}
    for demand in sorted(pending, key=lambda demand: demand.decided_gpus is None):
        placement = place(ledger, demand)
        if not isinstance(placement, Refusal):
            grants = grants_of(ledger.layout, demand, placement, demand.uid)
            ledger = ledger.with_grants(grants)
            sets[demand.uid] = [one.gpus for one in placement.containers if len(one.gpus) == count]
    for demand in pending:
        yield from sets.get(demand.uid, ())


def allocate(offer: Offer, ids: Sequence[str]) -> Allocation | Refusal:
    """How one container gets at these devices. The same ids give the same answer, in any order."""
    if unknown := sorted(set(ids) - offer.place_of.keys()):
        return Refusal(reason=f"there is no device {shown(unknown[0])} here")
    if len(set(ids)) < len(ids):
        return Refusal(reason="a device is asked for twice")
    if not ids:
        return Refusal(reason="no device is asked for")
    layout, manner = offer.layout, offer.manner
    gpus = [layout.machine.gpus[place] for place in offer.places(ids)]
    nodes = {gpu.node for gpu in gpus}
    annotations = {GPUS_KEY: ",".join(key(gpu) for gpu in gpus)}
    if None not in nodes:
        annotations[NODES_KEY] = str(Bitmap(node for node in nodes if node is not None))
    if manner.cdi_kind:
        names = tuple(f"{manner.cdi_kind}={_name(gpu, manner.visible)}" for gpu in gpus)
        return Allocation(annotations=annotations, cdi_devices=names)
    return Allocation(
        envs={VISIBLE_DEVICES: ",".join(_name(gpu, manner.visible) for gpu in gpus)},
        annotations=annotations,
        device_nodes=tuple(
            (f"{manner.dev_dir}/{name}", f"/dev/{name}") for name in _device_nodes(manner, gpus)
        ),
    )


def _device_nodes(manner: Manner, gpus: Sequence[Gpu]) -> list[str]:
    own = [f"nvidia{gpu.minor}" for gpu in gpus if gpu.minor is not None]
    return [name for name in (*own, *_CONTROL_NODES) if name in manner.device_nodes]


def keys_by_id(machine: Machine, ids: IdKind) -> dict[str, str]:
    """The key of each GPU by its device id."""
    return {_name(gpu, ids): key(gpu) for gpu in machine.gpus}


def to_fact(keys: Mapping[str, str], holding: Holding, uid: str = "") -> PodFact:
    """A pod of which only its devices are known: it has no policy, and without a `uid` none but its
    name.

    `keys` are those of keys_by_id; a device that is not there any more is its own key.
    """
    given = {
        name: tuple(keys.get(one, one) for one in ids) for name, ids in holding.devices.items()
    }
    return PodFact(demand=_demand(holding, uid or holding.pod), given=given)


def _demand(holding: Holding, uid: str) -> Demand | Invalid:
    try:
        containers = tuple(
            ContainerDemand(name=name, role=Role.APP, gpus=len(ids), cpus=0, memory_bytes=None)
            for name, ids in holding.devices.items()
        )
        return Demand(
            pod=holding.pod,
            uid=uid,
            policy=None,
            exclusive=Exclusive.REQUIRED,
            pinned=False,
            containers=containers,
            decided_cpus=None,
            decided_gpus=None,
            notes=(),
        )
    except ValueError as reason:
        return Invalid(pod=holding.pod, uid=uid, reason=str(reason))
