"""The books: who holds what, behind one lock, and what the container runtime told of its pods.

The pass settles with all that was observed; the container runtime's plugin settles for one
container at its creation, with what is known then. Both go from one ledger to the next by the same
`settle`.
"""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from agent import log
from agent.core.bitmap import Bitmap
from agent.core.layout import lay_out
from agent.core.ledger import Grant, Ledger
from agent.core.offer import GPUS_KEY, Holding
from agent.core.placement import MemoryRule, Refusal
from agent.core.podevents import Pins, PodEvent, Reason, see_pins, see_verdicts
from agent.core.podfacts import Memory, read_facts
from agent.core.podspecs import name_of
from agent.core.pool import GroupPod, Qos
from agent.core.request import PIN_KEY, Demand
from agent.core.runtime import (
    Cpuset,
    OnUnsatisfied,
    RuntimeContainer,
    RuntimePod,
    Stage,
    Unannotated,
)
from agent.core.settlement import PodFact, Settlement, settle
from agent.core.topology import EMPTY, Machine, union


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What an administrator decided. `observe_only` is the sentence why nothing may be pinned."""

    on_unsatisfied: OnUnsatisfied = OnUnsatisfied.FAIL
    unannotated: Unannotated = Unannotated.LEAVE
    memory: MemoryRule = MemoryRule.AUTO
    lift_quota: bool = True
    observe_only: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What a pass observed beside the runtime. `keys` are those of the GPUs by device id, `specs`
    are pods as Kubernetes has them by uid, None where nobody tells."""

    machine: Machine
    reserved: Bitmap = EMPTY
    holdings: tuple[Holding, ...] = ()
    specs: Mapping[str, object] | None = None
    keys: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned:
    """A container that holds CPUs, and what it should run on."""

    pod: RuntimePod
    container: RuntimeContainer
    cpuset: Cpuset

    @property
    def name(self) -> str:
        return f"{self.pod.pod}/{self.container.name}"


class Books:
    """All methods may be called by any thread."""

    def __init__(
        self,
        ring: Callable[[], None],
        tell: Callable[[Sequence[PodEvent]], None] = lambda events: None,
    ) -> None:
        self._ring = ring
        self._tell = tell
        self._lock = threading.Lock()
        self._rules = Rules()
        self._node: Node | None = None
        self._ledger: Ledger | None = None
        self._pods: dict[str, RuntimePod] = {}
        self._containers: dict[str, RuntimeContainer] = {}
        self._memory: Memory = {}
        self._told = False
        self.knows_pods = False
        """Whether anybody has told which pods there are, ever."""
        self._asking: frozenset[str] = frozenset()
        self._refused: dict[str, str] = {}
        self._noted: dict[str, tuple[str, ...]] = {}
        self._pins: Pins = {}
        self.turn = 0
        """Counts what happened: the cgroups are to follow."""

    # --- the pass ---------------------------------------------------------------------------------

    def settle(self, node: Node, rules: Rules) -> Settlement:
        """The next ledger, with all that is known now."""
        with self._lock:
            self._node, self._rules = node, rules
            if self._ledger is not None and self._ledger.reserved != node.reserved:
                self._ledger = replace(self._ledger, reserved=node.reserved)
            return self._settle()

    def _settle(self) -> Settlement:
        assert self._node is not None
        node = self._node
        ledger = self._ledger or Ledger(layout=lay_out(node.machine), reserved=node.reserved)
        facts = read_facts(
            tuple(self._pods.values()),
            tuple(self._containers.values()),
            node.holdings,
            (node.specs or {}) if self.knows_pods else {},  # else what runs would be placed anew
            node.keys,
            self._memory,
        )
        settlement = settle(node.machine, ledger, facts, self._rules.memory)
        self.turn += bool(settlement.changes)
        self._tell_all(settlement, facts, node.specs)
        self._ledger = settlement.ledger
        self._asking = frozenset(
            fact.demand.uid
            for fact in facts
            if isinstance(fact.demand, Demand) and fact.demand.pinned
        )
        self._refused = {one.uid: one.reason for one in settlement.refused}
        return settlement

    def _tell_all(
        self,
        settlement: Settlement,
        facts: Sequence[PodFact],
        specs: Mapping[str, object] | None,
    ) -> None:
        """What is new about pods, in the log and as Events. Without anybody who tells the pods'
        specifications, what is seen of them has to do."""
        names = {uid: name_of(pod) for uid, pod in (specs or {}).items()}
        names |= {pod.uid: pod.pod for pod in self._pods.values()}
        known = names if specs is None else specs
        fresh = replace(
            settlement,
            refused=tuple(
                one for one in settlement.refused if self._refused.get(one.uid) != one.reason
            ),
        )
        _say(fresh, names, known)
        events = [*see_verdicts(fresh, names, known)]
        noted = {fact.demand.uid: notes for fact in facts if (notes := _notes_of(fact))}
        for uid in noted.keys() & names.keys() & known.keys():
            if noted[uid] != self._noted.get(uid):
                message = "; ".join(noted[uid])
                log.warning("annotations", pod=names[uid], note=message)
                events.append(
                    PodEvent(uid=uid, pod=names[uid], reason=Reason.IGNORED, message=message)
                )
        self._noted = {uid: notes for uid, notes in noted.items() if uid in known}
        pins, self._pins = see_pins(
            settlement.ledger, self._pods, self._containers.values(), self._pins
        )
        if events or pins:
            self._tell([*events, *pins])

    def see(self, pods: Sequence[RuntimePod], containers: Sequence[RuntimeContainer]) -> None:
        """These are the pods and containers that there are, in order of creation; unless a runtime
        tells, which knows better."""
        with self._lock:
            if not self._told:
                self._see(pods, containers)

    def _see(self, pods: Sequence[RuntimePod], containers: Sequence[RuntimeContainer]) -> None:
        now = {pod.id: pod for pod in pods}, {one.id: one for one in containers}
        self.turn += now != (self._pods, self._containers) or not self.knows_pods
        self.knows_pods = True
        self._pods, self._containers = now

    def pods(self) -> tuple[RuntimePod, ...]:
        with self._lock:
            return tuple(self._pods.values())

    def hear_no_more(self) -> None:
        """The runtime tells nothing any more; what it told stays until somebody else sees."""
        with self._lock:
            self._told = False

    @property
    def ledger(self) -> Ledger | None:
        return self._ledger

    def group_pods(self) -> tuple[GroupPod, ...]:
        """What the cgroups of all pods are judged by."""
        with self._lock:
            if self._ledger is None:
                return ()
            live: dict[str, list[RuntimeContainer]] = {id_: [] for id_ in self._pods}
            for container in self._containers.values():
                if container.stage is not Stage.STOPPED and container.pod_id in live:
                    live[container.pod_id].append(container)
            return tuple(
                self._group_pod(self._ledger, pod, live[pod.id]) for pod in self._pods.values()
            )

    def _group_pod(
        self, ledger: Ledger, pod: RuntimePod, live: Sequence[RuntimeContainer]
    ) -> GroupPod:
        cpus = {grant.container: grant.cpus for grant in ledger.of_pod(pod.uid) if grant.cpus}
        pinned = {one.id: cpus[one.name] for one in live if one.name in cpus}
        near = {} if cpus else {one.id: self._near(ledger, one) for one in live}
        return GroupPod(
            uid=pod.uid,
            qos=Qos.GUARANTEED,
            containers=frozenset(one.id for one in live),
            pinned=pinned,
            held=union(cpus.values()),
            waits=not cpus and pod.uid in self._asking and pod.uid not in self._refused,
            near={id_: some for id_, some in near.items() if some},
        )

    def _near(self, ledger: Ledger, container: RuntimeContainer) -> Bitmap:
        """The shared CPUs on the nodes of the container's GPUs, if it is to stay near them."""
        keys = container.annotations.get(GPUS_KEY)
        if self._rules.unannotated is Unannotated.LEAVE or not keys:
            return EMPTY
        layout = ledger.layout
        seats = layout.seats_of(layout.places(keys.split(",")))
        return union(layout.seats[seat].cpus for seat in seats) & ledger.shared_pool

    def pinned(self) -> tuple[Pinned, ...]:
        """The containers that run, or may, on CPUs of their own."""
        with self._lock:
            ledger, found = self._ledger, []
            for container in self._containers.values():
                pod = self._pods.get(container.pod_id)
                grant = ledger.pin_of(pod.uid, container.name) if ledger and pod else None
                if pod and grant and container.stage is not Stage.STOPPED:
                    cpuset = self._to_cpuset(grant)
                    found.append(Pinned(pod=pod, container=container, cpuset=cpuset))
            return tuple(found)

    def _to_cpuset(self, grant: Grant) -> Cpuset:
        return Cpuset(cpus=grant.cpus, mems=grant.mems, lift_quota=self._rules.lift_quota)

    # --- the container runtime, in its plugin's thread --------------------------------------------

    def on_synchronize(
        self, pods: Sequence[RuntimePod], containers: Sequence[RuntimeContainer]
    ) -> dict[str, Cpuset]:
        """All that there is; the cpusets of running containers that must have others.

        The runtime also lists sandboxes that have ended; nothing runs in them.
        """
        busy = {one.pod_id for one in containers if one.stage is not Stage.STOPPED}
        with self._lock:
            self._told = True
            self._see([pod for pod in pods if pod.pid or pod.id in busy], containers)
            if self._node is None or self._rules.observe_only:
                return {}
            self._settle()
            wrong = [
                (container, cpuset)
                for container in self._containers.values()
                if container.stage is not Stage.STOPPED
                and (cpuset := self._cpuset(container)) is not None
                and (container.cpus, container.mems or cpuset.mems) != (cpuset.cpus, cpuset.mems)
            ]
            for container, cpuset in wrong:
                self._note_cpuset(container, cpuset)
        self._ring()
        return {container.id: cpuset for container, cpuset in wrong if _may_update(container)}

    def on_create(self, pod: RuntimePod, container: RuntimeContainer) -> Cpuset | Refusal | None:
        """What a container is created with."""
        with self._lock:
            self._pods[pod.id] = pod
            self._containers.pop(container.id, None)
            self._containers[container.id] = container
            if self._node is None or self._rules.observe_only:
                return None
            self._settle()
            asks = pod.annotations.get(PIN_KEY) == "required"
            reason = self._refused.get(pod.uid) if asks else None
            cpuset = None if reason else self._cpuset(container)
            if cpuset is not None:
                self._note_cpuset(container, cpuset)
            elif reason and self._rules.on_unsatisfied is OnUnsatisfied.FAIL:
                del self._containers[container.id]
            self.turn += 1
        self._ring()
        if reason is None:
            return cpuset
        log.warning("not pinned", pod=pod.pod, container=container.name, reason=reason)
        return Refusal(reason=reason) if self._rules.on_unsatisfied is OnUnsatisfied.FAIL else None

    def on_update(
        self, pod: RuntimePod, container: RuntimeContainer, asked: object
    ) -> Cpuset | None:
        """A pinned container keeps its CPUs, whoever asks for what."""
        with self._lock:
            known = self._containers.get(container.id)
            if known is None or self._ledger is None or not _may_update(known):
                return None
            if self._rules.observe_only:
                return None
            return self._cpuset(known)

    def on_start(self, container_id: str) -> None:
        self._set_stage(container_id, Stage.RUNNING)
        self._ring()

    def on_stop(self, container_id: str) -> None:
        self._set_stage(container_id, Stage.STOPPED)
        self._ring()

    def on_remove(self, container_id: str) -> None:
        with self._lock:
            self._containers.pop(container_id, None)
            self.turn += 1
        self._ring()

    def on_run_pod(self, pod: RuntimePod) -> None:
        with self._lock:
            self._pods[pod.id] = pod
            self.turn += 1
        self._ring()

    def on_end_pod(self, pod_id: str) -> None:
        """The sandbox is stopped or gone: what it held is free."""
        with self._lock:
            self._pods.pop(pod_id, None)
            self._containers = {
                id_: one for id_, one in self._containers.items() if one.pod_id != pod_id
            }
            self.turn += 1
        self._ring()

    def _set_stage(self, container_id: str, stage: Stage) -> None:
        with self._lock:
            if container := self._containers.get(container_id):
                self._containers[container_id] = replace(container, stage=stage)
                self.turn += 1

    def _cpuset(self, container: RuntimeContainer) -> Cpuset | None:
        """What the ledger says that the container runs on; None if that is nothing of its own."""
        assert self._ledger is not None
        pod = self._pods.get(container.pod_id)
        grant = self._ledger.pin_of(pod.uid, container.name) if pod else None
        if grant is not None:
            return self._to_cpuset(grant)
        near = self._near(self._ledger, container)
        return Cpuset(cpus=near, lift_quota=False) if near else None

    def _note_cpuset(self, container: RuntimeContainer, cpuset: Cpuset) -> None:
        self._containers[container.id] = replace(container, cpus=cpuset.cpus, mems=cpuset.mems)


def _say(settlement: Settlement, names: Mapping[str, str], known: Collection[str]) -> None:
    """What became of pods, and what was not done as somebody decided."""
    for change in settlement.changes:
        gpus = [name for grant in change.grants for name in grant.gpus]
        cpus = [f"{grant.container}:{grant.cpus}" for grant in change.grants if grant.cpus]
        log.info(
            change.kind,
            pod=change.pod,
            gpus=",".join(gpus) or None,
            cpus=" ".join(cpus) or None,
            reason=change.reason,
        )
    for uid, note in settlement.notes:
        if uid in known:
            log.warning("placed otherwise", pod=names.get(uid, uid), note=note)


def _notes_of(fact: PodFact) -> tuple[str, ...]:
    return fact.demand.notes if isinstance(fact.demand, Demand) else ()


def _may_update(container: RuntimeContainer) -> bool:
    """Whether the runtime may change a running container: one whose GPUs are not among its device
    nodes would lose them."""
    devices = any(path.startswith("/dev/nvidia") for path in container.devices)
    return devices or container.visible_devices in (None, "", "void", "none")
