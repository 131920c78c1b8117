"""containerd in a folder of its own, with one image."""

import contextlib
import json
import os
import subprocess
from enum import StrEnum
from pathlib import Path

import psutil

from tests.e2e.image import NAME, write_image
from tests.e2e.process import Process, wait_for

NAMESPACE = "k8s.io"
"""The containerd namespace that kubelet's containers live in."""

NRI_SOCKET = "nri.sock"


_NO_NETWORK = {"cniVersion": "1.0.0", "name": "none", "plugins": [{"type": "none"}]}
"""For pods that bring their node's; with it kubelet says that its node is ready."""


class Release(StrEnum):
    """Which containerd; what the names of its programs begin with."""

    BUILT = ""
    """2.4, which hack/e2e/build makes: it has NRI."""
    PACKAGED = "packaged/"
    """The distribution's 1.6, without NRI."""


def format_built_config(folder: Path) -> str:
    """containerd's TOML of version 3, all its files below `folder`.

    A root user without CAP_SYS_RESOURCE may not lower an OOM score: `restrict_oom_score_adj`.
    The snapshotter `native` copies, and so works on any file system.
    """
    runtime, images = (
        'plugins."io.containerd.cri.v1.runtime"',
        'plugins."io.containerd.cri.v1.images"',
    )
    return f"""
version = 3
root = {_quote(folder / "root")}
state = {_quote(folder / "state")}
[grpc]
address = {_quote(folder / "containerd.sock")}
[plugins."io.containerd.internal.v1.opt"]
path = {_quote(folder / "opt")}
[plugins."io.containerd.grpc.v1.cri"]
disable_tcp_service = true
[plugins."io.containerd.nri.v1.nri"]
disable = false
socket_path = {_quote(folder / NRI_SOCKET)}
plugin_path = {_quote(folder / "nri/plugins")}
plugin_config_path = {_quote(folder / "nri/config")}
[{images}]
snapshotter = "native"
[{images}.pinned_images]
sandbox = {_quote(NAME)}
[{runtime}]
restrict_oom_score_adj = true
[{runtime}.cni]
bin_dirs = [{_quote(folder / "cni/bin")}]
conf_dir = {_quote(folder / "cni/conf")}
[{runtime}.containerd]
default_runtime_name = "runc"
[{runtime}.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
"""


def format_packaged_config(folder: Path) -> str:
    """The same in TOML of version 2."""
    cri = 'plugins."io.containerd.grpc.v1.cri"'
    return f"""
version = 2
root = {_quote(folder / "root")}
state = {_quote(folder / "state")}
[grpc]
address = {_quote(folder / "containerd.sock")}
[plugins."io.containerd.internal.v1.opt"]
path = {_quote(folder / "opt")}
[{cri}]
sandbox_image = {_quote(NAME)}
restrict_oom_score_adj = true
disable_tcp_service = true
[{cri}.cni]
bin_dir = {_quote(folder / "cni/bin")}
conf_dir = {_quote(folder / "cni/conf")}
[{cri}.containerd]
snapshotter = "native"
default_runtime_name = "runc"
[{cri}.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
"""


def _quote(value: str | Path) -> str:
    return json.dumps(str(value))


class Containerd(Process):
    """`binaries` is a folder with containerd, its shim, ctr, runc and busybox."""

    def __init__(self, release: Release, binaries: Path, folder: Path) -> None:
        folder.mkdir()
        networks = folder / "cni/conf"
        networks.mkdir(parents=True)
        (networks / "none.conflist").write_text(json.dumps(_NO_NETWORK))
        config = folder / "config.toml"
        built = release is Release.BUILT
        config.write_text((format_built_config if built else format_packaged_config)(folder))
        super().__init__(
            [binaries / "containerd", "--config", config],
            folder / "containerd.log",
            PATH=f"{binaries}:{os.environ['PATH']}",
        )
        self.socket = folder / "containerd.sock"
        self.nri_socket = folder / NRI_SOCKET
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

    def end_orphans(self) -> None:
        """Ends what is left of containers when there are no tasks: a containerd that was killed
        while it made a container does not know it afterwards."""
        for process in psutil.process_iter(["cmdline"]):
            if str(self.socket) in (process.info["cmdline"] or ()) and process.pid != self.pid:
                with contextlib.suppress(psutil.NoSuchProcess):
                    for one in (*process.children(recursive=True), process):
                        one.kill()

    def _answers(self) -> bool:
        try:
            self.ctr("version")
        except subprocess.CalledProcessError:
            return False
        return True
