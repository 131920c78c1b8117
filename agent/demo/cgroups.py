"""Kubelet's cgroups as a tree of plain files: v2, cgroupfs driver.

Plain files hand nothing down, so what would be in force is worked out here, by the kernel's rule.
"""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.core.bitmap import Bitmap

_FS: Final = "sys/fs/cgroup"
_PERIOD_US: Final = 100_000
CLASSES: Final = ("burstable", "besteffort")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kubepods:
    """The groups below kubepods of the host whose files are at `root`; paths start below it, ""
    is kubepods itself. `cpus` and `mems` are all that there are."""

    root: Path
    cpus: Bitmap
    mems: Bitmap

    def make_all(self) -> None:
        """As kubelet does at its start."""
        for path in ("", *CLASSES):
            self.make(path)
        (self.root / _FS / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
        self._write("", "cpuset.cpus.effective", str(self.cpus))
        self._write("", "cpuset.mems.effective", str(self.mems))

    def make(self, path: str, cpus: str = "", mems: str = "", quota_us: int = -1) -> None:
        """A group; one that is there already has what it has."""
        if not self._file(path, "cpuset.cpus").exists():
            quota = "max" if quota_us < 0 else str(quota_us)
            self._write(path, "cpuset.cpus", cpus)
            self._write(path, "cpuset.mems", mems)
            self._write(path, "cpu.max", f"{quota} {_PERIOD_US}")

    def remove(self, path: str) -> None:
        shutil.rmtree(self._file(path, "cpuset.cpus").parent, ignore_errors=True)

    def cpus_of(self, path: str) -> Bitmap:
        """The CPUs that the group's tasks would run on. Source: cgroup-v2.rst, cpuset.cpus."""
        return self._effective(path, "cpuset.cpus", self.cpus)

    def mems_of(self, path: str) -> Bitmap:
        return self._effective(path, "cpuset.mems", self.mems)

    def is_throttled(self, path: str) -> bool:
        """Whether a quota of CPU time is on this group or one above it."""
        own = self._read(path, "cpu.max").split()[0] != "max"
        return own or (path != "" and self.is_throttled(os.path.dirname(path)))

    def _effective(self, path: str, name: str, everything: Bitmap) -> Bitmap:
        if not path:
            return everything
        above = self._effective(os.path.dirname(path), name, everything)
        return Bitmap.parse_list(self._read(path, name)) & above or above

    def _file(self, path: str, name: str) -> Path:
        return self.root / _FS / "kubepods" / path / name

    def _read(self, path: str, name: str) -> str:
        return self._file(path, name).read_text().strip()

    def _write(self, path: str, name: str, text: str) -> None:
        file = self._file(path, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
