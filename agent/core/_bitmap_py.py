"""The Python twin of `_bitmap.c`: its definition, its type stub and its oracle.

A set is one int whose bit i says whether i is a member, so every operation is one of int's own.
Both twins give the same results, hashes, pickles and error texts.

Texts are the kernel's. Source: cpuset(7), "Mask format" and "List format"; of what it describes
for input, everything but strides ("0-31:2/8"). Reading costs time linear in the text, whatever the
text; an error quotes 40 characters of it at most.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from operator import index
from typing import Final, Never, final

MAX_ID: Final = 1023
"""The largest member a `Bitmap` can have."""

_TOO_LARGE: Final = f"is over {MAX_ID}, the largest that numalet handles"
_WHITE: Final = " \t\n\v\f\r"
_ITEM: Final = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_WORD: Final = re.compile(r"[0-9A-Fa-f]{1,8}")
_QUOTED_LENGTH: Final = 40
_SHOWN_BITS: Final = 128


@final
class Bitmap:
    """An immutable set of the ids 0..1023.

    Compares as frozenset does: `<=` is "subset of". Operators take Bitmaps only. An id is whatever
    `operator.index` takes.

    Raises:
        TypeError: a member is no integer.
        ValueError: a member is negative or over 1023.
    """

    __slots__ = ("_bits",)
    __module__ = "agent.core.bitmap"  # one pickle for both twins

    _bits: int

    def __new__(cls, ids: Iterable[int] = (), /) -> "Bitmap":
        bits = 0
        for member in ids:
            bits |= 1 << _check_id(index(member))
        return _make(bits)

    def __init_subclass__(cls) -> Never:
        raise TypeError("type 'agent.core.bitmap.Bitmap' is not an acceptable base type")

    @classmethod
    def from_int(cls, bits: int, /) -> "Bitmap":
        """The set that has i as a member where bit i is set.

        Raises:
            TypeError: `bits` is no integer.
            ValueError: `bits` is negative or has a bit over 1023.
        """
        bits = index(bits)
        if bits < 0:
            raise ValueError("a negative int is no set of ids")
        if bits > 0:
            _check_id(bits.bit_length() - 1)
        return _make(bits)

    @classmethod
    def parse_list(cls, text: str, /) -> "Bitmap":
        """Reads "0-3,64-67". Empty text is the empty set.

        White space around the text and around its items is passed over, and NULs at the end.

        Raises:
            TypeError: `text` is no str.
            ValueError: not such a list, or an id is over 1023.
        """
        body = _strip(text)
        bits = 0
        try:
            for item in body.split(",") if body else ():
                bits |= _read_item(item.strip(_WHITE))
        except ValueError as reason:
            raise ValueError(f"{_quote(body)} is no list of ids: {reason}") from None
        return _make(bits)

    @classmethod
    def parse_mask(cls, text: str, /) -> "Bitmap":
        """Reads "00000000,00ffffff": words of 32 bits, the most significant first.

        A word may have fewer than 8 digits, and there may be any number of leading zero words.
        White space around the text is passed over, and NULs at the end.

        Raises:
            TypeError: `text` is no str.
            ValueError: not such a mask (empty text is none), or an id is over 1023.
        """
        body = _strip(text)
        try:
            return cls.from_int(_read_words(body.split(",")))
        except ValueError as reason:
            raise ValueError(f"{_quote(body)} is no mask: {reason}") from None

    def to_int(self) -> int:
        """The int whose bit i is set where i is a member."""
        return self._bits

    def format_mask(self) -> str:
        """The text that `parse_mask` reads: as few words as hold the set, at least one."""
        words = (self._bits.bit_length() + 31) // 32 or 1
        digits = f"{self._bits:0{words * 8}x}"
        return ",".join(digits[at : at + 8] for at in range(0, len(digits), 8))

    def first(self) -> int:
        """The lowest member.

        Raises:
            ValueError: the set is empty.
        """
        if not self._bits:
            raise ValueError("an empty set has no first id")
        return _lowest_bit(self._bits)

    def lowest(self, count: int, /) -> "Bitmap":
        """The set of the `count` lowest members.

        Raises:
            TypeError: `count` is no integer.
            ValueError: `count` is negative or more than there are.
        """
        count = index(count)
        if not 0 <= count <= len(self):
            raise ValueError(f"{_show_number(count)} ids cannot be taken from a set of {len(self)}")
        rest = self._bits
        for _ in range(count):
            rest &= rest - 1
        return _make(self._bits ^ rest)

    def isdisjoint(self, other: "Bitmap", /) -> bool:
        """Whether the two sets have no member in common.

        Raises:
            TypeError: `other` is no Bitmap.
        """
        if not isinstance(other, Bitmap):
            raise TypeError(f"isdisjoint takes a Bitmap, not {type(other).__name__}")
        return not self._bits & other._bits

    def __and__(self, other: "Bitmap") -> "Bitmap":
        if not isinstance(other, Bitmap):
            return NotImplemented
        return _make(self._bits & other._bits)

    def __or__(self, other: "Bitmap") -> "Bitmap":
        if not isinstance(other, Bitmap):
            return NotImplemented
        return _make(self._bits | other._bits)

    def __xor__(self, other: "Bitmap") -> "Bitmap":
        if not isinstance(other, Bitmap):
            return NotImplemented
        return _make(self._bits ^ other._bits)

    def __sub__(self, other: "Bitmap") -> "Bitmap":
        if not isinstance(other, Bitmap):
            return NotImplemented
        return _make(self._bits & ~other._bits)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Bitmap):
            return NotImplemented
        return self._bits == other._bits

    def __le__(self, other: "Bitmap") -> bool:
        if not isinstance(other, Bitmap):
            return NotImplemented
        return not self._bits & ~other._bits

    def __lt__(self, other: "Bitmap") -> bool:
        if not isinstance(other, Bitmap):
            return NotImplemented
        return self._bits != other._bits and self <= other

    def __ge__(self, other: "Bitmap") -> bool:
        if not isinstance(other, Bitmap):
            return NotImplemented
        return other <= self

    def __gt__(self, other: "Bitmap") -> bool:
        if not isinstance(other, Bitmap):
            return NotImplemented
        return other < self

    def __hash__(self) -> int:
        """`hash(b.to_int())`, which C can compute word by word."""
        return hash(self._bits)

    def __contains__(self, member: int) -> bool:
        """Whether the id is a member; one out of range is none.

        Raises:
            TypeError: `member` is no integer.
        """
        number = index(member)
        return 0 <= number <= MAX_ID and bool(self._bits >> number & 1)

    def __len__(self) -> int:
        return self._bits.bit_count()

    def __bool__(self) -> bool:
        return self._bits != 0

    def __iter__(self) -> Iterator[int]:
        """The members, ascending."""
        rest = self._bits
        while rest:
            yield _lowest_bit(rest)
            rest &= rest - 1

    def __str__(self) -> str:
        """The text that `parse_list` reads, as the kernel prints it: "0-3,64"."""
        return ",".join(
            f"{first}" if first == last else f"{first}-{last}" for first, last in _runs(self._bits)
        )

    def __repr__(self) -> str:
        return f"Bitmap.parse_list('{self}')"

    def __setattr__(self, name: str, value: object) -> Never:
        raise AttributeError(f"a Bitmap does not change: {name!r}")

    def __delattr__(self, name: str) -> Never:
        raise AttributeError(f"a Bitmap does not change: {name!r}")

    def __reduce__(self) -> tuple[Callable[[int], "Bitmap"], tuple[int]]:
        return Bitmap.from_int, (self._bits,)


def _make(bits: int) -> Bitmap:
    made = object.__new__(Bitmap)
    object.__setattr__(made, "_bits", bits)
    return made


def _check_id(number: int) -> int:
    if number < 0:
        raise ValueError(f"id {_show_number(number)} is negative")
    if number > MAX_ID:
        raise ValueError(f"id {_show_number(number)} {_TOO_LARGE}")
    return number


def _show_number(number: int) -> str:
    """Decimal while it is short: int itself refuses to print more than 4,300 digits."""
    if number.bit_length() <= _SHOWN_BITS:
        return str(number)
    return f"about {'-' if number < 0 else ''}2**{number.bit_length() - 1}"


def _lowest_bit(bits: int) -> int:
    return (bits & -bits).bit_length() - 1


def _runs(bits: int) -> Iterator[tuple[int, int]]:
    """The runs of consecutive members, ascending, each as its first and last member."""
    while bits:
        first = _lowest_bit(bits)
        beyond = _lowest_bit(bits + (1 << first))  # the carry stops at the first gap
        yield first, beyond - 1
        bits = bits >> beyond << beyond


def _strip(text: str) -> str:
    if not isinstance(text, str):
        raise TypeError(f"text must be str, not {type(text).__name__}")
    return text.rstrip(_WHITE + "\0").lstrip(_WHITE)


def _read_item(item: str) -> int:
    """The bits of one number or range."""
    match = _ITEM.fullmatch(item)
    if match is None and ":" in item:
        raise ValueError(f"{_quote(item)} has a stride, which numalet does not handle")
    if match is None:
        raise ValueError(f"{_quote(item)} is neither a number nor a range")
    first = _read_id(match[1])
    last = _read_id(match[2] or match[1])
    if first > last:
        raise ValueError(f"the range {_quote(item)} runs backwards")
    return (1 << last + 1) - (1 << first)


def _read_id(digits: str) -> int:
    """The number, told from its length first: `int` takes quadratic time for long ones."""
    significant = digits.lstrip("0") or "0"
    if len(significant) > 4 or int(significant) > MAX_ID:
        raise ValueError(f"id {_shorten(significant)} {_TOO_LARGE}")
    return int(significant)


def _read_words(words: list[str]) -> int:
    for word in words:
        if _WORD.fullmatch(word) is None:
            raise ValueError(f"{_quote(word)} is not a word of 1 to 8 hex digits")
    return int("".join(word.zfill(8) for word in words), 16)


def _quote(text: str) -> str:
    return f'"{_shorten(text)}"'


def _shorten(text: str) -> str:
    """At most 40 characters of the text, in printable ASCII."""
    shown = text[:_QUOTED_LENGTH].encode("unicode_escape").decode("ascii")
    return shown if len(text) <= _QUOTED_LENGTH else shown + "…"
