"""What the agent says while it runs: one line an event, `event key=value …`, on standard error."""

import json
import logging
import sys
from datetime import UTC, datetime

_logger = logging.getLogger("numalet")


def start_logging(level: str) -> None:
    """Sends events of `level` ("debug", "info", "warning", "error") and above to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Line())
    _logger.handlers[:] = [handler]
    _logger.propagate = False
    _logger.setLevel(level.upper())


def debug(event: str, **facts: object) -> None:
    _logger.debug(format_event(event, facts))


def info(event: str, **facts: object) -> None:
    _logger.info(format_event(event, facts))


def warning(event: str, **facts: object) -> None:
    _logger.warning(format_event(event, facts))


def error(event: str, **facts: object) -> None:
    _logger.error(format_event(event, facts))


def crash(event: str) -> None:
    """A bug: the exception now being handled, with its traceback."""
    _logger.exception(event)


def format_event(event: str, facts: dict[str, object]) -> str:
    """`gpu unhealthy gpu=GPU-1 reason="fell off the bus"`; facts that are None are left out."""
    words = [f"{key}={_quote(value)}" for key, value in facts.items() if value is not None]
    return " ".join([event, *words])


def _quote(value: object) -> str:
    text = f"{round(value, 3):g}" if isinstance(value, float) else str(value)
    plain = text and text.isprintable() and not set(text) & set(' ="\\')
    return text if plain else json.dumps(text, ensure_ascii=not text.isprintable())


class _Line(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
