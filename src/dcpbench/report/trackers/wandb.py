"""Weights & Biases: a group for each sweep with an offline run for each cell, for `wandb sync` to upload."""

import shutil
from pathlib import Path

import wandb

from dcpbench.report.trackers import Logged, LoggedCell, LoggedSweep

_DIGEST = "dcpbench-digest"
"""A file that is written into a run's folder last: a run without it broke off, and is made again."""


def log(sweep: LoggedSweep, folder: Path, project: str) -> Logged:
    """Write an offline run for each cell that has none as it is now. Its id is the cell's key, so that what
    is uploaded twice is one run."""
    logged = Logged()
    folder.mkdir(parents=True, exist_ok=True)
    for cell in sweep.cells:
        before = list(folder.glob(f"wandb/offline-run-*-{cell.key}"))
        if any(_digest_in(run) == cell.digest for run in before):
            logged.same += 1
            continue
        for run in before:
            shutil.rmtree(run)
        if before:
            logged.replaced += 1
        else:
            logged.new += 1
        _write(sweep, cell, folder, project)
    return logged


def seen_with(folder: Path) -> str:
    """The command that uploads what is there, where it can be seen."""
    return f"wandb sync {folder}/wandb/offline-run-*"


def _digest_in(run: Path) -> str | None:
    try:
        return (run / _DIGEST).read_text(encoding="utf-8")
    except OSError:
        return None


def _write(sweep: LoggedSweep, cell: LoggedCell, folder: Path, project: str) -> None:
    # What wandb would find out by itself is of the machine that logs, which may not be the one that ran.
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
        name=cell.name,
        group=f"{sweep.name}~{sweep.key[:8]}",
        job_type="cell",
        tags=[cell.tags["status"]],
        config={**sweep.environment, **cell.tags, **cell.params},
        settings=quiet,
        reinit="finish_previous",
    )
    place = Path(run.dir).parent
    run.summary.update(cell.metrics)
    run.finish(exit_code=0 if cell.ok else 1)
    (place / _DIGEST).write_text(cell.digest, encoding="utf-8")
