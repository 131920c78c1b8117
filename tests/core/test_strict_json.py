"""JSON that anyone may have written: read as it is meant, or refused in one short sentence."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.core.strict_json import (
    drop_trailing_commas,
    parse_annotation,
    parse_json,
    part,
    printable,
    read_annotation,
    shown,
    typed,
)

BAD_TEXTS = {
    "a bare word": ("Restricted", "not JSON: Expecting value at line 1, column 1"),
    "nothing": ("", "not JSON: Expecting value at line 1, column 1"),
    "an error in the second line": ('{"a": [1],\n "b": x}', "not JSON: Expecting value at line 2,"),
    "a trailing comma": ('{"a": 1,}', "not JSON: "),
    "a text that never ends": ('{"a": "b', "not JSON: Unterminated string"),
    "more after the end": ("{} {}", "not JSON: Extra data at line 1, column 4"),
    "a key twice": ('{"a": 1, "b": 2, "a": 1}', 'the key "a" stands twice in one object'),
    "a key twice, far inside": ('[{"x": {"a\\n": 1, "a\\n": 2}}]', 'the key "a?" stands twice in'),
    "a long key twice": (
        '{"' + "k" * 900 + '": 1, "' + "k" * 900 + '": 1}',
        'the key "' + "k" * 40 + '…" stands twice in one object',
    ),
    "NaN": ('{"x": NaN}', "NaN is not a JSON number"),
    "less than nothing can be": ("-Infinity", "-Infinity is not a JSON number"),
    "brackets as deep as may be": ("[" * 1000_000, "the JSON is nested too deeply"),
    "objects as deep as may be": ('{"":' * 250_000, "the JSON is nested too deeply"),
    "a character too many": ("[" * 1000_001, "it has 1,000,001 characters, more than 1,000,000"),
}


@pytest.mark.parametrize(("text", "sentence"), BAD_TEXTS.values(), ids=BAD_TEXTS)
def test_a_text_is_refused_in_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        parse_json(text, 1000_000)
    assert str(caught.value).startswith(sentence)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 100


def test_a_number_of_five_thousand_digits_is_read_as_out_of_every_range() -> None:
    digits = "1" + "0" * 4999
    great, small = typed(parse_json(f"[{digits}, -{digits}]", 20_000), list, "it")
    assert great > 2**64
    assert small < -(2**63)


@given(st.integers(-(2**63), 2**64))
@settings(deadline=None)
def test_a_number_in_range_is_exact(number: int) -> None:
    assert parse_json(str(number), 99) == number


BAD_ANNOTATIONS = {
    "null": ("null", "it is null, not an object"),
    "a list": ("[]", "it is a list, not an object"),
    "no text": ({"a": 1}, "it is an object, not a text"),
    "a number": (7, "it is 7, not a text"),
    "an error after a trailing comma": (
        '{"a": [1 ,],\n "b": x}',
        "not JSON: Expecting value at line 2, column 7",
    ),
    "nothing but a comma": ("{,}", "not JSON: "),
    "two trailing commas": ('{"numaTopologyPolicy": "Restricted",,}', "not JSON: "),
    "brackets as deep as may be": ("[" * 65_536, "the JSON is nested too deeply"),
    "a mebibyte of brackets": ("[" * (1 << 20), "it has 1,048,576 characters, more than 65,536"),
}


@pytest.mark.parametrize(("value", "sentence"), BAD_ANNOTATIONS.values(), ids=BAD_ANNOTATIONS)
def test_an_annotation_cannot_be_used(value: object, sentence: str) -> None:
    said, (note,) = read_annotation(parse_annotation, {"key": value}, "key")
    assert said is None
    assert note.startswith(f"annotation key cannot be used: {sentence}")


GOOD_ANNOTATIONS: dict[str, tuple[dict[str, Any], Any, list[str]]] = {
    "none": ({}, None, []),
    "null": ({"key": None}, None, []),
    "an object": ({"key": '{"a": [1]}'}, {"a": [1]}, []),
    "an object with a trailing comma": (
        {"key": '{"a": [1, ]\n,}'},
        {"a": [1]},
        ["annotation key has a trailing comma, which is passed over"],
    ),
}


@pytest.mark.parametrize(
    ("annotations", "value", "notes"), GOOD_ANNOTATIONS.values(), ids=GOOD_ANNOTATIONS
)
def test_an_annotation_says(annotations: dict[str, Any], value: object, notes: list[str]) -> None:
    assert read_annotation(parse_annotation, annotations, "key") == (value, notes)


SHOWN: dict[str, tuple[object, str]] = {
    "a text": ("Restricted", '"Restricted"'),
    "a text of forty characters": ("x" * 40, '"' + "x" * 40 + '"'),
    "a longer text": ("x" * 41, '"' + "x" * 40 + '…"'),
    "a text of several lines and colours": ("a\nb\x1b[31m\u202e", '"a?b?[31m?"'),
    "half a character": ("\ud83d", '"?"'),
    "letters of others": ("größe 大", '"größe 大"'),
    "null": (None, "null"),
    "true": (True, "true"),
    "the largest id": (2**64 - 1, "18446744073709551615"),
    "a larger number": (2**64, "a huge number"),
    "a number that int would not print": (-(10**5000), "a huge number"),
    "a fraction": (0.5, "0.5"),
    "infinity": (float("inf"), "Infinity"),
    "a list": ([[[]]], "a list"),
    "an object": ({"a": 1}, "an object"),
    "what JSON does not know": (b"1", "no JSON"),
}


@pytest.mark.parametrize(("value", "text"), SHOWN.values(), ids=SHOWN)
def test_it_is_shown_as(value: object, text: str) -> None:
    assert shown(value) == text


@given(st.text(), st.integers(0, 9))
@settings(deadline=None)
def test_what_is_printed_is_one_short_line(text: str, length: int) -> None:
    line = printable(text, length)
    assert line.isprintable()
    assert len(line) == min(len(text), length + 1)
    if len(text) <= length and text.isprintable():
        assert line == text


KINDS: dict[str, tuple[object, type, str]] = {
    "a text": ("", int, 'x is "", not a whole number'),
    "true": (True, int, "x is true, not a whole number"),
    "a whole fraction": (1.0, int, "x is 1.0, not a whole number"),
    "null": (None, dict, "x is null, not an object"),
    "a list": ([1], str, "x is a list, not a text"),
    "an object": ({}, list, "x is an object, not a list"),
}


@pytest.mark.parametrize(("value", "kind", "sentence"), KINDS.values(), ids=KINDS)
def test_a_value_of_another_kind_is_refused(value: object, kind: type, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        typed(value, kind, "x")
    assert str(caught.value) == sentence


def test_a_part_of_another_kind_is_refused_by_its_key() -> None:
    with pytest.raises(ValueError, match="a list, not an object") as caught:
        part({"a\n" * 99: []}, "a\n" * 99, dict)
    assert str(caught.value) == "a?" * 20 + "… is a list, not an object"


def test_a_part_that_is_missing_or_null_is_empty() -> None:
    assert part({}, "x", list) == []
    assert part({"x": None}, "x", dict) == {}
    assert part({"x": "y"}, "x", str) == "y"


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=12,
)


@given(st.text(st.characters(), max_size=20) | st.text('{}[]",:\\ \n01e-NaN', max_size=20))
@settings(deadline=None)
def test_any_text_is_read_as_json_reads_it_or_refused(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert parse_json(text, 99) == json.loads(text)


def write(value: object, data: st.DataObject) -> str:
    """JSON with white space and trailing commas by chance."""
    if not isinstance(value, (list, dict)) or not value:
        return json.dumps(value, ensure_ascii=data.draw(st.booleans()))
    inside = (
        [f"{json.dumps(key)}:{write(item, data)}" for key, item in value.items()]
        if isinstance(value, dict)
        else [write(item, data) for item in value]
    )
    spaces = st.text(" \t\r\n", max_size=2)
    comma = data.draw(st.sampled_from(["", ","]))
    text = ",".join(inside) + data.draw(spaces) + comma + data.draw(spaces)
    return "{" + text + "}" if isinstance(value, dict) else "[" + text + "]"


@given(JSON_VALUES, st.data())
@settings(deadline=None)
def test_trailing_commas_change_nothing(value: object, data: st.DataObject) -> None:
    text = write(value, data)
    assert json.loads(drop_trailing_commas(text)) == value
    assert len(drop_trailing_commas(text)) == len(text)


PUNCTUATION = st.text(',}]{[":\\ \n')


@given(
    st.recursive(PUNCTUATION, lambda inner: st.lists(inner) | st.dictionaries(PUNCTUATION, inner))
)
@settings(deadline=None)
def test_json_without_trailing_commas_stays_as_it_is(value: object) -> None:
    text = json.dumps(value, indent=1)
    assert drop_trailing_commas(text) == text


def test_a_comma_inside_a_text_survives() -> None:
    text = '{"a,}": "b,]\\",}",}'
    assert json.loads(drop_trailing_commas(text)) == {"a,}": 'b,]",}'}
