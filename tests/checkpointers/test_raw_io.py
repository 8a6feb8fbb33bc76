"""Plain files of the requested lengths, which are removed afterwards."""

from pathlib import Path

import pytest

from dcpbench.checkpointers.raw_io import RawIO

LENGTHS = (0, 1, 100_000, 3 * 2**20, 9 * 2**20 + 1)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("sync", [True, False])
def test_raw_files_have_lengths_and_are_removed(tmp_path: Path, threads: int, sync: bool) -> None:
    folder = tmp_path / "raw"
    raw = RawIO(threads, sync)
    raw.write(folder, LENGTHS)
    files = sorted(folder.iterdir())
    assert [each.stat().st_size for each in files] == list(LENGTHS)
    assert len(set(files[-1].read_bytes())) == 256, "zeros may never reach the disk"
    raw.read(folder, LENGTHS)
    assert list(tmp_path.iterdir()) == []


def test_rank_without_a_share_writes_nothing(tmp_path: Path) -> None:
    RawIO(1, sync=True).write(tmp_path / "raw", [])
    RawIO(1, sync=True).read(tmp_path / "raw", [])
    assert list(tmp_path.iterdir()) == []


def test_unreadable_raw_file_raises_and_is_removed(tmp_path: Path) -> None:
    raw = RawIO(1, sync=False)
    raw.write(tmp_path / "raw", [10])
    with pytest.raises(FileNotFoundError):
        raw.read(tmp_path / "raw", [10, 10])
    assert list(tmp_path.iterdir()) == []
