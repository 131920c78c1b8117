"""The two Deployments of ACK's page, and what becomes of them on a node of 8 A800.

Source: ACK's page on NUMA topology-aware scheduling, for the pods. What they should get is worked
out by hand from the rules of placement: without a topology the GPUs of the first node; with one all
on the other node, CPUs as whole cores from the lowest free one on.
"""

from collections.abc import Iterable, Sequence
from typing import Final

from agent.core.bitmap import Bitmap
from agent.demo.node import Node
from agent.demo.play import Played, Stage
from agent.demo.promises import Promise, cpus_of, held_gpus, mems_of

PODS: Final = "ack.yaml"
MACHINE: Final = "a800x8.json"

_POOL: Final = "0-31,44-95,108-127"
_NUMA: Final = ("4-7", "32-43,96-107", "1")


def expect_of_ack(node: Node, pods: Sequence[Played]) -> Iterable[Promise]:
    plain, numa, big = pods
    yield Promise(
        text="tgi asks for no topology: GPUs 0-3, and the 104 CPUs of both nodes that nobody owns",
        check=lambda: _compare(_see(node, plain), ("0-3", "", "")) or _check_pool(node, plain),
    )
    yield Promise(
        text="tgi-numa has GPUs 4-7, 12 whole cores beside them, and memory of node 1 only",
        check=lambda: _compare(_see(node, numa), _NUMA),
    )
    yield Promise(
        text="too-big, which asks for 72 CPUs of one node of 64, does not start",
        check=lambda: _check_big(big),
    )


def expect_nothing(node: Node, pods: Sequence[Played]) -> Iterable[Promise]:
    """Of pods or a machine that a user brings."""
    return ()


def _see(node: Node, played: Played) -> tuple[str, str, str]:
    """GPUs, CPUs and memory nodes of a pod with one container."""
    gpus = Bitmap(gpu.index for gpu in held_gpus(node.machine, played))
    if not played.placed:
        return str(gpus), "", ""
    (one,) = played.placed
    return str(gpus), str(cpus_of(one)), str(mems_of(one))


def _compare(seen: tuple[str, str, str], wanted: tuple[str, str, str]) -> str:
    parts = zip(("GPUs", "CPUs", "memory of node"), seen, wanted, strict=True)
    return ", ".join(f"{what} {is_ or 'none'}" for what, is_, should in parts if is_ != should)


def _check_pool(node: Node, played: Played) -> str:
    if not played.placed:
        return "it does not run"
    pool = str(node.kubepods.cpus_of(played.placed[0].cgroup))
    return "" if pool == _POOL else f"it runs on CPUs {pool}"


def _check_big(played: Played) -> str:
    if played.stage is Stage.NOT_CREATED and "asked 72 CPUs" in played.reason:
        return ""
    return f"it is {played.stage}" + (f": {played.reason}" if played.reason else "")
