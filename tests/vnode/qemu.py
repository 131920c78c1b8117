"""What QEMU is told of a machine: its CPUs, NUMA nodes and GPUs.

Source: QEMU's manual, docs/pcie.txt and docs/pci_expander_bridge.txt.
"""

import sys
from collections.abc import Iterator

from agent.fakes import node
from tests import machines

_LOCAL = 10
"""The distance of a node to itself."""


def arguments(machine: node.Description) -> Iterator[str]:
    """An argument each. The CPUs say that they are Intel's, which have threads. One thread of the
    host emulates all: with one each, CPUs were seen to run an instruction for ever that another
    had replaced (QEMU 7.2).

    Raises ValueError where the description has what QEMU cannot emulate.
    """
    yield from ("-machine", "q35", "-accel", "tcg,thread=single", "-cpu", "max,vendor=GenuineIntel")
    yield from ("-smp", _processors(machine))
    yield from ("-m", f"{sum(one.memory_gib for one in machine.nodes)}G")
    for what in (_numa_node, _distances):
        for one in machine.nodes:
            yield from what(one)
    for one in machine.nodes:
        yield from _gpus(machine, one)


def _processors(machine: node.Description) -> str:
    """QEMU numbers CPUs by socket, core and thread."""
    sockets = sorted({one.socket for one in machine.nodes if one.socket is not None})
    threads = {len(core) for core in machine.cores}
    per_socket = {
        sum(len(one.cores) for one in machine.nodes if one.socket == socket) for socket in sockets
    }
    cpus = [cpu for one in machine.nodes for cpu in one.cpus]
    if len(threads) > 1 or len(per_socket) > 1 or cpus != list(range(len(cpus))):
        raise ValueError("its CPUs are not numbered by socket, core and thread, all alike")
    return f"{len(cpus)},sockets={len(sockets)},cores={per_socket.pop()},threads={threads.pop()}"


def _numa_node(one: node.NodeFact) -> Iterator[str]:
    yield from ("-object", f"memory-backend-ram,id=memory{one.id},size={one.memory_gib}G")
    cpus = f",cpus={one.cpus[0]}-{one.cpus[-1]}" if one.cpus else ""
    yield from ("-numa", f"node,nodeid={one.id},memdev=memory{one.id}{cpus}")


def _distances(one: node.NodeFact) -> Iterator[str]:
    for other, distance in enumerate(one.distances):
        if distance != _LOCAL:
            yield from ("-numa", f"dist,src={one.id},dst={other},val={distance}")


def _gpus(machine: node.Description, one: node.NodeFact) -> Iterator[str]:
    """A root bridge of the node, a port for each GPU, and behind it a device that does nothing."""
    gpus = [(i, gpu) for i, gpu in enumerate(machine.gpus) if gpu.node == one.id]
    if not gpus:
        return
    bus = int(gpus[0][1].path[0].rpartition(":")[2], 16)
    bridge = f"bridge{one.id}"
    yield from ("-device", f"pxb-pcie,id={bridge},bus_nr={bus},numa_node={one.id},bus=pcie.0")
    for slot, (i, _) in enumerate(gpus):
        port = f"pcie-root-port,id=port{i},bus={bridge},addr={slot:x},chassis={i + 1},slot={i + 1}"
        yield from ("-device", port, "-device", f"pci-testdev,id=gpu{i},bus=port{i}")


if __name__ == "__main__":
    name = sys.argv[1]
    try:
        print("\n".join(arguments(machines.load(name))))
    except ValueError as error:
        sys.exit(f"{name} cannot be emulated: {error}")
