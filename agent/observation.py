"""What a machine is, from sysfs and the GPU driver; and how containers would be pinned on it."""

import os

from agent.core.discovery import DriverReading, Host, build_machine
from agent.core.topology import Machine
from agent.edge.cgroup import find_cgroups
from agent.edge.nvml import read_driver
from agent.edge.sysfs import read_host
from agent.errors import DiscoveryError, PinError


def observe_machine(root: str, nvml: str | None) -> Machine:
    """The machine below `root`; its GPU driver is asked through the library `nvml`.

    Without a library the host's own driver is asked, if `root` is the host itself and has GPUs.
    Raises DiscoveryError.
    """
    host = read_host(root)
    driver = read_driver(nvml) if nvml or (root == "/" and host.gpus) else None
    return join(root, host, driver)


def join(root: str, host: Host, driver: DriverReading | None) -> Machine:
    """The machine that both describe. Raises DiscoveryError where they contradict themselves."""
    try:
        return build_machine(host, driver)
    except ValueError as error:
        raise DiscoveryError(f"{root}: {error}") from error


def describe_pinning(root: str) -> str | None:
    """How containers below `root` would get their CPUs; None for a copy without cgroups."""
    socket = os.path.join(root, "var/run/nri/nri.sock")
    try:
        cgroups = find_cgroups(root)
    except PinError:
        return None
    groups = f"cgroup v{cgroups.version}, {cgroups.driver} driver" if cgroups else "no kubepods yet"
    if os.path.exists(socket):
        return f"through NRI at {socket} ({groups})"
    return f"through cgroup files, there is no NRI socket ({groups})"
