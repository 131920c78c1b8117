"""One suite for both twins of the searches. Expected values are worked out by hand or come from
trying every choice."""

import itertools
import math
import random
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import hypothesis
import pytest
from hypothesis import strategies as st

from agent.core import _bitmap, _bitmap_py, _search_py
from agent.core.bitmap import MAX_SUBSETS, Bitmap


class Twin(NamedTuple):
    bitmap: type[Bitmap]
    search: object

    def subset(
        self, scores: object, among: Iterable[int], include: Iterable[int], count: int
    ) -> tuple[list[int], int]:
        sets = self.bitmap(among), self.bitmap(include)
        chosen, inner = self.search.choose_subset(scores, *sets, count)
        assert type(chosen) is self.bitmap
        return list(chosen), inner

    def cpus(
        self,
        free: Iterable[int],
        cores: Sequence[Iterable[int]],
        caches: Sequence[Iterable[int]],
        count: int,
    ) -> list[int]:
        cores, caches = (tuple(map(self.bitmap, sets)) for sets in (cores, caches))
        chosen = self.search.choose_cpus(self.bitmap(free), cores, caches, count)
        assert type(chosen) is self.bitmap
        return list(chosen)


C = Twin(_bitmap.Bitmap, _bitmap)
PYTHON = Twin(_bitmap_py.Bitmap, _search_py)


@pytest.fixture(scope="session", params=[C, PYTHON], ids=["C", "Python twin"])
def twin(request: pytest.FixtureRequest) -> Twin:
    return request.param


def given(examples: int = 100, **drawn: st.SearchStrategy) -> Callable[[Callable], Callable]:
    """Hypothesis' own, without a time limit per example."""
    settings = hypothesis.settings(deadline=None, max_examples=examples)
    return lambda test: settings(hypothesis.given(**drawn)(test))


def exactly(message: str) -> str:
    return rf"\A{re.escape(message)}\Z"


def ids(text: str) -> list[int]:
    return list(_bitmap_py.Bitmap.parse_list(text))


# ---- subsets: by hand ------------------------------------------------------------------------

SCORES = {"X": 0, "SYS": 10, "NODE": 20, "PIX": 50, "NV1": 100, "NV2": 200, "NV6": 600}

Matrix = tuple[tuple[int, ...], ...]


def matrix(table: str) -> Matrix:
    return tuple(tuple(SCORES[link] for link in row.split()) for row in table.split("\n") if row)


# Eight V100 as published for an ecs.sccgn6.24xlarge. The NV2 links make one ring, 0-3-2-1-7-4-5-6.
# Each GPU has two NV2, two NV1 and three SYS, 630 in all: among all, equal sums inside have equal
# cuts.
CUBE_MESH = matrix("""
X   NV1 NV1 NV2 SYS SYS NV2 SYS
NV1 X   NV2 NV1 SYS SYS SYS NV2
NV1 NV2 X   NV2 NV1 SYS SYS SYS
NV2 NV1 NV2 X   SYS NV1 SYS SYS
SYS SYS NV1 SYS X   NV2 NV1 NV2
SYS SYS SYS NV1 NV2 X   NV2 NV1
NV2 SYS SYS SYS NV1 NV2 X   NV1
SYS NV2 SYS SYS NV2 NV1 NV1 X
""")

PAIRS = matrix("""
X    PIX  NODE NODE SYS  SYS  SYS  SYS
PIX  X    NODE NODE SYS  SYS  SYS  SYS
NODE NODE X    PIX  SYS  SYS  SYS  SYS
NODE NODE PIX  X    SYS  SYS  SYS  SYS
SYS  SYS  SYS  SYS  X    PIX  NODE NODE
SYS  SYS  SYS  SYS  PIX  X    NODE NODE
SYS  SYS  SYS  SYS  NODE NODE X    PIX
SYS  SYS  SYS  SYS  NODE NODE PIX  X
""")


def islands(count: int, size: int, inside: int = 50, outside: int = 10) -> Matrix:
    """Islands that take turns in the numbering: 0, count, 2 * count, … are the first."""
    ids = range(count * size)
    return tuple(
        tuple(0 if a == b else inside if a % count == b % count else outside for b in ids)
        for a in ids
    )


SWITCHED = islands(1, 16, inside=600)


@pytest.mark.parametrize(
    ("scores", "among", "include", "count", "expected", "inner"),
    [
        # Of 0, 1, 2, 4, 5 the NV2 pairs are 1-2 (cut 120 + 210 = 330) and 4-5 (120 + 30 = 150).
        pytest.param(CUBE_MESH, "0-7", "", 2, "0,3", 200, id="two of a cube mesh have NV2"),
        pytest.param(CUBE_MESH, "0-7", "5", 2, "4-5", 200, id="one joins another over NV2"),
        pytest.param(
            CUBE_MESH, "0-7", "", 3, "0,2-3", 500, id="three of a cube mesh: NV2, NV2, NV1"
        ),
        pytest.param(CUBE_MESH, "0-7", "", 4, "0-3", 900, id="four of a cube mesh are a face"),
        pytest.param(CUBE_MESH, "1-7", "", 4, "4-7", 900, id="four are the other face"),
        pytest.param(CUBE_MESH, "0-2,4-5", "", 2, "4-5", 200, id="the pair less linked to others"),
        pytest.param(CUBE_MESH, "0-7", "0-7", 8, "0-7", 2520, id="all, and all included"),
        pytest.param(PAIRS, "0-7", "", 2, "0-1", 50, id="two under one PCIe switch"),
        pytest.param(PAIRS, "1-3", "", 2, "2-3", 50, id="two under the only switch with two left"),
        pytest.param(PAIRS, "0-2", "", 1, "2", 0, id="one alone leaves the pair whole"),
        pytest.param(PAIRS, "0-5", "0,2", 4, "0-3", 180, id="two broken pairs are made whole"),
        pytest.param(PAIRS, "0-7", "7", 3, "4-5,7", 90, id="three of one socket"),
        pytest.param(PAIRS, "0,2,4,6", "", 2, "0,2", 20, id="two of one socket"),
        pytest.param(SWITCHED, "0-15", "", 4, "0-3", 3600, id="behind a switch, the lowest ids"),
        pytest.param(SWITCHED, "3,5-15", "9", 8, "3,5-11", 16800, id="lowest ids around one"),
        pytest.param(SWITCHED, "", "", 0, "", 0, id="none of none"),
        pytest.param(SWITCHED, "0-15", "", 0, "", 0, id="none"),
        pytest.param((), "", "", 0, "", 0, id="a machine without GPUs"),
        pytest.param(((0,),), "0", "", 1, "0", 0, id="the only one"),
        pytest.param(islands(4, 16), "0-63", "", 2, "0,4", 50, id="a pair of 64"),
        pytest.param(islands(4, 16), "0-63", "63", 3, "3,7,63", 150, id="two more of 64"),
        pytest.param(
            islands(8, 8),
            "0-63",
            "",
            8,
            "0,8,16,24,32,40,48,56",
            1400,
            id="an island of 64, too many subsets to try",
        ),
        pytest.param(
            islands(8, 8),
            "0-63",
            "9,17",
            8,
            "1,9,17,25,33,41,49,57",
            1400,
            id="the rest of an island of 64",
        ),
        # 16 + 16 in two islands of 8 each: 2 * 28 pairs inside, 64 across.
        pytest.param(
            islands(8, 8),
            "0-63",
            "",
            16,
            "0-1,8-9,16-17,24-25,32-33,40-41,48-49,56-57",
            2 * 28 * 50 + 64 * 10,
            id="two islands of 64",
        ),
    ],
)
def test_chooses_the_best_linked(twin, scores, among, include, count, expected, inner):
    assert twin.subset(scores, ids(among), ids(include), count) == (ids(expected), inner)


def test_handles_the_highest_scores(twin):
    full = islands(1, 64, inside=1_000_000)
    assert twin.subset(full, range(64), [], 64) == (list(range(64)), 2_016_000_000)
    assert twin.subset(full, range(64), [], 62) == (list(range(62)), 1_891_000_000)


# ---- subsets: properties ---------------------------------------------------------------------


class SubsetCase(NamedTuple):
    scores: Matrix
    among: list[int]
    include: list[int]
    count: int


def mirrored(size: int, scores: Iterable[int]) -> Matrix:
    pairs = dict(zip(itertools.combinations(range(size), 2), scores, strict=False))
    return tuple(
        tuple(0 if a == b else pairs[min(a, b), max(a, b)] for b in range(size))
        for a in range(size)
    )


@st.composite
def subset_cases(draw: st.DrawFn) -> SubsetCase:
    size = draw(st.integers(0, 9))
    score = draw(
        st.sampled_from([st.sampled_from([10, 20, 50]), st.integers(0, 3), st.integers(0, 10**6)])
    )
    pairs = math.comb(size, 2)
    scores = mirrored(size, draw(st.lists(score, min_size=pairs, max_size=pairs)))
    among = [i for i in range(size) if draw(st.integers(0, 3))]
    include = [i for i in among if not draw(st.integers(0, 3))]
    return SubsetCase(scores, among, include, draw(st.integers(len(include), len(among))))


def subset_key(scores: Matrix, among: Iterable[int], chosen: Iterable[int]) -> tuple:
    """Straight from the matrix: (− inner, cut, ids)."""
    inner = cut = 0
    for a in chosen:
        for b in among:
            if b not in chosen:
                cut += scores[a][b]
            elif a < b:
                inner += scores[a][b]
    return -inner, cut, tuple(sorted(chosen))


@given(case=subset_cases(), examples=200)
def test_no_other_subset_is_better(twin, case):
    scores, among, include, count = case
    keys = [
        subset_key(scores, among, choice)
        for choice in itertools.combinations(among, count)
        if set(include) <= set(choice)
    ]
    minus_inner, _, chosen = min(keys)
    assert twin.subset(*case) == (list(chosen), -minus_inner)


@given(case=subset_cases(), seed=st.randoms(use_true_random=False))
def test_other_numbers_for_the_gpus_change_only_which_of_equals_is_chosen(twin, case, seed):
    scores, among, include, count = case
    old = list(range(len(scores)))  # old[new number] is the old number
    seed.shuffle(old)
    moved = tuple(tuple(scores[a][b] for b in old) for a in old)
    to_new = {number: new for new, number in enumerate(old)}
    chosen, inner = twin.subset(*case)
    moved_ids = ([to_new[i] for i in members] for members in (among, include))
    moved_chosen, moved_inner = twin.subset(moved, *moved_ids, count)
    assert inner == moved_inner
    cuts = [
        subset_key(scores, among, members)[1]
        for members in (chosen, [old[new] for new in moved_chosen])
    ]
    assert cuts[0] == cuts[1]


@given(case=subset_cases())
def test_ids_outside_among_do_not_matter(twin, case):
    """Rows of GPUs that are taken may say what they like."""
    scores, among, include, count = case
    outside = set(range(len(scores))) - set(among)
    changed = tuple(
        tuple(
            0 if a == b else 999 if outside & {a, b} else scores[a][b] for b in range(len(scores))
        )
        for a in range(len(scores))
    )
    assert twin.subset(changed, among, include, count) == twin.subset(*case)


def random_matrix(size: int, seed: int, scores: Sequence[int] = (10, 20, 50, 100)) -> Matrix:
    chance = random.Random(seed)
    return mirrored(size, (chance.choice(scores) for _ in range(math.comb(size, 2))))


@pytest.mark.parametrize(
    ("size", "left", "seed"),
    [
        pytest.param(20, 10, 15, id="10 of 20, where climbing alone falls short"),
        pytest.param(25, 6, 20, id="19 of 25, where climbing alone falls short"),
        pytest.param(48, 4, 0, id="44 of 48"),
        pytest.param(64, 3, 0, id="61 of 64"),
    ],
)
def test_is_exact_up_to_the_bound(size, left, seed):
    """Told from what each choice leaves: inner = all − links of these + inner of these."""
    assert 40_000 < math.comb(size, left) <= MAX_SUBSETS
    scores = random_matrix(size, seed, scores=(0, 1))
    links = [sum(row) for row in scores]

    def key(out: tuple[int, ...]) -> tuple:
        among_out = sum(scores[a][b] for a, b in itertools.combinations(out, 2))
        links_out = sum(links[a] for a in out)
        return links_out - among_out, links_out - 2 * among_out, [-a for a in out]

    best = min(itertools.combinations(range(size), left), key=key)
    inner = sum(links) // 2 - key(best)[0]
    chosen = [a for a in range(size) if a not in best]
    assert C.subset(scores, range(size), [], size - left) == (chosen, inner)


@st.composite
def large_cases(draw: st.DrawFn) -> SubsetCase:
    """With more subsets than are tried."""
    size, count = draw(st.sampled_from([(21, 10), (22, 11), (26, 7), (32, 5), (30, 24)]))
    scores = draw(st.sampled_from([(10, 20, 50), (0, 1), range(10**6)]))
    include = draw(st.sampled_from([[], [0], [size]]))
    free = size + len(include)
    taken = draw(st.sampled_from([[], [free, free + 1]]))
    rows = random_matrix(free + len(taken), draw(st.integers(0, 999)), scores)
    case = SubsetCase(rows, list(range(free)), include, count + len(include))
    assert math.comb(size, count) > MAX_SUBSETS
    return case


def greedy(scores: Matrix, among: list[int], include: list[int], count: int) -> list[int]:
    """Adds, one by one, the member with which the choice so far is best."""
    chosen = list(include)
    while len(chosen) < count:
        left = [i for i in among if i not in chosen]
        chosen.append(min(left, key=lambda i: subset_key(scores, among, [*chosen, i])))
    return chosen


@given(case=large_cases(), examples=30)
def test_beyond_the_bound_no_exchange_and_no_greedy_choice_is_better(case):
    scores, among, include, count = case
    chosen, inner = C.subset(*case)
    key = subset_key(scores, among, chosen)
    assert inner == -key[0]
    assert len(chosen) == count
    assert set(include) <= set(chosen) <= set(among)
    leavers, comers = set(chosen) - set(include), set(among) - set(chosen)
    for leaver, comer in itertools.product(leavers, comers):
        assert subset_key(scores, among, {*chosen, comer} - {leaver}) > key
    assert subset_key(scores, among, greedy(*case)) >= key


@given(case=large_cases(), examples=15)
def test_the_twins_agree_beyond_the_bound(case):
    assert C.subset(*case) == PYTHON.subset(*case)


# ---- subsets: refusals -----------------------------------------------------------------------

TWO = ((0, 5), (5, 0))


@pytest.mark.parametrize(
    ("scores", "among", "include", "count", "message"),
    [
        pytest.param(TWO, "0-1", "", 3, "3 ids cannot be taken from a set of 2", id="too many"),
        pytest.param(
            TWO, "0-1", "", -1, "-1 ids cannot be taken from a set of 2", id="less than 0"
        ),
        pytest.param(
            TWO,
            "0-1",
            "",
            -(2**999),
            "about -2**999 ids cannot be taken from a set of 2",
            id="far less than 0",
        ),
        pytest.param(
            TWO,
            "0-1",
            "0-1",
            1,
            "a choice of 1 ids cannot hold the 2 of include",
            id="fewer than are included",
        ),
        pytest.param(
            TWO,
            "0",
            "0-1",
            1,
            "ids 1 of include are not in among",
            id="one included that is not there",
        ),
        pytest.param(
            TWO,
            "0-2,900",
            "",
            1,
            "ids 2,900 of among are beyond the 2 rows of scores",
            id="GPUs without rows",
        ),
        pytest.param(
            (), "0", "", 1, "ids 0 of among are beyond the 0 rows of scores", id="no rows"
        ),
        pytest.param(
            islands(1, 65), "0", "", 1, "scores have 65 rows; at most 64 are handled", id="65 rows"
        ),
        pytest.param(
            ((0, 5), (5, 0, 1)),
            "0-1",
            "",
            1,
            "row 1 of scores has 3 columns, not 2",
            id="a long row",
        ),
        pytest.param(
            ((0, 5), ()), "0-1", "", 1, "row 1 of scores has 0 columns, not 2", id="an empty row"
        ),
        pytest.param(
            ((0, 5), (6, 0)),
            "0-1",
            "",
            1,
            "scores[1][0] is 6, scores[0][1] is 5",
            id="two scores for one link",
        ),
        pytest.param(
            ((0, 5), (5, 7)), "0-1", "", 1, "scores[1][1] is 7, not 0", id="a link to itself"
        ),
        pytest.param(
            ((0, -5), (-5, 0)),
            "0-1",
            "",
            1,
            "scores[0][1] is -5, not 0..1000000",
            id="a score less than 0",
        ),
        pytest.param(
            ((0, 10**6 + 1), (0, 0)),
            "0-1",
            "",
            1,
            "scores[0][1] is 1000001, not 0..1000000",
            id="a score too high",
        ),
        pytest.param(
            ((0, -(2**999)), (0, 0)),
            "0-1",
            "",
            1,
            "scores[0][1] is about -2**999, not 0..1000000",
            id="a score far too low",
        ),
        pytest.param(
            ((0, 2**999), (0, 0)),
            "0-1",
            "",
            1,
            "scores[0][1] is about 2**999, not 0..1000000",
            id="a score far too high",
        ),
    ],
)
def test_says_what_is_wrong_with_a_subset(twin, scores, among, include, count, message):
    with pytest.raises(ValueError, match=exactly(message)):
        twin.subset(scores, ids(among), ids(include), count)


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        pytest.param([[0]], "scores must be a tuple, not list", id="a list"),
        pytest.param(([0],), "scores must hold tuples, not list", id="lists in a tuple"),
        pytest.param(((0.0,),), "'float' object cannot be interpreted as an integer", id="floats"),
    ],
)
def test_scores_are_a_tuple_of_tuples_of_ints(twin, scores, message):
    with pytest.raises(TypeError, match=exactly(message)):
        twin.subset(scores, [0], [], 1)


# ---- CPUs: by hand ---------------------------------------------------------------------------


def siblings(count: int) -> list[tuple[int, int]]:
    """Cores of two threads, numbered as x86 firmware likes it: core i has i and count + i."""
    return [(i, count + i) for i in range(count)]


def neighbours(*sizes: int) -> list[range]:
    """Cores of these numbers of threads, one after the other."""
    ends = list(itertools.accumulate(sizes, initial=0))
    return list(itertools.starmap(range, itertools.pairwise(ends)))


def caches_of(cores: Sequence[Iterable[int]], *counts: int) -> list[list[int]]:
    """Caches of so many cores, one after the other."""
    rest = iter(cores)
    return [[cpu for core in itertools.islice(rest, count) for cpu in core] for count in counts]


PAIR3 = neighbours(2, 2, 2)
POWER9 = neighbours(4, 4, 4)
HYBRID = neighbours(2, 2, 1, 1)
SOCKET = siblings(32)
SINGLES = neighbours(*[1] * 32)


@pytest.mark.parametrize(
    ("free", "cores", "caches", "count", "expected"),
    [
        pytest.param(
            "0-4", PAIR3, ["0-5"], 1, "4", id="a broken pair is finished before another is opened"
        ),
        pytest.param(
            "1-5", PAIR3, ["0-5"], 3, "1-3", id="an odd request: a whole pair and the odd one"
        ),
        pytest.param(
            "0-5", PAIR3, ["0-5"], 3, "0-2", id="an odd request breaks a pair where none is broken"
        ),
        pytest.param("1-5", PAIR3, ["0-5"], 2, "2-3", id="a whole pair rather than the lowest ids"),
        pytest.param(
            "0-1,3,5", PAIR3, ["0-5"], 3, "0-1,3", id="broken pairs follow where whole ones run out"
        ),
        pytest.param("0,2,4", PAIR3, ["0-5"], 2, "0,2", id="only broken pairs"),
        pytest.param("0-5", PAIR3, ["0-5"], 0, "", id="none"),
        pytest.param("", PAIR3, ["0-5"], 0, "", id="none of none"),
        pytest.param("", [], [], 0, "", id="no machine at all"),
        pytest.param("0-1,3,5", PAIR3, ["0-5"], 4, "0-1,3,5", id="all"),
        pytest.param(
            "0-5", siblings(3), ["0-5"], 2, "0,3", id="a pair is a core, not two neighbours"
        ),
        # The whole core is 1-2; of 0 and 20 the lower.
        pytest.param(
            "0-2,20",
            [(0, 20), (1, 2)],
            [],
            3,
            "0-2",
            id="the pair is broken that gives the lowest ids",
        ),
        pytest.param(
            "0-11", POWER9, ["0-11"], 6, "0-5", id="four threads: one core and half of another"
        ),
        pytest.param(
            "0-8,10-11",
            POWER9,
            ["0-11"],
            6,
            "0-3,8,10",
            id="four threads: the half is of a broken core",
        ),
        pytest.param(
            "0-7,10",
            POWER9,
            ["0-11"],
            6,
            "0-5",
            id="four threads: a broken core with too few is left alone",
        ),
        pytest.param(
            "0-5", HYBRID, ["0-5"], 3, "0-1,4", id="hybrid: the odd one is an efficiency core"
        ),
        pytest.param("0-5", HYBRID, ["0-5"], 1, "4", id="hybrid: one efficiency core for one"),
        pytest.param(
            "0-4",
            neighbours(2, 2, 1),
            [],
            3,
            "0-1,4",
            id="a core whose sibling is offline is whole",
        ),
        pytest.param(
            "0-63",
            SOCKET,
            caches_of(SOCKET, 8, 8, 8, 8),
            24,
            "0-11,32-43",
            id="24 threads in 2 of 4 caches of 8 cores",
        ),
        pytest.param(
            "0-31",
            SINGLES,
            caches_of(SINGLES, 8, 8, 8, 8),
            24,
            "0-23",
            id="24 cores in 3 of 4 caches of 8 cores",
        ),
        pytest.param(
            "1-31",
            SINGLES,
            caches_of(SINGLES, 8, 8, 8, 8),
            24,
            "8-31",
            id="24 cores in the 3 caches that are quite free",
        ),
        # 7 + 8 + 8 + 8 free CPUs: 23 are had of 3 caches, and least is left with the first one.
        pytest.param(
            "1-31",
            SINGLES,
            caches_of(SINGLES, 8, 8, 8, 8),
            23,
            "1-23",
            id="23 cores with the cache that has 7",
        ),
        pytest.param(
            "0-11",
            SINGLES,
            caches_of(SINGLES, 8, 8, 16),
            4,
            "8-11",
            id="the cache that has just enough",
        ),
        # 8, 6, 6 and 5 free: 11 = 6 + 5 leaves none, while the greatest with the least leaves 2.
        pytest.param(
            "0-7,8-13,16-21,24-28",
            SINGLES,
            caches_of(SINGLES, 8, 8, 8, 8),
            11,
            "8-13,24-28",
            id="two caches that leave nothing, neither of them the greatest",
        ),
        pytest.param(
            "0-1,4-7",
            neighbours(2, 2, 2, 2),
            ["0-3", "4-7"],
            4,
            "4-7",
            id="one cache rather than the lowest ids",
        ),
        pytest.param(
            "0-2,5", PAIR3, ["0-1,4-5", "2-3"], 3, "0-1,5", id="the odd one from the cache in use"
        ),
        # Taking 0-1 with 2, whose cache is another, breaks nothing; breaking 4-5 would stay in one.
        pytest.param(
            "0-2,4-5",
            PAIR3,
            ["0-1,4-5", "2-3"],
            3,
            "0-2",
            id="another cache rather than another broken pair",
        ),
        pytest.param("0-3", SINGLES[:4], ["2-3", "0-1"], 2, "2-3", id="the preferred cache"),
        pytest.param("0-3", SINGLES[:4], ["2-3"], 2, "2-3", id="cores in no cache come last"),
        pytest.param(
            "0-4", SINGLES[:5], ["3-4"], 3, "0-2", id="cores in no cache count as one cache"
        ),
        pytest.param(
            "1-79",
            neighbours(*[2] * 40),
            ["0-79"],
            71,
            "1-71",
            id="71 threads of one cache: 35 pairs and a broken one",
        ),
        pytest.param(
            "1021-1023", [(1021, 1023), (1022,)], [], 2, "1021,1023", id="the highest ids"
        ),
    ],
)
def test_chooses_cpus(twin, free, cores, caches, count, expected):
    cache_ids = [ids(cache) if isinstance(cache, str) else cache for cache in caches]
    assert twin.cpus(ids(free), cores, cache_ids, count) == ids(expected)


def test_chooses_out_of_1024_cpus(twin):
    """The largest machine there can be: one core of all, or one cache and core for each."""
    every, single = range(1024), [[i] for i in range(1024)]
    assert twin.cpus(every, [every], [every], 1023) == list(range(1023))
    assert twin.cpus(every, [every], [every], 1024) == list(range(1024))
    assert twin.cpus(every, single, single, 3) == [0, 1, 2]
    assert twin.cpus(every, single, [], 1023) == list(range(1023))


# ---- CPUs: properties ------------------------------------------------------------------------


class CpuCase(NamedTuple):
    free: list[int]
    cores: list[list[int]]
    caches: list[list[int]]
    count: int


@st.composite
def cpu_cases(draw: st.DrawFn, most: int = 10) -> CpuCase:
    """Cores of the same size or mixed ones, spread over caches in any way, with any ids."""
    sizes = draw(st.sampled_from([[1], [2], [4], [1, 2], [1, 2, 4], [1, 2, 3, 4, 5]]))
    numbers = st.integers(0, most + 2) | st.integers(0, 1023)
    cpus = draw(st.lists(numbers, max_size=most, unique=True))
    if draw(st.booleans()):
        cpus.sort()
    cores = []
    while cpus:
        size = draw(st.sampled_from(sizes))
        cores.append(cpus[:size])
        cpus = cpus[size:]
    caches: list[list[int]] = [[] for _ in range(draw(st.integers(1, 4)))]
    for core in cores:
        draw(st.sampled_from(caches)).extend(core)
    has_none = draw(st.booleans())  # cores that are in no cache
    caches = [cache for cache in caches[has_none:] if cache]
    taken = draw(st.sampled_from([0, 1, 2, 5]))  # of ten
    free = [i for core in cores for i in core if draw(st.integers(0, 9)) >= taken]
    return CpuCase(free, cores, caches, draw(st.integers(0, len(free))))


def cpu_key(case: CpuCase, chosen: Iterable[int]) -> tuple:
    free, chosen = set(case.free), set(chosen)
    whole = [set(core) for core in case.cores if set(core) <= free]
    split = sum(0 < len(core & chosen) < len(core) for core in whole)
    of_broken = len(chosen - set().union(*whole))
    no_cache = set().union(*case.cores).difference(*case.caches)
    touched = [i for i, cache in enumerate([*case.caches, no_cache]) if chosen & set(cache)]
    left = sum(len(free & set([*case.caches, no_cache][i]) - chosen) for i in touched)
    return split, of_broken, len(touched), left, touched, sorted(chosen)


@given(case=cpu_cases(), examples=400)
def test_no_other_cpus_are_better(case):
    choices = itertools.combinations(case.free, case.count)
    best = min(cpu_key(case, choice) for choice in choices)
    for twin in (C, PYTHON):
        assert twin.cpus(*case) == best[-1]


@given(case=cpu_cases(most=60))
def test_the_twins_choose_the_same_cpus(case):
    assert C.cpus(*case) == PYTHON.cpus(*case)


@given(case=cpu_cases(most=30), seed=st.randoms(use_true_random=False))
def test_the_order_of_cores_does_not_matter(twin, case, seed):
    cores = list(case.cores)
    seed.shuffle(cores)
    assert twin.cpus(case.free, cores, case.caches, case.count) == twin.cpus(*case)


@given(case=cpu_cases(most=30), seed=st.randoms(use_true_random=False))
def test_the_order_of_caches_only_matters_among_equals(twin, case, seed):
    caches = list(case.caches)
    seed.shuffle(caches)
    chosen = twin.cpus(case.free, case.cores, caches, case.count)
    assert cpu_key(case, chosen)[:4] == cpu_key(case, twin.cpus(*case))[:4]


@given(seed=st.integers(0, 10**6), count=st.integers(0, 40), examples=20)
def test_the_twins_agree_on_a_machine_of_384_cpus(seed, count):
    cores = siblings(192)
    chance = random.Random(seed)
    free = [i for i in range(384) if chance.random() < chance.choice([0.5, 0.9])]
    case = CpuCase(free, cores, caches_of(cores, *[8] * 24), count)
    assert C.cpus(*case) == PYTHON.cpus(*case)


# ---- CPUs: refusals --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("free", "cores", "caches", "count", "message"),
    [
        pytest.param("0-2", PAIR3, [], 4, "4 ids cannot be taken from a set of 3", id="too many"),
        pytest.param(
            "0-2", PAIR3, [], -1, "-1 ids cannot be taken from a set of 3", id="less than 0"
        ),
        pytest.param(
            "0-2",
            PAIR3,
            [],
            2**999,
            "about 2**999 ids cannot be taken from a set of 3",
            id="far too many",
        ),
        pytest.param("0-7", PAIR3, [], 1, "free CPUs 6-7 are in no core", id="CPUs without a core"),
        pytest.param("0", [[0], []], [], 1, "core 1 has no CPUs", id="an empty core"),
        pytest.param("0", [[0]], [[0], []], 1, "cache 1 has no CPUs", id="an empty cache"),
        pytest.param(
            "0",
            [[0, 1], [1, 2]],
            [],
            1,
            "CPUs 1 are in core 1 and in an earlier one",
            id="cores that overlap",
        ),
        pytest.param(
            "0",
            [[0]],
            [[1, 2], [3], [2, 3]],
            1,
            "CPUs 2-3 are in cache 2 and in an earlier one",
            id="caches that overlap",
        ),
        pytest.param(
            "0",
            PAIR3,
            [[0, 1, 2], [3]],
            1,
            "CPUs 2-3 of core 1 are not in one cache",
            id="a core in two caches",
        ),
        pytest.param(
            "0",
            PAIR3,
            [[0, 1, 2]],
            1,
            "CPUs 2-3 of core 1 are not in one cache",
            id="half a core in a cache",
        ),
        pytest.param(
            "0",
            PAIR3,
            [[0, 1, 3]],
            1,
            "CPUs 2-3 of core 1 are not in one cache",
            id="the other half",
        ),
        pytest.param(
            "0",
            [[i] for i in range(1024)] + [[5]],
            [],
            1,
            "CPUs 5 are in core 1024 and in an earlier one",
            id="more cores than ids",
        ),
    ],
)
def test_says_what_is_wrong_with_cpus(twin, free, cores, caches, count, message):
    with pytest.raises(ValueError, match=exactly(message)):
        twin.cpus(ids(free), cores, caches, count)


# ---- wrong types -----------------------------------------------------------------------------

CALLS = {
    "among": lambda twin, x: (twin.search.choose_subset, TWO, x, twin.bitmap(), 0),
    "include": lambda twin, x: (twin.search.choose_subset, TWO, twin.bitmap(), x, 0),
    "free": lambda twin, x: (twin.search.choose_cpus, x, (), (), 0),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("other", [{1}, 1, None, "0-3"], ids=lambda other: repr(other))
def test_sets_are_bitmaps(twin, name, other):
    function, *args = CALLS[name](twin, other)
    message = f"{name} must be a Bitmap, not {type(other).__name__}"
    with pytest.raises(TypeError, match=exactly(message)):
        function(*args)


@pytest.mark.parametrize(
    ("cores", "caches", "message"),
    [
        pytest.param([], (), "cores must be a tuple, not list", id="a list of cores"),
        pytest.param((), [], "caches must be a tuple, not list", id="a list of caches"),
        pytest.param(({1},), (), "cores must hold Bitmaps, not set", id="a set for a core"),
        pytest.param((), ({1},), "caches must hold Bitmaps, not set", id="a set for a cache"),
    ],
)
def test_cores_and_caches_are_tuples_of_bitmaps(twin, cores, caches, message):
    with pytest.raises(TypeError, match=exactly(message)):
        twin.search.choose_cpus(twin.bitmap(), cores, caches, 0)


def test_a_count_is_whatever_has_an_index(twin):
    assert twin.subset(TWO, [0, 1], [], True) == ([0], 0)
    assert twin.cpus([0, 1], [[0], [1]], [], True) == [0]
    for call in (lambda: twin.subset(TWO, [0], [], "1"), lambda: twin.cpus([0], [[0]], [], "1")):
        with pytest.raises(TypeError, match="'str' object cannot be interpreted as an integer"):
            call()


def test_the_twins_bitmaps_do_not_mix():
    for function, *args in (CALLS[name](C, PYTHON.bitmap()) for name in CALLS):
        with pytest.raises(TypeError, match="must be a Bitmap, not Bitmap"):
            function(*args)


def test_the_twins_have_the_same_bound():
    assert _bitmap.MAX_SUBSETS == _search_py.MAX_SUBSETS == MAX_SUBSETS == 200_000
