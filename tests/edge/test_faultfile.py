"""The administrator's fault file, as it is, is not, and should not be."""

import os
from pathlib import Path

import pytest

from agent.core.health import FaultMarks
from agent.edge.faultfile import read_fault_marks
from agent.errors import ConfigError

NONE = FaultMarks(indices=frozenset(), uuids=frozenset())
BOTH = FaultMarks(indices=frozenset({0, 7}), uuids=frozenset({"GPU-1"}))


@pytest.mark.parametrize(
    ("data", "marks"),
    [
        pytest.param(b'{"index": ["0", "7"], "uuid": ["GPU-1"]}', BOTH, id="both kinds of marks"),
        pytest.param(b'\xef\xbb\xbf{"index": [0, 7], "uuid": ["GPU-1"]}', BOTH, id="a byte mark"),
        pytest.param(b"{}", NONE, id="an object without marks"),
        pytest.param(b'{"index": ["3"]}' + b" " * 65520, FaultMarks(indices=frozenset({3})),
                     id="as large as a file may be"),
    ],
)  # fmt: skip
def test_marks(data: bytes, marks: FaultMarks, tmp_path: Path) -> None:
    file = tmp_path / "marks.json"
    file.write_bytes(data)
    assert read_fault_marks(str(file)) == marks


def test_a_link_to_the_file_as_kubernetes_mounts_it(tmp_path: Path) -> None:
    (tmp_path / "..data").mkdir()
    (tmp_path / "..data" / "marks.json").write_text('{"index": ["0", "7"], "uuid": ["GPU-1"]}')
    (tmp_path / "marks.json").symlink_to("..data/marks.json")
    assert read_fault_marks(str(tmp_path / "marks.json")) == BOTH


@pytest.mark.parametrize("path", ["marks.json", "no/such/folder/marks.json"])
def test_no_file_no_marks(path: str, tmp_path: Path) -> None:
    assert read_fault_marks(str(tmp_path / path)) == NONE


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        pytest.param(b"\xff", "is not UTF-8 text: invalid start byte", id="no text"),
        pytest.param(
            b" " * 65537, "cannot be used: it is larger than 64 KiB", id="a byte too many"
        ),
        pytest.param(
            b'["0"]',
            "cannot be used: it is a list, not an object",
            id="a list instead of an object",
        ),
    ],
)
def test_files_that_cannot_be_used(data: bytes, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "marks.json"
    file.write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        read_fault_marks(str(file))
    assert str(caught.value) == f"{file}: {reason}"


@pytest.mark.parametrize("text", ["{", '{"index": [true]}', '{"gpu": []}', "[" * 40000])
def test_what_the_file_says_is_judged_with_its_name(text: str, tmp_path: Path) -> None:
    file = tmp_path / "marks.json"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_fault_marks(str(file))
    assert str(caught.value).startswith(f"{file}: cannot be used: ")
    assert "\n" not in str(caught.value)


def test_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_fault_marks(str(tmp_path))


def test_a_folder_on_the_way_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be read: Not a directory"):
        read_fault_marks(str(tmp_path / "file" / "marks.json"))


def test_a_pipe_that_nobody_writes_to_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="cannot be used: it is not a regular file"):
        read_fault_marks(str(tmp_path / "pipe"))


def test_a_path_that_cannot_be_one() -> None:
    with pytest.raises(ConfigError) as caught:
        read_fault_marks("/a\0b")
    assert str(caught.value) == "/a?b: cannot be used: embedded null byte"


def test_nothing_stays_open(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b" " * 65537)
    before = sorted(os.listdir("/proc/self/fd"))
    for path in (tmp_path, tmp_path / "large"):
        with pytest.raises(ConfigError):
            read_fault_marks(str(path))
    assert sorted(os.listdir("/proc/self/fd")) == before
