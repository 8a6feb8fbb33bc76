"""Weights & Biases: a group for each sweep with an offline run for each cell, for `wandb sync` to upload."""

from pathlib import Path

import wandb

from dcpbench.plugins.trackers.log import LoggedCell, LoggedSweep
from dcpbench.records import files
from dcpbench.records.store import ResultsError

_RUNS = "wandb/offline-run-*"
_DIGEST = "dcpbench-digest"
"""A file that is written last to a run's folder; a run without it is incomplete, and is written again."""


def log(sweep: LoggedSweep, folder: Path, project: str) -> dict[str, str]:
    """Write an offline run for each cell that is new or has changed. Its id is the cell's key, so that
    uploading it twice results in one run."""
    folder.mkdir(parents=True, exist_ok=True)
    there = {run.name.rpartition("-")[2]: run for run in folder.glob(_RUNS)}
    before = {key: _digest_in(run) for key, run in there.items()}
    written: dict[Path, str] = {}
    for cell in sweep.changed(before):
        if cell.key in there:
            refused = files.remove(there[cell.key], folder)
            if refused:
                raise ResultsError(refused)
        written[_write(sweep, cell, folder, project)] = cell.digest
    wandb.teardown()  # a finished run's file is complete only when wandb's service process has ended
    for run, digest in written.items():
        (run / _DIGEST).write_text(digest, encoding="utf-8")
    return before


def seen_with(folder: Path) -> str:
    """Return the command that uploads the runs."""
    return f"wandb sync {folder}/{_RUNS}"


def _digest_in(run: Path) -> str:
    try:
        return files.read(run / _DIGEST).decode()
    except (OSError, ValueError):
        return ""


def _write(sweep: LoggedSweep, cell: LoggedCell, folder: Path, project: str) -> Path:
    """Write one offline run, and return its folder."""
    # wandb would record this machine, which can differ from the one on which the cells ran.
    quiet = wandb.Settings(
        console="off",
        silent=True,
        disable_git=True,
        disable_code=True,
        x_disable_meta=True,
        x_disable_stats=True,
    )
    run = wandb.init(
        mode="offline",
        dir=str(folder),
        project=project,
        id=cell.key,
        name=cell.row.cell,
        group=f"{sweep.name}~{sweep.key[:8]}",
        job_type="cell",
        tags=[cell.row.status],
        config={**sweep.environment, **cell.tags, **cell.params},
        settings=quiet,
        reinit="finish_previous",
    )
    place = Path(run.dir).parent
    run.summary.update(cell.metrics)
    run.finish(exit_code=0 if cell.row.is_ok else 1)
    return place
