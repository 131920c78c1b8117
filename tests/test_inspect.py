"""The command `kubectl inspect-numalet` as people call it, on a fake API server."""

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent import inspect
from agent.core.bitmap import Bitmap
from agent.core.layout import lay_out
from agent.core.ledger import Grant, Ledger
from agent.core.report import About, to_nrt
from agent.fakes.apiserver import TOPOLOGIES, FakeApiServer, hang, refuse
from agent.inspect import main
from tests.core.machines import described

Capture = pytest.CaptureFixture[str]
Json = dict[str, Any]


def node(name: str, gpus: int = 8, **labels: str) -> Json:
    return {
        "metadata": {"name": name, "labels": labels},
        "status": {
            "capacity": {"aliyun.com/gpu": str(gpus)},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }


def report(name: str, held: int = 0) -> Json:
    layout = lay_out(described("a800x8"))
    gpus = layout.keys(Bitmap(range(held)))
    grant = Grant(uid="1", pod="ml/train", container="main", gpus=gpus)
    grants = (grant,) if held else ()
    return to_nrt(Ledger(layout=layout, grants=grants), About(node=name, pinning="nri"))


@pytest.fixture
def server() -> Iterator[FakeApiServer]:
    """A cluster of three nodes, one of them without a report."""
    with FakeApiServer() as server:
        for name, pool in (("gpu-2", "a"), ("gpu-10", "b"), ("gpu-1", "b")):
            server.put("nodes", node(name, pool=pool))
        for name, held in (("gpu-2", 5), ("gpu-10", 0)):
            server.put("noderesourcetopologies", report(name, held), manager="numalet")
        yield server


@pytest.fixture
def kubeconfig(server: FakeApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    path = tmp_path / "config"
    config = {
        "current-context": "here",
        "contexts": [
            {"name": "here", "context": {"cluster": "here"}},
            {"name": "nowhere", "context": {"cluster": "nowhere"}},
        ],
        "clusters": [
            {"name": "here", "cluster": {"server": server.url}},
            {"name": "nowhere", "cluster": {"server": "http://127.0.0.1:9"}},
        ],
    }
    path.write_text(yaml.safe_dump(config))
    monkeypatch.setenv("KUBECONFIG", str(path))
    return str(path)


TABLE = """\
NODE     GPUS   NUMA GPUS   FREE CPUS   STATE    POLICY   PINNING   WARNINGS
gpu-1    ?/8    -           -           -        -        -         kubelet offers 8 aliyun.com/gpu, but no report tells where they are: is the agent running there?
gpu-2    5/8    4/4,1/4     64,64       shared   none     nri       -
gpu-10   0/8    0/4,0/4     64,64       idle     none     nri       -

Allocated/total GPUs in the cluster: 5/16 (31.2%); 8 more without a report
"""  # noqa: E501


@pytest.mark.usefixtures("kubeconfig")
def test_the_cluster_in_one_table(capsys: Capture) -> None:
    assert main([]) == 0
    assert capsys.readouterr() == (TABLE, "")


def test_the_kubeconfig_and_the_context_can_be_given(
    kubeconfig: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    assert main(["--kubeconfig", kubeconfig, "--context", "here"]) == 0
    assert capsys.readouterr().out == TABLE
    assert main(["--kubeconfig", kubeconfig, "--context", "nowhere"]) == 2
    assert capsys.readouterr().err == (
        "kubectl inspect-numalet: http://127.0.0.1:9: it cannot be reached: nobody listens there\n"
    )


@pytest.mark.usefixtures("kubeconfig")
def test_a_wider_table(capsys: Capture) -> None:
    assert main(["-o", "wide"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert "FREE MEMORY" in head
    assert rows[1].split()[:4] == ["gpu-2", "Ready", "NVIDIA-A800-SXM4-80GB", "5/8"]


@pytest.mark.parametrize("flags", [["-o", "json"], ["-d", "--output", "json"]])
@pytest.mark.usefixtures("kubeconfig")
def test_json_is_for_other_programs(capsys: Capture, flags: list[str]) -> None:
    assert main(flags) == 0
    data = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in data["nodes"]] == ["gpu-1", "gpu-2", "gpu-10"]
    assert data["nodes"][1]["pods"][0]["containers"][0]["gpus"] == [0, 1, 2, 3, 4]
    assert data["gpus"] == {"allocated": 5, "total": 16, "unhealthy": 0, "unreported": 8}


@pytest.mark.usefixtures("kubeconfig")
def test_details_tell_which_pod_holds_what(capsys: Capture) -> None:
    assert main(["-d", "gpu-2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("gpu-2   8 × NVIDIA A800-SXM4-80GB · 2 NUMA nodes · 128 CPUs · Ready")
    assert "  ml          train   main        0-1    0-4    -      -\n" in out
    assert out.endswith("GPUs of these nodes: 5/8 (62.5%)\n")


# --- some nodes -----------------------------------------------------------------------------------


def rows(out: str) -> list[str]:
    return [line.split()[0] for line in out.splitlines()[1:-2]]


@pytest.mark.parametrize("few", [0, 20], ids=["of many nodes", "of few nodes"])
@pytest.mark.usefixtures("kubeconfig")
def test_a_selector_is_about_the_labels_of_nodes(
    server: FakeApiServer, monkeypatch: pytest.MonkeyPatch, capsys: Capture, few: int
) -> None:
    monkeypatch.setattr(inspect, "_FEW", few)
    assert main(["-l", "pool=b"]) == 0
    assert rows(capsys.readouterr().out) == ["gpu-1", "gpu-10"]
    asked = [r.query.get("fieldSelector") for r in server.requests if TOPOLOGIES.plural in r.path]
    assert asked == (["metadata.name=gpu-1", "metadata.name=gpu-10"] if few else [None])


@pytest.mark.usefixtures("kubeconfig")
def test_a_selector_that_selects_nothing(capsys: Capture) -> None:
    assert main(["-l", "pool=c"]) == 0
    assert capsys.readouterr() == (
        "",
        "kubectl inspect-numalet: no node has a topology report or GPUs to report\n",
    )


@pytest.mark.usefixtures("kubeconfig")
def test_nodes_can_be_named_as_kubectl_names_them(server: FakeApiServer, capsys: Capture) -> None:
    server.put("nodes", node("plain", 0))
    assert main(["plain", "node/gpu-10", "gpu-10"]) == 0
    assert rows(capsys.readouterr().out) == ["gpu-10", "plain"]


@pytest.mark.usefixtures("kubeconfig")
def test_a_node_that_is_not_there(capsys: Capture, server: FakeApiServer) -> None:
    assert main(["gpu-2", "gpu-7"]) == 2
    out, err = capsys.readouterr()
    assert rows(out) == ["gpu-2"]
    assert err == f'kubectl inspect-numalet: {server.url}: there is no node "gpu-7"\n'


WRONG = {
    "a name that is none": (["a,b"], '"a,b" cannot be the name of a node'),
    "an empty name": ([""], '"" cannot be the name of a node'),
    "names and a selector": (
        ["gpu-1", "-l", "a=b"],
        "give names of nodes or a selector, not both",
    ),
    "a context that is not there": (["--context", "x"], '{config}: there is no context "x"'),
    "a file that is not there": (["--kubeconfig", "/x/y"], "/x/y: there is no such file"),
    "a selector that is none": (
        ["-l", "a=("],
        "{url}: it refuses to list nodes (400): unable to parse requirement: a=(",
    ),
}


@pytest.mark.parametrize(("arguments", "sentence"), WRONG.values(), ids=WRONG)
def test_what_cannot_be_meant_is_one_sentence(
    kubeconfig: str, server: FakeApiServer, capsys: Capture, arguments: list[str], sentence: str
) -> None:
    assert main(arguments) == 2
    text = sentence.format(config=kubeconfig, url=server.url)
    assert capsys.readouterr() == ("", f"kubectl inspect-numalet: {text}\n")


# --- a cluster that does not tell everything ------------------------------------------------------


@pytest.mark.usefixtures("kubeconfig")
def test_without_the_right_to_list_nodes_the_reports_are_shown(
    server: FakeApiServer, capsys: Capture
) -> None:
    server.fail(
        refuse(403, message="nodes is forbidden"), None, lambda r: r.path == "/api/v1/nodes"
    )
    assert main([]) == 0
    out, err = capsys.readouterr()
    assert rows(out) == ["gpu-2", "gpu-10"]
    assert err == (
        f"kubectl inspect-numalet: {server.url}: we may not list nodes (403): nodes is forbidden; "
        "nodes without a report are not shown\n"
    )
    assert main(["-l", "pool=b"]) == 2


@pytest.mark.usefixtures("kubeconfig")
def test_without_the_right_to_list_reports_there_is_nothing_to_show(
    server: FakeApiServer, capsys: Capture
) -> None:
    server.fail(refuse(403), None, lambda request: TOPOLOGIES.plural in request.path)
    assert main([]) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.usefixtures("kubeconfig")
def test_without_the_definition_of_reports_that_is_said(
    server: FakeApiServer, capsys: Capture
) -> None:
    server.resources.remove(TOPOLOGIES)
    assert main([]) == 2
    assert capsys.readouterr().err.endswith("that definition (CRD) is not installed\n")


# --- the command itself ---------------------------------------------------------------------------


def run(*arguments: str, **how: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "agent.inspect", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **how)


def test_help_does_without_the_kubernetes_package() -> None:
    script = (
        "import sys\n"
        "from agent.inspect import main\n"
        "try:\n"
        "    main(['--help'])\n"
        "finally:\n"
        "    assert 'kubernetes' not in sys.modules, 'kubernetes was imported'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("usage: kubectl inspect-numalet ")
    assert "--kubeconfig" in done.stdout


@pytest.mark.usefixtures("kubeconfig")
def test_errors_are_one_line_without_a_traceback(server: FakeApiServer) -> None:
    server.stop()
    done = run()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        f"kubectl inspect-numalet: {server.url}: it cannot be reached: nobody listens there"
    ]


@pytest.mark.usefixtures("kubeconfig")
def test_an_interrupt_ends_it_without_a_traceback(server: FakeApiServer) -> None:
    server.fail(hang())
    script = (
        "import signal, sys\n"
        "from agent.inspect import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.exit(main([]))\n"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        server.wait_for(lambda: server.requests)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=20) == (b"", None)
        assert process.returncode == 130


@pytest.mark.usefixtures("kubeconfig")
def test_a_reader_that_goes_away_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "agent.inspect"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.usefixtures("kubeconfig")
def test_colour_and_width_are_those_of_the_terminal(server: FakeApiServer) -> None:
    server.remove("noderesourcetopologies", "gpu-10")
    environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    environment["COLUMNS"] = "100"
    coloured = on_terminal(environment)
    assert "\x1b[1mNODE\x1b[0m" in coloured
    assert "kubelet offers 8 aliyun.com/gpu…" in coloured
    plain = on_terminal(environment | {"NO_COLOR": "1"})
    assert "\x1b" not in plain
    assert max(map(len, plain.splitlines()[:-2])) == 100


def on_terminal(environment: dict[str, str]) -> str:
    """What the command prints there."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "agent.inspect"]
    subprocess.run(command, stdout=theirs, env=environment, check=True)
    os.close(theirs)
    out = b""
    try:
        while part := os.read(ours, 1 << 16):
            out += part
    except OSError:  # how Linux tells the end of a terminal
        pass
    os.close(ours)
    return out.decode().replace("\r\n", "\n")
