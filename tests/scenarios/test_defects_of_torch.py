"""Which cells are subject to which known defect of torch, and what they are held against then."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dcpbench.records.findings import Finding, Problem
from dcpbench.scenarios import checks, fine_tune, known_defects
from dcpbench.scenarios.cell import Cell
from dcpbench.scenarios.checkpoint import FLAGS, Checkpoint, live_state
from dcpbench.scenarios.steps import Oracle
from dcpbench.verify.compare import compare
from dcpbench.verify.known_defects import AS_RESTORED, TRAINED_ALONE, UNFROZEN
from dcpbench.verify.snapshot import named_parameters
from dcpbench.workloads.batches import batches_of
from dcpbench.workloads.build_run import build_plain, build_replica
from dcpbench.workloads.training_run import TrainingRun
from support.alone import bare_cell, config, world

SMALL: dict[str, Any] = {"model": "short", "train_steps": 1, "resume_steps": 1, "saves": 1}
FOUND = [Finding("net1.weight", Problem.differs)]
CHECKS = ("model_equal", "optim_equal", "extra_equal")
ONE_SHARD = dict.fromkeys(("model_equal", "optim_equal"), "replica")
MARKED: dict[tuple[str, int], dict[str, str]] = {
    ("none", 2): {},
    ("fsdp", 2): {},
    ("fsdp", 1): {},  # one shard, but one replica
    ("hsdp", 4): {},  # replicas, but of shards
    ("hsdp", 2): ONE_SHARD,
    ("hsdp2", 2): {},  # FSDP2 averages
    ("fsdp_tp", 4): {"optim_equal": "sliced"},
    ("fsdp2_tp", 4): {},
}
"""By parallelism and ranks: the defect that each check is subject to."""


def on(parallel: str, size: int, folder: Path) -> Cell:
    return bare_cell(folder, config(**SMALL, parallel=parallel), world(0, size))


@pytest.mark.parametrize(("parallel", "size"), MARKED)
@pytest.mark.parametrize("check", CHECKS)
def test_what_differs_after_a_load_is_marked_where_a_defect_makes_it(
    parallel: str, size: int, check: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, actual = {"net1.weight": 1}, {"net1.weight": 2}
    checkpoint = Checkpoint(1, "", None, dict.fromkeys(CHECKS, saved))  # type: ignore[arg-type]

    def sliced(*given: Any) -> str:
        assert given[:3] == (FOUND, saved, actual)
        assert given[4] == 2
        return "sliced"

    def replica(*given: Any) -> str:
        assert given == (FOUND, saved, actual, None)
        return "replica"

    monkeypatch.setattr(known_defects, "mark_sliced", sliced)
    monkeypatch.setattr(known_defects, "mark_replica", replica)
    marked = known_defects.mark_restored(on(parallel, size, tmp_path), check, FOUND, checkpoint, actual)
    assert marked == MARKED[parallel, size].get(check, FOUND)


def with_tp(cell: Cell, plan: dict[str, str]) -> Cell:
    """The cell, with a model in which one is frozen, all sharded that fits the plan."""
    cell.config.parallel.tp_plan = plan
    return fine_tune._tuning(cell, 2)


def beside(cell: Cell) -> tuple[str | None, TrainingRun | None, Oracle]:
    """By what a difference is marked that is not there beside a run with the defect; that run; and what the
    cell has trained, whose frozen part is of another seed."""
    trained = build_plain(cell.config, cell.world, 11)
    oracle = Oracle(cell, trained, batches_of(cell.config, cell.world.device))
    trained.train(oracle.data, 2)
    with torch.no_grad():  # what was pre-trained is not what a seed gives
        for value in frozen_of(oracle.twin.model).values():
            value.mul_(2)
    seen: list[TrainingRun] = []

    def compare(other: TrainingRun) -> list[Finding]:
        seen.append(other)
        return []

    (marked,) = known_defects.marked_by(cell, oracle)(FOUND, compare)
    return marked.by, seen[0] if seen else None, oracle


def frozen_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in named_parameters(model).items() if name.startswith("pretrain.")}


def test_replicas_that_train_alone_are_beside_one_that_does(tmp_path: Path) -> None:
    cell = with_tp(on("hsdp", 2, tmp_path), {})
    by, other, oracle = beside(cell)
    assert by == TRAINED_ALONE
    assert other is not None
    assert other.world is cell.world, "it sees its own share of the batch"
    assert other.train_state.step == 2
    theirs = frozen_of(oracle.trained.model)
    assert len(theirs) == 4
    for name, value in frozen_of(other.model).items():
        assert torch.equal(value, theirs[name])
        assert not value.requires_grad


def test_what_tensor_parallelism_shards_is_trained_though_it_was_frozen(tmp_path: Path) -> None:
    cell = with_tp(on("fsdp_tp", 4, tmp_path), {"net1": "colwise"})
    by, other, oracle = beside(cell)
    assert by == UNFROZEN
    assert other is not None
    assert other.world.size == 1, "it is a plain one"
    assert other.train_state.step == 2
    twin = frozen_of(oracle.twin.model)
    for name, value in frozen_of(other.model).items():
        sharded = name.startswith("pretrain.net1.")
        assert value.requires_grad is sharded
        assert torch.equal(value, twin[name]) is not sharded, "it began as the twin's, and was trained"


@pytest.mark.parametrize(("parallel", "size"), [("none", 2), ("fsdp", 2), ("hsdp2", 2), ("fsdp2_tp", 4)])
def test_other_cells_have_no_excuse(parallel: str, size: int, tmp_path: Path) -> None:
    assert beside(with_tp(on(parallel, size, tmp_path), {"net1": "colwise"}))[:2] == (None, None)


def test_nothing_that_is_frozen_is_no_excuse_under_tensor_parallelism(tmp_path: Path) -> None:
    assert beside(on("fsdp_tp", 4, tmp_path))[:2] == (None, None)


@pytest.mark.parametrize("frozen", [["0.weight"], ["1.bias"], ["0.weight", "0.bias", "1.weight", "1.bias"]])
def test_what_is_frozen_is_copied_and_no_more(frozen: list[str]) -> None:
    source, model = (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))
    for name in frozen:
        named_parameters(source)[name].requires_grad_(False)
    assert known_defects._frozen(source) == frozen
    known_defects._copy(source, model, frozen)
    theirs, mine = named_parameters(source), named_parameters(model)
    assert [name for name in mine if torch.equal(mine[name], theirs[name])] == frozen


@pytest.mark.parametrize(
    ("plan", "unfrozen"),
    [
        (["first"], ["first"]),
        (["last"], ["last"]),
        (["inner.*"], ["inner.0", "inner.1"]),
        (["first", "inner.1", "last"], ["first", "inner.1", "last"]),
        ([""], ["first", "inner.0", "inner.1", "last"]),
        ([], []),
    ],
)
def test_what_fits_the_plan_is_unfrozen(plan: list[str], unfrozen: list[str]) -> None:
    inner = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model = nn.ModuleDict({"first": nn.Linear(1, 1), "inner": inner, "last": nn.Linear(1, 1)})
    model.requires_grad_(False)
    known_defects._unfreeze(model, dict.fromkeys(plan, "colwise"))
    seen = [name for name, value in model.named_parameters() if value.requires_grad]
    assert seen == [f"{name}.{kind}" for name in unfrozen for kind in ("weight", "bias")]


def resumed(cell: Cell, target: TrainingRun, until: int) -> tuple[str | None, TrainingRun | None]:
    """By what a difference is marked that a run which goes on from the same does not have; that run."""
    seen: list[TrainingRun] = []

    def compare(other: TrainingRun) -> list[Finding]:
        seen.append(other)
        return []

    data = batches_of(cell.config, cell.world.device)
    (marked,) = known_defects.resumed_by(cell, target, data, until)(FOUND, compare)
    return marked.by, seen[0] if seen else None


@pytest.mark.parametrize(
    ("parallel", "size", "make"), [("fsdp_tp", 4, build_plain), ("hsdp", 2, build_replica)]
)
@pytest.mark.parametrize("model", ["tied", "buffered", "dropout"])
def test_what_was_restored_goes_on_as_a_plain_run_does(
    parallel: str, size: int, make: Any, model: str, tmp_path: Path
) -> None:
    """To the bit, where the target is a plain one itself; with its hyperparameters and generators."""
    given = config(**{**SMALL, "model": model, "optimizer": "adamw_groups"}, parallel=parallel)
    cell = bare_cell(tmp_path, given, world(0, size))
    data = batches_of(cell.config, cell.world.device)
    target = make(cell.config, cell.world, 11)
    target.train(data, 2)
    for entries in target.optimizer.state.values():
        entries["exp_avg"].mul_(3)
    target.optimizer.param_groups[1]["lr"] *= 2
    target.noise.like(torch.zeros(3))
    before = list(target.train_state.losses)
    by, other = resumed(cell, target, 4)
    assert by == AS_RESTORED
    assert target.train_state.losses == before, "the target is yet to go on"
    target.train(data, 4)
    assert other is not None
    for check, leaves in live_state(target).items():
        if check != FLAGS:
            mine = {name: leaf for name, leaf in leaves.items() if not name.startswith("tensor_object.")}
            theirs = live_state(other)[check]
            assert compare(mine, {name: theirs[name] for name in mine}) == []


@pytest.mark.parametrize(("parallel", "size"), [one for one in MARKED if not MARKED[one]])
def test_what_is_subject_to_no_defect_is_held_against_nothing_else(
    parallel: str, size: int, tmp_path: Path
) -> None:
    cell = on(parallel, size, tmp_path)
    assert resumed(cell, build_plain(cell.config, cell.world, 1), 1) == (None, None)


def test_what_was_unfrozen_goes_on_being_trained(tmp_path: Path) -> None:
    cell = with_tp(on("fsdp_tp", 4, tmp_path), {"net1": "colwise"})
    target = build_plain(cell.config, cell.world, 11)
    _, other = resumed(cell, target, 1)
    assert other is not None
    theirs = frozen_of(target.model)
    for name, value in frozen_of(other.model).items():
        assert torch.equal(value, theirs[name]) is not name.startswith("pretrain.net1.")


def test_of_a_resumed_state_close_tensors_and_recorded_losses_are_explained() -> None:
    given, here = config(**SMALL), world()
    data = batches_of(given, here.device)
    run, other = (build_plain(given, here, given.seed) for _ in range(2))
    for each in (run, other):
        each.train(data, 2)
    names = (
        "net1.weight",
        "net2.bias",
        "param_groups.0.lr",
        "train_state.losses",
        "train_state.current_loss",
        "tensor_object.data",
    )
    found = [Finding(name, Problem.differs) for name in names]

    def left(recorded: list[float]) -> list[str]:
        marked = checks._explain(lambda found, beside: beside(other), run, recorded, 1e-4, iter(found))
        return [one.name for one in marked]

    recorded = list(run.train_state.losses)
    assert left(recorded) == ["param_groups.0.lr"]
    assert left([recorded[0] + 1, recorded[1]]) == list(names[2:5])
    with torch.no_grad():
        named_parameters(run.model)["net2.bias"].add_(0.01)
    assert left(recorded) == ["net2.bias", "param_groups.0.lr"]
    run.train_state.current_loss += 1
    assert left(recorded) == ["net2.bias", *names[2:5]]
    run.tensor_object.data.add_(1)
    assert left(recorded) == ["net2.bias", *names[2:]]


@pytest.mark.parametrize(("parallel", "size", "alone"), [("fsdp_tp", 4, False), ("hsdp", 2, True)])
def test_parts_are_those_of_all_ranks_but_where_each_has_a_model_of_its_own(
    parallel: str, size: int, alone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group: Any = object()
    cell = bare_cell(tmp_path, config(**SMALL, parallel=parallel), world(0, size, group))
    groups: list[Any] = []
    honest = known_defects.assembled

    def assembled(leaves: Any, given: Any) -> dict[str, torch.Tensor]:
        groups.append(given)
        return honest(leaves, None)

    monkeypatch.setattr(known_defects, "assembled", assembled)
    target = build_plain(cell.config, cell.world, 1)
    known_defects.resumed_by(cell, target, batches_of(cell.config, cell.world.device), 0)
    assert groups == [None if alone else group] * 2
