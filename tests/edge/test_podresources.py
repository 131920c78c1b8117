"""agent.edge.podresources against the fake kubelet, and against peers that misbehave.

Expected values are what the test gave the pods, and kubelet's rules.
"""

import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.core.offer import Holding
from agent.edge.podresources import get_holding, read_pod_list
from agent.errors import KubeletError
from agent.fakes.kubelet import FakeKubelet
from agent.proto import podresources_pb2 as wire

RESOURCE = "example.com/gpu"
OTHER = "example.com/nic"


@pytest.fixture
def kubelet(tmp_path: Path) -> Iterator[FakeKubelet]:
    with FakeKubelet(tmp_path / "dp", tmp_path / "pr.sock") as kubelet:
        yield kubelet


@pytest.fixture
def path(kubelet: FakeKubelet) -> str:
    return str(kubelet.pod_resources)


def holding(pod: str, **devices: tuple[str, ...]) -> Holding:
    return Holding(pod=pod, devices=devices)


# --- what is held ---------------------------------------------------------------------------------


def test_every_pod_that_holds_the_resource(kubelet: FakeKubelet, path: str) -> None:
    kubelet.give("prod/train", "main", RESOURCE, {"b": [0], "a": [1], "c": [0, 1]})
    kubelet.give("prod/train", "side", RESOURCE, {"d": []})
    kubelet.give("prod/train", "shell", RESOURCE, {})
    kubelet.give("dev/train", "main", RESOURCE, {"e": [0]})
    kubelet.give("dev/nic", "main", OTHER, {"f": [0]})
    kubelet.give("dev/idle", "main", RESOURCE, {})
    assert read_pod_list(path, RESOURCE).holdings == (
        holding("dev/train", main=("e",)),
        holding("prod/train", main=("a", "b", "c"), side=("d",)),
    )


def test_nobody_holds_anything(path: str) -> None:
    assert read_pod_list(path, RESOURCE).holdings == ()


def test_all_pods_are_named_whatever_they_hold(kubelet: FakeKubelet, path: str) -> None:
    """In the order of their names."""
    assert read_pod_list(path, RESOURCE).pods == ()
    kubelet.give("prod/train", "main", RESOURCE, {"a": [0]})
    kubelet.give("dev/idle", "main", RESOURCE, {})
    kubelet.give("prod/nic", "main", OTHER, {"b": [0]})
    kubelet.give("dev/train", "main", OTHER, {})
    expected = (("dev", "idle"), ("dev", "train"), ("prod", "nic"), ("prod", "train"))
    assert read_pod_list(path, RESOURCE).pods == expected
    kubelet.remove("prod/nic")
    assert read_pod_list(path, RESOURCE).pods == (*expected[:2], expected[3])


def test_one_container_may_hold_two_resources(kubelet: FakeKubelet, path: str) -> None:
    kubelet.give("ns/pod", "main", RESOURCE, {"a": [0]})
    kubelet.give("ns/pod", "main", OTHER, {"b": [0]})
    assert read_pod_list(path, OTHER).holdings == (holding("ns/pod", main=("b",)),)


@pytest.mark.parametrize("mode", ["on", "off", "missing"])
def test_one_pod(kubelet: FakeKubelet, path: str, mode: Any) -> None:
    kubelet.get = mode
    kubelet.give("ns/pod", "main", RESOURCE, {"b": [0], "a": [0, 1]})
    kubelet.give("ns/idle", "main", RESOURCE, {})
    kubelet.give("ns/nic", "main", OTHER, {"c": [0]})
    assert get_holding(path, RESOURCE, "ns", "pod") == holding("ns/pod", main=("a", "b"))
    assert get_holding(path, RESOURCE, "ns", "idle") == holding("ns/idle")
    assert get_holding(path, RESOURCE, "ns", "nic") == holding("ns/nic")
    assert get_holding(path, RESOURCE, "ns", "gone") is None
    assert get_holding(path, RESOURCE, "pod", "ns") is None


def test_a_holding_cannot_be_changed(kubelet: FakeKubelet, path: str) -> None:
    kubelet.give("ns/pod", "main", RESOURCE, {"a": [0]})
    (held,) = read_pod_list(path, RESOURCE).holdings
    assert isinstance(held.devices, MappingProxyType)


def test_an_unknown_pod_is_not_looked_for_twice(tmp_path: Path) -> None:
    def get(_: bytes, context: grpc.ServicerContext) -> bytes:
        return context.abort(grpc.StatusCode.UNKNOWN, "pod pod in namespace ns not found")

    path = tmp_path / "peer.sock"
    with serving(path, {"Get": grpc.unary_unary_rpc_method_handler(get)}):
        assert get_holding(str(path), RESOURCE, "ns", "pod") is None


def test_a_future_kubelet_that_says_not_found(kubelet: FakeKubelet, path: str) -> None:
    kubelet.pod_resources_error = (grpc.StatusCode.NOT_FOUND, "whatever")
    assert get_holding(path, RESOURCE, "ns", "pod") is None
    with pytest.raises(KubeletError, match="List failed: NOT_FOUND whatever"):
        read_pod_list(path, RESOURCE)


ids = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
names = st.from_regex(r"[a-z0-9]([-a-z0-9.]{0,6}[a-z0-9])?", fullmatch=True)
entry = st.tuples(
    st.sampled_from([RESOURCE, OTHER]),
    st.lists(ids, max_size=3),
    st.lists(st.integers(0, 3), max_size=2),
)
container = st.tuples(names, st.lists(entry, max_size=4))
pod = st.tuples(names, names, st.lists(container, max_size=3))


@given(pods=st.lists(pod, max_size=4))
@settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_whatever_is_listed_is_held_once(answering: "Answering", pods: list[Any]) -> None:
    answering.list = wire.ListPodResourcesResponse(pod_resources=map(to_pod, pods))
    expected: dict[str, dict[str, set[str]]] = {}
    for namespace, name, containers in pods:
        for part, entries in containers:
            for resource, devices, _ in entries:
                if resource == RESOURCE and devices:
                    held = expected.setdefault(f"{namespace}/{name}", {}).setdefault(part, set())
                    held.update(devices)
    answer = read_pod_list(answering.path, RESOURCE)
    assert answer.pods == tuple(sorted((namespace, name) for namespace, name, _ in pods))
    holdings = answer.holdings
    assert [h.pod for h in holdings] == sorted(expected)
    for each in holdings:
        assert {name: set(each.devices[name]) for name in each.devices} == expected[each.pod]
        assert all(list(held) == sorted(set(held)) for held in each.devices.values())


def to_pod(facts: Any) -> wire.PodResources:
    namespace, name, containers = facts
    return wire.PodResources(
        namespace=namespace,
        name=name,
        containers=[
            wire.ContainerResources(
                name=part,
                devices=[
                    wire.ContainerDevices(
                        resource_name=resource,
                        device_ids=devices,
                        topology={"nodes": [{"ID": node} for node in nodes]},
                    )
                    for resource, devices, nodes in entries
                ],
            )
            for part, entries in containers
        ],
    )


# --- no answer ------------------------------------------------------------------------------------

CALLS: list[Callable[..., Any]] = [
    read_pod_list,
    lambda path, resource, **how: get_holding(path, resource, "ns", "pod", **how),
]
both = pytest.mark.parametrize("ask", CALLS, ids=["List", "Get"])


def complaint(ask: Callable[..., Any], path: str, timeout_s: float = 20) -> str:
    """The error's text, which begins with the path and is one line."""
    with pytest.raises(KubeletError) as caught:
        ask(path, RESOURCE, timeout_s=timeout_s)
    text = str(caught.value)
    assert text.startswith(f"{path}: kubelet")
    assert text.isprintable()
    return text


@both
def test_kubelet_is_not_there(tmp_path: Path, ask: Callable[..., Any]) -> None:
    assert "no such socket" in complaint(ask, str(tmp_path / "none.sock"))
    assert "no such socket" in complaint(ask, str(tmp_path / "none" / "none.sock"))


@both
def test_kubelet_was_killed(kubelet: FakeKubelet, path: str, ask: Callable[..., Any]) -> None:
    kubelet.kill()
    assert "nobody serves" in complaint(ask, path)


@both
@pytest.mark.parametrize("what", ["file", "folder"])
def test_it_is_no_socket(tmp_path: Path, ask: Callable[..., Any], what: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    assert "nobody serves" in complaint(ask, str(tmp_path / what))


@both
def test_it_may_not_be_opened(kubelet: FakeKubelet, path: str, ask: Callable[..., Any]) -> None:
    os.chmod(path, 0)
    with without_privileges():
        text = complaint(ask, path)
    assert "no permission" in text


@contextmanager
def without_privileges() -> Iterator[None]:
    """Root may open everything, so it is nobody meanwhile."""
    user = os.geteuid()
    os.seteuid(user or 65534)
    try:
        yield
    finally:
        os.seteuid(user)


@both
@pytest.mark.parametrize(
    ("code", "details", "expected"),
    [
        pytest.param("RESOURCE_EXHAUSTED", "rejected by rate limit", "asked too often", id="rate"),
        pytest.param("UNAVAILABLE", "going away", "UNAVAILABLE going away", id="unavailable"),
        pytest.param("INTERNAL", "", "INTERNAL", id="no words"),
        pytest.param("INTERNAL", "a\nb\x00\x1b[31m\r c", "INTERNAL a b [31m c", id="odd words"),
        pytest.param("PERMISSION_DENIED", "x" * 3000, "x" * 100, id="many words"),
    ],
)
def test_kubelet_refuses(
    kubelet: FakeKubelet, path: str, ask: Callable[..., Any], code: str, details: str, expected: str
) -> None:
    kubelet.pod_resources_error = (grpc.StatusCode[code], details)
    text = complaint(ask, path)
    assert expected in text
    assert len(text) < len(path) + 400


@both
def test_a_kubelet_without_the_api(tmp_path: Path, ask: Callable[..., Any]) -> None:
    path = tmp_path / "other.sock"
    with serving(path, {}):
        assert "List failed: this kubelet does not know the call" in complaint(ask, str(path))


def test_a_get_that_fails_otherwise_is_asked_of_list(answering: "Answering") -> None:
    answering.get = RuntimeError("a bug")
    answering.list = wire.ListPodResourcesResponse(pod_resources=[to_pod(("ns", "pod", []))])
    assert get_holding(answering.path, RESOURCE, "ns", "pod") == holding("ns/pod")


@pytest.mark.parametrize(
    "path",
    [
        pytest.param("/tmp/\0/kubelet.sock", id="NUL"),
        pytest.param("/" + 107 * "x", id="108 bytes"),
        pytest.param("/" + 54 * "ü", id="109 bytes, 55 characters"),
    ],
)
@both
def test_what_no_socket_can_be_named(ask: Callable[..., Any], path: str) -> None:
    with pytest.raises(KubeletError, match="cannot be a socket's path"):
        ask(path, RESOURCE)


def test_a_relative_path(
    kubelet: FakeKubelet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubelet.give("ns/pod", "main", RESOURCE, {"a": [0]})
    monkeypatch.chdir(tmp_path)
    assert read_pod_list("pr.sock", RESOURCE).holdings == (holding("ns/pod", main=("a",)),)


@pytest.mark.parametrize("name", ["a b", "a%41", "a?b", "a#b", "ü", "a:b", "$", "\udcff"])
def test_a_path_is_taken_as_it_is(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    with FakeKubelet(tmp_path / "dp", folder / "k.sock") as kubelet:
        kubelet.give("ns/pod", "main", RESOURCE, {"a": [0]})
        path = f"/{folder}/./k.sock"
        assert read_pod_list(path, RESOURCE).holdings == (holding("ns/pod", main=("a",)),)


def test_kubelet_is_back_at_once_after_a_restart(kubelet: FakeKubelet, path: str) -> None:
    kubelet.give("ns/pod", "main", RESOURCE, {"a": [0]})
    for _ in range(3):
        kubelet.kill()
        assert "nobody serves" in complaint(read_pod_list, path)
        kubelet.start()
        assert read_pod_list(path, RESOURCE).holdings == (holding("ns/pod", main=("a",)),)


def test_many_may_ask_at_once(kubelet: FakeKubelet, path: str) -> None:
    kubelet.give("ns/pod", "main", RESOURCE, {"a": [0]})
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(read_pod_list, path, RESOURCE, 20) for _ in range(40)]
        assert [call.result().holdings for call in calls] == 40 * [
            (holding("ns/pod", main=("a",)),)
        ]


def test_nothing_stays_open(kubelet: FakeKubelet, path: str, tmp_path: Path) -> None:
    def used() -> int:
        return len(os.listdir("/proc/self/fd")) + threading.active_count()

    read_pod_list(path, RESOURCE)
    before = used()
    for _ in range(30):
        read_pod_list(path, RESOURCE)
        get_holding(path, RESOURCE, "ns", "pod")
        complaint(read_pod_list, str(tmp_path / "none"))
    kubelet.wait_for(lambda: used() < before + 30)  # the server's threads come as needed


# --- answers that make no sense -------------------------------------------------------------------


@contextmanager
def serving(path: Path, methods: Mapping[str, grpc.RpcMethodHandler], **how: Any) -> Iterator[None]:
    """A gRPC server whose methods take and give bytes."""
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool, **how)
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("v1.PodResourcesLister", methods)]
        )
        server.add_insecure_port(f"unix://{path}")
        server.start()
        yield
        server.stop(None).wait()


def always(*answers: bytes, call: str = "List") -> dict[str, grpc.RpcMethodHandler]:
    """As many answers as given, though one is meant."""
    return {call: grpc.unary_stream_rpc_method_handler(lambda *_: iter(answers))}


class Answering:
    """A peer whose answers a test sets: messages, bytes, or errors to raise."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.list: Any = b""
        self.get: Any = b""

    def methods(self) -> dict[str, grpc.RpcMethodHandler]:
        def answer(name: str) -> bytes:
            value = getattr(self, name)
            if isinstance(value, Exception):
                raise value
            return value if isinstance(value, bytes) else value.SerializeToString()

        return {
            "List": grpc.unary_unary_rpc_method_handler(lambda *_: answer("list")),
            "Get": grpc.unary_unary_rpc_method_handler(lambda *_: answer("get")),
        }


@pytest.fixture
def answering(tmp_path: Path) -> Iterator[Answering]:
    peer = Answering(tmp_path / "peer.sock")
    with serving(Path(peer.path), peer.methods()):
        yield peer


@given(answer=st.binary(max_size=64))
@settings(
    deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_bytes_are_an_error_or_an_answer(answering: Answering, answer: bytes) -> None:
    answering.list = answering.get = answer
    for ask in CALLS:
        with suppress(KubeletError):
            ask(answering.path, RESOURCE)


def break_text(message: Any) -> bytes:
    """The message with a name that is no UTF-8."""
    body: bytes = message.SerializeToString()
    return body.replace(b"BROKEN", b"\xff\xfe\xfd\xff\xfe\xfd")


MAIN = ("main", [(RESOURCE, ["a"], [0])])


@pytest.mark.parametrize(
    ("pod", "told"),
    [
        pytest.param(("", "pod", [MAIN]), "container 'main' of pod '/pod'", id="no namespace"),
        pytest.param(("ns", "", [MAIN]), "of pod 'ns/'", id="no name"),
        pytest.param(("ns", "a/b", [MAIN]), "of pod 'ns/a/b'", id="a slash in a name"),
        pytest.param(("n/s", "a", [MAIN]), "of pod 'n/s/a'", id="a slash in a namespace"),
        pytest.param(("ns", "a\nb", [MAIN]), r"of pod 'ns/a\nb'", id="a line break in a name"),
        pytest.param(
            ("ns", "pod", [("", [(RESOURCE, ["a"], [])])]), "container ''", id="no container name"
        ),
        pytest.param(
            ("ns", "pod", [("main", [(RESOURCE, ["a", ""], [])])]), "'ns/pod'", id="no device name"
        ),
    ],
)
def test_names_that_cannot_be(answering: Answering, pod: Any, told: str) -> None:
    answering.list = wire.ListPodResourcesResponse(pod_resources=[to_pod(pod)])
    assert told in complaint(read_pod_list, answering.path)


def test_odd_names_of_pods_without_the_resource_do_not_matter(answering: Answering) -> None:
    pods = [to_pod(("", "", [("", [(OTHER, [""], [0])])])), to_pod(("ns", "pod", [MAIN]))]
    answering.list = wire.ListPodResourcesResponse(pod_resources=pods)
    assert read_pod_list(answering.path, RESOURCE).holdings == (holding("ns/pod", main=("a",)),)


def test_two_pods_of_one_name_hold_what_both_hold(answering: Answering) -> None:
    ending = to_pod(
        ("ns", "pod", [("main", [(RESOURCE, ["c", "b"], [0])]), ("old", [(RESOURCE, ["d"], [])])])
    )
    answering.list = wire.ListPodResourcesResponse(
        pod_resources=[ending, to_pod(("ns", "pod", [MAIN]))]
    )
    answering.get = RuntimeError()
    both_hold = holding("ns/pod", main=("a", "b", "c"), old=("d",))
    assert read_pod_list(answering.path, RESOURCE).holdings == (both_hold,)
    assert get_holding(answering.path, RESOURCE, "ns", "pod") == both_hold


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(to_pod(("ns", "other", [MAIN])), id="another pod"),
        pytest.param(to_pod(("pod", "ns", [MAIN])), id="the names exchanged"),
    ],
)
def test_get_answers_about_another_pod(answering: Answering, answer: Any) -> None:
    if answer:
        answer = wire.GetPodResourcesResponse(pod_resources=answer)
    answering.get = answer
    assert "about another pod" in complaint(CALLS[1], answering.path)


def test_text_that_is_no_utf8(answering: Answering) -> None:
    pods = [to_pod(("ns", "BROKEN", [MAIN]))]
    answering.list = break_text(wire.ListPodResourcesResponse(pod_resources=pods))
    answering.get = break_text(wire.GetPodResourcesResponse(pod_resources=pods[0]))
    for ask in CALLS:
        assert "makes no sense" in complaint(ask, answering.path)


def test_an_answer_that_is_as_large_as_may_be(answering: Answering) -> None:
    message = wire.ListPodResourcesResponse(pod_resources=[to_pod(("ns", "pod", [MAIN]))])
    padding = (1 << 21) - 8
    field = b"\x7a" + bytes([padding & 0x7F | 0x80, padding >> 7 & 0x7F | 0x80, padding >> 14])
    answering.list = message.SerializeToString() + 7 * (field + bytes(padding))  # field 15, skipped
    assert len(answering.list) > 14 << 20
    assert read_pod_list(answering.path, RESOURCE).holdings == (holding("ns/pod", main=("a",)),)


def test_an_answer_that_is_too_large(answering: Answering) -> None:
    answering.list = bytes((16 << 20) + 1)
    assert "larger than 16 MiB" in complaint(read_pod_list, answering.path)


def test_a_small_answer_that_would_be_too_large(tmp_path: Path) -> None:
    path = tmp_path / "peer.sock"
    with serving(path, always(bytes(32 << 20)), compression=grpc.Compression.Gzip):
        assert "larger than 16 MiB" in complaint(read_pod_list, str(path))


@pytest.mark.parametrize("call", ["List", "Get"])
def test_success_without_an_answer(tmp_path: Path, call: str) -> None:
    path = tmp_path / "peer.sock"
    with serving(path, always(call=call)):
        ask = CALLS[call == "Get"]
        assert f"answer to {call} makes no sense: there is none" in complaint(ask, str(path))


def test_two_answers_are_none(tmp_path: Path) -> None:
    path = tmp_path / "peer.sock"
    with serving(path, always(b"", b"")):
        complaint(read_pod_list, str(path), timeout_s=0.5)


def send(data: bytes) -> Callable[[socket.socket], None]:
    return lambda connection: connection.sendall(data)


SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""The frame that an HTTP/2 server starts with."""


@both
@pytest.mark.parametrize(
    ("behaviour", "expected", "timeout_s"),
    [
        pytest.param(send(b""), "no answer within 0.2 s", 0.2, id="says nothing"),
        pytest.param(send(SETTINGS), "no answer within 0.2 s", 0.2, id="says hello only"),
        pytest.param(send(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "UNAVAILABLE", 20, id="HTTP/1.1"),
        pytest.param(send(bytes(range(256))), "UNAVAILABLE", 20, id="noise"),
        pytest.param(send(SETTINGS + b"\xff" * 99), "UNAVAILABLE", 20, id="hello, then noise"),
        pytest.param(
            lambda connection: connection.shutdown(socket.SHUT_RDWR),
            "UNAVAILABLE",
            20,
            id="hangs up",
        ),
    ],
)
def test_a_peer_that_does_not_speak_grpc(
    tmp_path: Path,
    ask: Callable[..., Any],
    behaviour: Callable[[socket.socket], None],
    expected: str,
    timeout_s: float,
) -> None:
    path = str(tmp_path / "peer.sock")
    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as pool:
        listener.bind(path)
        listener.listen()
        connections: list[socket.socket] = []

        def accept() -> None:
            for _ in itertools.count():
                connection, _ = listener.accept()
                connections.append(connection)
                behaviour(connection)

        accepting = pool.submit(accept)
        try:
            assert expected in complaint(ask, path, timeout_s)
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            assert isinstance(accepting.exception(timeout=20), OSError)
            for connection in connections:
                connection.close()
