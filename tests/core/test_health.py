"""agent.core.health against tables, and against a model that reads the whole history."""

import itertools
import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.discovery import DriverGpu, DriverReading
from agent.core.health import (
    DEFAULT_IGNORED_XIDS,
    RESET_XIDS,
    FaultMarks,
    Health,
    HealthPolicy,
    Probe,
    Sighting,
    Trouble,
    Xid,
    describe_xid,
    judge,
    judge_all,
    parse_fault_marks,
    see_reading,
    see_silence,
)

POLICY = HealthPolicy(recovery_s=60)
SOUND, LOST, SILENT = "sound", "lost", "silent"
Event = str | int
"""What happened to the one GPU: a probe, or an Xid's number."""

PROBES = {
    SOUND: Probe(uuid="GPU-0", fault=None),
    LOST: Probe(uuid="GPU-0", fault="it fell off the bus", gone=True),
    SILENT: Probe(uuid="GPU-0", fault="the driver does not answer"),
}


def after(*history: tuple[float, Event], policy: HealthPolicy = POLICY) -> Health:
    health = Health()
    for now_s, event in history:
        if isinstance(event, str):
            health = judge(health, probe=PROBES[event], now_s=now_s, policy=policy)
        else:
            health = judge(health, xids=[event], now_s=now_s, policy=policy)
    return health


# --- one GPU --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("event", "health"),
    [
        pytest.param(SOUND, Health(), id="a sound probe"),
        pytest.param(
            LOST, Health(reason="it fell off the bus", trouble=Trouble.LOST), id="a failed probe"
        ),
        pytest.param(
            SILENT,
            Health(reason="the driver does not answer", trouble=Trouble.LOST),
            id="a probe without an answer",
        ),
        pytest.param(31, Health(), id="an Xid that a program causes"),
        pytest.param(
            94,
            Health(
                reason="Xid 94: a memory error that hit one program only", trouble=Trouble.ERROR
            ),
            id="an Xid that may pass",
        ),
        pytest.param(
            79,
            Health(
                reason="Xid 79: the GPU has fallen off the bus",
                trouble=Trouble.LOST,
                needs_reset=True,
            ),
            id="an Xid that needs a reset",
        ),
        pytest.param(
            123,
            Health(
                reason="Xid 123: the driver reported an error, see the kernel log",
                trouble=Trouble.ERROR,
            ),
            id="an Xid of which we know nothing",
        ),
    ],
)
def test_what_becomes_of_a_healthy_gpu_at_once(event: Event, health: Health) -> None:
    assert after((5, event)) == health


@pytest.mark.parametrize(
    ("history", "healthy"),
    [
        pytest.param([(0, LOST), (2, SOUND), (61, SOUND)], False, id="sound for 59 s"),
        pytest.param([(0, LOST), (2, SOUND), (62, SOUND)], True, id="sound for 60 s"),
        pytest.param([(0, LOST), (90, SOUND)], False, id="the first sound probe after a long time"),
        pytest.param(
            [(0, LOST), (2, SOUND), (50, LOST), (52, SOUND), (111, SOUND)],
            False,
            id="a second fault starts the time anew",
        ),
        pytest.param(
            [(0, 94), (2, SOUND), (50, 94), (52, SOUND), (111, SOUND)],
            False,
            id="a second Xid starts the time anew",
        ),
        pytest.param(
            [(0, LOST), (2, SOUND), (50, 94), (52, SOUND), (111, SOUND)],
            False,
            id="an Xid while it recovers starts the time anew",
        ),
        pytest.param(
            [(0, LOST), (2, SOUND), (50, 31), (62, SOUND)],
            True,
            id="an ignored Xid while it recovers",
        ),
        pytest.param([(0, 94), (2, SOUND), (62, SOUND)], True, id="an Xid that passes"),
        pytest.param(
            [(0, 48), (2, SOUND), (9999, SOUND)], False, id="sound probes without a reset"
        ),
        pytest.param(
            [(0, 48), (2, SILENT), (4, SOUND), (9999, SOUND)], False, id="a hang is no reset"
        ),
        pytest.param([(0, 48), (2, LOST), (4, SOUND), (63, SOUND)], False, id="59 s after a reset"),
        pytest.param([(0, 48), (2, LOST), (4, SOUND), (64, SOUND)], True, id="60 s after a reset"),
        pytest.param(
            [(0, LOST), (1, 79), (4, SOUND), (64, SOUND)],
            False,
            id="an Xid after the last failed probe",
        ),
        pytest.param(
            [(0, LOST), (1, 79), (2, LOST), (4, SOUND), (64, SOUND)],
            True,
            id="an Xid among failed probes",
        ),
        pytest.param(
            [(0, 48), (1, 94), (2, SOUND), (99, SOUND)],
            False,
            id="a lesser Xid does not undo a graver one",
        ),
    ],
)
def test_when_a_gpu_is_healthy_again(history: list[tuple[float, Event]], healthy: bool) -> None:
    assert (after(*history) == Health()) == healthy


@pytest.mark.parametrize(
    ("history", "reason"),
    [
        pytest.param([(0, 48), (1, 64)], describe_xid(48), id="the first that needs a reset"),
        pytest.param([(0, 94), (1, 48)], describe_xid(48), id="the graver one"),
        pytest.param([(0, 48), (1, 94)], describe_xid(48), id="the graver one, which came first"),
        pytest.param([(0, 94), (1, 92)], describe_xid(92), id="the last of two light ones"),
        pytest.param([(0, LOST), (1, 94)], "it fell off the bus", id="the fault before an Xid"),
        pytest.param([(0, LOST), (1, 79)], describe_xid(79), id="the Xid that explains the fault"),
        pytest.param([(0, 48), (1, SILENT)], describe_xid(48), id="the Xid before a hang"),
        pytest.param([(0, 48), (1, LOST)], "it fell off the bus", id="what a GPU does after it"),
        pytest.param([(0, 94), (1, SILENT)], "the driver does not answer", id="the hang"),
    ],
)
def test_which_reason_a_gpu_keeps(history: list[tuple[float, Event]], reason: str) -> None:
    assert after(*history).reason == reason


def test_a_policy_may_ignore_what_needs_a_reset_and_mind_what_programs_do() -> None:
    policy = HealthPolicy(ignored_xids=frozenset({48}))
    assert after((0, 48), policy=policy) == Health()
    assert after((0, 31), policy=policy).trouble is Trouble.ERROR


def test_without_a_recovery_time_the_first_sound_probe_counts() -> None:
    policy = HealthPolicy(recovery_s=0)
    assert after((0, LOST), (0, SOUND), policy=policy) == Health()


@pytest.mark.parametrize("code", [48, 62, 64, 74, 79, 95, 119, 120, 140, 143])
def test_hardware_that_fails_needs_a_reset(code: int) -> None:
    assert code in RESET_XIDS - DEFAULT_IGNORED_XIDS


@pytest.mark.parametrize("code", range(1, 200))
def test_every_xid_has_a_sentence(code: int) -> None:
    prefix, _, meaning = describe_xid(code).partition(": ")
    assert prefix == f"Xid {code}"
    assert meaning
    assert meaning.isprintable()
    assert not meaning.endswith(".")


# --- properties -----------------------------------------------------------------------------------

EVENTS = st.sampled_from([SOUND, SOUND, SOUND, LOST, SILENT, 31, 48, 79, 92, 94, 123])
HISTORIES = st.lists(st.tuples(st.integers(0, 40), EVENTS), max_size=40).map(
    lambda steps: list(
        zip(itertools.accumulate(step for step, _ in steps), (e for _, e in steps), strict=True)
    )
)


def is_trouble(event: Event) -> bool:
    return event not in (SOUND, 31)


def should_be_healthy(history: Sequence[tuple[float, Event]]) -> bool:
    """The rule as a sentence about the whole history."""
    events = [event for _, event in history]
    troubles = [i for i, event in enumerate(events) if is_trouble(event)]
    if not troubles:
        return True
    hard = [i for i, event in enumerate(events) if event in (48, 79)]
    if hard and LOST not in events[hard[-1] :]:
        return False
    sound = [now_s for now_s, event in history[troubles[-1] :] if event == SOUND]
    return bool(sound) and sound[-1] - sound[0] >= 60


@given(HISTORIES)
def test_health_is_what_the_history_says(history: list[tuple[float, Event]]) -> None:
    assert (after(*history).reason is None) == should_be_healthy(history)


@given(HISTORIES, st.sampled_from([LOST, SILENT, 48, 94]), st.integers(0, 59))
def test_never_healthy_within_the_recovery_time(
    history: list[tuple[float, Event]], trouble: Event, patience_s: int
) -> None:
    now_s = history[-1][0] if history else 0
    later = [(now_s, trouble), (now_s, SOUND), (now_s + patience_s, SOUND)]
    assert after(*history, *later).reason is not None


@given(HISTORIES)
def test_reason_and_trouble_come_together(history: list[tuple[float, Event]]) -> None:
    health = after(*history)
    assert (health.reason is None) == (health.trouble is None)
    assert not health.needs_reset or health.trouble is Trouble.LOST
    assert health.sound_since_s is None or (health.reason and not health.needs_reset)


UUIDS = ["GPU-0", "GPU-1", "GPU-2"]
PROBE = st.builds(
    Probe, uuid=st.sampled_from(UUIDS), fault=st.sampled_from([None, "a"]), gone=st.booleans()
)
XID = st.builds(Xid, uuid=st.sampled_from([*UUIDS, None]), code=st.sampled_from([31, 48, 94]))
SIGHTINGS = st.lists(
    st.builds(
        Sighting,
        probes=st.lists(PROBE, max_size=3, unique_by=lambda probe: probe.uuid).map(tuple),
        xids=st.lists(XID, max_size=3).map(tuple),
    ),
    max_size=10,
)


@given(SIGHTINGS, st.permutations(UUIDS))
def test_gpus_do_not_depend_on_each_other(sightings: list[Sighting], order: list[str]) -> None:
    healths = dict.fromkeys(order, Health())
    alone = dict.fromkeys(order, Health())
    for now_s, sighting in enumerate(sightings):
        healths = judge_all(healths, sighting, 30 * now_s, POLICY)
        for uuid in order:
            mine = Sighting(
                probes=tuple(probe for probe in sighting.probes if probe.uuid == uuid),
                xids=tuple(xid for xid in sighting.xids if xid.uuid in (uuid, None)),
            )
            alone |= judge_all({uuid: alone[uuid]}, mine, 30 * now_s, POLICY)
    assert healths == alone
    assert list(healths) == order


@given(SIGHTINGS)
def test_what_did_not_change_is_the_same_object(sightings: list[Sighting]) -> None:
    healths: dict[str, Health] = {}
    for now_s, sighting in enumerate(sightings):
        new = judge_all(healths, sighting, now_s, POLICY)
        assert all(new[uuid] is old or new[uuid] != old for uuid, old in healths.items())
        healths = new


# --- many GPUs ------------------------------------------------------------------------------------


def reasons(sighting: Sighting) -> dict[str, str | None]:
    healths = judge_all(dict.fromkeys(UUIDS[:2], Health()), sighting, 0, POLICY)
    return {uuid: health.reason for uuid, health in healths.items()}


def test_an_xid_of_nobody_knows_whose_concerns_all() -> None:
    assert reasons(Sighting(xids=(Xid(uuid=None, code=48),))) == {
        "GPU-0": describe_xid(48),
        "GPU-1": describe_xid(48),
    }
    assert reasons(Sighting(xids=(Xid(uuid=None, code=13),))) == {"GPU-0": None, "GPU-1": None}


def test_gpus_first_seen_come_last() -> None:
    sighting = Sighting(
        probes=(Probe(uuid="GPU-9", fault="gone"),), xids=(Xid(uuid="GPU-8", code=94),)
    )
    assert list(reasons(sighting).items()) == [
        ("GPU-0", None),
        ("GPU-1", None),
        ("GPU-9", "gone"),
        ("GPU-8", describe_xid(94)),
    ]


def test_xids_count_as_later_than_the_probes_of_their_sighting() -> None:
    sighting = Sighting(probes=(PROBES[LOST],), xids=(Xid(uuid="GPU-0", code=48),))
    assert judge_all({}, sighting, 0, POLICY)["GPU-0"].needs_reset


def test_what_a_reading_says_of_gpus() -> None:
    reading = DriverReading(
        gpus=(
            DriverGpu(index=0, uuid="GPU-0"),
            DriverGpu(index=1, uuid="GPU-1", fault="it is on fire"),
            DriverGpu(index=2, fault="it has no name"),
        )
    )
    assert see_reading(["GPU-2", "GPU-1"], reading).probes == (
        Probe(uuid="GPU-2", fault="the driver does not list it any more", gone=True),
        Probe(uuid="GPU-1", fault="it is on fire"),
        Probe(uuid="GPU-0", fault=None),
    )


def test_a_reading_that_failed_leaves_all_known_gpus_in_doubt() -> None:
    reading = DriverReading(problem="the NVIDIA driver is not loaded")
    expected = Sighting(
        probes=tuple(
            Probe(uuid=uuid, fault="the NVIDIA driver is not loaded") for uuid in UUIDS[:2]
        )
    )
    assert see_reading(UUIDS[:2], reading) == expected
    assert see_silence(UUIDS[:2], "the NVIDIA driver is not loaded") == expected


# --- the administrator's word ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "indices", "uuids"),
    [
        pytest.param("", [], [], id="an empty file"),
        pytest.param(" \n", [], [], id="a file of blanks"),
        pytest.param("{}", [], [], id="nothing"),
        pytest.param('{"index": ["0", "7"]}', [0, 7], [], id="indices as texts"),
        pytest.param('{"index": [3, "12"]}', [3, 12], [], id="indices as numbers, too"),
        pytest.param('{"uuid": ["GPU-5c9e"]}', [], ["GPU-5c9e"], id="UUIDs"),
        pytest.param('{"uuid": [], "index": null}', [], [], id="empty lists and null"),
        pytest.param('{"index": ["1", 1, "01"], "uuid": ["GPU-1"]}', [1], ["GPU-1"], id="both"),
    ],
)
def test_fault_marks(text: str, indices: list[int], uuids: list[str]) -> None:
    marks = FaultMarks(indices=frozenset(indices), uuids=frozenset(uuids))
    assert parse_fault_marks(text) == marks


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[]", "it is a list, not an object"),
        ("{", "not JSON: Expecting property name enclosed in double quotes at line 1, column 2"),
        ('{"index": "0"}', 'index is "0", not a list'),
        ('{"index": ["-1"]}', 'index has "-1", which is no GPU\'s index'),
        ('{"index": [-1]}', "index has -1, which is no GPU's index"),
        ('{"index": [1024]}', "index has 1024, which is no GPU's index"),
        ('{"index": [true]}', "index has true, which is no GPU's index"),
        ('{"index": [0.5]}', "index has 0.5, which is no GPU's index"),
        ('{"index": ["٣"]}', 'index has "٣", which is no GPU\'s index'),
        ('{"uuid": [7]}', "a part of uuid is 7, not a text"),
        ('{"uuid": ["7"]}', 'uuid has "7", which is no GPU\'s UUID'),
        ('{"uuids": []}', 'it has the key "uuids"; "index" and "uuid" are known'),
        ('{"index": [], "index": []}', 'the key "index" stands twice in one object'),
        (" " * 65536 + "{}", "it has 65,538 characters, more than 65,536"),
    ],
)
def test_fault_marks_that_cannot_be_meant(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        parse_fault_marks(text)
