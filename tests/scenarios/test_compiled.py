"""Compiled cells, in one sweep: ranks compile their first graph once."""

import pytest

from conftest import ONE_STEP, SMALL, Finished, blocks, run, selected

pytestmark = pytest.mark.slow

MODELS = [
    *((parallel, optimizer) for parallel in ("none", "fsdp", "fsdp2") for optimizer in ("sgd", "adamw")),
    ("fsdp2_per_layer", "adam"),
]
OWN = [(parallel, "own_workload.build") for parallel in ("ddp", "fsdp", "fsdp2", "hsdp2")]
OWN += [(parallel, "ordinary_workloads.named_tuple") for parallel in ("ddp", "fsdp2")]
OWN += [("ddp", "trainers.Compiles")]


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    asked = selected(request, "parallel", "optimizer")
    cells = [{"parallel": parallel, "optimizer": optimizer} for parallel, optimizer in asked]
    others = {"parallel": "fsdp2", "save": "async"}
    cells += [{"scenario": scenario, **others} for scenario in selected(request, "scenario")]
    words = ("compile=true", "device=cpu", "world_size=2", "saves=1", *SMALL)
    return run(tmp_path_factory.mktemp("compiled") / "sweep", *blocks(cells), *words)


@pytest.mark.parametrize(("parallel", "optimizer"), MODELS)
def test_compiled_cells_really_compile(compiled: Finished, parallel: str, optimizer: str) -> None:
    row = compiled.row(scenario="save_load", parallel=parallel, optimizer=optimizer)
    assert row["status"] == "pass", compiled.out
    assert row["compile"] is True
    assert all(rank["not_compiled"] is None for rank in row["details"]["ranks"])


@pytest.mark.parametrize("scenario", ["convert", "fine_tune", "partial_load"])
def test_compiled_models_convert_and_fine_tune(compiled: Finished, scenario: str) -> None:
    row = compiled.row(scenario=scenario)
    assert row["status"] == "pass", compiled.out


@pytest.fixture(scope="module")
def own(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    cells = [
        {
            "parallel": parallel,
            "workload.target": f"support.{target}",
            "world_size": 4 if parallel == "hsdp2" else 2,
            **({"checkpointer": "trainer"} if "trainers" in target else {"compile": True}),
        }
        for parallel, target in selected(request, "parallel", "target")
    ]
    words = ("device=cpu", "saves=1", "retry=0", *ONE_STEP)
    return run(tmp_path_factory.mktemp("own") / "sweep", *blocks(cells), *words)


@pytest.mark.parametrize(("parallel", "target"), OWN)
def test_own_code_compiles_where_it_trains(own: Finished, parallel: str, target: str) -> None:
    row = own.row(parallel=parallel, model=f"support.{target}")
    if target.endswith("named_tuple"):  # its model is an nn.Sequential
        skips = "torch.compile skips torch's own forwards; give the model a forward of its own"
        assert row["status"] == "vacuous"
        assert row["reason"] == f"compile: rank 0: nothing was compiled: {skips}"
        return
    assert (row["status"], row["restart"]) == ("pass", "interpreter"), row["reason"]
    assert row["compile"] is not target.endswith("Compiles")
