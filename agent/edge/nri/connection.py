"""One connection to the runtime: its calls are answered, and ours are made, by one thread.

Whatever the peer does, memory is bounded by the decoder and time by the three bounds below; only
the wait for the next call has none.

Source: containerd/ttrpc 1.2, server.go and client.go.
"""

import math
import select
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from itertools import count
from typing import Any, Final, Generic, TypeVar

from google.protobuf.message import DecodeError
from google.protobuf.message import Message as Proto

from agent import log
from agent.core.strict_json import printable
from agent.edge.nri.frames import (
    MAX_DATA_BYTES,
    PLUGIN_CONNECTION,
    REQUEST,
    RESPONSE,
    RUNTIME_CONNECTION,
    Decoder,
    Message,
    ProtocolError,
    encode,
)
from agent.errors import ContainerRuntimeError
from agent.proto import ttrpc_pb2 as ttrpc

PLUGIN_SERVICE: Final = "nri.pkg.api.v1alpha1.Plugin"
RUNTIME_SERVICE: Final = "nri.pkg.api.v1alpha1.Runtime"

_READ_BYTES: Final = 1 << 16
_SEND_S: Final = 2.0
"""How long the peer may take to read what it is sent."""
_WHOLE_S: Final = 10.0
"""How long the peer may take from the begin of a message to its end."""
_SENTENCE_LENGTH: Final = 1_000

_Request = TypeVar("_Request", bound=Proto)
_Response = TypeVar("_Response", bound=Proto)


class Code(IntEnum):
    """How a call ended. Source: google.rpc.Code."""

    OK = 0
    INVALID_ARGUMENT = 3
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    UNIMPLEMENTED = 12
    INTERNAL = 13


class RefusedError(Exception):
    """What a method raises to fail its call: the runtime fails what the call was about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method(Generic[_Request, _Response]):
    """A call that is answered. `answer` may raise RefusedError, and ProtocolError to end the
    connection; all else that it raises is a bug. `otherwise` is the response where `answer` has
    none, or fails, or was not understood."""

    request: type[_Request]
    answer: Callable[[_Request], _Response | None]
    otherwise: _Response


class Connection:
    """Talks over a connected socket until either side ends it.

    `on_rpc` is told of each call that was answered: method, seconds, name of the code. All but
    `close` belongs to one thread.
    """

    def __init__(
        self,
        peer: socket.socket,
        methods: Mapping[str, Method[Any, Any]],
        on_rpc: Callable[[str, float, str], None],
    ) -> None:
        peer.settimeout(_SEND_S)
        self._peer = peer
        self._methods = methods
        self._on_rpc = on_rpc
        self._decoder = Decoder()
        self._whole_by_s = math.inf
        self._last_stream = 0
        self._own_streams = count(1, 2)
        self._awaited: dict[int, bytes | None] = {}
        self._undecodable: set[str] = set()

    def serve(self) -> None:
        """Reads and answers. Raises ContainerRuntimeError with the reason when it is over."""
        while True:
            self._read()

    def call(
        self, method: str, request: Proto, response: type[_Response], timeout_s: float
    ) -> _Response:
        """What the runtime answers; its own calls are answered meanwhile. Not from a method.

        Raises ContainerRuntimeError.
        """
        stream, deadline_s = next(self._own_streams), time.monotonic() + timeout_s
        body = ttrpc.Request(
            service=RUNTIME_SERVICE,
            method=method,
            payload=request.SerializeToString(),
            timeout_nano=int(timeout_s * 1e9),
        )
        self._awaited[stream] = None
        try:
            with _translated():
                self._send(RUNTIME_CONNECTION, stream, REQUEST, body.SerializeToString())
            while (data := self._awaited[stream]) is None:
                if not self._read(deadline_s):
                    raise ContainerRuntimeError(
                        f"the container runtime does not answer {method} within {timeout_s:g} s"
                    )
        finally:
            del self._awaited[stream]
        return _open_response(method, data, response)

    def close(self) -> None:
        """Ends the connection; `serve` and `call` raise then. From any thread, also when it is
        over. Closing the socket is left to whoever opened it."""
        with suppress(OSError):
            self._peer.shutdown(socket.SHUT_RDWR)

    # --- bytes ------------------------------------------------------------------------------------

    def _read(self, deadline_s: float = math.inf) -> bool:
        """Waits for bytes and takes the messages that they complete. False past the deadline.

        Raises ContainerRuntimeError.
        """
        with _translated():
            if not self._wait(min(deadline_s, self._whole_by_s)):
                if self._whole_by_s <= time.monotonic():
                    raise ProtocolError("the container runtime stopped in the middle of a message")
                return False
            data = self._peer.recv(_READ_BYTES)
            if not data:
                raise ContainerRuntimeError("the container runtime closed the connection")
            completed = False
            for message in self._decoder.feed(data):
                self._take(message)
                completed = True
        if not self._decoder.waits:
            self._whole_by_s = math.inf
        elif completed or self._whole_by_s == math.inf:
            self._whole_by_s = time.monotonic() + _WHOLE_S
        return True

    def _wait(self, deadline_s: float) -> bool:
        poll = select.poll()
        poll.register(self._peer, select.POLLIN)
        if deadline_s == math.inf:
            return bool(poll.poll())
        return bool(poll.poll(max(0.0, deadline_s - time.monotonic()) * 1e3))

    def _send(self, connection: int, stream: int, kind: int, data: bytes) -> None:
        message = Message(connection=connection, stream=stream, kind=kind, data=data)
        self._peer.sendall(encode(message))

    # --- messages ---------------------------------------------------------------------------------

    def _take(self, message: Message) -> None:
        """Answers a call, or keeps an answer. What is neither is passed over."""
        if (message.connection, message.kind) == (PLUGIN_CONNECTION, REQUEST):
            response = self._answer(message)
            data = response.SerializeToString()
            if len(data) > MAX_DATA_BYTES:
                response = _failed(Code.RESOURCE_EXHAUSTED, f"an answer of {len(data):,} bytes")
                data = response.SerializeToString()
            self._send(PLUGIN_CONNECTION, message.stream, RESPONSE, data)
        elif (message.connection, message.kind) == (RUNTIME_CONNECTION, RESPONSE) and (
            message.stream in self._awaited
        ):
            self._awaited[message.stream] = message.data

    def _answer(self, message: Message) -> ttrpc.Response:
        if message.stream % 2 == 0 or message.stream <= self._last_stream:
            return _failed(
                Code.INVALID_ARGUMENT, "a stream id must be odd and higher than those before"
            )
        self._last_stream = message.stream
        try:
            request = ttrpc.Request.FromString(message.data)
        except DecodeError:
            return _failed(Code.INVALID_ARGUMENT, "this is no request")
        method = self._methods.get(request.method)
        if request.service != PLUGIN_SERVICE or method is None:
            return _failed(Code.UNIMPLEMENTED, "there is no such method")
        start = time.perf_counter()
        code, response = self._call(request.method, method, request.payload)
        try:
            self._on_rpc(request.method, time.perf_counter() - start, code.name)
        except Exception:
            log.crash("call not counted")
        return response

    def _call(
        self, name: str, method: Method[Any, Any], payload: bytes
    ) -> tuple[Code, ttrpc.Response]:
        """Fails only if the method refuses: an error would stop pods, whatever they are to us."""
        response, code = None, Code.OK
        try:
            response = method.answer(method.request.FromString(payload))
        except ProtocolError:
            raise
        except RefusedError as refusal:
            return Code.FAILED_PRECONDITION, _failed(Code.FAILED_PRECONDITION, str(refusal))
        except DecodeError:
            code = Code.INVALID_ARGUMENT
            if name not in self._undecodable:
                self._undecodable.add(name)
                log.warning("call not understood", method=name, bytes=len(payload))
        except Exception:
            code = Code.INTERNAL
            log.crash(f"call not answered method={name}")
        if response is None:
            response = method.otherwise
        return code, ttrpc.Response(payload=response.SerializeToString())


def _failed(code: Code, sentence: str) -> ttrpc.Response:
    text = printable(sentence, _SENTENCE_LENGTH)
    return ttrpc.Response(status=ttrpc.Status(code=code, message=text))


def _open_response(method: str, data: bytes, response: type[_Response]) -> _Response:
    try:
        answer = ttrpc.Response.FromString(data)
        if answer.status.code == Code.OK:
            return response.FromString(answer.payload)
    except DecodeError as error:
        raise ContainerRuntimeError(
            f"the container runtime's answer to {method} makes no sense"
        ) from error
    why = printable(answer.status.message, _SENTENCE_LENGTH)
    raise ContainerRuntimeError(f"the container runtime refuses {method}: {why}")


@contextmanager
def _translated() -> Iterator[None]:
    """Here foreign errors end."""
    try:
        yield
    except ProtocolError as error:
        raise ContainerRuntimeError(str(error)) from error
    except TimeoutError as error:
        raise ContainerRuntimeError(
            "the container runtime does not read what it is sent"
        ) from error
    except OSError as error:
        raise ContainerRuntimeError(
            f"the connection to the container runtime broke: {error.strerror}"
        ) from error
