"""Memory of the C core, watched in a process of its own: nothing leaks, and running out of memory
at any allocation is a MemoryError, never a crash or a wrong answer.

Run as a program it is that process, with "leaks" or "nomemory" as its argument.
"""

import operator
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent.core import _bitmap

ROOT = Path(__file__).parents[2]

Bitmap, choose_subset, choose_cpus = _bitmap.Bitmap, _bitmap.choose_subset, _bitmap.choose_cpus
EMPTY = Bitmap()
SMALL = Bitmap([1, 2, 3, 700])
LARGE = Bitmap(range(300, 1000))
LONG = ",".join(map(str, range(1024)))  # over 512 bytes: the system's allocator, not Python's
WIDE = "0000000f," * 32 + "000000ff"
HUGE = 10**40

FEW = Bitmap(range(6))
MANY = Bitmap(range(22))
SCORES = tuple(tuple(0 if a == b else 10 * (a + b) for b in range(22)) for a in range(22))
PAIRS = tuple(Bitmap([i, i + 3]) for i in range(3))
CACHES = (Bitmap([0, 3]), Bitmap([1, 2, 4, 5]))

# Functions written in C with their arguments: each call reaches the type without a Python frame.
CALLS: dict[str, tuple[Callable[..., object], *tuple[object, ...]]] = {
    "Bitmap()": (Bitmap,),
    "Bitmap(list)": (Bitmap, [1, 1000]),
    "Bitmap(range)": (Bitmap, range(1000)),
    "Bitmap(no iterable)": (Bitmap, 5),
    "Bitmap(no integers)": (Bitmap, [1, "x"]),
    "Bitmap(too large)": (Bitmap, [1, 1024]),
    "Bitmap(huge)": (Bitmap, [1, HUGE]),
    "Bitmap(negative)": (Bitmap, [1, -1]),
    "Bitmap(two arguments)": (Bitmap, [], []),
    "inheritance": (type, "Sub", (Bitmap,), {}),
    "from_int": (Bitmap.from_int, 2**1023 + 5),
    "from_int(too large)": (Bitmap.from_int, 2**1024),
    "from_int(negative)": (Bitmap.from_int, -(2**1024)),
    "from_int(no integer)": (Bitmap.from_int, "x"),
    "parse_list": (Bitmap.parse_list, " 0-3, 64-1023\n"),
    "parse_list(long)": (Bitmap.parse_list, LONG),
    "parse_list(empty)": (Bitmap.parse_list, ""),
    "parse_list(long and wrong)": (Bitmap.parse_list, LONG + ",x"),
    "parse_list(not ASCII)": (Bitmap.parse_list, "\u0663" * 1000),
    "parse_list(stride)": (Bitmap.parse_list, "0-31:2/8"),
    "parse_list(backwards)": (Bitmap.parse_list, "5-3"),
    "parse_list(first too large)": (Bitmap.parse_list, "0001024-5"),
    "parse_list(last too large)": (Bitmap.parse_list, "5-" + "9" * 1000),
    "parse_list(no str)": (Bitmap.parse_list, b"0"),
    "parse_mask": (Bitmap.parse_mask, "f,00000001\n"),
    "parse_mask(too large)": (Bitmap.parse_mask, WIDE),
    "parse_mask(wrong)": (Bitmap.parse_mask, "0x1"),
    "parse_mask(no str)": (Bitmap.parse_mask, None),
    "to_int": (LARGE.to_int,),
    "format_mask": (LARGE.format_mask,),
    "str": (str, LARGE),
    "repr": (repr, SMALL),
    "first": (SMALL.first,),
    "first(empty)": (EMPTY.first,),
    "lowest": (LARGE.lowest, 500),
    "lowest(too many)": (LARGE.lowest, 701),
    "lowest(huge)": (LARGE.lowest, 2**200),
    "lowest(no integer)": (LARGE.lowest, "x"),
    "isdisjoint": (SMALL.isdisjoint, LARGE),
    "isdisjoint(no Bitmap)": (SMALL.isdisjoint, {1}),
    "and": (operator.and_, SMALL, LARGE),
    "or": (operator.or_, SMALL, LARGE),
    "xor": (operator.xor, SMALL, LARGE),
    "sub": (operator.sub, SMALL, LARGE),
    "and(no Bitmap)": (operator.and_, SMALL, 1),
    "sub(no Bitmap)": (operator.sub, {1}, SMALL),
    "eq": (operator.eq, SMALL, LARGE),
    "ne": (operator.ne, SMALL, LARGE),
    "lt": (operator.lt, SMALL, LARGE),
    "le": (operator.le, SMALL, LARGE),
    "gt": (operator.gt, SMALL, LARGE),
    "ge": (operator.ge, SMALL, LARGE),
    "eq(no Bitmap)": (operator.eq, SMALL, 5),
    "lt(no Bitmap)": (operator.lt, SMALL, {1}),
    "hash": (hash, LARGE),
    "in": (operator.contains, SMALL, 700),
    "in(huge)": (operator.contains, SMALL, HUGE),
    "in(no integer)": (operator.contains, SMALL, "x"),
    "len": (len, LARGE),
    "bool": (bool, LARGE),
    "iteration": (list, LARGE),
    "iteration given up": (operator.indexOf, LARGE, 310),
    "reduce": (LARGE.__reduce__,),
    "assignment": (setattr, SMALL, "first", 1),
    "choose_subset": (choose_subset, SCORES, FEW, EMPTY, 3),
    "choose_subset(beyond the bound)": (choose_subset, SCORES, MANY, EMPTY, 11),
    "choose_subset(two arguments)": (choose_subset, SCORES, FEW),
    "choose_subset(no Bitmap)": (choose_subset, SCORES, FEW, {1}, 3),
    "choose_subset(no tuple)": (choose_subset, [], FEW, EMPTY, 3),
    "choose_subset(no tuples)": (choose_subset, ([0],), FEW, EMPTY, 3),
    "choose_subset(no integers)": (choose_subset, (("x",),), FEW, EMPTY, 3),
    "choose_subset(no square)": (choose_subset, ((0, 1),), FEW, EMPTY, 3),
    "choose_subset(huge score)": (choose_subset, ((HUGE,),), FEW, EMPTY, 3),
    "choose_subset(no mirror)": (choose_subset, ((0, 1), (2, 0)), FEW, EMPTY, 3),
    "choose_subset(no row)": (choose_subset, SCORES, LARGE, EMPTY, 3),
    "choose_subset(not among)": (choose_subset, SCORES, FEW, MANY, 3),
    "choose_subset(huge count)": (choose_subset, SCORES, FEW, EMPTY, HUGE),
    "choose_subset(too few)": (choose_subset, SCORES, FEW, FEW, 3),
    "choose_subset(no count)": (choose_subset, SCORES, FEW, EMPTY, "x"),
    "choose_cpus": (choose_cpus, FEW, PAIRS, CACHES, 4),
    "choose_cpus(a pair is broken)": (choose_cpus, FEW, PAIRS, CACHES, 3),
    "choose_cpus(two arguments)": (choose_cpus, FEW, PAIRS),
    "choose_cpus(no Bitmap)": (choose_cpus, {1}, PAIRS, CACHES, 3),
    "choose_cpus(no tuple)": (choose_cpus, FEW, list(PAIRS), CACHES, 3),
    "choose_cpus(no Bitmaps)": (choose_cpus, FEW, PAIRS, ({1},), 3),
    "choose_cpus(overlap)": (choose_cpus, FEW, (*PAIRS, FEW), CACHES, 3),
    "choose_cpus(empty core)": (choose_cpus, FEW, (*PAIRS, EMPTY), CACHES, 3),
    "choose_cpus(two caches)": (choose_cpus, FEW, PAIRS, (Bitmap([0]), Bitmap([3])), 3),
    "choose_cpus(no core)": (choose_cpus, MANY, PAIRS, CACHES, 3),
    "choose_cpus(huge count)": (choose_cpus, FEW, PAIRS, CACHES, HUGE),
    "choose_cpus(no count)": (choose_cpus, FEW, PAIRS, CACHES, "x"),
}


class Broken:
    def __index__(self) -> int:
        raise LookupError

    def __iter__(self) -> Iterator[int]:
        yield 1
        raise LookupError


CALLS_BACK_INTO_PYTHON = {
    "Bitmap(broken iterable)": (Bitmap, Broken()),
    "Bitmap(broken integers)": (Bitmap, [1, Broken()]),
    "from_int(broken)": (Bitmap.from_int, Broken()),
    "lowest(broken)": (SMALL.lowest, Broken()),
    "in(broken)": (operator.contains, SMALL, Broken()),
    "choose_subset(broken score)": (choose_subset, ((Broken(),),), FEW, EMPTY, 1),
    "choose_subset(broken count)": (choose_subset, SCORES, FEW, EMPTY, Broken()),
    "choose_cpus(broken count)": (choose_cpus, FEW, PAIRS, CACHES, Broken()),
}


def outcome(function: Callable[..., object], *args: object) -> object:
    try:
        return function(*args)
    except Exception as error:
        return type(error), str(error)


# ---- leaks -----------------------------------------------------------------------------------

ROUNDS = 2000
SPARE = 100  # what the interpreter's own caches may take or give back meanwhile
SPARE_BYTES = 1024 * 1024
WATCHED = (
    *(Bitmap, EMPTY, SMALL, LARGE, LONG, WIDE, HUGE, NotImplemented, None, True, False),
    *(FEW, MANY, SCORES, *PAIRS, *CACHES),
)


def counts() -> list[int]:
    return [sys.getallocatedblocks(), *map(sys.getrefcount, WATCHED)]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def is_leaking(function: Callable[..., object], *args: object) -> bool:
    """Whether repetition changes a count of blocks or references, or takes the system's memory."""

    def repeat() -> None:
        for _ in range(ROUNDS):
            outcome(function, *args)

    repeat()
    before, resident = counts(), resident_bytes()
    repeat()
    taken = resident_bytes() - resident
    changes = [abs(now - then) for now, then in zip(counts(), before, strict=True)]
    return max(changes) > SPARE or taken > SPARE_BYTES


def find_leaks() -> list[str]:
    calls = CALLS | CALLS_BACK_INTO_PYTHON
    return [f"{name} leaks" for name, call in calls.items() if is_leaking(*call)]


# ---- no memory -------------------------------------------------------------------------------


def without_memory(first: int, last: int, function: Callable[..., object], *args: object) -> object:
    """What the call comes to when its allocations after `first` fail, up to `last` (0: all)."""
    import _testcapi

    # An error that passes a frame needs the frame as an object; for want of memory to make one,
    # CPython 3.11 loses the error. So it is made beforehand.
    sys._getframe()
    _testcapi.set_nomemory(first, last)
    try:
        return function(*args)
    except MemoryError:
        return MemoryError
    except Exception as error:
        _testcapi.remove_mem_hooks()
        return type(error), str(error)
    finally:
        _testcapi.remove_mem_hooks()


def find_wrong_answers() -> list[str]:
    return [answer for name, call in CALLS.items() for answer in wrong_answers(name, call)]


def wrong_answers(name: str, call: tuple[Callable[..., object], *tuple[object, ...]]) -> list[str]:
    """Takes away one allocation after the other, until the call needs none of those taken."""
    wrong, answer, first = [], None, 0
    expected = outcome(*call)
    while answer != expected:
        for last in (first + 1, 0):
            answer = without_memory(first, last, *call)
            if answer not in (expected, MemoryError):
                wrong.append(f"{name} without allocation {first}: {answer!r}")
        first += 1
    return wrong


# ---- the tests -------------------------------------------------------------------------------


def run(what: str) -> None:
    command = [sys.executable, "-m", "tests.core.test_bitmap_leaks", what]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_nothing_leaks():
    run("leaks")


def test_running_out_of_memory_is_a_memory_error():
    pytest.importorskip("_testcapi", reason="this Python has no _testcapi to take memory away")
    run("nomemory")


if __name__ == "__main__":
    found = {"leaks": find_leaks, "nomemory": find_wrong_answers}[sys.argv[1]]()
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(bool(found))
