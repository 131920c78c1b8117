"""JSON from strangers: bounded, nothing in it said twice, and a refusal is one sentence.

What a sentence quotes is short and printable, whatever the stranger wrote. Annotations are JSON in
a text, and a trailing comma in one is passed over: ACK publishes a sample with one.
"""

import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

Object = dict[str, Any]

MAX_ANNOTATION_LENGTH = 64 << 10
"""Characters in one annotation. All annotations of a pod together may have four times as many."""
_STRING_OR_TRAILING_COMMA = re.compile(
    r'("(?:[^"\\]|\\.)*"?)|(?<![\s\[{,])(\s*),(?=\s*[}\]])', re.DOTALL
)
_KINDS: dict[type, str] = {
    dict: "an object",
    list: "a list",
    str: "a text",
    int: "a whole number",
}

_T = TypeVar("_T")


def parse_json(text: str, max_length: int) -> object:
    """The value in a text of so many characters. Raises ValueError with one sentence.

    A whole number is cut after 21 characters, which leaves it below -2**63 or over 2**63.
    """
    if len(text) > max_length:
        raise ValueError(f"it has {len(text):,} characters, more than {max_length:,}")
    try:
        value: object = json.loads(
            text,
            object_pairs_hook=_unique_keys,
            parse_int=lambda digits: int(digits[:21]),
            parse_constant=_refuse_constant,
        )
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"not JSON: {error.msg} at {where}") from None
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> Object:
    data: Object = {}
    for key, value in pairs:
        if key in data:
            raise ValueError(f"the key {shown(key)} stands twice in one object")
        data[key] = value
    return data


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def typed(value: object, kind: type[_T], what: str) -> _T:
    """`value` itself if it is of that JSON type, exactly. Raises ValueError that names `what`."""
    if type(value) is not kind:
        raise ValueError(f"{what} is {shown(value)}, not {_KINDS[kind]}")
    return value


def part(parent: Object, key: str, kind: type[_T]) -> _T:
    """What `parent` has there, or an empty one: Kubernetes reads null like nothing."""
    value = parent.get(key)
    return kind() if value is None else typed(value, kind, printable(key, 40))


def shown(value: object) -> str:
    """The value for a sentence: short, printable, on one line."""
    if type(value) is str:
        return f'"{printable(value, 40)}"'
    if type(value) is int and value.bit_length() > 64:
        return "a huge number"
    if value is None or type(value) in (bool, int, float):
        return json.dumps(value)
    return _KINDS.get(type(value), "no JSON")


def as_object(value: object) -> Object:
    """The value where it is an object, else an empty one: for what strangers may have left out."""
    return value if isinstance(value, dict) else {}


def as_list(value: object) -> list[Any]:
    """The value where it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def printable(text: str, max_length: int) -> str:
    """The text on one line, cut to so many characters, a question mark for each unprintable."""
    line = "".join(char if char.isprintable() else "?" for char in text[:max_length])
    return line if len(text) <= max_length else line + "…"


def read_annotation(
    parse: Callable[[object], _T], annotations: Object, key: str
) -> tuple[_T | None, list[str]]:
    """What the annotation says, None if it is missing or cannot be used; and notes on that."""
    value = annotations.get(key)
    if value is None:
        return None, []
    try:
        said = parse(value)
    except ValueError as reason:
        return None, [f"annotation {key} cannot be used: {reason}"]
    commas = drop_trailing_commas(str(value)) != value
    return said, [f"annotation {key} has a trailing comma, which is passed over"] * commas


def parse_annotation(value: object) -> Object:
    """The JSON object in an annotation. Raises ValueError with one sentence."""
    text = typed(value, str, "it")
    if len(text) <= MAX_ANNOTATION_LENGTH:
        text = drop_trailing_commas(text)
    return typed(parse_json(text, MAX_ANNOTATION_LENGTH), dict, "it")


def drop_trailing_commas(text: str) -> str:
    """JSON with a blank for each comma that follows the last item of an object or list."""
    return _STRING_OR_TRAILING_COMMA.sub(lambda found: found[1] or f"{found[2]} ", text)
