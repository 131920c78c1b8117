"""Labels, arena's ConfigMap and marks of faults: expected texts as ACK's documents and arena have
them."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.ack import (
    arena_config_map,
    arena_name,
    check_label,
    device_status_name,
    node_labels,
    parse_device_status,
    parse_unhealthy_gpus,
    to_label_value,
    unhealthy_name,
)
from agent.core.health import FaultMarks
from agent.core.topology import Machine
from tests.core.machines import described
from tests.core.oracle import build

A800 = described("a800x8")
TWO = build((2, 1))


def gpus(machine: Machine, **more: list[Any]) -> Machine:
    """The machine with such a fact for each of its GPUs."""
    facts = [dict(zip(more, values, strict=True)) for values in zip(*more.values(), strict=True)]
    changed = tuple(replace(gpu, **fact) for gpu, fact in zip(machine.gpus, facts, strict=True))
    return replace(machine, gpus=changed)


# --- labels ---------------------------------------------------------------------------------------

LABELS = {
    "a server of eight": (
        A800,
        {"name": "NVIDIA-A800-SXM4-80GB", "mem": "81920MiB", "count": "8"},
    ),
    "as ACK's documents have it": (
        gpus(TWO, model=["Tesla V100-SXM2-32GB"] * 2, memory_bytes=[15360 << 20] * 2),
        {"name": "Tesla-V100-SXM2-32GB", "mem": "15360MiB", "count": "2"},
    ),
    "part of a MiB does not count, as in nvidia-smi": (
        gpus(TWO, memory_bytes=[(24564 << 20) + 65536] * 2),
        {"name": "A800", "mem": "24564MiB", "count": "2"},
    ),
    "no GPUs, no labels": (build((0, 1)), {}),
    "different models have no name": (
        gpus(TWO, model=["NVIDIA L20", "NVIDIA L40"]),
        {"mem": "81920MiB", "count": "2"},
    ),
    "different sizes are not told": (
        gpus(TWO, memory_bytes=[1 << 30, 2 << 30]),
        {"name": "A800", "count": "2"},
    ),
    "a size that is known of one only is not told": (
        gpus(TWO, memory_bytes=[1 << 30, None]),
        {"name": "A800", "count": "2"},
    ),
    "sizes that nobody knows are not told": (
        gpus(TWO, memory_bytes=[None, None]),
        {"name": "A800", "count": "2"},
    ),
    "a model that the driver does not tell is none": (
        gpus(TWO, model=["PCI 10de:20f3"] * 2),
        {"mem": "81920MiB", "count": "2"},
    ),
    "nor is one that nobody tells": (
        gpus(TWO, model=["unknown"] * 2),
        {"mem": "81920MiB", "count": "2"},
    ),
    "a name that no label can have is none": (
        gpus(TWO, model=["显卡"] * 2),
        {"mem": "81920MiB", "count": "2"},
    ),
    "a GPU that the driver never named does not count": (
        gpus(TWO, uuid=["GPU-0", None], model=["NVIDIA L20", "unknown"]),
        {"name": "NVIDIA-L20", "mem": "81920MiB", "count": "1"},
    ),
    "a faulty one does": (
        gpus(TWO, fault=[None, "lost"]),
        {"name": "A800", "mem": "81920MiB", "count": "2"},
    ),
}


@pytest.mark.parametrize(("machine", "labels"), LABELS.values(), ids=LABELS)
def test_node_labels(machine: Machine, labels: dict[str, str]) -> None:
    expected = {f"aliyun.accelerator/nvidia_{key}": value for key, value in labels.items()}
    assert node_labels(machine) == expected


VALUES = {
    "NVIDIA H100 80GB HBM3": "NVIDIA-H100-80GB-HBM3",
    "Quadro RTX 6000/8000": "Quadro-RTX-6000-8000",
    " odd (name) ": "odd--name",
    "...": "",
    "": "",
    "-" + "a" * 80: "a" * 63,
    "a" * 60 + "    b": "a" * 60,
}


@pytest.mark.parametrize(("text", "value"), VALUES.items(), ids=VALUES)
def test_label_values(text: str, value: str) -> None:
    assert to_label_value(text) == value


@given(st.text(max_size=100))
def test_any_label_value_is_one(text: str) -> None:
    value = to_label_value(text)
    assert re.fullmatch(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?", value)
    assert len(value) <= 63


CHECKED: dict[str, tuple[object, str | None]] = {
    "as it should be": ({"ack.node.gpu.schedule": "topology", "other": "x"}, None),
    "missing": ({"other": "x"}, "has no label ack.node.gpu.schedule=topology,"),
    "another value": (
        {"ack.node.gpu.schedule": "share"},
        'label ack.node.gpu.schedule is "share" and not topology,',
    ),
    "a value that is none": (
        {"ack.node.gpu.schedule": ["topology"]},
        "is a list and not topology,",
    ),
    "labels that are none": ("topology", "has no label"),
    "no labels at all": (None, "has no label"),
}


@pytest.mark.parametrize(("labels", "sentence"), CHECKED.values(), ids=CHECKED)
def test_the_label(labels: object, sentence: str | None) -> None:
    said = check_label(labels)
    assert said is None if sentence is None else said and sentence in said


# --- arena's ConfigMap ----------------------------------------------------------------------------


def test_arenas_config_map() -> None:
    links = {(0, 1): "NV2", (0, 2): "PIX", (1, 2): "SYS"}
    machine = gpus(build((3, 1), links=links), fault=[None, "lost", None])
    made = arena_config_map(machine, "node-1")
    data = {
        key: value if key == "nodeName" else json.loads(value)
        for key, value in made["data"].items()
    }
    bandwidth = [[750, 96, 17], [96, 750, 15], [17, 15, 750]]
    assert made | {"data": data} == {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": "numalet-topology-node-1",
            "namespace": "kube-system",
            "labels": {"ack.node.gpu.schedule": "topology", "nodename": "node-1"},
        },
        "data": {
            "nodeName": "node-1",
            "devices": {"0": "Healthy", "1": "Unhealthy", "2": "Healthy"},
            "linkType": [["N-A", "NV2", "PIX"], ["NV2", "N-A", "SYS"], ["PIX", "SYS", "N-A"]],
            "bandwidth": bandwidth,
            "bandwith": bandwidth,
        },
    }


def test_a_gpu_that_the_driver_never_named_is_in_no_matrix() -> None:
    links = {(0, 1): "PIX", (0, 2): "NV4", (1, 2): "PIX"}
    machine = gpus(build((3, 1), links=links), uuid=["GPU-0", None, "GPU-2"])
    data = arena_config_map(machine, "n")["data"]
    assert json.loads(data["devices"]) == {"0": "Healthy", "2": "Healthy"}
    assert json.loads(data["linkType"]) == [["N-A", "NV4"], ["NV4", "N-A"]]


def test_without_gpus_all_is_empty() -> None:
    data = arena_config_map(build((0, 1)), "n")["data"]
    assert [data[key] for key in ("devices", "linkType", "bandwidth")] == ["{}", "[]", "[]"]


def test_better_links_have_more_bandwidth() -> None:
    kinds = ["NV2", "NV1", "PIX", "PXB", "PHB", "NODE", "SYS"]
    links = {(0, place): kind for place, kind in enumerate(kinds, 1)}
    machine = build((len(kinds) + 1, 1), links=links)
    row = json.loads(arena_config_map(machine, "n")["data"]["bandwidth"])[0]
    assert row[1:] == sorted(row[1:], reverse=True)
    assert len(set(row)) == len(row)


def test_names() -> None:
    assert [name("n1") for name in (arena_name, device_status_name, unhealthy_name)] == [
        "numalet-topology-n1",
        "n1-device-status",
        "unhealthy-gpu-n1",
    ]


# --- marks ----------------------------------------------------------------------------------------


def device(id_: object = 0, healthy: object = False, type_: object = "gpu") -> dict[str, object]:
    return {"deviceId": id_, "deviceType": type_, "healthy": healthy}


STATUS: dict[str, tuple[object, set[int]]] = {
    "nothing": (None, set()),
    "an empty list": ([], set()),
    "one GPU": ([device(3)], {3}),
    "an index as text": ([device("3")], {3}),
    "the highest index": ([device(1023)], {1023}),
    "a healthy GPU is not marked": ([device(0, healthy=True), device(1)], {1}),
    "another device is not ours": ([device("eth0", type_="rdma"), device(1)], {1}),
    "twice is once": ([device(1), device("1")], {1}),
}


@pytest.mark.parametrize(("devices", "indices"), STATUS.values(), ids=STATUS)
def test_device_status(devices: object, indices: set[int]) -> None:
    assert parse_device_status(devices) == FaultMarks(indices=frozenset(indices))


BAD_STATUS: dict[str, tuple[object, str]] = {
    "no list": ({"deviceId": 0}, "devices is an object, not a list"),
    "a text": ("gpu 0", 'devices is "gpu 0", not a list'),
    "a device that is none": ([device(), 7], "a device is 7, not an object"),
    "no index": ([{"deviceType": "gpu", "healthy": False}], "null is no GPU's index"),
    "a UUID": ([device("GPU-1")], '"GPU-1" is no GPU\'s index'),
    "a negative index": ([device(-1)], "-1 is no GPU's index"),
    "an index that is too high": ([device(1024)], "1024 is no GPU's index"),
    "a long text": ([device("9" * 5000)], "is no GPU's index"),
    "half a GPU": ([device(0.5)], "0.5 is no GPU's index"),
    "true": ([device(True)], "true is no GPU's index"),
    "no type": ([{"deviceId": 0, "healthy": False}], "deviceType is null, not a text"),
    "no health": (
        [{"deviceType": "gpu", "deviceId": 0}],
        "healthy of GPU 0 is null, neither true nor false",
    ),
    "a word for health": ([device(healthy="no")], 'healthy of GPU 0 is "no", neither'),
}


@pytest.mark.parametrize(("devices", "sentence"), BAD_STATUS.values(), ids=BAD_STATUS)
def test_device_status_that_makes_no_sense(devices: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        parse_device_status(devices)


UNHEALTHY: dict[str, tuple[object, set[int]]] = {
    "as documented": ({"data": {"gpus": "0,2"}}, {0, 2}),
    "blanks and commas too many": ({"data": {"gpus": " 0, 2,,"}}, {0, 2}),
    "an empty text": ({"data": {"gpus": ""}}, set()),
    "no such key": ({"data": {"other": "1"}}, set()),
    "no data": ({"data": None}, set()),
    "nothing": ({}, set()),
}


@pytest.mark.parametrize(("config_map", "indices"), UNHEALTHY.values(), ids=UNHEALTHY)
def test_unhealthy_gpus(config_map: object, indices: set[int]) -> None:
    assert parse_unhealthy_gpus(config_map) == FaultMarks(indices=frozenset(indices))


BAD_UNHEALTHY: dict[str, tuple[object, str]] = {
    "no object": ([], "it is a list, not an object"),
    "data that is none": ({"data": "0,2"}, 'data is "0,2", not an object'),
    "a list of GPUs": ({"data": {"gpus": [0, 2]}}, "gpus is a list, not a text"),
    "a word": ({"data": {"gpus": "0,all"}}, '"all" is no GPU\'s index'),
    "a range": ({"data": {"gpus": "0-2"}}, '"0-2" is no GPU\'s index'),
    "a digit of another script": ({"data": {"gpus": "٣"}}, "is no GPU's index"),
}


@pytest.mark.parametrize(("config_map", "sentence"), BAD_UNHEALTHY.values(), ids=BAD_UNHEALTHY)
def test_unhealthy_gpus_that_make_no_sense(config_map: object, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        parse_unhealthy_gpus(config_map)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["deviceId", "deviceType", "healthy", "data", "gpus"]), inner
            )
        ),
        max_leaves=10,
    )
)
def test_whatever_it_is_it_is_marks_or_one_sentence(value: object) -> None:
    for parse in (parse_device_status, parse_unhealthy_gpus):
        assert sentence_of(parse, value).isprintable()


def sentence_of(parse: Callable[[object], FaultMarks], value: object) -> str:
    """Why it cannot be parsed; empty if it can."""
    try:
        parse(value)
    except ValueError as reason:
        return str(reason)
    return ""
