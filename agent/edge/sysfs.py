"""The host as the kernel's files below one root tell it (`/`, a container's mount, a capture).

What placement stands on (CPU lists, cores, sockets) must be readable and agree, or the tree is
refused with the path in the sentence. What only adds to it (memory, distances, caches, one PCI
device) costs a warning.

Source: Documentation/ABI/stable/sysfs-devices-node, testing/sysfs-devices-system-cpu and
testing/sysfs-bus-pci of the Linux kernel.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeVar

from agent.core.bitmap import Bitmap
from agent.core.discovery import Host, PciGpu
from agent.core.topology import EMPTY, Core, NodeKind, NumaNode, union
from agent.errors import DiscoveryError

_T = TypeVar("_T")
_CPU = "sys/devices/system/cpu"
_NODE = "sys/devices/system/node"
_PCI = "sys/bus/pci/devices"
_NVIDIA = "0x10de"
_GPU_CLASSES = ("0x0300", "0x0302")
"""VGA and 3D controller: base class and sub-class, without the programming interface."""
_HUGEPAGES = re.compile(r"hugepages-(\d{1,12})kB", re.ASCII)


def read_host(root: str) -> Host:
    """All that the files below `root` say. Raises DiscoveryError with path and reason."""
    if not os.path.isdir(os.path.join(root, "sys")):
        raise DiscoveryError(f'{root}: has no folder "sys", so it is not the root of a machine')
    tree = _Tree(root)
    online = _read_online_cpus(tree)
    possible_nodes, nodes = _read_nodes(tree, online)
    present = tree.optional(f"{_CPU}/present", Bitmap.parse_list) or online
    return Host(
        name=_read_name(tree),
        nodes=nodes,
        cores=_read_cores(tree, online, nodes, possible_nodes),
        gpus=_read_gpus(tree, possible_nodes),
        offline_cpus=present - online,
        isolated_cpus=tree.optional(f"{_CPU}/isolated", Bitmap.parse_list) or EMPTY,
        warnings=tuple(tree.warnings),
    )


class _Tree:
    """The files below one root; `warnings` gathers what is wrong with those we can do without."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.warnings: list[str] = []

    def bad(self, path: str, why: str) -> DiscoveryError:
        return DiscoveryError(f"{os.path.join(self.root, path)}: {why}")

    def text(self, path: str) -> str | None:
        """The file's text, None where there is no file. Never waits, not even for a FIFO."""
        try:
            file = os.open(os.path.join(self.root, path), os.O_RDONLY | os.O_NONBLOCK)
            try:
                data = os.read(file, 1 << 20)
            finally:
                os.close(file)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise self.bad(path, f"cannot be read: {error.strerror}") from error
        return data.decode("ascii", "replace").strip("\0 \t\n")

    def parsed(self, path: str, parse: Callable[[str], _T]) -> _T | None:
        """The file's value, None where there is no file; a bad file raises."""
        text = self.text(path)
        try:
            return None if text is None else parse(text)
        except ValueError as error:
            raise self.bad(path, str(error)) from error

    def optional(self, path: str, parse: Callable[[str], _T]) -> _T | None:
        """As `parsed`, but a bad file is a warning and None."""
        try:
            return self.parsed(path, parse)
        except DiscoveryError as error:
            self.warnings.append(str(error))
            return None

    def set(self, *paths: str) -> Bitmap | None:
        """The set in the first of these files that exists: `…list` holds a list, others a mask."""
        for path in paths:
            parse = Bitmap.parse_list if path.endswith("list") else Bitmap.parse_mask
            members = self.parsed(path, parse)
            if members is not None:
                return members
        return None

    def names(self, path: str) -> list[str]:
        """The entries of a folder in order, none where there is no folder."""
        try:
            return sorted(os.listdir(os.path.join(self.root, path)))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise self.bad(path, f"cannot be listed: {error.strerror}") from error

    def numbered(self, path: str, prefix: str) -> Bitmap | None:
        """The N of the entries `<prefix>N` of a folder, None where there are none."""
        numbers = [name[len(prefix) :] for name in self.names(path) if name.startswith(prefix)]
        try:
            return Bitmap(int(n) for n in numbers if n.isascii() and n.isdecimal()) or None
        except ValueError as error:
            raise self.bad(path, str(error)) from error


def _read_name(tree: _Tree) -> str:
    for path in ("proc/sys/kernel/hostname", "etc/hostname"):
        if name := tree.optional(path, str):
            return name
    return os.path.basename(os.path.abspath(tree.root)) or "localhost"


def _read_online_cpus(tree: _Tree) -> Bitmap:
    online = tree.parsed(f"{_CPU}/online", Bitmap.parse_list)
    if online is None:
        folders = tree.numbered(_CPU, "cpu") or EMPTY
        online = Bitmap(cpu for cpu in folders if tree.text(f"{_CPU}/cpu{cpu}/online") != "0")
    if not online:
        raise tree.bad(_CPU, "shows no online CPU")
    return online


# --- NUMA nodes -----------------------------------------------------------------------------------


def _read_nodes(tree: _Tree, online: Bitmap) -> tuple[Bitmap, tuple[NumaNode, ...]]:
    """The nodes that the machine could have, and those that are online.

    A kernel without NUMA has no folder for nodes: it is one node 0 of all CPUs.
    """
    ids = tree.parsed(f"{_NODE}/online", Bitmap.parse_list) or tree.numbered(_NODE, "node")
    if ids is None:
        memory = tree.optional("proc/meminfo", _parse_memory) or 0
        node = NumaNode(id=0, kind=NodeKind.CPU, cpus=online, memory_bytes=memory, distances=(10,))
        return Bitmap([0]), (node,)
    possible = (tree.optional(f"{_NODE}/possible", Bitmap.parse_list) or EMPTY) | ids
    of_devices = _read_device_nodes(tree)
    nodes = tuple(_read_node(tree, id_, online, ids, possible, of_devices) for id_ in ids)
    for node in nodes:
        for other in nodes:
            if node.id < other.id and (both := node.cpus & other.cpus):
                path = f"{_NODE}/node{other.id}"
                raise tree.bad(path, f"has CPUs {both}, which are on node {node.id} too")
    return possible, nodes


def _read_node(
    tree: _Tree, id_: int, online: Bitmap, ids: Bitmap, possible: Bitmap, of_devices: Bitmap
) -> NumaNode:
    folder = f"{_NODE}/node{id_}"
    cpus = tree.set(f"{folder}/cpulist", f"{folder}/cpumap")
    if cpus is None:
        raise tree.bad(folder, "has neither cpulist nor cpumap")
    cpus &= online
    memory = tree.optional(f"{folder}/meminfo", _parse_memory)
    kind = NodeKind.MEMORY_ONLY
    if cpus:
        kind = NodeKind.CPU
    elif not memory or id_ in of_devices:
        kind = NodeKind.DEVICE_ONLY
    row = tree.optional(f"{folder}/distance", lambda text: _parse_distances(text, ids, possible))
    return NumaNode(
        id=id_,
        kind=kind,
        cpus=cpus,
        memory_bytes=memory or 0,
        distances=row or (),
        hugepages=tuple(_read_hugepages(tree, folder)),
    )


def _read_device_nodes(tree: _Tree) -> Bitmap:
    """The nodes that are a GPU's own memory (POWER9, Grace), from the NVIDIA driver's files."""
    folder = "proc/driver/nvidia/gpus"
    paths = [f"{folder}/{bdf}/numa_status" for bdf in tree.names(folder)]
    return union(found for p in paths if (found := tree.optional(p, _parse_numa_status)))


def _read_hugepages(tree: _Tree, folder: str) -> Iterable[tuple[int, int]]:
    """(page size in bytes, pages) of the sizes that have pages, smallest first."""
    sizes = [_HUGEPAGES.fullmatch(name) for name in tree.names(f"{folder}/hugepages")]
    for size_kb in sorted(int(size[1]) for size in sizes if size):
        path = f"{folder}/hugepages/hugepages-{size_kb}kB/nr_hugepages"
        if pages := tree.optional(path, _parse_count):
            yield size_kb * 1024, pages


def _parse_memory(text: str) -> int:
    match = re.search(r"MemTotal:\s*(\d{1,15}) kB", text, re.ASCII)
    if not match:
        raise ValueError("has no line MemTotal")
    return int(match[1]) * 1024


def _parse_numa_status(text: str) -> Bitmap:
    match = re.search(r"^Node:\s*(-?\d+)", text, re.ASCII | re.MULTILINE)
    return Bitmap([int(match[1])] if match and int(match[1]) >= 0 else [])


def _parse_distances(text: str, online: Bitmap, possible: Bitmap) -> tuple[int, ...]:
    """The row for the online nodes. The kernel lists online nodes in ascending order of ids;
    captures exist that list all possible ones."""
    row = tuple(_parse_count(word) for word in text.split())
    if len(row) == len(online):
        return row
    if len(row) == len(possible):
        return tuple(d for id_, d in zip(possible, row, strict=True) if id_ in online)
    raise ValueError(f'"{text[:60]}" has {len(row)} distances for {len(online)} online nodes')


def _parse_count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise ValueError(f'"{text[:60]}" is not a whole number')
    return int(text)


# --- cores ----------------------------------------------------------------------------------------


def _read_cores(
    tree: _Tree, online: Bitmap, nodes: tuple[NumaNode, ...], possible_nodes: Bitmap
) -> tuple[Core, ...]:
    threads = _read_siblings(tree, online)
    sockets = {first: _read_id(tree, first, "physical_package_id") for first in threads}
    dies = {first: _read_id(tree, first, "die_id") for first in threads}
    pairs = set(zip(sockets.values(), dies.values(), strict=True))
    several = {s for s, count in Counter(socket for socket, _ in pairs).items() if count > 1}
    caches = _read_caches(tree, threads)
    node_of = {cpu: node.id for node in nodes for cpu in node.cpus}
    _check_homes(tree, threads, node_of, offline_nodes=len(possible_nodes) > len(nodes))
    return tuple(
        Core(
            id=id_,
            socket=sockets[first],
            die=dies[first] if sockets[first] in several else None,
            node=node_of.get(first),
            l3=caches.get(first),
            cpus=cpus,
        )
        for id_, (first, cpus) in enumerate(threads.items())
    )


def _check_homes(
    tree: _Tree, threads: dict[int, Bitmap], node_of: dict[int, int], offline_nodes: bool
) -> None:
    """Every core is on one node; only where nodes are offline may it be on none."""
    homeless = Bitmap(cpu for cpus in threads.values() for cpu in cpus if cpu not in node_of)
    if homeless and not offline_nodes:
        raise tree.bad(_NODE, f"CPUs {homeless} are online, but on no NUMA node")
    if homeless:
        tree.warnings.append(f"CPUs {homeless} are on no online NUMA node: never given to a pod")
    for first, cpus in threads.items():
        on = {node_of.get(cpu) for cpu in cpus}
        if len(on) > 1:
            among = ", ".join(sorted("none" if node is None else str(node) for node in on))
            why = f"its core has CPUs {cpus} on several nodes: {among}"
            raise tree.bad(f"{_CPU}/cpu{first}", why)


def _read_siblings(tree: _Tree, online: Bitmap) -> dict[int, Bitmap]:
    """The online CPUs of each core by its lowest one, ascending.

    A CPU without a topology folder counts as a core of its own.
    """
    names = ("core_cpus_list", "thread_siblings_list", "core_cpus", "thread_siblings")
    core_of: dict[int, Bitmap] = {}
    alone = []
    for cpu in online:
        folder = f"{_CPU}/cpu{cpu}/topology"
        siblings = tree.set(*(f"{folder}/{name}" for name in names))
        if siblings is None:
            alone.append(cpu)
        core_of[cpu] = (siblings or Bitmap([cpu])) & online
    for cpu, cpus in core_of.items():
        if cpu not in cpus or any(core_of[other] != cpus for other in cpus):
            path = f"{_CPU}/cpu{cpu}/topology"
            raise tree.bad(path, f"its core has CPUs {cpus}, but those name other siblings")
    if alone:
        tree.warnings.append(f"CPUs {Bitmap(alone)} do not tell their core: each counts as one")
    return {cpu: cpus for cpu, cpus in core_of.items() if cpu == cpus.first()}


def _read_id(tree: _Tree, cpu: int, name: str) -> int:
    """A socket or die id; 0 where the kernel does not know it (no file, or -1)."""
    path = f"{_CPU}/cpu{cpu}/topology/{name}"
    return tree.parsed(path, lambda text: 0 if text == "-1" else _parse_count(text)) or 0


def _read_caches(tree: _Tree, firsts: Iterable[int]) -> dict[int, int]:
    """The number of its last-level cache for each core by its lowest CPU, where it is known."""
    cache_of: dict[int, int] = {}
    count = 0
    for cpu in firsts:
        shared = None if cpu in cache_of else _read_last_level(tree, cpu)
        if shared:
            cache_of |= dict.fromkeys(shared, count)
            count += 1
    return cache_of


def _read_last_level(tree: _Tree, cpu: int) -> Bitmap | None:
    """The CPUs that share this CPU's highest data cache."""
    folder = f"{_CPU}/cpu{cpu}/cache"
    try:
        levels = [
            (tree.parsed(f"{folder}/{name}/level", _parse_count) or 0, name)
            for name in tree.names(folder)
            if name.startswith("index") and tree.text(f"{folder}/{name}/type") != "Instruction"
        ]
        path = f"{folder}/{max(levels)[1]}" if levels else folder
        shared = tree.set(f"{path}/shared_cpu_list", f"{path}/shared_cpu_map")
        if shared and cpu not in shared:
            raise tree.bad(path, f"the cache of CPU {cpu} is shared by CPUs {shared}")
    except DiscoveryError as error:
        tree.warnings.append(str(error))
        return None
    return shared


# --- GPUs on the PCI bus --------------------------------------------------------------------------


def _read_gpus(tree: _Tree, possible_nodes: Bitmap) -> tuple[PciGpu, ...]:
    return tuple(
        _read_gpu(tree, bdf, possible_nodes)
        for bdf in tree.names(_PCI)
        if tree.optional(f"{_PCI}/{bdf}/vendor", str) == _NVIDIA
        and (tree.optional(f"{_PCI}/{bdf}/class", str) or "").startswith(_GPU_CLASSES)
    )


def _read_gpu(tree: _Tree, bdf: str, possible_nodes: Bitmap) -> PciGpu:
    path = f"{_PCI}/{bdf}"
    node = tree.optional(f"{path}/numa_node", _parse_node)
    if node is not None and node >= 0 and node not in possible_nodes:
        raise tree.bad(f"{path}/numa_node", f"is {node}, but the nodes are {possible_nodes}")
    device = tree.optional(f"{path}/device", str) or "?"
    return PciGpu(
        bdf=bdf,
        node=None if node is None or node < 0 else node,
        bridges=_read_bridges(tree, path),
        device=f"{_NVIDIA}:{device}".replace("0x", ""),
    )


def _read_bridges(tree: _Tree, path: str) -> tuple[str, ...]:
    """The host bridge (`pci0000:17`) and the bridges below it, from the device's link."""
    try:
        parts = os.readlink(os.path.join(tree.root, path)).split("/")
    except OSError:
        return ()
    host_bridges = [i for i, part in enumerate(parts) if part.startswith("pci")]
    return tuple(parts[host_bridges[-1] : -1]) if host_bridges else ()


def _parse_node(text: str) -> int:
    return -1 if text == "-1" else _parse_count(text)
