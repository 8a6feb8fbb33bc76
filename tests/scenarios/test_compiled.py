"""Compiled cells, all in one sweep: ranks pay for their first graph once."""

import pytest

from conftest import ONE_STEP, Finished, run

pytestmark = pytest.mark.slow

ASKED = {
    "eager_optimizers": "{parallel: 'none,fsdp,fsdp2', optimizer: 'sgd,adamw'}",
    "layers": "{parallel: fsdp2_per_layer, saves: 1}",
    "scenarios": "{scenario: 'convert,fine_tune,partial_load', parallel: fsdp2, save: async, saves: 1}",
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    blocks = [f"+hydra.sweeper.matrix.{name}={block}" for name, block in ASKED.items()]
    asked = ("compile=true", "device=cpu", "world_size=2", *ONE_STEP)
    return run(tmp_path_factory.mktemp("compiled") / "sweep", *blocks, *asked)


def test_compiled_cells_really_compile(compiled: Finished) -> None:
    rows = [row for row in compiled.rows if row["scenario"] == "save_load"]
    assert [row["status"] for row in rows] == ["pass"] * 7, compiled.out
    for row in rows:
        assert row["compile"] is True
        assert all(rank["not_compiled"] is None for rank in row["details"]["ranks"])


def test_compiled_models_are_converted_and_fine_tuned_too(compiled: Finished) -> None:
    rows = [row for row in compiled.rows if row["scenario"] != "save_load"]
    assert [row["status"] for row in rows] == ["pass"] * 3, compiled.out
