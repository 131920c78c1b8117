"""What the searches cost beside their twins: one table per question, as a pod would ask it."""

import random
from collections.abc import Callable

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from agent.core import _bitmap, _bitmap_py, _search_py

KINDS = {"C": (_bitmap.Bitmap, _bitmap), "Python twin": (_bitmap_py.Bitmap, _search_py)}

pytestmark = pytest.mark.benchmark(max_time=0.5, min_rounds=1)  # some answers take the twin long
kinds = pytest.mark.parametrize("kind", KINDS)


def measure(
    benchmark: BenchmarkFixture, group: str, call: Callable[..., object], *args: object
) -> None:
    benchmark.group = group
    benchmark(call, *args)


def matrix(size: int) -> tuple[tuple[int, ...], ...]:
    """Any links at all: on a machine with a pattern to its links no search takes longer."""
    chance = random.Random(size)
    score = {pair: chance.choice((10, 20, 50, 100, 200)) for pair in pairs(size)}
    return tuple(
        tuple(0 if a == b else score[min(a, b), max(a, b)] for b in range(size))
        for a in range(size)
    )


def pairs(size: int) -> list[tuple[int, int]]:
    return [(a, b) for b in range(size) for a in range(b)]


@pytest.mark.parametrize(
    ("count", "size"),
    [(4, 8), (4, 16), (8, 16), (10, 20), (8, 32)],
    ids=lambda number: str(number),
)
@kinds
def test_choose_subset(benchmark: BenchmarkFixture, kind: str, count: int, size: int) -> None:
    bitmap, search = KINDS[kind]
    args = matrix(size), bitmap(range(size)), bitmap(), count
    measure(benchmark, f"best {count} of {size}", search.choose_subset, *args)


@pytest.mark.parametrize(
    ("count", "cpus"), [(24, 128), (24, 384), (25, 384), (96, 384)], ids=lambda number: str(number)
)
@pytest.mark.parametrize("state", ["idle", "half taken"])
@kinds
def test_choose_cpus(
    benchmark: BenchmarkFixture, kind: str, state: str, count: int, cpus: int
) -> None:
    """Cores of two threads, i and i + half, in caches of 8 cores."""
    bitmap, search = KINDS[kind]
    half = cpus // 2
    cores = tuple(bitmap([i, half + i]) for i in range(half))
    caches = tuple(
        bitmap([*range(i, i + 8), *range(half + i, half + i + 8)]) for i in range(0, half, 8)
    )
    chance = random.Random(cpus)
    taken = set(chance.sample(range(cpus), half)) if state == "half taken" else set()
    free = bitmap(set(range(cpus)) - taken)
    group = f"{count} of {cpus} CPUs, {state}"
    measure(benchmark, group, search.choose_cpus, free, cores, caches, count)
