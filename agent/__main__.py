"""The command `numalet`: arguments in, exit code out (0 done, 2 bad input)."""

import argparse
import json
import os
import sys
from collections.abc import Sequence

from agent.core.picture import draw_text
from agent.core.schema import parse_machine, to_json
from agent.core.svg import draw_svg
from agent.core.topology import Machine
from agent.daemon import observe_machine
from agent.errors import AgentError, ConfigError

_LARGEST_FILE = 16 << 20
"""Bytes of a file given by a user; the widest real machine takes 0.1 MB."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        code: int = options.command(options)
        sys.stdout.flush()
        return code
    except AgentError as error:
        print(f"numalet: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="numalet",
        description="CPUs and memory for pods on the NUMA node of their GPUs.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    show = commands.add_parser(
        "show",
        help="what this node is: NUMA nodes, cores, GPUs and their links",
        description="Shows a node: NUMA nodes, cores, caches, GPUs and the links between them.",
        allow_abbrev=False,
    )
    source = show.add_mutually_exclusive_group()
    source.add_argument("--root", metavar="DIR", help="read the files of a machine below DIR (/)")
    source.add_argument(
        "--machine", metavar="FILE", help="show a machine saved with --json; - is standard input"
    )
    show.add_argument(
        "--nvml",
        metavar="LIBRARY",
        help="ask the GPU driver through this libnvidia-ml.so.1 (the host's own, if DIR is /)",
    )
    show.add_argument("--json", action="store_true", help="print the machine as JSON")
    show.add_argument("--svg", metavar="FILE", help="also draw the machine into FILE")
    show.set_defaults(command=_show)
    return parser


def _show(options: argparse.Namespace) -> int:
    if options.machine and options.nvml:
        raise ConfigError("--nvml asks a driver, --machine reads a file: give one of them")
    machine = (
        _load_machine(options.machine)
        if options.machine
        else observe_machine(options.root or "/", options.nvml)
    )
    if options.svg:
        _write(options.svg, draw_svg(machine))
    if options.json:
        print(json.dumps(to_json(machine), indent=1, ensure_ascii=False))
    else:
        sys.stdout.write(draw_text(machine, colour=_wants_colour()))
    return 0


def _wants_colour() -> bool:
    """Source: https://no-color.org."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _load_machine(path: str) -> Machine:
    try:
        return parse_machine(_read(path))
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


def _read(path: str) -> str:
    try:
        with open(0 if path == "-" else path, "rb") as file:
            data = file.read(_LARGEST_FILE + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > _LARGEST_FILE:
        raise ConfigError(f"{path}: is larger than {_LARGEST_FILE >> 20} MiB")
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text: {error.reason}") from error


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


if __name__ == "__main__":
    sys.exit(main())
