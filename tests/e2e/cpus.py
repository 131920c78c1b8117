"""On which CPUs the processes in pods may run, as the kernel and psutil say.

Source: the kernel's Documentation/admin-guide/cgroup-v1/cpusets.rst and cgroup-v2.rst;
kubelet's cgroupfs driver for where containers are.
"""

import contextlib
import glob
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

Cpus = frozenset[int]


def parse(text: str) -> Cpus:
    """A list as the kernel writes it: "0-3,8"."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return frozenset(
        cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)
    )


def show(cpus: Cpus) -> str:
    """A list that the agent reads."""
    return ",".join(map(str, sorted(cpus)))


ALL = parse(Path("/sys/devices/system/cpu/online").read_text())
OWN = frozenset([max(ALL)])
"""The only CPU that the agent may give away here: all others are reserved."""
POOL = ALL - OWN

_V1 = Path("/sys/fs/cgroup/cpuset")
_KUBEPODS = (_V1 if _V1.exists() else _V1.parent) / "kubepods"
_EFFECTIVE = ("cpuset.effective_cpus", "cpuset.cpus.effective")


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """A container's cgroup, or a sandbox's. `effective` are its CPUs, `processes` those of each
    process by its id, `threads` those of each thread."""

    pod: str
    id: str
    folder: Path
    effective: Cpus
    processes: Mapping[int, Cpus]
    threads: Mapping[int, Cpus]


def folders() -> Iterator[Path]:
    """The cgroups of all containers and sandboxes."""
    for qos in ("", "burstable/", "besteffort/"):
        yield from map(Path, glob.iglob(f"{_KUBEPODS}/{qos}pod*/*/"))  # Path's trips over what ends


def read_containers() -> list[Container]:
    """All that there are; one that ends meanwhile is left out."""
    found = []
    for folder in folders():
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            found.append(_read_container(folder))
    return found


def of_classes() -> set[Cpus]:
    """What new pods of the classes with a cgroup of their own begin with."""
    return {_effective(_KUBEPODS / name) for name in ("burstable", "besteffort")}


def _effective(folder: Path) -> Cpus:
    for name in _EFFECTIVE:
        if (folder / name).exists():
            return parse((folder / name).read_text())
    raise FileNotFoundError(folder)


def _read_container(folder: Path) -> Container:
    pids = [int(pid) for pid in (folder / "cgroup.procs").read_text().split()]
    tasks = [task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()]
    return Container(
        pod=folder.parent.name.removeprefix("pod"),
        id=folder.name,
        folder=folder,
        effective=_effective(folder),
        processes={pid: frozenset(psutil.Process(pid).cpu_affinity()) for pid in pids},
        threads={int(task.name): _allowed(task) for task in tasks},
    )


def _allowed(task: Path) -> Cpus:
    """Raises OSError when it has ended."""
    for line in (task / "status").read_text().splitlines():
        if line.startswith("Cpus_allowed_list:"):
            return parse(line.partition(":")[2])
    raise ProcessLookupError(f"{task} has ended")


def of_process(pid: int) -> Cpus | None:
    """None once it has ended."""
    try:
        return frozenset(psutil.Process(pid).cpu_affinity())
    except psutil.NoSuchProcess:
        return None


def find_wrong(own: Mapping[str, Cpus], pool: Cpus) -> list[str]:
    """A sentence for each container whose processes may run elsewhere than they should: on `own` by
    the container's id, together with the sandbox of their pod, all others on `pool`."""
    containers = read_containers()
    pods = {container.pod: own[container.id] for container in containers if container.id in own}
    wrong = [f"{id_} is not there" for id_ in own if id_ not in {one.id for one in containers}]
    for container in containers:
        want = pods.get(container.pod, pool)
        seen = {container.effective, *container.processes.values(), *container.threads.values()}
        if seen != {want}:
            has = " and ".join(show(cpus) for cpus in seen)
            wrong.append(f"{container.folder} has {has}, not {show(want)}")
    return wrong
