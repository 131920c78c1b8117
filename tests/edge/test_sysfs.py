"""The machine below a root: described ones, captured ones, broken ones."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.core.discovery import build_machine
from agent.core.topology import Machine, NodeKind
from agent.edge.sysfs import read_host
from agent.errors import DiscoveryError
from agent.fakes import node
from tests import captured, machines

CPU = "sys/devices/system/cpu"
NODE = "sys/devices/system/node"
PCI = "sys/bus/pci/devices"


def read(root: Path) -> Machine:
    return build_machine(read_host(str(root)), None)


@pytest.fixture
def a800(tmp_path: Path) -> Path:
    return node.lay_out(machines.load("a800x8"), tmp_path / "a800")


@pytest.mark.parametrize("name", machines.names())
def test_a_described_machine_is_read_as_it_is_described(name: str, tmp_path: Path) -> None:
    facts = machines.load(name)
    machine = read(node.lay_out(facts, tmp_path))
    assert machine.name == name
    assert [(n.id, list(n.cpus), n.memory_bytes, n.distances) for n in machine.nodes] == [
        (n.id, n.cpus, n.memory_gib << 30, n.distances) for n in facts.nodes
    ]
    assert [tuple(core.cpus) for core in machine.cores] == facts.cores
    assert {tuple(core.cpus): core.socket for core in machine.cores} == {
        core: n.socket for n in facts.nodes for core in n.cores
    }
    of_gpu = {gpu.bdf: gpu for gpu in facts.gpus}
    assert [gpu.bdf for gpu in machine.gpus] == sorted(of_gpu)
    for gpu in machine.gpus:
        assert gpu.node == (of_gpu[gpu.bdf].sysfs_node if of_gpu[gpu.bdf].sysfs_node >= 0 else None)


# Matrices of PCIe machines, printed by nvidia-smi on the real ones.
@pytest.mark.parametrize("name", ["l20x8-5plus3", "pcie8-pairs", "pcie16-nps4"])
def test_pcie_links_are_read_from_the_bridges_as_nvidia_smi_prints_them(
    name: str, tmp_path: Path
) -> None:
    facts = machines.load(name)
    machine = read(node.lay_out(facts, tmp_path))
    printed = tuple(tuple(str(link or "X") for link in row) for row in machine.links)
    assert printed == facts.links


def test_caches_of_eight_cores_are_told_apart(tmp_path: Path) -> None:
    machine = read(node.lay_out(machines.load("h100x8-384"), tmp_path))
    caches = {core.l3 for core in machine.cores}
    assert caches == set(range(24))
    assert [core.l3 for core in machine.cores[:9]] == [0] * 8 + [1]


def test_nodes_without_cpus_are_told_apart(tmp_path: Path) -> None:
    machine = read(node.lay_out(machines.load("cxl-expander"), tmp_path))
    assert [n.kind for n in machine.nodes] == [
        NodeKind.CPU,
        NodeKind.CPU,
        NodeKind.MEMORY_ONLY,
        NodeKind.DEVICE_ONLY,
    ]
    assert machine.nodes[0].hugepages == ((2 << 20, 1024),)


@pytest.mark.parametrize("name", captured.ARCHIVES)
def test_a_captured_machine_is_read_as_hwloc_reads_it(name: str, tmp_path: Path) -> None:
    root = captured.unpack(name, tmp_path)
    hwloc = captured.ask_hwloc(root)
    machine = read(root)
    assert {n.id for n in machine.nodes} == set(hwloc.cpus)
    assert {n.id: frozenset(n.cpus) for n in machine.cpu_nodes} == {
        n.id: hwloc.cpus[n.id] for n in machine.cpu_nodes
    }
    for n in machine.nodes:
        assert n.memory_bytes == pytest.approx(hwloc.memory[n.id], rel=0.01)
    assert {frozenset(core.cpus) for core in machine.cores} == hwloc.cores


def test_the_capture_with_gpu_memory_nodes_keeps_cpus_off_them(tmp_path: Path) -> None:
    machine = read(captured.unpack("hwloc/nvidiagpunumanodes.tar.bz2", tmp_path))
    kinds = {n.id: n.kind for n in machine.nodes}
    assert kinds == {0: NodeKind.CPU, 8: NodeKind.CPU} | dict.fromkeys(
        range(250, 256), NodeKind.DEVICE_ONLY
    )


def test_the_capture_with_an_offline_node_says_which_cpus_have_no_node(tmp_path: Path) -> None:
    machine = read(captured.unpack("hwloc/offline-cpu0-node0.tar.bz2", tmp_path))
    assert machine.nodes[0].distances == (10,)
    assert machine.warnings == (
        "CPUs 4,6,8,10,12,14,16,18,20 are on no online NUMA node: never given to a pod",
    )


def test_the_capture_of_a_vm_finds_its_tesla_on_the_only_node(tmp_path: Path) -> None:
    machine = read(captured.unpack("ghw/linux-amd64-accel-nvidia.tar.gz", tmp_path))
    assert [(g.bdf, g.model, g.node, g.node_source.value) for g in machine.gpus] == [
        ("0000:06:00.0", "PCI 10de:15f8", 0, "single-node")
    ]


# --- one change to a good tree --------------------------------------------------------------------

Change = Callable[[Path], None]


def writing(path: str, text: str) -> Change:
    def change(root: Path) -> None:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(text.encode())

    return change


def removing(*patterns: str) -> Change:
    def change(root: Path) -> None:
        for pattern in patterns:
            for path in root.glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    return change


def all_of(*changes: Change) -> Change:
    def change(root: Path) -> None:
        for one in changes:
            one(root)

    return change


def masks_only(root: Path) -> None:
    """As old kernels show it: masks where there are lists today."""
    for name in ("core_cpus_list", "shared_cpu_list", "cpulist"):
        for path in root.glob(f"{CPU}/cpu*/**/{name}" if name != "cpulist" else f"{NODE}/*/{name}"):
            bits = sum(1 << cpu for cpu in _cpus(path.read_text()))
            words = [f"{bits >> 32 * i & 0xFFFFFFFF:08x}" for i in reversed(range(4))]
            new = {"core_cpus_list": "thread_siblings", "shared_cpu_list": "shared_cpu_map"}
            path.with_name(new.get(name, "cpumap")).write_text(",".join(words) + "\n")
            path.unlink()


def _cpus(text: str) -> list[int]:
    ends = [part.partition("-") for part in text.strip().split(",")]
    return [cpu for a, _, b in ends for cpu in range(int(a), int(b or a) + 1)]


SAME = {
    "masks instead of lists": masks_only,
    "NUL bytes at the end of lists": all_of(
        writing(f"{NODE}/node0/cpulist", "0-31,64-95\n\0"), writing(f"{CPU}/online", "0-127\0\0")
    ),
    "no newline at the end": writing(f"{NODE}/node0/cpulist", "0-31,64-95"),
    "no list of online CPUs": removing(f"{CPU}/online", f"{CPU}/present"),
    "no list of online nodes": removing(f"{NODE}/online"),
    "no list of possible nodes": removing(f"{NODE}/possible"),
    "sockets the kernel does not number on the second": writing(
        f"{CPU}/cpu0/topology/physical_package_id", "-1"
    ),
    "cpufreq and other folders that begin with cpu": writing(f"{CPU}/cpufreq/boost", "1"),
}


@pytest.mark.parametrize("change", SAME.values(), ids=SAME)
def test_the_same_machine_is_read_with(change: Change, a800: Path) -> None:
    before = read(a800)
    change(a800)
    assert read(a800) == before


def test_a_kernel_without_numa_is_one_node_of_all_cpus(a800: Path) -> None:
    removing(NODE)(a800)
    writing("proc/meminfo", "MemTotal:       1024 kB\nMemFree: 1 kB\n")(a800)
    for gpu in machines.load("a800x8").gpus:
        writing(f"{PCI}/{gpu.bdf}/numa_node", "-1")(a800)
    machine = read(a800)
    assert [(n.id, str(n.cpus), n.memory_bytes) for n in machine.nodes] == [(0, "0-127", 1 << 20)]
    assert {(g.node, g.node_source.value) for g in machine.gpus} == {(0, "single-node")}


def test_cpus_that_are_off_belong_to_nobody(a800: Path) -> None:
    writing(f"{CPU}/online", "0-99")(a800)
    machine = read(a800)
    assert str(machine.offline_cpus) == "100-127"
    assert str(machine.nodes[1].cpus) == "32-63,96-99"
    assert len(machine.cores) == 64


def test_without_a_list_the_cpus_that_say_0_are_off(a800: Path) -> None:
    removing(f"{CPU}/online", f"{CPU}/present")(a800)
    writing(f"{CPU}/cpu127/online", "0\n")(a800)
    assert str(read(a800).cpus) == "0-126"


def test_isolated_cpus_are_told(a800: Path) -> None:
    writing(f"{CPU}/isolated", "2-3\n")(a800)
    assert str(read(a800).isolated_cpus) == "2-3"


def test_cpus_without_topology_count_as_cores_of_their_own(a800: Path) -> None:
    removing(f"{CPU}/cpu[0-9]*/topology", f"{CPU}/cpu[0-9]*/cache")(a800)
    machine = read(a800)
    assert len(machine.cores) == 128
    assert {core.l3 for core in machine.cores} == {None}
    assert machine.warnings == ("CPUs 0-127 do not tell their core: each counts as one",)


def test_dies_are_told_where_a_socket_has_several(a800: Path) -> None:
    for cpu in (*range(16, 32), *range(80, 96)):
        writing(f"{CPU}/cpu{cpu}/topology/die_id", "1")(a800)
    machine = read(a800)
    assert {(core.socket, core.die) for core in machine.cores} == {(0, 0), (0, 1), (1, None)}


def test_a_pci_domain_of_32_bits_is_read(a800: Path) -> None:
    (a800 / PCI / "0000:1a:00.0").rename(a800 / PCI / "10000:1a:00.0")
    assert read(a800).gpus[-1].bdf == "10000:1a:00.0"


def test_devices_that_are_no_nvidia_gpus_are_passed_over(a800: Path) -> None:
    writing(f"{PCI}/0000:1a:00.0/class", "0x020000")(a800)
    writing(f"{PCI}/0000:1f:00.0/vendor", "0x1002")(a800)
    writing(f"{PCI}/0000:44:00.0/class", "0x030000")(a800)
    assert [gpu.bdf[5:7] for gpu in read(a800).gpus] == ["44", "49", "9b", "a0", "c2", "c7"]


WARNINGS = {
    "memory that is not told": (
        writing(f"{NODE}/node0/meminfo", "nothing"),
        f"{NODE}/node0/meminfo: has no line MemTotal",
    ),
    "a distance row of the wrong length": (
        writing(f"{NODE}/node1/distance", "10 20 30"),
        f'{NODE}/node1/distance: "10 20 30" has 3 distances for 2 online nodes',
    ),
    "a distance that is no number": (
        writing(f"{NODE}/node1/distance", "10 near"),
        f'{NODE}/node1/distance: "near" is not a whole number',
    ),
    "a cache shared by others only": (
        writing(f"{CPU}/cpu0/cache/index3/shared_cpu_list", "1-31"),
        f"{CPU}/cpu0/cache/index3: the cache of CPU 0 is shared by CPUs 1-31",
    ),
    "a numa_node that is no number": (
        writing(f"{PCI}/0000:1a:00.0/numa_node", "zero"),
        f'{PCI}/0000:1a:00.0/numa_node: "zero" is not a whole number',
    ),
    "isolated CPUs that are no list": (
        writing(f"{CPU}/isolated", "some"),
        f"{CPU}/isolated: ",
    ),
    "a file that is a folder": (
        all_of(removing(f"{CPU}/isolated"), lambda root: (root / CPU / "isolated").mkdir()),
        f"{CPU}/isolated: cannot be read: Is a directory",
    ),
}


@pytest.mark.parametrize(("change", "sentence"), WARNINGS.values(), ids=WARNINGS)
def test_a_warning_is_all_that_comes_of(change: Change, sentence: str, a800: Path) -> None:
    change(a800)
    machine = read(a800)
    assert any(f"{a800}/{sentence}" in warning for warning in machine.warnings)
    assert len(machine.gpus) == 8


BAD = {
    "no folder sys": (removing("sys"), 'has no folder "sys"'),
    "no online CPU": (writing(f"{CPU}/online", ""), f"{CPU}: shows no online CPU"),
    "no CPUs at all": (removing(f"{CPU}/*"), f"{CPU}: shows no online CPU"),
    "a CPU over 1,023": (
        writing(f"{CPU}/online", "0-1024"),
        f"{CPU}/online: ",
    ),
    "a CPU folder over 1,023": (
        all_of(removing(f"{CPU}/online"), writing(f"{CPU}/cpu1024/online", "1")),
        "id 1024 is over 1023, the largest that numalet handles",
    ),
    "CPUs that are no list": (writing(f"{CPU}/online", "0-"), f"{CPU}/online: "),
    "bytes that are no text": (writing(f"{CPU}/online", "\xff\xfe"), f"{CPU}/online: "),
    "a node that is online, but has no folder": (
        removing(f"{NODE}/node1"),
        f"{NODE}/node1: has neither cpulist nor cpumap",
    ),
    "a truncated CPU list of a node": (
        writing(f"{NODE}/node1/cpulist", "32-63,96-"),
        f"{NODE}/node1/cpulist: ",
    ),
    "a CPU on two nodes": (
        writing(f"{NODE}/node1/cpulist", "31-63,96-127"),
        f"{NODE}/node1: has CPUs 31, which are on node 0 too",
    ),
    "CPUs on no node": (
        writing(f"{NODE}/node1/cpulist", "32-63"),
        f"{NODE}: CPUs 96-127 are online, but on no NUMA node",
    ),
    "a core on two nodes": (
        all_of(
            writing(f"{CPU}/cpu0/topology/core_cpus_list", "0,32"),
            writing(f"{CPU}/cpu32/topology/core_cpus_list", "0,32"),
            writing(f"{CPU}/cpu64/topology/core_cpus_list", "64"),
            writing(f"{CPU}/cpu96/topology/core_cpus_list", "96"),
        ),
        f"{CPU}/cpu0: its core has CPUs 0,32 on several nodes: 0, 1",
    ),
    "siblings that do not agree": (
        writing(f"{CPU}/cpu64/topology/core_cpus_list", "1,64"),
        "those name other siblings",
    ),
    "a core without its own CPU": (
        writing(f"{CPU}/cpu5/topology/core_cpus_list", "6"),
        f"{CPU}/cpu5/topology: its core has CPUs 6, but those name other siblings",
    ),
    "a socket that is no number": (
        writing(f"{CPU}/cpu0/topology/physical_package_id", "left"),
        f'{CPU}/cpu0/topology/physical_package_id: "left" is not a whole number',
    ),
    "a GPU on a node that cannot be": (
        writing(f"{PCI}/0000:1a:00.0/numa_node", "7"),
        f"{PCI}/0000:1a:00.0/numa_node: is 7, but the nodes are 0-1",
    ),
    "a list that is a folder": (
        all_of(removing(f"{CPU}/online"), lambda root: (root / CPU / "online").mkdir()),
        f"{CPU}/online: cannot be read: Is a directory",
    ),
}


@pytest.mark.parametrize(("change", "sentence"), BAD.values(), ids=BAD)
def test_a_tree_is_refused_for(change: Change, sentence: str, a800: Path) -> None:
    change(a800)
    with pytest.raises(DiscoveryError) as caught:
        read(a800)
    assert str(caught.value).startswith(str(a800))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_gpu_on_an_offline_node_is_shown_without_a_node(a800: Path) -> None:
    writing(f"{NODE}/possible", "0-7")(a800)
    writing(f"{PCI}/0000:1a:00.0/numa_node", "7")(a800)
    machine = read(a800)
    assert machine.gpus[0].node is None
    assert "sysfs says NUMA node 7, which has no online CPUs" in machine.warnings[0]


def test_a_pipe_in_place_of_a_file_does_not_hang(a800: Path) -> None:
    (a800 / CPU / "isolated").unlink()
    os.mkfifo(a800 / CPU / "isolated")
    assert str(read(a800).isolated_cpus) == ""


def test_the_name_is_the_hosts_then_the_folders(a800: Path) -> None:
    assert read(a800).name == "a800x8"
    writing("proc/sys/kernel/hostname", "gpu-7\n")(a800)
    assert read(a800).name == "gpu-7"
    removing("proc", "etc")(a800)
    assert read(a800).name == "a800"


def test_this_very_host_is_read() -> None:
    machine = read(Path("/"))
    assert len(machine.cpus) == os.cpu_count()
