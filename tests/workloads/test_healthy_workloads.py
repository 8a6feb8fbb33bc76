"""Workloads and trainers with state of every kind: healthy ones pass, a known limit is a skip with its
reason."""

import pytest

from conftest import Finished, blocks, cells_of, run, selected

pytestmark = pytest.mark.slow

SHARDED = ("fsdp", "fsdp2", "fsdp2_per_layer")
LOSES_ITS_BASE = "support.trainers.LosesItsBase"
CLIPS_ITS_PART = "support.healthy_workloads.clips_its_part"
WITHOUT_CLOSURE = "known failure closure: the loop of a Workload, and get_optimizer_state_dict, call step()"
REFUSED = {
    "lbfgs": WITHOUT_CLOSURE,
    "sharpness_aware": WITHOUT_CLOSURE,
    "sharpness_aware_step": "step: an optimizer's step has a closure; call backward() before it",
    "text_key": "known failure state-of-no-parameter: get_optimizer_state_dict takes every key of the",
    "sparse_adam": "known failure sparse-adam: get_optimizer_state_dict fills an empty optimizer by a step",
    "opaque": "the hyperparameter 'param_groups.0.handle' of type Handle cannot be compared",
    "composite_state": "'moment' in the state, of type TwoTensor, cannot be compared",
    "sparse_gradients": "known failure fsdp-sparse-gradients: FSDP cannot reduce sparse gradients; pass sp",
    "empty_parameter": "known failure ",
    "complex_parameter": "known failure fsdp-dtypes: ",
}
"""Refusals of these workloads, wherever they are no pass."""
XFAIL = {"text_key", "sparse_gradients", "empty_parameter"}
"""Those that torch does not document; the others are a skip."""
REFUSED_BY_BOTH = ("lbfgs", "composite_state", "sharpness_aware", "sharpness_aware_step", "text_key")
REFUSED_CELLS = {
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


@pytest.mark.parametrize("block", HEALTHY)
def test_healthy_workloads_pass(sweep: Finished, block: str) -> None:
    assert sweep.rows, sweep.err
    healthy = [
        row
        for row in sweep.rows
        if row["model"] not in (LOSES_ITS_BASE, CLIPS_ITS_PART) and row["status"] not in ("skip", "xfail")
    ]
    assert {row["cell"]: row["reason"] for row in healthy if row["status"] != "pass"} == {}


def test_clipping_by_the_norm_of_a_part_is_detected(sweep: Finished) -> None:
    wrong = sweep.row(model=CLIPS_ITS_PART)
    assert (wrong["status"], wrong["gradient_close"], wrong["step_equal"]) == ("fail", True, False)


def test_refusal_is_a_skip_or_known_with_the_reason(sweep: Finished) -> None:
    rows = {(row["model"].rpartition(".")[2], row["parallel"]): row for row in sweep.rows}
    refused = {key: row for key, row in rows.items() if row["status"] in ("skip", "xfail")}
    assert refused.keys() == REFUSED_CELLS & rows.keys()
    for (name, parallel), row in refused.items():
        assert row["status"] == ("xfail" if name in XFAIL else "skip")
        assert row["reason"].startswith(REFUSED[name]), row["reason"]
        if name == "empty_parameter":
            known = "several-optimizers-fsdp1" if parallel == "fsdp" else "fsdp-no-elements"
            assert row["reason"].startswith(f"known failure {known}: "), row["reason"]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
def test_unsaved_base_must_be_built_the_same(sweep: Finished, parallel: str) -> None:
    same = sweep.row(model="support.trainers.OnlyTheAdapter", parallel=parallel)
    control = same["details"]["checks"]["model_equal"]["control"]
    assert control["base.0.weight in the checkpoint of step 1"]
    other = sweep.row(model=LOSES_ITS_BASE, parallel=parallel)
    assert other["model_equal"] is False
    assert "base.0.bias (param) in the checkpoint of step 1" in other["reason"]
