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
BLOCKS = ("batches", "uneven", "losses", "share_only", "names", "hooks")


@pytest.fixture(scope="module")
def sweep(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    words = experiment("ordinary_workloads", selected(request, "block"))
    return run(tmp_path_factory.mktemp("ordinary") / "sweep", *words)


@pytest.mark.parametrize("block", tiered(BLOCKS, *BLOCKS))
def test_ordinary_workloads_pass_or_are_refused(sweep: Finished, block: str) -> None:
    assert sweep.rows, sweep.err
    wrong = {}
    for row in sweep.rows:
        refusal = REFUSED.get(row["model"].rpartition(".")[2])
        as_expected = row["status"] == ("error" if refusal else "pass") and (refusal or "") in str(
            row["reason"]
        )
        if not as_expected:
            wrong[row["cell"]] = row["status"], row["reason"]
    assert wrong == {}
