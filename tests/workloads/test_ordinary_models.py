"""Models that people train pass: differences of rounding are not reported."""

import pytest

from conftest import Finished, blocks, cells_of, run, selected

pytestmark = pytest.mark.slow

ALL = ("separate", "packed", "tied", "vit", "dead")
ONE = ("separate",)
MODEL, OPTIMIZER = "+workload.options.model", "+workload.options.optimizer"
CELLS = {
    "matrices": {MODEL: "separate", "parallel": "fsdp2"},
    "tensor_parallel": {
        MODEL: "separate",
        OPTIMIZER: "adamw",
        "parallel": "fsdp2_tp_blocks",
        "world_size": 2,
    },
}
"""Of these blocks `make test` has a cell each."""


@pytest.fixture(scope="module")
def sweep(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Run a cell of each kind of conf/experiment/ordinary.yaml."""
    chosen = ["experiment=ordinary", "matrix=pairwise", "seed=3", "compile=false"]
    if ALL not in selected(request, "models"):
        cells, of_all = cells_of("ordinary"), {MODEL: ONE[0], "seed": 3, "compile": False}
        chosen = blocks({**cells[name], **of_one, **of_all} for name, of_one in CELLS.items())
    return run(tmp_path_factory.mktemp("ordinary") / "sweep", *chosen)


@pytest.mark.parametrize("models", [ONE, ALL], ids=["one", "all"])
def test_ordinary_models_pass(sweep: Finished, models: tuple[str, ...]) -> None:
    assert {row["overrides"]: row["reason"] for row in sweep.rows if row["status"] != "pass"} == {}
    seen = {row["parallel"] for row in sweep.rows}
    assert seen >= {"fsdp2", "fsdp2_tp_blocks"}
    assert seen == {"ddp", "fsdp", "fsdp2", "hsdp2", "fsdp2_tp_blocks"} or models is ONE
    for name in (*models, "muon", *(() if models is ONE else ("autocast",))):
        assert any(name in row["overrides"] for row in sweep.rows), name


def test_every_gradient_is_compared(sweep: Finished) -> None:
    """The gradient of a key projection's bias is rounding only, so it has no control unless it is
    reproduced."""
    for row in sweep.rows:
        if "separate" not in row["overrides"] or "autocast" in row["overrides"]:
            continue
        control = row["details"]["checks"]["gradient_close"]["control"]
        named = "blocks.0.attention.key.bias in the uninterrupted run" in control
        assert named == (row["gradient_bound"] == "rounding_of_sum"), row["overrides"]
        assert "blocks.0.attention.query.weight in the uninterrupted run" in control


def test_rows_name_their_bound(sweep: Finished) -> None:
    for row in sweep.rows:
        split = row["parallel"] == "fsdp2_tp_blocks"
        assert row["gradient_bound"] == ("measured_noise" if split else "rounding_of_sum")
        measured = "muon" in row["overrides"] and row["parallel"] == "fsdp2"
        assert row["step_bound"] == ("measured" if measured else "bits")
        assert row["training"] is row["resume"] is True


@pytest.mark.exhaustive
def test_every_ordinary_cell_passes(tmp_path_factory: pytest.TempPathFactory) -> None:
    swept = run(tmp_path_factory.mktemp("every") / "sweep", "experiment=ordinary", timeout_s=7200)
    assert {row["overrides"]: row["reason"] for row in swept.rows if row["status"] != "pass"} == {}
