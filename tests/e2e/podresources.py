"""What kubelet says about devices, read by the tests themselves: API v1, List and Allocatable.

Kubelet refuses calls beyond 100 a second, its other clients' included: then it is asked again.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc

from agent.proto import podresources_pb2 as messages
from tests.e2e.kubelet import RESOURCE

_SERVICE = "/v1.PodResourcesLister"
_TIMEOUT_S = 5
_PAUSE_S = 0.1


def held_devices(socket: Path) -> dict[str, frozenset[str]]:
    """The ids of the GPUs that each pod holds, by the pod's name; pods without any are left out.

    Raises grpc.RpcError.
    """
    answer = _ask(socket, "List", messages.ListPodResourcesRequest, "ListPodResourcesResponse")
    held = {
        pod.name: frozenset(
            device
            for container in pod.containers
            for devices in container.devices
            if devices.resource_name == RESOURCE
            for device in devices.device_ids
        )
        for pod in answer.pod_resources
    }
    return {name: devices for name, devices in held.items() if devices}


def all_pods(socket: Path) -> list[tuple[str, str]]:
    """(namespace, name) of every pod in kubelet's list, also of those that hold nothing.

    Raises grpc.RpcError.
    """
    answer = _ask(socket, "List", messages.ListPodResourcesRequest, "ListPodResourcesResponse")
    return [(pod.namespace, pod.name) for pod in answer.pod_resources]


def healthy_devices(socket: Path) -> Mapping[str, tuple[int, ...]]:
    """The NUMA nodes of each GPU that kubelet holds for healthy, by the GPU's id.

    Nothing while kubelet does not answer.
    """
    try:
        answer = _ask(
            *(socket, "GetAllocatableResources"),
            *(messages.AllocatableResourcesRequest, "AllocatableResourcesResponse"),
        )
    except grpc.RpcError:
        return {}
    nodes: dict[str, tuple[int, ...]] = {}
    for devices in answer.devices:
        if devices.resource_name == RESOURCE:
            for device in devices.device_ids:
                more = tuple(node.ID for node in devices.topology.nodes)
                nodes[device] = tuple(sorted({*nodes.get(device, ()), *more}))
    return nodes


def _ask(socket: Path, call: str, request: Any, answer: str) -> Any:
    with grpc.insecure_channel(f"unix://{socket}") as channel:
        method = channel.unary_unary(
            f"{_SERVICE}/{call}",
            request_serializer=request.SerializeToString,
            response_deserializer=getattr(messages, answer).FromString,
        )
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            try:
                return method(request(), timeout=_TIMEOUT_S)
            except grpc.RpcError as error:
                refused = error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
                if not refused or time.monotonic() > deadline:
                    raise
            time.sleep(_PAUSE_S)
