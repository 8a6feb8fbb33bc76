"""What a cell does to its own process changes neither where its files go, nor what is told of it."""

from pathlib import Path

import pytest

from conftest import SMALL, Finished, run
from support.adversary import ESCAPES

pytestmark = pytest.mark.slow

SCENARIOS = ["leaves_folder", "looks_around", "speaks_for_others", "tells_escapes", "removes_rows"]
CONTROLS = [sign for sign in ESCAPES if not sign.isprintable()]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Into a folder that is named relative to the one that the driver is started in."""
    place = tmp_path_factory.mktemp("hostile")
    scenarios = f"scenario={','.join(SCENARIOS)}"
    few = ("parallel=ddp", "world_size=2", "device=cpu", "saves=1", "retry=0", "keep_checkpoints=all", *SMALL)
    ended = run(Path("sweep"), "-m", scenarios, "storage.root=root", *few, cwd=place)
    return Finished(ended.status, ended.out, ended.err, place / "sweep")


def test_checkpoints_of_a_cell_that_changes_its_folder_are_where_they_were_asked_for(sweep: Finished) -> None:
    row = sweep.row(scenario="leaves_folder")
    assert row["status"] == "pass", row["reason"]
    assert row["disk_bytes"] > 0
    assert list((sweep.folder.parent / "root" / "sweep" / row["cell"]).glob("step-*"))
    assert (sweep.folder / row["cell"] / "rank0.log").exists()


def test_ranks_meet_where_nobody_else_can_come(sweep: Finished) -> None:
    row = sweep.row(scenario="looks_around")
    assert row["status"] == "pass", row["reason"]


def test_what_a_rank_says_of_others_is_dropped_and_told(sweep: Finished) -> None:
    row = sweep.row(scenario="speaks_for_others")
    assert row["status"] == "pass", row["reason"]
    came = "rank 0: what came from it was dropped: RankReport of rank"
    told = [f"{came} 1, {row['cell']}, try 1", f"{came} 0, another, try 1"]
    assert row["details"]["dropped_messages"] == told
    for sentence in told:
        assert f"{row['cell']}: {sentence}" in sweep.err


def test_nothing_that_a_rank_says_reaches_the_terminal_as_more_than_text(sweep: Finished) -> None:
    row = sweep.row(scenario="tells_escapes")
    assert row["status"] == "error"
    assert "\x1b" in row["reason"], "the row has it as it was said"
    for text in (sweep.out, sweep.err):
        assert "owned" in text
        assert not [sign for sign in CONTROLS if sign in text.replace("\n", "")]
        assert not any(line.startswith("[9/9]") for line in text.splitlines())


def test_rows_that_a_cell_has_removed_are_written_again_and_count(sweep: Finished) -> None:
    assert [row["scenario"] for row in sweep.rows] == SCENARIOS
    assert sweep.rows[-1]["status"] == "pass"
    assert "4 rows of this sweep had vanished from results.jsonl" in sweep.err
    assert sweep.status == 1, "one of those that had vanished is an error"
