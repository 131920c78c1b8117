"""The administrator's file of GPUs that are not to be given out."""

import os
import stat

from agent.core.health import MAX_MARKS_LENGTH, FaultMarks, parse_fault_marks
from agent.core.strict_json import printable
from agent.errors import ConfigError


def read_fault_marks(path: str) -> FaultMarks:
    """The marks in this file; where there is no file there are none.

    Raises ConfigError with one sentence if it cannot be read or understood.
    """
    try:
        return parse_fault_marks(_read_bytes(path).decode("utf-8-sig"))
    except FileNotFoundError:
        return FaultMarks()
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
    except UnicodeDecodeError as error:
        reason = f"is not UTF-8 text: {error.reason}"
    except ValueError as error:
        reason = f"cannot be used: {error}"
    raise ConfigError(f"{printable(path, 400)}: {reason}")


def _read_bytes(path: str) -> bytes:
    """Raises OSError, or ValueError with the reason. Does not wait at a pipe."""
    with open(path, "rb", opener=lambda path, how: os.open(path, how | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is not a regular file")
        data = file.read(MAX_MARKS_LENGTH + 1)
    if len(data) > MAX_MARKS_LENGTH:
        raise ValueError(f"it is larger than {MAX_MARKS_LENGTH >> 10} KiB")
    return data
