"""The steps of a user's trainer. Its run without saves shows where its epochs end, where it ends itself, and
how long the cell takes."""

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from dcpbench.cell import steps, training
from dcpbench.cell.cell import Cell, Window
from dcpbench.cell.steps import ReferenceRun
from dcpbench.config.schema import FEWEST_STEPS, Config
from dcpbench.config.text import duration_text
from dcpbench.core.rank_report import Skip
from dcpbench.core.state import StatePart
from dcpbench.runs.attributes import changed_by_training, own_attributes
from dcpbench.runs.own_trainer import TrainerRun
from dcpbench.runs.run import TrainingEndedError
from dcpbench.state.snapshot import State, retained

_NEWEST = 10
"""The default step of a trainer's last regular save. The one before has fewer digits, so that a retention in
the order of names as texts removes the newest checkpoint."""
_RESUMED = 23
"""The most steps of a trainer after a load, unless its next epoch ends later."""
LONGEST = 92
"""The most steps of a trainer's uninterrupted run."""
_LONG_S = 10.0
"""Steps of a cell that take longer are announced to the user, with the keys that make them fewer."""
_EPOCHS_WITHIN = LONGEST // 2
"""The most steps in which the end of a trainer's first epoch is looked for."""


def train_and_choose(cell: Cell, unsaved: ReferenceRun, exactly: bool) -> Cell:
    """Train a trainer without saves, choose its steps, and note what training changes; return the cell with
    these steps."""
    config, gathered = cell.config, cell.world.gathered
    run = training.build_without_saves(cell, unsaved)
    assert isinstance(run, TrainerRun)
    first, newest = retained(run.attributes()), State()
    most, step_s = max(LONGEST, config.last_step), math.inf
    looks_until = 0 if config.train_steps else _EPOCHS_WITHIN

    def window_now() -> Window:
        return window_of_trainer(config, gathered(run.epochs.steps)[0], most, exactly)

    while run.train_state.step < max(window_now().last, min(most, looks_until)):
        began = time.perf_counter()
        try:
            steps.train(cell, run, run.train_state.step + 1)
        except TrainingEndedError as ended:
            most = ended.step
            try:
                window_now()
            except ValueError as too_few:  # one of the first steps raised by a mistake
                raise (ended.__cause__ or ended if most <= FEWEST_STEPS else too_few) from None
            break
        step_s = min(step_s, max(gathered(time.perf_counter() - began)))
        with cell.phase("verify", "retained"):
            newest = run.retained_state()
        if run.train_state.step == 1:
            attributes = own_attributes(run.trainer)
            first |= {name: leaf for name, leaf in newest[StatePart.extra].items() if name not in attributes}
        elif run.train_state.step == FEWEST_STEPS:
            announce_length(cell, window_now(), looks_until, step_s)
        if run.train_state.step == window_now().last:
            unsaved.states[run.train_state.step] = newest
    window = window_now()
    unsaved.states = {window.last: unsaved.states.get(window.last, newest)}
    unsaved.unsaved_values[window.last] = run.unsaved_values().texts
    unsaved.losses += run.train_state.losses[: window.last]
    unsaved.exclusions = replace(run.exclusions, changing=changed_by_training(first, newest[StatePart.extra]))
    cell.report.note("column", " ".join(map(str, window.saves)), name="save_steps")
    cell.report.note("column", str(window.resume_steps), name="resume_steps")
    training.verify_replicas(cell, run)
    return replace(cell, trainer_steps=window)


def announce_length(cell: Cell, window: Window, looks_until: int, step_s: float) -> None:
    """Announce how long the other steps take, by the faster of the first two, if that is long; raise Skip if
    it is longer than a cell may take."""
    end = window.end_of(window.saves[0])
    resumed = sum(window.end_of(step) - step for step in (*window.saves, end, window.saves[-1]))
    left = max(window.last, looks_until) - FEWEST_STEPS + end + window.last + resumed
    left_s, limit_s = left * step_s, cell.config.timeouts.cell_s
    about = f"{left} more steps take about {duration_text(left_s)}"
    text = f"{about}; for fewer pass train_steps, resume_steps, saves"
    if left_s > limit_s:
        raise Skip(f"{text}, such as 2, 2 and 1, or allow more than timeouts.cell_s={limit_s:g}")
    if left_s > _LONG_S:
        cell.announce("train", text)


def window_of_trainer(config: Config, epoch_ends: Sequence[int], most: int, exactly: bool = False) -> Window:
    """Choose the steps of a trainer: as many saves as the configuration asks for, the last after step 10; one
    exactly at an epoch's end and one in the epoch that follows; and resumed runs that pass the next end.

    Args:
        epoch_ends: the steps that took the last batch of an epoch, as far as they were seen.
        most: the most steps of the uninterrupted run.
        exactly: as many saves as the configuration asks for, and no others.

    Raises:
        ValueError: the trainer takes too few steps.
    """
    asked = f"train_steps={config.train_steps} resume_steps={config.resume_steps} saves={config.saves}"
    too_few = f"the trainer takes {most} steps, too few for {asked}"
    if not (saves := _regular(config, most)):
        raise ValueError(too_few)
    if epoch_ends and not config.train_steps:
        saves = _with_epoch(saves, epoch_ends, most, len(saves) if exactly else len(saves) + 2)
    wanted = _RESUMED
    if epoch_ends:  # from the first save on past the end that follows the last one
        length = epoch_ends[0]
        wanted = max(wanted, *((step // length + 1) * length + 1 - step for step in saves))
    last = saves[-1] + config.resume_steps if config.resume_steps else min(saves[-1] + wanted, most)
    if not saves[-1] < last <= most:
        raise ValueError(too_few)
    return Window(tuple(saves), config.resume_steps or wanted, last)


def _regular(config: Config, most: int) -> list[int]:
    """Return the steps of saves that do not depend on epochs."""
    if config.train_steps:
        return config.save_steps
    room = max(most - (config.resume_steps or FEWEST_STEPS), 0)
    count = min(config.saves, room)
    if room >= max(_NEWEST, count):
        first = max(1, _NEWEST + 1 - count)
        regular = {*range(first, first + count)}
    else:
        regular = {room // count * number or number for number in range(1, count + 1)}
    return sorted(regular | ({config.save_at} if config.save_at is not None else set()))


def _with_epoch(saves: list[int], epoch_ends: Sequence[int], most: int, count: int) -> list[int]:
    """Return the steps of at most `count` saves: one at an epoch's end, one in the epoch that follows, and
    the newest of the others. Two of the others may be these."""
    length = epoch_ends[0]
    within = [end for end in epoch_ends if end in saves and end + 1 in saves]
    end = within[0] if within else length
    following = [step for step in saves if end < step < end + length]
    with_epoch = [end, following[0] if following else end + min(3, max(1, length // 2))]
    with_epoch = [step for step in with_epoch if step + FEWEST_STEPS <= most]
    others = [step for step in reversed(saves) if step not in with_epoch]
    return sorted([*with_epoch, *others][:count])
