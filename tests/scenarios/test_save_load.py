"""Saves that overlap, and state that is too large to copy, on real ranks."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from conftest import ONE_STEP, SMALL, Finished, blocks, run, selected
from support.drivers import plant

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    apart = {"save": "sync_no_collectives", "scenario": "convert", "saves": 1}
    overlapping = ",".join(selected(request, "overlapping"))
    cells: list[dict[str, Any]] = [
        {"parallel": overlapping or "fsdp2", "save": "sync,async", "overlap_saves": True, "saves": 2},
        *(
            {"parallel": saves, "load_parallel": loads, **apart}
            for saves, loads in selected(request, "saves", "loads")
        ),
        *(
            {"parallel": parallel, "save": save, "raw": True, "keep_checkpoints": "all", "saves": 2}
            for parallel, save in selected(request, "parallel", "save")
        ),
    ]
    folder = tmp_path_factory.mktemp("saved") / "sweep"
    return run(folder, *blocks(cells), "device=cpu", "world_size=2", "retry=0", *SMALL)


def rows_with(saved: Finished, word: str) -> list[dict[str, Any]]:
    """Return the rows of cells with an override."""
    return [row for row in saved.rows if word in row["overrides"].split()]


@pytest.mark.parametrize("overlapping", ["fsdp_flat", "fsdp2"])
def test_overlapping_saves_have_their_own_state(saved: Finished, overlapping: str) -> None:
    rows = [row for row in rows_with(saved, "overlap_saves=true") if row["parallel"] == overlapping]
    at_once, background = rows
    assert (at_once["status"], "each save is complete" in at_once["reason"]) == ("skip", True)
    assert background["status"] == "pass", background["reason"]
    assert background["save_s"] is None, "it was held back: how long it took says nothing"
    assert background["save_stall_s"] > 0
    assert saved.status == 0


PAIRS = [*itertools.product(("ddp", "fsdp2"), repeat=2)]


@pytest.mark.parametrize(("saves", "loads"), PAIRS)
def test_ranks_without_collectives_find_their_files(saved: Finished, saves: str, loads: str) -> None:
    """Another layout does not, and no error says so (docs/findings/load-without-collectives.md)."""
    row = saved.row(scenario="convert", parallel=saves, load_parallel=loads)
    assert (row["checkpoint_whole"], row["files_equal"]) == (True, True)
    lost = (saves, loads) == ("fsdp2", "ddp")
    assert row["status"] == ("xfail" if lost else "pass"), row["reason"]
    assert (row["model_equal"], row["optim_equal"]) == (not lost, not lost)


RAW = [*itertools.product(("none", "fsdp2"), ("sync", "async"))]


@pytest.mark.parametrize(("parallel", "save"), RAW)
def test_raw_io_is_measured_with_each_save(saved: Finished, parallel: str, save: str) -> None:
    (row,) = [
        row for row in rows_with(saved, "raw=true") if (row["parallel"], row["save"]) == (parallel, save)
    ]
    assert row["status"] == "pass", row["reason"]
    assert row["raw_write_s"] > 0
    assert row["raw_read_s"] > 0
    kept = {path.name for path in (saved.folder / row["cell"]).glob("checkpoints/*")}
    assert kept == {"step-0001", "step-0002"}, "of the plain files nothing stays"
    assert "raw_write_s" in saved.out


def test_large_parts_are_compared_by_digests(sweep: Callable[..., Finished]) -> None:
    large = partial(plant, "dcpbench.state.snapshot", "LARGE_BYTES", 8192)
    done = sweep(
        "-m", "device=cpu", "parallel=fsdp2", "model=wide", "optimizer=sgd", "saves=1", "world_size=2",
        "fault=none,weight_lowest_bit", *ONE_STEP, prepare=large,
    )  # fmt: skip
    for row in done.rows:
        if row["fault"] is None:
            assert row["status"] == "pass", row["reason"]
            continue
        assert row["status"] == "fail"
        # The checkpoint was asked what the element had been: its digests are those that were kept.
        (worst,) = row["details"]["checks"]["model_equal"]["worst"]
        assert (worst["name"], worst["kind"], worst["ranks"]) == ("net2.weight", "param", [0])
        assert worst["differing"] == 1
        assert int(worst["expected_bits"], 16) ^ int(worst["actual_bits"], 16) == 1
        assert f"index {worst['index']}: saved {worst['expected']}" in row["reason"]
    assert done.status == 0
