"""The device plugin before a real kubelet and containerd, on a server of 8 GPUs and 2 nodes.

Source of the expected sets: every subset of the described GPUs, tried here.
"""

import itertools
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from agent.fakes import nvml
from agent.fakes.node import Description
from tests.e2e.agent import GPU_RECOVERY_S, Agent, node_options, sockets
from tests.e2e.conftest import Note, spread
from tests.e2e.kubelet import PLUGINS, Pod
from tests.e2e.machine import make_machine
from tests.e2e.rig import Rig

BACK_S = 5
"""Within how long devices must be back after whatever happened."""

END_S = 2
"""Within how long the agent must end."""

RESET_S = 5
"""How long a GPU that needs a reset is away."""

GPU_IS_LOST = 15
FELL_OFF_THE_BUS = 79


def ids(machine: Description, *indices: int) -> frozenset[str]:
    return frozenset(machine.gpus[index].uuid for index in indices)


def nvlinks(machine: Description, gpus: tuple[int, ...]) -> int:
    words = [machine.links[i][j] for i, j in itertools.combinations(gpus, 2)]
    return sum(int(word[2:]) for word in words if word.startswith("NV"))


def best_sets(machine: Description, count: int) -> list[frozenset[str]]:
    """Of the sets on the fewest NUMA nodes, those with the most NVLinks inside."""

    def goodness(gpus: tuple[int, ...]) -> tuple[int, int]:
        return -len({machine.gpus[index].node for index in gpus}), nvlinks(machine, gpus)

    sets = list(itertools.combinations(range(len(machine.gpus)), count))
    best = max(map(goodness, sets))
    return [ids(machine, *gpus) for gpus in sets if goodness(gpus) == best]


def nodes_of(rig: Rig, pod: Pod) -> frozenset[int]:
    """The NUMA nodes of the GPUs that the pod holds."""
    return rig.machine.nodes_of(rig.held()[pod.name])


# --- what pods get --------------------------------------------------------------------------------


def test_all_gpus_appear_with_their_numa_nodes(rig: Rig) -> None:
    assert rig.healthy() == {gpu.uuid: (gpu.node,) for gpu in rig.machine.facts.gpus}


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_a_pod_gets_the_best_set_of_its_size(rig: Rig, count: int) -> None:
    (pod,) = rig.run_pods("only", gpus=count)
    assert rig.held()[pod.name] in best_sets(rig.machine.facts, count)


def test_a_container_sees_its_gpus_and_no_others(rig: Rig) -> None:
    (pod,) = rig.run_pods("only", gpus=2)
    held = rig.held()[pod.name]
    indices = [i for i, gpu in enumerate(rig.machine.facts.gpus) if gpu.uuid in held]
    rig.wait(
        lambda: "nvidiactl" in rig.kubelet.output(pod.name), "the container has listed its devices"
    )
    lines = rig.kubelet.output(pod.name).splitlines()
    environment = dict(line.split("=", 1) for line in lines if "=" in line)
    assert environment["NVIDIA_VISIBLE_DEVICES"].split(",") == [
        rig.machine.facts.gpus[index].uuid for index in indices
    ]
    assert sorted(line for line in lines if line.startswith("nvidia")) == sorted(
        [f"nvidia{index}" for index in indices] + ["nvidia-uvm", "nvidia-uvm-tools", "nvidiactl"]
    )


@pytest.mark.parametrize("first", [1, 2, 4])
def test_a_pod_of_four_takes_the_node_that_another_pod_left_whole(rig: Rig, first: int) -> None:
    (one,) = rig.run_pods("one", gpus=first)
    (two,) = rig.run_pods("two", gpus=4)
    assert len(nodes_of(rig, one)) == len(nodes_of(rig, two)) == 1
    assert nodes_of(rig, one) != nodes_of(rig, two)


@pytest.fixture
def cube(rig: Rig) -> Iterator[Rig]:
    """The same node with other GPUs: two meshes of direct NVLinks, one and two a pair."""
    rig.agent.stop()
    machine = make_machine("v100x8-cube", rig.library, rig.folder / "v100x8-cube")
    options = node_options(machine, rig.kubelet, rig.containerd)
    agent = Agent(machine, rig.folder / "agent-cube", options)
    agent.start()
    other = replace(rig, machine=machine, agent=agent)
    try:
        other.wait_until_whole()
        yield other
        other.remove_pods()
    finally:
        agent.stop()


def test_pods_get_the_best_linked_gpus_of_a_node(cube: Rig) -> None:
    for count in (2, 3, 4):
        (pod,) = cube.run_pods(f"pod-of-{count}", gpus=count)
        assert cube.held()[pod.name] in best_sets(cube.machine.facts, count)
        cube.remove_pods()


# --- GPUs that come and go ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param([nvml.fail("*", GPU_IS_LOST, 5)], id="silently"),
        pytest.param(
            [nvml.fail("*", GPU_IS_LOST, 5), nvml.event(5, FELL_OFF_THE_BUS)], id="with an Xid"
        ),
    ],
)
def test_a_gpu_is_lost_and_comes_back(rig: Rig, note: Note, lines: list[str]) -> None:
    pods = rig.run_pods("bystander", gpus=4)
    lost = rig.machine.facts.gpus[5].uuid
    start = time.monotonic()
    for line in lines:
        nvml.add_line(rig.machine.state, line)
    rig.wait(lambda: lost not in rig.healthy(), "the lost GPU is unhealthy", BACK_S)
    noticed_s = time.monotonic() - start
    assert len(rig.healthy()) == 7
    rig.wait(lambda: time.monotonic() > start + RESET_S, "the GPU is reset")
    rig.machine.mend()
    back_s = rig.wait_until_whole(GPU_RECOVERY_S + BACK_S)
    assert rig.is_unchanged(pods)
    how = "silently" if len(lines) == 1 else "with an Xid"
    note(f"GPU lost {how}: unhealthy after", f"{noticed_s:.1f} s", f"{BACK_S} s")
    note("  mended: healthy after", f"{back_s:.1f} s", f"{GPU_RECOVERY_S + BACK_S} s")


# --- kubelet and the agent die --------------------------------------------------------------------


def test_kubelet_is_killed_twenty_times(rig: Rig, note: Note) -> None:
    pods = [*rig.run_pods("four", gpus=4), *rig.run_pods("one", gpus=1)]
    held = rig.held()
    times_s = []
    for _ in range(20):
        rig.restart_kubelet()
        times_s.append(rig.wait_until_whole(BACK_S))
        rig.wait(lambda: rig.is_unchanged(pods), "the pods run as before")
        assert rig.held() == held
    note("kubelet killed 20 times: devices back after", spread(times_s), f"{BACK_S} s")
    (late,) = rig.run_pods("late", gpus=2)
    assert nodes_of(rig, late) == nodes_of(rig, pods[1])


def test_the_agent_is_killed_twenty_times(rig: Rig, note: Note) -> None:
    pods = [*rig.run_pods("four", gpus=4), *rig.run_pods("one", gpus=1)]
    held = rig.held()
    times_s = []
    for _ in range(20):
        rig.agent.kill()
        rig.wait(lambda: not rig.healthy(), "kubelet has noticed")
        rig.agent.start()
        times_s.append(rig.wait_until_whole(BACK_S))
        assert rig.held() == held
        assert len(sockets()) == 1
    assert rig.is_unchanged(pods)
    note("agent killed 20 times: devices back after", spread(times_s), f"{BACK_S} s")
    (late,) = rig.run_pods("late", gpus=2)
    assert nodes_of(rig, late) == nodes_of(rig, pods[1])


@pytest.mark.parametrize("lines", [[], [nvml.hang("*")]], ids=["sound driver", "hanging driver"])
def test_the_agent_ends_when_it_is_told_to(rig: Rig, note: Note, lines: list[str]) -> None:
    pods = rig.run_pods("bystander", gpus=4)
    for line in lines:
        nvml.add_line(rig.machine.state, line)
    start = time.monotonic()
    assert rig.agent.stop() == 0
    took_s = time.monotonic() - start
    note(
        f"SIGTERM, {'hanging' if lines else 'sound'} driver: ended after", f"{took_s:.2f} s", "2 s"
    )
    assert took_s <= END_S
    assert sockets() == []
    rig.wait(lambda: not rig.healthy(), "kubelet has noticed")
    assert rig.is_unchanged(pods)


# --- the plugin directory -------------------------------------------------------------------------


def test_the_plugin_socket_is_deleted(rig: Rig, note: Note) -> None:
    pods = rig.run_pods("bystander", gpus=1)
    (socket,) = sockets()
    before = rig.kubelet.registrations()
    socket.unlink()
    start = time.monotonic()
    rig.wait(lambda: rig.kubelet.registrations() > before, "the agent registers again", BACK_S)
    rig.wait(lambda: rig.agent.is_ready() and rig.is_whole(), "kubelet has the devices", BACK_S)
    assert len(sockets()) == 1
    note("plugin socket deleted: back after", f"{time.monotonic() - start:.2f} s", f"{BACK_S} s")
    assert rig.is_unchanged(pods)
    rig.run_pods("late", gpus=4)


def test_the_plugin_directory_is_wiped(rig: Rig, note: Note) -> None:
    pods = rig.run_pods("bystander", gpus=1)
    for path in PLUGINS.iterdir():
        path.unlink()
    rig.restart_kubelet()
    took_s = rig.wait_until_whole(BACK_S)
    note("plugin directory wiped, kubelet restarted: back after", f"{took_s:.2f} s", f"{BACK_S} s")
    rig.wait(lambda: rig.is_unchanged(pods), "the pod runs as before")
    rig.run_pods("late", gpus=4)


def test_a_second_agent_refuses_and_the_first_goes_on(rig: Rig) -> None:
    pods = rig.run_pods("bystander", gpus=1)
    options = node_options(rig.machine, rig.kubelet, rig.containerd)
    second = Agent(rig.machine, rig.folder / "second", options)
    second.start()
    try:
        assert second.wait(30) > 0
    finally:
        second.stop()
    (sentence,) = [line for line in second.log.read_text().splitlines() if is_for_people(line)]
    assert str(PLUGINS) in sentence
    assert rig.agent.is_ready()
    assert rig.is_whole()
    assert rig.is_unchanged(pods)
    rig.run_pods("late", gpus=4)


def is_for_people(line: str) -> bool:
    """Not what was logged on the way, which begins with the time."""
    return not line[:4].isdecimal()


# --- what it costs --------------------------------------------------------------------------------

BATCH = 8
BATCHES = 25
SLACK = 2
"""Threads and files that come and go with gRPC's pools; a leak a batch would be six times that."""


def mib(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):.1f} MiB"


def test_two_hundred_pods_leak_nothing(rig: Rig, note: Note) -> None:
    start, usages = time.monotonic(), []
    for _ in range(BATCHES):
        rig.run_pods(*["small"] * BATCH, gpus=1)
        assert len(frozenset.union(*rig.held().values())) == BATCH
        rig.remove_pods()
        usages.append(rig.agent.usage())
    early, late = usages[: BATCHES // 2], usages[BATCHES // 2 :]
    grown = late[-1].tree_bytes - early[-1].tree_bytes
    threads = [max(usage.threads for usage in half) for half in (early, late)]
    files = [max(usage.files for usage in half) for half in (early, late)]
    note(f"{BATCHES * BATCH} pods, {BATCH} at a time", f"{time.monotonic() - start:.0f} s", "")
    note("  grown in the second half by", f"{grown / 1024:.0f} KiB", "2048 KiB")
    note("  most threads in either half", "{}, {}".format(*threads), f"+{SLACK}")
    note("  most open files in either half", "{}, {}".format(*files), f"+{SLACK}")
    assert grown <= 2 << 20
    assert threads[1] <= threads[0] + SLACK
    assert files[1] <= files[0] + SLACK
    assert late[-1].processes <= early[-1].processes
    (pod,) = rig.run_pods("all", gpus=8)
    assert len(rig.held()[pod.name]) == 8


IDLE_S = 60
MEMORY_BAR = 60 << 20
CPU_BAR = 0.003


def test_it_is_small_and_idles(rig: Rig, note: Note) -> None:
    rig.run_pods("bystander", gpus=4)
    before, start = rig.agent.usage(), time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        rig.agent.wait(IDLE_S)
    after, took_s = rig.agent.usage(), time.monotonic() - start
    share = (after.cpu_s - before.cpu_s) / took_s
    note("resident memory of the agent", mib(after.rss_bytes), mib(MEMORY_BAR))
    note("  with its children, each page once", mib(after.tree_bytes), "")
    note("  proportional, other programs take their part", mib(after.pss_bytes), "")
    note("  processes, threads", f"{after.processes}, {after.threads}", "")
    note(f"CPU of them over {IDLE_S} idle seconds", f"{share:.2%}", f"{CPU_BAR:.2%}")
    assert after.rss_bytes <= MEMORY_BAR
    assert share <= 4 * CPU_BAR  # a loaded machine counts too; the figure is what is compared
