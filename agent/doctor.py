"""`numalet doctor`: every precondition of the agent on this node, looked at once.

Neighbours are asked as the agent asks them, but nothing is registered, taken or changed. Each group
of checks has a thread of its own, so that a neighbour that hangs costs its own findings only.

    nodechecks.py      this host: machine, driver, kubelet, container runtime, the agent
    clusterchecks.py   what the Kubernetes API says of it
"""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from agent.clusterchecks import check_cluster
from agent.config import Config
from agent.core.findings import Finding, draw, failed, has_failed, to_json
from agent.nodechecks import check_agent, check_kubelet, check_machine, check_pinning

__all__ = ["Finding", "draw", "has_failed", "run_doctor", "to_json"]

_ALL_S: Final = 9.0
"""How long all groups may take; they run side by side."""


@dataclass(slots=True, kw_only=True)
class _Group:
    """What a group of checks has found so far; its thread adds to it."""

    name: str
    check: Callable[[Config], Iterator[Finding]]
    found: list[Finding] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def run(self, config: Config) -> None:
        try:
            for finding in self.check(config):
                self.found.append(finding)
        except Exception as error:
            seen = f"a bug in the check: {type(error).__name__}: {error}"
            self.found.append(failed(self.name, seen, "Please report it. The rest is not checked."))
        finally:
            self.ended.set()


def run_doctor(config: Config) -> tuple[Finding, ...]:
    """All findings, always in the same order. Takes less than 10 s, whatever hangs."""
    groups = [
        _Group(name=f"{name} checks", check=check)
        for name, check in (
            ("machine", check_machine),
            ("kubelet", check_kubelet),
            ("pinning", check_pinning),
            ("cluster", check_cluster),
            ("agent", check_agent),
        )
    ]
    for group in groups:
        threading.Thread(target=group.run, args=(config,), daemon=True).start()
    deadline_s = time.monotonic() + _ALL_S
    return tuple(finding for group in groups for finding in _await(group, deadline_s))


def _await(group: _Group, deadline_s: float) -> Iterator[Finding]:
    in_time = group.ended.wait(max(0.0, deadline_s - time.monotonic()))
    yield from tuple(group.found)
    if not in_time:
        seen = f"what comes next did not end within {_ALL_S:g} s"
        yield failed(group.name, seen, "Something on this host hangs there; see the kernel log.")
