"""What a kubelet and a container runtime leave on a machine, and how all of it goes away.

A machine is claimed by a locked file in kubelet's folder that names the private folder of the run
and the places that were not there before. A run that was killed has left the file, unlocked: the
next one cleans up behind it.
"""

import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.e2e.kubelet import HOME

_CLAIM = HOME / "numalet-e2e.json"

_PLACES = (HOME, Path("/run/containerd"), Path("/var/log/containers"))
"""Folders that kubelet and containerd make whatever they are configured to."""

_CGROUPS = "kubepods"

_MARK = "NUMALET_E2E_RUN"
"""The environment variable that everything started by a run inherits: its private folder."""


@contextlib.contextmanager
def claimed_machine() -> Iterator[Path]:
    """A private folder on a machine that is this run's, and is as it was before afterwards.

    Raises RuntimeError if it is a real node, or another run is under way.
    """
    new_places = [str(place) for place in _PLACES if not place.exists()]
    if HOME.exists() and any(HOME.iterdir()) and not _CLAIM.exists():
        raise RuntimeError(f"{HOME} is not empty: the tests would harm the node that it belongs to")
    HOME.mkdir(exist_ok=True)
    with _CLAIM.open("a+") as claim:
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RuntimeError("another run of these tests is under way") from error
        claim.seek(0)
        if before := claim.read():
            old = json.loads(before)
            new_places += old["places"]
            sweep(Path(old["folder"]))
        elif foreign := _cgroups():
            raise RuntimeError(f"{foreign[0]} exists: a kubelet runs on this machine")
        folder = Path(tempfile.mkdtemp(prefix="numalet-e2e-"))
        claim.seek(0)
        claim.truncate()
        claim.write(json.dumps({"folder": str(folder), "places": new_places}))
        claim.flush()
        os.environ[_MARK] = str(folder)
        try:
            yield folder
        finally:
            found = sweep(folder)
            for path in HOME.iterdir():
                _remove(path)
            for place in new_places:
                _remove(Path(place))
    if found:
        raise RuntimeError(f"what the tests should have stopped ran on: {', '.join(found)}")


def sweep(folder: Path) -> list[str]:
    """Ends and removes whatever is left of a run; the programs that it had to end."""
    found = _end_processes(folder)
    for mount in reversed(_mounts(folder)):
        subprocess.run(["umount", "--lazy", mount], check=True)
    for cgroup in _cgroups():
        _remove_cgroup(cgroup)
    _remove(folder)
    return found


def _end_processes(folder: Path) -> list[str]:
    """Programs that the run started, and whatever is in kubelet's cgroups."""
    started = [
        process.pid
        for process in psutil.process_iter(["environ"])
        if (process.info["environ"] or {}).get(_MARK) == str(folder)
    ]
    contained = [pid for cgroup in _cgroups() for pid in _members(cgroup)]
    ended = [_kill(pid) for pid in sorted({*started, *contained} - {os.getpid()})]
    deadline = time.monotonic() + 10
    while any(_members(cgroup) for cgroup in _cgroups()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [program for program in ended if program]


def _kill(pid: int) -> str:
    """The program, or nothing if it has ended already."""
    try:
        process = psutil.Process(pid)
        program = f"{process.name()} ({pid})"
        process.kill()
    except psutil.NoSuchProcess:
        return ""
    return program


def _members(cgroup: Path) -> list[int]:
    return [
        int(pid)
        for file in cgroup.rglob("cgroup.procs")
        for pid in file.read_text().split()
        if pid != "0"
    ]


def _cgroups() -> list[Path]:
    """kubelet's cgroup in every hierarchy that is mounted."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    roots = [line.split()[4] for line in lines if " - cgroup" in line]
    return [path for root in roots if (path := Path(root) / _CGROUPS).exists()]


def _remove_cgroup(cgroup: Path) -> None:
    folders = [Path(name) for name, _, _ in os.walk(cgroup, topdown=False)]
    for folder in folders:
        folder.rmdir()


def _mounts(folder: Path) -> list[str]:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points = [line.split()[4] for line in lines]
    return [point for point in points if Path(point).is_relative_to(folder)]


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
