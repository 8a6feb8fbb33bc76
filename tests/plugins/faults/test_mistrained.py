"""Training that is wrong under its parallelism is reported, and the resume is not blamed for it."""

import pytest

from conftest import Finished, blocks, cells_of, run, selected
from dcpbench.analysis.causes import causes_of
from dcpbench.config.groups import InjectedAt
from dcpbench.plugins.faults.expected import NothingToInjectError
from dcpbench.plugins.faults.registry import load_faults
from support.alone import run_alone
from support.notes import noted

ONE_STEP = {"saves": 1, "train_steps": 1, "resume_steps": 1}

REPORTED_BY = {
    "eps_tenfold": {"step_equal"},
    "gradients_summed": {"gradient_close"},
    "layer_gradient_scaled": {"gradient_close"},
    "lr_off_on_one_rank": {"step_equal"},
    "share_trained_twice": {"gradient_close", "batch_loss_close"},
}


@pytest.fixture(scope="module")
def mistrained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    cells = cells_of("mistrained")
    cells["shards"]["fault"] = ",".join(selected(request, "fault") or ["eps_tenfold"])
    cells["replicas"]["fault"] = ",".join(selected(request, "drift") or ["lr_off_on_one_rank"])
    return run(tmp_path_factory.mktemp("mistrained") / "sweep", *blocks(cells.values()))


def _failed(row: dict[str, object], training: bool = True) -> set[str]:
    of_training = {"gradient_close", "step_equal", "replicas_equal", "batch_loss_close"}
    failed = {
        check for check, passed in row.items() if passed is False and check.endswith(("_equal", "_close"))
    }
    return failed & of_training if training else failed - of_training


def test_every_fault_of_training_is_tried() -> None:
    of_training = {name for name, spec in load_faults().items() if spec.at is InjectedAt.training}
    assert of_training == {*REPORTED_BY, "gradients_not_averaged"}


@pytest.mark.slow
@pytest.mark.parametrize("fault", REPORTED_BY)
def test_wrong_training_is_reported(mistrained: Finished, fault: str) -> None:
    row = mistrained.row(parallel="fsdp2", fault=fault, world_size=2)
    assert (row["status"], row["fault_seen"]) == ("fail", True), row["reason"]
    assert (row["resume"], row["training"]) == (True, False)
    assert row["reason"].startswith("the resume is correct; training: ")
    assert _failed(row) == REPORTED_BY[fault]
    lost = "do not train on the batch that was drawn" in str(causes_of(row))
    assert lost is (fault == "share_trained_twice")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "drift"),
    [("ddp", "gradients_not_averaged"), ("ddp", "lr_off_on_one_rank"), ("hsdp", "lr_off_on_one_rank")],
)
def test_drifting_replicas_are_reported(mistrained: Finished, parallel: str, drift: str) -> None:
    row = mistrained.row(parallel=parallel, fault=drift)
    assert (row["fault_seen"], row["training"]) == (True, False), row["reason"]
    assert "replicas_equal" in _failed(row)
    assert row["resume"] is False  # a checkpoint has one of the replicas
    assert "have drifted apart" in str(causes_of(row))
    assert "known failure" not in row["reason"]


@pytest.mark.slow
def test_correct_training_passes(mistrained: Finished) -> None:
    row = mistrained.row(parallel="fsdp2", fault=None)
    assert (row["status"], row["resume"], row["training"]) == ("pass", True, True), row["reason"]


@pytest.mark.parametrize("fault", ["gradients_summed", "gradients_not_averaged", "share_trained_twice"])
def test_fault_of_shares_needs_several_ranks(fault: str) -> None:
    with pytest.raises(NothingToInjectError):
        run_alone(fault, **ONE_STEP)


@pytest.mark.cell
def test_buffers_do_not_widen_the_bound_of_a_step() -> None:
    # The noise of nondeterministic kernels is measured by twins that begin with these buffers.
    ended = run_alone("layer_gradient_scaled", model="buffered", deterministic=False, **ONE_STEP)
    assert noted(ended.reports[0], "column")["gradient_bound"] == "measured_noise"
    assert ended.verdict.fault_seen, ended.verdict.reason
