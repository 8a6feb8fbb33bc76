"""TensorBoard: a run for each cell, with its hyperparameters and scalars; written without torch."""

import shutil
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import summary_v2 as hparams
from tensorboard.plugins.text import summary_v2 as text
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from dcpbench.report.trackers import Logged, LoggedCell, LoggedSweep, log_cells

_PART = ".part"


def log(sweep: LoggedSweep, folder: Path, project: str) -> Logged:
    """Write each cell to `folder/project/<sweep>/<cell>`, unless it is there as it is now."""
    runs = folder / project / f"{sweep.name}~{sweep.key[:8]}"
    shutil.rmtree(runs / _PART, ignore_errors=True)

    def digest_there(cell: LoggedCell) -> str | None:
        files = runs / cell.name
        return next((path.suffix[1:] for path in files.iterdir()), "") if files.exists() else None

    def write(cell: LoggedCell) -> None:
        _write(runs / _PART, sweep, cell)
        shutil.rmtree(runs / cell.name, ignore_errors=True)
        (runs / _PART).rename(runs / cell.name)

    return log_cells(sweep, digest_there, write)


def seen_with(folder: Path) -> str:
    """The command that shows what is there."""
    return f"tensorboard --logdir {folder}"


def _write(run: Path, sweep: LoggedSweep, cell: LoggedCell) -> None:
    writer = EventFileWriter(str(run), filename_suffix=f".{cell.digest}")
    start = hparams.hparams_pb(cell.params, trial_id=cell.key, start_time_secs=cell.started_s)
    about = {**cell.tags, **sweep.environment}
    lines = (f"| {key} | {' '.join(value.split()).replace('|', '/')} |" for key, value in about.items())
    table = "\n".join(["| what | value |", "| --- | --- |", *lines])
    scalars = [Summary.Value(tag=name, simple_value=value) for name, value in cell.metrics.items()]
    for summary in (start, text.text_pb("about", table), Summary(value=scalars)):
        writer.add_event(Event(wall_time=cell.started_s, step=cell.repeat, summary=summary))
    writer.close()
