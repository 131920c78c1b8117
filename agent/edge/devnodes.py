"""The GPU driver's device nodes on the host."""

import os
import re
import stat

_NAME = re.compile(r"nvidia([0-9]+|ctl|-uvm|-uvm-tools)")


def read_device_nodes(root: str, dev_dir: str) -> frozenset[str]:
    """The names below `dev_dir` of the driver's character devices, as `nvidia0`.

    `dev_dir` is a path on the host, whose files are below `root`. A folder that is not there has
    none; so has one that cannot be read.
    """
    folder = os.path.join(root, dev_dir.lstrip("/"))
    try:
        names = [name for name in os.listdir(folder) if _NAME.fullmatch(name)]
    except OSError:
        return frozenset()
    return frozenset(name for name in names if _is_device(os.path.join(folder, name)))


def _is_device(path: str) -> bool:
    try:
        return stat.S_ISCHR(os.stat(path).st_mode)
    except OSError:
        return False
