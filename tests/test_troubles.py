"""What is wrong is said once for each change, and what fails does not end the pass."""

import logging
from collections.abc import Iterator

import pytest

from agent import errors
from agent.errors import AgentError, KubeletError, PinError
from agent.troubles import Troubles


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What is logged, each line after its level."""
    lines: list[str] = []
    logger = logging.getLogger("numalet")
    before = logger.level

    def keep(record: logging.LogRecord) -> bool:
        lines.append(f"{record.levelname} {record.getMessage()}")
        return False

    logger.addFilter(keep)
    logger.setLevel(logging.DEBUG)
    yield lines
    logger.removeFilter(keep)
    logger.setLevel(before)


@pytest.fixture
def kinds() -> list[str]:
    """The classes of errors that were counted."""
    return []


@pytest.fixture
def troubles(kinds: list[str]) -> Troubles:
    return Troubles(kinds.append)


def fail_with(error: Exception) -> int:
    raise error


# --- saying ---------------------------------------------------------------------------------------

WRONG = 'WARNING pods reason="no answer"'
OTHER = 'WARNING pods reason="they are odd"'
WELL = "INFO pods is well again"


@pytest.mark.parametrize(
    ("sentences", "lines"),
    [
        pytest.param([""], [], id="all is well from the beginning"),
        pytest.param(["no answer"], [WRONG], id="something is wrong"),
        pytest.param(["no answer", "no answer"], [WRONG], id="the same is said once"),
        pytest.param(["no answer", "they are odd"], [WRONG, OTHER], id="another is said"),
        pytest.param(["no answer", ""], [WRONG, WELL], id="it is well again"),
        pytest.param(["no answer", "", ""], [WRONG, WELL], id="that is said once"),
        pytest.param(["no answer", "", "no answer"], [WRONG, WELL, WRONG], id="it comes back"),
    ],
)
def test_what_is_said(
    troubles: Troubles, said: list[str], sentences: list[str], lines: list[str]
) -> None:
    for sentence in sentences:
        troubles.tell("pods", sentence)
    assert said == lines


def test_each_step_has_troubles_of_its_own(troubles: Troubles, said: list[str]) -> None:
    troubles.tell("pods", "no answer")
    troubles.tell("sysfs", "no answer")
    troubles.tell("pods", "")
    troubles.tell("sysfs", "no answer")
    assert said == [WRONG, 'WARNING sysfs reason="no answer"', WELL]


# --- attempts -------------------------------------------------------------------------------------


def test_what_succeeds_is_given_on(troubles: Troubles, said: list[str], kinds: list[str]) -> None:
    assert troubles.attempt("pods", lambda: 2, last=1) == 2
    assert (said, kinds) == ([], [])


def test_nothing_found_is_no_failure(troubles: Troubles, kinds: list[str]) -> None:
    assert troubles.attempt("pods", lambda: None, last=1) is None
    assert kinds == []


def test_what_fails_is_as_it_was_last(troubles: Troubles, said: list[str]) -> None:
    error = KubeletError("no answer")
    assert [troubles.attempt("pods", lambda: fail_with(error), last=n) for n in (1, 2)] == [1, 2]
    assert troubles.attempt("pods", lambda: 3, last=2) == 3
    assert said == [WRONG, WELL]


def test_each_failure_counts_though_it_is_said_once(
    troubles: Troubles, said: list[str], kinds: list[str]
) -> None:
    for _ in range(3):
        troubles.attempt("pods", lambda: fail_with(KubeletError("no answer")), last=0)
    assert said == [WRONG]
    assert kinds == ["KubeletError"] * 3


class LostError(PinError):
    """As an edge may have one of its own."""


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((kind, kind.__name__) for kind in (AgentError, *AgentError.__subclasses__())),
        pytest.param(LostError, "PinError", id="an edge's own error is what errors.py has it for"),
    ],
)
def test_errors_count_by_their_class(
    troubles: Troubles, kinds: list[str], kind: type[AgentError], name: str
) -> None:
    troubles.attempt("pods", lambda: fail_with(kind("no answer")), last=0)
    assert kinds == [name]
    assert hasattr(errors, name)


@pytest.mark.parametrize("error", [ValueError("a bug"), OSError("a bug"), KeyError("a bug")])
def test_a_bug_is_not_passed_over(
    troubles: Troubles, said: list[str], kinds: list[str], error: Exception
) -> None:
    with pytest.raises(type(error)):
        troubles.attempt("pods", lambda: fail_with(error), last=0)
    assert (said, kinds) == ([], [])
