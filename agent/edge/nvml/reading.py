"""Everything that the driver says of its GPUs and their links, once."""

import time
from collections.abc import Sequence
from functools import partial
from itertools import combinations
from typing import Any, Final

import pynvml

from agent.core.bitmap import MAX_ID, Bitmap
from agent.core.discovery import DriverGpu, DriverReading
from agent.core.topology import Link, LinkKind
from agent.edge.nvml.child import (
    GRACE_S,
    NoChildError,
    Silence,
    describe_end,
    end_child,
    receive,
    send,
    start_child,
)
from agent.edge.nvml.talk import UNSAID, RefusalError, Talk, converse, open_session

_INIT_SHARE, _GPU_SHARE, _PAIR_SHARE = 0.5, 0.8, 0.9
"""By which part of the time the stages end. The rest is for sending the answer."""

_WORDS: Final = (MAX_ID + 1) // 64

_ANCESTORS: Final[dict[int | None, LinkKind]] = {
    pynvml.NVML_TOPOLOGY_INTERNAL: LinkKind.PIX,
    pynvml.NVML_TOPOLOGY_SINGLE: LinkKind.PIX,
    pynvml.NVML_TOPOLOGY_MULTIPLE: LinkKind.PXB,
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: LinkKind.PHB,
    pynvml.NVML_TOPOLOGY_NODE: LinkKind.NODE,
    pynvml.NVML_TOPOLOGY_SYSTEM: LinkKind.SYS,
}


def read_driver(library: str | None = None, timeout_s: float = 30.0) -> DriverReading:
    """All GPUs that the driver lists. The driver's trouble is told in the reading, never raised.

    `library` is the path of the driver's library, None for the one that the loader finds. Returns
    within `timeout_s` and a second, though the driver hang. Where nothing keeps idle GPUs awake the
    driver first starts them, which may take seconds for each.

    Forks, so it is best called before threads start. With threads it works too, as long as none of
    them uses pynvml: the child runs nothing but what is written here.
    """
    try:
        child = start_child(partial(_answer, library, timeout_s))
    except NoChildError as error:
        return DriverReading(problem=str(error))
    answer: object = None
    try:
        answer = receive(child, timeout_s)
    finally:
        status = end_child(child, 0 if answer in (None, Silence.LATE) else GRACE_S)
    return judge_answer(answer, timeout_s, status)


def judge_answer(answer: object, timeout_s: float, status: int | None) -> DriverReading:
    """What a child that should have sent a reading sent; `status` is how it ended."""
    if isinstance(answer, DriverReading):
        return answer
    if answer is Silence.LATE:
        return DriverReading(problem=f"the GPU driver did not answer within {timeout_s:g} s")
    return DriverReading(
        problem="the process that asked the GPU driver ended without an answer: "
        + describe_end(status)
    )


# --- in the child ---------------------------------------------------------------------------------


def _answer(library: str | None, timeout_s: float, pipe: int) -> None:
    send(pipe, interrogate(library, timeout_s)[0])


def interrogate(library: str | None, timeout_s: float) -> tuple[DriverReading, list[Talk]]:
    """The reading, and the talks with the GPUs in it, in its order. The session stays open."""
    start = time.monotonic()
    opening = Talk()
    problem = converse([opening], partial(open_session, library), start, _INIT_SHARE * timeout_s)[0]
    if problem:
        return DriverReading(problem=problem), []
    talks = [Talk(index=index) for index in range(opening.facts["count"])]
    faults = converse(talks, read_gpu, start, _GPU_SHARE * timeout_s)
    sound = [talk for talk in talks if not faults[talk.index]]
    links = _read_links(sound, start, _PAIR_SHARE * timeout_s)
    reading = DriverReading(
        gpus=tuple(_describe(talk, faults[talk.index]) for talk in talks),
        links=tuple(tuple(links.get((a.index, b.index)) for b in talks) for a in talks),
        warnings=tuple(
            f"GPU {talk.index} ({talk.facts['bdf']}): {text}"
            for talk in talks
            for text in talk.warnings
        ),
    )
    return reading, talks


def read_gpu(talk: Talk) -> None:
    """All facts. What must be known comes first: the GPU stays nameable when a later call fails.

    Raises RefusalError.
    """
    handle = talk.handle = talk.ask("nvmlDeviceGetHandleByIndex", talk.index)
    talk.facts["bdf"] = _format_bdf(talk.ask("nvmlDeviceGetPciInfo", handle))
    talk.facts["uuid"] = talk.ask("nvmlDeviceGetUUID", handle)
    talk.facts["minor"] = talk.ask_optional("nvmlDeviceGetMinorNumber", handle)
    talk.facts["model"] = talk.ask_optional("nvmlDeviceGetName", handle)
    memory = talk.ask_optional("nvmlDeviceGetMemoryInfo", handle)
    talk.facts["memory_bytes"] = memory.total if memory else None
    talk.facts["memory_nodes"] = _read_affinity(talk, "nvmlDeviceGetMemoryAffinity")
    talk.facts["cpus"] = _read_affinity(talk, "nvmlDeviceGetCpuAffinityWithinScope")
    talk.facts["fault"] = read_fault(talk)
    _read_nvlinks(talk)


def read_fault(talk: Talk) -> str | None:
    """Why a GPU that answers cannot be given out. Raises RefusalError."""
    mig = talk.ask_optional("nvmlDeviceGetMigMode", talk.handle)
    if mig and mig[0] == pynvml.NVML_DEVICE_MIG_ENABLE:
        return "MIG is enabled: it cannot be given out as a whole GPU"
    return None


def _read_affinity(talk: Talk, call: str) -> Bitmap | None:
    """The set of ids that `call` gives at node scope; an empty one says nothing."""
    too_many = (pynvml.NVML_ERROR_INSUFFICIENT_SIZE,)
    scope = pynvml.NVML_AFFINITY_SCOPE_NODE
    words = talk.ask_optional(call, talk.handle, _WORDS, scope, unsaid=too_many) or ()
    bits = sum(word << 64 * i for i, word in enumerate(words))
    return Bitmap.from_int(bits) if bits else None


def _read_nvlinks(talk: Talk) -> None:
    """A driver that does not know a remote end's type still knows its address."""
    beyond = (pynvml.NVML_ERROR_INVALID_ARGUMENT,)
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        end = (talk.handle, link)
        if not talk.ask_optional("nvmlDeviceGetNvLinkState", *end, unsaid=beyond):
            continue
        kind = talk.ask_optional("nvmlDeviceGetNvLinkRemoteDeviceType", *end)
        if kind == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            talk.switched += 1
        elif kind in (pynvml.NVML_NVLINK_DEVICE_TYPE_GPU, None):
            remote = talk.ask_optional("nvmlDeviceGetNvLinkRemotePciInfo", *end)
            if remote:
                talk.direct[_format_bdf(remote)] += 1


def _read_links(
    gpus: Sequence[Talk], start: float, limit_s: float
) -> dict[tuple[int, int], Link | None]:
    """The links both ways, by index. A pair whose path cannot be asked costs a warning only: the
    driver does not tell which of the two is to blame."""
    paths: dict[tuple[int, int], LinkKind | None] = {}
    doubts = converse(gpus, partial(_read_paths, gpus, paths), start, limit_s)
    links: dict[tuple[int, int], Link | None] = {}
    for a, b in combinations(gpus, 2):
        kind = paths.get((a.index, b.index))
        if nvlinks := _count_nvlinks(a, b):
            link: Link | None = Link(kind=LinkKind.NV, nvlinks=nvlinks)
        else:
            link = Link(kind=kind) if kind else None
        links[a.index, b.index] = links[b.index, a.index] = link
    for talk in gpus:
        if doubt := doubts[talk.index]:
            talk.warn(doubt)
    return links


def _read_paths(
    gpus: Sequence[Talk], paths: dict[tuple[int, int], LinkKind | None], talk: Talk
) -> None:
    """The PCI paths to the GPUs that follow, where no NVLink is the better one."""
    for other in gpus:
        if talk.index < other.index and not _count_nvlinks(talk, other):
            paths[talk.index, other.index] = _ask_path(talk, other)


def _ask_path(talk: Talk, other: Talk) -> LinkKind | None:
    call = "nvmlDeviceGetTopologyCommonAncestor"
    try:
        return _ANCESTORS.get(talk.ask(call, talk.handle, other.handle), LinkKind.SYS)
    except RefusalError as refusal:
        if refusal.code == pynvml.NVML_ERROR_UNKNOWN:  # so on boards with odd bridges
            return LinkKind.SYS
        if refusal.code not in UNSAID:
            talk.warn(f"{call} with GPU {other.index} failed: {refusal.meaning}")
        return None


# --- from NVML's values to ours -------------------------------------------------------------------


def _count_nvlinks(a: Talk, b: Talk) -> int:
    """The NVLinks between two GPUs that both ends agree on, else those through NVSwitch."""
    direct = min(a.direct[b.facts["bdf"]], b.direct[a.facts["bdf"]])
    return direct or min(a.switched, b.switched)


def _format_bdf(pci: Any) -> str:
    return f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0"


def _describe(talk: Talk, fault: str | None) -> DriverGpu:
    facts = dict(talk.facts)
    if fault:
        facts["fault"] = fault
    return DriverGpu(index=talk.index, **facts)
