"""The command as people call it: output, files, sentences, exit codes."""

import json
import os
import pty
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from agent.__main__ import main
from agent.core.picture import draw_text
from agent.core.schema import to_json
from agent.fakes import node
from tests import machines
from tests.core.machines import described


@pytest.fixture
def a800(tmp_path: Path) -> str:
    return str(node.lay_out(machines.load("a800x8"), tmp_path / "a800"))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(to_json(described("v100x8-cube"))))
    return path


Capture = pytest.CaptureFixture[str]


def test_show_prints_the_machine_below_a_root(a800: str, capsys: Capture) -> None:
    assert main(["show", "--root", a800]) == 0
    out = capsys.readouterr().out
    assert out.startswith("a800x8   2 NUMA nodes · 64 cores · 128 CPUs · 1.0 TiB · 8 GPUs\n")
    assert out.count("─ GPU ") == 8


@pytest.mark.parametrize(
    ("made", "line"),
    [
        ("sys/fs/cgroup/kubepods.slice", "pinning   through cgroup files, there is no NRI socket"),
        ("var/run/nri/nri.sock", "pinning   through NRI at "),
    ],
    ids=["cgroups alone", "a container runtime that asks"],
)
def test_show_says_who_would_pin(tmp_path: Path, capsys: Capture, made: str, line: str) -> None:
    root = node.lay_out(machines.load("laptop"), tmp_path)
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "sys/fs/cgroup/cgroup.controllers").write_text("cpuset cpu memory\n")
    (root / made).mkdir(parents=True)
    assert main(["show", "--root", str(root)]) == 0
    assert line in capsys.readouterr().out.splitlines()[-1]


def test_json_can_be_saved_and_shown_elsewhere(a800: str, tmp_path: Path, capsys: Capture) -> None:
    main(["show", "--root", a800, "--json"])
    file = tmp_path / "saved.json"
    file.write_text(capsys.readouterr().out)
    main(["show", "--root", a800])
    expected = capsys.readouterr().out
    assert main(["show", "--machine", str(file)]) == 0
    assert capsys.readouterr().out == expected


def test_the_json_has_the_documented_keys_in_their_order(a800: str, capsys: Capture) -> None:
    main(["show", "--root", a800, "--json"])
    data = json.loads(capsys.readouterr().out)
    assert list(data) == [
        *("schema", "name", "nodes", "cores", "gpus", "links"),
        *("offline_cpus", "isolated_cpus", "warnings"),
    ]
    assert data["nodes"][0] == {
        "id": 0,
        "kind": "cpu",
        "cpus": "0-31,64-95",
        "memory_bytes": 549755813888,
        "distances": {"0": 10, "1": 20},
    }
    assert data["cores"][0] == {"id": 0, "socket": 0, "node": 0, "l3": 0, "cpus": "0,64"}
    assert data["gpus"][0] == {
        "index": 0,
        "minor": None,
        "uuid": None,
        "bdf": "0000:1a:00.0",
        "model": "PCI 10de:20f3",
        "memory_bytes": None,
        "node": 0,
        "node_source": "sysfs",
    }


def test_a_machine_is_read_from_standard_input(saved: Path) -> None:
    command = [sys.executable, "-m", "agent", "show", "--machine", "-"]
    run = subprocess.run(command, input=saved.read_bytes(), capture_output=True, check=True)
    assert run.stdout.decode() == draw_text(described("v100x8-cube"))


def test_svg_goes_to_a_file_beside_the_text(saved: Path, tmp_path: Path, capsys: Capture) -> None:
    svg = tmp_path / "machine.svg"
    assert main(["show", "--machine", str(saved), "--svg", str(svg)]) == 0
    assert ET.parse(svg).getroot().tag.endswith("svg")
    assert capsys.readouterr().out.startswith("v100x8-cube")


def test_colour_is_for_terminals_only(saved: Path) -> None:
    ours, theirs = pty.openpty()
    environment = {k: v for k, v in os.environ.items() if k != "NO_COLOR"}
    command = [sys.executable, "-m", "agent", "show", "--machine", str(saved)]
    subprocess.run(command, stdout=theirs, env=environment, check=True)
    assert b"\x1b[1mv100x8-cube\x1b[0m" in os.read(ours, 1 << 16)
    subprocess.run(command, stdout=theirs, env=environment | {"NO_COLOR": "1"}, check=True)
    assert b"\x1b[1mv100x8-cube" not in os.read(ours, 1 << 16)
    os.close(ours)
    os.close(theirs)


def test_a_reader_that_leaves_early_is_no_error(saved: Path) -> None:
    command = f"{sys.executable} -m agent show --json --machine {saved} | head -c 1"
    run = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, check=True)
    assert run.stderr == b""


BAD = {
    "no such root": (["show", "--root", "/nowhere"], '/nowhere: has no folder "sys"'),
    "no such file": (
        ["show", "--machine", "/nowhere"],
        "/nowhere: cannot be read: No such file or directory",
    ),
    "a folder for a file": (["show", "--machine", "/"], "/: cannot be read: Is a directory"),
    "bytes that are no text": (
        ["show", "--machine", "{binary}"],
        "{binary}: is not UTF-8 text: invalid start byte",
    ),
    "a file that is no JSON": (
        ["show", "--machine", "{text}"],
        "{text}: not JSON: Expecting value at line 1, column 1",
    ),
    "a file without end": (["show", "--machine", "/dev/zero"], "/dev/zero: is larger than 16 MiB"),
    "a picture that cannot be written": (
        ["show", "--machine", "{saved}", "--svg", "/nowhere/x.svg"],
        "/nowhere/x.svg: cannot be written: No such file or directory",
    ),
    "a driver asked about a file": (
        ["show", "--machine", "{saved}", "--nvml", "x"],
        "--nvml asks a driver, --machine reads a file: give one of them",
    ),
}


@pytest.mark.parametrize(("arguments", "sentence"), BAD.values(), ids=BAD)
def test_it_is_one_sentence_and_exit_code_2_for(
    arguments: list[str], sentence: str, saved: Path, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    (tmp_path / "text").write_text("nodes: 2")
    places = {"saved": str(saved)} | {n: str(tmp_path / n) for n in ("binary", "text")}
    assert main([argument.format(**places) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"numalet: {sentence.format(**places)}")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [[], ["shwo"], ["show", "--jsno"], ["show", "--root", "/", "--machine", "x"]],
    ids=["no command", "an unknown command", "an unknown flag", "two sources"],
)
def test_usage_is_explained_with_exit_code_2_for(arguments: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: numalet" in capsys.readouterr().err


def test_help_names_the_command(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    assert "what this node is" in capsys.readouterr().out


PODS = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: tgi, namespace: test}
spec:
  replicas: 2
  template:
    metadata:
      annotations:
        cpuset-scheduler: required
        scheduling.alibabacloud.com/numa-topology-spec: '{"numaTopologyPolicy": "SingleNUMANode",}'
    spec:
      containers:
      - name: tgi
        resources:
          limits: {cpu: 24, aliyun.com/gpu: 4}
"""


@pytest.fixture
def pods(tmp_path: Path) -> Path:
    path = tmp_path / "pods.yaml"
    path.write_text(PODS)
    return path


def test_plan_places_the_replicas_one_after_the_other(
    a800: str, pods: Path, capsys: Capture
) -> None:
    assert main(["plan", "--root", a800, "-f", str(pods), "--json"]) == 0
    placements = json.loads(capsys.readouterr().out)["placements"]
    assert [(p["pod"], p["nodes"], p["gpus"]) for p in placements] == [
        ("test/tgi-0", [0], [0, 1, 2, 3]),
        ("test/tgi-1", [1], [4, 5, 6, 7]),
    ]


def test_plan_ends_with_3_when_a_pod_is_refused(a800: str, pods: Path, capsys: Capture) -> None:
    pods.write_text(PODS.replace("replicas: 2", "replicas: 3"))
    assert main(["plan", "--root", a800, "-f", str(pods)]) == 3
    captured = capsys.readouterr()
    assert "test/tgi-2   SingleNUMANode   refused: SingleNUMANode: node 0 (single)" in captured.out
    assert captured.err == ""


def test_plan_ends_with_2_when_a_document_is_bad_but_plans_the_others(
    a800: str, pods: Path, tmp_path: Path, capsys: Capture
) -> None:
    other = tmp_path / "other.yaml"
    other.write_text("kind: Service\nmetadata: {name: web}\n")
    assert main(["plan", "--root", a800, "-f", str(other), str(pods)]) == 2
    captured = capsys.readouterr()
    assert "test/tgi-1" in captured.out
    assert captured.err.startswith(f"numalet: {other}")
    assert captured.err.count("\n") == 1


def test_plan_reserves_what_it_is_told_and_draws(
    saved: Path, pods: Path, tmp_path: Path, capsys: Capture
) -> None:
    svg = tmp_path / "plan.svg"
    arguments = ["--machine", str(saved), "-f", str(pods), "--svg", str(svg)]
    assert main(["plan", *arguments, "--reserved-cpus", "0,48"]) == 0
    assert "1-12,49-60" in capsys.readouterr().out
    assert "test/tgi-0" in svg.read_text()


BAD_PLANS = {
    "reserved CPUs that are no list": (
        ["--reserved-cpus", "x"],
        '--reserved-cpus: "x" is no list of ids',
    ),
    "reserved CPUs that the machine has not": (
        ["--reserved-cpus", "0,500"],
        "--reserved-cpus: the machine has no online CPUs 500",
    ),
    "everything from standard input": (
        ["--machine", "-", "-f", "-"],
        "the machine and the pods cannot both come from standard input",
    ),
}


@pytest.mark.parametrize(("arguments", "sentence"), BAD_PLANS.values(), ids=BAD_PLANS)
def test_plan_refuses(
    arguments: list[str], sentence: str, saved: Path, pods: Path, capsys: Capture
) -> None:
    source = [] if "--machine" in arguments else ["--machine", str(saved)]
    assert main(["plan", *source, "-f", str(pods), *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"numalet: {sentence}")


def test_the_pictures_of_the_readme_are_what_plan_draws(tmp_path: Path, capsys: Capture) -> None:
    examples = Path(__file__).parent.parent / "docs" / "examples"
    for svg in sorted(examples.glob("*.svg")):
        fresh = tmp_path / svg.name
        pods = svg.with_suffix(".yaml")
        machine = str(examples / "a800x8.json")
        assert main(["plan", "--machine", machine, "-f", str(pods), "--svg", str(fresh)]) == 0
        assert fresh.read_text() == svg.read_text(), "run hack/pictures"
    capsys.readouterr()
