"""A real kubelet: how it is configured, static pods, what it says of the pods that tests add."""

import itertools
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.e2e.image import NAME, WAIT
from tests.e2e.process import Process, free_port, wait_for

HOME = Path("/var/lib/kubelet")
PLUGINS = HOME / "device-plugins"
"""Not to be moved: kubelet's --root-dir does not reach it."""

NODE = "node"
NAMESPACE = "default"
RESOURCE = "aliyun.com/gpu"

_LABEL = "ack.node.gpu.schedule=topology"
"""What an administrator gives a node for the agent to be put there."""

_PROGRAM = f"env; cat /proc/self/status; ls /dev; {WAIT}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """What kubelet says of a pod with one container; `container` is its id with the runtime,
    `waiting` why it does not run, as far as kubelet says."""

    name: str
    phase: str
    reason: str
    message: str
    ready: bool
    container: str
    restarts: int
    waiting: str


def make_pod(
    name: str,
    *,
    gpus: int = 0,
    cpu: str | None = None,
    request: str | None = None,
    program: str = _PROGRAM,
    annotations: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """A pod with one container, `main`; `program` is a shell script.

    Without `cpu` it is BestEffort; `cpu` is its request and its limit, `request` a request alone,
    which makes it Burstable.
    """
    resources = {RESOURCE: str(gpus)} if gpus else {}
    resources |= {"cpu": cpu, "memory": "32Mi"} if cpu else {}
    container = {
        "name": "main",
        "image": NAME,
        "imagePullPolicy": "Never",
        "command": ["/bin/sh", "-c", program],
        "resources": {"limits": resources, "requests": {"cpu": request} if request else {}},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "annotations": dict(annotations or {})},
        "spec": {
            "hostNetwork": True,
            "terminationGracePeriodSeconds": 1,
            "containers": [container],
        },
    }


def format_config(
    folder: Path, runtime: Path, *, port: int, health_port: int, read_port: int
) -> str:
    """KubeletConfiguration for a machine without systemd, API server and network plugin.

    Evictions and image collection are off: the disk is the machine's, not the test's.
    """
    return json.dumps(
        {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "containerRuntimeEndpoint": f"unix://{runtime}",
            "staticPodPath": str(folder / "pods"),
            "podLogsDir": str(folder / "logs"),
            "volumePluginDir": str(folder / "volume-plugins"),
            "fileCheckFrequency": "1s",
            "nodeStatusUpdateFrequency": "1s",
            "address": "127.0.0.1",
            "port": port,
            "readOnlyPort": read_port,
            "healthzBindAddress": "127.0.0.1",
            "healthzPort": health_port,
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "cgroupDriver": "cgroupfs",
            "failCgroupV1": False,
            "failSwapOn": False,
            "localStorageCapacityIsolation": False,
            "makeIPTablesUtilChains": False,
            "resolvConf": "",
            "oomScoreAdj": 0,
            "imageGCHighThresholdPercent": 100,
            "evictionHard": dict.fromkeys(
                ["imagefs.available", "nodefs.available", "nodefs.inodesFree"], "0%"
            ),
        },
        indent=1,
    )


class Kubelet(Process):
    """Its ports are kept over restarts. The one of `url` is a node's 10250, without its checks.

    With a `kubeconfig` it registers its node with an API server, and runs the pods that this has
    for it beside the static ones.
    """

    def __init__(
        self, binary: Path, folder: Path, runtime: Path, kubeconfig: Path | None = None
    ) -> None:
        (folder / "pods").mkdir(parents=True)
        self._health, self._read, port = free_port(), free_port(), free_port()
        self.config = folder / "config.json"
        self.config.write_text(
            format_config(
                *(folder, runtime), port=port, health_port=self._health, read_port=self._read
            )
        )
        self.root_dir = folder / "root"
        super().__init__(
            [
                binary,
                f"--config={self.config}",
                f"--root-dir={self.root_dir}",
                f"--cert-dir={folder / 'certificates'}",
                f"--hostname-override={NODE}",
                "--v=2",
                *([f"--kubeconfig={kubeconfig}", f"--node-labels={_LABEL}"] if kubeconfig else []),
            ],
            folder / "kubelet.log",
        )
        self._folder = folder
        self._numbers = itertools.count()
        self.pod_resources = self.root_dir / "pod-resources/kubelet.sock"
        self.url = f"https://127.0.0.1:{port}"
        self.logs = folder / "logs"

    def wait_until_healthy(self) -> None:
        wait_for(self._is_healthy, "kubelet is healthy", 60, [self])

    def _is_healthy(self) -> bool:
        return _get(f"http://127.0.0.1:{self._health}/healthz") == b"ok"

    def add_pod(self, name: str, **how: Any) -> str:
        """Puts a static pod before kubelet, as `make_pod` makes it; the name that the pod gets:
        `name`, a number, the node.

        No name comes twice: kubelet would let the second pod wait for 10 s.
        """
        name = f"{name}-{next(self._numbers)}"
        fresh = self._folder / f"{name}.json"
        fresh.write_text(json.dumps(make_pod(name, **how)))
        fresh.rename(self._folder / "pods" / fresh.name)
        return f"{name}-{NODE}"

    def remove_pod(self, name: str) -> None:
        """Takes the static pod that `add_pod` gave this name away from kubelet."""
        (self._folder / "pods" / f"{name.removesuffix(f'-{NODE}')}.json").unlink()

    def remove_pods(self) -> None:
        for path in (self._folder / "pods").iterdir():
            path.unlink()

    def pods(self) -> dict[str, Pod]:
        """Every pod of the tests' namespace that kubelet knows, by name; none while it does not
        answer."""
        answer = _get(f"http://127.0.0.1:{self._read}/pods")
        items = json.loads(answer)["items"] or [] if answer else []
        ours = [item for item in items if item["metadata"]["namespace"] == NAMESPACE]
        return {pod.name: pod for pod in map(_pod, ours)}

    def registrations(self) -> int:
        """How often a device plugin has registered for the GPUs since kubelet started."""
        name = f'kubelet_device_plugin_registration_total{{resource_name="{RESOURCE}"}} '
        for line in _get(f"http://127.0.0.1:{self._read}/metrics").decode().splitlines():
            if line.startswith(name):
                return int(line.removeprefix(name))
        return 0

    def output(self, name: str) -> str:
        """What the pod's container has printed, all its instances one after the other."""
        files = sorted(self.logs.glob(f"{NAMESPACE}_{name}_*/main/*.log"))
        lines = [line for file in files for line in file.read_text().splitlines()]
        return "\n".join(line.split(" ", 3)[3] for line in lines)


def _get(url: str) -> bytes:
    """Nothing while kubelet does not answer."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bytes(answer.read())
    except (urllib.error.URLError, OSError):
        return b""


def _pod(item: dict[str, Any]) -> Pod:
    status = item["status"]
    containers = status.get("containerStatuses") or [{}]
    return Pod(
        name=item["metadata"]["name"],
        phase=status.get("phase", ""),
        reason=status.get("reason", ""),
        message=status.get("message", ""),
        ready=containers[0].get("ready", False),
        container=containers[0].get("containerID", ""),
        restarts=containers[0].get("restartCount", 0),
        waiting=_waiting(containers[0].get("state", {})),
    )


def _waiting(state: Mapping[str, Any]) -> str:
    facts = state.get("waiting", {})
    return ": ".join(facts[key] for key in ("reason", "message") if facts.get(key))
