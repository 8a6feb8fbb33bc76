"""Jobs that are killed inside a save, and go on from what they find."""

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
def test_a_job_that_is_killed_goes_on_from_the_checkpoint_before(killed: Finished, name: str) -> None:
    row = row_of(killed, name)
    assert (row["status"], row["reason"]) == ("pass", None)
    checks = (*EQUAL, "crash_recoverable", "crash_consistent", "contract_held", "checkpoint_whole")
    assert all(row[check] is True for check in checks)
    # Resumed after the complete checkpoint, and after the one that is saved where the save was killed.
    assert all(rank["resumed"].keys() == {"1"} for rank in row["details"]["ranks"])


@pytest.mark.slow
def test_a_rank_that_hangs_after_a_peer_died_is_counted_and_ended(killed: Finished) -> None:
    assert [row["ranks_hung"] for row in killed.rows] == [None, 1, 0, 0, None]
    assert row_of(killed, "peers wait")["cell_s"] < 60, "it took as long as a cell may"
    assert alive_in(killed.folder) == []


@pytest.mark.slow
def test_a_save_that_fails_before_the_kill_is_that_error(killed: Finished) -> None:
    row = row_of(killed, "refused")
    assert row["status"] == "error"
    assert row["reason"].endswith("in save: RuntimeError: one save only")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "check"),
    [("before data, same", "crash_consistent"), ("in publication, same", "crash_recoverable")],
)
def test_a_save_over_a_checkpoint_loses_it(killed: Finished, name: str, check: str) -> None:
    row = row_of(killed, name)
    assert row["status"] == "xfail"
    assert [one for one in ("crash_consistent", "crash_recoverable", "contract_held") if not row[one]] == [
        check
    ]


WHOLE = {"__0_0.distcp": "100 bytes, a", "__1_0.distcp": "90 bytes, b", ".metadata": "9 bytes, c"}
"""The files of a complete checkpoint of two ranks, as digests have them."""
NEW = {"__0_0.distcp": "100 bytes, d", "__1_0.distcp": "90 bytes, e"}
LEFT = {
    At.before_data: {"__0_0.distcp": "100 bytes, d"},
    At.in_data: {**NEW, "__1_0.distcp": "40 bytes, f"},
    At.before_metadata: NEW,
    At.in_publication: {**NEW, ".metadata.tmp": "9 bytes, g"},
}
"""What is there of a new one when rank 1, or the publisher, dies at a point."""


@pytest.mark.parametrize("over", [False, True])
@pytest.mark.parametrize("point", At)
def test_files_tell_at_which_point_a_save_was_killed(point: At, over: bool) -> None:
    before = WHOLE if over else {}
    killing = Killing(Path(), Path(), point, (0,) if point is At.in_publication else (1,))
    after = {**before, **LEFT[point]}
    if point is At.in_publication:
        after.pop(".metadata", None)
    fits = [at for at in At if not misplaced(at, killing, WHOLE, before, after)]
    assert fits == [point]
