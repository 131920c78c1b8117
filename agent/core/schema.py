"""The JSON `numalet/machine/v1`: a Machine that anyone can save, send and open again.

Optional keys appear only where they say something: `die` on a core of a socket with several dies,
`hugepages` (page bytes → pages) on a node that has some, `fault` on a GPU that cannot be given out.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, TypeVar

from agent.core.bitmap import Bitmap
from agent.core.strict_json import parse_json, shown, typed
from agent.core.topology import (
    Core,
    Gpu,
    Machine,
    NodeKind,
    NodeSource,
    NumaNode,
    parse_link,
)

MACHINE_SCHEMA = "numalet/machine/v1"
MAX_MACHINE_LENGTH = 16 << 20
"""Characters of JSON; the widest real machine takes 0.1 million."""

_T = TypeVar("_T")
_E = TypeVar("_E", bound=StrEnum)
_Decode = Callable[[object, str], Any]
"""(JSON value, where it stands) → value; raises ValueError that says where and what."""


def to_json(machine: Machine) -> dict[str, Any]:
    """The JSON object of `machine`, keys in their documented order."""
    ids = [node.id for node in machine.nodes]
    return {
        "schema": MACHINE_SCHEMA,
        "name": machine.name,
        "nodes": [_node_to_json(node, ids) for node in machine.nodes],
        "cores": [_core_to_json(core) for core in machine.cores],
        "gpus": [_gpu_to_json(gpu) for gpu in machine.gpus],
        "links": [[None if link is None else str(link) for link in row] for row in machine.links],
        "offline_cpus": str(machine.offline_cpus),
        "isolated_cpus": str(machine.isolated_cpus),
        "warnings": list(machine.warnings),
    }


def _node_to_json(node: NumaNode, ids: list[int]) -> dict[str, Any]:
    distances = zip(ids, node.distances, strict=True) if node.distances else ()
    hugepages = {"hugepages": {str(size): pages for size, pages in node.hugepages}}
    return {
        "id": node.id,
        "kind": node.kind.value,
        "cpus": str(node.cpus),
        "memory_bytes": node.memory_bytes,
        "distances": {str(id_): distance for id_, distance in distances},
    } | (hugepages if node.hugepages else {})


def _core_to_json(core: Core) -> dict[str, Any]:
    return {
        "id": core.id,
        "socket": core.socket,
        "node": core.node,
        "l3": core.l3,
        "cpus": str(core.cpus),
    } | ({} if core.die is None else {"die": core.die})


def _gpu_to_json(gpu: Gpu) -> dict[str, Any]:
    return {
        "index": gpu.index,
        "minor": gpu.minor,
        "uuid": gpu.uuid,
        "bdf": gpu.bdf,
        "model": gpu.model,
        "memory_bytes": gpu.memory_bytes,
        "node": gpu.node,
        "node_source": gpu.node_source.value,
    } | ({} if gpu.fault is None else {"fault": gpu.fault})


def parse_machine(text: str) -> Machine:
    """The Machine in a JSON text. Raises ValueError with one sentence that says where and what."""
    return from_json(parse_json(text, MAX_MACHINE_LENGTH))


def from_json(data: object) -> Machine:
    """The Machine of a parsed JSON value. Raises ValueError as parse_machine does."""
    top = typed(data, dict, "the machine")
    schema = top.get("schema")
    if schema != MACHINE_SCHEMA:
        raise ValueError(f'schema is {shown(schema)}, not "{MACHINE_SCHEMA}"')
    fields = _fields(top, "", _MACHINE)
    del fields["schema"]
    ids = [node["id"] for node in fields["nodes"]]
    for node in fields["nodes"]:
        node["distances"] = _distances(node, ids)
    fields["nodes"] = tuple(NumaNode(**node) for node in fields["nodes"])
    return Machine(**fields)


def _distances(node: dict[str, Any], ids: list[int]) -> tuple[int, ...]:
    distances = dict(node["distances"])
    if not distances:
        return ()
    if distances.keys() != set(ids):
        raise ValueError(f"the distances of node {node['id']} are not to exactly the nodes {ids}")
    return tuple(distances[id_] for id_ in ids)


def _fields(value: object, where: str, keys: Mapping[str, "_Decode"]) -> dict[str, Any]:
    """The decoded values of a JSON object that has exactly `keys`; those in _OPTIONAL may lack."""
    data = typed(value, dict, where)
    if unknown := data.keys() - keys.keys():
        raise ValueError(f"{where or 'the machine'} has the unknown key {shown(min(unknown))}")
    if lacking := keys.keys() - data.keys() - _OPTIONAL:
        raise ValueError(f'{where or "the machine"} lacks the key "{min(lacking)}"')
    prefix = f"{where}." if where else ""
    return {key: keys[key](item, prefix + key) for key, item in data.items()}


def _text(value: object, where: str) -> str:
    return typed(value, str, where)


def _number(value: object, where: str) -> int:
    number = typed(value, int, where)
    if abs(number) >= 2**63:
        raise ValueError(f"{where} is {shown(number)}, out of range")
    return number


def _parsed(parse: Callable[[str], _T]) -> Callable[[object, str], _T]:
    """A decoder of texts that `parse` understands or refuses with ValueError."""

    def decode(value: object, where: str) -> _T:
        try:
            return parse(_text(value, where))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None

    return decode


def _or_null(decode: Callable[[object, str], _T]) -> Callable[[object, str], _T | None]:
    return lambda value, where: None if value is None else decode(value, where)


def _list(decode: Callable[[object, str], _T]) -> Callable[[object, str], tuple[_T, ...]]:
    return lambda value, where: tuple(
        decode(item, f"{where}[{i}]") for i, item in enumerate(typed(value, list, where))
    )


def _counts(value: object, where: str) -> tuple[tuple[int, int], ...]:
    key_of = _parsed(_whole)
    return tuple(
        sorted(
            (key_of(key, where), _number(count, f"{where}.{key}"))
            for key, count in typed(value, dict, where).items()
        )
    )


def _made(make: Callable[..., _T], keys: Mapping[str, _Decode]) -> Callable[[object, str], _T]:
    return lambda value, where: make(**_fields(value, where, keys))


def _whole(text: str) -> int:
    """An integer in its shortest spelling, of a size that something can be counted in."""
    if len(text) > 19 or not text.removeprefix("-").isdecimal() or str(int(text)) != text:
        raise ValueError(f"{shown(text)} is not a whole number")
    return int(text)


def _choice(kind: type[_E]) -> Callable[[str], _E]:
    def choose(text: str) -> _E:
        if text not in list(kind):
            raise ValueError(f"{shown(text)} is not one of {', '.join(kind)}")
        return kind(text)

    return choose


_OPTIONAL = {"die", "hugepages", "fault"}
_bitmap = _parsed(Bitmap.parse_list)
_NODE: Mapping[str, _Decode] = {
    "id": _number,
    "kind": _parsed(_choice(NodeKind)),
    "cpus": _bitmap,
    "memory_bytes": _number,
    "distances": _counts,
    "hugepages": _counts,
}
_CORE: Mapping[str, _Decode] = {
    "id": _number,
    "socket": _number,
    "die": _number,
    "node": _or_null(_number),
    "l3": _or_null(_number),
    "cpus": _bitmap,
}
_GPU: Mapping[str, _Decode] = {
    "index": _number,
    "minor": _or_null(_number),
    "uuid": _or_null(_text),
    "bdf": _text,
    "model": _text,
    "memory_bytes": _or_null(_number),
    "node": _or_null(_number),
    "node_source": _parsed(_choice(NodeSource)),
    "fault": _text,
}
_MACHINE: Mapping[str, _Decode] = {
    "schema": _text,
    "name": _text,
    "nodes": _list(_made(dict, _NODE)),
    "cores": _list(_made(Core, _CORE)),
    "gpus": _list(_made(Gpu, _GPU)),
    "links": _list(_list(_or_null(_parsed(parse_link)))),
    "offline_cpus": _bitmap,
    "isolated_cpus": _bitmap,
    "warnings": _list(_text),
}
