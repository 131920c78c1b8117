"""agent.edge.kubeletpods against servers on loopback: one like kubelet's, and peers that misbehave.

Certificates are made by openssl, which the tests of https need.
"""

import contextlib
import json
import os
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from agent.edge import kubeletpods
from agent.edge.kubeletpods import list_pods
from agent.errors import KubeletError

PATIENCE_S = 20.0
PODS = [{"metadata": {"name": "a", "uid": "1"}}, {"metadata": {"name": "b", "uid": "2"}}]
POD_LIST = json.dumps({"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": PODS})


@dataclass(slots=True)
class Server:
    """Answers every request with the same, and notes (path, headers)."""

    url: str = ""
    status: int = 200
    body: str = POD_LIST
    headers: dict[str, str] = field(default_factory=dict)
    chunked: bool = False
    asked: list[tuple[str, Mapping[str, str]]] = field(default_factory=list)


@contextlib.contextmanager
def serving(
    certificate: Path | None = None, address: str = "127.0.0.1", version: str = "HTTP/1.1"
) -> Iterator[Server]:
    server = Server()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = version

        def do_GET(self) -> None:
            server.asked.append((self.path, dict(self.headers)))
            self.send_response(server.status)
            for name, value in server.headers.items():
                self.send_header(name, value)
            body = server.body.encode()
            if server.chunked:
                self.send_header("Transfer-Encoding", "chunked")
                parts = [body[at : at + 50] for at in range(0, len(body), 50)]
                body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in [*parts, b""])
            elif version == "HTTP/1.1":
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    class Listener(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in address else socket.AF_INET

        def handle_error(self, *_: Any) -> None:
            """Clients that do not trust us hang up."""

    listener = Listener((address, 0), Handler)
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        listener.socket = context.wrap_socket(listener.socket, server_side=True)
    host = f"[{address}]" if ":" in address else address
    server.url = f"{'https' if certificate else 'http'}://{host}:{listener.server_port}"
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        listener.shutdown()
        thread.join()
        listener.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


def complaint(url: str, **how: Any) -> str:
    """The error's text after the URL, which is one line."""
    with pytest.raises(KubeletError) as caught:
        list_pods(url, **({"timeout_s": PATIENCE_S} | how))
    text = str(caught.value)
    assert text.startswith(f"{url}: ")
    assert text.isprintable()
    return text.removeprefix(f"{url}: ")


# --- what kubelet answers -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "pods"),
    [
        pytest.param(POD_LIST, PODS, id="two pods"),
        pytest.param('{"kind":"PodList","items":null}', [], id="none, as Go says"),
        pytest.param('{"kind":"PodList","apiVersion":"v1"}', [], id="none"),
        pytest.param('{"items":[{"metadata":{"name":"ü"}}]}', [{"metadata": {"name": "ü"}}],
                     id="a name that is not ASCII"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("chunked", [False, True])
def test_pods(server: Server, body: str, pods: list[object], chunked: bool) -> None:
    server.body = body
    server.chunked = chunked
    assert list_pods(server.url, timeout_s=PATIENCE_S) == tuple(pods)
    assert [path for path, _ in server.asked] == ["/pods"]


def test_a_server_that_closes_after_each_answer() -> None:
    with serving(version="HTTP/1.0") as server:
        assert list_pods(server.url, timeout_s=PATIENCE_S) == tuple(PODS)


def test_an_address_of_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with serving(address="::1") as server:
        assert list_pods(server.url, timeout_s=PATIENCE_S) == tuple(PODS)


def test_no_proxy_is_asked(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
        monkeypatch.setenv(name.upper(), "http://127.0.0.1:9")
    assert list_pods(server.url, timeout_s=PATIENCE_S) == tuple(PODS)


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        pytest.param(401, "kubelet refuses, 401: it does not know the token", id="unknown"),
        pytest.param(
            403,
            "kubelet refuses, 403: the token may not get nodes/proxy or nodes/pods",
            id="not allowed",
        ),
        pytest.param(307, "kubelet refuses, 307: Temporary Redirect", id="elsewhere"),
        pytest.param(500, "kubelet refuses, 500: Internal Server Error", id="broken"),
    ],
)
def test_kubelet_refuses(server: Server, status: int, reason: str) -> None:
    with serving() as other:
        server.status = status
        server.headers = {"Location": f"{other.url}/pods"}
        assert complaint(server.url) == reason
        assert other.asked == []


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        pytest.param("", "not JSON: Expecting value: line 1 column 1 (char 0)", id="nothing"),
        pytest.param(
            '{"items":', "not JSON: Expecting value: line 1 column 10 (char 9)", id="half"
        ),
        pytest.param("[]", "no list of pods", id="another list"),
        pytest.param('{"items":{}}', "no list of pods", id="items that are no list"),
        pytest.param('{"items":[1]}', "no list of pods", id="an item that is no object"),
        pytest.param('{"items":' + "[" * 200000, "nested too deeply", id="very deep"),
    ],
)
def test_answers_that_make_no_sense(server: Server, body: str, reason: str) -> None:
    server.body = body
    assert complaint(server.url) == f"kubelet's answer is {reason}"


def test_an_answer_that_is_no_text(server: Server) -> None:
    with peer(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n\xff\xff") as url:
        assert complaint(url).startswith("kubelet's answer is not JSON: 'utf-8' codec")


@pytest.mark.parametrize("chunked", [False, True])
def test_a_large_answer(server: Server, chunked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    server.chunked = chunked
    monkeypatch.setattr(kubeletpods, "_LARGEST", len(POD_LIST))
    assert list_pods(server.url, timeout_s=PATIENCE_S) == tuple(PODS)
    server.body += " "
    assert complaint(server.url) == "kubelet's answer is larger than 0 MiB"


# --- https ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Certificate:
    """`chain` is the certificate and its key, `ca` who has signed it."""

    chain: Path
    ca: Path


@pytest.fixture(scope="session")
def make_certificate(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Certificate]:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")

    def make(name: str) -> Certificate:
        folder = tmp_path_factory.mktemp("certificate")
        key, certificate, chain = (folder / one for one in ("key.pem", "ca.pem", "chain.pem"))
        command = [
            *(openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", "/CN=kubelet", "-addext", f"subjectAltName={name}"),
            *("-keyout", key, "-out", certificate),
        ]
        subprocess.run(command, check=True, capture_output=True)
        chain.write_bytes(certificate.read_bytes() + key.read_bytes())
        return Certificate(chain, certificate)

    return make


@pytest.fixture(scope="session")
def of_node(make_certificate: Callable[[str], Certificate]) -> Certificate:
    return make_certificate("DNS:node-1")


@pytest.fixture(scope="session")
def of_address(make_certificate: Callable[[str], Certificate]) -> Certificate:
    return make_certificate("IP:0.0.0.0")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost"])
def test_on_loopback_any_certificate_will_do(host: str, of_node: Certificate) -> None:
    with serving(of_node.chain, "127.0.0.2" if host == "127.0.0.2" else "127.0.0.1") as server:
        url = server.url.replace("127.0.0.1", host)
        assert list_pods(url, timeout_s=PATIENCE_S) == tuple(PODS)


def test_on_loopback_the_signature_counts_not_the_name(
    of_node: Certificate, of_address: Certificate
) -> None:
    with serving(of_node.chain) as server:
        ca_file = str(of_node.ca)
        assert list_pods(server.url, "", ca_file, timeout_s=PATIENCE_S) == tuple(PODS)
        assert complaint(server.url, ca_file=str(of_address.ca)) == (
            "kubelet's certificate is not trusted: self-signed certificate"
        )


# 0.0.0.0 leads to this machine too, but is not a loopback address.
def test_elsewhere_both_count(of_node: Certificate, of_address: Certificate) -> None:
    with serving(of_address.chain) as server:
        url = server.url.replace("127.0.0.1", "0.0.0.0")
        ca_file = str(of_address.ca)
        assert list_pods(url, "", ca_file, timeout_s=PATIENCE_S) == tuple(PODS)
        assert "certificate is not trusted: self-signed certificate" in complaint(url)
    with serving(of_node.chain) as server:
        url = server.url.replace("127.0.0.1", "0.0.0.0")
        assert complaint(url, ca_file=str(of_node.ca)) == (
            "kubelet's certificate is not trusted: IP address mismatch, "
            "certificate is not valid for '0.0.0.0'."
        )


def test_the_token_is_read_anew_each_time(of_node: Certificate, tmp_path: Path) -> None:
    token = tmp_path / "token"
    with serving(of_node.chain) as server:
        for text in ("first.token\n", "second.token"):
            token.write_text(text)
            list_pods(server.url, str(token), timeout_s=PATIENCE_S)
    assert [headers["Authorization"] for _, headers in server.asked] == [
        "Bearer first.token",
        "Bearer second.token",
    ]


def test_the_token_is_not_sent_in_clear(server: Server, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    list_pods(server.url, str(tmp_path / "token"), timeout_s=PATIENCE_S)
    assert "secret" not in str(server.asked)


@pytest.mark.parametrize("text", ["", "\n", "two words", "a\nb: c", "ü"])
def test_a_file_without_a_token(text: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(text)
    reason = complaint("https://127.0.0.1:9", token_file=str(tmp_path / "token"))
    assert reason == f"the file {tmp_path}/token has no token"


def test_a_token_that_is_not_there(tmp_path: Path) -> None:
    reason = complaint("https://127.0.0.1:9", token_file=f"{tmp_path}/none")
    assert reason == f"kubelet cannot be asked: {tmp_path}/none No such file or directory"


def test_certificates_that_are_not_there(tmp_path: Path) -> None:
    reason = complaint("https://127.0.0.1:9", ca_file=f"{tmp_path}/none")
    assert reason == f"the file {tmp_path}/none has no certificates: No such file or directory"


def test_a_file_without_certificates(tmp_path: Path) -> None:
    (tmp_path / "ca").write_text("none")
    reason = complaint("https://127.0.0.1:9", ca_file=f"{tmp_path}/ca")
    assert reason.startswith(f"the file {tmp_path}/ca has no certificates: ")


def test_a_server_that_does_not_speak_https() -> None:
    with peer(b"HTTP/1.1 400 Bad Request\r\n\r\n") as url:
        reason = complaint(url.replace("http:", "https:"))
    assert reason.startswith("kubelet cannot be asked: [SSL")


# --- no answer ------------------------------------------------------------------------------------


@contextlib.contextmanager
def peer(answer: bytes, drip: bytes = b"") -> Iterator[str]:
    """Says `answer` to one client that has asked, then `drip` over and over until it hangs up."""
    listener = socket.create_server(("127.0.0.1", 0))

    def talk() -> None:
        with contextlib.suppress(OSError), listener.accept()[0] as client:
            client.recv(1000)
            client.sendall(answer)
            client.settimeout(0.01 if drip else None)
            while drip:
                client.sendall(drip)
                with contextlib.suppress(TimeoutError):
                    if not client.recv(1):
                        return
            if not answer:
                client.recv(1)

    thread = threading.Thread(target=talk)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    reason = complaint(f"http://127.0.0.1:{port}")
    assert reason == "nobody listens there; kubelet is not running"


@pytest.mark.parametrize(
    ("answer", "drip"),
    [
        pytest.param(b"", b"", id="silent"),
        pytest.param(b"HTTP/1.1 200 OK\r\n", b"x", id="an endless header"),
        pytest.param(b"HTTP/1.1 200 OK\r\n\r\n", b" ", id="blank after blank"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n", id="chunks"
        ),
    ],
)
def test_a_slow_peer_is_not_waited_for(answer: bytes, drip: bytes) -> None:
    with peer(answer, drip) as url:
        assert complaint(url, timeout_s=0.3) == "kubelet did not answer within 0.3 s"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        pytest.param(b"hello\r\n\r\n", "not HTTP: hello", id="another protocol"),
        pytest.param(b"HTTP/1.1 2x0 OK\r\n\r\n", "not HTTP: HTTP/1.1 2x0 OK", id="no status"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 200, "not HTTP: got more than 100 headers",
            id="many headers",
        ),
        pytest.param(
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "not HTTP: ",
            id="no chunk",
        ),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", "not JSON: ", id="a part"),
    ],
)  # fmt: skip
def test_peers_that_talk_nonsense(answer: bytes, reason: str) -> None:
    with peer(answer) as url:
        assert complaint(url).startswith(f"kubelet's answer is {reason}")


def test_a_peer_that_hangs_up() -> None:
    with peer(b"\r") as url:
        assert "kubelet" in complaint(url)


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("127.0.0.1:10250", "it is no URL like https://127.0.0.1:10250"),
        ("ftp://127.0.0.1", "it is no URL like https://127.0.0.1:10250"),
        ("https://", "it is no URL like https://127.0.0.1:10250"),
        ("https://127.0.0.1:x", "Port could not be cast to integer value as 'x'"),
        ("https://[::1", "Invalid IPv6 URL"),
    ],
)
def test_what_is_no_url(url: str, reason: str) -> None:
    assert complaint(url) == reason


def test_nothing_stays_open(of_node: Certificate) -> None:
    with serving(of_node.chain) as server:
        list_pods(server.url, timeout_s=PATIENCE_S)
    before = len(os.listdir("/proc/self/fd"))
    with serving(of_node.chain) as server:
        for status in (200, 500):
            server.status = status
            with contextlib.suppress(KubeletError):
                list_pods(server.url, timeout_s=PATIENCE_S)
        complaint(server.url, ca_file=str(of_node.chain.parent / "none"))
    assert len(os.listdir("/proc/self/fd")) <= before
