"""Pods with a CPU of their own on this machine, others beside them, and what befalls them.

All CPUs but the last are reserved, so that one pod at a time can have one CPU, and everybody else
runs on the others.
"""

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from tests.e2e import cpus
from tests.e2e.agent import Agent, Option, node_options
from tests.e2e.conftest import Note, spread
from tests.e2e.cpus import ALL, OWN, POOL
from tests.e2e.image import WAIT
from tests.e2e.kubelet import Pod
from tests.e2e.process import wait_for
from tests.e2e.rig import Rig

OPTIONS = {"reserved_cpus": cpus.show(POOL)}

PIN = {"cpuset-scheduler": "required"}

STATIC = '{"policyName":"static","defaultCpuSet":"","checksum":0}'
"""What kubelet keeps in its cpu_manager_state where it pins containers itself.

Source: Kubernetes, pkg/kubelet/cm/cpumanager/state.
"""

LISTS = (
    'while read -r line; do case "$line" in *_allowed_list:*) echo "$line";; esac; '
    f"done < /proc/self/status; {WAIT}"
)
"""The shell reads its own status before it does anything else; it starts no other program for
it."""


def container_id(pod: Pod) -> str:
    return pod.container.removeprefix("containerd://")


def run_pinned(rig: Rig, **how: Any) -> Pod:
    (pod,) = rig.run_pods("pinned", **({"cpu": "1", "annotations": PIN, "program": LISTS} | how))
    return pod


def run_others(rig: Rig) -> list[Pod]:
    """A pod of each class that asks for no CPUs of its own."""
    return [
        *rig.run_pods("best-effort"),
        *rig.run_pods("burstable", request="100m"),
        *rig.run_pods("guaranteed", cpu="100m"),
    ]


def assert_all_run_where_they_should(rig: Rig, *pinned: Pod, timeout_s: float = 10) -> None:
    own = {container_id(pod): OWN for pod in pinned}
    pool = POOL if pinned else ALL

    def right() -> bool:
        nonlocal wrong
        wrong = cpus.find_wrong(own, pool)
        return not wrong

    wrong: list[str] = []
    try:
        rig.wait(right, "everybody runs where they should", timeout_s)
    except AssertionError as error:
        raise AssertionError("\n".join([*wrong, str(error)])) from None


def remove_pinned(rig: Rig, pod: Pod) -> None:
    """Returns when all others have its CPU. A kubelet that was just started forgets a pod before
    it ends."""
    rig.remove_pod(pod)
    assert_all_run_where_they_should(rig, timeout_s=30)


def printed(rig: Rig, pod: Pod, words: str) -> list[str]:
    rig.wait(lambda: words in rig.kubelet.output(pod.name), f"{pod.name} prints {words}")
    return rig.kubelet.output(pod.name).splitlines()


def path(rig: Rig) -> str:
    """Who gives containers their CPUs, as the agent says."""
    paths = [word for word in ("nri", "cgroup", "none") if _path_metric(rig, word)]
    return " and ".join(paths)


def _path_metric(rig: Rig, word: str) -> float:
    return rig.agent.metrics().get(f'numalet_pinning_path{{path="{word}"}}', 0)


def passes(rig: Rig) -> float:
    """How often the agent has looked at everything since it was started."""
    return rig.agent.metrics().get("numalet_pass_duration_seconds_count", 0)


def assert_nothing_is_pinned(rig: Rig, why: str) -> None:
    """Whatever asks for it, and the agent says why, once."""
    run_others(rig)
    run_pinned(rig)
    seen = passes(rig)
    rig.wait(lambda: passes(rig) > seen + 1, "the agent has looked twice", 60)
    assert cpus.find_wrong({}, ALL) == []
    assert rig.agent.log.read_text().count(why) == 1


def drifts(rig: Rig) -> float:
    return rig.agent.metrics()["numalet_cpuset_drifts_total"]


def waiting(rig: Rig, name: str) -> str:
    """Why the pod's container does not run, beside that it is being created."""
    pods = rig.kubelet.pods()
    said = pods[name].waiting if name in pods else ""
    return said if ": " in said else ""


@contextlib.contextmanager
def other_agent(rig: Rig, name: str, **options: Option) -> Iterator[Rig]:
    """The rig with another agent, instead of its own, which leaves nothing behind."""
    rig.wait(lambda: cpus.of_classes() == {ALL}, "everybody may run everywhere")
    rig.agent.stop()
    usual = node_options(rig.machine, rig.kubelet, rig.containerd) | OPTIONS
    agent = Agent(rig.machine, rig.folder / name, usual | options)
    agent.start()
    other = replace(rig, agent=agent)
    try:
        other.wait_until_whole()
        yield other
        other.remove_pods()
    finally:
        agent.stop()


# --- how fast the shared pool follows


def time_a_pin(rig: Rig) -> tuple[float, float]:
    """How long it took until nobody else had the CPU of a pinned pod after its container had a
    cgroup, and until everybody had it after the pod's last cgroup was gone; in seconds, less than
    nothing where it was before."""
    shared = {pid for one in cpus.read_containers() for pid in one.processes}
    before = set(cpus.folders())
    moments_s: dict[str, float] = {}

    def see(**seen: bool) -> bool:
        for what in (what for what, is_so in seen.items() if is_so):
            moments_s.setdefault(what, time.monotonic())
        return seen.keys() <= moments_s.keys()

    pod = rig.kubelet.add_pod("pinned", cpu="1", annotations=PIN)
    watch(lambda: see(made=len({*cpus.folders()} - before) > 1, narrow=all_on(shared, POOL)))
    rig.wait_until_running([pod])
    rig.kubelet.remove_pod(pod)
    watch(lambda: see(gone={*cpus.folders()} == before, wide=all_on(shared, ALL)))
    rig.wait(lambda: pod not in rig.kubelet.pods(), f"{pod} is gone", 60)
    return moments_s["narrow"] - moments_s["made"], moments_s["wide"] - moments_s["gone"]


def watch(condition: Callable[[], bool]) -> None:
    wait_for(condition, "the shared pool follows", 60, poll_s=0.001)


def all_on(pids: set[int], want: cpus.Cpus) -> bool:
    return all(cpus.of_process(pid) in (want, None) for pid in pids)


# --- faults

ROUNDS = 10


def storm(
    rig: Rig, note: Note, what: str, fault: Callable[[], object], rounds: int = ROUNDS
) -> None:
    """The fault comes while pods run and one is being created: by turns one that is pinned, and one
    that is not. Afterwards everybody must run where they should, and as before."""
    chance = random.Random(what)
    pods = run_others(rig)
    pinned: list[Pod] = []
    times_s = []
    for round_ in range(rounds):
        if pins := round_ % 2 == 0:
            for pod in pinned:
                remove_pinned(rig, pod)
        how = {"cpu": "1", "annotations": PIN} if pins else {"request": "10m"}
        new = rig.kubelet.add_pod("pinned" if pins else "other", **how)
        wait_until(time.monotonic() + chance.uniform(0, 1))
        fault()
        start_s = time.monotonic()
        rig.revive()
        added = rig.wait_until_running([new])
        pinned, pods = (added, pods) if pins else (pinned, pods + added)
        assert_all_run_where_they_should(rig, *pinned, timeout_s=30)
        times_s.append(time.monotonic() - start_s)
        wait_until_unchanged(rig, [*pods, *pinned])
    note(f"{what}, {rounds} times: all right after", spread(times_s), "")
    for pod in pinned:
        remove_pinned(rig, pod)


def wait_until(moment_s: float) -> None:
    wait_for(lambda: time.monotonic() >= moment_s, "the moment has come", 60)


def wait_until_unchanged(rig: Rig, pods: Sequence[Pod]) -> None:
    rig.wait(lambda: rig.is_unchanged(pods), "all pods run as before")
