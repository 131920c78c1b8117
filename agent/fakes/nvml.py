"""The fake GPU driver: its library, and the text file that the library answers from.

`libnvidia-ml.c` says what each line means. A state is its lines: GPUs first, then whatever else is
to be told. While a process uses the library, `add_line` and `remove_line` break and mend it.
"""

import hashlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ENVIRONMENT = "NUMALET_FAKE_NVML"
"""The environment variable that names the text file to the library."""

SONAME = "libnvidia-ml.so.1"

ANCESTORS = {"PIX": 10, "PXB": 20, "PHB": 30, "NODE": 40, "SYS": 50}
"""NVML's topology levels by the words of `nvidia-smi topo -m`."""

_SOURCE = Path(__file__).with_name("libnvidia-ml.c")
_WARNINGS = ("-Wall", "-Wextra", "-Wconversion", "-Wshadow", "-Werror")
_FLAGS = ("-std=c11", *_WARNINGS, "-O1", "-fPIC", "-shared")


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeGpu:
    """What the driver says of one GPU; None is a fact that it does not support.

    `memory_nodes` and `cpus` are kernel lists ("0-31,64-95"), `events` the types that can be
    registered.
    """

    bdf: str | None
    uuid: str | None
    minor: int | None = None
    memory: int | None = None
    memory_nodes: str | None = None
    cpus: str | None = None
    mig: int | None = None
    events: int | None = 0x1F
    name: str | None = None


def build(folder: Path, soname: str = SONAME) -> Path:
    """The library, compiled into `folder` unless it is there already."""
    recipe = _SOURCE.read_bytes() + " ".join((*_FLAGS, soname)).encode()
    library = folder / hashlib.sha256(recipe).hexdigest()[:16] / SONAME
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        fresh = library.with_name(f"{os.getpid()}.so")
        compiler = os.environ.get("CC", "cc")
        subprocess.run(
            [compiler, *_FLAGS, f"-Wl,-soname,{soname}", "-o", fresh, _SOURCE], check=True
        )
        fresh.replace(library)
    return library


def format_state(
    gpus: Sequence[FakeGpu], lines: Sequence[str] = (), driver: str = "550.54.15"
) -> str:
    """The text of a state; `lines` are those of the functions below."""
    return "\n".join([f"driver {driver}", *map(_gpu, range(len(gpus)), gpus), *lines, ""])


def write_state(path: Path, text: str) -> None:
    """Replaces the file at once: a running library sees the old text or the new."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    fresh.write_text(text)
    fresh.replace(path)


def add_line(path: Path, line: str) -> None:
    write_state(path, f"{path.read_text()}{line}\n")


def remove_line(path: Path, line: str) -> None:
    """Raises ValueError if there is no such line."""
    lines = path.read_text().splitlines()
    lines.remove(line)
    write_state(path, "\n".join([*lines, ""]))


def fail(call: str, code: int, gpu: int | str = "*") -> str:
    """An NVML error from `call` ("*" is any) for `gpu` ("*" is any GPU or none)."""
    return f"fail {gpu} {call} {code}"


def hang(call: str, gpu: int | str = "*") -> str:
    """No answer while the line is there."""
    return f"hang {gpu} {call}"


def crash(call: str, gpu: int | str = "*") -> str:
    return f"crash {gpu} {call}"


def event(gpu: int | str, data: int, event_type: int = 8) -> str:
    """An event, by default the Xid `data`; of no GPU for "*". Only ever add such lines.

    It is delivered once to each event set that was there before the line.
    """
    return f"event {gpu} {event_type} {data}"


def ancestor(a: int, b: int, level: int) -> str:
    return f"ancestor {a} {b} {level}"


def nvlink(gpu: int, link: int, to: str, bdf: str = "") -> str:
    """One end of an NVLink; `to` is gpu, switch, npu, unknown, or off for one that is down."""
    return f"nvlink {gpu} {link} {to} {bdf}".rstrip()


def nvlinks(counts: Mapping[tuple[int, int], int], bdfs: Sequence[str]) -> list[str]:
    """Direct NVLinks, both ends: `counts[i, j]` of them between the GPUs i and j, given once."""
    used = [0] * len(bdfs)
    lines = []
    for (i, j), count in counts.items():
        for here, there in ((i, j), (j, i)):
            for link in range(used[here], used[here] + count):
                lines.append(nvlink(here, link, "gpu", bdfs[there]))
            used[here] += count
    return lines


def links(matrix: Sequence[Sequence[str]], bdfs: Sequence[str], nvswitch: bool) -> list[str]:
    """The lines for a link matrix as `nvidia-smi topo -m` prints it, NVLinks direct or switched.

    The PCI path below an NVLink, which the matrix does not tell, is SYS.
    """
    pairs = {(i, j): matrix[i][j] for i in range(len(bdfs)) for j in range(i + 1, len(bdfs))}
    counts = {pair: int(word[2:]) for pair, word in pairs.items() if word.startswith("NV")}
    lines = [ancestor(i, j, ANCESTORS.get(word, 50)) for (i, j), word in pairs.items()]
    if not nvswitch:
        return lines + nvlinks(counts, bdfs)
    for gpu in range(len(bdfs)):
        most = max((count for pair, count in counts.items() if gpu in pair), default=0)
        lines += [nvlink(gpu, link, "switch") for link in range(most)]
    return lines


def _gpu(index: int, gpu: FakeGpu) -> str:
    facts = {
        "uuid": gpu.uuid,
        "bdf": gpu.bdf,
        "minor": gpu.minor,
        "memory": gpu.memory,
        "memory_nodes": gpu.memory_nodes,
        "cpus": gpu.cpus,
        "mig": gpu.mig,
        "events": gpu.events,
        "name": gpu.name,
    }
    words = [f"{key}={value}" for key, value in facts.items() if value is not None]
    return " ".join([f"gpu {index}", *words])
