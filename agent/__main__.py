"""The command `numalet`: arguments in, exit code out (0 done, 2 bad input, 3 refused)."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from agent.config import add_flags, flags_given, load_config
from agent.core.bitmap import Bitmap
from agent.core.picture import draw_text
from agent.core.plan import draw_plan, make_plan, owners, plan_to_json
from agent.core.schema import parse_machine, to_json
from agent.core.svg import draw_svg
from agent.core.topology import Machine
from agent.demo import add_arguments, run_demo
from agent.edge.manifest import read_pods
from agent.errors import AgentError, ConfigError
from agent.observation import describe_pinning, observe_machine

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
    _add_machine(show)
    show.add_argument("--json", action="store_true", help="print the machine as JSON")
    show.add_argument("--svg", metavar="FILE", help="also draw the machine into FILE")
    show.set_defaults(command=_show)
    plan = commands.add_parser(
        "plan",
        help="where pods would go on a node, and what would be refused",
        description="Places pods one after the other on the empty node and shows what becomes of "
        "them. Exit code: 0 all admitted, 3 some refused, 2 bad input.",
        allow_abbrev=False,
    )
    _add_machine(plan)
    plan.add_argument(
        *("-f", "--filename"),
        metavar="FILE",
        nargs="+",
        action="extend",
        required=True,
        help="Kubernetes YAML or JSON: pods and workloads; - is standard input",
    )
    plan.add_argument(
        "--reserved-cpus", metavar="LIST", default="", help="CPUs no pod is pinned to, like 0-1,64"
    )
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    plan.add_argument(
        "--svg", metavar="FILE", help="also draw the node, coloured by pod, into FILE"
    )
    plan.set_defaults(command=_plan)
    doctor = commands.add_parser(
        "doctor",
        help="what this node needs before the agent can do its work, and what to do about it",
        description="Checks every precondition of `numalet run`, with the same options. Exit code: "
        "0 nothing stands in the way, 1 something does, 2 bad input.",
        allow_abbrev=False,
    )
    add_flags(doctor)
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")
    doctor.set_defaults(command=_doctor)
    demo = commands.add_parser(
        "demo",
        help="the agent at work on a node that is not there: no root, no cluster, no GPU",
        description="Runs the unmodified agent on an embedded node, lets pods come and go there, "
        "and checks what became of them. Exit code: 0 every promise was kept, 1 one was broken, "
        "2 bad input.",
        allow_abbrev=False,
    )
    add_arguments(demo)
    demo.set_defaults(command=run_demo)
    run = commands.add_parser(
        "run",
        help="the agent: offer this node's GPUs to kubelet",
        description="Runs the agent until SIGTERM. SIGHUP reads the configuration anew.",
        allow_abbrev=False,
    )
    add_flags(run)
    run.set_defaults(command=_run)
    return parser


def _add_machine(command: argparse.ArgumentParser) -> None:
    source = command.add_mutually_exclusive_group()
    source.add_argument("--root", metavar="DIR", help="the machine whose files are below DIR (/)")
    source.add_argument(
        "--machine", metavar="FILE", help="a machine saved by show --json; - is standard input"
    )
    command.add_argument(
        "--nvml",
        metavar="LIBRARY",
        help="ask the GPU driver through this libnvidia-ml.so.1 (the host's own, if DIR is /)",
    )


def _read_machine(options: argparse.Namespace) -> Machine:
    if not options.machine:
        return observe_machine(options.root or "/", options.nvml)
    if options.nvml:
        raise ConfigError("--nvml asks a driver, --machine reads a file: give one of them")
    try:
        return parse_machine(_read(options.machine))
    except ValueError as error:
        raise ConfigError(f"{options.machine}: {error}") from error


def _show(options: argparse.Namespace) -> int:
    machine = _read_machine(options)
    if options.svg:
        _write(options.svg, draw_svg(machine))
    if options.json:
        _print_json(to_json(machine))
    else:
        sys.stdout.write(draw_text(machine, colour=_wants_colour()))
        if not options.machine and (path := describe_pinning(options.root or "/")):
            print(f"pinning   {path}")
    return 0


def _plan(options: argparse.Namespace) -> int:
    if options.machine == "-" and "-" in options.filename:
        raise ConfigError("the machine and the pods cannot both come from standard input")
    machine = _read_machine(options)
    reserved = _parse_reserved(options.reserved_cpus, machine)
    pods, problems = read_pods(options.filename)
    for problem in problems:
        print(f"numalet: {problem}", file=sys.stderr)
    plan = make_plan(machine, reserved, pods)
    if options.svg:
        _write(options.svg, draw_svg(machine, owners(plan)))
    if options.json:
        _print_json(plan_to_json(plan))
    else:
        sys.stdout.write(draw_plan(plan))
    return 2 if problems else 3 if any(pod.reason for pod in plan.pods) else 0


def _run(options: argparse.Namespace) -> int:
    from agent.daemon import Daemon  # gRPC and the like, which the other commands do without

    Daemon(lambda: load_config(options.config, flags_given(options))).run()
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from agent.doctor import draw, has_failed, run_doctor, to_json

    findings = run_doctor(load_config(options.config, flags_given(options)))
    if options.json:
        _print_json(to_json(findings))
    else:
        sys.stdout.write(draw(findings, _wants_colour()))
    return int(has_failed(findings))


def _parse_reserved(text: str, machine: Machine) -> Bitmap:
    try:
        reserved = Bitmap.parse_list(text)
    except ValueError as error:
        raise ConfigError(f"--reserved-cpus: {error}") from error
    if strange := reserved - machine.cpus:
        raise ConfigError(f"--reserved-cpus: the machine has no online CPUs {strange}")
    return reserved


def _print_json(data: dict[str, Any]) -> None:
    print(json.dumps(data, indent=1, ensure_ascii=False))


def _wants_colour() -> bool:
    """Source: https://no-color.org."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


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
