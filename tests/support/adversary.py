"""Scenarios that do what a runner does not expect, and pass all the same if nobody minds."""

import os
import stat
import sys
from dataclasses import replace
from pathlib import Path

import psutil

from dcpbench.records.rank_report import RankReport
from dcpbench.scenarios.cell import Cell
from dcpbench.scenarios.save_load import save_load
from dcpbench.worker.messages import Message

ESCAPES = "\x1b[2J\x1b]0;owned\x07\x9b31m\r[9/9] pass every cell\n\u202e=1+1"


def leaves_folder(cell: Cell) -> None:
    """It works in another folder than the one in which it was started."""
    os.chdir("/")
    save_load(cell)


def looks_around(cell: Cell) -> None:
    """Where the ranks meet is a file without a name, and no port of dcpbench's or torch's own; ranks on the
    CPU see no GPU, which torch's checkpointing would start."""
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    links = list(Path("/proc/self/fd").iterdir())
    opened = [path for path in links if path.is_symlink() and "dcpbench-store" in str(path.readlink())]
    assert [stat.S_IMODE(path.stat().st_mode) for path in opened] == [0o600]
    assert not opened[0].readlink().exists()
    listening = [one.laddr for one in psutil.Process().net_connections() if one.status == "LISTEN"]
    assert all(address.ip == "127.0.0.1" for address in listening), "gloo's own, for its peers"
    save_load(cell)


def removes_rows(cell: Cell) -> None:
    """It takes away what the cells before it came to; its checkpoints go to `root` beside the sweep."""
    checkpoints = cell.folder.parent
    if cell.world.rank == 0:
        (checkpoints.parents[1] / checkpoints.name / "results.jsonl").unlink()
    save_load(cell)


def speaks_for_others(cell: Cell) -> None:
    """Rank 0 reports what another rank, and another cell, came to: what a process may do that it forked."""
    save_load(cell)
    rank = cell.announce.__self__  # type: ignore[attr-defined]
    if cell.world.rank == 0:
        other_cell = replace(rank.cell.run, cell="another")
        rank.connection.send(Message(rank.cell.run, 1, RankReport(1)))
        rank.connection.send(Message(other_cell, 0, RankReport(0)))


def tells_escapes(cell: Cell) -> None:
    """What it says of itself would move the cursor, ring, and write another line."""
    with cell.phase(f"train{ESCAPES}"):
        raise ValueError(ESCAPES)


def close_descriptors() -> None:
    """What `<&- >&- 2>&-` does to a process before it begins."""
    for number in range(3):
        os.close(number)
    sys.stdin = sys.stdout = sys.stderr = None  # type: ignore[assignment]


def fill_output(number: int) -> None:
    """What `>/dev/full` does, or `2>/dev/full`."""
    os.dup2(os.open("/dev/full", os.O_WRONLY), number)


def remove_folder() -> None:
    """The folder that the process is in goes."""
    Path.cwd().rmdir()
