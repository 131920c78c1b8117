"""What facts about a node mean for the agent: each a finding, with what to do about it.

Takes what the edges read, and asks nobody.
"""

import re
from collections.abc import Iterable, Set
from typing import Final

from agent.core.discovery import DriverReading, Host
from agent.core.findings import Finding, failed, ok, skipped, warning
from agent.core.picture import count_of
from agent.core.strict_json import printable
from agent.core.topology import Gpu, Machine

# --- the machine ----------------------------------------------------------------------------------


def judge_host(host: Host) -> Finding:
    cpus = sum(len(core.cpus) for core in host.cores)
    nodes = count_of(len(host.nodes), "NUMA node")
    seen = f"{nodes}, {count_of(len(host.cores), 'core')}, {count_of(cpus, 'CPU')}"
    if not host.warnings:
        return ok("sysfs", seen)
    return warning(
        "sysfs",
        f"{seen}; {'; '.join(host.warnings)}",
        "The agent leaves out what it cannot read. If these files are there on the host, mount all "
        "of its /sys.",
    )


def judge_driver(reading: DriverReading, version: str, on_bus: int) -> Finding:
    """`version` is the loaded kernel module's, empty for none; `on_bus` counts PCI devices."""
    name = "gpu driver"
    module = f"NVIDIA {version}" if version else "NVIDIA, of unknown version"
    if reading.problem is None and reading.gpus:
        return ok(name, f"{module}; NVML answers, with {count_of(len(reading.gpus), 'GPU')}")
    bus = f"{on_bus or 'no'} NVIDIA GPU{'s' * (on_bus != 1)} on the PCI bus"
    if not on_bus:
        return failed(
            name,
            f"{bus}; {reading.problem or 'NVML answers, and lists no GPU'}",
            "The agent has no GPU to offer here. Take the label off this node; or, in a virtual "
            "machine, pass the GPUs through.",
        )
    return failed(name, f"{bus}; {reading.problem or 'NVML lists none'}", _driver_advice(version))


def _driver_advice(version: str) -> str:
    if not version:
        return "Install the NVIDIA driver on the host and load it (modprobe nvidia)."
    return (
        "The driver is loaded, so this process does not see it right: in a container, use NVIDIA's "
        "runtime with NVIDIA_VISIBLE_DEVICES=all and NVIDIA_DRIVER_CAPABILITIES=utility, or name "
        "the library with nvml. Outside of one, see whether nvidia-smi works, and switch on "
        "persistence mode if it is slow."
    )


def judge_gpus(machine: Machine) -> Finding:
    name, gpus = "gpus", machine.gpus
    if not gpus:
        return skipped(name, "there are none")
    models = ", ".join(sorted({printable(gpu.model, 60) for gpu in gpus}))
    ill = [gpu for gpu in gpus if gpu.fault or not gpu.uuid]
    if not ill:
        return ok(name, f"{count_of(len(gpus), 'GPU')} can be given out: {models}")
    reasons = "; ".join(f"GPU {gpu.index}: {_fault(gpu)}" for gpu in ill)
    seen = f"{len(ill)} of {count_of(len(gpus), 'GPU')} cannot be given out: {reasons}"
    advice = (
        "See dmesg for Xid errors and nvidia-smi -q; a GPU may need a reset, or the host a boot."
    )
    return (failed if len(ill) == len(gpus) else warning)(name, seen, advice)


def _fault(gpu: Gpu) -> str:
    return printable(gpu.fault or "the driver does not name it", 200)


def judge_gpu_nodes(machine: Machine) -> Finding:
    """A single GPU without a node takes them from all: kubelet is told all nodes or none."""
    name = "gpu nodes"
    if not machine.gpus:
        return skipped(name, "there are no GPUs")
    lost = [gpu for gpu in machine.gpus if gpu.node is None]
    if not lost:
        count = len(machine.gpus)
        return ok(name, f"the NUMA node of {'every GPU' if count > 1 else 'the GPU'} is known")
    which = ", ".join(f"{gpu.index} ({gpu.bdf})" for gpu in lost)
    return failed(
        name,
        f"the NUMA node of {count_of(len(lost), 'GPU')} is not known: {which}",
        "No NUMA policy can use these GPUs, and kubelet is told the node of none. Switch NUMA on "
        "in the firmware; in a virtual machine, have the hypervisor pass on where each device is.",
    )


def judge_device_nodes(
    machine: Machine, present: Set[str], dev_dir: str, cdi_kind: str = ""
) -> Finding:
    """`present` are names below `dev_dir`, like `nvidia0`."""
    name = "device nodes"
    if cdi_kind:
        return skipped(name, f"the runtime finds them by CDI names of {cdi_kind}")
    if not machine.gpus:
        return skipped(name, "there are no GPUs")
    own = [f"nvidia{gpu.minor}" for gpu in machine.gpus if gpu.minor is not None]
    missing = [node for node in (*own, "nvidiactl", "nvidia-uvm") if node not in present]
    if not missing:
        return ok(name, f"{dev_dir} has those of {count_of(len(own), 'GPU')}")
    return failed(
        name,
        f"{dev_dir} lacks {', '.join(missing)}",
        "Containers get at their GPUs through these. nvidia-modprobe -u -c 0 makes them on the "
        "host; if they are there, mount the host's /dev where root and dev_dir say.",
    )


# --- kubelet --------------------------------------------------------------------------------------


def judge_cpu_manager(policy: str | None) -> Finding:
    name = "cpu manager"
    if policy is None:
        return warning(
            name,
            "neither kubelet's configuration nor its cpu_manager_state tells the policy",
            "Kubelet's default, none, is assumed. Check kubelet_dir and kubelet_config, and that "
            "kubelet's folder is mounted.",
        )
    if policy != "static":
        return ok(name, f"kubelet's policy is {printable(policy, 40)}: the agent pins")
    return failed(
        name,
        "kubelet's policy is static: kubelet pins CPUs, and the agent only watches",
        "Set cpuManagerPolicy: none in kubelet's configuration, drain the node, remove "
        "cpu_manager_state from kubelet's folder and restart kubelet.",
    )


def judge_topology_manager(file: str, policy: str | None, scope: str | None) -> Finding:
    """`file` is kubelet's configuration, empty where there is none."""
    name = "topology manager"
    if not file:
        return warning(
            name,
            "kubelet's configuration file is not there: its topology policy and its reserved CPUs "
            "are not known",
            "Set kubelet_config to the file that kubelet is started with (--config). What kubelet "
            "is told by flags is not seen: see topology_policy and reserved_cpus.",
        )
    if policy not in ("single-numa-node", "restricted"):
        said = f"is {printable(policy, 40)}" if policy else "is not set, so none"
        return ok(name, f"kubelet's policy {said}: the pod's own policy counts")
    which = f"{policy} per {printable(scope, 40)}" if scope else policy
    return warning(
        name,
        f"kubelet's policy is {which}: it rejects pods whose GPUs are on more nodes than it likes, "
        "whatever the pods say",
        "Set topologyManagerPolicy: none (or best-effort). The agent aligns each pod by the pod's "
        "own policy; topology_policy still reports another one to schedulers.",
    )


_GPU_SOCKET: Final = re.compile(r"nvidia|gpu|mig|cuda", re.IGNORECASE)


def judge_plugin_sockets(names: Iterable[str]) -> Finding:
    """`names` are the sockets of other device plugins that somebody serves."""
    name = "other plugins"
    all_names = sorted(printable(one, 80) for one in names)
    rivals = [one for one in all_names if _GPU_SOCKET.search(one)]
    if rivals:
        return warning(
            name,
            f"another device plugin for GPUs is served: {', '.join(rivals)}",
            "If it offers the same GPUs, each would be given out twice. Keep its DaemonSet off "
            "this node; on ACK the label ack.node.gpu.schedule decides.",
        )
    others = f", beside {', '.join(all_names)}" if all_names else ""
    return ok(name, f"no other device plugin for GPUs{others}")


# --- who pins -------------------------------------------------------------------------------------


def judge_cgroups(
    version: int, driver: str, kubepods: str, kubelet_driver: str | None, writable: bool
) -> Finding:
    """`kubelet_driver` is what kubelet's configuration says, None where it does not."""
    name = "cgroups"
    seen = f"v{version}, {driver} driver, {kubepods}"
    if not writable:
        return failed(
            name,
            f"{seen}; they cannot be written",
            "Mount /sys/fs/cgroup of the host writable, and run the agent as root.",
        )
    if kubelet_driver and kubelet_driver != driver:
        return warning(
            name,
            f"{seen}; kubelet's configuration says {printable(kubelet_driver, 40)}",
            "These may be left over from before. Restart kubelet, and remove groups without pods.",
        )
    if version == 1:
        return warning(
            name,
            seen,
            "The agent works with v1, but kubelet refuses it from Kubernetes 1.35 on. Boot the "
            "host with cgroup v2.",
        )
    return ok(name, seen)


NRI_ADVICE: Final = (
    "Switch NRI on in the container runtime's configuration (it is on by default since containerd "
    "2.0 and CRI-O 1.30), and mount the folder of its socket."
)


def judge_no_nri(is_told: bool) -> Finding:
    """Without NRI the agent goes through the cgroups. `is_told`: somebody else tells of pods."""
    name = "nri"
    if is_told:
        return warning(
            name,
            "there is no NRI socket: CPUs are set through the cgroups, a moment after the start",
            NRI_ADVICE,
        )
    return failed(
        name,
        "there is no NRI socket, and neither the Kubernetes API nor a kubelet_url tells what pods "
        "ask: nothing is pinned",
        f"{NRI_ADVICE} Or give the agent the API or kubelet_url: then CPUs are set through the "
        "cgroups.",
    )


# --- the agent itself -----------------------------------------------------------------------------


def judge_agent(address: str, alive: str | None, ready: str | None) -> Finding:
    """What its pages say, None for "ok"."""
    name = "agent"
    if alive is not None:
        return failed(
            name,
            f"it runs, but is stuck: {printable(alive, 200)}",
            "See its log; kubelet starts it anew if its probes are set.",
        )
    if ready is not None:
        return warning(
            name,
            f"it runs, but is not ready: {printable(ready, 200)}",
            "The other findings should say why; else see its log.",
        )
    return ok(name, f"it runs and is ready, at {address}")
