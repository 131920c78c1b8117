"""Writing what groups have: only what differs, never an empty set, and read back."""

import errno
import os
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from agent.core.bitmap import Bitmap
from agent.core.pool import Write
from agent.core.strict_json import printable, shown
from agent.core.topology import EMPTY
from agent.edge.cgroup.files import GONE, list_folders, read_text
from agent.edge.cgroup.finding import Cgroups
from agent.edge.cgroup.reading import read_own
from agent.errors import PinError

_CPUS: Final = "cpuset.cpus"
_MEMS: Final = "cpuset.mems"

_REFUSALS: Final = {
    errno.EACCES: "the group above has not all of them",
    errno.EBUSY: "a group below has others, or tasks with deadlines need more",
    errno.EINVAL: "not all of them are online",
    errno.ERANGE: "the machine has not all of them",
    errno.ENOSPC: "the group has tasks and would have none",
}
"""Source: the kernel's cpusets, on v1; v2 refuses what the machine has not."""


def apply_writes(cgroups: Cgroups, writes: Iterable[Write]) -> tuple[PinError, ...]:
    """Writes one after the other; those that fail do not keep the others back. A group that is gone
    is passed over."""
    errors = []
    for write in writes:
        try:
            write_cpus(cgroups, write.path, write.cpus)
        except PinError as error:
            if _is_there(cgroups, write.path):
                errors.append(error)
    return tuple(errors)


def write_cpus(cgroups: Cgroups, path: str, cpus: Bitmap) -> bool:
    """Writes cpuset.cpus; whether that was needed.

    v1 refuses where a group below has other CPUs. Then it is one that a container made itself, or
    that was made just now; it is narrowed first.

    Raises:
        PinError: the kernel refuses, or has other CPUs afterwards.
    """
    try:
        return _write_set(cgroups, path, _CPUS, cpus)
    except PinError as error:
        cause = error.__cause__
        busy = isinstance(cause, OSError) and cause.errno == errno.EBUSY
        if cgroups.version == 2 or not busy:
            raise
    for below, set_ in _steps_below(cgroups, path, cpus):
        try:
            _write_set(cgroups, below, _CPUS, set_)
        except PinError:
            if _is_there(cgroups, below):
                raise
    return True


def _steps_below(cgroups: Cgroups, top: str, cpus: Bitmap) -> list[tuple[str, Bitmap]]:
    """What to write, in order, so that `top` has these CPUs and all below have, of what they had,
    those that are among them; all of them, where none is."""
    had = {top: read_own(cgroups, top) or EMPTY}
    aims = {top: cpus}
    order = [top]
    for above in order:
        for name in list_folders(os.path.join(cgroups.cpuset, above)):
            path = f"{above}/{name}"
            if own := read_own(cgroups, path):
                had[path], aims[path] = own, own & aims[above] or aims[above]
                order.append(path)
    widened = [(path, had[path] | aims[path]) for path in order if not aims[path] <= had[path]]
    return widened + [(path, aims[path]) for path in reversed(order)]


def _is_there(cgroups: Cgroups, path: str) -> bool:
    return os.path.isdir(os.path.join(cgroups.cpuset, path))


def write_mems(cgroups: Cgroups, path: str, nodes: Bitmap) -> bool:
    """Writes cpuset.mems; whether that was needed. Memory that is in use moves along, which may
    take seconds: v2 does that by itself, v1 is told to.

    Raises:
        PinError: the kernel refuses, or has other nodes afterwards.
    """
    if cgroups.version == 1:
        _write(os.path.join(cgroups.cpuset, path, "cpuset.memory_migrate"), "1", "memory migration")
    return _write_set(cgroups, path, _MEMS, nodes)


def lift_quota(cgroups: Cgroups, path: str) -> bool:
    """Takes the CFS quota off this group; whether it had one. Raises PinError."""
    folder = os.path.join(cgroups.cpu, path)
    if cgroups.version == 1:
        return _write(os.path.join(folder, "cpu.cfs_quota_us"), "-1", "no quota")
    file = os.path.join(folder, "cpu.max")
    period = (read_text(file) or "").rpartition(" ")[2]
    return _write(file, f"max {period}".strip(), "no quota")


# --- files ----------------------------------------------------------------------------------------


def _write_set(cgroups: Cgroups, path: str, name: str, members: Bitmap) -> bool:
    file = os.path.join(cgroups.cpuset, path, name)
    what = f"CPUs {members}" if name == _CPUS else f"memory nodes {members}"
    if not members:
        raise PinError(f"{file}: an empty set is never written")
    if cgroups.version == 2 and not os.path.exists(file):
        _enable_cpusets(cgroups, path)
    return _write(file, str(members), what)


def _write(file: str, text: str, what: str) -> bool:
    """Raises PinError; its cause is the kernel's refusal, if there was one."""
    if read_text(file) == text:
        return False
    try:
        _put(file, text)
    except OSError as error:
        raise _refused(file, what, _why(file, error)) from error
    if (now := read_text(file)) != text:
        has = "the group is gone" if now is None else f"it reads {shown(now)} afterwards"
        raise _refused(file, what, has)
    return True


def _put(file: str, text: str) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK)
    try:
        os.write(descriptor, f"{text}\n".encode())
    finally:
        os.close(descriptor)


def _refused(file: str, what: str, why: str) -> PinError:
    return PinError(f"{printable(file, 400)}: {what} cannot be written: {why}")


def _why(file: str, error: OSError) -> str:
    """What the kernel means. Its error names a file where it was asked to open, not to write."""
    if error.errno in GONE:
        there = os.path.isdir(os.path.dirname(file))
        return "the kernel has no such file for this group" if there else "the group is gone"
    refused = error.filename is None and os.path.basename(file) in (_CPUS, _MEMS)
    meaning = _REFUSALS.get(error.errno or 0) if refused else None
    return meaning or error.strerror or str(error)


def _enable_cpusets(cgroups: Cgroups, path: str) -> None:
    """On v2 a group has cpusets if all groups above enable them for those below. Runtimes do that
    when they make a group, systemd may undo it."""
    parts = path.split("/")
    for depth in range(len(parts)):
        file = os.path.join(cgroups.cpuset, *parts[:depth], "cgroup.subtree_control")
        enabled = read_text(file)
        if enabled is not None and "cpuset" not in enabled.split():
            with suppress(OSError):
                _put(file, "+cpuset")
