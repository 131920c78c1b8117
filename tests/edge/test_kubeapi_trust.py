"""agent.edge.kubeapi: where the API server is, who trusts whom, and what happens when that rotates.

Certificates are made by openssl, which these tests need.
"""

import contextlib
import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agent.edge import kubeapi
from agent.edge.kubeapi import Api, Server, Watch, find_server, watching
from agent.edge.kubeapi import server as server_module
from agent.errors import KubeApiError
from agent.fakes.apiserver import FakeApiServer, User, lay_out_account, say
from agent.fakes.certificates import Certificate, issue, make_authority

PATIENCE_S = 20.0
NODES = "/api/v1/nodes"
PODS = "/api/v1/pods"

needs_openssl = pytest.mark.skipif(not shutil.which("openssl"), reason="openssl is not installed")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make_authority(tmp_path_factory.mktemp("authority"), "authority")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """Another authority."""
    return make_authority(tmp_path_factory.mktemp("other"), "other")


@pytest.fixture(scope="module")
def certificate(authority: Certificate) -> Certificate:
    return issue(authority, "server")


@pytest.fixture
def secure(certificate: Certificate) -> Iterator[FakeApiServer]:
    with FakeApiServer(certificate) as server:
        yield server


@pytest.fixture
def plain() -> Iterator[FakeApiServer]:
    with FakeApiServer() as server:
        yield server


@contextlib.contextmanager
def talking(server: FakeApiServer, folder: Path, timeout_s: float = PATIENCE_S) -> Iterator[Api]:
    api = Api(Server(url=server.url, folder=str(folder)), timeout_s)
    try:
        yield api
    finally:
        api.close()


def complaint(call: Callable[[], Any]) -> KubeApiError:
    with pytest.raises(KubeApiError) as caught:
        call()
    assert str(caught.value).isprintable()
    assert 10 < len(str(caught.value)) < 1500
    return caught.value


def ask(api: Api) -> Any:
    return api.get(NODES)


# --- where ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "host", "port", "url"),
    [
        pytest.param("https://a:1", "10.0.0.1", "443", "https://a:1", id="the option counts"),
        pytest.param("https://a:1/", None, None, "https://a:1", id="a slash at the end"),
        pytest.param("", "10.0.0.1", "6443", "https://10.0.0.1:6443", id="as a pod is told"),
        pytest.param("", "fd00::1", "443", "https://[fd00::1]:443", id="IPv6"),
        pytest.param("", "10.0.0.1", None, "https://10.0.0.1:443", id="no port"),
        pytest.param("", "10.0.0.1", "", "https://10.0.0.1:443", id="an empty port"),
        pytest.param("", None, "443", None, id="a port alone"),
        pytest.param("", "", "443", None, id="an empty host"),
    ],
)
def test_where_the_server_is(
    option: str,
    host: str | None,
    port: str | None,
    url: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("HOST", host), ("PORT", port)):
        monkeypatch.delenv(f"KUBERNETES_SERVICE_{name}", raising=False)
        if value is not None:
            monkeypatch.setenv(f"KUBERNETES_SERVICE_{name}", value)
    found = find_server(option, "/folder")
    assert found == (url and Server(url=url, folder="/folder"))


# --- certificates ---------------------------------------------------------------------------------


@needs_openssl
def test_a_trusted_server(secure: FakeApiServer, authority: Certificate, tmp_path: Path) -> None:
    lay_out_account(tmp_path, "secret", authority)
    with talking(secure, tmp_path) as api:
        for _ in range(3):
            ask(api)
        kubeapi.may(api, "get", "", "nodes")
    assert [request.token for request in secure.requests] == ["secret"] * 4
    assert secure.connections == 1


@needs_openssl
@pytest.mark.parametrize(
    ("days", "hosts"),
    [
        pytest.param(-1, ("IP:127.0.0.1",), id="run out"),
        pytest.param(1, ("DNS:example.com",), id="of somebody else"),
        pytest.param(1, ("IP:127.0.0.2",), id="of another address"),
    ],
)
def test_certificates_that_do_not_hold(
    authority: Certificate, tmp_path: Path, days: int, hosts: tuple[str, ...]
) -> None:
    lay_out_account(tmp_path, "secret", authority)
    with FakeApiServer(issue(authority, "bad", hosts, days)) as server:
        with talking(server, tmp_path) as api:
            assert "certificate" in str(complaint(lambda: ask(api)))
            assert "certificate" in str(complaint(lambda: list(api.stream(PODS, {}))))
        assert server.requests == []


@needs_openssl
def test_an_unknown_authority(secure: FakeApiServer, other: Certificate, tmp_path: Path) -> None:
    """Neither another one, nor the system's, where there is no file."""
    with talking(secure, tmp_path) as api:
        assert "certificate" in str(complaint(lambda: ask(api)))
        lay_out_account(tmp_path, "secret", other)
        assert "certificate" in str(complaint(lambda: ask(api)))
    assert secure.requests == []


@needs_openssl
def test_a_certificate_rotates(
    secure: FakeApiServer, authority: Certificate, tmp_path: Path
) -> None:
    lay_out_account(tmp_path, "secret", authority)
    with talking(secure, tmp_path) as api:
        ask(api)
        secure.rotate(issue(authority, "second"))
        secure.drop_connections()
        secure.wait_for(lambda: not secure.open)
        ask(api)
    assert secure.tls_failures == []


@needs_openssl
def test_an_authority_rotates_first_here(
    secure: FakeApiServer, authority: Certificate, other: Certificate, tmp_path: Path
) -> None:
    """First both are trusted, then the server changes, then one is."""
    lay_out_account(tmp_path, "secret", authority)
    with talking(secure, tmp_path) as api:
        ask(api)
        (tmp_path / "both").write_text(authority.chain.read_text() + other.chain.read_text())
        (tmp_path / "both").replace(tmp_path / "ca.crt")
        ask(api)
        secure.rotate(issue(other, "second"))
        secure.drop_connections()
        secure.wait_for(lambda: not secure.open)
        ask(api)
        lay_out_account(tmp_path, None, other)
        ask(api)
    assert secure.tls_failures == []


@needs_openssl
def test_an_authority_rotates_first_there(
    secure: FakeApiServer, authority: Certificate, other: Certificate, tmp_path: Path
) -> None:
    lay_out_account(tmp_path, "secret", authority)
    with talking(secure, tmp_path) as api:
        ask(api)
        secure.rotate(issue(other, "second"))
        secure.drop_connections()
        secure.wait_for(lambda: not secure.open)
        for _ in range(3):
            assert "certificate" in str(complaint(lambda: ask(api)))
        lay_out_account(tmp_path, None, other)
        ask(api)


@needs_openssl
def test_an_authority_that_is_not_trusted_any_more(
    secure: FakeApiServer, authority: Certificate, other: Certificate, tmp_path: Path
) -> None:
    """Connections of before do not outlive the trust."""
    lay_out_account(tmp_path, "secret", authority)
    with talking(secure, tmp_path) as api:
        ask(api)
        lay_out_account(tmp_path, None, other)
        complaint(lambda: ask(api))
    assert len(secure.requests) == 1


@needs_openssl
@pytest.mark.parametrize("text", ["", "none", "-----BEGIN CERTIFICATE-----\nAAAA\n", "\x00\xff"])
def test_a_file_without_authorities(
    secure: FakeApiServer, authority: Certificate, tmp_path: Path, text: str
) -> None:
    (tmp_path / "ca.crt").write_text(text)
    with talking(secure, tmp_path) as api:
        assert str(tmp_path / "ca.crt") in str(complaint(lambda: ask(api)))
        lay_out_account(tmp_path, "secret", authority)
        ask(api)
    assert len(secure.requests) == 1


@needs_openssl
def test_a_folder_in_the_place_of_the_authorities(secure: FakeApiServer, tmp_path: Path) -> None:
    (tmp_path / "ca.crt").mkdir()
    with talking(secure, tmp_path) as api:
        complaint(lambda: ask(api))


@needs_openssl
def test_a_watch_lives_through_a_rotation(
    secure: FakeApiServer,
    authority: Certificate,
    other: Certificate,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both the server's authority and the token change; first there, then here."""
    monkeypatch.setattr(watching, "_FIRST_S", 0.01)
    monkeypatch.setattr(watching, "_LONGEST_S", 0.04)
    secure.users = {"old": User(name="agent")}
    lay_out_account(tmp_path, "old", authority)
    with talking(secure, tmp_path) as api:
        watch: Watch[str] = Watch(
            api, PODS, {}, lambda item: str(item["metadata"]["name"]), lambda: None
        )
        secure.wait_for(lambda: secure.watches == 1)
        secure.users = {"new": User(name="agent")}
        secure.rotate(issue(other, "second"))
        secure.drop_connections()
        secure.wait_for(lambda: "certificate" in watch.problem)
        secure.put("pods", {"metadata": {"name": "a"}})
        lay_out_account(tmp_path, None, other)
        secure.wait_for(lambda: "401" in watch.problem)
        assert watch.objects == {}
        lay_out_account(tmp_path, "new")
        secure.wait_for(lambda: list((watch.objects or {}).values()) == ["a"])
        secure.wait_for(lambda: watch.problem == "")
        watch.close()


# --- TLS that is none -----------------------------------------------------------------------------


def test_a_server_that_speaks_plain_http(plain: FakeApiServer, tmp_path: Path) -> None:
    lay_out_account(tmp_path, "secret")
    api = Api(Server(url=plain.url.replace("http:", "https:"), folder=str(tmp_path)))
    assert "TLS" in str(complaint(lambda: ask(api)))
    assert plain.requests == []
    api.close()


@needs_openssl
def test_plain_http_to_a_server_that_speaks_tls(secure: FakeApiServer, tmp_path: Path) -> None:
    api = Api(Server(url=secure.url.replace("https:", "http:"), folder=str(tmp_path)), 1.0)
    complaint(lambda: ask(api))
    api.close()


@contextlib.contextmanager
def deaf() -> Iterator[tuple[str, threading.Event]]:
    """Accepts connections and says nothing; the event is set once somebody has spoken."""
    listener, heard = socket.create_server(("127.0.0.1", 0)), threading.Event()
    clients: list[socket.socket] = []

    def listen() -> None:
        with contextlib.suppress(OSError):
            while True:
                clients.append(listener.accept()[0])
                clients[-1].recv(10)
                heard.set()

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        yield f"https://127.0.0.1:{listener.getsockname()[1]}", heard
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        for each in (listener, *clients):
            each.close()
        thread.join()


def test_a_handshake_that_does_not_end(tmp_path: Path) -> None:
    with deaf() as (url, _):
        api = Api(Server(url=url, folder=str(tmp_path)), 0.2)
        assert "no answer within 0.2 s" in str(complaint(lambda: ask(api)))
        api.close()


def test_closing_during_a_handshake(tmp_path: Path) -> None:
    with deaf() as (url, heard), ThreadPoolExecutor(1) as pool:
        api = Api(Server(url=url, folder=str(tmp_path)), 0.3)
        asked = pool.submit(ask, api)
        assert heard.wait(PATIENCE_S)
        api.close()
        complaint(lambda: asked.result(PATIENCE_S))


def test_closing_a_watch_during_a_handshake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "_CLOSE_S", 0.05)
    with deaf() as (url, heard):
        api = Api(Server(url=url, folder=str(tmp_path)), 0.3)
        watch: Watch[str] = Watch(api, "/api/v1/handshake", {}, lambda item: "", lambda: None)
        assert heard.wait(PATIENCE_S)
        watch.close()
        api.close()
    for thread in threading.enumerate():
        if "handshake" in thread.name:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


# --- tokens ---------------------------------------------------------------------------------------


def test_no_token(plain: FakeApiServer, tmp_path: Path) -> None:
    with talking(plain, tmp_path / "none") as api:
        ask(api)
    assert "Authorization" not in plain.requests[0].headers


@pytest.mark.parametrize("text", ["secret", "secret\n", " secret \r\n"])
def test_a_token(plain: FakeApiServer, tmp_path: Path, text: str) -> None:
    lay_out_account(tmp_path, text)
    with talking(plain, tmp_path) as api:
        ask(api)
        next(api.stream(PODS, {"timeoutSeconds": 0}), None)
    assert [request.token for request in plain.requests] == ["secret", "secret"]


@pytest.mark.parametrize(
    "text", ["", "\n", "a b", "a\nb", "a\r\nHost: b", "ü", "\x00", "\x1b[1m", "a" * 100_000]
)
def test_tokens_that_are_none(plain: FakeApiServer, tmp_path: Path, text: str) -> None:
    lay_out_account(tmp_path, text)
    with talking(plain, tmp_path) as api:
        error = complaint(lambda: ask(api))
        assert str(tmp_path / "token") in str(error)
        if text.strip():
            assert text.strip() not in str(error)
        assert plain.requests == []
        lay_out_account(tmp_path, "secret")
        ask(api)


def test_a_token_that_cannot_be_read(plain: FakeApiServer, tmp_path: Path) -> None:
    (tmp_path / "token").mkdir()
    with talking(plain, tmp_path) as api:
        assert str(tmp_path / "token") in str(complaint(lambda: ask(api)))


def test_a_token_rotates(plain: FakeApiServer, tmp_path: Path) -> None:
    """The old one is refused: the new one is used at once, in the same call, whatever it is."""
    plain.users = {"first": User(name="agent")}
    lay_out_account(tmp_path, "first")
    with talking(plain, tmp_path) as api:
        ask(api)
        for token in ("second", "third"):
            plain.users = {token: User(name="agent")}
            lay_out_account(tmp_path, token)
            body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": token}}
            api.post(NODES, body)
    statuses = [request.status for request in plain.requests]
    assert statuses == [200, 401, 201, 401, 201]
    assert len(plain.all("nodes")) == 2


def test_a_token_that_is_refused(plain: FakeApiServer, tmp_path: Path) -> None:
    plain.users = {"right": User(name="agent")}
    lay_out_account(tmp_path, "wrong")
    with talking(plain, tmp_path) as api:
        error = complaint(lambda: ask(api))
        assert (error.status, "wrong" in str(error)) == (401, False)
        assert len(plain.requests) <= 2


def test_a_token_is_not_read_each_time(
    plain: FakeApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lay_out_account(tmp_path, "first")
    with talking(plain, tmp_path) as api:
        ask(api)
        lay_out_account(tmp_path, "second")
        ask(api)
        monkeypatch.setattr(server_module.time, "monotonic", lambda: 1e9)
        ask(api)
    assert [request.token for request in plain.requests] == ["first", "first", "second"]


def test_a_token_is_not_told_to_others(plain: FakeApiServer, tmp_path: Path) -> None:
    """Neither to where a redirection leads, nor in a sentence."""
    lay_out_account(tmp_path, "secret")
    with FakeApiServer() as elsewhere, talking(plain, tmp_path) as api:
        for status in (301, 302, 303, 307, 308):
            plain.fail(say("", status, headers={"Location": f"{elsewhere.url}{NODES}"}), times=1)
            error = complaint(lambda: ask(api))
            assert (error.status, "secret" in str(error)) == (status, False)
        assert elsewhere.requests == []


def test_the_environment_has_no_say(
    plain: FakeApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A .netrc would be another way to authenticate."""
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login a password b\n")
    os.chmod(tmp_path / ".netrc", 0o600)
    monkeypatch.setenv("HOME", str(tmp_path))
    with talking(plain, tmp_path) as api:
        ask(api)
    assert "Authorization" not in plain.requests[0].headers
