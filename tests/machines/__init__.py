"""Descriptions of servers, one a file; what they say is measured, or stands in their comments."""

import tomllib
from pathlib import Path

from agent.fakes.node import Description, describe

FOLDER = Path(__file__).parent


def load(name: str) -> Description:
    """That of <name>.toml."""
    return describe(tomllib.loads((FOLDER / f"{name}.toml").read_text()), name)


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.toml"))
