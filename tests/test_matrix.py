"""The whole way, on CPU ranks with gloo: every parallelism with every way of saving."""

import itertools
import random
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from conftest import ONE_STEP, PARALLELISMS, Finished, blocks, run, selected
from dcpbench.core.checks import CHECKS, CheckSpec
from dcpbench.core.plugins import plugins
from dcpbench.records.row import columns
from support.notes import texts
from support.rows import seen

KNOWN = "fsdp_tp"

CELLS = [(parallel, save) for parallel in PARALLELISMS for save in ("sync", "async")]
ONCE = [(parallel, ("async", "sync")[number % 2]) for number, parallel in enumerate(PARALLELISMS)]
ALWAYS = [("ddp", "sync"), ("fsdp2", "sync")]
"""Whose files are checked."""

pytestmark = pytest.mark.slow


def ranks_of(parallel: str) -> int:
    return 4 if parallel.startswith("hsdp") or "tp" in parallel else 2


@pytest.fixture(scope="module")
def matrix(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    wanted = {*selected(request, "parallel", "save"), *ALWAYS}
    cells: list[dict[str, Any]] = [
        {
            "parallel": parallel,
            "save": save,
            "world_size": ranks_of(parallel),
            "saves": 2 if parallel == "fsdp2" else 1,
        }
        for parallel, save in CELLS
        if (parallel, save) in wanted
    ]
    cells.append({"parallel": ",".join(PARALLELISMS), "save": "async_cached"})
    folder = tmp_path_factory.mktemp("matrix") / "sweep"
    return run(folder, *blocks(cells), "model=uneven", "device=cpu", *ONE_STEP, reports=True)


@pytest.mark.parametrize(("parallel", "save"), [cell for cell in CELLS if cell[0] != KNOWN])
def test_state_is_restored_and_training_continues(matrix: Finished, parallel: str, save: str) -> None:
    row = matrix.row(parallel=parallel, save=save)
    assert row["status"] == "pass", row["reason"]
    # Of other scenarios.
    columns_of_plugins = [column for plugin in plugins() for column in plugin.columns]
    others = (
        "loss_resume_close",
        *(column.name for column in columns_of_plugins if isinstance(column, CheckSpec)),
    )
    assert all(row[check] is True for check in CHECKS if check not in others)
    assert (row["powered"], row["resume"], row["training"]) == (True, True, True)
    bound = "measured_noise" if "tp" in parallel else "rounding_of_sum"
    assert (row["gradient_bound"], row["step_bound"]) == (bound, "bits")
    assert 0 <= row["gradient_bound_used"] <= 1
    assert row["max_abs_diff"] < 1e-6
    assert row["loss_resumed"] == row["loss_continued"] > 0
    assert row["world_size"] == ranks_of(parallel)
    assert [texts(rank, "left_behind") for rank in row["details"]["ranks"]] == [[]] * ranks_of(parallel)
    for column in ("build_s", "train_s", "save_s", "save_stall_s", "load_s", "verify_s", "cell_s"):
        assert row[column] > 0
    assert row["save_stall_s"] <= row["save_s"]
    assert row["checkpoint_bytes"] > 0
    assert row["peak_host_bytes"] > 0
    assert row["peak_device_bytes"] is None


@pytest.mark.parametrize(("parallel", "save"), [cell for cell in CELLS if cell[0] == KNOWN])
def test_fsdp1_with_tp_is_an_xfail_with_names(matrix: Finished, parallel: str, save: str) -> None:
    row = matrix.row(parallel=parallel, save=save)
    assert row["status"] == "xfail"
    assert row["model_equal"] is True
    assert row["extra_equal"] is True
    assert row["training"] is True
    assert row["optim_equal"] is False
    assert "fsdp1-tp-optimizer-state" in row["reason"]
    assert "state.net1.weight.exp_avg" in row["reason"]


def test_cached_staging_on_the_cpu_is_a_skip(matrix: Finished) -> None:
    rows = [row for row in matrix.rows if row["save"] == "async_cached"]
    assert len(rows) == len(PARALLELISMS)
    assert {row["status"] for row in rows} == {"skip"}
    assert all("accelerator" in row["reason"] for row in rows)


def test_every_checkpoint_was_loaded_under_a_control(matrix: Finished) -> None:
    row = matrix.row(parallel="fsdp2", save="sync")
    for metric, times in (("save_s", 2), ("load_s", 3)):  # the newest is loaded twice
        numbers = [(one["rank"], one["save"]) for one in matrix.measurements(row["cell"], metric)]
        assert sorted(numbers) == [(rank, number) for rank in range(2) for number in range(times)]
    details = row["details"]
    controls = details["checks"]["optim_equal"]["control"]
    assert {name.rsplit(" ", 1)[-1] for name in controls} == {"1", "2", "again"}
    assert any("param_groups.0.lr" in name for name in controls)
    assert all(check["control_missed"] == [] for check in details["checks"].values())


def test_sweep_folder_has_all_files(matrix: Finished) -> None:
    assert matrix.status == 0, matrix.err
    for name in ("results.csv", "environment.json", "report.html", "junit.xml", "multirun.yaml"):
        assert (matrix.folder / name).stat().st_size > 0
    flat = pd.read_csv(matrix.folder / "results.csv")
    assert tuple(flat.columns) == columns()
    assert len(flat) == len(matrix.rows) >= 2 * len(PARALLELISMS)
    cell = matrix.folder / matrix.row(parallel="ddp", save="sync")["cell"]
    assert sorted(path.name for path in (cell / ".hydra").iterdir()) == ["config.yaml", "overrides.yaml"]
    assert sorted(path.name for path in cell.glob("rank*.log")) == ["rank0.log", "rank1.log"]
    assert not list(matrix.folder.rglob("*.distcp")), "checkpoints of passed cells are removed"


def test_cells_do_not_depend_on_earlier_cells(tmp_path: Path) -> None:
    """Fresh ranks in one order and warm ones in another, among cells that die and cells with a fault."""
    healthy = itertools.product(["ddp", "fsdp2"], ["even", "buffered"], ["none", "weight_lowest_bit"])
    cells = [f"{{parallel: {of}, model: {model}, fault: {fault}}}" for of, model, fault in healthy]
    cells += [f"{{parallel: fsdp2, model: {model}, compile: true}}" for model in ("even", "dummy")]
    dies = "scenario: dies, scenario.options.how: kill, scenario.options.phase: load"
    cells += [f"{{parallel: ddp, {dies}}}"]
    shuffled = random.Random(5).sample(cells, len(cells))

    def rows(isolation: str, blocks: list[str]) -> dict[str, Any]:
        matrix = [f"+hydra.sweeper.matrix.b{number}={block}" for number, block in enumerate(blocks)]
        asked = (f"isolation={isolation}", "device=cpu", "world_size=2", "saves=1", "retry=0", *ONE_STEP)
        ended = run(tmp_path / isolation, *matrix, *asked)
        found = {row["overrides"].replace(f" isolation={isolation}", ""): row for row in ended.rows}
        return {name: seen(row) for name, row in found.items()}

    fresh, warm = rows("fresh", cells), rows("warm", shuffled)
    assert len(fresh) == len(cells)
    assert list(fresh) != list(warm), "the order is another"
    assert fresh == warm
    assert {columns["status"] for columns, _, _ in fresh.values()} == {"pass", "fail", "crash"}
