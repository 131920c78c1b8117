"""What becomes of pods on a node: the sample of ACK's page, the table, the JSON, the colours."""

import json
from typing import Any

import pytest

from agent.core.bitmap import Bitmap
from agent.core.plan import draw_plan, make_plan, owners, plan_to_json
from agent.core.svg import draw_svg
from tests.core.machines import described

SPEC = "scheduling.alibabacloud.com/numa-topology-spec"
OLD_SPEC = "scheduling.alibabacloud.com/resource-spec"


def pod(
    name: str, gpus: int = 0, cpus: int | str = 0, *, memory: str = "", **annotations: str
) -> dict[str, Any]:
    """A pod of one container `main` with request = limit."""
    amounts = {"cpu": str(cpus), "memory": memory, "aliyun.com/gpu": str(gpus)}
    size = {key: amount for key, amount in amounts.items() if amount not in ("", "0")}
    return {
        "metadata": {"namespace": "test", "name": name, "annotations": annotations},
        "spec": {"containers": [{"name": "main", "resources": {"requests": size, "limits": size}}]},
    }


def asking(policy: str = "", exclusive: str = "", *, key: str = SPEC, pin: bool = True) -> Any:
    """The annotations for a policy, as keyword arguments."""
    spec = {"numaTopologyPolicy": policy} | (
        {"singleNUMANodeExclusive": exclusive} if exclusive else {}
    )
    annotations = {key: json.dumps(spec)} if policy else {}
    return annotations | ({"cpuset-scheduler": "required"} if pin else {})


# ACK's page: 4 GPUs and 24 CPUs; both spellings of the annotation, one of them with a stray comma.
SAMPLES = {
    "the documented annotation": asking("SingleNUMANode", "Preferred"),
    "the older spelling": asking("SingleNUMANode", "Preferred", key=OLD_SPEC),
    "a trailing comma, as published": {
        "cpuset-scheduler": "required",
        OLD_SPEC: '{\n  "numaTopologyPolicy": "SingleNUMANode",\n}',
    },
}


@pytest.mark.parametrize("annotations", SAMPLES.values(), ids=SAMPLES)
def test_the_sample_of_acks_page_gets_one_node_and_twelve_whole_cores_with(
    annotations: dict[str, str],
) -> None:
    plan = make_plan(described("a800x8"), Bitmap(), [pod("tgi-0", 4, 24, **annotations)])
    (placement,) = plan_to_json(plan)["placements"]
    assert placement["nodes"] == [0]
    assert placement["gpus"] == [0, 1, 2, 3]
    # By hand: node 0 is 0-31,64-95, CPU c and c + 64 are one core, the lowest twelve are free.
    assert placement["containers"][0]["cpus"] == "0-11,64-75"


def test_the_json_is_as_documented() -> None:
    ask = asking("SingleNUMANode", "Preferred")
    plan = make_plan(described("a800x8"), Bitmap(), [pod("tgi-0", 4, 24, memory="64Gi", **ask)])
    assert json.dumps(plan_to_json(plan)) == json.dumps(
        {
            "schema": "numalet/plan/v1",
            "placements": [
                {
                    "pod": "test/tgi-0",
                    "admitted": True,
                    "policy": "SingleNUMANode",
                    "exclusive": "Preferred",
                    "nodes": [0],
                    "gpus": [0, 1, 2, 3],
                    "containers": [
                        {"name": "main", "cpus": "0-11,64-75", "mems": "0", "gpus": [0, 1, 2, 3]}
                    ],
                    "reason": None,
                }
            ],
            "nodes": [
                {"id": 0, "state": "single", "free_gpus": 0, "free_cpus": 40},
                {"id": 1, "state": "idle", "free_gpus": 4, "free_cpus": 64},
            ],
        }
    )


def test_a_refused_and_an_invalid_pod_are_told_and_the_others_planned() -> None:
    pods = [
        pod("wide", 6, 24, **asking("SingleNUMANode")),
        pod("half", 1, "1.5", **asking("SingleNUMANode")),
        "no pod",
        pod("plain", 2, 7, **asking(pin=False)),
    ]
    data = plan_to_json(make_plan(described("a800x8"), Bitmap(), pods))
    wide, half, strange, plain = data["placements"]
    assert (wide["admitted"], wide["policy"], wide["exclusive"]) == (
        False,
        "SingleNUMANode",
        "Required",
    )
    assert wide["reason"] == (
        "SingleNUMANode: node 0 has 4 free GPUs and 64 free CPUs, node 1 has 4 and 64; "
        "asked 6 GPUs and 24 CPUs"
    )
    assert (wide["nodes"], wide["gpus"], wide["containers"]) == ([], [], [])
    assert (half["admitted"], half["policy"], half["exclusive"]) == (False, None, None)
    assert "1.5" in half["reason"]
    assert strange["pod"] == "default/?"
    assert (plain["admitted"], plain["policy"], plain["exclusive"]) == (True, None, None)
    assert plain["containers"] == [{"name": "main", "cpus": "", "mems": "", "gpus": [0, 1]}]


def test_reserved_cpus_are_given_to_nobody() -> None:
    plan = make_plan(
        described("a800x8"), Bitmap([0, 64]), [pod("a", 4, 62, **asking("SingleNUMANode"))]
    )
    assert plan_to_json(plan)["placements"][0]["containers"][0]["cpus"] == "1-31,65-95"


TABLE = """\
POD           POLICY           NUMA   GPUS   CPUS          MEMORY
test/one      SingleNUMANode   0      0-3    0-11,64-75    node 0
test/two      Restricted       1      4-5    32-35,96-99   -
  first                               4      32-33,96-97
  second                              5      34-35,98-99
                               note: memory is not bound: not every container has a memory limit
test/three    SingleNUMANode   refused: SingleNUMANode: node 0 (single) has 0 free GPUs and 40 free CPUs, node 1 (single) has 2 and 56; asked 4 GPUs and 8 CPUs
test/shared   -                1      6      -             -
test/bad      -                refused: annotation scheduling.alibabacloud.com/numa-topology-spec cannot be used: numaTopologyPolicy is "Best", not one of SingleNUMANode, Restricted, BestEffort

NODE   STATE    FREE GPUS   FREE CPUS
0      single   0           40
1      single   1           56
"""  # noqa: E501


def test_the_whole_table() -> None:
    two = pod("two", 1, 4, **asking("Restricted"))
    (container,) = two["spec"]["containers"]
    two["spec"]["containers"] = [container | {"name": name} for name in ("first", "second")]
    pods = [
        pod("one", 4, 24, memory="64Gi", **asking("SingleNUMANode")),
        two,
        pod("three", 4, 8, **asking("SingleNUMANode")),
        pod("shared", 1, 2, **asking(pin=False)),
        pod("bad", 1, 2, **asking("Best")),
    ]
    assert draw_plan(make_plan(described("a800x8"), Bitmap(), pods)) == TABLE


def test_no_pods_leave_the_node_as_it_is() -> None:
    text = draw_plan(make_plan(described("laptop"), Bitmap(), []))
    assert text == (
        "POD   POLICY   NUMA   GPUS   CPUS   MEMORY\n\n"
        "NODE   STATE   FREE GPUS   FREE CPUS\n"
        "0      idle    0           8\n"
    )


def test_the_picture_colours_what_each_admitted_pod_holds() -> None:
    machine = described("a800x8")
    pods = [
        pod("one", 4, 24, **asking("SingleNUMANode")),
        pod("no", 9, 1, **asking("SingleNUMANode")),
        pod("two", 1, 2, **asking(pin=False)),
    ]
    plan = make_plan(machine, Bitmap(), pods)
    assert [(o.name, str(o.gpus), str(o.cpus)) for o in owners(plan)] == [
        ("test/one", "0-3", "0-11,64-75"),
        ("test/two", "4", ""),
    ]
    svg = draw_svg(machine, owners(plan))
    first, second = "#e4572e", "#2e86ab"
    # 24 CPUs, 4 GPUs and the legend; 1 GPU and the legend.
    assert svg.count(f'fill="{first}"') == 24 + 4 + 1
    assert svg.count(f'fill="{second}"') == 1 + 1
    assert "test/two   GPUs 4 · shared CPUs" in svg
