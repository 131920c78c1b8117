"""What is told of pods as Events, and how often.

The machine has two nodes of four cores with two threads and two GPUs each: CPUs 0-7 with GPU-0 and
GPU-1, CPUs 8-15 with GPU-2 and GPU-3.
"""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.bitmap import Bitmap
from agent.core.ledger import Grant, Ledger
from agent.core.podevents import (
    PodEvent,
    Reason,
    Told,
    admit,
    see_pins,
    see_verdicts,
    to_event,
)
from agent.core.runtime import RuntimeContainer, RuntimePod, Stage
from agent.core.settlement import Refused, Settlement
from tests.core.oracle import build, grant, ledger_of

MACHINE = build((2, 4), (2, 4))
ONE_NODE = grant("a", [2, 3], "8-11", mems="1", bound_bytes=1 << 30)
NAMES = {"a": "ns/a", "b": "ns/b"}


# --- verdicts -------------------------------------------------------------------------------------


def verdicts(
    *, refused: str = "", note: str = "", known: bool = True
) -> list[tuple[str, str, str]]:
    """(pod, reason, message) of what is told, where a pod is refused, and a note is made of it."""
    settlement = Settlement(
        ledger=ledger_of(MACHINE),
        changes=(),
        refused=(Refused(uid="a", pod="ns/a", reason=refused),) if refused else (),
        notes=(("a", note),) if note else (),
    )
    told = see_verdicts(settlement, NAMES, ["a"] if known else [])
    return [(one.pod, one.reason.value, one.message) for one in told]


def test_who_is_refused_is_told_why_whatever_is_known_of_it() -> None:
    expected = [("ns/a", "Refused", "no room")]
    assert verdicts(refused="no room") == verdicts(refused="no room", known=False) == expected


def test_who_is_placed_otherwise_is_told_once_it_is_known_what_it_asks() -> None:
    assert verdicts(note="not as decided") == [("ns/a", "PlacedOtherwise", "not as decided")]
    assert verdicts(note="not as decided", known=False) == []


def test_verdicts_on_a_pod_without_a_name_are_told_to_nobody() -> None:
    """As of one that only kubelet's list of devices knows."""
    refused = (Refused(uid="ns/x", pod="ns/x", reason="no room"),)
    notes = (("ns/x", "not as decided"),)
    settlement = Settlement(ledger=ledger_of(MACHINE), changes=(), refused=refused, notes=notes)
    assert list(see_verdicts(settlement, NAMES, ["ns/x"])) == []


# --- pins -----------------------------------------------------------------------------------------

POD = RuntimePod(id="sandbox", uid="a", pod="ns/a")


def container(name: str = "main", cpus: str = "", stage: Stage = Stage.CREATING) -> Any:
    """A container of the pod, with the cpuset that the runtime has for it."""
    return RuntimeContainer(
        id=f"c-{name}", pod_id="sandbox", name=name, stage=stage, cpus=Bitmap.parse_list(cpus)
    )


def pins(
    ledger: Ledger, *containers: RuntimeContainer, told: str = ""
) -> tuple[list[tuple[str, str, str]], dict[str, Bitmap]]:
    """(container, reason, message) of what is told, and what is told by then."""
    before = {"c-main": Bitmap.parse_list(told)} if told else {}
    events, now = see_pins(ledger, {"sandbox": POD}, containers, before)
    assert {(one.uid, one.pod) for one in events} <= {("a", "ns/a")}
    return [(one.container, one.reason.value, one.message) for one in events], dict(now)


@pytest.mark.parametrize(
    ("held", "message"),
    [
        pytest.param(
            ONE_NODE,
            "main: CPUs 8-11 of NUMA node 1, GPUs 2-3, memory bound to 1",
            id="with GPUs and memory",
        ),
        pytest.param(grant("a", cpus="2-3"), "main: CPUs 2-3 of NUMA node 0", id="CPUs only"),
        pytest.param(
            grant("a", [1, 2], "6-9"), "main: CPUs 6-9 of NUMA node 0-1, GPUs 1-2", id="wide"
        ),
        pytest.param(
            grant("a", [0], "8-9"), "main: CPUs 8-9 of NUMA node 0-1, GPUs 0", id="far from it"
        ),
    ],
)
def test_who_gets_cpus_is_told_where(held: Grant, message: str) -> None:
    told, now = pins(ledger_of(MACHINE, held), container())
    assert told == [("main", "Pinned", message)]
    assert now == {"c-main": held.cpus}


def test_each_container_is_told_of_for_itself() -> None:
    ledger = ledger_of(
        MACHINE, grant("a", cpus="2"), replace(grant("a", cpus="8"), container="two")
    )
    told, _ = pins(ledger, container(), container("two"), container("three"))
    assert [(name, reason) for name, reason, _ in told] == [("main", "Pinned"), ("two", "Pinned")]


@pytest.mark.parametrize(
    ("told", "has", "reason"),
    [
        pytest.param("", "", "Pinned", id="new"),
        pytest.param("", "0-15", "Pinned", id="new, on CPUs of everybody"),
        pytest.param("8-11", "8-11", None, id="as told"),
        pytest.param("8-11", "", None, id="as told, not made yet"),
        pytest.param("", "8-11", None, id="pinned before it was seen"),
        pytest.param("2-5", "2-5", "PinMoved", id="elsewhere than told"),
        pytest.param("2-5", "8-11", "PinMoved", id="elsewhere than told, and made so"),
    ],
)
def test_only_what_is_new_is_told(told: str, has: str, reason: str | None) -> None:
    events, now = pins(ledger_of(MACHINE, ONE_NODE), container(cpus=has), told=told)
    assert [one[1] for one in events] == ([reason] if reason else [])
    assert now == {"c-main": Bitmap([8, 9, 10, 11])}


@pytest.mark.parametrize(
    ("held", "one"),
    [
        pytest.param(ONE_NODE, container(stage=Stage.STOPPED), id="a container that has ended"),
        pytest.param(grant("a", [2, 3]), container(), id="one with GPUs only"),
        pytest.param(grant("b", [2, 3], "8-11"), container(), id="one of a pod that holds nothing"),
        pytest.param(ONE_NODE, container("two"), id="one that holds nothing"),
        pytest.param(
            ONE_NODE, replace(container(), pod_id="unknown"), id="one of a pod that is gone"
        ),
    ],
)
def test_nothing_is_told_of(held: Grant, one: RuntimeContainer) -> None:
    assert pins(ledger_of(MACHINE, held), one, told="2-5") == ([], {})


def test_what_was_told_of_a_container_goes_with_it() -> None:
    """One that is made anew under the same name is told of again."""
    ledger = ledger_of(MACHINE, ONE_NODE)
    _, now = pins(ledger, told="8-11")
    assert now == {}


# --- how often ------------------------------------------------------------------------------------


def event_of(
    message: str = "m", uid: str = "a", reason: Reason = Reason.REFUSED, container: str = ""
) -> PodEvent:
    pod = f"ns/{uid}"
    return PodEvent(uid=uid, pod=pod, reason=reason, message=message, container=container)


def admitted(*happened: tuple[float, PodEvent]) -> list[bool]:
    told, answers = Told(), []
    for at_s, event in happened:
        told, answer = admit(told, event, at_s)
        answers.append(answer)
    return answers


@pytest.mark.parametrize(
    ("then_s", "then", "told"),
    [
        pytest.param(599.0, event_of(), False, id="the same within ten minutes"),
        pytest.param(601.0, event_of(), True, id="the same after ten minutes"),
        pytest.param(29.0, event_of("other"), False, id="another reason too soon"),
        pytest.param(31.0, event_of("other"), True, id="another reason half a minute later"),
        pytest.param(0.0, event_of(uid="b"), True, id="another pod at once"),
        pytest.param(0.0, event_of(reason=Reason.PINNED), True, id="something else at once"),
        pytest.param(0.0, event_of(container="two"), True, id="another container at once"),
    ],
)
def test_the_same_is_not_told_again_soon(then_s: float, then: PodEvent, told: bool) -> None:
    assert admitted((1000.0, event_of()), (1000.0 + then_s, then)) == [True, told]


def test_what_changes_to_and_fro_is_told_twice_a_minute_at_most() -> None:
    happened = [(1000.0 + second, event_of(f"m{second % 2}")) for second in range(60)]
    assert sum(admitted(*happened)) == 2


def test_a_burst_is_cut_and_more_may_follow_as_time_goes() -> None:
    """Fifty at once, one more every two seconds."""
    burst = [(1000.0, event_of(uid=f"p{number}")) for number in range(100)]
    later = [(1010.0, event_of(uid=f"q{number}")) for number in range(100)]
    idle = [(9000.0, event_of(uid=f"r{number}")) for number in range(100)]
    answers = admitted(*burst, *later, *idle)
    assert [sum(answers[at : at + 100]) for at in (0, 100, 200)] == [50, 5, 50]


def test_what_was_cut_is_not_taken_for_told() -> None:
    burst = [(1000.0, event_of(uid=f"p{number}")) for number in range(51)]
    assert admitted(*burst, (1010.0, event_of(uid="p50")))[-2:] == [False, True]


def test_a_clock_that_stands_still_gives_no_room() -> None:
    """Nor does one that goes back."""
    burst = [(1000.0, event_of(uid=f"p{number}")) for number in range(50)]
    assert admitted(*burst, (1000.0, event_of(uid="x")), (0.0, event_of(uid="y")))[-2:] == [
        False,
        False,
    ]


happenings = st.lists(
    st.tuples(
        st.floats(0, 120),
        st.sampled_from([event_of(m, u, r) for m in "mn" for u in "ab" for r in Reason]),
    ),
    max_size=40,
)


@given(happenings)
def test_whatever_happens_no_pod_is_told_the_same_twice(
    pauses: list[tuple[float, PodEvent]],
) -> None:
    told, now_s, last = Told(), 500.0, {}
    for pause_s, event in pauses:
        now_s += pause_s
        told, answer = admit(told, event, now_s)
        before = last.get((event.uid, event.reason))
        if answer and before:
            assert now_s - before[1] >= (600 if before[0] == event.message else 30)
        if answer:
            last[event.uid, event.reason] = event.message, now_s
        assert len(told.lately) <= len(last)
        assert 0 <= told.budget <= 50


def test_what_was_told_long_ago_is_forgotten() -> None:
    told = Told()
    for number in range(1000):
        told, _ = admit(told, event_of(uid=f"p{number}"), 1000.0 + 60 * number)
    assert len(told.lately) <= 10


# --- for the API server ---------------------------------------------------------------------------

WHEN = "2026-11-30T14:00:00Z"


def test_an_event_on_a_pod() -> None:
    event = to_event(event_of("no room", uid="web"), "node-1", WHEN)
    assert event == {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"namespace": "ns", "name": name_of(event)},
        "involvedObject": {
            "apiVersion": "v1",
            "kind": "Pod",
            "namespace": "ns",
            "name": "web",
            "uid": "web",
        },
        "reason": "Refused",
        "message": "no room",
        "type": "Warning",
        "firstTimestamp": WHEN,
        "lastTimestamp": WHEN,
        "count": 1,
        "source": {"component": "numalet", "host": "node-1"},
        "reportingComponent": "numalet",
        "reportingInstance": "node-1",
    }


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        (Reason.PINNED, "Normal"),
        (Reason.MOVED, "Normal"),
        (Reason.REFUSED, "Warning"),
        (Reason.OTHERWISE, "Warning"),
        (Reason.IGNORED, "Warning"),
        (Reason.DRIFTED, "Warning"),
    ],
)
def test_what_went_as_asked_is_normal(reason: Reason, kind: str) -> None:
    event = to_event(event_of(reason=reason), "n", WHEN)
    assert (event["type"], event["reason"]) == (kind, str(reason))
    assert re.fullmatch(r"[A-Z][A-Za-z]{2,127}", event["reason"])  # as Kubernetes wants reasons


def test_a_message_is_one_line_of_bounded_length() -> None:
    event = to_event(event_of("a\nb\x00" + "c" * 5000), "n", WHEN)
    assert event["message"].startswith("a?b?ccc")
    assert len(event["message"]) <= 1024 + len("…")


SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
"""Source: RFC 1123, as Kubernetes reads it; names of pods and of Events, 253 characters at most."""
names = st.from_regex(SUBDOMAIN, fullmatch=True).map(lambda name: name[:253])


def name_of(event: dict[str, Any]) -> str:
    return str(event["metadata"]["name"])


def test_the_same_event_has_the_same_name_and_no_other_has() -> None:
    """So that one whose answer was lost is not written twice."""
    one = event_of("m", container="main")
    others = [
        (one, "2026-11-30T14:00:01Z"),
        *(
            (other, WHEN)
            for other in (
                replace(one, message="n"),
                replace(one, uid="b"),
                replace(one, container="two"),
                replace(one, reason=Reason.DRIFTED),
                replace(one, pod="ns/other"),
            )
        ),
    ]
    name = name_of(to_event(one, "n", WHEN))
    assert name == name_of(to_event(one, "n", WHEN))
    assert name.startswith("a.")
    assert len({name, *(name_of(to_event(other, "n", when)) for other, when in others)}) == 7


@given(names.filter(lambda name: len(name) <= 200 and bool(SUBDOMAIN.fullmatch(name))))
def test_the_name_of_an_event(name: str) -> None:
    event = to_event(replace(event_of(), pod=f"ns/{name}"), "n", WHEN)
    assert SUBDOMAIN.fullmatch(name_of(event))
    assert event["involvedObject"]["name"] == name


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("a" * 253, id="letters"),
        pytest.param("a" * 199 + "-" + "b" * 53, id="a dash where it is cut"),
        pytest.param("a" * 199 + "." + "b" * 53, id="a dot where it is cut"),
        pytest.param("a" * 190 + "-" * 30 + "b" * 33, id="many dashes where it is cut"),
    ],
)
def test_the_name_of_an_event_on_a_pod_with_a_long_name(name: str) -> None:
    event = to_event(replace(event_of(), pod=f"ns/{name}"), "n", WHEN)
    assert len(name_of(event)) <= 253
    assert SUBDOMAIN.fullmatch(name_of(event))
    assert event["involvedObject"]["name"] == name
