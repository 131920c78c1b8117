"""Which device nodes of the GPU driver exist, on folders whose devices are links to /dev/null."""

import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent.edge.devnodes import read_device_nodes

DRIVER = ["nvidia0", "nvidia1", "nvidia15", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"]
CAPS = ["nvidia-caps/nvidia-cap1", "nvidia-caps/nvidia-cap2"]
"""Of MIG devices, which are not given out."""


def device(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to("/dev/null")


def file(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")


def folder(path: Path) -> None:
    path.mkdir(parents=True)


def pipe(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)


def dangling(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to("nowhere")


Make = Callable[[Path], None]

FOLDERS: dict[str, tuple[dict[str, Make], list[str]]] = {
    "all that the driver has": (dict.fromkeys([*DRIVER, *CAPS], device), DRIVER),
    "no driver": (dict.fromkeys(["null", "sda", "card0", "dri/card0"], device), []),
    "an empty folder": ({}, []),
    "devices of others that are called alike": (
        dict.fromkeys(
            [
                *("nvidia", "nvidia-modeset", "nvidia-nvlink", "nvidiactl2", "xnvidia0", "NVIDIA0"),
                *("nvidia-nvswitch0", "nvidia-caps-imex-channels/channel0", "nvidia_0"),
                "deep/nvidia0",
            ],
            device,
        ),
        [],
    ),
    "what is called alike but is no character device": (
        {
            "nvidia0": device,
            "nvidia1": file,
            "nvidia2": folder,
            "nvidia3": pipe,
            "nvidia4": dangling,
            "nvidiactl": file,
            "nvidia-uvm": dangling,
        },
        ["nvidia0"],
    ),
}


@pytest.mark.parametrize(("made", "expected"), FOLDERS.values(), ids=FOLDERS)
def test_the_device_nodes_that_exist(
    tmp_path: Path, made: dict[str, Make], expected: list[str]
) -> None:
    (tmp_path / "dev").mkdir()
    for name, make in made.items():
        make(tmp_path / "dev" / name)
    assert read_device_nodes(str(tmp_path), "/dev") == frozenset(expected)


@pytest.mark.parametrize(
    ("root", "dev_dir"),
    [("/host", "/run/nvidia/driver/dev"), ("/host/", "/run/nvidia/driver/dev/"), ("", "/host/run")],
    ids=["below the root", "with slashes at the end", "anywhere"],
)
def test_names_are_below_the_folder_wherever_that_is(
    tmp_path: Path, root: str, dev_dir: str
) -> None:
    for name in ("nvidia0", "nvidiactl"):
        device(tmp_path / f"{root}/{dev_dir}/{name}".lstrip("/"))
    found = read_device_nodes(f"{tmp_path}{root}", dev_dir)
    assert found == {"nvidia0", "nvidiactl"}


# --- folders that cannot be read ------------------------------------------------------------------


@pytest.mark.parametrize(
    "dev_dir",
    [
        "/nowhere",
        "/nowhere/dev",
        "/file",
        "/file/dev",
        "/loop",
        f"/{'x' * 256}",
    ],
    ids=[
        "not there",
        "nor the folder above",
        "a file",
        "below a file",
        "a link to itself",
        "a name that is too long",
    ],
)
def test_what_is_no_folder_has_no_device_nodes(tmp_path: Path, dev_dir: str) -> None:
    file(tmp_path / "file")
    (tmp_path / "loop").symlink_to("loop")
    assert read_device_nodes(str(tmp_path), dev_dir) == frozenset()


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that others can read, with one device node."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        device(Path(name, "above", "dev", "nvidia0"))
        yield Path(name)


@pytest.mark.parametrize("closed", ["above/dev", "above"], ids=["the folder", "the folder above"])
def test_what_may_not_be_read_has_no_device_nodes(shared: Path, closed: str) -> None:
    os.chmod(shared / closed, 0)
    try:
        found = as_nobody(lambda: read_device_nodes(str(shared), "/above/dev"))
    finally:
        os.chmod(shared / closed, 0o755)
    assert found == frozenset()


def as_nobody(action: Callable[[], object]) -> object:
    """What the action returns, or the sentence of what it raises; root, who may read everything,
    becomes somebody else for it, in a process of its own."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            result = action()
        except BaseException as error:
            result = repr(error)
        os.write(writer, pickle.dumps(result))
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as answer:
        result = pickle.loads(answer.read())
    os.waitpid(pid, 0)
    return result
