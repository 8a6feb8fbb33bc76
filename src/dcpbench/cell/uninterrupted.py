"""The run that never saves. The run that saves has to end in its state; and where a user's trainer is run, it
comes first and shows how fast the trainer is, where its epochs end, and where it ends itself."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from dcpbench.cell import steps
from dcpbench.cell.cell import Cell
from dcpbench.cell.explained import explained
from dcpbench.cell.steps import RunRecord, other_seed
from dcpbench.cell.window import LONGEST, window_of_trainer
from dcpbench.core.mismatch import TWIN, Sides
from dcpbench.verify.compare import same_leaves
from dcpbench.verify.losses import compare_losses
from dcpbench.verify.perturb import compare_controlled
from dcpbench.verify.snapshot import Leaves, retained
from dcpbench.workloads import build_run, lockstep
from dcpbench.workloads.attributes import judged_of
from dcpbench.workloads.build_run import copy_state
from dcpbench.workloads.lockstep import Lockstep
from dcpbench.workloads.own_trainer import TrainerRun, TrainingEndedError
from dcpbench.workloads.run_state import ATTRIBUTES, RANDOM, State, live_state, only_generators, retained_state
from dcpbench.workloads.training_run import TrainingRun

_WHERE = "in the uninterrupted run"
_SAVES: Sides = ("{} without saves", "{} with them")
_TRAINED_S = 10.0
"""How long the uninterrupted run of a trainer may take."""
_EPOCHS_WITHIN = LONGEST // 2
"""The most steps in which an epoch's end is looked for."""
HARMLESS = "save_harmless"


def begin(cell: Cell, exactly: bool = False) -> tuple[Cell, TrainingRun, RunRecord]:
    """Train the run that never saves. Return the cell with its steps, the run, and its record.

    Args:
        exactly: a trainer saves as often as the configuration asks for, and not for its epochs in addition.
    """
    with _building(cell) as run_of:
        run = run_of()
    if isinstance(run, TrainerRun):
        return _begin_trainer(cell, run, exactly)
    _train(cell, run, cell.window.last)
    record = RunRecord(run.train_state.losses, {cell.window.last: retained_state(run)})
    return cell, run, record
