"""What the cluster is to know of this node."""

from collections.abc import Mapping
from dataclasses import dataclass

from agent.config import Config, node_name
from agent.core import ack
from agent.core.koordinator import to_device
from agent.core.ledger import Ledger
from agent.core.report import About, to_nrt
from agent.core.strict_json import Object
from agent.core.topology import EMPTY
from agent.observing import Facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Saying:
    """What the cluster is to know: whole objects, without an owner; None for those that are not to
    be written. `registered`: kubelet has our GPUs."""

    topology: Object
    labels: Mapping[str, str]
    arena: Object | None
    device: Object | None
    registered: bool


def to_about(config: Config, facts: Facts, pinning: str) -> About:
    """What the report says beside the ledger; `pinning` is who gives containers their CPUs."""
    kubelet = facts.kubelet
    policy, scope = config.topology_policy, config.topology_scope
    return About(
        node=node_name(config),
        pods=facts.pods,
        topology_policy=policy if policy != "kubelet" else kubelet.topology_policy or "none",
        topology_scope=scope if scope != "kubelet" else kubelet.topology_scope or "container",
        pinning=pinning,
        cpu_manager_policy=kubelet.cpu_manager_policy or "none",
        reserved_cpus=kubelet.reserved_cpus or EMPTY,
        exclusive=kubelet.exclusive,
    )


def to_saying(ledger: Ledger, about: About, config: Config, registered: bool) -> Saying:
    """What there is to say of a node."""
    machine = ledger.layout.machine
    is_ack, wants_device = config.ack_objects == "yes", config.koordinator_device == "yes"
    return Saying(
        topology=to_nrt(ledger, about),
        labels=ack.node_labels(machine) if is_ack else {},
        arena=ack.arena_config_map(machine, about.node) if is_ack else None,
        device=to_device(ledger, about) if wants_device else None,
        registered=registered,
    )
