"""The topology reports of a cluster, brought together with its nodes: one NodeView a node.

A report that numalet wrote is read exactly, by its annotations. One that others wrote is shown by
its zones, as far as these go. `core.inspection_text` draws the views.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from agent.core.inspection_zones import (
    Holder,
    Zone,
    as_object,
    describe_machine,
    doubts_of,
    holders_of,
    models_of,
    natural,
    parse_zones,
    read_attributes,
    zones_of,
)
from agent.core.ledger import Ledger
from agent.core.report import (
    MACHINE_KEY,
    PINNING_ATTRIBUTE,
    TOPOLOGY_POLICIES,
    from_nrt,
    is_foreign,
)
from agent.core.request import GPU_RESOURCE, parse_quantity
from agent.core.strict_json import Object, part, printable, typed

OURS: Final = "numalet"
_MODE_LABEL: Final = "ack.node.gpu.schedule"
_OUR_MODE: Final = "topology"
_POLICY, _SCOPE = "topologyManagerPolicy", "topologyManagerScope"


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeNode:
    """What the API server says of a node itself.

    `status` as `kubectl get nodes` words it. `gpus` are those that kubelet offers, sound or not.
    `ours`: its label gives its GPUs to numalet.
    """

    name: str
    status: str = ""
    gpus: int = 0
    ours: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """One node. Texts are empty where the report does not tell; `reporter` is who wrote the zones,
    empty without a report. `offered` is the count of GPUs that only kubelet tells of. `gone`: the
    report is of a node that is not there any more; its GPUs do not count."""

    name: str
    status: str = ""
    reporter: str = ""
    models: tuple[str, ...] = ()
    machine: str = ""
    zones: tuple[Zone, ...] = ()
    offered: int = 0
    policy: str = ""
    scope: str = ""
    pinning: str = ""
    holders: tuple[Holder, ...] = ()
    warnings: tuple[str, ...] = ()
    gone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCount:
    """`untold` GPUs are on nodes without a report: who holds them is not known."""

    held: int
    total: int
    unhealthy: int
    untold: int


def inspect_cluster(
    reports: Iterable[object],
    nodes: Mapping[str, KubeNode] | None,
    *,
    only_these: bool = False,
    each: bool = False,
) -> tuple[NodeView, ...]:
    """The views, node-2 before node-10. Reports may come twice; the last one counts.

    `nodes` are by name, None where nobody may list them. `only_these` leaves out reports of others.
    A node without a report is shown if it should have one, with `each` in any case.
    """
    views: dict[str, NodeView] = {}
    for report in reports:
        name = name_of(report)
        if name and not (only_these and name not in (nodes or {})):
            views[name] = _see(name, report, nodes)
    for node in (nodes or {}).values():
        if node.name not in views and (each or node.gpus or node.ours):
            views[node.name] = _see_none(node)
    return tuple(views[name] for name in sorted(views, key=natural))


def name_of(value: object) -> str:
    """metadata.name, empty where there is none."""
    meta = value.get("metadata") if type(value) is dict else None
    name = meta.get("name") if type(meta) is dict else None
    return printable(name, 253) if type(name) is str else ""


def count_gpus(views: Iterable[NodeView]) -> GpuCount:
    there = tuple(views)
    zones = [zone for view in there for zone in view.zones]
    return GpuCount(
        held=sum(zone.held for zone in zones),
        total=sum(zone.gpus or 0 for zone in zones),
        unhealthy=sum(zone.unhealthy for zone in zones),
        untold=sum(view.offered for view in there),
    )


def count_all(views: Iterable[NodeView]) -> GpuCount:
    """Of nodes that exist."""
    return count_gpus(view for view in views if not view.gone)


def see_node(node: object) -> KubeNode | None:
    """What a Node object says, as far as it makes sense; None without a name."""
    name = name_of(node)
    if type(node) is not dict or not name:
        return None
    status, spec = as_object(node.get("status")), as_object(node.get("spec"))
    labels = as_object(as_object(node.get("metadata")).get("labels"))
    try:
        gpus = int(parse_quantity(as_object(status.get("capacity")).get(GPU_RESOURCE)))
    except ValueError:
        gpus = 0
    conditions = status.get("conditions")
    ready = _readiness(conditions if type(conditions) is list else [])
    cordoned = ",SchedulingDisabled" if spec.get("unschedulable") is True else ""
    ours = labels.get(_MODE_LABEL) == _OUR_MODE
    return KubeNode(name=name, status=ready + cordoned, gpus=gpus, ours=ours)


def _readiness(conditions: Iterable[object]) -> str:
    of_type = {as_object(one).get("type"): as_object(one).get("status") for one in conditions}
    return {"True": "Ready", None: "Unknown"}.get(of_type.get("Ready"), "NotReady")


# --- one node -------------------------------------------------------------------------------------


def _see_none(node: KubeNode) -> NodeView:
    if node.gpus:
        gpus = f"kubelet offers {node.gpus} {GPU_RESOURCE}, but no report tells where they are"
        why = f"{gpus}: is the agent running there?"
    elif node.ours:
        why = f"label {_MODE_LABEL}={_OUR_MODE}, but no report: is the agent running there?"
    else:
        why = "no report"
    return NodeView(name=node.name, status=node.status, offered=node.gpus, warnings=(why,))


def _see(name: str, report: object, nodes: Mapping[str, KubeNode] | None) -> NodeView:
    node = nodes.get(name) if nodes is not None else KubeNode(name=name)
    about: Object = {"name": name, "status": node.status if node else "", "gone": node is None}
    try:
        top = typed(report, dict, "it")
        return _read(top, node, about)
    except ValueError as why:
        offered = node.gpus if node else 0
        warnings = (f"the report cannot be read: {why}", *_doubts(node, None))
        return NodeView(**about, offered=offered, warnings=warnings)


def _read(top: Object, node: KubeNode | None, about: Object) -> NodeView:
    """Raises ValueError with a sentence where neither numalet's part nor the zones can be read."""
    ledger, ledger_problem = _ledger(top)
    zones, zones_problem = _zones(top)
    if ledger is None and zones_problem:
        raise ValueError(ledger_problem or zones_problem)
    attributes = read_attributes(top.get("attributes"))
    policy, scope = _policy(top, attributes)
    if ledger:
        zones = zones_of(ledger, {zone.name: zone for zone in zones}, exact=not is_foreign(top))
    warnings = [*doubts_of(ledger)] if ledger else []
    if ledger_problem:
        warnings.append(f"{ledger_problem}; shown by its zones")
    elif ledger is None and node and (node.ours or node.gpus):
        warnings.append("not reported by numalet: is the agent running there?")
    gpus = sum(zone.gpus or 0 for zone in zones)
    warnings += _doubts(node, gpus if ledger else None)
    return NodeView(
        **about,
        reporter=_reporter(top, ledger is not None),
        models=models_of(ledger) if ledger else (),
        machine=describe_machine(ledger) if ledger else "",
        zones=zones,
        offered=node.gpus if node and not ledger and not gpus else 0,
        policy=policy,
        scope=scope,
        pinning=attributes.get(PINNING_ATTRIBUTE, ""),
        holders=tuple(holders_of(ledger)) if ledger else (),
        warnings=tuple(warnings),
    )


def _doubts(node: KubeNode | None, gpus: int | None) -> Iterator[str]:
    """What speaks against a report of so many GPUs (None: not told)."""
    if node is None:
        yield "there is no such node (any more)"
    elif node.status.startswith("NotReady"):
        yield "the node is not ready: what is reported may be old"
    if node and node.status and gpus is not None and gpus != node.gpus:
        yield f"kubelet offers {node.gpus} {GPU_RESOURCE}, the report has {gpus}"


def _ledger(top: Object) -> tuple[Ledger | None, str]:
    """And why it cannot be read, where numalet wrote one."""
    if MACHINE_KEY not in as_object(as_object(top.get("metadata")).get("annotations")):
        return None, ""
    try:
        return from_nrt(top), ""
    except ValueError as why:
        return None, str(why)


def _zones(top: Object) -> tuple[tuple[Zone, ...], str]:
    try:
        return tuple(parse_zones(part(top, "zones", list))), ""
    except ValueError as why:
        return (), str(why)


def _policy(top: Object, attributes: Mapping[str, str]) -> tuple[str, str]:
    """Kubelet's topology manager policy and scope; from the old field where no attribute tells.

    Source: noderesourcetopology-api; the old field joins both in one word.
    """
    old = top.get("topologyPolicies")
    word = old[0] if type(old) is list and old and type(old[0]) is str else ""
    level = next((scope for scope in ("Container", "Pod") if word.endswith(f"{scope}Level")), "")
    spelled = {policy.replace("-", ""): policy for policy in TOPOLOGY_POLICIES}
    policy = spelled.get(word.removesuffix(f"{level}Level").lower(), printable(word, 40))
    return attributes.get(_POLICY, policy), attributes.get(_SCOPE, level.lower())


def _reporter(top: Object, ours: bool) -> str:
    """Who wrote the zones, by the API server's own notes, else by the label of custom."""
    meta = as_object(top.get("metadata"))
    entries = meta.get("managedFields")
    owners = [
        printable(owner, 40)
        for entry in map(as_object, entries if type(entries) is list else [])
        if "f:zones" in as_object(entry.get("fieldsV1"))
        and type(owner := entry.get("manager")) is str
    ]
    label = as_object(meta.get("labels")).get("app.kubernetes.io/managed-by")
    if type(label) is str and (not owners or OURS in owners):
        owners.append(printable(label, 40))
    owners += [OURS] * ours
    return ",".join(dict.fromkeys(owners)) or "unknown"
