"""What kubelet and a scheduler decided, and whether it can be."""

from dataclasses import replace
from typing import NamedTuple

import pytest

from agent.core.bitmap import Bitmap
from agent.core.decision import DecidedGpus, GpuKey
from agent.core.ledger import Ledger
from agent.core.obey import obey
from agent.core.request import ContainerDemand, Role
from tests.core.oracle import asks, build, demand_of, grant, ledger_of

INDEX, MINOR = GpuKey
INIT, SIDECAR = Role.INIT, Role.SIDECAR
MACHINE = build((4, 8), (4, 8), faulty=[7])  # CPUs 0-15 and 16-31; minors are 100 above indices
IDLE = ledger_of(MACHINE)
BUSY = ledger_of(MACHINE, grant("a", [0, 1], "0-3"))
SPARSE = ledger_of(  # indices 1, 3, 5, …: a lost GPU or a mask of the driver leaves gaps
    replace(MACHINE, gpus=tuple(replace(gpu, index=2 * gpu.index + 1) for gpu in MACHINE.gpus))
)


def bits(text: str) -> Bitmap:
    return Bitmap.parse_list(text)


SPARSE_BUSY = SPARSE.with_grants([grant("a", [1])])


class Gpus(NamedTuple):
    """What two GPUs' pod was decided, and what comes of it: places and a conflict."""

    ledger: Ledger
    by: GpuKey
    numbers: tuple[int, ...]
    given: str
    places: str | None
    conflict: str | None = None


GPUS = {
    "by index": Gpus(IDLE, INDEX, (2, 5), "", "2,5"),
    "by minor": Gpus(IDLE, MINOR, (102, 105), "", "2,5"),
    "by index, where indices have gaps": Gpus(SPARSE, INDEX, (5, 11), "", "2,5"),
    "by minor, where indices have gaps": Gpus(SPARSE, MINOR, (102, 105), "", "2,5"),
    "as kubelet did": Gpus(IDLE, INDEX, (2, 5), "2,5", "2,5"),
    "as kubelet did, though held": Gpus(BUSY, INDEX, (0, 1), "0-1", "0-1"),
    "other than kubelet did": Gpus(
        *(IDLE, INDEX, (2, 5), "2,6", "2,6"), "the scheduler chose GPUs 2,5, kubelet gave others"
    ),
    "a GPU that is not there, beside kubelet's": Gpus(
        *(IDLE, INDEX, (2, 9), "2", "2"), "the scheduler chose GPUs 2,9, kubelet gave others"
    ),
    "a GPU that is not there": Gpus(
        *(IDLE, INDEX, (2, 8, 9), "", None),
        "the scheduler chose GPUs 2,8-9, but there is no GPU 8-9",
    ),
    "an index as a minor": Gpus(
        *(IDLE, MINOR, (2, 5), "", None), "the scheduler chose GPUs 2,5, but there is no GPU 2,5"
    ),
    "a held GPU": Gpus(
        *(BUSY, INDEX, (1, 2), "", None),
        "the scheduler chose GPUs 1-2, but GPU 1 is held or faulty",
    ),
    "a held GPU, which the sentence names by its index": Gpus(
        *(SPARSE_BUSY, MINOR, (101, 102), "", None),
        "the scheduler chose GPUs 101-102, but GPU 3 is held or faulty",
    ),
    "a faulty GPU": Gpus(
        *(IDLE, MINOR, (106, 107), "", None),
        "the scheduler chose GPUs 106-107, but GPU 7 is held or faulty",
    ),
    "too few": Gpus(
        *(IDLE, INDEX, (2,), "", None), "the scheduler chose GPUs 2, but the pod asks for 2"
    ),
    "too many": Gpus(
        *(IDLE, INDEX, (2, 3, 4), "", None), "the scheduler chose GPUs 2-4, but the pod asks for 2"
    ),
}


@pytest.mark.parametrize("row", GPUS.values(), ids=GPUS)
def test_a_scheduler_chose_gpus(row: Gpus) -> None:
    chosen = DecidedGpus(by=row.by, numbers=row.numbers)
    given = {"main": bits(row.given)} if row.given else {}
    decided = obey(row.ledger, demand_of(asks(gpus=2, cpus=2), decided_gpus=chosen), given)
    assert decided.gpus == (None if row.places is None else bits(row.places))
    assert decided.conflicts == ((row.conflict,) if row.conflict else ())
    assert decided.cpus is None


@pytest.mark.parametrize(
    ("given", "places"),
    [({}, None), ({"main": bits("")}, None), ({"a": bits("4"), "b": bits("0")}, bits("0,4"))],
    ids=["nothing", "no GPUs", "GPUs of two containers"],
)
def test_without_a_scheduler_kubelet_gave(given: dict[str, Bitmap], places: Bitmap | None) -> None:
    decided = obey(IDLE, demand_of(asks(gpus=2, cpus=2)), given)
    assert (decided.gpus, decided.cpus, decided.conflicts) == (places, None, ())


class Cpus(NamedTuple):
    """Containers, what was decided for them, and what comes of it: CPUs by name, a conflict."""

    ledger: Ledger
    containers: list[ContainerDemand]
    chosen: dict[str, str]
    cpus: dict[str, str] | None
    conflict: str | None = None
    given: dict[str, str] = {}  # noqa: RUF012
    pinned: bool = True


APP = [asks("a", cpus=4)]
APPS = [asks("a", cpus=4), asks("b", cpus=2)]
TWO_SIDES = [asks("a", gpus=1, cpus=4), asks("b", gpus=1, cpus=4)]
ONE_THREAD = ledger_of(MACHINE, reserved="31")

CPUS = {
    "for each container": Cpus(IDLE, APPS, {"a": "4-7", "b": "16-17"}, {"a": "4-7", "b": "16-17"}),
    "for a container, but too few": Cpus(
        *(IDLE, APP, {"a": "4-6"}, None),
        'the scheduler chose CPUs "4-6" for container a, which asks for 4',
    ),
    "for a container, but too many": Cpus(
        *(IDLE, APP, {"a": "4-8"}, None),
        'the scheduler chose CPUs "4-8" for container a, which asks for 4',
    ),
    "for one container, but not for the other": Cpus(
        *(IDLE, APPS, {"a": "4-7"}, None),
        'the scheduler chose CPUs "" for container b, which asks for 2',
    ),
    "the same for two containers": Cpus(
        *(IDLE, APPS, {"a": "4-7", "b": "6-7"}, None),
        "the scheduler chose CPUs 6-7 for two containers",
    ),
    "the same for an app and an init container before it": Cpus(
        *(IDLE, [asks("i", INIT, cpus=2), *APP], {"i": "4-5", "a": "4-7"}),
        {"i": "4-5", "a": "4-7"},
    ),
    "the same for an app and a sidecar": Cpus(
        *(IDLE, [asks("s", SIDECAR, cpus=2), *APP], {"s": "4-5", "a": "4-7"}, None),
        "the scheduler chose CPUs 4-5 for two containers",
    ),
    "the same for a sidecar and an init container before it": Cpus(
        IDLE,
        [asks("i", INIT, cpus=2), asks("s", SIDECAR, cpus=2), *APP],
        {"i": "4-5", "s": "4-5", "a": "6-9"},
        {"i": "4-5", "s": "4-5", "a": "6-9"},
    ),
    "the same for a sidecar and an init container after it": Cpus(
        IDLE,
        [asks("s", SIDECAR, cpus=2), asks("i", INIT, cpus=2), *APP],
        {"s": "4-5", "i": "4-5", "a": "6-9"},
        None,
        "the scheduler chose CPUs 4-5 for two containers",
    ),
    "held ones": Cpus(
        *(BUSY, APP, {"a": "2-5"}, None),
        "the scheduler chose CPUs 2-5, but 2-3 are not free here",
    ),
    "ones that are not there": Cpus(
        *(IDLE, APP, {"a": "30-33"}, None),
        "the scheduler chose CPUs 30-33, but 32-33 are not free here",
    ),
    "reserved ones": Cpus(
        *(ONE_THREAD, APP, {"a": "28-31"}, None),
        "the scheduler chose CPUs 28-31, but 31 are not free here",
    ),
    "for a pod of one container": Cpus(IDLE, APP, {"": "4-7"}, {"a": "4-7"}),
    "for a pod of two containers": Cpus(IDLE, APPS, {"": "4-9"}, {"a": "4-7", "b": "8-9"}),
    "for a pod whose containers have their GPUs on two nodes": Cpus(
        IDLE,
        TWO_SIDES,
        {"": "4-7,16-19"},
        {"a": "16-19", "b": "4-7"},
        given={"a": "4", "b": "0"},
    ),
    "for a pod, but too few": Cpus(
        *(IDLE, APPS, {"": "4-8"}, None), "the scheduler chose CPUs 4-8, but the pod asks for 6"
    ),
    "for a pod, held ones": Cpus(
        *(BUSY, APPS, {"": "0-5"}, None), "the scheduler chose CPUs 0-5, but 0-3 are not free here"
    ),
    "for a pod with an init container, at its peak": Cpus(
        IDLE,
        [asks("i", INIT, cpus=6), *APP],
        {"": "4-9"},
        {"a": "4-7", "i": "4-9"},
    ),
    "for a pod without whole CPUs: all containers have all": Cpus(
        *(IDLE, [asks("a"), asks("b")], {"": "4-8"}, {"a": "4-8", "b": "4-8"}), pinned=False
    ),
    "for a container without whole CPUs": Cpus(
        *(IDLE, [asks("a"), asks("b")], {"a": "4-8"}, {"a": "4-8"}), pinned=False
    ),
    "all CPUs that are not reserved": Cpus(
        ONE_THREAD, [asks("a", cpus=31)], {"a": "0-30"}, {"a": "0-30"}
    ),
}


@pytest.mark.parametrize("row", CPUS.values(), ids=CPUS)
def test_a_scheduler_chose_cpus(row: Cpus) -> None:
    decided_cpus = tuple((name, bits(text)) for name, text in row.chosen.items())
    demand = demand_of(*row.containers, pinned=row.pinned, decided_cpus=decided_cpus)
    given = {name: bits(text) for name, text in row.given.items()}
    decided = obey(row.ledger, demand, given)
    cpus = None if decided.cpus is None else {n: str(c) for n, c in decided.cpus.items()}
    assert cpus == row.cpus
    assert decided.conflicts == ((row.conflict,) if row.conflict else ())


@pytest.mark.parametrize("name", ["a", ""], ids=["for a container", "for a pod"])
def test_without_reserved_cpus_a_scheduler_cannot_give_away_the_last_core(name: str) -> None:
    demand = demand_of(asks("a", cpus=32), decided_cpus=((name, bits("0-31")),))
    decided = obey(IDLE, demand, {})
    assert decided.cpus is None
    [conflict] = decided.conflicts
    assert conflict.startswith("the scheduler chose CPUs 0-31")


def test_conflicts_about_gpus_and_cpus_are_both_told() -> None:
    demand = demand_of(
        asks("a", gpus=1, cpus=2),
        decided_gpus=DecidedGpus(by=INDEX, numbers=(0,)),
        decided_cpus=(("a", bits("0-1")),),
    )
    assert obey(BUSY, demand, {}).conflicts == (
        "the scheduler chose GPUs 0, but GPU 0 is held or faulty",
        "the scheduler chose CPUs 0-1, but 0-1 are not free here",
    )
