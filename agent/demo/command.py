"""From arguments to an exit code: what is shown, and that nothing is left of it."""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import as_file, files
from pathlib import Path
from typing import Final

from agent.core.picture import count_of, draw_text
from agent.core.schema import MAX_MACHINE_LENGTH, parse_machine
from agent.core.svg import draw_svg
from agent.core.topology import Machine
from agent.demo.ack import MACHINE, PODS, expect_nothing, expect_of_ack
from agent.demo.node import FailedError, Node, to_node_name
from agent.demo.pods import Pod, parse_pod
from agent.demo.screen import BOLD, DIM, GREEN, RED, Screen, printable_line
from agent.demo.showable import make_showable
from agent.demo.story import CREATED, Story
from agent.edge.manifest import read_pods
from agent.errors import ConfigError
from agent.fakes import nvml

AGENT: Final = (sys.executable, "-m", "agent", "run")
_LONGEST_FOLDER: Final = 60
"""Characters, so that sockets below it have names that the kernel takes."""
_MOST_PODS: Final = 200
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Interrupted(BaseException):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def run(options: argparse.Namespace, agent: Sequence[str] = AGENT) -> int:
    """As run_demo. `agent` is the command that is on trial; `--config FILE` is added to it."""
    if "-" in (options.filename or ()) and options.machine == "-":
        raise ConfigError("the machine and the pods cannot both come from standard input")
    place = os.path.dirname(options.svg or "") or "."
    if not os.path.isdir(place):
        raise ConfigError(f"--svg: {place}: there is no such folder")
    machine = make_showable(_read_machine(options.machine))
    pods, problems = _read_pods(options.filename, to_node_name(machine.name))
    for problem in problems:
        print(f"numalet: {problem}", file=sys.stderr)
    if not pods:
        raise ConfigError("there is no pod to play")
    screen = _screen()
    try:
        with _interruptible(), _make_folder() as folder:
            story = _tell(machine, pods, folder, options, agent, screen)
    except _Interrupted as interrupted:
        screen.line("interrupted: the agent is ended, and nothing is left behind")
        return 128 + interrupted.number
    except FailedError as error:
        screen.line(f"  {screen.paint('✗', RED)} {error}")
        if error.log:
            screen.lines(["the end of its log:", *map(printable_line, error.log)], 4)
        return 1
    if options.svg:
        _write(options.svg, draw_svg(machine, story.owners))
    return 1 if story.broken else 2 if problems else 0


def _tell(
    machine: Machine,
    pods: Sequence[Pod],
    folder: Path,
    options: argparse.Namespace,
    agent: Sequence[str],
    screen: Screen,
) -> Story:
    library = _build_library(folder)
    _introduce(machine, screen)
    start_s = time.monotonic()
    is_ack = not options.machine and not options.filename
    with Node(machine, folder, library, agent, screen.tick) as node, _uninterrupted_end():
        story = Story(
            node=node,
            screen=screen,
            pods=pods,
            expect=expect_of_ack if is_ack else expect_nothing,
        )
        story.tell()
    _conclude(story, time.monotonic() - start_s)
    if is_ack:
        hint = "With your own node and pods: numalet show --json > node.json, and on any machine"
        command = "numalet demo --machine node.json -f pods.yaml"
        screen.lines((screen.paint(hint, DIM), screen.paint(command, DIM)))
    return story


def _introduce(machine: Machine, screen: Screen) -> None:
    screen.line(f"{screen.paint('numalet demo', BOLD)}   {draw_text(machine).splitlines()[0]}")
    screen.line()
    screen.lines(
        (
            "embedded   kubelet, container runtime, API server, GPU driver: stand-ins that speak",
            "           the real protocols; sysfs and cgroups are files; nothing runs in the pods",
            "real       the agent: `numalet run`, a process of its own, as it runs on every node",
            "checked    by what the stand-ins got, not by what the agent says of itself",
        )
    )
    screen.line()


def _conclude(story: Story, took_s: float) -> None:
    screen, total = story.screen, story.kept + story.broken
    if story.broken:
        verdict = f"{count_of(story.broken, 'promise')} of {total} broken"
        mark, code = "✗", RED
    else:
        verdict, mark, code = f"{total} of {total} promises kept", "✓", GREEN
    screen.line(f"{screen.paint(f'{mark} {verdict}', code)} in {took_s:.1f} s")


def _screen() -> Screen:
    """Source of NO_COLOR: https://no-color.org."""
    live = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    return Screen(sys.stdout, colour=live and not os.environ.get("NO_COLOR"), live=live)


# --- what is given --------------------------------------------------------------------------------


def _read_machine(path: str | None) -> Machine:
    text = _read(path) if path else _resource(MACHINE)
    try:
        return parse_machine(text)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


def _read_pods(paths: Sequence[str] | None, node: str) -> tuple[list[Pod], list[str]]:
    """Pods with names of their own, and what is wrong with others."""
    with as_file(files("agent.demo") / PODS) as ack:
        manifests, said = read_pods(paths or [str(ack)])
    pods: dict[str, Pod] = {}
    problems = list(said)
    for manifest in manifests[:_MOST_PODS]:
        try:
            pod = parse_pod(manifest, node, CREATED)
        except ValueError as error:
            problems.append(str(error))
            continue
        if pod.name in pods:
            problems.append(f"pod {pod.name} is there already: the other one is passed over")
        pods.setdefault(pod.name, pod)
    if len(manifests) > _MOST_PODS:
        problems.append(f"more than {_MOST_PODS} pods: the rest is passed over")
    return list(pods.values()), problems


def _resource(name: str) -> str:
    return (files("agent.demo") / name).read_text(encoding="utf-8")


def _read(path: str) -> str:
    try:
        with open(0 if path == "-" else path, "rb") as file:
            data = file.read(MAX_MACHINE_LENGTH + 1)
        return data.decode()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text: {error.reason}") from error


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error


# --- what is needed -------------------------------------------------------------------------------


def _build_library(folder: Path) -> Path:
    """The stand-in for the GPU driver's library, from the cache or else compiled."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    for place in (Path(cache) / "numalet" / "nvml", folder / "nvml"):
        try:
            return nvml.build(place)
        except FileNotFoundError as error:
            raise ConfigError(
                "the stand-in for the GPU driver is compiled once, and there is no C compiler: "
                "install gcc"
            ) from error
        except subprocess.CalledProcessError as error:
            raise ConfigError(
                "the stand-in for the GPU driver cannot be compiled: install gcc and libc6-dev"
            ) from error
        except OSError:
            continue  # a cache that cannot be written
    raise ConfigError(f"{folder}: cannot be written")


@contextmanager
def _make_folder() -> Iterator[Path]:
    """Gone at the end, with all in it."""
    base = tempfile.gettempdir()
    if len(base) > _LONGEST_FOLDER:
        base = "/tmp"
    try:
        folder = tempfile.mkdtemp(prefix="numalet-demo-", dir=base)
    except OSError as error:
        raise ConfigError(f"{base}: no folder can be made here: {error.strerror}") from error
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Signals end the demo, in order and at once; once only."""

    def interrupt(number: int, frame: object) -> None:
        _ignore()
        raise _Interrupted(number)

    before = {number: signal.signal(number, interrupt) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _uninterrupted_end() -> Iterator[None]:
    """From its end on, signals are not heard: what is cleared away then takes no time."""
    try:
        yield
    finally:
        _ignore()


def _ignore() -> None:
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
