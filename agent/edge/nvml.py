"""What the GPU driver says of its GPUs, through NVML; the only importer of pynvml.

Nobody can interrupt a call into a driver: one lost GPU can hang it for ever, and a library that
does not fit the driver can crash. So the driver is asked by a forked child, which may be killed,
and there each GPU by a thread of its own, which may be left behind. This process never loads the
driver's library.

    parent    fork ── wait for the answer, then reap or abandon the child
    child     init ─┬─ GPU 0 ─┬─ pairs of GPU 0 ─┬─ send the answer
                    ├─ GPU 1 ─┼─ pairs of GPU 1 ─┤
                    └─ …      ┴─ …               ┘
    by        50 %            80 %               90 % of `timeout_s`
"""

import ctypes
import gc
import os
import pickle
import select
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from typing import Any, Final, Never

import pynvml

from agent.core.bitmap import MAX_ID, Bitmap
from agent.core.discovery import DriverGpu, DriverReading
from agent.core.topology import Link, LinkKind

_SONAME: Final = "libnvidia-ml.so.1"
"""What pynvml loads, and the only name that it knows."""

_INIT_SHARE, _GPU_SHARE, _PAIR_SHARE = 0.5, 0.8, 0.9
"""By which part of the time the stages end. The rest is for sending the answer."""

_GRACE_S: Final = 0.5
"""How long a child may take to die."""

_MOST_STUCK: Final = 8
"""How many children that do not die are too many to start another."""

_WORDS: Final = (MAX_ID + 1) // 64

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

_UNSAID: Final = frozenset(
    {
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_UNKNOWN,  # virtual machines return it where NotSupported is meant
    }
)
"""Errors that only mean that this driver or GPU does not tell."""

_UNUSABLE: Final = frozenset({pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED})
"""Errors that mean the GPU itself, whatever was asked."""

_ANCESTORS: Final[dict[int | None, LinkKind]] = {
    pynvml.NVML_TOPOLOGY_INTERNAL: LinkKind.PIX,
    pynvml.NVML_TOPOLOGY_SINGLE: LinkKind.PIX,
    pynvml.NVML_TOPOLOGY_MULTIPLE: LinkKind.PXB,
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: LinkKind.PHB,
    pynvml.NVML_TOPOLOGY_NODE: LinkKind.NODE,
    pynvml.NVML_TOPOLOGY_SYSTEM: LinkKind.SYS,
}

_stuck: set[int] = set()
"""Children that were killed and would not die; stuck in the driver, they may never."""


class _RefusalError(Exception):
    """A call that got no answer; `code` is NVML's error, None if it is none of NVML's."""

    def __init__(self, call: str, meaning: str, code: int | None = None) -> None:
        super().__init__(f"{meaning} ({call})")
        self.meaning = meaning
        self.code = code


@dataclass(slots=True, kw_only=True)
class _Talk:
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
            _RefusalError: there is no answer.
        """
        self.call = call
        try:
            return getattr(pynvml, call)(*arguments)
        except pynvml.NVMLError as error:
            meaning = _MEANINGS.get(error.value) or f"NVML error {error.value}, {error}"
            raise _RefusalError(call, meaning, error.value) from error
        except Exception as error:
            raise _RefusalError(call, f"the answer makes no sense: {error}") from error

    def ask_optional(self, call: str, *arguments: object, unsaid: Sequence[int] = ()) -> Any:
        """None where the driver does not say; with a warning, unless GPUs often do not.

        Raises:
            _RefusalError: the GPU cannot be used at all.
        """
        try:
            return self.ask(call, *arguments)
        except _RefusalError as refusal:
            if refusal.code in _UNUSABLE:
                raise
            if refusal.code not in _UNSAID and refusal.code not in unsaid:
                self.warn(f"{call} failed: {refusal.meaning}")
            return None

    def warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)


def read_driver(library: str | None = None, timeout_s: float = 30.0) -> DriverReading:
    """All GPUs that the driver lists. The driver's trouble is told in the reading, never raised.

    `library` is the path of the driver's library, None for the one that the loader finds. Returns
    within `timeout_s` and a second, though the driver hang. Where nothing keeps idle GPUs awake the
    driver first starts them, which may take seconds for each.

    Forks, so it is best called before threads start. With threads it works too, as long as none of
    them uses pynvml: the child runs nothing but what is written here.
    """
    deadline = time.monotonic() + timeout_s
    _stuck.difference_update([pid for pid in _stuck if _wait_for(pid, 0) is not None])
    if len(_stuck) >= _MOST_STUCK:
        return DriverReading(
            problem=f"the GPU driver is not asked again: {len(_stuck)} processes are stuck in it"
        )
    try:
        pid, pipe = _fork(library, timeout_s)
    except OSError as error:
        return DriverReading(problem=f"no process can be started to ask the GPU driver: {error}")
    answer = None
    try:
        answer = _receive(pipe, deadline)
    finally:
        os.close(pipe)
        status = _end(pid, _GRACE_S if answer is not None else 0)
    if answer is None:
        return DriverReading(problem=f"the GPU driver did not answer within {timeout_s:g} s")
    return _unpack(answer, status)


# --- the parent's side ----------------------------------------------------------------------------


def _fork(library: str | None, timeout_s: float) -> tuple[int, int]:
    """The child that asks, and the pipe that it answers through."""
    receiver, sender = os.pipe()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            _be_child(sender, mask, library, timeout_s)
    except OSError:
        os.close(receiver)
        raise
    finally:
        os.close(sender)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return pid, receiver


def _receive(pipe: int, deadline: float) -> bytes | None:
    """All that the child sends until it closes the pipe; None if it does not by the deadline."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    parts: list[bytes] = []
    while poll.poll(1000 * max(0.0, deadline - time.monotonic())):
        part = os.read(pipe, 1 << 16)
        if not part:
            return b"".join(parts)
        parts.append(part)
    return None


def _wait_for(pid: int, patience_s: float) -> int | None:
    """The exit code of a child, negative for a signal; None while it lives.

    Never blocks in the kernel: a process stuck in a driver may not even die when killed.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            ended, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:  # whoever ignores SIGCHLD has no zombies
            return 0
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.001)


def _end(pid: int, patience_s: float) -> int | None:
    """Reaps the child, by force after `patience_s`, and remembers one that does not die."""
    status = _wait_for(pid, patience_s)
    if status is None:
        os.kill(pid, signal.SIGKILL)
        status = _wait_for(pid, _GRACE_S)
    if status is None:
        _stuck.add(pid)
    return status


def _unpack(answer: bytes, status: int | None) -> DriverReading:
    try:
        reading: DriverReading = pickle.loads(answer)
    except (EOFError, pickle.UnpicklingError):
        end = f"exit status {status}"
        if status is not None and status < 0:
            end = f"signal {-status}, {signal.strsignal(-status)}"
        return DriverReading(
            problem=f"the process that asked the GPU driver ended without an answer: {end}"
        )
    return reading


# --- the child's side -----------------------------------------------------------------------------


def _be_child(
    sender: int, mask: set[int | signal.Signals], library: str | None, timeout_s: float
) -> Never:
    status = 1
    try:
        _leave_parent(sender)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        reading = _interrogate(library, timeout_s)
        # Closing by hand: at the exit, a thread stuck in the driver would keep the pipe open.
        with open(sender, "wb") as pipe:
            pickle.dump(reading, pipe)
        status = 0
    finally:
        os._exit(status)


def _leave_parent(pipe: int) -> None:
    """Drops what a child that never dies would hold on to, and what only the parent may run."""
    gc.disable()  # finalizers of the parent's objects
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor != pipe:
            os.closerange(descriptor, descriptor + 1)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in {0, 1, 2} - {pipe}:
        os.dup2(null, descriptor)


def _interrogate(library: str | None, timeout_s: float) -> DriverReading:
    start = time.monotonic()
    opening = _Talk()
    problems = _converse([opening], partial(_open, library), start, _INIT_SHARE * timeout_s)
    if problems[0]:
        return DriverReading(problem=problems[0])
    talks = [_Talk(index=index) for index in range(opening.facts["count"])]
    faults = _converse(talks, _read_gpu, start, _GPU_SHARE * timeout_s)
    sound = [talk for talk in talks if not faults[talk.index]]
    links = _read_links(sound, start, _PAIR_SHARE * timeout_s)
    return DriverReading(
        gpus=tuple(_describe(talk, faults[talk.index]) for talk in talks),
        links=tuple(tuple(links.get((a.index, b.index)) for b in talks) for a in talks),
        warnings=tuple(
            f"GPU {talk.index} ({talk.facts['bdf']}): {text}"
            for talk in talks
            for text in talk.warnings
        ),
    )


def _converse(
    talks: Sequence[_Talk], question: Callable[[_Talk], None], start: float, limit_s: float
) -> dict[int, str | None]:
    """Asks `question` in a thread for each talk; why each did not get to its end, by index.

    A thread that hangs is left behind `limit_s` after `start`.
    """
    outcomes: dict[int, str | None] = {}

    def run(talk: _Talk) -> None:
        try:
            question(talk)
            outcomes[talk.index] = None
        except _RefusalError as refusal:
            outcomes[talk.index] = str(refusal)

    threads = [threading.Thread(target=run, args=(talk,), daemon=True) for talk in talks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, start + limit_s - time.monotonic()))
    silence = "the driver did not answer {} within {:g} s"
    return {
        talk.index: outcomes.get(talk.index, silence.format(talk.call, limit_s)) for talk in talks
    }


def _open(library: str | None, talk: _Talk) -> None:
    if library is not None:
        _load(library, talk)
    talk.ask("nvmlInitWithFlags", 0)
    talk.facts["count"] = talk.ask("nvmlDeviceGetCount")


def _load(path: str, talk: _Talk) -> None:
    """Loads the library before pynvml does, which then gets this one: the loader goes by soname."""
    talk.call = "dlopen"
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise _RefusalError(
            "dlopen", f"the GPU driver's library cannot be loaded: {error}"
        ) from error
    try:
        known = ctypes.CDLL(_SONAME, mode=os.RTLD_NOLOAD | os.RTLD_NOW)._handle
    except OSError:
        known = None
    if known != library._handle:
        raise _RefusalError("dlopen", f"{path} is another library: its soname is not {_SONAME}")


def _read_gpu(talk: _Talk) -> None:
    """What must be known first: the GPU stays nameable when a later call fails."""
    handle = talk.handle = talk.ask("nvmlDeviceGetHandleByIndex", talk.index)
    talk.facts["bdf"] = _format_bdf(talk.ask("nvmlDeviceGetPciInfo", handle))
    talk.facts["uuid"] = talk.ask("nvmlDeviceGetUUID", handle)
    talk.facts["minor"] = talk.ask_optional("nvmlDeviceGetMinorNumber", handle)
    talk.facts["model"] = talk.ask_optional("nvmlDeviceGetName", handle)
    memory = talk.ask_optional("nvmlDeviceGetMemoryInfo", handle)
    talk.facts["memory_bytes"] = memory.total if memory else None
    talk.facts["memory_nodes"] = _read_affinity(talk, "nvmlDeviceGetMemoryAffinity")
    talk.facts["cpus"] = _read_affinity(talk, "nvmlDeviceGetCpuAffinityWithinScope")
    mig = talk.ask_optional("nvmlDeviceGetMigMode", handle)
    if mig and mig[0] == pynvml.NVML_DEVICE_MIG_ENABLE:
        talk.facts["fault"] = "MIG is enabled: it cannot be given out as a whole GPU"
    _read_nvlinks(talk)


def _read_affinity(talk: _Talk, call: str) -> Bitmap | None:
    """The set of ids that `call` gives at node scope; an empty one says nothing."""
    too_many = (pynvml.NVML_ERROR_INSUFFICIENT_SIZE,)
    scope = pynvml.NVML_AFFINITY_SCOPE_NODE
    words = talk.ask_optional(call, talk.handle, _WORDS, scope, unsaid=too_many) or ()
    bits = sum(word << 64 * i for i, word in enumerate(words))
    return Bitmap.from_int(bits) if bits else None


def _read_nvlinks(talk: _Talk) -> None:
    """A driver that does not know a remote end's type still knows its address."""
    beyond = (pynvml.NVML_ERROR_INVALID_ARGUMENT,)
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        end = (talk.handle, link)
        if not talk.ask_optional("nvmlDeviceGetNvLinkState", *end, unsaid=beyond):
            continue
        kind = talk.ask_optional("nvmlDeviceGetNvLinkRemoteDeviceType", *end)
        if kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            talk.switched += 1
        elif kind in (pynvml.NVML_NVLINK_DEVICE_TYPE_GPU, None):
            remote = talk.ask_optional("nvmlDeviceGetNvLinkRemotePciInfo", *end)
            if remote:
                talk.direct[_format_bdf(remote)] += 1


def _read_links(
    gpus: Sequence[_Talk], start: float, limit_s: float
) -> dict[tuple[int, int], Link | None]:
    """The links both ways, by index. A pair whose path cannot be asked costs a warning only: the
    driver does not tell which of the two is to blame."""
    paths: dict[tuple[int, int], LinkKind | None] = {}
    doubts = _converse(gpus, partial(_read_paths, gpus, paths), start, limit_s)
    links: dict[tuple[int, int], Link | None] = {}
    for a, b in combinations(gpus, 2):
        kind = paths.get((a.index, b.index))
        if nvlinks := _count_nvlinks(a, b):
            link: Link | None = Link(kind=LinkKind.NV, nvlinks=nvlinks)
        else:
            link = Link(kind=kind) if kind else None
        links[a.index, b.index] = links[b.index, a.index] = link
    for talk in gpus:
        if doubt := doubts[talk.index]:
            talk.warn(doubt)
    return links


def _read_paths(
    gpus: Sequence[_Talk], paths: dict[tuple[int, int], LinkKind | None], talk: _Talk
) -> None:
    """The PCI paths to the GPUs that follow, where no NVLink is the better one."""
    for other in gpus:
        if talk.index < other.index and not _count_nvlinks(talk, other):
            paths[talk.index, other.index] = _ask_path(talk, other)


def _ask_path(talk: _Talk, other: _Talk) -> LinkKind | None:
    call = "nvmlDeviceGetTopologyCommonAncestor"
    try:
        return _ANCESTORS.get(talk.ask(call, talk.handle, other.handle), LinkKind.SYS)
    except _RefusalError as refusal:
        if refusal.code == pynvml.NVML_ERROR_UNKNOWN:  # so on boards with odd bridges
            return LinkKind.SYS
        if refusal.code not in _UNSAID:
            talk.warn(f"{call} with GPU {other.index} failed: {refusal.meaning}")
        return None


# --- from NVML's values to ours -------------------------------------------------------------------


def _count_nvlinks(a: _Talk, b: _Talk) -> int:
    """The NVLinks between two GPUs that both ends agree on, else those through NVSwitch."""
    direct = min(a.direct[b.facts["bdf"]], b.direct[a.facts["bdf"]])
    return direct or min(a.switched, b.switched)


def _format_bdf(pci: Any) -> str:
    return f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"


def _describe(talk: _Talk, fault: str | None) -> DriverGpu:
    facts = dict(talk.facts)
    if fault:
        facts["fault"] = fault
    return DriverGpu(index=talk.index, **facts)
