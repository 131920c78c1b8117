"""Pods out of Kubernetes manifests, YAML or JSON, as `kubectl apply -f` reads them.

Manifests come from users: what cannot be read costs itself and one sentence, never the rest.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import yaml

Pod = dict[str, Any]

MAX_BYTES = 4 << 20
"""Of one file. The API server takes no object of more than about 1.5 MiB."""
MAX_REPLICAS = 10_000
MAX_NODES = 200_000
"""YAML nodes of one document, with aliases counted as often as they are used."""

_DOCUMENT_START = re.compile(r"^---(?=\s|$)", re.MULTILINE)
_REPLICAS: dict[str, str | None] = {
    "Deployment": "replicas",
    "StatefulSet": "replicas",
    "ReplicaSet": "replicas",
    "ReplicationController": "replicas",
    "Job": "parallelism",
    "DaemonSet": None,
}
"""Workload → the field of its spec that says how many pods it has; a DaemonSet has one a node."""


class _BadManifestError(Exception):
    """Why one document, or one file, gives no pods."""


def read_pods(paths: Sequence[str]) -> tuple[tuple[Pod, ...], tuple[str, ...]]:
    """(pods in order, problems as sentences) of all files; `-` is standard input.

    Workloads give as many pods as they have replicas, named `<workload>-0`, `<workload>-1`, …
    Where a document of a file, or an item of a List, is bad the others are still read.
    """
    pods: list[Pod] = []
    problems: list[str] = []
    for path in paths:
        before = len(pods) + len(problems)
        for where, read in _readers(path):
            try:
                pods += read()
            except _BadManifestError as error:
                problems.append(f"{where}: {error}")
        if len(pods) + len(problems) == before:
            problems.append(f"{path}: has no pods")
    return tuple(pods), tuple(problems)


def _readers(path: str) -> Iterator[tuple[str, Callable[[], list[Pod]]]]:
    """(where it stands, what reads its pods) for each object of a file."""
    try:
        parts = [part for part in _split(_read_file(path)) if not _is_blank(part)]
    except _BadManifestError as error:
        yield path, partial(_fail, error)
        return
    for number, part in enumerate(parts, 1):
        where = f"{path}, document {number}" if len(parts) > 1 else path
        try:
            for place, value in _objects_in(_parse(part), where):
                yield place, partial(_pods_of, value)
        except _BadManifestError as error:
            yield where, partial(_fail, error)


def _objects_in(value: object, where: str) -> Iterator[tuple[str, object]]:
    """The objects of a document: itself, or the items of a List."""
    items = value.get("items") if isinstance(value, dict) else None
    if isinstance(items, list) and str(value.get("kind", "")).endswith("List"):  # type: ignore[attr-defined]
        for number, item in enumerate(items, 1):
            yield from _objects_in(item, f"{where}, item {number}")
    else:
        yield where, value


def _fail(error: Exception) -> list[Pod]:
    raise error


def _split(text: str) -> Iterator[str]:
    """The documents, each below as many blank lines as the file has before it, for line numbers."""
    starts = [0, *(match.end() for match in _DOCUMENT_START.finditer(text))]
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        yield "\n" * text.count("\n", 0, start) + text[start:end].removesuffix("---")


def _is_blank(text: str) -> bool:
    return all(not line.strip() or line.lstrip().startswith("#") for line in text.splitlines())


# --- text to values -------------------------------------------------------------------------------


def _read_file(path: str) -> str:
    try:
        # Without waiting for a writer, should it be a pipe that nobody writes to.
        file = 0 if path == "-" else os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with open(file, "rb", closefd=path != "-") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise _BadManifestError(f"cannot be read: {error.strerror}") from error
    if len(data) > MAX_BYTES:
        raise _BadManifestError(f"is larger than {MAX_BYTES >> 20} MiB")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _BadManifestError(f"is not UTF-8 text: {error.reason}") from error


def _parse(text: str) -> object:
    """The value of one document. Tabs are fine in what is plainly JSON."""
    if text.lstrip().startswith("{"):
        try:
            return json.loads(text, object_pairs_hook=_mapping)
        except (json.JSONDecodeError, RecursionError):
            pass  # flow style YAML starts like this too
    try:
        loader = _Loader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise _BadManifestError(f"is not YAML: {error.problem}{where}") from error
    except RecursionError as error:
        raise _BadManifestError("is nested too deeply") from error
    except (yaml.YAMLError, ValueError) as error:
        raise _BadManifestError(f"is not YAML: {str(error).splitlines()[0][:120]}") from error


def _mapping(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    """A mapping of string keys, none of them twice, as Kubernetes has them."""
    mapping: dict[str, Any] = {}
    for key, value in pairs:
        if not isinstance(key, str):
            raise _BadManifestError(f"has a key that is no text: {str(key)[:40]}")
        if key in mapping:
            raise _BadManifestError(f'has the key "{key[:40]}" twice in one mapping')
        mapping[key] = value
    return mapping


class _Loader(yaml.SafeLoader):
    """SafeLoader that counts what aliases unfold to, keeps dates as texts and mappings exact."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._size: dict[int, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        node = super().compose_node(parent, index)
        if node is not None and node is not parent:
            self._count(node)
        return node

    def _count(self, node: yaml.Node) -> None:
        """Children are complete when their parent is, so sizes add up without unfolding."""
        children: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            children = [child for pair in node.value for child in pair]
        elif isinstance(node, yaml.SequenceNode):
            children = node.value
        size = 1 + sum(self._size.get(id(child), 1) for child in children)
        if size > MAX_NODES:
            raise _BadManifestError(f"unfolds to more than {MAX_NODES:,} values")
        self._size[id(node)] = size


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[str, Any]:
    loader.flatten_mapping(node)
    return _mapping(
        [
            (loader.construct_object(key, deep=True), loader.construct_object(value, deep=True))
            for key, value in node.value
        ]
    )


_Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)


def _construct_text(loader: _Loader, node: yaml.ScalarNode) -> str:
    return str(loader.construct_scalar(node))


_Loader.add_constructor("tag:yaml.org,2002:timestamp", _construct_text)


# --- values to pods -------------------------------------------------------------------------------


def _pods_of(value: object) -> list[Pod]:
    if not isinstance(value, dict):
        raise _BadManifestError("is not an object with a kind")
    kind = value.get("kind")
    if not isinstance(kind, str) or not kind:
        raise _BadManifestError("has no kind")
    if kind == "Pod":
        return [value]
    if kind == "CronJob":
        return list(_replicas(_object(value, "metadata"), _job_template(value), "Job"))
    if kind in _REPLICAS:
        return list(_replicas(_object(value, "metadata"), _object(value, "spec"), kind))
    raise _BadManifestError(f"is a {kind[:60]}, which has no pods")


def _job_template(cron_job: dict[str, Any]) -> dict[str, Any]:
    return _object(_object(_object(cron_job, "spec"), "jobTemplate"), "spec")


def _replicas(metadata: dict[str, Any], spec: dict[str, Any], kind: str) -> Iterator[Pod]:
    template = _object(spec, "template")
    field = _REPLICAS[kind]
    count = 1 if field is None or spec.get(field) is None else spec[field]
    if type(count) is not int or not 0 <= count <= MAX_REPLICAS:
        raise _BadManifestError(f"has {str(count)[:40]} {field}, not a number up to {MAX_REPLICAS}")
    for number in range(count):
        own = _object(template, "metadata") | {"name": f"{metadata.get('name', '?')}-{number}"}
        if "namespace" in metadata:
            own["namespace"] = metadata["namespace"]
        yield {"kind": "Pod", "metadata": own, "spec": template.get("spec")}


def _object(parent: dict[str, Any], key: str) -> dict[str, Any]:
    value = parent.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _BadManifestError(f"has a {key} that is not an object")
    return value
