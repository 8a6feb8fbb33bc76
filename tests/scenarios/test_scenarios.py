"""Every scenario on CPU ranks with gloo, under every parallelism that it supports."""

from itertools import product
from pathlib import Path

import pytest

from conftest import ONE_STEP, PARALLELISMS, SMALL, Finished, blocks, run, seen_through, selected
from support.notes import texts

CHECKS_OF = {
    "partial_load": ("model_equal", "optim_equal", "contract_held"),
    "key_order": ("model_equal", "optim_equal", "extra_equal"),
    "overwrite": ("model_equal", "optim_equal", "extra_equal", "loss_resume_equal", "contract_held"),
    "in_place": ("model_equal", "optim_equal", "extra_equal", "loss_resume_equal", "contract_held"),
    "stateful_or_not": ("model_equal", "optim_equal", "extra_equal", "contract_held"),
    "fine_tune": ("model_equal", "optim_equal", "extra_equal", "loss_resume_equal", "contract_held"),
}
KNOWN = "fsdp_tp"
FOUR = ("hsdp", "hsdp2", "fsdp2_tp")
"""Which take four ranks."""
OF_SEEDS = ("fsdp", KNOWN)
"""Under which `experiment=seeds` runs every one of these scenarios."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def matrix(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    cells = [
        {"scenario": scenario, "parallel": parallel, "world_size": 4 if parallel in FOUR else 2}
        for parallel, scenario in selected(request, "parallel", "scenario")
        if parallel not in OF_SEEDS
    ]
    cells.append({"scenario": "chain", "parallel": "fsdp2", "save": "async", "load_into": "gradients"})
    folder = tmp_path_factory.mktemp("scenarios") / "sweep"
    return run(folder, "device=cpu", "saves=2", *SMALL, *blocks({"world_size": 2, **cell} for cell in cells))


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The cells of PyTorch's own checkpoint tests; the compiled ones are four of `make run`'s."""
    eager = "hydra.sweeper.matrix.end_to_end.compile=false"
    return run(tmp_path_factory.mktemp("seeds") / "sweep", "experiment=seeds", "device=cpu", eager, *ONE_STEP)


def test_experiment_of_pytorchs_own_tests(seeds: Finished) -> None:
    assert seeds.status == 0, seeds.out
    statuses = {row["status"] for row in seeds.rows}
    assert statuses == {"pass", "xfail", "skip"}
    more = {"save_load", "convert", "fine_tune_submodules", "no_cpu_backend", "no_dist"}
    assert {row["scenario"] for row in seeds.rows} == {*CHECKS_OF, *more}
    unexpected = [row["cell"] for row in seeds.rows if row["status"] == "xfail" and row["parallel"] != KNOWN]
    assert unexpected == []
    ranks = [rank for row in seeds.rows for rank in row["details"].get("ranks", [])]
    assert not [rank for rank in ranks if texts(rank, "left_behind")]


@pytest.mark.parametrize(
    ("parallel", "scenario"),
    [(parallel, scenario) for parallel in PARALLELISMS for scenario in CHECKS_OF],
)
def test_scenario_passes_under_every_parallelism(
    matrix: Finished, request: pytest.FixtureRequest, scenario: str, parallel: str
) -> None:
    sweep = request.getfixturevalue("seeds") if parallel in OF_SEEDS else matrix
    row = sweep.row(scenario=scenario, parallel=parallel)
    if parallel == KNOWN:
        assert row["status"] == "xfail", row["reason"]
        assert "fsdp1-tp" in row["reason"]
        return
    assert row["status"] == "pass", row["reason"]
    assert row["powered"] is True
    held = {check: row[check] for check in CHECKS_OF[scenario]}
    assert all(held.values()), held
    assert row["gradient_close"] is True
    assert row["step_equal"] is True
    assert row["batch_loss_close"] is True
    assert row["state_resume_equal"] is True
    assert row["flags_equal"] is True
    assert row["side_effect_free"] is True


def test_comparisons_do_not_mix_with_an_upload(matrix: Finished) -> None:
    row = matrix.row(scenario="chain")
    assert row["status"] == "pass", row["reason"]


@pytest.fixture(scope="module")
def few(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    asked = selected(request, "checkpointer", "parallel")
    cells = blocks({"checkpointer": checkpointer, "parallel": parallel} for checkpointer, parallel in asked)
    words = ("raw=true", "world_size=2", "save=sync,async", "device=cpu", "saves=2", *SMALL)
    return run(tmp_path_factory.mktemp("few") / "sweep", *cells, *words)


FILES = [*product(("torch_save", "safetensors"), ("ddp", "fsdp2"))]


@pytest.mark.parametrize(("checkpointer", "parallel"), FILES)
def test_one_file_has_the_full_state_of_every_layout(few: Finished, checkpointer: str, parallel: str) -> None:
    skipped = few.row(checkpointer=checkpointer, parallel=parallel, save="async")
    assert skipped["status"] == "skip"
    assert " takes save=sync and not async: it has no background upload" in skipped["reason"]
    row = few.row(checkpointer=checkpointer, parallel=parallel, save="sync")
    assert row["status"] == "pass", row["reason"]
    also = (
        *("gradient_close", "step_equal", "batch_loss_close", "checkpoint_whole", "save_harmless"),
        "powered",
    )
    assert all(row[check] is True for check in (*CHECKS_OF["in_place"][:4], *also))
    assert row["checkpoint_bytes"] > 0
    assert row["raw_write_s"] > 0
    assert few.status == 0


def test_faults_are_reported_with_torch_save(tmp_path: Path) -> None:
    seen_through(tmp_path / "sweep", "torch_save")
