"""Checkpoints of one layout are loaded under another, and every layout is a partition of the plain model."""

from itertools import product

import pytest

from conftest import PARALLELISMS, SMALL, Finished, blocks, run, selected

KNOWN = "fsdp_tp"
ON_TWO = ("none", "ddp", "fsdp", "fsdp2")
"""Which two ranks are enough for."""
PAIRS = [(saves, loads) for saves in ("none", "fsdp", "hsdp2", "fsdp2_tp") for loads in PARALLELISMS]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def conversions(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("convert") / "sweep"
    asked = selected(request, "parallel", "load_parallel")
    pairs = blocks(
        {"parallel": saves, "load_parallel": loads, "world_size": 2 if {saves, loads} <= {*ON_TWO} else 4}
        for saves, loads in asked
    )
    return run(folder, *pairs, "scenario=convert", "device=cpu", "saves=1", *SMALL)


@pytest.mark.parametrize(("parallel", "load_parallel"), PAIRS)
def test_each_layout_loads_the_others_checkpoints(
    conversions: Finished, parallel: str, load_parallel: str
) -> None:
    row = conversions.row(parallel=parallel, load_parallel=load_parallel)
    if load_parallel == KNOWN:
        assert row["status"] == "xfail", row["reason"]
        assert row["model_equal"] is True
        return
    assert row["status"] == "pass", row["reason"]
    # The same layout must go on with the same bits, another one closely.
    same = parallel == load_parallel
    assert row["loss_resume_equal"] is (True if same else None)
    assert row["state_resume_equal"] is (True if same else None)
    assert row["flags_equal"] is True
    assert row["loss_resume_close"] is (None if same else True)


@pytest.fixture(scope="module")
def other_worlds(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("worlds") / "sweep"
    asked = selected(request, "parallel", "load_parallel", "load_world_size")
    cells = [
        {"parallel": saves, "load_parallel": loads, "load_world_size": ranks, "world_size": 4}
        for saves, loads, ranks in asked
    ]
    cells += [
        {"parallel": parallel, "load_parallel": "hsdp", "load_world_size": "1,2,3", "world_size": 2}
        for parallel in selected(request, "saved_under")
    ]
    # Replicas that drift apart have other losses from the second resumed step on.
    small = ("saves=1", "model=short", "train_steps=1", "resume_steps=2")
    return run(folder, *blocks(cells), "scenario=convert", "device=cpu", *small)


@pytest.mark.parametrize(
    ("parallel", "load_parallel", "load_world_size"),
    product(("fsdp2", "ddp"), ("fsdp2", "fsdp"), (1, 2, 3)),
)
def test_fewer_ranks_load_what_four_saved(
    other_worlds: Finished, parallel: str, load_parallel: str, load_world_size: int
) -> None:
    row = other_worlds.row(parallel=parallel, load_parallel=load_parallel, load_world_size=load_world_size)
    assert row["status"] == "pass", row["reason"]
    assert row["model_equal"] is True
    assert row["optim_equal"] is True
    assert row["loss_resume_close"] is True
    assert row["loss_resume_equal"] is None


@pytest.mark.parametrize("saved_under", ["fsdp2", "ddp"])
def test_replicas_of_one_shard_are_reported(other_worlds: Finished, saved_under: str) -> None:
    of = {"parallel": saved_under, "load_parallel": "hsdp"}
    row = other_worlds.row(**of, load_world_size=2)
    assert row["status"] == "xfail", row["reason"]
    assert "fsdp1-one-shard" in row["reason"]
    assert (row["model_equal"], row["optim_equal"]) == (True, True)
    for load_world_size in (1, 3):
        row = other_worlds.row(**of, load_world_size=load_world_size)
        assert row["status"] == "skip"
        why = f"world size {load_world_size}, which is not a multiple of 2 (load_world_size)"
        assert why in row["reason"]
