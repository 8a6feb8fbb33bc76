"""TensorBoard: a run for each cell, with its hyperparameters and scalars; written without torch."""

from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import summary_v2 as hparams
from tensorboard.plugins.text import summary_v2 as text
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from dcpbench.plugins.trackers.log import LoggedCell, LoggedSweep
from dcpbench.records import files
from dcpbench.records.store import ResultsError

_LONGEST_NAME = 255
"""Maximum number of bytes of a file name."""


def log(sweep: LoggedSweep, folder: Path, project: str) -> dict[str, str]:
    """Write each cell that is new or has changed to `folder/project/<sweep>/<cell>`. The name of its file
    contains the digest."""
    runs = folder / project / f"{sweep.name}~{sweep.key[:8]}"
    part = runs / ".part"
    digests = {file.parent.name: file.suffix[1:] for file in runs.glob("*/*")}
    before = {cell.key: digests[name] for cell in sweep.cells if (name := _name(cell)) in digests}
    for cell in sweep.changed(before):
        _remove(part, folder)
        _write(part, sweep, cell)
        _remove(runs / _name(cell), folder)
        part.rename(runs / _name(cell))
    return before


def _name(cell: LoggedCell) -> str:
    """Return the name of a cell's folder: the name of the cell if it is a valid file name, otherwise its
    key."""
    name = cell.row.cell
    is_valid = name.isprintable() and "/" not in name and not name.startswith(".")
    return name if name and is_valid and len(name.encode()) <= _LONGEST_NAME else cell.key


def _remove(run: Path, within: Path) -> None:
    if refused := files.remove(run, within):
        raise ResultsError(refused)


def seen_with(folder: Path) -> str:
    """Return the command that shows the runs."""
    return f"tensorboard --logdir {folder}"


def _write(run: Path, sweep: LoggedSweep, cell: LoggedCell) -> None:
    writer = EventFileWriter(str(run), filename_suffix=f".{cell.digest}")
    start = hparams.hparams_pb(cell.params, trial_id=cell.key, start_time_secs=cell.started_s)
    about = {**cell.tags, **sweep.environment}
    lines = (f"| {key} | {' '.join(value.split()).replace('|', '/')} |" for key, value in about.items())
    table = "\n".join(["| name | value |", "| --- | --- |", *lines])
    scalars = [Summary.Value(tag=name, simple_value=value) for name, value in cell.metrics.items()]
    for summary in (start, text.text_pb("about", table), Summary(value=scalars)):
        writer.add_event(Event(wall_time=cell.started_s, step=cell.row.repeat or 0, summary=summary))
    writer.close()
