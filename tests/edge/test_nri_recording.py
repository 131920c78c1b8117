"""agent.edge.nri against what a real containerd said, byte for byte.

A CRI client made it, on the host's network and below the cgroup parent /pods:

    pod prod/early    container main, annotation pin=1; both ran before the plugin came, which gave
                      the container CPU 1 then
    pod prod/train    container main, annotations pin=0-1 and gpus=GPU-7, device /dev/null; created
                      with CPUs 0-1, started, asked to be on CPU 0 and kept on 1
                      container refused, annotations refuse=1 and note=yyy…, which was refused
    all of it         stopped and removed

All of them asked for 512 shares, 50 ms of 100 ms and 64 MiB, and main for NVIDIA_VISIBLE_DEVICES.
"""

import base64
import socket
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from agent.core.bitmap import Bitmap
from agent.core.placement import Refusal
from agent.core.runtime import Cpuset, CpuTime, RuntimeContainer, RuntimePod, Stage
from agent.edge.nri import Asked, Callbacks, NriPlugin
from agent.edge.nri.frames import Decoder, Message, encode
from agent.fakes.runtime import PLUGIN, FakeRuntime
from agent.proto import ttrpc_pb2 as ttrpc

RECORDING: Final = Path(__file__).with_name("nri_recording.txt")

METHODS: Final = (
    "Configure",
    "Synchronize",
    "RunPodSandbox",
    "CreateContainer",
    "PostStartContainer",
    "UpdateContainer",
    "CreateContainer",  # refused, and so undone
    "StopContainer",
    "RemoveContainer",
    "StopContainer",
    "RemoveContainer",
    "RemovePodSandbox",
    "StopContainer",
    "RemoveContainer",
    "RemovePodSandbox",
)

ASKED: Final = CpuTime(shares=512, quota_us=50_000, period_us=100_000)
LIFTED: Final = CpuTime(shares=512, quota_us=-1, period_us=100_000)
REASON: Final = "SingleNUMANode: node 0 has 3 free GPUs; asked 4 GPUs"


def read_recording() -> list[tuple[str, bytes]]:
    lines = (line.split() for line in RECORDING.read_text().splitlines() if line[0] != "#")
    return [(who, zlib.decompress(base64.b64decode(data))) for who, data in lines]


@pytest.fixture(scope="module")
def reads() -> list[tuple[str, bytes]]:
    return read_recording()


def said_by(who: str, reads: list[tuple[str, bytes]]) -> bytes:
    return b"".join(data for writer, data in reads if writer == who)


def decode(wire: bytes, size: int) -> list[Message]:
    decoder = Decoder()
    parts = (wire[start : start + size] for start in range(0, len(wire), size))
    messages = [message for part in parts for message in decoder.feed(part)]
    assert not decoder.waits
    return messages


@pytest.mark.parametrize("size", [1, 7, 4096, 1 << 16])
@pytest.mark.parametrize("who", ["runtime", "plugin"])
def test_what_was_said_is_read_and_said_again(
    reads: list[tuple[str, bytes]], who: str, size: int
) -> None:
    wire = said_by(who, reads)
    messages = decode(wire, size)
    assert len(messages) == len(METHODS) + 1
    assert b"".join(map(encode, messages)) == wire


def test_a_message_came_in_two_frames(reads: list[tuple[str, bytes]]) -> None:
    messages = decode(said_by("runtime", reads), 1 << 16)
    assert sum(len(message.data) > 4096 for message in messages) == 1


def test_the_calls_that_were_made(reads: list[tuple[str, bytes]]) -> None:
    answer, *calls = decode(said_by("runtime", reads), 1 << 16)
    assert (answer.connection, answer.stream, answer.kind, answer.data) == (2, 1, 2, b"")
    requests = [ttrpc.Request.FromString(call.data) for call in calls]
    assert tuple(request.method for request in requests) == METHODS
    assert {request.service for request in requests} == {PLUGIN}
    assert [call.stream for call in calls] == list(range(1, 2 * len(METHODS), 2))
    assert all(1.9e9 < request.timeout_nano < 2e9 for request in requests)


# --- the same again -------------------------------------------------------------------------------


class Daemon:
    """Says what was said when the recording was made."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.callbacks = Callbacks(
            on_synchronize=self._synchronize,
            on_create=self._create,
            on_update=self._update,
            on_start=lambda container: self._tell("start", container),
            on_stop=lambda container: self._tell("stop", container),
            on_remove=lambda container: self._tell("remove", container),
            on_run_pod=lambda pod: self._tell("run pod", pod),
            on_end_pod=lambda pod: self._tell("end pod", pod),
            on_connection=lambda connected: None,
            on_rpc=lambda method, seconds, code: None,
        )

    def _tell(self, *event: Any) -> None:
        self.told.append(event)

    def _synchronize(self, pods: Any, containers: Any) -> dict[str, Cpuset]:
        self._tell("synchronize", pods, containers)
        return {container.id: pinned("1") for container in containers}

    def _create(self, pod: RuntimePod, container: RuntimeContainer) -> Cpuset | Refusal:
        self._tell("create", pod, container)
        if "refuse" in container.annotations:
            return Refusal(reason=REASON)
        return pinned(container.annotations["pin"])

    def _update(self, pod: RuntimePod, container: RuntimeContainer, asked: Asked) -> Cpuset:
        self._tell("update", pod, container, asked)
        return pinned("1")


def pinned(cpus: str) -> Cpuset:
    return Cpuset(cpus=Bitmap.parse_list(cpus), mems=Bitmap([0]))


@pytest.fixture(scope="module")
def replay(
    reads: list[tuple[str, bytes]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[list[bytes], Daemon]]:
    """What the plugin says this time, write by write, and what its daemon is told."""
    answers, daemon = list[bytes](), Daemon()

    def converse(peer: socket.socket) -> None:
        for who, data in reads:
            if who == "runtime":
                peer.sendall(data)
            else:
                answers.append(peer.recv(len(data), socket.MSG_WAITALL))
        runtime.may_synchronize.clear()
        runtime.converse = None

    path = tmp_path_factory.mktemp("nri") / "nri.sock"
    with FakeRuntime(path) as runtime:
        runtime.converse = converse
        plugin = NriPlugin(str(path), "numalet", "42", daemon.callbacks)
        runtime.wait_for(lambda: runtime.converse is None)
        plugin.close()
        yield answers, daemon


def test_the_answers_are_those_that_containerd_took(
    reads: list[tuple[str, bytes]], replay: tuple[list[bytes], Daemon]
) -> None:
    """The recording is older than our interest in StopPodSandbox: one bit of Configure's answer."""
    answers, _ = replay
    taken = [data for who, data in reads if who == "plugin"]
    assert answers[1] == taken[1].replace(b"\x10\xcd\r", b"\x10\xcf\r") != taken[1]
    assert answers[:1] + answers[2:] == taken[:1] + taken[2:]


def events(replay: tuple[list[bytes], Daemon], name: str) -> list[tuple[Any, ...]]:
    return [event[1:] for event in replay[1].told if event[0] == name]


def pod_named(name: str, pod: RuntimePod) -> RuntimePod:
    """What is known of it; containerd adds annotations of its own, and the id."""
    assert pod.annotations["cpuset-scheduler"] == "required"
    assert len(pod.id) == 64
    assert pod.pid > 0
    return RuntimePod(
        id=pod.id,
        uid=f"uid-{name}",
        pod=f"prod/{name}",
        annotations=pod.annotations,
        cgroup_parent=f"/pods/poduid-{name}",
        cpu_time=ASKED,
        memory_bytes=64 << 20,
        pid=pod.pid,
    )


def test_what_ran_before(replay: tuple[list[bytes], Daemon]) -> None:
    (((pod,), (container,)),) = events(replay, "synchronize")
    assert pod == pod_named("early", pod)
    assert container.annotations["pin"] == "1"
    assert container == RuntimeContainer(
        id=container.id,
        pod_id=pod.id,
        name="main",
        stage=Stage.RUNNING,
        annotations=container.annotations,
        cpu_time=ASKED,
        memory_bytes=64 << 20,
        visible_devices="GPU-1",
    )


def test_what_was_created(replay: tuple[list[bytes], Daemon]) -> None:
    (pod, main), (again, refused) = events(replay, "create")
    assert pod == again == pod_named("train", pod)
    assert (main.annotations["pin"], main.annotations["gpus"]) == ("0-1", "GPU-7")
    assert refused.annotations["note"] == "y" * 1500
    common = {
        "pod_id": pod.id,
        "stage": Stage.CREATING,
        "cpu_time": ASKED,
        "memory_bytes": 64 << 20,
    }
    assert main == RuntimeContainer(
        id=main.id,
        name="main",
        annotations=main.annotations,
        devices=("/dev/null",),
        visible_devices="GPU-7",
        **common,
    )
    assert refused == RuntimeContainer(
        id=refused.id, name="refused", annotations=refused.annotations, **common
    )


def test_what_was_to_be_changed(replay: tuple[list[bytes], Daemon]) -> None:
    """The container has by then what its creation was answered with."""
    ((_, container, asked),) = events(replay, "update")
    assert (container.cpus, container.mems) == (Bitmap([0, 1]), Bitmap([0]))
    assert (container.cpu_time, container.stage) == (LIFTED, Stage.RUNNING)
    assert asked == Asked(
        cpu_time=CpuTime(shares=256, quota_us=25_000, period_us=100_000), cpus=Bitmap([0])
    )


def test_the_order_of_events(replay: tuple[list[bytes], Daemon]) -> None:
    ((early,), (first,)) = events(replay, "synchronize")[0]
    (pod, main), (_, refused) = events(replay, "create")
    told = [
        event for event in replay[1].told if event[0] not in ("synchronize", "create", "update")
    ]
    assert told == [
        ("run pod", pod),
        ("start", main.id),
        ("stop", refused.id),
        ("remove", refused.id),
        ("stop", main.id),
        ("remove", main.id),
        ("end pod", pod.id),
        ("stop", first.id),
        ("remove", first.id),
        ("end pod", early.id),
    ]
