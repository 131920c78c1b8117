"""One rig for all end-to-end tests, and a table of what they measured."""

import contextlib
from collections.abc import Callable, Iterator

import pytest

from tests.e2e.rig import Rig, running_rig

Note = Callable[[str, str, str], None]
"""Keeps a figure for the table: what it is, its value, and the bar it is held against."""

_FIGURES = pytest.StashKey[list[tuple[str, str, str]]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_FIGURES] = []


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Note:
    def keep(what: str, value: str, bar: str) -> None:
        request.config.stash[_FIGURES].append((what, value, bar))

    return keep


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    rows = config.stash[_FIGURES]
    if not rows:
        return
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    terminalreporter.section("figures")
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        terminalreporter.write_line("  ".join(cells).rstrip())


@pytest.fixture(scope="session")
def session_rig(library: str) -> Iterator[Rig]:
    with contextlib.ExitStack() as stack:
        try:
            rig = stack.enter_context(running_rig(library))
        except RuntimeError as error:
            pytest.exit(str(error), returncode=2)
        yield rig


@pytest.fixture
def rig(session_rig: Rig) -> Iterator[Rig]:
    """The rig with a sound driver, a running agent, all GPUs healthy, and no pods."""
    rig = session_rig
    rig.machine.mend()
    rig.revive()
    rig.wait_until_whole()
    yield rig
    rig.machine.mend()
    rig.revive()
    rig.remove_pods()
