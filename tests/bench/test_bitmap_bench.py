"""What Bitmap costs beside its twin, a plain int and a frozenset: one table per operation and size.

Each set has two thirds of the ids in one run, and any two share a third. An int has no way to walk
its bits but a loop, which is counted as its iteration; it and frozenset read no texts.
"""

import operator
from collections.abc import Callable

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from agent.core import _bitmap, _bitmap_py


def int_of(ids: range) -> int:
    return sum(1 << i for i in ids)


def members_of(bits: int) -> list[int]:
    members = []
    while bits:
        lowest = bits & -bits
        members.append(lowest.bit_length() - 1)
        bits ^= lowest
    return members


KINDS = {
    "C": _bitmap.Bitmap,
    "Python twin": _bitmap_py.Bitmap,
    "int": int_of,
    "frozenset": frozenset,
}
ITERATE = {"int": members_of}
LENGTH = {"int": int.bit_count}
CONTAINS = {"int": lambda bits, i: bits >> i & 1}

kinds = pytest.mark.parametrize("kind", KINDS)
sizes = pytest.mark.parametrize("size", [256, 1024], ids=lambda size: f"{size} bits")


def measure(
    benchmark: BenchmarkFixture, what: str, size: int, call: Callable[..., object], *args: object
) -> None:
    benchmark.group = f"{what}, {size} bits"
    benchmark(call, *args)


@sizes
@pytest.mark.parametrize("name", ["&", "|"])
@kinds
def test_algebra(benchmark: BenchmarkFixture, kind: str, name: str, size: int) -> None:
    a, b = KINDS[kind](range(size * 2 // 3)), KINDS[kind](range(size // 3, size))
    measure(benchmark, name, size, {"&": operator.and_, "|": operator.or_}[name], a, b)


@sizes
@kinds
def test_len(benchmark: BenchmarkFixture, kind: str, size: int) -> None:
    measure(benchmark, "len", size, LENGTH.get(kind, len), KINDS[kind](range(size * 2 // 3)))


@sizes
@kinds
def test_iteration(benchmark: BenchmarkFixture, kind: str, size: int) -> None:
    measure(
        benchmark, "iteration", size, ITERATE.get(kind, list), KINDS[kind](range(size * 2 // 3))
    )


@sizes
@kinds
def test_in(benchmark: BenchmarkFixture, kind: str, size: int) -> None:
    contains = CONTAINS.get(kind, operator.contains)
    measure(benchmark, "in", size, contains, KINDS[kind](range(size * 2 // 3)), size // 2)


@sizes
@pytest.mark.parametrize("kind", ["C", "Python twin"])
def test_parse_list(benchmark: BenchmarkFixture, kind: str, size: int) -> None:
    text = ",".join(f"{first}-{first + 15}" for first in range(0, size, 32))
    measure(benchmark, "parse list", size, KINDS[kind].parse_list, text)


@sizes
@pytest.mark.parametrize("kind", ["C", "Python twin"])
def test_parse_mask(benchmark: BenchmarkFixture, kind: str, size: int) -> None:
    text = ",".join(["0000ffff"] * (size // 32))
    measure(benchmark, "parse mask", size, KINDS[kind].parse_mask, text)
