"""Boots virtual nodes, runs their tests inside, and shows what was seen.

    python -m tests.vnode [MACHINE...]      all that there are tests for

Ends with 0 if all passed, 1 if not, 2 if something is missing here.
"""

import os
import subprocess
import sys
import textwrap
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from agent.fakes import nvml
from tests.vnode.guest import MODULES

_REPOSITORY = Path(__file__).parent.parent.parent
_CACHE = _REPOSITORY / ".cache"

_MISSING = 2
_MEMORY_BYTES = 8 << 30
"""What hack/vnode/boot wants to be free for one node."""

_WIDTH = 100
_INDENT = " " * 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How the tests of one node ended: an exit code, and how long they took, boot and all."""

    machine: str
    code: int
    took_s: float

    @property
    def results(self) -> Path:
        return _results(self.machine)


def main(machines: list[str]) -> int:
    nvml.build(_CACHE / "nvml")
    with ThreadPoolExecutor(_at_once()) as pool:
        runs = list(pool.map(_run, machines or MODULES))
    if any(run.code == _MISSING for run in runs):
        return _MISSING
    print("\n".join(["", *(row for run in runs for row in _table(run))]))
    return int(any(run.code for run in runs))


def _at_once() -> int:
    """As many nodes as this machine can emulate side by side: each keeps one CPU busy."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(os.cpu_count() or 1, free // _MEMORY_BYTES))


def _run(machine: str) -> Run:
    """Shows the output of the tests meanwhile, each line with the machine before it."""
    pytest = [sys.executable, "-m", "pytest", "-o", "addopts=", "-o", "junit_family=xunit1"]
    quiet = ["-v", "--no-header", "--color=no", "-p", "no:cacheprovider"]
    boot = [_REPOSITORY / "hack/vnode/boot", machine, "env", "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1"]
    command = [*boot, *pytest, *quiet, "--junitxml", _results(machine), "tests/vnode"]
    start_s = time.monotonic()
    with subprocess.Popen(
        command,
        env=os.environ | {"PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(f"{machine} | {line}", end="", flush=True)
    return Run(machine=machine, code=process.returncode, took_s=time.monotonic() - start_s)


def _results(machine: str) -> Path:
    return _CACHE / "vnode" / machine / "results.xml"


def _table(run: Run) -> Iterator[str]:
    """For each test how it ended, how long it took, what it is, and what it saw."""
    yield f"{run.machine}: {'failed' if run.code else 'all passed'}, {run.took_s:.0f} s"
    if not run.results.exists():
        return
    for case in ET.parse(run.results).getroot().iter("testcase"):
        name = case.attrib["name"].removeprefix("test_").replace("_", " ")
        yield f"  {_outcome(case):7} {float(case.attrib['time']):4.0f} s  {name}"
        for one in case.iter("property"):
            how = {"initial_indent": f"{_INDENT}· ", "subsequent_indent": f"{_INDENT}  "}
            yield from textwrap.wrap(one.attrib["value"], _WIDTH, **how)


def _outcome(case: ET.Element) -> str:
    words = {"failure": "FAILED", "error": "FAILED", "skipped": "skipped"}
    return next((words[child.tag] for child in case if child.tag in words), "passed")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
