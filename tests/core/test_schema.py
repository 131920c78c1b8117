"""`numalet/machine/v1`, both ways."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.core.bitmap import Bitmap
from agent.core.schema import parse_machine, to_json
from agent.core.topology import (
    Core,
    Gpu,
    Link,
    LinkKind,
    Machine,
    NodeKind,
    NodeSource,
    NumaNode,
)
from tests.core.machines import random_machines

# As the issue that asked for it spells it, with one node more.
DOCUMENTED = """
{"schema": "numalet/machine/v1", "name": "a800x8",
 "nodes": [{"id": 0, "kind": "cpu", "cpus": "0-31,64-95", "memory_bytes": 549755813888, "distances": {"0": 10, "1": 20}},
           {"id": 1, "kind": "memory-only", "cpus": "", "memory_bytes": 549755813888, "distances": {"0": 20, "1": 10}}],
 "cores": [{"id": 0, "socket": 0, "node": 0, "l3": 0, "cpus": "0-31,64-95"}],
 "gpus": [{"index": 0, "minor": 0, "uuid": "GPU-1", "bdf": "0000:1a:00.0", "model": "NVIDIA A800-SXM4-80GB", "memory_bytes": 85899345920, "node": 0, "node_source": "sysfs"},
          {"index": 1, "minor": null, "uuid": null, "bdf": "0000:1b:00.0", "model": "NVIDIA A800-SXM4-80GB", "memory_bytes": null, "node": null, "node_source": "unknown"}],
 "links": [[null, "NV8"], ["NV8", null]],
 "offline_cpus": "", "isolated_cpus": "7", "warnings": []}
"""  # noqa: E501


def test_the_documented_json_is_read() -> None:
    machine = parse_machine(DOCUMENTED)
    assert machine == Machine(
        name="a800x8",
        nodes=(
            NumaNode(
                id=0,
                kind=NodeKind.CPU,
                cpus=Bitmap([*range(32), *range(64, 96)]),
                memory_bytes=512 << 30,
                distances=(10, 20),
            ),
            NumaNode(
                id=1,
                kind=NodeKind.MEMORY_ONLY,
                cpus=Bitmap(),
                memory_bytes=512 << 30,
                distances=(20, 10),
            ),
        ),
        cores=(Core(id=0, socket=0, node=0, l3=0, cpus=Bitmap([*range(32), *range(64, 96)])),),
        gpus=(
            Gpu(
                index=0,
                minor=0,
                uuid="GPU-1",
                bdf="0000:1a:00.0",
                model="NVIDIA A800-SXM4-80GB",
                memory_bytes=80 << 30,
                node=0,
                node_source=NodeSource.SYSFS,
            ),
            Gpu(
                index=1,
                minor=None,
                uuid=None,
                bdf="0000:1b:00.0",
                model="NVIDIA A800-SXM4-80GB",
                memory_bytes=None,
                node=None,
                node_source=NodeSource.UNKNOWN,
            ),
        ),
        links=(
            (None, Link(kind=LinkKind.NV, nvlinks=8)),
            (Link(kind=LinkKind.NV, nvlinks=8), None),
        ),
        isolated_cpus=Bitmap([7]),
    )


def test_the_documented_json_is_written_key_by_key_in_its_order() -> None:
    assert json.dumps(to_json(parse_machine(DOCUMENTED))) == json.dumps(json.loads(DOCUMENTED))


@given(random_machines())
@settings(deadline=None)
def test_a_machine_survives_the_way_through_json(machine: Machine) -> None:
    assert parse_machine(json.dumps(to_json(machine))) == machine


def changed(*path: Any, to: Any) -> str:
    """The documented JSON with one value replaced; `...` deletes."""
    data = json.loads(DOCUMENTED)
    place = data
    for step in path[:-1]:
        place = place[step]
    if to is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = to
    return json.dumps(data)


BAD = {
    "no JSON at all": ("nodes: 2", "not JSON: Expecting value at line 1, column 1"),
    "half of it": (DOCUMENTED[:200], "not JSON: "),
    "a list": ("[]", "the machine is a list, not an object"),
    "a mebibyte of brackets": ("[" * (1 << 20), "the JSON is nested too deeply"),
    "a number too large to read": (
        changed("nodes", 0, "id", to=0).replace('"id": 0', '"id": ' + "9" * 5000, 1),
        "nodes[0].id is a huge number, out of range",
    ),
    "a number just too large": (
        changed("gpus", 0, "memory_bytes", to=2**63),
        "gpus[0].memory_bytes is 9223372036854775808, out of range",
    ),
    "a number just too small": (
        changed("gpus", 0, "index", to=-(2**63)),
        "gpus[0].index is -9223372036854775808, out of range",
    ),
    "more than a user's file may hold": (
        " " * (16 << 20) + "{",
        "it has 16,777,217 characters, more than 16,777,216",
    ),
    "NaN": (DOCUMENTED.replace("549755813888", "NaN"), "NaN is not a JSON number"),
    "a key twice": ('{"name": 1, "name": 2}', 'the key "name" stands twice in one object'),
    "no schema": (changed("schema", to=...), 'schema is null, not "numalet/machine/v1"'),
    "a newer schema": (
        changed("schema", to="numalet/machine/v2"),
        'schema is "numalet/machine/v2", not "numalet/machine/v1"',
    ),
    "a missing key": (changed("cores", to=...), 'the machine lacks the key "cores"'),
    "a missing key below": (changed("gpus", 1, "uuid", to=...), 'gpus[1] lacks the key "uuid"'),
    "an unknown key": (changed("nodez", to=1), 'the machine has the unknown key "nodez"'),
    "an unknown key below": (
        changed("nodes", 0, "dei", to=1),
        'nodes[0] has the unknown key "dei"',
    ),
    "a long unknown key": (changed("x" * 90, to=1), 'has the unknown key "' + "x" * 40 + "…"),
    "a text for a number": (
        changed("nodes", 0, "memory_bytes", to="1"),
        'nodes[0].memory_bytes is "1", not a whole number',
    ),
    "a fraction": (changed("nodes", 0, "id", to=0.5), "nodes[0].id is 0.5, not a whole number"),
    "true for a number": (changed("nodes", 0, "id", to=True), "nodes[0].id is true, not a"),
    "null for a text": (changed("name", to=None), "name is null, not a text"),
    "an object for a list": (changed("gpus", to={}), "gpus is an object, not a list"),
    "a list for an object": (changed("nodes", 0, to=[]), "nodes[0] is a list, not an object"),
    "an unknown kind": (
        changed("nodes", 0, "kind", to="gpu"),
        'nodes[0].kind: "gpu" is not one of cpu, memory-only, device-only',
    ),
    "an unknown source": (
        changed("gpus", 0, "node_source", to="guess"),
        'gpus[0].node_source: "guess" is not one of sysfs, nvml-memory',
    ),
    "an unknown link": (changed("links", 0, 1, to="NVX"), 'links[0][1]: "NVX" is not a link'),
    "CPUs that are no list": (changed("cores", 0, "cpus", to="a-b"), "cores[0].cpus: "),
    "a CPU over 1,023": (
        changed("isolated_cpus", to="1024"),
        "id 1024 is over 1023, the largest that numalet handles",
    ),
    "a distance to nowhere": (
        changed("nodes", 0, "distances", to={"0": 10, "7": 20}),
        "the distances of node 0 are not to exactly the nodes [0, 1]",
    ),
    "a distance twice": (
        changed("nodes", 0, "distances", to={"0": 10, "00": 20, "1": 20}),
        'nodes[0].distances: "00" is not a whole number',
    ),
    "a distance from no number": (
        changed("nodes", 0, "distances", to={"x": 10}),
        'nodes[0].distances: "x" is not a whole number',
    ),
    "what the machine itself refuses": (
        changed("gpus", 0, "node", to=1),
        "GPU 0000:1a:00.0 is on node 1, which has no CPUs here",
    ),
}


@pytest.mark.parametrize(("text", "sentence"), BAD.values(), ids=BAD)
def test_it_is_refused_in_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        parse_machine(text)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=12,
)


@given(JSON_VALUES, st.data())
@settings(deadline=None)
def test_any_value_anywhere_is_read_or_refused(value: Any, data: st.DataObject) -> None:
    document = json.loads(DOCUMENTED)
    place, key = document, data.draw(st.sampled_from(sorted(document)))
    while isinstance(place[key], (list, dict)) and place[key] and data.draw(st.booleans()):
        place = place[key]
        keys = sorted(place) if isinstance(place, dict) else range(len(place))
        key = data.draw(st.sampled_from(keys))
    place[key] = value
    with contextlib.suppress(ValueError):
        machine = parse_machine(json.dumps(document))
        assert parse_machine(json.dumps(to_json(machine))) == machine
