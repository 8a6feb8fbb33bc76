"""Workloads and trainers with state of every kind: healthy ones pass, a known limit is a skip with its
reason."""

import pytest

from conftest import Finished, blocks, cells_of, run, selected, tiered

pytestmark = pytest.mark.slow

SHARDED = ("fsdp", "fsdp2", "fsdp2_per_layer")
LOSES_ITS_BASE = "support.healthy_trainers.LosesItsBase"
CLIPS_ITS_PART = "support.healthy_workloads.clips_its_part"
REFUSED = {
    "lbfgs": "torch's get_optimizer_state_dict calls step() without a closure, which LBFGS refuses",
    "sharpness_aware": "torch's get_optimizer_state_dict calls step() without a closure, which Sharp",
    "sharpness_aware_step": "step: an optimizer's step has a closure; call backward() before it",
    "text_key": "torch's get_optimizer_state_dict refuses the key 'global' of the optimizer's state",
    "sparse_adam": "torch's get_optimizer_state_dict fills an empty optimizer by a step with dense gradients",
    "opaque": "the hyperparameter 'param_groups.0.handle' of type Handle cannot be compared",
    "composite_state": "'moment' in the state, of type TwoTensor, cannot be compared",
    "sparse_gradients": "torch's FSDP does not train embed.weight, which has sparse gradients",
    "empty_parameter": "torch's FSDP does not train prompt, which has no elements",
    "complex_parameter": "torch's FSDP does not train turn, which is complex, and others are not",
}
"""Refusals of these workloads, wherever they are a skip."""
REFUSED_BY_BOTH = ("lbfgs", "composite_state", "sharpness_aware", "sharpness_aware_step", "text_key")
SKIPPED = {
    *((name, parallel) for name in REFUSED_BY_BOTH for parallel in ("ddp", "fsdp2")),
    *((name, "ddp") for name in ("sparse_adam", "opaque")),
    *((name, parallel) for name in ("sparse_gradients", "empty_parameter") for parallel in SHARDED),
    *(("complex_parameter", parallel) for parallel in SHARDED[:2]),
}


BLOCKS = cells_of("healthy_workloads")
HEALTHY = [name for name in BLOCKS if name != "clipped_wrong"]


@pytest.fixture(scope="module")
def sweep(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    asked = {*selected(request, "block"), "trainers", "clipped_wrong"}
    cells = {name: cell for name, cell in BLOCKS.items() if name in asked}
    if "both" not in asked:
        cells["both"] = {**BLOCKS["both"], "workload.target": "support.healthy_workloads.python_state"}
        for cell in cells.values():
            cell["parallel"] = cell["parallel"].rpartition(",")[2]
    return run(tmp_path_factory.mktemp("healthy") / "sweep", *blocks(cells.values()))


@pytest.mark.parametrize("block", tiered(HEALTHY, "adapter", "clipped", "returned", "trainers", "refused"))
def test_healthy_workloads_pass(sweep: Finished, block: str) -> None:
    assert sweep.rows, sweep.err
    healthy = [
        row
        for row in sweep.rows
        if row["model"] not in (LOSES_ITS_BASE, CLIPS_ITS_PART) and row["status"] != "skip"
    ]
    assert {row["cell"]: row["reason"] for row in healthy if row["status"] != "pass"} == {}


def test_clipping_by_the_norm_of_a_part_is_detected(sweep: Finished) -> None:
    wrong = sweep.row(model=CLIPS_ITS_PART)
    assert (wrong["status"], wrong["gradient_close"], wrong["step_equal"]) == ("fail", True, False)


def test_known_limit_is_a_skip_with_the_reason(sweep: Finished) -> None:
    skipped = [row for row in sweep.rows if row["status"] == "skip"]
    ran = {(row["model"].rpartition(".")[2], row["parallel"]) for row in sweep.rows}
    assert {(row["model"].rpartition(".")[2], row["parallel"]) for row in skipped} == SKIPPED & ran
    for row in skipped:
        assert row["reason"].startswith(REFUSED[row["model"].rpartition(".")[2]]), row["reason"]


@pytest.mark.parametrize("parallel", tiered(["ddp", "fsdp2"], "fsdp2"))
def test_python_values_in_optimizers_have_controls(sweep: Finished, parallel: str) -> None:
    row = sweep.row(model="support.healthy_workloads.python_state", parallel=parallel)
    control = row["details"]["checks"]["optim_equal"]["control"]
    for entry in ("step", "decay", "warm", "never", "last", "seen"):
        assert control[f"state.2.bias.{entry} in the checkpoint of step 1"], entry


@pytest.mark.parametrize("parallel", tiered(["ddp", "fsdp2"], "fsdp2"))
def test_unsaved_base_must_be_built_the_same(sweep: Finished, parallel: str) -> None:
    same = sweep.row(model="support.healthy_trainers.OnlyTheAdapter", parallel=parallel)
    control = same["details"]["checks"]["model_equal"]["control"]
    assert control["base.0.weight in the checkpoint of step 1"]
    other = sweep.row(model=LOSES_ITS_BASE, parallel=parallel)
    assert other["model_equal"] is False
    assert "base.0.bias (param) in the checkpoint of step 1" in other["reason"]
