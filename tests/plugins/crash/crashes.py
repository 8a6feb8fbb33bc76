"""Record saves in this process, enumerate their crash states, and load each."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

from dcpbench.plugins.crash.disk_states import DiskState, after, disk_states
from dcpbench.plugins.crash.loading import Judge, Loader, folder_in_memory, sentinel
from dcpbench.plugins.crash.operations import Kind, Record, tree_of
from dcpbench.plugins.crash.recording import read_record, recording
from dcpbench.plugins.crash.survey import Survey, survey
from support.gloo_ranks import Ask

Writer = Callable[[Path], FileSystemWriter]
RANKS = 2
"""Number of ranks in saves by several."""


def state(step: int) -> dict[str, Any]:
    """Return the values of a step; the tensors together fill more than a page, and not a multiple of one."""
    return {
        "a": torch.full((700,), float(step)),
        "b": torch.full((300,), step + 0.25, dtype=torch.float64),
        "step": step,
    }


OLD, NEW = state(1), state(2)


def names(same_folder: bool) -> tuple[str, ...]:
    return ("checkpoint",) if same_folder else ("new", "old")


def save(step: int, folder: Path, writer: Writer) -> None:
    dcp.save(state(step), storage_writer=writer(folder), no_dist=True)


def recorded(writer: Writer, same_folder: bool) -> Record:
    """Return the record of a save next to an old one, or over it."""
    return recorded_save(lambda step, folder: save(step, folder, writer), names(same_folder))


def recorded_save(save: Callable[[int, Path], None], names: tuple[str, ...]) -> Record:
    """Save step 1 in this process, then step 2 next to it or over it, and return the record of the second
    save. If it raises, it has reported no success."""
    with tempfile.TemporaryDirectory() as folder:
        saved, logs, before = (Path(folder) / name for name in ("saved", "logs", "before"))
        saved.mkdir()
        logs.mkdir()
        save(1, saved / names[-1])
        shutil.copytree(saved, before)
        with recording(saved, logs, 0) as recorder, suppress(CheckpointException):
            save(2, saved / names[0])
            recorder.note(Kind.success)
        record = read_record(before, logs, 1)
        assert after(record) == tree_of(saved), "a change to the files was missed"
        return record


@contextmanager
def recorded_on_ranks(ask: Ask, writer: Writer, same_folder: bool) -> Iterator[Record]:
    """Context manager: like `recorded`, with two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        ask(_save_on_ranks, Path(folder), writer, same_folder)
        record = read_record(Path(folder) / "before", Path(folder) / "logs", RANKS)
        assert after(record) == tree_of(Path(folder) / "saved")
        yield record


def _save_on_ranks(folder: Path, writer: Writer, same_folder: bool) -> None:
    """Save on the first ranks; the others do nothing."""
    group = dist.new_group([*range(RANKS)])
    if (rank := dist.get_rank()) >= RANKS:
        return
    saved, logs, before = (folder / name for name in ("saved", "logs", "before"))
    saved.mkdir(exist_ok=True)
    logs.mkdir(exist_ok=True)
    new, *other = names(same_folder)
    first = writer(saved / (other or [new])[0])
    dcp.save(state(1), storage_writer=first, process_group=group)
    dist.barrier(group)
    if rank == 0:
        shutil.copytree(saved, before)
    dist.barrier(group)
    with recording(saved, logs, rank) as recorder:
        dcp.save(state(2), storage_writer=writer(saved / new), process_group=group)
        recorder.note(Kind.success)
    dist.barrier(group)


def load(values: dict[str, Any], folder: str) -> None:
    dcp.load(values, storage_reader=FileSystemReader(folder), no_dist=True)


def states(writer: Writer, same_folder: bool, samples: int = 2) -> list[DiskState]:
    return list(disk_states(recorded(writer, same_folder), samples, 0))


@contextmanager
def loading() -> Iterator[Loader]:
    with folder_in_memory() as folder:
        yield Loader(folder, load, lambda: {key: sentinel(value) for key, value in NEW.items()})


def surveyed(found: list[DiskState], same_folder: bool) -> Survey:
    """Count the results of loading these states."""
    with loading() as loader:
        return survey(found, loader, Judge(NEW, OLD), names(same_folder))


def is_caught(found: list[DiskState], same_folder: bool, check: str) -> bool:
    """Return whether one of these states violates a check; the last states are loaded first."""
    with loading() as loader:
        judge = Judge(NEW, OLD)
        kinds = (survey([one], loader, judge, names(same_folder)).distinct for one in reversed(found))
        return any(kind.broken == check for kinds_of_one in kinds for kind in kinds_of_one)


def broken(found: Survey) -> set[str]:
    """Return the violated checks, with what crashed."""
    return {f"{kind.crash} {kind.broken}" for kind in found.distinct if kind.broken}
