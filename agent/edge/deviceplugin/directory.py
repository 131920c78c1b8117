"""Kubelet's plugin directory: whose it is, and which socket stands there."""

import errno
import fcntl
import os
from pathlib import Path
from urllib.parse import quote

from agent.core.registration import SocketId
from agent.errors import KubeletError


def keep_lock(descriptor: int | None, directory: Path) -> int | None:
    """The lock on the directory itself, which dies with us. A directory whose content was wiped is
    still locked, one that was made anew is locked anew; None while there is none.

    Raises KubeletError.
    """
    try:
        if descriptor is not None and os.path.samestat(os.fstat(descriptor), os.stat(directory)):
            return descriptor
        fresh = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return descriptor
    except OSError as error:
        raise KubeletError(f"{directory}: kubelet's plugin directory: {error.strerror}") from error
    try:
        fcntl.flock(fresh, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.access(directory, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        os.close(fresh)
        why = "another numalet serves there" if error.errno == errno.EWOULDBLOCK else error.strerror
        raise KubeletError(f"{directory}: kubelet's plugin directory: {why}") from error
    if descriptor is not None:
        os.close(descriptor)
    return fresh


def identify(path: Path) -> SocketId | None:
    """What stands there, None for nothing. Raises KubeletError."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise KubeletError(f"{path}: {error.strerror}") from error
    return status.st_ino, status.st_ctime_ns


def to_target(path: Path) -> str:
    """The path of a socket as gRPC wants it: a URI."""
    return f"unix://{quote(os.fsencode(path))}"
