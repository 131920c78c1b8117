"""Connections, TLS, and answers on the wire, whole or not."""

import contextlib
import select
import socket
import ssl
import time
import traceback
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from agent.fakes.apiserver.answering import not_served, to_answer
from agent.fakes.apiserver.faults import Answer, Fault, to_line
from agent.fakes.apiserver.fields import Object
from agent.fakes.apiserver.requests import Request
from agent.fakes.apiserver.store import StatusError

if TYPE_CHECKING:
    from agent.fakes.apiserver.server import FakeApiServer

_PATIENCE_S = 30.0
_LOOK_S = 0.05
_LAST_CHUNK = b"0\r\n\r\n"


class Listener(ThreadingHTTPServer):
    """Each connection has a thread; TLS begins there."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, fake: "FakeApiServer", port: int) -> None:
        self.fake = fake
        super().__init__(("127.0.0.1", port), _Handler)

    def finish_request(self, request: Any, client_address: Any) -> None:
        connection = None
        try:
            if self.fake.opened(request):
                connection = self._secure(request) if self.fake.certificate else request
            if connection:
                super().finish_request(connection, client_address)
        finally:
            with contextlib.suppress(OSError):
                (connection or request).close()
            self.fake.closed(request, connection or request)

    def _secure(self, request: socket.socket) -> ssl.SSLSocket | None:
        assert self.fake.certificate
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.fake.certificate.chain, self.fake.certificate.key)
        request.settimeout(_PATIENCE_S)
        try:
            secured = context.wrap_socket(request, server_side=True)
        except OSError as error:
            self.fake.tls_failures.append(str(error))
            return None
        secured.settimeout(None)
        return secured if self.fake.opened(secured) else None

    def handle_error(self, *_: Any) -> None:
        """Clients that hang up."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Listener

    def setup(self) -> None:
        super().setup()
        self.fake = self.server.fake
        self.number = self.fake.count_connection()

    def log_message(self, *_: Any) -> None:
        pass

    def _serve(self) -> None:
        url = urlsplit(self.path)
        request = Request(
            method=self.command,
            path=url.path,
            query=dict(parse_qsl(url.query, keep_blank_values=True)),
            headers={name.title(): value for name, value in self.headers.items()},
            raw=self.rfile.read(int(self.headers.get("Content-Length", 0))),
            connection=self.number,
            at_s=time.monotonic(),
        )
        try:
            self._respond(request, self.fake.note(request))
        except OSError:
            self.close_connection = True

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do_HEAD = _serve  # noqa: N815

    def _respond(self, request: Request, fault: Fault | None) -> None:
        batches, answer = None, fault.answer if fault else None
        try:
            if request.is_watch and not fault:
                batches = self.fake.watch(request)
                answer = not_served()
            answer = answer or self.fake.answer(request)
        except StatusError as error:
            answer = to_answer(error.code, error.status)
        except Exception:
            self.fake.crashes.append(traceback.format_exc())
            answer = to_answer(500, StatusError(500, "InternalError", "a bug of the fake").status)
        if batches is not None:
            self._stream(request, batches)
        else:
            request.status = answer.status
            self._send(answer, fault or Fault())

    def _stream(self, request: Request, batches: Iterator[list[Object]]) -> None:
        request.status = 200
        self.wfile.write(_head(Answer(status=200, body=b""), chunked=True))
        with self.fake.counted_watch():
            for batch in batches:
                if batch:
                    self.wfile.write(_chunk(b"".join(map(to_line, batch))))
                elif self._is_gone():
                    self.close_connection = True
                    return
            if self.fake.running:
                self.wfile.write(_LAST_CHUNK)
            self.close_connection = not self.fake.running

    def _send(self, answer: Answer, fault: Fault) -> None:
        ends = [at for at in (fault.cut_after, fault.hang_after) if at is not None]
        if -1 not in ends:
            self._write(answer, fault, min([len(answer.body), *ends]))
        if fault.chunked and not ends:
            self.wfile.write(_LAST_CHUNK)
        if fault.hang_after is not None:
            self._wait()
        self.close_connection = self.close_connection or bool(ends)

    def _write(self, answer: Answer, fault: Fault, length: int) -> None:
        """At once if there is no pause."""
        head, healed = _head(answer, fault.chunked), self.fake.healed
        size = fault.piece_bytes if fault.pause_s else max(1, length)
        pieces = [answer.body[at : min(at + size, length)] for at in range(0, length, size)]
        for piece in pieces or [b""]:
            self.wfile.write(head + (_chunk(piece) if fault.chunked and piece else piece))
            head = b""
            if fault.pause_s and healed.wait(fault.pause_s):
                raise BrokenPipeError

    def _wait(self) -> None:
        """For the end of the connection, or of the fault."""
        healed = self.fake.healed
        while not healed.wait(_LOOK_S) and not self._is_gone():
            pass

    def _is_gone(self) -> bool:
        return bool(select.select([self.connection], [], [], 0)[0])


def _head(answer: Answer, chunked: bool) -> bytes:
    phrase = BaseHTTPRequestHandler.responses.get(answer.status, ("Unknown",))[0]
    length = ("Transfer-Encoding", "chunked")
    if not chunked:
        length = ("Content-Length", str(len(answer.body)))
    headers = {"Content-Type": answer.content_type} | dict([length]) | dict(answer.headers)
    lines = [f"HTTP/1.1 {answer.status} {phrase}", *map(": ".join, headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def _chunk(body: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(body), body)
