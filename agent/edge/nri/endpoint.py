"""The runtime's socket, and who we are there."""

import errno
import os
import re
import socket
from typing import Final

from agent.errors import ConfigError, ContainerRuntimeError

_NAME: Final = re.compile(r"[A-Za-z0-9_.+-]+")
_INDEX: Final = re.compile(r"[0-9]{2}")
_LONGEST_PATH: Final = 107
"""Bytes, for a socket."""

_CAUSES: Final = {
    errno.ENOENT: "there is no such socket: the container runtime does not run, or NRI is off",
    errno.ECONNREFUSED: "nobody serves the socket: the container runtime does not run",
    errno.EACCES: "no permission to open the container runtime's socket",
    errno.EAGAIN: "the container runtime does not accept connections",
}

SocketId = tuple[int, int]
"""Inode and ctime in nanoseconds: two sockets at one path differ in one of them."""


def check_identity(path: str, name: str, index: str) -> None:
    """Raises ConfigError for a path, a name or an index that no plugin can have, and for "00"."""
    encoded = os.fsencode(path)
    if b"\0" in encoded or not 0 < len(encoded) <= _LONGEST_PATH:
        raise ConfigError(
            f"{path!r}: cannot be a socket's path, which has no NUL and 1 to {_LONGEST_PATH} bytes"
        )
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r}: cannot be an NRI plugin's name, which has letters, digits and _.+- only"
        )
    if not _INDEX.fullmatch(index) or index == "00":
        raise ConfigError(f"{index!r}: cannot be our index among NRI plugins, which is 01 to 99")


def identify(path: str) -> SocketId | None:
    """What stands there; None for nothing, or nothing to see."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_ctime_ns


def connect(path: str) -> socket.socket:
    """Does not wait. Raises ContainerRuntimeError."""
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        peer.setblocking(False)
        peer.connect(path)
    except OSError as error:
        peer.close()
        why = _CAUSES.get(error.errno or 0) or error.strerror or str(error)
        raise ContainerRuntimeError(why) from error
    return peer
