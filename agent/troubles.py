"""What is wrong at the moment, said once for each change."""

from collections.abc import Callable
from typing import TypeVar

from agent import log
from agent.errors import AgentError

_T = TypeVar("_T")


class Troubles:
    """`on_error` is told the class of each error, as `errors.py` has it."""

    def __init__(self, on_error: Callable[[str], None]) -> None:
        self._on_error = on_error
        self._now: dict[str, str] = {}

    def attempt(self, step: str, action: Callable[[], _T], last: _T) -> _T:
        """What the action gives; if it fails, what it gave last."""
        try:
            value = action()
        except AgentError as error:
            self._on_error(_kind(error))
            self.tell(step, str(error))
            return last
        self.tell(step, "")
        return value

    def tell(self, step: str, trouble: str) -> None:
        """Says what is wrong with a step, and when it is well again."""
        if trouble == self._now.get(step, ""):
            return
        if trouble:
            self._now[step] = trouble
            log.warning(step, reason=trouble)
        else:
            del self._now[step]
            log.info(f"{step} is well again")


def _kind(error: AgentError) -> str:
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "agent.errors")
