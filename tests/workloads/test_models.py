"""Models that torch's checkpointing does not restore completely: their rows say what is lost, and by which
bug."""

import pytest

from conftest import ONE_STEP, Finished, blocks, run, selected, tiered
from dcpbench.workloads.build_run import build
from dcpbench.workloads.run_state import FLAGS, live_state
from dcpbench.workloads.workload import batches_of
from support.alone import alone, config, world


def test_extra_state_is_compared_as_saved() -> None:
    given = config(model="extra_state")
    trained = build(given, world(), 0)
    trained.train(batches_of(given, world().device), 2)
    held = live_state(trained)["model_equal"]
    assert held["_extra_state.seen"] == 2
    assert held["_extra_state.powers"].local.tolist() == [1.0, 2.0, 4.0]
    saved = trained.state()["model"].state_dict()["_extra_state"]
    assert (saved["seen"], saved["powers"].tolist()) == (2, [1.0, 2.0, 4.0])


def test_frozen_layer_is_saved_unless_left_out() -> None:
    run = build(config(model="frozen"), world(), 0)
    assert live_state(run)[FLAGS]["requires_grad.net1.weight"] is False
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
        {"model": "batch_norm", "parallel": ",".join(selected(request, "parallel") or ["fsdp2"])},
        {"model": "local_experts", "parallel": "ddp"},
        {"model": "unused", "parallel": "ddp,fsdp2"},
    ]
    words = ("device=cpu", "world_size=2", "saves=1", *ONE_STEP)
    return run(tmp_path_factory.mktemp("defective") / "sweep", *blocks(cells), *words)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", tiered(["ddp", "fsdp2"], "fsdp2"))
def test_running_statistics_are_those_of_one_rank(defective: Finished, parallel: str) -> None:
    row = defective.row(model="batch_norm", parallel=parallel)
    assert row["status"] == "xfail", row["reason"]
    assert "buffers-of-some-rank" in row["reason"]
    assert (row["model_equal"], row["optim_equal"], row["loss_resume_equal"]) == (False, True, True)
    assert (row["training"], row["gradient_close"], row["batch_loss_close"]) == (True, True, True)


@pytest.mark.slow
def test_local_expert_is_that_of_one_rank(defective: Finished) -> None:
    row = defective.row(model="local_experts", parallel="ddp")
    assert row["status"] == "xfail", row["reason"]
    assert "known failure local-experts" in row["reason"]
    assert (row["model_equal"], row["optim_equal"], row["extra_equal"]) == (False, False, True)


@pytest.mark.slow
def test_parameter_without_gradient_cannot_be_loaded(defective: Finished) -> None:
    row = defective.row(model="unused", parallel="fsdp2")
    assert row["status"] == "xfail", row["reason"]
    assert "Missing key in checkpoint state_dict: optimizer.state.experts.unused.weight" in row["reason"]
    assert defective.row(model="unused", parallel="ddp")["status"] == "skip"
