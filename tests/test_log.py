"""Log lines: one an event, whatever the facts of it are."""

import json
import logging
import re
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent import log

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def logger() -> Iterator[logging.Logger]:
    """The agent's logger, and all of it as before when the test ends."""
    logger = logging.getLogger("numalet")
    before = logger.handlers[:], logger.propagate, logger.level
    yield logger
    logger.handlers[:], logger.propagate = before[:2]
    logger.setLevel(before[2])


LINES: dict[str, tuple[dict[str, object], str]] = {
    "an event without facts": ({}, "woke"),
    "a plain word": ({"gpu": "GPU-1"}, "woke gpu=GPU-1"),
    "facts stay in order": ({"b": 1, "a": 2}, "woke b=1 a=2"),
    "None is left out": ({"gpu": None, "node": 0}, "woke node=0"),
    "a sentence is quoted": ({"reason": "fell off"}, 'woke reason="fell off"'),
    "an empty text is quoted": ({"reason": ""}, 'woke reason=""'),
    "a text with = is quoted": ({"reason": "a=b"}, 'woke reason="a=b"'),
    "quotes are escaped": ({"reason": 'a "b"'}, r'woke reason="a \"b\""'),
    "backslashes are escaped": ({"path": "a\\b"}, r'woke path="a\\b"'),
    "letters of any language stay": ({"reason": "ключ é"}, 'woke reason="ключ é"'),
    "a line break is escaped": ({"reason": "a\nb"}, r'woke reason="a\nb"'),
    "a tab is escaped": ({"reason": "a\tb"}, r'woke reason="a\tb"'),
    "NUL is escaped": ({"reason": "a\0b"}, r'woke reason="a\u0000b"'),
    "a terminal's control character is escaped": ({"x": "a\x9bb"}, r'woke x="a\u009bb"'),
    "a line separator is escaped": ({"x": "a\u2028b"}, r'woke x="a\u2028b"'),
    "half a character is escaped": ({"x": "a\udcffb"}, r'woke x="a\udcffb"'),
    "a short float": ({"seconds": 0.25}, "woke seconds=0.25"),
    "a long float is rounded": ({"seconds": 1 / 3}, "woke seconds=0.333"),
    "an int is not": ({"bytes": 123456789}, "woke bytes=123456789"),
    "a bool": ({"up": True}, "woke up=True"),
    "a list": ({"nodes": [0, 1]}, 'woke nodes="[0, 1]"'),
    "an error is its sentence": ({"error": ValueError("no GPU")}, 'woke error="no GPU"'),
}


@pytest.mark.parametrize(("facts", "line"), LINES.values(), ids=LINES)
def test_lines(facts: dict[str, object], line: str) -> None:
    assert log.format_event("woke", facts) == line


@given(st.text(st.characters()))
def test_any_text_is_one_printable_line_and_can_be_read_back(text: str) -> None:
    line = log.format_event("woke", {"reason": text})
    assert line.isprintable()
    value = line.removeprefix("woke reason=")
    assert (json.loads(value) if value.startswith('"') else value) == text


SAY = {
    "debug": log.debug,
    "info": log.info,
    "warning": log.warning,
    "error": log.error,
}


@pytest.mark.parametrize(
    ("level", "said"),
    [
        ("debug", ["debug", "info", "warning", "error"]),
        ("info", ["info", "warning", "error"]),
        ("warning", ["warning", "error"]),
        ("error", ["error"]),
    ],
)
def test_a_level_says_itself_and_what_is_above(
    level: str, said: list[str], capsys: Capture
) -> None:
    log.start_logging(level)
    for name, say in SAY.items():
        say("woke", by=name)
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.rpartition("by=")[2] for line in err.splitlines()] == said


def test_a_line_has_the_time_in_utc_and_the_level(capsys: Capture) -> None:
    log.start_logging("info")
    log.warning("GPU unhealthy", gpu="GPU-1")
    line = capsys.readouterr().err
    stamp = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00"
    assert re.fullmatch(rf"{stamp} WARNING GPU unhealthy gpu=GPU-1\n", line)


def test_the_time_is_that_of_the_event(logger: logging.Logger, capsys: Capture) -> None:
    log.start_logging("info")
    record = logger.makeRecord("numalet", logging.INFO, "", 0, "woke", (), None)
    record.created = 1_800_000_000.25  # as `date -u -d @1800000000` has it
    logger.handle(record)
    assert capsys.readouterr().err == "2027-01-15T08:00:00.250+00:00 INFO    woke\n"


def test_started_again_it_says_everything_once(logger: logging.Logger, capsys: Capture) -> None:
    logging.getLogger().addHandler(other := logging.StreamHandler())
    try:
        log.start_logging("error")
        log.start_logging("info")
        log.info("woke")
    finally:
        logging.getLogger().removeHandler(other)
    assert capsys.readouterr().err.count("woke") == 1


def test_percent_signs_are_no_placeholders(capsys: Capture) -> None:
    log.start_logging("info")
    log.info("woke", path="%s%d")
    assert capsys.readouterr().err.endswith("woke path=%s%d\n")


def test_a_crash_comes_with_its_traceback(capsys: Capture) -> None:
    log.start_logging("error")
    try:
        raise ZeroDivisionError("by nought")
    except ZeroDivisionError:
        log.crash("pass failed")
    err = capsys.readouterr().err
    assert "ERROR   pass failed\nTraceback (most recent call last):\n" in err
    assert err.endswith("ZeroDivisionError: by nought\n")
