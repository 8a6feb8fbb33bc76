"""What scenarios verify, each check with its negative control: the power to fail, shown in the cell."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from dcpbench.records.checks import CHECKS
from dcpbench.records.findings import Finding, Problem
from dcpbench.scenarios import steps
from dcpbench.scenarios.cell import Cell
from dcpbench.scenarios.checkpoint import Checkpoint, State, live_state
from dcpbench.scenarios.oracles import Losses, Oracle, other_seed
from dcpbench.verify.compare import compare
from dcpbench.verify.compare_layouts import compare_across, differing
from dcpbench.verify.perturb import controllable, made_different
from dcpbench.verify.snapshot import Idle, Leaves, TensorLeaf, snapshot_model
from dcpbench.verify.tolerances import (
    TOLERANCES,
    compare_close,
    loss_name,
    losses_close,
    losses_equal,
)
from dcpbench.workloads import training_run
from dcpbench.workloads.batches import Batches
from dcpbench.workloads.training_run import TrainingRun

_UNRESTORED = 5
"""How many models from other seeds a loss is held against before it is said that nothing tells them apart."""


def breach(name: str, text: str) -> Finding:
    """A breach of a scenario's contract, in its own words."""
    return Finding(name, Problem.contract, facts={"text": text})


def verify_twin(cell: Cell, oracle: Oracle) -> None:
    """Train the twin on the same batches; the parallel run must have stayed close to it."""
    trained, twin = oracle.trained, oracle.twin
    tolerance = TOLERANCES[cell.config.tolerance.value]
    with cell.phase("verify", "twin"):
        losses = oracle.losses
        _verify_losses(
            cell,
            "loss_twin_close",
            lambda actual: losses_close(losses.twin, actual, 1, tolerance),
            _telling(losses.continued, trained.alive, 1),
            losses.continued,
            _unrestored(cell, oracle.data, range(1, trained.train_state.step + 1)),
            "in the uninterrupted run",
        )
        expected, actual = _tensors(twin), _tensors(trained)
        found = compare_close(expected, actual, tolerance)
        cell.check("state_twin_close", found, "after the uninterrupted run")
        plain = training_run.build_plain(cell.config, cell.world, other_seed(cell, 0))
        plain.train(oracle.data, 1)
        reported = {finding.name for finding in compare_close(expected, _tensors(plain), tolerance)}
        cell.control("state_twin_close", {name: name in reported for name in expected})
    cell.report.losses["continued"] = losses.continued
    cell.report.losses["twin"] = losses.twin


def verify_save_harmless(cell: Cell, oracle: Oracle) -> None:
    """A run that never saves must end up in the very state of the one that did, by the same losses."""
    with cell.phase("build"):
        unsaved = training_run.build(cell.config, cell.world, cell.config.seed)
    trained = oracle.trained
    with cell.phase("train"):
        unsaved.train(oracle.data, trained.train_state.step)
    with cell.phase("verify", "harmless"):
        never, saved = live_state(unsaved), live_state(trained)
        for check, leaves in never.items():
            cell.check("save_harmless", compare(leaves, saved[check]), "in the run that saved")
            control_changed(cell, "save_harmless", leaves, "")


def load_and_verify(cell: Cell, target: TrainingRun, checkpoint: Checkpoint, number: int = 0) -> None:
    """Load a checkpoint, the one of this number, into a target in which everything was made different."""
    steps.make_different(cell, target, number)
    prove_power(cell, target, checkpoint)
    steps.load(cell, target, checkpoint)
    verify_restored(cell, target, checkpoint)


def prove_power(
    cell: Cell, target: TrainingRun, checkpoint: Checkpoint, checks: Sequence[str] | None = None
) -> None:
    """The negative controls: each comparison against the target before anything is loaded into it.

    Args:
        target: in which everything was made different.
        checks: of which equality, if not of all three.
    """
    with cell.phase("verify", "power"):
        unrestored = live_state(target)
        for check, leaves in checkpoint.state.items():
            if checks is None or check in checks:
                reported = checkpoint.differing(check, unrestored[check], cell.world.checkpoint_group)
                _control(cell, check, leaves, reported, str(checkpoint))


def verify_restored(
    cell: Cell, target: TrainingRun, checkpoint: Checkpoint, checks: Sequence[str] | None = None
) -> None:
    """What came back must be, bit for bit, what was there at the moment of saving: part by part, or by
    content where the parts lie otherwise. The checks of plug-ins follow."""
    with cell.phase("verify", "equality"):
        restored = live_state(target)
        for check in checkpoint.state:
            if checks is None or check in checks:
                found = checkpoint.compare(check, restored[check], cell.world.checkpoint_group)
                cell.check(check, found, str(checkpoint))
        for spec in CHECKS.values():
            if spec.probe:
                spec.probe(cell, target, checkpoint)


def control_part(cell: Cell, run: TrainingRun, prefix: str, saved: Checkpoint, where: str) -> None:
    """The negative control of `verify_part`, before the part is loaded."""
    with cell.phase("verify", "power"):
        expected = saved.state["model_equal"]
        reported = differing(expected, _part(run, prefix), cell.world.checkpoint_group)
        _control(cell, "model_equal", expected, reported, where)


def verify_part(cell: Cell, run: TrainingRun, prefix: str, saved: Checkpoint, where: str) -> None:
    """The part of a model whose FQNs begin with `prefix` must be, by content, the model that was saved."""
    with cell.phase("verify", "equality"):
        expected, group = saved.state["model_equal"], cell.world.checkpoint_group
        found = compare_across(expected, _part(run, prefix), group, saved.recall("model_equal"))
        cell.check("model_equal", found, where)


def verify_unchanged(cell: Cell, run: TrainingRun, prefix: str, saved: Checkpoint, where: str) -> None:
    """The same after more training, of a run with the layout that was saved: it was not trained."""
    with cell.phase("verify", "equality"):
        before, after = (
            {name: leaf for name, leaf in leaves.items() if name.startswith(prefix)}
            for leaves in (saved.state["model_equal"], snapshot_model(run.model))
        )
        cell.check("model_equal", compare(before, after), where)


def resume(
    cell: Cell,
    target: TrainingRun,
    checkpoint: Checkpoint,
    losses: Losses,
    number: int = 0,
    exactly: bool = True,
) -> None:
    """Train on: the steps must have the uninterrupted run's losses, and those must mean something.

    They mean something if they are finite and not zero, a gradient was there, and a model from
    which nothing was restored has others.

    Args:
        target: into which the checkpoint was loaded.
        checkpoint: from which it goes on.
        losses: those of the uninterrupted run and of the twin.
        number: of the load; each has other models to be told from.
        exactly: whether the losses are the same bits; another layout sums in another order.
    """
    tolerance = TOLERANCES[cell.config.tolerance.value]
    first, last = checkpoint.step + 1, checkpoint.step + cell.config.resume_steps
    resumed = steps.train(cell, target, losses.data, last)
    where = f"after the checkpoint of step {checkpoint.step}"
    with cell.phase("verify", "resumed"):
        continued, twin = losses.continued[first - 1 : last], losses.twin[first - 1 : last]
        telling = _telling(resumed, target.alive, first)

        def against_continued(actual: list[float]) -> list[Finding]:
            if exactly:
                return losses_equal(continued, actual, first)
            return losses_close(continued, actual, first, tolerance, "uninterrupted")

        def against_twin(actual: list[float]) -> list[Finding]:
            return losses_close(twin, actual, first, tolerance)

        for check, compared in (
            ("loss_resume_equal" if exactly else "loss_resume_close", against_continued),
            ("loss_twin_close", against_twin),
        ):
            others = _unrestored(cell, losses.data, range(first, last + 1), number)
            _verify_losses(cell, check, compared, telling, resumed, others, where)
    cell.report.resumed[checkpoint.step] = resumed


def _telling(losses: list[float], alive: list[bool], first: int) -> dict[str, bool]:
    """Whether a step's loss means something: it is finite and not zero, and a gradient was there."""
    return {
        loss_name(step): math.isfinite(loss) and loss != 0.0 and lives
        for step, (loss, lives) in enumerate(zip(losses, alive, strict=False), first)
    }


def _unrestored(cell: Cell, data: Batches, steps: range, first: int = 0) -> Iterator[list[float]]:
    """The losses of models from other seeds, one after the other."""
    for number in range(first, first + _UNRESTORED):
        plain = training_run.build_plain(cell.config, cell.world, other_seed(cell, number))
        yield plain.losses_without_training(data, steps)


def _verify_losses(
    cell: Cell,
    check: str,
    compared: Callable[[list[float]], list[Finding]],
    telling: dict[str, bool],
    losses: list[float],
    unrestored: Iterator[list[float]],
    where: str,
) -> None:
    """Losses by a comparison that must report those of models from which nothing was restored.

    Two models' losses may come close by chance, at a step or two: several models are tried.
    """
    cell.check(check, compared(losses), where)
    reported: set[str] = set()
    while not telling.keys() <= reported and (others := next(unrestored, None)) is not None:
        reported |= {finding.name for finding in compared(others)}
    cell.control(check, {name: means and name in reported for name, means in telling.items()}, where)


def control_changed(cell: Cell, check: str, expected: Leaves, where: str) -> None:
    """The control of an equality check with a changed copy of each piece of state, one at a time."""
    changed = (compare({name: leaf}, {name: made_different(leaf)}) for name, leaf in expected.items())
    _control(cell, check, expected, [finding.name for found in changed for finding in found], where)


def _control(cell: Cell, check: str, expected: Leaves, reported: Iterable[str], where: str) -> None:
    names = set(reported)
    cell.control(check, {name: name in names for name in controllable(expected)}, where)


def verify_equal(
    cell: Cell, check: str, expected: Leaves, actual: Leaves, where: str, before: Leaves
) -> None:
    """State outside a training run, against what was saved of it; `before` is what it was before the load:
    different in everything."""
    with cell.phase("verify", "equality"):
        cell.check(check, compare(expected, actual), where)
        _control(cell, check, expected, [found.name for found in compare(expected, before)], where)


def verify_untouched(cell: Cell, target: TrainingRun, before: State, saved: Checkpoint) -> None:
    """All of a target but its model must be what it was before the load, and not what was saved."""
    with cell.phase("verify", "equality"):
        now, then, loaded = map(_beside_model, (live_state(target), before, saved.state))
        where = f"not loaded {saved}"
        verify_contract(cell, compare(then, now), compare(then, loaded), controllable(then), where)


def verify_contract(
    cell: Cell, held: Iterable[Finding], broken: Iterable[Finding], names: Iterable[str], where: str
) -> None:
    """What a scenario asks of DCP beside equality.

    Args:
        held: what the judgement finds wrong with what happened.
        broken: what the same judgement finds wrong with a case that breaks the contract on purpose.
        names: what it has to find there.
        where: of what checkpoint or step this is.
    """
    cell.check("contract_held", held, where)
    reported = {finding.name for finding in broken}
    cell.control("contract_held", {name: name in reported for name in names}, where)


def verify_content(cell: Cell, check: str, expected: Leaves, actual: Leaves, where: str) -> None:
    """State outside a training run, whole on every rank, against parts of it that were saved."""
    group = cell.world.checkpoint_group
    with cell.phase("verify", "equality"):
        cell.check(check, compare_across(expected, actual, group), where)
        changed = {name: made_different(leaf) for name, leaf in actual.items()}
        _control(cell, check, expected, differing(expected, changed, group), where)


def verify_refused(
    cell: Cell,
    kind: type[BaseException],
    message: str,
    refused: Callable[[], None],
    accepted: Callable[[], None],
) -> None:
    """What must be refused was, with an exception of this kind and a message that holds these words.

    Args:
        kind: of the exception.
        message: what its text contains.
        refused: the call that must raise it.
        accepted: the same in a way that is allowed: the negative control.
    """

    def wrong(call: Callable[[], None]) -> list[Finding]:
        expected = f"expected {kind.__name__}: {message}"
        try:
            call()
        except (Exception, kind) as error:  # noqa: BLE001 - which one it is, is the question
            if isinstance(error, kind) and message in str(error):
                return []
            return [breach("refusal", f"{expected}; got {type(error).__name__}: {error}")]
        return [breach("refusal", f"{expected}; it was not refused")]

    verify_contract(cell, wrong(refused), wrong(accepted), ["refusal"], "of the save")


def _part(run: TrainingRun, prefix: str) -> Leaves:
    return {
        name.removeprefix(prefix): leaf
        for name, leaf in snapshot_model(run.model).items()
        if name.startswith(prefix)
    }


def _tensors(run: TrainingRun) -> Leaves:
    """The live model and optimizer."""
    state = live_state(run)
    return {
        name: leaf
        for name, leaf in {**state["model_equal"], **state["optim_equal"]}.items()
        if isinstance(leaf, TensorLeaf | Idle)
    }


def _beside_model(state: State) -> Leaves:
    return {**state["optim_equal"], **state["extra_equal"]}
