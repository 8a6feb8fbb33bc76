"""How many steps a user's trainer takes before each save and after each load."""

import time
from typing import Any

from dcpbench.cell.cell import Cell
from dcpbench.cell.steps import ReferenceRun, train
from dcpbench.config.schema import FEWEST_STEPS

_STEPS = (FEWEST_STEPS, 3, 5, 7, 11, 13, 17, 19, 23)
_TRAINED_S = 10.0
"""How long the uninterrupted run of a trainer may take."""


def with_steps(cell: Cell, reference: ReferenceRun) -> Cell:
    """Return the cell with the steps of a trainer before each save and after each load, as many as fit ten
    seconds at the pace of its second step, unless they were asked for.

    It is prime. From 13 on, no save comes after a whole number of epochs of two to twelve batches, and an
    epoch ends before the first save and after each load.
    """
    config, run = cell.config, reference.trained
    asked: dict[str, Any] = {"train_steps": config.train_steps, "resume_steps": config.resume_steps}
    if not config.own_trainer or all(asked.values()):
        return cell
    fitting = 0
    if min(config.save_steps) >= _STEPS[0]:
        train(cell, run, _STEPS[0] - 1)
        began = time.perf_counter()
        train(cell, run, _STEPS[0])
        pace = max(cell.world.gathered(time.perf_counter() - began))
        fitting = int(_TRAINED_S / pace / (config.saves + 1))
    steps = max((number for number in _STEPS if number <= fitting), default=_STEPS[0])
    asked = {name: number or steps for name, number in asked.items()}
    cell.report.steps = asked
    return cell.vary(**asked)
