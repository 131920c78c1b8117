"""How the demo is printed: steps that show how far they are, lines below them, ticks.

On a terminal a step is one line that is drawn anew until it is done; elsewhere it is printed once.
"""

import shutil
import textwrap
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final, TextIO

_WIDTH: Final = 100
_FRAMES: Final = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_FRAME_S: Final = 0.08
_CLEAR: Final = "\r\x1b[K"
BOLD, DIM, RED, GREEN, YELLOW = "1", "2", "31", "32", "33"


class Screen:
    """`colour` for ANSI colours, `live` for steps that are drawn anew."""

    def __init__(self, out: TextIO, colour: bool, live: bool) -> None:
        self._out = out
        self._colour = colour
        self._live = live
        self._step: tuple[str, float] | None = None
        self._drawn_s = 0.0

    def paint(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._colour and code else text

    def line(self, text: str = "") -> None:
        self._out.write(f"{text}\n")
        self._out.flush()

    def lines(self, lines: Iterable[str], indent: int = 2) -> None:
        for line in lines:
            self.line(f"{' ' * indent}{line}".rstrip())

    def kept(self, text: str) -> None:
        self.line(f"  {self.paint('✓', GREEN)} {text}")

    def broken(self, text: str, why: str) -> None:
        self.line(f"  {self.paint('✗', RED)} {text}")
        for line in textwrap.wrap(printable_line(why), _WIDTH - 6, break_on_hyphens=False):
            self.line(f"      {self.paint(line, RED)}")

    @contextmanager
    def step(self, text: str) -> Iterator[None]:
        """The work inside belongs to it; nothing may be printed meanwhile."""
        self._step = text, time.monotonic()
        self.tick()
        try:
            yield
        except BaseException:
            self._step = None
            self.line(f"{self._clear}{self.paint(text, BOLD)}")
            raise
        took = f"{time.monotonic() - self._step[1]:.1f} s"
        self._step = None
        gap = " " * max(2, _WIDTH - len(text) - len(took))
        self.line(f"{self._clear}{self.paint(text, BOLD)}{gap}{self.paint(took, DIM)}")

    def tick(self) -> None:
        """Time passes."""
        now_s = time.monotonic()
        if self._live and self._step and now_s - self._drawn_s >= _FRAME_S:
            text, start_s = self._step
            frame = _FRAMES[int((now_s - start_s) / _FRAME_S) % len(_FRAMES)]
            room = shutil.get_terminal_size().columns - 10
            self._out.write(f"{_CLEAR}{frame} {text[:room]} {now_s - start_s:.1f} s")
            self._out.flush()
            self._drawn_s = now_s

    @property
    def _clear(self) -> str:
        return _CLEAR if self._live else ""


def printable_line(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)
