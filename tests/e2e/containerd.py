"""containerd in a folder of its own, with one image."""

import json
import os
import subprocess
from pathlib import Path

from tests.e2e.image import NAME, write_image
from tests.e2e.process import Process, wait_for

NAMESPACE = "k8s.io"
"""The containerd namespace that kubelet's containers live in."""

_CRI = 'plugins."io.containerd.grpc.v1.cri"'


def format_config(folder: Path) -> str:
    """containerd's TOML (version 2), all its files below `folder`.

    A root user without CAP_SYS_RESOURCE may not lower an OOM score: `restrict_oom_score_adj`.
    The snapshotter `native` copies, and so works on any file system.
    """
    quote = json.dumps
    return f"""
version = 2
root = {quote(str(folder / "root"))}
state = {quote(str(folder / "state"))}
[grpc]
address = {quote(str(folder / "containerd.sock"))}
[plugins."io.containerd.internal.v1.opt"]
path = {quote(str(folder / "opt"))}
[{_CRI}]
sandbox_image = {quote(NAME)}
restrict_oom_score_adj = true
disable_tcp_service = true
[{_CRI}.cni]
bin_dir = {quote(str(folder / "cni/bin"))}
conf_dir = {quote(str(folder / "cni/conf"))}
[{_CRI}.containerd]
snapshotter = "native"
default_runtime_name = "runc"
[{_CRI}.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
"""


class Containerd(Process):
    """`binaries` is a folder with containerd, its shim, ctr, runc and busybox."""

    def __init__(self, binaries: Path, folder: Path) -> None:
        folder.mkdir()
        config = folder / "config.toml"
        config.write_text(format_config(folder))
        super().__init__(
            [binaries / "containerd", "--config", config],
            folder / "containerd.log",
            PATH=f"{binaries}:{os.environ['PATH']}",
        )
        self.socket = folder / "containerd.sock"
        self._ctr = binaries / "ctr"
        self._image = folder / "image.tar"
        write_image(binaries / "busybox", self._image)

    def start(self) -> None:
        super().start()
        wait_for(self._answers, "containerd answers", 30, [self])
        self.ctr("images", "import", self._image)

    def ctr(self, *arguments: str | Path) -> str:
        """Raises subprocess.CalledProcessError."""
        command = [self._ctr, "--address", self.socket, "--namespace", NAMESPACE, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def _answers(self) -> bool:
        try:
            self.ctr("version")
        except subprocess.CalledProcessError:
            return False
        return True
