"""Saves that overlap, and saves without collectives, on real ranks."""

import itertools
from typing import Any

import pytest

from conftest import SMALL, Finished, blocks, run, selected

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
