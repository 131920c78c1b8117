"""Reading a file that a person or kubelet wrote: it may be anything, and of any size."""

import os
import stat


def read_bytes(path: str, most_bytes: int) -> bytes:
    """All of a regular file. Does not wait at a pipe.

    `most_bytes` is a whole number of KiB. Raises OSError, or ValueError with the reason.
    """
    with open(path, "rb", opener=lambda path, how: os.open(path, how | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is not a regular file")
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(f"it is larger than {_format_size(most_bytes)}")
    return data


def _format_size(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
