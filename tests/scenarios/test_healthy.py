"""Models and optimizers of users in which nothing is wrong: every cell passes, and its controls fire."""

import pytest

from conftest import Finished, blocks, cells_of, in_make_test, run, selected
from support.notes import why_not

pytestmark = pytest.mark.slow


BLOCKS = cells_of("healthy")


@pytest.fixture(scope="module")
def healthy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    asked = {*selected(request, "block"), "random"}
    cells = [cell for block, cell in BLOCKS.items() if block in asked]
    if in_make_test(request):
        cells = [{**cell, "parallel": cell["parallel"].rpartition(",")[2]} for cell in cells]
        cells.append({**BLOCKS["random"], "parallel": "ddp"})
    return run(tmp_path_factory.mktemp("healthy") / "sweep", *blocks(cells))


@pytest.mark.parametrize("block", BLOCKS)
def test_no_false_alarm(healthy: Finished, block: str) -> None:
    assert healthy.rows, healthy.err
    assert {row["cell"]: row["reason"] for row in healthy.rows if row["status"] != "pass"} == {}


TWIN = ("gradient_close", "batch_loss_close")


@pytest.mark.parametrize("parallel", ["none", "ddp", "fsdp2_tp"])
def test_drawing_model_may_have_a_twin(healthy: Finished, parallel: str) -> None:
    row = healthy.row(model="dropout", parallel=parallel)
    assert row["random_equal"] is True
    assert row["loss_resume_equal"] is True
    assert row["step_equal"] is True, "its gradients are the ranks'"
    held = parallel != "fsdp2_tp"
    assert [row[check] for check in TWIN] == [True if held else None] * 2
    why = "the model draws random numbers in training, and the twin draws others"
    told = {} if held else dict.fromkeys(TWIN, why)
    for rank in row["details"]["ranks"]:
        assert {name: one for name, one in why_not(rank).items() if name in TWIN} == told
