"""Comparison of a run with its twin step by step, on one rank in this process."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._functorch import config as functorch_config

from dcpbench.compare import across_layouts
from dcpbench.config.groups import WorkloadConfig
from dcpbench.core.mismatch import SECOND_DERIVATIVES, Problem
from dcpbench.core.rank_report import Compared
from dcpbench.runs.build_run import build, build_twin
from dcpbench.runs.own_run import OwnRun
from dcpbench.runs.run import GradientUse
from dcpbench.state.layout import Extent
from dcpbench.state.snapshot import Leaves
from dcpbench.twin import lockstep as lockstep_module
from dcpbench.twin.lockstep import TRAINING_CHECKS, Lockstep
from dcpbench.twin.twin import StepTolerance, Twin, _replace_gradient, copy_run, tolerance_of_steps
from dcpbench.workloads.batch import Batch, share_of
from dcpbench.workloads.workload import batches_of
from dcpbench.workloads.world import World
from support.alone import ONCE, config, world
from support.gloo_ranks import WORLD_SIZE, Ask
from support.ordinary_workloads import net


def twin_of(inexact: StepTolerance = StepTolerance(), accumulate: int = 1) -> Twin:  # noqa: B008 - frozen
    """Build the twin of a run."""

    def build() -> OwnRun:
        run = build_twin(config(**ONCE), world(), 0)
        run.accumulate = accumulate
        return run

    return Twin(build(), {torch.float32}, build, inexact)


def on_ranks() -> World:
    group: Any = dist.group.WORLD
    return world(dist.get_rank(), dist.get_world_size(), group)


def lockstep(steps: int, **values: Any) -> Lockstep:
    """Train a run and compare each step with its twin, if it can follow."""
    given, here = config(**{**ONCE, **values}), world()
    run, twin, data = build(given, here, 0), build_twin(given, here, 0), batches_of(given, here.device)
    compared = Lockstep(given, here, run, twin, None)
    for _ in range(steps):
        uses = compared.train(data)
        if compared.follows:
            compared.follow(data, uses)
    return compared


def results_of(compared: Lockstep, unrestored: Sequence[float] = (5.0,)) -> dict[str, Compared]:
    return compared.results(unrestored)


@pytest.mark.parametrize("zero", [False, True])
def test_gradients_of_zeros_prove_nothing(zero: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = OwnRun.loss_of
    if zero:
        monkeypatch.setattr(OwnRun, "loss_of", lambda run, samples: 0 * honest(run, samples) + 1)
    gradients = results_of(lockstep(2))["gradient_close"]
    assert gradients.found == []
    assert {*gradients.detected.values()} == {not zero}


def test_autograd_is_watched_in_the_twin_of_fully_shard_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, data = lockstep(1), batches_of(config(**ONCE), world().device)
    honest, loss_of = torch.autograd._engine_run_backward, OwnRun.loss_of
    is_honest: dict[OwnRun, list[bool]] = {compared._run: [], compared._twin.run: []}

    def loss(run: OwnRun, samples: Batch) -> torch.Tensor:
        is_honest[run].append(torch.autograd._engine_run_backward is honest)
        return loss_of(run, samples)

    monkeypatch.setattr(OwnRun, "loss_of", loss)
    for sharded in (False, True):
        monkeypatch.setattr(compared, "_is_fully_sharded", sharded)
        compared.follow(data, compared.train(data))
    assert [*is_honest.values()] == [[True, True], [True, False]]
    assert torch.autograd._engine_run_backward is honest


@pytest.mark.parametrize(
    ("differentiates", "wrong", "is_late"), [(2, 2, True), (2, 3, True), (2, 4, False), (3, 2, False)]
)
def test_wrong_gradient_beside_second_derivatives_is_theirs(
    differentiates: int, wrong: int, is_late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under `fully_shard`, in a step whose gradients have gradients and in the next one."""
    compared, data, honest = lockstep(1), batches_of(config(**ONCE), world().device), OwnRun.loss_of

    def loss_of(run: OwnRun, samples: Batch) -> torch.Tensor:
        loss, step = honest(run, samples), run.train_state.step + 1
        if step == differentiates:
            torch.autograd.grad(loss, [*run.model.parameters()], create_graph=True)
        return loss + (loss - loss.detach()) * (step == wrong and run is compared._run)

    monkeypatch.setattr(OwnRun, "loss_of", loss_of)
    monkeypatch.setattr(compared, "_is_fully_sharded", True)
    for _ in range(3):
        compared.follow(data, compared.train(data))
    causes = {mismatch.by for mismatch in results_of(compared)["gradient_close"].found}
    assert causes == {SECOND_DERIVATIVES if is_late else None}
    assert bool(compared.why_not_resumed) == is_late


def norms(parallel: str, **values: Any) -> tuple[float, float]:
    """Return the norm of the gradients of this rank's run, and that of one model that has the whole batch."""
    given, here = config(parallel=parallel, **values), on_ranks()
    given.parallel = given.parallel.planned_by(given.model)
    run, data = build(given, here, 0), batches_of(given, here.device)
    run.backward(run.next_batch(data))
    plain = build_twin(given, here, 0)
    plain.loss_of(plain.next_batch(data)).backward()
    gradients = [value.grad for value in plain.model.parameters() if value.grad is not None]
    return run._norm_of_gradients(), float(torch.nn.utils.get_total_norm(gradients))


@pytest.mark.parametrize(
    ("parallel", "values"),
    [
        ("ddp", {}),
        ("fsdp", {}),
        ("fsdp2", {}),
        ("hsdp", {}),
        ("hsdp2", {}),
        ("fsdp_tp", {"model": "even"}),
        ("hsdp2_tp", {"model": "even"}),
        ("tp", {"model": "even"}),
        ("fsdp2_ep", {"model": "experts"}),
    ],
)
def test_norm_of_gradients_is_that_of_all_ranks(ask: Ask, parallel: str, values: dict[str, Any]) -> None:
    for norm, expected in ask(partial(norms, **values), parallel):
        assert norm == pytest.approx(expected, rel=1e-5)


def test_magnitudes_are_summed_over_accumulated_parts() -> None:
    """The parts of a batch can cancel each other, and their rounding cannot."""
    given, here = config(**ONCE), world()
    data = batches_of(given, here.device).at(1)

    def passed(accumulate: int, batch: Batch) -> GradientUse:
        twin = twin_of(accumulate=accumulate)
        twin.begin(batch, None)
        return twin.take_step(()).uses[0]

    first, second = (passed(1, share_of(data, number, 2)).gradients for number in range(2))
    made = passed(2, data)
    for name, size in made.sizes.items():
        torch.testing.assert_close(made.gradients[name], (first[name] + second[name]) / 2)
        torch.testing.assert_close(size, (first[name].abs() + second[name].abs()) / 2)
    assert any(bool((size > made.gradients[name].abs() * 1.01).any()) for name, size in made.sizes.items())


def test_replicas_that_differ_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second rank has another bit in the last bias."""

    def gathered(mine: Any, group: object) -> list[Any]:
        if isinstance(mine[last], Extent):
            return [mine, mine]
        changed = across_layouts._contents(across_layouts.perturbed_leaves(leaves))
        theirs = {name: replace(one, changed=changed.get(name, b"")) for name, one in mine.items()}
        return [mine, {**theirs, last: replace(mine[last], content=changed[last])}]

    compared, last = lockstep(1), ("net2.bias",)
    leaves = {(name,): leaf for name, leaf in compared._leaves.items()}
    monkeypatch.setattr(across_layouts, "gathered_values", gathered)
    replicas = results_of(compared)["replicas_equal"]
    assert [one.name for one in replicas.found] == ["net2.bias"]
    assert replicas.detected["net1.weight"]


def test_tensor_that_only_another_rank_has_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only stages of a pipeline have different tensors."""
    name, trained_state, gathered = ("net2.bias",), OwnRun.trained_state, World.gathered

    def without(run: OwnRun, parts: Any) -> Leaves:
        leaves = dict(trained_state(run, parts))
        if parts is own:
            del leaves[name]
        return leaves

    def with_another(here: World, mine: Any) -> list[Any]:
        return [mine, mine | {name}] if isinstance(mine, set) else gathered(here, mine)

    compared = lockstep(1)
    own = compared._own_parts
    monkeypatch.setattr(OwnRun, "trained_state", without)
    monkeypatch.setattr(World, "gathered", with_another)
    (found,) = compared._compare_state(1, {}).found
    assert (found.name, found.problem) == ("net2.bias", Problem.only_twin)


def test_steps_on_another_device_are_rounded() -> None:
    given, here = config(**ONCE), world()
    run, twin = build(given, here, 0), build_twin(given, here, 0)
    assert tolerance_of_steps(run, twin, split=False) == StepTolerance()
    run.model.to(torch.device("meta"))
    names = frozenset(f"net{number}.{kind}" for number in (1, 2) for kind in ("weight", "bias"))
    assert tolerance_of_steps(run, twin, split=False) == StepTolerance(rounded=names, other_kernels=True)


def hooks_of(run: OwnRun) -> list[object]:
    """Return all hooks on a run's modules, parameters and optimizer."""
    owners = [*run.model.modules(), *run.model.parameters(), run.optimizer]
    held = [getattr(one, name, None) for one in owners for name in dir(one) if name.endswith("_hooks")]
    return [hook for hooks in held if isinstance(hooks, dict) for hook in hooks.values()]


def test_what_raises_in_a_comparison_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hooks that note gradients and dtypes are removed."""
    given, here = config(**ONCE), world()
    run, data = build(given, here, 0), batches_of(given, here.device)
    twin = twin_of(accumulate=2)
    twin.begin(data.at(1), None)
    before = [hooks_of(one) for one in (run, twin.run)]

    def fail(*_: object) -> torch.Tensor:
        raise RuntimeError("of the user")

    monkeypatch.setattr(OwnRun, "loss_of", fail)
    with pytest.raises(RuntimeError, match="of the user"):
        run.train(data, 1)
    with pytest.raises(RuntimeError, match="of the user"):
        twin.take_step(())
    assert [hooks_of(one) for one in (run, twin.run)] == before


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("takes_steps", [False, True])
def test_copies_have_and_change_nothing_of_the_twin(takes_steps: bool, deterministic: bool) -> None:
    """Jittered steps begin with all values, and leave none to the next step."""
    target = WorkloadConfig("twin.remembering.remembers", options={"takes_steps": takes_steps})
    compared = lockstep(3, workload=target, deterministic=deterministic)
    results = results_of(compared)
    assert {check: one.found for check, one in results.items()} == {key: [] for key in results}
    assert compared.not_applied.keys() == {"replicas_equal"}
    uses = (" before the optimizer, use 1", " before the optimizer, use 2") if takes_steps else ("",)
    names = {f"net.{name}{use}" for name in net().state_dict() for use in uses}
    assert results["gradient_close"].detected == dict.fromkeys(names, True)


def test_copied_run_keeps_its_modules() -> None:
    """Hooks and functions refer to the modules that they were made for."""
    run, other = (build_twin(config(**ONCE), world(), 0) for _ in range(2))
    before = [*other.model.modules()]
    copy_run(run, other, steps=False)
    assert len(before) > 2
    assert [*map(id, other.model.modules())] == [*map(id, before)]


@pytest.mark.parametrize("gradient", [None, torch.zeros(2).to_sparse(), torch.zeros(2)])
def test_twin_continues_with_the_ranks_gradient(gradient: torch.Tensor | None) -> None:
    """A dense gradient stays the same tensor, which torch's clipping already has."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = gradient
    _replace_gradient(parameter, "weight", GradientUse("", {}, full={"weight": torch.ones(2)}))
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [1.0, 1.0]
    assert (parameter.grad is gradient) == (gradient is not None and not gradient.is_sparse)


def test_statistic_of_few_channels_has_a_tolerance() -> None:
    """Its jittered inputs would round to the same mean if some went up and others down."""
    given = config(**ONCE, workload=WorkloadConfig("support.set_once.norm", options={"drop": 0.0}))
    build_one = partial(build_twin, given, world(), 0)
    twin = Twin(build_one(), {torch.float32}, build_one, StepTolerance())
    twin.begin(batches_of(given, torch.device("cpu")).at(2), None)
    uses = twin.take_step(()).uses
    tolerances = twin.tolerances(uses, twin.jittered_steps(uses, draws=False))
    mean = twin.run.model.get_buffer("raw.running_mean")
    assert (tolerances["raw.running_mean",] > 10 * torch.finfo(mean.dtype).eps * mean).all()
    assert (tolerances["raw.running_mean",] < 1e-3 * mean).all()


def received_buffers() -> list[float]:
    """Return the buffers of a twin after a step that begins with those of the first rank."""
    here = on_ranks()
    twin = Twin(build_twin(config(**ONCE), world(), 0), (), None, StepTolerance())
    for name in ("first", "last"):
        twin.run.model.register_buffer(name, torch.tensor(float(here.rank + 1)))
    twin.begin(batches_of(config(**ONCE), here.device).at(1), here.group)
    twin.take_step(())
    return [float(buffer) for buffer in twin.run.model.buffers()]


def test_twin_receives_each_buffer_of_the_first_rank(ask: Ask) -> None:
    assert ask(received_buffers) == [[1.0, 1.0]] * WORLD_SIZE


@pytest.mark.parametrize("deterministic", [True, False])
def test_model_that_cannot_be_copied_has_no_twin_where_bounds_are_measured(deterministic: bool) -> None:
    target = WorkloadConfig("twin.remembering.not_copied")
    compared = lockstep(2, workload=target, deterministic=deterministic)
    results = results_of(compared)
    of_twin = {"gradient_close", "step_equal", "batch_loss_close"}
    made = {check for check in TRAINING_CHECKS if results.get(check)}
    assert made == (of_twin if deterministic else set())
    for check in made:
        assert (results[check].found, all(results[check].detected.values())) == ([], True)
    why = "the model cannot be copied: RuntimeError: Only Tensors created explicitly by the user"
    for check in of_twin - made:
        assert compared.not_applied[check].startswith(why)


@pytest.mark.parametrize(("steps", "unrestored"), [(1, [5.0]), (2, []), (1, [])])
def test_control_of_a_loss_is_that_of_another_step_or_run(steps: int, unrestored: list[float]) -> None:
    losses = results_of(lockstep(steps), unrestored)["batch_loss_close"]
    names = [f"loss of step {step}" for step in range(1, steps + 1)]
    assert (losses.found, losses.detected) == ([], dict.fromkeys(names, steps > 1 or bool(unrestored)))


def test_redrawn_dropout_in_the_backward_pass_is_not_compared() -> None:
    why = lockstep_module.why_drawn(compiled=True)
    with functorch_config.patch(activation_memory_budget=0.5):
        more = lockstep_module.why_drawn(compiled=True).removeprefix(why)
    assert more.startswith("; with activation_memory_budget=0.5 the backward pass can draw others as well")
    assert lockstep_module.why_drawn(compiled=False) == why
