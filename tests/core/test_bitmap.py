"""One suite for both twins of Bitmap. Expected values come from frozenset, from cpuset(7) and from
this machine's kernel."""

import copy
import itertools
import operator
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies as st

from agent.core import _bitmap, _bitmap_py
from agent.core.bitmap import MAX_ID, Bitmap

ROOT = Path(__file__).parents[2]
TWINS = {"C": _bitmap.Bitmap, "Python twin": _bitmap_py.Bitmap}


def given(**drawn: st.SearchStrategy) -> Callable[[Callable], Callable]:
    """Hypothesis' own, without a time limit per example."""
    return lambda test: hypothesis.settings(deadline=None)(hypothesis.given(**drawn)(test))


def exactly(message: str) -> str:
    return rf"\A{re.escape(message)}\Z"


def outcome(call: Callable[..., object], *args: object) -> object:
    """What a call comes to, in words that do not tell the twins apart."""
    try:
        result = call(*args)
    except Exception as error:
        return type(error), str(error)
    return result.to_int() if type(result) in TWINS.values() else result


@pytest.fixture(scope="session", params=TWINS.values(), ids=TWINS.keys())
def bitmap(request: pytest.FixtureRequest) -> type[Bitmap]:
    return request.param


# Random draws seldom hit the borders of words and of the whole set, so both are drawn on purpose.
ids = st.integers(0, MAX_ID) | st.sampled_from([0, 31, 32, 63, 64, 127, 128, 959, 960, MAX_ID])
spans = st.tuples(ids, ids).map(sorted)


def union(ranges: Iterable[Iterable[int]]) -> frozenset[int]:
    return frozenset(member for first, last in ranges for member in range(first, last + 1))


sets = st.frozensets(ids, max_size=20) | st.lists(spans, max_size=5).map(union)
numbers = st.integers() | st.integers(-2, MAX_ID + 2) | st.sampled_from([-(10**5000), 10**5000])
texts = (
    st.text("0123456789-, \n\0", max_size=12)
    | st.text("0123456789abcdefABCDEF,x \n\0", max_size=20)
    | st.text('019af-,:_+x"\\ \t\0\u0663\u2028\ud800…', max_size=60)
    | st.text(st.characters())
)


# ---- members ---------------------------------------------------------------------------------


@given(members=sets)
def test_holds_the_members_it_was_made_of(bitmap, members):
    made = bitmap(members)
    assert list(made) == sorted(members)
    assert len(made) == len(members)
    assert bool(made) == bool(members)
    assert all((i in made) == (i in members) for i in range(-1, MAX_ID + 2))


def test_without_arguments_it_is_empty(bitmap):
    assert list(bitmap()) == []


def test_may_be_full(bitmap):
    full = bitmap(range(MAX_ID + 1))
    assert len(full) == 1024
    assert str(full) == "0-1023"
    assert full.to_int() == 2**1024 - 1


def test_an_id_is_whatever_has_an_index(bitmap):
    class Three:
        def __index__(self) -> int:
            return 3

    made = bitmap([True, Three()])
    assert made == bitmap([1, 3])
    assert True in made
    assert Three() in made
    assert made.lowest(True) == bitmap([1])


@pytest.mark.parametrize("other", [0.0, "0", None, b"0", [0]], ids=lambda other: repr(other))
def test_what_is_no_integer_is_a_type_error(bitmap, other):
    made = bitmap([0])
    for call in (bitmap.from_int, made.lowest, made.__contains__, lambda other: bitmap([other])):
        with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
            call(other)


def test_an_iterables_own_error_comes_through(bitmap):
    def broken():
        yield 1
        raise LookupError("gone")

    with pytest.raises(LookupError, match="gone"):
        bitmap(broken())
    with pytest.raises(TypeError, match="'int' object is not iterable"):
        bitmap(5)


OVER = "is over 1023, the largest that numalet handles"


@pytest.mark.parametrize(
    ("number", "message"),
    [
        pytest.param(1024, f"id 1024 {OVER}", id="the first id that is too large"),
        pytest.param(1030, f"id 1030 {OVER}", id="a larger id"),
        pytest.param(10**30, f"id 1{'0' * 30} {OVER}", id="one beyond 64 bits"),
        pytest.param(2**20000, f"id about 2**20000 {OVER}", id="one that int does not print"),
        pytest.param(-1, "id -1 is negative", id="minus one"),
        pytest.param(-(10**30), f"id -1{'0' * 30} is negative", id="one below 64 bits"),
        pytest.param(-(2**20000), "id about -2**20000 is negative", id="one far below"),
    ],
)
def test_ids_out_of_range_are_refused(bitmap, number, message):
    with pytest.raises(ValueError, match=exactly(message)):
        bitmap([5, number])
    assert number not in bitmap(range(1024))


# ---- ints ------------------------------------------------------------------------------------


@given(members=sets)
def test_bit_i_of_the_int_is_member_i(bitmap, members):
    bits = sum(2**i for i in members)
    assert bitmap(members).to_int() == bits
    assert bitmap.from_int(bits) == bitmap(members)


@pytest.mark.parametrize(
    ("bits", "message"),
    [
        pytest.param(2**1024, f"id 1024 {OVER}", id="one bit too many"),
        pytest.param(2**100000 + 1, f"id 100000 {OVER}", id="far too many bits"),
        pytest.param(-1, "a negative int is no set of ids", id="minus one"),
        pytest.param(-(2**100000), "a negative int is no set of ids", id="far below"),
    ],
)
def test_ints_that_are_no_set_are_refused(bitmap, bits, message):
    with pytest.raises(ValueError, match=exactly(message)):
        bitmap.from_int(bits)


# ---- list text -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "members"),
    [
        pytest.param("0-4,9", [0, 1, 2, 3, 4, 9], id="first example of cpuset(7)"),
        pytest.param("0-2,7,12-14", [0, 1, 2, 7, 12, 13, 14], id="second example of cpuset(7)"),
        pytest.param("", [], id="empty"),
        pytest.param("\n", [], id="a memory-only node's cpulist"),
        pytest.param("0-3\n", [0, 1, 2, 3], id="newline at the end"),
        pytest.param(" \t\n 5 \r\v\f\n", [5], id="white space around"),
        pytest.param("0-1\0", [0, 1], id="NUL at the end"),
        pytest.param("0-1\n\0\0 \0", [0, 1], id="NULs and white space at the end"),
        pytest.param("0-1, 8,\n9 ,10", [0, 1, 8, 9, 10], id="white space around items"),
        pytest.param("7-7", [7], id="range of one"),
        pytest.param("3,1,2-3,1", [1, 2, 3], id="in disorder and twice"),
        pytest.param("00000000001023", [1023], id="leading zeros"),
        pytest.param("00-0", [0], id="nothing but zeros"),
        pytest.param("63-64,127-192", [63, 64, *range(127, 193)], id="across words"),
    ],
)
def test_reads_a_list(bitmap, text, members):
    assert list(bitmap.parse_list(text)) == members


NEITHER = "is neither a number nor a range"
STRIDE = "has a stride, which numalet does not handle"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("0-3,x", f'"0-3,x" is no list of ids: "x" {NEITHER}', id="a word"),
        pytest.param("0,,3", f'"0,,3" is no list of ids: "" {NEITHER}', id="an empty item"),
        pytest.param("0,\n", f'"0," is no list of ids: "" {NEITHER}', id="a comma at the end"),
        pytest.param(",", f'"," is no list of ids: "" {NEITHER}', id="a comma alone"),
        pytest.param("0 1", f'"0 1" is no list of ids: "0 1" {NEITHER}', id="a space for a comma"),
        pytest.param("1 - 2", f'"1 - 2" is no list of ids: "1 - 2" {NEITHER}', id="a spaced range"),
        pytest.param("-1", f'"-1" is no list of ids: "-1" {NEITHER}', id="a minus sign"),
        pytest.param("+1", f'"+1" is no list of ids: "+1" {NEITHER}', id="a plus sign"),
        pytest.param("1-", f'"1-" is no list of ids: "1-" {NEITHER}', id="an open range"),
        pytest.param("-", f'"-" is no list of ids: "-" {NEITHER}', id="a dash alone"),
        pytest.param("1-2-3", f'"1-2-3" is no list of ids: "1-2-3" {NEITHER}', id="two dashes"),
        pytest.param("1_0", f'"1_0" is no list of ids: "1_0" {NEITHER}', id="an underscore"),
        pytest.param("0x1", f'"0x1" is no list of ids: "0x1" {NEITHER}', id="hex"),
        pytest.param("\u0663", rf'"\u0663" is no list of ids: "\u0663" {NEITHER}', id="Arabic 3"),
        pytest.param("²", rf'"\xb2" is no list of ids: "\xb2" {NEITHER}', id="superscript 2"),
        pytest.param("\u00a01", rf'"\xa01" is no list of ids: "\xa01" {NEITHER}', id="hard space"),
        pytest.param("\ud800", rf'"\ud800" is no list of ids: "\ud800" {NEITHER}', id="surrogate"),
        pytest.param("\0001", rf'"\x001" is no list of ids: "\x001" {NEITHER}', id="NUL in front"),
        pytest.param("1\0,2", rf'"1\x00,2" is no list of ids: "1\x00" {NEITHER}', id="NUL inside"),
        pytest.param(
            "5-3", '"5-3" is no list of ids: the range "5-3" runs backwards', id="backwards"
        ),
        pytest.param(
            "1,0-31:2/8", f'"1,0-31:2/8" is no list of ids: "0-31:2/8" {STRIDE}', id="a stride"
        ),
        pytest.param("5,1030", f'"5,1030" is no list of ids: id 1030 {OVER}', id="too large"),
        pytest.param(
            "0-1024", f'"0-1024" is no list of ids: id 1024 {OVER}', id="a range too long"
        ),
        pytest.param("2000-5", f'"2000-5" is no list of ids: id 2000 {OVER}', id="both faults"),
        pytest.param("00001024", f'"00001024" is no list of ids: id 1024 {OVER}', id="after zeros"),
        pytest.param(
            "9" * 5000,
            f'"{"9" * 40}…" is no list of ids: id {"9" * 40}… {OVER}',
            id="more digits than int reads",
        ),
        pytest.param(
            "x" * 40, f'"{"x" * 40}" is no list of ids: "{"x" * 40}" {NEITHER}', id="just not cut"
        ),
        pytest.param(
            "x" * 41, f'"{"x" * 40}…" is no list of ids: "{"x" * 40}…" {NEITHER}', id="just cut"
        ),
    ],
)
def test_says_what_is_wrong_with_a_list(bitmap, text, message):
    with pytest.raises(ValueError, match=exactly(message)):
        bitmap.parse_list(text)


def by_hand(members: frozenset[int]) -> str:
    """The kernel's list text by grouping members whose distance from their rank is the same."""
    runs = []
    for _, group in itertools.groupby(enumerate(sorted(members)), lambda pair: pair[1] - pair[0]):
        run = [member for _, member in group]
        runs.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ",".join(runs)


@given(members=sets)
def test_prints_lists_as_the_kernel_does(bitmap, members):
    assert str(bitmap(members)) == by_hand(members)
    assert bitmap.parse_list(by_hand(members)) == bitmap(members)


@pytest.mark.parametrize("step", [2, 3], ids=["every other id", "pairs with single gaps"])
def test_prints_the_longest_lists(bitmap, step):
    members = frozenset(i for i in range(1024) if i % step != step - 1)
    assert str(bitmap(members)) == by_hand(members)


@given(ranges=st.lists(spans), data=st.data())
def test_reads_ranges_in_any_order_overlap_and_spacing(bitmap, ranges, data):
    blank = st.text(" \t\n", max_size=2)
    zeros = st.sampled_from(["", "0", "000"])
    items = []
    for first, last in ranges:
        low, high = data.draw(zeros) + str(first), data.draw(zeros) + str(last)
        items.append(data.draw(blank) + f"{low}-{high}" + data.draw(blank))
        if first == last and data.draw(st.booleans()):
            items[-1] = low
    assert frozenset(bitmap.parse_list(",".join(items))) == union(ranges)


# ---- mask text -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "members"),
    [
        pytest.param("00000001", [0], id="cpuset(7): bit 0"),
        pytest.param("40000000,00000000,00000000", [94], id="cpuset(7): bit 94"),
        pytest.param("00000001,00000000,00000000", [64], id="cpuset(7): bit 64"),
        pytest.param("000000ff,00000000", list(range(32, 40)), id="cpuset(7): bits 32 to 39"),
        pytest.param(
            "00000000,000e3862", [1, 5, 6, 11, 12, 13, 17, 18, 19], id="cpuset(7): scattered"
        ),
        pytest.param("f", [0, 1, 2, 3], id="one digit"),
        pytest.param("03\n", [0, 1], id="two digits and a newline"),
        pytest.param("0000,003fffff", list(range(22)), id="short first word"),
        pytest.param("1,2", [1, 32], id="every word is 32 bits, however short"),
        pytest.param("AbCdEf", [i for i in range(24) if 0xABCDEF >> i & 1], id="either case"),
        pytest.param(" 1\n\0\0", [0], id="white space around and NULs at the end"),
        pytest.param("0", [], id="no member"),
        pytest.param("00000000," * 255 + "00000001", [0], id="a kernel built for 8192 CPUs"),
        pytest.param("80000000" + ",0" * 31, [1023], id="the highest member"),
    ],
)
def test_reads_a_mask(bitmap, text, members):
    assert list(bitmap.parse_mask(text)) == members


NO_WORD = "is not a word of 1 to 8 hex digits"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", f'"" is no mask: "" {NO_WORD}', id="empty"),
        pytest.param("\n", f'"" is no mask: "" {NO_WORD}', id="a newline alone"),
        pytest.param("1,,1", f'"1,,1" is no mask: "" {NO_WORD}', id="an empty word"),
        pytest.param("1,", f'"1," is no mask: "" {NO_WORD}', id="a comma at the end"),
        pytest.param("000000001", f'"000000001" is no mask: "000000001" {NO_WORD}', id="9 digits"),
        pytest.param("0xff", f'"0xff" is no mask: "0xff" {NO_WORD}', id="0x"),
        pytest.param("1, 1", f'"1, 1" is no mask: " 1" {NO_WORD}', id="a space inside"),
        pytest.param("-1", f'"-1" is no mask: "-1" {NO_WORD}', id="a sign"),
        pytest.param("1_1", f'"1_1" is no mask: "1_1" {NO_WORD}', id="an underscore"),
        pytest.param("0-3", f'"0-3" is no mask: "0-3" {NO_WORD}', id="a list"),
        pytest.param("fg", f'"fg" is no mask: "fg" {NO_WORD}', id="a letter beyond f"),
        pytest.param("@", f'"@" is no mask: "@" {NO_WORD}', id="the character before A"),
        pytest.param("\u0663", rf'"\u0663" is no mask: "\u0663" {NO_WORD}', id="Arabic 3"),
        pytest.param(
            "1" + ",0" * 32, f'"1{",0" * 19},…" is no mask: id 1024 {OVER}', id="bit 1024"
        ),
        pytest.param(
            "5,1" + ",0" * 32, f'"5,1{",0" * 18},…" is no mask: id 1058 {OVER}', id="bit 1058"
        ),
        pytest.param(
            "1" + ",0" * 32 + ",x", f'"1{",0" * 19},…" is no mask: "x" {NO_WORD}', id="both faults"
        ),
    ],
)
def test_says_what_is_wrong_with_a_mask(bitmap, text, message):
    with pytest.raises(ValueError, match=exactly(message)):
        bitmap.parse_mask(text)


@given(members=sets, zero_words=st.integers(0, 40))
def test_writes_and_reads_masks_word_by_word(bitmap, members, zero_words):
    count = max(members, default=0) // 32 + 1
    words = [sum(2 ** (i - 32 * w) for i in members if i // 32 == w) for w in range(count)]
    text = ",".join(f"{word:08x}" for word in reversed(words))
    assert bitmap(members).format_mask() == text
    assert bitmap.parse_mask("0," * zero_words + text) == bitmap(members)
    short = ",".join(f"{word:x}" for word in reversed(words))
    assert bitmap.parse_mask(short) == bitmap(members)


def test_reads_the_two_texts_of_this_kernel_alike(bitmap):
    system = Path("/sys/devices/system")
    lists = [*system.glob("node/node*/cpulist"), *system.glob("cpu/cpu0/cache/*/shared_cpu_list")]
    for list_file in lists:
        text = list_file.read_text()
        mask = list_file.with_name(list_file.name.replace("list", "map")).read_text()
        assert bitmap.parse_mask(mask) == bitmap.parse_list(text), list_file
        assert str(bitmap.parse_list(text)) == text.strip()
    if not lists:
        pytest.skip("this kernel shows no CPU lists with masks beside them")


# ---- any text --------------------------------------------------------------------------------


@given(text=texts)
def test_hostile_text_raises_nothing_but_value_error(bitmap, text):
    for parse in (bitmap.parse_list, bitmap.parse_mask):
        answer = outcome(parse, text)
        if not isinstance(answer, int):
            kind, message = answer
            assert kind is ValueError
            assert message.isprintable()


MIB = 1024 * 1024


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("9" * MIB, id="one number"),
        pytest.param("0" * MIB, id="one zero"),
        pytest.param("1-" + "9" * MIB, id="one range"),
        pytest.param("1" * (MIB // 2) + "-" + "2" * (MIB // 2) + "x", id="a range and an x"),
        pytest.param("," * MIB, id="commas"),
        pytest.param("-" * MIB, id="dashes"),
        pytest.param("0-1023," * (MIB // 7) + "0", id="full ranges"),
        pytest.param("ffffffff," * (MIB // 9) + "0", id="full words"),
        pytest.param("0," * (MIB // 2) + "0", id="zeros"),
        pytest.param("1" + " " * MIB + "1", id="blanks inside"),
        pytest.param(" " * MIB, id="blanks"),
        pytest.param("1" + "\0" * MIB, id="NULs"),
        pytest.param("\U0001f600" * (MIB // 4), id="emoji"),
    ],
)
def test_a_mebibyte_of_text_takes_linear_time_and_a_short_answer(bitmap, text):
    """A quadratic reader would take minutes to hours here."""
    for parse in (bitmap.parse_list, bitmap.parse_mask):
        answer = outcome(parse, text)
        assert isinstance(answer, int) or len(answer[1]) < 1000


@pytest.mark.parametrize("text", [b"0-3", None, 3, ["0"]], ids=lambda text: repr(text))
def test_what_is_no_str_is_a_type_error(bitmap, text):
    for parse in (bitmap.parse_list, bitmap.parse_mask):
        with pytest.raises(
            TypeError, match=exactly(f"text must be str, not {type(text).__name__}")
        ):
            parse(text)


# ---- algebra and relations -------------------------------------------------------------------

ALGEBRA = {"&": operator.and_, "|": operator.or_, "^": operator.xor, "-": operator.sub}
RELATIONS = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "isdisjoint": lambda a, b: a.isdisjoint(b),
}


@pytest.mark.parametrize("name", ALGEBRA)
@given(a=sets, b=sets)
def test_algebra_is_that_of_frozenset(bitmap, name, a, b):
    result = ALGEBRA[name](bitmap(a), bitmap(b))
    assert type(result) is bitmap
    assert frozenset(result) == ALGEBRA[name](a, b)


# Two random sets are hardly ever comparable; one made from the other is.
related = st.tuples(sets, sets).flatmap(
    lambda pair: st.sampled_from([pair, (pair[0], pair[0] | pair[1]), (pair[0], pair[0])])
)


@pytest.mark.parametrize("name", RELATIONS)
@given(pair=related)
def test_relations_are_those_of_frozenset(bitmap, name, pair):
    for a, b in (pair, pair[::-1]):
        assert RELATIONS[name](bitmap(a), bitmap(b)) is RELATIONS[name](a, b)


@pytest.mark.parametrize("other", [{1}, frozenset({1}), 2, None], ids=lambda other: repr(other))
def test_is_unequal_to_and_mixes_with_nothing_but_bitmaps(bitmap, other):
    made = bitmap([1])
    assert (made == other, made != other) == (False, True)
    orders = [RELATIONS[name] for name in ("<", "<=", ">", ">=")]
    for operation in (*ALGEBRA.values(), *orders):
        with pytest.raises(TypeError):
            operation(made, other)
        with pytest.raises(TypeError):
            operation(other, made)
    with pytest.raises(
        TypeError, match=exactly(f"isdisjoint takes a Bitmap, not {type(other).__name__}")
    ):
        made.isdisjoint(other)


@given(members=sets)
def test_equal_sets_hash_alike_in_both_twins(members):
    hashes = {hash(twin(members)) for twin in TWINS.values()}
    assert hashes == {hash(sum(2**i for i in members))}


@pytest.mark.parametrize(
    "bits",
    [2**61 - 2, 2**61 - 1, 2**61, 2**64 - 1, 2**125 - 2**64, 2**1024 - 1, (2**1024 - 1) // 3],
    ids=hex,
)
def test_hash_is_right_around_its_modulus(bitmap, bits):
    assert hash(bitmap.from_int(bits)) == hash(bits)


# ---- the lowest ------------------------------------------------------------------------------


@given(members=sets.filter(len))
def test_first_is_the_lowest_member(bitmap, members):
    assert bitmap(members).first() == min(members)


def test_the_empty_set_has_no_first(bitmap):
    with pytest.raises(ValueError, match=exactly("an empty set has no first id")):
        bitmap().first()


@given(members=sets, data=st.data())
def test_lowest_takes_the_lowest_members(bitmap, members, data):
    count = data.draw(st.integers(0, len(members)))
    assert list(bitmap(members).lowest(count)) == sorted(members)[:count]


@pytest.mark.parametrize(
    ("count", "shown"),
    [(4, "4"), (-1, "-1"), (1025, "1025"), (10**30, f"1{'0' * 30}"), (-(2**999), "about -2**999")],
    ids=["one too many", "minus one", "more than there can be", "beyond 64 bits", "far below"],
)
def test_lowest_takes_no_more_than_there_are(bitmap, count, shown):
    with pytest.raises(ValueError, match=exactly(f"{shown} ids cannot be taken from a set of 3")):
        bitmap([1, 2, 3]).lowest(count)


def test_lowest_of_the_full_set_ends_at_1024(bitmap):
    full = bitmap(range(1024))
    assert full.lowest(1024) == full
    with pytest.raises(ValueError, match=exactly("1025 ids cannot be taken from a set of 1024")):
        full.lowest(1025)


# ---- as a Python object ----------------------------------------------------------------------


@given(members=sets)
def test_repr_evaluates_to_the_set(bitmap, members):
    made = bitmap(members)
    assert repr(made) == f"Bitmap.parse_list('{by_hand(members)}')"
    assert eval(repr(made), {"Bitmap": bitmap}) == made


def test_is_immutable(bitmap):
    made = bitmap([1])
    for name in ("_bits", "other", "first"):
        with pytest.raises(AttributeError):
            setattr(made, name, 2)
        with pytest.raises(AttributeError):
            delattr(made, name)
    assert not hasattr(made, "__dict__")
    assert list(made) == [1]


def test_making_another_from_it_leaves_it_alone(bitmap):
    made = bitmap([1, 2])
    made.__init__([5])
    list(made), made.lowest(1), made & bitmap(), made | bitmap([7])
    assert list(made) == [1, 2]


def test_cannot_be_inherited_from(bitmap):
    with pytest.raises(
        TypeError, match=exactly("type 'agent.core.bitmap.Bitmap' is not an acceptable base type")
    ):
        type("Sub", (bitmap,), {})


@pytest.mark.parametrize("args", [((), ()), ((), 1, 2)], ids=["two", "three"])
def test_takes_one_argument_by_position(bitmap, args):
    with pytest.raises(TypeError):
        bitmap(*args)
    with pytest.raises(TypeError):
        bitmap(ids=())


def test_copies_are_equal(bitmap):
    made = bitmap([0, 700])
    assert copy.copy(made) == copy.deepcopy(made) == made
    maker, args = made.__reduce__()
    assert maker(*args) == made


def test_its_iterator_outlives_it(bitmap):
    iterator = iter(bitmap([3, 900]))
    assert list(iterator) == [3, 900]
    assert list(iterator) == []


# ---- the twins together ----------------------------------------------------------------------


CALLS = {
    "Bitmap": lambda twin, a, n, text: twin([*a, n]),
    "from_int": lambda twin, a, n, text: twin.from_int(n),
    "parse_list": lambda twin, a, n, text: twin.parse_list(text),
    "parse_mask": lambda twin, a, n, text: twin.parse_mask(text),
    "lowest": lambda twin, a, n, text: twin(a).lowest(n),
    "first": lambda twin, a, n, text: twin(a).first(),
    "in": lambda twin, a, n, text: n in twin(a),
    "in with text": lambda twin, a, n, text: text in twin(a),
    "isdisjoint with a number": lambda twin, a, n, text: twin(a).isdisjoint(n),
    "str": lambda twin, a, n, text: str(twin(a)),
    "format_mask": lambda twin, a, n, text: twin(a).format_mask(),
}


@pytest.mark.parametrize("name", CALLS)
@given(a=sets, n=numbers, text=texts)
def test_the_twins_do_and_say_the_same(name, a, n, text):
    c, twin = (outcome(CALLS[name], twin, a, n, text) for twin in TWINS.values())
    assert c == twin


def test_the_twins_offer_the_same_names():
    c, twin = ({n for n in dir(t) if not n.startswith("_")} for t in TWINS.values())
    assert c == twin
    assert _bitmap.MAX_ID == _bitmap_py.MAX_ID == MAX_ID == 1023


def test_the_twins_do_not_mix():
    c, twin = (t([1]) for t in TWINS.values())
    assert c != twin
    with pytest.raises(TypeError):
        c & twin
    with pytest.raises(TypeError):
        twin.isdisjoint(c)


PROCESSES = {"C": {"NUMALET_PURE_PYTHON": ""}, "Python twin": {"NUMALET_PURE_PYTHON": "1"}}


def run(kind: str, code: str, data: bytes = b"") -> bytes:
    """Runs the code in a process whose `agent.core.bitmap` has chosen that twin."""
    command = [sys.executable, "-c", "import pickle, sys\n" + code]
    env = os.environ | PROCESSES[kind]
    done = subprocess.run(
        command, input=data, env=env, cwd=ROOT, check=True, stdout=subprocess.PIPE
    )
    return done.stdout


@pytest.mark.parametrize(
    ("sender", "receiver"),
    [("C", "Python twin"), ("Python twin", "C"), ("C", "C"), ("Python twin", "Python twin")],
    ids=lambda kind: kind,
)
def test_pickles_travel_between_processes(sender, receiver):
    pickles = run(
        sender,
        "from agent.core.bitmap import Bitmap\n"
        "made = Bitmap([0, 64, 1023])\n"
        "versions = range(pickle.HIGHEST_PROTOCOL + 1)\n"
        "pickle.dump([pickle.dumps(made, version) for version in versions], sys.stdout.buffer)",
    )
    answer = run(
        receiver,
        "for text in pickle.load(sys.stdin.buffer): print(repr(pickle.loads(text)))",
        pickles,
    )
    assert set(answer.decode().splitlines()) == {"Bitmap.parse_list('0,64,1023')"}


@pytest.mark.parametrize(("kind", "module"), [("C", "_bitmap"), ("Python twin", "_bitmap_py")])
def test_the_environment_selects_the_twin(kind, module):
    code = f"from agent.core import bitmap, {module}; print(bitmap.Bitmap is {module}.Bitmap)"
    assert run(kind, code) == b"True\n"


def test_a_missing_c_core_is_an_error_not_a_slow_product():
    code = (
        "sys.modules['agent.core._bitmap'] = None\n"
        "try: import agent.core.bitmap\n"
        "except ImportError: print('refused')"
    )
    assert run("C", code) == b"refused\n"
