"""The tests of the virtual node run in it; `make vnode` boots it for them."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.vnode.guest import MACHINE, MODULES, PatientRig, running_node

collect_ignore = [module for machine, module in MODULES.items() if machine != MACHINE]

Seen = Callable[[str], None]
"""Keeps what was seen for the table."""


def pytest_configure() -> None:
    if MACHINE not in MODULES:
        pytest.exit("these tests run in a virtual node, which `make vnode` boots", returncode=2)


@pytest.fixture
def seen(record_property: Callable[[str, object], None]) -> Seen:
    return lambda what: record_property("seen", what)


@pytest.fixture(scope="session")
def node(library: str) -> Iterator[PatientRig]:
    with running_node(library, Path(tempfile.mkdtemp(dir="/run"))) as rig:
        yield rig


@pytest.fixture
def rig(node: PatientRig) -> Iterator[PatientRig]:
    """The node without pods."""
    yield node
    node.revive()
    node.remove_pods()
