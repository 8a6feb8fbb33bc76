"""Copies of a folder: what they keep, and what was being written."""

import mmap
import os
from pathlib import Path

import psutil

from dcpbench.plugins.script.copies import Copy, open_for_writing


def changed_last(folder: Path) -> list[str]:
    """Return the names in a folder in the order of their change times."""
    return [path.name for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_ctime_ns)]


def test_copy_keeps_links_holes_times_and_the_order_of_changes(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name in ("c", "a", "b"):
        (out / name).write_text(name)
    os.link(out / "a", out / "other-a")
    (out / "latest").symlink_to(out / "b")
    with (out / "hole").open("wb") as file:
        file.truncate(1 << 24)
    os.utime(out / "c", ns=(5, 7))  # changed last, with an old modification time
    expected = changed_last(out)
    copy = Copy.taken(out, tmp_path / "copy", 0.0, {}, {})
    copy.put(out)
    copy.put(out)  # it is untouched, and can be put back again
    assert [name for name in changed_last(out) if name in "abc"] == [
        name for name in expected if name in "abc"
    ]
    assert len({path.stat().st_ctime_ns for path in map(out.joinpath, "abc")}) == 3
    assert (out / "c").stat().st_mtime_ns == 7
    assert (out / "a").stat().st_ino == (out / "other-a").stat().st_ino
    assert (out / "latest").readlink() == out / "b"
    assert (out / "hole").stat().st_blocks * 512 < 1 << 20


def test_stop_cuts_the_copy_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "a").write_bytes(b"12345678")
    for how, size in (("half", 4), ("empty", 0), ("made", 8)):
        event = {"path": "a", "cut": how}
        copy = Copy.taken(out, tmp_path / how, 0.0, event, {})
        assert (copy.folder / "a").stat().st_size == size
        assert copy.cut == {"a"}
    assert (out / "a").read_bytes() == b"12345678"


def test_files_that_a_process_writes(tmp_path: Path) -> None:
    for name in ("read", "mapped", "log"):
        (tmp_path / name).write_bytes(b"1" * 8)
    with (
        (tmp_path / "written").open("wb"),
        (tmp_path / "read").open("rb"),
        (tmp_path / "log").open("ab"),
        (tmp_path / "mapped").open("r+b") as file,
    ):
        mapped = mmap.mmap(file.fileno(), 8)
        file.close()
        found = open_for_writing([psutil.Process()], tmp_path)
        mapped.close()
    assert {path: {*pids} for path, pids in found.items()} == {
        path: {os.getpid()} for path in ("written", "mapped")
    }
    assert open_for_writing([psutil.Process()], tmp_path) == {}
