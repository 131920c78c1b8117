"""The files of one group, and the sentences about them."""

import errno
import os
from typing import Final

from agent.core.strict_json import printable
from agent.errors import PinError

GONE: Final = frozenset({errno.ENOENT, errno.ENODEV, errno.ENOTDIR})
"""How reading ends where the group has been removed, or is removed just then."""
_LARGEST: Final = 4 << 20
"""Bytes; the longest file is the list of a group's tasks."""


def read_text(path: str) -> str | None:
    """The file's text, None where there is no file. Raises PinError."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            parts: list[bytes] = []
            while (part := os.read(file, 1 << 16)) and len(parts) < _LARGEST >> 16:
                parts.append(part)
        finally:
            os.close(file)
    except OSError as error:
        if error.errno in GONE:
            return None
        raise PinError(f"{printable(path, 400)}: cannot be read: {error.strerror}") from error
    return b"".join(parts).decode("ascii", "replace").strip("\0 \t\n")


def list_folders(path: str, follow: bool = False) -> list[str]:
    """The names of the folders in a folder, none where there is no folder; sorted. Raises
    PinError."""
    try:
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=follow))
    except OSError as error:
        if error.errno in GONE:
            return []
        raise PinError(f"{printable(path, 400)}: cannot be listed: {error.strerror}") from error
