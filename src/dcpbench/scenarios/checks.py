"""What scenarios verify, each check with its negative control: the power to fail, shown in the cell."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from dcpbench.scenarios.cell import Cell
from dcpbench.scenarios.steps import Checkpoint, Oracle, Snapshot, other_seed, recall, snapshot
from dcpbench.verify.compare import Mismatch, compare
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
from dcpbench.workloads import training_run as trainees
from dcpbench.workloads.training_run import Trainee

_UNRESTORED = 5
"""How many models from other seeds a loss is held against before it is said that nothing tells them apart."""


def verify_twin(cell: Cell, oracle: Oracle) -> None:
    """Train the twin on the same batches; the parallel run must have stayed close to it."""
    trained, twin = oracle.trained, oracle.twin
    tolerance = TOLERANCES[cell.config.tolerance.value]
    with cell.phase("verify", "twin"):
        twin.train(oracle.data, trained.train_state.step)

        def against_twin(losses: list[float]) -> list[Mismatch]:
            return losses_close(twin.train_state.losses, losses, 1, tolerance)

        _verify_losses(
            cell,
            "loss_twin_close",
            against_twin,
            _telling(trained.train_state.losses, trained.alive, 1),
            trained.train_state.losses,
            _unrestored(cell, oracle, range(1, trained.train_state.step + 1)),
            "in the uninterrupted run",
        )
        expected, actual = _tensors(twin), _tensors(trained)
        found = compare_close(expected, actual, tolerance)
        cell.check("state_twin_close", found, "after the uninterrupted run")
        plain = trainees.build_plain(cell.config, cell.world, other_seed(cell, 0))
        plain.train(oracle.data, 1)
        reported = {mismatch.name for mismatch in compare_close(expected, _tensors(plain), tolerance)}
        cell.control("state_twin_close", {name: name in reported for name in expected})
    cell.report.losses["continued"] = trained.train_state.losses
    cell.report.losses["twin"] = twin.train_state.losses


def verify_save_harmless(cell: Cell, oracle: Oracle) -> None:
    """A run that never saves must end up in the very state of the one that did, by the same losses."""
    with cell.phase("build"):
        unsaved = trainees.build(cell.config, cell.world, cell.config.seed)
    trained = oracle.trained
    with cell.phase("train"):
        unsaved.train(oracle.data, trained.train_state.step)
    with cell.phase("verify", "harmless"):
        never, saved = snapshot(unsaved).by_check(), snapshot(trained).by_check()
        for check, leaves in never.items():
            cell.check("save_harmless", compare(leaves, saved[check]), "in the run that saved")
            control_changed(cell, "save_harmless", leaves, "")


def prove_power(
    cell: Cell,
    target: Trainee,
    checkpoint: Checkpoint,
    checks: Sequence[str] | None = None,
    same_layout: bool = True,
) -> None:
    """The negative controls: each comparison against the target before anything is loaded into it.

    Args:
        checks: of which equality, if not of all three.
        same_layout: whether the target's parts lie as the saved ones did.
    """
    with cell.phase("verify", "power"):
        unrestored = snapshot(target).by_check()
        for check, leaves in checkpoint.snapshot.by_check().items():
            if checks is not None and check not in checks:
                continue
            if same_layout:
                control_equal(cell, check, leaves, unrestored[check], str(checkpoint))
            else:
                reported = differing(leaves, unrestored[check], cell.world.checkpoint_group)
                _control(cell, check, leaves, reported, str(checkpoint))


def verify_restored(
    cell: Cell,
    target: Trainee,
    checkpoint: Checkpoint,
    checks: Sequence[str] | None = None,
    same_layout: bool = True,
) -> None:
    """What came back must be, bit for bit, what was there at the moment of saving: part by part, or by
    content where the parts lie otherwise."""
    with cell.phase("verify", "equality"):
        restored = snapshot(target).by_check()
        for check, leaves in checkpoint.snapshot.by_check().items():
            if checks is not None and check not in checks:
                continue
            held = recall(checkpoint, check)
            if same_layout:
                found = compare(leaves, restored[check], held)
            else:
                found = compare_across(leaves, restored[check], cell.world.checkpoint_group, held)
            cell.check(check, found, str(checkpoint))


def control_part(cell: Cell, trainee: Trainee, prefix: str, saved: Checkpoint, where: str) -> None:
    """The negative control of `verify_part`, before the part is loaded."""
    with cell.phase("verify", "power"):
        expected, part = saved.snapshot.model_equal, _part(trainee, prefix)
        reported = differing(expected, part, cell.world.checkpoint_group)
        _control(cell, "model_equal", expected, reported, where)


def verify_part(cell: Cell, trainee: Trainee, prefix: str, saved: Checkpoint, where: str) -> None:
    """The part of a model whose FQNs begin with `prefix` must be, by content, the model that was saved."""
    with cell.phase("verify", "equality"):
        expected, part = saved.snapshot.model_equal, _part(trainee, prefix)
        held = recall(saved, "model_equal")
        cell.check("model_equal", compare_across(expected, part, cell.world.checkpoint_group, held), where)


def verify_unchanged(cell: Cell, trainee: Trainee, prefix: str, saved: Checkpoint, where: str) -> None:
    """The same after more training, of a trainee with the layout that was saved: it was not trained."""
    with cell.phase("verify", "equality"):
        before = {name: leaf for name, leaf in saved.snapshot.model_equal.items() if name.startswith(prefix)}
        after = {
            name: leaf for name, leaf in snapshot_model(trainee.model).items() if name.startswith(prefix)
        }
        cell.check("model_equal", compare(before, after), where)


def verify_resumed(
    cell: Cell,
    target: Trainee,
    resumed: list[float],
    checkpoint: Checkpoint,
    oracle: Oracle,
    number: int,
    same_layout: bool = True,
) -> None:
    """The resumed steps must have the uninterrupted run's losses, and those must mean something.

    They mean something if they are finite and not zero, a gradient was there, and a model from
    which nothing was restored has others. Another layout sums in another order: it need only be close.
    """
    tolerance = TOLERANCES[cell.config.tolerance.value]
    first, last = checkpoint.step + 1, checkpoint.step + cell.config.resume_steps
    where = f"after the checkpoint of step {checkpoint.step}"
    with cell.phase("verify", "resumed"):
        continued = oracle.trained.train_state.losses[first - 1 : last]
        twins = oracle.twin.train_state.losses[first - 1 : last]
        telling = _telling(resumed, target.alive, first)

        def against_continued(losses: list[float]) -> list[Mismatch]:
            if same_layout:
                return losses_equal(continued, losses, first)
            return losses_close(continued, losses, first, tolerance, "uninterrupted")

        def against_twin(losses: list[float]) -> list[Mismatch]:
            return losses_close(twins, losses, first, tolerance)

        for check, compared in (
            ("loss_resume_equal" if same_layout else "loss_resume_close", against_continued),
            ("loss_twin_close", against_twin),
        ):
            others = _unrestored(cell, oracle, range(first, last + 1), number)
            _verify_losses(cell, check, compared, telling, resumed, others, where)
    cell.report.resumed[checkpoint.step] = resumed


def _telling(losses: list[float], alive: list[bool], first: int) -> dict[str, bool]:
    """Whether a step's loss means something: it is finite and not zero, and a gradient was there."""
    return {
        loss_name(step): math.isfinite(loss) and loss != 0.0 and lives
        for step, (loss, lives) in enumerate(zip(losses, alive, strict=False), first)
    }


def _unrestored(cell: Cell, oracle: Oracle, steps: range, first: int = 0) -> Iterator[list[float]]:
    """The losses of models from other seeds, one after the other."""
    for number in range(first, first + _UNRESTORED):
        plain = trainees.build_plain(cell.config, cell.world, other_seed(cell, number))
        yield plain.losses_without_training(oracle.data, steps)


def _verify_losses(
    cell: Cell,
    check: str,
    compared: Callable[[list[float]], list[Mismatch]],
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
        reported |= {mismatch.name for mismatch in compared(others)}
    cell.control(check, {name: means and name in reported for name, means in telling.items()}, where)


def control_equal(cell: Cell, check: str, expected: Leaves, other: Leaves, where: str) -> None:
    """The control of an equality check: `other` differs in everything, and it must be seen."""
    _control(cell, check, expected, [found.name for found in compare(expected, other)], where)


def control_changed(cell: Cell, check: str, expected: Leaves, where: str) -> None:
    """The same with a changed copy of each piece of state, one at a time."""
    changed = (compare({name: leaf}, {name: made_different(leaf)}) for name, leaf in expected.items())
    _control(cell, check, expected, [found.name for told in changed for found in told], where)


def _control(cell: Cell, check: str, expected: Leaves, reported: Iterable[str], where: str) -> None:
    names = set(reported)
    cell.control(check, {name: name in names for name in controllable(expected)}, where)


def verify_equal(
    cell: Cell, check: str, expected: Leaves, actual: Leaves, where: str, before: Leaves
) -> None:
    """State outside a trainee, against what was saved of it; `before` is what it was before the load."""
    with cell.phase("verify", "equality"):
        cell.check(check, compare(expected, actual), where)
        control_equal(cell, check, expected, before, where)


def verify_untouched(cell: Cell, target: Trainee, before: Snapshot, saved: Checkpoint) -> None:
    """All of a target but its model must be what it was before the load, and not what was saved."""
    with cell.phase("verify", "equality"):
        now, then, loaded = (
            _beside_model(snapshot(target)),
            _beside_model(before),
            _beside_model(saved.snapshot),
        )
        verify_contract(
            cell, compare(then, now), compare(then, loaded), controllable(then), f"not loaded {saved}"
        )


def verify_contract(
    cell: Cell, held: Iterable[Mismatch], broken: Iterable[Mismatch], names: Iterable[str], where: str
) -> None:
    """What a scenario asks of DCP beside equality.

    Args:
        held: what the judgement finds wrong with what happened.
        broken: what the same judgement finds wrong with a case that breaks the contract on purpose.
        names: what it has to find there.
        where: of what checkpoint or step this is.
    """
    cell.check("contract_held", held, where)
    reported = {found.name for found in broken}
    cell.control("contract_held", {name: name in reported for name in names}, where)


def verify_content(cell: Cell, check: str, expected: Leaves, actual: Leaves, where: str) -> None:
    """State outside a trainee, whole on every rank, against parts of it that were saved."""
    group = cell.world.checkpoint_group
    with cell.phase("verify", "equality"):
        cell.check(check, compare_across(expected, actual, group), where)
        changed = {name: made_different(leaf) for name, leaf in actual.items()}
        _control(cell, check, expected, differing(expected, changed, group), where)


def _part(trainee: Trainee, prefix: str) -> Leaves:
    return {
        name.removeprefix(prefix): leaf
        for name, leaf in snapshot_model(trainee.model).items()
        if name.startswith(prefix)
    }


def _tensors(trainee: Trainee) -> Leaves:
    """The live model and optimizer."""
    state = snapshot(trainee)
    return {
        name: leaf
        for name, leaf in {**state.model_equal, **state.optim_equal}.items()
        if isinstance(leaf, TensorLeaf | Idle)
    }


def verify_refused(
    cell: Cell,
    kind: type[BaseException],
    message: str,
    refused: Callable[[], None],
    accepted: Callable[[], None],
) -> None:
    """What must be refused was, with an exception of this kind and a message that holds these words.

    Args:
        accepted: the same in a way that is allowed: the negative control.
    """

    def wrong(call: Callable[[], None]) -> list[Mismatch]:
        try:
            call()
        except (Exception, kind) as error:  # noqa: BLE001 - which one it is, is the question
            if isinstance(error, kind) and message in str(error):
                return []
            return [
                Mismatch(
                    "refusal", f"expected {kind.__name__}: {message}; got {type(error).__name__}: {error}"
                )
            ]
        return [Mismatch("refusal", f"expected {kind.__name__}: {message}; it was not refused")]

    verify_contract(cell, wrong(refused), wrong(accepted), ["refusal"], "of the save")


def _beside_model(state: Snapshot) -> Leaves:
    return {**state.optim_equal, **state.extra_equal}
