"""What is saved under one layout is loaded under another, and every layout is the plain model cut up."""

import pytest

from conftest import PARALLELISMS, SMALL, Finished, run

KNOWN = "fsdp_tp"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def conversions(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("convert") / "sweep"
    lists = ("parallel=none,fsdp,hsdp2,fsdp2_tp", f"load_parallel={','.join(PARALLELISMS)}", "saves=1")
    return run(folder, "-m", "scenario=convert", "device=cpu", *SMALL, *lists)


@pytest.mark.parametrize("load_parallel", PARALLELISMS)
@pytest.mark.parametrize("parallel", ["none", "fsdp", "hsdp2", "fsdp2_tp"])
def test_what_one_saves_another_loads(conversions: Finished, parallel: str, load_parallel: str) -> None:
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
def other_worlds(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("worlds") / "sweep"
    # Replicas that drift apart have other losses from the second resumed step on.
    lists = ("parallel=fsdp2,ddp", "load_parallel=fsdp2,fsdp,hsdp", "load_world_size=1,2,3", "resume_steps=2")
    return run(
        folder,
        *("-m", "scenario=convert", "world_size=4", "device=cpu", "saves=1", "model=short", "train_steps=1"),
        *lists,
    )


@pytest.mark.parametrize("load_world_size", [1, 2, 3])
@pytest.mark.parametrize("load_parallel", ["fsdp2", "fsdp"])
@pytest.mark.parametrize("parallel", ["fsdp2", "ddp"])
def test_fewer_ranks_load_what_four_saved(
    other_worlds: Finished, parallel: str, load_parallel: str, load_world_size: int
) -> None:
    row = other_worlds.row(parallel=parallel, load_parallel=load_parallel, load_world_size=load_world_size)
    assert row["status"] == "pass", row["reason"]
    assert row["model_equal"] is True
    assert row["optim_equal"] is True
    assert row["loss_resume_close"] is True
    assert row["loss_resume_equal"] is None


def test_replicas_of_one_shard_are_a_finding_and_what_has_no_mesh_is_a_skip(other_worlds: Finished) -> None:
    for parallel in ("fsdp2", "ddp"):
        of = {"parallel": parallel, "load_parallel": "hsdp"}
        row = other_worlds.row(**of, load_world_size=2)
        assert row["status"] == "xfail", row["reason"]
        assert "fsdp1-one-shard" in row["reason"]
        assert (row["model_equal"], row["optim_equal"]) == (True, True)
        for load_world_size in (1, 3):
            row = other_worlds.row(**of, load_world_size=load_world_size)
            assert row["status"] == "skip"
            why = f"world size {load_world_size}, which is no multiple of 2 (load_world_size)"
            assert why in row["reason"]


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("layouts") / "sweep"
    lists = (f"parallel={','.join(PARALLELISMS)}", "model=even,uneven")
    return run(folder, "-m", "scenario=layouts", "device=cpu", *lists)


def test_the_parts_of_every_layout_make_up_the_plain_model(layouts: Finished) -> None:
    assert [(row["parallel"], row["model"], row["status"]) for row in layouts.rows] == [
        (parallel, model, "pass") for parallel in PARALLELISMS for model in ("even", "uneven")
    ]
