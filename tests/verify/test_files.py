"""The files of a checkpoint: whatever becomes of one is told by its name."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dcpbench.verify.files import compare_files, digest_files, file_controls, not_synced, recorded_syncs

SMALL, LARGE = "data/0", "data/1"
CHANGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a byte": (SMALL, lambda path: path.write_bytes(b"other")),
    "longer": (SMALL, lambda path: path.write_bytes(b"bytes and more")),
    "gone": (SMALL, Path.unlink),
    "one more": ("data/2", lambda path: path.write_bytes(b"")),
    "first byte of a large one": (LARGE, lambda path: _write(path, 0)),
    "last byte of a large one": (LARGE, lambda path: _write(path, -1)),
    "between the blocks that are read, by its time": (LARGE, lambda path: _write(path, 2**20 + 5, False)),
}


def _write(path: Path, at: int, same_time: bool = True) -> None:
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        file.write(b"x")
    later = before.st_mtime_ns + (0 if same_time else 1)
    os.utime(path, ns=(before.st_atime_ns, later))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / SMALL).write_bytes(b"bytes")
    with (tmp_path / LARGE).open("wb") as file:
        file.truncate(100 * 2**20 + 1)
    return tmp_path


def test_files_that_nobody_touched_are_unchanged(folder: Path) -> None:
    then = digest_files(folder)
    assert list(then) == [SMALL, LARGE]
    assert compare_files(then, digest_files(folder)) == []
    assert all(file_controls(then).values())


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_told_by_the_name_of_the_file(folder: Path, change: str) -> None:
    then = digest_files(folder)
    path, do = CHANGES[change]
    do(folder / path)
    assert [finding.name for finding in compare_files(then, digest_files(folder))] == [path]


def test_whole_files_are_read_where_that_is_asked_for(folder: Path) -> None:
    then, then_whole = digest_files(folder), digest_files(folder, whole=True)
    _write(folder / LARGE, 2**20 + 5)
    assert compare_files(then, digest_files(folder)) == []
    assert [one.name for one in compare_files(then_whole, digest_files(folder, whole=True))] == [LARGE]


def test_files_that_were_synced_are_known_by_another_name_too(tmp_path: Path) -> None:
    with recorded_syncs() as synced:
        for name in ("one", "other"):
            with (tmp_path / name).open("wb") as file:
                if name == "one":
                    os.fsync(file.fileno())
        (tmp_path / "one").rename(tmp_path / "renamed")
        assert [finding.name for finding in not_synced(tmp_path, synced)] == ["other"]
    assert os.fsync.__module__ == "posix"
