"""What kubelet's own files tell of how it handles CPUs: its configuration and its CPU manager's
state.

Source: Kubernetes 1.36, pkg/kubelet/cm/cpumanager/state and staging/src/k8s.io/kubelet/config. The
state file is there since kubelet first ran, with the policy `none` too; its policy is the one in
force, also where a flag was given. Kubelet replaces it as a whole.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import yaml

from agent.core.bitmap import Bitmap
from agent.core.strict_json import Object, parse_json, part, printable, shown, typed
from agent.errors import KubeletError
from agent.files import read_bytes

_LARGEST: Final = 4 << 20
"""Bytes of either file."""
_NULLS: Final = ("", "~", "null", "Null", "NULL")
"""Source: YAML 1.1, "Null"."""
_POD_ENTRY: Final = "cpuSet"


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeletFacts:
    """How kubelet handles CPUs; None is what neither file tells, so that kubelet's default is
    likely.

    `cpu_manager_policy` is none or static. `exclusive` are the CPUs that kubelet itself gave to
    containers, by the pod's uid and the container's name; what a pod has as a whole is under "".
    `topology_policy` is none, best-effort, restricted or single-numa-node, `topology_scope` is
    container or pod, `cgroup_driver` is systemd or cgroupfs. Flags of kubelet's are not seen.
    """

    cpu_manager_policy: str | None = None
    exclusive: Mapping[str, Mapping[str, Bitmap]] = field(default_factory=dict)
    reserved_cpus: Bitmap | None = None
    topology_policy: str | None = None
    topology_scope: str | None = None
    cgroup_driver: str | None = None


def read_cpu_manager(kubelet_dir: str, config_file: str = "") -> KubeletFacts:
    """What the files say. `config_file` is config.yaml in `kubelet_dir` where it is not given;
    either file may be missing.

    Raises:
        KubeletError: a file cannot be read or understood.
    """
    state = _read(os.path.join(kubelet_dir, "cpu_manager_state"), _parse_state)
    config = _read(config_file or os.path.join(kubelet_dir, "config.yaml"), _parse_config)
    return KubeletFacts(
        cpu_manager_policy=state.cpu_manager_policy or config.cpu_manager_policy,
        exclusive=state.exclusive,
        reserved_cpus=config.reserved_cpus,
        topology_policy=config.topology_policy,
        topology_scope=config.topology_scope,
        cgroup_driver=config.cgroup_driver,
    )


def _read(path: str, parse: Callable[[str], KubeletFacts]) -> KubeletFacts:
    """Nothing where there is no file. Raises KubeletError."""
    try:
        return parse(read_bytes(path, _LARGEST).decode())
    except FileNotFoundError:
        return KubeletFacts()
    except OSError as error:
        reason = f"cannot be read: {error.strerror}"
        raise KubeletError(f"{printable(path, 400)}: {reason}") from error
    except UnicodeDecodeError as error:
        reason = f"is not UTF-8 text: {error.reason}"
        raise KubeletError(f"{printable(path, 400)}: {reason}") from error
    except ValueError as error:
        raise KubeletError(f"{printable(path, 400)}: cannot be understood: {error}") from error


# --- the CPU manager's state ----------------------------------------------------------------------


def _parse_state(text: str) -> KubeletFacts:
    data = typed(parse_json(text, _LARGEST), dict, "it")
    exclusive: dict[str, dict[str, Bitmap]] = {}
    for uid, containers in part(data, "entries", dict).items():
        sets = typed(containers, dict, f"the entry of pod {shown(uid)}")
        exclusive[uid] = {name: _parse_set(sets[name], name) for name in sets}
    for uid, pod in part(data, "podEntries", dict).items():
        whole = typed(pod, dict, f"the entry of pod {shown(uid)}").get(_POD_ENTRY, "")
        if cpus := _parse_set(whole, _POD_ENTRY):
            exclusive.setdefault(uid, {})[""] = cpus
    policy = part(data, "policyName", str) or None
    return KubeletFacts(cpu_manager_policy=policy, exclusive=exclusive)


def _parse_set(value: object, what: str) -> Bitmap:
    return Bitmap.parse_list(typed(value, str, printable(what, 63)))


# --- the configuration ----------------------------------------------------------------------------


def _parse_config(text: str) -> KubeletFacts:
    data = _parse_object(text)
    reserved = _word(data, "reservedSystemCPUs")
    return KubeletFacts(
        cpu_manager_policy=_word(data, "cpuManagerPolicy"),
        reserved_cpus=Bitmap.parse_list(reserved) if reserved else None,
        topology_policy=_word(data, "topologyManagerPolicy"),
        topology_scope=_word(data, "topologyManagerScope"),
        cgroup_driver=_word(data, "cgroupDriver"),
    )


def _parse_object(text: str) -> Object:
    """JSON, or YAML with all its values as text: kubelet has only texts where we look."""
    if text.lstrip().startswith("{"):
        return typed(parse_json(text, _LARGEST), dict, "it")
    try:
        value = next(iter(yaml.load_all(text, yaml.BaseLoader)), None)
    except RecursionError:
        raise ValueError("the YAML is nested too deeply") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = printable(getattr(error, "problem", None) or str(error).splitlines()[0], 120)
        raise ValueError(f"not YAML: {problem}{where}") from None
    return typed(value or {}, dict, "it")


def _word(data: Object, key: str) -> str | None:
    value = data.get(key)
    if value is None or value in _NULLS:
        return None
    return typed(value, str, key)
