"""A GPU server that this machine is not: files, driver and device nodes for the agent."""

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from agent.fakes import node, nvml
from tests import machines

_NULL = os.makedev(1, 3)


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeMachine:
    """`root` is its sysfs, `state` the file that its driver `library` answers from, `dev_dir` its
    device nodes, which all are /dev/null."""

    facts: node.Description
    root: Path
    library: str
    state: Path
    dev_dir: Path

    def nodes_of(self, devices: frozenset[str]) -> frozenset[int]:
        """The NUMA nodes that the GPUs with these UUIDs are on."""
        return frozenset(gpu.node for gpu in self.facts.gpus if gpu.uuid in devices)

    def mend(self) -> None:
        """The driver as it was when the machine was made."""
        nvml.write_state(self.state, node.driver_state(self.facts))


def make_machine(name: str, library: str, folder: Path, *, here: bool = False) -> FakeMachine:
    """The machine of tests/machines/<name>.toml, its files below `folder`.

    `here`: it is this machine, as far as CPUs and memory go, to which the GPUs are added; no file
    tells which NUMA node they are on.
    """
    dev_dir = folder / "dev"
    dev_dir.mkdir(parents=True)
    facts = machines.load(name)
    for device in (*(str(i) for i in range(len(facts.gpus))), "ctl", "-uvm", "-uvm-tools"):
        os.mknod(dev_dir / f"nvidia{device}", stat.S_IFCHR | 0o666, _NULL)
    root = Path("/") if here else _lay_out(facts, folder / "tree", dev_dir)
    machine = FakeMachine(
        facts=facts, root=root, library=library, state=folder / "driver", dev_dir=dev_dir
    )
    machine.mend()
    return machine


def _lay_out(facts: node.Description, folder: Path, dev_dir: Path) -> Path:
    """The agent looks for its host's device nodes below its root, which kubelet does not know."""
    root = node.lay_out(facts, folder)
    shown = root / dev_dir.relative_to("/")
    shown.parent.mkdir(parents=True)
    shown.symlink_to(dev_dir)
    return root
