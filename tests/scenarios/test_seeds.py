"""`experiment=seeds`: what PyTorch's own tests of checkpointing cover."""

from pathlib import Path

import pytest

from conftest import ONE_STEP, run

SCENARIOS = {
    "save_load",
    "convert",
    "partial_load",
    "key_order",
    "overwrite",
    "in_place",
    "stateful_or_not",
    "fine_tune",
    "fine_tune_submodules",
    "no_cpu_backend",
    "no_dist",
}

pytestmark = pytest.mark.slow


def test_the_experiment_of_pytorchs_own_tests(tmp_path: Path) -> None:
    ended = run(tmp_path / "sweep", "experiment=seeds", "device=cpu", *ONE_STEP)
    assert ended.status == 0, ended.out
    statuses = {row["status"] for row in ended.rows}
    assert statuses == {"pass", "xfail", "skip"}
    assert {row["scenario"] for row in ended.rows} == SCENARIOS
    unexpected = [
        row["cell"] for row in ended.rows if row["status"] == "xfail" and row["parallel"] != "fsdp_tp"
    ]
    assert unexpected == []
