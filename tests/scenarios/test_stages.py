"""A stage that has to end in a crash: the next one, on fresh ranks, loads the state saved before."""

import pytest

from conftest import SMALL, Finished, run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("stages") / "sweep"
    cells = ("scenario=killed_in_save", "scenario.options.dies=true,false", "parallel=fsdp2")
    return run(folder, "-m", *cells, "world_size=2", "device=cpu", "retry=0", "saves=1", *SMALL)


def test_checkpoint_survives_a_death_in_the_next_save(killed: Finished) -> None:
    row, _ = killed.rows
    assert row["status"] == "pass", row["reason"]
    equal = ("model_equal", "optim_equal", "extra_equal", "loss_resume_equal")
    assert all(row[check] is True for check in (*equal, "powered")), row
    assert [rank["rank"] for rank in row["details"]["ranks"]] == [0, 1], "each of the second stage alone"


def test_expected_death_that_fails_is_an_error(killed: Finished) -> None:
    _, row = killed.rows
    assert row["status"] == "error"
    assert row["reason"] == "expected a rank to die in support.stages.save_twice, but none did"
    assert row["model_equal"] is None, "the next stage did not run"
    assert killed.status == 1
