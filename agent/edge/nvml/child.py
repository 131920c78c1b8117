"""The child process that may hang or crash in the driver: starting, hearing and ending it."""

import ctypes
import gc
import os
import pickle
import select
import signal
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Never

_libc = ctypes.CDLL(None, use_errno=True)

_PR_SET_PDEATHSIG: Final = 1
"""Source: Linux, include/uapi/linux/prctl.h."""

GRACE_S: Final = 0.5
"""How long a child may take to die."""

_MOST_STUCK: Final = 8
"""How many children that do not die are too many to start another."""

_LENGTH: Final = struct.Struct("!I")
_MAX_LENGTH: Final = 16 << 20
"""Bytes of one message. A reading of 64 GPUs with all links has about 100,000."""

_EVENT_LOOPS: Final = ("anon_inode:[eventpoll]", "anon_inode:[eventfd]")

stuck: set[int] = set()
"""Children that were killed and would not die; stuck in the driver, they may never."""


class NoChildError(Exception):
    """No child can be started; the text is one sentence."""


class Silence(Enum):
    """Why there is no answer: it is late or makes no sense, the child ended, `stop` was given."""

    LATE = "late"
    ENDED = "ended"
    STOPPED = "stopped"


@dataclass(slots=True, kw_only=True)
class Child:
    """`pipe` is where it tells; `status` its exit code as `wait_for` says, once it is `over`."""

    pid: int
    pipe: int
    heard: bytearray = field(default_factory=bytearray)
    over: bool = False
    status: int | None = None


# --- the parent's side ----------------------------------------------------------------------------


def start_child(run: Callable[[int], None]) -> Child:
    """A child that runs `run`, which may `send` through the pipe that it is given, and ends.

    It ends with the thread that calls this, too. Raises NoChildError.
    """
    stuck.difference_update([pid for pid in stuck if _wait_for(pid, 0) is not None])
    if len(stuck) >= _MOST_STUCK:
        raise NoChildError(
            f"the GPU driver is not asked again: {len(stuck)} processes are stuck in it"
        )
    try:
        return _fork(run)
    except OSError as error:
        raise NoChildError(f"no process can be started to ask the GPU driver: {error}") from error


def _fork(run: Callable[[int], None]) -> Child:
    receiver, sender = os.pipe()
    parent = os.getpid()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            _be_child(parent, sender, mask, run)
    except OSError:
        os.close(receiver)
        raise
    finally:
        os.close(sender)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return Child(pid=pid, pipe=receiver)


def receive(child: Child, patience_s: float, stop: int | None = None) -> object | Silence:
    """The next thing that the child sends; `stop` is a descriptor that is readable to stop."""
    deadline = time.monotonic() + patience_s
    poll = select.poll()
    for descriptor in (child.pipe, stop):
        if descriptor is not None:
            poll.register(descriptor, select.POLLIN)
    while (message := _take_message(child.heard)) is None:
        ready = [
            descriptor for descriptor, _ in poll.poll(1000 * max(0.0, deadline - time.monotonic()))
        ]
        if stop in ready:
            return Silence.STOPPED
        if not ready:
            return Silence.LATE
        part = os.read(child.pipe, 1 << 16)
        if not part:
            return Silence.ENDED
        child.heard += part
    return message


def _take_message(heard: bytearray) -> object | None:
    """The first message, removed; None if it is not whole. A crash may begin with nonsense."""
    if len(heard) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(heard)
    if length > _MAX_LENGTH:
        return Silence.LATE
    end = _LENGTH.size + length
    if len(heard) < end:
        return None
    try:
        message: object = pickle.loads(heard[_LENGTH.size : end])
    except Exception:
        return Silence.LATE
    del heard[:end]
    return message


def end_child(child: Child, patience_s: float) -> int | None:
    """The exit code, as `_wait_for` says; by force after `patience_s`.

    Remembers a child that does not die. Called again, it says the same.
    """
    if not child.over:
        child.over = True
        os.close(child.pipe)
        child.status = _reap(child.pid, patience_s)
    return child.status


def _reap(pid: int, patience_s: float) -> int | None:
    status = _wait_for(pid, patience_s)
    if status is None:
        os.kill(pid, signal.SIGKILL)
        status = _wait_for(pid, GRACE_S)
    if status is None:
        stuck.add(pid)
    return status


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


def describe_end(status: int | None) -> str:
    if status is not None and status < 0:
        return f"signal {-status}, {signal.strsignal(-status)}"
    return f"exit status {status}"


# --- the child's side -----------------------------------------------------------------------------


def _be_child(
    parent: int, sender: int, mask: set[int | signal.Signals], run: Callable[[int], None]
) -> Never:
    status = 1
    try:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:  # else it died before
            _leave_parent(sender)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            run(sender)
            status = 0
    finally:
        os._exit(status)


def _leave_parent(pipe: int) -> None:
    """Drops what a child that never dies would hold on to, and what only the parent may run."""
    gc.freeze()  # finalizers of the parent's objects
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor > 2 and descriptor != pipe and not _is_event_loop(descriptor):
            os.closerange(descriptor, descriptor + 1)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in {0, 1, 2} - {pipe}:
        os.dup2(null, descriptor)


def _is_event_loop(descriptor: int) -> bool:
    """gRPC starts its event loop anew in a forked child, and aborts if that loses its descriptors.

    It does not where it was imported with the environment variable GRPC_ENABLE_FORK_SUPPORT=0.
    """
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").startswith(_EVENT_LOOPS)
    except OSError:
        return False


def send(pipe: int, message: object) -> None:
    """Raises OSError if the parent hears no more."""
    data = pickle.dumps(message)
    rest = memoryview(_LENGTH.pack(len(data)) + data)
    while rest:
        rest = rest[os.write(pipe, rest) :]
