"""What a NodeResourceTopology says, and how another reporter than the agent would write one."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from xxhash import xxh64_intdigest

from tests.e2e.kubelet import NODE, RESOURCE

TOPOLOGIES = "noderesourcetopologies.topology.node.k8s.io"
TOPOLOGY = "/apis/topology.node.k8s.io/v1alpha2/noderesourcetopologies"
FINGERPRINT = "nodeTopologyPodsFingerprint"

Counts = tuple[int, int, int]
"""capacity, allocatable, available"""


def resources(zone: Mapping[str, Any]) -> dict[str, Counts]:
    """By resource, of a zone that counts in whole numbers. No name comes twice."""
    found = {
        one["name"]: (int(one["capacity"]), int(one["allocatable"]), int(one["available"]))
        for one in zone["resources"]
    }
    assert len(found) == len(zone["resources"])
    return found


def gpus_by_zone(topology: Mapping[str, Any]) -> dict[str, Counts]:
    """Of the zones that have GPUs."""
    return {
        zone["name"]: resources({"resources": [one]})[RESOURCE]
        for zone in topology["zones"]
        for one in zone["resources"]
        if one["name"] == RESOURCE
    }


def attributes(topology: Mapping[str, Any]) -> dict[str, str]:
    """The report's top-level attributes. No name comes twice."""
    pairs = [(one["name"], one["value"]) for one in topology["attributes"]]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def fingerprint(pods: Iterable[tuple[str, str]]) -> str:
    """Of (namespace, name), by hand.

    Source: the pod fingerprint of the NodeResourceTopology consumers, version 1.
    """
    hashes = sorted(
        xxh64_intdigest(name.encode(), seed=xxh64_intdigest(namespace.encode()))
        for namespace, name in pods
    )
    text = b"".join(number.to_bytes(8, "little") for number in hashes)
    return f"pfp0v001{xxh64_intdigest(text):016x}"


def make_foreign(zones: Sequence[str]) -> dict[str, Any]:
    """As another reporter would have it, with more than any schema asks, and zones in an order of
    its own."""
    return {
        "apiVersion": "topology.node.k8s.io/v1alpha2",
        "kind": "NodeResourceTopology",
        "metadata": {
            "name": NODE,
            "labels": {"app.kubernetes.io/managed-by": "Koordinator", "team": "a-b.c"},
            "annotations": {
                "node.koordinator.sh/cpu-topology": '{"detail": [ ]}',
                "odd": " \u00fc",
            },
        },
        "topologyPolicies": ["SingleNUMANodePodLevel"],
        "attributes": [{"name": "zzz", "value": "last"}, {"name": "aaa", "value": "first"}],
        "zones": [
            {
                "name": name,
                "type": "Node",
                "parent": "socket-7",
                "costs": [{"name": name, "value": 10}],
                "attributes": [{"name": "theirs", "value": name}],
                "resources": [
                    {
                        "name": "memory",
                        "capacity": "1Gi",
                        "allocatable": "1e9",
                        "available": "512M",
                    },
                    {"name": "cpu", "capacity": "9", "allocatable": 8, "available": "7500m"},
                    {"name": "other.io/nic", "capacity": 2, "allocatable": 2, "available": 1},
                ],
            }
            for name in (*reversed(zones), "numa-node-9")
        ],
    }
