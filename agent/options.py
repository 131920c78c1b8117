"""Which values an option may have: each kind checks what TOML or a flag gives, and says what can be
meant."""

import ipaddress
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from agent.core.bitmap import Bitmap

_LONGEST_PATH: Final = 4095
"""Bytes. Source: PATH_MAX of Linux, less the NUL."""
LONGEST_SOCKET: Final = 107
"""Bytes. Source: unix(7), sun_path of 108 with its NUL."""
LONGEST_SOCKET_DIR: Final = LONGEST_SOCKET - len("/numalet-00000000.sock")

_CDI_KIND: Final = re.compile(
    r"(?=[^/]{1,253}/)[A-Za-z]([\w.-]*[A-Za-z0-9])?/(?=.{1,63}\Z)[A-Za-z]([\w.-]*[A-Za-z0-9])?",
    re.ASCII,
)
"""Source: the CDI specification, "Kind", and what its Go package lets pass of that."""
_SUBDOMAIN: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_LABEL_NAME: Final = re.compile(r"(?=.{1,63}\Z)[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?", re.ASCII)
_ADDRESS: Final = re.compile(r"(?:\[([^\[\]]+)\]|([^:\[\]]+)):([0-9]{1,5})", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """`accept` turns TOML's value into Config's; None: it cannot be meant. `meant` says what can.

    `from_text` turns a flag's text into what TOML would have; what it does not know, it leaves.
    """

    help: str
    meant: str
    metavar: str
    accept: Callable[[object], Any]
    from_text: Callable[[str], object] = str


def _field(default: object, about: str, **how: Any) -> Any:
    return field(default=default, metadata={"option": Option(help=about, **how)})


def path(default: str, about: str, *, example: str = "", longest: int = _LONGEST_PATH) -> Any:
    """An absolute path; or an empty one, if that is the default."""
    like = f"an absolute path of at most {longest} bytes, like {default or example}"
    return _field(
        default,
        about,
        meant=like if default else f"{like}, or empty",
        metavar="PATH",
        accept=partial(_accept_path, longest, not default),
    )


def _accept_path(longest: int, optional: bool, value: object) -> str | None:
    if not isinstance(value, str) or "\0" in value:
        return None
    try:
        size = len(value.encode())
    except UnicodeEncodeError:  # a flag with bytes that are no text
        return None
    sound = value.startswith("/") and size <= longest
    return value if sound or (optional and not value) else None


def seconds(default: float, about: str, *, least: float, most: float) -> Any:
    return _field(
        default,
        about,
        meant=f"a number of seconds from {least:g} to {most:g}, like {default:g}",
        metavar="SECONDS",
        accept=partial(_accept_seconds, least, most),
        from_text=_to_number,
    )


def _accept_seconds(least: float, most: float, value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if least <= value <= most else None


def _to_number(text: str) -> object:
    try:
        return float(text)
    except ValueError:
        return text


def numbers(default: tuple[int, ...], about: str, *, most: int) -> Any:
    """Whole numbers in ascending order, each once; on the command line with commas between."""
    return _field(
        default,
        about,
        meant=f"a list of whole numbers from 1 to {most}, like [13, 31] (as a flag: 13,31)",
        metavar="LIST",
        accept=partial(_accept_numbers, most),
        from_text=_to_numbers,
    )


def _accept_numbers(most: int, value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list | tuple):
        return None
    sound = all(type(number) is int and 1 <= number <= most for number in value)
    return tuple(sorted(set(value))) if sound else None


def _to_numbers(text: str) -> object:
    parts = text.split(",") if text else []
    sound = all(re.fullmatch(r"[0-9]{1,9}", part) for part in parts)
    return [int(part) for part in parts] if sound else text


def word(default: str, about: str, words: Sequence[str]) -> Any:
    return _field(
        default,
        about,
        meant=f"one of {', '.join(words)}",
        metavar="|".join(words),
        accept=lambda value: next((word for word in words if word == value), None),
    )


def text(
    default: str, about: str, *, metavar: str, meant: str, is_meant: Callable[[str], bool]
) -> Any:
    """A text that `is_meant`, or an empty one."""

    def accept(value: object) -> str | None:
        return value if isinstance(value, str) and (not value or is_meant(value)) else None

    return _field(default, about, meant=f"{meant}, or empty", metavar=metavar, accept=accept)


def is_cdi_kind(text: str) -> bool:
    return bool(_CDI_KIND.fullmatch(text))


def is_address(text: str) -> bool:
    found = _ADDRESS.fullmatch(text)
    if not found or int(found[3]) > 65535:
        return False
    try:
        return ipaddress.ip_address(found[1] or found[2]).version == (6 if found[1] else 4)
    except ValueError:
        return False


def is_nri_index(text: str) -> bool:
    return bool(re.fullmatch(r"[0-9]{2}", text, re.ASCII)) and text != "00"


def is_cpu_list(text: str) -> bool:
    try:
        return bool(Bitmap.parse_list(text))
    except ValueError:
        return False


def is_url(text: str) -> bool:
    return bool(re.fullmatch(r"https?://[\w.:\[\]-]{1,255}/?", text, re.ASCII))


def is_node_name(text: str) -> bool:
    """Source: Kubernetes, a DNS subdomain (RFC 1123)."""
    return len(text) <= 253 and bool(_SUBDOMAIN.fullmatch(text))


def is_label_key(text: str) -> bool:
    """Source: Kubernetes, qualified names of labels and taints."""
    prefix, slash, name = text.rpartition("/")
    return (not slash or is_node_name(prefix)) and bool(_LABEL_NAME.fullmatch(name))
