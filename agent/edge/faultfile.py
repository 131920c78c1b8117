"""The administrator's file of GPUs that are not to be given out."""

from agent.core.health import MAX_MARKS_LENGTH, FaultMarks, parse_fault_marks
from agent.core.strict_json import printable
from agent.errors import ConfigError
from agent.files import read_bytes


def read_fault_marks(path: str) -> FaultMarks:
    """The marks in this file; where there is no file there are none.

    Raises ConfigError with one sentence if it cannot be read or understood.
    """
    try:
        return parse_fault_marks(read_bytes(path, MAX_MARKS_LENGTH).decode("utf-8-sig"))
    except FileNotFoundError:
        return FaultMarks()
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
    except UnicodeDecodeError as error:
        reason = f"is not UTF-8 text: {error.reason}"
    except ValueError as error:
        reason = f"cannot be used: {error}"
    raise ConfigError(f"{printable(path, 400)}: {reason}")
