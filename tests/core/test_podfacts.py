"""Facts of pods from what a runtime shows: kubelet's numbers, each rule by hand, lives of nodes."""

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from agent.core.bitmap import Bitmap
from agent.core.layout import key, lay_out
from agent.core.ledger import Grant, Ledger
from agent.core.offer import GPUS_KEY, Holding
from agent.core.podfacts import REST, Memory, read_facts
from agent.core.request import (
    GPU_RESOURCE,
    PIN_KEY,
    SPEC_KEYS,
    ContainerDemand,
    Demand,
    Exclusive,
    Invalid,
    Policy,
    Role,
    read_demand,
)
from agent.core.runtime import CpuTime, RuntimeContainer, RuntimePod, Stage
from agent.core.settlement import PodFact, Settlement, settle
from agent.core.topology import EMPTY, Machine
from tests.core.machines import random_machines
from tests.core.oracle import asks, build

SINGLE, RESTRICTED, BEST_EFFORT = Policy
APP, INIT, SIDECAR = Role
CREATING, CREATED, RUNNING, STOPPED = Stage

# --- kubelet's numbers ----------------------------------------------------------------------------
# Source: kubelet's MilliCPUToShares, MilliCPUToQuota and calculateLinuxResources. A number of 0 is
# not given on by the runtime.

PERIOD_US = 100_000
CAP_MILLI = 256_000
"""From here on shares say no more."""


def shares_of(milli: int) -> int:
    return min(max(2, milli * 1024 // 1000), 262_144)


def quota_of(milli: int, period_us: int) -> int | None:
    return max(1000, milli * period_us // 1000) if milli else None


def time_of(request_milli: int, limit_milli: int, period_us: int = PERIOD_US) -> CpuTime:
    return CpuTime(
        shares=shares_of(request_milli),
        quota_us=quota_of(limit_milli, period_us),
        period_us=period_us,
    )


def read_one(time: CpuTime, found: Bitmap = EMPTY) -> Demand | Invalid:
    """What a pinned pod asks, of one container with this time."""
    pod = RuntimePod(id="s", uid="a", pod="ns/a", annotations={PIN_KEY: "required"}, cpu_time=time)
    one = RuntimeContainer(
        id="c", pod_id="s", name="main", stage=CREATING, cpu_time=time, cpus=found
    )
    (fact,) = read_facts([pod], [one])
    return fact.demand


def cpus_of(demand: Demand | Invalid) -> int:
    """The CPUs of its one container, 0 if that has no whole ones."""
    return demand.containers[0].cpus if isinstance(demand, Demand) else 0


whole = st.integers(1, 1024).map(lambda cpus: (cpus * 1000, cpus * 1000))
equal = st.integers(1, 600_000).map(lambda milli: (milli, milli))
near = st.tuples(st.integers(1, 600), st.integers(0, 3)).map(
    lambda pair: (pair[0] * 1000 - pair[1], pair[0] * 1000)
)
any_pair = st.tuples(st.integers(0, 600_000), st.integers(0, 600_000))
amounts = st.one_of(whole, equal, near, any_pair).map(sorted) | equal.map(lambda pair: (pair[0], 0))


@given(amounts, st.integers(2, 1000))
def test_whole_cpus_are_seen_for_what_they_are(pair: Sequence[int], period_ms: int) -> None:
    request, limit = pair
    told = read_one(time_of(request, limit, period_ms * 1000))
    same = request == limit or min(request, limit) >= CAP_MILLI
    assert cpus_of(told) == (limit // 1000 if same and limit % 1000 == 0 else 0)


@given(st.integers(3, CAP_MILLI - 1), st.integers(10, 600_000))
def test_request_and_limit_are_told_to_a_thousandth(request: int, limit: int) -> None:
    told = read_one(time_of(request, limit))
    if isinstance(told, Invalid):
        said = f'the request of cpu is "{request}m" and its limit "{limit}m"'
        assert said in told.reason
    else:
        assert (request, cpus_of(told) * 1000) == (limit, limit)


@pytest.mark.parametrize("request_milli", [0, 1, 2])
def test_the_least_requests_are_told_as_none(request_milli: int) -> None:
    told = read_one(time_of(request_milli, 500))
    assert isinstance(told, Invalid)
    assert 'the request of cpu is "0m" and its limit "500m"' in told.reason


def test_every_number_of_whole_cpus() -> None:
    numbers = range(1, 1025)
    assert [cpus_of(read_one(time_of(n * 1000, n * 1000))) for n in numbers] == [*numbers]


@pytest.mark.parametrize("quota_us", [-1, None], ids=["lifted", "not given on"])
def test_a_pinned_container_without_quota_has_what_it_requests(quota_us: int | None) -> None:
    numbers = range(1, 257)
    times = [replace(time_of(n * 1000, n * 1000), quota_us=quota_us) for n in numbers]
    found = [cpus_of(read_one(time, Bitmap([9]))) for time in times]
    assert found == [*numbers]


def test_a_pinned_container_of_more_than_256_cpus_keeps_its_size() -> None:
    time = replace(time_of(300_000, 300_000), quota_us=-1)
    assert cpus_of(read_one(time, Bitmap(range(300)))) == 300


TIMES = {
    "no request and no limit": (CpuTime(shares=2), 0),
    "nothing is told": (CpuTime(), 0),
    "a request without a limit": (CpuTime(shares=2048, period_us=100_000), 0),
    "a request with a lifted quota, but no cpuset": (
        CpuTime(shares=2048, quota_us=-1, period_us=100_000),
        0,
    ),
    "a limit without a request": (CpuTime(quota_us=200_000, period_us=100_000), 0),
    "a quota of no period": (CpuTime(shares=2048, quota_us=200_000), 0),
    "a request below its limit": (time_of(1000, 2000), 0),
    "half a CPU": (time_of(500, 500), 0),
    "the least that kubelet sets, at its shortest period": (time_of(1, 1, 1000), 0),
    "one CPU": (time_of(1000, 1000), 1),
    "one CPU at another period": (time_of(1000, 1000, 5000), 1),
    "256 CPUs without a limit": (time_of(256_000, 0), 0),
    "257 CPUs": (time_of(257_000, 257_000), 257),
    "257.5 CPUs": (time_of(257_500, 257_500), 0),
}


@pytest.mark.parametrize(("time", "cpus"), TIMES.values(), ids=TIMES)
def test_whole_cpus_in(time: CpuTime, cpus: int) -> None:
    assert cpus_of(read_one(time)) == cpus


# --- one pod at a time ----------------------------------------------------------------------------

KEYS = {f"dev-{at}": f"GPU-{at}" for at in range(8)}


def sandbox(
    cpus: int | None = 0,
    *,
    uid: str = "a",
    id: str = "",  # noqa: A002
    name: str = "",
    pin: str | None = "required",
    policy: Policy | None = None,
    time: CpuTime | None = None,
    memory_gib: int = 0,
    **annotations: str,
) -> RuntimePod:
    """A pod of so many CPUs, request = limit; with None the runtime does not tell."""
    said = {PIN_KEY: pin} if pin is not None else {}
    if policy:
        said[SPEC_KEYS[0]] = json.dumps({"numaTopologyPolicy": policy})
    return RuntimePod(
        id=id or f"s-{uid}",
        uid=uid,
        pod=name or f"ns/{uid}",
        annotations=said | annotations,
        cpu_time=time or (None if cpus is None else time_of(cpus * 1000, cpus * 1000)),
        memory_bytes=memory_gib << 30 or None,
    )


def box(
    name: str,
    cpus: int,
    *,
    stage: Stage = RUNNING,
    found: str = "",
    mems: str = "",
    gpus: str | None = None,
    memory_gib: int = 0,
    time: CpuTime | None = None,
    sandbox: str = "s-a",
    id: str = "",  # noqa: A002
) -> RuntimeContainer:
    """A container of so many CPUs; one that was `found` on some has had its quota lifted."""
    plain = time_of(cpus * 1000, cpus * 1000)
    return RuntimeContainer(
        id=id or f"{sandbox}-{name}",
        pod_id=sandbox,
        name=name,
        stage=stage,
        annotations={} if gpus is None else {GPUS_KEY: gpus},
        cpu_time=time or (replace(plain, quota_us=-1) if found else plain),
        memory_bytes=memory_gib << 30 or None,
        cpus=Bitmap.parse_list(found),
        mems=Bitmap.parse_list(mems),
    )


def kubernetes(
    *containers: ContainerDemand,
    uid: str = "a",
    pin: str | None = "required",
    annotations: Mapping[str, str] | None = None,
) -> dict[str, object]:
    """A pod as Kubernetes has it."""
    parts: dict[str, list[object]] = {"initContainers": [], "containers": []}
    for one in containers:
        always = {"restartPolicy": "Always"} if one.role is SIDECAR else {}
        amount = {"cpu": one.cpus, GPU_RESOURCE: one.gpus}
        memory = {"memory": one.memory_bytes} if one.memory_bytes else {}
        resources = {"requests": amount, "limits": amount | memory}
        part = "containers" if one.role is APP else "initContainers"
        parts[part].append({"name": one.name, "resources": resources} | always)
    said = annotations or ({PIN_KEY: pin} if pin is not None else {})
    metadata = {"namespace": "ns", "name": uid, "uid": uid, "annotations": said}
    return {"metadata": metadata, "spec": parts}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A pod, its containers in order of creation, and the fact that they make; None for none.

    `devices` are what kubelet lists for the pod. `pinned` are CPUs and memory nodes.
    """

    pod: RuntimePod
    containers: tuple[RuntimeContainer, ...] = ()
    devices: Mapping[str, tuple[str, ...]] | None = None
    spec: object = None
    asked: tuple[ContainerDemand, ...] | None = None
    invalid: str = ""
    """Part of the reason."""
    given: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    pinned: Mapping[str, tuple[str, str]] = field(default_factory=dict)


def read_case(case: Case) -> tuple[PodFact, ...]:
    held = [] if case.devices is None else [Holding(pod=case.pod.pod, devices=case.devices)]
    specs = {} if case.spec is None else {case.pod.uid: case.spec}
    return read_facts([case.pod], case.containers, held, specs, KEYS)


def check_case(case: Case) -> None:
    facts = read_case(case)
    if case.asked is None and not case.invalid:
        assert facts == ()
        return
    (fact,) = facts
    assert (fact.demand.uid, fact.demand.pod) == (case.pod.uid, case.pod.pod)
    if isinstance(fact.demand, Invalid):
        assert case.invalid
        assert case.invalid in fact.demand.reason
    else:
        assert fact.demand.containers == case.asked
    assert fact.given == case.given
    pins = {name: (str(pin.cpus), str(pin.mems)) for name, pin in fact.pinned.items()}
    assert pins == case.pinned


FOUR = sandbox(4)
LOOSE = sandbox(4, pin=None)

STILL_TO_COME = {
    "a sandbox alone: all of its CPUs are held": Case(pod=FOUR, asked=(asks(REST, cpus=4),)),
    "a sandbox alone that is not to be pinned: nothing": Case(pod=LOOSE),
    "a sandbox alone with an annotation that is no value: held, and not pinned": Case(
        pod=sandbox(4, pin="preferred"), asked=(asks(REST, cpus=4),)
    ),
    "a sandbox alone with an empty annotation: nothing": Case(pod=sandbox(4, pin="")),
    "a sandbox alone without CPUs: nothing": Case(pod=sandbox(0)),
    "a sandbox alone whose total is not told: nothing": Case(pod=sandbox(None)),
    "a sandbox alone with a fraction of a CPU: nothing": Case(
        pod=sandbox(time=time_of(1500, 1500))
    ),
    "a sandbox alone whose limit is more than its request: nothing": Case(
        pod=sandbox(time=time_of(2000, 4000))
    ),
    "a sandbox alone whose quota is lifted: nothing": Case(
        pod=sandbox(time=replace(time_of(4000, 4000), quota_us=-1))
    ),
    "a sandbox alone of 300 CPUs": Case(pod=sandbox(300), asked=(asks(REST, cpus=300),)),
    "the first container is being created: the others' are held": Case(
        pod=FOUR,
        containers=(box("one", 1, stage=CREATING),),
        asked=(asks("one", cpus=1), asks(REST, cpus=3)),
    ),
    "all containers are there: nothing is held beyond": Case(
        pod=FOUR,
        containers=(box("one", 1), box("two", 3, stage=CREATED)),
        asked=(asks("one", cpus=1), asks("two", cpus=3)),
    ),
    "more is there than the sandbox was made for, after a resize: nothing is held beyond": Case(
        pod=FOUR,
        containers=(box("one", 3), box("two", 3)),
        asked=(asks("one", cpus=3), asks("two", cpus=3)),
    ),
    "the total is not told: only what is there": Case(
        pod=sandbox(None), containers=(box("one", 1),), asked=(asks("one", cpus=1),)
    ),
    "a pod that is not to be pinned: only what is there": Case(
        pod=LOOSE, containers=(box("one", 1),), asked=(asks("one", cpus=1),)
    ),
    "a container without whole CPUs: invalid, and what runs pinned is told": Case(
        pod=FOUR,
        containers=(
            box("one", 2, found="2-3"),
            box("two", 0, stage=CREATING, time=time_of(1500, 2000)),
        ),
        invalid='container "two": the request of cpu is "1500m" and its limit "2000m"',
        pinned={"one": ("2-3", "")},
    ),
    "two halves of a CPU that make a whole: invalid": Case(
        pod=sandbox(1),
        containers=(box("one", 0, stage=CREATING, time=time_of(500, 500)),),
        invalid='container "one"',
    ),
}

COMING_AND_GOING = {
    f"a container that is {stage} and pinned": Case(
        pod=FOUR,
        containers=(box("one", 4, stage=stage, found="2-5", mems="0"),),
        asked=(asks("one", cpus=4),),
        pinned={"one": ("2-5", "0")},
    )
    for stage in (CREATING, CREATED, RUNNING)
} | {
    "one that is pinned and one that is not yet": Case(
        pod=FOUR,
        containers=(box("one", 2, found="2-3"), box("two", 2, stage=CREATING)),
        asked=(asks("one", cpus=2), asks("two", cpus=2)),
        pinned={"one": ("2-3", "")},
    ),
    "one that has stopped: its CPUs are held, and it has no pin": Case(
        pod=FOUR,
        containers=(box("one", 1, found="2"), box("two", 3, stage=STOPPED, found="4-6")),
        asked=(asks("one", cpus=1), asks(REST, cpus=3)),
        pinned={"one": ("2", "")},
    ),
    "all have stopped": Case(
        pod=FOUR,
        containers=(box("one", 4, stage=STOPPED, found="2-5"),),
        asked=(asks(REST, cpus=4),),
    ),
    "one that is started anew: the new one counts": Case(
        pod=FOUR,
        containers=(
            box("one", 4, stage=STOPPED, found="2-5"),
            box("one", 4, stage=CREATING, id="new"),
        ),
        asked=(asks("one", cpus=4),),
    ),
    "one that was started anew and runs: its own pin counts": Case(
        pod=FOUR,
        containers=(
            box("one", 4, stage=STOPPED, found="2-5"),
            box("one", 4, stage=STOPPED, found="3-6", id="second"),
            box("one", 4, found="4-7", id="third"),
        ),
        asked=(asks("one", cpus=4),),
        pinned={"one": ("4-7", "")},
    ),
    "an init container: what the pod has beyond it is held": Case(
        pod=FOUR,
        containers=(box("init", 1, found="2"),),
        asked=(asks("init", cpus=1), asks(REST, cpus=3)),
        pinned={"init": ("2", "")},
    ),
    "an init container that is over: what it had is its pod's": Case(
        pod=FOUR,
        containers=(
            box("init", 4, stage=STOPPED, found="2-5"),
            box("main", 4, stage=CREATING),
        ),
        asked=(asks("main", cpus=4),),
    ),
    "an init container that is over, and was more than all that follow: the rest is held": Case(
        pod=FOUR,
        containers=(box("init", 4, stage=STOPPED), box("main", 3, stage=CREATING)),
        asked=(asks("main", cpus=3), asks(REST, cpus=1)),
    ),
    "the total is not told: what has stopped is held to be started anew": Case(
        pod=sandbox(None),
        containers=(box("one", 1), box("two", 3, stage=STOPPED, found="4-6")),
        asked=(asks("one", cpus=1), asks(REST, cpus=3)),
    ),
    "the total is not told: what was started anew is held once": Case(
        pod=sandbox(None),
        containers=(
            box("one", 3, stage=STOPPED, id="first"),
            box("one", 3, stage=STOPPED, id="second"),
            box("one", 3, id="third"),
        ),
        asked=(asks("one", cpus=3),),
    ),
    "a pod that is not to be pinned: what is found on it is no pin of ours": Case(
        pod=LOOSE, containers=(box("one", 4, found="2-5"),), asked=(asks("one", cpus=4),)
    ),
    "a pod that its scheduler pinned: what is found on it is": Case(
        pod=sandbox(4, pin=None, cpuset='{"one":{"0":{"elems":{"2":{},"3":{}}}}}'),
        containers=(box("one", 4, found="2-3"),),
        asked=(asks("one", cpus=4),),
        pinned={"one": ("2-3", "")},
    ),
}

MEMORY = {
    "a sandbox alone": Case(
        pod=sandbox(4, memory_gib=8), asked=(asks(REST, cpus=4, memory_gib=8),)
    ),
    "a sandbox alone without a limit": Case(pod=FOUR, asked=(asks(REST, cpus=4),)),
    "what the others have is held": Case(
        pod=sandbox(4, memory_gib=8),
        containers=(box("one", 1, memory_gib=3),),
        asked=(asks("one", cpus=1, memory_gib=3), asks(REST, cpus=3, memory_gib=5)),
    ),
    "none is left: what is to come has a limit all the same": Case(
        pod=sandbox(4, memory_gib=8),
        containers=(box("one", 1, memory_gib=8),),
        asked=(
            asks("one", cpus=1, memory_gib=8),
            replace(asks(REST, cpus=3), memory_bytes=1),
        ),
    ),
    "one without a limit beside one with": Case(
        pod=sandbox(4, memory_gib=8),
        containers=(box("one", 1), box("two", 1, memory_gib=3)),
        asked=(
            asks("one", cpus=1),
            asks("two", cpus=1, memory_gib=3),
            asks(REST, cpus=2, memory_gib=8),
        ),
    ),
    "the total is not told: what has stopped had a limit": Case(
        pod=sandbox(None),
        containers=(box("one", 1, memory_gib=3), box("two", 2, memory_gib=5, stage=STOPPED)),
        asked=(asks("one", cpus=1, memory_gib=3), asks(REST, cpus=2, memory_gib=5)),
    ),
    "the total is not told: what has stopped had none": Case(
        pod=sandbox(None),
        containers=(box("one", 1, memory_gib=3), box("two", 2, stage=STOPPED)),
        asked=(asks("one", cpus=1, memory_gib=3), asks(REST, cpus=2)),
    ),
}

GPUS = {
    "kubelet lists them before any container is there": Case(
        pod=sandbox(4),
        devices={"main": ("dev-1", "dev-0")},
        asked=(asks(REST, cpus=4, gpus=2),),
        given={REST: ("GPU-1", "GPU-0")},
    ),
    "of a pod that is not to be pinned": Case(
        pod=LOOSE,
        devices={"main": ("dev-1",)},
        asked=(asks(REST, gpus=1),),
        given={REST: ("GPU-1",)},
    ),
    "of a pod whose total is not told": Case(
        pod=sandbox(None, pin=None),
        devices={"main": ("dev-1",)},
        asked=(asks(REST, gpus=1),),
        given={REST: ("GPU-1",)},
    ),
    "Allocate wrote them on the container": Case(
        pod=FOUR,
        containers=(box("main", 4, stage=CREATING, gpus="GPU-2,GPU-3"),),
        asked=(asks("main", cpus=4, gpus=2),),
        given={"main": ("GPU-2", "GPU-3")},
    ),
    "kubelet lists others than Allocate wrote: those written count": Case(
        pod=FOUR,
        containers=(box("main", 4, stage=CREATING, gpus="GPU-2"),),
        devices={"main": ("dev-5", "dev-6")},
        asked=(asks("main", cpus=4, gpus=1),),
        given={"main": ("GPU-2",)},
    ),
    "kubelet lists those of a container that has none written on it": Case(
        pod=FOUR,
        containers=(box("main", 4, stage=CREATING),),
        devices={"main": ("dev-5",)},
        asked=(asks("main", cpus=4, gpus=1),),
        given={"main": ("GPU-5",)},
    ),
    "nothing is written": Case(
        pod=FOUR,
        containers=(box("main", 4, stage=CREATING, gpus=""),),
        asked=(asks("main", cpus=4),),
    ),
    "one is written twice": Case(
        pod=FOUR,
        containers=(box("main", 4, gpus="GPU-2,GPU-2"),),
        asked=(asks("main", cpus=4, gpus=1),),
        given={"main": ("GPU-2",)},
    ),
    "kubelet lists a device that the machine does not have: it is its own key": Case(
        pod=FOUR,
        containers=(box("main", 4),),
        devices={"main": ("gone",)},
        asked=(asks("main", cpus=4, gpus=1),),
        given={"main": ("gone",)},
    ),
    "those of containers that are not there are held together": Case(
        pod=sandbox(6),
        containers=(box("one", 2, gpus="GPU-0"), box("two", 2, stage=STOPPED, gpus="GPU-1")),
        devices={"one": ("dev-0",), "two": ("dev-1",), "three": ("dev-3", "dev-2")},
        asked=(asks("one", cpus=2, gpus=1), asks(REST, cpus=4, gpus=3)),
        given={"one": ("GPU-0",), REST: ("GPU-1", "GPU-3", "GPU-2")},
    ),
    "a container is started anew: its are still its own": Case(
        pod=FOUR,
        containers=(
            box("main", 4, stage=STOPPED, gpus="GPU-1"),
            box("main", 4, stage=CREATING, gpus="GPU-1", id="new"),
        ),
        asked=(asks("main", cpus=4, gpus=1),),
        given={"main": ("GPU-1",)},
    ),
    "an init container runs: an app that will have the same is no second holder": Case(
        pod=FOUR,
        containers=(box("init", 3, gpus="GPU-0"),),
        devices={"init": ("dev-0",), "main": ("dev-0", "dev-1")},
        asked=(asks("init", cpus=3, gpus=1), asks(REST, cpus=1, gpus=1)),
        given={"init": ("GPU-0",), REST: ("GPU-1",)},
    ),
    "an init container is over: they are held once for the app": Case(
        pod=FOUR,
        containers=(box("init", 3, stage=STOPPED, gpus="GPU-0"),),
        devices={"init": ("dev-0",), "main": ("dev-0", "dev-1")},
        asked=(asks(REST, cpus=4, gpus=2),),
        given={REST: ("GPU-0", "GPU-1")},
    ),
    "an init container is over: the app has them now": Case(
        pod=FOUR,
        containers=(box("init", 3, stage=STOPPED, gpus="GPU-0"), box("main", 4, gpus="GPU-0")),
        devices={"init": ("dev-0",), "main": ("dev-0",)},
        asked=(asks("main", cpus=4, gpus=1),),
        given={"main": ("GPU-0",)},
    ),
    "an init container had more than the app: kubelet keeps the others for the pod": Case(
        pod=LOOSE,
        containers=(
            box("init", 3, stage=STOPPED, gpus="GPU-0,GPU-1"),
            box("main", 4, gpus="GPU-1"),
        ),
        asked=(asks("main", cpus=4, gpus=1), asks(REST, gpus=1)),
        given={"main": ("GPU-1",), REST: ("GPU-0",)},
    ),
}

WRITTEN = (
    asks("side", SIDECAR, cpus=1),
    asks("init", INIT, cpus=2, gpus=1, memory_gib=1),
    asks("main", cpus=2, gpus=1, memory_gib=2),
)
KNOWN = {
    "a sandbox alone: all containers are asked for by name": Case(
        pod=sandbox(3), spec=kubernetes(*WRITTEN), asked=WRITTEN
    ),
    "a pod that asks for nothing": Case(
        pod=LOOSE, spec=kubernetes(asks("main"), pin=None), asked=(asks("main"),)
    ),
    "what the runtime shows of amounts and annotations does not count": Case(
        pod=sandbox(9, pin=None, memory_gib=9),
        containers=(box("side", 7, stage=CREATING, memory_gib=7),),
        spec=kubernetes(*WRITTEN),
        asked=WRITTEN,
    ),
    "a container that the specification does not have, such as a debugger": Case(
        pod=sandbox(3),
        containers=(box("main", 2, found="2-3"), box("debugger", 0, stage=CREATING)),
        spec=kubernetes(*WRITTEN),
        asked=WRITTEN,
        pinned={"main": ("2-3", "")},
    ),
    "pins are those of containers that are there and have one": Case(
        pod=sandbox(3),
        containers=(
            box("side", 1, found="2", mems="0"),
            box("init", 2, stage=STOPPED, found="3-4"),
            box("main", 2, stage=CREATING),
        ),
        spec=kubernetes(*WRITTEN),
        asked=WRITTEN,
        pinned={"side": ("2", "0")},
    ),
    "what is found on a pod that is not to be pinned is no pin of ours": Case(
        pod=sandbox(3, pin=None),
        containers=(box("main", 2, found="2-3"),),
        spec=kubernetes(*WRITTEN, pin=None),
        asked=WRITTEN,
    ),
    "GPUs stay with the containers that kubelet names": Case(
        pod=sandbox(3),
        containers=(box("init", 2, stage=STOPPED, gpus="GPU-0"),),
        devices={"main": ("dev-0",)},
        spec=kubernetes(*WRITTEN),
        asked=WRITTEN,
        given={"init": ("GPU-0",), "main": ("GPU-0",)},
    ),
    "it is invalid": Case(
        pod=sandbox(3),
        containers=(box("main", 2, found="2-3", gpus="GPU-1"),),
        spec=kubernetes(asks("main", cpus=2), asks("side")),
        invalid='container "side"',
        given={"main": ("GPU-1",)},
        pinned={"main": ("2-3", "")},
    ),
}

CASES = {
    f"{subject}: {name}": case
    for subject, cases in (
        ("still to come", STILL_TO_COME),
        ("coming and going", COMING_AND_GOING),
        ("memory", MEMORY),
        ("GPUs", GPUS),
        ("the specification is known", KNOWN),
    )
    for name, case in cases.items()
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_fact_of_a_pod(case: Case) -> None:
    check_case(case)


def test_an_empty_item_is_no_gpu() -> None:
    written = Case(
        pod=FOUR,
        containers=(box("main", 4, gpus=",GPU-0,"),),
        asked=(asks("main", cpus=4, gpus=1),),
        given={"main": ("GPU-0",)},
    )
    check_case(written)


# --- many pods ------------------------------------------------------------------------------------


def test_a_fact_for_each_pod_that_has_one_in_their_order() -> None:
    pods = [sandbox(2, uid="c"), sandbox(2, uid="b", pin=None), sandbox(2, uid="a")]
    containers = [box("main", 2, sandbox="s-a"), box("other", 2, sandbox="s-b")]
    facts = read_facts(pods, containers)
    asked = {
        fact.demand.uid: fact.demand.containers[0].name
        for fact in facts
        if isinstance(fact.demand, Demand)
    }
    assert list(asked.items()) == [("c", REST), ("b", "other"), ("a", "main")]
    assert [fact.demand.uid for fact in read_facts(pods, containers[:1])] == ["c", "a"]


def test_a_container_of_an_unknown_sandbox_is_nobodys() -> None:
    (fact,) = read_facts([FOUR], [box("one", 1), box("two", 1, sandbox="strange")])
    assert isinstance(fact.demand, Demand)
    assert fact.demand.containers == (asks("one", cpus=1), asks(REST, cpus=3))


def test_of_two_sandboxes_with_one_id_the_last_counts() -> None:
    (fact,) = read_facts([sandbox(2, uid="b", id="s-a"), FOUR], [box("one", 1), box("one", 3)])
    assert isinstance(fact.demand, Demand)
    assert (fact.demand.uid, fact.demand.pod) == ("a", "ns/a")
    assert fact.demand.containers == (asks("one", cpus=3), asks(REST, cpus=1))


LATER = {"main": ("dev-0", "dev-1"), "more": ("dev-2",)}
"""What kubelet lists of pod b, which has no sandbox: not yet, or not any more."""


def held_without_sandbox(
    written: str = "", spec: dict[str, object] | None = None
) -> PodFact | None:
    """The fact of b beside that of a, which runs with the GPUs `written` on its container."""
    box_a = box("main", 2, sandbox="s-a", gpus=written or None)
    facts = read_facts(
        [sandbox(2, uid="a")],
        [box_a],
        [Holding(pod="ns/b", devices=LATER)],
        {"b": spec} if spec else {},
        KEYS,
    )
    return next((fact for fact in facts if fact.demand.pod == "ns/b"), None)


@pytest.mark.parametrize(
    ("written", "given"),
    [
        pytest.param("", {"main": ("GPU-0", "GPU-1"), "more": ("GPU-2",)}, id="nobody has them"),
        pytest.param("GPU-1", {"main": ("GPU-0",), "more": ("GPU-2",)}, id="another has one now"),
        pytest.param("GPU-2", {"main": ("GPU-0", "GPU-1"), "more": ()}, id="one container's"),
        pytest.param("GPU-0,GPU-1,GPU-2", None, id="others have all of them now"),
    ],
)
def test_what_runs_knows_better_than_kubelets_list_who_has_a_gpu(
    written: str, given: dict[str, tuple[str, ...]] | None
) -> None:
    fact = held_without_sandbox(written)
    assert (fact and dict(fact.given)) == given


def test_a_pod_without_sandbox_asks_what_its_specification_says() -> None:
    spec = kubernetes(asks("main", cpus=2, gpus=2), asks("more", cpus=1, gpus=1), uid="b")
    fact = held_without_sandbox(spec=spec)
    assert fact is not None
    assert fact.demand == read_demand(spec)


@pytest.mark.parametrize(
    "leaving",
    [
        pytest.param({"status": {"phase": "Succeeded"}}, id="it has ended"),
        pytest.param(
            {"metadata": {"deletionTimestamp": "2026-11-30T14:00:00Z"}}, id="it is to end"
        ),
    ],
)
def test_a_pod_without_sandbox_that_leaves_asks_for_nothing_but_what_it_has(
    leaving: dict[str, dict[str, object]],
) -> None:
    spec = kubernetes(asks("main", cpus=2, gpus=2), asks("more", cpus=1, gpus=1), uid="b")
    for part, more in leaving.items():
        before = spec.get(part, {})
        assert isinstance(before, dict)
        spec[part] = before | more
    fact = held_without_sandbox(spec=spec)
    assert fact is not None
    assert isinstance(fact.demand, Demand)
    assert (fact.demand.uid, fact.demand.pinned, fact.demand.cpus) == ("b", False, 0)


def test_each_pod_has_its_own_specification_and_devices() -> None:
    pods = [sandbox(2, uid="a"), sandbox(2, uid="b")]
    facts = read_facts(
        pods,
        [box("main", 2, sandbox=pod.id) for pod in pods],
        [Holding(pod="ns/b", devices={"main": ("dev-1",)})],
        {"a": kubernetes(asks("main", cpus=2), asks("more", cpus=1))},
        KEYS,
    )
    assert [fact.given for fact in facts] == [{}, {"main": ("GPU-1",)}]
    asked = [fact.demand.containers for fact in facts if isinstance(fact.demand, Demand)]
    assert asked == [
        (asks("main", cpus=2), asks("more", cpus=1)),
        (asks("main", cpus=2, gpus=1),),
    ]


def test_who_holds_devices_and_is_not_in_the_runtime_comes_last() -> None:
    holdings = [
        Holding(pod="ns/gone", devices={"main": ("dev-1",)}),
        Holding(pod="ns/a", devices={"main": ("dev-0",)}),
    ]
    mine, other = read_facts([FOUR], [box("main", 4)], holdings, {}, KEYS)
    assert (mine.demand.uid, mine.given) == ("a", {"main": ("GPU-0",)})
    assert (other.demand.uid, other.given) == ("ns/gone", {"main": ("GPU-1",)})


SPEC = kubernetes(asks("main", cpus=4))
MAIN = box("main", 4, stage=CREATING)
GIVEN = Holding(pod="ns/a", devices={"main": ("dev-1",)})
NEWS: dict[str, dict[str, Any]] = {
    "another container": {"containers": [MAIN, box("more", 1)]},
    "a container in another stage": {"containers": [replace(MAIN, stage=STOPPED)]},
    "a pin on a container": {"containers": [box("main", 4, found="2-5")]},
    "no container": {"containers": []},
    "a sandbox that was updated": {"pods": [sandbox(8)]},
    "other devices": {"holdings": [Holding(pod="ns/a", devices={"main": ("dev-2",)})]},
    "no devices": {"holdings": []},
    "other keys of the same devices": {"keys": {"dev-1": "GPU-9"}},
    "a specification": {"specs": {"a": SPEC}},
}


@pytest.mark.parametrize("news", NEWS.values(), ids=NEWS)
def test_a_fact_is_remembered_until_there_is(news: dict[str, Any]) -> None:
    told: dict[str, Any] = {"pods": [FOUR], "containers": [MAIN], "holdings": [GIVEN]}
    told["keys"] = KEYS
    memory: Memory = {}
    (first,) = read_facts(**told, memory=memory)
    (again,) = read_facts(**told, memory=memory)
    assert again is first
    after = read_facts(**(told | news), memory=memory)
    assert after == read_facts(**(told | news))
    assert after != (first,)
    assert read_facts(**told, memory=memory) == (first,)


def test_nothing_is_remembered_of_pods_that_are_gone() -> None:
    memory: Memory = {}
    read_facts([FOUR, sandbox(uid="b", pin=None)], [MAIN], memory=memory)
    assert memory.keys() == {"s-a", "s-b"}
    assert read_facts([], [MAIN], memory=memory) == ()
    assert not memory


def test_what_is_remembered_follows_a_namesake() -> None:
    """Kubelet lists the GPUs of both by their name: a's are those that b does not have."""
    old, new = sandbox(2, uid="a", name="ns/x"), sandbox(2, uid="b", name="ns/x")
    kept = box("main", 2, stage=STOPPED, gpus="GPU-0")
    again = box("main", 2, stage=CREATING, gpus="GPU-0", sandbox="s-b")
    held = [Holding(pod="ns/x", devices={"main": ("dev-0",)})]
    memory: Memory = {}
    for pods_now, containers in (
        ([old], [kept]),
        ([old, new], [kept, again]),
        ([old], [kept]),
    ):
        facts = read_facts(pods_now, containers, held, {}, KEYS, memory)
        assert facts == read_facts(pods_now, containers, held, {}, KEYS)


texts = st.text(max_size=12) | st.sampled_from(["", REST, "a", "main", "ns/a", "x" * 300, "\ud800"])
numbers = st.none() | st.integers(-(2**63), 2**63)
times = st.builds(CpuTime, shares=numbers, quota_us=numbers, period_us=numbers)
said = st.dictionaries(
    st.sampled_from([PIN_KEY, *SPEC_KEYS, GPUS_KEY, "cpuset"]),
    st.sampled_from(["required", "{}", '{"numaTopologyPolicy":"Restricted"}']) | texts,
)
stranger_pods = st.builds(
    RuntimePod,
    id=texts,
    uid=texts,
    pod=texts,
    annotations=said,
    cpu_time=st.none() | times,
    memory_bytes=numbers,
)
stranger_boxes = st.builds(
    RuntimeContainer,
    id=texts,
    pod_id=texts,
    name=texts,
    stage=st.sampled_from(Stage),
    annotations=said,
    cpu_time=times,
    memory_bytes=numbers,
    cpus=st.sampled_from([EMPTY, Bitmap([2, 3]), Bitmap([1023])]),
    mems=st.sampled_from([EMPTY, Bitmap([0])]),
)
stranger_holdings = st.builds(
    Holding, pod=texts, devices=st.dictionaries(texts, st.lists(texts, max_size=2).map(tuple))
)


@given(
    st.lists(stranger_pods, max_size=3),
    st.lists(stranger_boxes, max_size=4),
    st.lists(stranger_holdings, max_size=2),
    st.dictionaries(texts, st.none() | texts | st.just({"spec": {}}), max_size=2),
)
@settings(deadline=None)
def test_strangers_texts_and_numbers_do_no_harm(
    pods: list[RuntimePod],
    containers: list[RuntimeContainer],
    holdings: list[Holding],
    specs: dict[str, object],
) -> None:
    facts = read_facts(pods, containers, holdings, specs, KEYS)
    assert len(facts) <= len(pods) + len(holdings)
    settlement = settle(TWO, Ledger(layout=lay_out(TWO), reserved=Bitmap([0, 1])), facts)
    assert {one.uid for one in settlement.ledger.grants} <= {fact.demand.uid for fact in facts}


# --- moments of nodes -----------------------------------------------------------------------------

# Node 0 has CPUs 0-7 and GPUs 0 and 1, node 1 has CPUs 8-15 and GPUs 2 and 3; the threads of a core
# are neighbours. CPUs 0-1 are reserved.
TWO = build((2, 4), (2, 4))


@dataclass(frozen=True, kw_only=True)
class Moment:
    """What there is when it is settled; `devices` are by pod and container. `restart`: the agent
    has forgotten all."""

    pods: tuple[RuntimePod, ...] = ()
    containers: tuple[RuntimeContainer, ...] = ()
    devices: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)
    specs: Mapping[str, object] = field(default_factory=dict)
    restart: bool = False


@dataclass(frozen=True, kw_only=True)
class Story:
    """Moments of a node, and what holds after the last: `cpus` of containers by uid and name, the
    number of CPUs and the GPUs that each pod holds, and who is refused."""

    moments: tuple[Moment, ...]
    cpus: Mapping[str, str] = field(default_factory=dict)
    held: Mapping[str, int]
    gpus: Mapping[str, str] = field(default_factory=dict)
    refused: tuple[str, ...] = ()


def settle_moments(moments: Iterable[Moment]) -> Settlement:
    empty = Ledger(layout=lay_out(TWO), reserved=Bitmap([0, 1]))
    ledger = empty
    for moment in moments:
        held = [Holding(pod=pod, devices=devices) for pod, devices in moment.devices.items()]
        facts = read_facts(moment.pods, moment.containers, held, moment.specs, KEYS)
        settlement = settle(TWO, empty if moment.restart else ledger, facts)
        ledger = settlement.ledger
    return settlement


def check_story(story: Story) -> None:
    settlement = settle_moments(story.moments)
    ledger = settlement.ledger
    assert tuple(one.uid for one in settlement.refused) == story.refused
    names = {f"{one.uid}/{one.container}": str(one.cpus) for one in ledger.grants if one.cpus}
    assert {name: names.get(name) for name in story.cpus} == story.cpus
    pods = {uid: ledger.of_pod(uid) for uid in ledger.pods}
    assert {uid: len({*_cpus(grants)}) for uid, grants in pods.items()} == story.held
    gpus = {uid: " ".join(sorted({*_gpus(grants)})) for uid, grants in pods.items()}
    assert {uid: keys for uid, keys in gpus.items() if keys} == story.gpus


def _cpus(grants: Iterable[Grant]) -> list[int]:
    return [cpu for one in grants for cpu in one.cpus]


def _gpus(grants: Iterable[Grant]) -> list[str]:
    return [gpu for one in grants for gpu in one.gpus]


B_FOUR = sandbox(4, uid="b")
A_TWELVE = sandbox(12, uid="a")
ONE, TWO_CREATING = box("one", 2, found="2-3"), box("two", 2, stage=CREATING)

CHOICE = json.dumps(
    {
        name: {"0": {"elems": {str(cpu): {} for cpu in cpus}}}
        for name, cpus in (("one", (4, 5)), ("two", (6, 7)))
    }
)
DECIDED = sandbox(4, cpuset=CHOICE)
ANEW = sandbox(4, id="anew")

STORIES = {
    "containers come one by one: each beside those that are there": Story(
        moments=(
            Moment(pods=(FOUR,)),
            Moment(pods=(FOUR,), containers=(box("one", 2, stage=CREATING),)),
            Moment(pods=(FOUR,), containers=(ONE, TWO_CREATING)),
        ),
        cpus={"a/one": "2-3", "a/two": "4-5"},
        held={"a": 4},
    ),
    "what is still to come is held against others": Story(
        moments=(
            Moment(pods=(FOUR,), containers=(ONE,)),
            Moment(pods=(FOUR, sandbox(10, uid="b")), containers=(ONE,)),
            Moment(pods=(FOUR, sandbox(10, uid="b")), containers=(ONE, TWO_CREATING)),
        ),
        cpus={"a/one": "2-3", "a/two": "4-5"},
        held={"a": 4, "b": 10},
    ),
    "an init container is over: the app runs where it ran": Story(
        moments=(
            Moment(pods=(FOUR,), containers=(box("init", 4, stage=CREATING),)),
            Moment(pods=(FOUR,), containers=(box("init", 4, stage=STOPPED, found="2-5"),)),
            Moment(
                pods=(FOUR,),
                containers=(
                    box("init", 4, stage=STOPPED, found="2-5"),
                    box("main", 4, stage=CREATING),
                ),
            ),
        ),
        cpus={"a/main": "2-5"},
        held={"a": 4},
    ),
    "a container is started anew: its CPUs were held, and the others' stay": Story(
        moments=(
            Moment(pods=(FOUR,), containers=(ONE, box("two", 2, found="4-5"))),
            Moment(
                pods=(FOUR, sandbox(2, uid="b")),
                containers=(
                    box("one", 2, found="2-3", stage=STOPPED),
                    box("two", 2, found="4-5"),
                ),
            ),
            Moment(
                pods=(FOUR, sandbox(2, uid="b")),
                containers=(
                    box("one", 2, found="2-3", stage=STOPPED),
                    box("two", 2, found="4-5"),
                    box("one", 2, stage=CREATING, id="new"),
                ),
            ),
        ),
        cpus={"a/one": "2-3", "a/two": "4-5"},
        held={"a": 4, "b": 2},
    ),
    "the agent starts anew while a container is away: what runs stays, the rest is held": Story(
        moments=(
            Moment(
                pods=(FOUR, sandbox(8, uid="b")),
                containers=(box("two", 2, found="4-5"),),
                restart=True,
            ),
        ),
        cpus={"a/two": "4-5", f"a/{REST}": "2-3"},
        held={"a": 4, "b": 8},
    ),
    "the agent starts anew after the pod's end: nothing is held": Story(
        moments=(Moment(pods=(FOUR,), containers=(ONE,)), Moment(restart=True)), held={}
    ),
    "all are gone: nothing is held": Story(
        moments=(Moment(pods=(FOUR, B_FOUR), containers=(ONE,)), Moment()), held={}
    ),
    "the specification becomes known: what runs stays, the rest has names": Story(
        moments=(
            Moment(pods=(FOUR,), containers=(ONE,)),
            Moment(
                pods=(FOUR,),
                containers=(ONE,),
                specs={"a": kubernetes(asks("one", cpus=2), asks("two", cpus=2))},
            ),
        ),
        cpus={"a/one": "2-3", "a/two": "4-5"},
        held={"a": 4},
    ),
    "the specification is forgotten: what runs stays, the rest is held": Story(
        moments=(
            Moment(
                pods=(FOUR,),
                containers=(ONE,),
                specs={"a": kubernetes(asks("one", cpus=2), asks("two", cpus=2))},
            ),
            Moment(pods=(FOUR,), containers=(ONE,)),
        ),
        cpus={"a/one": "2-3", f"a/{REST}": "4-5"},
        held={"a": 4},
    ),
    "on one node: what is still to come too": Story(
        moments=(
            Moment(pods=(sandbox(6, policy=SINGLE),), containers=(box("one", 2, found="8-9"),)),
            Moment(
                pods=(sandbox(6, policy=SINGLE), sandbox(4, uid="b", policy=SINGLE)),
                containers=(box("one", 2, found="8-9"),),
            ),
            Moment(
                pods=(sandbox(6, policy=SINGLE), sandbox(4, uid="b", policy=SINGLE)),
                containers=(box("one", 2, found="8-9"), box("two", 4, stage=CREATING)),
            ),
        ),
        cpus={"a/one": "8-9", "a/two": "10-13", f"b/{REST}": "2-5"},
        held={"a": 6, "b": 4},
    ),
    "a pod beside its GPUs, which kubelet lists before the first container": Story(
        moments=(
            Moment(pods=(FOUR,), devices={"ns/a": {"main": ("dev-2",)}}),
            Moment(
                pods=(FOUR,),
                containers=(box("main", 4, stage=CREATING, gpus="GPU-2"),),
                devices={"ns/a": {"main": ("dev-2",)}},
            ),
        ),
        cpus={"a/main": "8-11"},
        held={"a": 4},
        gpus={"a": "GPU-2"},
    ),
    "a container that runs is resized: it has the new size": Story(
        moments=(
            Moment(pods=(sandbox(2),), containers=(ONE,)),
            Moment(pods=(sandbox(2),), containers=(box("one", 4, found="2-3"),)),
        ),
        cpus={"a/one": "2-5"},
        held={"a": 4},
    ),
    "a container without whole CPUs comes: its pod is invalid and keeps what it runs on": Story(
        moments=(
            Moment(pods=(sandbox(2),), containers=(ONE,)),
            Moment(
                pods=(sandbox(2),),
                containers=(ONE, box("two", 0, time=time_of(500, 0), stage=CREATING)),
            ),
        ),
        cpus={"a/one": "2-3"},
        held={"a": 2},
        refused=("a",),
    ),
    "an init container has all CPUs, and an app will have a GPU": Story(
        moments=(
            Moment(
                pods=(FOUR,),
                containers=(box("init", 4, stage=CREATING),),
                devices={"ns/a": {"main": ("dev-0",)}},
            ),
        ),
        cpus={"a/init": "2-5"},
        held={"a": 4},
        gpus={"a": "GPU-0"},
    ),
    "an init container had a GPU that the app, which has all CPUs, has not": Story(
        moments=(
            Moment(
                pods=(FOUR,),
                containers=(
                    box("init", 4, stage=STOPPED, gpus="GPU-0,GPU-1"),
                    box("main", 4, stage=CREATING, gpus="GPU-1"),
                ),
            ),
        ),
        cpus={"a/main": "2-5"},
        held={"a": 4},
        gpus={"a": "GPU-0 GPU-1"},
    ),
    "the total is not told, and a container with a GPU is away": Story(
        moments=(
            Moment(
                pods=(sandbox(None),),
                containers=(ONE,),
                devices={"ns/a": {"main": ("dev-0",)}},
                restart=True,
            ),
        ),
        cpus={"a/one": "2-3"},
        held={"a": 2},
        gpus={"a": "GPU-0"},
    ),
    "somebody debugs a pod that runs": Story(
        moments=(
            Moment(pods=(sandbox(2),), containers=(ONE,)),
            Moment(pods=(sandbox(2),), containers=(ONE, box("debugger", 0, stage=CREATING))),
        ),
        cpus={"a/one": "2-3"},
        held={"a": 2},
    ),
    "a container has the name under which the rest is held": Story(
        moments=(Moment(pods=(FOUR,), containers=(box(REST, 1, stage=CREATING),)),),
        cpus={f"a/{REST}": "2"},
        held={"a": 4},
    ),
    "a scheduler chose CPUs for each container: the first": Story(
        moments=(Moment(pods=(DECIDED,), containers=(box("one", 2, stage=CREATING),)),),
        cpus={"a/one": "4-5"},
        held={"a": 4},
    ),
    "a scheduler chose CPUs for each container: the first, settled before too": Story(
        moments=(
            Moment(pods=(DECIDED,)),
            Moment(pods=(DECIDED,), containers=(box("one", 2, stage=CREATING),)),
        ),
        cpus={"a/one": "4-5"},
        held={"a": 4},
    ),
    "a scheduler chose CPUs for each container: the second": Story(
        moments=(
            Moment(pods=(DECIDED,), containers=(box("one", 2, found="4-5"),)),
            Moment(pods=(DECIDED,), containers=(box("one", 2, found="4-5"), TWO_CREATING)),
        ),
        cpus={"a/one": "4-5", "a/two": "6-7"},
        held={"a": 4},
    ),
    "one that waits does not get what a container still to come has": Story(
        moments=(
            Moment(pods=(B_FOUR,)),
            Moment(pods=(B_FOUR, A_TWELVE)),
            Moment(
                pods=(B_FOUR, A_TWELVE), containers=(box("one", 4, stage=CREATING, sandbox="s-b"),)
            ),
        ),
        cpus={"b/one": "2-5"},
        held={"b": 4},
        refused=("a",),
    ),
    "one that waits does not get what a container has that is started anew": Story(
        moments=(
            Moment(pods=(B_FOUR,), containers=(box("one", 4, found="2-5", sandbox="s-b"),)),
            Moment(
                pods=(B_FOUR, A_TWELVE),
                containers=(box("one", 4, found="2-5", stage=STOPPED, sandbox="s-b"),),
            ),
        ),
        held={"b": 4},
        refused=("a",),
    ),
    "one of one node keeps its CPUs while nothing of it runs, though one of two came": Story(
        moments=(
            Moment(pods=(sandbox(4, policy=SINGLE),), containers=(box("one", 4, found="2-5"),)),
            Moment(
                pods=(sandbox(4, policy=SINGLE), sandbox(10, uid="b")),
                containers=(box("one", 4, found="2-5"),),
            ),
            Moment(
                pods=(sandbox(4, policy=SINGLE), sandbox(10, uid="b")),
                containers=(box("one", 4, found="2-5", stage=STOPPED),),
            ),
        ),
        held={"a": 4, "b": 10},
    ),
    "Restricted without GPUs has CPUs of two nodes: the second container": Story(
        moments=(
            Moment(pods=(sandbox(12, policy=RESTRICTED),), containers=(ONE,)),
            Moment(
                pods=(sandbox(12, policy=RESTRICTED),),
                containers=(ONE, box("two", 10, stage=CREATING)),
            ),
        ),
        cpus={"a/one": "2-3", "a/two": "4-13"},
        held={"a": 12},
    ),
    "a pod has a new sandbox, and the old one is not removed yet": Story(
        moments=(
            Moment(
                pods=(ANEW, FOUR),
                containers=(
                    box("one", 4, stage=STOPPED, found="2-5"),
                    box("one", 4, found="2-5", sandbox="anew"),
                ),
            ),
        ),
        cpus={"a/one": "2-5"},
        held={"a": 4},
    ),
    "a pod of the same name follows, and the old one's sandbox is not removed yet": Story(
        moments=(
            Moment(
                pods=(sandbox(2, uid="a", name="ns/x"), sandbox(2, uid="b", name="ns/x")),
                containers=(
                    box("main", 2, stage=STOPPED, gpus="GPU-0"),
                    box("main", 2, stage=CREATING, gpus="GPU-0", sandbox="s-b"),
                ),
                devices={"ns/x": {"main": ("dev-0",)}},
            ),
        ),
        cpus={"b/main": "4-5"},
        held={"a": 2, "b": 2},
        gpus={"b": "GPU-0"},
    ),
}


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_what_is_held_after(story: Story) -> None:
    check_story(story)


# --- lives of nodes -------------------------------------------------------------------------------

NODES = [
    TWO,
    build((2, 6), (2, 6)),
    build((2, 3), (1, 2), (0, 4), seatless=1),
    build((1, 4), (1, 2), (1, 3), threads=1, faulty=[2]),
    build((0, 8)),
]


@dataclass(kw_only=True)
class Box:
    """A container as the runtime has it."""

    id: str
    asked: ContainerDemand
    stage: Stage = CREATING
    cpus: Bitmap = EMPTY
    mems: Bitmap = EMPTY


@dataclass(kw_only=True)
class Pod:
    """A pod on the node, as its user wrote it, as kubelet and the runtime have it.

    `chosen` are the CPUs that a scheduler chose for its containers, if one did. `devices` are those
    that kubelet gave it, `over` its init containers that have done their work. `known` is whether
    its specification is; `promised` is whether it had all that it asks for, and nothing has
    happened that could have cost it that.
    """

    uid: str
    pinned: bool
    policy: Policy | None
    exclusive: Exclusive
    containers: tuple[ContainerDemand, ...]
    known: bool
    chosen: Mapping[str, frozenset[int]] = field(default_factory=dict)
    devices: dict[str, tuple[str, ...]] = field(default_factory=dict)
    boxes: list[Box] = field(default_factory=list)
    over: set[str] = field(default_factory=set)
    promised: bool = False

    def most(self, amounts: Iterable[int]) -> int:
        """What Kubernetes takes for the whole pod, of these amounts of its containers.

        Source: KEP-753: all apps and sidecars, or an init container with the sidecars before it,
        whatever is more.
        """
        beside, peaks = 0, [0]
        for container, amount in zip(self.containers, amounts, strict=True):
            peaks.append(beside + amount)
            beside += 0 if container.role is INIT else amount
        return max(peaks)

    @property
    def cpus(self) -> int:
        return self.most(container.cpus for container in self.containers)

    def live(self) -> dict[str, Box]:
        return {box.asked.name: box for box in self.boxes if box.stage is not STOPPED}

    def next(self) -> ContainerDemand | None:
        """The container that kubelet creates next, for the first time or again: init containers one
        after the other, and apps when they are over."""
        live = self.live()
        for container in self.containers:
            if container.name not in live and container.name not in self.over:
                return container
            if container.role is INIT and container.name in live:
                return None
        return None

    def annotations(self) -> dict[str, str]:
        spec = {"numaTopologyPolicy": self.policy, "singleNUMANodeExclusive": self.exclusive}
        cpuset = {
            name: {"0": {"elems": {str(cpu): {} for cpu in cpus}}}
            for name, cpus in self.chosen.items()
        }
        return (
            {SPEC_KEYS[0]: json.dumps(spec)}
            | ({PIN_KEY: "required"} if self.pinned else {})
            | ({"cpuset": json.dumps(cpuset)} if cpuset else {})
        )


@st.composite
def pods(draw: st.DrawFn, uid: str, known: bool, gpus: int) -> Pod:
    """Pods of up to four containers with at most so many GPUs; most want to be pinned."""
    pinned = draw(st.integers(0, 3)) > 0
    roles = draw(st.lists(st.sampled_from([INIT, SIDECAR]), max_size=2))
    roles += [APP] * draw(st.integers(1, 2))
    containers = []
    for at, role in enumerate(roles):
        count = min(gpus, draw(st.sampled_from([0, 0, 0, 1, 2])))
        gpus -= count
        cpus = draw(st.integers(1 if pinned else 0, 3))
        memory = draw(st.sampled_from([1, 1, 1, 40, None]))
        containers.append(asks(f"c{at}", role, gpus=count, cpus=cpus, memory_gib=memory))
    chosen: dict[str, frozenset[int]] = {}
    if pinned and not draw(st.integers(0, 4)):
        cpus_of = {
            one.name: st.sets(st.integers(0, 11), min_size=one.cpus, max_size=one.cpus)
            for one in containers
        }
        chosen = {name: frozenset(draw(cpus)) for name, cpus in cpus_of.items()}
    return Pod(
        uid=uid,
        pinned=pinned,
        chosen=chosen,
        policy=draw(st.sampled_from([None, BEST_EFFORT] if chosen else [None, *Policy])),
        exclusive=draw(st.sampled_from(Exclusive)),
        containers=tuple(containers),
        known=known,
    )


NEVER, ALWAYS, BY_AND_BY = "never", "always", "by and by"


class Life(RuleBasedStateMachine):
    """A node with kubelet, a container runtime and the agent, which settles whenever one of them
    does something, may be away for a while, and forgets all when it starts anew.

    Kubelet gives a pod its GPUs when it admits it, those of init containers again to later ones;
    then it creates its containers one by one. What the agent refuses is not created, or, on some
    nodes, created without a pin.

    `knows` is when the agent knows specifications.
    """

    knows: tuple[str, ...] = (NEVER, BY_AND_BY)

    @initialize(
        data=st.data(),
        machine=st.sampled_from(NODES) | random_machines(most_nodes=3, most_gpus=3),
        reserved=st.integers(0, 2),
        totals=st.integers(0, 3),
        warn=st.booleans(),
        period_us=st.sampled_from([100_000, 5_000]),
    )
    def boot(
        self,
        data: st.DataObject,
        machine: Machine,
        reserved: int,
        totals: int,
        warn: bool,
        period_us: int,
    ) -> None:
        self.machine, self.warn, self.period_us = machine, warn, period_us
        self.known = data.draw(st.sampled_from(self.knows))
        self.totals = totals > 0
        self.reserved = Bitmap(sorted(machine.cpus)[:reserved])
        self.keys = {f"dev-{at}": key(gpu) for at, gpu in enumerate(machine.gpus)}
        self.node_of = {f"dev-{at}": gpu.node for at, gpu in enumerate(machine.gpus)}
        self.pods: dict[str, Pod] = {}
        self.shown: dict[str, RuntimePod | RuntimeContainer] = {}
        self.specs: dict[str, dict[str, object]] = {}
        self.count = self.reads = 0
        self.start_agent()
        for near in range(data.draw(st.integers(1, 3))):
            self.admit(data, data.draw(st.integers(0, 9)), near)
        self.go_on(data, 8)

    # What kubelet and the runtime do.

    @rule(data=st.data(), first=st.integers(0, 9), near=st.integers(0, 60), steps=st.integers(0, 8))
    @precondition(lambda self: len(self.pods) < 5)
    def arrive(self, data: st.DataObject, first: int, near: int, steps: int) -> None:
        self.admit(data, first, near)
        self.go_on(data, steps)

    def admit(self, data: st.DataObject, first: int, near: int) -> None:
        """Kubelet takes a pod; the first sign of its uid says where it is in order."""
        self.count += 1
        uid = f"{first}-{self.count}"
        free = self.free_devices(near)
        pod = data.draw(pods(uid, self.known == ALWAYS, len(free)))
        reusable: list[str] = []
        for container in pod.containers:
            taken = [*reusable, *(one for one in free if one not in reusable)][: container.gpus]
            free = [one for one in free if one not in taken]
            reusable = [one for one in reusable if one not in taken]
            reusable += taken if container.role is INIT else []
            if taken:
                pod.devices[container.name] = tuple(taken)
        self.pods[uid] = pod
        self.may_settle(data)

    def free_devices(self, near: int) -> list[str]:
        """Those that kubelet has given to nobody, one node's first."""
        given = {one for pod in self.pods.values() for some in pod.devices.values() for one in some}
        sound = [
            name for name, gpu in zip(self.keys, self.machine.gpus, strict=True) if not gpu.fault
        ]
        free = [name for name in sound if name not in given]
        return sorted(free, key=lambda name: abs((self.node_of[name] or 0) - near))

    @rule(data=st.data(), steps=st.integers(1, 8))
    @precondition(lambda self: self.pods)
    def go_on(self, data: st.DataObject, steps: int) -> None:
        """Kubelet creates containers, init containers do their work."""
        for _ in range(steps):
            ready = sorted(uid for uid, pod in self.pods.items() if pod.next())
            busy = [box for box in self.boxes(RUNNING) if box.asked.role is INIT]
            if ready and (not busy or data.draw(st.booleans())):
                self.create(self.pods[data.draw(st.sampled_from(ready))])
            elif busy:
                self.end(data, data.draw(st.sampled_from(busy)), well=True)
            if data.draw(st.booleans()):
                for box in self.boxes(CREATED):
                    box.stage = RUNNING

    def create(self, pod: Pod) -> None:
        self.count += 1
        asked = pod.next()
        assert asked
        box = Box(id=f"box-{self.count}", asked=asked)
        pod.boxes.append(box)
        if self.up:
            self.settle()
            if pod.pinned and not box.cpus and not self.warn:
                pod.boxes.remove(box)
                self.settle()
        box.stage = CREATED

    @rule(data=st.data(), well=st.booleans())
    @precondition(lambda self: self.boxes(CREATED, RUNNING))
    def stop(self, data: st.DataObject, well: bool) -> None:
        self.end(data, data.draw(st.sampled_from(self.boxes(CREATED, RUNNING))), well)

    def end(self, data: st.DataObject, box: Box, well: bool) -> None:
        box.stage = STOPPED
        (pod,) = (pod for pod in self.pods.values() if box in pod.boxes)
        if well and box.asked.role is INIT:
            pod.over.add(box.asked.name)
        self.may_settle(data)

    @rule()
    @precondition(lambda self: self.boxes(STOPPED))
    def collect(self) -> None:
        """The runtime forgets what has stopped."""
        for pod in self.pods.values():
            pod.boxes = list(pod.live().values())
        self.settle()

    @rule(data=st.data(), all_of_them=st.integers(0, 5))
    @precondition(lambda self: self.pods)
    def leave(self, data: st.DataObject, all_of_them: int) -> None:
        leaving = (
            sorted(self.pods)
            if not all_of_them
            else [data.draw(st.sampled_from(sorted(self.pods)))]
        )
        for uid in leaving:
            for box in self.pods[uid].boxes:
                box.stage = STOPPED
                self.may_settle(data)
            del self.pods[uid]
        self.settle()

    # What becomes of the agent, and of what it knows.

    @rule()
    def agent_starts_anew(self) -> None:
        self.start_agent()

    @rule()
    @precondition(lambda self: self.pods and self.up)
    def agent_is_killed(self) -> None:
        self.up = False

    @rule()
    @precondition(lambda self: not self.up)
    def agent_is_back(self) -> None:
        self.start_agent()

    @rule(data=st.data())
    @precondition(lambda self: self.pods and self.known == BY_AND_BY)
    def specification_is_learnt_or_forgotten(self, data: st.DataObject) -> None:
        pod = self.pods[data.draw(st.sampled_from(sorted(self.pods)))]
        pod.known = not pod.known
        pod.promised &= self.totals  # else nobody knows any more what is still to come
        self.may_settle(data)

    def start_agent(self) -> None:
        """The runtime tells a new agent of containers that have not stopped."""
        self.up = True
        self.ledger = Ledger(layout=lay_out(self.machine), reserved=self.reserved)
        self.memory: Memory = {}
        for pod in self.pods.values():
            pod.promised = False
            pod.boxes = list(pod.live().values())
        self.settle()

    # What the runtime and kubelet show.

    def boxes(self, *stages: Stage) -> list[Box]:
        return [box for pod in self.pods.values() for box in pod.boxes if box.stage in stages]

    def read(self) -> list[PodFact]:
        """The facts with a memory, which now and then are compared to those without."""
        everybody = list(self.pods.values())
        known = [pod for pod in everybody if pod.known]
        shown = (
            [self.keep(self.show_pod(pod)) for pod in everybody],
            [self.keep(self.show_box(pod, box)) for pod in everybody for box in pod.boxes],
            [Holding(pod=f"ns/{pod.uid}", devices=pod.devices) for pod in everybody if pod.devices],
            {pod.uid: self.keep_spec(pod) for pod in known},
            self.keys,
        )
        facts = read_facts(*shown, self.memory)
        self.reads += 1
        assert self.reads % 4 or facts == read_facts(*shown)
        return list(facts)

    def keep_spec(self, pod: Pod) -> object:
        if pod.uid not in self.specs:
            spec = kubernetes(*pod.containers, uid=pod.uid, annotations=pod.annotations())
            self.specs[pod.uid] = spec
        return self.specs[pod.uid]

    def keep(self, shown: Any) -> Any:
        """What was shown before, as long as it is the same."""
        if self.shown.get(shown.id) != shown:
            self.shown[shown.id] = shown
        return self.shown[shown.id]

    def show_pod(self, pod: Pod) -> RuntimePod:
        memory = pod.most(container.memory_bytes or 0 for container in pod.containers)
        time = time_of(pod.cpus * 1000, pod.cpus * 1000, self.period_us)
        return RuntimePod(
            id=f"s-{pod.uid}",
            uid=pod.uid,
            pod=f"ns/{pod.uid}",
            annotations=pod.annotations(),
            cpu_time=time if self.totals else None,
            memory_bytes=memory or None,
        )

    def show_box(self, pod: Pod, box: Box) -> RuntimeContainer:
        time = time_of(box.asked.cpus * 1000, box.asked.cpus * 1000, self.period_us)
        gpus = ",".join(self.keys[one] for one in pod.devices.get(box.asked.name, ()))
        return RuntimeContainer(
            id=box.id,
            pod_id=f"s-{pod.uid}",
            name=box.asked.name,
            stage=box.stage,
            annotations={GPUS_KEY: gpus} if gpus else {},
            cpu_time=replace(time, quota_us=-1) if box.cpus else time,
            memory_bytes=box.asked.memory_bytes,
            cpus=box.cpus,
            mems=box.mems,
        )

    # What the agent does, and what must hold then.

    def may_settle(self, data: st.DataObject) -> None:
        if data.draw(st.booleans()):
            self.settle()

    def settle(self) -> None:
        """Settles and pins, unless the agent is away."""
        if not self.up:
            return
        facts = self.read()
        settlement = settle(self.machine, self.ledger, facts)
        again = settle(self.machine, self.ledger, random.sample(facts, len(facts)))
        assert again == settlement
        self.ledger = settlement.ledger
        refused = {one.uid for one in settlement.refused}
        for uid, pod in self.pods.items():
            self.pin(pod, uid in refused)
        self.check()
        second = settle(self.machine, self.ledger, self.read())
        assert (second.ledger, second.changes) == (self.ledger, ())

    def pin(self, pod: Pod, refused: bool) -> None:
        """What has a pin keeps it; what has none gets one, or its pod is refused."""
        grants = {one.container: one for one in self.ledger.of_pod(pod.uid)}
        for name, box in pod.live().items():
            grant = grants.get(name, Grant(uid=pod.uid, pod="", container=name))
            if box.cpus:
                assert (grant.cpus, grant.mems) == (box.cpus, box.mems)
            box.cpus, box.mems = grant.cpus, grant.mems
            assert len(box.cpus) == (box.asked.cpus if pod.pinned else 0) or refused
        assert not (pod.promised and refused)
        pod.promised = not refused and (self.totals or pod.known)

    def check(self) -> None:
        """Nothing is held twice, and only what may be given away is."""
        held = {uid: set(_cpus(self.ledger.of_pod(uid))) for uid in self.ledger.pods}
        assert held.keys() <= self.pods.keys()
        every = [cpu for cpus in held.values() for cpu in cpus]
        assert len(every) == len(set(every))
        assert set(every) <= set(self.machine.cpus) - set(self.reserved)
        for uid, pod in self.pods.items():
            runs_on = [cpu for box in pod.live().values() for cpu in box.cpus]
            assert len(runs_on) == len(set(runs_on))
            assert set(runs_on) <= held.get(uid, set())
            if pod.promised:
                self.check_promise(pod, held.get(uid, set()))

    def check_promise(self, pod: Pod, held: set[int]) -> None:
        """A pod that is not refused holds what all of its containers need, where it may."""
        assert len(held) == (pod.cpus if pod.pinned else 0) or pod.chosen
        devices = {one for some in pod.devices.values() for one in some}
        gpus = {self.keys[one] for one in devices}
        assert gpus <= set(_gpus(self.ledger.of_pod(pod.uid)))
        nodes = {node.id for node in self.machine.nodes if held & set(node.cpus)}
        seats = {self.node_of[one] for one in devices}
        if pod.policy is SINGLE and (held or devices):
            assert len(nodes | seats) == 1
        if pod.policy is RESTRICTED and devices:
            assert nodes <= seats


class KnownLife(Life):
    """The agent knows what each pod asks for."""

    knows = (ALWAYS,)


TestLife, TestKnownLife = Life.TestCase, KnownLife.TestCase
TestLife.settings = settings(deadline=None, max_examples=100, stateful_step_count=20)
TestKnownLife.settings = settings(deadline=None, max_examples=60, stateful_step_count=20)
