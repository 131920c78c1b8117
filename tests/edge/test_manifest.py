"""Manifests as people write them, as the API server prints them, and as nobody should."""

import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.edge.manifest import read_pods

Read = Callable[..., tuple[list[dict[str, Any]], list[str]]]

POD = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {}}
TEMPLATE: dict[str, Any] = {
    "metadata": {"labels": {"app": "tgi"}, "annotations": {"cpuset-scheduler": "required"}},
    "spec": {"containers": [{"name": "main"}]},
}


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Read:
    """The pods of manifests and the problems, without the path of the file."""
    folder = tmp_path_factory.mktemp("manifests")

    def write_and_read(*manifests: str | bytes) -> tuple[list[dict[str, Any]], list[str]]:
        paths = [folder / f"{number}.yaml" for number in range(len(manifests))]
        for path, manifest in zip(paths, manifests, strict=True):
            path.write_bytes(manifest if isinstance(manifest, bytes) else manifest.encode())
        pods, problems = read_pods([str(path) for path in paths])
        return list(pods), [problem.replace(f"{folder}{os.sep}", "") for problem in problems]

    return write_and_read


def workload(kind: str, **spec: Any) -> dict[str, Any]:
    metadata = {"name": "w", "namespace": "ns", "labels": {"app": "none of the pods'"}}
    return {"kind": kind, "metadata": metadata, "spec": {"template": TEMPLATE} | spec}


def replica(number: int) -> dict[str, Any]:
    metadata = {"name": f"w-{number}", "namespace": "ns"} | TEMPLATE["metadata"]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": TEMPLATE["spec"]}


# What `kubectl apply` would start of it.
WORKLOADS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "a Pod is itself": (POD, [POD]),
    "a Deployment of two": (workload("Deployment", replicas=2), [replica(0), replica(1)]),
    "a Deployment that does not say how many": (workload("Deployment"), [replica(0)]),
    "a Deployment that says null": (workload("Deployment", replicas=None), [replica(0)]),
    "a Deployment of none": (workload("Deployment", replicas=0), []),
    "a StatefulSet": (workload("StatefulSet", replicas=1), [replica(0)]),
    "a ReplicaSet": (workload("ReplicaSet", replicas=1), [replica(0)]),
    "a ReplicationController": (workload("ReplicationController"), [replica(0)]),
    "a DaemonSet has one pod here": (workload("DaemonSet", replicas=7), [replica(0)]),
    "a Job": (workload("Job"), [replica(0)]),
    "a Job of many, two at a time": (
        workload("Job", parallelism=2, completions=9),
        [replica(0), replica(1)],
    ),
    "a CronJob": (
        {
            "kind": "CronJob",
            "metadata": {"name": "w", "namespace": "ns"},
            "spec": {"jobTemplate": {"spec": {"parallelism": 2, "template": TEMPLATE}}},
        },
        [replica(0), replica(1)],
    ),
    "a List": ({"kind": "List", "items": [POD, workload("Job")]}, [POD, replica(0)]),
    "a List in a List": (
        {"kind": "List", "items": [{"kind": "List", "items": [POD, POD]}, workload("Job")]},
        [POD, POD, replica(0)],
    ),
    "a List of nothing": ({"kind": "List", "items": []}, []),
    "a PodList without items, as Go writes it": ({"kind": "PodList", "items": None}, []),
    "a DeploymentList whose items have no kind": (
        {"kind": "DeploymentList", "items": [workload("") | {"kind": "Deployment"}]},
        [replica(0)],
    ),
    "a PodList whose items leave out their kind": (
        {"kind": "PodList", "items": [{"metadata": {"name": "p"}}]},
        [{"kind": "Pod", "metadata": {"name": "p"}}],
    ),
    "a Job that the API server names": (
        {"kind": "Job", "metadata": {"generateName": "w-"}, "spec": {"template": {"spec": {}}}},
        [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "w-0"}, "spec": {}}],
    ),
    "a Deployment without a namespace takes none from its template": (
        {
            "kind": "Deployment",
            "metadata": {"name": "w"},
            "spec": {"template": {"metadata": {"namespace": "x", "name": "y"}, "spec": {}}},
        },
        [{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "w-0"}, "spec": {}}],
    ),
}


@pytest.mark.parametrize(("manifest", "pods"), WORKLOADS.values(), ids=WORKLOADS)
@pytest.mark.parametrize("form", [yaml.safe_dump, json.dumps], ids=["in YAML", "in JSON"])
def test_pods_of(
    manifest: dict[str, Any],
    pods: list[dict[str, Any]],
    form: Callable[[object], str],
    read: Read,
) -> None:
    assert read(form(manifest)) == (pods, [])


P, Q = "kind: Pod\nmetadata: {name: p}\n", "kind: Pod\nmetadata: {name: q}\n"
# manifest → names of its pods, beginnings of problems
DOCUMENTS: dict[str, tuple[str, list[str], list[str]]] = {
    "one": (P, ["p"], []),
    "two": (f"{P}---\n{Q}", ["p", "q"], []),
    "two with Windows' line breaks": (f"{P}---\n{Q}".replace("\n", "\r\n"), ["p", "q"], []),
    "two with an old Mac's": (f"{P}---\n{Q}".replace("\n", "\r"), ["p", "q"], []),
    "between empty ones": (f"---\n---\n{P}--- # none\n\n---\n{Q}---\n---", ["p", "q"], []),
    "behind a comment": (f"# Copyright\n\n---\n{P}", ["p"], []),
    "behind directives": (f"%YAML 1.1\n---\n{P}...\n%YAML 1.1\n---\n{Q}", ["p", "q"], []),
    "beside its marker": (f"--- {{kind: Pod, metadata: {{name: p}}}}\n---\n{Q}", ["p", "q"], []),
    "with its end marked": (f"{P}...\n{Q}... # the end\n", ["p", "q"], []),
    "behind a byte order mark": (f"\ufeff{P}", ["p"], []),
    "in JSON with tabs": ('{\n\t"kind": "Pod",\n\t"metadata": {"name": "p"}\n}\n', ["p"], []),
    "in JSON behind a marker": (
        '---\n{"kind":\t"Pod", "metadata": {"name": "p"}}\n---\n' + Q,
        ["p", "q"],
        [],
    ),
    "in YAML's flow style": ("{kind: Pod, metadata: {name: p,},}", ["p"], []),
    "a marker inside a text": (f"{P}x: |\n  a\n  ---\n  b\n---\n{Q}", ["p", "q"], []),
    "a longer line than a marker": (f"---\n{P}---x: 1\n", ["p"], []),
    "a bad one between two": (
        f"{P}---\n# here\n  a: 1\n b: 2\n---\n{Q}",
        ["p", "q"],
        ["0.yaml, document 2: the YAML cannot be read: "],
    ),
    "a text that never ends between two": (
        f'{P}---\na: "b\n---\n{Q}',
        ["p", "q"],
        ["0.yaml, document 2: the YAML cannot be read: "],
    ),
    "others between two": (
        f"{P}---\nkind: ConfigMap\n---\nkind: Ingress\n---\n{Q}",
        ["p", "q"],
        [
            "0.yaml, document 2: it is a ConfigMap, which has no pods",
            "0.yaml, document 3: it is an Ingress, which has no pods",
        ],
    ),
    "a bad item in a List": (
        "kind: List\nitems:\n- kind: Service\n- {kind: Pod, metadata: {name: p}}\n- 7\n- {}",
        ["p"],
        [
            "0.yaml, document 1, item 1: it is a Service, which has no pods",
            "0.yaml, document 1, item 3: it is 7, not an object",
            "0.yaml, document 1, item 4: it has no kind",
        ],
    ),
}


@pytest.mark.parametrize(("manifest", "names", "problems"), DOCUMENTS.values(), ids=DOCUMENTS)
def test_documents(manifest: str, names: list[str], problems: list[str], read: Read) -> None:
    pods, said = read(manifest)
    assert [pod["metadata"]["name"] for pod in pods] == names
    assert len(said) == len(problems)
    assert all(map(str.startswith, said, problems))


def test_files_are_read_in_order_and_a_bad_one_costs_only_itself(read: Read) -> None:
    pods, problems = read(P, "kind: [", "", Q)
    assert [pod["metadata"]["name"] for pod in pods] == ["p", "q"]
    assert [problem.split(":")[0] for problem in problems] == ["1.yaml, document 1", "2.yaml"]


def same(one: Any, other: Any) -> bool:
    """Equal down to the types: True is not 1."""
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)


# As YAML 1.1 and Kubernetes read it, but for what JSON does not know.
VALUES: dict[str, tuple[str, object]] = {
    "a plain text": ("a b", "a b"),
    "a date is its text": ("2026-11-30", "2026-11-30"),
    "a moment is its text": ("2026-11-30T12:00:00Z", "2026-11-30T12:00:00Z"),
    "a time is its text": ("12:30:45", "12:30:45"),
    "an equals sign is a text": ("=", "="),
    "a number": ("24", 24),
    "a quoted number is a text": ('"24"', "24"),
    "a number marked as a text": ("!!str 24", "24"),
    "a number marked as no particular thing": ("! 24", "24"),
    "a number marked as a number": ('!!int "24"', 24),
    "a negative number": ("-1", -1),
    "a hexadecimal number": ("0x10", 16),
    "an octal number": ("010", 8),
    "what only looks like a number": ("0x_", "0x_"),
    "a longer number than anything has": ("9" * 65, "9" * 65),
    "a number of a mebibyte": ("9" * (1 << 20), "9" * (1 << 20)),
    "a fraction": ("1.5", 1.5),
    "a quantity": ("500m", "500m"),
    "yes": ("yes", True),
    "On": ("On", True),
    "no": ("no", False),
    "false": ("false", False),
    "null": ("null", None),
    "a tilde": ("~", None),
    "nothing": ("", None),
    "a block": ("|\n  a\n  b\n", "a\nb\n"),
    "a folded block": (">-\n  a\n  b\n", "a b"),
    "a list": ("[a, {b: c}]", ["a", {"b": "c"}]),
    "a number for a key": ("{8080: a}", {"8080": "a"}),
    "a truth for a key": ("{yes: a}", {"yes": "a"}),
    "null for a key": ("{~: a}", {"~": "a"}),
    "letters of others": ("größe 大 😀", "größe 大 😀"),
    "an alias": ("[&a {b: 1}, *a]", [{"b": 1}, {"b": 1}]),
    "an alias of a key": ("[{&a b: 1}, *a]", [{"b": 1}, "b"]),
    "an anchor used again": ("[&a 1, *a, &a 2, *a]", [1, 1, 2, 2]),
    "a merge": ("[&a {b: 1, c: 2}, {<<: *a, b: 3}]", [{"b": 1, "c": 2}, {"b": 3, "c": 2}]),
    "a merge below": ("[&a {b: 1}, {b: 3, <<: *a}]", [{"b": 1}, {"b": 3}]),
    "a merge of two": (
        "[&a {b: 1}, &c {b: 2, d: 3}, {<<: [*a, *c]}]",
        [{"b": 1}, {"b": 2, "d": 3}, {"b": 1, "d": 3}],
    ),
    "a quoted merge is a key": ('{"<<": 1}', {"<<": 1}),
    "a list a hundred deep": ("[" * 100 + "]" * 100, json.loads("[" * 100 + "]" * 100)),
}


@pytest.mark.parametrize(("text", "value"), VALUES.values(), ids=VALUES)
def test_a_value(text: str, value: object, read: Read) -> None:
    pods, problems = read(f"kind: Pod\nvalue: {text}\nafter: x")
    assert problems == []
    assert pods[0]["after"] == "x"
    assert same(pods[0]["value"], value)


BOMB = "a0: &a0 [x, x]\n" + "".join(
    f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}, *a{n - 1}, *a{n - 1}]\n" for n in range(1, 99)
)
MERGE_BOMB = "a0: &a0 {x: x}\n" + "".join(
    f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}, *a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 99)
)
BAD: dict[str, tuple[str | bytes, str]] = {
    "nothing": ("", "it has no Kubernetes object in it"),
    "blank lines and comments": (" \n# none\n---\n", "it has no Kubernetes object in it"),
    "a text": ("hello", 'it is "hello", not an object'),
    "a list": ("- kind: Pod", "it is a list, not an object"),
    "no kind": ("metadata: {name: p}", "it has no kind"),
    "an empty kind": ("kind: ''", "it has no kind"),
    "a kind that is a number": ("kind: 7", "kind is 7, not a text"),
    "a kind of a mebibyte": (
        "kind: " + "x" * (1 << 20),
        f"it is a {'x' * 63}…, which has no pods",
    ),
    "a kind with colours": ('kind: "\\e[31mPod"', "it is a ?[31mPod, which has no pods"),
    "a List without items": ("kind: List", "it is a List, which has no pods"),
    "a List whose items are an object": (
        "kind: List\nitems: {}",
        "it is a List, which has no pods",
    ),
    "replicas that are a text": (
        json.dumps(workload("Deployment", replicas="2")),
        'replicas is "2", not a number up to 10,000',
    ),
    "replicas that are true": (
        json.dumps(workload("Deployment", replicas=True)),
        "replicas is true, not a number up to 10,000",
    ),
    "half a replica": (
        json.dumps(workload("Deployment", replicas=0.5)),
        "replicas is 0.5, not a number up to 10,000",
    ),
    "fewer replicas than none": (
        json.dumps(workload("StatefulSet", replicas=-1)),
        "replicas is -1, not a number up to 10,000",
    ),
    "absurdly many replicas": (
        json.dumps(workload("ReplicaSet", replicas=10_001)),
        "replicas is 10001, not a number up to 10,000",
    ),
    "replicas that int would not print": (
        '{"kind": "Deployment", "spec": {"replicas": ' + "9" * 5000 + "}}",
        "replicas is a huge number, not a number up to 10,000",
    ),
    "absurdly much parallelism": (
        json.dumps(workload("Job", parallelism=10_001)),
        "parallelism is 10001, not a number up to 10,000",
    ),
    "a workload without a name": ("kind: Job\nspec: {template: {spec: {}}}", "it has no name"),
    "a workload whose name is a number": (
        "kind: Job\nmetadata: {name: 7}\nspec: {template: {spec: {}}}",
        "name is 7, not a text",
    ),
    "a workload without a template": (
        "kind: Job\nmetadata: {name: j}\nspec: {}",
        "it has no template for its pods",
    ),
    "a workload without a spec": (
        "kind: Job\nmetadata: {name: j}",
        "it has no template for its pods",
    ),
    "a spec that is a list": ("kind: Job\nspec: []", "spec is a list, not an object"),
    "a template that is a text": (
        "kind: Job\nmetadata: {name: j}\nspec: {template: x}",
        'template is "x", not an object',
    ),
    "a CronJob without a Job": ("kind: CronJob\nmetadata: {name: c}", "it has no template for its"),
    "a bracket too few": ("kind: Pod\nspec: [1,\n", "the YAML cannot be read: "),
    "an error behind a document": (
        f"{P}---\n\na: 1\n  b: 2",
        "the YAML cannot be read: mapping values are not allowed ",
    ),
    "an error behind an end": (
        f"{P}...\n# x\n'",
        "the YAML cannot be read: found unexpected end of stream at line 5, column 2",
    ),
    "JSON with an error and tabs": (
        '{\n\t"kind": "Pod"\n\t"metadata": {}}',
        "the YAML cannot be read: ",
    ),
    "a key twice": (
        "kind: Pod\nspec:\n  a: 1\n  b: 2\n  a: 3",
        'the key "a" stands twice in one object at line 5, column 3',
    ),
    "a key twice in JSON": (
        '{"kind": "Pod",\n"kind": "Pod"}',
        'the key "kind" stands twice in one object at line 2, column 1',
    ),
    "a key as a number and as a text": ("{1: a, '1': b}", 'the key "1" stands twice in one object'),
    "an object for a key": ("? {a: b}\n: c", "a key is not a text at line 1, column 3"),
    "an alias for a key": ("a: &x y\n*x : b", "a key is not a text at line 2, column 1"),
    "an alias of nothing": ("a: *b", 'the alias "b" names nothing before it at line 1, column 4'),
    "an alias inside what it names": (
        "a: &b [*b]",
        'the alias "b" names nothing before it at line 1, column 8',
    ),
    "a merge of a text": ("{<<: x}", "what << merges is not an object at line 1, column 2"),
    "a Python object": (
        "a: !!python/object/apply:os.system [ls]",
        'the tag "tag:yaml.org,2002:python/object/apply:os…" is not for this value at line 1',
    ),
    "bytes": ("a: !!binary aGk=", 'the tag "tag:yaml.org,2002:binary" is not for this value at'),
    "a set": ("a: !!set {b, c}", 'the tag "tag:yaml.org,2002:set" is not for this value at line'),
    "a word marked as a number": ("!!int x", 'the tag "tag:yaml.org,2002:int" is not for this'),
    "aliases that unfold without end": (
        BOMB,
        "it unfolds to more than 1,000,000 values at line 10, column ",
    ),
    "merges that unfold without end": (
        MERGE_BOMB,
        "it unfolds to more than 1,000,000 values at line 10, column ",
    ),
    "a mebibyte of objects": ('{"a":' * (1 << 18), "it is nested more than 100 deep at line 1, "),
    "a mebibyte of dashes": ("- " * (1 << 19), "it is nested more than 100 deep at line 1, "),
    "a control character": (
        f"---\n{P}b: \x07",
        "the YAML cannot be read: a control character at line 4, column 4",
    ),
    "UTF-16": ("kind: Pod".encode("utf-16"), "it is not UTF-8 text: invalid start byte at byte 0"),
    "a broken letter": (b"kind: Pod # \xc3", "it is not UTF-8 text: unexpected end of data at"),
    "more than 16 MiB": (b"#" * ((16 << 20) + 1), "it is larger than 16 MiB"),
    "a document too many": (
        "---\n" * 10_000,
        "it has 10,000 documents or more: the rest is passed over",
    ),
}


@pytest.mark.parametrize(("manifest", "sentence"), BAD.values(), ids=BAD)
def test_it_is_a_problem_in_one_sentence(manifest: str | bytes, sentence: str, read: Read) -> None:
    _, problems = read(manifest)
    assert len(problems) == 1
    where, _, said = problems[0].partition(": ")
    assert where.startswith("0.yaml")
    assert said.startswith(sentence)
    assert said.isprintable()
    assert len(said) < 250


def test_a_mebibyte_of_brackets_is_a_problem_in_one_sentence(read: Read) -> None:
    (problem,) = read("[" * (1 << 20))[1]
    assert "nest" in problem  # libyaml has a limit of its own


def test_an_error_is_found_where_it_stands_in_the_file(read: Read) -> None:
    pods, (problem,) = read(f"{P}---\n\na: 1\n  b: 2\n---\n{Q}")
    assert len(pods) == 2
    assert problem.startswith("0.yaml, document 2: ")
    assert problem.endswith(" at line 6, column 4")


def test_more_pods_than_any_node_is_asked_for_end_the_reading(read: Read) -> None:
    most = json.dumps(workload("Deployment", replicas=10_000))
    pods, problems = read("\n---\n".join([most] * 12))
    assert len(pods) == 100_000
    assert problems == ["more than 100,000 pods are asked for: the rest is passed over"]


def problem_with(path: object) -> str:
    pods, (problem,) = read_pods([str(path)])
    assert pods == ()
    return problem


def test_a_file_that_is_missing_or_a_folder(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    assert problem_with(missing) == f"{missing}: it cannot be read: No such file or directory"
    assert problem_with(tmp_path) == f"{tmp_path}: it cannot be read: Is a directory"


def test_a_path_that_no_file_has() -> None:
    assert problem_with("a\0\nb") == "a??b: embedded null byte"
    assert problem_with("\ud800").startswith("?: ")


def test_a_pipe_that_nobody_writes_to_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert problem_with(tmp_path / "pipe").endswith("pipe: it has no Kubernetes object in it")


@pytest.fixture
def pipe() -> Iterator[int]:
    """The end to read of a pipe into which a megabyte of manifest comes, bit by bit."""
    out, into = os.pipe()
    manifest = (P + "# x\n" * 250_000 + "---\n" + Q).encode()

    def write() -> None:
        with open(into, "wb") as file:
            file.write(manifest)

    writer = threading.Thread(target=write)
    writer.start()
    yield out
    writer.join()
    os.close(out)


def test_a_slow_pipe_is_read_to_its_end(pipe: int) -> None:
    pods, problems = read_pods([f"/dev/fd/{pipe}"])
    assert [pod["metadata"]["name"] for pod in pods] == ["p", "q"]
    assert problems == ()


def test_standard_input_is_read_to_its_end_and_only_once(pipe: int) -> None:
    kept = os.dup(0)
    try:
        os.dup2(pipe, 0)
        pods, problems = read_pods(["-", "-"])
    finally:
        os.dup2(kept, 0)
        os.close(kept)
    assert [pod["metadata"]["name"] for pod in pods] == ["p", "q"]
    assert problems == ("standard input: it has no Kubernetes object in it",)


# --- whatever it says -----------------------------------------------------------------------------

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=9)
    | st.sampled_from(["2026-11-30", "yes", "<<", "=", "0x1", "1:30", "~", "---", "*a", "!!int 1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=9,
)
FORMS: dict[str, Callable[[object], str]] = {
    "block": lambda value: yaml.safe_dump(value, default_flow_style=False),
    "flow": lambda value: yaml.safe_dump(value, default_flow_style=True, width=20),
    "json": lambda value: json.dumps(value, indent="\t"),
}


@given(JSON_VALUES, st.sampled_from(sorted(FORMS)))
@settings(deadline=None)
def test_any_value_in_a_pod_is_read_as_it_was_written(read: Read, value: object, form: str) -> None:
    pods, problems = read(FORMS[form](POD | {"value": value}))
    assert problems == []
    assert same(pods, [POD | {"value": value}])


COUNTED = st.tuples(
    st.sampled_from(["Deployment", "StatefulSet", "ReplicaSet", "Job", "DaemonSet", "Secret"]),
    st.integers(0, 4),
    st.from_regex(r"\A[a-z]([a-z0-9-]{0,9}[a-z0-9])?\Z"),
)


@given(st.lists(COUNTED, min_size=1, max_size=5), st.sampled_from(sorted(FORMS)), st.booleans())
@settings(deadline=None)
def test_each_workload_gives_its_pods_in_order(
    read: Read, workloads: list[tuple[str, int, str]], form: str, as_list: bool
) -> None:
    objects = [
        workload(kind, replicas=count, parallelism=count) | {"metadata": {"name": name}}
        for kind, count, name in workloads
    ]
    documents: list[Any] = [{"kind": "List", "items": objects}] if as_list else objects
    pods, problems = read("\n---\n".join(FORMS[form](document) for document in documents))
    counts = {"DaemonSet": 1, "Secret": 0}
    assert [pod["metadata"]["name"] for pod in pods] == [
        f"{name}-{number}"
        for kind, count, name in workloads
        for number in range(counts.get(kind, count))
    ]
    assert len(problems) == sum(kind == "Secret" for kind, _, _ in workloads)


WORDS = ["kind: Pod", "kind: List\nitems:\n", "kind: Job\n", "!!int ", "\ufeff", "\x00", "\x85"]
SIGNS = ["\n---\n", "\n...\n", "\n  ", "a", "&a ", "*a", "<<", ": ", "- "]
FRAGMENTS = st.sampled_from([*"{}[],:-?&*!|>'\"%@`#~ \n\t\r", *SIGNS, *WORDS])


@given(st.text(max_size=30) | st.lists(FRAGMENTS, max_size=25).map("".join) | st.binary(max_size=9))
@settings(deadline=None)
def test_any_file_gives_pods_or_problems(read: Read, manifest: str | bytes) -> None:
    pods, problems = read(manifest)
    assert json.dumps(pods)
    assert all(problem.isprintable() and len(problem) < 300 for problem in problems)


@given(st.lists(FRAGMENTS, max_size=25).map("".join))
@settings(deadline=None)
def test_a_pod_is_found_whatever_stands_before_its_document(read: Read, before: str) -> None:
    pods, _ = read(f"{before}\n---\n{P}")
    assert pods[-1:] == [{"kind": "Pod", "metadata": {"name": "p"}}]
