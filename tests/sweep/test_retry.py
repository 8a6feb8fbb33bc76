"""Which cells are tried again, and what becomes of the checkpoints of either try."""

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
from dcpbench.core.rank_report import RankReport
from dcpbench.core.stage_end import StageEnd
from dcpbench.core.statuses import STATUSES
from dcpbench.executors.base import Executor, HostsLostError
from dcpbench.rank.messages import CellSpec
from dcpbench.records.row import exit_status
from dcpbench.sweep.cell_runner import CellRunner, clear, is_due, set_aside
from dcpbench.sweep.row_builder import Attempt, row_of
from dcpbench.verdict.verdict import Verdict
from support import alone
from support.ends import reported
from support.jobs import job
from support.rows import row

NOBODY = 65534


def tried(status: str, reason: str | None = None, fault_seen: bool | None = None) -> Attempt:
    checks = {"model_equal": status != "crash"}
    verdict = Verdict(status, reason, checks, fault_seen=fault_seen)
    return Attempt(verdict, "2026-11-21T00:00:00+00:00")


@pytest.mark.parametrize("status", STATUSES)
def test_cells_that_are_not_ok_have_two_attempts_without_fault(status: str) -> None:
    assert is_due(tried(status), Config()) is (status not in ("pass", "xfail", "skip"))
    assert not is_due(tried(status), Config(retry=0))
    planted = Config(fault=FaultConfig(name="lr_not_restored", target="x.y"))
    for seen in (True, False):
        assert not is_due(tried(status, fault_seen=seen), planted)


@pytest.mark.parametrize(("first", "second", "flaky"), [("crash", "pass", True), ("fail", "fail", False)])
def test_row_has_both_attempts(first: str, second: str, flaky: bool) -> None:
    reason = None if second == "pass" else "net1.weight differs"
    first_try = replace(tried(first, "rank 2 died"), cell_s=2.0)
    first_try = replace(first_try, verdict=replace(first_try.verdict, checks={"model_equal": False}))
    settled = row_of(job(), [first_try, tried(second, reason)])
    assert settled.status == second
    assert settled.flaky is flaky
    assert settled.details["first_try"]["status"] == first
    assert settled.details["first_try"]["reason"] == "rank 2 died"
    assert settled.details["first_try"]["cell_s"] == 2.0
    assert settled.details["first_try"]["failed_checks"] == ["model_equal"]
    assert ("rank 2 died" in (settled.reason or "")) is flaky
    assert exit_status([settled, row(status="pass")]) == 1


def test_logs_of_the_first_attempt_are_moved(tmp_path: Path) -> None:
    (tmp_path / "rank0.log").write_text("of the first try")
    set_aside(tmp_path)
    assert list(tmp_path.glob("*.log")) == []
    assert (tmp_path / "first-try" / "rank0.log").read_text() == "of the first try"


@pytest.mark.parametrize(
    ("keep", "status", "flaky", "left"),
    [
        ("none", "fail", False, []),
        ("failed", "pass", True, ["first"]),
        ("failed", "fail", False, ["second"]),
        ("failed", "fail", True, ["first", "second"]),
        ("all", "pass", True, ["first", "second"]),
    ],
)
def test_kept_checkpoints_of_both_attempts(
    tmp_path: Path, keep: str, status: str, flaky: bool, left: list[str]
) -> None:
    for name in ("first", "second"):
        (tmp_path / name / "step-0002").mkdir(parents=True)
    config = Config(keep_checkpoints=KeepCheckpoints[keep])
    assert clear(config, not tried(status).is_ok, tmp_path / "second") == []
    assert clear(config, flaky, tmp_path / "first") == []
    assert sorted(path.name for path in tmp_path.iterdir()) == left


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
    assert clear(Config(keep_checkpoints=KeepCheckpoints.none), True, checkpoints) == []
    assert not checkpoints.exists()


def test_failed_removal_is_reported(without_privileges: Path) -> None:
    checkpoints = without_privileges / "checkpoints"
    checkpoints.mkdir()
    without_privileges.chmod(0o555)
    told = clear(Config(keep_checkpoints=KeepCheckpoints.none), True, checkpoints)
    without_privileges.chmod(0o755)
    assert [one.startswith(f"{checkpoints} could not be removed: ") for one in told] == [True]


def test_phases_are_those_of_the_slowest_rank() -> None:
    def report(rank: int, **seconds: float) -> RankReport:
        parts = [(name.replace("_", "/"), value) for name, value in seconds.items()]
        return RankReport(
            rank, measurements=[Measurement(PHASE_S, value, rank, name) for name, value in parts]
        )

    save = reported([report(0, build=1.0, save=2.0), report(1, build=2.5, save=0.25)])
    load = reported([report(0, build=1.0, verify_twin=0.5, verify_power=0.25), report(1, build=1.0)])
    of_two_stages = replace(tried("pass"), ends=[save, load], cell_s=6.0)
    phases = row_of(job(), [of_two_stages]).details["phases"]
    assert phases == {"build": 2.0, "save": 2.0, "verify": 0.75}
    assert "phases" not in row_of(job(), [tried("skip")]).details


@pytest.mark.parametrize("keep", ["all", "none"])
def test_second_attempt_without_hosts_leaves_nothing(keep: str, tmp_path: Path) -> None:
    store = tmp_path / "store"
    config = alone.config(keep_checkpoints=keep)
    config.storage = StorageConfig(options={"url": f"file://{store}"})
    one = job(config)
    one = replace(one, folder=tmp_path / "cell")

    def run(kind: object, spec: CellSpec, *_: object) -> StageEnd:
        place = Path(f"{store}{spec.checkpoints}")
        place.mkdir(parents=True)
        (place / "object").touch()
        (Path(spec.checkpoints) / "file").touch()
        if spec.run.attempt:
            raise HostsLostError("they are gone")
        return StageEnd(not_run="they were unwell")

    executor = mock.Mock(Executor, run=run, interrupted=False)
    runner = CellRunner(tmp_path, executor, mock.Mock(), mock.Mock())
    finished = runner.run(one).row
    assert (finished.status, finished.details["no_second_try"]) == ("error", "they are gone")
    left = {path.parent.name for path in tmp_path.rglob("*") if path.is_file()}
    assert left - {".hydra"} == (set() if keep == "none" else {"checkpoints"})
