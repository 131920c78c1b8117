"""The Python twin of the searches in `_search.c`: their definition, type stub and oracle.

Two searches, for GPUs and for CPUs. Each has a key that says what is better: the answer is the
choice whose key is least, and no two choices have the same key. Both twins give the same results
and error texts.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from itertools import accumulate, combinations, product
from math import comb
from operator import index
from typing import Final, NamedTuple, TypeAlias

from agent.core._bitmap_py import Bitmap, _show_number

MAX_SUBSETS: Final = 200_000
"""The number of subsets up to which `choose_subset` tries them all."""

_MAX_ROWS: Final = 64
_MAX_SCORE: Final = 1_000_000

_Scores: TypeAlias = tuple[tuple[int, ...], ...]
_Ids: TypeAlias = frozenset[int]
_Key: TypeAlias = Callable[[_Ids], tuple[int, int, list[int]]]


# ---- subsets ---------------------------------------------------------------------------------


def choose_subset(
    scores: _Scores, among: Bitmap, include: Bitmap, count: int, /
) -> tuple[Bitmap, int]:
    """The `count` members of `among` with the best links inside, and the sum of these links.

    `scores[a][b]` says how good the link of a and b is: 0..1,000,000, at most 64 rows, symmetric, 0
    on the diagonal. All of `include` are chosen. What is better, the first that differs:

    1. more inside: the sum of the scores of all pairs of the choice;
    2. less cut: the sum of the scores between the choice and the rest of `among` (what is left
       keeps its strong links);
    3. lower ids: the choice as an ascending list.

    Exact where `comb(len(among - include), count - len(include)) <= MAX_SUBSETS`, so always among
    20 ids. Beyond that it is the best that climbing reaches from each first member: no exchange of
    one member betters it, and adding the best member again and again comes to nothing better.

    The matrix is read at every call, which costs little beside the search, so it needs no type.

    Raises:
        TypeError: an argument is of another type.
        ValueError: no such matrix, an id beyond its rows, `include` not within `among`, or a count
            that is less than one has or more than the other.
    """
    _check_bitmap("among", among)
    _check_bitmap("include", include)
    _check_scores(scores)
    count = index(count)
    _check_subset(len(scores), among, include, count)
    links = {a: sum(scores[a][b] for b in among) for a in among}

    def inner(chosen: _Ids) -> int:
        return sum(scores[a][b] for a, b in combinations(chosen, 2))

    def key(chosen: _Ids) -> tuple[int, int, list[int]]:
        inside = inner(chosen)
        return -inside, sum(links[a] for a in chosen) - 2 * inside, sorted(chosen)

    rest = frozenset(among - include)
    exact = comb(len(rest), count - len(include)) <= MAX_SUBSETS
    choices = _all_choices if exact else _climbed_choices
    best = min(choices(frozenset(include), rest, count, key), key=key)
    return Bitmap(best), inner(best)


def _all_choices(include: _Ids, rest: _Ids, count: int, key: _Key) -> Iterator[_Ids]:
    return map(include.union, combinations(rest, count - len(include)))


def _climbed_choices(include: _Ids, rest: _Ids, count: int, key: _Key) -> Iterator[_Ids]:
    """For each first member, the greedy choice that begins with it, bettered by exchanges."""
    for first in rest:
        chosen = include | {first}
        while len(chosen) < count:
            chosen = min((chosen | {another} for another in rest - chosen), key=key)
        yield _exchange(chosen, include, rest, key)


def _exchange(chosen: _Ids, include: _Ids, rest: _Ids, key: _Key) -> _Ids:
    """Makes the best exchange of one member for another, again and again while it is better."""
    while True:
        pairs = product(chosen - include, rest - chosen)
        better = min((chosen - {leaver} | {comer} for leaver, comer in pairs), key=key)
        if key(better) >= key(chosen):
            return chosen
        chosen = better


def _check_scores(scores: _Scores) -> None:
    if not isinstance(scores, tuple):
        raise TypeError(f"scores must be a tuple, not {type(scores).__name__}")
    if len(scores) > _MAX_ROWS:
        raise ValueError(f"scores have {len(scores)} rows; at most {_MAX_ROWS} are handled")
    for i, row in enumerate(scores):
        if not isinstance(row, tuple):
            raise TypeError(f"scores must hold tuples, not {type(row).__name__}")
        if len(row) != len(scores):
            raise ValueError(f"row {i} of scores has {len(row)} columns, not {len(scores)}")
        for j, score in enumerate(row):
            _check_score(scores, i, j, index(score))


def _check_score(scores: _Scores, i: int, j: int, score: int) -> None:
    if not 0 <= score <= _MAX_SCORE:
        raise ValueError(f"scores[{i}][{j}] is {_show_number(score)}, not 0..{_MAX_SCORE}")
    if i == j and score != 0:
        raise ValueError(f"scores[{i}][{j}] is {score}, not 0")
    if i > j and score != scores[j][i]:
        raise ValueError(f"scores[{i}][{j}] is {score}, scores[{j}][{i}] is {int(scores[j][i])}")


def _check_subset(rows: int, among: Bitmap, include: Bitmap, count: int) -> None:
    if beyond := among - Bitmap(range(rows)):
        raise ValueError(f"ids {beyond} of among are beyond the {rows} rows of scores")
    if strange := include - among:
        raise ValueError(f"ids {strange} of include are not in among")
    _check_count(count, among)
    if count < len(include):
        raise ValueError(f"a choice of {count} ids cannot hold the {len(include)} of include")


# ---- CPUs ------------------------------------------------------------------------------------


class _Group(NamedTuple):
    """The cores of one cache."""

    whole: list[Bitmap]
    broken: Bitmap
    """The free CPUs of the broken cores."""


class _Plan(NamedTuple):
    whole: int
    """The CPUs to take from whole cores."""
    broken: int
    """The CPUs to take from broken cores."""
    splits: bool
    """Whether one whole core is taken in part."""


def choose_cpus(
    free: Bitmap, cores: tuple[Bitmap, ...], caches: tuple[Bitmap, ...], count: int, /
) -> Bitmap:
    """The `count` CPUs of `free` that break the fewest cores and touch the fewest caches.

    `cores` are the CPUs of each physical core, in any order; every free CPU is in one. `caches` are
    the CPUs of each last-level cache, the preferred ones first; a core lies in one or in none, and
    those in none count together as one more cache, the last. A core is *whole* while all its CPUs
    are free, else *broken*. What is better, the first that differs:

    1. fewer whole cores that are taken in part;
    2. fewer CPUs of broken cores;
    3. fewer caches touched;
    4. fewer free CPUs left in the caches touched (best fit: a wide one stays for a wide request);
    5. earlier caches: their places as an ascending list;
    6. lower ids: the choice as an ascending list.

    So whole cores come first, as many CPUs of them as fit; the remainder comes from broken cores
    where these have enough, else from one more whole core, and never from two. Exact for every
    mixture of cores.

    Raises:
        TypeError: an argument is of another type.
        ValueError: cores or caches are empty or overlap, a core is not in one cache, a free CPU in
            no core, or a count is negative or more than there are.
    """
    _check_bitmap("free", free)
    _check_sets("cores", "core", cores)
    _check_sets("caches", "cache", caches)
    count = index(count)
    groups = _group(free, cores, caches)
    _check_count(count, free)
    plan = _make_plan(groups, count)
    touched = _choose_groups(groups, plan)
    whole = sorted((core for group in touched for core in group.whole), key=Bitmap.first)
    take = _take_split if plan.splits else _take_whole
    return take(whole, plan.whole) | _union(g.broken for g in touched).lowest(plan.broken)


def _group(free: Bitmap, cores: tuple[Bitmap, ...], caches: tuple[Bitmap, ...]) -> list[_Group]:
    """One group for each cache and, last, one for the cores in none."""
    if outside := free - _union(cores):
        raise ValueError(f"free CPUs {outside} are in no core")
    groups = [_Group([], Bitmap()) for _ in (*caches, None)]
    for i, core in enumerate(cores):
        place = _find_cache(i, core, caches)
        whole, broken = groups[place]
        if core <= free:
            whole.append(core)
        else:
            groups[place] = _Group(whole, broken | core & free)
    return groups


def _find_cache(i: int, core: Bitmap, caches: tuple[Bitmap, ...]) -> int:
    for place, cache in enumerate(caches):
        if core <= cache:
            return place
    if any(core & cache for cache in caches):
        raise ValueError(f"CPUs {core} of core {i} are not in one cache")
    return len(caches)


def _make_plan(groups: list[_Group], count: int) -> _Plan:
    sums = _sums(core for group in groups for core in group.whole)
    whole = max(total for total in sums if total <= count)
    if count - whole <= sum(len(group.broken) for group in groups):
        return _Plan(whole, count - whole, splits=False)
    return _Plan(count, 0, splits=True)


def _sums(cores: Iterable[Bitmap]) -> set[int]:
    """How many CPUs some of the cores can have together."""
    return reduce(_add_to_sums, cores, {0})


def _add_to_sums(sums: set[int], core: Bitmap) -> set[int]:
    return sums | {total + len(core) for total in sums}


def _choose_groups(groups: list[_Group], plan: _Plan) -> list[_Group]:
    """The groups to touch.

    Group by group, the best way to get each possible number of CPUs of both kinds. What comes later
    does not ask how they came together, so only the best way need be kept.
    """
    best: dict[tuple[int, int], tuple[int, int, list[int]]] = {(0, 0): (0, 0, [])}
    for place, group in enumerate(groups):
        size = sum(map(len, group.whole))
        sums = range(size + 1) if plan.splits else _sums(group.whole)
        for (whole, broken), (touched, free, places) in list(best.items()):
            way = touched + 1, free + size + len(group.broken), [*places, place]
            for more in product(sums, range(len(group.broken) + 1)):
                reached = whole + more[0], broken + more[1]
                if reached[0] <= plan.whole and reached[1] <= plan.broken:
                    best[reached] = min(best.get(reached, way), way)
    return [groups[place] for place in best[plan.whole, plan.broken][2]]


def _take_whole(cores: list[Bitmap], count: int) -> Bitmap:
    """The lowest cores that have `count` CPUs together: each that leaves a sum of later ones."""
    *sums, _ = accumulate(reversed(cores), _add_to_sums, initial={0})
    taken = Bitmap()
    for core, sums_of_later in zip(cores, reversed(sums), strict=True):
        if count - len(core) in sums_of_later:
            taken |= core
            count -= len(core)
    return taken


def _take_split(cores: list[Bitmap], count: int) -> Bitmap:
    """The lowest `count` CPUs that take one core in part.

    A core is opened, going up, if some opened core can give back all that is then too much, out of
    its CPUs above. Of those that can in the end, it is the one that gives back the highest.
    """
    opened: list[Bitmap] = []
    for core in cores:
        excess = sum(map(len, opened)) + len(core) - count
        if any(_count_above(giver, core.first()) >= excess for giver in [*opened, core]):
            opened.append(core)
    excess = sum(map(len, opened)) - count
    givers = [core for core in opened if len(core) > excess]
    return _union(opened) - max((_highest(core, excess) for core in givers), key=Bitmap.first)


def _count_above(core: Bitmap, cpu: int) -> int:
    return sum(other > cpu for other in core)


def _highest(core: Bitmap, count: int) -> Bitmap:
    return core - core.lowest(len(core) - count)


def _union(sets: Iterable[Bitmap]) -> Bitmap:
    total = Bitmap()
    for members in sets:
        total |= members
    return total


# ---- arguments -------------------------------------------------------------------------------


def _check_bitmap(name: str, value: object) -> None:
    if not isinstance(value, Bitmap):
        raise TypeError(f"{name} must be a Bitmap, not {type(value).__name__}")


def _check_sets(names: str, name: str, sets: tuple[Bitmap, ...]) -> None:
    if not isinstance(sets, tuple):
        raise TypeError(f"{names} must be a tuple, not {type(sets).__name__}")
    seen = Bitmap()
    for i, cpus in enumerate(sets):
        if not isinstance(cpus, Bitmap):
            raise TypeError(f"{names} must hold Bitmaps, not {type(cpus).__name__}")
        if not cpus:
            raise ValueError(f"{name} {i} has no CPUs")
        if both := cpus & seen:
            raise ValueError(f"CPUs {both} are in {name} {i} and in an earlier one")
        seen |= cpus


def _check_count(count: int, members: Bitmap) -> None:
    if not 0 <= count <= len(members):
        raise ValueError(f"{_show_number(count)} ids cannot be taken from a set of {len(members)}")
