"""The running agent: how soon it is registered, how long its answers take while the GPU driver
hangs, and what it costs when nothing happens.

`python -m tests.bench.running_agent [SECONDS]`; the last part takes so many seconds (60).
"""

import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from agent.fakes import node, nvml
from agent.fakes.kubelet import FakeKubelet
from tests import machines

RESOURCE = "aliyun.com/gpu"
CALLS = 2_000
LIBRARY = nvml.build(Path(__file__).parents[2] / ".cache" / "nvml")


def measure(machine: str, home: Path, idle_s: float) -> None:
    description = machines.load(machine)
    node.lay_out(description, home / "tree")
    nvml.write_state(home / "state", node.driver_state(description))
    size = len(description.gpus)
    print(f"{machine}: {size} GPUs")
    with FakeKubelet(home / "plugins", home / "pods.sock") as kubelet:
        begin = time.monotonic()
        agent = start(home)
        try:
            kubelet.wait_for(lambda: len(kubelet.devices(RESOURCE)) == size)
            show("registered after", f"{time.monotonic() - begin:.2f} s", "1 s")
            measure_idle(agent, idle_s)
            nvml.add_line(home / "state", nvml.hang("*"))
            measure_calls(kubelet)
        finally:
            agent.terminate()
            begin = time.monotonic()
            agent.wait(10)
            show("ended after SIGTERM, driver hanging", f"{time.monotonic() - begin:.2f} s", "2 s")


def start(home: Path) -> psutil.Popen:
    (home / "config.toml").write_text(
        f'root = "{home}/tree"\nnvml = "{LIBRARY}"\nplugin_dir = "{home}/plugins"\n'
        f'pod_resources = "{home}/pods.sock"\nfault_file = "{home}/faults"\n'
        'status_address = "127.0.0.1:0"\n'
    )
    environment = os.environ | {nvml.ENVIRONMENT: str(home / "state")}
    command = [sys.executable, "-m", "agent", "run", "--config", str(home / "config.toml")]
    with open(home / "log", "w") as log:
        return psutil.Popen(command, env=environment, stderr=log)


def measure_idle(agent: psutil.Popen, idle_s: float) -> None:
    time.sleep(2.0)  # the start is over
    family = [agent, *agent.children(recursive=True)]
    before = [sum(one.cpu_times()[:2]) for one in family]
    time.sleep(idle_s)
    used = [sum(one.cpu_times()[:2]) - was for one, was in zip(family, before, strict=True)]
    shares = " + ".join(f"{100 * share / idle_s:.2f}" for share in used)
    show(f"idle, {idle_s:g} s", f"{100 * sum(used) / idle_s:.2f} % of a core ({shares})", "0.3 %")
    memory = [one.memory_full_info() for one in family]
    show("resident memory, agent", f"{memory[0].rss / 2**20:.1f} MiB", "60 MiB")
    pss = sum(one.pss for one in memory) / 2**20
    show("shared out, with its child", f"{pss:.1f} MiB", "60 MiB")


def measure_calls(kubelet: FakeKubelet) -> None:
    ids = sorted(kubelet.devices(RESOURCE))
    choice = random.Random(0)

    def prefer() -> object:
        return kubelet.preferred(ids, [], choice.randint(1, len(ids)))

    def allocate() -> object:
        return kubelet.allocate(choice.sample(ids, choice.randint(1, len(ids))))

    for name, call in (("GetPreferredAllocation", prefer), ("Allocate", allocate)):
        cuts = statistics.quantiles(time_calls(call), n=100)
        show(f"{name}, driver hanging", f"p50 {cuts[49]:.2f}  p99 {cuts[98]:.2f} ms", "2, 10 ms")


def time_calls(call: Callable[[], object]) -> Sequence[float]:
    """Milliseconds of each of so many calls."""
    times = []
    for _ in range(CALLS):
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1000)
    return times


def show(what: str, value: str, bar: str) -> None:
    print(f"  {what:<40} {value:<36} (bar {bar})", flush=True)


def main() -> None:
    idle_s = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    for machine in ("a800x8", "v100x16-dgx2"):
        with tempfile.TemporaryDirectory() as home:
            measure(machine, Path(home), idle_s)


if __name__ == "__main__":
    main()
