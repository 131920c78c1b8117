"""Options: what they are by default, from a file, from flags, and what cannot be meant."""

import argparse
import dataclasses
import os
import re
import socket
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.config import (
    Config,
    add_flags,
    flags_given,
    format_example,
    load_config,
    node_name,
)
from agent.core.offer import IdKind
from agent.core.placement import MemoryRule
from agent.core.runtime import OnUnsatisfied, Unannotated
from agent.errors import ConfigError

Load = Callable[..., Config]

DEFAULTS: dict[str, object] = {
    "root": "/",
    "dev_dir": "/dev",
    "nvml": "",
    "plugin_dir": "/var/lib/kubelet/device-plugins",
    "pod_resources": "/var/lib/kubelet/pod-resources/kubelet.sock",
    "device_ids": IdKind.UUID,
    "visible_devices": IdKind.UUID,
    "cdi_kind": "",
    "fault_file": "/etc/nvidia-device-plugin/unhealthyDevices.json",
    "ignored_xids": (13, 31, 43, 45, 68, 109),
    "gpu_recovery_s": 60.0,
    "driver_timeout_s": 30.0,
    "nri_socket": "/var/run/nri/nri.sock",
    "nri_index": "10",
    "on_unsatisfied": OnUnsatisfied.FAIL,
    "memory": MemoryRule.AUTO,
    "unannotated_gpu_pods": Unannotated.LEAVE,
    "lift_quota": "yes",
    "reserved_cpus": "",
    "kubelet_dir": "/var/lib/kubelet",
    "kubelet_config": "/var/lib/kubelet/config.yaml",
    "kubelet_url": "",
    "kube_api": "",
    "service_account_dir": "/var/run/secrets/kubernetes.io/serviceaccount",
    "node_name": "",
    "topology_policy": "kubelet",
    "topology_scope": "kubelet",
    "ack_objects": "yes",
    "koordinator_device": "no",
    "startup_taint": "numalet.io/starting",
    "period_s": 10.0,
    "status_address": "127.0.0.1:9470",
    "log_level": "info",
}


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Config from the text of a file and flags; sentences come without the file's folder."""
    file = tmp_path / "agent.toml"

    def write_and_load(text: str | bytes = b"", /, **flags: str) -> Config:
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        try:
            return load_config(str(file), flags)
        except ConfigError as error:
            raise ConfigError(str(error).replace(f"{tmp_path}{os.sep}", "")) from error

    return write_and_load


def refusal(load: Load, text: str | bytes = b"", /, **flags: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text, **flags)
    sentence = str(caught.value)
    assert sentence.isprintable()
    return sentence


# --- what is taken --------------------------------------------------------------------------------


def test_defaults() -> None:
    assert dataclasses.asdict(Config()) == DEFAULTS


def test_without_file_and_flags_there_are_the_defaults(load: Load) -> None:
    assert load_config(None, {}) == load("# nothing\n") == Config()


TAKEN: list[tuple[str, str, str, object]] = [
    ("root", '"/host"', "/host", "/host"),
    ("root", '"/"', "/", "/"),
    ("root", '"/a folder/ключ"', "/a folder/ключ", "/a folder/ключ"),
    ("dev_dir", '"/run/nvidia/driver/dev"', "/run/nvidia/driver/dev", "/run/nvidia/driver/dev"),
    ("nvml", '"/lib/libnvidia-ml.so.1"', "/lib/libnvidia-ml.so.1", "/lib/libnvidia-ml.so.1"),
    ("nvml", '""', "", ""),
    ("plugin_dir", '"/kubelet/device-plugins/"', "/kubelet/device-plugins/",
     "/kubelet/device-plugins/"),
    ("pod_resources", '"/kubelet.sock"', "/kubelet.sock", "/kubelet.sock"),
    ("device_ids", '"index"', "index", IdKind.INDEX),
    ("visible_devices", '"index"', "index", IdKind.INDEX),
    ("cdi_kind", '"nvidia.com/gpu"', "nvidia.com/gpu", "nvidia.com/gpu"),
    ("fault_file", '"/etc/marks.json"', "/etc/marks.json", "/etc/marks.json"),
    ("ignored_xids", "[13]", "13", (13,)),
    ("ignored_xids", "[]", "", ()),
    ("ignored_xids", "[94, 13, 94]", "94,13,94", (13, 94)),
    ("ignored_xids", "[1, 65535]", "1,65535", (1, 65535)),
    ("gpu_recovery_s", "0", "0", 0.0),
    ("gpu_recovery_s", "1.5", "1.5", 1.5),
    ("driver_timeout_s", "600", "600", 600.0),
    ("nri_socket", '"/run/nri.sock"', "/run/nri.sock", "/run/nri.sock"),
    ("nri_index", '"99"', "99", "99"),
    ("on_unsatisfied", '"warn"', "warn", OnUnsatisfied.WARN),
    ("memory", '"bind"', "bind", MemoryRule.BIND),
    ("unannotated_gpu_pods", '"near"', "near", Unannotated.NEAR),
    ("lift_quota", '"no"', "no", "no"),
    ("reserved_cpus", '"0-1,64"', "0-1,64", "0-1,64"),
    ("kubelet_dir", '"/data/kubelet"', "/data/kubelet", "/data/kubelet"),
    ("kubelet_config", '"/etc/kubelet.yaml"', "/etc/kubelet.yaml", "/etc/kubelet.yaml"),
    ("kubelet_url", '"https://[::1]:10250/"', "https://[::1]:10250/", "https://[::1]:10250/"),
    ("kubelet_url", '"http://node-1:10255"', "http://node-1:10255", "http://node-1:10255"),
    ("kube_api", '"https://10.0.0.1:6443"', "https://10.0.0.1:6443", "https://10.0.0.1:6443"),
    ("service_account_dir", '"/account"', "/account", "/account"),
    ("node_name", '"gpu-1.cn-hangzhou"', "gpu-1.cn-hangzhou", "gpu-1.cn-hangzhou"),
    ("topology_policy", '"single-numa-node"', "single-numa-node", "single-numa-node"),
    ("topology_policy", '"none"', "none", "none"),
    ("topology_scope", '"pod"', "pod", "pod"),
    ("ack_objects", '"no"', "no", "no"),
    ("koordinator_device", '"yes"', "yes", "yes"),
    ("startup_taint", '"wait"', "wait", "wait"),
    ("startup_taint", '""', "", ""),
    ("period_s", "0.1", "0.1", 0.1),
    ("status_address", '"0.0.0.0:80"', "0.0.0.0:80", "0.0.0.0:80"),
    ("status_address", '"[::1]:0"', "[::1]:0", "[::1]:0"),
    ("status_address", '""', "", ""),
    ("log_level", '"debug"', "debug", "debug"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "toml", "text", "value"), TAKEN)
def test_a_file_and_a_flag_say_the_same(
    load: Load, name: str, toml: str, text: str, value: object
) -> None:
    expected = DEFAULTS | {name: value}
    for config in (load(f"{name} = {toml}"), load(**{name: text})):
        assert dataclasses.asdict(config) == expected
        assert type(getattr(config, name)) is type(value)


def test_every_option_has_a_row_above() -> None:
    assert {name for name, *_ in TAKEN} == set(DEFAULTS)


def test_flags_count_before_the_file_and_the_file_before_defaults(load: Load) -> None:
    config = load('root = "/file"\nperiod_s = 5\n', root="/flag")
    assert (config.root, config.period_s, config.log_level) == ("/flag", 5, "info")


def test_a_file_with_a_byte_mark_and_windows_line_ends(load: Load) -> None:
    assert load(b'\xef\xbb\xbfroot = "/host"\r\nperiod_s = 5\r\n').root == "/host"


# --- what is not ----------------------------------------------------------------------------------

SECONDS = "is a number of seconds from 0 to 86400, like 60, not"
PATH = "is an absolute path of at most 4095 bytes, like /, not"
XIDS = "is a list of whole numbers from 1 to 65535, like [13, 31] (as a flag: 13,31), not"
ADDRESS = "is an IP address and a port, like 127.0.0.1:9470 or [::1]:9470, or empty, not"

REFUSED_IN_A_FILE: dict[str, tuple[str, str]] = {
    "a number with a unit": ('gpu_recovery_s = "60s"', f'gpu_recovery_s {SECONDS} "60s"'),
    "a number as a text": ('gpu_recovery_s = "60"', f'gpu_recovery_s {SECONDS} "60"'),
    "a bool for a number": ("gpu_recovery_s = true", f"gpu_recovery_s {SECONDS} true"),
    "no number": ("gpu_recovery_s = nan", f"gpu_recovery_s {SECONDS} nan"),
    "for ever": ("gpu_recovery_s = inf", f"gpu_recovery_s {SECONDS} inf"),
    "less than nothing": ("gpu_recovery_s = -1", f"gpu_recovery_s {SECONDS} -1"),
    "more than a day": ("gpu_recovery_s = 86401", f"gpu_recovery_s {SECONDS} 86401"),
    "far more than a day": (
        f"gpu_recovery_s = 1{'0' * 400}", f"gpu_recovery_s {SECONDS} a huge number"),
    "more digits than Python writes": (
        f"gpu_recovery_s = 0x{'f' * 9000}", f"gpu_recovery_s {SECONDS} a huge number"),
    "a date": ("gpu_recovery_s = 2026-01-01", f"gpu_recovery_s {SECONDS} 2026-01-01"),
    "a list for a number": ("gpu_recovery_s = [60]", f"gpu_recovery_s {SECONDS} [60]"),
    "a table for a number": ("[gpu_recovery_s]\na = 1", f"gpu_recovery_s {SECONDS} a table"),
    "no time between passes": (
        "period_s = 0", "period_s is a number of seconds from 0.1 to 3600, like 10, not 0"),
    "no time for the driver": (
        "driver_timeout_s = 0.0",
        "driver_timeout_s is a number of seconds from 0.1 to 600, like 30, not 0.0"),
    "a relative path": ('root = "host"', f'root {PATH} "host"'),
    "an empty path": ('root = ""', f'root {PATH} ""'),
    "a path with NUL": (r'root = "/a\u0000b"', rf'root {PATH} "/a\u0000b"'),
    "a number for a path": ("root = 1", f"root {PATH} 1"),
    "a table for a path": ("root = {}", f"root {PATH} a table"),
    "a path that is too long": (f'root = "/{"a" * 4095}"', f'root {PATH} "/{"a" * 59}…"'),
    "a relative library": (
        'nvml = "libnvidia-ml.so.1"',
        "nvml is an absolute path of at most 4095 bytes, like /usr/lib64/libnvidia-ml.so.1, or "
        'empty, not "libnvidia-ml.so.1"'),
    "a word that is none of them": (
        'device_ids = "serial"', 'device_ids is one of uuid, index, not "serial"'),
    "a word in capitals": (
        'log_level = "INFO"', 'log_level is one of debug, info, warning, error, not "INFO"'),
    "an empty word": (
        'log_level = ""', 'log_level is one of debug, info, warning, error, not ""'),
    "a number for a list": ("ignored_xids = 13", f"ignored_xids {XIDS} 13"),
    "a text for a list": ('ignored_xids = "13"', f'ignored_xids {XIDS} "13"'),
    "texts in a list": ('ignored_xids = ["13"]', f'ignored_xids {XIDS} ["13"]'),
    "a bool in a list": ("ignored_xids = [true]", f"ignored_xids {XIDS} [true]"),
    "a float in a list": ("ignored_xids = [13.0]", f"ignored_xids {XIDS} [13.0]"),
    "a nought in a list": ("ignored_xids = [13, 0]", f"ignored_xids {XIDS} [13, 0]"),
    "a number too large in a list": (
        "ignored_xids = [65536]", f"ignored_xids {XIDS} [65536]"),
    "a policy as Kubernetes' objects spell it": (
        'topology_policy = "SingleNUMANode"',
        "topology_policy is one of kubelet, none, best-effort, restricted, single-numa-node, "
        'not "SingleNUMANode"'),
    "a bool for yes": (
        "ack_objects = true", "ack_objects is one of yes, no, not true"),
    "no path to the account": (
        'service_account_dir = ""',
        "service_account_dir is an absolute path of at most 4095 bytes, like "
        '/var/run/secrets/kubernetes.io/serviceaccount, not ""'),
    "a list in a list": ("ignored_xids = [[13], {}]", f"ignored_xids {XIDS} […, …]"),
    "a long list": (
        f"ignored_xids = [{'0, ' * 30}]", f"ignored_xids {XIDS} [{'0, ' * 20}…]"),
    "an address without a port": (
        'status_address = "127.0.0.1"', f'status_address {ADDRESS} "127.0.0.1"'),
    "an option written with dashes": (
        'plugin-dir = "/a"', '"plugin-dir" is not an option; is plugin_dir meant?'),
    "a misspelt option": (
        "gpu_recovery = 60", '"gpu_recovery" is not an option; is gpu_recovery_s meant?'),
    "an option in a table": (
        '[agent]\nroot = "/"', '"agent" is not an option'),
    "an option with a line break in it": (
        r'"a\nb" = 1', r'"a\nb" is not an option'),
}  # fmt: skip


@pytest.mark.parametrize(("text", "sentence"), REFUSED_IN_A_FILE.values(), ids=REFUSED_IN_A_FILE)
def test_a_file_with(load: Load, text: str, sentence: str) -> None:
    assert refusal(load, text) == f"agent.toml: {sentence}"


REFUSED_AS_A_FLAG: dict[str, tuple[str, str, str]] = {
    "a number with a unit": ("gpu_recovery_s", "60s", f'--gpu-recovery-s {SECONDS} "60s"'),
    "an empty number": ("gpu_recovery_s", "", f'--gpu-recovery-s {SECONDS} ""'),
    "no number": ("gpu_recovery_s", "nan", f"--gpu-recovery-s {SECONDS} nan"),
    "for ever": ("gpu_recovery_s", "1e999", f"--gpu-recovery-s {SECONDS} inf"),
    "true": ("gpu_recovery_s", "true", f'--gpu-recovery-s {SECONDS} "true"'),
    "a relative path": ("root", "..", f'--root {PATH} ".."'),
    "bytes that are no text": ("root", "/\udcff", rf'--root {PATH} "/\udcff"'),
    "a list in brackets": ("ignored_xids", "[13]", f'--ignored-xids {XIDS} "[13]"'),
    "a list with blanks": ("ignored_xids", "13, 31", f'--ignored-xids {XIDS} "13, 31"'),
    "a list with a comma too many": ("ignored_xids", "13,", f'--ignored-xids {XIDS} "13,"'),
    "a list with a sign": ("ignored_xids", "-13", f'--ignored-xids {XIDS} "-13"'),
    "a list of digits that are not ASCII": ("ignored_xids", "١٣", f'--ignored-xids {XIDS} "١٣"'),
    "a list of a huge number": (
        "ignored_xids", "9" * 99, f'--ignored-xids {XIDS} "{"9" * 60}…"'),
    "no option": ("rot", "/", '"--rot" is not an option; is root meant?'),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "sentence"), REFUSED_AS_A_FLAG.values(), ids=REFUSED_AS_A_FLAG
)
def test_a_flag_with(load: Load, name: str, text: str, sentence: str) -> None:
    assert refusal(load, **{name: text}) == sentence


def test_a_flag_does_not_hide_what_is_wrong_in_the_file(load: Load) -> None:
    assert refusal(load, "root = 1", root="/").startswith("agent.toml: root is")


BROKEN: dict[str, tuple[bytes, str]] = {
    "no value": (b"root =", "is not TOML: "),
    "a value twice": (b'root = "/"\nroot = "/"\n', "is not TOML: "),
    "a control character": (b"a = '\0'", "is not TOML: "),
    "too many digits": (b"a = " + b"9" * 5000, "is not TOML: "),
    "lists without an end": (b"a = " + b"[" * 50000, "is not TOML: "),
    "tables without an end": (b"a = " + b"{a=" * 20000, "is not TOML: "),
    "no text": (b"root = '\xff'", "is not UTF-8 text: invalid start byte"),
    "a byte too many": (b"#" * 65537, "cannot be read: it is larger than 64 KiB"),
}


@pytest.mark.parametrize(("data", "sentence"), BROKEN.values(), ids=BROKEN)
def test_a_file_that_is_broken_by(load: Load, data: bytes, sentence: str) -> None:
    assert refusal(load, data).startswith(f"agent.toml: {sentence}")


def test_a_broken_file_is_told_with_the_place(load: Load) -> None:
    assert "at line 2, column" in refusal(load, 'root = "/"\nperiod_s = ,\n')


def test_a_file_as_large_as_a_file_may_be(load: Load) -> None:
    assert load(b"#" * 65536) == Config()


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reasons = {
        str(tmp_path / "none"): "cannot be read: No such file or directory",
        str(tmp_path): "cannot be read: Is a directory",
        str(tmp_path / "pipe"): "cannot be read: it is not a regular file",
        "": "cannot be read: No such file or directory",
        "a\0b": "cannot be read: embedded null byte",
    }
    before = sorted(os.listdir("/proc/self/fd"))
    for file, reason in reasons.items():
        with pytest.raises(ConfigError) as caught:
            load_config(file, {})
        assert str(caught.value) == f"{file}: {reason}".replace("\0", "?")
    assert sorted(os.listdir("/proc/self/fd")) == before


# --- CDI kinds, addresses, sockets ----------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    ["nvidia.com/gpu", "vendor.com/device", "foo.bar.baz/foo-bar123.B_az", "v/c", "V1/c2",
     f"{'v' * 253}/{'c' * 63}"],
)  # fmt: skip
def test_cdi_kinds(kind: str) -> None:
    assert Config(cdi_kind=kind).cdi_kind == kind


@pytest.mark.parametrize(
    "kind",
    ["gpu", "/", "/gpu", "nvidia.com/", "nvidia.com/gpu/", "nvidia.com/gpu/0", "nvidia.com/gpu=0",
     " nvidia.com/gpu", "nvidia.com/gpu\n", "nvidia com/gpu", "-nvidia.com/gpu", "nvidia.com-/gpu",
     ".com/gpu", "1com/gpu", "nvidia.com/0", "nvidia.com/_gpu", "nvidia.com/gpu_", "nvidiа.com/gpu",
     f"{'v' * 254}/c", f"v/{'c' * 64}"],
)  # fmt: skip
def test_no_cdi_kinds(kind: str) -> None:
    meant = "cdi_kind is a CDI kind of vendor and class, like nvidia.com/gpu, or empty, not "
    with pytest.raises(ValueError, match=meant):
        Config(cdi_kind=kind)


@pytest.mark.parametrize("option", ["kube_api", "kubelet_url"])
@pytest.mark.parametrize(
    ("url", "is_meant"),
    [
        ("https://10.0.0.1:6443", True),
        ("http://127.0.0.1:8080/", True),
        ("https://[fd00::1]:6443", True),
        ("https://api.example.com", True),
        ("10.0.0.1:6443", False),
        ("ftp://10.0.0.1", False),
        ("https://", False),
        ("https://10.0.0.1:6443/api", False),
        ("https://user@10.0.0.1", False),
        ("https://10.0.0.1:6443\n", False),
        ("https://10.0.0.1 ", False),
        ("https://апи", False),
        (f"https://{'a' * 256}", False),
    ],
)
def test_urls(option: str, url: str, is_meant: bool) -> None:
    if is_meant:
        assert getattr(Config(**{option: url}), option) == url
        return
    with pytest.raises(ValueError, match=f"{option} is a URL like"):
        Config(**{option: url})


@pytest.mark.parametrize(
    ("name", "is_meant"),
    [
        ("gpu-node-1", True),
        ("10.0.0.1", True),
        ("cn-hangzhou.192.168.0.1", True),
        ("a" * 253, True),
        ("a" * 254, False),
        ("Node-1", False),
        ("node_1", False),
        ("-node", False),
        ("node.", False),
        ("node..1", False),
        ("node/1", False),
        ("node 1", False),
        ("node\n", False),
        ("../node", False),
    ],
)
def test_names_of_nodes(name: str, is_meant: bool) -> None:
    """As Kubernetes takes them: subdomains of DNS."""
    if is_meant:
        assert Config(node_name=name).node_name == name
        return
    with pytest.raises(ValueError, match="node_name is a node's name"):
        Config(node_name=name)


@pytest.mark.parametrize(
    ("taint", "is_meant"),
    [
        ("numalet.io/starting", True),
        ("starting", True),
        ("Not_Ready.yet", True),
        (f"{'p' * 253}/{'n' * 63}", True),
        ("numalet.io/", False),
        ("/starting", False),
        ("a/b/c", False),
        ("numalet.io/starting:NoSchedule", False),
        ("starting=true", False),
        ("numalet_io/starting", False),
        ("-starting", False),
        ("n" * 64, False),
        ("starting\n", False),
    ],
)
def test_keys_of_taints(taint: str, is_meant: bool) -> None:
    """As Kubernetes takes them: qualified names, without an effect."""
    if is_meant:
        assert Config(startup_taint=taint).startup_taint == taint
        return
    with pytest.raises(ValueError, match="startup_taint is the key of a taint"):
        Config(startup_taint=taint)


@pytest.mark.parametrize(
    ("option", "environment", "name"),
    [
        pytest.param("gpu-1", "other", "gpu-1", id="the option's"),
        pytest.param("", "gpu-2", "gpu-2", id="the environment's"),
        pytest.param("", "", os.uname().nodename.lower(), id="the host's"),
    ],
)
def test_what_the_node_is_called(
    monkeypatch: pytest.MonkeyPatch, option: str, environment: str, name: str
) -> None:
    monkeypatch.setenv("NODE_NAME", environment)
    assert node_name(Config(node_name=option)) == name


@pytest.mark.parametrize(
    "address",
    ["0.0.0.0:0", "127.0.0.1:65535", "10.1.2.3:09470", "[::]:9470", "[fd00::1]:1", "[fe80::1%lo]:1",
     "[::ffff:127.0.0.1]:1"],
)  # fmt: skip
def test_addresses(address: str) -> None:
    assert Config(status_address=address).status_address == address


@pytest.mark.parametrize(
    "address",
    [":9470", "9470", "localhost:9470", "127.0.0.1", "127.0.0.1:", "127.0.0.1:65536", "::1:9470",
     "127.0.0.1:-1", "127.0.0.1:http", "127.0.0.1:١", "[::1]", "[::1]9470", "[127.0.0.1]:9470",
     "127.1:9470", "256.0.0.1:9470", "[::g]:9470", "http://127.0.0.1:9470", "127.0.0.1:9470/",
     "127.0.0.1:9470\n", " 127.0.0.1:9470", "[]:1", "[[::1]]:1", "127.0.0.1:000001"],
)  # fmt: skip
def test_no_addresses(address: str) -> None:
    with pytest.raises(ValueError, match="status_address is an IP address and a port"):
        Config(status_address=address)


@pytest.mark.parametrize(
    ("name", "below"), [("plugin_dir", "/numalet-00000000.sock"), ("pod_resources", "")]
)
def test_the_longest_path_is_the_longest_that_the_kernel_listens_at(name: str, below: str) -> None:
    """In bytes, of which é has two."""
    with tempfile.TemporaryDirectory(prefix="é", dir="/tmp") as short:
        room = 107 - len(below) - len(os.fsencode(short)) - 1
        fits, too_long = f"{short}/{'a' * room}", f"{short}/{'a' * (room + 1)}"
        if below:
            os.mkdir(fits)
            os.mkdir(too_long)
        with socket.socket(socket.AF_UNIX) as one, socket.socket(socket.AF_UNIX) as other:
            one.bind(f"{fits}{below}")
            with pytest.raises(OSError, match="too long"):
                other.bind(f"{too_long}{below}")
        assert getattr(Config(**{name: fits}), name) == fits
        with pytest.raises(ValueError, match=f"{name} is an absolute path of at most"):
            Config(**{name: too_long})


# --- Config itself --------------------------------------------------------------------------------


def test_a_constructor_takes_what_python_has(load: Load) -> None:
    config = Config(device_ids="index", ignored_xids=[31, 13], period_s=5)  # type: ignore[arg-type]
    assert config == load('device_ids = "index"\nignored_xids = [13, 31]\nperiod_s = 5')
    assert type(config.device_ids) is IdKind
    assert hash(config) == hash(dataclasses.replace(config))


WRONG: list[dict[str, Any]] = [
    {"root": None},
    {"root": b"/"},
    {"nvml": "relative"},
    {"period_s": True},
    {"period_s": "10"},
    {"device_ids": None},
    {"device_ids": 0},
    {"ignored_xids": {13}},
    {"ignored_xids": (13, None)},
    {"status_address": None},
    {"cdi_kind": 1},
    {"log_level": ["info"]},
]


@pytest.mark.parametrize("values", WRONG, ids=str)
def test_a_constructor_does_not_take(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(values))} is "):
        Config(**values)


def test_an_invalid_config_cannot_be_made_of_a_valid_one() -> None:
    with pytest.raises(ValueError, match="root is an absolute path"):
        dataclasses.replace(Config(), root="")


SCALARS = st.one_of(
    st.text(), st.integers(), st.floats(), st.booleans(), st.dates(), st.just("/"), st.none()
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5
)


def outcome(make: Callable[[], Config]) -> Config | str:
    try:
        return make()
    except (ValueError, ConfigError) as error:
        return str(error)


@given(st.dictionaries(st.sampled_from(sorted(DEFAULTS)), VALUES, max_size=2))
def test_whatever_is_given_is_taken_or_refused_in_one_line(values: dict[str, Any]) -> None:
    config = outcome(lambda: Config(**values))
    if isinstance(config, str):
        assert config.isprintable()
        assert len(config) < 2000
    else:
        assert dataclasses.replace(config) == config


@given(st.sampled_from(sorted(DEFAULTS)), st.text(st.characters()))
def test_whatever_a_flag_says_is_taken_or_refused_in_one_line(name: str, text: str) -> None:
    config = outcome(lambda: load_config(None, {name: text}))
    if isinstance(config, str):
        assert config.startswith(f"--{dashed(name)} is ")
        assert config.isprintable()


# --- the command line -----------------------------------------------------------------------------


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="agent", allow_abbrev=False)
    add_flags(parser)
    return parser


def test_flags_that_are_given(parser: argparse.ArgumentParser) -> None:
    line = ["--config", "a.toml", "--root", "/host", "--ignored-xids=13,31", "--nvml", ""]
    parsed = parser.parse_args(line)
    assert parsed.config == "a.toml"
    assert flags_given(parsed) == {"root": "/host", "ignored_xids": "13,31", "nvml": ""}


def test_no_flags(parser: argparse.ArgumentParser) -> None:
    parsed = parser.parse_args([])
    assert parsed.config is None
    assert flags_given(parsed) == {}


@pytest.mark.parametrize("flag", ["--config", "--root", "--nvml"])
def test_a_flag_that_is_given_twice(
    parser: argparse.ArgumentParser, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        parser.parse_args([flag, "", flag, "/b"])
    assert exited.value.code == 2
    assert f"argument {flag}: is given twice" in capsys.readouterr().err


def test_help_names_every_option_with_its_default(parser: argparse.ArgumentParser) -> None:
    text = " ".join(parser.format_help().replace("-\n", "-").split())
    options = dict(part.split(" ", 1) for part in re.split(r" (?=--[a-z])", text)[1:])
    assert options.pop("--help")
    assert options.pop("--config").startswith("FILE a TOML file")
    assert list(options) == [f"--{dashed(name)}" for name in DEFAULTS]
    for default, about in zip(DEFAULTS.values(), options.values(), strict=True):
        assert about.replace(" ", "").endswith(f"(default:{as_toml(default)})".replace(" ", ""))


# --- the example ----------------------------------------------------------------------------------


def dashed(name: str) -> str:
    return name.replace("_", "-")


def as_toml(value: object) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    return str(list(value)) if isinstance(value, tuple) else f"{value:g}"


def test_the_example_sets_nothing(load: Load) -> None:
    assert tomllib.loads(format_example()) == {}


def test_the_example_without_its_signs_sets_every_default(load: Load) -> None:
    lines = format_example().splitlines()
    options = [line.removeprefix("# ") for line in lines if line.partition(" = ")[1]]
    table = tomllib.loads("\n".join(options))
    assert list(table) == list(DEFAULTS)
    assert load("\n".join(options)) == Config()


def test_the_example_says_above_each_option_what_it_is() -> None:
    _, *paragraphs = format_example().split("\n\n")
    assert len(paragraphs) == len(DEFAULTS)
    for name, paragraph in zip(DEFAULTS, paragraphs, strict=True):
        *comments, option = paragraph.strip().splitlines()
        assert option == f"# {name} = {as_toml(DEFAULTS[name])}"
        assert len(comments) >= 2
        assert all(line.startswith("# ") and len(line) <= 100 for line in comments)


# --- texts with a form of their own ---------------------------------------------------------------

FORMS = [
    ("nri_index", "00", "two digits but not 00, like 10"),
    ("nri_index", "7", "two digits but not 00, like 10"),
    ("nri_index", "１０", "two digits but not 00, like 10"),
    ("reserved_cpus", "0-", "a list of CPUs, like 0-1,64"),
    ("reserved_cpus", "1-0", "a list of CPUs, like 0-1,64"),
    ("reserved_cpus", " ", "a list of CPUs, like 0-1,64"),
    ("kubelet_url", "localhost:10250", "a URL like https://127.0.0.1:10250"),
    ("kubelet_url", "https://node/pods", "a URL like https://127.0.0.1:10250"),
    ("kubelet_url", "ftp://node", "a URL like https://127.0.0.1:10250"),
]


@pytest.mark.parametrize(("name", "text", "meant"), FORMS)
def test_what_has_another_form_is_refused(load: Load, name: str, text: str, meant: str) -> None:
    sentence = refusal(load, f'{name} = "{text}"')
    assert sentence.startswith(f"agent.toml: {name} is {meant}, or empty, not ")
