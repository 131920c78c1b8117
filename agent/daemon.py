"""The story: observe → decide → act. The only file that knows all others.

    main thread      the pass, rung by the bell or a slow tick
    driver           what the GPU driver says (driver.py)
    kubelet, rpc     edge.deviceplugin; RPCs are answered from the last snapshot
    status           /healthz, /readyz, /metrics

What threads share is one immutable snapshot, replaced by assignment.
"""

import queue
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

from agent import log
from agent.config import Config
from agent.core.continuity import with_faults
from agent.core.discovery import Host
from agent.core.health import FaultMarks, Health, HealthPolicy
from agent.core.layout import key, lay_out
from agent.core.ledger import Ledger
from agent.core.offer import (
    Allocation,
    Holding,
    IdKind,
    Manner,
    Offer,
    allocate,
    keys_by_id,
    make_offer,
    prefer,
    to_fact,
)
from agent.core.placement import Refusal
from agent.core.request import GPU_RESOURCE, Demand
from agent.core.settlement import PodFact, Settlement, settle
from agent.core.topology import Machine
from agent.driver import Driver, DriverSettings, Known, Listener
from agent.edge.deviceplugin import Answers, DevicePlugin
from agent.edge.devnodes import read_device_nodes
from agent.edge.faultfile import read_fault_marks
from agent.edge.podresources import list_holdings
from agent.edge.status import GpuRow, Metrics, StatusServer, start_status
from agent.edge.sysfs import read_host
from agent.errors import AgentError
from agent.observation import join

_T = TypeVar("_T")

_HOST_S = 60.0
"""How often sysfs is read: CPUs come and go rarely, and a wide machine takes 25 ms."""
_BUSY_S = 3.0
"""How long after an allocation kubelet's list of holders is looked at more often."""
_BUSY_TICK_S = 0.5
_STALLED_S = 60.0
"""A pass that takes longer is stuck, and the agent better started anew."""


class _Closable(Protocol):
    def close(self) -> None: ...


_Part = TypeVar("_Part", bound=_Closable)


@dataclass(slots=True)
class _Running(Generic[_Part]):
    """A part of the agent with threads of its own, and the settings that it was started with."""

    settings: object
    part: _Part
    closed: bool = False


def _renew(
    running: _Running[_Part] | None, settings: object, start: Callable[[], _Part]
) -> _Running[_Part]:
    """The part that runs with these settings: this one, or else a new one in its place."""
    if running is not None and not running.closed:
        if running.settings == settings:
            return running
        _close(running)
    return _Running(settings, start())


def _close(running: _Running[_Part] | None) -> None:
    if running is not None and not running.closed:
        running.closed = True
        running.part.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What RPCs are answered from. `pending` are pods that wait for devices, in order."""

    offer: Offer
    ledger: Ledger
    pending: tuple[Demand, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a pass has observed."""

    machine: Machine
    pods: tuple[PodFact, ...]
    manner: Manner


class Daemon:
    """The agent, from its first pass until SIGTERM. `load` reads its configuration, at SIGHUP anew.

    Raises ConfigError and KubeletError for what makes a start impossible.
    """

    def __init__(self, load: Callable[[], Config]) -> None:
        self._load = load
        self._config = load()
        self._metrics = Metrics()
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()  # may be rung in a signal handler
        self._ending = self._reloading = False
        self._plugin: _Running[DevicePlugin] | None = None
        self._driver: _Running[Driver] | None = None
        self._status: _Running[StatusServer] | None = None
        self._host: tuple[float, Host] | None = None
        self._marks = FaultMarks()
        self._holdings: tuple[Holding, ...] = ()
        self._ledger: Ledger | None = None
        self._snapshot: Snapshot | None = None
        self._troubles: dict[str, str] = {}
        self._failed = ""
        self._beat_s = time.monotonic()
        self._busy_until_s = 0.0

    def run(self) -> None:
        """Serves until SIGTERM or SIGINT."""
        log.start_logging(self._config.log_level)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)
        signal.signal(signal.SIGHUP, self._ask_reload)
        try:
            self._renew_parts(self._config)
            while not self._ending:
                self._pass()
                self._wait()
                if self._reloading:
                    self._reload()
            log.info("ending")
        finally:
            _close(self._plugin)
            _close(self._driver)
            _close(self._status)

    # --- the pass ---------------------------------------------------------------------------------

    def _pass(self) -> None:
        start = self._beat_s = time.monotonic()
        self._failed = ""
        facts = self._observe()
        if facts is not None:
            ledger = self._ledger or Ledger(layout=lay_out(facts.machine))
            self._act(facts, settle(facts.machine, ledger, facts.pods))
        self._metrics.passed(time.monotonic() - start, not self._failed, self._failed)

    def _observe(self) -> Facts | None:
        """None as long as no machine is known, or no GPU on it."""
        config = self._config
        host = self._attempt("sysfs", self._read_host, self._host and self._host[1])
        known = self._driver.part.known if self._driver else Known()
        if host is None or known.reading is None:
            return None
        machine = self._attempt("machine", partial(join, config.root, host, known.reading), None)
        if machine is None:
            return None
        read_marks = partial(read_fault_marks, config.fault_file)
        self._marks = self._attempt("fault file", read_marks, self._marks)
        machine = self._same(with_faults(machine, _faults(machine, known.healths, self._marks)))
        listing = partial(list_holdings, config.pod_resources, GPU_RESOURCE)
        self._holdings = self._attempt("pod resources", listing, self._holdings)
        keys = keys_by_id(machine, config.device_ids)
        return Facts(
            machine=machine,
            pods=tuple(to_fact(keys, holding) for holding in self._holdings),
            manner=Manner(
                ids=config.device_ids,
                visible=config.visible_devices,
                cdi_kind=config.cdi_kind,
                dev_dir=config.dev_dir,
                device_nodes=read_device_nodes(config.root, config.dev_dir),
            ),
        )

    def _act(self, facts: Facts, settlement: Settlement) -> None:
        self._ledger = settlement.ledger
        offer = make_offer(settlement.ledger.layout, facts.manner)
        self._snapshot = Snapshot(offer=offer, ledger=settlement.ledger)
        if offer.devices and self._plugin:
            self._plugin.part.update(offer.devices)
        for change in settlement.changes:
            gpus = [name for grant in change.grants for name in grant.gpus]
            log.info(change.kind, pod=change.pod, gpus=",".join(gpus) or None, reason=change.reason)
        self._metrics.show_gpus(_rows(settlement.ledger))
        self._tell("refused", "; ".join(f"{one.pod}: {one.reason}" for one in settlement.refused))

    def _read_host(self) -> Host:
        now_s = time.monotonic()
        if self._host is None or now_s - self._host[0] >= _HOST_S:
            self._host = now_s, read_host(self._config.root)
        return self._host[1]

    def _same(self, machine: Machine) -> Machine:
        """The machine that the ledger is laid out for, if it is equal: all that follows is kept."""
        if self._ledger is not None and self._ledger.layout.machine == machine:
            return self._ledger.layout.machine
        healthy = sum(gpu.fault is None for gpu in machine.gpus)
        log.info("machine", nodes=len(machine.nodes), gpus=len(machine.gpus), healthy=healthy)
        self._tell("machine warnings", "; ".join(machine.warnings))
        return machine

    def _attempt(self, step: str, action: Callable[[], _T], last: _T) -> _T:
        """What the action gives; if it fails, what it gave last."""
        try:
            value = action()
        except AgentError as error:
            self._failed = type(error).__name__
            self._tell(step, str(error))
            return last
        self._tell(step, "")
        return value

    def _tell(self, step: str, trouble: str) -> None:
        """Says what is wrong with a step, once for each change."""
        if trouble == self._troubles.get(step, ""):
            return
        if trouble:
            self._troubles[step] = trouble
            log.warning(step, reason=trouble)
        else:
            del self._troubles[step]
            log.info(f"{step} is well again")

    # --- bell and signals -------------------------------------------------------------------------

    def _ring(self) -> None:
        self._bell.put(None)

    def _wait(self) -> None:
        busy = time.monotonic() < self._busy_until_s
        try:
            self._bell.get(timeout=_BUSY_TICK_S if busy else self._config.period_s)
            while True:
                self._bell.get_nowait()
        except queue.Empty:
            return

    def _end(self, number: int, frame: object) -> None:
        self._ending = True
        self._ring()

    def _ask_reload(self, number: int, frame: object) -> None:
        self._reloading = True
        self._ring()

    def _reload(self) -> None:
        self._reloading = False
        before = self._config
        try:
            self._config = self._load()
            self._host = None
            self._renew_parts(self._config)
        except AgentError as error:
            log.error("configuration is not changed", reason=error)
            self._config = before
            self._renew_parts(before)
        else:
            log.start_logging(self._config.log_level)
            log.info("configuration read", changed=self._config != before)

    # --- parts ------------------------------------------------------------------------------------

    def _renew_parts(self, config: Config) -> None:
        """Starts what is not running, and anew what runs with other settings."""
        answers = Answers(
            prefer=self._prefer,
            allocate=self._allocate,
            on_rpc=self._on_rpc,
            on_registration=self._metrics.registered,
            on_stream=self._metrics.streaming,
        )
        kubelet = config.plugin_dir, config.device_ids
        self._plugin = _renew(
            self._plugin, kubelet, lambda: DevicePlugin(config.plugin_dir, GPU_RESOURCE, answers)
        )
        driver = DriverSettings(
            library=config.nvml,
            timeout_s=config.driver_timeout_s,
            policy=HealthPolicy(
                ignored_xids=frozenset(config.ignored_xids), recovery_s=config.gpu_recovery_s
            ),
            by_index=config.device_ids is IdKind.INDEX,
        )
        listener = Listener(
            on_news=self._ring,
            on_answer=self._metrics.driver,
            on_xid=lambda xid: self._metrics.xid(xid.uuid, xid.code),
        )
        known = self._driver.part.known if self._driver else Known()
        self._driver = _renew(self._driver, driver, lambda: Driver(driver, known, listener))
        address, checks = config.status_address, (self._is_alive, self._is_ready)
        if address:
            self._status = _renew(
                self._status, address, lambda: start_status(address, self._metrics, *checks)
            )
        else:
            _close(self._status)

    def _is_alive(self) -> str | None:
        late_s = time.monotonic() - self._beat_s
        limit_s = _STALLED_S + self._config.period_s
        return f"the last pass began {late_s:.0f} s ago" if late_s > limit_s else None

    def _is_ready(self) -> str | None:
        if self._snapshot is None:
            return "the machine is not read yet"
        if not self._snapshot.offer.devices:
            reading = self._driver.part.known.reading if self._driver else None
            return (reading and reading.problem) or "there is no GPU to offer"
        streaming = self._plugin and self._plugin.part.streaming
        return None if streaming else "kubelet does not read the devices"

    # --- answers, from memory ---------------------------------------------------------------------

    def _prefer(
        self, available: Sequence[str], include: Sequence[str], count: int
    ) -> Sequence[str]:
        now = self._snapshot
        return prefer(now.offer, now.ledger, now.pending, available, include, count) if now else ()

    def _allocate(self, ids: Sequence[str]) -> Allocation | Refusal:
        now = self._snapshot
        if now is None:
            return Refusal(reason="the machine is not read yet")
        return allocate(now.offer, ids)

    def _on_rpc(self, method: str, seconds: float, code: str) -> None:
        self._metrics.rpc(method, seconds, code)
        if method == "Allocate":
            self._busy_until_s = time.monotonic() + _BUSY_S
            self._ring()


def _faults(machine: Machine, healths: Mapping[str, Health], marks: FaultMarks) -> dict[str, str]:
    """Why GPUs cannot be given out, by UUID, beside what the driver's reading says."""
    ill = {uuid: health.reason for uuid, health in healths.items() if health.reason}
    marked = {
        gpu.uuid: "an administrator marked it as faulty"
        for gpu in machine.gpus
        if gpu.uuid and (gpu.uuid in marks.uuids or gpu.index in marks.indices)
    }
    return ill | marked


def _rows(ledger: Ledger) -> Iterator[GpuRow]:
    held = {name for grant in ledger.grants for name in grant.gpus}
    for gpu in ledger.layout.machine.gpus:
        yield GpuRow(
            gpu=key(gpu),
            index=gpu.index,
            node=gpu.node,
            healthy=gpu.fault is None,
            allocated=key(gpu) in held,
        )
