"""Models that torch's checkpointing does not restore completely: their rows say what is lost, and by which
bug."""

from typing import Any

import pytest

from conftest import ONE_STEP, Finished, blocks, run, selected
from dcpbench.core.state import StatePart
from dcpbench.runs.build_run import build
from dcpbench.runs.run_state import live_state
from dcpbench.workloads.workload import batches_of
from support.alone import alone, config, world


def test_extra_state_is_compared_as_saved() -> None:
    given = config(model="extra_state")
    trained = build(given, world(), 0)
    trained.train(batches_of(given, world().device), 2)
    held = live_state(trained)[StatePart.model]
    assert held["_extra_state", "seen"] == 2
    assert held["_extra_state", "powers"].local.tolist() == [1.0, 2.0, 4.0]
    saved = trained.state()["model"].state_dict()["_extra_state"]
    assert (saved["seen"], saved["powers"].tolist()) == (2, [1.0, 2.0, 4.0])


def test_frozen_layer_is_saved_unless_left_out() -> None:
    run = build(config(model="frozen"), world(), 0)
    assert live_state(run)[StatePart.flags]["requires_grad", "net1.weight"] is False
    assert "net1.weight" in run.state()["model"].state_dict()


@pytest.mark.cell
@pytest.mark.parametrize("optimizer", ["adagrad", "sgd_plain"])
def test_save_before_the_first_step_passes(optimizer: str) -> None:
    once = {"model": "short", "train_steps": 1, "resume_steps": 1, "saves": 1}
    verdict, _ = alone(**once, optimizer=optimizer, save_at=0)
    assert verdict.status == "pass", verdict.reason


@pytest.fixture(scope="module")
def defective(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    cells = [
        {"model": model, "parallel": parallel} for model, parallel in selected(request, "model", "parallel")
    ]
    cells.append({"scenario": "convert", "model": "batch_norm", "parallel": "fsdp2", "load_parallel": "ddp"})
    words = ("device=cpu", "world_size=2", "saves=1", *ONE_STEP)
    return run(tmp_path_factory.mktemp("defective") / "sweep", *blocks(cells), *words)


IN_TRAINING = {"training": True, "gradient_close": True, "batch_loss_close": True}
BUFFER: dict[str, Any] = {"model_equal": False, "optim_equal": True, "loss_resume_equal": True, **IN_TRAINING}
NO_KEY = "Missing key in checkpoint state_dict: optimizer.state.experts.unused.weight"
LOST: dict[tuple[str, str], tuple[str, str, dict[str, Any]]] = {
    ("batch_norm", "ddp"): ("xfail", "buffers-of-some-rank", BUFFER),
    ("batch_norm", "fsdp2"): ("xfail", "buffers-of-some-rank", BUFFER),
    ("unused", "fsdp2"): ("xfail", NO_KEY, {}),
    ("unused", "ddp"): ("skip", "", {}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("model", "parallel"), LOST)
def test_lost_state_is_a_known_failure(defective: Finished, model: str, parallel: str) -> None:
    """`make test` has the others in workloads (test_ordinary_workloads.py)."""
    status, reason, columns = LOST[model, parallel]
    row = defective.row(model=model, parallel=parallel, scenario="save_load")
    assert row["status"] == status, row["reason"]
    assert reason in row["reason"]
    assert {name: row[name] for name in columns} == columns


@pytest.mark.slow
def test_buffers_that_ddp_overwrites_are_explained_on_each_rank(defective: Finished) -> None:
    row = defective.row(scenario="convert")
    assert row["status"] == "xfail", row["reason"]
    assert "buffers-of-some-rank" in row["reason"]
    assert (row["model_equal"], row["optim_equal"]) == (False, True)
