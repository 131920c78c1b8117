"""What is applied to a cluster: options, the pod with its mounts, and its image, held against the
code that they are for.

`python -m tests.test_daemonset` writes the options of base and overlays anew.
"""

import argparse
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest
import yaml
from packaging.requirements import Requirement

from agent.config import Config, add_flags, flags_given, format_example, load_config
from agent.core import ack
from tests.manifests import (
    BASE,
    COMPONENTS,
    FOLDER,
    OVERLAYS,
    Object,
    objects_in,
    one_of,
    parts,
    read,
)

ROOT: Final = Path(__file__).parent.parent

IN_A_POD: Final = {"status_address": "0.0.0.0:9470"}
"""Kubelet's probes and Prometheus come to the pod's address, not to loopback."""
OPTIONS: Final[Mapping[str, Mapping[str, str]]] = {
    "base": IN_A_POD,
    "overlays/ack": IN_A_POD,
    "overlays/vanilla": IN_A_POD | {"ack_objects": "no"},
    "overlays/koordinator": IN_A_POD | {"ack_objects": "no"},
}
"""What each sets; all else is a comment."""

DAEMON_SET: Final = one_of(objects_in(BASE), "DaemonSet")
POD: Final[Object] = DAEMON_SET["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
VOLUMES: Final[Mapping[str, Object]] = {one["name"]: one for one in POD["volumes"]}
HOST_MOUNTS: Final[Mapping[str, Object]] = {
    mount["mountPath"]: mount
    for mount in CONTAINER["volumeMounts"]
    if "hostPath" in VOLUMES[mount["name"]]
}


# --- kustomize ------------------------------------------------------------------------------------


def test_every_file_is_part_of_something_that_is_applied() -> None:
    applied = {part for folder in OVERLAYS.iterdir() for part in parts(folder)}
    optional = {part for folder in COMPONENTS.iterdir() for part in parts(folder)}
    assert all(part.is_file() for part in applied | optional)
    files = {path for path in FOLDER.rglob("*") if path.is_file() and path.parent != FOLDER}
    assert files - applied - optional == set()


def test_a_cluster_with_koordinator_keeps_its_own_crd() -> None:
    with_crd = {
        folder.name for folder in OVERLAYS.iterdir() if any("crd" in p.parts for p in parts(folder))
    }
    assert with_crd == {"ack", "vanilla"}


# --- options --------------------------------------------------------------------------------------


def _options_text(settings: Mapping[str, str]) -> str:
    text = format_example()
    for name, value in settings.items():
        text, times = re.subn(rf"(?m)^# {name} = .*$", f'{name} = "{value}"', text)
        assert times == 1, name
    return text


@pytest.mark.parametrize("place", OPTIONS)
def test_the_options_are_all_there_as_the_agent_explains_them(place: str) -> None:
    file = FOLDER / place / "numalet.toml"
    assert file.read_text() == _options_text(OPTIONS[place]), f"see {__name__}'s docstring"
    assert tomllib.loads(file.read_text()) == OPTIONS[place]


@pytest.mark.parametrize("place", OPTIONS)
def test_the_agent_takes_the_options_and_the_arguments(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    patched = [
        step["value"]
        for component in COMPONENTS.iterdir()
        for patch in read(component / "kustomization.yaml")[0].get("patches", ())
        for step in yaml.safe_load(patch["patch"])
        if "/args/" in step["path"]
    ]
    command, *flags = [arg.replace("$(NODE_NAME)", "node-1") for arg in CONTAINER["args"]]
    parser = argparse.ArgumentParser()
    add_flags(parser)
    given = parser.parse_args([*flags, *patched])
    config = load_config(str(FOLDER / place / "numalet.toml"), flags_given(given))
    assert (command, config.node_name) == ("run", "node-1")
    assert given.config == "/etc/numalet/numalet.toml"
    assert (config.koordinator_device, bool(config.kubelet_url)) == ("yes", True)


# --- the pod --------------------------------------------------------------------------------------


def test_the_pod_has_no_rights_but_those_of_root_as_an_owner_of_files() -> None:
    assert CONTAINER["securityContext"] == {
        "runAsUser": 0,
        "privileged": False,
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert not {"hostNetwork", "hostPID", "hostIPC", "securityContext"} & set(POD)


NOT_MOUNTED: Final = {
    "root": "a container has a sysfs and a procfs of its own that show the machine",
    "dev_dir": "NVIDIA's container runtime makes the device nodes",
    "service_account_dir": "the token's volume",
}
"""Options whose default is a path that needs none of the host's folders, and why."""
WRITTEN: Final = {
    "/sys/fs/cgroup": "cpusets are written",
    "/var/lib/kubelet/device-plugins": "our socket is made there",
}


def _mount_of(path: str) -> str | None:
    """Where the innermost mount is that has this path."""
    above = [mount for mount in HOST_MOUNTS if path == mount or path.startswith(f"{mount}/")]
    return max(above, key=len, default=None)


def test_every_folder_of_the_host_is_one_that_an_option_is_about() -> None:
    defaults = {name: getattr(Config(), name) for name in Config.__dataclass_fields__}
    paths = {
        name: value
        for name, value in defaults.items()
        if isinstance(value, str) and value.startswith("/")
    }
    mounts = {name: _mount_of(path) for name, path in paths.items()}
    assert {name for name, mount in mounts.items() if mount is None} == set(NOT_MOUNTED)
    assert set(mounts.values()) - {None} | {"/sys/fs/cgroup"} == set(HOST_MOUNTS)


def test_the_host_s_folders_have_the_host_s_paths_and_are_read_only_where_they_can_be() -> None:
    for path, mount in HOST_MOUNTS.items():
        assert VOLUMES[mount["name"]]["hostPath"]["path"] == path
    writable = {path for path, mount in HOST_MOUNTS.items() if not mount.get("readOnly")}
    assert writable == set(WRITTEN)


def test_the_volumes_of_other_pods_are_hidden() -> None:
    mounts = {mount["mountPath"]: mount for mount in CONTAINER["volumeMounts"]}
    assert VOLUMES[mounts["/var/lib/kubelet/pods"]["name"]]["emptyDir"] == {}


def test_every_volume_is_mounted_once() -> None:
    assert sorted(mount["name"] for mount in CONTAINER["volumeMounts"]) == sorted(VOLUMES)


def test_the_token_is_where_the_agent_looks_and_is_bound_to_the_pod_for_an_hour() -> None:
    (mount,) = (mount for mount in CONTAINER["volumeMounts"] if mount["name"] == "token")
    token, authority = VOLUMES["token"]["projected"]["sources"]
    assert mount["mountPath"] == Config().service_account_dir
    assert token["serviceAccountToken"] == {"path": "token", "expirationSeconds": 3600}
    assert authority["configMap"]["items"] == [{"key": "ca.crt", "path": "ca.crt"}]
    account = one_of(objects_in(BASE), "ServiceAccount")
    assert (POD["serviceAccountName"], POD["automountServiceAccountToken"]) == ("numalet", False)
    assert (account["metadata"]["name"], account["automountServiceAccountToken"]) == (
        *("numalet", False),
    )


def test_the_probes_ask_where_the_agent_listens() -> None:
    (port,) = CONTAINER["ports"]
    assert IN_A_POD["status_address"].endswith(f":{port['containerPort']}")
    probes = {name: CONTAINER[name]["httpGet"] for name in ("livenessProbe", "readinessProbe")}
    assert probes == {
        "livenessProbe": {"path": "/healthz", "port": port["name"]},
        "readinessProbe": {"path": "/readyz", "port": port["name"]},
    }


def test_it_runs_on_the_nodes_that_are_ours_before_other_pods_and_never_twice() -> None:
    assert POD["nodeSelector"][ack.SCHEDULE_LABEL] == ack.SCHEDULE_VALUE
    assert POD["priorityClassName"] == "system-node-critical"
    assert POD["tolerations"] == [{"operator": "Exists"}]
    assert DAEMON_SET["spec"]["updateStrategy"]["rollingUpdate"]["maxSurge"] == 0
    assert CONTAINER["resources"]["requests"] == {"cpu": "50m", "memory": "80Mi"}
    assert "cpu" not in CONTAINER["resources"]["limits"]


# --- the image ------------------------------------------------------------------------------------

ONLY_FOR_PEOPLE: Final = "kubernetes"
"""What kubectl inspect-numalet needs and the agent does not."""
BROUGHT_ALONG: Final = {"typing-extensions": "grpcio"}
DOCKERFILE: Final = (FOLDER / "Dockerfile").read_text()


def _requirements(lines: list[str]) -> dict[str, Requirement]:
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {one.name.lower().replace("_", "-"): one for one in found}


def test_the_image_has_what_the_agent_needs_in_fixed_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = _requirements(project["dependencies"])
    pinned = _requirements((FOLDER / "requirements.txt").read_text().splitlines())
    assert set(pinned) == set(wanted) - {ONLY_FOR_PEOPLE} | set(BROUGHT_ALONG)
    for name, one in pinned.items():
        (exact,) = one.specifier
        assert exact.operator == "==", name
        assert name not in wanted or exact.version in wanted[name].specifier, name


def test_the_image_has_two_stages_of_one_fixed_python_and_no_compiler_in_the_last() -> None:
    (python,) = re.findall(r"(?m)^ARG PYTHON=(.*)$", DOCKERFILE)
    _, build, product = re.split(r"(?m)^FROM python:\$\{PYTHON\}.*$", DOCKERFILE)
    assert re.fullmatch(r"3\.\d+\.\d+-slim-[a-z]+", python)
    assert "gcc" in build
    assert not re.search(r"apt-get|gcc|pip install", product)


def test_the_image_is_made_of_files_that_are_sent_to_the_builder() -> None:
    sources = {
        source
        for line in re.findall(r"(?m)^COPY (?!--from)(.*)$", DOCKERFILE)
        for source in line.split()[:-1]
    }
    ignore = (FOLDER / "Dockerfile.dockerignore").read_text().splitlines()
    assert all((ROOT / source).exists() for source in sources)
    assert sources == {line[1:] for line in ignore if line.startswith("!")}


if __name__ == "__main__":
    for place, settings in OPTIONS.items():
        (FOLDER / place / "numalet.toml").write_text(_options_text(settings))
