"""What the GPU driver said before, where it says less now.

A GPU that once was there stays known: kubelet, and the pods that hold it, know it by what it was
called then. It keeps its index, its place in the machine and its links, and gets a fault.
"""

from collections.abc import Mapping
from dataclasses import fields, replace

from agent.core.discovery import DriverGpu, DriverReading
from agent.core.topology import Link, Machine

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
        gpus.append(_complete(old, new, by_index) if new else replace(old, fault=GONE))
    unknown = [*named.values(), *nameless.values()]
    gpus += _number({gpu.index for gpu in gpus}, unknown)
    gpus.sort(key=lambda gpu: gpu.index)
    links = _links(before) | _links(now)
    return replace(
        now,
        gpus=tuple(gpus),
        links=tuple(tuple(links.get((a.bdf, b.bdf)) for b in gpus) for a in gpus),
    )


def _complete(old: DriverGpu, new: DriverGpu, by_index: bool) -> DriverGpu:
    """The new facts, and the old ones that a GPU with a fault does not tell."""
    facts = {
        name: getattr(old, name)
        for name in (field.name for field in fields(DriverGpu))
        if name == "index" or (name != "fault" and getattr(new, name) is None)
    }
    if by_index and new.bdf is not None and new.index != old.index and new.fault is None:
        facts["fault"] = f"the driver calls it GPU {new.index} now, and kubelet GPU {old.index}"
    return replace(new, **facts)


def _number(used: set[int], gpus: list[DriverGpu]) -> list[DriverGpu]:
    """GPUs that were not there before, by their own indices or, where taken, the next free ones."""
    numbered = []
    for gpu in sorted(gpus, key=lambda gpu: gpu.index):
        index = gpu.index if gpu.index not in used else max(used) + 1
        used = used | {index}
        numbered.append(replace(gpu, index=index))
    return numbered


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
