"""A node to test on: containerd, kubelet and the agent on a GPU server that is not there."""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tests.e2e import podresources
from tests.e2e.agent import Agent, Option, node_options
from tests.e2e.containerd import Containerd, Release
from tests.e2e.kubelet import PLUGINS, Kubelet, Pod
from tests.e2e.leftovers import claimed_machine
from tests.e2e.machine import FakeMachine, make_machine
from tests.e2e.process import Process, wait_for

T = TypeVar("T")

_REPOSITORY = Path(__file__).parent.parent.parent
LOGS = _REPOSITORY / ".cache/e2e"
"""The logs of the last run."""

MACHINE = "a800x8"

KUBELET_SOCKET = PLUGINS / "kubelet.sock"


def find_binaries() -> dict[str, Path]:
    """The programs by name. Raises RuntimeError with the sentence that says what is missing."""
    build = _REPOSITORY / "hack/e2e/build"
    answer = subprocess.run([build, "--paths"], capture_output=True, text=True)
    if answer.returncode:
        raise RuntimeError(answer.stderr.strip())
    lines = (line.split("\t") for line in answer.stdout.splitlines())
    binaries = {name: Path(path) for name, path in lines}
    if unbuilt := [name for name, path in binaries.items() if not path.exists()]:
        raise RuntimeError(f"{', '.join(unbuilt)} is not built yet: run hack/e2e/build")
    return binaries


@dataclass(frozen=True, slots=True, kw_only=True)
class Rig:
    """What runs, and the questions that tests have. Pods are named as kubelet names them."""

    folder: Path
    library: str
    machine: FakeMachine
    containerd: Containerd
    kubelet: Kubelet
    agent: Agent

    def wait(self, condition: Callable[[], T], what: str, timeout_s: float = 30) -> T:
        watched = [self.agent, self.kubelet, self.containerd]
        return wait_for(condition, what, timeout_s, watched)

    def healthy(self) -> Mapping[str, tuple[int, ...]]:
        """NUMA nodes by device id, of the devices that kubelet would give out."""
        return podresources.healthy_devices(self.kubelet.pod_resources)

    def held(self) -> dict[str, frozenset[str]]:
        """Device ids by pod."""
        return podresources.held_devices(self.kubelet.pod_resources)

    def is_whole(self) -> bool:
        """Every GPU of the machine is healthy in the eyes of kubelet."""
        return set(self.healthy()) == {gpu.uuid for gpu in self.machine.facts.gpus}

    def wait_until_whole(self, timeout_s: float = 30) -> float:
        """How long it took, in seconds."""
        start = time.monotonic()
        self.wait(self.is_whole, "kubelet has all GPUs for healthy", timeout_s)
        return time.monotonic() - start

    def run_pods(self, *names: str, **how: Any) -> list[Pod]:
        """Adds pods, all in the same way, and waits until they run."""
        return self.wait_until_running(self.kubelet.add_pod(name, **how) for name in names)

    def wait_until_running(self, names: Iterable[str]) -> list[Pod]:
        """Pods that were added. Raises AssertionError if kubelet refuses one."""
        added = list(names)

        def running() -> list[Pod]:
            pods = self.kubelet.pods()
            if failed := [pods[name] for name in added if _failed(pods.get(name))]:
                raise AssertionError(f"kubelet refused {failed}")
            ready = [pods[name] for name in added if name in pods and pods[name].ready]
            return ready if len(ready) == len(added) else []

        return self.wait(running, f"{', '.join(added)} run", 60)

    def is_unchanged(self, pods: Sequence[Pod]) -> bool:
        """The pods run in the containers that they ran in."""
        now = self.kubelet.pods()
        return all(now.get(pod.name) == pod for pod in pods)

    def remove_pod(self, pod: Pod) -> None:
        """Takes it away and waits until kubelet has forgotten it."""
        self.kubelet.remove_pod(pod.name)
        self.wait(lambda: pod.name not in self.kubelet.pods(), f"{pod.name} is gone", 60)

    def remove_pods(self) -> None:
        """Takes all pods away and waits until neither kubelet nor containerd has any of them."""
        self.kubelet.remove_pods()

        def gone() -> bool:
            if self.kubelet.pods() or self.held():
                return False
            return not self.containerd.ctr("tasks", "list", "--quiet").split()

        wait_for(gone, "the pods are gone", 60, [self.kubelet, self.containerd])
        self.containerd.end_orphans()

    def revive(self) -> None:
        """Starts what does not run, as after a test that failed halfway."""
        for process in (self.containerd, self.kubelet, self.agent):
            if not process.is_running():
                process.stop()
                process.start()
        self.kubelet.wait_until_healthy()

    def restart_kubelet(self) -> None:
        """SIGKILL, then a new kubelet; returns when it listens for plugins."""
        self.kubelet.kill()
        before = _identity(KUBELET_SOCKET)
        self.kubelet.start()
        self.wait(
            lambda: _identity(KUBELET_SOCKET) not in (None, before),
            "the new kubelet listens for plugins",
            60,
        )


def _failed(pod: Pod | None) -> bool:
    return pod is not None and pod.phase == "Failed"


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        facts = os.stat(path)
    except FileNotFoundError:
        return None
    return facts.st_ino, facts.st_ctime_ns


@contextlib.contextmanager
def running_rig(
    library: str, release: Release = Release.BUILT, *, here: bool = False, **options: Option
) -> Iterator[Rig]:
    """Everything started, and everything stopped and removed at the end, whatever happens.

    `here`: the GPUs are in this machine, whose CPUs the agent may pin; else they are in a server of
    2 NUMA nodes. `options` are the agent's. Pods are the test's to remove: what runs in a container
    when kubelet has ended is an error.

    Raises RuntimeError if something is missing, or the machine is a real node.
    """
    with prepared(release) as folder, rig_in(folder, library, release, options, here=here) as rig:
        yield rig


@contextlib.contextmanager
def prepared(release: Release) -> Iterator[Path]:
    """The private folder of a run, which is removed at the end, with the programs in its bin.

    Raises RuntimeError as `running_rig` does.
    """
    if os.geteuid() != 0:
        raise RuntimeError("the end-to-end tests start a kubelet, and must run as root")
    found = find_binaries()
    with claimed_machine() as folder:
        _gather(found, release, folder / "bin")
        yield folder


@contextlib.contextmanager
def rig_in(
    folder: Path,
    library: str,
    release: Release,
    options: Mapping[str, Option],
    *,
    here: bool = False,
    kubeconfig: Path | None = None,
    logs: str = "",
) -> Iterator[Rig]:
    """As `running_rig`, in a folder that is prepared; `kubeconfig` is kubelet's, `logs` names the
    folder below LOGS, if not after the release."""
    binaries = folder / "bin"
    containerd = Containerd(release, binaries, folder / "containerd")
    kubelet = Kubelet(binaries / "kubelet", folder / "kubelet", containerd.socket, kubeconfig)
    machine = make_machine(MACHINE, library, folder / MACHINE, here=here)
    agent = Agent(
        machine, folder / "agent", node_options(machine, kubelet, containerd) | dict(options)
    )
    rig = Rig(
        folder=folder,
        library=library,
        machine=machine,
        containerd=containerd,
        kubelet=kubelet,
        agent=agent,
    )
    with running(logs or release.name.lower(), containerd, kubelet, agent):
        rig.revive()
        yield rig


@contextlib.contextmanager
def running(logs: str, *processes: Process) -> Iterator[None]:
    """Stops the processes at the end, the last one first, and keeps their logs."""
    with contextlib.ExitStack() as stack:
        stack.callback(_keep_logs, logs, processes)
        for process in processes:
            stack.callback(process.stop)
        yield


def _gather(binaries: Mapping[str, Path], release: Release, folder: Path) -> None:
    """One folder with those of the release under their plain names, as containerd looks for its
    helpers."""
    plain = {name: path for name, path in binaries.items() if "/" not in name}
    ours = {
        name.removeprefix(release): path
        for name, path in binaries.items()
        if release and name.startswith(release)
    }
    folder.mkdir()
    for name, path in (plain | ours).items():
        (folder / name).symlink_to(path)


def _keep_logs(name: str, processes: Sequence[Process]) -> None:
    folder = LOGS / name
    folder.mkdir(parents=True, exist_ok=True)
    for process in processes:
        if process.log.exists():
            shutil.copy(process.log, folder)
