"""The virtual node as its tests find it: what is put into it, and what runs on it."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from agent.fakes import nvml
from tests.e2e import cpus
from tests.e2e.agent import Agent, node_options
from tests.e2e.containerd import Containerd, Release
from tests.e2e.kubelet import Kubelet
from tests.e2e.machine import FakeMachine, make_machine
from tests.e2e.process import Process, wait_for
from tests.e2e.rig import Rig, find_binaries

T = TypeVar("T")

MACHINE = os.environ.get("NUMALET_VNODE", "")
"""The description of the virtual node that this is; empty on any other machine."""

MODULES = {"vnode-2x16": "test_two_nodes.py", "vnode-3plus5": "test_four_nodes.py"}
"""The tests of each machine, beside those of all."""

_RESULTS = Path(os.environ.get("NUMALET_VNODE_RESULTS", "/"))

_PATIENCE = 5
"""How much longer everything may take than on a real machine."""

_POLL_S = 0.5

_THREADS = "4"
"""How many threads each Go program runs on: as many as the node has CPUs would wait for each
other, and be emulated."""

_DEVICES = Path("/sys/bus/pci/devices")
_VENDOR, _CLASS = 0x10DE, 0x030200


@dataclass(frozen=True, slots=True, kw_only=True)
class PatientRig(Rig):
    """Waits long, and looks seldom: looking takes time too."""

    def wait(self, condition: Callable[[], T], what: str, timeout_s: float = 30) -> T:
        watched = [self.agent, self.kubelet, self.containerd]
        return wait_for(condition, what, timeout_s * _PATIENCE, watched, _POLL_S)

    def remove_pods(self) -> None:
        self.kubelet.remove_pods()
        self.wait(lambda: not any(cpus.folders()), "no container has a cgroup", 60)
        self.wait(lambda: not self.kubelet.pods() and not self.held(), "the pods are gone", 60)


@contextlib.contextmanager
def running_node(library: str, folder: Path) -> Iterator[PatientRig]:
    """containerd, kubelet and the agent on this node, ready, all files below `folder`."""
    os.environ["GOMAXPROCS"] = _THREADS
    binaries = _gather(folder / "bin")
    machine = make_machine(MACHINE, library, folder / "machine", here=True)
    insert_gpus(machine, folder / "masks")
    containerd = Containerd(Release.BUILT, binaries, folder / "containerd")
    kubelet = Kubelet(binaries / "kubelet", folder / "kubelet", containerd.socket)
    agent = Agent(machine, folder / "agent", node_options(machine, kubelet, containerd))
    rig = PatientRig(
        folder=folder,
        library=library,
        machine=machine,
        containerd=containerd,
        kubelet=kubelet,
        agent=agent,
    )
    with contextlib.ExitStack() as stack:
        for process in (containerd, kubelet, agent):
            stack.callback(_end, process)
            process.start()
        kubelet.wait_until_healthy()
        rig.wait_until_whole()
        yield rig


def _gather(folder: Path) -> Path:
    folder.mkdir()
    for name, path in find_binaries().items():
        if "/" not in name:
            (folder / name).symlink_to(path)
    return folder


def _end(process: Process) -> None:
    """The node ends next, and keeps nothing but what is common to it and its host."""
    process.kill()
    shutil.copy(process.log, _RESULTS)


def insert_gpus(machine: FakeMachine, folder: Path) -> None:
    """Makes what QEMU has in the places of the GPUs look like them, to everybody on the node.

    Vendor, model and class are the GPU's; the address, the way on the bus and the NUMA node are the
    kernel's. The driver knows no NUMA node. Raises OSError if a place is empty.
    """
    folder.mkdir()
    for gpu in machine.facts.gpus:
        device, model = _DEVICES / gpu.bdf, int(gpu.device, 16)
        config = bytearray((device / "config").read_bytes())
        config[0:4] = _VENDOR.to_bytes(2, "little") + model.to_bytes(2, "little")
        config[9:12] = _CLASS.to_bytes(3, "little")
        _mask(device / "config", config, folder)
        _mask(device / "vendor", f"{_VENDOR:#06x}\n".encode(), folder)
        _mask(device / "device", f"{model:#06x}\n".encode(), folder)
        _mask(device / "class", f"{_CLASS:#08x}\n".encode(), folder)
    words = machine.state.read_text().split(" ")
    known = (word for word in words if not word.startswith(("memory_nodes=", "cpus=")))
    nvml.write_state(machine.state, " ".join(known))


def _mask(file: Path, content: bytes, folder: Path) -> None:
    mask = folder / f"{file.parent.name}-{file.name}"
    mask.write_bytes(content)
    subprocess.run(["mount", "--bind", mask, file], check=True)
