"""A run gets the saved values of what known defects made wrong in its load, and of nothing else."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from dcpbench.cell import checks
from dcpbench.cell.cell import Cell
from dcpbench.cell.checkpoint import Checkpoint
from dcpbench.cell.known_defects import repair
from dcpbench.compare.leaves import compare
from dcpbench.core.mismatch import Mismatch, Place, Problem
from dcpbench.core.rank_report import Compared
from dcpbench.core.state import CHECK_OF, StatePart, key_of
from dcpbench.runs.build_run import build
from dcpbench.runs.own_run import OwnRun
from dcpbench.runs.run import NO_EXCLUSIONS
from dcpbench.state.snapshot import State, TensorLeaf, digested, named_parameters
from support.alone import ONCE, bare_cell, config, run_alone, trained
from support.notes import why_not


@pytest.fixture
def cell(tmp_path: Path) -> Cell:
    """A cell in whose checkpoints there are no tensors to read."""
    made = bare_cell(tmp_path, config(**ONCE))
    vars(made)["checkpointer"] = mock.Mock(read_tensor=lambda *_: None)
    return made


def loaded_wrongly(
    cell: Cell, state: State, run: OwnRun, by: Callable[[str], str | None] = lambda name: "mine"
) -> Checkpoint:
    """Report all in which a run is not as it was saved, with the defects that explain it."""
    checkpoint = Checkpoint(2, "", state)
    for part, leaves in run.live_state().items():
        found = [replace(one, by=by(one.name)) for one in compare(state[part], leaves)]
        cell.record(CHECK_OF[part], Compared(found, {}, {}), checkpoint.place)
    return checkpoint


def wrong(checkpoint: Checkpoint, run: OwnRun) -> set[str]:
    state = run.live_state()
    return {
        one.name
        for part, leaves in checkpoint.state.items()
        if part is not StatePart.flags
        for one in compare(leaves, state[part], closely=False)
    }


@pytest.mark.parametrize("optimizer", ["adam", "adam_and_sgd", "adam_tensor_lr"])
@pytest.mark.parametrize("scheduler", ["step", "multi_step"])
def test_everything_explained_gets_its_saved_value(optimizer: str, scheduler: str, cell: Cell) -> None:
    saved, target = (trained(steps, optimizer=optimizer, scheduler=scheduler) for steps in (2, 1))
    checkpoint = loaded_wrongly(cell, saved.retained_state(), target)
    assert {"net1.weight", "train_state.losses"} <= wrong(checkpoint, target)
    lr = target.optimizer.param_groups[0]["lr"]
    assert repair(cell, target, checkpoint) is None
    assert wrong(checkpoint, target) == set()
    if optimizer == "adam_tensor_lr":
        assert target.optimizer.param_groups[0]["lr"] is lr, "which the defaults may share"


def test_unexplained_values_stay(cell: Cell) -> None:
    """Of two mismatches of a name, one is not explained."""
    explained, target = {"net1.weight", "net2.bias"}, trained(1)
    by = dict.fromkeys(explained, "mine").get
    checkpoint = loaded_wrongly(cell, trained(2).retained_state(), target, by)
    before = wrong(checkpoint, target)
    again = Mismatch("net2.bias", Problem.differs)
    cell.record("model_equal", Compared([again], {}, {}), checkpoint.place)
    assert repair(cell, target, checkpoint) is None
    assert wrong(checkpoint, target) == before - {"net1.weight"}


def test_mismatches_of_another_load_do_not_count(cell: Cell) -> None:
    target = trained(1)
    checkpoint = loaded_wrongly(cell, trained(2).retained_state(), target)
    before = wrong(checkpoint, target)
    assert repair(cell, target, replace(checkpoint, step=3)) is None
    assert wrong(checkpoint, target) == before


def test_missing_entries_are_made_like_their_parameters(cell: Cell) -> None:
    target = build(cell.config, cell.world, 1)
    checkpoint = loaded_wrongly(cell, trained(2).retained_state(), target)
    state = checkpoint.state[StatePart.optimizer]
    found = cell.report.checks["optim_equal"].distinct.values()
    missing = {one.name for one in found if one.problem is Problem.missing}
    assert {"state.net1.weight.exp_avg", "state.net1.weight.step"} <= missing
    assert repair(cell, target, checkpoint) is None
    for name, parameter in named_parameters(target.model).items():
        entries = target.optimizer.state[parameter]
        assert entries["exp_avg"].shape == parameter.shape
        assert torch.equal(entries["exp_avg"], state["state", name, "exp_avg"].local)
        assert entries["exp_avg"] is not state["state", name, "exp_avg"].local, "later steps change it"


def test_entry_of_another_dtype_is_replaced(cell: Cell) -> None:
    saved = trained(2)
    target = copy.deepcopy(saved)
    for entries in target.optimizer.state.values():
        entries |= {"step": entries["step"].bfloat16(), "exp_avg": entries["exp_avg"].bfloat16()}
    checkpoint = loaded_wrongly(cell, saved.retained_state(), target)
    found = cell.report.checks["optim_equal"].distinct.values()
    assert {one.problem for one in found} == {Problem.dtype}
    assert repair(cell, target, checkpoint) is None
    assert wrong(checkpoint, target) == set()


class StatefulLayer(torch.nn.Module):
    """A module whose extra state is any value."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.value = state


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        (torch.ones(2), torch.zeros(2)),
        (torch.ones(2), {}),
        (b"2", b"1"),
        ({"steps": 2, "seen": 3}, {"steps": 1}),
        ({"steps": 2}, None),
    ],
)
def test_extra_state_of_a_module_gets_its_saved_value(saved: Any, loaded: Any, cell: Cell) -> None:
    run = build(cell.config, cell.world, 0)
    run.model.counter = StatefulLayer(saved)
    state = run.retained_state()
    run.model.counter.value = loaded
    checkpoint = loaded_wrongly(cell, state, run)
    assert repair(cell, run, checkpoint) is None
    assert wrong(checkpoint, run) == set()
    assert type(run.model.counter.value) is type(saved)


@pytest.mark.parametrize("is_right", [True, False])
def test_large_tensors_are_read_if_the_checkpoint_has_them(is_right: bool, cell: Cell) -> None:
    target, state = trained(1), trained(2).retained_state()
    stored = {
        key_of(part, name): leaf.local + (not is_right)
        for part in (StatePart.model, StatePart.optimizer, StatePart.extra)
        for name, leaf in state[part].items()
        if isinstance(leaf, TensorLeaf) and leaf.dtype == torch.float32
    }
    names = {"net1.weight", "state.net1.weight.exp_avg"}
    by = dict.fromkeys(names, "mine").get
    vars(cell)["checkpointer"] = mock.Mock(read_tensor=lambda checkpoint_id, key: stored.get(key))
    digests: State = {part: digested(leaves) for part, leaves in state.items()}
    checkpoint = loaded_wrongly(cell, digests, target, by)
    before = wrong(checkpoint, target)
    why = repair(cell, target, checkpoint)
    assert wrong(checkpoint, target) == (before - names if is_right else before)
    assert (why is None) is is_right
    assert is_right or why == "net1.weight was not restored (mine), and its saved value cannot be set"


@pytest.mark.cell
def test_resume_is_not_applied_where_nothing_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "repair", lambda *_: "net1.weight was not restored")
    ran = run_alone(**ONCE)
    for check in ("loss_resume_equal", "state_resume_equal"):
        assert ran.verdict.checks[check] is None
        assert why_not(ran.reports[0])[check] == "net1.weight was not restored"
    assert ran.verdict.checks["model_equal"] is True


@pytest.mark.cell
@pytest.mark.parametrize(
    ("chosen", "failed"),
    [
        ({"scheduler": "multi_step"}, {"extra_equal"}),
        ({"optimizer": "adam_tensor_lr"}, {"flags_equal"}),
        ({"model": "frozen", "optimizer": "adagrad"}, {"optim_equal"}),
    ],
)
def test_known_failure_lists_causes_alone(chosen: dict[str, str], failed: set[str]) -> None:
    ran = run_alone(**{**ONCE, **chosen})
    assert {one.check for one in ran.verdict.failed} == failed
    assert all(mismatch.by for one in ran.verdict.failed for mismatch in one.mismatches)
    assert ran.verdict.checks["loss_resume_equal"] is ran.verdict.checks["state_resume_equal"] is True


def test_losses_after_wrong_gradients_are_not_compared(cell: Cell) -> None:
    where = Place("resumed", 2)
    run = build(cell.config, cell.world, 0)
    known = Mismatch("net1.weight", Problem.far, by="mine")
    cell.record("gradient_close", Compared([known], {}, {}), where)
    assert not checks._layout_matters(cell, run, NO_EXCLUSIONS, Place("resumed", 1))
    assert checks._layout_matters(cell, run, NO_EXCLUSIONS, where)
    assert why_not(cell.report)["loss_resume_close"] == "the gradients of these steps are wrong (mine)"
