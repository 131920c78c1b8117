"""What a scheduler wrote on a pod, in each of its four ways, and what it wrote wrongly."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.core.bitmap import Bitmap
from agent.core.decision import DecidedGpus, GpuKey, read_decided_cpus, read_decided_gpus

STATUS = "scheduling.koordinator.sh/resource-status"
GROUP = "topology.kubernetes.io/gpu-group"
DEVICES = "scheduling.koordinator.sh/device-allocated"


def elems(*cpus: int) -> dict[str, Any]:
    return {"elems": {str(cpu): {} for cpu in cpus}}


A01_B4 = json.dumps({"b": {"1": elems(4)}, "a": {"0": elems(0), "1": elems(1)}})
A, B = ("a", Bitmap([0, 1])), ("b", Bitmap([4]))
Cpus = tuple[tuple[str, Bitmap], ...] | None
DECIDED_CPUS: dict[str, tuple[dict[str, Any], Cpus, list[str]]] = {
    "by container, over nodes": ({"cpuset": A01_B4}, (A, B), []),
    "for one container only": ({"cpuset": json.dumps({"b": {"1": elems(4)}})}, (B,), []),
    "for the pod": ({STATUS: '{"cpuset": "0-3,8"}'}, (("", Bitmap([0, 1, 2, 3, 8])),), []),
    "nothing": ({"cpuset": "{}", STATUS: '{"cpuset": ""}'}, None, []),
    "nulls and empty sets": (
        {"cpuset": '{"a": null, "b": {"0": {}}}', STATUS: '{"numaNodeResources": []}'},
        None,
        [],
    ),
    "the same in both forms": ({"cpuset": A01_B4, STATUS: '{"cpuset": "0-1,4"}'}, (A, B), []),
    "different in both forms": (
        {"cpuset": A01_B4, STATUS: '{"cpuset": "0-1"}'},
        (A, B),
        [f"annotation {STATUS} is ignored: it contradicts cpuset"],
    ),
    "with a container of another pod": (
        {"cpuset": json.dumps({"x\n": {}, "": {"0": elems(9)}, "b": {"1": elems(4)}})},
        (B,),
        ['annotation cpuset is ignored for ", x?", not in this pod'],
    ),
    "only for another pod's container": (
        {"cpuset": json.dumps({"x": {"0": elems(0)}}), STATUS: '{"cpuset": "7"}'},
        (("", Bitmap([7])),),
        ['annotation cpuset is ignored for "x", not in this pod'],
    ),
    "with a trailing comma": (
        {"cpuset": A01_B4[:-1] + ",}"},
        (A, B),
        ["annotation cpuset has a trailing comma, which is passed over"],
    ),
    "with a CPU that is a word": (
        {"cpuset": '{"a": {"0": {"elems": {"x": {}}}}}', STATUS: '{"cpuset": "7"}'},
        (("", Bitmap([7])),),
        ['annotation cpuset cannot be used: "x" is no list of ids: '],
    ),
    "with a CPU over 1,023": (
        {STATUS: '{"cpuset": "1024"}'},
        None,
        [f'annotation {STATUS} cannot be used: "1024" is no list of ids: '],
    ),
    "with a list for an object": (
        {"cpuset": '{"a": []}', STATUS: '{"cpuset": [0]}'},
        None,
        [
            "annotation cpuset cannot be used: a is a list, not an object",
            f"annotation {STATUS} cannot be used: cpuset is a list, not a text",
        ],
    ),
    "with a node that is a number": (
        {"cpuset": '{"a": {"0": 1}}'},
        None,
        ["annotation cpuset cannot be used: a node is 1, not an object"],
    ),
    "in no JSON": (
        {"cpuset": "0-3", STATUS: 7},
        None,
        [
            "annotation cpuset cannot be used: not JSON: ",
            f"annotation {STATUS} cannot be used: it is 7, not a text",
        ],
    ),
}


@pytest.mark.parametrize(("annotations", "cpus", "notes"), DECIDED_CPUS.values(), ids=DECIDED_CPUS)
def test_a_scheduler_decided_cpus(
    annotations: dict[str, Any], cpus: Cpus, notes: list[str]
) -> None:
    decided, said = read_decided_cpus(annotations, ["a", "b"])
    assert decided == cpus
    assert len(said) == len(notes)
    assert all(map(str.startswith, said, notes))


def by(key: GpuKey, *numbers: int) -> DecidedGpus:
    return DecidedGpus(by=key, numbers=numbers)


INDEX_0_2 = by(GpuKey.INDEX, 0, 2)
DECIDED_GPUS: dict[str, tuple[dict[str, Any], DecidedGpus | None, list[str]]] = {
    "by index": ({GROUP: "2, 0"}, INDEX_0_2, []),
    "by minor": (
        {DEVICES: '{"gpu": [{"minor": 3, "id": "GPU-1"}, {"minor": 1}], "rdma": [{}]}'},
        by(GpuKey.MINOR, 1, 3),
        [],
    ),
    "nothing": ({GROUP: "", DEVICES: '{"rdma": [{"minor": 0}]}'}, None, []),
    "the same in both forms": (
        {GROUP: "0,2", DEVICES: '{"gpu": [{"minor": 0}, {"minor": 2}]}'},
        INDEX_0_2,
        [],
    ),
    "different in both forms": (
        {GROUP: "0,2", DEVICES: '{"gpu": [{"minor": 1}]}'},
        INDEX_0_2,
        [f"annotation {DEVICES} is ignored: its numbers are not those of {GROUP}"],
    ),
    "by words, then by minor": (
        {GROUP: "GPU-1", DEVICES: '{"gpu": [{"minor": 1}]}'},
        by(GpuKey.MINOR, 1),
        [f'annotation {GROUP} cannot be used: "GPU-1" is no list of ids: '],
    ),
    "without a minor": (
        {GROUP: ["0"], DEVICES: '{"gpu": [{"minor": null}]}'},
        None,
        [
            f"annotation {GROUP} cannot be used: it is a list, not a text",
            f"annotation {DEVICES} cannot be used: a minor is null, not a whole number",
        ],
    ),
    "by true": (
        {DEVICES: '{"gpu": [{"minor": true}]}'},
        None,
        [f"annotation {DEVICES} cannot be used: a minor is true, not a whole number"],
    ),
    "by a negative minor": (
        {DEVICES: '{"gpu": [{"minor": -1}]}'},
        None,
        [f"annotation {DEVICES} cannot be used: id -1 is negative"],
    ),
    "by a minor of five thousand digits": (
        {DEVICES: '{"gpu": [{"minor": ' + "9" * 5000 + "}]}"},
        None,
        [f"annotation {DEVICES} cannot be used: id 999999999999999999999 is over 1023"],
    ),
    "by a list of texts": (
        {DEVICES: '{"gpu": ["0"]}'},
        None,
        [f'annotation {DEVICES} cannot be used: a GPU is "0", not an object'],
    ),
}


@pytest.mark.parametrize(("annotations", "gpus", "notes"), DECIDED_GPUS.values(), ids=DECIDED_GPUS)
def test_a_scheduler_decided_gpus(
    annotations: dict[str, Any], gpus: DecidedGpus | None, notes: list[str]
) -> None:
    decided, said = read_decided_gpus(annotations)
    assert decided == gpus
    assert len(said) == len(notes)
    assert all(map(str.startswith, said, notes))


CPU_SETS = st.dictionaries(
    st.sampled_from("abc"), st.frozensets(st.integers(0, 1023), max_size=9), max_size=3
)


@given(CPU_SETS, st.integers(1, 4))
@settings(deadline=None)
def test_what_a_scheduler_writes_is_what_is_read(
    held: dict[str, frozenset[int]], nodes: int
) -> None:
    cpuset = {
        name: {str(n): elems(*(cpu for cpu in cpus if cpu % nodes == n)) for n in range(nodes)}
        for name, cpus in held.items()
    }
    decided, notes = read_decided_cpus({"cpuset": json.dumps(cpuset)}, ["a", "b", "c"])
    assert dict(decided or ()) == {name: Bitmap(cpus) for name, cpus in held.items() if cpus}
    assert notes == []


@given(st.frozensets(st.integers(0, 1023), max_size=9), st.data())
@settings(deadline=None)
def test_gpus_are_the_same_in_both_spellings(numbers: frozenset[int], data: st.DataObject) -> None:
    order = data.draw(st.permutations(sorted(numbers)))
    group = ",".join(map(str, order))
    devices = json.dumps({"gpu": [{"minor": number} for number in order]})
    wanted = tuple(sorted(numbers))
    assert read_decided_gpus({GROUP: group})[0] == (by(GpuKey.INDEX, *wanted) if wanted else None)
    assert read_decided_gpus({DEVICES: devices})[0] == (
        by(GpuKey.MINOR, *wanted) if wanted else None
    )
