"""What the GPU driver said before, where it says less now.

A GPU that once was there stays known: kubelet, and the pods that hold it, know it by what it was
called then. It keeps its index, its place in the machine and its links, and gets a fault.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

from agent.core.discovery import DriverGpu, DriverReading
from agent.core.topology import MAX_GPUS, Link, Machine

GONE = "the GPU driver does not list it any more"


def remember(
    before: DriverReading | None, now: DriverReading, by_index: bool = False
) -> DriverReading:
    """What the driver says now, completed by what it said before. GPUs are matched by PCI address.

    With `by_index` others call GPUs by the driver's index, so that one which the driver has
    numbered anew cannot be given out.
    """
    if before is None or not before.gpus:
        return now
    if now.problem:
        ill = tuple(replace(gpu, fault=now.problem) for gpu in before.gpus)
        return replace(before, gpus=ill, warnings=now.warnings)
    named = {gpu.bdf: gpu for gpu in now.gpus if gpu.bdf is not None}
    nameless = {gpu.index: gpu for gpu in now.gpus if gpu.bdf is None}
    gpus: list[DriverGpu] = []
    for old in before.gpus:
        if old.bdf is None:
            continue
        new = named.pop(old.bdf, None) or nameless.pop(old.index, None)
        gpus.append(_complete(old, new) if new else replace(old, fault=GONE))
    used = {gpu.index for gpu in gpus}
    gpus += _number(used, sorted([*named.values(), *nameless.values()], key=_index))
    gpus = _without_doubles(gpus, now)
    if by_index:
        gpus = [_distrust(gpu, now) for gpu in gpus]
    gpus.sort(key=_index)
    links = _links(before) | _links(now)
    matrix = tuple(tuple(links.get((a.bdf, b.bdf)) for b in gpus) for a in gpus)
    return replace(now, gpus=tuple(gpus), links=matrix)


def _index(gpu: DriverGpu) -> int:
    return gpu.index


def _complete(old: DriverGpu, new: DriverGpu) -> DriverGpu:
    """The new facts, and the old ones that a GPU with a fault does not tell."""
    facts = {
        name: getattr(old, name)
        for name in (field.name for field in fields(DriverGpu))
        if name == "index" or (name != "fault" and getattr(new, name) is None)
    }
    return replace(new, **facts)


def _number(used: set[int], gpus: Sequence[DriverGpu]) -> list[DriverGpu]:
    """GPUs that were not there before, by their own indices or, where taken, further ones."""
    free = [gpu for gpu in gpus if gpu.index not in used]
    taken = [gpu for gpu in gpus if gpu.index in used]
    beyond = max([*used, *map(_index, gpus)], default=-1) + 1
    return free + [replace(gpu, index=index) for index, gpu in enumerate(taken, beyond)]


def _without_doubles(gpus: Sequence[DriverGpu], now: DriverReading) -> list[DriverGpu]:
    """A remembered GPU gives up the UUID and the minor that a listed one of another address has,
    and its place where there are too many."""
    uuids = {gpu.uuid for gpu in now.gpus if gpu.uuid is not None}
    minors = {gpu.minor for gpu in now.gpus if gpu.minor is not None}
    listed = {gpu.bdf for gpu in now.gpus}
    kept = []
    for gpu in gpus:
        if gpu.bdf not in listed:
            if len(gpus) > MAX_GPUS and gpu.fault == GONE:
                continue
            uuid = None if gpu.uuid in uuids else gpu.uuid
            minor = None if gpu.minor in minors else gpu.minor
            gpu = replace(gpu, uuid=uuid, minor=minor)
        kept.append(gpu)
    return kept


def _distrust(gpu: DriverGpu, now: DriverReading) -> DriverGpu:
    """The GPU, with a fault where its index means another one to the driver."""
    theirs = next((one.index for one in now.gpus if one.bdf == gpu.bdf), gpu.index)
    if theirs == gpu.index or gpu.fault is not None:
        return gpu
    return replace(gpu, fault=f"the driver calls it GPU {theirs} now, and kubelet GPU {gpu.index}")


def _links(reading: DriverReading) -> dict[tuple[str | None, str | None], Link]:
    return {
        (a.bdf, b.bdf): link
        for a, row in zip(reading.gpus, reading.links, strict=True)
        for b, link in zip(reading.gpus, row, strict=True)
        if link is not None and a.bdf is not None and b.bdf is not None
    }


def with_faults(machine: Machine, faults: Mapping[str, str]) -> Machine:
    """The machine whose GPUs have these faults, by UUID, beside those that it knows of."""
    gpus = tuple(
        replace(gpu, fault=fault)
        if (fault := faults.get(gpu.uuid or "")) and not gpu.fault
        else gpu
        for gpu in machine.gpus
    )
    return machine if gpus == machine.gpus else replace(machine, gpus=gpus)
