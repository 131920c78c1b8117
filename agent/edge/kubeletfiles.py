"""What kubelet's own files say of how it treats CPUs: its configuration, its CPU manager's state.

Source: Kubernetes 1.36, KubeletConfiguration v1beta1 and pkg/kubelet/cm/cpumanager/state.
"""

import os
import stat
from dataclasses import dataclass
from typing import Any, Final

import yaml

from agent.core.bitmap import Bitmap
from agent.core.strict_json import parse_json, printable
from agent.errors import KubeletError

_STATE: Final = "cpu_manager_state"
_LARGEST_FILE: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeletFacts:
    """None where kubelet's files do not say. The state file counts before the configuration: it is
    what kubelet does, whatever its flags were."""

    cpu_manager_policy: str | None = None
    topology_policy: str | None = None
    topology_scope: str | None = None
    reserved_cpus: Bitmap | None = None


def read_kubelet(folder: str, config: str) -> KubeletFacts:
    """What the files in kubelet's `folder` and the file `config` say; neither need be there.

    Raises KubeletError for a file that cannot be read or understood.
    """
    state = _read_state(os.path.join(folder, _STATE))
    options = _read_config(config)
    reserved = _text(options, "reservedSystemCPUs", config)
    try:
        cpus = Bitmap.parse_list(reserved) if reserved else None
    except ValueError as error:
        raise KubeletError(f"{config}: reservedSystemCPUs: {error}") from error
    return KubeletFacts(
        cpu_manager_policy=_text(state, "policyName", _STATE)
        or _text(options, "cpuManagerPolicy", config),
        topology_policy=_text(options, "topologyManagerPolicy", config),
        topology_scope=_text(options, "topologyManagerScope", config),
        reserved_cpus=cpus,
    )


def _read_state(path: str) -> dict[str, Any]:
    text = _read(path)
    try:
        state = parse_json(text, _LARGEST_FILE) if text else {}
    except ValueError as error:
        raise KubeletError(f"{path}: {error}") from error
    return _mapping(state, path)


def _read_config(path: str) -> dict[str, Any]:
    text = _read(path)
    try:
        options = yaml.safe_load(text) if text else {}
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise KubeletError(f"{path}: is not YAML: {printable(str(error), 200)}") from error
    return _mapping(options or {}, path)


def _mapping(value: object, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise KubeletError(f"{path}: is no mapping")
    return value


def _text(values: dict[str, Any], name: str, path: str) -> str | None:
    value = values.get(name)
    if value is not None and not isinstance(value, str | int):
        raise KubeletError(f"{path}: {name} is no text")
    return None if value in (None, "") else str(value)


def _read(path: str) -> str:
    """The file's text, empty where there is none. Does not wait at a pipe."""
    try:
        with open(path, "rb", opener=lambda path, how: os.open(path, how | os.O_NONBLOCK)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise KubeletError(f"{path}: is not a regular file")
            data = file.read(_LARGEST_FILE + 1)
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise KubeletError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > _LARGEST_FILE:
        raise KubeletError(f"{path}: is larger than {_LARGEST_FILE >> 20} MiB")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise KubeletError(f"{path}: is not UTF-8 text: {error.reason}") from error
