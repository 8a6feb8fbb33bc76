"""Plain files of the lengths that were asked for, and nothing of them afterwards."""

from pathlib import Path

import pytest

from dcpbench.measure import raw_io

LENGTHS = (0, 1, 100_000, 3 * 2**20, 9 * 2**20 + 1)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("sync", [True, False])
def test_what_is_written_has_the_lengths_and_is_gone_when_read(
    tmp_path: Path, threads: int, sync: bool
) -> None:
    folder = tmp_path / "raw"
    raw_io.write(folder, LENGTHS, threads, sync)
    files = sorted(folder.iterdir())
    assert [each.stat().st_size for each in files] == list(LENGTHS)
    assert len(set(files[-1].read_bytes())) == 256, "zeros may never reach the disk"
    raw_io.read(folder, LENGTHS, threads)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_without_a_share_writes_nothing(tmp_path: Path) -> None:
    raw_io.write(tmp_path / "raw", [], 1, sync=True)
    raw_io.read(tmp_path / "raw", [], 1)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_read_raises_and_is_gone_all_the_same(tmp_path: Path) -> None:
    raw_io.write(tmp_path / "raw", [10], 1, sync=False)
    with pytest.raises(FileNotFoundError):
        raw_io.read(tmp_path / "raw", [10, 10], 1)
    assert list(tmp_path.iterdir()) == []
