"""Kubelet's files as they are, are not, and should not be.

The state files are as kubelet writes them; their checksums do not matter here.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from agent.core.bitmap import Bitmap
from agent.edge.kubeletfiles import KubeletFacts, read_cpu_manager
from agent.errors import KubeletError

UID = "235148fe-393f-47a8-a17d-bd55bc1a836b"
OTHER = "c0ffee00c0ffee00c0ffee00c0ffee00"

NONE_STATE = '{"policyName":"none","defaultCpuSet":"","checksum":1353318690}'
STATIC_STATE = (
    '{"policyName":"static","defaultCpuSet":"0,2-12,14-23","entries":{"'
    + UID
    + '":{"a":"1,13","b":"15-16"}},"checksum":1552716370}'
)
POD_STATE = (
    '{"policyName":"static","defaultCpuSet":"0-3","entries":{"'
    + UID
    + '":{"a":"4"}},"podEntries":{"'
    + UID
    + '":{"cpuSet":"4-5"},"'
    + OTHER
    + '":{"cpuSet":"6-7"},"gone":{}},"checksum":1}'
)
KUBEADM_CONFIG = """\
apiVersion: kubelet.config.k8s.io/v1beta1
authentication:
  x509:
    clientCAFile: /etc/kubernetes/pki/ca.crt
cgroupDriver: systemd
clusterDNS:
- 10.96.0.10
containerRuntimeEndpoint: ""
cpuManagerReconcilePeriod: 0s
kind: KubeletConfiguration
logging:
  flushFrequency: 0
"""
FULL_CONFIG = """\
---
kind: KubeletConfiguration
cpuManagerPolicy: static
reservedSystemCPUs: 0-1,64-65
topologyManagerPolicy: "single-numa-node"
topologyManagerScope: pod
cgroupDriver: cgroupfs
"""


def exclusive(text: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, Bitmap]]:
    return {
        uid: {name: Bitmap.parse_list(cpus) for name, cpus in sets.items()}
        for uid, sets in text.items()
    }


@pytest.mark.parametrize(
    ("state", "config", "facts"),
    [
        pytest.param(None, None, KubeletFacts(), id="no files"),
        pytest.param(NONE_STATE, None, KubeletFacts(cpu_manager_policy="none"), id="policy none"),
        pytest.param(
            STATIC_STATE,
            None,
            KubeletFacts(
                cpu_manager_policy="static", exclusive=exclusive({UID: {"a": "1,13", "b": "15-16"}})
            ),
            id="policy static, with containers",
        ),
        pytest.param(
            POD_STATE,
            None,
            KubeletFacts(
                cpu_manager_policy="static",
                exclusive=exclusive({UID: {"a": "4", "": "4-5"}, OTHER: {"": "6-7"}}),
            ),
            id="policy static, with whole pods",
        ),
        pytest.param(
            NONE_STATE,
            KUBEADM_CONFIG,
            KubeletFacts(cpu_manager_policy="none", cgroup_driver="systemd"),
            id="as kubeadm sets it up",
        ),
        pytest.param(
            None,
            FULL_CONFIG,
            KubeletFacts(
                cpu_manager_policy="static",
                reserved_cpus=Bitmap.parse_list("0-1,64-65"),
                topology_policy="single-numa-node",
                topology_scope="pod",
                cgroup_driver="cgroupfs",
            ),
            id="configured, before kubelet ran",
        ),
        pytest.param(
            NONE_STATE,
            "cpuManagerPolicy: static",
            KubeletFacts(cpu_manager_policy="none"),
            id="what is in force counts, not what is configured",
        ),
        pytest.param(
            None,
            '{\n\t"cpuManagerPolicy": "none",\n\t"reservedSystemCPUs": "3"}',
            KubeletFacts(cpu_manager_policy="none", reserved_cpus=Bitmap([3])),
            id="a configuration in JSON",
        ),
        pytest.param(
            None, "reservedSystemCPUs: 0", KubeletFacts(reserved_cpus=Bitmap([0])), id="one CPU"
        ),
        pytest.param(
            '{"policyName":"","entries":null}',
            'cpuManagerPolicy: null\ntopologyManagerPolicy: ~\nreservedSystemCPUs: ""',
            KubeletFacts(),
            id="nothing said in many words",
        ),
        pytest.param(None, "", KubeletFacts(), id="an empty configuration"),
        pytest.param(None, "a: 1\n---\nb: [", KubeletFacts(), id="only the first document counts"),
    ],
)
def test_what_the_files_say(
    state: str | None, config: str | None, facts: KubeletFacts, tmp_path: Path
) -> None:
    for name, text in (("cpu_manager_state", state), ("config.yaml", config)):
        if text is not None:
            (tmp_path / name).write_text(text)
    assert read_cpu_manager(str(tmp_path)) == facts


def test_a_configuration_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("cgroupDriver: systemd")
    (tmp_path / "other.json").write_text('{"cgroupDriver": "cgroupfs"}')
    config_file = str(tmp_path / "other.json")
    assert read_cpu_manager(str(tmp_path), config_file).cgroup_driver == "cgroupfs"


def test_no_such_folder(tmp_path: Path) -> None:
    assert read_cpu_manager(str(tmp_path / "none")) == KubeletFacts()


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        pytest.param(
            "cpu_manager_state",
            b"{",
            "cannot be understood: not JSON: "
            "Expecting property name enclosed in double quotes at line 1, column 2",
            id="half a state",
        ),
        pytest.param(
            "cpu_manager_state",
            b"[]",
            "cannot be understood: it is a list, not an object",
            id="a state that is no object",
        ),
        pytest.param(
            "cpu_manager_state",
            b'{"policyName":1}',
            "cannot be understood: policyName is 1, not a text",
            id="a policy that is no text",
        ),
        pytest.param(
            "cpu_manager_state",
            b'{"entries":{"u":["1"]}}',
            'cannot be understood: the entry of pod "u" is a list, not an object',
            id="an entry that is no object",
        ),
        pytest.param(
            "cpu_manager_state",
            b'{"entries":{"u":{"c":[1]}}}',
            "cannot be understood: c is a list, not a text",
            id="CPUs that are no text",
        ),
        pytest.param(
            "cpu_manager_state",
            b'{"podEntries":{"u":{"cpuSet":"x"}}}',
            'cannot be understood: "x" is no list of ids: "x" is neither a number nor a range',
            id="CPUs that are no list",
        ),
        pytest.param(
            "config.yaml",
            b"a: [\n",
            "cannot be understood: not YAML: "
            "expected the node content, but found '<stream end>' at line 2, column 1",
            id="half a configuration",
        ),
        pytest.param(
            "config.yaml",
            b"- a\n",
            "cannot be understood: it is a list, not an object",
            id="a configuration that is no object",
        ),
        pytest.param(
            "config.yaml",
            b"reservedSystemCPUs: [0, 1]\n",
            "cannot be understood: reservedSystemCPUs is a list, not a text",
            id="reserved CPUs that are no text",
        ),
        pytest.param(
            "config.yaml",
            b"[" * 900,
            "cannot be understood: the YAML is nested too deeply",
            id="a deep configuration",
        ),
        pytest.param(
            "config.yaml",
            b"a: \x01\n",
            "cannot be understood: not YAML: "
            "unacceptable character #x0001: special characters are not allowed",
            id="a control character",
        ),
        pytest.param("config.yaml", b"\xff", "is not UTF-8 text: invalid start byte", id="no text"),
        pytest.param(
            "config.yaml",
            b" " * ((4 << 20) + 1),
            "cannot be understood: it is larger than 4 MiB",
            id="a large configuration",
        ),
    ],
)
def test_files_that_cannot_be_used(name: str, data: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(KubeletError) as caught:
        read_cpu_manager(str(tmp_path))
    assert str(caught.value) == f"{tmp_path / name}: {reason}"


def test_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").mkdir()
    with pytest.raises(KubeletError, match=r"config\.yaml: cannot be read: Is a directory"):
        read_cpu_manager(str(tmp_path))


def test_a_pipe_that_nobody_writes_to_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "cpu_manager_state")
    with pytest.raises(KubeletError, match="it is not a regular file"):
        read_cpu_manager(str(tmp_path))
