"""The books as the container runtime and the pass use them: callbacks by hand, many threads.

The machine has two nodes of four cores with two threads and two GPUs each: CPUs 0-7 with GPU-0 and
GPU-1, CPUs 8-15 with GPU-2 and GPU-3. Core 0-1 is reserved. Expected CPUs are worked out by hand
from the design's rules: near the GPUs, whole cores, lowest ids.
"""

import itertools
import json
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from agent.books import Books, Node, Rules
from agent.core.bitmap import Bitmap
from agent.core.decision import CPUSET_KEY, GROUP_KEY, STATUS_KEY
from agent.core.offer import GPUS_KEY, Holding
from agent.core.placement import MemoryRule, Refusal
from agent.core.podevents import PodEvent, Reason
from agent.core.podspecs import trim_pod
from agent.core.request import GPU_RESOURCE, PIN_KEY, SPEC_KEYS, Role
from agent.core.runtime import (
    Cpuset,
    CpuTime,
    OnUnsatisfied,
    RuntimeContainer,
    RuntimePod,
    Stage,
    Unannotated,
)
from agent.core.topology import EMPTY
from tests.core.oracle import build

MACHINE = build((2, 4), (2, 4))
ALL = Bitmap(range(16))
RESERVED = Bitmap([0, 1])
NODE = Node(machine=MACHINE, reserved=RESERVED)
PIN = {PIN_KEY: "required"}
WARN = Rules(on_unsatisfied=OnUnsatisfied.WARN)
WATCH = Rules(observe_only="kubelet pins CPUs itself")
NEAR = Rules(unannotated=Unannotated.NEAR)
GIB = 1 << 30


def cpus(text: str) -> Bitmap:
    return Bitmap.parse_list(text)


def policy(name: str) -> dict[str, str]:
    return {SPEC_KEYS[0]: json.dumps({"numaTopologyPolicy": name})}


def time_of(count: int) -> CpuTime:
    """What kubelet asks of the runtime for so many whole CPUs."""
    return CpuTime(shares=count * 1024, quota_us=count * 100_000, period_us=100_000)


def pod_of(name: str, count: int = 0, annotations: Any = None, **more: Any) -> RuntimePod:
    """A pod with so many CPUs in all, that asks for its own unless `annotations` say else."""
    return RuntimePod(
        id=f"sandbox-{name}",
        uid=name,
        pod=f"ns/{name}",
        annotations=PIN if annotations is None else annotations,
        cpu_time=time_of(count),
        **{"pid": 7} | more,
    )


def container_of(
    pod: RuntimePod,
    count: int,
    gpus: Iterable[int] = (),
    name: str = "main",
    id_: str = "",
    stage: Stage = Stage.CREATING,
    **more: Any,
) -> RuntimeContainer:
    """A container with so many CPUs, and with these GPUs as our Allocate gives them."""
    keys = ",".join(f"GPU-{gpu}" for gpu in gpus)
    return RuntimeContainer(
        id=id_ or f"{pod.uid}_{name}",
        pod_id=pod.id,
        name=name,
        stage=stage,
        annotations={GPUS_KEY: keys} if keys else {},
        cpu_time=time_of(count),
        **{
            "devices": tuple(f"/dev/nvidia{gpu}" for gpu in gpus),
            "visible_devices": keys or None,
        }
        | more,
    )


@dataclass(slots=True)
class Desk:
    """Books that a pass has settled once, and how often they rang."""

    books: Books
    rings: list[None] = field(default_factory=list)

    def run(self, pod: RuntimePod, *containers: RuntimeContainer) -> list[Any]:
        """As the runtime does for a pod that starts; the answers to its containers' creation."""
        self.books.on_run_pod(pod)
        answers = [self.books.on_create(pod, one) for one in containers]
        for one, answer in zip(containers, answers, strict=True):
            if not isinstance(answer, Refusal):
                self.books.on_start(one.id)
        return answers

    def run_one(self, name: str, count: int, gpus: Iterable[int] = (), **annotations: str) -> Any:
        """A pod with one container that asks for all its CPUs."""
        pod = pod_of(name, count, PIN | annotations)
        (answer,) = self.run(pod, container_of(pod, count, gpus))
        return answer

    def held(self) -> dict[str, Bitmap]:
        """CPUs by pod and container, as the ledger has them."""
        assert self.books.ledger is not None
        grants = self.books.ledger.grants
        return {f"{one.uid}/{one.container}": one.cpus for one in grants if one.cpus}

    def pinned(self) -> dict[str, Bitmap]:
        return {one.container.id: one.cpuset.cpus for one in self.books.pinned()}

    @property
    def pool(self) -> Bitmap:
        assert self.books.ledger is not None
        return self.books.ledger.shared_pool


def sit(rules: Rules | None = None, node: Node | None = NODE) -> Desk:
    rings: list[None] = []
    desk = Desk(Books(lambda: rings.append(None)), rings)
    if node is not None:
        desk.books.settle(node, rules or Rules())
    return desk


@pytest.fixture
def desk() -> Desk:
    return sit()


# --- creation -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "annotations", "expected"),
    [
        pytest.param([0], {}, "2-5", id="beside a GPU of node 0, not on the reserved core"),
        pytest.param([3], {}, "8-11", id="beside a GPU of node 1"),
        pytest.param([2, 3], policy("SingleNUMANode"), "8-11", id="on the one node of two GPUs"),
        pytest.param([1, 2], policy("Restricted"), "2-3,8-9", id="on both nodes of two GPUs"),
    ],
)
def test_a_container_is_created_on_cpus_of_its_own(
    desk: Desk, gpus: list[int], annotations: dict[str, str], expected: str
) -> None:
    assert desk.run_one("a", 4, gpus, **annotations) == Cpuset(cpus=cpus(expected))
    assert desk.held() == {"a/main": cpus(expected)}
    assert desk.pinned() == {"a_main": cpus(expected)}
    assert desk.pool == ALL - cpus(expected)


@pytest.mark.parametrize(
    ("memory", "limit", "mems"),
    [
        (MemoryRule.AUTO, 8 * GIB, "1"),
        (MemoryRule.AUTO, None, ""),
        (MemoryRule.AUTO, 65 * GIB, ""),
        (MemoryRule.BIND, None, "1"),
        (MemoryRule.LEAVE, 8 * GIB, ""),
    ],
    ids=["fits", "no limit", "fits on no node", "always", "never"],
)
def test_memory_is_bound_by_the_rule(memory: MemoryRule, limit: int | None, mems: str) -> None:
    desk = sit(Rules(memory=memory))
    pod = pod_of("a", 2, memory_bytes=limit)
    (cpuset,) = desk.run(pod, container_of(pod, 2, [2], memory_bytes=limit))
    assert (cpuset.cpus, cpuset.mems) == (cpus("8-9"), cpus(mems))


@pytest.mark.parametrize("lift", [True, False], ids=["lifted", "left"])
def test_the_quota_is_as_an_administrator_wants_it(lift: bool) -> None:
    assert sit(Rules(lift_quota=lift)).run_one("a", 2).lift_quota is lift


def test_pods_after_each_other_get_what_is_left(desk: Desk) -> None:
    answers = [desk.run_one(name, 4, [gpu]) for name, gpu in (("a", 2), ("b", 3), ("c", 0))]
    assert [answer.cpus for answer in answers] == [cpus("8-11"), cpus("12-15"), cpus("2-5")]
    assert desk.pool == cpus("0-1,6-7")


def test_containers_of_one_pod_find_their_cpus_beside_each_other(desk: Desk) -> None:
    """The runtime shows them one by one; what is to come is held."""
    pod = pod_of("a", 6, PIN | policy("SingleNUMANode"))
    first, second = container_of(pod, 2, [2], "one"), container_of(pod, 4, [3], "two")
    desk.books.on_run_pod(pod)
    one = desk.books.on_create(pod, first)
    assert isinstance(one, Cpuset)
    assert desk.pool == ALL - union_of(desk.held())
    assert len(union_of(desk.held())) == 6
    other = desk.run_one("b", 4)  # between them: it takes nothing of theirs
    two = desk.books.on_create(pod, second)
    assert isinstance(two, Cpuset)
    assert (len(one.cpus), len(two.cpus)) == (2, 4)
    assert one.cpus | two.cpus <= cpus("8-15")
    assert not one.cpus & two.cpus
    assert not (one.cpus | two.cpus) & other.cpus
    assert desk.held().keys() == {"a/one", "a/two", "b/main"}


def union_of(held: dict[str, Bitmap]) -> Bitmap:
    return Bitmap(cpu for some in held.values() for cpu in some)


def test_a_container_that_is_started_anew_has_its_cpus_again(desk: Desk) -> None:
    pod = pod_of("a", 4)
    (first,) = desk.run(pod, container_of(pod, 4, [2], id_="old"))
    desk.books.on_stop("old")
    desk.books.settle(NODE, Rules())
    assert desk.pool == ALL - first.cpus
    assert desk.run_one("b", 4, [3]).cpus == cpus("12-15")
    again = desk.books.on_create(pod, container_of(pod, 4, [2], id_="new"))
    desk.books.on_remove("old")
    desk.books.settle(NODE, Rules())
    assert again == first
    assert desk.pinned() == {"new": first.cpus, "b_main": cpus("12-15")}


def test_a_container_without_whole_cpus_runs_where_everybody_runs(desk: Desk) -> None:
    pod = pod_of("a", annotations={})
    assert desk.run(pod, container_of(pod, 0), container_of(pod, 2, [1], "two")) == [None, None]
    assert desk.pool == ALL
    assert desk.pinned() == {}


def test_a_schedulers_decision_is_obeyed(desk: Desk) -> None:
    decided = {"cpuset": json.dumps({"main": {"1": {"elems": {"14": {}, "15": {}}}}})}
    assert desk.run_one("a", 2, [2], **decided).cpus == cpus("14-15")


def test_what_kubelet_lists_counts_before_the_runtime_shows_it(desk: Desk) -> None:
    """Kubelet's list has no uid: its pod is one with the runtime's of this name."""
    holdings = (Holding(pod="ns/a", devices={"main": ("GPU-2", "GPU-3")}),)
    desk.books.settle(replace(NODE, holdings=holdings), Rules())
    assert desk.books.ledger is not None
    assert desk.books.ledger.free_gpus == Bitmap([0, 1])
    assert desk.run_one("a", 2).cpus == cpus("8-9")
    assert {one.uid for one in desk.books.ledger.grants} == {"a"}


# --- what cannot be -------------------------------------------------------------------------------


def test_a_pod_that_cannot_be_pinned_is_refused_with_the_numbers(desk: Desk) -> None:
    answer = desk.run_one("a", 8, [0], **policy("SingleNUMANode"))
    assert isinstance(answer, Refusal)
    assert answer.reason.startswith("SingleNUMANode")
    assert "6" in answer.reason  # free on node 0
    assert "8 CPUs" in answer.reason
    assert desk.held() == {}
    assert desk.pinned() == {}
    assert desk.pool == ALL


def test_a_refused_pod_comes_in_when_there_is_room(desk: Desk) -> None:
    desk.run_one("a", 6, [0])
    pod = pod_of("b", 6, PIN | policy("SingleNUMANode"))
    (answer,) = desk.run(pod, container_of(pod, 6, [1]))
    assert isinstance(answer, Refusal)
    desk.books.on_stop("b_main")  # the runtime undoes the creation
    desk.books.on_remove("b_main")
    desk.books.on_end_pod("sandbox-a")
    again = desk.books.on_create(pod, container_of(pod, 6, [1], id_="again"))
    assert again == Cpuset(cpus=cpus("2-7"))


@pytest.mark.parametrize("rules", [Rules(), WARN], ids=["fail", "warn"])
def test_what_is_refused_keeps_the_gpus_that_kubelet_gave(rules: Rules) -> None:
    desk = sit(rules)
    desk.run_one("a", 8, [0], **policy("SingleNUMANode"))
    assert desk.books.ledger is not None
    assert 0 not in desk.books.ledger.free_gpus


def test_at_warn_it_runs_where_everybody_runs() -> None:
    desk = sit(WARN)
    assert desk.run_one("a", 8, [0], **policy("SingleNUMANode")) is None
    (pod,) = desk.books.group_pods()
    assert pod.containers == {"a_main"}
    assert (pod.pinned, pod.held, pod.waits) == ({}, EMPTY, False)
    assert desk.pool == ALL


def test_at_warn_it_is_pinned_when_there_is_room() -> None:
    desk = sit(WARN)
    desk.run_one("a", 6, [0])
    assert desk.run_one("b", 6, [1], **policy("SingleNUMANode")) is None
    desk.books.on_end_pod("sandbox-a")
    desk.books.settle(NODE, WARN)
    assert desk.pinned() == {"b_main": cpus("2-7")}


@pytest.mark.parametrize(
    ("pod", "count", "words"),
    [
        pytest.param(pod_of("a", 0), 0, "whole CPUs", id="no CPUs"),
        pytest.param(
            pod_of("a", 2, PIN | {SPEC_KEYS[0]: "{"}), 2, SPEC_KEYS[0], id="a spec that is no JSON"
        ),
        pytest.param(
            pod_of("a", 2, PIN | policy("Sometimes")), 2, "Sometimes", id="a policy that is none"
        ),
        pytest.param(
            pod_of("a", 2, PIN | {SPEC_KEYS[0]: "x" * 1_000_000}), 2, SPEC_KEYS[0], id="a huge spec"
        ),
    ],
)
def test_a_pod_that_asks_for_nonsense(desk: Desk, pod: RuntimePod, count: int, words: str) -> None:
    (answer,) = desk.run(pod, container_of(pod, count))
    assert isinstance(answer, Refusal)
    assert words in answer.reason
    assert len(answer.reason) < 1000
    assert desk.run_one("b", 2) is not None  # everybody else goes on


def test_any_other_value_of_the_annotation_is_ignored(desk: Desk) -> None:
    pod = pod_of("a", 2, {PIN_KEY: "preferred"})
    assert desk.run(pod, container_of(pod, 2)) == [None]


@pytest.mark.parametrize(
    ("annotations", "name", "gpus"),
    [
        pytest.param({SPEC_KEYS[2]: "{"}, "main", [], id="a spec that is no JSON"),
        pytest.param(policy("Sometimes"), "main", [1], id="a policy that is none"),
        pytest.param({}, "Not_A_Label", [], id="a container with a name that Kubernetes has not"),
        pytest.param(policy("SingleNUMANode"), "main", [1, 2], id="GPUs that are on two nodes"),
    ],
)
def test_who_asks_for_no_cpus_is_not_refused(
    desk: Desk, annotations: dict[str, str], name: str, gpus: list[int]
) -> None:
    pod = pod_of("a", 2, annotations)
    assert desk.run(pod, container_of(pod, 2, gpus, name)) == [None]


# --- only watching --------------------------------------------------------------------------------


def test_where_kubelet_pins_nothing_is_changed() -> None:
    desk = sit(WATCH)
    pod = pod_of("a", 4)
    container = container_of(pod, 4, [2])
    assert desk.run(pod, container, container_of(pod, 8, [3], "too-big")) == [None, None]
    assert desk.books.on_update(pod, container, None) is None
    wrong = replace(container, stage=Stage.RUNNING, cpus=cpus("0"))
    assert desk.books.on_synchronize([pod], [wrong]) == {}


@pytest.mark.parametrize("call", ["create", "synchronize", "update"])
def test_before_the_machine_is_known_nothing_is_changed(call: str) -> None:
    desk, pod = sit(node=None), pod_of("a", 4)
    container = container_of(pod, 4, [2], stage=Stage.RUNNING)
    assert desk.books.ledger is None
    assert desk.books.group_pods() == desk.books.pinned() == ()
    if call == "synchronize":
        assert desk.books.on_synchronize([pod], [container]) == {}
    else:
        assert desk.books.on_create(pod, container) is None
    if call == "update":
        assert desk.books.on_update(pod, container, None) is None
    desk.books.settle(NODE, Rules())
    assert desk.pinned() == {"a_main": cpus("8-11")}


# --- GPU pods that ask for nothing ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "gpus", "expected"),
    [
        pytest.param(Rules(), [2], None, id="left alone"),
        pytest.param(NEAR, [2], "8-15", id="near the GPU"),
        pytest.param(NEAR, [1, 2], "0-15", id="near both GPUs"),
        pytest.param(NEAR, [], None, id="without GPUs"),
        pytest.param(NEAR, [0], "0-7", id="reserved CPUs are shared CPUs"),
    ],
)
def test_gpu_pods_that_ask_for_nothing(rules: Rules, gpus: list[int], expected: str | None) -> None:
    desk = sit(rules)
    pod = pod_of("a", 2, {})
    (answer,) = desk.run(pod, container_of(pod, 2, gpus))
    near = {} if expected is None else {"a_main": cpus(expected)}
    assert answer == (Cpuset(cpus=cpus(expected), lift_quota=False) if expected else None)
    assert desk.books.group_pods()[0].near == near
    assert desk.pool == ALL
    assert desk.pinned() == {}


def test_who_is_near_gives_way_to_who_is_pinned() -> None:
    desk = sit(NEAR)
    pod = pod_of("a", 2, {})
    desk.run(pod, container_of(pod, 2, [2]))
    assert desk.run_one("b", 4, [3]).cpus == cpus("8-11")
    of_pod = {one.uid: one for one in desk.books.group_pods()}
    assert of_pod["a"].near == {"a_main": cpus("12-15")}
    assert of_pod["b"].near == {}


def test_near_a_node_without_shared_cpus_is_anywhere() -> None:
    desk = sit(NEAR)
    desk.run_one("a", 8, [2])
    pod = pod_of("b", 2, {})
    assert desk.run(pod, container_of(pod, 2, [3])) == [None]
    assert desk.books.group_pods()[1].near == {}


# --- restarts -------------------------------------------------------------------------------------


def running(container: RuntimeContainer, answer: Cpuset) -> RuntimeContainer:
    """As the runtime shows it later: with its cpuset, and without a quota."""
    time = replace(container.cpu_time, quota_us=-1)
    return replace(
        container, stage=Stage.RUNNING, cpus=answer.cpus, mems=answer.mems, cpu_time=time
    )


def test_what_runs_pinned_is_adopted() -> None:
    """On CPUs that nobody would choose."""
    pods = [pod_of("a", 4), pod_of("b", 2)]
    containers = [
        running(container_of(pods[0], 4, [2]), Cpuset(cpus=cpus("9,11-13"), mems=cpus("1"))),
        running(container_of(pods[1], 2, [0]), Cpuset(cpus=cpus("5-6"))),
    ]
    desk = sit()
    assert desk.books.on_synchronize(pods, containers) == {}
    desk.books.settle(NODE, Rules())
    assert desk.pinned() == {"a_main": cpus("9,11-13"), "b_main": cpus("5-6")}
    assert desk.run_one("c", 2, [3]).cpus == cpus("14-15")


def test_a_restart_changes_nothing() -> None:
    first, second = sit(), sit()
    pods = [pod_of(name, 4) for name in "abc"]
    containers = [container_of(pod, 4, [gpu]) for pod, gpu in zip(pods, (2, 3, 0), strict=True)]
    answers = [first.run(pod, one)[0] for pod, one in zip(pods, containers, strict=True)]
    shown = [running(*pair) for pair in zip(containers, answers, strict=True)]
    for order in itertools.permutations(range(3)):
        second = sit()
        corrected = second.books.on_synchronize(pods, [shown[place] for place in order])
        assert corrected == {}
        assert second.held() == first.held()


def test_those_that_have_other_cpus_are_corrected(desk: Desk) -> None:
    pods = [pod_of("a", 4), pod_of("b", 4)]
    containers = [container_of(pods[0], 4, [2]), container_of(pods[1], 4, [3])]
    (one,), (two,) = (desk.run(*pair) for pair in zip(pods, containers, strict=True))
    shown = [
        running(containers[0], one),
        running(containers[1], Cpuset(cpus=cpus("0-15"))),
    ]
    assert desk.books.on_synchronize(pods, shown) == {"b_main": two}
    assert desk.books.on_synchronize(pods, [shown[0], running(containers[1], two)]) == {}
    assert desk.pinned() == {"a_main": one.cpus, "b_main": two.cpus}


def test_what_was_created_meanwhile_is_pinned(desk: Desk) -> None:
    pod = pod_of("a", 4)
    late = container_of(pod, 4, [2], stage=Stage.RUNNING)
    assert desk.books.on_synchronize([pod], [late]) == {"a_main": Cpuset(cpus=cpus("8-11"))}


def test_what_went_meanwhile_holds_nothing(desk: Desk) -> None:
    desk.run_one("a", 4, [2])
    assert desk.books.on_synchronize([], []) == {}
    assert desk.held() == {}
    assert desk.pool == ALL


def test_sandboxes_that_have_ended_hold_nothing(desk: Desk) -> None:
    ended = pod_of("a", 4, pid=0)
    assert desk.books.on_synchronize([ended], []) == {}
    assert desk.held() == {}


def test_a_pod_without_containers_yet_holds_what_it_asks(desk: Desk) -> None:
    assert desk.books.on_synchronize([pod_of("a", 4)], []) == {}
    assert len(union_of(desk.held())) == 4


@pytest.mark.parametrize(
    "old_first",
    [
        pytest.param(True, id="old first"),
        pytest.param(
            False,
            id="new first",
        ),
    ],
)
def test_a_sandbox_that_was_made_anew_is_the_same_pod(desk: Desk, old_first: bool) -> None:
    """The old one is still listed, with its container that has ended; the runtime's list has no
    order."""
    new = pod_of("a", 4)
    old = replace(new, id="sandbox-old", pid=0)
    runs = running(container_of(new, 4, [2], id_="new"), Cpuset(cpus=cpus("12-15")))
    ended = container_of(old, 4, [2], id_="old", stage=Stage.STOPPED)
    pods, containers = ([old, new], [ended, runs]) if old_first else ([new, old], [runs, ended])
    assert desk.books.on_synchronize(pods, containers) == {}
    assert desk.held() == {"a/main": cpus("12-15")}
    assert desk.pinned() == {"new": cpus("12-15")}


@pytest.mark.parametrize(
    ("devices", "visible", "updated"),
    [
        pytest.param(("/dev/null", "/dev/nvidia2"), "GPU-2", True, id="its GPUs are its devices"),
        pytest.param((), "GPU-2", False, id="its GPUs are known to a hook only"),
        pytest.param(("/dev/null",), "all", False, id="it sees all GPUs by a hook"),
        pytest.param((), None, True, id="it has no GPUs"),
        pytest.param((), "void", True, id="its image asks for none, void"),
        pytest.param((), "none", True, id="its image asks for none, none"),
        pytest.param((), "", True, id="its image asks for none, empty"),
    ],
)
def test_who_would_lose_its_gpus_is_never_updated(
    desk: Desk, devices: tuple[str, ...], visible: str | None, updated: bool
) -> None:
    pod = pod_of("a", 4)
    container = container_of(pod, 4, stage=Stage.RUNNING, devices=devices, visible_devices=visible)
    expected = Cpuset(cpus=cpus("2-5"))
    corrected = desk.books.on_synchronize([pod], [container])
    assert corrected == ({"a_main": expected} if updated else {})
    assert desk.books.on_update(pod, container, None) == (expected if updated else None)
    assert desk.pinned() == {"a_main": expected.cpus}  # the cgroups are to follow


def test_containers_that_have_ended_are_not_updated(desk: Desk) -> None:
    pod = pod_of("a", 4)
    ended = container_of(pod, 4, [2], stage=Stage.STOPPED)
    assert desk.books.on_synchronize([pod], [ended]) == {}
    assert desk.pinned() == {}
    assert len(union_of(desk.held())) == 4


# --- updates --------------------------------------------------------------------------------------


def test_a_pinned_container_keeps_its_cpus_whoever_asks(desk: Desk) -> None:
    pod = pod_of("a", 4, memory_bytes=GIB)
    container = container_of(pod, 4, [2], memory_bytes=GIB)
    (answer,) = desk.run(pod, container)
    assert answer.mems == cpus("1")
    asked = replace(container, cpus=cpus("0-3"), cpu_time=time_of(4))
    assert desk.books.on_update(pod, asked, None) == answer
    assert desk.held() == {"a/main": answer.cpus}


def test_others_may_be_updated_as_anybody_likes(desk: Desk) -> None:
    pod = pod_of("a", 2, {})
    container = container_of(pod, 2, [2])
    desk.run(pod, container)
    assert desk.books.on_update(pod, container, None) is None
    assert desk.books.on_update(pod, replace(container, id="unknown"), None) is None


# --- the end --------------------------------------------------------------------------------------


def test_a_pod_holds_its_cpus_until_its_sandbox_ends(desk: Desk) -> None:
    desk.run_one("a", 4, [2])
    for end in (desk.books.on_stop, desk.books.on_remove):
        end("a_main")
        desk.books.settle(NODE, Rules())
        assert desk.pool == ALL - cpus("8-11")
        assert desk.pinned() == {}
    desk.books.on_end_pod("sandbox-a")
    desk.books.settle(NODE, Rules())
    assert desk.pool == ALL
    assert desk.books.group_pods() == ()


def test_what_a_pod_held_is_free_for_the_next_creation(desk: Desk) -> None:
    """Without a pass in between."""
    first = desk.run_one("a", 8, [2])
    desk.books.on_end_pod("sandbox-a")
    assert desk.run_one("b", 8, [3]) == first


Event = Callable[[Desk, RuntimePod], object]


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(lambda desk, _: desk.books.on_start("unknown"), id="start"),
        pytest.param(lambda desk, _: desk.books.on_stop("unknown"), id="stop"),
        pytest.param(lambda desk, _: desk.books.on_remove("unknown"), id="remove"),
        pytest.param(lambda desk, _: desk.books.on_end_pod("unknown"), id="end of a pod"),
        pytest.param(lambda desk, pod: desk.books.on_start(pod.id), id="start of a sandbox"),
        pytest.param(lambda desk, _: desk.books.on_end_pod("a_main"), id="end of a container"),
    ],
)
def test_ids_that_nobody_knows_change_nothing(desk: Desk, event: Event) -> None:
    desk.run_one("a", 4, [2])
    before = desk.held(), desk.pinned(), desk.books.group_pods()
    event(desk, pod_of("a", 4))
    desk.books.settle(NODE, Rules())
    assert (desk.held(), desk.pinned(), desk.books.group_pods()) == before


def test_a_container_of_an_unknown_pod_is_created(desk: Desk) -> None:
    """Its sandbox was started before we were asked."""
    pod = pod_of("a", 4)
    assert desk.books.on_create(pod, container_of(pod, 4, [2])) == Cpuset(cpus=cpus("8-11"))


# --- what the cgroups are judged by ---------------------------------------------------------------


def test_the_groups_of_a_pinned_pod(desk: Desk) -> None:
    pod = pod_of("a", 6)
    one, two = container_of(pod, 2, [2], "one"), container_of(pod, 4, [3], "two")
    desk.books.on_run_pod(pod)
    desk.books.on_create(pod, one)
    (group,) = desk.books.group_pods()
    assert group.uid == "a"
    assert group.containers == group.pinned.keys() == {"a_one"}
    assert len(group.held) == 6  # the other is to come
    desk.books.on_create(pod, two)
    desk.books.on_stop("a_one")
    (group,) = desk.books.group_pods()
    assert group.containers == group.pinned.keys() == {"a_two"}
    assert len(group.held) == 6
    assert not group.waits


def test_a_pod_that_nobody_settled_yet_waits(desk: Desk) -> None:
    """It asks for CPUs, and the pass has not come to it."""
    pod = pod_of("a", 4)
    desk.books.on_run_pod(pod)
    desk.books.settle(NODE, Rules())
    (group,) = desk.books.group_pods()
    assert (len(group.held), group.waits, group.containers) == (4, False, frozenset())


def test_a_refused_pod_does_not_wait() -> None:
    desk = sit(WARN)
    desk.run_one("a", 8, [0], **policy("SingleNUMANode"))
    assert [group.waits for group in desk.books.group_pods()] == [False]


TURNS: dict[str, Event] = {
    "a pod": lambda desk, pod: desk.books.on_run_pod(pod),
    "a creation": lambda desk, pod: desk.books.on_create(pod, container_of(pod, 2, [2])),
    "a refusal": lambda desk, pod: desk.books.on_create(pod, container_of(pod, 9, [2])),
    "a start": lambda desk, _: desk.books.on_start("a_main"),
    "an end": lambda desk, _: desk.books.on_stop("a_main"),
    "a removal": lambda desk, _: desk.books.on_remove("a_main"),
    "a pod's end": lambda desk, _: desk.books.on_end_pod("sandbox-a"),
    "others than before": lambda desk, pod: desk.books.on_synchronize([pod], []),
    "a reserved CPU that was held": lambda desk, _: desk.books.settle(
        replace(NODE, reserved=cpus("0-1,8")), Rules()
    ),
}
QUIET: dict[str, Event] = {
    "a pass": lambda desk, _: desk.books.settle(NODE, Rules()),
    "a machine read anew": lambda desk, _: desk.books.settle(
        replace(NODE, machine=build((2, 4), (2, 4))), Rules()
    ),
    "an update": lambda desk, pod: desk.books.on_update(pod, container_of(pod, 4, [2]), None),
    "looking": lambda desk, _: (desk.books.group_pods(), desk.books.pinned(), desk.books.ledger),
}
PASSES = {"a reserved CPU that was held"}
"""What a pass itself finds."""


@pytest.mark.parametrize("name", TURNS | QUIET)
def test_the_turn_counts_what_happens(desk: Desk, name: str) -> None:
    desk.run_one("a", 4, [2])
    turn = desk.books.turn
    (TURNS | QUIET)[name](desk, pod_of("a", 4))
    assert (desk.books.turn > turn) is (name in TURNS)


@pytest.mark.parametrize("name", TURNS | QUIET)
def test_what_the_cgroups_are_to_follow_rings(desk: Desk, name: str) -> None:
    desk.run_one("a", 4, [2])
    rings = len(desk.rings)
    (TURNS | QUIET)[name](desk, pod_of("a", 4))
    assert (len(desk.rings) > rings) is (name in TURNS.keys() - PASSES)


def test_seeing_the_same_again_is_no_news(desk: Desk) -> None:
    pod = pod_of("a", 4)
    container = container_of(pod, 4, [2], stage=Stage.RUNNING)
    desk.books.see([pod], [container])
    turn = desk.books.turn
    desk.books.see([pod], [container])
    assert desk.books.turn == turn
    desk.books.see([pod], [replace(container, stage=Stage.STOPPED)])
    assert desk.books.turn > turn


# --- many threads ---------------------------------------------------------------------------------


@dataclass(slots=True)
class Runtime:
    """Lives of pods in one thread, as the runtime tells of them; and what it was answered."""

    books: Books
    seed: int
    kept: dict[str, Cpuset] = field(default_factory=dict)
    refused: int = 0

    def live(self, lives: int) -> None:
        dice = random.Random(self.seed)
        pods: list[RuntimePod] = []
        for number in range(lives):
            pod = pod_of(f"p{self.seed}-{number}", dice.choice([1, 2, 2, 3]))
            pods.append(pod)
            self._start(pod, dice)
            if dice.random() < 0.6:
                self._end(pods.pop(dice.randrange(len(pods))))
            self._check()

    def _start(self, pod: RuntimePod, dice: random.Random) -> None:
        assert pod.cpu_time is not None
        assert pod.cpu_time.shares is not None
        container = container_of(pod, pod.cpu_time.shares // 1024)
        self.books.on_run_pod(pod)
        answer = self.books.on_create(pod, container)
        if isinstance(answer, Cpuset):
            self.kept[container.id] = answer
            self.books.on_start(container.id)
        else:
            self.refused += isinstance(answer, Refusal)

    def _end(self, pod: RuntimePod) -> None:
        self.kept.pop(f"{pod.uid}_main", None)
        self.books.on_stop(f"{pod.uid}_main")
        self.books.on_end_pod(pod.id)

    def _check(self) -> None:
        now = {one.container.id: one.cpuset for one in self.books.pinned()}
        assert {id_: now.get(id_) for id_ in self.kept} == self.kept


def look(books: Books) -> None:
    """Nobody has another's CPUs at any time, and nobody has a reserved one."""
    held = [one.cpuset.cpus for one in books.pinned()]
    assert sum(map(len, held)) == len(Bitmap(cpu for some in held for cpu in some))
    assert not any(some & RESERVED for some in held)
    pods = [one.held for one in books.group_pods()]
    assert sum(map(len, pods)) == len(Bitmap(cpu for some in pods for cpu in some))


def run_all(*actions: Callable[[], None]) -> Iterator[BaseException]:
    """What they raise, each in a thread of its own."""
    raised: list[BaseException] = []

    def guard(action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=guard, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return iter(raised)


def test_callbacks_from_many_threads_while_a_pass_settles(desk: Desk) -> None:
    runtimes = [Runtime(desk.books, seed) for seed in range(3)]

    def settle() -> None:
        for _ in range(60):
            desk.books.settle(NODE, Rules())
            look(desk.books)

    lives: list[Callable[[], None]] = [lambda one=one: one.live(40) for one in runtimes]
    for error in run_all(settle, *lives):
        raise error
    desk.books.settle(NODE, Rules())
    look(desk.books)
    kept = {id_: answer.cpus for one in runtimes for id_, answer in one.kept.items()}
    pinned = desk.pinned()
    assert {id_: pinned[id_] for id_ in kept} == kept
    assert sum(one.refused for one in runtimes) > 0
    for group in desk.books.group_pods():
        desk.books.on_end_pod(f"sandbox-{group.uid}")
    desk.books.settle(NODE, Rules())
    assert desk.pool == ALL
    assert desk.held() == {}


# --- the specification, which may come later ------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A container of a pod: what it asks, and the GPUs that kubelet gives it."""

    name: str = "main"
    role: Role = Role.APP
    cpus: int = 2
    gpus: tuple[int, ...] = ()
    memory_bytes: int = GIB

    def to_json(self) -> dict[str, Any]:
        amounts = {"cpu": str(self.cpus), "memory": str(self.memory_bytes)}
        if self.gpus:
            amounts[GPU_RESOURCE] = str(len(self.gpus))
        always = {"restartPolicy": "Always"} if self.role is Role.SIDECAR else {}
        return {"name": self.name, "resources": {"limits": amounts, "requests": amounts}, **always}


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """A pod as its user, kubelet and the runtime see it."""

    name: str
    parts: tuple[Part, ...]
    annotations: dict[str, str] = field(default_factory=lambda: dict(PIN))

    def spec(self) -> dict[str, Any]:
        """As the agent keeps it of what the API server shows."""
        lists = {
            "initContainers": [one.to_json() for one in self.parts if one.role is not Role.APP],
            "containers": [one.to_json() for one in self.parts if one.role is Role.APP],
        }
        names = {"name": self.name, "namespace": "ns", "uid": self.name}
        trimmed = trim_pod(
            {
                "metadata": {**names, "annotations": self.annotations},
                "spec": {**lists, "nodeName": "node"},
                "status": {"phase": "Running"},
            }
        )
        assert trimmed is not None
        return trimmed

    def sandbox(self) -> RuntimePod:
        """With the sum that kubelet works out for it: the most that runs at once."""
        memory = peak(self.parts, lambda one: one.memory_bytes)
        count = peak(self.parts, lambda one: one.cpus)
        return pod_of(self.name, count, self.annotations, memory_bytes=memory)

    def container(self, part: Part) -> RuntimeContainer:
        memory = part.memory_bytes
        return container_of(self.sandbox(), part.cpus, part.gpus, part.name, memory_bytes=memory)

    def holdings(self) -> tuple[Holding, ...]:
        devices = {
            one.name: tuple(f"GPU-{gpu}" for gpu in one.gpus) for one in self.parts if one.gpus
        }
        return (Holding(pod=f"ns/{self.name}", devices=devices),) if devices else ()


def peak(parts: Iterable[Part], size: Callable[[Part], int]) -> int:
    """Sidecars stay, an init container is gone before the next one comes."""
    most = beside = 0
    for one in parts:
        most = max(most, beside + size(one))
        beside += 0 if one.role is Role.INIT else size(one)
    return most


@dataclass(slots=True)
class Play:
    """Books, the specifications that the API server has told, and what runs with which cpuset."""

    told: list[PodEvent] = field(default_factory=list)
    specs: dict[str, Any] = field(default_factory=dict)
    stories: dict[str, Story] = field(default_factory=dict)
    running: dict[str, Cpuset] = field(default_factory=dict)
    books: Books = field(init=False)

    def __post_init__(self) -> None:
        self.books = Books(lambda: None, self.told.extend)
        self.settle()

    def settle(self) -> None:
        holdings = tuple(one for story in self.stories.values() for one in story.holdings())
        self.books.settle(replace(NODE, specs=dict(self.specs), holdings=holdings), Rules())
        self.check()

    def know(self, story: Story) -> None:
        self.specs[story.name] = story.spec()
        self.settle()

    def forget(self, story: Story) -> None:
        self.specs.pop(story.name, None)
        self.settle()

    def begin(self, story: Story) -> None:
        """Kubelet has given it its GPUs, which a pass has seen; its sandbox runs."""
        self.stories[story.name] = story
        self.settle()
        self.books.on_run_pod(story.sandbox())

    def create(self, story: Story, part: Part) -> Cpuset | Refusal | None:
        container = story.container(part)
        answer = self.books.on_create(story.sandbox(), container)
        if isinstance(answer, Cpuset):
            self.running[container.id] = answer
            self.books.on_start(container.id)
        self.check()
        return answer

    def stop(self, story: Story, part: Part) -> None:
        id_ = story.container(part).id
        self.running.pop(id_)
        self.books.on_stop(id_)
        self.settle()

    def renew(self, blind: bool) -> None:
        """Another agent, which the runtime tells of all pods; if `blind`, before it knows what any
        of them asks."""
        pods = [story.sandbox() for story in self.stories.values()]
        parts = [(story, part) for story in self.stories.values() for part in story.parts]
        shown = [
            running(container, self.running[container.id])
            for container in (story.container(part) for story, part in parts)
            if container.id in self.running
        ]
        holdings = tuple(one for story in self.stories.values() for one in story.holdings())
        specs = None if blind else dict(self.specs)
        self.books = Books(lambda: None, self.told.extend)
        self.books.settle(replace(NODE, specs=specs, holdings=holdings), Rules())
        assert self.books.on_synchronize(pods, shown) == {}
        self.check()
        self.settle()

    def end(self, story: Story) -> None:
        for part in story.parts:
            self.running.pop(story.container(part).id, None)
        del self.stories[story.name]
        self.specs.pop(story.name, None)
        self.books.on_end_pod(story.sandbox().id)
        self.settle()

    def held(self, story: Story) -> tuple[Bitmap, Bitmap]:
        """CPUs and memory nodes of a pod."""
        assert self.books.ledger is not None
        grants = self.books.ledger.of_pod(story.name)
        cpus_ = Bitmap(cpu for one in grants for cpu in one.cpus)
        return cpus_, Bitmap(node for one in grants for node in one.mems)

    def check(self) -> None:
        """Who runs has what it was created with, and nobody else has any of it."""
        now = {one.container.id: one.cpuset for one in self.books.pinned()}
        assert {id_: now.get(id_) for id_ in self.running} == self.running
        look(self.books)

    def said(self, *reasons: Reason) -> list[str]:
        return [one.message for one in self.told if one.reason in reasons]


def decided(**cpus_of: str) -> dict[str, str]:
    """A scheduler's decision for each container by name, as ACK writes it."""
    sets = {
        name: {"0": {"elems": {cpu: {} for cpu in text.split(",")}}}
        for name, text in cpus_of.items()
    }
    return {CPUSET_KEY: json.dumps(sets)}


INIT, SIDECAR = Part(name="init", role=Role.INIT), Part(name="proxy", role=Role.SIDECAR)
STORIES = {
    "one container": Story(name="a", parts=(Part(),)),
    "with a GPU": Story(name="a", parts=(Part(gpus=(2,)),)),
    "with GPUs on both nodes": Story(
        name="a", parts=(Part(cpus=4, gpus=(1, 2)),), annotations=PIN | policy("Restricted")
    ),
    "two containers": Story(name="a", parts=(Part(gpus=(2,)), Part(name="two", cpus=3))),
    "two with GPUs, on one node": Story(
        name="a",
        parts=(Part(gpus=(2,)), Part(name="two", gpus=(3,))),
        annotations=PIN | policy("SingleNUMANode"),
    ),
    "an init container": Story(name="a", parts=(INIT, Part(cpus=4, gpus=(2,)))),
    "an init container with most": Story(
        name="a", parts=(replace(INIT, cpus=5, memory_bytes=4 * GIB), Part(gpus=(2,)))
    ),
    "a sidecar": Story(name="a", parts=(SIDECAR, Part(gpus=(2,)))),
    "all kinds": Story(
        name="a", parts=(SIDECAR, INIT, replace(INIT, name="init-2", cpus=3), Part(gpus=(0,)))
    ),
    "decided, one container": Story(
        name="a", parts=(Part(gpus=(2,)),), annotations=PIN | decided(main="14,15")
    ),
    "decided, two containers": Story(
        name="a",
        parts=(Part(), Part(name="two", gpus=(2,))),
        annotations=PIN | decided(main="12,13", two="14,15"),
    ),
    "decided, one set for all": Story(
        name="a",
        parts=(Part(), Part(name="two", gpus=(2,))),
        annotations=PIN | {STATUS_KEY: '{"cpuset":"12-15"}'},
    ),
    "decided, the GPUs": Story(
        name="a", parts=(Part(gpus=(1, 2)),), annotations=PIN | {GROUP_KEY: "1,2"}
    ),
}


@pytest.mark.parametrize("at", range(5), ids=lambda at: f"after {at} containers")
@pytest.mark.parametrize("name", STORIES)
def test_a_specification_that_comes_later_moves_nothing(name: str, at: int) -> None:
    """Nor does one that is gone before its pod."""
    play, story = Play(), STORIES[name]
    play.begin(story)
    play.settle()
    for number, part in enumerate(story.parts):
        if number == at:
            play.know(story)
        answer = play.create(story, part)
        assert isinstance(answer, Cpuset)
        assert len(answer.cpus) == part.cpus
        if part.role is Role.INIT:
            play.stop(story, part)
    before = play.held(story)
    play.know(story)
    assert play.held(story) == before
    play.forget(story)
    assert play.held(story) == before
    assert len(before[0]) == peak(story.parts, lambda one: one.cpus)
    assert play.said(Reason.REFUSED) == []


SHAPES = (
    [Role.APP],
    [Role.APP, Role.APP],
    [Role.INIT, Role.APP],
    [Role.SIDECAR, Role.APP],
    [Role.INIT, Role.INIT, Role.APP],
    [Role.INIT, Role.SIDECAR, Role.APP],
    [Role.SIDECAR, Role.INIT, Role.APP, Role.APP],
)
POLICIES = [{}, policy("SingleNUMANode"), policy("Restricted"), policy("BestEffort")]


@dataclass(slots=True)
class Director:
    """Lets pods live side by side while their specifications come and go."""

    data: st.DataObject
    play: Play = field(default_factory=Play)
    next_parts: dict[str, list[Part]] = field(default_factory=dict)
    pods: int = 0

    def pick(self, items: Sequence[Any], label: str) -> Any:
        return self.data.draw(st.sampled_from(items), label)

    def step(self) -> None:
        names = sorted(self.play.stories)
        if not names or (len(names) < 3 and self.pick([True, False, False], "start")):
            self.start()
            return
        story = self.play.stories[self.pick(names, "pod")]
        moves = {
            "on": self.go_on,
            "known or not": self.toggle,
            "restart": self.restart,
            "a new agent": self.renew,
        }
        moves[self.pick(["on", "on", *moves], "move")](story)

    def start(self) -> None:
        assert self.play.books.ledger is not None
        free = list(self.play.books.ledger.free_gpus)
        self.pods += 1
        parts = []
        for number, role in enumerate(self.pick(SHAPES, "shape")):
            count = self.pick([0, 0, 1, 2], "GPUs") if role is not Role.INIT else 0
            mine, free = tuple(free[:count]), free[count:]
            size, memory = self.pick([1, 2, 3], "CPUs"), self.pick([GIB, 2 * GIB], "memory")
            part = Part(
                name=f"{role}{number}", role=role, cpus=size, gpus=mine, memory_bytes=memory
            )
            parts.append(part)
        annotations = PIN | self.pick(POLICIES, "policy")
        gpus = ",".join(str(gpu) for part in parts for gpu in part.gpus)
        if gpus and self.pick([True, False], "decided"):
            annotations |= {GROUP_KEY: gpus}
        story = Story(name=f"p{self.pods}", parts=tuple(parts), annotations=annotations)
        known = self.pick([True, False], "known before")
        note(f"start {story}{' known before' if known else ''}")
        if known:
            self.play.know(story)
        self.play.begin(story)
        self.next_parts[story.name] = parts

    def go_on(self, story: Story) -> None:
        """Its next container, after the end of an init container; or its end."""
        waiting, live = self.next_parts[story.name], self.live(story)
        if not waiting:
            self.play.end(story)
        elif live and live[-1].role is Role.INIT:
            self.play.stop(story, live[-1])
        elif isinstance(answer := self.play.create(story, waiting[0]), Refusal):
            assert len(waiting) == len(story.parts), answer  # else it had been let in
            self.play.end(story)
        else:
            assert isinstance(answer, Cpuset)
            assert len(answer.cpus) == waiting.pop(0).cpus

    def live(self, story: Story) -> list[Part]:
        return [one for one in story.parts if story.container(one).id in self.play.running]

    def toggle(self, story: Story) -> None:
        before = self.play.held(story)
        known = story.name in self.play.specs
        note(f"{story.name} is {'forgotten' if known else 'known'}")
        (self.play.forget if known else self.play.know)(story)
        if self.live(story):
            assert self.play.held(story) == before

    def renew(self, story: Story) -> None:
        """While of each pod something runs, or nothing has yet: what waits between two of its
        containers keeps nothing, as there is no state."""
        begun = [
            one
            for one in self.play.stories.values()
            if len(self.next_parts[one.name]) < len(one.parts)
        ]
        if all(map(self.live, begun)):
            self.play.renew(self.pick([True, False], "blind"))

    def restart(self, story: Story) -> None:
        if live := [one for one in self.live(story) if one.role is not Role.INIT]:
            part = self.pick(live, "container")
            held = self.play.held(story)[0]
            note(f"{story.name} {part.name} is started anew")
            self.play.stop(story, part)
            answer = self.play.create(story, part)
            assert isinstance(answer, Cpuset)
            assert len(answer.cpus) == part.cpus
            assert answer.cpus <= held


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_specifications_that_come_and_go_move_nobody(data: st.DataObject) -> None:
    director = Director(data)
    for _ in range(data.draw(st.integers(4, 16), "steps")):
        director.step()


def test_an_init_container_gets_no_more_than_it_asks_of_a_shared_decision() -> None:
    """The sandbox is seen first, the specification then."""
    parts = (replace(INIT, cpus=1), Part())
    play = Play()
    story = Story(name="a", parts=parts, annotations=PIN | {STATUS_KEY: '{"cpuset":"12-13"}'})
    play.begin(story)
    play.settle()
    play.know(story)
    answer = play.create(story, parts[0])
    assert isinstance(answer, Cpuset)
    assert len(answer.cpus) == 1


INVALID: dict[str, Callable[[dict[str, Any]], object]] = {
    "a container without CPUs": lambda pod: pod["spec"]["containers"].append(
        {"name": "log", "resources": {}}
    ),
    "a container with a part of a CPU": lambda pod: pod["spec"]["containers"].append(
        {"name": "log", "resources": {"requests": {"cpu": "100m"}}}
    ),
    "a policy that is none, written since": lambda pod: pod["metadata"]["annotations"].update(
        policy("Sometimes")
    ),
    "no JSON, written since": lambda pod: pod["metadata"]["annotations"].update(
        {SPEC_KEYS[0]: "{"}
    ),
}


@pytest.mark.parametrize("name", INVALID)
def test_who_runs_pinned_keeps_its_cpus_whatever_its_specification_says(name: str) -> None:
    """The runtime did not tell, or an annotation was changed since."""
    play, story = Play(), STORIES["with a GPU"]
    play.begin(story)
    assert isinstance(play.create(story, story.parts[0]), Cpuset)
    pod = story.spec()
    INVALID[name](pod)
    play.specs["a"] = pod
    play.settle()
    assert play.held(story)[0] == cpus("8-9")
    other = Story(name="b", parts=(Part(cpus=6, gpus=(3,)),))
    play.begin(other)
    play.create(other, other.parts[0])


def test_a_specification_of_another_name_is_not_the_pods() -> None:
    """Anybody may make a pod with the annotation of a likeness, and so say any uid."""
    play, story = Play(), STORIES["with a GPU"]
    play.begin(story)
    assert isinstance(play.create(story, story.parts[0]), Cpuset)
    strange = replace(story, name="evil", parts=(Part(cpus=1),)).spec()
    strange["metadata"]["uid"] = "a"
    play.specs["a"] = strange
    play.settle()
    assert play.held(story)[0] == cpus("8-9")


def test_a_gpu_that_a_pod_has_left_goes_to_the_next() -> None:
    """Kubelet has given it on since it was asked for its list, in which the old pod comes first."""
    play, old = Play(), STORIES["with a GPU"]
    play.begin(old)
    assert isinstance(play.create(old, old.parts[0]), Cpuset)
    play.running.clear()
    play.books.on_end_pod(old.sandbox().id)
    new = replace(old, name="z")
    play.books.on_run_pod(new.sandbox())
    assert isinstance(play.create(new, new.parts[0]), Cpuset)


# --- what is told of pods -------------------------------------------------------------------------


def test_a_pod_that_starts_is_told_of_once_and_by_the_names_of_its_containers() -> None:
    """A pass comes between its sandbox and its container."""
    play, story = Play(), STORIES["with a GPU"]
    play.begin(story)
    play.settle()
    play.create(story, story.parts[0])
    play.settle()
    play.know(story)
    assert [one.reason for one in play.told] == [Reason.PINNED]
    assert play.told[0].message == "main: CPUs 8-9 of NUMA node 1, GPUs 2, memory bound to 1"


def test_a_decision_about_containers_to_come_is_not_told_as_ignored() -> None:
    parts = (INIT, Part(gpus=(2,)))
    annotations = PIN | decided(init="12,13", main="12,13")
    play, story = Play(), Story(name="a", parts=parts, annotations=annotations)
    play.begin(story)
    play.settle()
    for part in parts:
        answer = play.create(story, part)
        assert isinstance(answer, Cpuset)
        assert answer.cpus == cpus("12-13")
        if part.role is Role.INIT:
            play.stop(story, part)
    assert play.said(Reason.IGNORED, Reason.OTHERWISE) == []


def test_a_decided_pod_has_its_memory_bound_whoever_is_first() -> None:
    """A pass comes between its sandbox and its container."""
    play, story = Play(), STORIES["decided, one container"]
    play.begin(story)
    play.settle()
    answer = play.create(story, story.parts[0])
    assert answer == Cpuset(cpus=cpus("14-15"), mems=cpus("1"))
