"""What a check of this node found: a verdict, what was seen, what to do; as text and as JSON."""

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby
from typing import Any, Final


class Verdict(StrEnum):
    """How it stands with one precondition."""

    OK = "ok"
    WARNING = "warning"
    """The agent works, but not as well, or not for every pod."""
    FAILED = "failed"
    """What the agent is for cannot be done."""
    SKIPPED = "skipped"
    """Not looked at: it is not needed here, or what it depends on failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check. `name` stays the same from version to version; `seen` and `advice` are sentences
    for people, `advice` is empty where there is nothing to do."""

    name: str
    verdict: Verdict
    seen: str
    advice: str = ""


def ok(name: str, seen: str) -> Finding:
    return Finding(name=name, verdict=Verdict.OK, seen=seen)


def warning(name: str, seen: str, advice: str) -> Finding:
    return Finding(name=name, verdict=Verdict.WARNING, seen=seen, advice=advice)


def failed(name: str, seen: str, advice: str) -> Finding:
    return Finding(name=name, verdict=Verdict.FAILED, seen=seen, advice=advice)


def skipped(name: str, seen: str) -> Finding:
    return Finding(name=name, verdict=Verdict.SKIPPED, seen=seen)


def skip(names: Iterable[str], why: str) -> Iterator[Finding]:
    """All of them skipped for one reason."""
    return (skipped(name, why) for name in names)


def has_failed(findings: Sequence[Finding]) -> bool:
    return any(finding.verdict is Verdict.FAILED for finding in findings)


# --- as text --------------------------------------------------------------------------------------

_SYMBOLS: Final = {
    Verdict.OK: ("✓", "32"),
    Verdict.WARNING: ("!", "33"),
    Verdict.FAILED: ("✗", "31"),
    Verdict.SKIPPED: ("–", "2"),
}
"""The symbol and the ANSI code of its colour."""
_WORD_WIDTH: Final = max(map(len, Verdict))
_WIDTH: Final = 100
"""Characters of a line; only what cannot be broken is longer."""


def draw(findings: Sequence[Finding], colour: bool) -> str:
    """A line for each finding, what to do below it, and the count; lines end with a newline.

    What was skipped for one reason shares a line.
    """
    shown = [_share(list(group)) for _, group in groupby(findings, _shared)]
    width = max((len(finding.name) for finding in shown), default=0)
    lines = [line for finding in shown for line in _draw(finding, width, colour)]
    return "".join(f"{line}\n" for line in (*lines, "", _draw_count(findings, colour)))


def _shared(finding: Finding) -> object:
    """Equal for those that share a line, if they stand together."""
    return finding.seen if finding.verdict is Verdict.SKIPPED else object()


def _share(group: Sequence[Finding]) -> Finding:
    """All of one line, by the name of the first."""
    first, *others = group
    if not others:
        return first
    names = ", ".join(other.name for other in others)
    return replace(first, seen=f"{first.seen}; nor are checked: {names}")


def _draw(finding: Finding, width: int, colour: bool) -> Iterator[str]:
    symbol, code = _SYMBOLS[finding.verdict]
    word = f"{symbol} {finding.verdict:<{_WORD_WIDTH}}"
    indent = " " * (len(word) + 2 + width + 2)
    first, *rest = _wrap(finding.seen, _WIDTH - len(indent)) or ["–"]
    yield f"{_paint(word, code, colour)}  {finding.name:<{width}}  {first}"
    yield from (f"{indent}{line}" for line in rest)
    if finding.verdict is Verdict.OK:
        return
    mark = _paint("→", code, colour)
    for line in _wrap(finding.advice, _WIDTH - len(indent) - 2):
        yield f"{indent}{mark} {line}"
        mark = " "


def _draw_count(findings: Sequence[Finding], colour: bool) -> str:
    counts = Counter(finding.verdict for finding in findings)
    words = {
        Verdict.OK: f"{counts[Verdict.OK]} ok",
        Verdict.WARNING: f"{counts[Verdict.WARNING]} warning{'s' * (counts[Verdict.WARNING] != 1)}",
        Verdict.FAILED: f"{counts[Verdict.FAILED]} failed",
        Verdict.SKIPPED: f"{counts[Verdict.SKIPPED]} skipped",
    }
    return ", ".join(
        _paint(words[verdict], _SYMBOLS[verdict][1], colour)
        for verdict in Verdict
        if counts[verdict] or verdict is Verdict.OK
    )


def _paint(text: str, code: str, colour: bool) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if colour else text


def _wrap(text: str, width: int) -> list[str]:
    """Lines that are safe for a terminal, whatever a neighbour said."""
    safe = "".join(char if char.isprintable() else " " for char in text)
    return textwrap.wrap(safe, width, break_long_words=False, break_on_hyphens=False)


# --- as JSON --------------------------------------------------------------------------------------


def to_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """`ok` is whether none failed; `counts` has every verdict; `findings` are in their order."""
    counts = Counter(finding.verdict for finding in findings)
    return {
        "ok": not has_failed(findings),
        "counts": {str(verdict): counts[verdict] for verdict in Verdict},
        "findings": [
            {
                "name": finding.name,
                "verdict": str(finding.verdict),
                "seen": finding.seen,
                "advice": finding.advice,
            }
            for finding in findings
        ],
    }
