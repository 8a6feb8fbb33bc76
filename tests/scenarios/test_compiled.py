"""Compiled cells, in one sweep: ranks compile their first graph once."""

import pytest

from conftest import SMALL, Finished, blocks, run, selected, tiered

pytestmark = pytest.mark.slow

MODELS = [
    *((parallel, optimizer) for parallel in ("none", "fsdp", "fsdp2") for optimizer in ("sgd", "adamw")),
    ("fsdp2_per_layer", "adam"),
]


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    asked = selected(request, "parallel", "optimizer")
    cells = [{"parallel": parallel, "optimizer": optimizer} for parallel, optimizer in asked]
    others = {"parallel": "fsdp2", "save": "async"}
    cells += [{"scenario": scenario, **others} for scenario in selected(request, "scenario")]
    words = ("compile=true", "device=cpu", "world_size=2", "saves=1", *SMALL)
    return run(tmp_path_factory.mktemp("compiled") / "sweep", *blocks(cells), *words)


@pytest.mark.parametrize(("parallel", "optimizer"), tiered(MODELS, ("fsdp2", "adamw")))
def test_compiled_cells_really_compile(compiled: Finished, parallel: str, optimizer: str) -> None:
    row = compiled.row(scenario="save_load", parallel=parallel, optimizer=optimizer)
    assert row["status"] == "pass", compiled.out
    assert row["compile"] is True
    assert all(rank["not_compiled"] is None for rank in row["details"]["ranks"])


@pytest.mark.extended
@pytest.mark.parametrize("scenario", ["convert", "fine_tune", "partial_load"])
def test_compiled_models_convert_and_fine_tune(compiled: Finished, scenario: str) -> None:
    row = compiled.row(scenario=scenario)
    assert row["status"] == "pass", compiled.out
