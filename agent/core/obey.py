"""Whether what others decided about a pod can be obeyed: kubelet, and a scheduler.

Kubelet's device list is the truth about GPUs. A scheduler's decision is checked against the ledger;
where it cannot be, the node decides by its own rules and the conflict is told.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from agent.core.bitmap import Bitmap
from agent.core.decision import DecidedGpus, GpuKey
from agent.core.layout import Layout
from agent.core.ledger import Ledger
from agent.core.request import Demand
from agent.core.shares import Held, clashes, share_cpus, share_gpus
from agent.core.topology import EMPTY, union


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """What is decided and can be: places of GPUs, each container's CPUs; None where it is not.

    `conflicts` are sentences about decisions that cannot be obeyed.
    """

    gpus: Bitmap | None
    cpus: Held | None
    conflicts: tuple[str, ...]


def obey(ledger: Ledger, demand: Demand, given: Mapping[str, Bitmap]) -> Decided:
    """What stands before the node's own rules come into play; `given` is kubelet's."""
    gpus, gpu_conflict = _obey_gpus(ledger, demand, union(given.values()))
    if gpus and not given:
        given = share_gpus(ledger.layout, demand.containers, gpus)
    cpus, cpu_conflict = _obey_cpus(ledger, demand, given)
    conflicts = tuple(sentence for sentence in (gpu_conflict, cpu_conflict) if sentence)
    return Decided(gpus=gpus, cpus=cpus, conflicts=conflicts)


def _obey_gpus(ledger: Ledger, demand: Demand, given: Bitmap) -> tuple[Bitmap | None, str | None]:
    if demand.decided_gpus is None:
        return given or None, None
    places, unknown = _find_gpus(ledger.layout, demand.decided_gpus)
    wanted = f"the scheduler chose GPUs {_show(demand.decided_gpus)}"
    if given:
        conflict = None if places == given and not unknown else f"{wanted}, kubelet gave others"
        return given, conflict
    if unknown:
        return None, f"{wanted}, but there is no GPU {unknown}"
    if taken := places - ledger.free_gpus:
        return None, f"{wanted}, but GPU {ledger.layout.indices(taken)} is held or faulty"
    if len(places) != demand.gpus:
        return None, f"{wanted}, but the pod asks for {demand.gpus}"
    return places, None


def _find_gpus(layout: Layout, decided: DecidedGpus) -> tuple[Bitmap, Bitmap]:
    """The places of the decided GPUs, and the numbers that no GPU has."""
    by_index = decided.by is GpuKey.INDEX
    place_of = {
        gpu.index if by_index else gpu.minor: place for place, gpu in enumerate(layout.machine.gpus)
    }
    found = [number for number in decided.numbers if number in place_of]
    return Bitmap(place_of[n] for n in found), Bitmap(decided.numbers) - Bitmap(found)


def _show(decided: DecidedGpus) -> str:
    return str(Bitmap(decided.numbers))


def _obey_cpus(
    ledger: Ledger, demand: Demand, given: Mapping[str, Bitmap]
) -> tuple[Held | None, str | None]:
    if not demand.decided_cpus:
        return None, None
    total = union(cpus for _, cpus in demand.decided_cpus)
    if taken := total - ledger.free_cpus:
        return None, f"the scheduler chose CPUs {total}, but {taken} are not free here"
    left = ledger.free_cpus - total
    cores = (core for seat in ledger.layout.seats for core in seat.cores)
    if not ledger.reserved and not any(core <= left for core in cores):
        return None, f"the scheduler chose CPUs {total}, but one core stays with everybody else"
    if demand.decided_cpus[0][0] == "":
        return _share_decided(ledger, demand, total, given)
    return _check_each(demand, dict(demand.decided_cpus))


def _share_decided(
    ledger: Ledger, demand: Demand, total: Bitmap, given: Mapping[str, Bitmap]
) -> tuple[Held | None, str | None]:
    """One set for the whole pod: each container its part, or all of it where CPUs are not whole."""
    if not demand.pinned:
        return {container.name: total for container in demand.containers}, None
    if len(total) != demand.cpus:
        return None, f"the scheduler chose CPUs {total}, but the pod asks for {demand.cpus}"
    gpus = {container.name: given.get(container.name, EMPTY) for container in demand.containers}
    seats = ledger.layout.seats_of(EMPTY, total)
    return share_cpus(ledger.layout, demand.containers, seats, total, gpus), None


def _check_each(demand: Demand, chosen: Held) -> tuple[Held | None, str | None]:
    """A set for each container; those that run side by side may not share."""
    for container in demand.containers:
        cpus = chosen.get(container.name, EMPTY)
        if demand.pinned and len(cpus) != container.cpus:
            return None, (
                f'the scheduler chose CPUs "{cpus}" for container {container.name}, '
                f"which asks for {container.cpus}"
            )
    if both := clashes(demand.containers, chosen):
        return None, f"the scheduler chose CPUs {both} for two containers"
    return chosen, None
