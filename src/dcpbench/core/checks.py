"""Checks: what is verified in a cell, each declared once. Each is a column: true, false, or null where it did
not apply. Everything that judges, shows, compares or stores a check iterates over `CHECKS`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CheckSpec:
    """One check.

    Args:
        name: the column.
        label: what it is called at the head of its column in a table.
        help: what holds when it holds, in one sentence.
        probe: for a check that no scenario makes: called on each rank as `probe(cell, target, checkpoint)`
            after each load that was verified; it records a `Compared`, which carries its negative control,
            with `cell.record(name, compared, where)`.
        training: whether it is about training under a parallelism, and not about saving and resuming.
    """

    name: str
    label: str
    help: str
    probe: Callable[[Any, Any, Any], None] | None = None
    training: bool = False


CHECKS: dict[str, CheckSpec] = {}
"""Every check by its name, in the order of the columns."""


def register_check(spec: CheckSpec) -> CheckSpec:
    """Declare a check; a ValueError if its name is taken."""
    if CHECKS.setdefault(spec.name, spec) != spec:
        raise ValueError(f"check {spec.name}: declared twice")
    return spec


for _spec in (
    CheckSpec("model_equal", "model=", "parameters and persistent buffers came back bit for bit"),
    CheckSpec("optim_equal", "optim=", "optimizer state and hyperparameters came back bit for bit"),
    CheckSpec("extra_equal", "extra=", "all else that was saved came back bit for bit"),
    CheckSpec("loss_resume_equal", "resume=", "resumed losses are the uninterrupted run's, bit for bit"),
    CheckSpec("loss_resume_close", "resume~", "under another layout, resumed losses are close"),
    CheckSpec(
        "gradient_close",
        "gradient~",
        "each step's gradients are the unwrapped twin's, within the bound of their rounding",
        training=True,
    ),
    CheckSpec(
        "step_equal",
        "step=",
        "each optimizer step is the twin's with the same gradients, bit for bit",
        training=True,
    ),
    CheckSpec(
        "replicas_equal", "replicas=", "ranks that have the same part have the same bits", training=True
    ),
    CheckSpec(
        "batch_loss_close",
        "batch loss~",
        "each step's loss is the twin's loss of the whole batch, within its rounding",
        training=True,
    ),
    CheckSpec("contract_held", "contract", "what the scenario asks of DCP beside equality"),
    CheckSpec("checkpoint_whole", "whole", "the checkpoint has the keys, shapes, chunks and files it should"),
    CheckSpec("save_harmless", "harmless", "a run that saves ends in the state of one that never does"),
    CheckSpec("state_resume_equal", "resume state=", "the state after resuming is the uninterrupted run's"),
    CheckSpec("flags_equal", "flags=", "flags, modes, defaults, shared memory, gradients and hooks stayed"),
    CheckSpec("side_effect_free", "no side effects", "saves and loads change nothing else that is live"),
    CheckSpec("files_unchanged", "files=", "files are what they were when their save reported success"),
    CheckSpec("files_equal", "plain read=", "the files hold what was saved, read without DCP"),
    CheckSpec("random_equal", "random=", "each rank goes on to draw what it would have drawn"),
):
    register_check(_spec)
