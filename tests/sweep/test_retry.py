"""Retries of cells, and the checkpoints that are kept."""

import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from dcpbench.config.groups import FaultConfig, KeepCheckpoints, StorageConfig
from dcpbench.config.schema import Config
from dcpbench.core.metrics import PHASE_S, Measurement
from dcpbench.core.mismatch import Mismatch, Problem
from dcpbench.core.rank_report import RankReport
from dcpbench.core.stage_end import RankEnd, StageEnd
from dcpbench.core.statuses import STATUSES
from dcpbench.executors.base import Executor, HostsLostError
from dcpbench.plan.plan import _one_per_run
from dcpbench.rank.messages import CellSpec, WorldSpec
from dcpbench.records.row import Row, exit_status
from dcpbench.records.store import read_rows
from dcpbench.sweep.cell_runner import CellRunner, needs_retry, remove_checkpoints
from dcpbench.sweep.row_builder import Attempt, row_of
from dcpbench.verdict.verdict import Verdict
from support import alone
from support.ends import reported
from support.jobs import job
from support.pretended import jobs_in, sweep_of
from support.pretended_engine import healthy

NOBODY = 65534


def tried(status: str, reason: str | None = None, fault_seen: bool | None = None) -> Attempt:
    checks = {"model_equal": status != "crash"}
    verdict = Verdict(status, reason, checks, fault_seen=fault_seen)
    return Attempt(verdict, "2026-11-21T00:00:00+00:00", [StageEnd()])


@pytest.mark.parametrize("status", STATUSES)
def test_cells_that_are_not_ok_are_retried_without_fault(status: str) -> None:
    assert needs_retry(tried(status), Config()) is (status not in ("pass", "xfail", "skip"))
    assert not needs_retry(tried(status), Config(retry=0))
    assert not needs_retry(replace(tried(status), ends=()), Config()), "its ranks never ran"
    planted = Config(fault=FaultConfig(name="lr_not_restored", target="x.y"))
    for seen in (True, False):
        assert not needs_retry(tried(status, fault_seen=seen), planted)


KIND = WorldSpec(1, "cpu", False)
ENDS = {
    "pass": healthy(KIND),
    "fail": healthy(KIND, Mismatch("w", Problem.differs)),
    "crash": StageEnd((RankEnd(0, 0, "here", exited_at=1.0, exit_status=-9),)),
    "error": StageEnd(not_run="they were unwell"),
}


def run_twice(folder: Path, first: str, second: str, keep: str) -> tuple[list[Row], list[Path]]:
    """Run a cell whose runs end with these statuses; return their rows, and the checkpoints that are left."""

    def end(spec: CellSpec) -> StageEnd:
        (Path(spec.checkpoints) / "step-0002").mkdir()
        return ENDS[second if spec.config.repeat else first]

    (planned,) = jobs_in(folder, "a", retry=1, keep_checkpoints=KeepCheckpoints[keep])
    sweep, _ = sweep_of(folder, [planned], end)
    sweep.run()
    kept = [run for run in (planned, planned.retry) if run.checkpoints.exists()]
    return read_rows(folder)[0], [run.folder for run in kept]


@pytest.mark.parametrize(
    ("first", "second", "keep", "left"),
    [
        ("fail", "fail", "none", []),
        ("crash", "pass", "failed", ["a"]),
        ("crash", "crash", "failed", ["a"]),
        ("crash", "fail", "failed", ["a", "a,repeat=1"]),
        ("crash", "pass", "all", ["a", "a,repeat=1"]),
    ],
)
def test_retry_is_another_run(tmp_path: Path, first: str, second: str, keep: str, left: list[str]) -> None:
    (before, after), kept = run_twice(tmp_path, first, second, keep)
    assert (before.status, before.flaky, before.retry_of) == (first, first != second, None)
    assert (after.status, after.flaky, after.retry_of) == (second, None, 0)
    assert (after.cell, after.repeat, after.config_digest) == ("a,repeat=1", 1, before.config_digest)
    assert after.overrides.endswith("repeat=1")
    assert exit_status([before, after]) == 1
    assert [folder.name for folder in kept] == left
    assert (tmp_path / after.cell / ".hydra" / "overrides.yaml").exists()


def test_retries_come_after_all_planned_runs(tmp_path: Path) -> None:
    first, second = jobs_in(tmp_path, "save=sync,repeat=0", "save=sync,repeat=1", retry=1)
    second = replace(second, config=replace(second.config, repeat=1))
    planned = _one_per_run([first, second])
    retries = [run.retry for run in planned]
    assert [(run.name, run.config.repeat, run.columns["retry_of"]) for run in retries] == [
        ("save=sync,repeat=2", 2, 0),
        ("save=sync,repeat=3", 3, 1),
    ]


@pytest.fixture
def without_privileges() -> Iterator[Path]:
    """A folder of this process's own, which is not root's while the test runs."""
    with tempfile.TemporaryDirectory() as made:
        root = os.geteuid() == 0
        if root:
            os.chown(made, NOBODY, -1)
            os.seteuid(NOBODY)
        try:
            yield Path(made)
        finally:
            if root:
                os.seteuid(0)


def test_read_only_checkpoints_are_removed(without_privileges: Path) -> None:
    checkpoints = without_privileges / "checkpoints"
    (checkpoints / "step-0002").mkdir(parents=True)
    (checkpoints / "step-0002" / ".metadata").touch()
    (checkpoints / "step-0002").chmod(0o555)
    checkpoints.chmod(0o555)
    assert remove_checkpoints(Config(keep_checkpoints=KeepCheckpoints.none), True, checkpoints) == []
    assert not checkpoints.exists()


def test_phases_are_those_of_the_slowest_rank() -> None:
    def report(rank: int, **seconds: float) -> RankReport:
        parts = [(name.replace("_", "/"), value) for name, value in seconds.items()]
        return RankReport(
            rank, measurements=[Measurement(PHASE_S, value, rank, name) for name, value in parts]
        )

    save = reported([report(0, build=1.0, save=2.0), report(1, build=2.5, save=0.25)])
    load = reported([report(0, build=1.0, verify_twin=0.5, verify_power=0.25), report(1, build=1.0)])
    of_two_stages = replace(tried("pass"), ends=[save, load], cell_s=6.0)
    phases = row_of(job(), of_two_stages).details["phases"]
    assert phases == {"build": 2.0, "save": 2.0, "verify": 0.75}
    assert "phases" not in row_of(job(), tried("skip")).details


@pytest.mark.parametrize("keep", ["all", "none"])
def test_retry_without_hosts_leaves_nothing(keep: str, tmp_path: Path) -> None:
    store = tmp_path / "store"
    config = alone.config(keep_checkpoints=keep)
    config.storage = StorageConfig(options={"url": f"file://{store}"})
    planned = replace(job(config), folder=tmp_path / "cell")

    def run(kind: object, spec: CellSpec, *_: object) -> StageEnd:
        place = Path(f"{store}{spec.checkpoints}")
        place.mkdir(parents=True)
        (place / "object").touch()
        (Path(spec.checkpoints) / "file").touch()
        if spec.config.repeat:
            raise HostsLostError("they are gone")
        return ENDS["error"]

    executor = mock.Mock(Executor, run=run, interrupted=False)
    runner = CellRunner(tmp_path, executor, mock.Mock(), mock.Mock())
    (finished,) = runner.run(planned)
    assert (finished.row.status, finished.row.details["no_retry"]) == ("error", "they are gone")
    left = {path.parent.name for path in tmp_path.rglob("*") if path.is_file()}
    assert left - {".hydra"} == (set() if keep == "none" else {"checkpoints"})
