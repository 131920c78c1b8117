"""Pods out of Kubernetes manifests, YAML or JSON, that anyone may have written.

What cannot be read costs one sentence and itself, never the rest. A line that starts with `---` is
the start of a document wherever it stands, so the file is split there before YAML is parsed, and
what follows a broken document is still read.

Values are built here from the parser's events, as Kubernetes has them: what JSON knows and nothing
else. A date is its text, a key is its text (`8080: x` has the key "8080"), no key stands twice, and
aliases are counted as often as they are used, before anything is unfolded.
"""

import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, pairwise
from typing import Any

import yaml
from yaml.constructor import SafeConstructor
from yaml.reader import Reader
from yaml.resolver import Resolver

from agent.core.strict_json import Object, parse_json, part, printable, shown, typed

MAX_BYTES = 16 << 20
"""Of one file. The API server takes no object of more than about 1.5 MiB."""
MAX_DOCUMENTS = 10_000
MAX_VALUES = 1_000_000
"""In one document, with what an alias stands for counted each time."""
MAX_DEPTH = 100
MAX_REPLICAS = 10_000
MAX_PODS = 100_000

_MARKER = re.compile(r"^(?:---|\.\.\.)(?=\s|\Z)", re.MULTILINE)
_CONTENT = re.compile(r"^[^%#\n]", re.MULTILINE)
_LOADER: Any = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
_TAG = "tag:yaml.org,2002:"
_RESOLVER: Any = Resolver()
_NUMBERS: Mapping[str, Any] = {
    f"{_TAG}int": SafeConstructor().construct_yaml_int,
    f"{_TAG}float": SafeConstructor().construct_yaml_float,
}
_REPLICAS: Mapping[str, str | None] = {
    "Deployment": "replicas",
    "StatefulSet": "replicas",
    "ReplicaSet": "replicas",
    "ReplicationController": "replicas",
    "Job": "parallelism",
    "DaemonSet": None,
}
"""The field that says how many pods a workload has; of a DaemonSet a node has one."""


def read_pods(paths: Sequence[str]) -> tuple[tuple[Object, ...], tuple[str, ...]]:
    """The pods of these files in order, and problems: sentences that name file and document.

    `-` is standard input. A workload gives its pods `<name>-0`, `<name>-1`, …, which share what
    its template says; a file without any object is a problem.
    """
    pods: list[Object] = []
    problems: list[str] = []
    for outcome in (outcome for path in paths for outcome in _read_outcomes(path)):
        if isinstance(outcome, str):
            problems.append(outcome)
        elif len(pods) + len(outcome) > MAX_PODS:
            problems.append(f"more than {MAX_PODS:,} pods are asked for: the rest is passed over")
            break
        else:
            pods += outcome
    return tuple(pods), tuple(problems)


def _read_outcomes(path: str) -> Iterator[list[Object] | str]:
    """The pods of an object, or the sentence why it has none, for each object of a file."""
    name = "standard input" if path == "-" else printable(path, 400)
    number = 0
    try:
        for line, text in _split(_read_text(path)):
            where = f"{name}, document {number + 1}"
            try:
                document = _parse(text, line)
            except ValueError as reason:
                yield f"{where}: {reason}"
            else:
                yield from _outcomes_of(document, where)
                if document is None:
                    continue
            number += 1
        if not number:
            raise ValueError("it has no Kubernetes object in it")
    except ValueError as reason:
        yield f"{name}: {reason}"


# --- files to texts -------------------------------------------------------------------------------


def _read_text(path: str) -> str:
    """Raises ValueError with the reason. Does not wait for someone to open the other end."""
    try:
        # A path with a NUL or half a character is a ValueError of Python's own.
        file = os.dup(0) if path == "-" else os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            text = _read_bytes(file).decode("utf-8-sig")
        finally:
            os.close(file)
    except OSError as error:
        raise ValueError(f"it cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text: {error.reason} at byte {error.start}") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _read_bytes(file: int) -> bytes:
    if stat.S_ISFIFO(os.fstat(file).st_mode):
        os.set_blocking(file, True)  # its writer may take a while: `-f <(helm template …)`
    data = bytearray()
    while chunk := os.read(file, 1 << 20):
        data += chunk
        if len(data) > MAX_BYTES:
            raise ValueError(f"it is larger than {MAX_BYTES >> 20} MiB")
    return bytes(data)


def _split(text: str) -> Iterator[tuple[int, str]]:
    """(number of its first line, text) of each document; raises ValueError after too many.

    Source: YAML 1.1, l-forbidden: no scalar has a line that starts with a document's marker.
    """
    found = islice(_MARKER.finditer(text), MAX_DOCUMENTS)
    starts = [mark.start() if mark[0] == "---" else mark.end() for mark in found]
    line = 1
    for start, end in pairwise([0, *starts, len(text)][: MAX_DOCUMENTS + 1]):
        document = text[start:end]
        if _CONTENT.search(document):
            yield line, document
        line += document.count("\n")
    if len(starts) == MAX_DOCUMENTS:
        raise ValueError(f"it has {MAX_DOCUMENTS:,} documents or more: the rest is passed over")


# --- texts to values ------------------------------------------------------------------------------


def _parse(text: str, line: int) -> object:
    """The value of a document that starts on this line of its file; None where it is empty."""
    if text.removeprefix("---").lstrip().startswith("{"):
        try:
            return parse_json(text.removeprefix("---"), MAX_BYTES)
        except ValueError:
            pass  # YAML may start like this too
    if bad := Reader.NON_PRINTABLE.search(text):
        column = bad.start() - text.rfind("\n", 0, bad.start())
        place = f"line {line + text.count(chr(10), 0, bad.start())}, column {column}"
        raise ValueError(f"the YAML cannot be read: a control character at {place}")
    try:
        return _Builder(text, line).build()
    except yaml.YAMLError as error:
        problem = printable(str(getattr(error, "problem", error)), 120)
        place = _place(getattr(error, "problem_mark", None), line)
        raise ValueError(f"the YAML cannot be read: {problem}{place}") from error


def _place(mark: Any, line: int) -> str:
    return f" at line {mark.line + line}, column {mark.column + 1}" if mark else ""


class _Builder:
    """Turns the events of one document into its value."""

    def __init__(self, text: str, line: int) -> None:
        self._events = yaml.parse(text, Loader=_LOADER)
        self._line = line
        self._named: dict[str, tuple[object, int]] = {}
        """Anchor → its value, and how many values that is."""
        self._count = 0

    def build(self) -> object:
        value = None
        for event in self._events:
            if isinstance(event, yaml.NodeEvent):
                value = self._value(event, 0)
        return value

    def _refuse(self, event: Any, why: str) -> ValueError:
        return ValueError(f"{why}{_place(event.start_mark, self._line)}")

    def _value(self, event: Any, depth: int) -> object:
        if depth > MAX_DEPTH:
            raise self._refuse(event, f"it is nested more than {MAX_DEPTH} deep")
        before = self._count
        if isinstance(event, yaml.AliasEvent):
            value = self._alias(event)
        elif isinstance(event, yaml.ScalarEvent):
            value = self._scalar(event)
        elif event.tag not in (None, "!", f"{_TAG}map", f"{_TAG}seq"):
            raise self._unknown_tag(event)
        elif isinstance(event, yaml.MappingStartEvent):
            value = self._mapping(depth + 1)
        else:
            value = [self._value(item, depth + 1) for item in self._until(yaml.SequenceEndEvent)]
        self._count += 1
        if self._count > MAX_VALUES:
            raise self._refuse(event, f"it unfolds to more than {MAX_VALUES:,} values")
        if event.anchor and not isinstance(event, yaml.AliasEvent):
            self._named[event.anchor] = value, self._count - before
        return value

    def _until(self, end: type) -> Iterator[Any]:
        while not isinstance(event := next(self._events), end):
            yield event

    def _alias(self, event: Any) -> object:
        if event.anchor not in self._named:
            raise self._refuse(event, f"the alias {shown(event.anchor)} names nothing before it")
        value, count = self._named[event.anchor]
        self._count += count
        return value

    def _scalar(self, event: Any) -> object:
        text: str = event.value
        plain = event.implicit[0] or event.tag is not None
        tag = _RESOLVER.resolve(yaml.ScalarNode, text, (plain, True))
        if event.tag in ("!", f"{_TAG}str"):
            return text
        if event.tag not in (None, tag):
            raise self._unknown_tag(event)
        if tag == f"{_TAG}null":
            return None
        if tag == f"{_TAG}bool":
            return text.lower() in ("yes", "true", "on")
        if tag not in _NUMBERS or len(text) > 64 or ":" in text:
            return text  # to Kubernetes, 12:30 is no number
        try:
            number: object = _NUMBERS[tag](yaml.ScalarNode(tag, text))
        except ValueError:  # 0x_
            return text
        return number

    def _mapping(self, depth: int) -> Object:
        own: Object = {}
        merged: Object = {}
        for key in self._until(yaml.MappingEndEvent):
            if not isinstance(key, yaml.ScalarEvent):
                raise self._refuse(key, "a key is not a text")
            name = key.value
            if key.anchor:
                self._named[key.anchor] = name, 1
            value = self._value(next(self._events), depth)
            if name == "<<" and key.implicit[0]:
                self._merge(key, value, merged)
            elif name in own:
                raise self._refuse(key, f"the key {shown(name)} stands twice in one object")
            else:
                own[name] = value
        return merged | own

    def _merge(self, key: Any, value: object, merged: Object) -> None:
        """Source: YAML's merge key: own keys come first, then earlier mappings."""
        for source in value if isinstance(value, list) else [value]:
            if not isinstance(source, dict):
                raise self._refuse(key, "what << merges is not an object")
            for name, item in source.items():
                merged.setdefault(name, item)

    def _unknown_tag(self, event: Any) -> ValueError:
        return self._refuse(event, f"the tag {shown(event.tag)} is not for this value")


# --- values to pods -------------------------------------------------------------------------------


def _outcomes_of(document: object, where: str) -> Iterator[list[Object] | str]:
    for place, value in _objects_in(document, where):
        try:
            yield _pods_of(value)
        except ValueError as reason:
            yield f"{place}: {reason}"


def _objects_in(document: object, where: str) -> Iterator[tuple[str, object]]:
    """The object of a document, or those of a List, even of a List in it."""
    waiting = [] if document is None else [(where, document)]
    while waiting:
        place, value = waiting.pop()
        kind = value.get("kind") if isinstance(value, dict) else None
        items = value.get("items", ()) if isinstance(value, dict) else None
        if isinstance(kind, str) and kind.endswith("List") and type(items) in (list, type(None)):
            waiting += reversed(
                [
                    (f"{place}, item {number}", _as_item(item, kind))
                    for number, item in enumerate(items or (), 1)
                ]
            )
        else:
            yield place, value


def _as_item(item: object, kind: str) -> object:
    """The item with its kind: in a PodList the API server leaves it out."""
    if kind == "List" or not isinstance(item, dict) or "kind" in item:
        return item
    return {"kind": kind.removesuffix("List"), **item}


def _pods_of(value: object) -> list[Object]:
    """Raises ValueError with the reason where it is no workload."""
    data = typed(value, dict, "it")
    kind = part(data, "kind", str)
    if not kind:
        raise ValueError("it has no kind")
    if kind == "Pod":
        return [data]
    if kind == "CronJob":
        job = part(part(data, "spec", dict), "jobTemplate", dict)
        return _replicas(part(data, "metadata", dict), part(job, "spec", dict), "Job")
    if kind in _REPLICAS:
        return _replicas(part(data, "metadata", dict), part(data, "spec", dict), kind)
    article = "an" if kind[0] in "AEIOU" else "a"
    raise ValueError(f"it is {article} {printable(kind, 63)}, which has no pods")


def _replicas(metadata: Object, spec: Object, kind: str) -> list[Object]:
    field = _REPLICAS[kind]
    count = spec.get(field) if field else None
    if count is None:
        count = 1
    if type(count) is not int or not 0 <= count <= MAX_REPLICAS:
        raise ValueError(f"{field} is {shown(count)}, not a number up to {MAX_REPLICAS:,}")
    name = part(metadata, "name", str)
    prefix = f"{name}-" if name else part(metadata, "generateName", str)
    if not prefix:
        raise ValueError("it has no name")
    template = part(spec, "template", dict)
    if not template:
        raise ValueError("it has no template for its pods")
    own = part(template, "metadata", dict)
    shared = {key: own[key] for key in ("labels", "annotations") if key in own}
    shared |= {key: metadata[key] for key in ("namespace",) if key in metadata}
    return [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"{prefix}{number}"} | shared,
            "spec": template.get("spec"),
        }
        for number in range(count)
    ]
