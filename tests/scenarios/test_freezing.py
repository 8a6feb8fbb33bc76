"""A layer that is frozen at one save and trained at the next, or the other way round."""

from typing import Any

import pytest

from conftest import Finished, run, selected
from support.alone import Ran, run_alone, unexplained

CHAIN: dict[str, Any] = {"scenario": "chain", "saves": 2, "train_steps": 2, "resume_steps": 1}


def chained(component: str, fault: str = "none", optimizer: str = "adam") -> Ran:
    return run_alone(fault, component=component, optimizer=optimizer, model="short", **CHAIN)


@pytest.mark.cell
@pytest.mark.parametrize("optimizer", ["adam", "sgd_plain", "adam_and_sgd"])
def test_layer_that_is_unfrozen_later_is_restored(optimizer: str) -> None:
    ran = chained("unfreezing", optimizer=optimizer)
    assert ran.verdict.status == "pass", ran.verdict.reason
    names = {str(where): set(seen) for where, seen in ran.reports[0].checks["optim_equal"].compared.items()}
    frozen, trained = names.values()
    if optimizer == "adam":
        more = {name for name in trained - frozen if name.startswith("state.")}
        assert {name.rpartition(".")[0] for name in more} == {"state.net1.weight", "state.net1.bias"}


@pytest.mark.cell
def test_moments_of_a_layer_frozen_later_are_lost() -> None:
    ran = chained("freezing")
    assert {one.check for one in ran.verdict.failed} == {"optim_equal"}, "the resume gets them"
    assert unexplained(ran, "state-of-frozen") == set()
    where = {str(one.where) for failed in ran.verdict.failed for one in failed.mismatches}
    assert all("step 4" in one for one in where), "in the checkpoint in which it was trained they come back"


@pytest.mark.cell
def test_own_step_counter_is_reported() -> None:
    ran = chained("counts_for_itself")
    failed = {one.check: {each.name for each in one.mismatches} for one in ran.verdict.failed}
    assert {"requires_grad.net1.weight", "requires_grad.net1.bias"} <= failed["flags_equal"], failed.keys()


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    cells = ("-m", "component=unfreezing,freezing", f"parallel={','.join(selected(request, 'parallel'))}")
    words = ("scenario=chain", "model=short", "device=cpu", "world_size=2", "saves=2", "resume_steps=1")
    return run(tmp_path_factory.mktemp("freezing") / "sweep", *cells, *words, "retry=0")


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["fsdp", "fsdp2", "ddp_unused"])
def test_freezing_on_ranks(ranks: Finished, parallel: str) -> None:
    assert ranks.row(parallel=parallel, component="unfreezing")["status"] == "pass", ranks.out
    known = ranks.row(parallel=parallel, component="freezing")
    assert (known["status"], "state-of-frozen" in known["reason"]) == ("xfail", True), known["reason"]
