"""What hack/vnode says where it cannot boot a virtual node; that it can is for `make vnode`."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests import machines
from tests.vnode import qemu

_HACK = Path(__file__).parent.parent / "hack/vnode"
_MACHINE = "vnode-2x16"
_PLAIN = (
    "bash",
    "awk",
    "cat",
    "dirname",
    "id",
    "ldd",
    "ls",
    "paste",
    "realpath",
    "sed",
    "sort",
    "tail",
)


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder with all programs that the scripts look for; QEMU and the like do nothing."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in _PLAIN:
        (folder / name).symlink_to(shutil.which(name) or name)
    for name in ("qemu-system-x86_64", "modprobe", "cpio", "python3", "apt-cache"):
        answer(folder, name, "")
    answer(folder, "busybox", "")
    answer(folder, "ldd", "", code=1)
    answer(folder, "id", "0")
    return folder


def answer(folder: Path, program: str, text: str, code: int = 0) -> None:
    """Puts a program there that says this, whatever it is asked."""
    (folder / program).unlink(missing_ok=True)
    (folder / program).write_text(f"#!{shutil.which('bash')}\necho {text}\nexit {code}\n")
    (folder / program).chmod(0o755)


def run(programs: Path, script: str, *words: str) -> tuple[int, str]:
    """The exit code, and what is said on standard error."""
    told = os.environ | {"PATH": str(programs), "NUMALET_E2E_CACHE": str(programs.parent / "cache")}
    done = subprocess.run([_HACK / script, *words], env=told, capture_output=True, text=True)
    assert done.stdout == ""
    return done.returncode, done.stderr.strip()


@pytest.mark.parametrize(
    ("program", "package"), [("qemu-system-x86_64", "qemu-system-x86"), ("cpio", "cpio")]
)
@pytest.mark.parametrize("words", [("build",), ("build", "--paths"), ("boot", _MACHINE, "true")])
def test_a_missing_program_is_named_with_its_package(
    programs: Path, program: str, package: str, words: tuple[str, ...]
) -> None:
    (programs / program).unlink()
    code, said = run(programs, *words)
    assert code == 2
    assert said == (
        "the virtual node needs what this machine does not have: "
        f"{program} (Debian package {package}); install it"
    )


def test_a_busybox_that_needs_libraries_is_none(programs: Path) -> None:
    answer(programs, "ldd", "libc.so.6")
    code, said = run(programs, "build")
    assert code == 2
    assert "busybox (Debian package busybox-static)" in said


def test_a_kernel_that_nobody_offers(programs: Path) -> None:
    code, said = run(programs, "build")
    assert code == 2
    assert "the Debian package linux-image-amd64; run apt-get update" in said


def test_a_kernel_that_is_not_there_yet(programs: Path) -> None:
    code, said = run(programs, "boot", _MACHINE, "true")
    assert code == 2
    assert said == "the kernel of the virtual node is not there yet: run hack/vnode/build"


@pytest.mark.parametrize(
    ("program", "text", "sentence"),
    [
        pytest.param("id", "1000", "run it as root", id="not root"),
        pytest.param(
            "awk",
            "512",
            "needs 8192 MiB of free memory, and this machine has 512 MiB",
            id="too little memory",
        ),
    ],
)
def test_a_machine_that_cannot_boot_it(
    programs: Path, program: str, text: str, sentence: str
) -> None:
    answer(programs, program, text)
    code, said = run(programs, "boot", _MACHINE, "true")
    assert code == 2
    assert said.endswith(sentence)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        pytest.param(["nosuch", "true"], "there is no tests/machines/nosuch.toml", id="no machine"),
        pytest.param(
            [_MACHINE], "usage: hack/vnode/boot MACHINE COMMAND [WORD...]", id="no command"
        ),
    ],
)
def test_a_command_line_that_cannot_be_meant(
    programs: Path, words: list[str], sentence: str
) -> None:
    code, said = run(programs, "boot", *words)
    assert code == 2
    assert said.endswith(sentence)


def test_a_machine_that_qemu_cannot_be() -> None:
    """Its threads are numbered apart."""
    with pytest.raises(ValueError, match="not numbered by socket, core and thread"):
        list(qemu.arguments(machines.load("a800x8")))
