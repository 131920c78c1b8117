"""Boots virtual nodes one after the other, runs their tests inside, and shows what was seen.

    python -m tests.vnode [MACHINE...]      all that there are tests for

Ends with 0 if all passed, 1 if not, 2 if something is missing here.
"""

import os
import subprocess
import sys
import textwrap
import time
import xml.etree.ElementTree as ET
from pathlib import Path

from agent.fakes import nvml
from tests.vnode.guest import MODULES

_REPOSITORY = Path(__file__).parent.parent.parent
_CACHE = _REPOSITORY / ".cache"
_RESULTS = "results.xml"
_MISSING = 2
_WIDTH = 100
_INDENT = " " * 14


def main(machines: list[str]) -> int:
    codes, tables = [], []
    nvml.build(_CACHE / "nvml")
    for machine in machines or list(MODULES):
        start_s = time.monotonic()
        code = _boot(machine)
        if code == _MISSING:
            return code
        took_s = time.monotonic() - start_s
        codes.append(code)
        tables += [f"{machine}: {'all passed' if not code else 'failed'}, {took_s:.0f} s"]
        tables += _rows(_CACHE / "vnode" / machine / _RESULTS)
    print("\n".join(["", *tables]))
    return int(any(codes))


def _boot(machine: str) -> int:
    """The exit code of the tests inside, whose output is shown meanwhile."""
    boot = _REPOSITORY / "hack/vnode/boot"
    pytest = [sys.executable, "-m", "pytest", "-o", "addopts=", "-o", "junit_family=xunit1"]
    quiet = ["-v", "--no-header", "--color=no", "-p", "no:cacheprovider"]
    results = ["--junitxml", _CACHE / "vnode" / machine / _RESULTS]
    told = os.environ | {"PYTHON": sys.executable, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(
        [boot, machine, *pytest, *quiet, *results, "tests/vnode"], env=told
    ).returncode


def _rows(results: Path) -> list[str]:
    """For each test how it ended, how long it took in seconds, what it is, and what it saw."""
    if not results.exists():
        return ["  it did not come to an end"]
    rows = []
    for case in ET.parse(results).getroot().iter("testcase"):
        name = case.attrib["name"].removeprefix("test_").replace("_", " ")
        rows.append(f"  {_outcome(case):7} {float(case.attrib['time']):4.0f} s  {name}")
        for one in case.iter("property"):
            rows += textwrap.wrap(
                one.attrib["value"],
                _WIDTH,
                initial_indent=f"{_INDENT}  · ",
                subsequent_indent=f"{_INDENT}    ",
            )
    return rows


def _outcome(case: ET.Element) -> str:
    words = {"failure": "FAILED", "error": "FAILED", "skipped": "skipped"}
    return next((words[child.tag] for child in case if child.tag in words), "passed")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
