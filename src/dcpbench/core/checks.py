"""Checks: the comparisons that decide whether a cell passes. Each is declared once, and is a column of the
row: true, false, or null if it did not apply. Code that judges, shows, compares or stores a check iterates
over `CHECKS`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CheckSpec:
    """Declaration of a check.

    >>> CHECKS["model_equal"].help
    'parameters and persistent buffers were restored bit for bit'

    Args:
        name: the column.
        label: heading of its column in a table.
        help: one sentence that is true if the check passes.
        probe: for a check that no scenario makes: called on each rank as `probe(cell, target, checkpoint)`
            after every load. It makes a `Compared`, which includes the negative control, and passes it to
            `cell.record(name, compared, where)`.
        training: True for a check of training under a parallelism, False for one of saving and resuming.
    """

    name: str
    label: str
    help: str
    probe: Callable[[Any, Any, Any], None] | None = None
    training: bool = False


_OWN = (
    CheckSpec("model_equal", "model=", "parameters and persistent buffers were restored bit for bit"),
    CheckSpec("optim_equal", "optim=", "optimizer state and hyperparameters were restored bit for bit"),
    CheckSpec("extra_equal", "extra=", "everything else that was saved was restored bit for bit"),
    CheckSpec("loss_resume_equal", "resume=", "resumed losses equal the uninterrupted run's, bit for bit"),
    CheckSpec("loss_resume_close", "resume~", "under another layout, resumed losses are close"),
    CheckSpec(
        "gradient_close",
        "gradient~",
        "each step's gradients equal the unwrapped twin's, within their rounding bound",
        training=True,
    ),
    CheckSpec(
        "step_equal",
        "step=",
        "each optimizer step equals the twin's on the same gradients, bit for bit",
        training=True,
    ),
    CheckSpec(
        "replicas_equal",
        "replicas=",
        "ranks that have the same part of a tensor have the same bits",
        training=True,
    ),
    CheckSpec(
        "batch_loss_close",
        "batch loss~",
        "each step's loss equals the twin's loss of the full batch, within its rounding bound",
        training=True,
    ),
    CheckSpec("contract_held", "contract", "DCP does what the scenario requires in addition to equality"),
    CheckSpec("checkpoint_whole", "whole", "the checkpoint has the expected keys, shapes, chunks and files"),
    CheckSpec("save_harmless", "harmless", "a run that saves ends in the same state as one that never saves"),
    CheckSpec(
        "state_resume_equal",
        "resume state=",
        "after resuming and training on, the state equals the uninterrupted run's",
    ),
    CheckSpec(
        "flags_equal", "flags=", "flags, modes, defaults, shared memory, gradients and hooks are unchanged"
    ),
    CheckSpec("side_effect_free", "no side effects", "saves and loads change nothing else in the process"),
    CheckSpec("files_unchanged", "files=", "files have not changed since their save reported success"),
    CheckSpec("files_equal", "plain read=", "the files contain what was saved, read without DCP"),
    CheckSpec("random_equal", "random=", "each rank draws the random numbers that it would have drawn"),
)

CHECKS = {spec.name: spec for spec in _OWN}
"""Every check by name, in the order of the columns."""


def register_check(spec: CheckSpec) -> CheckSpec:
    """Add a check; raise a ValueError if its name is taken."""
    if CHECKS.setdefault(spec.name, spec) != spec:
        raise ValueError(f"check {spec.name}: declared twice")
    return spec
