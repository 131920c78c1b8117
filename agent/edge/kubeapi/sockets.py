"""The connections to one API server, and a way to end them all while somebody waits on them."""

import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final
from weakref import WeakSet

from urllib3 import BaseHTTPResponse, HTTPConnectionPool, Timeout, connection_from_url
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import ProtocolError, SSLError

from agent.edge.kubeapi.server import Credentials, check_url

_CONNECTIONS: Final = 8
"""Kept for the next call; more at once are made, and closed afterwards."""

_SOCKET_OPTIONS: Final = (
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""A peer that is gone without a word is found after 60 s of silence."""

_OnSocket = Callable[[socket.socket], None]


class _Plain(HTTPConnection):
    """Tells of the socket, once connected, and remembers it."""

    def __init__(self, *args: Any, on_socket: _OnSocket, **options: Any) -> None:
        super().__init__(*args, **options)
        self.on_socket = on_socket
        self.socket: socket.socket | None = None

    def connect(self) -> None:
        super().connect()
        self.socket = self.sock
        self.on_socket(self.sock)


class _Tls(HTTPSConnection):
    """The same over TLS."""

    def __init__(self, *args: Any, on_socket: _OnSocket, **options: Any) -> None:
        super().__init__(*args, **options)
        self.on_socket = on_socket
        self.socket: socket.socket | None = None

    def connect(self) -> None:
        super().connect()
        self.socket = self.sock
        self.on_socket(self.sock)


class Sockets:
    """Sends requests, over connections that are kept. For any thread. Raises what urllib3 does,
    OSError, and ValueError with a sentence."""

    def __init__(self, url: str, credentials: Credentials) -> None:
        self.closed = threading.Event()
        self._url = url
        self._is_tls = url.startswith("https:")
        self._credentials = credentials
        self._lock = threading.Lock()
        self._pool: HTTPConnectionPool | None = None
        self._trust: ssl.SSLContext | None = None
        self._live: WeakSet[socket.socket] = WeakSet()

    def send(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: bytes | None,
        timeout_s: float,
    ) -> BaseHTTPResponse:
        """The answer, its body unread. A kept connection may turn out to be dead when it is used;
        all but POST is sent once more then."""
        try:
            return self._send(method, target, headers, body, timeout_s)
        except ProtocolError as error:
            if method == "POST" or not isinstance(error.args[-1], ConnectionError):
                raise
            return self._send(method, target, headers, body, timeout_s)

    def close(self) -> None:
        """Ends what is under way, at once, and all that comes later."""
        self.closed.set()
        with self._lock:
            live, pool, self._pool = list(self._live), self._pool, None
        for each in live:
            _shut(each)
        if pool:
            pool.close()

    def _send(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: bytes | None,
        timeout_s: float,
    ) -> BaseHTTPResponse:
        try:
            return self._current_pool().urlopen(
                method,
                target,
                body=body,
                headers=headers,
                timeout=Timeout(total=timeout_s),
                retries=False,
                redirect=False,
                preload_content=False,
                decode_content=False,
            )
        except SSLError:
            self._credentials.doubt_trust()
            raise

    def _current_pool(self) -> HTTPConnectionPool:
        """A new one when other authorities are to be trusted."""
        check_url(self._url)
        trust = self._credentials.trust() if self._is_tls else None
        with self._lock:
            if self.closed.is_set():
                raise ValueError("it is not asked any more")
            if self._pool is None or trust is not self._trust:
                if self._pool:
                    self._pool.close()
                self._pool, self._trust = self._make_pool(trust), trust
            return self._pool

    def _make_pool(self, trust: ssl.SSLContext | None) -> HTTPConnectionPool:
        tls = {"ssl_context": trust} if trust else {}
        pool = connection_from_url(
            self._url,
            maxsize=_CONNECTIONS,
            socket_options=_SOCKET_OPTIONS,
            on_socket=self._add,
            **tls,
        )
        pool.ConnectionCls = _Tls if trust else _Plain
        return pool

    def _add(self, connected: socket.socket) -> None:
        with self._lock:
            self._live.add(connected)
        if self.closed.is_set():
            _shut(connected)


def bear_silence(response: BaseHTTPResponse, silence_s: float) -> None:
    """The rest of this answer may come after so much silence, whatever its begin might."""
    connection = response.connection
    if isinstance(connection, _Plain | _Tls) and connection.socket:
        connection.socket.settimeout(silence_s)


def _shut(connected: socket.socket) -> None:
    """Wakes who reads from it. Not TLS's own method, which takes TLS away under the reader."""
    with suppress(OSError):
        socket.socket.shutdown(connected, socket.SHUT_RDWR)
