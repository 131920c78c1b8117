"""A rig for each module of end-to-end tests, and a table of what they measured."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import pytest

from tests.e2e.cluster import OVERLAYS, Cluster, running_cluster
from tests.e2e.rig import Rig, running_rig

T = TypeVar("T")

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


def spread(times_s: Sequence[float]) -> str:
    ordered = sorted(times_s)
    return f"median {ordered[len(ordered) // 2]:.2f} s, worst {ordered[-1]:.2f} s"


@contextlib.contextmanager
def _needed(running: contextlib.AbstractContextManager[T]) -> Iterator[T]:
    """What it gives; without it no test makes sense."""
    with contextlib.ExitStack() as stack:
        try:
            given = stack.enter_context(running)
        except RuntimeError as error:
            pytest.exit(str(error), returncode=2)
        yield given


def rig_of_module(library: str, *how: Any, **more: Any) -> contextlib.AbstractContextManager[Rig]:
    """What `running_rig` gives."""
    return _needed(running_rig(library, *how, **more))


@pytest.fixture(scope="module")
def module_rig(library: str) -> Iterator[Rig]:
    """The rig that the tests of a module share; a module may have one of its own."""
    with rig_of_module(library) as rig:
        yield rig


@pytest.fixture
def rig(module_rig: Rig) -> Iterator[Rig]:
    """The rig with a sound driver, a running agent, all GPUs healthy, and no pods."""
    rig = module_rig
    rig.machine.mend()
    rig.revive()
    rig.wait_until_whole()
    yield rig
    rig.machine.mend()
    rig.revive()
    rig.remove_pods()


@pytest.fixture(scope="module")
def module_cluster(library: str) -> Iterator[Cluster]:
    """The cluster that the tests of a module share."""
    with _needed(running_cluster(library, OVERLAYS / "ack")) as cluster:
        yield cluster


@pytest.fixture
def cluster(module_cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with everything running, all GPUs healthy and reported, and no pods."""
    cluster = module_cluster
    cluster.rig.machine.mend()
    cluster.revive()
    cluster.rig.wait_until_whole()
    cluster.wait_until_right()
    yield cluster
    cluster.rig.machine.mend()
    cluster.revive()
    cluster.remove_pods()
