"""What the agent tells over HTTP, to clients that are polite, rude, slow or many.

Expected metrics are lines of the text format, written by hand.
"""

import contextlib
import http.client
import os
import resource
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import prometheus_client
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from agent.edge import status
from agent.edge.status import GpuRow, Metrics, StatusServer, start_status
from agent.errors import ConfigError

PATIENCE_S = 20.0
"""How long a test waits for what must happen, on a machine that is busy with other things."""
PAGES = b"there are /healthz, /readyz, /metrics\n"

Start = Callable[..., StatusServer]
Reply = tuple[int, dict[str, str], bytes]


@pytest.fixture
def start() -> Iterator[Start]:
    """Servers that end with the test."""
    with contextlib.ExitStack() as stack:

        def start_one(
            metrics: Metrics | None = None,
            *,
            alive: Callable[[], str | None] = lambda: None,
            ready: Callable[[], str | None] = lambda: None,
            address: str = "127.0.0.1:0",
        ) -> StatusServer:
            server = start_status(address, metrics or Metrics(), alive, ready)
            stack.callback(server.close)
            return server

        yield start_one


def ask(server: StatusServer, path: str, method: str = "GET", **headers: str) -> Reply:
    connection = http.client.HTTPConnection(server.address, timeout=PATIENCE_S)
    with contextlib.closing(connection):
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response.status, dict(response.headers), response.read()


def connect(server: StatusServer) -> socket.socket:
    host, _, port = server.address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), PATIENCE_S)


def talk(server: StatusServer, data: bytes) -> bytes:
    """All that is answered to these bytes and an end of file."""
    with connect(server) as client:
        client.sendall(data)
        with contextlib.suppress(OSError):  # the server has hung up already
            client.shutdown(socket.SHUT_WR)
        return drain(client)


def drain(client: socket.socket) -> bytes:
    """What comes until the server hangs up, in whichever way."""
    data = bytearray()
    with contextlib.suppress(ConnectionResetError):
        while part := client.recv(1 << 16):
            data += part
    return bytes(data)


def eventually(holds: Callable[[], object]) -> bool:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > deadline:
            return False
        select.select([], [], [], 0.01)
    return True


def lines(metrics: Metrics) -> list[str]:
    return prometheus_client.generate_latest(metrics.registry).decode().splitlines()


def gpu(index: int, node: int | None, *, healthy: bool = True, allocated: bool = False) -> GpuRow:
    return GpuRow(gpu=f"GPU-{index}", index=index, node=node, healthy=healthy, allocated=allocated)


# --- metrics --------------------------------------------------------------------------------------

HAPPENINGS: dict[str, tuple[Callable[[Metrics], None], list[str]]] = {
    "an RPC is answered": (
        lambda metrics: metrics.rpc("Allocate", 0.0002, "OK"),
        [
            'numalet_rpc_duration_seconds_bucket{le="0.0001",method="Allocate"} 0.0',
            'numalet_rpc_duration_seconds_bucket{le="0.00025",method="Allocate"} 1.0',
            'numalet_rpc_duration_seconds_bucket{le="1.0",method="Allocate"} 1.0',
            'numalet_rpc_duration_seconds_sum{method="Allocate"} 0.0002',
        ],
    ),
    "an RPC gets an error": (
        lambda metrics: metrics.rpc("Allocate", 2.0, "INVALID_ARGUMENT"),
        [
            'numalet_rpc_errors_total{code="INVALID_ARGUMENT",method="Allocate"} 1.0',
            'numalet_rpc_duration_seconds_bucket{le="1.0",method="Allocate"} 0.0',
            'numalet_rpc_duration_seconds_count{method="Allocate"} 1.0',
        ],
    ),
    "kubelet took our registration": (
        lambda metrics: metrics.registered("ok"),
        [
            'numalet_kubelet_registrations_total{result="ok"} 1.0',
            'numalet_kubelet_registrations_total{result="failed"} 0.0',
        ],
    ),
    "kubelet did not take it, twice": (
        lambda metrics: [metrics.registered("failed") for _ in range(2)] and None,
        [
            'numalet_kubelet_registrations_total{result="ok"} 0.0',
            'numalet_kubelet_registrations_total{result="failed"} 2.0',
        ],
    ),
    "nothing": (
        lambda _: None,
        ["numalet_kubelet_stream_open 0.0", "numalet_driver_up 0.0"],
    ),
    "kubelet listens": (
        lambda metrics: metrics.streaming(True),
        ["numalet_kubelet_stream_open 1.0"],
    ),
    "kubelet listened": (
        lambda metrics: [metrics.streaming(on) for on in (True, False)] and None,
        ["numalet_kubelet_stream_open 0.0"],
    ),
    "the driver answers": (lambda metrics: metrics.driver(True), ["numalet_driver_up 1.0"]),
    "an Xid": (
        lambda metrics: metrics.xid("GPU-1", 79),
        ['numalet_gpu_xid_errors_total{gpu="GPU-1",xid="79"} 1.0'],
    ),
    "an Xid of nobody knows which GPU": (
        lambda metrics: metrics.xid(None, 13),
        ['numalet_gpu_xid_errors_total{gpu="unknown",xid="13"} 1.0'],
    ),
    "a pass": (
        lambda metrics: metrics.passed(0.002),
        [
            'numalet_pass_duration_seconds_bucket{le="0.001"} 0.0',
            'numalet_pass_duration_seconds_bucket{le="0.0025"} 1.0',
            "numalet_pass_duration_seconds_count 1.0",
        ],
    ),
    "an error in a pass": (
        lambda metrics: metrics.failed("KubeletError"),
        ['numalet_pass_errors_total{kind="KubeletError"} 1.0'],
    ),
}


@pytest.mark.parametrize(("happen", "expected"), HAPPENINGS.values(), ids=HAPPENINGS)
def test_what_is_counted_after(happen: Callable[[Metrics], None], expected: list[str]) -> None:
    metrics = Metrics()
    happen(metrics)
    assert set(expected) <= set(lines(metrics))


@pytest.mark.parametrize(
    ("metric", "happen"),
    [
        ("numalet_rpc_errors_total", lambda metrics: metrics.rpc("Allocate", 0.1, "OK")),
        ("numalet_pass_errors_total", lambda metrics: metrics.passed(0.1)),
    ],
)
def test_what_went_well_is_no_error(metric: str, happen: Callable[[Metrics], None]) -> None:
    metrics = Metrics()
    happen(metrics)
    assert not [line for line in lines(metrics) if line.startswith(f"{metric}{{")]


def test_codes_that_mean_nothing_share_one_series() -> None:
    metrics = Metrics()
    for code in (-1, 256, 1000, 1 << 63, *range(100_000, 100_500)):
        metrics.xid("GPU-1", code)
    metrics.xid("GPU-1", 255)
    assert [
        line for line in lines(metrics) if line.startswith("numalet_gpu_xid_errors_total{")
    ] == [
        'numalet_gpu_xid_errors_total{gpu="GPU-1",xid="other"} 504.0',
        'numalet_gpu_xid_errors_total{gpu="GPU-1",xid="255"} 1.0',
    ]


def gpu_lines(metrics: Metrics) -> list[str]:
    return [line for line in lines(metrics) if line.startswith("numalet_gpu")]


def test_gpus_by_node_and_health() -> None:
    metrics = Metrics()
    assert gpu_lines(metrics) == []
    metrics.show_gpus(
        [
            gpu(0, 0, allocated=True),
            gpu(1, 0),
            gpu(2, 1, healthy=False, allocated=True),
            gpu(3, None),
        ]
    )
    assert gpu_lines(metrics) == [
        'numalet_gpus{health="healthy",node="0"} 2.0',
        'numalet_gpus{health="unhealthy",node="0"} 0.0',
        'numalet_gpus{health="healthy",node="1"} 0.0',
        'numalet_gpus{health="unhealthy",node="1"} 1.0',
        'numalet_gpus{health="healthy",node="unknown"} 1.0',
        'numalet_gpus{health="unhealthy",node="unknown"} 0.0',
        'numalet_gpus_allocated{node="0"} 1.0',
        'numalet_gpus_allocated{node="1"} 1.0',
        'numalet_gpus_allocated{node="unknown"} 0.0',
        'numalet_gpu_healthy{gpu="GPU-0",index="0",node="0"} 1.0',
        'numalet_gpu_healthy{gpu="GPU-1",index="1",node="0"} 1.0',
        'numalet_gpu_healthy{gpu="GPU-2",index="2",node="1"} 0.0',
        'numalet_gpu_healthy{gpu="GPU-3",index="3",node="unknown"} 1.0',
    ]


def test_gpus_that_are_gone_have_no_series() -> None:
    metrics = Metrics()
    metrics.show_gpus([gpu(0, 0), gpu(1, 1)])
    metrics.show_gpus(iter([gpu(1, 0)]))
    assert gpu_lines(metrics) == [
        'numalet_gpus{health="healthy",node="0"} 1.0',
        'numalet_gpus{health="unhealthy",node="0"} 0.0',
        'numalet_gpus_allocated{node="0"} 0.0',
        'numalet_gpu_healthy{gpu="GPU-1",index="1",node="0"} 1.0',
    ]


def test_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    python = ".".join(map(str, sys.version_info[:3]))
    core = "python" if os.environ.get("NUMALET_PURE_PYTHON") == "1" else "c"
    [line] = [line for line in lines(Metrics()) if line.startswith("numalet_build_info{")]
    assert line.startswith(f'numalet_build_info{{core="{core}",python="{python}",version="')
    assert line.endswith('"} 1.0')


def test_the_process_itself() -> None:
    [line] = [line for line in lines(Metrics()) if line.startswith("process_start_time_seconds ")]
    began = float(line.split()[1])
    assert 0 < began <= time.time() + 1
    names = {line.split()[0] for line in lines(Metrics())}
    assert {
        "process_resident_memory_bytes",
        "process_open_fds",
        "process_cpu_seconds_total",
    } <= names


def test_two_of_them_do_not_share_anything() -> None:
    one, other = Metrics(), Metrics()
    one.driver(True)
    assert "numalet_driver_up 1.0" in lines(one)
    assert "numalet_driver_up 0.0" in lines(other)
    assert b"numalet" not in prometheus_client.generate_latest(prometheus_client.REGISTRY)


def test_no_series_says_when_another_began() -> None:
    metrics = Metrics()
    metrics.rpc("Allocate", 0.1, "INTERNAL")
    metrics.passed(0.1)
    metrics.failed("other")
    assert not [line for line in lines(metrics) if "_created" in line]


def test_many_threads_count_everything_once() -> None:
    metrics = Metrics()

    def call() -> None:
        for _ in range(500):
            metrics.rpc("Allocate", 0.001, "INTERNAL")
            metrics.xid("GPU-1", 79)

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {
        'numalet_rpc_errors_total{code="INTERNAL",method="Allocate"} 4000.0',
        'numalet_rpc_duration_seconds_count{method="Allocate"} 4000.0',
        'numalet_gpu_xid_errors_total{gpu="GPU-1",xid="79"} 4000.0',
    } <= set(lines(metrics))


def test_a_scrape_shows_the_gpus_of_one_moment() -> None:
    metrics = Metrics()
    metrics.show_gpus([gpu(0, 0), gpu(1, 0)])
    families = metrics.collect()
    first = next(families)
    metrics.show_gpus([gpu(2, 1)])
    labels = [sample.labels for family in (first, *families) for sample in family.samples]
    assert {label["node"] for label in labels} == {"0"}
    assert {label["gpu"] for label in labels if "gpu" in label} == {"GPU-0", "GPU-1"}


# --- answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/healthz?verbose", "//healthz"])
def test_all_is_well(start: Start, path: str) -> None:
    code, headers, body = ask(start(), path)
    assert (code, body) == (200, b"ok\n")
    assert headers["Content-Type"] == "text/plain; charset=utf-8"
    assert headers["Server"] == "numalet"


@pytest.mark.parametrize(
    ("path", "code", "body"),
    [
        ("/healthz", 503, b"the pass hangs\n"),
        ("/readyz", 503, "kubelet wasn’t told\n".encode()),
        ("/metrics", 200, None),
    ],
)
def test_not_all_is_well(start: Start, path: str, code: int, body: bytes | None) -> None:
    server = start(alive=lambda: "the pass hangs", ready=lambda: "kubelet wasn’t told")
    answer = ask(server, path)
    assert answer[0] == code
    assert body in (None, answer[2])


def test_each_question_is_asked_anew(start: Start) -> None:
    problems = iter(["starting", None, "gone"])
    server = start(ready=lambda: next(problems))
    assert [ask(server, "/readyz")[0] for _ in range(3)] == [503, 200, 503]


def test_half_a_character_in_a_sentence(start: Start) -> None:
    assert ask(start(alive=lambda: "/\udcff is gone"), "/healthz")[2] == b"/? is gone\n"


def test_metrics_are_those_of_now(start: Start) -> None:
    metrics = Metrics()
    server = start(metrics)
    for up in (True, False):
        metrics.driver(up)
        assert f"numalet_driver_up {up:.1f}".encode() in ask(server, "/metrics")[2].splitlines()


@pytest.mark.parametrize("path", ["/", "/metrics/", "/healthz/x", "/../etc/passwd", "*", "/%00"])
def test_other_pages(start: Start, path: str) -> None:
    assert ask(start(), path)[::2] == (404, PAGES)


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics", "/"])
def test_head_is_get_without_the_body(start: Start, path: str) -> None:
    server = start(ready=lambda: "not yet")
    code, headers, body = ask(server, path)
    head_code, head_headers, _ = ask(server, path, "HEAD")
    assert head_code == code
    assert talk(server, f"HEAD {path} HTTP/1.1\r\n\r\n".encode()).endswith(b"\r\n\r\n")
    assert head_headers["Content-Type"] == headers["Content-Type"]
    assert int(headers["Content-Length"]) == len(body)
    if path != "/metrics":
        assert head_headers["Content-Length"] == headers["Content-Length"]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "QUIT"])
@pytest.mark.parametrize("path", ["/healthz", "/metrics", "/quitquitquit"])
def test_nothing_can_be_changed(start: Start, method: str, path: str) -> None:
    code, headers, body = ask(start(), path, method)
    assert (code, headers["Allow"], body) == (405, "GET, HEAD", b"GET and HEAD only\n")


def test_a_body_is_not_invited(start: Start) -> None:
    request = b"POST /healthz HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n"
    assert talk(start(), request).startswith(b"HTTP/1.1 405 ")


def test_a_check_that_fails_itself(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    server = start(alive=lambda: f"{1 // 0}")
    assert ask(server, "/healthz")[::2] == (500, b"a bug; see the log\n")
    assert ask(server, "/readyz")[0] == 200
    [record] = caplog.records
    assert record.message == "status page failed"
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError


# --- formats --------------------------------------------------------------------------------------

PLAIN = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        pytest.param("", PLAIN, id="nothing"),
        pytest.param("*/*", PLAIN, id="anything"),
        pytest.param("text/html", PLAIN, id="what there is not"),
        pytest.param("text/plain;version=0.0.4;q=0.5", PLAIN, id="the plain format"),
        pytest.param(
            "application/openmetrics-text;version=1.0.0;q=0.8,text/plain;version=0.0.4;q=0.5",
            f"{OPEN_METRICS}; escaping=underscores",
            id="OpenMetrics first",
        ),
        pytest.param("application/openmetrics-text", OPEN_METRICS, id="OpenMetrics of any version"),
        pytest.param("application/openmetrics-text;version=x", PLAIN, id="no version"),
        pytest.param("text/plain;version=x", PLAIN, id="no plain version"),
        pytest.param(f"text/plain;version={'9' * 5000}.x", PLAIN, id="a version that is too long"),
        pytest.param(";;;,,,===", PLAIN, id="nonsense"),
    ],
)
def test_formats(start: Start, accept: str, content_type: str) -> None:
    code, headers, body = ask(start(), "/metrics", Accept=accept)
    assert (code, headers["Content-Type"]) == (200, content_type)
    assert b"numalet_driver_up 0.0\n" in body
    assert body.endswith(b"# EOF\n") == content_type.startswith("application/")


def test_open_metrics_are_what_their_strict_parser_takes(start: Start) -> None:
    metrics = Metrics()
    for happen, _ in HAPPENINGS.values():
        happen(metrics)
    metrics.show_gpus([gpu(0, 0), gpu(1, None, healthy=False, allocated=True)])
    _, _, body = ask(start(metrics), "/metrics", Accept="application/openmetrics-text")
    families = {family.name: family for family in text_string_to_metric_families(body.decode())}
    assert families["numalet_gpus"].type == "gauge"
    assert families["numalet_gpu_xid_errors"].type == "counter"
    assert families["numalet_rpc_duration_seconds"].type == "histogram"


def test_a_header_in_two_lines_does_not_become_ours(start: Start) -> None:
    accept = b"Accept: application/openmetrics-text;version=1.0.0.\r\n Evil: 1\r\n"
    answer = talk(start(), b"GET /metrics HTTP/1.1\r\n" + accept + b"\r\n")
    head, _, _ = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert not [line for line in head.splitlines() if line.strip().startswith(b"Evil")]


# --- rude, slow and many --------------------------------------------------------------------------

RUDE: dict[str, tuple[bytes, bytes]] = {
    "nothing": (b"", b""),
    "an empty line": (b"\r\n\r\n", b""),
    "one word": (b"GET\r\n\r\n", b"HTTP/1.1 400 "),
    "four words": (b"GET / / HTTP/1.1\r\n\r\n", b"HTTP/1.1 400 "),
    "no version": (b"GET / HTTQ/1.1\r\n\r\n", b"HTTP/1.1 400 "),
    "a version to come": (b"GET / HTTP/2.0\r\n\r\n", b"HTTP/1.1 505 "),
    "a version of long ago": (b"GET /healthz\r\n\r\n", b"HTTP/1.1 200 "),
    "line feeds alone": (b"GET /healthz HTTP/1.1\n\n", b"HTTP/1.1 200 "),
    "no empty line, but the end": (b"GET /healthz HTTP/1.1\r\n", b"HTTP/1.1 200 "),
    "a header without a colon": (b"GET /healthz HTTP/1.1\r\nfoo\r\n\r\n", b"HTTP/1.1 200 "),
    "too many headers": (
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n",
        b"HTTP/1.1 431 ",
    ),
    "a header that never ends": (b"GET / HTTP/1.1\r\na: " + b"b" * 17000, b"HTTP/1.1 431 "),
    "a path that never ends": (b"GET /" + b"a" * 17000, b"HTTP/1.1 431 "),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n\n", b"HTTP/1.1 400 "),
}


@pytest.mark.parametrize(("data", "answer"), RUDE.values(), ids=RUDE)
def test_a_client_that_says(start: Start, data: bytes, answer: bytes) -> None:
    server = start()
    got = talk(server, data)
    assert got.startswith(answer) if answer else got == b""
    assert ask(server, "/healthz")[0] == 200


@pytest.mark.parametrize("end", [b"\r\n\r\n", b"\n\n", b"\n\r\n"])
def test_a_request_ends_with_an_empty_line_however_it_was_cut(end: bytes) -> None:
    request = b"GET / HTTP/1.1\r\nA: b" + end
    for cut in range(1, len(request)):
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # keeps the cuts
        with one, other:
            for part in (request[:cut], request[cut:], b"body"):
                one.send(part)
            assert status._read_head(other, time.monotonic() + PATIENCE_S) == request


def test_no_error_page_repeats_markup(start: Start) -> None:
    answer = talk(start(), b"GET /<script> <b> HTTP/1.1\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"Content-Type: text/plain; charset=utf-8" in head.splitlines()
    assert b"<" not in body


@pytest.fixture(scope="module")
def shared() -> Iterator[StatusServer]:
    server = start_status("127.0.0.1:0", Metrics(), lambda: None, lambda: None)
    yield server
    server.close()


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.binary(max_size=200)
    | st.builds(b"GET %s HTTP/1.%s\r\n%s\r\n\r\n".__mod__, st.tuples(*[st.binary(max_size=30)] * 3))
    | st.builds(b"GET /metrics HTTP/1.1\r\nAccept: %s\r\n\r\n".__mod__, st.binary(max_size=60))
)
def test_whatever_a_client_says_the_next_one_is_answered(
    shared: StatusServer, caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    answer = talk(shared, data)
    assert b"500 Internal" not in answer
    assert ask(shared, "/healthz")[0] == 200
    assert not caplog.records


def served() -> int:
    """How many connections are being served."""
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "_REQUEST_S", 0.2)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("said", [b"", b"GET /hea", b"GET /healthz HTTP/1.1\r\nA: b\r\n"])
def test_a_client_that_does_not_finish_is_hung_up_on(start: Start, said: bytes) -> None:
    server = start()
    with connect(server) as client:
        client.sendall(said)
        assert drain(client) == b""


@pytest.mark.usefixtures("hurried")
def test_a_client_that_says_a_letter_now_and_then_is_hung_up_on(start: Start) -> None:
    server = start()
    deadline = time.monotonic() + PATIENCE_S
    with connect(server) as client, contextlib.suppress(ConnectionError):
        client.sendall(b"GET /")
        while not select.select([client], [], [], 0.02)[0]:
            assert time.monotonic() < deadline
            client.sendall(b"a")
        assert client.recv(100) == b""


@pytest.mark.usefixtures("hurried")
def test_a_client_that_does_not_read_is_hung_up_on(start: Start) -> None:
    server = start(alive=lambda: "a" * (64 << 20))
    with connect(server) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        assert client.recv(9) == b"HTTP/1.1 "
        assert eventually(lambda: not served())
    assert ask(server, "/readyz")[0] == 200


def test_a_client_that_leaves_early(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    server = start(alive=lambda: "a" * (64 << 20))
    with connect(server) as client:
        client.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        client.recv(9)
    assert eventually(lambda: not served())
    assert not caplog.records


def test_more_clients_than_are_served(start: Start) -> None:
    server = start()
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connect(server)) for _ in range(status._MOST_CONNECTIONS)]
        assert eventually(lambda: served() == len(idle))
        assert talk(server, b"GET /healthz HTTP/1.1\r\n\r\n") == b""
        idle[0].sendall(b"GET /readyz HTTP/1.1\r\n\r\n")
        assert drain(idle[0]).startswith(b"HTTP/1.1 200 ")
        assert eventually(lambda: served() < len(idle))
        assert ask(server, "/healthz")[0] == 200
    assert eventually(lambda: not served())


def test_many_clients_at_once_are_all_answered(start: Start) -> None:
    server = start()
    codes: list[int] = []

    def scrape() -> None:
        codes.extend(ask(server, "/metrics")[0] for _ in range(10))

    threads = [threading.Thread(target=scrape) for _ in range(status._MOST_CONNECTIONS // 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [200] * 10 * len(threads)


def test_without_file_descriptors_clients_wait(start: Start) -> None:
    server = start()
    assert eventually(lambda: not served())  # whose sockets would be free soon
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken: list[int] = []
    with socket.socket() as client:
        client.settimeout(PATIENCE_S)
        host, _, port = server.address.rpartition(":")
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
        try:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.dup(0))
            client.connect((host, int(port)))
            client.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
            assert not select.select([client], [], [], 0.3)[0]
        finally:
            for descriptor in taken:
                os.close(descriptor)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert drain(client).startswith(b"HTTP/1.1 200 ")


# --- where it listens, and for how long -----------------------------------------------------------


def test_an_address_in_use(start: Start) -> None:
    address = start().address
    with pytest.raises(ConfigError) as caught:
        start(address=address)
    assert str(caught.value) == f"status_address {address}: cannot be used: Address already in use"


def test_an_address_of_another_machine(start: Start) -> None:
    with pytest.raises(ConfigError) as caught:
        start(address="192.0.2.1:9470")
    assert str(caught.value) == (
        "status_address 192.0.2.1:9470: cannot be used: Cannot assign requested address"
    )


@pytest.mark.parametrize(
    "address",
    ["", ":9470", "localhost:9470", "127.0.0.1", "127.0.0.1:65536", "127.0.0.1:99999999999",
     "::1:9470", "[::1]", "[localhost]:1", "a\0b:1", "é:1", f"{'a' * 70000}.b:1", "/run/status:1"],
)  # fmt: skip
def test_what_is_no_address(start: Start, address: str) -> None:
    with pytest.raises(ConfigError, match=r"^status_address .*: is not an IP address and a port$"):
        start(address=address)


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_ipv6(start: Start) -> None:
    server = start(address="[::1]:0")
    assert server.address.startswith("[::1]:")
    assert ask(server, "/healthz")[0] == 200


def test_the_address_has_the_port_that_was_free(start: Start) -> None:
    one, other = start(), start()
    assert one.address != other.address
    assert all(server.address.startswith("127.0.0.1:") for server in (one, other))
    assert not one.address.endswith(":0")


def test_after_its_end_nobody_listens_and_the_address_is_free(start: Start) -> None:
    server = start()
    assert ask(server, "/healthz")[0] == 200
    with connect(server):  # an idle client does not keep it open
        assert eventually(lambda: served() == 1)
        server.close()
        with pytest.raises(ConnectionRefusedError):
            ask(server, "/healthz")
    server.close()
    assert ask(start(address=server.address), "/healthz")[0] == 200


def test_nothing_is_left_behind(start: Start) -> None:
    def left() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    assert eventually(lambda: not served())
    before = left()
    for _ in range(10):
        server = start()
        ask(server, "/metrics")
        server.close()
    assert eventually(lambda: left() == before)


LOOK_UPS = """
import sys, urllib.request
from agent.edge.status import Metrics, start_status
seen = []
sys.addaudithook(lambda event, args: seen.append((event, args)))
server = start_status("127.0.0.1:0", Metrics(), lambda: None, lambda: "not yet")
host, port = server.address.split(":")
import socket
with socket.create_connection((host, int(port))) as client:
    client.sendall(b"GET /readyz HTTP/1.1\\r\\n\\r\\n")
    while client.recv(1000): pass
print({(event, args[0]) for event, args in seen if event.startswith("socket.get")})
server.close()
"""


def test_no_name_is_looked_up_and_nothing_logged() -> None:
    """Only numbers are made into addresses."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", LOOK_UPS],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("{('socket.getaddrinfo', '127.0.0.1')}\n", "")
