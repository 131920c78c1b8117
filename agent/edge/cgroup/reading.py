"""What groups have. They come and go while they are read."""

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil, log2
from typing import Final, ParamSpec, TypeVar

from agent.core.bitmap import Bitmap
from agent.core.pool import ContainerGroup, Group, Groups, PodGroup, Qos
from agent.core.runtime import CpuTime
from agent.core.strict_json import printable
from agent.core.topology import EMPTY
from agent.edge.cgroup.files import list_folders, read_text
from agent.edge.cgroup.finding import Cgroups, class_path, parse_container, pod_folders
from agent.errors import PinError

_T = TypeVar("_T")
_P = ParamSpec("_P")

_ALLOWED: Final = re.compile(r"^Cpus_allowed_list:\s*(\S+)$", re.ASCII | re.MULTILINE)
_MOST_SHARES: Final = 1 << 18
_SHARES_OF_CPU: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class CpusetReading:
    """What is written in a group, on v2 maybe nothing, and what is in force."""

    cpus: Bitmap
    mems: Bitmap
    effective_cpus: Bitmap
    effective_mems: Bitmap


# --- all groups -----------------------------------------------------------------------------------


def read_groups(cgroups: Cgroups) -> Groups:
    """Kubepods and all pods and containers below. A group that goes meanwhile is left out.

    Raises:
        PinError: kubepods itself cannot be read.
    """
    cpus = read_cpuset(cgroups, cgroups.kubepods).effective_cpus
    unread: list[str] = []
    classes = {
        qos: Group(path=path, cpus=own)
        for qos in (Qos.BURSTABLE, Qos.BESTEFFORT)
        for path in [class_path(cgroups, qos)]
        if (own := _try(unread, read_own, cgroups, path)) is not None
    }
    return Groups(
        version=cgroups.version,
        path=cgroups.kubepods,
        cpus=cpus,
        classes=classes,
        pods=tuple(pod for qos in Qos for pod in _read_pods(cgroups, qos, unread)),
        unread=tuple(unread),
    )


def _read_pods(cgroups: Cgroups, qos: Qos, unread: list[str]) -> Iterator[PodGroup]:
    for uid, path in _try(unread, pod_folders, cgroups, qos) or ():
        own = _try(unread, read_own, cgroups, path)
        if own is not None:
            containers = tuple(_read_containers(cgroups, path, unread))
            yield PodGroup(path=path, cpus=own, uid=uid, qos=qos, containers=containers)


def _read_containers(cgroups: Cgroups, pod: str, unread: list[str]) -> Iterator[ContainerGroup]:
    for name in _try(unread, list_folders, os.path.join(cgroups.cpuset, pod)) or ():
        path = f"{pod}/{name}"
        own = _try(unread, read_own, cgroups, path)
        if own is not None:
            runtime, id_ = parse_container(name)
            yield ContainerGroup(path=path, cpus=own, id=id_, runtime=runtime)


def _try(unread: list[str], read: Callable[_P, _T], *args: _P.args, **kw: _P.kwargs) -> _T | None:
    try:
        return read(*args, **kw)
    except PinError as error:
        unread.append(str(error))
        return None


# --- one group ------------------------------------------------------------------------------------


def read_cpuset(cgroups: Cgroups, path: str) -> CpusetReading:
    """What this group has. Raises PinError, also where there is no such group."""
    if not os.path.isdir(os.path.join(cgroups.cpuset, path)):
        raise PinError(f"{os.path.join(cgroups.cpuset, path)}: there is no such cgroup")
    return CpusetReading(
        cpus=_read_set(cgroups, path, "cpuset.cpus") or EMPTY,
        mems=_read_set(cgroups, path, "cpuset.mems") or EMPTY,
        effective_cpus=_read_effective(cgroups, path, "cpus"),
        effective_mems=_read_effective(cgroups, path, "mems"),
    )


def read_own(cgroups: Cgroups, path: str) -> Bitmap | None:
    """What is written in cpuset.cpus, None where the group is gone. Raises PinError."""
    own = _read_set(cgroups, path, "cpuset.cpus")
    if own is None and os.path.isdir(os.path.join(cgroups.cpuset, path)):
        return EMPTY  # v2, and cpusets are not enabled here
    return own


def _read_effective(cgroups: Cgroups, path: str, what: str) -> Bitmap:
    """What is in force: on v2, where cpusets are not enabled, that of the next group above."""
    if cgroups.version == 1:
        found = _read_set(cgroups, path, f"cpuset.effective_{what}")
        return found or _read_set(cgroups, path, f"cpuset.{what}") or EMPTY
    while (found := _read_set(cgroups, path, f"cpuset.{what}.effective")) is None and path:
        path = os.path.dirname(path)
    return found or EMPTY


def _read_set(cgroups: Cgroups, path: str, name: str) -> Bitmap | None:
    """None where there is no such file."""
    file = os.path.join(cgroups.cpuset, path, name)
    text = read_text(file)
    try:
        return None if text is None else Bitmap.parse_list(text)
    except ValueError as error:
        raise PinError(f"{file}: {error}") from error


def read_tasks(cgroups: Cgroups, path: str) -> dict[int, Bitmap]:
    """The CPUs on which each thread of the group and of groups below it may run, by its number.

    A thread that has asked for fewer CPUs than its group has runs on those. Threads that this
    process cannot see, as it is in another PID namespace, are left out. Raises PinError.
    """
    name = "tasks" if cgroups.version == 1 else "cgroup.threads"
    texts = [
        read_text(os.path.join(folder, name)) or ""
        for folder, _, _ in os.walk(os.path.join(cgroups.cpuset, path))
    ]
    numbers = [int(word) for text in texts for word in text.split() if word != "0"]
    found = {number: _read_allowed(cgroups, number) for number in numbers}
    return {number: cpus for number, cpus in found.items() if cpus is not None}


def _read_allowed(cgroups: Cgroups, number: int) -> Bitmap | None:
    line = _ALLOWED.search(read_text(os.path.join(cgroups.root, f"proc/{number}/status")) or "")
    return Bitmap.parse_list(line[1]) if line else None


# --- CPU time -------------------------------------------------------------------------------------


def read_cpu_time(cgroups: Cgroups, path: str) -> CpuTime:
    """What the scheduler is told of this group; None where the kernel has no file for it.

    Of v2's weight only whole CPUs can be told, and `shares` is None for all else. It may be whole
    by chance: 0.99 CPUs weigh as much as one. The quota tells.

    Raises:
        PinError: a file cannot be read.
    """
    if cgroups.version == 1:
        return CpuTime(
            shares=_read_number(cgroups, path, "cpu.shares"),
            quota_us=_read_number(cgroups, path, "cpu.cfs_quota_us"),
            period_us=_read_number(cgroups, path, "cpu.cfs_period_us"),
        )
    weight = _read_number(cgroups, path, "cpu.weight")
    file = os.path.join(cgroups.cpu, path, "cpu.max")
    quota, period = _parse_max(file, read_text(file))
    shares = None if weight is None else to_shares(weight)
    return CpuTime(shares=shares, quota_us=quota, period_us=period)


def _read_number(cgroups: Cgroups, path: str, name: str) -> int | None:
    file = os.path.join(cgroups.cpu, path, name)
    text = read_text(file)
    try:
        return None if text is None else int(text)
    except ValueError as error:
        raise PinError(f"{file}: {error}") from error


def _parse_max(file: str, text: str | None) -> tuple[int | None, int | None]:
    """(quota, period) in microseconds; a quota of -1 is no limit."""
    if text is None:
        return None, None
    words = re.fullmatch(r"(max|\d{1,18}) (\d{1,18})", text, re.ASCII)
    if not words:
        raise PinError(f"{file}: {printable(text, 40)} is no quota and period")
    return -1 if words[1] == "max" else int(words[1]), int(words[2])


def to_shares(weight: int) -> int | None:
    """The cgroup v1 shares of the one whole number of CPUs that has this weight on v2."""
    return _SHARES.get(weight)


def _linear_weight(shares: int) -> int:
    """Source: kubelet, and runc before 1.3.2."""
    return 1 + (shares - 2) * 9999 // (_MOST_SHARES - 2)


def _quadratic_weight(shares: int) -> int:
    """Source: runc 1.3.2 and later, crun 1.23 and later."""
    if shares >= _MOST_SHARES:
        return 10000
    log = log2(shares)
    return ceil(10 ** ((log * log + 125 * log) / 612 - 7 / 34))


def _whole_shares() -> dict[int, int]:
    """Shares by weight, without weights that several numbers of CPUs have."""
    found: dict[int, set[int]] = {}
    for shares in range(_SHARES_OF_CPU, _MOST_SHARES + 1, _SHARES_OF_CPU):
        for weight in (_linear_weight(shares), _quadratic_weight(shares)):
            found.setdefault(weight, set()).add(shares)
    return {weight: shares.pop() for weight, shares in found.items() if len(shares) == 1}


_SHARES: Final = _whole_shares()
