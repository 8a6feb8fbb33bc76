"""A cell that changes its rank's process affects only itself: the next cell has a fresh rank."""

from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from adversary.leaks import LEAKS
from conftest import SMALL, run
from support import drivers
from support.notes import texts
from support.rows import seen

pytestmark = pytest.mark.slow

ON_RANKS = ["default_dtype,child", "function_mode,destroyed_group"]
"""Leaks of two sweeps; `bench/leaks.py` has all of them, under warm and fresh ranks."""


def report_leak(answer: Connection, _: object, what: str) -> None:
    """Send what is left behind before and after a leak."""
    import torch

    from dcpbench.rank.run_cell import left_behind
    from dcpbench.state.process_state import ProcessState

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    torch.distributed.new_group([0])
    device = torch.device("cpu")
    before = ProcessState.now(device)
    answer.send(left_behind(before, device))
    LEAKS[what]()
    answer.send(left_behind(before, device))


@pytest.mark.parametrize("what", LEAKS)
def test_whatever_is_left_behind_is_seen(what: str) -> None:
    here, process = drivers.fork(report_leak, what)
    try:
        assert here.recv() == []
        assert len(here.recv()) >= 1
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("leaks", ON_RANKS)
def test_the_next_cell_does_not_notice(tmp_path: Path, leaks: str) -> None:
    cells = ("-m", "scenario=leaks", f"scenario.options.what={leaks}", "parallel=ddp", "saves=1")
    ended = run(tmp_path / "sweep", *cells, "device=cpu", "world_size=2", "retry=0", *SMALL)
    assert [row["status"] for row in ended.rows] == ["pass"] * 2, ended.out
    first, second = map(seen, ended.rows)
    assert first == second
    for row in ended.rows:
        assert all(texts(rank, "left_behind") for rank in row["details"]["ranks"]), row["cell"]
