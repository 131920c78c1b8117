"""A machine from its description: the one source of every fake node.

A description (tests/machines/*.toml) says in a page what a server is: nodes with their CPUs, GPUs
with their place on the PCI bus, the links between them. `lay_out` makes it a sysfs tree;
`driver_state` is what its GPU driver says.
"""

import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.fakes import nvml


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFact:
    """A NUMA node; `cores` are the thread siblings of each core, `socket` None without CPUs."""

    id: int
    socket: int | None
    cores: tuple[tuple[int, ...], ...]
    memory_gib: int
    distances: tuple[int, ...]
    hugepages_2m: int

    @property
    def cpus(self) -> list[int]:
        return sorted(cpu for core in self.cores for cpu in core)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFact:
    """A GPU; `node` is where it is, `sysfs_node` what sysfs says, `path` its way on the bus."""

    bdf: str
    uuid: str
    model: str
    device: str
    memory_gib: int
    node: int
    sysfs_node: int
    path: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """A machine; `links` is its matrix as `nvidia-smi topo -m` prints it, X on the diagonal."""

    name: str
    nodes: tuple[NodeFact, ...]
    gpus: tuple[GpuFact, ...]
    links: tuple[tuple[str, ...], ...]
    nvswitch: bool
    cores_per_l3: int | None

    @property
    def cores(self) -> list[tuple[int, ...]]:
        return sorted(core for node in self.nodes for core in node.cores)


def describe(facts: dict[str, Any], name: str) -> Description:
    gpus = facts.get("gpus", [])
    return Description(
        name=name,
        nodes=tuple(_node(node, facts) for node in facts["nodes"]),
        gpus=tuple(_gpu(i, gpu, facts, name) for i, gpu in enumerate(gpus)),
        links=_links(facts.get("links", "SYS"), len(gpus)),
        nvswitch=facts.get("nvswitch", False),
        cores_per_l3=facts.get("cores_per_l3"),
    )


def _node(node: dict[str, Any], facts: dict[str, Any]) -> NodeFact:
    return NodeFact(
        id=node["id"],
        socket=node.get("socket"),
        cores=tuple(_siblings(node.get("cpus", ""), facts.get("siblings", "ranges"))),
        memory_gib=node["memory_gib"],
        distances=tuple(node["distances"]),
        hugepages_2m=node.get("hugepages_2m", 0),
    )


def _siblings(cpus: str, how: str) -> Iterator[tuple[int, ...]]:
    """`ranges`: the k-th CPUs of the ranges are siblings. `neighbours`: CPUs 2k and 2k+1 are.
    `none`: every CPU is a core."""
    ranges = [
        range(int(first), int(last or first) + 1)
        for first, _, last in (part.partition("-") for part in cpus.split(",") if part)
    ]
    if how == "ranges":
        yield from zip(*ranges, strict=True)
    else:
        flat = [cpu for part in ranges for cpu in part]
        step = 2 if how == "neighbours" else 1
        yield from (tuple(flat[i : i + step]) for i in range(0, len(flat), step))


def _gpu(index: int, gpu: dict[str, Any], facts: dict[str, Any], machine: str) -> GpuFact:
    domain, bus, _ = gpu["bdf"].split(":")
    port = f"{domain}:{bus}:1e.0"
    root = gpu.get("root", f"pci{domain}:{bus}")
    switch = gpu.get("switch")
    return GpuFact(
        bdf=gpu["bdf"],
        uuid=gpu.get("uuid", f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, f'{index}.{machine}')}"),
        model=facts["model"],
        device=facts["device"],
        memory_gib=facts["gpu_memory_gib"],
        node=gpu["node"],
        sysfs_node=gpu.get("sysfs_node", facts.get("sysfs_node", gpu["node"])),
        path=(root, f"{domain}:{switch}:01.0", f"{domain}:{switch}:02.0", port)
        if switch
        else (root, port),
    )


def _links(links: str, gpus: int) -> tuple[tuple[str, ...], ...]:
    rows = [tuple(row.split()) for row in links.strip().splitlines()]
    if len(rows) == 1 and len(rows[0]) == 1:
        pair = rows[0][0]
        return tuple(tuple("X" if i == j else pair for j in range(gpus)) for i in range(gpus))
    return tuple(rows)


# --- the sysfs tree -------------------------------------------------------------------------------


def lay_out(machine: Description, root: Path) -> Path:
    """Writes the machine's files below `root` as the kernel shows them; returns `root`."""
    files = dict(_cpu_files(machine)) | dict(_node_files(machine)) | dict(_pci_files(machine))
    files["etc/hostname"] = machine.name
    for folder in sorted({os.path.dirname(path) for path in files}):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        (root / path).write_text(text + "\n")
    for gpu in machine.gpus:
        link = root / "sys/bus/pci/devices" / gpu.bdf
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to("/".join(("../../../devices", *gpu.path, gpu.bdf)))
    return root


def kernel_list(ids: list[int]) -> str:
    """`0-3,8`, written independently of the code under test."""
    parts: list[list[int]] = []
    for number in sorted(ids):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def _cpu_files(machine: Description) -> Iterator[tuple[str, str]]:
    base = "sys/devices/system/cpu"
    everything = kernel_list([cpu for core in machine.cores for cpu in core])
    yield from ((f"{base}/{name}", everything) for name in ("online", "present", "possible"))
    yield from ((f"{base}/{name}", "") for name in ("offline", "isolated"))
    for socket in sorted({n.socket for n in machine.nodes if n.socket is not None}):
        cores = sorted(c for node in machine.nodes if node.socket == socket for c in node.cores)
        groups = machine.cores_per_l3 or len(cores)
        for i, core in enumerate(cores):
            start = i // groups * groups
            l3 = [cpu for mate in cores[start : start + groups] for cpu in mate]
            for cpu in core:
                folder = f"{base}/cpu{cpu}"
                yield f"{folder}/topology/physical_package_id", str(socket)
                yield f"{folder}/topology/die_id", "0"
                yield f"{folder}/topology/core_id", str(i)
                yield f"{folder}/topology/core_cpus_list", kernel_list(list(core))
                for index, (level, kind, shared) in enumerate(
                    ((1, "Data", core), (1, "Instruction", core), (2, "Unified", core))
                ):
                    yield f"{folder}/cache/index{index}/level", str(level)
                    yield f"{folder}/cache/index{index}/type", kind
                    yield f"{folder}/cache/index{index}/shared_cpu_list", kernel_list(list(shared))
                yield f"{folder}/cache/index3/level", "3"
                yield f"{folder}/cache/index3/type", "Unified"
                yield f"{folder}/cache/index3/shared_cpu_list", kernel_list(l3)


def _node_files(machine: Description) -> Iterator[tuple[str, str]]:
    base = "sys/devices/system/node"
    ids = kernel_list([node.id for node in machine.nodes])
    yield from ((f"{base}/{name}", ids) for name in ("online", "possible"))
    for node in machine.nodes:
        folder = f"{base}/node{node.id}"
        kib = node.memory_gib << 20
        yield f"{folder}/cpulist", kernel_list(node.cpus)
        yield f"{folder}/meminfo", f"\nNode {node.id} MemTotal: {kib:>14} kB"
        yield f"{folder}/distance", " ".join(map(str, node.distances))
        huge = f"{folder}/hugepages/hugepages-2048kB/nr_hugepages"
        yield huge, str(node.hugepages_2m)


def _pci_files(machine: Description) -> Iterator[tuple[str, str]]:
    for gpu in machine.gpus:
        folder = "/".join(("sys/devices", *gpu.path, gpu.bdf))
        yield f"{folder}/vendor", "0x10de"
        yield f"{folder}/device", gpu.device
        yield f"{folder}/class", "0x030200"
        yield f"{folder}/numa_node", str(gpu.sysfs_node)


# --- the GPU driver -------------------------------------------------------------------------------


def driver_state(machine: Description, *lines: str) -> str:
    """What the machine's GPU driver answers, for the fake of its library, and `lines` more."""
    cpus_of = {node.id: kernel_list(node.cpus) for node in machine.nodes}
    gpus = [
        nvml.FakeGpu(
            bdf=gpu.bdf,
            uuid=gpu.uuid,
            minor=index,
            memory=gpu.memory_gib << 30,
            memory_nodes=str(gpu.node),
            cpus=cpus_of[gpu.node],
            mig=0,
            name=gpu.model,
        )
        for index, gpu in enumerate(machine.gpus)
    ]
    links = nvml.links(machine.links, [gpu.bdf for gpu in machine.gpus], machine.nvswitch)
    return nvml.format_state(gpus, [*links, *lines])
