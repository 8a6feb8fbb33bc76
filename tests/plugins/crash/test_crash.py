"""Jobs that are killed inside a save, and continue from the newest checkpoint."""

from pathlib import Path
from typing import Any

import pytest

from conftest import alive_in, cells_of, experiment, run, selected
from dcpbench.plugins.crash.killing import At, Killing, misplaced

EQUAL = ("model_equal", "optim_equal", "extra_equal", "loss_resume_equal", "state_resume_equal")
OVER = {
    "before_data_over_a_checkpoint": "crash_consistent",
    "in_publication_over_a_checkpoint": "crash_recoverable",
}


@pytest.fixture(scope="module")
def killed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Rows of cells, and what is alive in the folder of their sweep."""
    names = [name for name in cells_of("killed") if name in selected(request, "name")]
    ended = run(tmp_path_factory.mktemp("killed") / "sweep", *experiment("killed", names))
    return {**dict(zip(names, ended.rows, strict=True)), "alive": alive_in(ended.folder)}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all_in_publication", "some_peers_wait"])
def test_killed_job_resumes_the_previous_checkpoint(killed: dict[str, Any], name: str) -> None:
    row = killed[name]
    assert (row["status"], row["reason"]) == ("pass", None)
    checks = (*EQUAL, "crash_recoverable", "crash_consistent", "contract_held", "checkpoint_whole")
    assert all(row[check] is True for check in checks)
    # Resumed after the complete checkpoint, and after the one that is saved where the save was killed.
    assert all(rank["resumed"].keys() == {"1"} for rank in row["details"]["ranks"])
    hung = name == "some_peers_wait"
    assert row["ranks_hung"] == (1 if hung else None)
    assert not hung or row["cell_s"] < 60, "it ran until the time limit of a cell"
    assert killed["alive"] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["refused_before_it_is_killed"])
def test_failure_before_the_kill_is_an_error(killed: dict[str, Any], name: str) -> None:
    row = killed[name]
    assert (row["status"], row["ranks_hung"]) == ("error", None)
    assert row["reason"].endswith("in save: RuntimeError: one save only (support/storage.py:45)")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "check"),
    OVER.items(),
)
def test_killed_save_over_a_checkpoint_loses_it(killed: dict[str, Any], name: str, check: str) -> None:
    row = killed[name]
    assert (row["status"], row["ranks_hung"]) == ("xfail", 0)
    checks = ("crash_consistent", "crash_recoverable", "contract_held")
    assert [each for each in checks if not row[each]] == [check]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["before_metadata_over_a_checkpoint"])
def test_killed_save_that_loads_is_resumed(killed: dict[str, Any], name: str) -> None:
    """The metadata of the checkpoint before fit the new data. The resumed run takes as many steps as any."""
    row = killed[name]
    assert (row["status"], row["reason"]) == ("pass", None)
    assert all(row[check] is True for check in EQUAL)
    resumed = [
        {step: len(losses) for step, losses in rank["resumed"].items()} for rank in row["details"]["ranks"]
    ]
    assert resumed == [{"2": row["resume_steps"]}] * 2


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
