"""Our values as kubelet's messages."""

from collections.abc import Sequence
from typing import Final

from agent.core.offer import Allocation, Device
from agent.proto import deviceplugin_pb2 as pb

_HEALTH: Final = {True: "Healthy", False: "Unhealthy"}


def to_response(devices: Sequence[Device]) -> pb.ListAndWatchResponse:
    """All devices for kubelet. A device without nodes has no topology at all: an empty one would
    count as being on no node."""
    response = pb.ListAndWatchResponse()
    for device in devices:
        told = response.devices.add(ID=device.id, health=_HEALTH[device.healthy])
        for node in device.nodes:
            told.topology.nodes.add(ID=node)
    return response


def to_allocation(allocation: Allocation) -> pb.ContainerAllocateResponse:
    """How a container gets at its devices, for kubelet."""
    response = pb.ContainerAllocateResponse(
        envs=allocation.envs, annotations=allocation.annotations
    )
    for host_path, container_path in allocation.device_nodes:
        response.devices.add(host_path=host_path, container_path=container_path, permissions="rw")
    for name in allocation.cdi_devices:
        response.cdi_devices.add(name=name)
    return response
