"""Which cells are subject to which known defect of torch, and what they are held against then."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dcpbench.core.mismatch import Mismatch, Problem
from dcpbench.scenarios import checks, fine_tune, known_defects, plain_runs
from dcpbench.scenarios.cell import Cell
from dcpbench.scenarios.checkpoint import FLAGS, Checkpoint, live_state
from dcpbench.verify.compare import compare
from dcpbench.verify.known_defects import AS_RESTORED, DIVIDED_TWICE, TRAINED_ALONE, UNFROZEN
from dcpbench.verify.layout import whole
from dcpbench.verify.snapshot import TensorLeaf, named_parameters
from dcpbench.verify.training import GradientBound, GradientPart, TwinGradient, compare_gradient
from dcpbench.verify.whole_tensors import Exchange, real_elements
from dcpbench.workloads.batches import batches_of
from dcpbench.workloads.build_run import build_plain, build_replica, build_twin
from dcpbench.workloads.training_run import TrainingRun
from support.alone import bare_cell, config, world

SMALL: dict[str, Any] = {"model": "short", "train_steps": 1, "resume_steps": 1, "saves": 1}
FOUND = [Mismatch("net1.weight", Problem.differs)]
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


def gradients(cell: Cell) -> tuple[known_defects.GradientDefects, TrainingRun]:
    """What defects make of the gradients of a cell, and the twin that these are compared with."""
    twin = build_twin(cell.config, cell.world, cell.config.seed)
    return known_defects.gradients_of(cell, twin), twin


def frozen_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in named_parameters(model).items() if name.startswith("pretrain.")}


def marked(
    defects: known_defects.GradientDefects, name: str, here: torch.Tensor, twin: TwinGradient
) -> tuple[Problem | None, str | None, str | None]:
    """What is found of a gradient, what it is explained by, and whether it still is if it is a little off."""
    found, by = [], []
    for gradient in (here, here * 1.001):
        part = GradientPart(TensorLeaf(gradient, whole(gradient), None, "param"), gradient, gradient)
        finding, _ = compare_gradient(name, 1, part, defects.expected(name, twin))
        found.append(finding.problem if finding else None)
        own = real_elements(here) * defects.ranks
        by.append(defects.mark(finding, 1, part, twin, own).by if finding else None)
    return found[0], *by


def summed_twin(*terms: torch.Tensor) -> TwinGradient:
    elements = [real_elements(one) for one in terms]
    bound = GradientBound(len(terms), torch.finfo(torch.float32).eps, noise=False)
    total, size = torch.stack(elements).sum(0), torch.stack(elements).abs().sum(0)
    return TwinGradient.of(bound, total, size)


ONE, OTHER = torch.tensor([1.0, 2.0]), torch.tensor([3.0, -5.0])


def test_replicas_that_train_alone_have_the_gradients_of_their_own_share(tmp_path: Path) -> None:
    cell = with_tp(on("hsdp", 2, tmp_path), {})
    defects, twin = gradients(cell)
    assert (defects.alone, defects.unfrozen, defects.divided) == (True, frozenset(), ())
    assert len(frozen_of(twin.model)) == 4
    assert not any(value.requires_grad for value in frozen_of(twin.model).values())
    replica = build_replica(cell.config, cell.world, cell.config.seed)
    data = batches_of(cell.config, cell.world.device)
    with twin.recording() as own:
        twin.backward(twin.next_batch(data))
    with replica.recording() as alone:
        replica.backward(replica.next_batch(data))
    name, gradient = next(iter(own.items()))
    assert torch.equal(alone[name], gradient / 2)
    both = summed_twin(gradient, torch.ones_like(gradient))
    assert marked(defects, name, alone[name], both) == (Problem.far, TRAINED_ALONE, None)
    assert marked(defects, name, (gradient + 1) / 2, both)[0] is None


def test_what_tensor_parallelism_shards_has_gradients_though_it_was_frozen(tmp_path: Path) -> None:
    defects, twin = gradients(with_tp(on("fsdp_tp", 4, tmp_path), {"net1": "colwise"}))
    assert (defects.alone, defects.divided) == (False, ())
    assert defects.unfrozen == {"pretrain.net1.weight", "pretrain.net1.bias"}
    for name, value in frozen_of(twin.model).items():
        assert value.requires_grad is (name in defects.unfrozen)
    expected = summed_twin(ONE, OTHER)
    name = "pretrain.net1.bias"
    assert marked(defects, name, (ONE + OTHER) / 2, expected) == (Problem.only_parallel, UNFROZEN, None)
    assert marked(defects, "net1.bias", (ONE + OTHER) / 2, expected)[0] is None
    assert marked(defects, "net1.bias", ONE, expected) == (Problem.far, None, None)


def test_experts_whose_gradients_are_summed_are_divided_twice(tmp_path: Path) -> None:
    given = config(**{**SMALL, "model": "experts"}, parallel="fsdp2_ep_sums")
    given.parallel.ep_plan = {"experts": ""}
    defects, _ = gradients(bare_cell(tmp_path, given, world(0, 4)))
    assert (defects.alone, defects.unfrozen, defects.divided) == (False, frozenset(), ("experts.",))
    expected, mean = summed_twin(ONE, OTHER), (ONE + OTHER) / 2
    assert marked(defects, "experts.0.weight", mean / 4, expected) == (Problem.far, DIVIDED_TWICE, None)
    assert marked(defects, "net1.weight", mean / 4, expected) == (Problem.far, None, None)


@pytest.mark.parametrize(("parallel", "size"), [("none", 2), ("fsdp", 2), ("hsdp2", 2), ("fsdp2_tp", 4)])
def test_other_cells_have_no_excuse(parallel: str, size: int, tmp_path: Path) -> None:
    defects, twin = gradients(with_tp(on(parallel, size, tmp_path), {"net1": "colwise"}))
    assert (defects.alone, defects.unfrozen, defects.divided) == (False, frozenset(), ())
    assert not any(value.requires_grad for value in frozen_of(twin.model).values())


def test_nothing_that_is_frozen_is_no_excuse_under_tensor_parallelism(tmp_path: Path) -> None:
    defects, _ = gradients(on("fsdp_tp", 4, tmp_path))
    assert (defects.alone, defects.unfrozen, defects.divided) == (False, frozenset(), ())


@pytest.mark.parametrize("frozen", [["0.weight"], ["1.bias"], ["0.weight", "0.bias", "1.weight", "1.bias"]])
def test_what_is_frozen_is_known_by_its_name(frozen: list[str]) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for name in frozen:
        named_parameters(model)[name].requires_grad_(False)
    assert known_defects._frozen(model) == frozen


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

    def compare(other: TrainingRun) -> list[Mismatch]:
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
    found = [Mismatch(name, Problem.differs) for name in names]

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
    honest = plain_runs.assembled

    def assembled(leaves: Any, exchange: Exchange) -> dict[str, torch.Tensor]:
        groups.append(exchange.group)
        return honest(leaves, Exchange(None))

    monkeypatch.setattr(plain_runs, "assembled", assembled)
    target = build_plain(cell.config, cell.world, 1)
    known_defects.resumed_by(cell, target, batches_of(cell.config, cell.world.device), 0)
    assert groups == [None if alone else group] * 2
