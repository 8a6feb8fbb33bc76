"""Find small saves by one process in which a crash can leave the same kind of state as in a larger one, so
that a script which reproduces it is short."""

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

from dcpbench.plugins.crash.disk_states import after, disk_states
from dcpbench.plugins.crash.loading import Judge, Loader, Values, folder_in_memory, sentinel
from dcpbench.plugins.crash.operations import Record, tree_of
from dcpbench.plugins.crash.recording import read_record, recording
from dcpbench.plugins.crash.script import Shown
from dcpbench.plugins.crash.survey import StateKind, survey

_COUNTS = (1, 2)
"""Numbers of values in the small saves, in the order in which they are attempted."""


def smallest(
    kinds: Sequence[StateKind], like: Values, options: Mapping[str, Any], names: tuple[str, ...]
) -> dict[StateKind, Shown]:
    """Return a crash state of each kind from a save of as few values as possible. Kinds that need several
    ranks or more values are missing.

    Args:
        like: the values of a checkpoint; the smallest of them are saved.
        options: of the `FileSystemWriter`.
        names: of the folder of the new checkpoint, and of the folder of the old one if it is another.
    """
    found: dict[StateKind, Shown] = {}
    keys = sorted(like, key=lambda key: (not isinstance(like[key], torch.Tensor), _size(like[key]), key))
    for count in _COUNTS:
        if found.keys() == {*kinds}:
            break
        steps = [{key: _of_step(like[key], step) for key in keys[:count]} for step in (1, 2)]
        found |= _states(kinds, steps, options, names) | found
    return found


def _states(
    kinds: Sequence[StateKind], steps: Sequence[Values], options: Mapping[str, Any], names: tuple[str, ...]
) -> dict[StateKind, Shown]:
    old, new = steps

    def save(step: int, folder: Path) -> None:
        writer = FileSystemWriter(folder, **options)
        dcp.save(dict(steps[step - 1]), storage_writer=writer, no_dist=True)

    def template() -> dict[str, Any]:
        return {key: sentinel(value) for key, value in new.items()}

    record = recorded_save(save, names)
    with folder_in_memory() as folder:
        states = disk_states(record, 0, 0)
        simplest = survey(states, Loader(folder, _load, template), Judge(new, old), names).simplest
    return {kind: Shown(simplest[kind], record, new) for kind in kinds if kind in simplest}


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
            recorder.succeeded()
        record = read_record(before, logs, 1)
        assert after(record) == tree_of(saved), "a change to the files was missed"
        return record


def _load(values: dict[str, Any], folder: str) -> None:
    dcp.load(values, storage_reader=FileSystemReader(folder), no_dist=True)


def _size(value: Any) -> int:
    return int(value.numel()) if isinstance(value, torch.Tensor) else 0


def _of_step(value: Any, step: int) -> Any:
    return torch.full_like(value, step) if isinstance(value, torch.Tensor) else step
