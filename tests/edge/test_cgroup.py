"""agent.edge.cgroup on trees of plain files, and on the kernel's own cpusets in a private group.

What kubelet and runtimes call their groups is written out by hand, from their documentation. The
tests on the kernel need root and cpusets that are mounted for writing.
"""

import itertools
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.core.bitmap import Bitmap
from agent.core.pool import (
    ContainerGroup,
    Group,
    GroupPod,
    Groups,
    PodGroup,
    Qos,
    Write,
    find_drift,
    plan_writes,
)
from agent.core.runtime import CpuTime
from agent.edge.cgroup import (
    Cgroups,
    CpusetReading,
    apply_writes,
    find_cgroups,
    find_container,
    find_pod,
    lift_quota,
    parse_cgroups_path,
    parse_qos,
    read_cpu_time,
    read_cpuset,
    read_groups,
    read_tasks,
    write_cpus,
    write_mems,
)
from agent.errors import PinError
from agent.fakes.cgroups import FakeCpusets, RealCpusets, lay_out

UID = "0a1b2c3d-0000-4000-8000-00000000000a"
UID_ = UID.replace("-", "_")
STATIC = "c0ffee00c0ffee00c0ffee00c0ffee00"
"""A static pod's uid has no dashes."""
X, Y, Z = ("a1" * 32, "b2" * 32, "c3" * 32)
FS = "sys/fs/cgroup"
V1, V2 = f"{FS}/cpuset", FS


Host = Callable[[Mapping[str, str], Path], Path]


def cpus(text: str) -> Bitmap:
    return Bitmap.parse_list(text)


def v1(files: Mapping[str, str], root: Path) -> Path:
    """A host with cgroup v1; `files` are below the cpuset hierarchy."""
    own = {"sys/fs/cgroup/cpuset/cpuset.cpus": "0-7\n", "sys/fs/cgroup/cpu,cpuacct/": ""}
    lay_out(root, own | {f"{V1}/{path}": text for path, text in files.items()})
    (root / FS / "cpu").symlink_to("cpu,cpuacct")
    return root


def v2(files: Mapping[str, str], root: Path) -> Path:
    own = {f"{FS}/cgroup.controllers": "cpuset cpu io memory pids\n"}
    return lay_out(root, own | {f"{V2}/{path}": text for path, text in files.items()})


# --- where they are -------------------------------------------------------------------------------


@pytest.mark.parametrize("host", [v1, v2])
@pytest.mark.parametrize(
    ("folders", "cgroup_root", "found"),
    [
        pytest.param(["kubepods.slice"], "/", ("systemd", "kubepods.slice"), id="systemd"),
        pytest.param(["kubepods"], "/", ("cgroupfs", "kubepods"), id="cgroupfs"),
        pytest.param(
            ["kubelet.slice/kubelet-kubepods.slice"],
            "/",
            ("systemd", "kubelet.slice/kubelet-kubepods.slice"),
            id="kind, systemd",
        ),
        pytest.param(["kubelet/kubepods"], "/", ("cgroupfs", "kubelet/kubepods"), id="kind"),
        pytest.param(
            ["a_b.slice/a_b-c.slice/a_b-c-kubepods.slice", "kubepods.slice"],
            "/a-b/c/",
            ("systemd", "a_b.slice/a_b-c.slice/a_b-c-kubepods.slice"),
            id="below a cgroup root with a dash, systemd",
        ),
        pytest.param(
            ["a-b/kubepods"], "a-b", ("cgroupfs", "a-b/kubepods"), id="below a cgroup root"
        ),
        pytest.param(
            ["kubepods.slice/kubepods-burstable.slice", "kubepods/burstable/pod1"],
            "/",
            ("cgroupfs", "kubepods"),
            id="another driver's empty groups were left behind",
        ),
        pytest.param(["kubepods"], "/other", None, id="not below the cgroup root"),
        pytest.param(["system.slice"], "/", None, id="kubelet has not started"),
    ],
)
def test_where_kubelet_has_its_groups(
    host: Host, folders: list[str], cgroup_root: str, found: tuple[str, str] | None, tmp_path: Path
) -> None:
    root = str(host({f"{folder}/": "" for folder in folders}, tmp_path))
    cgroups = find_cgroups(root, cgroup_root)
    assert found == (cgroups and (cgroups.driver, cgroups.kubepods))


def test_hierarchies_of_v1(tmp_path: Path) -> None:
    root = str(v1({"kubepods/": ""}, tmp_path))
    assert find_cgroups(root) == Cgroups(
        root=root,
        version=1,
        driver="cgroupfs",
        cpuset=f"{root}/{FS}/cpuset",
        cpu=f"{root}/{FS}/cpu",
        kubepods="kubepods",
    )


def test_v1_with_a_mount_of_v2_beside_it(tmp_path: Path) -> None:
    v1({"kubepods/": ""}, tmp_path)
    lay_out(tmp_path, {f"{FS}/unified/cgroup.controllers": "", f"{FS}/unified/kubepods.slice/": ""})
    cgroups = find_cgroups(str(tmp_path))
    assert cgroups is not None
    assert (cgroups.version, cgroups.kubepods) == (1, "kubepods")


def test_cpuset_and_cpu_in_one_hierarchy_of_v1(tmp_path: Path) -> None:
    lay_out(tmp_path, {f"{FS}/cpu,cpuset/cpuset.cpus": "0\n", f"{FS}/cpu,cpuset/kubepods/": ""})
    cgroups = find_cgroups(str(tmp_path))
    assert cgroups is not None
    assert cgroups.cpuset == cgroups.cpu == f"{tmp_path}/{FS}/cpu,cpuset"


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        pytest.param({}, "neither cgroup v2 nor v1's cpusets are mounted here", id="nothing"),
        pytest.param(
            {f"{FS}/cpu/": "", f"{FS}/memory/": ""},
            "neither cgroup v2 nor v1's cpusets are mounted here",
            id="v1 without cpusets",
        ),
        pytest.param(
            {f"{FS}/cgroup.controllers": "cpu io memory"},
            "the kernel has no cpusets for cgroup v2",
            id="v2 without cpusets",
        ),
    ],
)
def test_a_host_without_cpusets(files: dict[str, str], reason: str, tmp_path: Path) -> None:
    lay_out(tmp_path, files)
    with pytest.raises(PinError, match=f"{FS}.*: {reason}$"):
        find_cgroups(str(tmp_path))


# --- what they are called -------------------------------------------------------------------------

SYSTEMD = {
    "kubepods.slice/cpuset.cpus": "",
    "kubepods.slice/cpuset.cpus.effective": "0-7",
    "kubepods.slice/kubepods-burstable.slice/cpuset.cpus": "0-3",
    "kubepods.slice/kubepods-besteffort.slice/cpuset.cpus": "0-3\n",
    f"kubepods.slice/kubepods-pod{UID_}.slice/cpuset.cpus": "4-7\n",
    f"kubepods.slice/kubepods-pod{UID_}.slice/cri-containerd-{X}.scope/cpuset.cpus": "4-7\n",
    f"kubepods.slice/kubepods-pod{UID_}.slice/cri-containerd-{X}.scope/init/cpuset.cpus": "4\n",
    f"kubepods.slice/kubepods-pod{UID_}.slice/docker-{Y}.scope/cpuset.cpus": "\n",
    f"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{STATIC}.slice/cpuset.cpus": "",
    f"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{STATIC}.slice/"
    f"crio-{Z}.scope/cpuset.cpus": "1\n",
    f"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{STATIC}.slice/"
    f"crio-conmon-{Z}.scope/cpuset.cpus": "\n",
    "kubepods.slice/other.slice/cpuset.cpus": "",
}
CGROUPFS = {
    "kubepods/cpuset.cpus": "0-7\n",
    "kubepods/burstable/cpuset.cpus": "0-3\n",
    "kubepods/besteffort/cpuset.cpus": "0-3\n",
    f"kubepods/pod{UID}/cpuset.cpus": "4-7\n",
    f"kubepods/pod{UID}/{X}/cpuset.cpus": "4-7\n",
    f"kubepods/pod{UID}/{X}/init/cpuset.cpus": "4\n",
    f"kubepods/pod{UID}/{Y}/cpuset.cpus": "4\n",
    f"kubepods/burstable/pod{STATIC}/cpuset.cpus": "0-3\n",
    f"kubepods/burstable/pod{STATIC}/crio-{Z}/cpuset.cpus": "1\n",
}


def test_groups_of_the_systemd_driver(tmp_path: Path) -> None:
    pod = f"kubepods.slice/kubepods-pod{UID_}.slice"
    burstable = "kubepods.slice/kubepods-burstable.slice"
    static = f"{burstable}/kubepods-burstable-pod{STATIC}.slice"
    assert read_groups(found(v2(SYSTEMD, tmp_path))) == Groups(
        version=2,
        path="kubepods.slice",
        cpus=cpus("0-7"),
        classes={
            Qos.BURSTABLE: Group(path=burstable, cpus=cpus("0-3")),
            Qos.BESTEFFORT: Group(
                path="kubepods.slice/kubepods-besteffort.slice", cpus=cpus("0-3")
            ),
        },
        pods=(
            PodGroup(
                path=pod,
                cpus=cpus("4-7"),
                uid=UID,
                qos=Qos.GUARANTEED,
                containers=(
                    container(f"{pod}/cri-containerd-{X}.scope", "4-7", X, "cri-containerd"),
                    container(f"{pod}/docker-{Y}.scope", "", Y, "docker"),
                ),
            ),
            PodGroup(
                path=static,
                cpus=cpus(""),
                uid=STATIC,
                qos=Qos.BURSTABLE,
                containers=(
                    container(f"{static}/crio-{Z}.scope", "1", Z, "crio"),
                    container(f"{static}/crio-conmon-{Z}.scope", "", f"crio-conmon-{Z}.scope", ""),
                ),
            ),
        ),
    )


def test_groups_of_the_cgroupfs_driver(tmp_path: Path) -> None:
    pod = f"kubepods/pod{UID}"
    static = f"kubepods/burstable/pod{STATIC}"
    assert read_groups(found(v1(CGROUPFS, tmp_path))) == Groups(
        version=1,
        path="kubepods",
        cpus=cpus("0-7"),
        classes={
            Qos.BURSTABLE: Group(path="kubepods/burstable", cpus=cpus("0-3")),
            Qos.BESTEFFORT: Group(path="kubepods/besteffort", cpus=cpus("0-3")),
        },
        pods=(
            PodGroup(
                path=pod,
                cpus=cpus("4-7"),
                uid=UID,
                qos=Qos.GUARANTEED,
                containers=(
                    container(f"{pod}/{X}", "4-7", X, ""),
                    container(f"{pod}/{Y}", "4", Y, ""),
                ),
            ),
            PodGroup(
                path=static,
                cpus=cpus("0-3"),
                uid=STATIC,
                qos=Qos.BURSTABLE,
                containers=(container(f"{static}/crio-{Z}", "1", Z, "crio"),),
            ),
        ),
    )


def found(root: Path, cgroup_root: str = "/") -> Cgroups:
    cgroups = find_cgroups(str(root), cgroup_root)
    assert cgroups is not None
    return cgroups


def container(path: str, set_: str, id_: str, runtime: str) -> ContainerGroup:
    return ContainerGroup(path=path, cpus=cpus(set_), id=id_, runtime=runtime)


def test_groups_below_a_cgroup_root(tmp_path: Path) -> None:
    above = "kubelet.slice/kubelet-kubepods.slice"
    pod = f"{above}/kubelet-kubepods-besteffort.slice/kubelet-kubepods-besteffort-pod{UID_}.slice"
    files = {f"{above}/cpuset.cpus": "", f"{pod}/cpuset.cpus": "2"}
    groups = read_groups(found(v2(files, tmp_path)))
    assert [(one.uid, one.qos, one.path) for one in groups.pods] == [(UID, Qos.BESTEFFORT, pod)]


@pytest.mark.parametrize(
    ("files", "uid", "id_", "path"),
    [
        pytest.param(
            SYSTEMD,
            UID,
            X,
            f"kubepods.slice/kubepods-pod{UID_}.slice/cri-containerd-{X}.scope",
            id="systemd, containerd",
        ),
        pytest.param(
            SYSTEMD,
            STATIC,
            Z,
            "kubepods.slice/kubepods-burstable.slice/"
            f"kubepods-burstable-pod{STATIC}.slice/crio-{Z}.scope",
            id="systemd, CRI-O, not its watcher",
        ),
        pytest.param(CGROUPFS, UID, Y, f"kubepods/pod{UID}/{Y}", id="cgroupfs, containerd"),
        pytest.param(
            CGROUPFS, STATIC, Z, f"kubepods/burstable/pod{STATIC}/crio-{Z}", id="cgroupfs, CRI-O"
        ),
        pytest.param(CGROUPFS, STATIC, X, None, id="a container of another pod"),
        pytest.param(CGROUPFS, "other", X, None, id="another pod"),
        pytest.param(CGROUPFS, "../burstable", "podx", None, id="no uid"),
    ],
)
def test_one_container(
    files: dict[str, str], uid: str, id_: str, path: str | None, tmp_path: Path
) -> None:
    cgroups = found(v2(files, tmp_path))
    assert find_container(cgroups, uid, id_) == path
    if path:
        assert find_pod(cgroups, uid) == os.path.dirname(path)


@pytest.mark.parametrize(
    ("files", "text", "path"),
    [
        pytest.param(
            SYSTEMD,
            f"kubepods-burstable-pod{UID_}.slice:cri-containerd:{X}",
            "kubepods.slice/kubepods-burstable.slice/"
            f"kubepods-burstable-pod{UID_}.slice/cri-containerd-{X}.scope",
            id="systemd",
        ),
        pytest.param(
            SYSTEMD,
            f"kubepods-pod{UID_}.slice:crio:{X}",
            f"kubepods.slice/kubepods-pod{UID_}.slice/crio-{X}.scope",
            id="systemd, Guaranteed",
        ),
        pytest.param(
            SYSTEMD, f"system.slice:docker:{X}", None, id="systemd, not of kubelet"
        ),
        pytest.param(SYSTEMD, f"kubepods-pod{UID_}.slice:../..:{X}", None, id="systemd, a way out"),
        pytest.param(
            CGROUPFS, f"/kubepods/besteffort/pod{UID}/{X}", f"kubepods/besteffort/pod{UID}/{X}",
            id="cgroupfs",
        ),
        pytest.param(CGROUPFS, f"/system/{X}", None, id="cgroupfs, not of kubelet"),
        pytest.param(CGROUPFS, f"/kubepods/../system/{X}", None, id="cgroupfs, a way out"),
        pytest.param(CGROUPFS, "/kubepods//x", None, id="cgroupfs, a name is missing"),
        pytest.param(CGROUPFS, "", None, id="nothing"),
    ],
)  # fmt: skip
def test_what_a_runtime_calls_a_group(
    files: dict[str, str], text: str, path: str | None, tmp_path: Path
) -> None:
    assert parse_cgroups_path(found(v2(files, tmp_path)), text) == path


@pytest.mark.parametrize(
    ("path", "qos"),
    [
        (f"kubepods/pod{UID}/{X}", Qos.GUARANTEED),
        (f"kubepods/burstable/pod{UID}", Qos.BURSTABLE),
        (f"kubepods/besteffort/pod{UID}/{X}", Qos.BESTEFFORT),
        (f"kubepods.slice/kubepods-pod{UID_}.slice", Qos.GUARANTEED),
        (f"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UID_}.slice/x.scope",
         Qos.BURSTABLE),
        (f"kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/"
         f"kubelet-kubepods-besteffort-pod{UID_}.slice", Qos.BESTEFFORT),
    ],
)  # fmt: skip
def test_the_class_that_a_path_tells(path: str, qos: Qos) -> None:
    assert parse_qos(path) is qos


# --- what they have -------------------------------------------------------------------------------


def test_groups_that_cannot_be_read_do_not_keep_others_from_it(tmp_path: Path) -> None:
    cgroups = found(v1(CGROUPFS, tmp_path))
    (tmp_path / V1 / "kubepods/besteffort/cpuset.cpus").write_text("all\n")
    (tmp_path / V1 / f"kubepods/pod{UID}/{X}/cpuset.cpus").write_text("0-4000\n")
    blocked = tmp_path / V1 / f"kubepods/burstable/pod{STATIC}/cpuset.cpus"
    blocked.unlink()
    blocked.mkdir()
    groups = read_groups(cgroups)
    assert list(groups.classes) == [Qos.BURSTABLE]
    assert [(pod.uid, [one.id for one in pod.containers]) for pod in groups.pods] == [(UID, [Y])]
    assert sorted(sentence.partition("kubepods/")[2] for sentence in groups.unread) == [
        'besteffort/cpuset.cpus: "all" is no list of ids: "all" is neither a number nor a range',
        f"burstable/pod{STATIC}/cpuset.cpus: cannot be read: Is a directory",
        f'pod{UID}/{X}/cpuset.cpus: "0-4000" is no list of ids: id 4000 is over 1023, the largest '
        "that numalet handles",
    ]


def test_a_class_that_cannot_be_listed(tmp_path: Path) -> None:
    cgroups = found(v1(CGROUPFS, tmp_path))
    shutil.rmtree(tmp_path / V1 / "kubepods/burstable")
    (tmp_path / V1 / "kubepods/burstable").symlink_to("burstable")
    groups = read_groups(cgroups)
    assert [pod.uid for pod in groups.pods] == [UID]
    assert sorted(sentence.partition("kubepods/")[2] for sentence in groups.unread) == [
        "burstable/cpuset.cpus: cannot be read: Too many levels of symbolic links",
        "burstable: cannot be listed: Too many levels of symbolic links",
    ]


def test_kubepods_is_gone_when_it_is_read(tmp_path: Path) -> None:
    cgroups = replace(found(v1(CGROUPFS, tmp_path)), kubepods="gone")
    with pytest.raises(PinError, match=f"{V1}/gone: there is no such cgroup$"):
        read_groups(cgroups)


def test_before_kubelet_has_made_the_classes(tmp_path: Path) -> None:
    groups = read_groups(found(v1({"kubepods/cpuset.cpus": "0-7"}, tmp_path)))
    assert (groups.classes, groups.pods, groups.unread) == ({}, (), ())


@pytest.mark.parametrize(
    ("host", "files", "reading"),
    [
        pytest.param(
            v2,
            {"cpuset.cpus": "1\n", "cpuset.cpus.effective": "1\n", "cpuset.mems": "\n",
             "cpuset.mems.effective": "0-1\n"},
            ("1", "", "1", "0-1"),
            id="v2",
        ),
        pytest.param(
            v2, {"cgroup.procs": ""}, ("", "", "0-7", "0"), id="v2, cpusets are not enabled here"
        ),
        pytest.param(
            v1,
            {"cpuset.cpus": "0-1\n", "cpuset.effective_cpus": "1\n", "cpuset.mems": "0-1\n",
             "cpuset.effective_mems": "1\n"},
            ("0-1", "0-1", "1", "1"),
            id="v1",
        ),
        pytest.param(
            v1, {"cpuset.cpus": "0-1\n", "cpuset.mems": "1\n"}, ("0-1", "1", "0-1", "1"),
            id="v1 of an old kernel",
        ),
    ],
)  # fmt: skip
def test_the_cpuset_of_one_group(
    host: Host, files: dict[str, str], reading: tuple[str, ...], tmp_path: Path
) -> None:
    top = {"kubepods/cpuset.cpus.effective": "0-7\n", "kubepods/cpuset.mems.effective": "0\n"}
    below = {f"kubepods/pod1/{name}": text for name, text in files.items()}
    own, mems, effective, effective_mems = map(cpus, reading)
    assert read_cpuset(found(host(top | below, tmp_path)), "kubepods/pod1") == CpusetReading(
        cpus=own, mems=mems, effective_cpus=effective, effective_mems=effective_mems
    )


@pytest.mark.parametrize(
    ("files", "time"),
    [
        pytest.param(
            {
                "cpu.shares": "4096\n",
                "cpu.cfs_quota_us": "400000\n",
                "cpu.cfs_period_us": "100000\n",
            },
            CpuTime(shares=4096, quota_us=400000, period_us=100000),
            id="four CPUs",
        ),
        pytest.param(
            {"cpu.shares": "2\n", "cpu.cfs_quota_us": "-1\n", "cpu.cfs_period_us": "100000\n"},
            CpuTime(shares=2, quota_us=-1, period_us=100000),
            id="no limit",
        ),
        pytest.param({"tasks": ""}, CpuTime(), id="no files"),
    ],
)
def test_cpu_time_of_v1(files: dict[str, str], time: CpuTime, tmp_path: Path) -> None:
    cgroups = found(v1({"kubepods/pod1/": ""}, tmp_path))
    lay_out(tmp_path / FS / "cpu", {f"kubepods/pod1/{name}": text for name, text in files.items()})
    assert read_cpu_time(cgroups, "kubepods/pod1") == time


# Weights as published: runc's own examples for 1024, 2 and 262144 shares, and kubelet's for 1024;
# the others from the two formulas with exact numbers.
@pytest.mark.parametrize(
    ("weight", "shares"),
    [
        pytest.param(39, 1024, id="one CPU, the old way"),
        pytest.param(100, 1024, id="one CPU, the new way"),
        pytest.param(79, 2048, id="two CPUs, the old way"),
        pytest.param(174, 2048, id="two CPUs, the new way"),
        pytest.param(2500, 65536, id="64 CPUs, the old way"),
        pytest.param(3023, 65536, id="64 CPUs, the new way"),
        pytest.param(10000, 262144, id="256 CPUs, both ways"),
        pytest.param(1, None, id="no request"),
        pytest.param(59, None, id="one and a half, the old way"),
        pytest.param(586, None, id="15 CPUs the old way, 9 the new way"),
    ],
)
def test_the_weight_of_v2(weight: int, shares: int | None, tmp_path: Path) -> None:
    files = {"cpu.weight": f"{weight}\n", "cpu.max": "200000 100000\n"}
    root = v2({f"kubepods/pod1/{name}": text for name, text in files.items()}, tmp_path)
    time = CpuTime(shares=shares, quota_us=200000, period_us=100000)
    assert read_cpu_time(found(root), "kubepods/pod1") == time


def test_no_limit_and_no_weight_on_v2(tmp_path: Path) -> None:
    root = v2({"kubepods/cpu.max": "max 100000\n"}, tmp_path)
    assert read_cpu_time(found(root), "kubepods") == CpuTime(quota_us=-1, period_us=100000)
    assert read_cpu_time(found(root), "kubepods/gone") == CpuTime()


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        pytest.param("cpu.max", "max", "max is no quota and period", id="a period is missing"),
        pytest.param("cpu.weight", "many", "invalid literal.*", id="no number"),
    ],
)
def test_cpu_time_that_makes_no_sense(name: str, text: str, reason: str, tmp_path: Path) -> None:
    root = v2({f"kubepods/{name}": text}, tmp_path)
    with pytest.raises(PinError, match=f"kubepods/{name}: {reason}$"):
        read_cpu_time(found(root), "kubepods")


# --- writing, on plain files ----------------------------------------------------------------------


def test_only_what_differs_is_written(tmp_path: Path) -> None:
    cgroups = found(v2(SYSTEMD, tmp_path))
    path = "kubepods.slice/kubepods-burstable.slice"
    assert write_cpus(cgroups, path, cpus("0-2,5"))
    assert (tmp_path / V2 / path / "cpuset.cpus").read_text() == "0-2,5\n"
    (tmp_path / V2 / path / "cpuset.cpus").chmod(0o400)
    assert not write_cpus(cgroups, path, cpus("0-2,5"))


def test_an_empty_set_is_never_written(tmp_path: Path) -> None:
    cgroups = found(v2(SYSTEMD, tmp_path))
    for write in (write_cpus, write_mems):
        with pytest.raises(PinError, match=r"an empty set is never written$"):
            write(cgroups, "kubepods.slice", cpus(""))
    assert (tmp_path / V2 / "kubepods.slice/cpuset.cpus").read_text() == ""


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    cgroups = found(v1({"kubepods/cpuset.cpus": "0-7"}, tmp_path))
    (tmp_path / V1 / "kubepods/cpuset.cpus").unlink()
    (tmp_path / V1 / "kubepods/cpuset.cpus").symlink_to("/dev/null")
    with pytest.raises(PinError, match=r'CPUs 1-2 cannot be written: it reads "" afterwards$'):
        write_cpus(cgroups, "kubepods", cpus("1-2"))


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        pytest.param("kubepods/gone", "the group is gone", id="no such group"),
        pytest.param(
            "kubepods/bare", "the kernel has no such file for this group", id="no such file"
        ),
        pytest.param("kubepods/odd", "Is a directory", id="the file is a folder"),
    ],
)
def test_what_cannot_be_written(path: str, reason: str, tmp_path: Path) -> None:
    files = {"kubepods/cpuset.cpus": "0", "kubepods/bare/": "", "kubepods/odd/cpuset.cpus/": ""}
    cgroups = found(v2(files, tmp_path))
    with pytest.raises(PinError, match=f"{path}/cpuset.cpus: .*{reason}$"):
        write_cpus(cgroups, path, cpus("0"))


def test_where_cpusets_are_not_enabled_they_are_on_v2(tmp_path: Path) -> None:
    files = {
        "cgroup.subtree_control": "cpu cpuset\n",
        "kubepods/cgroup.subtree_control": "cpu\n",
        "kubepods/pod1/cgroup.subtree_control": "\n",
        "kubepods/pod1/x/cgroup.subtree_control": "\n",
    }
    cgroups = found(v2(files, tmp_path))
    with pytest.raises(PinError, match="the kernel has no such file for this group"):
        write_cpus(cgroups, "kubepods/pod1/x", cpus("0"))  # as plain files do not follow
    assert {path: (tmp_path / V2 / path).read_text() for path in files} == {
        "cgroup.subtree_control": "cpu cpuset\n",
        "kubepods/cgroup.subtree_control": "+cpuset\n",
        "kubepods/pod1/cgroup.subtree_control": "+cpuset\n",
        "kubepods/pod1/x/cgroup.subtree_control": "\n",
    }


def test_memory_is_told_to_move_on_v1(tmp_path: Path) -> None:
    files = {"kubepods/cpuset.mems": "0-1\n", "kubepods/cpuset.memory_migrate": "0\n"}
    cgroups = found(v1(files, tmp_path))
    assert write_mems(cgroups, "kubepods", cpus("1"))
    assert not write_mems(cgroups, "kubepods", cpus("1"))
    assert (tmp_path / V1 / "kubepods/cpuset.mems").read_text() == "1\n"
    assert (tmp_path / V1 / "kubepods/cpuset.memory_migrate").read_text() == "1\n"


def test_memory_on_v2(tmp_path: Path) -> None:
    cgroups = found(v2({"kubepods/cpuset.mems": "\n"}, tmp_path))
    assert write_mems(cgroups, "kubepods", cpus("0-1"))
    assert (tmp_path / V2 / "kubepods/cpuset.mems").read_text() == "0-1\n"


def test_the_quota_is_lifted(tmp_path: Path) -> None:
    on_v1 = found(v1({"kubepods/": ""}, tmp_path / "v1"))
    on_v2 = found(v2({"kubepods/cpu.max": "200000 50000\n"}, tmp_path / "v2"))
    lay_out(tmp_path / "v1" / FS / "cpu", {"kubepods/cpu.cfs_quota_us": "200000\n"})
    for cgroups in (on_v1, on_v2):
        assert lift_quota(cgroups, "kubepods")
        assert not lift_quota(cgroups, "kubepods")
    assert (tmp_path / "v1" / FS / "cpu/kubepods/cpu.cfs_quota_us").read_text() == "-1\n"
    assert (tmp_path / "v2" / FS / "kubepods/cpu.max").read_text() == "max 50000\n"


def test_one_refused_write_does_not_keep_the_others_back(tmp_path: Path) -> None:
    files = {f"kubepods/{name}/cpuset.cpus": "0-7\n" for name in "ac"}
    cgroups = found(v1(files | {"kubepods/b/cpuset.cpus/": ""}, tmp_path))
    writes = [Write(path=f"kubepods/{name}", cpus=cpus("0")) for name in ("a", "gone", "b", "c")]
    errors = apply_writes(cgroups, writes)
    assert [str(error).partition(FS)[2] for error in errors] == [
        "/cpuset/kubepods/b/cpuset.cpus: cannot be read: Is a directory"
    ]
    assert (tmp_path / V1 / "kubepods/c/cpuset.cpus").read_text() == "0\n"


# --- the kernel itself ----------------------------------------------------------------------------


@pytest.fixture
def kernel() -> Iterator[RealCpusets]:
    try:
        kernel = RealCpusets()
    except OSError as error:
        pytest.skip(f"no cpusets to test on: {error}")
    try:
        if len(kernel.online) < 2:
            pytest.skip("the rules need two CPUs")
        yield kernel
    finally:
        kernel.close()


PATHS = ("a", "a/b", "a/b/c", "a/d", "e")


@settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_the_model_is_the_kernel(kernel: RealCpusets, data: st.DataObject) -> None:
    """The same writes, with the same answers and results."""
    model = FakeCpusets(kernel.version, kernel.online)
    some = st.frozensets(st.sampled_from(sorted(kernel.online)[:3]))
    for path in PATHS:
        kernel.make(path)
        model.make(path)
    try:
        for path, set_ in data.draw(st.lists(st.tuples(st.sampled_from(PATHS), some), max_size=20)):
            assert answer(kernel, path, set_) == answer(model, path, set_)
            for each in PATHS:
                assert kernel.own[each] == model.own[each]
                assert kernel.effective(each) == model.effective(each)
    finally:
        kernel.remove("a")
        kernel.remove("e")


def answer(cpusets: FakeCpusets | RealCpusets, path: str, set_: frozenset[int]) -> int:
    try:
        cpusets.write(path, set_)
    except OSError as error:
        return error.errno or -1
    return 0


class Task:
    """A process in a group."""

    def __init__(self, kernel: RealCpusets, path: str) -> None:
        self.process = subprocess.Popen(["sleep", "600"])
        (kernel.folder / path / "cgroup.procs").write_text(str(self.process.pid))

    def runs_on(self) -> Bitmap:
        return Bitmap(psutil.Process(self.process.pid).cpu_affinity())

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def tasks(kernel: RealCpusets) -> Iterator[list[Task]]:
    tasks: list[Task] = []
    yield tasks
    for task in tasks:
        task.end()


class Node:
    """Kubelet's groups in the kernel's cpusets, as runtimes make them, each with a process."""

    def __init__(self, kernel: RealCpusets, tasks: list[Task]) -> None:
        self.kernel = kernel
        self.tasks = tasks
        self.of: dict[str, Task] = {}
        for path in ("kubepods", "kubepods/burstable", "kubepods/besteffort"):
            self.make(path)
        self.cgroups = found(Path("/"), f"/{kernel.name}")

    def make(self, path: str) -> None:
        """On v1, runtimes copy the CPUs of the group above."""
        self.kernel.make(path)
        if self.kernel.version == 1:
            self.kernel.write(path, self.kernel.own[os.path.dirname(path)])

    def add(self, path: str) -> Task:
        """A container."""
        self.make(path)
        task = Task(self.kernel, path)
        self.tasks.append(task)
        return task

    def name(self, path: str) -> str:
        return f"{self.kernel.name}/{path}"


@pytest.fixture
def node(kernel: RealCpusets, tasks: list[Task]) -> Node:
    return Node(kernel, tasks)


@pytest.fixture
def pin(kernel: RealCpusets) -> Bitmap:
    return Bitmap([max(kernel.online)])


def test_a_pin_and_the_pool_and_back_again(node: Node, pin: Bitmap) -> None:
    online = Bitmap(node.kernel.online)
    pool = online - pin
    for pod in ("kubepods/podg", "kubepods/burstable/podb", "kubepods/podu"):
        node.make(pod)
    pinned, shared, other, unpinned = map(
        node.add,
        ("kubepods/podg/x", "kubepods/burstable/podb/y", "kubepods/podu/z", "kubepods/podu/w"),
    )
    facts = [
        GroupPod(uid="g", qos=Qos.GUARANTEED, containers=frozenset("x"), pinned={"x": pin}),
        GroupPod(uid="b", qos=Qos.BURSTABLE, containers=frozenset("y")),
        GroupPod(uid="u", qos=Qos.GUARANTEED, containers=frozenset("zw")),
    ]
    assert find_drift(read_groups(node.cgroups), facts, online) == {"x": online}
    assert (
        apply_writes(node.cgroups, plan_writes(read_groups(node.cgroups), facts, pool, online))
        == ()
    )
    assert pinned.runs_on() == pin
    assert [task.runs_on() for task in (shared, other, unpinned)] == [pool] * 3
    assert plan_writes(read_groups(node.cgroups), facts, pool, online) == ()
    assert find_drift(read_groups(node.cgroups), facts, online) == {}
    free = [replace(fact, pinned={}) for fact in facts]
    assert (
        apply_writes(node.cgroups, plan_writes(read_groups(node.cgroups), free, online, online))
        == ()
    )
    assert [task.runs_on() for task in node.tasks] == [online] * 4


def test_a_group_that_a_container_made_itself_is_narrowed_with_it(node: Node, pin: Bitmap) -> None:
    for path in ("", "/x", "/x/own", "/x/own/deep", "/x/far"):
        node.make(f"kubepods/podg{path}")
    node.kernel.make("kubepods/podg/x/empty")
    inner = [node.add(f"kubepods/podg/x/{path}/task") for path in ("own/deep", "far")]
    for path in ("far/task", "far"):
        node.kernel.write(f"kubepods/podg/x/{path}", Bitmap(node.kernel.online) - pin)
    assert write_cpus(node.cgroups, node.name("kubepods/podg/x"), pin)
    assert [task.runs_on() for task in inner] == [pin] * 2


def test_cpusets_that_systemd_has_switched_off_on_v2(node: Node, pin: Bitmap) -> None:
    if node.kernel.version == 1:
        pytest.skip("v1 has them always")
    for path in ("kubepods/podg", "kubepods/podg/x"):
        node.make(path)
    task = node.add("kubepods/podg/x/task")
    for path in ("kubepods/podg/x/task", "kubepods/podg/x", "kubepods/podg"):
        (node.kernel.folder / path / "cgroup.subtree_control").write_text("-cpuset")
    path = node.name("kubepods/podg/x/task")
    assert read_cpuset(node.cgroups, path).effective_cpus == Bitmap(node.kernel.online)
    assert write_cpus(node.cgroups, path, pin)
    assert read_cpuset(node.cgroups, path).effective_cpus == task.runs_on() == pin


def test_what_the_kernel_refuses(node: Node, pin: Bitmap) -> None:
    node.make("kubepods/podg")
    file = node.kernel.folder / "kubepods/podg/cpuset.cpus"
    beyond = Bitmap([1023])
    with pytest.raises(PinError) as caught:
        write_cpus(node.cgroups, node.name("kubepods/podg"), beyond)
    assert str(caught.value) == (
        f"{file}: CPUs 1023 cannot be written: the machine has not all of them"
    )
    if node.kernel.version == 1:
        node.kernel.write("kubepods/podg", pin)
        node.kernel.write("kubepods/burstable", pin)
        node.kernel.write("kubepods/besteffort", pin)
        node.kernel.write("kubepods", pin)
        other = Bitmap(node.kernel.online) - pin
        with pytest.raises(PinError) as caught:
            write_cpus(node.cgroups, node.name("kubepods/podg"), other)
        assert str(caught.value) == (
            f"{file}: CPUs {other} cannot be written: the group above has not all of them"
        )


def test_memory_nodes(node: Node) -> None:
    node.add("kubepods/podx")
    before = read_cpuset(node.cgroups, node.name("kubepods/podx"))
    first = Bitmap([before.effective_mems.first()])
    write_mems(node.cgroups, node.name("kubepods/podx"), first)
    after = read_cpuset(node.cgroups, node.name("kubepods/podx"))
    assert (after.mems, after.effective_mems) == (first, first)
    with pytest.raises(PinError, match="memory nodes 1023 cannot be written"):
        write_mems(node.cgroups, node.name("kubepods/podx"), Bitmap([1023]))


def test_threads_and_the_cpus_that_they_may_run_on(node: Node, pin: Bitmap) -> None:
    node.make("kubepods/podg")
    task = node.add("kubepods/podg/x")
    write_cpus(node.cgroups, node.name("kubepods/podg/x"), pin)
    assert read_tasks(node.cgroups, node.name("kubepods/podg")) == {task.process.pid: pin}
    task.end()
    assert read_tasks(node.cgroups, node.name("kubepods/podg")) == {}


def test_groups_come_and_go_while_they_are_read(node: Node) -> None:
    node.make("kubepods/podstays")
    node.make("kubepods/podstays/x")
    ended = threading.Event()

    def churn() -> None:
        for number in itertools.count():
            if ended.is_set():
                return
            node.make(f"kubepods/pod{number % 7}")
            node.make(f"kubepods/pod{number % 7}/x")
            node.kernel.remove(f"kubepods/pod{number % 7}")

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        seen = set()
        for _ in range(300):
            groups = read_groups(node.cgroups)
            assert groups.unread == ()
            assert ["x"] in [
                [one.id for one in pod.containers] for pod in groups.pods if pod.uid == "stays"
            ]
            seen |= {pod.uid for pod in groups.pods}
    finally:
        ended.set()
        thread.join()
    assert "stays" in seen
