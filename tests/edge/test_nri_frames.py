"""agent.edge.nri.frames against bytes that are put together and read here, or as Go does it."""

import struct
from collections.abc import Iterable, Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.edge.nri.frames import Decoder, Message, ProtocolError, encode
from agent.fakes.runtime import GoReader, PluginLostError, go_frames

MAX_DATA = 4 << 20
MAX_PAYLOAD = MAX_DATA + 10

# --- what is sent and read, put together from bytes -----------------------------------------------


def frame(connection: int, payload: bytes) -> bytes:
    return struct.pack(">II", connection, len(payload)) + payload


def message_bytes(message: Message, flags: int = 0) -> bytes:
    head = struct.pack(">IIBB", len(message.data), message.stream, message.kind, flags)
    return head + message.data


def cut(data: bytes, places: Iterable[int]) -> list[bytes]:
    """At these places, as far as they lie in it."""
    edges = [0, *sorted(place for place in set(places) if 0 < place < len(data)), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


def split_frames(data: bytes) -> Iterator[tuple[int, bytes]]:
    while data:
        connection, length = struct.unpack(">II", data[:8])
        yield connection, data[8 : 8 + length]
        data = data[8 + length :]


datas = st.builds(
    lambda size, seed: (bytes(range(256)) * (size // 256 + 1))[seed : seed + size],
    st.one_of(st.integers(0, 40), st.integers(4000, 4200), st.integers(8100, 8300)),
    st.integers(0, 200),
)
messages = st.builds(
    Message,
    connection=st.sampled_from([1, 2]),
    stream=st.integers(0, (1 << 32) - 1),
    kind=st.integers(0, 255),
    data=datas,
)
places = st.lists(st.integers(0, 20_000), max_size=12)


def decode(parts: Iterable[bytes], decoder: Decoder | None = None) -> list[Message]:
    decoder = decoder or Decoder()
    return [message for part in parts for message in decoder.feed(part)]


def of(connection: int, messages: list[Message]) -> list[Message]:
    return [message for message in messages if message.connection == connection]


# --- reading --------------------------------------------------------------------------------------


@given(data=st.data(), sent=st.lists(messages, max_size=5), flags=st.integers(0, 255))
@settings(deadline=None, max_examples=150)
def test_messages_come_out_whatever_the_frames_and_reads(
    data: st.DataObject, sent: list[Message], flags: int
) -> None:
    """Frames cut the two streams of bytes anywhere and come in any order, and so do reads."""
    frames = []
    for connection in (1, 2):
        stream = b"".join(message_bytes(message, flags) for message in of(connection, sent))
        payloads = cut(stream, data.draw(places))
        frames.append([frame(connection, payload) for payload in payloads])
    others = data.draw(st.lists(st.integers(3, (1 << 32) - 1).map(lambda n: frame(n, b"?" * 30))))
    wire = b"".join(interleave(data, [*frames, others]))
    decoder = Decoder()
    got = decode(cut(wire, data.draw(places)), decoder)
    for connection in (1, 2):
        assert of(connection, got) == of(connection, sent)
    assert not decoder.waits


def interleave(data: st.DataObject, rows: list[list[bytes]]) -> Iterator[bytes]:
    """All of them, each row in its order."""
    turns = [row for row, items in enumerate(rows) for _ in items]
    left = [iter(items) for items in rows]
    for row in data.draw(st.permutations(turns)):
        yield next(left[row])


@given(sent=st.lists(messages, min_size=1, max_size=4), keep=st.floats(0, 1))
@settings(deadline=None, max_examples=100)
def test_of_a_stream_that_breaks_off_what_is_complete_is_there(
    sent: list[Message], keep: float
) -> None:
    ends, wire = [0], b""
    for message in sent:
        wire += frame(message.connection, message_bytes(message))
        ends.append(len(wire))
    length = int(keep * len(wire))
    decoder = Decoder()
    complete = sum(end <= length for end in ends) - 1
    assert decode([wire[:length]], decoder) == sent[:complete]
    assert decoder.waits == (length not in ends)


def test_one_byte_at_a_time() -> None:
    sent = [Message(connection=n % 2 + 1, stream=n, kind=1, data=b"x" * n) for n in range(20)]
    wire = b"".join(frame(m.connection, message_bytes(m)) for m in sent)
    assert decode(bytes([byte]) for byte in wire) == sent


def test_the_largest_message_in_one_frame() -> None:
    sent = Message(connection=1, stream=1, kind=1, data=bytes(MAX_DATA))
    wire = frame(1, message_bytes(sent))
    assert decode(cut(wire, range(0, len(wire), 1 << 16))) == [sent]


TOO_LARGE = {
    "a frame of one byte more than a message may have": struct.pack(">II", 1, MAX_PAYLOAD + 1),
    "a frame of 4 GiB": struct.pack(">II", 2, (1 << 32) - 1),
    "a frame of 4 GiB for nobody": struct.pack(">II", 7, (1 << 32) - 1),
    "a message of one byte more": frame(1, struct.pack(">IIBB", MAX_DATA + 1, 1, 1, 0)),
    "a message of 4 GiB": frame(2, struct.pack(">IIBB", (1 << 32) - 1, 1, 2, 0)),
}


@pytest.mark.parametrize("wire", TOO_LARGE.values(), ids=TOO_LARGE)
def test_what_is_too_large_is_refused_at_its_head(wire: bytes) -> None:
    decoder = Decoder()
    assert list(decoder.feed(wire[:-1])) == []
    with pytest.raises(ProtocolError, match=r"the container runtime sent a (frame|message) of 4,"):
        list(decoder.feed(wire[-1:]))


def test_messages_before_what_is_too_large_come_out() -> None:
    sent = Message(connection=1, stream=5, kind=1, data=b"fine")
    wire = frame(1, message_bytes(sent)) + struct.pack(">II", 1, MAX_PAYLOAD + 1)
    feeding = Decoder().feed(wire)
    assert next(feeding) == sent
    with pytest.raises(ProtocolError):
        next(feeding)


heads = st.builds(
    lambda connection, length, size, stream: struct.pack(
        ">IIIIBB", connection, length, size, stream, 1, 0
    ),
    st.integers(0, 3),
    st.integers(0, 40),
    st.integers(0, 40),
    st.integers(0, 3),
)


@given(st.lists(st.one_of(heads, st.binary(max_size=40)), max_size=20))
@settings(max_examples=300)
def test_noise_is_refused_or_awaited(parts: list[bytes]) -> None:
    """Nothing but ProtocolError comes out, and no more than what went in."""
    try:
        got = decode(parts)
    except ProtocolError:
        return
    assert sum(10 + len(message.data) for message in got) <= sum(map(len, parts))


# --- writing --------------------------------------------------------------------------------------


@given(sent=st.lists(messages, max_size=5))
@settings(deadline=None, max_examples=150)
def test_go_reads_what_is_sent(sent: list[Message]) -> None:
    """Through its buffer of 4,096 bytes, without running out of room."""
    frames = list(split_frames(b"".join(encode(message) for message in sent)))
    for connection in (1, 2):
        payloads = iter([payload for number, payload in frames if number == connection])
        reader = GoReader(payloads.__next__)
        for message in of(connection, sent):
            assert reader.read_message() == (message.stream, message.kind, message.data)
        assert list(payloads) == []


@given(message=messages)
@settings(deadline=None)
def test_a_message_begins_in_a_small_frame_and_the_rest_fills_one(message: Message) -> None:
    frames = list(split_frames(encode(message)))
    assert {connection for connection, _ in frames} == {message.connection}
    assert b"".join(payload for _, payload in frames) == message_bytes(message)
    assert len(frames[0][1]) <= 4096
    assert len(frames) == (1 if len(message.data) + 10 <= 4096 else 2)


@given(message=messages)
@settings(deadline=None)
def test_it_is_sent_as_go_sends_it(message: Message) -> None:
    assert encode(message) == go_frames(
        message.connection, message.stream, message.kind, message.data
    )


def test_the_largest_message_that_can_be_sent() -> None:
    message = Message(connection=1, stream=1, kind=2, data=bytes(MAX_DATA))
    payloads = iter([payload for _, payload in split_frames(encode(message))])
    assert GoReader(payloads.__next__).read_message() == (1, 2, message.data)
    with pytest.raises(ValueError, match="4,194,305 bytes cannot be sent, only 4,194,304"):
        encode(Message(connection=1, stream=1, kind=2, data=bytes(MAX_DATA + 1)))


ROOM = {
    "a frame that fills the buffer": (4086, True),
    "a frame of one byte more": (4087, False),
}


@pytest.mark.parametrize(("size", "fits"), ROOM.values(), ids=ROOM)
def test_go_has_4096_bytes_for_the_frame_that_begins_a_message(size: int, fits: bool) -> None:
    """What the rule is for: the whole message in one frame."""
    message = Message(connection=1, stream=1, kind=2, data=bytes(size))
    reader = GoReader(iter([message_bytes(message)]).__next__)
    if fits:
        assert reader.read_message() == (1, 2, message.data)
    else:
        with pytest.raises(PluginLostError, match="cannot allocate memory"):
            reader.read_message()
