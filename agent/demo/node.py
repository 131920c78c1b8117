"""The embedded node: stand-ins for all that the agent talks to, and the agent as its own process.

Everything lives below one temporary folder and in this process; the agent is started as on a real
node, with its neighbours' sockets and files in its configuration.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import agent
from agent.core.ack import SCHEDULE_LABEL, SCHEDULE_VALUE
from agent.core.bitmap import Bitmap
from agent.core.report import PLURAL
from agent.core.request import GPU_RESOURCE
from agent.core.topology import Machine
from agent.demo import host
from agent.demo.cgroups import Kubepods
from agent.fakes import nvml
from agent.fakes.apiserver import FakeApiServer
from agent.fakes.kubelet import FakeKubelet
from agent.fakes.runtime import FakeRuntime

STARTUP_TAINT: Final = "numalet.io/starting"
PLUGIN: Final = "10-numalet"
"""What the agent is called among the runtime's plugins."""
_PATIENCE_S: Final = 20.0
_LOOK_S: Final = 0.02
_TAIL: Final = 12
"""Lines of the agent's log that are shown when it failed."""


class FailedError(Exception):
    """The demo cannot go on; `log` is the end of what the agent said."""

    def __init__(self, sentence: str, log: Sequence[str] = ()) -> None:
        super().__init__(sentence)
        self.log = log


class Node:
    """A context manager: the node runs inside, without the agent, and nothing of it is left after.

    `command` is what runs the agent; `--config FILE` is added. `on_wait` is called while something
    is waited for.
    """

    def __init__(
        self,
        machine: Machine,
        folder: Path,
        library: Path,
        command: Sequence[str],
        on_wait: Callable[[], None],
    ) -> None:
        self.machine = machine
        self.name = to_node_name(machine.name)
        self.root = folder / "host"
        mems = Bitmap(node.id for node in machine.nodes if node.memory_bytes)
        self.kubepods = Kubepods(root=self.root, cpus=machine.cpus, mems=mems)
        self.kubelet = FakeKubelet(folder / "dp", folder / "pr.sock")
        self.runtime = FakeRuntime(folder / "nri.sock")
        self.api = FakeApiServer()
        self._folder = folder
        self._library = library
        self._command = command
        self._on_wait = on_wait
        self._log = folder / "agent.log"
        self._agent: subprocess.Popen[bytes] | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Node":
        host.lay_out(self.machine, self.root)
        self.kubepods.make_all()
        (self._folder / "faults.json").write_text(json.dumps(host.fault_marks(self.machine)))
        nvml.write_state(self._folder / "driver.txt", host.driver_state(self.machine))
        for part in (self.api, self.kubelet, self.runtime):
            self._stack.enter_context(part)
        self.api.put("nodes", self._node_object())
        self._stack.callback(self.kill_agent)  # before its neighbours, which wait for nothing then
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _node_object(self) -> dict[str, Any]:
        taint = {"key": STARTUP_TAINT, "effect": "NoSchedule"}
        return {
            "metadata": {"name": self.name, "labels": {SCHEDULE_LABEL: SCHEDULE_VALUE}},
            "spec": {"taints": [taint]},
        }

    # --- the agent --------------------------------------------------------------------------------

    def start_agent(self) -> None:
        """In a session of its own, so that Ctrl-C reaches it through us only."""
        config = self._folder / "numalet.toml"
        config.write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in self._options().items()))
        try:
            with self._log.open("ab") as log:
                self._agent = subprocess.Popen(
                    [*self._command, "--config", config],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=Path(agent.__file__).parent.parent,
                    env=os.environ | {nvml.ENVIRONMENT: str(self._folder / "driver.txt")},
                    start_new_session=True,
                )
        except OSError as error:
            raise FailedError(f"the agent cannot be started: {error}") from error

    def _options(self) -> dict[str, object]:
        return {
            "root": str(self.root),
            "nvml": str(self._library),
            "plugin_dir": str(self._folder / "dp"),
            "pod_resources": str(self._folder / "pr.sock"),
            "nri_socket": str(self._folder / "nri.sock"),
            "fault_file": str(self._folder / "faults.json"),
            "kubelet_dir": str(self._folder / "kubelet"),
            "kubelet_config": str(self._folder / "kubelet/config.yaml"),
            "kube_api": self.api.url,
            "service_account_dir": str(self._folder / "account"),
            "node_name": self.name,
            "status_address": "",
            "period_s": 2,  # what no bell rings for should not keep people waiting
        }

    def kill_agent(self) -> None:
        """As kill -9 does; whatever it started goes with it."""
        if self._agent is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._agent.pid, signal.SIGKILL)
            self._agent.wait()
            self._agent = None

    def check_agent(self) -> None:
        """Raises FailedError if it has ended."""
        if self._agent is not None and (code := self._agent.poll()) is not None:
            raise FailedError(f"the agent has ended with exit code {code}", self.log_end())

    def log_end(self) -> list[str]:
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        return lines[-_TAIL:]

    # --- what is seen of it -----------------------------------------------------------------------

    def wait(self, is_met: Callable[[], object], what: str) -> None:
        """Raises FailedError if it does not come true."""
        if not self.comes_true(is_met, _PATIENCE_S):
            raise FailedError(f"not within {_PATIENCE_S:g} s: {what}", self.log_end())

    def comes_true(self, is_met: Callable[[], object], patience_s: float) -> bool:
        """Whether it does so in time. Raises FailedError if the agent ends meanwhile."""
        deadline_s = time.monotonic() + patience_s
        while not is_met():
            self.check_agent()
            if time.monotonic() > deadline_s:
                return False
            self._on_wait()
            time.sleep(_LOOK_S)
        return True

    @property
    def is_asked(self) -> bool:
        """Whether the runtime asks the agent."""
        return self.runtime.plugins == [PLUGIN]

    @property
    def devices(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Kubelet's: health and nodes by UUID."""
        return self.kubelet.devices(GPU_RESOURCE)

    @property
    def report(self) -> dict[str, Any] | None:
        return self.api.get(PLURAL, self.name)

    @property
    def events(self) -> list[dict[str, Any]]:
        """In the order in which they were written."""
        return sorted(
            self.api.all("events"), key=lambda one: int(one["metadata"]["resourceVersion"])
        )


def to_node_name(text: str) -> str:
    """A name that Kubernetes takes for a node, from what a machine calls itself."""
    name = re.sub(r"[^a-z0-9.-]|\.(?=[.-])|-(?=\.)", "-", text.lower())[:63]
    return name.strip("-.") or "node"
