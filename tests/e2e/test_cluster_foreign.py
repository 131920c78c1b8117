"""A NodeResourceTopology that another reporter writes: the agent's part is put into it, and every
other byte stays as it is."""

import contextlib
import copy
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from agent.core.report import from_nrt
from tests.e2e.cluster import Cluster
from tests.e2e.conftest import Note, spread
from tests.e2e.kubelet import NODE, RESOURCE
from tests.e2e.report import TOPOLOGIES, TOPOLOGY, attributes, make_foreign

OTHER = "koordlet"


def without_ours(topology: Mapping[str, Any]) -> dict[str, Any]:
    """The object without what the agent may add to one that is another's."""
    left = copy.deepcopy(dict(topology))
    facts = left["metadata"]
    left["metadata"] = {
        "name": facts["name"],
        "labels": facts["labels"],
        "annotations": {
            key: value
            for key, value in facts["annotations"].items()
            if not key.startswith("numalet.io/")
        },
    }
    left["attributes"] = [
        one for one in left["attributes"] if not one["name"].startswith("numalet.io/")
    ]
    for zone in left["zones"]:
        if "resources" in zone:
            zone["resources"] = [one for one in zone["resources"] if one["name"] != RESOURCE]
        if "attributes" in zone:
            zone["attributes"] = [
                one for one in zone["attributes"] if not one["name"].startswith("numalet.io/")
            ]
    return left


def rewrite(
    cluster: Cluster, change: Callable[[dict[str, Any]], object], version: str = ""
) -> None:
    """As the other reporter: read, changed, written; again where somebody was faster."""
    path = f"{TOPOLOGY}/{NODE}?fieldManager={OTHER}"
    path = path.replace("v1alpha2", version or "v1alpha2")

    def written() -> bool:
        topology = cluster.admin.get(path)
        change(topology)
        return cluster.admin.status("PUT", path, topology) == 200

    cluster.wait(written, "the other reporter has written")


@contextlib.contextmanager
def owned_by_another(cluster: Cluster, topology: Mapping[str, Any]) -> Iterator[None]:
    """The node's object is this one, of another reporter; the agent comes later."""
    cluster.rig.agent.stop()
    cluster.admin.delete(f"{TOPOLOGY}/{NODE}")
    cluster.admin.post(f"{TOPOLOGY}?fieldManager={OTHER}", topology)
    cluster.rig.agent.start()
    try:
        yield
    finally:
        cluster.admin.delete(f"{TOPOLOGY}/{NODE}")
        cluster.wait_until_right(60)


def zone_names(cluster: Cluster) -> list[str]:
    return [f"node-{node.id}" for node in cluster.rig.machine.facts.nodes]


@pytest.fixture
def foreign(cluster: Cluster) -> Iterator[dict[str, Any]]:
    """The other reporter's object, to which the agent has added its part."""
    made = make_foreign(zone_names(cluster))
    with owned_by_another(cluster, made):
        cluster.wait(lambda: shows_gpus(cluster), "our GPUs are in their zones", 60)
        yield made


def shows_gpus(cluster: Cluster) -> bool:
    return cluster.reported_gpus() == cluster.gpus()


def live(cluster: Cluster) -> dict[str, Any]:
    topology = cluster.topology()
    assert topology is not None
    return topology


def test_every_byte_stays_while_both_write(
    cluster: Cluster, foreign: dict[str, Any], note: Note
) -> None:
    assert without_ours(live(cluster)) == foreign
    assert len(from_nrt(live(cluster)).layout.machine.gpus) == 8
    cpus = foreign["zones"][0]["resources"][1]
    before, numbers, times_s = cluster.reports(), itertools.count(), []

    def both_are_shown() -> bool:
        """The other one writes ten times a second meanwhile."""
        cpus["available"] = f"{next(numbers)}m"
        rewrite(cluster, lambda said: said["zones"][0]["resources"][1].update(cpus))
        return shows_gpus(cluster) and without_ours(live(cluster)) == foreign

    def time_it() -> None:
        start = time.monotonic()
        cluster.wait(both_are_shown, "both are shown")
        times_s.append(time.monotonic() - start)

    for _ in range(5):
        name = cluster.post_pod("theirs", gpus=1)
        cluster.wait(lambda name=name: name in cluster.rig.held(), "kubelet has given a GPU")
        time_it()
        cluster.rig.wait_until_running([name])
        cluster.delete_pod(name)
        cluster.wait(lambda name=name: name not in cluster.rig.held(), "kubelet has it back")
        time_it()
    tries = cluster.deeds(["create", "update", "patch"], TOPOLOGIES)[before:]
    lost = sum(deed.status == 409 for deed in tries)
    note(f"another's report, {next(numbers)} writes of theirs: ours follows", spread(times_s), "")
    note("  writes of ours, those that theirs forestalled", f"{len(tries)}, {lost}", "")


@pytest.mark.parametrize("version", ["v1alpha1", "v1alpha2"])
def test_a_reporter_that_forgets_our_part_is_reminded(
    cluster: Cluster, foreign: dict[str, Any], version: str
) -> None:
    """Version v1alpha1 has no attributes beside the zones: who writes it loses them all."""
    rewrite(cluster, lambda said: said.update(zones=foreign["zones"]), version)
    foreign["attributes"] = [] if version == "v1alpha1" else foreign["attributes"]
    cluster.wait(lambda: shows_gpus(cluster), "our GPUs are in their zones again", 60)
    assert without_ours(live(cluster)) == foreign
    assert attributes(live(cluster))["numalet.io/pinning"] == "nri"


_NODE_0 = {"name": "node-0", "type": "Node"}

ODD = [
    pytest.param([], id="no zones"),
    pytest.param([_NODE_0], id="a zone with nothing in it"),
    pytest.param([_NODE_0, _NODE_0 | {"parent": "a"}], id="a zone twice"),
    pytest.param([{"name": "Node-0", "type": ""}, {"name": "", "type": "Node"}], id="odd names"),
    pytest.param(
        [
            _NODE_0
            | {
                "resources": [
                    {"name": name, "capacity": "-1", "allocatable": "1e-3", "available": "1E"}
                    for name in ("cpu", "cpu", RESOURCE)
                ],
                "costs": [{"name": "node-0", "value": -(1 << 62)}],
                "attributes": [{"name": "a", "value": "b"}, {"name": "a", "value": "c"}],
            }
        ],
        id="everything twice and beyond all bounds",
    ),
]


@pytest.mark.parametrize("zones", ODD)
def test_an_odd_object_harms_nobody(cluster: Cluster, zones: list[dict[str, Any]]) -> None:
    made = make_foreign([]) | {"zones": zones}
    with owned_by_another(cluster, made):
        cluster.wait(lambda: is_merged(live(cluster)), "our part is in it", 60)
        (pod,) = cluster.run_pods("one", gpus=4)
        cluster.wait(lambda: from_nrt(live(cluster)).grants, "it tells of the pod")
        kept = without_ours(live(cluster) | {"zones": live(cluster)["zones"][: len(zones)]})
        assert [bare(zone) for zone in kept["zones"]] == [bare(zone) for zone in zones]
        assert [kept[key] for key in ("metadata", "topologyPolicies", "attributes")] == [
            made[key] for key in ("metadata", "topologyPolicies", "attributes")
        ]
        assert cluster.rig.held().keys() == {pod.name}
        assert cluster.rig.agent.is_ready()


def is_merged(topology: Mapping[str, Any]) -> bool:
    return "numalet.io/machine" in topology["metadata"]["annotations"]


def bare(zone: Mapping[str, Any]) -> dict[str, Any]:
    """Without GPUs, which are ours, and without lists that are empty."""
    others = [one for one in zone.get("resources", ()) if one["name"] != RESOURCE]
    return {key: value for key, value in (dict(zone) | {"resources": others}).items() if value}
