"""What would become of pods on a node: `numalet plan` without its files.

The pods are placed one after the other, as if each started when the one before it runs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from agent.core.bitmap import Bitmap
from agent.core.layout import Layout, lay_out
from agent.core.ledger import Ledger
from agent.core.placement import ContainerPlacement, Placement, Refusal, place
from agent.core.request import Demand, Invalid, read_demand
from agent.core.settlement import grants_of
from agent.core.svg import Owner
from agent.core.topology import Machine, union

PLAN_SCHEMA = "numalet/plan/v1"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPod:
    """A pod and what becomes of it."""

    asked: Demand | Invalid
    outcome: Placement | Refusal

    @property
    def reason(self) -> str | None:
        """Why the pod is refused, None if it is admitted."""
        return self.outcome.reason if isinstance(self.outcome, Refusal) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All pods in order, and the ledger after them."""

    pods: tuple[PlannedPod, ...]
    ledger: Ledger


def make_plan(machine: Machine, reserved: Bitmap, pods: Iterable[object]) -> Plan:
    """Places `pods`, Kubernetes Pods as parsed JSON, on the empty machine."""
    ledger = Ledger(layout=lay_out(machine), reserved=reserved)
    planned = []
    for number, pod in enumerate(pods):
        asked = read_demand(pod)
        outcome: Placement | Refusal
        if isinstance(asked, Invalid):
            outcome = Refusal(reason=asked.reason)
        else:
            outcome = place(ledger, asked)
        if isinstance(asked, Demand) and isinstance(outcome, Placement):
            grants = grants_of(ledger.layout, asked, outcome, uid=f"{number:08d}")
            ledger = ledger.with_grants(grants)
        planned.append(PlannedPod(asked=asked, outcome=outcome))
    return Plan(pods=tuple(planned), ledger=ledger)


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """The JSON object `numalet/plan/v1`."""
    layout, ledger = plan.ledger.layout, plan.ledger
    return {
        "schema": PLAN_SCHEMA,
        "placements": [_pod_to_json(layout, pod) for pod in plan.pods],
        "nodes": [
            {
                "id": seat.id,
                "state": ledger.states[number].value,
                "free_gpus": len(seat.gpus & ledger.free_gpus),
                "free_cpus": len(seat.cpus & ledger.free_cpus),
            }
            for number, seat in enumerate(layout.seats)
        ],
    }


def _pod_to_json(layout: Layout, pod: PlannedPod) -> dict[str, Any]:
    asked, outcome = pod.asked, pod.outcome
    policy = asked.policy if isinstance(asked, Demand) else None
    placed = outcome if isinstance(outcome, Placement) else None
    containers = placed.containers if placed else ()
    return {
        "pod": asked.pod,
        "admitted": placed is not None,
        "policy": policy and policy.value,
        "exclusive": asked.exclusive.value if isinstance(asked, Demand) and policy else None,
        "nodes": list(placed.nodes) if placed else [],
        "gpus": list(layout.indices(union(one.gpus for one in containers))),
        "containers": [
            {
                "name": one.name,
                "cpus": str(one.cpus),
                "mems": str(placed.mems) if placed else "",
                "gpus": list(layout.indices(one.gpus)),
            }
            for one in containers
        ],
        "reason": pod.reason,
    }


def owners(plan: Plan) -> tuple[Owner, ...]:
    """The admitted pods and what they hold, for the picture."""
    layout = plan.ledger.layout
    return tuple(
        Owner(
            name=pod.asked.pod,
            gpus=layout.indices(union(one.gpus for one in pod.outcome.containers)),
            cpus=union(one.cpus for one in pod.outcome.containers),
        )
        for pod in plan.pods
        if isinstance(pod.outcome, Placement)
    )


# --- text -----------------------------------------------------------------------------------------


def draw_plan(plan: Plan) -> str:
    """The table of pods and, below it, the node afterwards; lines end with a newline."""
    layout, ledger = plan.ledger.layout, plan.ledger
    head = ("POD", "POLICY", "NUMA", "GPUS", "CPUS", "MEMORY")
    rows = [row for pod in plan.pods for row in _rows(layout, pod)]
    nodes = [("NODE", "STATE", "FREE GPUS", "FREE CPUS")]
    nodes += [
        (
            str(seat.id),
            ledger.states[number].value,
            str(len(seat.gpus & ledger.free_gpus)),
            str(len(seat.cpus & ledger.free_cpus)),
        )
        for number, seat in enumerate(layout.seats)
    ]
    return "\n".join([*_align([head, *rows]), "", *_align(nodes), ""])


def _rows(layout: Layout, pod: PlannedPod) -> list[tuple[str, ...]]:
    """One row a pod and, where it has several containers, one for each; then its notes."""
    policy = pod.asked.policy or "-" if isinstance(pod.asked, Demand) else "-"
    if isinstance(pod.outcome, Refusal):
        return [(pod.asked.pod, policy, f"refused: {pod.outcome.reason}")]
    placed = pod.outcome
    together = ContainerPlacement(
        name="",
        gpus=union(one.gpus for one in placed.containers),
        cpus=union(one.cpus for one in placed.containers),
    )
    mems = f"node {placed.mems}" if placed.mems else "-"
    rows = [(pod.asked.pod, policy, str(placed.nodes) or "-", *_held(layout, together), mems)]
    if len(placed.containers) > 1:
        rows += [(f"  {one.name}", "", "", *_held(layout, one), "") for one in placed.containers]
    notes = (*pod.asked.notes, *placed.notes) if isinstance(pod.asked, Demand) else placed.notes
    return rows + [("", "", f"note: {note}") for note in notes]


def _held(layout: Layout, one: ContainerPlacement) -> tuple[str, str]:
    return str(layout.indices(one.gpus)) or "-", str(one.cpus) or "-"


def _align(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Columns as wide as their widest cell; the last cell of a row may be longer."""
    widths: dict[int, int] = {}
    for row in rows:
        for column, cell in enumerate(row[:-1] if len(row) < len(rows[0]) else row):
            widths[column] = max(widths.get(column, 0), len(cell))
    return [
        "   ".join(cell.ljust(widths.get(i, 0)) for i, cell in enumerate(row)).rstrip()
        for row in rows
    ]
