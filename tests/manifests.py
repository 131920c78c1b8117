"""The manifests of daemonset/ as objects."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

FOLDER: Final = Path(__file__).parent.parent / "daemonset"
BASE, OVERLAYS, COMPONENTS = FOLDER / "base", FOLDER / "overlays", FOLDER / "components"

Object = dict[str, Any]


def read(path: Path) -> list[Object]:
    """The documents of a file."""
    return [one for one in yaml.safe_load_all(path.read_text()) if one]


def objects_in(*folders: Path) -> list[Object]:
    """All but what kustomize is told, of these folders alone."""
    files = [file for folder in folders for file in sorted(folder.glob("*.yaml"))]
    return [one for file in files if file.name != "kustomization.yaml" for one in read(file)]


def one_of(objects: list[Object], kind: str) -> Object:
    (found,) = (one for one in objects if one["kind"] == kind)
    return found


def parts(folder: Path) -> Iterator[Path]:
    """The files that a kustomization is made of, itself among them, and those of its parts."""
    yield folder / "kustomization.yaml"
    (plan,) = read(folder / "kustomization.yaml")
    generated = [name for maker in plan.get("configMapGenerator", ()) for name in maker["files"]]
    for name in [*plan.get("resources", ()), *generated]:
        part = (folder / name).resolve()
        yield from parts(part) if part.is_dir() else [part]
