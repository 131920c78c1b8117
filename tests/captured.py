"""Real machines captured by others, if they lie beside the repository, and hwloc's view of them."""

import os
import shutil
import subprocess
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

import pytest

MACHINES = Path(__file__).parent.parent.parent / "shared" / "machines"
ARCHIVES = (
    "hwloc/128arm-2pa2n8cluster4co.tar.bz2",
    "hwloc/16amd64-8n2c-cpusets.tar.bz2",
    "hwloc/32amd64-4s2n4c-cgroup2.tar.bz2",
    "hwloc/40intel64-2g2n4c+pcilocality.tar.bz2",
    "hwloc/48amd64-4pa2n6c-sparse.tar.bz2",
    "hwloc/fakeheteromemtiers.tar.bz2",
    "hwloc/fakepcilocalities.tar.bz2",
    "hwloc/memorysidecaches.tar.bz2",
    "hwloc/nvidiagpunumanodes.tar.bz2",
    "hwloc/offline-cpu0-node0.tar.bz2",
    "ghw/linux-amd64-8581cf3a529e5d8b97ea876eade2f60d.tar.gz",
    "ghw/linux-amd64-accel-nvidia.tar.gz",
    "ghw/linux-amd64-offlineCPUs.tar.gz",
    "nri-plugins/snc-2socket-4node-40core.tar.bz2",
)


def captured(name: str) -> Path:
    """The file of that name, or a skip that says what is missing."""
    path = MACHINES / name
    if not path.exists():
        pytest.skip(f"no captured machines beside the repository (shared/machines/{name})")
    return path


def unpack(name: str, folder: Path) -> Path:
    """The root of the captured tree: the folder that has `sys` in it."""
    subprocess.run(["tar", "-xf", captured(name), "-C", folder], check=True)
    for parent, folders, _ in os.walk(folder):
        if "sys" in folders:
            return Path(parent)
    raise AssertionError(f"{name} has no folder sys")


@dataclass(frozen=True, slots=True, kw_only=True)
class HwlocView:
    """What hwloc reads from a tree: node → CPUs, node → bytes, the CPU sets of the cores."""

    cpus: dict[int, frozenset[int]]
    memory: dict[int, int]
    cores: frozenset[frozenset[int]]


def ask_hwloc(root: Path) -> HwlocView:
    """hwloc's reading of the tree, or a skip where hwloc is not installed.

    hwloc hides the nodes that are a GPU's memory unless told otherwise, and gives nodes without
    CPUs the CPUs near them.
    """
    tool = shutil.which("lstopo-no-graphics")
    if not tool:
        pytest.skip("lstopo-no-graphics is missing (Debian package hwloc)")
    environment = os.environ | {
        "HWLOC_FSROOT": str(root),
        "HWLOC_COMPONENTS": "linux,stop",
        "HWLOC_KEEP_NVIDIA_GPU_NUMA_NODES": "1",
    }
    command = [tool, "--disallowed", "--of", "xml"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    topology = ET.fromstring(run.stdout)
    nodes = [o for o in topology.iter("object") if o.get("type") == "NUMANode"]
    kinds = {o.get("type") for o in topology.iter("object")}
    core = "Core" if "Core" in kinds else "PU"
    return HwlocView(
        cpus={int(o.attrib["os_index"]): parse_bitmap(o.attrib["cpuset"]) for o in nodes},
        memory={int(o.attrib["os_index"]): int(o.get("local_memory", 0)) for o in nodes},
        cores=frozenset(
            parse_bitmap(o.attrib["cpuset"])
            for o in topology.iter("object")
            if o.get("type") == core
        ),
    )


def parse_bitmap(text: str) -> frozenset[int]:
    """hwloc's `0x000000ff,,0x1`: 32-bit words, most significant first, empty ones left out."""
    words = [int(word, 16) if word else 0 for word in text.split(",")]
    return frozenset(
        32 * place + bit
        for place, word in enumerate(reversed(words))
        for bit in range(32)
        if word >> bit & 1
    )
