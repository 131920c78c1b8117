"""The bytes on NRI's socket: ttrpc messages inside the frames of a multiplexer. No I/O here.

    frame     connection id (4) · payload length (4) · payload
    message   data length (4) · stream id (4) · type (1) · flags (1) · data

All numbers are big-endian. The payloads of one connection are one stream of bytes: messages and
frames need not begin together. The runtime reads that stream through a buffer of 4,096 bytes and
drops a connection whose frame does not fit into what is left of it. So the frame in which a message
begins has at most 4,096 bytes, and all the rest of the message follows in a second frame: many
small ones could overflow the runtime's queue of 256.

Source: containerd/nri 0.12, pkg/net/multiplex; containerd/ttrpc 1.2, channel.go.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

PLUGIN_CONNECTION: Final = 1
"""On which the runtime calls the plugin."""
RUNTIME_CONNECTION: Final = 2
"""On which the plugin calls the runtime."""

REQUEST: Final = 1
RESPONSE: Final = 2

FIRST_FRAME_BYTES: Final = 4096
MAX_DATA_BYTES: Final = 4 << 20

_FRAME: Final = struct.Struct(">II")
_MESSAGE: Final = struct.Struct(">IIBB")

MAX_PAYLOAD_BYTES: Final = _MESSAGE.size + MAX_DATA_BYTES


class ProtocolError(ValueError):
    """The peer sent what no peer may send, in one sentence. The connection is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One ttrpc message. `connection` is the multiplexer's, `kind` REQUEST, RESPONSE or another."""

    connection: int
    stream: int
    kind: int
    data: bytes


def encode(message: Message) -> bytes:
    """The frames of a message. Raises ValueError for data over MAX_DATA_BYTES."""
    if len(message.data) > MAX_DATA_BYTES:
        raise ValueError(
            f"a message of {len(message.data):,} bytes cannot be sent, only {MAX_DATA_BYTES:,}"
        )
    body = _MESSAGE.pack(len(message.data), message.stream, message.kind, 0) + message.data
    parts = (body[:FIRST_FRAME_BYTES], body[FIRST_FRAME_BYTES:])
    return b"".join(_FRAME.pack(message.connection, len(part)) + part for part in parts if part)


@dataclass(slots=True)
class Decoder:
    """Turns what is read from the socket, in pieces of any size, into messages.

    Keeps at most one frame, and of each connection one message and one frame: 25 MB.
    """

    _raw: bytearray = field(default_factory=bytearray)
    _streams: dict[int, bytearray] = field(
        default_factory=lambda: {PLUGIN_CONNECTION: bytearray(), RUNTIME_CONNECTION: bytearray()}
    )

    @property
    def waits(self) -> bool:
        """Whether a frame or a message has begun that is not complete."""
        return bool(self._raw) or any(self._streams.values())

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that are complete now. What is for other connections is dropped.

        The iterator must be read to its end. Raises ProtocolError; the decoder is of no use then.
        """
        self._raw += data
        for connection, payload in _take_frames(self._raw):
            stream = self._streams.get(connection)
            if stream is not None:
                stream += payload
                yield from _take_messages(connection, stream)


def _take_frames(raw: bytearray) -> Iterator[tuple[int, bytes]]:
    start = 0
    while len(raw) - start >= _FRAME.size:
        connection, length = _FRAME.unpack_from(raw, start)
        if length > MAX_PAYLOAD_BYTES:
            raise ProtocolError(f"the container runtime sent a frame of {length:,} bytes")
        begin = start + _FRAME.size
        if len(raw) < begin + length:
            break
        start = begin + length
        yield connection, bytes(raw[begin:start])
    del raw[:start]


def _take_messages(connection: int, stream: bytearray) -> Iterator[Message]:
    start = 0
    while len(stream) - start >= _MESSAGE.size:
        length, number, kind, _ = _MESSAGE.unpack_from(stream, start)
        if length > MAX_DATA_BYTES:
            raise ProtocolError(f"the container runtime sent a message of {length:,} bytes")
        begin = start + _MESSAGE.size
        if len(stream) < begin + length:
            break
        start = begin + length
        data = bytes(stream[begin:start])
        yield Message(connection=connection, stream=number, kind=kind, data=data)
    del stream[:start]
