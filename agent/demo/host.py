"""A Machine as a host shows it: sysfs, device nodes, and what its GPU driver says.

Source: Documentation/ABI of the Linux kernel, as edge/sysfs.py reads it.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from agent.core.bitmap import Bitmap
from agent.core.topology import Gpu, Machine, NodeKind, NodeSource, union
from agent.demo.showable import has_nvswitch
from agent.fakes import nvml

_CPU: Final = "sys/devices/system/cpu"
_NODE: Final = "sys/devices/system/node"
_TOLD_BY_MEMORY: Final = (NodeSource.SYSFS, NodeSource.NVML_MEMORY)
_TOLD_BY_CPUS: Final = (*_TOLD_BY_MEMORY, NodeSource.NVML_CPU)


def lay_out(machine: Machine, root: Path) -> None:
    """Writes the files of a machine that is showable below `root`."""
    files = dict(_cpu_files(machine)) | dict(_node_files(machine)) | dict(_pci_files(machine))
    files["etc/hostname"] = machine.name
    for folder in sorted({Path(path).parent for path in files}):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for path, text in files.items():
        (root / path).write_text(f"{text}\n")
    _link(root, "sys/bus/pci/devices", {gpu.bdf: f"../../../{_way(gpu)}" for gpu in machine.gpus})
    names = ["nvidiactl", "nvidia-uvm", *(f"nvidia{gpu.minor}" for gpu in machine.gpus)]
    _link(root, "dev", dict.fromkeys(names, "/dev/null"))


def _link(root: Path, folder: str, links: Mapping[str, str]) -> None:
    (root / folder).mkdir(parents=True, exist_ok=True)
    for name, target in links.items():
        (root / folder / name).symlink_to(target)


def _cpu_files(machine: Machine) -> Iterator[tuple[str, str]]:
    yield f"{_CPU}/online", str(machine.cpus)
    yield f"{_CPU}/present", str(machine.cpus | machine.offline_cpus)
    yield f"{_CPU}/isolated", str(machine.isolated_cpus)
    caches = {
        l3: union(core.cpus for core in machine.cores if core.l3 == l3)
        for l3 in {core.l3 for core in machine.cores if core.l3 is not None}
    }
    for core in machine.cores:
        for cpu in core.cpus:
            folder = f"{_CPU}/cpu{cpu}"
            yield f"{folder}/topology/physical_package_id", str(core.socket)
            yield f"{folder}/topology/die_id", str(core.die or 0)
            yield f"{folder}/topology/core_cpus_list", str(core.cpus)
            if core.l3 is not None:
                yield f"{folder}/cache/index3/level", "3"
                yield f"{folder}/cache/index3/type", "Unified"
                yield f"{folder}/cache/index3/shared_cpu_list", str(caches[core.l3])


def _node_files(machine: Machine) -> Iterator[tuple[str, str]]:
    online = Bitmap(node.id for node in machine.nodes)
    homeless = any(core.node is None for core in machine.cores)
    missing = Bitmap([next(i for i in range(len(online) + 1) if i not in online)])
    yield f"{_NODE}/online", str(online)
    yield f"{_NODE}/possible", str(online | missing if homeless else online)
    for node in machine.nodes:
        folder = f"{_NODE}/node{node.id}"
        yield f"{folder}/cpulist", str(node.cpus)
        yield f"{folder}/meminfo", f"Node {node.id} MemTotal: {node.memory_bytes >> 10} kB"
        if node.distances:
            yield f"{folder}/distance", " ".join(map(str, node.distances))
        for size, pages in node.hugepages:
            yield f"{folder}/hugepages/hugepages-{size >> 10}kB/nr_hugepages", str(pages)
        if node.kind is NodeKind.DEVICE_ONLY and node.memory_bytes:
            yield f"proc/driver/nvidia/gpus/node{node.id}/numa_status", f"Node: {node.id}"


def _way(gpu: Gpu) -> str:
    """Where its device is below sys; the links between GPUs are told by the driver."""
    domain, bus, _ = gpu.bdf.split(":")
    return f"devices/pci{domain}:{bus}/{gpu.bdf}"


def _pci_files(machine: Machine) -> Iterator[tuple[str, str]]:
    for gpu in machine.gpus:
        folder = f"sys/{_way(gpu)}"
        yield f"{folder}/vendor", "0x10de"
        yield f"{folder}/device", "0x20f3"
        yield f"{folder}/class", "0x030200"
        yield f"{folder}/numa_node", str(gpu.node if gpu.node_source is NodeSource.SYSFS else -1)


# --- the GPU driver -------------------------------------------------------------------------------


def driver_state(machine: Machine) -> str:
    """What the driver of a machine that is showable answers, for the stand-in of its library."""
    cpus = {node.id: str(node.cpus) for node in machine.nodes}
    gpus = [
        nvml.FakeGpu(
            bdf=gpu.bdf,
            uuid=gpu.uuid,
            minor=gpu.minor,
            memory=gpu.memory_bytes,
            memory_nodes=str(gpu.node) if gpu.node_source in _TOLD_BY_MEMORY else None,
            cpus=cpus[gpu.node or 0] if gpu.node_source in _TOLD_BY_CPUS else None,
            mig=0,
            name=gpu.model,
        )
        for gpu in machine.gpus
    ]
    matrix = [["X" if link is None else str(link) for link in row] for row in machine.links]
    links = nvml.links(matrix, [gpu.bdf for gpu in machine.gpus], has_nvswitch(machine))
    return nvml.format_state(gpus, links)


def fault_marks(machine: Machine) -> Mapping[str, list[str]]:
    """The administrator's file for the GPUs that cannot be given out."""
    return {"uuid": [gpu.uuid for gpu in machine.gpus if gpu.fault and gpu.uuid]}
