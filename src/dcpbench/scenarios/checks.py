"""What scenarios verify, each check with its negative control: the power to fail, shown in the cell."""

import itertools
import math
from collections.abc import Callable, Iterable
from functools import partial

from dcpbench.records.checks import CHECKS
from dcpbench.records.findings import Finding, Problem
from dcpbench.scenarios import steps
from dcpbench.scenarios.cell import Cell
from dcpbench.scenarios.checkpoint import Checkpoint, State, live_state
from dcpbench.scenarios.steps import Losses, Oracle, other_seed
from dcpbench.verify.compare import compare
from dcpbench.verify.perturb import controllable, made_different, perturb_model, perturb_optimizer
from dcpbench.verify.snapshot import Idle, Leaves, TensorLeaf
from dcpbench.verify.tolerances import TOLERANCES, compare_close, loss_name, losses_close, losses_equal
from dcpbench.workloads import training_run
from dcpbench.workloads.training_run import Batches, TrainingRun

_UNRESTORED = 5
"""How many models from other seeds a loss is held against before it is said that nothing tells them apart."""

Findings = Iterable[Finding]

Comparison = Callable[[list[float]], list[Finding]]
"""What is wrong with the losses of a run."""

View = Callable[[TrainingRun], State]
"""What of a training run is compared: its live state, or a part of it."""


def breach(name: str, text: str) -> Finding:
    """A breach of a scenario's contract, in its own words."""
    return Finding(name, Problem.contract, facts={"text": text})


def verify_twin(cell: Cell, oracle: Oracle) -> None:
    """Train the twin on the same batches; the parallel run must have stayed close to it."""
    trained = oracle.trained
    tolerance = TOLERANCES[cell.config.tolerance.value]
    with cell.phase("verify", "twin"):
        losses = oracle.losses
        near = partial(losses_close, losses.twin, first=1, tolerance=tolerance)
        where = "in the uninterrupted run"
        taken = range(1, trained.train_state.step + 1)
        seen = losses.continued, trained.alive
        _verify_losses(cell, "loss_twin_close", near, *seen, losses.data, taken, where)
        expected = _tensors(oracle.twin)
        found = compare_close(expected, _tensors(trained), tolerance)
        cell.check("state_twin_close", found, "after the uninterrupted run")
        plain = training_run.build_plain(cell.config, cell.world, other_seed(cell, 0))
        # A state that is as many steps old as the twin's would have its step counters.
        plain.train(oracle.data, 2 if trained.train_state.step == 1 else 1)
        _control(cell, "state_twin_close", expected, compare_close(expected, _tensors(plain), tolerance))
    cell.report.losses.update(continued=losses.continued, twin=losses.twin)


def verify_save_harmless(cell: Cell, oracle: Oracle) -> None:
    """A run that never saves must end up in the very state of the one that did, by the same losses."""
    with cell.phase("build"):
        unsaved = training_run.build(cell.config, cell.world, cell.config.seed)
    trained = oracle.trained
    steps.train(cell, unsaved, oracle.data, trained.train_state.step)
    with cell.phase("verify", "harmless"):
        never, saved = live_state(unsaved), live_state(trained)
        for check, leaves in never.items():
            cell.check("save_harmless", compare(leaves, saved[check]), "in the run that saved")
            control_changed(cell, "save_harmless", leaves)


def make_different(cell: Cell, target: TrainingRun, checkpoint: Checkpoint, number: int = 0) -> None:
    """Change every element and every hyperparameter of the target of a load, the one of this number, so that
    a load which restores nothing of it cannot go unseen, and prove it."""
    with cell.phase("build"):
        seed = other_seed(cell, number)
        perturb_model(target.model, seed)
        perturb_optimizer(target.optimizer, seed)
        target.forget(seed)
    prove_power(cell, target, checkpoint)


def load_and_verify(cell: Cell, target: TrainingRun, checkpoint: Checkpoint, number: int = 0) -> None:
    """Load a checkpoint, the one of this number, into a target in which everything was made different."""
    make_different(cell, target, checkpoint, number)
    steps.load(cell, target, checkpoint)
    verify_restored(cell, target, checkpoint)


def prove_power(
    cell: Cell, target: TrainingRun, checkpoint: Checkpoint, view: View = live_state, where: str = ""
) -> None:
    """The negative controls: each comparison with a target in which everything is different."""
    with cell.phase("verify", "power"):
        unrestored = view(target)
        for check, leaves in checkpoint.state.items():
            found = checkpoint.compare(check, unrestored[check], cell.world.checkpoint_group, closely=False)
            _control(cell, check, controllable(leaves), found, where or str(checkpoint))


def verify_restored(
    cell: Cell, target: TrainingRun, checkpoint: Checkpoint, view: View = live_state, where: str = ""
) -> None:
    """What came back must be, bit for bit, what was there at the moment of saving: part by part, or by
    content where the parts lie otherwise. Where `view` is of all of it, the checks of plug-ins follow."""
    with cell.phase("verify", "equality"):
        actual = view(target)
        for check in checkpoint.state:
            found = checkpoint.compare(check, actual[check], cell.world.checkpoint_group)
            cell.check(check, found, where or str(checkpoint))
        for spec in CHECKS.values():
            if spec.probe and view is live_state:
                spec.probe(cell, target, checkpoint)


def resume(
    cell: Cell,
    target: TrainingRun,
    checkpoint: Checkpoint,
    losses: Losses,
    number: int = 0,
    exactly: bool = True,
) -> None:
    """Train on: the steps must have the uninterrupted run's losses, and those must mean something.

    Args:
        number: of the load; each has other models to be told from.
        exactly: whether the losses are the same bits; another layout sums in another order.
    """
    first, last = checkpoint.step + 1, checkpoint.step + cell.config.resume_steps
    resumed = steps.train(cell, target, losses.data, last)
    continued, twin = losses.continued[first - 1 : last], losses.twin[first - 1 : last]
    near = partial(losses_close, first=first, tolerance=TOLERANCES[cell.config.tolerance.value])
    comparisons: dict[str, Comparison] = {"loss_twin_close": partial(near, twin)}
    if exactly:
        comparisons["loss_resume_equal"] = partial(losses_equal, continued, first=first)
    else:
        comparisons["loss_resume_close"] = partial(near, continued, reference="uninterrupted")
    where = f"after the checkpoint of step {checkpoint.step}"
    with cell.phase("verify", "resumed"):
        for check, compared in comparisons.items():
            taken = range(first, last + 1)
            _verify_losses(cell, check, compared, resumed, target.alive, losses.data, taken, where, number)
    cell.report.resumed[checkpoint.step] = resumed


def _verify_losses(
    cell: Cell,
    check: str,
    compared: Comparison,
    losses: list[float],
    alive: list[bool],
    data: Batches,
    taken: range,
    where: str,
    number: int = 0,
) -> None:
    """Losses by a comparison that must report those of models from which nothing was restored.

    Those of the steps `taken` mean something if they are finite and not zero, and a gradient was there
    (`alive`). Two models' losses may come close by chance, at a step or two: several are tried, from `number`
    on.
    """
    cell.check(check, compared(losses), where)
    telling = {
        loss_name(step): math.isfinite(loss) and loss != 0.0 and lives
        for step, (loss, lives) in enumerate(zip(losses, alive, strict=False), taken.start)
    }
    reported: set[str] = set()
    for other in range(number, number + _UNRESTORED):
        if telling.keys() <= reported:
            break
        plain = training_run.build_plain(cell.config, cell.world, other_seed(cell, other))
        unrestored = plain.losses_without_training(data, taken)
        reported |= {finding.name for finding in compared(unrestored)}
    cell.control(check, {name: means and name in reported for name, means in telling.items()}, where)


def control_changed(cell: Cell, check: str, expected: Leaves) -> None:
    """The control of an equality check with a changed copy of each piece of state, one at a time."""
    changed = (compare({name: leaf}, {name: made_different(leaf)}) for name, leaf in expected.items())
    _control(cell, check, controllable(expected), itertools.chain.from_iterable(changed))


def _control(cell: Cell, check: str, names: Iterable[str], found: Findings, where: str = "") -> None:
    """Each of these names must be among what a comparison found with something that is different."""
    reported = {finding.name for finding in found}
    cell.control(check, {name: name in reported for name in names}, where)


def verify(
    cell: Cell, check: str, held: Findings, broken: Findings, names: Iterable[str], where: str
) -> None:
    """A check with its control: `held` is what a judgement finds wrong with what happened, `broken` with a
    case that is wrong on purpose, where it has to find these names."""
    cell.check(check, held, where)
    _control(cell, check, names, broken, where)


def verify_refused(
    cell: Cell,
    kind: type[BaseException],
    message: str,
    refused: Callable[[], None],
    accepted: Callable[[], None],
) -> None:
    """What must be refused was, with an exception of this kind and a message that holds these words.
    `accepted` is the same call in a way that is allowed: the negative control."""

    def wrong(call: Callable[[], None]) -> list[Finding]:
        expected = f"expected {kind.__name__}: {message}"
        try:
            call()
        except (Exception, kind) as error:  # noqa: BLE001 - which one it is, is the question
            if isinstance(error, kind) and message in str(error):
                return []
            return [breach("refusal", f"{expected}; got {type(error).__name__}: {error}")]
        return [breach("refusal", f"{expected}; it was not refused")]

    verify(cell, "contract_held", wrong(refused), wrong(accepted), ["refusal"], "of the save")


def _tensors(run: TrainingRun) -> Leaves:
    """The live model and optimizer."""
    state = live_state(run)
    both = {**state["model_equal"], **state["optim_equal"]}
    return {name: leaf for name, leaf in both.items() if isinstance(leaf, TensorLeaf | Idle)}
