"""The story: observe → decide → act. The only file that knows all others.

    main thread      the pass, rung by the bell or a slow tick
    driver           what the GPU driver says (driver.py)
    kubelet, rpc     edge.deviceplugin; RPCs are answered from the last snapshot
    report, watches  what the cluster is told, and the pods that it tells of (reporting.py)
    status           /healthz, /readyz, /metrics

What threads share is one immutable snapshot, replaced by assignment.
"""

import gc
import queue
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from agent import log
from agent.books import Books, Node
from agent.config import Config, node_name
from agent.core.health import HealthPolicy
from agent.core.layout import key
from agent.core.ledger import Ledger
from agent.core.offer import Allocation, IdKind, Offer, allocate, make_offer, prefer
from agent.core.placement import Refusal
from agent.core.podevents import PodEvent
from agent.core.podspecs import waiting_for_gpus
from agent.core.report import About
from agent.core.request import GPU_RESOURCE, Demand
from agent.core.settlement import Settlement
from agent.driver import Driver, DriverSettings, Known, Listener
from agent.edge.deviceplugin import Answers, DevicePlugin
from agent.edge.kubeapi import find_server
from agent.edge.nri import Callbacks, NriPlugin
from agent.edge.status import GpuRow, Metrics, StatusServer, start_status
from agent.errors import AgentError
from agent.observing import Cluster, Facts, Observer
from agent.pinning import Path, Pinning
from agent.reporting import Reporter, ReportSettings
from agent.saying import to_about, to_saying
from agent.troubles import Troubles

_BUSY_S = 3.0
"""How long kubelet's list of holders is looked at more often after an allocation, or its start."""
_BUSY_TICK_S = 0.5
_GLANCE_S = 1.0
"""How often the cgroups are glanced at for pods that came or went: a runtime may tell nothing."""
_GAP_S = 0.05
"""Between the beginnings of two passes: many pods may ring at once, and kubelet refuses to tell who
holds its devices more than 100 times a second."""
_SILENT_S = 40.0
"""How long nothing is reported while nobody tells which pods there are. A container runtime lets a
plugin wait while a pod stops, for 30 s as a rule."""
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
        self._nri: _Running[NriPlugin] | None = None
        self._reporter: _Running[Reporter] | None = None
        self._troubles = Troubles(self._metrics.failed)
        self._observer = Observer(troubles=self._troubles)
        self._books = Books(self._ring, self._tell)
        self._pinning = Pinning(self._books, self._metrics, self._troubles, self._tell)
        self._snapshot: Snapshot | None = None
        self._said: tuple[Ledger, About, bool] | None = None
        self._beat_s = self._start_s = time.monotonic()
        self._busy_until_s = 0.0

    def run(self) -> None:
        """Serves until SIGTERM or SIGINT."""
        log.start_logging(self._config.log_level)
        gc.collect()
        gc.freeze()  # what is loaded stays: collecting it in vain would unshare the child's pages
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
            _close(self._nri)
            _close(self._plugin)
            _close(self._driver)
            _close(self._reporter)
            _close(self._status)

    # --- the pass ---------------------------------------------------------------------------------

    def _pass(self) -> None:
        start = self._beat_s = time.monotonic()
        self._pinning.follow()
        cluster = self._cluster()
        facts = self._observer.observe(self._config, self._known(), cluster, self._pinning.is_alone)
        if facts is not None:
            observe_only = facts.rules.observe_only is not None
            self._pinning.observe(self._config, facts.node, observe_only)
            self._act(facts, self._books.settle(facts.node, facts.rules))
        self._metrics.passed(time.monotonic() - start)

    def _act(self, facts: Facts, settlement: Settlement) -> None:
        offer = make_offer(settlement.ledger.layout, facts.manner)
        self._snapshot = Snapshot(
            offer=offer, ledger=settlement.ledger, pending=_pending(facts.node)
        )
        if offer.devices and self._plugin:
            self._plugin.part.update(offer.devices)
        self._metrics.show_gpus(_rows(settlement.ledger))
        refused = "; ".join(f"{one.pod}: {one.reason}" for one in settlement.refused)
        self._troubles.tell("refused", refused)
        self._metrics.refused(len(settlement.refused))
        self._start_nri(facts)
        self._pinning.follow()
        self._say(facts, settlement.ledger)

    def _say(self, facts: Facts, ledger: Ledger) -> None:
        """Lets the cluster know, if anything is new."""
        if self._reporter is None or self._reporter.closed:
            return
        is_blind = not self._books.knows_pods and self._pinning.path is not Path.NONE
        if is_blind and time.monotonic() - self._start_s < _SILENT_S:
            return  # what runs pinned would be told to be free
        registered = self._is_ready() is None
        said = ledger, to_about(self._config, facts, self._pinning.path), registered
        if self._said is None or ledger is not self._said[0] or said[1:] != self._said[1:]:
            self._said = said
            self._reporter.part.say(to_saying(ledger, said[1], self._config, registered))

    def _tell(self, events: Sequence[PodEvent]) -> None:
        if events and self._reporter and not self._reporter.closed:
            self._reporter.part.tell(events)

    def _cluster(self) -> Cluster:
        if self._reporter is None or self._reporter.closed:
            return Cluster()
        return Cluster(pods=self._reporter.part.pods, marks=self._reporter.part.marks)

    def _known(self) -> Known:
        return self._driver.part.known if self._driver else Known()

    # --- bell and signals -------------------------------------------------------------------------

    def _ring(self) -> None:
        self._bell.put(None)

    def _wait(self) -> None:
        """Until the bell rings, pods came or went unannounced, or it is time."""
        busy = time.monotonic() < self._busy_until_s
        end_s = time.monotonic() + (_BUSY_TICK_S if busy else self._config.period_s)
        while (left_s := end_s - time.monotonic()) > 0:
            try:
                self._bell.get(timeout=min(left_s, _GLANCE_S))
                break
            except queue.Empty:
                if self._pinning.stirred():
                    break
        time.sleep(max(0.0, self._beat_s + _GAP_S - time.monotonic()))
        with suppress(queue.Empty):
            while True:
                self._bell.get_nowait()

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
            self._observer.forget()
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
            on_stream=self._on_stream,
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
        known = self._known()
        self._driver = _renew(self._driver, driver, lambda: Driver(driver, known, listener))
        self._renew_reporter(config)
        address, checks = config.status_address, (self._is_alive, self._is_ready)
        if address:
            self._status = _renew(
                self._status, address, lambda: start_status(address, self._metrics, *checks)
            )
        else:
            _close(self._status)

    def _renew_reporter(self, config: Config) -> None:
        self._said = None
        server = find_server(config.kube_api, config.service_account_dir)
        if server is None:
            _close(self._reporter)
            return
        settings = ReportSettings(
            server=server,
            node=node_name(config),
            ack=config.ack_objects == "yes",
            taint=config.startup_taint,
        )
        self._reporter = _renew(
            *(self._reporter, settings), lambda: Reporter(settings, self._metrics, self._ring)
        )

    def _start_nri(self, facts: Facts) -> None:
        """Not before the machine is known: from then on containers are created as we say."""
        config, books = self._config, self._books
        if facts.rules.observe_only:
            _close(self._nri)
            return
        callbacks = Callbacks(
            on_synchronize=self._pinning.on_synchronize,
            on_create=books.on_create,
            on_update=books.on_update,
            on_start=books.on_start,
            on_stop=books.on_stop,
            on_remove=books.on_remove,
            on_run_pod=books.on_run_pod,
            on_end_pod=books.on_end_pod,
            on_connection=self._pinning.on_connection,
            on_rpc=self._metrics.rpc,
        )
        settings = config.nri_socket, config.nri_index
        self._nri = _renew(
            self._nri, settings, lambda: NriPlugin(settings[0], "numalet", settings[1], callbacks)
        )

    def _is_alive(self) -> str | None:
        late_s = time.monotonic() - self._beat_s
        limit_s = _STALLED_S + self._config.period_s
        return f"the last pass began {late_s:.0f} s ago" if late_s > limit_s else None

    def _is_ready(self) -> str | None:
        if self._snapshot is None:
            return "the machine is not read yet"
        if not self._snapshot.offer.devices:
            reading = self._known().reading
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

    def _on_stream(self, is_open: bool) -> None:
        self._metrics.streaming(is_open)
        if is_open:  # a kubelet that has just started does not list all its pods yet
            self._busy_until_s = time.monotonic() + _BUSY_S
        self._ring()  # the startup taint waits for it

    def _on_rpc(self, method: str, seconds: float, code: str) -> None:
        self._metrics.rpc(method, seconds, code)
        if method == "Allocate":
            self._busy_until_s = time.monotonic() + _BUSY_S
            self._ring()


def _pending(node: Node) -> tuple[Demand, ...]:
    return waiting_for_gpus((node.specs or {}).values(), node.holdings)


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
