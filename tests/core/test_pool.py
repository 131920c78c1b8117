"""What groups get: tables, random trees against a model of the kernel, and lives of nodes.

Expected values are counted by hand, or follow from which pod was given which CPUs.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from agent.core.bitmap import Bitmap
from agent.core.pool import (
    ContainerGroup,
    Group,
    GroupPod,
    Groups,
    PodGroup,
    Qos,
    Write,
    find_drift,
    plan_writes,
)
from agent.fakes.cgroups import Cpus, FakeCpusets

GUARANTEED, BURSTABLE, BESTEFFORT = Qos
TOP = "kubepods"
FOLDERS = {GUARANTEED: TOP, BURSTABLE: f"{TOP}/burstable", BESTEFFORT: f"{TOP}/besteffort"}
SANDBOX = "sandbox"


def cpus(text: str) -> Bitmap:
    return Bitmap.parse_list(text)


@dataclass(slots=True, kw_only=True)
class Pod:
    """A pod on a fake node. `containers` have their pins, None for those that share; `gone` are
    containers that hold CPUs but do not exist at the moment."""

    uid: str
    qos: Qos
    containers: dict[str, Cpus | None] = field(default_factory=dict)
    gone: dict[str, Cpus] = field(default_factory=dict)
    waits: bool = False
    known: bool = True
    sandbox: bool = True

    @property
    def path(self) -> str:
        return f"{FOLDERS[self.qos]}/pod{self.uid}"

    @property
    def held(self) -> Cpus:
        pins = [pin for pin in (*self.containers.values(), *self.gone.values()) if pin]
        return frozenset().union(*pins)

    def to_fact(self) -> GroupPod:
        return GroupPod(
            uid=self.uid,
            qos=self.qos,
            containers=frozenset(self.containers),
            pinned={id_: Bitmap(pin) for id_, pin in self.containers.items() if pin},
            held=Bitmap(frozenset().union(*self.gone.values())),
            waits=self.waits,
        )


def read(kernel: FakeCpusets, pods: Iterable[Pod]) -> Groups:
    """The groups of these pods, as the edge would read them."""
    own = {path: Bitmap(set_) for path, set_ in kernel.own.items()}
    return Groups(
        version=kernel.version,
        path=TOP,
        cpus=Bitmap(kernel.effective(TOP)),
        classes={
            qos: Group(path=FOLDERS[qos], cpus=own[FOLDERS[qos]])
            for qos in (BURSTABLE, BESTEFFORT)
            if FOLDERS[qos] in own
        },
        pods=tuple(
            PodGroup(
                path=pod.path,
                cpus=own[pod.path],
                uid=pod.uid,
                qos=pod.qos,
                containers=tuple(
                    ContainerGroup(path=path, cpus=set_, id=path.rpartition("/")[2])
                    for path, set_ in own.items()
                    if path.startswith(f"{pod.path}/")
                ),
            )
            for pod in pods
            if pod.path in own
        ),
    )


def plan(kernel: FakeCpusets, pods: Iterable[Pod], **how: Any) -> tuple[Write, ...]:
    pods = list(pods)
    pool = kernel.online.difference(*(pod.held for pod in pods))
    facts = [pod.to_fact() for pod in pods if pod.known]
    return plan_writes(read(kernel, pods), facts, Bitmap(pool), Bitmap(kernel.online), **how)


def tree(version: int, online: int, pods: Iterable[Pod]) -> FakeCpusets:
    """A node before anything was narrowed, as kubelet and the runtime make it."""
    kernel = FakeCpusets(version, range(online))
    for path in FOLDERS.values():
        make(kernel, path)
    for pod in pods:
        make(kernel, pod.path)
        for id_ in (*[SANDBOX] * pod.sandbox, *pod.containers):
            make(kernel, f"{pod.path}/{id_}")
    return kernel


def make(kernel: FakeCpusets, path: str, pin: Cpus | None = None) -> None:
    """On v1, runtimes and kubelet copy what the group above has."""
    kernel.make(path)
    if pin:
        kernel.write(path, pin)
    elif kernel.version == 1:
        kernel.write(path, kernel.own[path.rpartition("/")[0]])


# --- by hand --------------------------------------------------------------------------------------


def pod(uid: str, qos: Qos, *shared: str, **pins: str) -> Pod:
    """Containers that share, and pins of others by their ids."""
    pinned = {id_: frozenset(cpus(text)) for id_, text in pins.items()}
    return Pod(uid=uid, qos=qos, containers=dict.fromkeys(shared) | pinned)


def waiting(pod: Pod) -> Pod:
    pod.waits = True
    return pod


def unknown(pod: Pod) -> Pod:
    pod.known = False
    return pod


EMPTY_POD = Pod(uid="n", qos=GUARANTEED, sandbox=False, known=False)
EMPTY_BURSTABLE = Pod(uid="n", qos=BURSTABLE, sandbox=False, known=False)


@pytest.mark.parametrize(
    ("pods", "writes"),
    [
        pytest.param([pod("a", GUARANTEED, "x"), pod("b", BURSTABLE, "y")], [], id="no pins"),
        pytest.param(
            [pod("a", GUARANTEED, x="4-7"), pod("b", BURSTABLE, "y"), pod("c", BESTEFFORT, "z")],
            ["a 4-7", "a/x 4-7", "besteffort 0-3", "burstable 0-3"],
            id="two writes for the pool, however many containers",
        ),
        pytest.param(
            [pod("a", GUARANTEED, x="4-7"), pod("b", GUARANTEED, "y", "z")],
            ["a 4-7", "a/x 4-7", "b 0-3", "besteffort 0-3", "burstable 0-3"],
            id="an unpinned Guaranteed pod, at its own group",
        ),
        pytest.param(
            [pod("a", GUARANTEED, "y", x="4-7")],
            ["a/sandbox 0-3", "a/x 4-7", "a/y 0-3", "besteffort 0-3", "burstable 0-3"],
            id="a container that shares beside one that does not",
        ),
        pytest.param(
            [pod("a", BURSTABLE, x="4-7"), pod("b", BURSTABLE, "y"), pod("c", BESTEFFORT, "z")],
            ["a 4-7", "a/x 4-7", "b 0-3", "besteffort 0-3"],
            id="a pinned Burstable pod: its class keeps the pins, the others are narrowed",
        ),
        pytest.param(
            [pod("a", GUARANTEED, x="4-5"), pod("b", BURSTABLE, y="6"), pod("c", BURSTABLE, "z")],
            ["a 4-5", "a/x 4-5", "b 6", "b/y 6", "c 0-3,7", "besteffort 0-3,7",
             "burstable 0-3,6-7"],
            id="the class of a pinned Burstable pod has no foreign pins",
        ),
        pytest.param(
            [pod("a", GUARANTEED, x="4-7"), waiting(pod("b", GUARANTEED, "init"))],
            ["a 4-7", "a/x 4-7", "b/init 0-3", "b/sandbox 0-3", "besteffort 0-3", "burstable 0-3"],
            id="a Guaranteed pod that waits keeps all, its containers do not",
        ),
        pytest.param(
            [pod("a", GUARANTEED, x="4-7"), waiting(pod("b", BURSTABLE)), pod("c", BURSTABLE, "y")],
            ["a 4-7", "a/x 4-7", "b/sandbox 0-3", "besteffort 0-3", "c 0-3"],
            id="a Burstable pod that waits keeps its class wide",
        ),
        pytest.param(
            [pod("a", GUARANTEED, x="4-7"), unknown(pod("b", GUARANTEED, "y"))],
            ["a 4-7", "a/x 4-7", "b 0-3", "besteffort 0-3", "burstable 0-3"],
            id="a pod that nobody knows shares",
        ),
        pytest.param(
            [pod("a", GUARANTEED, x="4-7"), EMPTY_POD, EMPTY_BURSTABLE],
            ["a 4-7", "a/x 4-7", "besteffort 0-3", "burstable 0-3"],
            id="a group that nobody knows and nobody is in",
        ),
        pytest.param(
            [Pod(uid="a", qos=GUARANTEED, gone={"x": frozenset({4, 5})})],
            ["a 4-5", "besteffort 0-3,6-7", "burstable 0-3,6-7"],
            id="a pinned pod between two lives of its container",
        ),
    ],
)  # fmt: skip
def test_what_is_written_on_v2(pods: list[Pod], writes: list[str]) -> None:
    assert sorted(shown(plan(tree(2, 8, pods), pods))) == sorted(writes)


def shown(writes: Iterable[Write]) -> list[str]:
    """Each as "a/x 4-7": without the folders above a class or a pod."""
    names = [write.path.rpartition("/pod")[2].removeprefix(f"{TOP}/") for write in writes]
    return [f"{name} {write.cpus}" for name, write in zip(names, writes, strict=True)]


@pytest.mark.parametrize("version", [1, 2])
def test_who_waits_for_a_pin_is_not_refused_it(version: int) -> None:
    """Though the CPUs that it gets became free only after the last plan."""
    other, new = pod("a", GUARANTEED, x="4-7"), waiting(pod("b", BURSTABLE, "y"))
    kernel = tree(version, 8, [other, new])
    carry_out(kernel, [other, new])
    other.containers.clear()
    make(kernel, f"{new.path}/z", frozenset({4, 5, 6, 7}))
    assert kernel.effective(f"{new.path}/z") == {4, 5, 6, 7}


def test_the_number_of_containers_that_share_does_not_matter_on_v2() -> None:
    few = [pod("a", GUARANTEED, x="4-7"), pod("b", BURSTABLE, "b0")]
    many = few + [
        pod(f"p{n}", (BURSTABLE, BESTEFFORT)[n % 2], *(f"p{n}c{m}" for m in range(5)))
        for n in range(40)
    ]
    kernels = [tree(2, 8, pods) for pods in (few, many)]
    narrowing = [carry_out(kernel, pods) for kernel, pods in zip(kernels, (few, many), strict=True)]
    few[0].containers = {"x": frozenset({4, 5})}
    widening = [carry_out(kernel, pods) for kernel, pods in zip(kernels, (few, many), strict=True)]
    assert [len(writes) for writes in narrowing] == [4, 4]
    assert [len(writes) for writes in widening] == [4, 4]


def test_parents_first_when_widening_children_first_when_narrowing_on_v1() -> None:
    pods = [pod("a", BURSTABLE, "x")]
    pods[0].sandbox = False
    kernel = tree(1, 4, pods)
    held = Pod(uid="h", qos=GUARANTEED, gone={"h": frozenset({2, 3})})
    narrowed = carry_out(kernel, [*pods, held])
    assert shown(narrowed) == ["a/x 0-1", "a 0-1", "besteffort 0-1", "burstable 0-1"]
    assert shown(plan(kernel, pods)) == ["burstable 0-3", "a 0-3", "a/x 0-3", "besteffort 0-3"]


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_near_its_gpus(version: int) -> None:
    pods = [pod("a", GUARANTEED, x="4-7"), pod("b", GUARANTEED, "near", "far", "none")]
    kernel = tree(version, 8, pods)
    near = {"near": cpus("2-5"), "far": cpus("6-7")}
    facts = [pods[0].to_fact(), replace(pods[1].to_fact(), near=near)]
    for write in plan_writes(read(kernel, pods), facts, cpus("0-3"), cpus("0-7")):
        kernel.write(write.path, write.cpus)
    has = {id_: Bitmap(kernel.effective(f"{pods[1].path}/{id_}")) for id_ in pods[1].containers}
    assert has == {"near": cpus("2-3"), "far": cpus("0-3"), "none": cpus("0-3")}


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("online", "pool", "a", "b"),
    [
        pytest.param("0-6", "0-3", "4-6", "0-3", id="a CPU of a pin went offline"),
        pytest.param("0-3", "0-3", "0-3", "0-3", id="all CPUs of a pin went offline"),
        pytest.param("4-7", "0-3", "4-7", "4-7", id="all CPUs of the pool went offline"),
        pytest.param("8-9", "0-3", "0-7", "0-7", id="nothing is left: nothing is written"),
    ],
)
def test_cpus_that_went_offline(version: int, online: str, pool: str, a: str, b: str) -> None:
    """The kernel has not got around to it yet."""
    pods = [pod("a", GUARANTEED, x="4-7"), pod("b", BESTEFFORT, "y")]
    kernel = tree(version, 8, pods)
    facts = [pod.to_fact() for pod in pods]
    for write in plan_writes(read(kernel, pods), facts, cpus(pool), cpus(online)):
        assert write.cpus <= cpus(online)
        kernel.write(write.path, write.cpus)
    has = [kernel.effective(path) for path in ("kubepods/poda/x", f"{pods[1].path}/y")]
    expected = (cpus(a), cpus(b))
    missing = kernel.online - set(cpus(online)) if online != "8-9" else set()
    assert [Bitmap(one - missing) for one in has] == list(expected)


def test_a_cpu_of_a_pin_goes_offline_and_comes_back_on_v2() -> None:
    """There the kernel keeps the set, so that nothing is to be written."""
    pods = [pod("a", GUARANTEED, x="4-7"), pod("b", BESTEFFORT, "y")]
    kernel = tree(2, 8, pods)
    carry_out(kernel, pods)
    facts = [pod.to_fact() for pod in pods]
    for online in ("0-6", "0-7"):
        groups = replace(read(kernel, pods), cpus=cpus(online))
        assert plan_writes(groups, facts, cpus("0-3"), cpus(online)) == ()
        assert find_drift(groups, facts, cpus(online)) == {}


def test_no_cpu_that_is_offline_is_written_on_the_way() -> None:
    pods = [pod("a", GUARANTEED, x="5"), pod("b", BESTEFFORT, "y")]
    kernel = tree(1, 8, pods)
    for path in ("kubepods/poda/x", "kubepods/poda/sandbox", "kubepods/poda"):
        kernel.write(path, cpus("6-7"))
    facts = [pod.to_fact() for pod in pods]
    writes = plan_writes(read(kernel, pods), facts, cpus("0-4,6"), cpus("0-6"))
    assert [str(write.cpus) for write in writes if write.path == "kubepods/poda"] == ["5-6", "5"]


def test_the_class_that_the_path_tells_counts() -> None:
    pods = [pod("a", BURSTABLE, x="4-7"), pod("b", BURSTABLE, "y")]
    kernel = tree(2, 8, pods)
    facts = [replace(pod.to_fact(), qos=GUARANTEED) for pod in pods]
    writes = plan_writes(read(kernel, pods), facts, cpus("0-3"), cpus("0-7"))
    assert sorted(shown(writes)) == ["a 4-7", "a/x 4-7", "b 0-3", "besteffort 0-3"]


def test_a_pod_that_has_no_group_yet_counts_for_its_class() -> None:
    held = Pod(uid="a", qos=BURSTABLE, gone={"x": frozenset({4, 5, 6, 7})})
    kernel = tree(2, 8, [])
    assert shown(plan(kernel, [held])) == ["besteffort 0-3"]


# --- on the way -----------------------------------------------------------------------------------


def test_nobody_gets_foreign_cpus_while_a_class_is_widened() -> None:
    """CPUs 2 and 3 become free, and CPU 2 is given to a pod of the class at once."""
    gone = pod("g", GUARANTEED, g="2-3")
    other, late, shares = pod("h", GUARANTEED, h="4-7"), pod("a", BURSTABLE), pod("b", BURSTABLE)
    late.containers["x"] = shares.containers["y"] = None
    kernel = tree(2, 8, [gone, other, late, shares])
    carry_out(kernel, [gone, other, late, shares])
    kernel.remove(gone.path)
    late.containers["x"] = frozenset({2})
    carry_out(kernel, [other, late, shares], careful=True)
    check_all_is_well(kernel, [other, late, shares])


def test_a_set_that_does_not_count_does_not_begin_to() -> None:
    """The pod's group has nothing in common with its class, so that it has what that has."""
    late = waiting(pod("a", BURSTABLE, x="0-1"))
    kernel = tree(2, 8, [late])
    kernel.write("kubepods/burstable", cpus("0-3"))
    kernel.write(late.path, cpus("7"))
    kernel.write(f"{late.path}/x", cpus("6"))
    carry_out(kernel, [late])
    check_all_is_well(kernel, [late])


def test_a_container_s_set_that_does_not_count_does_not_begin_to() -> None:
    late = pod("a", GUARANTEED, "y", x="0-1")
    kernel = tree(2, 8, [late])
    kernel.write(late.path, cpus("0-3"))
    kernel.write(f"{late.path}/x", cpus("7"))
    carry_out(kernel, [late])
    check_all_is_well(kernel, [late])


def test_a_class_that_could_not_be_read() -> None:
    pods = [pod("a", GUARANTEED, x="4-7"), pod("b", BURSTABLE, "y")]
    kernel = tree(2, 8, pods)
    groups = replace(read(kernel, pods), classes={})
    facts = [pod.to_fact() for pod in pods]
    writes = plan_writes(groups, facts, cpus("0-3"), cpus("0-7"))
    assert sorted(shown(writes)) == ["a 4-7", "a/x 4-7", "b 0-3"]


@pytest.mark.parametrize(
    ("pod_has", "container_has", "drift"),
    [
        pytest.param("", "4-7", {}, id="none"),
        pytest.param("", "", {"x": "0-7"}, id="no set of its own"),
        pytest.param("", "4-6", {"x": "4-6"}, id="another set"),
        pytest.param("0-5", "4-7", {"x": "4-5"}, id="the pod's group is narrower"),
        pytest.param("4-7", "", {}, id="the pod's group is right"),
        pytest.param("0-3", "4-7", {"x": "0-3"}, id="the pod's group has other CPUs"),
    ],
)
def test_drift_on_v2(pod_has: str, container_has: str, drift: dict[str, str]) -> None:
    pods = [pod("a", GUARANTEED, x="4-7"), pod("b", BURSTABLE, "y")]
    kernel = tree(2, 8, pods)
    kernel.write("kubepods/poda", cpus(pod_has))
    kernel.write("kubepods/poda/x", cpus(container_has))
    facts = [pod.to_fact() for pod in pods]
    found = find_drift(read(kernel, pods), facts, cpus("0-7"))
    assert found == {id_: cpus(text) for id_, text in drift.items()}


# --- random trees, against the model of the kernel ------------------------------------------------

CPUS = 6


@st.composite
def nodes(draw: st.DrawFn) -> list[Pod]:
    """Pods of all kinds, which hold different CPUs; at least one CPU is left."""
    free = list(draw(st.permutations(range(CPUS))))

    def pin() -> Cpus:
        count = draw(st.integers(1, 2))
        return frozenset(free.pop() for _ in range(min(count, len(free) - 1)))

    pods = []
    for number in range(draw(st.integers(0, 4))):
        known = draw(st.integers(0, 9)) > 0
        new = Pod(
            uid=f"u{number}",
            qos=draw(st.sampled_from(Qos)),
            waits=known and draw(st.booleans()),
            known=known,
            sandbox=draw(st.integers(0, 9)) > 0,
        )
        for id_ in (f"{new.uid}x", f"{new.uid}y")[: draw(st.integers(0, 2))]:
            new.containers[id_] = (pin() or None) if new.known and draw(st.booleans()) else None
        if new.known and draw(st.integers(0, 3)) == 0 and len(free) > 1:
            new.gone[f"{new.uid}z"] = pin()
        pods.append(new)
    return pods


def scramble(draw: st.DrawFn, kernel: FakeCpusets) -> None:
    """Whatever somebody else may have written into the groups below kubepods."""
    for path in sorted(kernel.own, key=lambda path: path.count("/")):
        if path in ("", TOP):
            continue
        above = kernel.own[path.rpartition("/")[0]] if kernel.version == 1 else kernel.online
        least = 1 if kernel.version == 1 else 0
        kernel.own[path] = draw(st.frozensets(st.sampled_from(sorted(above)), min_size=least))


@settings(deadline=None, max_examples=300)
@given(st.data(), nodes(), st.sampled_from([1, 2]))
def test_from_any_state_to_the_right_one(
    data: st.DataObject, pods: list[Pod], version: int
) -> None:
    kernel = tree(version, CPUS, pods)
    data.draw(st.composite(lambda draw: scramble(draw, kernel))())
    carry_out(kernel, pods)
    check_all_is_well(kernel, pods)


@settings(deadline=None, max_examples=200)
@given(st.data(), nodes(), st.sampled_from([1, 2]))
def test_who_is_pinned_may_be_left_to_others(
    data: st.DataObject, pods: list[Pod], version: int
) -> None:
    kernel = tree(version, CPUS, pods)
    data.draw(st.composite(lambda draw: scramble(draw, kernel))())
    pinned = {f"{pod.path}/{id_}" for pod in pods for id_, pin in pod.containers.items() if pin}
    before = {path: kernel.own[path] for path in pinned}
    carry_out(kernel, pods, write_pins=False)
    assert {path: kernel.own[path] for path in pinned} == before
    assert plan(kernel, pods, write_pins=False) == ()
    pool = kernel.online.difference(*(pod.held for pod in pods))
    for pod in pods:
        for id_ in [id_ for id_, pin in pod.containers.items() if not pin]:
            assert kernel.effective(f"{pod.path}/{id_}") == pool
        for id_, pin in pod.containers.items():  # then the others do their part
            if pin:
                kernel.write(f"{pod.path}/{id_}", pin)
                assert kernel.effective(f"{pod.path}/{id_}") == pin
    carry_out(kernel, pods, write_pins=False)
    check_all_is_well(kernel, pods)


def carry_out(
    kernel: FakeCpusets, pods: list[Pod], *, careful: bool = False, write_pins: bool = True
) -> list[Write]:
    """Writes what is planned; OSError if the kernel refuses. On the way, nobody loses a CPU of a
    pin; if `careful`, nobody gets one of a foreign pin either. What others wrote into groups that
    are theirs may begin or cease to count."""
    writes = list(plan(kernel, pods, write_pins=write_pins))
    pins = {f"{pod.path}/{id_}": pin for pod in pods for id_, pin in pod.containers.items() if pin}
    have = {path: pin & kernel.effective(path) for path, pin in pins.items()}
    foreign = {path: held & kernel.effective(path) for path, held in strangers(kernel, pods)}
    for write in writes:
        assert write.cpus
        kernel.write(write.path, write.cpus)
        for path, kept in have.items():
            assert kept <= kernel.effective(path) or not write_pins, (path, write)
        for path, held in strangers(kernel, pods):
            if careful:
                assert kernel.effective(path) & held <= foreign[path], (path, write)
    return writes


def strangers(kernel: FakeCpusets, pods: list[Pod]) -> list[tuple[str, Cpus]]:
    """Each group with processes, and the CPUs that other pods hold."""
    return [
        (path, frozenset().union(*(other.held for other in pods if other is not pod)))
        for pod in pods
        for path in kernel.own
        if path.startswith(f"{pod.path}/")
    ]


def check_all_is_well(kernel: FakeCpusets, pods: list[Pod]) -> None:
    pool = kernel.online.difference(*(pod.held for pod in pods))
    for pod in pods:
        for id_, pin in pod.containers.items():
            assert kernel.effective(f"{pod.path}/{id_}") == (pin or pool), (pod.path, id_)
        if pod.sandbox:
            has = kernel.effective(f"{pod.path}/{SANDBOX}")
            alone = pod.held and all(pod.containers.values()) and not pod.waits
            assert has == (pod.held if alone else pool), pod.path
        if pod.waits:
            assert kernel.effective(pod.path) == kernel.online
    assert plan(kernel, pods) == ()
    facts = [pod.to_fact() for pod in pods if pod.known]
    assert find_drift(read(kernel, pods), facts, Bitmap(kernel.online)) == {}


# --- lives of nodes -------------------------------------------------------------------------------


class Life(RuleBasedStateMachine):
    """Pods come and go, as kubelet and a runtime make their groups; now and then it is planned.

    A container that is pinned runs on its CPUs from the first instruction, if the last plan knew of
    its pod.
    """

    @initialize(version=st.sampled_from([1, 2]))
    def begin(self, version: int) -> None:
        self.kernel = tree(version, CPUS, [])
        self.pods: list[Pod] = []
        self.number = 0
        self.planned: list[str] = []

    def name(self) -> str:
        self.number += 1
        return f"n{self.number}"

    def free(self) -> list[int]:
        """CPUs for pins; one CPU stays with the pool."""
        return sorted(self.kernel.online.difference(*(pod.held for pod in self.pods)))[1:]

    @rule(qos=st.sampled_from(Qos), waits=st.booleans())
    def add_pod(self, qos: Qos, waits: bool) -> None:
        pod = Pod(uid=self.name(), qos=qos, waits=waits)
        make(self.kernel, pod.path)
        make(self.kernel, f"{pod.path}/{SANDBOX}")
        self.pods.append(pod)

    @precondition(lambda self: self.pods)
    @rule(data=st.data(), count=st.integers(0, 2))
    def add_container(self, data: st.DataObject, count: int) -> None:
        """In a pod that waits it gets a pin."""
        pod = data.draw(st.sampled_from(self.pods))
        free = self.free()
        id_ = self.name()
        pin = frozenset(free[:count]) if pod.waits and pod.uid in self.planned else None
        make(self.kernel, f"{pod.path}/{id_}", pin)
        pod.containers[id_] = pin or None
        if pin:
            assert self.kernel.effective(f"{pod.path}/{id_}") == pin

    @precondition(lambda self: self.pods)
    @rule(data=st.data())
    def all_is_given(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.pods)).waits = False

    @precondition(lambda self: self.pods)
    @rule(data=st.data())
    def pin_what_runs(self, data: st.DataObject) -> None:
        pod = data.draw(st.sampled_from(self.pods))
        for id_ in [id_ for id_, pin in pod.containers.items() if not pin]:
            pod.containers[id_] = frozenset(self.free()[-1:]) or None

    @precondition(lambda self: self.pods)
    @rule(data=st.data(), comes_back=st.booleans())
    def end_container(self, data: st.DataObject, comes_back: bool) -> None:
        pod = data.draw(st.sampled_from(self.pods))
        for id_, pin in list(pod.containers.items())[:1]:
            self.kernel.remove(f"{pod.path}/{id_}")
            del pod.containers[id_]
            if pin and comes_back:
                pod.gone[id_] = pin

    @precondition(lambda self: self.pods)
    @rule(data=st.data())
    def restart_container(self, data: st.DataObject) -> None:
        """Where a plan was made since it ended, it need not be made again."""
        pod = data.draw(st.sampled_from(self.pods))
        for id_, pin in list(pod.gone.items())[:1]:
            del pod.gone[id_]
            pod.containers[id_] = pin
            make(self.kernel, f"{pod.path}/{id_}", pin)
            assert self.kernel.effective(f"{pod.path}/{id_}") == pin

    @precondition(lambda self: self.pods)
    @rule(data=st.data())
    def remove_pod(self, data: st.DataObject) -> None:
        pod = data.draw(st.sampled_from(self.pods))
        self.pods.remove(pod)
        self.kernel.remove(pod.path)

    @rule()
    def settle(self) -> None:
        carry_out(self.kernel, self.pods, careful=True)
        check_all_is_well(self.kernel, self.pods)
        self.planned = [pod.uid for pod in self.pods if pod.waits]


TestLife = Life.TestCase
TestLife.settings = settings(deadline=None, max_examples=100, stateful_step_count=40)
