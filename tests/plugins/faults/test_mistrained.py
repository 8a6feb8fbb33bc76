"""Training that is wrong under its parallelism is reported, and the resume is not blamed for it."""

import pytest

from conftest import Finished, blocks, cells_of, run, selected, tiered
from dcpbench.analysis.causes import causes_of
from dcpbench.core.rank_report import NothingToInjectError
from dcpbench.plugins.faults.registry import listed
from support.alone import run_alone

ONE_STEP = {"saves": 1, "train_steps": 1, "resume_steps": 1}

REPORTED_BY = {
    "decay_missing": {"step_equal"},
    "decay_missing_on_one_rank": {"step_equal"},
    "eps_tenfold": {"step_equal"},
    "gradients_divided_too_much": {"gradient_close"},
    "gradients_not_averaged": {"gradient_close"},
    "gradients_summed": {"gradient_close"},
    "layer_gradient_scaled": {"gradient_close"},
    "lr_off_on_one_rank": {"step_equal"},
    "share_trained_twice": {"gradient_close", "batch_loss_close"},
}


@pytest.fixture(scope="module")
def mistrained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    cells = cells_of("mistrained")
    assert cells["shards"]["fault"] == "${faults:training}"
    cells["shards"]["fault"] = ",".join([*selected(request, "fault"), "gradients_of_wrong_ranks"])
    cells["replicas"]["fault"] = ",".join(selected(request, "drift") or ["lr_off_on_one_rank"])
    cells["four"]["parallel"] = ",".join(selected(request, "parallel") or ["hsdp"])
    return run(tmp_path_factory.mktemp("mistrained") / "sweep", *blocks(cells.values()))


def _failed(row: dict[str, object], training: bool = True) -> set[str]:
    of_training = {"gradient_close", "step_equal", "replicas_equal", "batch_loss_close"}
    failed = {
        check for check, passed in row.items() if passed is False and check.endswith(("_equal", "_close"))
    }
    return failed & of_training if training else failed - of_training


def test_faults_of_training_are_listed() -> None:
    assert {*REPORTED_BY, "gradients_of_wrong_ranks"} == {*listed("training").split(",")}
    assert not {*REPORTED_BY} & {*listed().split(",")}


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    tiered(REPORTED_BY, "decay_missing", "gradients_not_averaged", "share_trained_twice"),
)
def test_wrong_training_is_reported(mistrained: Finished, fault: str) -> None:
    row = mistrained.row(parallel="fsdp2", fault=fault)
    assert (row["status"], row["fault_seen"]) == ("fail", True), row["reason"]
    assert (row["resume"], row["training"]) == (True, False)
    assert row["reason"].startswith("the resume is correct; training: ")
    assert _failed(row) == REPORTED_BY[fault]
    lost = "do not train on the batch that was drawn" in str(causes_of(row))
    assert lost is (fault == "share_trained_twice")


@pytest.mark.slow
@pytest.mark.parametrize("parallel", tiered(["ddp", "hsdp", "fsdp2"], "hsdp"))
def test_average_over_wrong_ranks_is_reported(mistrained: Finished, parallel: str) -> None:
    row = mistrained.row(parallel=parallel, fault="gradients_of_wrong_ranks", world_size=4)
    assert (row["fault_seen"], row["training"], row["gradient_close"]) == (True, False, False), row["reason"]
    replicated = parallel != "fsdp2"
    assert row["replicas_equal"] is not replicated
    assert row["resume"] is not replicated  # a checkpoint has one of the replicas
    assert ("have drifted apart" in str(causes_of(row))) is replicated
    assert "known failure" not in row["reason"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "drift", tiered(["gradients_not_averaged", "lr_off_on_one_rank"], "lr_off_on_one_rank")
)
def test_drifting_replicas_are_reported(mistrained: Finished, drift: str) -> None:
    row = mistrained.row(parallel="ddp", fault=drift)
    assert row["fault_seen"] is True, row["reason"]
    assert "replicas_equal" in _failed(row)


@pytest.mark.slow
def test_correct_training_passes(mistrained: Finished) -> None:
    row = mistrained.row(parallel="fsdp2", fault=None)
    assert (row["status"], row["resume"], row["training"]) == ("pass", True, True), row["reason"]
    skipped = mistrained.row(parallel="fsdp2", fault="gradients_of_wrong_ranks", world_size=2)
    assert skipped["status"] == "skip"
    assert "a batch has no shares other than those of 2 ranks" in skipped["reason"]


@pytest.mark.parametrize("fault", ["gradients_summed", "gradients_not_averaged", "share_trained_twice"])
def test_fault_of_shares_needs_several_ranks(fault: str) -> None:
    with pytest.raises(NothingToInjectError):
        run_alone(fault, **ONE_STEP)


@pytest.mark.cell
def test_buffers_do_not_widen_the_bound_of_a_step() -> None:
    # The noise of nondeterministic kernels is measured by twins that begin with these buffers.
    ended = run_alone("layer_gradient_scaled", model="buffered", deterministic=False, **ONE_STEP)
    assert ended.reports[0].bounds["gradient_bound"] == "measured_noise"
    assert ended.verdict.fault_seen, ended.verdict.reason
