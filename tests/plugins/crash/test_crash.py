"""Jobs that are killed inside a save, and continue from the newest checkpoint."""

from pathlib import Path
from typing import Any

import pytest

from conftest import Finished, alive_in, run
from dcpbench.plugins.crash.killing import At, Killing, misplaced

EQUAL = ("model_equal", "optim_equal", "extra_equal", "loss_resume_equal", "state_resume_equal")
ORDER = ("all in publication", "peers wait", "before data, same", "in publication, same", "refused")


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return run(tmp_path_factory.mktemp("killed") / "sweep", "experiment=killed")


def row_of(killed: Finished, name: str) -> dict[str, Any]:
    return killed.rows[ORDER.index(name)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ORDER[:2])
def test_killed_job_resumes_the_previous_checkpoint(killed: Finished, name: str) -> None:
    row = row_of(killed, name)
    assert (row["status"], row["reason"]) == ("pass", None)
    checks = (*EQUAL, "crash_recoverable", "crash_consistent", "contract_held", "checkpoint_whole")
    assert all(row[check] is True for check in checks)
    # Resumed after the complete checkpoint, and after the one that is saved where the save was killed.
    assert all(rank["resumed"].keys() == {"1"} for rank in row["details"]["ranks"])


@pytest.mark.slow
def test_hung_rank_is_counted_and_killed(killed: Finished) -> None:
    assert [row["ranks_hung"] for row in killed.rows] == [None, 1, 0, 0, None]
    assert row_of(killed, "peers wait")["cell_s"] < 60, "it ran until the time limit of a cell"
    assert alive_in(killed.folder) == []


@pytest.mark.slow
def test_failure_before_the_kill_is_an_error(killed: Finished) -> None:
    row = row_of(killed, "refused")
    assert row["status"] == "error"
    assert row["reason"].endswith("in save: RuntimeError: one save only (support/storage.py:45)")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "check"),
    [("before data, same", "crash_consistent"), ("in publication, same", "crash_recoverable")],
)
def test_killed_save_over_a_checkpoint_loses_it(killed: Finished, name: str, check: str) -> None:
    row = row_of(killed, name)
    assert row["status"] == "xfail"
    checks = ("crash_consistent", "crash_recoverable", "contract_held")
    assert [each for each in checks if not row[each]] == [check]


COMPLETE = {"__0_0.distcp": "100 bytes, a", "__1_0.distcp": "90 bytes, b", ".metadata": "9 bytes, c"}
"""Digests of the files of a complete checkpoint of two ranks."""
NEW = {"__0_0.distcp": "100 bytes, d", "__1_0.distcp": "90 bytes, e"}
LEFT = {
    At.before_data: {"__0_0.distcp": "100 bytes, d"},
    At.in_data: {**NEW, "__1_0.distcp": "40 bytes, f"},
    At.before_metadata: NEW,
    At.in_publication: {**NEW, ".metadata.tmp": "9 bytes, g"},
}
"""Digests of the files of a new checkpoint after rank 1, or the publisher, is killed at a point."""


@pytest.mark.parametrize("over", [False, True])
@pytest.mark.parametrize("point", At)
def test_files_identify_the_point_of_the_kill(point: At, over: bool) -> None:
    before = COMPLETE if over else {}
    killing = Killing(Path(), Path(), point, (0,) if point is At.in_publication else (1,))
    after = {**before, **LEFT[point]}
    if point is At.in_publication:
        after.pop(".metadata", None)
    fits = [at for at in At if not misplaced(at, killing, COMPLETE, before, after)]
    assert fits == [point]
