"""The steps of a trainer's cell: they follow from its epochs and its end, and never from a clock."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dcpbench.cell.cell import Window
from dcpbench.cell.trainer_steps import LONGEST, announce_length, window_of_trainer
from dcpbench.core.rank_report import Skip
from support.alone import bare_cell, config


def chosen(length: int = 0, most: int = LONGEST, exactly: bool = False, **values: Any) -> Window:
    """Return the steps of a trainer with epochs of this length, of which the first half of its steps is
    seen."""
    ends = range(length, LONGEST // 2 + 1, length) if length else ()
    return window_of_trainer(config(checkpointer="trainer", **values), ends, most, exactly)


SAVES = {
    0: (8, 9, 10),
    3: (8, 9, 10),
    5: (5, 8, 9, 10),
    6: (6, 8, 9, 10),
    7: (7, 8, 9, 10),
    9: (8, 9, 10),
    12: (8, 9, 10, 12, 15),
    40: (8, 9, 10, 40, 43),
}
"""The default saves, by the length of an epoch; 0 is without any."""


@pytest.mark.parametrize("length", SAVES)
def test_saves_are_at_an_end_of_an_epoch_and_in_the_next(length: int) -> None:
    window = chosen(length)
    assert window.saves == SAVES[length]
    for step in window.saves if length else ():
        assert window.end_of(step) > (step // length + 1) * length, "it passes the end of the epoch"


@pytest.mark.parametrize("length", [7, 12, 40])
def test_chain_has_no_saves_in_addition(length: int) -> None:
    saves = chosen(length, exactly=True).saves
    assert len(saves) == 3
    assert length in saves
    assert any(length < step < 2 * length for step in saves)


SHORT = {3: (1,), 5: (1, 2, 3), 11: (3, 6, 9), 12: (8, 9, 10), 36: (8, 9, 10)}
"""The saves of a job, by its number of steps."""


@pytest.mark.parametrize("most", SHORT)
def test_window_fits_into_a_short_job(most: int) -> None:
    window = chosen(most=most)
    assert window.saves == SHORT[most]
    assert window.last == min(most, 33)


def test_save_in_the_next_epoch_can_be_the_newest() -> None:
    assert chosen(9, exactly=True, saves=2).saves == (9, 10)


KEYS: tuple[tuple[dict[str, Any], Window], ...] = (
    ({"saves": 1}, Window((7, 10), 23, 33)),
    ({"saves": 5}, Window((6, 7, 8, 9, 10), 23, 33)),
    ({"resume_steps": 5}, Window((7, 8, 9, 10), 5, 15)),
    ({"save_at": 0}, Window((0, 7, 8, 9, 10), 23, 33)),
    ({"train_steps": 4}, Window((4, 8, 12), 23, 35)),
    ({"train_steps": 4, "resume_steps": 6}, Window((4, 8, 12), 6, 18)),
    ({"train_steps": 1, "resume_steps": 1, "saves": 1}, Window((1,), 1, 2)),
)


@pytest.mark.parametrize(("values", "window"), KEYS)
def test_keys_of_the_user_decide(values: dict[str, Any], window: Window) -> None:
    assert chosen(7, **values) == window


@pytest.mark.parametrize(
    ("most", "values"),
    [(1, {}), (2, {}), (5, {"resume_steps": 5}), (11, {"train_steps": 4}), (4, {"train_steps": 4})],
)
def test_job_that_is_too_short_is_refused(most: int, values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"the trainer takes {most} steps, too few for train_steps="):
        chosen(most=most, **values)


@pytest.mark.parametrize(
    ("step_s", "announced"), [(0.01, []), (0.5, ["train", "202 more steps take about 2 min"])]
)
def test_long_cell_is_announced(tmp_path: Path, step_s: float, announced: list[str]) -> None:
    given = config(checkpointer="trainer")
    told = list[str]()
    cell = replace(bare_cell(tmp_path, given), announce=lambda *texts: told.extend(texts))
    announce_length(cell, chosen(), LONGEST // 2, step_s)
    assert [text.partition(";")[0] for text in told] == announced


def test_cell_that_is_too_long_is_skipped_with_the_keys(tmp_path: Path) -> None:
    cell = bare_cell(tmp_path, config(checkpointer="trainer"))
    keys = r"train_steps, resume_steps, saves, such as 2, 2 and 1, or allow more than timeouts.cell_s=300"
    with pytest.raises(Skip, match=keys):
        announce_length(cell, chosen(), LONGEST // 2, 2.0)
