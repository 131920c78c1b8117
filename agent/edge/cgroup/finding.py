"""Where kubelet's groups are, and how they are called.

Source: Kubernetes 1.36, pkg/kubelet/cm: kubepods is made below --cgroup-root. In a name of the
systemd driver a dash divides the levels, so that one in a uid becomes an underscore. Runtimes call
a container's group by the id alone, or `<runtime>-<id>.scope` with the systemd driver; CRI-O writes
its name before the id with both, and gives the process that watches a container a group, too.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from agent.core.pool import Qos
from agent.edge.cgroup.files import list_folders, read_text
from agent.errors import PinError

_SLICE = ".slice"
_SCOPE = ".scope"
_KUBEPODS = "kubepods"
_USUAL_ROOTS: tuple[tuple[str, ...], ...] = ((), ("kubelet",))
"""Source: kubelet's default; kind starts it with --cgroup-root=/kubelet."""
_WATCHER = "conmon"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cgroups:
    """Kubelet's groups on a host. `version` is 1 or 2, `driver` is systemd or cgroupfs.

    `cpuset` and `cpu` are the folders that the two hierarchies are mounted at, on v2 the same.
    `kubepods` is a group's path. `root` is where the host's files are.
    """

    root: str
    version: int
    driver: str
    cpuset: str
    cpu: str
    kubepods: str


def find_cgroups(root: str = "/", cgroup_root: str = "/") -> Cgroups | None:
    """Kubelet's groups below `root`, None as long as kubelet has not made them.

    `cgroup_root` is what kubelet was told with --cgroup-root; where it was told nothing, the usual
    ones are tried. Of several, those count that have pods.

    Raises:
        PinError: the host has no cpusets.
    """
    version, cpuset, cpu = _find_mounts(os.path.join(root, "sys/fs/cgroup"))
    given = tuple(part for part in cgroup_root.split("/") if part)
    found = [
        Cgroups(root=root, version=version, driver=driver, cpuset=cpuset, cpu=cpu, kubepods=path)
        for base in ([given] if given else _USUAL_ROOTS)
        for driver, path in _places((*base, _KUBEPODS))
        if os.path.isdir(os.path.join(cpuset, path))
    ]
    populated = (one for one in found if any(pod_folders(one, qos) for qos in Qos))
    return next(populated, found[0] if found else None)


def _find_mounts(folder: str) -> tuple[int, str, str]:
    """(version, the cpuset hierarchy, the cpu hierarchy). A mount of v2 beside those of v1 has none
    of the controllers that v1 has."""
    unified = os.path.join(folder, "cgroup.controllers")
    if (controllers := read_text(unified)) is not None:
        if "cpuset" not in controllers.split():
            raise PinError(f"{unified}: the kernel has no cpusets for cgroup v2")
        return 2, folder, folder
    mounts = {
        controller: os.path.join(folder, name)
        for name in reversed(list_folders(folder, follow=True))
        for controller in name.split(",")
    }
    if read_text(os.path.join(mounts.get("cpuset", ""), "cpuset.cpus")) is None:
        raise PinError(f"{folder}: neither cgroup v2 nor v1's cpusets are mounted here")
    return 1, mounts["cpuset"], mounts.get("cpu", "")


def _places(parts: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(driver, path) of a group with these names from the top down."""
    yield "systemd", _expand_slice("-".join(part.replace("-", "_") for part in parts))
    yield "cgroupfs", "/".join(parts)


def _expand_slice(name: str) -> str:
    """The path of a slice, its name without ".slice": a-b is a.slice/a-b.slice."""
    parts = name.split("-")
    return "/".join("-".join(parts[: n + 1]) + _SLICE for n in range(len(parts)))


# --- names ----------------------------------------------------------------------------------------


def class_path(cgroups: Cgroups, qos: Qos) -> str:
    """The group in which the pods of a class are."""
    if qos is Qos.GUARANTEED:
        return cgroups.kubepods
    stem = os.path.basename(cgroups.kubepods).removesuffix(_SLICE)
    name = qos.value if cgroups.driver == "cgroupfs" else f"{stem}-{qos}{_SLICE}"
    return f"{cgroups.kubepods}/{name}"


def _pod_prefix(cgroups: Cgroups, above: str) -> str:
    if cgroups.driver == "cgroupfs":
        return "pod"
    return f"{os.path.basename(above).removesuffix(_SLICE)}-pod"


def pod_folders(cgroups: Cgroups, qos: Qos) -> list[tuple[str, str]]:
    """(uid, path) of the pods of a class. Raises PinError if the folder cannot be listed."""
    above = class_path(cgroups, qos)
    prefix = _pod_prefix(cgroups, above)
    names = [
        name
        for name in list_folders(os.path.join(cgroups.cpuset, above))
        if len(name) > len(prefix)
    ]
    return [
        (name[len(prefix) :].removesuffix(_SLICE).replace("_", "-"), f"{above}/{name}")
        for name in names
        if name.startswith(prefix)
    ]


def parse_container(name: str) -> tuple[str, str]:
    """(runtime, id) of a group in a pod's group. What watches a container has all its name for
    id."""
    runtime, _, id_ = name.removesuffix(_SCOPE).rpartition("-")
    return ("", name) if runtime.endswith(_WATCHER) else (runtime, id_)


def find_pod(cgroups: Cgroups, uid: str) -> str | None:
    """The path of the pod's group, None where there is none."""
    for qos in Qos:
        above = class_path(cgroups, qos)
        systemd = cgroups.driver == "systemd"
        name = f"{uid.replace('-', '_')}{_SLICE}" if systemd else uid
        path = f"{above}/{_pod_prefix(cgroups, above)}{name}"
        if "/" not in uid and os.path.isdir(os.path.join(cgroups.cpuset, path)):
            return path
    return None


def find_container(cgroups: Cgroups, uid: str, container: str) -> str | None:
    """The path of the group of a container by its id, None where there is none."""
    pod = find_pod(cgroups, uid)
    if pod is None:
        return None
    for name in list_folders(os.path.join(cgroups.cpuset, pod)):
        if parse_container(name)[1] == container:
            return f"{pod}/{name}"
    return None


def parse_cgroups_path(cgroups: Cgroups, text: str) -> str | None:
    """The path in what the runtime calls a container's group: itself, or `<slice>:<runtime>:<id>`
    with the systemd driver. None where it is none below kubepods.

    Source: the OCI runtime specification, "Cgroups Path", and runc's reading of it.
    """
    path = text.strip("/")
    slice_, *scope = path.split(":")
    if len(scope) == 2 and slice_.endswith(_SLICE):
        runtime, id_ = scope
        name = f"{runtime}-{id_}{_SCOPE}" if runtime else f"{id_}{_SCOPE}"
        path = f"{_expand_slice(slice_.removesuffix(_SLICE))}/{name}"
    below = path.startswith(f"{cgroups.kubepods}/")
    return path if below and not {"", ".", ".."} & set(path.split("/")) else None


def parse_qos(path: str) -> Qos:
    """The class of the pod that a path below kubepods leads to."""
    for part in path.split("/"):
        word = part.removesuffix(_SLICE).rpartition("-")[2]
        if word in (Qos.BURSTABLE, Qos.BESTEFFORT):
            return Qos(word)
    return Qos.GUARANTEED
