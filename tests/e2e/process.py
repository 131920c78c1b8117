"""A program that a test starts, and how to wait for what it does."""

import contextlib
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

T = TypeVar("T")

_POLL_S = 0.02
_TAIL_BYTES = 3000


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a process and its descendants take.

    `rss_bytes` is of the process alone; `tree_bytes` adds the pages that its descendants share with
    nobody, so that each page counts once; `pss_bytes` of all gives other programs their part.
    `cpu_s` includes descendants that have ended.
    """

    processes: int
    threads: int
    files: int
    rss_bytes: int
    tree_bytes: int
    pss_bytes: int
    cpu_s: float


class Process:
    """One program with one log file, which goes on over restarts."""

    def __init__(self, command: Sequence[str | Path], log: Path, **environment: str) -> None:
        self.command = [str(word) for word in command]
        self.log = log
        self.environment = environment
        self._running: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._running is not None, f"{self.command[0]} was not started"
        return self._running.pid

    def start(self) -> None:
        assert self._running is None, f"{self.command[0]} is running already"
        with self.log.open("ab") as log:
            self._running = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | self.environment,
                start_new_session=True,
            )

    def is_running(self) -> bool:
        return self._running is not None and self._running.poll() is None

    def has_died(self) -> bool:
        """It ended although nobody here ended it."""
        return self._running is not None and self._running.poll() is not None

    def wait(self, timeout_s: float) -> int:
        """The exit code, or minus the signal that ended it. Raises subprocess.TimeoutExpired."""
        assert self._running is not None
        code = self._running.wait(timeout_s)
        self._running = None
        return code

    def kill(self) -> None:
        self._end(signal.SIGKILL, timeout_s=30)

    def pause(self) -> None:
        """SIGSTOP: it does nothing until `resume`."""
        assert self._running is not None
        self._running.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._running is not None
        self._running.send_signal(signal.SIGCONT)

    def stop(self, timeout_s: float = 10) -> int | None:
        """SIGTERM, and SIGKILL after the time-out; the exit code, None if it did not run."""
        try:
            return self._end(signal.SIGTERM, timeout_s)
        except subprocess.TimeoutExpired:
            return self._end(signal.SIGKILL, timeout_s=30)

    def _end(self, with_signal: signal.Signals, timeout_s: float) -> int | None:
        if self._running is None:
            return None
        self._running.send_signal(with_signal)
        return self.wait(timeout_s)

    def tail(self) -> str:
        """The end of the log."""
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - _TAIL_BYTES))
            return log.read().decode(errors="replace")

    def usage(self) -> Usage:
        return usage(self.pid)


def usage(pid: int) -> Usage:
    """Adds up the process and its descendants."""
    tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    memory = [process.memory_full_info() for process in tree]
    return Usage(
        processes=len(tree),
        threads=sum(process.num_threads() for process in tree),
        files=sum(process.num_fds() for process in tree),
        rss_bytes=memory[0].rss,
        tree_bytes=memory[0].rss + sum(info.uss for info in memory[1:]),
        pss_bytes=sum(info.pss for info in memory),
        cpu_s=sum(sum(process.cpu_times()[:4]) for process in tree),
    )


def wait_for(
    condition: Callable[[], T],
    what: str,
    timeout_s: float = 30,
    watched: Sequence[Process] = (),
    poll_s: float = _POLL_S,
) -> T:
    """The first true answer of `condition`, asked again and again.

    Raises AssertionError with the ends of the logs of the `watched` processes when the time is
    over or one of them has died.
    """
    deadline = time.monotonic() + timeout_s
    while not (answer := condition()):
        if dead := [process for process in watched if process.has_died()]:
            raise AssertionError(_report(f"{dead[0].command[0]} ended while {what}", watched))
        if time.monotonic() > deadline:
            raise AssertionError(_report(f"not within {timeout_s:g} s: {what}", watched))
        time.sleep(poll_s)
    return answer


def _report(sentence: str, processes: Sequence[Process]) -> str:
    logs = [f"--- {process.log.name}\n{process.tail()}" for process in processes]
    return "\n".join([sentence, *logs])


_PORTS = range(20000, 32768)
"""Below those that the kernel gives to clients: one of these would take a server's port while the
server is restarted. Source: the kernel's ip_local_port_range, by default."""


def free_port() -> int:
    """A TCP port of the loopback that nobody listens on now."""
    while True:
        port = random.choice(_PORTS)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
