"""What the checks themselves do: with what they hold a run, what they call a control, what they ask for."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from dcpbench.records.checks import CheckSpec
from dcpbench.records.findings import Finding
from dcpbench.scenarios import checkpoint, checks, contract, known_defects, steps
from dcpbench.scenarios.cell import Cell
from dcpbench.scenarios.checkpoint import Checkpoint, live_state
from dcpbench.scenarios.steps import Losses, Oracle
from dcpbench.verify.files import digest_files
from dcpbench.verify.perturb import controllable
from dcpbench.verify.snapshot import Leaves
from dcpbench.verify.tolerances import losses_equal
from dcpbench.workloads.batches import Batches, batches_of
from dcpbench.workloads.build_run import build, build_plain
from dcpbench.workloads.training_run import TrainingRun
from support.alone import alone, bare_cell, config, run_alone, world

SMALL: dict[str, Any] = {"model": "short", "train_steps": 1, "resume_steps": 1, "saves": 2}
ONCE: dict[str, Any] = {**SMALL, "saves": 1}


def test_where_a_known_defect_applies_a_run_is_held_against_a_twin_that_has_it_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def marked_by(cell: Cell, oracle: Oracle) -> known_defects.Mark:
        other = build_plain(cell.config, cell.world, 1234)
        other.train(oracle.data, oracle.trained.train_state.step)
        return lambda found, beside: [*found, *beside(other)]

    monkeypatch.setattr(known_defects, "marked_by", marked_by)
    _, report = alone(**ONCE)
    where = "after the uninterrupted run"
    apart = {one.name for one in report.checks["state_twin_close"].distinct.values() if one.where == where}
    assert apart == {name for name in controllable(twin()) if not name.endswith(".step")}
    assert {one.name for one in report.checks["loss_twin_close"].distinct.values()} == {
        "loss of step 1",
        "loss of step 2",
    }


def twin() -> Leaves:
    given = config(**ONCE)
    run = build_plain(given, world(), given.seed)
    run.train(batches_of(given, world().device), 1)
    return checks._tensors(run)


def test_a_control_differs_in_values_and_not_in_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that one side lacks is reported, whatever the comparison makes of values."""
    seen: list[str] = []

    def watch(module: Any, name: str) -> None:
        honest = getattr(module, name)

        def compare(expected: Leaves, actual: Leaves, *rest: Any, **options: Any) -> list[Finding]:
            seen.append(name)
            assert expected.keys() == actual.keys()
            found: list[Finding] = honest(expected, actual, *rest, **options)
            return found

        monkeypatch.setattr(module, name, compare)

    watch(checkpoint, "compare")
    watch(checks, "compare")
    watch(checks, "compare_close")
    verdict, _ = alone(**SMALL)
    assert verdict.status == "pass", verdict.reason
    assert {"compare", "compare_close"} <= set(seen)


def test_what_no_rank_has_of_the_twins_state_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = checks._tensors
    missing = "state.net1.bias.exp_avg"
    here = world()

    def tensors(run: TrainingRun) -> Leaves:
        return {name: leaf for name, leaf in honest(run).items() if run.world is not here or name != missing}

    monkeypatch.setattr(checks, "_tensors", tensors)
    (report,) = run_alone(**ONCE, seen_by=here).reports
    compared = report.checks["state_twin_close"].compared["after the uninterrupted run"]
    assert {name for name, had in compared.items() if not had} == {missing}


def test_the_checks_of_plug_ins_follow_each_load_of_all_of_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str, bool]] = []

    def probe(name: str, cell: Cell, target: TrainingRun, loaded: Checkpoint) -> None:
        equal = not loaded.compare("model_equal", live_state(target)["model_equal"], None)
        asked.append((name, f"{Path(loaded.checkpoint_id).name} {cell.measured('load_s')}", equal))

    mine = {name: CheckSpec(name, "", "", partial(probe, name)) for name in ("first", "last")}
    without = CheckSpec("without", "", "")
    monkeypatch.setattr(checks, "CHECKS", {"first": mine["first"], "no": without, "last": mine["last"]})
    alone(**ONCE)
    places = ["step-0001 1", "step-0001 1", "step-0001-again 2"]  # loaded, set once more, saved again
    assert asked == [(name, place, True) for place in places for name in mine]
    asked.clear()
    alone(**ONCE, scenario="fine_tune")
    assert asked == [(name, "step-0001 3", True) for name in mine], "of the frozen part alone it is not"


@pytest.mark.parametrize("loss", [0.5, 0.0, math.inf, math.nan])
@pytest.mark.parametrize("alive", [True, False])
def test_a_loss_tells_something_if_it_is_a_living_models(loss: float, alive: bool, tmp_path: Path) -> None:
    cell, losses = bare_cell(tmp_path), unrestored_losses([[2.0, 3.0]])
    seen = [loss, 1.0]
    compared: dict[str, checks.Comparison] = {"loss_resume_equal": partial(losses_equal, seen, first=1)}
    checks._verify_losses(cell, compared, seen, [alive, True], losses, range(1, 3), "here")
    means = loss == 0.5 and alive
    assert cell.report.checks["loss_resume_equal"].control["here"] == {
        "loss of step 1": means,
        "loss of step 2": True,
    }


def unrestored_losses(strangers: list[list[float]]) -> Losses:
    given = config(**SMALL)
    return Losses([], [], batches_of(given, world().device), {}, dict(enumerate(strangers)))


@pytest.mark.parametrize("telling", range(5))
def test_as_many_models_are_tried_as_it_takes_to_tell_two_losses_apart(telling: int, tmp_path: Path) -> None:
    cell = bare_cell(tmp_path, config(**ONCE))
    losses = unrestored_losses([[2.0 if number == telling else 1.0, 3.0] for number in range(5)])
    asked = []

    def compared(seen: list[float]) -> list[Finding]:
        asked.append(seen)
        return losses_equal([1.0, 1.0], seen, first=1)

    checks._verify_losses(
        cell, {"loss_resume_equal": compared}, [1.0, 1.0], [True] * 2, losses, range(1, 3), "here"
    )
    assert all(cell.report.checks["loss_resume_equal"].control["here"].values())
    assert len(asked) == 1 + telling + 1, "the losses themselves, and no more models than that"


def test_losses_that_nothing_tells_apart_prove_nothing(tmp_path: Path) -> None:
    cell, losses = bare_cell(tmp_path, config(**ONCE)), unrestored_losses([[1.0]] * 5)
    compared: dict[str, checks.Comparison] = {"loss_resume_equal": partial(losses_equal, [1.0], first=1)}
    checks._verify_losses(cell, compared, [1.0], [True], losses, range(1, 2), "here")
    assert cell.report.checks["loss_resume_equal"].control["here"] == {"loss of step 1": False}


def test_an_unrestored_model_has_a_loss_for_each_step_and_is_trained_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell, losses = bare_cell(tmp_path, config(**SMALL)), unrestored_losses([])
    built: list[int] = []
    honest = steps.build_run.build_stranger

    def build_stranger(config: Any, world: Any, seed: int) -> TrainingRun:
        built.append(seed)
        return honest(config, world, seed)

    monkeypatch.setattr(steps.build_run, "build_stranger", build_stranger)
    everything = steps.unrestored(cell, losses, 0, range(1, 4))
    assert len(set(everything)) == 3
    assert steps.unrestored(cell, losses, 0, range(2, 4)) == everything[1:]
    assert steps.unrestored(cell, losses, 0, range(2, 3)) == everything[1:2]
    assert len(built) == 1
    longer = steps.unrestored(cell, losses, 0, range(1, 6))
    assert longer[:3] == everything
    assert len(longer) == 5
    assert not set(steps.unrestored(cell, losses, 1, range(1, 4))) & set(everything)
    assert built == [steps.other_seed(cell, number) for number in (0, 0, 1)]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_files_of_each_checkpoint_are_looked_at_by_rank_0_alone(rank: int, tmp_path: Path) -> None:
    cell = bare_cell(tmp_path, seen_by=world(rank, 2))
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
        now = partial(digest_files, tmp_path / name)
        cell.files[str(tmp_path / name)] = name, now(), now
        (tmp_path / name / "file").write_text("something else")
    checks.verify_files(cell)
    report = cell.report.checks["files_unchanged"]
    names = {"file", "a file that went", "a file that came"}
    assert {where: set(seen) for where, seen in report.compared.items()} == {
        where: set() if rank else names for where in ("one", "other")
    }
    found = [(one.name, one.where) for one in report.distinct.values()]
    assert found == ([] if rank else [("file", "one"), ("file", "other")])


def raising(error: Exception) -> Callable[[], None]:
    def call() -> None:
        raise error

    return call


def nothing() -> None:
    pass


@pytest.mark.parametrize(
    ("refused", "held"),
    [
        (raising(ValueError("there is one already")), True),
        (raising(ValueError("something else")), False),
        (raising(TypeError("there is one already")), False),
        (nothing, False),
    ],
)
def test_a_refusal_has_a_class_and_words(refused: Callable[[], None], held: bool, tmp_path: Path) -> None:
    cell = bare_cell(tmp_path)
    contract.verify_refused(cell, ValueError, "there is one", refused, nothing)
    report = cell.report.checks["contract_held"]
    assert (report.count == 0) is held
    assert report.control == {"of the save": {"refusal": True}}


@pytest.mark.parametrize("name", ["model", "scheduler", "train_state"])
def test_setting_what_is_there_already_may_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object, be it the first or the last of the state, that is changed when it is set once more."""
    honest = TrainingRun.state
    times: dict[int, int] = {}

    def state(run: TrainingRun) -> dict[str, Any]:
        given = honest(run)
        load, held = given[name].load_state_dict, given[name]

        def load_state_dict(loaded: dict[str, Any]) -> None:
            load(loaded)
            times[id(run)] = times.get(id(run), 0) + 1
            if times[id(run)] == 2:
                damage(run)

        class Fragile:
            state_dict = staticmethod(held.state_dict)

        Fragile.load_state_dict = staticmethod(load_state_dict)  # type: ignore[attr-defined]
        return {**given, name: Fragile()}

    def damage(run: TrainingRun) -> None:
        run.train_state.losses.append(1.0)
        run.scheduler.last_epoch += 1
        next(run.model.parameters()).data.add_(1)

    monkeypatch.setattr(TrainingRun, "state", state)
    _, report = alone(**ONCE)
    for check in ("model_equal", "extra_equal"):
        found = report.checks[check].distinct.values()
        assert "in the checkpoint of step 1" in {one.where for one in found}, "at once"


def test_a_load_into_the_run_that_was_saved_may_change_it(tmp_path: Path) -> None:
    cell = bare_cell(tmp_path, config(**ONCE))
    oracle = steps.build(cell)
    steps.go_on(cell, oracle, 1)
    saved = steps.save(cell, oracle.trained, steps.open_checkpointer(cell))
    steps.finish(cell, saved)
    steps.go_on(cell, oracle, 2)
    steps.load(cell, oracle.trained, saved)
    assert cell.report.checks["side_effect_free"].count == 0
    found = saved.compare("model_equal", live_state(oracle.trained)["model_equal"], None)
    assert found == []
    steps.load(cell, build(cell.config, cell.world, 1), saved)
    compared = cell.report.checks["side_effect_free"].compared["after the load of step 1"]
    assert "net1.weight" in compared, "a load into another run may not"


@pytest.mark.parametrize(
    ("draws", "sizes", "compiled", "why"),
    [
        (True, {"dp_shard": 2}, False, "ranks draw others than one process"),
        (True, {"dp_shard": 2}, True, "ranks draw others than one process"),
        (True, {}, True, "compiled code draws others than eager code"),
        (True, {}, False, None),
        (False, {"dp_shard": 2}, True, None),
    ],
)
def test_where_a_run_draws_others_than_a_plain_one_checks_of_one_against_the_other_are_not_made(
    draws: bool, sizes: dict[str, int], compiled: bool, why: str | None, tmp_path: Path
) -> None:
    cell = bare_cell(tmp_path, config(**{**ONCE, "compile": compiled}))
    run = build_plain(cell.config, cell.world, 0)
    run.draws, run.sizes = draws, sizes
    told = ["loss_twin_close", "state_twin_close", "loss_resume_close"]
    assert checks._draws_otherwise(cell, run, told) is (why is not None)
    text = f"the model draws random numbers in training, and {why}"
    assert cell.report.not_applied == (dict.fromkeys(told, text) if why else {})


@pytest.mark.parametrize(("own", "before", "told"), [("o", "b", "o"), ("o", None, "o"), (None, "b", "b")])
def test_what_the_run_that_saved_has_no_twin_for_has_none_after_it(
    own: str | None, before: str | None, told: str, tmp_path: Path
) -> None:
    cell = bare_cell(tmp_path, config(**ONCE))
    run = build_plain(cell.config, cell.world, 0)
    assert checks._has_no_twin(cell, run, ["loss_twin_close"]) is False
    run.why_no_twin = own
    assert checks._has_no_twin(cell, run, ["loss_twin_close"], before) is True
    assert cell.report.not_applied == {"loss_twin_close": told}


@pytest.mark.parametrize(("draws", "sizes"), [(True, {"tp": 1}), (True, {}), (False, {"tp": 1})])
def test_beside_a_known_defect_a_run_that_draws_otherwise_may_be_farther_off(
    draws: bool, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no other: one whose weights are off by a few per cent of the largest, and its losses by less."""
    told: list[set[str]] = []

    def resumed_by(cell: Cell, target: TrainingRun, data: Batches, until: int) -> known_defects.Mark:
        other = build_plain(cell.config, cell.world, cell.config.seed)
        other.train(data, until)
        with torch.no_grad():
            for value in target.model.parameters():
                value.mul_(1.003)
        target.draws, target.sizes = draws, sizes

        def mark(found: list[Finding], beside: Any) -> list[Finding]:
            told.append({one.name for one in beside(other)})
            return found

        return mark

    monkeypatch.setattr(known_defects, "resumed_by", resumed_by)
    alone(**ONCE)
    losses, *others = told
    apart, state = {"net1.weight", "state.net1.weight.exp_avg"}, set().union(*others)
    assert losses == (set() if draws and sizes else {"loss of step 2"}), "the others are of controls"
    assert state & apart == (set() if draws and sizes else apart)
    assert "train_state.losses" not in state, "they are those that were recorded"


def test_how_far_a_run_that_draws_otherwise_may_be_off() -> None:
    assert checks._DRAWN == {"loss": 0.02, "model_equal": 0.1, "optim_equal": 2.0}
