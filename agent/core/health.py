"""Whether a GPU may be given out, from what its driver says over time.

A GPU whose probe fails, or that reports an Xid which is not ignored, is unhealthy at once. It comes
back slowly: after `recovery_s` in which every probe of it was sound, counted from the first one
after its last trouble. So a GPU that comes and goes stays away.

After an Xid that only a reset or a reboot ends, sound probes are no proof: such a GPU may well
answer, and fail its next user. They count only once a probe after the Xid has found the GPU gone;
what answers then was reset. A probe without an answer is no such sign, for a GPU that is merely
slow looks the same. An agent that starts anew begins with what it sees.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from agent.core.discovery import DriverReading
from agent.core.strict_json import parse_json, part, shown, typed

DEFAULT_IGNORED_XIDS: Final = frozenset({13, 31, 43, 45, 68, 109})
"""Xids that an application causes and that end with it; the GPU is sound.

Source: NVIDIA/k8s-device-plugin ignores the same.
"""

MAX_MARKS_LENGTH: Final = 64 << 10
"""Characters in an administrator's file of fault marks."""

_MAX_INDEX: Final = 1023

RESET_XIDS: Final = frozenset(
    {46, 48, 62, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, 143, 151, 155, 156, 158}
)
"""Xids after which the GPU needs a reset, or the machine a reboot.

Source: NVIDIA's Xid catalog, immediate action RESET_GPU, RESTART_BM or RESTART_VM, and 48 and 74,
whose workflows end in a reset. Of 144 to 150 that depends on details that NVML does not tell.
"""

_XIDS: Final[dict[int, str]] = {
    13: "a program made the GPU's engines fail",
    31: "a program used GPU memory that is not its own",
    43: "a program's work on the GPU was stopped",
    45: "a program's work on the GPU was removed after another error",
    46: "the GPU stopped working on what it was given",
    48: "a memory error that cannot be corrected",
    54: "the GPU's power cable is not connected",
    62: "a controller inside the GPU halted",
    63: "a bad row of memory will be replaced at the next reset",
    64: "a bad row of memory could not be replaced",
    68: "the video decoder failed",
    74: "an NVLink failed",
    79: "the GPU has fallen off the bus",
    92: "memory errors are corrected very often",
    94: "a memory error that hit one program only",
    95: "a memory error that may have hit several programs",
    109: "the GPU could not switch from one program to the next",
    110: "a security fault",
    119: "the GPU's system processor (GSP) does not answer the driver",
    120: "the GPU's system processor (GSP) failed",
    121: "the link between GPU and CPU (C2C) failed",
    136: "an NVLink could not be brought up",
    140: "a memory error that the driver could not contain",
    143: "the GPU could not be started",
    **dict.fromkeys(range(144, 151), "an NVLink reported an error"),
    151: "the keys for confidential computing could not be changed",
    154: "the driver asks for another way of recovery, see the kernel log",
    155: "an NVLink reported an error",
    156: "a part of the GPU will be retired at the next reset",
    158: "the GPU did not answer the driver in time",
}
"""What the common ones mean. Source: NVIDIA's Xid catalog."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One GPU as a round of probing found it; `fault` is a sentence, None for a sound GPU.

    `gone`: the driver answered that it cannot speak to this GPU. Not so with a fault of a GPU that
    does answer, and not where nobody answered.
    """

    uuid: str
    fault: str | None
    gone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Xid:
    """An error that the driver reported; `uuid` is None where it did not say of which GPU."""

    uuid: str | None
    code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """What was seen at one time; the Xids count as later than the probes."""

    probes: tuple[Probe, ...] = ()
    xids: tuple[Xid, ...] = ()


class Trouble(StrEnum):
    """LOST: the GPU needs a reset or a reboot, or does not answer. ERROR: it may recover alone."""

    LOST = "lost"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Of one GPU, which is healthy when `reason` is None; else that is a sentence for people.

    `needs_reset`: sound probes do not count before one has found the GPU gone. `sound_since_s` is
    when the first sound probe that counts came after the last trouble, None if none came.
    """

    reason: str | None = None
    trouble: Trouble | None = None
    needs_reset: bool = False
    sound_since_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthPolicy:
    """`recovery_s` is how long all probes of a GPU must be sound until it is healthy again."""

    ignored_xids: frozenset[int] = DEFAULT_IGNORED_XIDS
    recovery_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultMarks:
    """The GPUs that an administrator has marked as faulty, by the driver's index or by UUID."""

    indices: frozenset[int] = frozenset()
    uuids: frozenset[str] = frozenset()


HEALTHY: Final = Health()
DEFAULT_POLICY: Final = HealthPolicy()


# --- judging --------------------------------------------------------------------------------------


def judge_all(
    healths: Mapping[str, Health],
    sighting: Sighting,
    now_s: float,
    policy: HealthPolicy = DEFAULT_POLICY,
) -> dict[str, Health]:
    """All GPUs by UUID after `sighting`, in the same order; those first seen in it come last.

    The value is the same object where nothing changed. An Xid of nobody knows which GPU concerns
    all of them. `now_s` is of any clock that does not go back.
    """
    probes = {probe.uuid: probe for probe in sighting.probes}
    named = [xid.uuid for xid in sighting.xids if xid.uuid is not None]
    return {
        uuid: judge(
            healths.get(uuid, HEALTHY),
            probe=probes.get(uuid),
            xids=[xid.code for xid in sighting.xids if xid.uuid in (uuid, None)],
            now_s=now_s,
            policy=policy,
        )
        for uuid in dict.fromkeys([*healths, *probes, *named])
    }


def judge(
    health: Health,
    *,
    probe: Probe | None = None,
    xids: Iterable[int] = (),
    now_s: float,
    policy: HealthPolicy = DEFAULT_POLICY,
) -> Health:
    """One GPU after a probe and then some Xids; `health` itself if nothing changed."""
    new = health
    if probe is not None and probe.fault is not None:
        new = _note_fault(new, probe.fault, probe.gone)
    elif probe is not None:
        new = _note_sound(new, now_s, policy.recovery_s)
    for code in xids:
        if code not in policy.ignored_xids:
            new = _note_xid(new, code)
    return health if new == health else new


def _note_fault(health: Health, fault: str, gone: bool) -> Health:
    """A GPU that needs a reset and merely does not answer keeps its graver reason."""
    if health.needs_reset and not gone:
        return health
    return Health(reason=fault, trouble=Trouble.LOST)


def _note_sound(health: Health, now_s: float, recovery_s: float) -> Health:
    if health.reason is None or health.needs_reset:
        return health
    since_s = now_s if health.sound_since_s is None else health.sound_since_s
    if now_s - since_s >= recovery_s:
        return HEALTHY
    return replace(health, sound_since_s=since_s)


def _note_xid(health: Health, code: int) -> Health:
    """The first of several Xids that need a reset stays the reason: the others follow from it."""
    needs_reset = code in RESET_XIDS
    if health.needs_reset:
        return health
    if health.trouble is Trouble.LOST and not needs_reset:
        return replace(health, sound_since_s=None)
    trouble = Trouble.LOST if needs_reset else Trouble.ERROR
    return Health(reason=describe_xid(code), trouble=trouble, needs_reset=needs_reset)


def describe_xid(code: int) -> str:
    """`Xid 79: the GPU has fallen off the bus`."""
    return f"Xid {code}: {_XIDS.get(code, 'the driver reported an error, see the kernel log')}"


# --- what else is a sighting ----------------------------------------------------------------------


def see_reading(known: Iterable[str], reading: DriverReading) -> Sighting:
    """What a new reading says of the GPUs that it lists and of those `known`, by UUID.

    A known GPU that is not listed any more is gone. Where the driver could not be asked, nobody
    knows more of the known ones than that.
    """
    if reading.problem is not None:
        return see_silence(known, reading.problem)
    listed = {gpu.uuid: gpu.fault for gpu in reading.gpus if gpu.uuid is not None}
    unlisted = dict.fromkeys(known, "the driver does not list it any more")
    return Sighting(
        probes=tuple(
            Probe(uuid=uuid, fault=fault, gone=uuid not in listed)
            for uuid, fault in (unlisted | listed).items()
        )
    )


def see_silence(known: Iterable[str], fault: str) -> Sighting:
    """Nobody can say of any of these GPUs whether it is sound."""
    return Sighting(probes=tuple(Probe(uuid=uuid, fault=fault) for uuid in known))


# --- the administrator's word ---------------------------------------------------------------------


def parse_fault_marks(text: str) -> FaultMarks:
    """The marks in a file `{"index": ["0"], "uuid": ["GPU-…"]}`; either key may be missing.

    An index is a number or a text of digits. A file of blanks marks nothing. Raises ValueError with
    one sentence.
    """
    if not text.strip():
        return FaultMarks()
    data = typed(parse_json(text, MAX_MARKS_LENGTH), dict, "it")
    for key in data:
        if key not in ("index", "uuid"):
            raise ValueError(f'it has the key {shown(key)}; "index" and "uuid" are known')
    return FaultMarks(
        indices=frozenset(map(_parse_index, part(data, "index", list))),
        uuids=frozenset(map(_parse_uuid, part(data, "uuid", list))),
    )


def _parse_index(value: object) -> int:
    number = value
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 5:
        number = int(value)
    if type(number) is not int or not 0 <= number <= _MAX_INDEX:
        raise ValueError(f"index has {shown(value)}, which is no GPU's index")
    return number


def _parse_uuid(value: object) -> str:
    uuid = typed(value, str, "a part of uuid")
    if not uuid.startswith("GPU-") or not uuid.isprintable() or " " in uuid:
        raise ValueError(f"uuid has {shown(uuid)}, which is no GPU's UUID")
    return uuid
