"""MLflow: a run for each sweep with a nested run for each cell, in a SQLite file."""

import logging
import os
from collections import Counter
from pathlib import Path

os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read at import; no data leaves this machine

import alembic  # noqa: F401 - a SQLite store needs them; mlflow-skinny does not install them
import mlflow
import sqlalchemy  # noqa: F401
from mlflow.entities import Metric, Param, Run, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from dcpbench.plugins.trackers.log import LoggedCell, LoggedSweep
from dcpbench.records.store import ResultsError

_KEY, _DIGEST, _PARENT = "dcpbench.key", "dcpbench.digest", "mlflow.parentRunId"


def log(sweep: LoggedSweep, folder: Path, project: str) -> dict[str, str]:
    """Create runs in the experiment `project` for cells that are new or have changed.

    Raises:
        ResultsError: MLflow raised an error.
    """
    logging.getLogger("mlflow").setLevel(logging.WARNING)
    folder.mkdir(parents=True, exist_ok=True)
    mlflow.set_tracking_uri(_uri(folder))
    client = MlflowClient()
    try:
        if known := client.get_experiment_by_name(project):
            experiment = known.experiment_id
        else:
            artifacts = (folder.resolve() / "artifacts").as_uri()
            experiment = client.create_experiment(project, artifact_location=artifacts)
        parent = _parent(sweep, client, experiment)
        there = {run.data.tags[_KEY]: run for run in _runs(experiment, _PARENT, parent)}
        before = {key: run.data.tags.get(_DIGEST, "") for key, run in there.items()}
        for cell in sweep.changed(before):
            if cell.key in there:
                client.delete_run(there[cell.key].info.run_id)
            _write(sweep, cell, client, experiment, parent)
    except MlflowException as error:
        raise ResultsError(f"MLflow: {str(error).splitlines()[0]}") from None
    return before


def seen_with(folder: Path) -> str:
    """Return the command that shows the runs."""
    return f"mlflow ui --backend-store-uri {_uri(folder)}"


def _uri(folder: Path) -> str:
    return f"sqlite:///{folder.resolve() / 'mlflow.db'}"


def _parent(sweep: LoggedSweep, client: MlflowClient, experiment: str) -> str:
    """Return the run of the sweep, after creating it if necessary and updating it."""
    found = _runs(experiment, _KEY, sweep.key)
    start = round(min((cell.started_s for cell in sweep.cells), default=0.0) * 1000)
    own = {_KEY: sweep.key}
    run = found[0] if found else client.create_run(experiment, start, own, run_name=sweep.name)
    counts = Counter(cell.row.status for cell in sweep.cells)
    counted = {f"cells.{status}": str(number) for status, number in counts.items()}
    for name, value in {**sweep.environment, **counted}.items():
        client.set_tag(run.info.run_id, name, value)
    ok = all(cell.row.is_ok for cell in sweep.cells)
    ended = max((cell.ended_s for cell in sweep.cells), default=0.0)
    client.set_terminated(run.info.run_id, "FINISHED" if ok else "FAILED", round(ended * 1000))
    return str(run.info.run_id)


def _write(sweep: LoggedSweep, cell: LoggedCell, client: MlflowClient, experiment: str, parent: str) -> None:
    """Write a run. Its digest is written last; a run without a digest is incomplete, and is written again."""
    at = round(cell.started_s * 1000)
    run = client.create_run(experiment, at, {_KEY: cell.key, _PARENT: parent}, run_name=cell.row.cell)
    client.log_batch(
        run.info.run_id,
        metrics=[Metric(name, value, at, 0) for name, value in cell.metrics.items()],
        params=[Param(name, value) for name, value in cell.params.items()],
        tags=[RunTag(name, value) for name, value in {**sweep.environment, **cell.tags}.items()],
    )
    status = "FINISHED" if cell.row.is_ok else "FAILED"
    client.set_terminated(run.info.run_id, status, round(cell.ended_s * 1000))
    client.set_tag(run.info.run_id, _DIGEST, cell.digest)


def _runs(experiment: str, tag: str, value: str) -> list[Run]:
    found: list[Run] = mlflow.search_runs([experiment], f"tags.`{tag}` = '{value}'", output_format="list")
    return found
