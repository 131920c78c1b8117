"""Which pods hold which devices: kubelet's pod resources API, a unix socket of kubelet's.

Source: the API's server in Kubernetes 1.27 to 1.36, pkg/kubelet/apis/podresources. It has no pod
uids and no way to watch; it refuses calls beyond 100 a second.
"""

import errno
import os
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeVar
from urllib.parse import quote

import grpc
from google.protobuf.message import DecodeError, Message

from agent.core.offer import Holding, PodList
from agent.errors import KubeletError
from agent.proto.podresources_pb2 import (
    GetPodResourcesRequest,
    GetPodResourcesResponse,
    ListPodResourcesRequest,
    ListPodResourcesResponse,
    PodResources,
)

_MOST_BYTES: Final = 16 << 20
"""Of an answer."""

_LONGEST_PATH: Final = 107
"""Bytes of a unix socket's path. Source: sockaddr_un, unix(7)."""

_OPTIONS: Final = (
    ("grpc.max_receive_message_length", _MOST_BYTES),
    ("grpc.use_local_subchannel_pool", 1),  # else channels share the wait after a refused one
    ("grpc.default_authority", "localhost"),
    ("grpc.enable_http_proxy", 0),
)

_CAUSES: Final = {
    errno.ENOENT: "there is no such socket; kubelet is not running, or its folder is not mounted",
    errno.ECONNREFUSED: "nobody serves this socket; kubelet is not running, or is just starting",
    errno.EACCES: "no permission to open this socket",
}
"""What connecting may end with. All else is told in gRPC's words."""

_WITHOUT_GET: Final = frozenset({grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNKNOWN})
"""How Get ends where kubelet does not know it (before 1.27) or has it switched off (before 1.34).

The second is UNKNOWN, as every error of kubelet's here, and only its text differs.
"""

_AnyMessage = TypeVar("_AnyMessage", bound=Message)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Peer:
    """Whom to ask, and until when on the monotonic clock."""

    socket: str
    timeout_s: float
    deadline: float


class _StatusError(KubeletError):
    """A call that ended with a gRPC status instead of an answer."""

    def __init__(self, sentence: str, code: grpc.StatusCode, details: str) -> None:
        super().__init__(sentence)
        self.code = code
        self.details = details


def read_pod_list(socket: str, resource: str, timeout_s: float = 2.0) -> PodList:
    """All pods, and those that hold devices of `resource`, each container's ids sorted.

    `socket` is a path. Kubelet 1.34 and later lists pods that have not ended, earlier ones list
    all. Devices show up at admission, before the container exists. What ordinary init containers
    held is not listed. Two pods may have one name, when the first is still ending: they are one
    Holding here, of all their devices.

    Raises:
        KubeletError: there is no answer within `timeout_s`, or it makes no sense.
    """
    peer = _peer(socket, timeout_s)
    pods = _list(peer)
    held = _collect(peer, pods, resource)
    return PodList(
        holdings=tuple(_to_holding(pod, held[pod]) for pod in sorted(held)),
        pods=tuple(sorted(map(_key, pods))),
    )


def get_holding(
    socket: str, resource: str, namespace: str, name: str, timeout_s: float = 2.0
) -> Holding | None:
    """What one pod holds, maybe nothing; None for a pod that kubelet does not know.

    Of a pod that has ended, kubelet may still tell what it held.

    Raises:
        KubeletError: as from `read_pod_list`.
    """
    peer = _peer(socket, timeout_s)
    pods = [pod for pod in _get(peer, namespace, name) if _key(pod) == (namespace, name)]
    held = _collect(peer, pods, resource)
    pod = f"{namespace}/{name}"
    return _to_holding(pod, held.get(pod, {})) if pods else None


def _get(peer: _Peer, namespace: str, name: str) -> Iterable[PodResources]:
    """Pods, among them those of this name: Get's answer, List's where kubelet has no Get."""
    request = GetPodResourcesRequest(pod_namespace=namespace, pod_name=name)
    try:
        answer = _ask(peer, "Get", request, GetPodResourcesResponse())
    except _StatusError as error:
        unknown_pod = f"pod {name} in namespace {namespace} not found"
        if error.code == grpc.StatusCode.NOT_FOUND or error.details == unknown_pod:
            return ()
        if error.code in _WITHOUT_GET:
            return _list(peer)
        raise
    if _key(answer.pod_resources) != (namespace, name):
        raise _nonsense(peer, "Get", "it is about another pod")
    return (answer.pod_resources,)


def _list(peer: _Peer) -> Sequence[PodResources]:
    request = ListPodResourcesRequest()
    return _ask(peer, "List", request, ListPodResourcesResponse()).pod_resources


# --- the answer -----------------------------------------------------------------------------------


def _collect(
    peer: _Peer, pods: Iterable[PodResources], resource: str
) -> dict[str, dict[str, set[str]]]:
    """The ids by pod and container; only those that hold any. Kubelet lists one per device and
    node, in random order."""
    held: dict[str, dict[str, set[str]]] = {}
    for pod in pods:
        for container in pod.containers:
            entries = (entry for entry in container.devices if entry.resource_name == resource)
            ids = {device for entry in entries for device in entry.device_ids}
            if not ids:
                continue
            if not all(map(_is_name, (*_key(pod), container.name))) or "" in ids:
                where = _plain(f"container {container.name!r} of pod {'/'.join(_key(pod))!r}")
                raise KubeletError(
                    f"{peer.socket}: kubelet names a pod, a container or a device as nobody can be "
                    f"named: {where} holds {resource}"
                )
            containers = held.setdefault("/".join(_key(pod)), {})
            containers.setdefault(container.name, set()).update(ids)
    return held


def _to_holding(pod: str, devices: Mapping[str, Set[str]]) -> Holding:
    ids = {container: tuple(sorted(devices[container])) for container in devices}
    return Holding(pod=pod, devices=MappingProxyType(ids))


def _key(pod: PodResources) -> tuple[str, str]:
    return pod.namespace, pod.name


def _is_name(text: str) -> bool:
    return text != "" and "/" not in text and text.isprintable()


# --- the call -------------------------------------------------------------------------------------


def _peer(socket: str, timeout_s: float) -> _Peer:
    path = os.fsencode(socket)
    if b"\0" in path or len(path) > _LONGEST_PATH:
        raise KubeletError(
            f"{socket!r}: cannot be a socket's path, which has no NUL and at most "
            f"{_LONGEST_PATH} bytes"
        )
    return _Peer(socket=socket, timeout_s=timeout_s, deadline=time.monotonic() + timeout_s)


def _ask(peer: _Peer, call: str, request: Message, answer: _AnyMessage) -> _AnyMessage:
    """Fills `answer` with kubelet's; here foreign errors end.

    Raises:
        _StatusError: the call ended without an answer.
        KubeletError: it is not an answer.
    """
    target = f"unix://{quote(os.fsencode(os.path.abspath(peer.socket)))}"
    with grpc.insecure_channel(target, options=_OPTIONS) as channel:
        # Bytes in and out: grpc would log an answer that is none, with a traceback.
        method: grpc.UnaryUnaryMultiCallable[bytes, bytes | None] = channel.unary_unary(
            f"/v1.PodResourcesLister/{call}"
        )
        try:
            timeout_s = max(0.0, peer.deadline - time.monotonic())
            body = method(request.SerializeToString(), timeout=timeout_s)
        except grpc.RpcError as error:
            raise _status_error(peer, call, error) from error
    if body is None:  # success without a message
        raise _nonsense(peer, call, "there is none")
    try:
        answer.ParseFromString(body)
    except DecodeError as error:
        raise _nonsense(peer, call, "it is no message of this API") from error
    return answer


def _status_error(peer: _Peer, call: str, error: grpc.RpcError) -> _StatusError:
    code, details = error.code(), error.details() or ""
    match code:
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            why = f"no answer within {peer.timeout_s:g} s"
        case grpc.StatusCode.UNIMPLEMENTED:
            why = "this kubelet does not know the call"
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            limit = f"larger than {_MOST_BYTES >> 20} MiB"
            why = f"the answer is {limit}, or kubelet is asked too often ({_plain(details)})"
        case _:
            why = _cause(details) or _plain(f"{code.name} {details}")
    return _StatusError(f"{peer.socket}: kubelet's {call} failed: {why}", code, details)


def _cause(details: str) -> str | None:
    return next((_CAUSES[code] for code in _CAUSES if os.strerror(code) in details), None)


def _plain(text: str) -> str:
    """On one line, and not too long for one."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:200]


def _nonsense(peer: _Peer, call: str, why: str) -> KubeletError:
    return KubeletError(f"{peer.socket}: kubelet's answer to {call} makes no sense: {why}")
