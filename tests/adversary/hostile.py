"""Scenarios that do what a runner does not expect, and still pass if nothing notices."""

import os
import stat
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import torch

from dcpbench.cell.cell import Cell
from dcpbench.core.mismatch import Mismatch, Problem
from dcpbench.core.rank_report import Compared, RankReport
from dcpbench.rank.messages import Message
from dcpbench.scenarios.save_load import save_load

ESCAPES = "\x1b[2J\x1b]0;owned\x07\x9b31m\r[9/9] pass every cell\n\u202e=1+1"


def leaves_folder(cell: Cell) -> None:
    """It works in another folder than the one in which it was started."""
    os.chdir("/")
    save_load(cell)


def nests_folders(cell: Cell) -> None:
    """It leaves more folders in each other than Python's recursion can follow."""
    save_load(cell)
    os.chdir(cell.folder)
    for _ in range(1500):
        Path("d").mkdir()
        os.chdir("d")


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


def speaks_for_others(cell: Cell) -> None:
    """Rank 0 reports what another rank, and another cell, came to: what a process may do that it forked."""
    save_load(cell)
    rank = cell.announce.__self__  # type: ignore[attr-defined]
    if cell.world.rank == 0:
        other_cell = replace(rank.cell.run, cell="another")
        rank.connection.send(Message(rank.cell.run, 1, RankReport(1)))
        rank.connection.send(Message(other_cell, 0, RankReport(0)))


def tells_escapes(cell: Cell) -> None:
    """Its text would move the cursor, ring, and write another line."""
    with cell.phase(f"train{ESCAPES}"):
        raise ValueError(ESCAPES)


def odd_values() -> dict[str, object]:
    """Values that JSON cannot hold."""
    values = (np.float32(0.5), torch.tensor(0.5), torch.float32, 10**400, 10**5000, {1}, b"\xff")
    of_number = {f"value {number}": value for number, value in enumerate(values)}
    return of_number | {"mine": Mine(), "fits": (1, "a")}


class Mine:
    """A class that only this process knows, and whose text cannot be made."""

    def __repr__(self) -> str:
        raise RuntimeError

    def __reduce__(self) -> str:
        raise RuntimeError


def reports_odd_values(cell: Cell) -> None:
    """None of its mismatches and measurements is a number or a text."""
    save_load(cell)
    finding = Mismatch(
        "w", Problem.contract, facts={"text": "odd", **odd_values()}, max_abs_diff=np.float32(2)
    )
    detected = {"w": np.bool_(True)}
    cell.record("contract_held", Compared([finding], {"w": True}, detected), "")  # type: ignore[arg-type]
    for value in (*odd_values().values(), float("inf")):
        cell.measure("load_s", value)
    cell.report.losses["mine"] = [torch.tensor(1.0)]


def raises_with_odd_values(cell: Cell) -> None:
    """It has found something odd when it raises."""
    finding = Mismatch("w", Problem.contract, facts={"text": {1}})
    cell.record("contract_held", Compared([finding], {"w": True}, {}), "")
    raise ValueError("no more")


def breaks_its_report(cell: Cell) -> None:
    """A field of its report is of another type."""
    save_load(cell)
    cell.report.losses = 5


def close_descriptors() -> None:
    """Do what `<&- >&- 2>&-` does to a process before it begins."""
    for number in range(3):
        os.close(number)
    sys.stdin = sys.stdout = sys.stderr = None  # type: ignore[assignment]


def fill_output(number: int) -> None:
    """Do what `>/dev/full` does, or `2>/dev/full`."""
    os.dup2(os.open("/dev/full", os.O_WRONLY), number)


def remove_folder() -> None:
    """The folder that the process is in goes."""
    Path.cwd().rmdir()
