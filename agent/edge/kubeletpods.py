"""The pods on this node as kubelet knows them: GET /pods of kubelet's own server.

Source: Kubernetes 1.36, pkg/kubelet/server: https on port 10250 for a token that may `get
nodes/proxy` (or nodes/pods), http on the read-only port where that is on. The answer is a
v1.PodList of all pods that were admitted, or wait for it, and the static ones.
"""

import http.client
import io
import ipaddress
import json
import socket
import ssl
import time
from contextlib import closing
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

from agent.core.strict_json import Object, printable
from agent.errors import KubeletError

_LARGEST: Final = 32 << 20
"""Bytes of an answer. A pod has some 10 KiB."""
_LARGEST_TOKEN: Final = 64 << 10
_PART: Final = 1 << 20
_REFUSED: Final = {
    401: "it does not know the token",
    403: "the token may not get nodes/proxy or nodes/pods",
}


def list_pods(
    url: str, token_file: str = "", ca_file: str = "", timeout_s: float = 2.0
) -> tuple[Object, ...]:
    """The pods, as JSON objects in kubelet's order. `url` is that of the server, without a path.

    The token, read anew each time, goes over https only. With `ca_file` kubelet's certificate must
    be signed by one of these; without, the system's are asked, except on a loopback address, which
    is trusted. The name in the certificate is not looked at there: it is the node's. No proxy is
    asked, no redirection followed.

    Raises:
        KubeletError: there is no answer within `timeout_s`, or it makes no sense.
    """
    deadline_s = time.monotonic() + timeout_s
    where = printable(url, 200)
    try:
        address = _parse_url(url)
        token = _read_token(token_file) if token_file and address.scheme == "https" else ""
        return _to_pods(_get(address, token, ca_file, deadline_s))
    except TimeoutError as error:
        raise KubeletError(f"{where}: kubelet did not answer within {timeout_s:g} s") from error
    except ConnectionRefusedError as error:
        raise KubeletError(f"{where}: nobody listens there; kubelet is not running") from error
    except ssl.SSLCertVerificationError as error:
        why = f"kubelet's certificate is not trusted: {error.verify_message}"
        raise KubeletError(f"{where}: {why}") from error
    except (OSError, http.client.HTTPException, ValueError, RecursionError) as error:
        raise KubeletError(f"{where}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        file = f" {printable(error.filename, 400)}" if error.filename else ""
        return f"kubelet cannot be asked:{file} {error.strerror or error}"
    if isinstance(error, RecursionError):
        return "kubelet's answer is nested too deeply"
    if isinstance(error, http.client.HTTPException):
        return f"kubelet's answer is not HTTP: {printable(str(error) or repr(error), 100)}"
    return str(error)


# --- the call -------------------------------------------------------------------------------------


def _parse_url(url: str) -> SplitResult:
    """Raises ValueError with a sentence."""
    address = urlsplit(url)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise ValueError("it is no URL like https://127.0.0.1:10250")
    _ = address.port  # raises ValueError if it is none
    return address


def _read_token(path: str) -> str:
    """Raises OSError, or ValueError with a sentence."""
    with open(path, encoding="ascii", errors="replace") as file:
        token = file.read(_LARGEST_TOKEN).strip()
    if not token.isprintable() or not token.isascii() or " " in token or not token:
        raise ValueError(f"the file {printable(path, 400)} has no token")
    return token


def _get(address: SplitResult, token: str, ca_file: str, deadline_s: float) -> bytes:
    headers = {"Accept": "application/json", "Connection": "close"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    with closing(_connection(address, ca_file, deadline_s)) as connection:
        connection.request("GET", "/pods", headers=headers)
        with connection.getresponse() as response:
            if response.status != 200:
                why = _REFUSED.get(response.status, printable(response.reason, 60))
                raise ValueError(f"kubelet refuses, {response.status}: {why}")
            return _read_body(response)


def _read_body(response: http.client.HTTPResponse) -> bytes:
    parts = []
    size = 0
    while part := response.read(_PART):
        parts.append(part)
        size += len(part)
        if size > _LARGEST:
            raise ValueError(f"kubelet's answer is larger than {_LARGEST >> 20} MiB")
    return b"".join(parts)


def _connection(
    address: SplitResult, ca_file: str, deadline_s: float
) -> http.client.HTTPConnection:
    """Raises ValueError with a sentence."""
    host, left_s = address.hostname or "", max(deadline_s - time.monotonic(), 0.001)
    connection: http.client.HTTPConnection
    if address.scheme == "https":
        context = _trust(host, ca_file)
        connection = http.client.HTTPSConnection(
            host, address.port or 443, timeout=left_s, context=context
        )
    else:
        connection = http.client.HTTPConnection(host, address.port or 80, timeout=left_s)

    def respond(sock: socket.socket, **how: Any) -> http.client.HTTPResponse:
        return http.client.HTTPResponse(_Reader(sock, deadline_s), **how)  # type: ignore[arg-type]

    connection.response_class = respond  # type: ignore[assignment]
    return connection


def _trust(host: str, ca_file: str) -> ssl.SSLContext:
    """Raises ValueError with a sentence. To read all authorities of the system takes 20 ms."""
    if _is_loopback(host) and not ca_file:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        return context
    try:
        context = ssl.create_default_context(cafile=ca_file or None)
    except OSError as error:
        path = printable(ca_file, 400)
        raise ValueError(f"the file {path} has no certificates: {error.strerror}") from None
    if _is_loopback(host):
        context.check_hostname = False
    return context


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Reader(io.RawIOBase):
    """What comes over a connection, until a deadline: a socket's own timeout starts anew with each
    byte."""

    def __init__(self, sock: socket.socket, deadline_s: float) -> None:
        self._sock = sock
        self._raw = sock.makefile("rb", buffering=0)
        self._deadline_s = deadline_s

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left_s = self._deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._sock.settimeout(left_s)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


# --- the answer -----------------------------------------------------------------------------------


def _to_pods(body: bytes) -> tuple[Object, ...]:
    """Raises ValueError with a sentence."""
    try:
        data = json.loads(body)
    except ValueError as error:
        raise ValueError(f"kubelet's answer is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError("kubelet's answer is no list of pods")
    pods = data.get("items")
    if pods is None:  # as Go writes an empty list
        return ()
    if not isinstance(pods, list) or not all(isinstance(pod, dict) for pod in pods):
        raise ValueError("kubelet's answer is no list of pods")
    return tuple(pods)
