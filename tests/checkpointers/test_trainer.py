"""Files of checkpoints that a user's trainer writes: those beside its checkpoints, checkpoints that it
removes, files that come after its save has reported success, and saves that overlap."""

import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from conftest import Finished, blocks, run, selected
from dcpbench.cell import checkpoint_files
from dcpbench.cell.cell import Cell
from dcpbench.cell.checkpoint import Checkpoint, SaveInFlight
from dcpbench.checkpointers.base import AtSuccess, PendingSave
from dcpbench.checkpointers.torch_save import TorchSaveCheckpointer
from dcpbench.checkpointers.trainer import TrainerCheckpointer
from dcpbench.core.mismatch import Problem
from dcpbench.core.rank_report import NOTHING, CheckReport
from dcpbench.records.row import notes_of
from dcpbench.state import process_state
from support.alone import bare_cell, config, world
from support.notes import why_not

PASS = {"PointsToTheLatest", "Logs", "KeepsOne"}
FAIL = {
    "OneOptimizerFile": {"optim_equal", "loss_resume_equal", "state_resume_equal"},
    "WritesLate": {"files_unchanged"},
    "EarlyOnRank1": {"files_unchanged"},
}
BLAMED = {
    "WritesLate": {f"step-{step}-1.pt" for step in (2, 4, 6)},
    "EarlyOnRank1": {f"step-{step}-{rank}.pt" for step in (2, 4, 6) for rank in (0, 1)},
}


@pytest.fixture(scope="module")
def sweep(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    asked = {"OneOptimizerFile", "KeepsOne"}
    asked |= {
        name for kind in ("trainer", "wrong", "missing", "late", "staged") for name in selected(request, kind)
    }
    targets = ",".join(f"support.trainers.{name}" for name in sorted(asked))
    chains = [{"workload.target": f"support.trainers.{name}"} for name in selected(request, "chained")]
    cells = [{"workload.target": targets}, *({**cell, "scenario": "chain"} for cell in chains)]
    words = (
        "checkpointer=trainer",
        "device=cpu",
        "world_size=2",
        "parallel=ddp",
        "train_steps=2",
        "resume_steps=2",
        "retry=0",
    )
    return run(tmp_path_factory.mktemp("files") / "sweep", *blocks(cells), *words)


def row_of(sweep: Finished, name: str, scenario: str = "save_load") -> dict[str, Any]:
    return sweep.row(model=f"support.trainers.{name}", scenario=scenario)


def left_out(row: dict[str, Any]) -> dict[str, str]:
    """Why the files of checkpoints are not compared, by place, in all stages of a cell."""
    return {str(note.place): note.text for note in notes_of(row) if note.check == "files_unchanged"}


@pytest.mark.slow
@pytest.mark.parametrize("trainer", sorted(PASS))
def test_files_beside_checkpoints_are_allowed(sweep: Finished, trainer: str) -> None:
    row = row_of(sweep, trainer)
    assert (row["status"], row["files_unchanged"]) == ("pass", True), row["reason"]
    assert (left_out(row) == {}) is (trainer != "KeepsOne"), "files beside belong to no checkpoint"


@pytest.mark.slow
@pytest.mark.parametrize("chained", ["KeepsOne", "Logs"])
def test_chain_loads_the_newest_checkpoint(sweep: Finished, chained: str) -> None:
    row = row_of(sweep, chained, "chain")
    assert row["status"] == "pass", row["reason"]


@pytest.mark.slow
def test_checkpoints_that_the_trainer_removes_are_not_loaded(sweep: Finished) -> None:
    row = row_of(sweep, "KeepsOne")
    removed = left_out(row)
    assert removed == {
        f"in the checkpoint of step {step}": f"the save of step-{step + 2} removed it, so it is not loaded"
        for step in (2, 4)
    }
    resumed = [rank["resumed"].keys() for rank in row["details"]["ranks"] if rank["resumed"]]
    assert resumed == [{"6", "7"}] * 2, "7 is the save after a load of 6 and a step"


@pytest.mark.slow
@pytest.mark.parametrize("wrong", FAIL)
def test_wrong_files_are_reported(sweep: Finished, wrong: str) -> None:
    row = row_of(sweep, wrong)
    failed = {name for name, check in row["details"]["checks"].items() if not check["held"]}
    assert (row["status"], failed) == ("fail", FAIL[wrong]), row["reason"]
    worst = row["details"]["checks"]["files_unchanged"]["worst"]
    assert {one["name"] for one in worst} == BLAMED.get(wrong, set())
    assert {one["problem"] for one in worst} <= {Problem.file_changed}


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["RemovesTheNewest", "WritesNothing"])
def test_newest_checkpoint_without_files_fails(sweep: Finished, missing: str) -> None:
    row = row_of(sweep, missing)
    steps = (6,) if missing == "RemovesTheNewest" else (2, 4, 6)
    assert row["status"] == "fail", row["reason"]
    worst = row["details"]["checks"]["files_unchanged"]["worst"]
    assert {one["name"] for one in worst} == {f"step-{step}" for step in steps}
    assert "its save wrote none under its path, or removed it" in row["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["RemovesHalf"])
def test_load_of_half_a_checkpoint_says_what_became_of_it(sweep: Finished, missing: str) -> None:
    row = row_of(sweep, missing)
    assert (row["status"], row["files_unchanged"]) == ("fail", False), row["reason"]
    assert "step-4-0.pt was there when the save of step 4 returned, and was removed since" in row["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("late", ["Rank0Late"])
def test_file_that_rank_0_writes_last_is_a_fact(sweep: Finished, late: str) -> None:
    row = row_of(sweep, late)
    assert row["status"] == "pass", row["reason"]
    late_files = [note.text for note in notes_of(row) if note.kind == "late_files"]
    assert "step-2.index in the checkpoint of step 2: not there when save returned on this rank" in late_files


@pytest.mark.slow
@pytest.mark.parametrize("staged", ["SharedStaging"])
def test_save_in_flight_that_the_next_one_overwrites_fails(sweep: Finished, staged: str) -> None:
    row = row_of(sweep, staged)
    worst = row["details"]["checks"]["model_equal"]["worst"]
    assert (row["status"], row["model_equal"]) == ("fail", False), row["reason"]
    assert {one["where"] for one in worst} == {f"in the checkpoint of step {step}" for step in (2, 4)}


class Writes:
    """Writes these files beside a path or, with a suffix, under it."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def save(self, path: str) -> None:
        for name in self.names:
            place = Path(f"{path}{name}") if name[0] in "-./" else Path(path).parent / name
            place.parent.mkdir(exist_ok=True)
            place.write_text(f"{path} {name}")


def test_files_under_the_path_are_a_checkpoints(tmp_path: Path) -> None:
    checkpointer = TrainerCheckpointer(tmp_path, config(), world())
    first, second = (str(tmp_path / checkpointer.name_of(step)) for step in (2, 20))
    checkpointer.save({"trainer": Writes("-0.pt", "/data", "latest")}, first)
    mine = {"step-2-0.pt", "step-2/data"}
    assert checkpointer.digests(first).keys() == mine == checkpointer.lengths(first).keys()
    checkpointer.save({"trainer": Writes(".pt", "latest")}, second)
    assert checkpointer.digests(second).keys() == {"step-20.pt"}
    assert checkpointer.size(second) == sum(checkpointer.lengths(second).values()) > 0
    assert checkpointer.removed == {}
    checkpointer.remove(first)
    assert sorted(path.name for path in (tmp_path / "output").iterdir()) == ["latest", "step-20.pt"]
    checkpointer.note_removed(second)
    assert checkpointer.removed == {first: "step-20"}


def test_files_of_other_names_belong_to_the_save_that_wrote_them(tmp_path: Path) -> None:
    checkpointer = TrainerCheckpointer(tmp_path, config(), world())
    first, second = (str(tmp_path / checkpointer.name_of(step)) for step in (2, 20))
    for path, names in ((first, ("a.pt", "latest")), (second, ("b/c.pt", "latest"))):
        (tmp_path / "output" / "b").mkdir(parents=True, exist_ok=True)
        checkpointer.save({"trainer": Writes(*names)}, path)
        checkpointer.at_success(path, 0, alone=True)
    assert checkpointer.digests(first).keys() == {"a.pt"}
    assert checkpointer.digests(second).keys() == {"b/c.pt"}
    (tmp_path / "output" / "a.pt").unlink()
    checkpointer.note_removed(second)
    assert checkpointer.removed == {first: "step-20"}
    loading = TrainerCheckpointer(tmp_path, config(), world())
    loading.note_removed(second, ["b/c.pt"])
    assert loading.size(second) == checkpointer.size(second) > 0
    loading.remove(second)
    assert [path.name for path in (tmp_path / "output").rglob("*") if path.is_file()] == ["latest"]


def saved_by(cell: Cell, path: Path) -> SaveInFlight:
    """A save to a path that reports success now."""
    vars(cell)["checkpointer"] = TorchSaveCheckpointer(path.parent, cell.config, cell.world)
    files = Future[AtSuccess]()
    files.set_result(cell.checkpointer.at_success(str(path), cell.world.rank, cell.world.size == 1))
    pending = PendingSave(0.0, 0.0)
    return SaveInFlight(Checkpoint(2, str(path), {}), pending, files, lambda: NOTHING, {}, {}, 0)


@pytest.mark.parametrize("rank", [0, 1])
def test_file_that_comes_after_success_on_a_rank_is_reported(tmp_path: Path, rank: int) -> None:
    cell = bare_cell(tmp_path, seen_by=world(rank, 2))
    save = saved_by(cell, tmp_path / "step-2")
    (tmp_path / "step-2").mkdir()
    (tmp_path / "step-2" / "late").touch()
    digests = checkpoint_files.digests_of(cell, save, on_several_hosts=False)
    report = cell.report.checks["files_unchanged"]
    assert [one.name for one in report.distinct.values()] == ["late"]
    checkpoint_files.watch_files(cell, save.checkpoint, digests)
    checkpoint_files.verify_files(cell)
    assert report.count == 2 - rank, "rank 0 compares them at the end too"


def test_late_file_of_another_host_is_not_blamed(tmp_path: Path) -> None:
    cell = bare_cell(tmp_path, seen_by=world(1, 2))
    (tmp_path / "step-2").mkdir()
    (tmp_path / "step-2" / "data").touch()
    time.sleep(0.02)  # a ctime is one of a clock with ticks of up to 10 ms
    save = saved_by(cell, tmp_path / "step-2")
    unseen = Future[AtSuccess]()
    unseen.set_result(save.files.result()._replace(listing={}))
    checkpoint_files.digests_of(cell, save._replace(files=unseen), on_several_hosts=True)
    assert cell.report.checks["files_unchanged"].count == 0


@pytest.mark.parametrize("has_files", [True, False])
def test_checkpoint_without_files_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_files: bool
) -> None:
    monkeypatch.setattr(process_state, "_SETTLE_S", 0)
    monkeypatch.setattr(TorchSaveCheckpointer, "has_files", has_files)
    monkeypatch.setattr(TorchSaveCheckpointer, "unreadable", "it is a test's")
    cell = bare_cell(tmp_path)
    save = saved_by(cell, tmp_path / "step-2")
    digests = checkpoint_files.digests_of(cell, save, on_several_hosts=False)
    checkpoint_files.watch_files(cell, save.checkpoint, digests)
    checkpoint_files.verify_files(cell)
    reported = [
        one.name for one in cell.report.checks.get("files_unchanged", CheckReport()).distinct.values()
    ]
    assert reported == ["step-2"] * has_files
    assert ("files_unchanged" in why_not(cell.report)) is not has_files
