"""Shared memory of dead ranks is removed; that of running processes and other programs is kept."""

import multiprocessing
import os
import re
import signal
from functools import partial
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from conftest import SMALL, start, wait_for, words_of
from dcpbench.executors import cleanup
from support.drivers import plant


def test_shared_memory_in_use_is_kept() -> None:
    """Include a semaphore, which the C library maps under a different name."""
    lock = multiprocessing.get_context("spawn").Lock()
    segment = shared_memory.SharedMemory(create=True, size=1)
    made = {segment.name, f"sem.{lock._semlock.name.removeprefix('/')}"}  # type: ignore[attr-defined]
    try:
        assert made <= cleanup.shared_memory()
        assert cleanup.remove_shared_memory(made, made, (), "", 0.0) == []
        assert made <= cleanup.shared_memory()
    finally:
        segment.close()
        segment.unlink()


def test_only_the_ranks_shared_memory_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cleanup, "_SHARED_MEMORY", tmp_path)
    own = {"torch_12_3_4", "opened", "dabc123_0f"}
    others = {"torch_123_3_4", "psm_0", "nccl-0", "sem.mp-0", "sem.mp-dcpbench-def456-0", "notes"}
    for name in own | others:
        (tmp_path / name).touch()
    monkeypatch.setattr(cleanup, "_opened_by", lambda _: set())
    unclear = cleanup.remove_shared_memory(own | others, {"opened"}, {12}, "abc123", 0.0)
    assert {path.name for path in tmp_path.iterdir()} == others
    assert unclear == sorted(others - {"notes"})


@pytest.mark.slow
def test_unclear_shared_memory_is_kept_and_reported(tmp_path: Path) -> None:
    """Make segments while ranks run that no process has open: their owner cannot be determined."""
    scenario = ("scenario=dies", "scenario.options.how=sleeps", "scenario.options.phase=train", "retry=0")
    words = words_of(tmp_path / "sweep", *scenario, *SMALL, "device=cpu", "world_size=2")
    segments = tmp_path / "segments"
    segments.mkdir()
    driver = start(*words, cwd=tmp_path, prepare=partial(plant, cleanup.__name__, "_SHARED_MEMORY", segments))
    made = [segments / f"{kind}0" for kind in ("nccl-", "psm_", "sem.mp-", "torch_1_")]
    try:
        begun = re.compile(r"process (\d+)\n")
        logs = partial(tmp_path.glob, "sweep/*/rank*.log")
        wait_for(lambda: len([log for log in logs() if begun.search(log.read_text())]) == 2)
        for path in made:
            path.write_bytes(b"1")
        os.kill(int(begun.findall(next(logs()).read_text())[0]), signal.SIGKILL)
        _, err = driver.communicate(120)
        assert sorted(segments.iterdir()) == made
        message = "did not remove 4 segments of shared memory, which another program may have made"
        assert f"{message}: {', '.join(path.name for path in made)}" in err
    finally:
        driver.close()
