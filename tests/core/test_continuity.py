"""What stays known of GPUs whose driver says less than before: by table, and over random histories
that are checked against what each GPU was last told to be."""

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from enum import Enum, auto
from functools import reduce
from typing import NamedTuple

import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from agent.core.bitmap import Bitmap
from agent.core.continuity import GONE, remember, with_faults
from agent.core.discovery import DriverGpu, DriverReading, Host, PciGpu, build_machine
from agent.core.topology import (
    MAX_GPUS,
    Core,
    Link,
    LinkKind,
    Machine,
    NodeKind,
    NumaNode,
    parse_link,
)
from tests.core.machines import described, random_machines

SLOTS = range(5)
BDFS = [f"0000:{0x10 + slot:02x}:00.0" for slot in SLOTS]
LOST = "the GPU fell off the bus"
MIG = "MIG is enabled"
SILENT = "the GPU driver did not answer"


def sound(slot: int, index: int) -> DriverGpu:
    """All that the driver says of the GPU in a slot; minors run against the addresses."""
    return DriverGpu(
        index=index,
        bdf=BDFS[slot],
        uuid=f"GPU-{slot}",
        minor=9 - slot,
        model=f"model {slot}",
        memory_bytes=80 << 30,
        memory_nodes=Bitmap([slot % 2]),
        cpus=Bitmap([4 * (slot % 2)]),
    )


def lost(index: int) -> DriverGpu:
    return DriverGpu(index=index, fault=LOST)


def mute(slot: int, index: int) -> DriverGpu:
    """A GPU that tells its address only."""
    return DriverGpu(index=index, bdf=BDFS[slot], fault=MIG)


def reading(*gpus: DriverGpu, warnings: tuple[str, ...] = ()) -> DriverReading:
    """Links are told between sound GPUs only."""
    links = tuple(tuple(_link(a, b) for b in gpus) for a in gpus)
    return DriverReading(gpus=gpus, links=links, warnings=warnings)


def _link(a: DriverGpu, b: DriverGpu) -> Link | None:
    if a is b or a.fault or b.fault or a.minor is None or b.minor is None:
        return None
    return Link(kind=LinkKind.NV, nvlinks=a.minor + b.minor)


def listed(*slots: int) -> DriverReading:
    """A driver that lists these slots, all sound, numbered as it comes."""
    return reading(*(sound(slot, index) for index, slot in enumerate(slots)))


def problem(sentence: str = SILENT) -> DriverReading:
    return DriverReading(problem=sentence, warnings=("from the problem",))


def after(history: Iterable[DriverReading], by_index: bool = False) -> DriverReading:
    first, *rest = history
    return reduce(
        lambda before, now: remember(before, now, by_index), rest, remember(None, first, by_index)
    )


def said(result: DriverReading) -> list[tuple[int, int | None, str | None]]:
    """(index, slot, fault) of each GPU, in order; the slot is None where the address is."""
    return [(gpu.index, BDFS.index(gpu.bdf) if gpu.bdf else None, gpu.fault) for gpu in result.gpus]


class Row(NamedTuple):
    """Readings, one after the other, and what is known at the end."""

    history: Sequence[DriverReading]
    expected: list[tuple[int, int | None, str | None]]


NOW_ONLY = {
    "nothing was known": [listed(0, 2)],
    "the driver never answered before": [problem(), listed(0, 2)],
    "the driver listed nothing before": [reading(), listed(0, 2)],
    "the driver says the same again": [listed(0, 2), listed(0, 2)],
    "a lost GPU is known by nothing": [reading(sound(0, 0), lost(1))],
    "a problem from the start": [problem()],
    "one problem after the other": [problem(), problem("no library")],
}


@pytest.mark.parametrize("history", NOW_ONLY.values(), ids=NOW_ONLY)
def test_what_is_said_now_is_all(history: Sequence[DriverReading]) -> None:
    assert after(history) == history[-1]


HISTORIES = {
    "a lost GPU keeps its name": Row(
        [listed(0, 1, 2), reading(sound(0, 0), lost(1), sound(2, 2))],
        [(0, 0, None), (1, 1, LOST), (2, 2, None)],
    ),
    "two lost GPUs keep theirs": Row(
        [listed(0, 1, 2), reading(lost(0), sound(1, 1), lost(2))],
        [(0, 0, LOST), (1, 1, None), (2, 2, LOST)],
    ),
    "a GPU is lost after another": Row(
        [
            listed(0, 1, 2),
            reading(sound(0, 0), lost(1), sound(2, 2)),
            reading(*map(lost, SLOTS[:3])),
        ],
        [(0, 0, LOST), (1, 1, LOST), (2, 2, LOST)],
    ),
    "a GPU is not listed any more, the others move up and keep their indices": Row(
        [listed(0, 1, 2, 3), listed(0, 2, 3)],
        [(0, 0, None), (1, 1, GONE), (2, 2, None), (3, 3, None)],
    ),
    "two GPUs are not listed any more": Row(
        [listed(0, 1, 2, 3), listed(1, 3)],
        [(0, 0, GONE), (1, 1, None), (2, 2, GONE), (3, 3, None)],
    ),
    "no GPU is listed any more": Row([listed(0, 1), reading()], [(0, 0, GONE), (1, 1, GONE)]),
    "a lost GPU is not listed any more": Row(
        [listed(0, 1, 2), reading(sound(0, 0), lost(1), sound(2, 2)), listed(0, 2)],
        [(0, 0, None), (1, 1, GONE), (2, 2, None)],
    ),
    "a lost GPU is back": Row(
        [listed(0, 1), reading(sound(0, 0), lost(1)), listed(0, 1)], [(0, 0, None), (1, 1, None)]
    ),
    "a GPU that was not listed is back": Row(
        [listed(0, 1, 2), listed(0, 2), listed(0, 1, 2)],
        [(0, 0, None), (1, 1, None), (2, 2, None)],
    ),
    "a GPU that tells its address only keeps the rest of its name": Row(
        [listed(0, 1), reading(mute(0, 0), sound(1, 1))], [(0, 0, MIG), (1, 1, None)]
    ),
    "the driver cannot be asked": Row([listed(0, 1), problem()], [(0, 0, SILENT), (1, 1, SILENT)]),
    "the driver cannot be asked, and a GPU was lost": Row(
        [listed(0, 1), reading(sound(0, 0), lost(1)), problem()], [(0, 0, SILENT), (1, 1, SILENT)]
    ),
    "the driver cannot be asked for one reason after another": Row(
        [listed(0), problem(), problem("no library")], [(0, 0, "no library")]
    ),
    "the driver can be asked again": Row(
        [listed(0, 1), problem(), listed(0, 1)], [(0, 0, None), (1, 1, None)]
    ),
    "the driver can be asked again, and lists fewer": Row(
        [listed(0, 1), problem(), listed(1)], [(0, 0, GONE), (1, 1, None)]
    ),
    "a new GPU behind the others": Row(
        [listed(0, 1), listed(0, 1, 2)], [(0, 0, None), (1, 1, None), (2, 2, None)]
    ),
    "a new GPU before the others is counted on from them": Row(
        [listed(2, 3), listed(0, 2, 3)], [(0, 2, None), (1, 3, None), (2, 0, None)]
    ),
    "a new GPU in the place of one that is gone": Row(
        [listed(0, 2), listed(1, 2)], [(0, 0, GONE), (1, 2, None), (2, 1, None)]
    ),
    "a GPU that was lost from the start is found": Row(
        [reading(sound(0, 0), lost(1)), listed(0, 1)], [(0, 0, None), (1, 1, None)]
    ),
    "all GPUs were lost from the start, and are found in other places": Row(
        [reading(lost(0), lost(1)), reading(sound(0, 0), lost(1)), listed(0, 2)],
        [(0, 0, None), (1, 2, None)],
    ),
    "a new GPU, and an unknown one that is lost before it": Row(
        [listed(2, 3), reading(lost(0), sound(0, 1), sound(2, 2), sound(3, 3))],
        [(0, 2, None), (1, 3, None), (2, None, LOST), (3, 0, None)],
    ),
    "an unknown GPU is lost, whose number a known one has": Row(
        [listed(1, 2), reading(lost(0), lost(1), lost(2))],
        [(0, 1, LOST), (1, 2, LOST), (2, None, LOST)],
    ),
    "an unknown GPU is lost, behind one that the driver moved up": Row(
        [listed(0, 1, 2), reading(sound(1, 0), sound(2, 1), lost(2))],
        [(0, 0, GONE), (1, 1, None), (2, 2, None), (3, None, LOST)],
    ),
}


@pytest.mark.parametrize("row", HISTORIES.values(), ids=HISTORIES)
def test_gpus_stay_known_by_their_index(row: Row) -> None:
    assert said(after(row.history)) == row.expected


def test_a_gone_gpu_keeps_all_that_was_said_of_it_but_that_it_is_sound() -> None:
    [gone, _] = after([listed(0, 1), listed(1)]).gpus
    assert gone == replace(sound(0, 0), fault=GONE)


def test_a_lost_gpu_keeps_all_that_was_said_of_it_but_that_it_is_sound() -> None:
    [gpu] = after([listed(3), reading(lost(0))]).gpus
    assert gpu == replace(sound(3, 0), fault=LOST)


def test_what_the_driver_says_anew_counts() -> None:
    [gpu] = after([listed(0), reading(replace(sound(0, 0), uuid="GPU-9", minor=None))]).gpus
    assert (gpu.uuid, gpu.minor) == ("GPU-9", 9)


LINKS_KEPT = {
    "of a lost GPU": reading(sound(0, 0), lost(1), sound(2, 2)),
    "of a gone GPU": listed(0, 2),
    "of all GPUs, when the driver cannot be asked": problem(),
    "of GPUs between which the driver says nothing": replace(
        listed(0, 1, 2), links=((None,) * 3,) * 3
    ),
}


@pytest.mark.parametrize("now", LINKS_KEPT.values(), ids=LINKS_KEPT)
def test_links_stay_known(now: DriverReading) -> None:
    before = listed(0, 1, 2)
    assert remember(before, now).links == before.links


def test_a_link_that_the_driver_says_anew_counts() -> None:
    pix = parse_link("PIX")
    now = replace(listed(0, 1), links=((None, pix), (pix, None)))
    assert remember(listed(0, 1), now).links == now.links


def test_a_new_gpu_brings_its_links_and_an_unknown_one_has_none() -> None:
    links = after([listed(2), reading(sound(0, 0), sound(2, 1), lost(2))]).links
    nv = Link(kind=LinkKind.NV, nvlinks=9 + 7)
    assert links == ((None, None, nv), (None, None, None), (nv, None, None))


def test_gone_gpus_make_room_where_there_are_too_many() -> None:
    def all_at(bus: int) -> DriverReading:
        gpus = [
            DriverGpu(index=i, bdf=f"0000:{bus:02x}:{i % 32:02x}.{i // 32}", uuid=f"GPU-{bus}-{i}")
            for i in range(MAX_GPUS)
        ]
        return DriverReading(gpus=tuple(gpus), links=((None,) * MAX_GPUS,) * MAX_GPUS)

    assert {gpu.uuid for gpu in remember(all_at(1), all_at(2)).gpus} == {
        f"GPU-2-{i}" for i in range(MAX_GPUS)
    }


def test_warnings_are_those_of_now() -> None:
    before = reading(sound(0, 0), sound(1, 1), warnings=("from before",))
    assert remember(before, reading(lost(0), warnings=("now",))).warnings == ("now",)
    assert remember(before, problem()).warnings == ("from the problem",)


def test_what_was_a_problem_is_none_once_the_gpus_are_known() -> None:
    assert remember(listed(0), problem()).problem is None


# --- what the driver numbers anew -----------------------------------------------------------------


def test_a_driver_loaded_anew_may_give_the_minor_of_a_gone_gpu_to_another() -> None:
    before = reading(*(replace(sound(slot, slot), minor=slot) for slot in (0, 1, 2)))
    now = reading(replace(sound(0, 0), minor=0), replace(sound(2, 1), minor=1))
    machine = build_machine(host([0, 1, 2]), after([before, problem(), now]))
    assert [(gpu.uuid, gpu.fault) for gpu in machine.gpus] == [
        ("GPU-0", None),
        ("GPU-1", GONE),
        ("GPU-2", None),
    ]


def test_a_gpu_may_come_back_at_another_address() -> None:
    now = reading(sound(0, 0), replace(sound(1, 1), bdf=BDFS[4]))
    machine = build_machine(host([0, 4]), after([listed(0, 1), listed(0), now]))
    assert [gpu.bdf for gpu in machine.gpus if gpu.uuid == "GPU-1" and not gpu.fault] == [BDFS[4]]


# --- others call GPUs by the driver's index -------------------------------------------------------

CALLED = {
    "a GPU that the driver has moved up cannot be given out": Row(
        [listed(0, 1, 2), listed(0, 2)],
        [(0, 0, None), (1, 1, GONE), (2, 2, "the driver calls it GPU 1 now, and kubelet GPU 2")],
    ),
    "nor when the driver has a better word": Row(
        [listed(0, 1), reading(mute(1, 0))], [(0, 0, GONE), (1, 1, MIG)]
    ),
    "a lost GPU has the number of what it was": Row(
        [listed(0, 1), reading(sound(0, 0), lost(1))], [(0, 0, None), (1, 1, LOST)]
    ),
    "numbers that are the old ones again can be given out": Row(
        [listed(0, 1, 2), listed(0, 2), listed(0, 1, 2)],
        [(0, 0, None), (1, 1, None), (2, 2, None)],
    ),
    "numbers that never changed": Row([listed(0, 1), listed(0, 1)], [(0, 0, None), (1, 1, None)]),
    "the driver cannot be asked": Row([listed(0), problem()], [(0, 0, SILENT)]),
}


@pytest.mark.parametrize("row", CALLED.values(), ids=CALLED)
def test_by_index_only_gpus_with_their_old_numbers_are_given_out(row: Row) -> None:
    assert said(after(row.history, by_index=True)) == row.expected


# --- random histories -----------------------------------------------------------------------------


class Shape(Enum):
    """What the driver says of a slot."""

    SOUND = auto()
    LOST = auto()
    MUTE = auto()
    UNLISTED = auto()


Shapes = tuple[Shape, ...]
"""Of all slots; empty: the driver cannot be asked."""

ALL_SOUND = (Shape.SOUND,) * len(SLOTS)
ALL_BUT_FIRST = (Shape.UNLISTED, *ALL_SOUND[1:])
ONE = st.sampled_from([*[Shape.SOUND] * 3, *Shape])
ALL = st.tuples(*[ONE] * len(SLOTS))
STORIES = st.lists(st.one_of(ALL, ALL, ALL, st.just(())), min_size=1, max_size=6)


def to_reading(shapes: Shapes) -> DriverReading:
    """The driver numbers what it lists in the order of addresses."""
    if not shapes:
        return problem()
    there = [(slot, shape) for slot, shape in enumerate(shapes) if shape is not Shape.UNLISTED]
    return reading(
        *(
            sound(slot, index)
            if shape is Shape.SOUND
            else mute(slot, index)
            if shape is Shape.MUTE
            else lost(index)
            for index, (slot, shape) in enumerate(there)
        )
    )


def host(slots: Iterable[int]) -> Host:
    """Two nodes of four CPUs, and GPUs in these slots."""
    cpus = [Bitmap(range(4)), Bitmap(range(4, 8))]
    return Host(
        name="host",
        nodes=tuple(
            NumaNode(id=i, kind=NodeKind.CPU, cpus=some, memory_bytes=1)
            for i, some in enumerate(cpus)
        ),
        cores=tuple(Core(id=i, socket=i, node=i, l3=i, cpus=some) for i, some in enumerate(cpus)),
        gpus=tuple(
            PciGpu(bdf=BDFS[slot], node=slot % 2, bridges=(), device="10de:20f3") for slot in slots
        ),
    )


STORY = settings(max_examples=150, deadline=None)


@STORY
@given(STORIES, st.sets(st.sampled_from(SLOTS)), st.booleans())
def test_whatever_happens_the_machine_is_valid(
    story: list[Shapes], on_bus: set[int], by_index: bool
) -> None:
    for end in range(1, len(story) + 1):
        result = after(map(to_reading, story[:end]), by_index)
        machine = build_machine(host(on_bus), result)
        known = {(gpu.bdf, gpu.uuid, gpu.index) for gpu in result.gpus if gpu.bdf}
        assert known <= {(gpu.bdf, gpu.uuid, gpu.index) for gpu in machine.gpus}


@STORY
@given(STORIES, st.booleans())
def test_whatever_happens_nothing_known_is_forgotten(story: list[Shapes], by_index: bool) -> None:
    facts: dict[str, dict[str, object]] = {}
    links: dict[tuple[str | None, str | None], Link] = {}
    indices: dict[str | None, int] = {}
    result = None
    for now in map(to_reading, story):
        result = remember(result, now, by_index)
        for gpu in now.gpus:
            if gpu.bdf:
                facts.setdefault(gpu.bdf, {}).update(told(gpu))
        links |= pairs(now)
        known = {gpu.bdf: gpu for gpu in result.gpus if gpu.bdf}
        assert {bdf: told(gpu) for bdf, gpu in known.items()} == facts
        assert links.items() <= pairs(result).items()
        assert indices.items() <= {bdf: gpu.index for bdf, gpu in known.items()}.items()
        indices |= {bdf: gpu.index for bdf, gpu in known.items()}


def told(gpu: DriverGpu) -> dict[str, object]:
    """What is known of a GPU, beside what may change from reading to reading."""
    facts = {field.name: getattr(gpu, field.name) for field in fields(gpu)}
    return {
        name: value
        for name, value in facts.items()
        if value is not None and name not in ("index", "fault")
    }


def pairs(result: DriverReading) -> dict[tuple[str | None, str | None], Link]:
    return {
        (a.bdf, b.bdf): link
        for i, a in enumerate(result.gpus)
        for j, b in enumerate(result.gpus)
        if (link := result.links[i][j])
    }


@STORY
@given(STORIES)
def test_whatever_happens_only_gpus_that_are_sound_now_can_be_given_out(
    story: list[Shapes],
) -> None:
    result = after(map(to_reading, story))
    shapes = story[-1] or (Shape.UNLISTED,) * len(SLOTS)
    faults = {gpu.bdf: gpu.fault for gpu in result.gpus if gpu.bdf}
    event(f"{len(faults)} known, {sum(map(bool, faults.values()))} of them with a fault")
    for slot, shape in enumerate(shapes):
        if shape is Shape.SOUND:
            assert faults[BDFS[slot]] is None
        elif shape is Shape.MUTE:
            assert faults[BDFS[slot]] == MIG
        else:
            assert faults.get(BDFS[slot], "unknown")


@STORY
@example([ALL_BUT_FIRST, ALL_SOUND])
@given(STORIES)
def test_by_index_whatever_happens_no_number_means_two_gpus(story: list[Shapes]) -> None:
    result = after(map(to_reading, story), by_index=True)
    now = {gpu.bdf: gpu.index for gpu in to_reading(story[-1]).gpus}
    for gpu in result.gpus:
        assert gpu.fault or now[gpu.bdf] == gpu.index


@STORY
@given(STORIES)
def test_the_same_words_again_change_nothing(story: list[Shapes]) -> None:
    """But for the numbers of GPUs that nobody can name."""
    once = after(map(to_reading, story))
    again = remember(once, to_reading(story[-1]))
    assert [gpu for gpu in again.gpus if gpu.bdf] == [gpu for gpu in once.gpus if gpu.bdf]
    assert pairs(again) == pairs(once)


@STORY
@example([ALL_BUT_FIRST, ALL_SOUND])
@given(STORIES)
def test_by_index_the_same_words_again_change_nothing(story: list[Shapes]) -> None:
    once = after(map(to_reading, story), by_index=True)
    again = remember(once, to_reading(story[-1]), by_index=True)
    assert [gpu for gpu in again.gpus if gpu.bdf] == [gpu for gpu in once.gpus if gpu.bdf]


# --- faults that others know of -------------------------------------------------------------------

A800 = described("a800x8")
UUIDS = [gpu.uuid or "" for gpu in A800.gpus]


def test_faults_go_to_the_gpus_with_these_uuids() -> None:
    machine = with_faults(A800, {UUIDS[2]: "Xid 79", UUIDS[5]: "marked", "GPU-elsewhere": "lost"})
    assert [gpu.fault for gpu in machine.gpus] == [
        {2: "Xid 79", 5: "marked"}.get(index) for index in range(8)
    ]
    clean = tuple(replace(gpu, fault=None) for gpu in machine.gpus)
    assert replace(machine, gpus=clean) == A800


def test_what_the_driver_says_of_a_gpu_comes_before_what_others_say() -> None:
    ill = with_faults(A800, {UUIDS[0]: LOST})
    assert with_faults(ill, {UUIDS[0]: "marked"}) is ill


@pytest.mark.parametrize(
    "faults",
    [{}, {"GPU-elsewhere": "lost"}, {UUIDS[0]: ""}],
    ids=["no faults", "a GPU that is not here", "an empty fault"],
)
def test_without_a_fault_of_its_own_it_is_the_same_machine(faults: dict[str, str]) -> None:
    assert with_faults(A800, faults) is A800


@settings(max_examples=80, deadline=None)
@given(
    random_machines(),
    st.dictionaries(st.sampled_from([f"GPU-{i}" for i in range(6)]), st.just("ill")),
)
def test_faults_are_added_and_nothing_else_changes(
    machine: Machine, faults: dict[str, str]
) -> None:
    ill = with_faults(machine, faults)
    for before, now in zip(machine.gpus, ill.gpus, strict=True):
        expected = before.fault or ("ill" if before.uuid in faults else None)
        assert now == replace(before, fault=expected)
    assert replace(ill, gpus=machine.gpus) == machine
