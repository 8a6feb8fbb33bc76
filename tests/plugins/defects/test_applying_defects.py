"""The cells that a known defect of torch applies to, and their expected results."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import pytest
import torch
import yaml
from torch import nn

from dcpbench.cell import explained
from dcpbench.cell.cell import Cell
from dcpbench.cell.explained import defects_at
from dcpbench.config.schema import conf_folder
from dcpbench.core.defects import Defect, Moment
from dcpbench.core.mismatch import Mismatch, Problem
from dcpbench.core.rank_report import Compared
from dcpbench.plugins.defects import _cells, _other_run, as_restored, divided_twice, trained_alone, unfrozen
from dcpbench.plugins.defects.as_restored import build_replica
from dcpbench.plugins.defects.plugin import plugin
from dcpbench.scenarios import fine_tune
from dcpbench.sweep import known_failures
from dcpbench.verify.compare import compare
from dcpbench.verify.layout import whole
from dcpbench.verify.losses import ResumedRule
from dcpbench.verify.snapshot import TensorLeaf, named_parameters
from dcpbench.verify.training import (
    GradientBound,
    GradientPart,
    TwinGradient,
    TwinGradients,
    compare_gradient,
)
from dcpbench.verify.whole_tensors import real_elements
from dcpbench.workloads.build_run import build_plain, build_plain_copy, build_twin
from dcpbench.workloads.run_state import FLAGS, live_state
from dcpbench.workloads.training_run import TrainingRun
from dcpbench.workloads.workload import Batches, batches_of
from support.alone import bare_cell, config, world

SMALL: dict[str, Any] = {"model": "short", "train_steps": 1, "resume_steps": 1, "saves": 1}
ANY = (
    *("buffers_of_some_rank", "empty_group", "integer_keys", "one_replica"),
    *("state_of_frozen", "tensor_lr_in_defaults", "touched_optimizer_state"),
)
ALWAYS = {
    "restored": {*ANY},
    "stored": {"buffers_of_some_rank", "one_replica"},
    "raised": {"state_of_no_gradient"},
    "resumed": {*ANY},
}
APPLY: dict[tuple[str, int], dict[str, set[str]]] = {
    ("none", 2): {"raised": {"refused_own_state"}},
    ("fsdp", 2): {},
    ("fsdp", 1): {},  # one shard, but one replica
    ("hsdp", 4): {},  # replicas, but of shards
    ("hsdp", 2): {
        "resumed": {"as_restored"},
        "twin": {"trained_alone"},
    },
    ("hsdp2", 2): {"raised": {"refused_own_state"}},  # FSDP2 averages
    ("fsdp_tp", 4): {
        "restored": {"sliced_by_shard"},
        "resumed": {"as_restored", "sliced_by_shard"},
        "twin": {"unfrozen"},
    },
    ("fsdp2_tp", 4): {"raised": {"refused_own_state"}},
}
"""The defects that apply to each step of a cell, by parallelism and number of ranks, in addition to those
that every model can have."""


def on(parallel: str, size: int, folder: Path) -> Cell:
    return bare_cell(folder, config(**SMALL, parallel=parallel, world_size=size), world(0, size))


def test_every_known_failure_is_recomputed(capsys: pytest.CaptureFixture[str]) -> None:
    path = conf_folder() / "known_failures.yaml"
    read = known_failures.read.__wrapped__(path)  # past the cache
    assert [one.id for one in read] == [one["id"] for one in yaml.safe_load(path.read_text())]
    assert "idle" not in capsys.readouterr().err


@pytest.mark.parametrize(("parallel", "size"), APPLY)
def test_defects_of_a_layout_apply_to_its_cells(parallel: str, size: int, tmp_path: Path) -> None:
    cell = on(parallel, size, tmp_path)
    for moment in get_args(Moment):
        expected = APPLY[parallel, size].get(moment, set()) | ALWAYS.get(moment, set())
        assert defects_at(cell, moment).keys() == expected, moment


@pytest.mark.parametrize(
    ("chosen", "restored", "resumed"),
    [
        ({"model": "batch_norm"}, set(), set()),
        ({"model": "local_experts"}, set(), {"as_restored"}),
        ({"model": "bf16"}, set(), {"as_restored"}),
        ({"optimizer": "adamw_empty_group"}, set(), set()),
        ({"optimizer": "adamw_empty_group", "state_dict": "full"}, {"as_list"}, {"as_list"}),
        ({"state_dict": "full"}, {"as_list"}, {"as_list"}),
        ({"scheduler": "multi_step"}, set(), set()),
        ({"load_into": "never_stepped"}, {"never_stepped"}, {"as_restored"}),
        ({"load_into": "no_scheduler"}, set(), {"as_restored"}),
        ({"save": "sync_no_collectives"}, {"own_chunks"}, {"as_restored"}),
        ({"save": "async_shared_writer"}, {"other_save"}, {"as_restored"}),
        ({"save": "async_shared_stager"}, {"other_save"}, {"as_restored"}),
        ({"save": "async_stager_kept"}, set(), set()),
    ],
)
def test_defects_of_options_apply_to_their_cells(
    chosen: dict[str, str], restored: set[str], resumed: set[str], tmp_path: Path
) -> None:
    cell = bare_cell(tmp_path, config(**{**SMALL, **chosen}))
    assert defects_at(cell, "restored").keys() == restored | ALWAYS["restored"]
    assert defects_at(cell, "resumed").keys() == resumed | ALWAYS["resumed"]


def with_tp(cell: Cell, plan: dict[str, str]) -> Cell:
    """Return the cell, with a model that has a frozen parameter, and is sharded as planned."""
    cell.config.parallel.tp_plan = plan
    return fine_tune._tuning(cell, 2)


def frozen_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value for name, value in named_parameters(model).items() if name.startswith("pretrain.")}


Expected = Callable[[str, TwinGradient, torch.Tensor], TwinGradient | None]
"""The gradient caused by a defect, given its name, the twin's gradient, and this rank's share of it."""


def by(defect: Any, cell: Cell) -> Expected:
    """Compute one gradient with a defect."""

    def expected(name: str, twin: TwinGradient, own: torch.Tensor) -> TwinGradient | None:
        assert defect.applies(cell.config)
        about = TwinGradients({name: twin}, {name: own}, lambda change: {})
        (state,) = defect.expected(cell, "twin", about)
        made: TwinGradient | None = state["gradient_close"].get(name)
        return made

    return expected


def explains(
    expected: Expected, name: str, here: torch.Tensor, twin: TwinGradient, ranks: int = 2
) -> tuple[bool, bool, bool]:
    """Return whether a gradient is wrong, whether a defect explains it, and whether it explains a slightly
    different one."""

    def wrong(gradient: torch.Tensor, twin: TwinGradient) -> bool:
        part = GradientPart(TensorLeaf(gradient, whole(gradient), None, "param"), gradient, gradient)
        return compare_gradient(name, 1, part, twin)[0] is not None

    made = expected(name, twin, real_elements(here) * ranks)
    explained = [made is not None and not wrong(one, made) for one in (here, here * 1.001)]
    return wrong(here, twin), explained[0], explained[1]


def summed_twin(*terms: torch.Tensor) -> TwinGradient:
    elements = [real_elements(one) for one in terms]
    bound = GradientBound(len(terms), torch.finfo(torch.float32).eps, noise=False)
    total, size = torch.stack(elements).sum(0), torch.stack(elements).abs().sum(0)
    return TwinGradient.of(bound, total, size)


ONE, OTHER = torch.tensor([1.0, 2.0]), torch.tensor([3.0, -5.0])


def gradients_of(run: TrainingRun, data: Batches) -> Mapping[str, torch.Tensor]:
    """Take a step, and return the gradients that it has used."""
    with run.recording() as uses:
        run.take_step(run.next_batch(data))
    return uses[0].gradients


def test_isolated_replicas_have_their_own_gradients(tmp_path: Path) -> None:
    cell = on("hsdp", 2, tmp_path)
    twin, replica = (make(cell.config, cell.world, cell.config.seed) for make in (build_twin, build_replica))
    data = batches_of(cell.config, cell.world.device)
    own, alone = (gradients_of(run, data) for run in (twin, replica))
    name, gradient = next(iter(own.items()))
    assert torch.equal(alone[name], gradient / 2)
    both = summed_twin(gradient, torch.ones_like(gradient))
    expected = by(trained_alone.defect, cell)
    assert explains(expected, name, alone[name], both) == (True, True, False)
    assert not explains(expected, name, (gradient + 1) / 2, both)[0]


def test_frozen_parameters_under_tp_have_gradients(tmp_path: Path) -> None:
    cell = with_tp(on("fsdp_tp", 4, tmp_path), {"net1": "colwise"})
    twin = build_twin(cell.config, cell.world, cell.config.seed)
    assert len(frozen_of(twin.model)) == 4
    assert not any(value.requires_grad for value in frozen_of(twin.model).values())

    def after(change: Callable[[nn.Module], None]) -> dict[str, TwinGradient]:
        change(twin.model)
        gradients = gradients_of(twin, batches_of(cell.config, cell.world.device)).items()
        return {name: summed_twin(one) for name, one in gradients if name in frozen_of(twin.model)}

    (state,) = unfrozen.defect.expected(cell, "twin", TwinGradients({}, {}, after))
    assert state["gradient_close"].keys() == {"pretrain.net1.weight", "pretrain.net1.bias"}


def test_summed_gradients_of_experts_are_divided_twice(tmp_path: Path) -> None:
    given = config(**{**SMALL, "model": "experts"}, parallel="fsdp2_ep_sums", world_size=4)
    given.parallel.ep_plan = {"experts": ""}
    cell = bare_cell(tmp_path, given, world(0, 4))
    assert defects_at(cell, "twin").keys() == {"divided_twice"}
    twin, mean = summed_twin(ONE, OTHER), (ONE + OTHER) / 2
    expected = by(divided_twice.defect, cell)
    assert explains(expected, "experts.0.weight", mean / 4, twin) == (True, True, False)
    assert explains(expected, "net1.weight", mean / 4, twin) == (True, False, False)


@pytest.mark.parametrize(
    ("plan", "trained"),
    [
        (["first"], ["first"]),
        (["last"], ["last"]),
        (["inner.*"], ["inner.0", "inner.1"]),
        (["first", "inner.1", "last"], ["first", "inner.1", "last"]),
        ([""], ["first", "inner.0", "inner.1", "last"]),
        ([], []),
    ],
)
def test_parameters_in_the_tp_plan_are_unfrozen(plan: list[str], trained: list[str]) -> None:
    inner = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model = nn.ModuleDict({"first": nn.Linear(1, 1), "inner": inner, "last": nn.Linear(1, 1)})
    model.requires_grad_(False)
    _cells.unfreeze(model, dict.fromkeys(plan, "colwise"))
    seen = [name for name, value in model.named_parameters() if value.requires_grad]
    assert seen == [f"{name}.{kind}" for name in trained for kind in ("weight", "bias")]


def going_on(cell: Cell, target: TrainingRun, until: int) -> Callable[[], Any]:
    """Copy a target. Return a function that trains the copy like a run with a known defect, and returns its
    state."""
    data = batches_of(cell.config, cell.world.device)
    restored = build_plain_copy(cell.config, cell.world, target)
    return lambda: as_restored.trained_on(cell, mock.Mock(restored=restored, data=data, until=until))


@pytest.mark.parametrize(
    ("parallel", "size", "make"), [("fsdp_tp", 4, build_plain), ("hsdp", 2, build_replica)]
)
@pytest.mark.parametrize("model", ["tied", "buffered", "dropout"])
def test_restored_state_continues_like_a_plain_run(
    parallel: str, size: int, make: Any, model: str, tmp_path: Path
) -> None:
    """The states are equal bit by bit if the target is plain, including hyperparameters and generators."""
    given = config(
        **{**SMALL, "model": model, "optimizer": "adamw_groups"}, parallel=parallel, world_size=size
    )
    cell = bare_cell(tmp_path, given, world(0, size))
    data = batches_of(cell.config, cell.world.device)
    target = make(cell.config, cell.world, 11)
    target.train(data, 2)
    for entries in target.optimizer.state.values():
        entries["exp_avg"].mul_(3)
    target.optimizer.param_groups[1]["lr"] *= 2
    target.noise.like(torch.zeros(3))
    before = list(target.train_state.losses)
    state = going_on(cell, target, 4)
    assert target.train_state.losses == before, "the target is yet to go on"
    target.train(data, 4)
    other = state()
    for check, leaves in live_state(target).items():
        if check != FLAGS:
            mine = {name: leaf for name, leaf in leaves.items() if not name.startswith("tensor_object.")}
            theirs = other[check]
            assert compare(mine, {name: theirs[name] for name in mine}) == []


def test_unfrozen_parameters_continue_training(tmp_path: Path) -> None:
    cell = with_tp(on("fsdp_tp", 4, tmp_path), {"net1": "colwise"})
    target = build_plain(cell.config, cell.world, 11)
    other = going_on(cell, target, 1)()["model_equal"]
    theirs = frozen_of(target.model)
    assert len(theirs) == 4
    for name, value in theirs.items():
        assert torch.equal(other[name].local, value) is not name.startswith("pretrain.net1.")


def test_close_tensors_and_losses_are_explained() -> None:
    given, here = config(**SMALL), world()
    data = batches_of(given, here.device)
    run, other = (build_plain(given, here, given.seed) for _ in range(2))
    for each in (run, other):
        each.train(data, 2)
    names = {
        "net1.weight",
        "net2.bias",
        "param_groups.0.lr",
        "train_state.losses",
        "train_state.current_loss",
        "tensor_object.data",
    }

    def left(recorded: list[float]) -> set[str]:
        return names - _other_run.same_state(recorded, live_state(run), live_state(other), 1e-4)

    recorded = list(run.train_state.losses)
    losses = {"train_state.losses", "train_state.current_loss"}
    assert left(recorded) == set()
    assert left([recorded[0] + 1, recorded[1]]) == losses
    run.optimizer.param_groups[0]["lr"] *= 2
    assert left(recorded) == {"param_groups.0.lr"}
    with torch.no_grad():
        named_parameters(run.model)["net2.bias"].add_(0.01)
    assert left(recorded) == {"net2.bias", "param_groups.0.lr"}
    run.train_state.current_loss += 1
    assert left(recorded) == {"net2.bias", "param_groups.0.lr", *losses}
    run.tensor_object.data.add_(1)
    assert left(recorded) == names - {"net1.weight"}


def test_losses_of_another_restored_run_are_separate() -> None:
    """The other run has taken one more step than the run that it is compared with."""
    given, here = config(**SMALL), world()
    run = build_plain(given, here, given.seed)
    run.train(batches_of(given, here.device), 3)
    losses = list(run.train_state.losses)
    rule = ResumedRule(losses[1:], 2, None)
    same = _other_run.same_losses(losses, live_state(run), rule, 1e-4)
    assert same == {"loss of step 2", "loss of step 3", "loss of step 4"}
    far = _other_run.same_losses([losses[0] * 2, *losses[1:]], live_state(run), rule, 1e-4)
    assert far == {"loss of step 3", "loss of step 4"}


def test_defects_are_computed_only_after_a_mismatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def expected(cell: Cell, moment: str, reference: Any) -> list[dict[str, Any]]:
        asked.append(moment)
        return [{"model_equal": {"w"}}]

    defect = Defect(("restored",), lambda config: True, expected)
    monkeypatch.setattr(explained, "_defects", lambda: {"mine": defect})
    cell = bare_cell(tmp_path)
    wrong = [Mismatch(name, Problem.differs) for name in ("w", "v")]

    def compared(found: list[Mismatch]) -> list[str | None]:
        one = {"model_equal": Compared(found, {}, {})}
        done = explained.explained(cell, "restored", one, lambda: None, lambda check, state: state[check])
        return [finding.by for finding in done["model_equal"].found]

    assert (compared([]), asked) == ([], [])
    assert (compared(wrong), asked) == (["mine", None], ["restored"])


def test_every_defect_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs/plugins/defects.md").read_text()
    assert {name for name in plugin.defects if f"\n| `{name}` | " not in page} == set()
