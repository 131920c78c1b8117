"""What a pass observes: every neighbour asked once; one that fails is as it was last."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from agent import log
from agent.books import Node, Rules
from agent.config import Config, node_name
from agent.core.bitmap import Bitmap
from agent.core.continuity import with_faults
from agent.core.discovery import Host
from agent.core.health import FaultMarks
from agent.core.offer import Manner, PodList, keys_by_id
from agent.core.podspecs import uid_of
from agent.core.request import GPU_RESOURCE
from agent.core.topology import EMPTY, Machine
from agent.driver import Known
from agent.edge.devnodes import read_device_nodes
from agent.edge.faultfile import read_fault_marks
from agent.edge.kubeletfiles import KubeletFacts, read_cpu_manager
from agent.edge.kubeletpods import list_pods
from agent.edge.podresources import read_pod_list
from agent.edge.sysfs import read_host
from agent.observation import join
from agent.troubles import Troubles

_HOST_S = 60.0
"""How often sysfs and kubelet's files are read: they change rarely; a wide machine takes 25 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What the API server tells: the pods of this node by uid, None while that is not known, and
    the GPUs that an administrator has marked there."""

    pods: Mapping[str, object] | None = None
    marks: FaultMarks = field(default_factory=FaultMarks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a pass has observed. `pods` are (namespace, name) of all that kubelet has."""

    node: Node
    manner: Manner
    rules: Rules
    kubelet: KubeletFacts
    pods: tuple[tuple[str, str], ...]


@dataclass(slots=True, kw_only=True)
class Observer:
    """Keeps what each neighbour said last. `machine` is the one of the last pass."""

    troubles: Troubles
    machine: Machine | None = None
    _host: Host | None = None
    _kubelet: KubeletFacts = field(default_factory=KubeletFacts)
    _read_s: float = float("-inf")
    _marks: FaultMarks = field(default_factory=FaultMarks)
    _pod_list: PodList = field(default_factory=PodList)
    _pods: tuple[object, ...] | None = None

    def forget(self) -> None:
        """Everything is to be read anew."""
        self._read_s = float("-inf")

    def observe(
        self, config: Config, known: Known, cluster: Cluster, wants_pods: bool
    ) -> Facts | None:
        """None as long as no machine is known. `wants_pods`: no runtime tells of pods. Only then
        are kubelet's read, which takes it and us 20 ms and more; the API server hears later of
        what runs."""
        attempt = self.troubles.attempt
        self._read_rarely(config)
        if self._host is None or known.reading is None:
            return None
        joined = attempt("machine", partial(join, config.root, self._host, known.reading), None)
        if joined is None:
            return None
        self._marks = attempt(
            "fault file", partial(read_fault_marks, config.fault_file), self._marks
        )
        faults = _faults(joined, known, self._marks, cluster.marks)
        self._keep(replace(with_faults(joined, faults), name=node_name(config)))
        listing = partial(read_pod_list, config.pod_resources, GPU_RESOURCE)
        self._pod_list = attempt("pod resources", listing, self._pod_list)
        specs = cluster.pods
        if wants_pods and config.kubelet_url:
            specs = self._read_pods(config, cluster.pods)
        return Facts(
            node=self._node(config, specs),
            manner=_manner(config),
            rules=self._rules(config),
            kubelet=self._kubelet,
            pods=self._pod_list.pods,
        )

    def _read_pods(
        self, config: Config, others: Mapping[str, object] | None
    ) -> Mapping[str, object] | None:
        """Kubelet's pods; those that others tell of, as long as kubelet has never answered."""
        token = os.path.join(config.service_account_dir, "token")
        asking = partial(list_pods, config.kubelet_url, token if os.path.exists(token) else "")
        self._pods = self.troubles.attempt("kubelet's pods", asking, self._pods)
        if self._pods is None:
            return others
        return {uid: pod for pod in self._pods if (uid := uid_of(pod))}

    def _read_rarely(self, config: Config) -> None:
        now_s = time.monotonic()
        if now_s - self._read_s < _HOST_S:
            return
        self._read_s = now_s
        self._host = self.troubles.attempt("sysfs", partial(read_host, config.root), self._host)
        self._kubelet = self.troubles.attempt(
            "kubelet's files",
            partial(read_cpu_manager, config.kubelet_dir, config.kubelet_config),
            self._kubelet,
        )

    def _keep(self, machine: Machine) -> None:
        """Keeps the same object where it is equal: all that was made of it is kept, too."""
        if machine == self.machine:
            return
        self.machine = machine
        healthy = sum(gpu.fault is None for gpu in machine.gpus)
        log.info("machine", nodes=len(machine.nodes), gpus=len(machine.gpus), healthy=healthy)
        self.troubles.tell("machine warnings", "; ".join(machine.warnings))

    def _node(self, config: Config, specs: Mapping[str, object] | None) -> Node:
        assert self.machine is not None
        return Node(
            machine=self.machine,
            reserved=_reserved(config, self._kubelet) & self.machine.cpus,
            holdings=self._pod_list.holdings,
            specs=specs,
            keys=keys_by_id(self.machine, config.device_ids),
        )

    def _rules(self, config: Config) -> Rules:
        static = self._kubelet.cpu_manager_policy == "static"
        why = "kubelet's CPU manager policy is static: it pins containers itself" if static else ""
        self.troubles.tell("nothing is pinned", why)
        return Rules(
            on_unsatisfied=config.on_unsatisfied,
            unannotated=config.unannotated_gpu_pods,
            memory=config.memory,
            lift_quota=config.lift_quota == "yes",
            observe_only=why or None,
        )


def _reserved(config: Config, kubelet: KubeletFacts) -> Bitmap:
    if config.reserved_cpus:
        return Bitmap.parse_list(config.reserved_cpus)
    return kubelet.reserved_cpus or EMPTY


def _manner(config: Config) -> Manner:
    return Manner(
        ids=config.device_ids,
        visible=config.visible_devices,
        cdi_kind=config.cdi_kind,
        dev_dir=config.dev_dir,
        device_nodes=read_device_nodes(config.root, config.dev_dir),
    )


def _faults(machine: Machine, known: Known, *marks: FaultMarks) -> dict[str, str]:
    """Why GPUs cannot be given out, by UUID, beside what the driver's reading says."""
    ill = {uuid: health.reason for uuid, health in known.healths.items() if health.reason}
    marked = {
        gpu.uuid: "an administrator marked it as faulty"
        for gpu in machine.gpus
        if gpu.uuid and any(gpu.uuid in one.uuids or gpu.index in one.indices for one in marks)
    }
    return ill | marked
