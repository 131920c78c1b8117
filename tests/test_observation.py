"""The whole observation: a described server's files and its driver become that very machine."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from agent.core.topology import Machine, NodeSource
from agent.errors import DiscoveryError
from agent.fakes import node, nvml
from agent.observation import observe_machine
from tests import machines
from tests.core.machines import described

Observe = Callable[..., Machine]


@pytest.fixture
def observe(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Observe:
    """observe(name, *lines): the described machine, with `lines` more said by the fake driver."""

    def run(name: str, *lines: str) -> Machine:
        facts = machines.load(name)
        root = node.lay_out(facts, tmp_path / "root")
        state = tmp_path / "driver"
        nvml.write_state(state, node.driver_state(facts, *lines))
        monkeypatch.setenv(nvml.ENVIRONMENT, str(state))
        return observe_machine(str(root), library)

    return run


@pytest.mark.parametrize("name", sorted(set(machines.names()) - {"h200x8-vm"}))
def test_a_described_server_is_observed_as_described(name: str, observe: Observe) -> None:
    expected = described(name)
    observed = observe(name)
    hugepages = tuple(n.hugepages for n in observed.nodes)
    nodes = tuple(replace(n, hugepages=h) for n, h in zip(expected.nodes, hugepages, strict=True))
    assert observed == replace(expected, nodes=nodes)


def test_on_a_vm_the_driver_knows_the_nodes_that_sysfs_does_not(observe: Observe) -> None:
    machine = observe("h200x8-vm")
    assert [(gpu.node, gpu.node_source) for gpu in machine.gpus] == [
        (node_id, NodeSource.NVML_MEMORY) for node_id in (0, 0, 0, 0, 1, 1, 1, 1)
    ]
    assert machine.warnings == ()


def test_one_lost_gpu_costs_itself_only(observe: Observe) -> None:
    machine = observe("a800x8", nvml.fail("*", 15, gpu=3))
    whole = described("a800x8")
    assert [gpu for gpu in machine.gpus if not gpu.fault] == [
        gpu for gpu in whole.gpus if gpu.index != 3
    ]
    lost = machine.gpus[3]
    assert (lost.index, lost.bdf, lost.node) == (3, whole.gpus[3].bdf, 0)
    assert "lost" in str(lost.fault)
    assert machine.warnings == (f"GPU 3 (0000:49:00.0): not given out: {lost.fault}",)


def test_a_captured_tree_asks_no_driver(tmp_path: Path) -> None:
    root = node.lay_out(machines.load("a800x8"), tmp_path)
    assert {gpu.uuid for gpu in observe_machine(str(root), None).gpus} == {None}


def test_a_library_that_is_not_there_is_a_warning(tmp_path: Path) -> None:
    missing = str(tmp_path / "libnvidia-ml.so.1")
    root = node.lay_out(machines.load("a800x8"), tmp_path / "a800")
    (warning,) = observe_machine(str(root), missing).warnings
    assert missing in warning


def test_this_host_is_observed_and_a_driver_missed_only_where_there_are_gpus() -> None:
    machine = observe_machine("/", None)
    assert machine.gpus or not any("libnvidia-ml" in warning for warning in machine.warnings)


def test_two_gpus_with_one_uuid_are_refused_with_the_root_named(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = machines.load("a800x8")
    twins = replace(facts, gpus=tuple(replace(gpu, uuid="GPU-1") for gpu in facts.gpus))
    root = node.lay_out(twins, tmp_path / "root")
    nvml.write_state(tmp_path / "driver", node.driver_state(twins))
    monkeypatch.setenv(nvml.ENVIRONMENT, str(tmp_path / "driver"))
    with pytest.raises(DiscoveryError, match=f"^{root}: two GPUs have the UUID GPU-1$"):
        observe_machine(str(root), library)
