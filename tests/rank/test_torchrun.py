"""Code that was written for torchrun runs in ranks."""

from pathlib import Path

import pytest

from conftest import ONE_STEP, Finished, run

pytestmark = pytest.mark.slow

TARGET = "rank.started_by_torchrun"
WORDS = ("device=cpu", "world_size=2", "parallel=ddp", "saves=1", "retry=0", *ONE_STEP)
INSTEAD = (
    "ValueError: trying to initialize the default process group twice! Ranks have a process group before "
    "they import your code: leave out init_process_group, or call it only if not "
    "torch.distributed.is_initialized()"
)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    targets = f"workload.target={TARGET}.build,{TARGET}.begins_a_group"
    return run(tmp_path_factory.mktemp("torchrun") / "sweep", "-m", targets, *WORDS)


def test_ranks_have_the_variables_of_torchrun(sweep: Finished) -> None:
    row = sweep.row(model=f"{TARGET}.build")
    assert row["status"] == "pass", row["reason"]


def test_second_process_group_is_refused_with_a_fix(sweep: Finished) -> None:
    row = sweep.row(model=f"{TARGET}.begins_a_group")
    assert row["status"] == "error"
    assert f" in build without a save: {INSTEAD} (rank/started_by_torchrun.py:" in row["reason"]


def test_group_of_a_script_is_refused_before_a_cell(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import torch\ntorch.distributed.init_process_group()\n")
    ended = run(tmp_path / "sweep", "workload.target=script.build", *WORDS, cwd=tmp_path)
    assert (ended.status, ended.out) == (2, "")
    assert ended.err == f"dcpbench: workload.target=script.build: cannot be imported: {INSTEAD}\n"
