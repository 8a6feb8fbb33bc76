"""Workloads as people write them: each passes, or is refused in one line that says what to do."""

import pytest

from conftest import Finished, experiment, run, selected, tiered

pytestmark = pytest.mark.slow

UNKNOWN = "in which dcpbench finds no tensors: use dictionaries, lists, tuples or dataclasses of tensors"
REFUSED = {
    "too_small_batch": "1 sample for 2 shares: each needs one",
    "unknown_container": f"batch(generator) contains a Unknown, {UNKNOWN}",
    "loss_of_each_sample": "loss returned with 'mse' a Tensor of shape (4,); return a scalar tensor, or a",
    "packed_sequence": f"batch(generator) contains a PackedSequence, {UNKNOWN}",
}
"""Parts of the reasons of workloads that are an error."""
NOT_RESTORED = {
    "low_state": "optim_equal",  # torch loads moments as float32
    "masters": "model_equal",
}
"""The first failed check of workloads whose training is right and whose checkpoint is not."""
BLOCKS = (
    *("batches", "uneven", "losses", "share_only", "names", "hooks"),
    *("extra_state", "optimizer_dtypes", "generators", "buckets"),
)


@pytest.fixture(scope="module")
def sweep(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    words = experiment("ordinary_workloads", selected(request, "block"))
    return run(tmp_path_factory.mktemp("ordinary") / "sweep", *words)


@pytest.mark.parametrize("block", tiered(BLOCKS, *BLOCKS))
def test_ordinary_workloads_pass_or_are_refused(sweep: Finished, block: str) -> None:
    assert sweep.rows, sweep.err
    wrong = {}
    for row in sweep.rows:
        name = row["model"].rpartition(".")[2]
        status = "error" if name in REFUSED else "fail" if name in NOT_RESTORED else "pass"
        reason = (REFUSED | NOT_RESTORED).get(name, "")
        as_expected = row["status"] == status and reason in str(row["reason"])
        if not as_expected or row["training"] is False:
            wrong[row["cell"]] = row["status"], row["training"], row["reason"]
    assert wrong == {}
