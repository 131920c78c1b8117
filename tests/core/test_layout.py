"""How a machine is laid out: seats, distances there and back, the places of GPUs."""

from dataclasses import replace

import pytest

from agent.core.bitmap import Bitmap
from agent.core.layout import Layout, key, lay_out
from agent.core.topology import Core, Gpu, Machine, NodeKind, NodeSource, NumaNode, parse_link


def bits(text: str) -> Bitmap:
    return Bitmap.parse_list(text)


def node(id_: int, cpus: str, *distances: int, memory_bytes: int = 1 << 30) -> NumaNode:
    kind = NodeKind.CPU if cpus else NodeKind.MEMORY_ONLY
    return NumaNode(
        id=id_, kind=kind, cpus=bits(cpus), memory_bytes=memory_bytes, distances=distances
    )


def core(id_: int, node: int | None, cpus: str, l3: int | None = None) -> Core:
    return Core(id=id_, socket=0, node=node, l3=l3, cpus=bits(cpus))


def gpu(index: int, node: int | None, uuid: str | None, fault: str | None = None) -> Gpu:
    return Gpu(
        index=index,
        minor=None,
        uuid=uuid,
        bdf=f"0000:{index:02x}:00.0",
        model="L20",
        memory_bytes=None,
        node=node,
        node_source=NodeSource.UNKNOWN if node is None else NodeSource.SYSFS,
        fault=fault,
    )


NV2, SYS = parse_link("NV2"), parse_link("SYS")
MACHINE = Machine(
    name="odd",
    nodes=(
        node(1, "0-3", 10, 14, 21, memory_bytes=5),
        node(3, "", 14, 10, 24),
        node(4, "4-7", 25, 24, 10, memory_bytes=7),
    ),
    cores=(
        core(0, 1, "0-1", 7),
        core(1, 1, "2", 2),
        core(2, 1, "3"),
        core(3, 4, "4-5", 9),
        core(4, 4, "6-7", 9),
        core(5, None, "8-9", 9),
    ),
    gpus=(gpu(0, 4, "GPU-a"), gpu(2, None, None), gpu(5, 1, "GPU-c", fault="lost")),
    links=((None, NV2, SYS), (NV2, None, SYS), (SYS, SYS, None)),
)
LAYOUT = lay_out(MACHINE)


def test_nodes_with_cpus_are_seats_in_the_order_of_ids() -> None:
    assert [seat.id for seat in LAYOUT.seats] == [1, 4]
    assert [str(seat.cpus) for seat in LAYOUT.seats] == ["0-3", "4-7"]
    assert [seat.memory_bytes for seat in LAYOUT.seats] == [5, 7]


def test_a_seat_has_its_cores_and_the_parts_of_caches_in_it() -> None:
    """Caches ascend by number, 2 before 7; a core of unknown cache is in none."""
    assert [[str(cpus) for cpus in seat.cores] for seat in LAYOUT.seats] == [
        ["0-1", "2", "3"],
        ["4-5", "6-7"],
    ]
    assert [[str(cpus) for cpus in seat.caches] for seat in LAYOUT.seats] == [
        ["2", "0-1"],
        ["4-7"],
    ]


def test_gpus_sit_where_they_are_known_to_be() -> None:
    assert [str(seat.gpus) for seat in LAYOUT.seats] == ["2", "0"]
    assert LAYOUT.seatless == bits("1")
    assert LAYOUT.sound == bits("0-1")


@pytest.mark.parametrize(
    ("first", "last", "sum_"),
    [
        ((10, 14, 21), (25, 24, 10), 46),
        ((), (25, 24, 10), 45),
        ((10, 14, 21), (), 41),
        ((), (), 40),
    ],
    ids=[
        "there and back differ",
        "there is unknown: 20",
        "back is unknown: 20",
        "both are unknown: 20 each",
    ],
)
def test_distances_are_there_and_back(
    first: tuple[int, ...], last: tuple[int, ...], sum_: int
) -> None:
    """The columns of nodes without CPUs are passed over."""
    ends = replace(MACHINE.nodes[0], distances=first), replace(MACHINE.nodes[2], distances=last)
    layout = lay_out(replace(MACHINE, nodes=(ends[0], MACHINE.nodes[1], ends[1])))
    assert layout.distances == ((0, sum_), (sum_, 0))


def test_scores_are_those_of_the_links() -> None:
    assert LAYOUT.scores == ((0, 200, 10), (200, 0, 10), (10, 10, 0))


@pytest.mark.parametrize(
    ("cores", "threads"),
    [
        (["0-1", "2-3"], 2),
        (["0", "1", "2", "3"], 1),
        (["0-1", "2", "3"], 1),
        (["0-3"], 4),
        (["0", "1", "2-3", "4-5"], 2),
    ],
    ids=["two each", "one each", "mostly one", "four each", "as many of one as of two"],
)
def test_threads_are_those_of_most_cores(cores: list[str], threads: int) -> None:
    cpus = ",".join(cores)
    machine = Machine(
        name="m",
        nodes=(node(0, cpus),),
        cores=tuple(core(at, 0, text) for at, text in enumerate(cores)),
    )
    assert lay_out(machine).threads == threads


@pytest.mark.parametrize(
    ("gpus", "cpus", "seats"),
    [
        ("", "", ()),
        ("0", "", (1,)),
        ("1", "", ()),
        ("", "3", (0,)),
        ("", "8-9", ()),
        ("0", "3", (0, 1)),
        ("2", "0", (0,)),
    ],
    ids=[
        "nothing",
        "a GPU",
        "a GPU of unknown node",
        "a CPU",
        "CPUs of an offline node",
        "a GPU and a CPU of another node",
        "a GPU and a CPU of one node",
    ],
)
def test_the_seats_touched_by(gpus: str, cpus: str, seats: tuple[int, ...]) -> None:
    assert LAYOUT.seats_of(bits(gpus), bits(cpus)) == seats


def test_a_gpu_is_known_by_its_uuid_or_where_no_driver_told_it_by_its_address() -> None:
    assert [key(gpu) for gpu in MACHINE.gpus] == ["GPU-a", "0000:02:00.0", "GPU-c"]
    assert LAYOUT.keys(bits("0-2")) == ("GPU-a", "0000:02:00.0", "GPU-c")
    assert LAYOUT.place_of == {"GPU-a": 0, "0000:02:00.0": 1, "GPU-c": 2}


def test_places_pass_over_gpus_of_other_machines() -> None:
    assert LAYOUT.places(["GPU-c", "GPU-of-old", "0000:02:00.0"]) == bits("1-2")
    assert LAYOUT.places(["0000:00:00.0"]) == Bitmap()


def test_keys_are_put_in_the_order_of_the_machine_with_strangers_last() -> None:
    keys = ["GPU-y", "GPU-c", "GPU-x", "GPU-a", "0000:02:00.0"]
    in_order = ("GPU-a", "0000:02:00.0", "GPU-c", "GPU-x", "GPU-y")
    assert LAYOUT.in_order(keys) == LAYOUT.in_order(keys[::-1]) == in_order


@pytest.mark.parametrize(
    ("seats", "gpus", "ids"),
    [((), "", ""), ((0,), "2", "1"), ((1,), "0", "4"), ((0, 1), "0,2", "1,4")],
    ids=["no seat", "the first", "the second", "both"],
)
def test_the_gpus_and_ids_of(seats: tuple[int, ...], gpus: str, ids: str) -> None:
    assert str(LAYOUT.gpus_at(seats)) == gpus
    assert str(LAYOUT.ids(seats)) == ids


def test_a_machine_without_gpus_is_laid_out() -> None:
    layout: Layout = lay_out(replace(MACHINE, gpus=(), links=()))
    assert (layout.scores, layout.place_of, layout.sound) == ((), {}, Bitmap())
