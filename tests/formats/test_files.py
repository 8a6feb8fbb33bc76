"""The files of a checkpoint: every change is reported with the file's name."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from dcpbench.core.mismatch import Mismatch
from dcpbench.formats import files as files_module
from dcpbench.formats.files import (
    compare_files,
    compare_synced,
    digest_files,
    digest_late_files,
    drop_pages,
    file_id,
    list_files,
    no_files,
    recorded_syncs,
    synced_in,
)
from dcpbench.records.files import files_below

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


def test_untouched_files_are_unchanged(folder: Path) -> None:
    then = digest_files(folder)
    assert list(then) == [SMALL, LARGE]
    compared = compare_files(then, digest_files(folder))
    names = dict.fromkeys((SMALL, LARGE, "a file that went", "a file that came"), True)
    assert (compared.found, compared.names, compared.detected) == ([], names, names)


def test_no_file_can_come_to_an_empty_folder(tmp_path: Path) -> None:
    assert digest_files(tmp_path) == {}
    compared = compare_files({}, {"late": "1 bytes, 1"})
    assert compared.detected == {"a file that went": True, "a file that came": True}
    assert [mismatch.name for mismatch in compared.found] == ["late"]
    assert [one.name for one in no_files("step-2").found] == ["step-2"]


def test_control_detects_a_weaker_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"a": "1", "b": "2", "c": "3"}
    every = (*files, "a file that went", "a file that came")
    honest = files_module._differing

    def detected(sees: Callable[[str, str | None, str | None], bool]) -> list[str]:
        def compare(then: dict[str, str], now: dict[str, str]) -> list[Mismatch]:
            return [one for one in honest(then, now) if sees(one.name, then.get(one.name), now.get(one.name))]

        monkeypatch.setattr(files_module, "_differing", compare)
        return [name for name, good in compare_files(files, files).detected.items() if good]

    assert detected(lambda name, then, now: True) == [*every]
    assert detected(lambda name, then, now: name != "a") == [one for one in every if one != "a"]
    assert detected(lambda name, then, now: name != "b") == [one for one in every if one != "b"]
    assert detected(lambda name, then, now: name != "c") == [one for one in every if one != "c"]
    assert detected(lambda name, then, now: now is not None) == [*files, "a file that came"]
    assert detected(lambda name, then, now: then is not None) == [*files, "a file that went"]


def test_no_file_is_compared_for_each_other_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer can write a file for each parameter."""
    honest, compared = files_module._differing, list[int]()

    def compare(then: dict[str, str], now: dict[str, str]) -> list[Mismatch]:
        compared.append(len(then))
        return honest(then, now)

    monkeypatch.setattr(files_module, "_differing", compare)
    files = {str(number): str(number) for number in range(500)}
    assert all(compare_files(files, files).detected.values())
    assert sum(compared) < 10 * len(files)


@pytest.mark.parametrize("change", CHANGES)
def test_changed_file_is_named(folder: Path, change: str) -> None:
    then = digest_files(folder)
    path, do = CHANGES[change]
    do(folder / path)
    assert [finding.name for finding in compare_files(then, digest_files(folder)).found] == [path]


def test_only_some_blocks_of_large_files_are_read(folder: Path) -> None:
    then = digest_files(folder)
    _write(folder / LARGE, 2**20 + 5)
    assert compare_files(then, digest_files(folder)).found == []


@pytest.mark.parametrize("below", ["", "data"])
def test_files_are_synced_before_pages_are_dropped(folder: Path, below: str) -> None:
    """Only the calls are checked, because a file system in memory keeps its pages."""
    advised: list[tuple[int, bool]] = []
    with recorded_syncs() as synced:

        def advise(file: int, offset: int, length: int, advice: int) -> None:
            assert (offset, length, advice) == (0, 0, os.POSIX_FADV_DONTNEED)
            advised.append((os.fstat(file).st_ino, file_id(file) in synced))

        with mock.patch.object(os, "posix_fadvise", advise):
            drop_pages(files_below(folder / below))
    assert sorted(advised) == sorted(((folder / name).stat().st_ino, True) for name in (SMALL, LARGE))


def test_recorded_sync_is_made(tmp_path: Path) -> None:
    with mock.patch.object(os, "fsync") as honest, recorded_syncs() as synced:
        with (tmp_path / "one").open("wb") as file:
            os.fsync(file.fileno())
            honest.assert_called_once_with(file.fileno())
        assert len(synced) == 1


def test_renamed_files_stay_synced(tmp_path: Path) -> None:
    with recorded_syncs() as synced:
        for name in ("one", "other"):
            with (tmp_path / name).open("wb") as file:
                if name == "one":
                    os.fsync(file.fileno())
        (tmp_path / "one").rename(tmp_path / "renamed")
        mine = synced_in(tmp_path, synced)
    assert mine == {"renamed"}
    compared = compare_synced(["other", "renamed"], mine)
    assert [finding.name for finding in compared.found] == ["other"]
    assert compared.detected == {"files that were not synced": True}
    assert os.fsync.__module__ == "posix"


def test_file_with_a_reused_inode_is_not_synced(tmp_path: Path) -> None:
    """Each file gets the inode of the synced one before it, where the file system reuses them."""
    with recorded_syncs() as synced:
        for _ in range(5):
            with (tmp_path / "one").open("wb") as file:
                os.fsync(file)
            assert synced_in(tmp_path, synced) == {"one"}
            (tmp_path / "one").unlink()
            time.sleep(0.02)  # before Linux 6.13 a birth time is one of a clock with ticks of up to 10 ms
            (tmp_path / "other").touch()
            assert synced_in(tmp_path, synced) == set()
            (tmp_path / "other").unlink()


def test_control_of_no_files_does_not_fire() -> None:
    assert compare_synced([], []).detected == {"files that were not synced": False}


def test_late_file_was_written_before_success(tmp_path: Path) -> None:
    for name in ("seen", "absent", "empty"):
        (tmp_path / name).write_text(name)
    honest = digest_files(tmp_path)
    last = max((tmp_path / name).stat().st_ctime for name in honest)
    then = {"seen": "4 bytes, of which one has changed since", "empty": "0 bytes, of another digest"}
    stats = files_below(tmp_path)
    late = digest_late_files(tmp_path, stats, then, last + 1)
    assert late == {name: honest[name] for name in ("absent", "empty")}
    assert digest_late_files(tmp_path, stats, then, last - 1) == {}, "they came later"


def test_listing_shows_another_length_and_another_time(folder: Path) -> None:
    then = list_files(folder, files_below(folder))
    assert list_files(folder, files_below(folder)) == then
    _write(folder / SMALL, 0, same_time=False)
    assert [
        mismatch.name for mismatch in compare_files(then, list_files(folder, files_below(folder))).found
    ] == [SMALL]


def test_files_that_are_removed_meanwhile_are_left_out(folder: Path) -> None:
    paths = [*files_below(folder)]
    (folder / SMALL).unlink()
    assert [*digest_files(folder, paths)] == [LARGE]
