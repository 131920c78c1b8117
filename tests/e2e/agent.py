"""The agent under test: `numalet run` before the real kubelet and containerd."""

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from agent.fakes import nvml
from tests.e2e.containerd import Containerd
from tests.e2e.kubelet import PLUGINS, Kubelet
from tests.e2e.machine import FakeMachine
from tests.e2e.process import Process, free_port

_PROGRAM = (sys.executable, "-m", "agent")
COMMAND = (*_PROGRAM, "run")

GPU_RECOVERY_S = 3
"""How long a GPU must be sound before the agent offers it again."""


Option = str | int
"""A value in the agent's configuration."""


def node_options(
    machine: FakeMachine, kubelet: Kubelet, containerd: Containerd
) -> dict[str, Option]:
    """Where the agent finds everything on this node."""
    return {
        "root": str(machine.root),
        "nvml": machine.library,
        "dev_dir": str(machine.dev_dir),
        "plugin_dir": str(PLUGINS),
        "pod_resources": str(kubelet.pod_resources),
        "kubelet_dir": str(kubelet.root_dir),
        "kubelet_config": str(kubelet.config),
        "kubelet_url": kubelet.url,
        "nri_socket": str(containerd.nri_socket),
    }


class Agent(Process):
    """Killed and started again it is the same agent, with the same configuration and log.

    `options` are its configuration, beside the usual: where it answers, and where it looks for
    faults.
    """

    def __init__(
        self,
        machine: FakeMachine,
        folder: Path,
        options: Mapping[str, Option],
        command: Sequence[str] = COMMAND,
    ) -> None:
        folder.mkdir()
        self._port = free_port()
        usual: dict[str, Option] = {
            "fault_file": str(folder / "faults.json"),
            "gpu_recovery_s": GPU_RECOVERY_S,
            "status_address": f"127.0.0.1:{self._port}",
        }
        self._config = config = folder / "config.toml"
        lines = (f"{key} = {json.dumps(value)}\n" for key, value in (usual | options).items())
        config.write_text("".join(lines))
        environment = {nvml.ENVIRONMENT: str(machine.state)}
        super().__init__(
            [*command, "--config", config], folder / f"{folder.name}.log", **environment
        )

    def is_ready(self) -> bool:
        """/readyz: registered with kubelet, which has opened ListAndWatch."""
        return self._get("/readyz") is not None

    def examine(self) -> dict[str, dict[str, str]]:
        """What `numalet doctor` finds on the agent's node, by name."""
        command = [*_PROGRAM, "doctor", "--json", "--config", str(self._config)]
        environment = os.environ | self.environment
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        return {one["name"]: one for one in json.loads(done.stdout)["findings"]}

    def metrics(self) -> dict[str, float]:
        """Every series by its name and labels, as they are written; none while it does not run."""
        lines = (self._get("/metrics") or "").splitlines()
        rows = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in rows}

    def _get(self, page: str) -> str | None:
        """None where the answer is not 200, or there is none."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}{page}", timeout=5) as one:
                return str(one.read().decode())
        except (urllib.error.URLError, OSError):
            return None


def sockets() -> list[Path]:
    """The plugins' sockets in kubelet's plugin directory."""
    names = os.listdir(PLUGINS) if PLUGINS.exists() else []
    return sorted(
        PLUGINS / name for name in names if name.endswith(".sock") and name != "kubelet.sock"
    )
