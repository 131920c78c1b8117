"""What the agent may be told: defaults, then a TOML file, then flags; the later one counts.

An option is one line in Config: its default, its help (what it is, and why that default), and which
values it takes. Flags, the commented example file, checks and sentences all come from that line.
"""

import argparse
import difflib
import json
import os
import textwrap
import tomllib
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields
from typing import Any, Final

from agent import options
from agent.core.offer import IdKind
from agent.core.placement import MemoryRule
from agent.core.report import TOPOLOGY_POLICIES, TOPOLOGY_SCOPES
from agent.core.runtime import OnUnsatisfied, Unannotated
from agent.core.strict_json import printable
from agent.errors import ConfigError
from agent.files import read_bytes
from agent.options import Option

_LARGEST_FILE: Final = 64 << 10


# --- the options ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All options. Raises ValueError with one sentence for a value that cannot be meant."""

    root: str = options.path(
        "/",
        "The host's files (sysfs, procfs) are below this folder. In a container it is where the "
        "host is mounted; outside of one, the host itself.",
    )
    dev_dir: str = options.path(
        "/dev",
        "Where the GPU driver's device nodes are on the host; they are looked for at root and this "
        "path together. Only a driver that a container installs has them elsewhere.",
    )
    nvml: str = options.path(
        "",
        "The GPU driver's library, libnvidia-ml.so.1. Empty: the one that the loader finds, which "
        "is the right one wherever a container runtime or a package put it in place.",
        example="/usr/lib64/libnvidia-ml.so.1",
    )
    plugin_dir: str = options.path(
        "/var/lib/kubelet/device-plugins",
        "Kubelet's folder for device plugins, as the agent sees it. Kubelet has it there unless it "
        "was started with another root folder.",
        longest=options.LONGEST_SOCKET_DIR,
    )
    pod_resources: str = options.path(
        "/var/lib/kubelet/pod-resources/kubelet.sock",
        "Kubelet's socket that tells which pod holds which devices, as the agent sees it. Kubelet "
        "has it there unless it was started with another root folder.",
        longest=options.LONGEST_SOCKET,
    )
    device_ids: IdKind = options.word(  # noqa: RUF009 (a field, not a default)
        IdKind.UUID,
        "What kubelet knows a GPU by. A uuid stays with its GPU when cards are moved or one is "
        "lost; an index does not, but some schedulers name GPUs by it.",
        tuple(IdKind),
    )
    visible_devices: IdKind = options.word(  # noqa: RUF009
        IdKind.UUID,
        "What NVIDIA_VISIBLE_DEVICES names a container's GPUs by. A uuid means the same GPU to "
        "every driver and runtime.",
        tuple(IdKind),
    )
    cdi_kind: str = options.text(
        "",
        "Answer kubelet with CDI names of this kind instead of device nodes. Empty: device nodes, "
        "which every runtime understands and which need no CDI files on the host.",
        metavar="VENDOR/CLASS",
        meant="a CDI kind of vendor and class, like nvidia.com/gpu",
        is_meant=options.is_cdi_kind,
    )
    fault_file: str = options.path(
        "/etc/nvidia-device-plugin/unhealthyDevices.json",
        "The administrator's file of GPUs that are not to be given out, as the agent sees it. No "
        "file, no marks. The default is the path that ACK documents.",
    )
    ignored_xids: tuple[int, ...] = options.numbers(
        (13, 31, 43, 45, 68, 109),
        "Xid errors that do not make a GPU unhealthy. The default are those that an application "
        "causes, not the GPU.",
        most=65535,
    )
    gpu_recovery_s: float = options.seconds(
        60,
        "How long a GPU must be sound without a break before it is offered again. Less, and a GPU "
        "that comes and goes takes pods down with it.",
        least=0,
        most=86400,
    )
    driver_timeout_s: float = options.seconds(
        30,
        "How long the GPU driver may take to describe all GPUs. Where nothing keeps them awake it "
        "first starts each of them, which takes seconds.",
        least=0.1,
        most=600,
    )
    nri_socket: str = options.path(
        "/var/run/nri/nri.sock",
        "The container runtime's socket for plugins, as the agent sees it. Where nobody serves it, "
        "cpusets are written to the cgroups instead.",
        longest=options.LONGEST_SOCKET,
    )
    nri_index: str = options.text(
        "10",
        "Where the agent stands among the runtime's plugins, which are asked in this order.",
        metavar="NN",
        meant="two digits but not 00, like 10",
        is_meant=options.is_nri_index,
    )
    on_unsatisfied: OnUnsatisfied = options.word(  # noqa: RUF009
        OnUnsatisfied.FAIL,
        "What becomes of a container whose pod asks for CPUs of its own and cannot have them. At "
        "fail it is not started, and the pod says why; at warn it runs on the shared CPUs.",
        tuple(OnUnsatisfied),
    )
    memory: MemoryRule = options.word(  # noqa: RUF009
        MemoryRule.AUTO,
        "Whether a pinned pod's memory is bound to its NUMA nodes. At auto, where it has limits "
        "that fit there: a bind that does not fit ends in an OOM kill.",
        tuple(MemoryRule),
    )
    unannotated_gpu_pods: Unannotated = options.word(  # noqa: RUF009
        Unannotated.LEAVE,
        "What becomes of GPU pods that ask for no pinning. At near they run on the shared CPUs of "
        "their GPUs' nodes; at leave on all shared CPUs.",
        tuple(Unannotated),
    )
    lift_quota: str = options.word(
        "yes",
        "Whether the CFS quota of a pinned container is lifted: it would throttle it on CPUs that "
        "nobody else may use.",
        ("yes", "no"),
    )
    reserved_cpus: str = options.text(
        "",
        "CPUs that no pod is pinned to. Empty: what kubelet's configuration reserves; where that "
        "reserves none, one core always stays free.",
        metavar="LIST",
        meant="a list of CPUs, like 0-1,64",
        is_meant=options.is_cpu_list,
    )
    kubelet_dir: str = options.path(
        "/var/lib/kubelet",
        "Kubelet's own folder, as the agent sees it. Its cpu_manager_state tells whether kubelet "
        "pins CPUs itself, in which case the agent only watches.",
    )
    kubelet_config: str = options.path(
        "/var/lib/kubelet/config.yaml",
        "Kubelet's configuration file, as the agent sees it. Where there is none, kubelet's "
        "defaults are taken.",
    )
    kubelet_url: str = options.text(
        "",
        "Where kubelet tells its pods, such as https://127.0.0.1:10250. Needed only where cpusets "
        "are written to the cgroups, which do not tell what a pod asks.",
        metavar="URL",
        meant="a URL like https://127.0.0.1:10250",
        is_meant=options.is_url,
    )
    kube_api: str = options.text(
        "",
        "Where the Kubernetes API is, such as https://10.0.0.1:6443. Empty: where a pod is told "
        "that it is (KUBERNETES_SERVICE_HOST); outside of a pod nothing is reported.",
        metavar="URL",
        meant="a URL like https://10.0.0.1:6443",
        is_meant=options.is_url,
    )
    service_account_dir: str = options.path(
        "/var/run/secrets/kubernetes.io/serviceaccount",
        "The folder with the agent's token and with the ca.crt of the Kubernetes API, as "
        "Kubernetes mounts it into pods. Both may change at any time.",
    )
    node_name: str = options.text(
        "",
        "What Kubernetes calls this node. Empty: what the environment variable NODE_NAME says; "
        "where there is none, the host's name, as kubelet itself does.",
        metavar="NAME",
        meant="a node's name, like gpu-node-1",
        is_meant=options.is_node_name,
    )
    topology_policy: str = options.word(
        "kubelet",
        "The topology manager policy that is reported to schedulers; at kubelet, the one that "
        "kubelet has. A scheduler that only aligns pods on nodes of the policy single-numa-node "
        "can be made to do so here.",
        ("kubelet", *TOPOLOGY_POLICIES),
    )
    topology_scope: str = options.word(
        "kubelet",
        "The topology manager scope that is reported to schedulers; at kubelet, the one that "
        "kubelet has.",
        ("kubelet", *TOPOLOGY_SCOPES),
    )
    ack_objects: str = options.word(
        "yes",
        "Whether the node gets the labels and the ConfigMap that ACK's tools read (card model, "
        "links for arena), and whether faulty GPUs are read from ACK's ConfigMaps.",
        ("yes", "no"),
    )
    koordinator_device: str = options.word(
        "no",
        "Whether Koordinator's Device object is written. Only for a cluster with Koordinator's "
        "scheduler whose koordlet does not write it.",
        ("yes", "no"),
    )
    startup_taint: str = options.text(
        "numalet.io/starting",
        "The key of a taint that is taken from the node once kubelet has our GPUs, so that no pod "
        "comes before. Empty: no taint is touched.",
        metavar="KEY",
        meant="the key of a taint, like numalet.io/starting",
        is_meant=options.is_label_key,
    )
    period_s: float = options.seconds(
        10,
        "How often the node is looked at when nothing rings. Everything that matters rings; this "
        "is for what was missed.",
        least=0.1,
        most=3600,
    )
    status_address: str = options.text(
        "127.0.0.1:9470",
        "Where /healthz, /readyz and /metrics are served. Port 0: any free one. Empty: nowhere. "
        "The default is seen by the host only; 0.0.0.0:9470 by the whole network.",
        metavar="IP:PORT",
        meant="an IP address and a port, like 127.0.0.1:9470 or [::1]:9470",
        is_meant=options.is_address,
    )
    log_level: str = options.word(
        "info",
        "The least important events that are logged. At info, what changes; at debug, every call.",
        ("debug", "info", "warning", "error"),
    )

    def __post_init__(self) -> None:
        for name in _OPTIONS:
            object.__setattr__(self, name, _accept(name, name, getattr(self, name)))


_FIELDS: Final[Mapping[str, Field[Any]]] = {each.name: each for each in fields(Config)}
_OPTIONS: Final[Mapping[str, Option]] = {
    name: each.metadata["option"] for name, each in _FIELDS.items()
}


def _accept(name: str, where: str, value: object) -> Any:
    """The value as Config holds it. Raises ValueError; `where` is the subject of its sentence."""
    option = _OPTIONS[name]
    accepted = option.accept(value)
    if accepted is None:
        raise ValueError(f"{where} is {option.meant}, not {_shown(value)}")
    return accepted


def _shown(value: object) -> str:
    """The value for a sentence: short, printable, as TOML has it."""
    if isinstance(value, str):
        cut = value if len(value) <= 60 else f"{value[:60]}…"
        return json.dumps(cut, ensure_ascii=not cut.isprintable())
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value}" if value.bit_length() <= 64 else "a huge number"
    if isinstance(value, list | tuple):
        items = ["…" if isinstance(item, list | dict) else _shown(item) for item in value[:20]]
        return f"[{', '.join(items + ['…'] * (len(value) > 20))}]"
    if isinstance(value, dict):
        return "a table"
    return f"{value}"


def node_name(config: Config) -> str:
    """What Kubernetes calls this node."""
    return config.node_name or os.environ.get("NODE_NAME") or os.uname().nodename.lower()


# --- where they come from -------------------------------------------------------------------------


class _Once(argparse.Action):
    """Stores a flag's text, and refuses a flag that is given twice."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        if getattr(namespace, self.dest) is not None:
            raise argparse.ArgumentError(self, "is given twice")
        setattr(namespace, self.dest, values)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds `--config FILE` and a flag for each option; what is not given is None."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        action=_Once,
        help="a TOML file with the options below, their names written with _ and without --",
    )
    for name, option in _OPTIONS.items():
        default = _to_toml(_FIELDS[name].default)
        parser.add_argument(
            _flag(name),
            metavar=option.metavar,
            action=_Once,
            help=f"{option.help} (default: {default})".replace("%", "%%"),
        )


def flags_given(parsed: argparse.Namespace) -> dict[str, str]:
    """Option → text, of what `add_flags` added and the command line gave."""
    texts = {name: getattr(parsed, name, None) for name in _OPTIONS}
    return {name: text for name, text in texts.items() if text is not None}


def load_config(file: str | None, flags: Mapping[str, str]) -> Config:
    """The options that this TOML file and then these flags set; `flags` is option → text.

    Raises ConfigError with one sentence that names file and option, or flag, and what would be
    right.
    """
    where = printable(file or "", 400)
    table = _read_toml(file, where) if file is not None else {}
    values = {name: _read_value(f"{where}: ", name, name, table[name]) for name in table}
    for name, text in flags.items():
        option = _OPTIONS.get(name)
        values[name] = _read_value("", _flag(name), name, option.from_text(text) if option else "")
    return Config(**values)


def _read_value(prefix: str, spelling: str, name: str, value: object) -> Any:
    if name not in _OPTIONS:
        near = difflib.get_close_matches(name.replace("-", "_"), _OPTIONS, n=1)
        hint = f"; is {near[0]} meant?" if near else ""
        raise ConfigError(f"{prefix}{_shown(spelling)} is not an option{hint}")
    try:
        return _accept(name, f"{prefix}{spelling}", value)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _read_toml(file: str, where: str) -> dict[str, object]:
    try:
        text = read_bytes(file, _LARGEST_FILE).decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: is not UTF-8 text: {error.reason}") from error
    except ValueError as error:
        raise ConfigError(f"{where}: cannot be read: {error}") from error
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ConfigError(f"{where}: is not TOML: it is nested too deep") from error
    except ValueError as error:
        raise ConfigError(f"{where}: is not TOML: {printable(str(error), 200)}") from error


def format_example() -> str:
    """A TOML file with every option commented out at its default, and its help above it."""
    parts = ["# Options of the agent, each with its default. A flag counts before this file.\n"]
    for name, option in _OPTIONS.items():
        default = _to_toml(_FIELDS[name].default)
        parts.append(
            _to_comment(option.help)
            + _to_comment(f"Takes {option.meant}.")
            + f"# {name} = {default}\n"
        )
    return "\n".join(parts)


def _to_comment(text: str) -> str:
    lines = textwrap.wrap(text, 98, break_long_words=False, break_on_hyphens=False)
    return "".join(f"# {line}\n" for line in lines)


def _to_toml(value: object) -> str:
    if isinstance(value, str):
        return json.dumps(str(value), ensure_ascii=False)
    if isinstance(value, tuple):
        return json.dumps(value)
    return f"{value:g}"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
