"""What a pod asks, and every way to ask wrongly."""

import json
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.core.bitmap import Bitmap
from agent.core.decision import DecidedGpus, GpuKey
from agent.core.request import (
    ContainerDemand,
    Demand,
    Exclusive,
    Invalid,
    Policy,
    Role,
    parse_quantity,
    read_demand,
)

ACK_SPEC = "scheduling.alibabacloud.com/numa-topology-spec"
ACK_RESOURCE_SPEC = "scheduling.alibabacloud.com/resource-spec"
KOORDINATOR_SPEC = "scheduling.koordinator.sh/numa-topology-spec"
STATUS = "scheduling.koordinator.sh/resource-status"
GROUP = "topology.kubernetes.io/gpu-group"
DEVICES = "scheduling.koordinator.sh/device-allocated"
PIN = {"cpuset-scheduler": "required"}


def asks(name: str = "main", gpu: Any = 0, cpu: Any = 1, **more: Any) -> dict[str, Any]:
    """A container that requests what it is limited to."""
    amounts = {"aliyun.com/gpu": gpu, "cpu": cpu}
    return {"name": name, "resources": {"requests": amounts, "limits": amounts}} | more


def holds(requests: Any, limits: Any) -> dict[str, Any]:
    return {"name": "main", "resources": {"requests": requests, "limits": limits}}


def pod(*containers: Any, annotations: Any = None, init: Any = None) -> dict[str, Any]:
    return {
        "metadata": {"name": "p", "namespace": "ns", "uid": "u", "annotations": annotations},
        "spec": {"containers": list(containers or [asks()]), "initContainers": init},
    }


def demanded(value: object) -> Demand:
    demand = read_demand(value)
    assert isinstance(demand, Demand), demand
    return demand


def refused(value: object) -> str:
    invalid = read_demand(value)
    assert isinstance(invalid, Invalid), invalid
    assert len(invalid.reason) < 400
    assert invalid.reason.isprintable()
    return invalid.reason


# What ACK's page publishes, in its two spellings: four GPUs and 24 CPUs on one node.
PUBLISHED = {
    "under the key of the table": (
        ACK_SPEC,
        '{"numaTopologyPolicy": "SingleNUMANode", "singleNUMANodeExclusive": "Required"}',
        (),
    ),
    "under the key of an older sample": (
        ACK_RESOURCE_SPEC,
        '{"numaTopologyPolicy": "SingleNUMANode"}',
        (),
    ),
    "with the comma too many": (
        ACK_SPEC,
        '{\n  "numaTopologyPolicy": "SingleNUMANode",\n  "singleNUMANodeExclusive": "Required",\n}',
        (f"annotation {ACK_SPEC} has a trailing comma, which is passed over",),
    ),
}


@pytest.mark.parametrize(("key", "spec", "notes"), PUBLISHED.values(), ids=PUBLISHED)
def test_a_published_sample_is_read(key: str, spec: str, notes: tuple[str, ...]) -> None:
    resources = {"cpu": "24", "aliyun.com/gpu": "4"}
    sample = pod(holds(resources, resources), annotations=PIN | {key: spec})
    assert read_demand(sample) == Demand(
        pod="ns/p",
        uid="u",
        policy=Policy.SINGLE_NUMA_NODE,
        exclusive=Exclusive.REQUIRED,
        pinned=True,
        containers=(
            ContainerDemand(name="main", role=Role.APP, gpus=4, cpus=24, memory_bytes=None),
        ),
        decided_cpus=None,
        decided_gpus=None,
        notes=notes,
    )


def spec(policy: Any = "Restricted", **more: Any) -> str:
    return json.dumps({"numaTopologyPolicy": policy} | more)


PREFERRED = {"singleNUMANodeExclusive": "Preferred"}
REQUIRED, WISH = Exclusive.REQUIRED, Exclusive.PREFERRED
IGNORED = f"annotation {KOORDINATOR_SPEC} is ignored: it contradicts one that comes first"
# annotations → pinned, policy, exclusive, notes
INTENTS: dict[str, tuple[dict[str, Any], bool, Policy | None, Exclusive, list[str]]] = {
    "nothing": ({}, False, None, REQUIRED, []),
    "pinning alone means BestEffort": (PIN, True, Policy.BEST_EFFORT, REQUIRED, []),
    "pinning with an empty policy as well": (
        PIN | {ACK_SPEC: spec("")},
        True,
        Policy.BEST_EFFORT,
        REQUIRED,
        [],
    ),
    "a policy alone does not pin": ({ACK_SPEC: spec()}, False, Policy.RESTRICTED, REQUIRED, []),
    "an empty policy is none": ({ACK_SPEC: spec("")}, False, None, REQUIRED, []),
    "a null is none": (
        {ACK_SPEC: spec(None, singleNUMANodeExclusive=None), "cpuset-scheduler": None},
        False,
        None,
        REQUIRED,
        [],
    ),
    "an empty exclusive is Required": (
        {ACK_SPEC: spec("BestEffort", singleNUMANodeExclusive="")},
        False,
        Policy.BEST_EFFORT,
        REQUIRED,
        [],
    ),
    "Preferred": ({ACK_SPEC: spec(**PREFERRED)}, False, Policy.RESTRICTED, WISH, []),
    "Koordinator's own key": (
        {KOORDINATOR_SPEC: spec(**PREFERRED)},
        False,
        Policy.RESTRICTED,
        WISH,
        [],
    ),
    "fields of others beside it": (
        {ACK_RESOURCE_SPEC: spec(preferredCPUBindPolicy="FullPCPUs", depth=10**30)},
        False,
        Policy.RESTRICTED,
        REQUIRED,
        [],
    ),
    "a number of five thousand digits beside it": (
        {ACK_SPEC: spec()[:-1] + ', "x": ' + "9" * 5000 + "}"},
        False,
        Policy.RESTRICTED,
        REQUIRED,
        [],
    ),
    "only fields of others is as if absent": (
        {ACK_RESOURCE_SPEC: '{"preferredCPUBindPolicy": "FullPCPUs"}', KOORDINATOR_SPEC: spec()},
        False,
        Policy.RESTRICTED,
        REQUIRED,
        [],
    ),
    "an exclusive without a policy is ignored": (
        PIN | {ACK_SPEC: json.dumps(PREFERRED)},
        True,
        Policy.BEST_EFFORT,
        REQUIRED,
        [f"annotation {ACK_SPEC} is ignored: it has no numaTopologyPolicy"],
    ),
    "the same twice": (
        {ACK_SPEC: spec(), KOORDINATOR_SPEC: spec(singleNUMANodeExclusive="Required")},
        False,
        Policy.RESTRICTED,
        REQUIRED,
        [],
    ),
    "another policy later": (
        {ACK_SPEC: spec(), KOORDINATOR_SPEC: spec("BestEffort")},
        False,
        Policy.RESTRICTED,
        REQUIRED,
        [IGNORED],
    ),
    "another exclusive later": (
        {ACK_RESOURCE_SPEC: spec(), KOORDINATOR_SPEC: spec(**PREFERRED)},
        False,
        Policy.RESTRICTED,
        REQUIRED,
        [IGNORED],
    ),
    "nonsense later": (
        {ACK_SPEC: spec(), KOORDINATOR_SPEC: "[]"},
        False,
        Policy.RESTRICTED,
        REQUIRED,
        [f"annotation {KOORDINATOR_SPEC} cannot be used: it is a list, not an object"],
    ),
    "the legacy value of cpuset-scheduler": (
        {"cpuset-scheduler": "true", ACK_SPEC: spec()},
        False,
        Policy.RESTRICTED,
        REQUIRED,
        ['annotation cpuset-scheduler is ignored: it is "true", not "required"'],
    ),
    "required in capitals": (
        {"cpuset-scheduler": "Required"},
        False,
        None,
        REQUIRED,
        ['annotation cpuset-scheduler is ignored: it is "Required", not "required"'],
    ),
}


@pytest.mark.parametrize(
    ("annotations", "pinned", "policy", "exclusive", "notes"), INTENTS.values(), ids=INTENTS
)
def test_the_user_means(
    annotations: dict[str, Any],
    pinned: bool,
    policy: Policy | None,
    exclusive: Exclusive,
    notes: list[str],
) -> None:
    demand = demanded(pod(annotations=annotations))
    assert (demand.pinned, demand.policy, demand.exclusive) == (pinned, policy, exclusive)
    assert demand.notes == tuple(notes)


BAD_SPECS = {
    "an unknown policy": (
        spec("Strict"),
        'numaTopologyPolicy is "Strict", not one of SingleNUMANode, Restricted, BestEffort',
    ),
    "a policy in the wrong case": (spec("restricted"), 'numaTopologyPolicy is "restricted", not'),
    "a policy that is a number": (spec(7), "numaTopologyPolicy is 7, not one of"),
    "a policy that is false": (spec(False), "numaTopologyPolicy is false, not one of"),
    "a policy that is a list": (spec(["Restricted"]), "numaTopologyPolicy is a list, not one of"),
    "an unknown exclusive": (
        spec(singleNUMANodeExclusive="Always"),
        'singleNUMANodeExclusive is "Always", not one of Required, Preferred',
    ),
    "a policy with a line break": (spec("a\nb\x1b[31m"), 'numaTopologyPolicy is "a?b?[31m", not'),
    "a policy that is half a character": (
        '{"numaTopologyPolicy": "\\ud83d"}',
        'numaTopologyPolicy is "?", not one of',
    ),
    "a policy of a thousand letters": (spec("x" * 1000), '"' + "x" * 40 + '…", not one of'),
    "a list": ("[]", "it is a list, not an object"),
    "no JSON": ("Restricted", "not JSON: Expecting value at line 1, column 1"),
    "a key twice": (
        '{"numaTopologyPolicy": "", "numaTopologyPolicy": "Restricted"}',
        'the key "numaTopologyPolicy" stands twice in one object',
    ),
    "no text": ({"numaTopologyPolicy": "Restricted"}, "it is an object, not a text"),
}


@pytest.mark.parametrize(("value", "sentence"), BAD_SPECS.values(), ids=BAD_SPECS)
def test_a_spec_is_refused_in_one_sentence(value: Any, sentence: str) -> None:
    reason = refused(pod(annotations={ACK_SPEC: value, KOORDINATOR_SPEC: spec()}))
    assert reason.startswith(f"annotation {ACK_SPEC} cannot be used: ")
    assert sentence in reason


# Worked out by hand; what is beyond 2**63 - 1 is capped.
QUANTITIES: dict[Any, Fraction] = {
    "0": Fraction(0),
    "24": Fraction(24),
    "+24": Fraction(24),
    "24000m": Fraction(24),
    "24.000": Fraction(24),
    "1.5": Fraction(3, 2),
    "5.": Fraction(5),
    ".5": Fraction(1, 2),
    "100m": Fraction(1, 10),
    "1500u": Fraction(3, 2000),
    "1n": Fraction(1, 1_000_000_000),
    "2k": Fraction(2000),
    "3M": Fraction(3_000_000),
    "1G": Fraction(1_000_000_000),
    "1T": Fraction(1_000_000_000_000),
    "1P": Fraction(1_000_000_000_000_000),
    "1E": Fraction(1_000_000_000_000_000_000),
    "1Ki": Fraction(1024),
    "1.5Ki": Fraction(1536),
    "1Mi": Fraction(1_048_576),
    "8Gi": Fraction(8_589_934_592),
    "1Ti": Fraction(1_099_511_627_776),
    "1Pi": Fraction(1_125_899_906_842_624),
    "7Ei": Fraction(8_070_450_532_247_928_832),
    "2e1": Fraction(20),
    "2E1": Fraction(20),
    "2.5e+3": Fraction(2500),
    "1e-3": Fraction(1, 1000),
    "8Ei": Fraction(9_223_372_036_854_775_807),
    "1e999": Fraction(9_223_372_036_854_775_807),
    2**64: Fraction(9_223_372_036_854_775_807),
    24: Fraction(24),
    0.1: Fraction(1, 10),
    1e22: Fraction(9_223_372_036_854_775_807),
    None: Fraction(0),
}


@pytest.mark.parametrize(("text", "number"), QUANTITIES.items(), ids=map(repr, QUANTITIES))
def test_a_quantity_is_exact(text: object, number: Fraction) -> None:
    assert parse_quantity(text) == number


def test_a_number_that_int_would_not_print_is_the_largest_quantity() -> None:
    assert parse_quantity(10**5000) == 2**63 - 1


NO_QUANTITIES = {
    "nothing": ("", '""'),
    "a word": ("many", '"many"'),
    "a point": (".", '"."'),
    "a suffix alone": ("Gi", '"Gi"'),
    "an exponent without its number": ("1e", '"1e"'),
    "an exponent and a suffix": ("1e3k", '"1e3k"'),
    "a fraction for an exponent": ("1e1.5", '"1e1.5"'),
    "an exponent to wait for": ("1e999999999", '"1e999999999"'),
    "a capital K": ("1K", '"1K"'),
    "a small ki": ("1ki", '"1ki"'),
    "a blank": ("1 Gi", '"1 Gi"'),
    "a line break": ("1\n", '"1?"'),
    "a negative number": ("-1", '"-1"'),
    "a negative int": (-1, "-1"),
    "the most negative int": (-(10**5000), "a huge number"),
    "an Arabic digit": ("٣", '"٣"'),
    "Python's underscore": ("1_000", '"1_000"'),
    "a ratio": ("1/2", '"1/2"'),
    "hexadecimal": ("0x10", '"0x10"'),
    "more digits than anyone needs": ("1" * 65, '"' + "1" * 40 + '…"'),
    "NaN": (float("nan"), "NaN"),
    "infinity": (float("inf"), "Infinity"),
    "true": (True, "true"),
    "a list": (["1"], "a list"),
    "an object": ({}, "an object"),
    "what JSON does not know": (b"1", "no JSON"),
}


@pytest.mark.parametrize(("value", "shown"), NO_QUANTITIES.values(), ids=NO_QUANTITIES)
def test_it_is_no_quantity(value: object, shown: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        parse_quantity(value)
    assert str(caught.value) == f"{shown} is not a quantity of 0 or more"


GPU, CPU, MEMORY = "aliyun.com/gpu", "cpu", "memory"
# requests, limits → (GPUs, CPUs, memory) of a pod that is not pinned
RESOURCES: dict[str, tuple[Any, Any, tuple[int, int, int | None]]] = {
    "nothing": (None, None, (0, 0, None)),
    "no GPU": ({GPU: "0"}, {GPU: 0}, (0, 0, None)),
    "a GPU by its limit": ({}, {GPU: "1"}, (1, 0, None)),
    "a GPU as 1e0": ({GPU: "1e0"}, {GPU: "1000m"}, (1, 0, None)),
    "as many GPUs as may be": ({}, {GPU: 1024}, (1024, 0, None)),
    "CPUs by their limit": ({}, {CPU: "24"}, (0, 24, None)),
    "CPUs in two spellings": ({CPU: 24.0}, {CPU: "24000m"}, (0, 24, None)),
    "CPUs without a limit": ({CPU: "24"}, {}, (0, 0, None)),
    "fewer CPUs requested": ({CPU: "23"}, {CPU: "24"}, (0, 0, None)),
    "a fraction of a CPU": ({CPU: "1500m"}, {CPU: "1500m"}, (0, 0, None)),
    "memory": ({MEMORY: "1Gi"}, {MEMORY: "2Gi"}, (0, 0, 2_147_483_648)),
    "memory without a limit": ({MEMORY: "1Gi"}, {}, (0, 0, None)),
    "a fraction of a byte": ({}, {MEMORY: "1500m"}, (0, 0, 2)),
    "a memory limit of 0 is none": ({}, {MEMORY: "0"}, (0, 0, None)),
    "what others count": ({"nvidia.com/gpu": "many"}, {"nvidia.com/gpu": []}, (0, 0, None)),
}


@pytest.mark.parametrize(("requests", "limits", "amounts"), RESOURCES.values(), ids=RESOURCES)
def test_a_container_asks(requests: Any, limits: Any, amounts: tuple[int, int, int | None]) -> None:
    (container,) = demanded(pod(holds(requests, limits))).containers
    assert (container.gpus, container.cpus, container.memory_bytes) == amounts


BAD_RESOURCES = {
    "GPUs without a limit": (
        {GPU: 1},
        {},
        "the request of aliyun.com/gpu is 1 and its limit 0; they must be equal",
    ),
    "fewer GPUs requested": (
        {GPU: "1"},
        {GPU: "2"},
        'the request of aliyun.com/gpu is "1" and its limit "2"; they must be equal',
    ),
    "half a GPU": ({}, {GPU: "500m"}, '"500m" of aliyun.com/gpu is not a whole number up to 1,024'),
    "absurdly many GPUs": ({}, {GPU: 1025}, "1025 of aliyun.com/gpu is not a whole number up to"),
    "GPUs that int would not print": (
        {},
        {GPU: 10**5000},
        "a huge number of aliyun.com/gpu is not a whole number up to",
    ),
    "fewer than no GPUs": ({}, {GPU: -1}, "aliyun.com/gpu: -1 is not a quantity of 0 or more"),
    "unreadable CPUs": ({CPU: "x"}, {CPU: 1}, 'cpu: "x" is not a quantity of 0 or more'),
    "an unreadable CPU limit": ({CPU: 1}, {CPU: []}, "cpu: a list is not a quantity of 0 or more"),
    "an unreadable memory request": ({MEMORY: "1 GB"}, {}, 'memory: "1 GB" is not a quantity'),
    "requests that are no object": ([], {}, "requests is a list, not an object"),
    "limits that are no object": ({}, "4", 'limits is "4", not an object'),
}


@pytest.mark.parametrize(
    ("requests", "limits", "sentence"), BAD_RESOURCES.values(), ids=BAD_RESOURCES
)
def test_resources_are_refused_pinned_or_not(requests: Any, limits: Any, sentence: str) -> None:
    reason = refused(pod(holds(requests, limits)))
    assert reason.startswith(f'container "main": {sentence}')
    assert refused(pod(holds(requests, limits), annotations=PIN)) == reason


NOT_WHOLE = {
    "no CPUs": ({}, {}, "the request of cpu is 0 and its limit 0"),
    "no limit": ({CPU: "24"}, {}, 'the request of cpu is "24" and its limit 0'),
    "fewer requested": ({CPU: "500m"}, {CPU: 1}, 'the request of cpu is "500m" and its limit 1'),
    "a fraction": ({}, {CPU: "1.5"}, 'the request of cpu is "1.5" and its limit "1.5"'),
}


@pytest.mark.parametrize(("requests", "limits", "sentence"), NOT_WHOLE.values(), ids=NOT_WHOLE)
@pytest.mark.parametrize("role", Role)
def test_every_container_of_a_pinned_pod_needs_whole_cpus(
    role: Role, requests: Any, limits: Any, sentence: str
) -> None:
    bad = holds(requests, limits)
    if role is Role.APP:
        value = pod(asks("other"), bad, annotations=PIN)
    else:
        first = bad | ({"restartPolicy": "Always"} if role is Role.SIDECAR else {})
        value = pod(asks("other"), init=[first], annotations=PIN)
    assert refused(value) == (
        f'container "main": {sentence}; '
        "a pinned pod needs whole CPUs with request = limit in every container"
    )


def test_what_a_scheduler_decided_is_part_of_the_demand() -> None:
    decided = {
        "cpuset": '{"b": {"0": {"elems": {"4": {}}}}, "x": {}}',
        GROUP: "0,2",
    }
    demand = demanded(pod(asks("a"), asks("b"), annotations=decided))
    assert demand.decided_cpus == (("b", Bitmap([4])),)
    assert demand.decided_gpus == DecidedGpus(by=GpuKey.INDEX, numbers=(0, 2))
    assert demand.notes == ('annotation cpuset is ignored for "x", not in this pod',)


def test_containers_come_in_their_order_of_start() -> None:
    init = [asks("fetch"), asks("mesh", restartPolicy="Always"), asks("warm", restartPolicy="No")]
    demand = demanded(pod(asks("b"), asks("a"), init=init))
    assert [(container.name, container.role) for container in demand.containers] == [
        ("fetch", Role.INIT),
        ("mesh", Role.SIDECAR),
        ("warm", Role.INIT),
        ("b", Role.APP),
        ("a", Role.APP),
    ]


BAD_CONTAINERS: dict[str, tuple[Any, str]] = {
    "no pod": (None, "the pod is null, not an object"),
    "an empty pod": ({}, "the pod has no containers"),
    "only an init container": (
        {"spec": {"initContainers": [asks()]}},
        "the pod has no containers",
    ),
    "a spec that is a list": ({"spec": []}, "spec is a list, not an object"),
    "metadata that is a text": ({"metadata": "x"}, 'metadata is "x", not an object'),
    "annotations that are a list": (pod(annotations=[]), "annotations is a list, not an object"),
    "containers that are an object": (
        {"spec": {"containers": {}}},
        "containers is an object, not a list",
    ),
    "a container that is a text": (pod("main"), 'a container is "main", not an object'),
    "a container without a name": (pod({}), 'container "": "" is not a container\'s name'),
    "a name that is a number": (pod({"name": 7}), "name is 7, not a text"),
    "a name with a line break": (pod({"name": "a\nb"}), 'container "a?b": "a?b" is not a'),
    "a name of a mebibyte": (
        pod({"name": "x" * (1 << 20)}),
        f'"{"x" * 40}…" is not a container\'s name (a DNS label)',
    ),
    "resources that are a list": (
        pod({"name": "a", "resources": []}),
        'container "a": resources is a list, not an object',
    ),
    "a name twice": (pod(asks("a"), asks("b"), asks("a")), 'two containers have the name "a"'),
    "a name of an init container again": (
        pod(asks("a"), init=[asks("a")]),
        'two containers have the name "a"',
    ),
    "1,001 containers": (
        pod(*(asks(f"c{i}") for i in range(1000)), init=[asks("i")]),
        "the pod has 1,001 containers, more than 1,000",
    ),
}


@pytest.mark.parametrize(("value", "sentence"), BAD_CONTAINERS.values(), ids=BAD_CONTAINERS)
def test_the_pod_is_refused_in_one_sentence(value: object, sentence: str) -> None:
    assert sentence in refused(value)


def test_a_pod_may_have_a_thousand_containers() -> None:
    assert demanded(pod(*(asks(f"c{i}") for i in range(1000)))).cpus == 1000


NAMES: dict[str, tuple[Any, tuple[str, str]]] = {
    "no pod": (7, ("default/?", "")),
    "no metadata": ({"metadata": []}, ("default/?", "")),
    "neither name nor namespace": ({"metadata": {"uid": "u"}}, ("default/?", "u")),
    "names of wrong types": (
        {"metadata": {"name": 1, "namespace": [], "uid": {}}},
        ("default/?", ""),
    ),
    "an empty name": ({"metadata": {"name": "", "namespace": "ns"}}, ("ns/?", "")),
    "control characters": (
        {"metadata": {"name": "a\x00b\u202e\ud800", "uid": "\x1b"}},
        ("default/a?b??", "?"),
    ),
    "a name of a mebibyte": (
        {"metadata": {"name": "x" * (1 << 20)}},
        ("default/" + "x" * 253 + "…", ""),
    ),
}


@pytest.mark.parametrize(("value", "identity"), NAMES.values(), ids=NAMES)
def test_a_bad_pod_still_has_a_name(value: object, identity: tuple[str, str]) -> None:
    invalid = read_demand(value)
    assert isinstance(invalid, Invalid)
    assert (invalid.pod, invalid.uid) == identity


def container(name: str = "main", role: Role = Role.APP, **amounts: int) -> ContainerDemand:
    default: dict[str, Any] = {"gpus": 0, "cpus": 0, "memory_bytes": None}
    return ContainerDemand(name=name, role=role, **default | amounts)


def demand_of(*containers: ContainerDemand, **more: Any) -> Demand:
    default: dict[str, Any] = {
        "pod": "ns/p",
        "uid": "u",
        "policy": None,
        "exclusive": Exclusive.REQUIRED,
        "pinned": False,
        "decided_cpus": None,
        "decided_gpus": None,
        "notes": (),
    }
    return Demand(containers=containers, **default | more)


CONTRADICTIONS = {
    "an empty name": (lambda: container(""), '"" is not a container'),
    "fewer than no GPUs": (lambda: container(gpus=-1), '"main" asks for less than nothing'),
    "fewer than no CPUs": (lambda: container(cpus=-1), '"main" asks for less than nothing'),
    "less than no memory": (lambda: container(memory_bytes=-1), "asks for less than nothing"),
    "no containers": (demand_of, "the pod has no containers"),
    "an init container last": (
        lambda: demand_of(container("a"), container("b", Role.INIT)),
        "an init container is listed after a container",
    ),
    "a name twice": (
        lambda: demand_of(container(), container()),
        'two containers have the name "main"',
    ),
    "pinned without a policy": (
        lambda: demand_of(container(cpus=1), pinned=True),
        "a pinned pod has no policy",
    ),
    "pinned without CPUs": (
        lambda: demand_of(container(), pinned=True, policy=Policy.RESTRICTED),
        "a pinned pod has a container without whole CPUs",
    ),
}


@pytest.mark.parametrize(("make", "sentence"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_a_constructor_refuses(make: Any, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        make()
    assert sentence in str(caught.value)


PEAKS: dict[str, tuple[list[tuple[Role, int]], int]] = {
    "apps run together": ([(Role.APP, 1), (Role.APP, 2)], 3),
    "init containers run one by one": ([(Role.INIT, 4), (Role.INIT, 5), (Role.APP, 1)], 5),
    "an init container makes way": ([(Role.INIT, 2), (Role.APP, 3)], 3),
    "a sidecar stays": ([(Role.SIDECAR, 2), (Role.APP, 3)], 5),
    "a sidecar runs beside what comes after it": (
        [(Role.INIT, 7), (Role.SIDECAR, 2), (Role.INIT, 6), (Role.APP, 1)],
        8,
    ),
}


@pytest.mark.parametrize(("amounts", "peak"), PEAKS.values(), ids=PEAKS)
def test_the_peak_of(amounts: list[tuple[Role, int]], peak: int) -> None:
    demand = demand_of(
        *(
            container(f"c{i}", role, gpus=n, cpus=2 * n, memory_bytes=3 * n)
            for i, (role, n) in enumerate(amounts)
        )
    )
    assert (demand.gpus, demand.cpus, demand.memory_bytes) == (peak, 2 * peak, 3 * peak)


@pytest.mark.parametrize("role", Role)
def test_a_pod_has_no_memory_limit_where_one_container_has_none(role: Role) -> None:
    without = container("a", role)
    assert demand_of(without, container("b", memory_bytes=1 << 30)).memory_bytes is None


def live(containers: tuple[ContainerDemand, ...]) -> list[set[ContainerDemand]]:
    """Who runs, moment by moment: kubelet starts the first list one by one, then the second."""
    moments: list[set[ContainerDemand]] = []
    running: set[ContainerDemand] = set()
    for each in (one for one in containers if one.role is not Role.APP):
        running = {*running, each}
        moments.append(running)
        if each.role is Role.INIT:
            running = running - {each}
    return [*moments, running | {one for one in containers if one.role is Role.APP}]


AMOUNTS = st.tuples(
    st.sampled_from([Role.INIT, Role.SIDECAR]), st.integers(0, 9), st.integers(0, 9)
)


@given(st.lists(AMOUNTS, max_size=6), st.lists(st.integers(0, 9), min_size=1, max_size=3))
@settings(deadline=None)
def test_the_peak_is_that_of_a_life_played_through(
    first: list[tuple[Role, int, int]], apps: list[int]
) -> None:
    init = [
        asks(f"i{i}", gpus, cpus, restartPolicy="Always" if role is Role.SIDECAR else None)
        for i, (role, gpus, cpus) in enumerate(first)
    ]
    demand = demanded(pod(*(asks(f"a{i}", n, n) for i, n in enumerate(apps)), init=init))
    moments = live(demand.containers)
    assert demand.gpus == max(sum(one.gpus for one in moment) for moment in moments)
    assert demand.cpus == max(sum(one.cpus for one in moment) for moment in moments)


ANY_TEXT = st.text(st.characters(), max_size=20)  # lone surrogates and control characters too
HOSTILE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | ANY_TEXT
    | st.sampled_from([10**400, -(10**400), "9" * 5000, "[" * 70_000, b"", {1: 2}, "1e999"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY_TEXT, inner, max_size=3),
    max_leaves=8,
)
KEYS = [*PIN, ACK_SPEC, ACK_RESOURCE_SPEC, KOORDINATOR_SPEC, "cpuset", STATUS, GROUP, DEVICES]


def check(value: object) -> None:
    """A Demand or an Invalid whose sentences are fit to be shown."""
    answer = read_demand(value)
    sentences = [answer.reason] if isinstance(answer, Invalid) else answer.notes
    for sentence in (*sentences, answer.pod, answer.uid):
        assert len(sentence) < 400
        assert sentence.isprintable()


@given(HOSTILE)
@settings(deadline=None)
def test_any_value_is_a_demand_or_invalid(value: object) -> None:
    check(value)


@given(HOSTILE, st.data())
@settings(deadline=None)
def test_any_value_anywhere_in_a_pod_is_a_demand_or_invalid(
    value: Any, data: st.DataObject
) -> None:
    whole: Any = pod(asks("a"), asks("b"), init=[asks("i")], annotations=dict.fromkeys(KEYS, "{}"))
    place, key = whole, data.draw(st.sampled_from(sorted(whole)))
    while isinstance(place[key], (list, dict)) and data.draw(st.booleans()):
        place = place[key]
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else [0]))
    place[key] = value
    check(whole)


FRAGMENTS = st.sampled_from(
    [
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        '"',
        "\\",
        " ",
        "null",
        "NaN",
        "0",
        '"cpuset"',
        '"gpu"',
        '"elems"',
    ]
)


@given(st.sampled_from(KEYS), ANY_TEXT | st.lists(FRAGMENTS, max_size=20).map("".join))
@settings(deadline=None)
def test_any_text_is_read_or_reported(key: str, text: str) -> None:
    check(pod(annotations={key: text}))


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=12,
)
WORDS = st.sampled_from(
    [
        "numaTopologyPolicy",
        "singleNUMANodeExclusive",
        "cpuset",
        "gpu",
        "minor",
        "main",
        "0",
        "elems",
    ]
)
WORD_VALUES = st.recursive(
    JSON_VALUES | WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(WORDS, inner, max_size=2),
    max_leaves=9,
)


@given(st.sampled_from(KEYS), WORD_VALUES)
@settings(deadline=None)
def test_any_json_is_read_or_reported(key: str, value: object) -> None:
    check(pod(annotations={key: json.dumps(value)}))
