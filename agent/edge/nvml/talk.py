"""Talking to NVML: every call, and what its errors mean. Runs in the child only."""

import ctypes
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pynvml

_SONAME: Final = "libnvidia-ml.so.1"
"""What pynvml loads, and the only name that it knows."""

_MISSING: Final = (
    f"{_SONAME} is not installed: there is no NVIDIA driver here, or the container does not see it"
)

_MEANINGS: Final[dict[int, str]] = {
    pynvml.NVML_ERROR_NOT_SUPPORTED: "the driver does not support this",
    pynvml.NVML_ERROR_NO_PERMISSION: "no permission to open /dev/nvidiactl or the GPU's device",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded",
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: _MISSING,
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: "the driver is too old for this",
    pynvml.NVML_ERROR_GPU_IS_LOST: (
        "the GPU fell off the bus or was lost; it needs a reset or the machine a reboot"
    ),
    pynvml.NVML_ERROR_RESET_REQUIRED: "the GPU needs a reset",
    pynvml.NVML_ERROR_OPERATING_SYSTEM: (
        "the operating system blocked it; may this container use the GPU's device?"
    ),
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
        "the driver and its library differ in version; restart after the driver upgrade"
    ),
    pynvml.NVML_ERROR_UNKNOWN: (
        "an unknown error; often /dev/nvidiactl may not be opened, or see the kernel log"
    ),
}
"""NVML's errors in words for people; NVML's own words for all others."""

UNSAID: Final = frozenset(
    {
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_UNKNOWN,  # virtual machines return it where NotSupported is meant
    }
)
"""Errors that only mean that this driver or GPU does not tell."""

_UNUSABLE: Final = frozenset({pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED})
"""Errors that mean the GPU itself, whatever was asked."""


class RefusalError(Exception):
    """A call that got no answer; `code` is NVML's error, None if it is none of NVML's."""

    def __init__(self, call: str, meaning: str, code: int | None = None) -> None:
        super().__init__(f"{meaning} ({call})")
        self.meaning = meaning
        self.code = code


@dataclass(slots=True, kw_only=True)
class Talk:
    """What one thread asks and has learnt; the main thread reads it while a call may hang.

    `facts` are fields of DriverGpu. `direct` counts active NVLinks by the PCI address at their
    other end, `switched` those into an NVSwitch.
    """

    index: int = 0
    handle: Any = None
    call: str = "at all"
    facts: dict[str, Any] = field(default_factory=dict)
    direct: Counter[str] = field(default_factory=Counter)
    switched: int = 0
    warnings: list[str] = field(default_factory=list)

    def ask(self, call: str, *arguments: object) -> Any:
        """What pynvml's function `call` answers; here foreign errors end.

        Raises:
            RefusalError: there is no answer.
        """
        self.call = call
        try:
            return getattr(pynvml, call)(*arguments)
        except pynvml.NVMLError as error:
            meaning = _MEANINGS.get(error.value) or f"NVML error {error.value}, {error}"
            raise RefusalError(call, meaning, error.value) from error
        except Exception as error:
            raise RefusalError(call, f"the answer makes no sense: {error}") from error

    def ask_optional(self, call: str, *arguments: object, unsaid: Sequence[int] = ()) -> Any:
        """None where the driver does not say; with a warning, unless GPUs often do not.

        Raises:
            RefusalError: the GPU cannot be used at all.
        """
        try:
            return self.ask(call, *arguments)
        except RefusalError as refusal:
            if refusal.code in _UNUSABLE:
                raise
            if refusal.code not in UNSAID and refusal.code not in unsaid:
                self.warn(f"{call} failed: {refusal.meaning}")
            return None

    def warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)


def converse(
    talks: Sequence[Talk], question: Callable[[Talk], None], start: float, limit_s: float
) -> dict[int, str | None]:
    """Asks `question` in a thread for each talk; why each did not get to its end, by index.

    A thread that hangs is left behind `limit_s` after `start`.
    """
    outcomes: dict[int, str | None] = {}

    def run(talk: Talk) -> None:
        try:
            question(talk)
            outcomes[talk.index] = None
        except RefusalError as refusal:
            outcomes[talk.index] = str(refusal)

    threads = [threading.Thread(target=run, args=(talk,), daemon=True) for talk in talks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, start + limit_s - time.monotonic()))
    return {
        talk.index: outcomes.get(talk.index, describe_silence(talk.call, limit_s)) for talk in talks
    }


def describe_silence(call: str, limit_s: float) -> str:
    return f"the driver did not answer {call} within {limit_s:g} s"


def open_session(library: str | None, talk: Talk) -> None:
    """The number of GPUs becomes the fact `count`. Raises RefusalError."""
    if library is not None:
        _load(library, talk)
    talk.ask("nvmlInitWithFlags", 0)
    talk.facts["count"] = talk.ask("nvmlDeviceGetCount")


def _load(path: str, talk: Talk) -> None:
    """Loads the library before pynvml does, which then gets this one: the loader goes by soname."""
    talk.call = "dlopen"
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise RefusalError(
            "dlopen", f"the GPU driver's library cannot be loaded: {error}"
        ) from error
    try:
        known = ctypes.CDLL(_SONAME, mode=os.RTLD_NOLOAD | os.RTLD_NOW)._handle
    except OSError:
        known = None
    if known != library._handle:
        raise RefusalError("dlopen", f"{path} is another library: its soname is not {_SONAME}")
