"""Where pods are, as they see it themselves and as their cgroups say."""

from collections.abc import Mapping
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


def run(rig: Rig, name: str, **how: Any) -> Pod:
    """A pod that shows where it is; BestEffort by default, as `make_pod` makes it."""
    (pod,) = rig.run_pods(name, **({"program": SHOW} | how))
    return pod


def where(rig: Rig, pod: Pod) -> Place:
    """As seen from inside, at its first instruction. Its device nodes and environment name the same
    GPUs, and its cgroup the same CPUs and memory, or it is an error."""
    rig.wait(lambda: _END in rig.kubelet.output(pod.name), f"{pod.name} shows where it is")
    lines = rig.kubelet.output(pod.name).splitlines()
    lists = dict(line.split(":\t") for line in lines if "_allowed_list:" in line)
    inside = place(
        lists["Cpus_allowed_list"],
        lists["Mems_allowed_list"],
        ",".join(_numbers(lines, "nvidia")),
    )
    uuids = {gpu.uuid: i for i, gpu in enumerate(rig.machine.facts.gpus)}
    named = [line.partition("=")[2] for line in lines if line.startswith("NVIDIA_VISIBLE_DEVICES=")]
    assert {uuids[word] for line in named for word in line.split(",")} == inside.gpus
    (container,) = (one for one in cpus.read_containers() if one.id == container_id(pod))
    assert container.effective == inside.cpus
    assert cpus.parse((container.folder / "cpuset.mems.effective").read_text()) == inside.mems
    return inside


def _numbers(lines: list[str], prefix: str) -> list[str]:
    names = (line.removeprefix(prefix) for line in lines if line.startswith(prefix))
    return [name for name in names if name.isdecimal()]


def assert_others_keep_out(rig: Rig, pinned: Mapping[str, Cpus]) -> None:
    """`pinned` are the CPUs that pods have for their own, by container: all their processes run on
    them, everybody else's on the others; new pods too."""
    pool = ALL.difference(*pinned.values())

    def right() -> bool:
        return not cpus.find_wrong(pinned, pool) and cpus.of_classes() == {pool}

    try:
        rig.wait(right, "everybody runs where they should", 10)
    except AssertionError as error:
        raise AssertionError("\n".join([*cpus.find_wrong(pinned, pool), str(error)])) from None


def own(*pods: tuple[Pod, Place]) -> dict[str, Cpus]:
    return {container_id(pod): its.cpus for pod, its in pods}
