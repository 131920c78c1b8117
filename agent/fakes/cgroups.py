"""Cpusets as the kernel has them, in memory; and a tree of plain files that looks like them.

Written from the kernel's documentation, cgroup-v1/cpusets.rst and cgroup-v2.rst, and from what a
6.18 kernel answers: tests/edge/test_cgroup.py holds the model against the kernel that it runs on.
"""

import errno
import itertools
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from agent.core.bitmap import Bitmap

Cpus = frozenset[int]
NONE: Cpus = frozenset()


class FakeCpusets:
    """The cpusets of one hierarchy, by path; "" is its root, which has all CPUs that are online.

    `own` is what is written in each group. `busy` groups have tasks.
    """

    def __init__(self, version: int, online: Iterable[int]) -> None:
        self.version = version
        self.online: Cpus = frozenset(online)
        self.own: dict[str, Cpus] = {"": self.online if version == 1 else NONE}
        self.busy: set[str] = set()

    def make(self, path: str) -> None:
        assert os.path.dirname(path) in self.own, f"{path} has nothing above it"
        self.own[path] = NONE

    def remove(self, path: str) -> None:
        for below in [other for other in self.own if f"{other}/".startswith(f"{path}/")]:
            del self.own[below]
            self.busy.discard(below)

    def write(self, path: str, cpus: Iterable[int]) -> None:
        """Raises OSError as the kernel's write does."""
        wanted = frozenset(cpus)
        if not wanted <= self.online:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        if self.version == 1:
            refusal = self._refusal(path, wanted)
            if refusal:
                raise OSError(refusal, os.strerror(refusal), path)
        self.own[path] = wanted

    def _refusal(self, path: str, wanted: Cpus) -> int:
        if any(not self.own[child] <= wanted for child in self._children(path)):
            return errno.EBUSY
        if not wanted <= self.own[os.path.dirname(path)]:
            return errno.EACCES
        if not wanted and path in self.busy:
            return errno.ENOSPC
        return 0

    def _children(self, path: str) -> list[str]:
        return [other for other in self.own if other and os.path.dirname(other) == path]

    def effective(self, path: str) -> Cpus:
        """The CPUs that tasks of the group run on."""
        if self.version == 1 or not path:
            return self.own[path] & self.online if path else self.online
        above = self.effective(os.path.dirname(path))
        return self.own[path] & above or above


# --- the kernel itself ----------------------------------------------------------------------------

_FS = Path("/sys/fs/cgroup")
_numbers = itertools.count()


class RealCpusets:
    """A group of our own in the kernel's cpusets, with the same interface; its path is "" here.

    Close it at the end. Raises OSError where the machine has no cpusets that we may use.
    """

    def __init__(self) -> None:
        self.version = 2 if (_FS / "cgroup.controllers").exists() else 1
        mount = _FS if self.version == 2 else _FS / "cpuset"
        self.name = f"numalet_test_{os.getpid()}_{next(_numbers)}"
        self.folder = mount / self.name
        self.online: Cpus = frozenset(Bitmap.parse_list(_get(mount, "cpuset.cpus", "effective")))
        self.folder.mkdir()
        try:
            self._adopt(mount, "")
        except OSError:
            self.folder.rmdir()
            raise

    def _adopt(self, mount: Path, path: str) -> None:
        """On v1 a group needs memory before tasks may come in, on v2 it hands cpusets down."""
        folder = self.folder / path
        if self.version == 2:
            (folder / "cgroup.subtree_control").write_text("+cpuset")
            (folder / "cpuset.cpus").read_text()
        else:
            (folder / "cpuset.mems").write_text((mount / "cpuset.mems").read_text())
            if not path:
                (folder / "cpuset.cpus").write_text((mount / "cpuset.cpus").read_text())

    @property
    def own(self) -> dict[str, Cpus]:
        return {
            os.path.relpath(folder, self.folder).lstrip("."): _parse(Path(folder) / "cpuset.cpus")
            for folder, _, _ in os.walk(self.folder)
        }

    def make(self, path: str) -> None:
        (self.folder / path).mkdir()
        with suppress(OSError):  # a group of v2 with tasks hands nothing down
            self._adopt(self.folder, path)

    def remove(self, path: str) -> None:
        for folder, _, _ in os.walk(self.folder / path, topdown=False):
            os.rmdir(folder)

    def write(self, path: str, cpus: Iterable[int]) -> None:
        file = os.open(self.folder / path / "cpuset.cpus", os.O_WRONLY)
        try:
            os.write(file, ",".join(map(str, sorted(cpus))).encode() + b"\n")
        finally:
            os.close(file)

    def effective(self, path: str) -> Cpus:
        return frozenset(Bitmap.parse_list(_get(self.folder / path, "cpuset.cpus", "effective")))

    def close(self) -> None:
        self.remove("")


def _get(folder: Path, name: str, how: str) -> str:
    """v1 and v2 call what is in force by different names."""
    first, _, last = name.partition(".")
    for file in (folder / f"{name}.{how}", folder / f"{first}.{how}_{last}"):
        if file.exists():
            return file.read_text()
    raise FileNotFoundError(errno.ENOENT, "no cpusets here", str(folder))


def _parse(file: Path) -> Cpus:
    return frozenset(Bitmap.parse_list(file.read_text()))


# --- as files -------------------------------------------------------------------------------------


def lay_out(root: Path, files: Mapping[str, str]) -> Path:
    """Writes files, by their paths below `root`; a path that ends with a slash is an empty folder.
    Returns `root`."""
    for path, text in files.items():
        target = root / path
        if path.endswith("/"):
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
    return root
