"""A resume is a restart: what a user's trainer keeps in its process, in a hash seed, or only until the end of
an epoch, is lost when its job is started again."""

import re
from typing import Any

import pytest

from conftest import Finished, blocks, run, selected

pytestmark = pytest.mark.slow

REMOVE = ("KeepsTheBest", "KeepsEveryFourth")
RIGHT = (
    *("Plain", "CountsInItsModule", "MakesItsIteratorLate", "StaticGraph", "WritesOnRank0"),
    *REMOVE,
)
WRONG = {
    "OrderOfASet": "optim_equal",
    "ForgetsTheCount": "loss_resume_equal",
    "EndsEarly": "loss_resume_equal",
    "BeginsAgainWithEpoch0": "loss_resume_equal",
    "Epochs3": "loss_resume_equal",
    "Epochs12": "loss_resume_equal",
}
ERRORS = {
    "StaticGraphNoSync": r"rank \d in train without a save, in step 1: RuntimeError: expect_autograd_hooks_",
    "Crashes": r"rank \d in train without a save, in step 30: ValueError: planted",
    "EndsOnRank1": r"rank 1 in train without a save, in step 4: .* on this rank, and not on all",
}
OF_EPOCHS = ("MakesItsIteratorLate", "BeginsAgainWithEpoch0", "Epochs3", "Epochs12")
SHORT: dict[str, Any] = {"train_steps": 2, "resume_steps": 2, "saves": 2}


@pytest.fixture(scope="module")
def sweep(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    asked = selected(request, "trainer", "scenario", "ranks")
    cells = [
        {
            "workload.target": f"support.trainers.{trainer}",
            "scenario": scenario,
            "world_size": ranks,
            **({} if trainer in (*OF_EPOCHS, "Crashes") else SHORT),
            **({"saves": 3} if trainer in REMOVE else {}),
        }
        for trainer, scenario, ranks in asked
    ]
    words = ("checkpointer=trainer", "device=cpu", "parallel=ddp", "retry=0")
    return run(tmp_path_factory.mktemp("restart") / "sweep", *blocks(cells), *words, timeout_s=900)


def of_each(trainers: Any) -> list[tuple[str, str, int]]:
    return [(trainer, *on) for trainer in trainers for on in (("save_load", 2), ("chain", 3))]


def row_of(sweep: Finished, trainer: str, scenario: str, ranks: int) -> dict[str, Any]:
    return sweep.row(model=f"support.trainers.{trainer}", scenario=scenario, world_size=ranks)


@pytest.mark.parametrize(
    ("trainer", "scenario", "ranks"),
    of_each(RIGHT),
)
def test_right_trainer_passes(sweep: Finished, trainer: str, scenario: str, ranks: int) -> None:
    row = row_of(sweep, trainer, scenario, ranks)
    assert (row["status"], row["restart"]) == ("pass", "interpreter"), row["reason"]


@pytest.mark.parametrize(
    ("trainer", "scenario", "ranks"),
    of_each(WRONG),
)
def test_wrong_trainer_fails(sweep: Finished, trainer: str, scenario: str, ranks: int) -> None:
    row = row_of(sweep, trainer, scenario, ranks)
    assert (row["status"], row["resume"]) == ("fail", False), row["reason"]
    assert row[WRONG[trainer]] is False
    if trainer in OF_EPOCHS:
        assert (row["train_steps"], row["resume_steps"]) == (None, 23)
        assert len(row["save_steps"].split()) >= 3


@pytest.mark.parametrize(("trainer", "scenario", "ranks"), of_each(ERRORS))
def test_exception_of_a_step_is_an_error(sweep: Finished, trainer: str, scenario: str, ranks: int) -> None:
    row = row_of(sweep, trainer, scenario, ranks)
    assert row["status"] == "error"
    assert re.search(ERRORS[trainer], row["reason"]), row["reason"]
