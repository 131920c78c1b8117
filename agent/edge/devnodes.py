"""The GPU driver's device nodes on the host."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

_PATTERNS = ("nvidia[0-9]*", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-caps/*")


def read_device_nodes(root: str, dev_dir: str) -> frozenset[str]:
    """The names below `dev_dir` of the driver's character devices, as `nvidia0`.

    `dev_dir` is a path on the host, whose files are below `root`. A folder that is not there has
    none; so has one that cannot be read.
    """
    folder = Path(root) / dev_dir.lstrip("/")
    return frozenset(str(path.relative_to(folder)) for path in _find(folder))


def _find(folder: Path) -> Iterator[Path]:
    for pattern in _PATTERNS:
        for path in folder.glob(pattern):
            try:
                if stat.S_ISCHR(os.stat(path).st_mode):
                    yield path
            except OSError:
                continue
