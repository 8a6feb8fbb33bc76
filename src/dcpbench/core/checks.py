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
        help: one sentence that is true if the check passes.
        control: its negative control: the wrong data that the same comparison has to report.
        where: the cells that it applies to; in all others it is null.
        probe: for a check that no scenario makes: called on each rank as `probe(cell, target, checkpoint)`
            after every load. It makes a `Compared`, which includes the negative control, and passes it to
            `cell.record(name, compared, where)`.
        training: True for a check of training under a parallelism, False for one of saving and resuming.
    """

    name: str
    help: str
    control: str = ""
    where: str = ""
    probe: Callable[[Any, Any, Any], None] | None = None
    training: bool = False


_COPY = "a copy in which every value is different"
_TARGET = "every value of the load target, changed before the load"
_UNRESTORED = "a run that loaded nothing, which must have different losses"
_RESUMED = "scenarios that train on under the layout that saved"
_TWIN = "scenarios that train a twin"

_OWN = (
    CheckSpec(
        "model_equal", "parameters and persistent buffers were restored bit for bit",
        _TARGET, "scenarios that load a model",
    ),
    CheckSpec(
        "optim_equal", "optimizer state and hyperparameters were restored bit for bit",
        f"{_TARGET}, hyperparameters too", "scenarios that load an optimizer",
    ),
    CheckSpec(
        "extra_equal", "everything else that was saved was restored bit for bit",
        _TARGET, "scenarios that save more than model and optimizer",
    ),
    CheckSpec(
        "loss_resume_equal", "resumed losses equal the uninterrupted run's, bit for bit",
        _UNRESTORED, _RESUMED,
    ),
    CheckSpec(
        "loss_resume_close", "under another layout, resumed losses are close",
        _UNRESTORED, "scenarios that train on under another layout than the one that saved",
    ),
    CheckSpec(
        "gradient_close",
        "each step's gradients equal the unwrapped twin's, within their rounding bound",
        "the twin's gradients, changed by more than the bound", _TWIN, training=True,
    ),
    CheckSpec(
        "step_equal", "each optimizer step equals the twin's on the same gradients, bit for bit",
        _COPY, _TWIN, training=True,
    ),
    CheckSpec(
        "replicas_equal", "ranks that have the same part of a tensor have the same bits",
        "a copy on one rank in which one bit is different",
        "layouts in which several ranks have the same part of a tensor", training=True,
    ),
    CheckSpec(
        "batch_loss_close",
        "each step's loss equals the mean of the twin's losses of the shares, within its rounding bound",
        "the loss of another step or of other weights", _TWIN, training=True,
    ),
    CheckSpec(
        "contract_held", "DCP does what the scenario requires in addition to equality",
        "the same call where it is allowed, or a case that is wrong on purpose",
        "scenarios that require more than equality",
    ),
    CheckSpec(
        "checkpoint_whole", "the checkpoint has the expected keys, shapes, chunks and files",
        "damaged copies of the checkpoint's metadata", "scenarios that check what a save wrote",
    ),
    CheckSpec(
        "save_harmless", "a run that saves ends in the same state as one that never saves",
        _COPY, "scenarios that also train a run without saves",
    ),
    CheckSpec(
        "state_resume_equal",
        "after resuming and training on, the state equals the uninterrupted run's",
        _COPY, _RESUMED,
    ),
    CheckSpec(
        "flags_equal", "flags, modes, defaults, shared memory, gradients and hooks are unchanged",
        _COPY, "scenarios that compare flags after a load",
    ),
    CheckSpec(
        "side_effect_free", "saves and loads change nothing else in the process",
        _COPY, "scenarios that compare the process before and after a save or a load",
    ),
    CheckSpec(
        "files_unchanged", "files have not changed since their save reported success",
        "another digest for each file, one file fewer and one more", "checkpoints that are files",
    ),
    CheckSpec(
        "files_equal", "the files contain the saved state, read without DCP",
        "a changed copy of the saved state, for each part that is read",
        "checkpoints that can be read without DCP",
    ),
    CheckSpec(
        "random_equal", "each rank draws the random numbers that it would have drawn",
        "the load target's generators, seeded differently before the load",
        "cells without a trainer that load under the layout that saved",
    ),
)  # fmt: skip

CHECKS = {spec.name: spec for spec in _OWN}
"""Every check by name, in the order of the columns."""
