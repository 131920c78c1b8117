"""What the agent tells who asks over HTTP: /healthz, /readyz and /metrics.

Anybody who reaches the address may ask, and may be slow, rude or many: a request is read within
`_REQUEST_S` and up to `_LARGEST_REQUEST`, no more than `_MOST_CONNECTIONS` are served at once, each
connection gets one answer, and nothing that is asked changes anything.
"""

import errno
import io
import re
import socket
import sys
import threading
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import PackageNotFoundError, version
from socketserver import TCPServer
from typing import Any, Final

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from agent import PURE_PYTHON, log
from agent.core.strict_json import printable
from agent.errors import ConfigError

_REQUEST_S: Final = 5.0
"""How long a client may take to send its request, and again to take the answer."""
_LARGEST_REQUEST: Final = 16 << 10
"""Bytes of a request's first line and headers."""
_MOST_CONNECTIONS: Final = 16
_BACKOFF_S: Final = 0.1
"""Before the next accept, where there are no file descriptors left for one."""

_RPC_BUCKETS_S: Final = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1,
)  # fmt: skip
_PASS_BUCKETS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5)

_LARGEST_XID: Final = 255
"""Beyond it, Xids share one label: a time series each is for codes that mean something.

Source: NVIDIA's catalogue of Xid errors ends below 200.
"""

_ADDRESS: Final = re.compile(r"(?:\[([^\[\]]+)\]|([^:\[\]]+)):([0-9]{1,5})", re.ASCII)


# --- metrics --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRow:
    """One GPU as the metrics show it; `gpu` is its UUID, `node` None where unknown."""

    gpu: str
    index: int
    node: int | None
    healthy: bool
    allocated: bool


class Metrics:
    """All that is counted. Its methods are called by any thread when what they name happened."""

    def __init__(self) -> None:
        # A twin of every series that says when it began is of no use to anyone here.
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._gpus: tuple[GpuRow, ...] = ()
        prometheus_client.ProcessCollector(registry=self.registry)
        self._show_build()
        self._make_series()
        self.registry.register(self)

    def _show_build(self) -> None:
        build = Gauge(
            "numalet_build_info",
            "Always 1; the labels say what runs.",
            ("version", "python", "core"),
            registry=self.registry,
        )
        core = "python" if PURE_PYTHON else "c"
        build.labels(_read_version(), ".".join(map(str, sys.version_info[:3])), core).set(1)

    def _make_series(self) -> None:
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self._rpc_seconds = histogram(
            "numalet_rpc_duration_seconds",
            "How long kubelet's calls took.",
            ("method",),
            buckets=_RPC_BUCKETS_S,
        )
        self._rpc_errors = counter(
            "numalet_rpc_errors_total",
            "Calls of kubelet that got an error.",
            ("method", "code"),
        )
        self._registrations = counter(
            "numalet_kubelet_registrations_total",
            "Registrations at kubelet, by result.",
            ("result",),
        )
        for result in ("ok", "failed"):
            self._registrations.labels(result)
        self._stream = gauge(
            "numalet_kubelet_stream_open", "1 while kubelet listens to our list of devices."
        )
        self._xids = counter(
            "numalet_gpu_xid_errors_total",
            "Xid errors that the GPU driver reported, ignored ones too.",
            ("gpu", "xid"),
        )
        self._pass_seconds = histogram(
            "numalet_pass_duration_seconds",
            "How long one pass of observe, decide, act took.",
            buckets=_PASS_BUCKETS_S,
        )
        self._pass_errors = counter(
            "numalet_pass_errors_total", "Steps of passes that failed, by kind.", ("kind",)
        )
        self._driver = gauge("numalet_driver_up", "1 while the GPU driver answers.")
        self._paths = gauge(
            "numalet_pinning_path", "1 for who gives containers their CPUs now.", ("path",)
        )
        self._drifts = counter(
            "numalet_cpuset_drifts_total", "Pinned containers that were found on other CPUs."
        )
        self._writes = counter("numalet_cpuset_writes_total", "Cgroups whose CPUs were written.")
        self._api = gauge("numalet_kube_api_up", "1 while the Kubernetes API answers.")
        self._reports = counter(
            "numalet_report_writes_total",
            "Objects written to the Kubernetes API, by kind and result.",
            ("object", "result"),
        )
        self._events = counter(
            "numalet_events_total", "Events on pods, by what became of them.", ("result",)
        )
        self._pod_refusals = gauge(
            "numalet_pods_refused", "Pods on this node that cannot be served as they ask."
        )

    def rpc(self, method: str, seconds: float, code: str) -> None:
        """A call of kubelet was answered; `code` is gRPC's name for how, "OK" or another."""
        self._rpc_seconds.labels(method).observe(seconds)
        if code != "OK":
            self._rpc_errors.labels(method, code).inc()

    def registered(self, result: str) -> None:
        """`result` is "ok" or "failed"."""
        self._registrations.labels(result).inc()

    def streaming(self, is_open: bool) -> None:
        self._stream.set(is_open)

    def xid(self, gpu: str | None, code: int) -> None:
        known = 0 <= code <= _LARGEST_XID
        self._xids.labels(gpu or "unknown", str(code) if known else "other").inc()

    def passed(self, seconds: float) -> None:
        """A pass ended."""
        self._pass_seconds.observe(seconds)

    def failed(self, kind: str) -> None:
        """A step of a pass failed; `kind` is the class of its error, like "DiscoveryError"."""
        self._pass_errors.labels(kind).inc()

    def driver(self, up: bool) -> None:
        self._driver.set(up)

    def pinned_by(self, path: str) -> None:
        """`path` is "nri", "cgroup" or "none" from now on."""
        self._paths.clear()
        self._paths.labels(path).set(1)

    def carried_out(self, drifts: int, writes: int) -> None:
        """The cgroups were made to follow the ledger."""
        self._drifts.inc(drifts)
        self._writes.inc(writes)

    def api(self, up: bool) -> None:
        """Whether the Kubernetes API answered."""
        self._api.set(up)

    def reported(self, kind: str, result: str) -> None:
        """An object was written; `kind` is like "topology", `result` is "ok" or "failed"."""
        self._reports.labels(kind, result).inc()

    def told(self, result: str) -> None:
        """What became of an Event: "sent", "failed", or "dropped" as one too many."""
        self._events.labels(result).inc()

    def refused(self, pods: int) -> None:
        self._pod_refusals.set(pods)

    def show_gpus(self, rows: Iterable[GpuRow]) -> None:
        """These are the GPUs from now on."""
        self._gpus = tuple(rows)

    def collect(self) -> Iterator[Metric]:
        """The registry asks here for the GPUs, all of one moment; what is gone has no series."""
        gpus = self._gpus
        nodes = sorted({_name_node(row) for row in gpus})
        health = Tally((_name_node(row), row.healthy) for row in gpus)
        allocated = Tally(_name_node(row) for row in gpus if row.allocated)
        count = GaugeMetricFamily(
            "numalet_gpus", "GPUs by NUMA node and health.", labels=("node", "health")
        )
        for node in nodes:
            count.add_metric((node, "healthy"), health[node, True])
            count.add_metric((node, "unhealthy"), health[node, False])
        yield count
        held = GaugeMetricFamily(
            "numalet_gpus_allocated", "GPUs that pods hold, by NUMA node.", labels=("node",)
        )
        for node in nodes:
            held.add_metric((node,), allocated[node])
        yield held
        each = GaugeMetricFamily(
            "numalet_gpu_healthy",
            "1 for a GPU that is given out, 0 for one that is not.",
            labels=("gpu", "index", "node"),
        )
        for row in gpus:
            each.add_metric((row.gpu, str(row.index), _name_node(row)), row.healthy)
        yield each


def _name_node(row: GpuRow) -> str:
    return "unknown" if row.node is None else str(row.node)


def _read_version() -> str:
    try:
        return version("numalet")
    except PackageNotFoundError:  # runs from a folder
        return "unknown"


# --- HTTP -----------------------------------------------------------------------------------------

Check = Callable[[], str | None]
"""None for yes, else the sentence why not."""


def start_status(
    address: str, metrics: Metrics, is_alive: Check, is_ready: Check
) -> "StatusServer":
    """Serves at "<IPv4>:<port>" or "[<IPv6>]:<port>" from threads of its own until it is closed.

    Port 0 is any free one. The checks are asked from these threads. Raises ConfigError.
    """
    family, sockaddr = _resolve(address)
    pages = {
        "/healthz": partial(_answer_check, is_alive),
        "/readyz": partial(_answer_check, is_ready),
        "/metrics": partial(_answer_metrics, metrics.registry),
    }
    try:
        return StatusServer(family, sockaddr, pages)
    except OSError as error:
        raise ConfigError(f"status_address {address}: cannot be used: {error.strerror}") from error


def _resolve(address: str) -> tuple[socket.AddressFamily, Any]:
    """The family and the socket address; no name is looked up. Raises ConfigError."""
    found = _ADDRESS.fullmatch(address)
    flags = socket.AI_NUMERICHOST | socket.AI_NUMERICSERV
    try:
        if found and int(found[3]) <= 65535:
            host = found[1] or found[2]
            known = socket.getaddrinfo(host, found[3], type=socket.SOCK_STREAM, flags=flags)
            return known[0][0], known[0][4]
    except (OSError, UnicodeError):
        pass
    raise ConfigError(f"status_address {printable(address, 60)}: is not an IP address and a port")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    body: bytes
    status: HTTPStatus = HTTPStatus.OK
    content_type: str = "text/plain; charset=utf-8"


Pages = Mapping[str, Callable[[str], _Answer]]
"""Path → what answers there, given the header Accept."""


def _answer_check(check: Check, _accept: str) -> _Answer:
    problem = check()
    if problem is None:
        return _Answer(body=b"ok\n")
    return _Answer(
        body=f"{problem}\n".encode(errors="replace"), status=HTTPStatus.SERVICE_UNAVAILABLE
    )


def _answer_metrics(registry: CollectorRegistry, accept: str) -> _Answer:
    """In the format that `accept` asks for; in the plain one where that makes no sense."""
    try:
        encode, content_type = choose_encoder(" ".join(accept.split()))
        return _Answer(body=encode(registry), content_type=content_type)
    except (TypeError, ValueError):  # a version that is no number
        encode, content_type = choose_encoder("")
        return _Answer(body=encode(registry), content_type=content_type)


class StatusServer(ThreadingHTTPServer):
    """Listens from its construction until `close`; `address` is where, with the port it got."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_port = False
    request_queue_size = _MOST_CONNECTIONS

    def __init__(self, family: socket.AddressFamily, sockaddr: Any, pages: Pages) -> None:
        self.address_family = family
        self.pages = pages
        self._free = threading.Semaphore(_MOST_CONNECTIONS)
        self._closing = threading.Event()
        super().__init__(sockaddr, _Handler)
        host, port = self.socket.getsockname()[:2]
        self.address = f"[{host}]:{port}" if family == socket.AF_INET6 else f"{host}:{port}"
        self._thread = threading.Thread(target=self._serve, name="status", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends listening at once; answers that are under way end by themselves."""
        self._closing.set()
        with suppress(OSError):  # closed before
            self.socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(0.4)
        self.server_close()

    def _serve(self) -> None:
        """Sleeps until somebody connects; `close` wakes it by shutting the socket down."""
        while not self._closing.is_set():
            self.handle_request()

    def server_bind(self) -> None:
        """Without HTTPServer's look-up of our own name, which may wait for a name server."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = self.socket.getsockname()[:2]

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                self._closing.wait(_BACKOFF_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Hangs up at once where too many are served."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread can be started
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go away or are too slow are nothing to speak of."""
        if not isinstance(sys.exc_info()[1], OSError):
            log.crash("status request failed")


class _Handler(BaseHTTPRequestHandler):
    """One connection: one request, one answer."""

    server: StatusServer
    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"
    error_content_type = "text/plain; charset=utf-8"
    error_message_format = "%(message)s\n"

    def handle(self) -> None:
        head = _read_head(self.connection, time.monotonic() + _REQUEST_S)
        self.connection.settimeout(_REQUEST_S)
        self.rfile.close()
        self.rfile = io.BufferedReader(io.BytesIO(head))
        self.raw_requestline = self.rfile.readline()
        self.requestline = self.command = ""
        self.request_version = self.protocol_version
        if len(head) > _LARGEST_REQUEST:
            self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        elif self.parse_request():
            self._send(self._answer())

    def _answer(self) -> _Answer:
        if self.command not in ("GET", "HEAD"):
            return _Answer(body=b"GET and HEAD only\n", status=HTTPStatus.METHOD_NOT_ALLOWED)
        page = self.server.pages.get(self.path.partition("?")[0])
        if page is None:
            known = ", ".join(self.server.pages)
            return _Answer(body=f"there are {known}\n".encode(), status=HTTPStatus.NOT_FOUND)
        try:
            return page(self.headers.get("Accept", ""))
        except Exception:
            log.crash("status page failed")
            return _Answer(body=b"a bug; see the log\n", status=HTTPStatus.INTERNAL_SERVER_ERROR)

    def _send(self, answer: _Answer) -> None:
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.send_header("Connection", "close")
        if answer.status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def handle_expect_100(self) -> bool:
        """Invites no body: none is read."""
        return True

    def version_string(self) -> str:
        return "numalet"

    def log_message(self, *_: object) -> None:
        pass


def _read_head(connection: socket.socket, deadline_s: float) -> bytes:
    """A request's first line and headers, or more or less of it; see `_LARGEST_REQUEST`.

    Raises TimeoutError at the deadline, OSError for a client that is gone.
    """
    head = bytearray()
    while len(head) <= _LARGEST_REQUEST:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        connection.settimeout(left_s)
        part = connection.recv(4096)
        head += part
        tail = head[-len(part) - 3 :]
        if not part or b"\n\r\n" in tail or b"\n\n" in tail:
            break
    return bytes(head)
