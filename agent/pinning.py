"""Carrying out in the cgroups what the books say: the shared pool, and the pins that drifted or
that no container runtime makes."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial

from agent import log
from agent.books import Books, Node, Pinned
from agent.config import Config
from agent.core.podevents import PodEvent, Reason
from agent.core.podspecs import see_specs
from agent.core.pool import Groups, Qos, find_drift, plan_writes
from agent.core.runtime import Cpuset, RuntimeContainer, RuntimePod, Stage
from agent.core.topology import EMPTY
from agent.edge.cgroup import (
    Cgroups,
    apply_writes,
    find_cgroups,
    lift_quota,
    pod_folders,
    read_cpuset,
    read_groups,
    write_mems,
)
from agent.edge.status import Metrics
from agent.errors import PinError
from agent.troubles import Troubles

_VERIFY_S = 30.0
"""How often cgroups are looked at when nothing happened: somebody else may have written them."""


_BLIND = "no NRI socket, and neither the Kubernetes API nor a kubelet_url tells what pods ask"


class Path(StrEnum):
    """Who gives containers their CPUs."""

    NRI = "nri"
    """The container runtime, when it creates them, as we tell it."""
    CGROUP = "cgroup"
    """We, when they run."""
    NONE = "none"
    """Nobody: kubelet pins CPUs itself."""


class Pinning:
    """Follows the books. The runtime's plugin calls what begins with `on_`, the pass all else."""

    def __init__(
        self,
        books: Books,
        metrics: Metrics,
        troubles: Troubles,
        tell: Callable[[Sequence[PodEvent]], None] = lambda events: None,
    ) -> None:
        self._tell = tell
        self._books = books
        self._metrics = metrics
        self._troubles = troubles
        self._connected = False
        self._path: Path | None = None
        self._cgroups: Cgroups | None = None
        self._done: int | None = None
        self._checked_s = float("-inf")
        self._names: frozenset[str] = frozenset()
        self._seen: set[str] = set()
        self._pinned: frozenset[str] = frozenset()

    def on_connection(self, connected: bool) -> None:
        """Whether the container runtime asks us."""
        self._connected = connected
        if not connected:
            self._books.hear_no_more()

    def observe(self, config: Config, node: Node, observe_only: bool) -> None:
        """Which path is in force; where it is the cgroups, which pods and containers there are."""
        before = self._path
        self._choose_path(config, observe_only)
        self._cgroups = self._troubles.attempt(
            "cgroups", partial(find_cgroups, config.root), self._cgroups
        )
        if self._cgroups is None:
            return
        if self._path is Path.NRI:
            self._end_pods(self._cgroups)
        if self._path is not Path.CGROUP or before not in (None, Path.CGROUP):
            return  # when the path changes, kubelet has not been asked for its pods yet
        blind = _BLIND if node.specs is None else ""
        self._troubles.tell("pods are not known", blind)
        if blind:
            return  # what is known stays
        groups = self._troubles.attempt("cgroups", partial(read_groups, self._cgroups), None)
        if groups is not None:
            self._names = self._list_pods(self._cgroups)
            pool = self._books.ledger.shared_pool if self._books.ledger else EMPTY
            self._books.see(*see_specs((node.specs or {}).values(), groups, pool))

    def on_synchronize(
        self, pods: Sequence[RuntimePod], containers: Sequence[RuntimeContainer]
    ) -> dict[str, Cpuset]:
        """What the container runtime has. After its own end by force it also lists pods that ended
        meanwhile, as if they ran."""
        uids = self._list_pods(self._cgroups) if self._cgroups else frozenset()
        there = [pod for pod in pods if not uids or pod.uid in uids]
        return self._books.on_synchronize(there, containers)

    def _end_pods(self, cgroups: Cgroups) -> None:
        """Ends the pods whose cgroups were there and are gone: after its own restart, a runtime may
        not tell of the end of pods from before."""
        pods = self._books.pods()  # before the groups are listed: these are made first
        self._names = self._list_pods(cgroups)
        for pod in pods:
            if pod.uid in self._seen - self._names:
                log.info("pod ended untold", pod=pod.pod)
                self._books.on_end_pod(pod.id)
        self._seen = {pod.uid for pod in pods if pod.uid in self._names}

    def _choose_path(self, config: Config, observe_only: bool) -> None:
        path = Path.CGROUP
        if observe_only:
            path = Path.NONE
        elif self._connected or os.path.exists(config.nri_socket):
            path = Path.NRI
        if path is not self._path:
            log.info("pinning", path=path)
            self._path = path
            self._metrics.pinned_by(path)

    def follow(self) -> None:
        """Makes the cgroups what they should be, if anything happened or it was long ago."""
        now_s, turn = time.monotonic(), self._books.turn
        if self._cgroups is None or self._path in (None, Path.NONE):
            return
        if not self._books.knows_pods:
            return  # else all that runs pinned would be taken for unpinned
        if turn == self._done and now_s - self._checked_s < _VERIFY_S:
            return
        by_runtime = self._path is Path.NRI
        carry = partial(carry_out, self._cgroups, self._books, by_runtime, self._pinned)
        outcome = self._troubles.attempt("cgroups", carry, None)
        if outcome is None:
            return
        self._done, self._checked_s, self._pinned = turn, now_s, outcome.pinned
        self._troubles.tell("cpusets", "; ".join(outcome.troubles))
        for one in outcome.drifted:
            log.warning("drift repaired", container=one.name)
        self._tell([_to_drift(one) for one in outcome.drifted])
        self._metrics.carried_out(len(outcome.drifted), outcome.writes)

    @property
    def path(self) -> Path:
        return self._path or Path.NONE

    @property
    def is_alone(self) -> bool:
        """Whether no container runtime tells of pods, as far as is known."""
        return self._path in (None, Path.CGROUP)

    def stirred(self) -> bool:
        """Whether pods came or went of which nobody may tell."""
        if self._path in (None, Path.NONE) or self._cgroups is None:
            return False
        return self._list_pods(self._cgroups) != self._names

    def _list_pods(self, cgroups: Cgroups) -> frozenset[str]:
        """The uids of the pods that have a cgroup."""
        try:
            return frozenset(uid for qos in Qos for uid, _ in pod_folders(cgroups, qos))
        except PinError:
            return self._names


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """`pinned` are the ids of containers that have their CPUs, `drifted` the containers that had
    lost them, `writes` how many groups were written, `troubles` sentences about what could not
    be."""

    pinned: frozenset[str] = field(default=frozenset(), compare=False)
    drifted: tuple[Pinned, ...] = ()
    writes: int = 0
    troubles: tuple[str, ...] = ()


def carry_out(
    cgroups: Cgroups, books: Books, by_runtime: bool, before: frozenset[str] = frozenset()
) -> Outcome:
    """Makes the cgroups what they should be. `by_runtime`: containers get their pins from the
    runtime when they are created, and are written here only when they lost them. `before` are those
    that had their pins when they were looked at last.

    Raises PinError if kubepods cannot be read.
    """
    groups = read_groups(cgroups)  # before the pods are taken down: see plan_writes
    pods, pinned, ledger = books.group_pods(), books.pinned(), books.ledger
    if ledger is None:
        return Outcome()
    online = ledger.layout.machine.cpus
    settled = frozenset(one.container.id for one in pinned if _is_settled(one, by_runtime))
    drift = find_drift(groups, pods, online).keys() & settled
    write_pins = not by_runtime or (bool(drift) and len(settled) == len(pinned))
    writes = plan_writes(groups, pods, ledger.shared_pool, online, write_pins=write_pins)
    known = settled if by_runtime else before
    errors = list(apply_writes(cgroups, writes))
    paths = {one.id: one.path for pod in groups.pods for one in pod.containers}
    here = [one for one in pinned if one.container.id in settled and one.container.id in paths]
    strayed = {one.container.id for one in here if _bind(cgroups, paths, one, errors)}
    _lift(cgroups, groups, [one for one in here if one.cpuset.lift_quota], paths, errors)
    lost = (drift | strayed if write_pins else strayed) & known
    return Outcome(
        pinned=frozenset(one.container.id for one in here),
        drifted=tuple(one for one in here if one.container.id in lost),
        writes=len(writes),
        troubles=tuple(map(str, (*groups.unread, *errors))),
    )


def _to_drift(one: Pinned) -> PodEvent:
    name = one.container.name
    return PodEvent(
        uid=one.pod.uid,
        pod=one.pod.pod,
        reason=Reason.DRIFTED,
        message=f"{name} did not run on its CPUs {one.cpuset.cpus} and was put back",
        container=name,
    )


def _is_settled(one: Pinned, by_runtime: bool) -> bool:
    """Whether the container's cpuset is not being made by the runtime just now."""
    return not by_runtime or one.container.stage is Stage.RUNNING


def _bind(cgroups: Cgroups, paths: Mapping[str, str], one: Pinned, errors: list[PinError]) -> bool:
    """Binds the container's memory; whether it was bound to other nodes."""
    path = paths[one.container.id]
    try:
        if not one.cpuset.mems or read_cpuset(cgroups, path).effective_mems == one.cpuset.mems:
            return False
        return write_mems(cgroups, path, one.cpuset.mems)
    except PinError as error:
        errors.append(error)
        return False


def _lift(
    cgroups: Cgroups,
    groups: Groups,
    pinned: Sequence[Pinned],
    paths: Mapping[str, str],
    errors: list[PinError],
) -> None:
    """Takes the CFS quota off pinned containers, and off their pods."""
    pods = {pod.uid: pod.path for pod in groups.pods}
    uids = dict.fromkeys(one.pod.uid for one in pinned)
    above = [pods[uid] for uid in uids if uid in pods]
    for path in (*above, *(paths[one.container.id] for one in pinned)):
        try:
            lift_quota(cgroups, path)
        except PinError as error:
            errors.append(error)
