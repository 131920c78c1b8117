"""The doctor's checks of this host: machine, driver, kubelet, container runtime, the agent."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from http.client import HTTPConnection, HTTPException
from typing import Final

from agent.config import Config
from agent.core import checkup
from agent.core.discovery import DriverReading, Host
from agent.core.findings import Finding, Verdict, failed, ok, skip, skipped, warning
from agent.core.request import GPU_RESOURCE
from agent.edge.cgroup import find_cgroups
from agent.edge.devnodes import read_device_nodes
from agent.edge.faultfile import read_fault_marks
from agent.edge.kubeapi import find_server
from agent.edge.kubeletfiles import KubeletFacts, read_cpu_manager
from agent.edge.kubeletpods import list_pods
from agent.edge.nri.connection import Connection
from agent.edge.nri.endpoint import connect
from agent.edge.nvml import read_driver
from agent.edge.podresources import read_pod_list
from agent.edge.sysfs import read_host
from agent.errors import AgentError, ContainerRuntimeError, KubeletError
from agent.files import read_bytes
from agent.observation import join
from agent.proto.nri_pb2 import Empty

_DRIVER_S: Final = 7.0
_CALL_S: Final = 2.0


def _attempt(name: str, check: Callable[[], Finding], advice: str) -> Finding:
    try:
        return check()
    except AgentError as error:
        return failed(name, str(error), advice)


# --- the machine and its driver -------------------------------------------------------------------


def check_machine(config: Config) -> Iterator[Finding]:
    try:
        host = read_host(config.root)
    except AgentError as error:
        yield failed("sysfs", str(error), "Mount the host's /sys, and name where with root.")
        why = "the machine cannot be read"
        yield from skip(("gpu driver", "gpus", "gpu nodes", "device nodes"), why)
    else:
        yield checkup.judge_host(host)
        reading = read_driver(config.nvml or None, min(config.driver_timeout_s, _DRIVER_S))
        version = _read_driver_version(config.root)
        yield checkup.judge_driver(reading, version, len(host.gpus))
        yield from _check_gpus(config, host, reading)
    yield _attempt(
        "fault file", partial(_check_fault_file, config), "Correct it: its marks are not seen."
    )


def _check_gpus(config: Config, host: Host, reading: DriverReading) -> Iterator[Finding]:
    try:
        machine = join(config.root, host, reading)
    except AgentError as error:
        yield failed("gpus", str(error), "The agent cannot start with this machine.")
        yield from skip(("gpu nodes", "device nodes"), "the machine contradicts itself")
        return
    if reading.problem and machine.gpus:
        yield skipped("gpus", "the driver does not answer")
        yield checkup.judge_gpu_nodes(machine)
        yield skipped("device nodes", "the driver does not answer")
        return
    yield checkup.judge_gpus(machine)
    yield checkup.judge_gpu_nodes(machine)
    nodes = read_device_nodes(config.root, config.dev_dir)
    yield checkup.judge_device_nodes(machine, nodes, config.dev_dir, config.cdi_kind)


def _read_driver_version(root: str) -> str:
    """That of the loaded kernel module, empty for none. Its library has the same, or the driver
    does not answer."""
    try:
        path = os.path.join(root, "sys/module/nvidia/version")
        return read_bytes(path, 64 << 10).decode("ascii", "replace").strip()[:40]
    except (OSError, ValueError):
        return ""


def _check_fault_file(config: Config) -> Finding:
    marks = read_fault_marks(config.fault_file)
    marked = sorted(marks.uuids) + [f"index {index}" for index in sorted(marks.indices)]
    if not marked:
        return ok("fault file", "no GPU is marked as faulty")
    return ok("fault file", f"marked as faulty, so not given out: {', '.join(marked)}")


# --- kubelet --------------------------------------------------------------------------------------


def check_kubelet(config: Config) -> Iterator[Finding]:
    path = os.path.join(config.plugin_dir, "kubelet.sock")
    if why := _why_silent(path):
        yield failed("kubelet", f"{path}: {why}", "Start kubelet: systemctl status kubelet.")
    else:
        yield ok("kubelet", f"it serves {path}")
    yield _check_plugin_dir(config.plugin_dir)
    advice = "Start kubelet, and mount the folder of this socket."
    pods = _attempt("pod resources", partial(_check_pod_resources, config), advice)
    silent = why is not None and pods.verdict is Verdict.FAILED
    yield skipped("pod resources", "kubelet does not run") if silent else pods
    yield from _check_kubelet_files(config)
    yield _check_other_plugins(config.plugin_dir)


def _check_plugin_dir(path: str) -> Finding:
    name = "plugin directory"
    if not os.path.isdir(path):
        return skipped(name, f"kubelet has not made it: {path}")
    if not os.access(path, os.W_OK):
        advice = "Mount it writable, and run the agent as root: its socket is to be there."
        return failed(name, f"{path}: cannot be written", advice)
    return ok(name, f"{path} can be written")


def _check_kubelet_files(config: Config) -> Iterator[Finding]:
    try:
        facts = read_cpu_manager(config.kubelet_dir, config.kubelet_config)
    except KubeletError as error:
        yield failed("cpu manager", str(error), "The agent reads this file: correct it.")
        yield skipped("topology manager", "kubelet's files cannot be read")
        return
    yield checkup.judge_cpu_manager(facts.cpu_manager_policy)
    file = config.kubelet_config if os.path.exists(config.kubelet_config) else ""
    yield checkup.judge_topology_manager(file, facts.topology_policy, facts.topology_scope)


def _check_pod_resources(config: Config) -> Finding:
    pods = read_pod_list(config.pod_resources, GPU_RESOURCE, _CALL_S)
    return ok(
        "pod resources",
        f"kubelet tells of {len(pods.pods)} pods, {len(pods.holdings)} with {GPU_RESOURCE}",
    )


def _check_other_plugins(plugin_dir: str) -> Finding:
    """By their sockets, if they are served: a plugin that was killed leaves its own."""
    try:
        names = os.listdir(plugin_dir)
    except OSError:
        return skipped("other plugins", "there is no plugin directory")
    others = [name for name in names if name.endswith(".sock") and not _is_ours(name)]
    served = [name for name in others if not _why_silent(os.path.join(plugin_dir, name))]
    return checkup.judge_plugin_sockets(served)


def _is_ours(name: str) -> bool:
    return name == "kubelet.sock" or name.startswith("numalet-")


def _why_silent(path: str) -> str | None:
    """None for a unix socket that somebody serves."""
    try:
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(_CALL_S)
            peer.connect(path)
    except FileNotFoundError:
        return "there is no such socket"
    except ConnectionRefusedError:
        return "nobody serves this socket"
    except OSError as error:
        return error.strerror or str(error)
    return None


# --- who pins -------------------------------------------------------------------------------------


def check_pinning(config: Config) -> Iterator[Finding]:
    advice = "Mount the host's /sys/fs/cgroup below root."
    yield _attempt("cgroups", partial(_check_cgroups, config), advice)
    if os.path.exists(config.nri_socket):
        yield _check_nri(config.nri_socket)
        yield skipped("kubelet's pods", "not needed: the container runtime tells what pods ask")
        return
    server = find_server(config.kube_api, config.service_account_dir)
    yield checkup.judge_no_nri(is_told=bool(config.kubelet_url) or server is not None)
    if config.kubelet_url:
        advice = (
            "See kubelet_url, and the finding access; or leave it empty where the API is known."
        )
        yield _attempt("kubelet's pods", partial(_check_kubelet_pods, config), advice)
    else:
        yield skipped("kubelet's pods", "kubelet_url is empty")


def _check_cgroups(config: Config) -> Finding:
    found = find_cgroups(config.root)
    if found is None:
        advice = (
            "Kubelet makes it when it starts; if it was told a cgroupRoot, the agent misses it."
        )
        return failed("cgroups", "there is no group kubepods", advice)
    try:
        facts = read_cpu_manager(config.kubelet_dir, config.kubelet_config)
    except KubeletError:
        facts = KubeletFacts()
    writable = os.access(os.path.join(found.cpuset, found.kubepods, "cpuset.cpus"), os.W_OK)
    return checkup.judge_cgroups(
        found.version, found.driver, found.kubepods, facts.cgroup_driver, writable
    )


_UNKNOWN_CALL: Final = "Describe"


def _check_nri(path: str) -> Finding:
    """Makes a call that no runtime knows, and hangs up. A registration would stop the node for the
    time of a Synchronize, and change who is asked. The runtime logs that a plugin did not register,
    as an error; seen with containerd 2.4, whose other plugins are not disturbed."""
    try:
        with connect(path) as peer:
            asking = Connection(peer, {}, lambda method, seconds, code: None)
            asking.call(_UNKNOWN_CALL, Empty(), Empty, _CALL_S)
    except ContainerRuntimeError as error:
        if f"refuses {_UNKNOWN_CALL}" not in str(error):
            advice = f"Start the container runtime, and see nri_socket. {checkup.NRI_ADVICE}"
            return failed("nri", f"{path}: {error}", advice)
    return ok("nri", f"a container runtime that speaks NRI serves {path}")


def _check_kubelet_pods(config: Config) -> Finding:
    token = os.path.join(config.service_account_dir, "token")
    pods = list_pods(config.kubelet_url, token if os.path.exists(token) else "", timeout_s=_CALL_S)
    return ok("kubelet's pods", f"{config.kubelet_url} tells of {len(pods)} pods")


# --- the agent itself -----------------------------------------------------------------------------


def check_agent(config: Config) -> Iterator[Finding]:
    address = config.status_address
    if not address or address.endswith(":0"):
        yield skipped("agent", "status_address does not tell where it would answer")
        return
    try:
        alive, ready = (_ask_page(address, page) for page in ("/healthz", "/readyz"))
    except ConnectionRefusedError:
        yield warning(
            "agent", f"it does not run: nobody listens at {address}", "Start it: numalet run."
        )
    except (OSError, HTTPException, ValueError) as error:
        advice = "Another program may have this address: choose another status_address."
        yield failed("agent", f"{address}: no answer of the agent: {error}", advice)
    else:
        yield checkup.judge_agent(address, alive, ready)


def _ask_page(address: str, page: str) -> str | None:
    """What is wrong by that page, None if nothing is. Raises OSError, HTTPException, and ValueError
    where it is another program's."""
    host, _, port = address.rpartition(":")
    with closing(HTTPConnection(host.strip("[]"), int(port), timeout=_CALL_S)) as connection:
        connection.request("GET", page)
        answer = connection.getresponse()
        text = answer.read(1 << 10).decode("utf-8", "replace").strip()
    if answer.getheader("Server") != "numalet":
        raise ValueError("another program answers there")
    return None if answer.status == 200 else text or f"HTTP status {answer.status}"
