"""Kubelet's cgroups: where they are, what they have, writing their cpusets; v1 and v2, of the
systemd and the cgroupfs driver.

A path of a group begins below the mount of its hierarchy, without a slash, and is the same in all
hierarchies of v1.
"""

from agent.edge.cgroup.finding import (
    Cgroups,
    find_cgroups,
    find_container,
    find_pod,
    parse_cgroups_path,
    parse_qos,
    pod_folders,
)
from agent.edge.cgroup.reading import (
    CpusetReading,
    read_cpu_time,
    read_cpuset,
    read_groups,
    read_tasks,
)
from agent.edge.cgroup.writing import apply_writes, lift_quota, write_cpus, write_mems

__all__ = [
    "Cgroups",
    "CpusetReading",
    "apply_writes",
    "find_cgroups",
    "find_container",
    "find_pod",
    "lift_quota",
    "parse_cgroups_path",
    "parse_qos",
    "pod_folders",
    "read_cpu_time",
    "read_cpuset",
    "read_groups",
    "read_tasks",
    "write_cpus",
    "write_mems",
]
