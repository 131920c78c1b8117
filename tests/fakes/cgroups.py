"""Cpusets as the kernel has them, in memory; and a tree of plain files that looks like them.

Written from the kernel's documentation, cgroup-v1/cpusets.rst and cgroup-v2.rst, and from what a
6.18 kernel answers: tests/edge/test_cgroup.py holds the model against the kernel that it runs on.
"""

import errno
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

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
