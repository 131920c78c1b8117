"""The agent under test: `numalet run` on a fake machine, before the real kubelet."""

import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from tests.e2e.kubelet import PLUGINS
from tests.e2e.machine import FakeMachine
from tests.e2e.process import Process, free_port
from tests.fakes import nvml

COMMAND = (sys.executable, "-m", "agent", "run")

GPU_RECOVERY_S = 3
"""How long a GPU must be sound before the agent offers it again."""


def format_config(machine: FakeMachine, folder: Path, pod_resources: Path, port: int) -> str:
    options = {
        "root": str(machine.root),
        "nvml": machine.library,
        "dev_dir": str(machine.dev_dir),
        "plugin_dir": str(PLUGINS),
        "pod_resources": str(pod_resources),
        "fault_file": str(folder / "faults.json"),
        "gpu_recovery_s": GPU_RECOVERY_S,
        "status_address": f"127.0.0.1:{port}",
    }
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in options.items())


class Agent(Process):
    """Killed and started again it is the same agent, with the same configuration and log."""

    def __init__(
        self,
        machine: FakeMachine,
        folder: Path,
        pod_resources: Path,
        command: Sequence[str] = COMMAND,
    ) -> None:
        folder.mkdir()
        self._port = free_port()
        config = folder / "config.toml"
        config.write_text(format_config(machine, folder, pod_resources, self._port))
        environment = {nvml.ENVIRONMENT: str(machine.state)}
        super().__init__(
            [*command, "--config", config], folder / f"{folder.name}.log", **environment
        )

    def is_ready(self) -> bool:
        """/readyz: registered with kubelet, which has opened ListAndWatch."""
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self._port}/readyz", timeout=5
            ) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


def sockets() -> list[Path]:
    """The plugins' sockets in kubelet's plugin directory."""
    names = os.listdir(PLUGINS) if PLUGINS.exists() else []
    return sorted(
        PLUGINS / name for name in names if name.endswith(".sock") and name != "kubelet.sock"
    )
