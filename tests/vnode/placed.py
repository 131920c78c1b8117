"""Where pods are, as they see it themselves and as their cgroups say."""

from dataclasses import dataclass
from typing import Any

from agent.fakes.node import kernel_list
from tests.e2e import cpus
from tests.e2e.cpus import ALL, Cpus
from tests.e2e.image import WAIT
from tests.e2e.kubelet import Pod
from tests.e2e.pinning import LISTS, PIN, container_id
from tests.e2e.rig import Rig

_SPEC = "scheduling.alibabacloud.com/numa-topology-spec"

_END = "that is all"
SHOW = LISTS.replace(WAIT, f"env; ls /dev; echo {_END}; {WAIT}")
"""A shell script that reads its status before anything else, then its environment and devices."""


def policy(name: str, exclusive: str = "Required") -> dict[str, str]:
    """The annotations of a pod that is to be pinned by this policy."""
    words = f'{{"numaTopologyPolicy": "{name}", "singleNUMANodeExclusive": "{exclusive}"}}'
    return PIN | {_SPEC: words}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """CPUs, nodes of memory, and GPUs by index; `str` of it is for people."""

    cpus: Cpus
    mems: frozenset[int]
    gpus: frozenset[int]

    def __str__(self) -> str:
        words = (
            f"{what} {kernel_list(list(ids))}"
            for what, ids in (("CPUs", self.cpus), ("memory", self.mems), ("GPUs", self.gpus))
            if ids
        )
        return ", ".join(words)


def place(own: str, mems: str, gpus: str = "") -> Place:
    """From lists as the kernel writes them."""
    return Place(cpus=cpus.parse(own), mems=cpus.parse(mems), gpus=cpus.parse(gpus))


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A running pod; `place` is as it saw it itself, at its first instruction."""

    pod: Pod
    place: Place


def run(rig: Rig, name: str, **how: Any) -> Placed:
    """A pod as `make_pod` makes it; its program must begin as SHOW does."""
    (pod,) = rig.run_pods(name, **({"program": SHOW} | how))
    return Placed(pod=pod, place=where(rig, pod))


def run_shared(rig: Rig) -> list[Pod]:
    """A pod of each class that asks for no CPUs of its own."""
    how: dict[str, dict[str, Any]] = {
        "best-effort": {},
        "burstable": {"request": "100m"},
        "guaranteed": {"cpu": "2"},
    }
    return rig.wait_until_running([rig.kubelet.add_pod(name, **how[name]) for name in how])


def where(rig: Rig, pod: Pod) -> Place:
    """As the pod saw it, and has it still: its device nodes and environment must name the same
    GPUs, and its cgroup the same CPUs and memory."""
    rig.wait(lambda: _END in rig.kubelet.output(pod.name), f"{pod.name} shows where it is")
    lines = rig.kubelet.output(pod.name).splitlines()
    lists = dict(line.split(":\t") for line in lines if "_allowed_list:" in line)
    gpus = ",".join(_numbers(lines, "nvidia"))
    inside = place(lists["Cpus_allowed_list"], lists["Mems_allowed_list"], gpus)
    uuids = {gpu.uuid: i for i, gpu in enumerate(rig.machine.facts.gpus)}
    named = [line.partition("=")[2] for line in lines if line.startswith("NVIDIA_VISIBLE_DEVICES=")]
    assert {uuids[word] for line in named for word in line.split(",")} == inside.gpus
    (folder,) = (one for one in cpus.folders() if one.name == container_id(pod))
    for file, ids in (("cpuset.cpus", inside.cpus), ("cpuset.mems", inside.mems)):
        assert cpus.parse((folder / f"{file}.effective").read_text()) == ids
    return inside


def _numbers(lines: list[str], prefix: str) -> list[str]:
    names = (line.removeprefix(prefix) for line in lines if line.startswith(prefix))
    return [name for name in names if name.isdecimal()]


def assert_others_keep_out(rig: Rig, *pinned: Placed) -> None:
    """All processes of the pinned pods are on their CPUs, and everybody else's on the others; new
    pods' too."""
    own = {container_id(one.pod): one.place.cpus for one in pinned}
    pool = ALL.difference(*own.values())

    def right() -> bool:
        return not cpus.find_wrong(own, pool) and cpus.of_classes() == {pool}

    try:
        rig.wait(right, "everybody runs where they should", 10)
    except AssertionError as error:
        raise AssertionError("\n".join([*cpus.find_wrong(own, pool), str(error)])) from None
