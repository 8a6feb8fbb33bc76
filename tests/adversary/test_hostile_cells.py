"""What a cell does to its own process changes neither where its files go, nor what is told of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from adversary.hostile import ESCAPES
from conftest import SMALL, Finished, blocks, resume, run
from support.commands import program

pytestmark = pytest.mark.slow

ON_ONE_RANK = ("leaves_folder", "tells_escapes", "breaks_its_report", "raises_with_odd_values")
ON_TWO = ("looks_around", "speaks_for_others", "reports_odd_values")
CONTROLS = [sign for sign in ESCAPES if not sign.isprintable()]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Into a folder that is named relative to the one that the driver is started in."""
    place = tmp_path_factory.mktemp("hostile")
    of_ranks = {1: ON_ONE_RANK, 2: ON_TWO}
    cells = blocks({"scenario": ",".join(names), "world_size": size} for size, names in of_ranks.items())
    few = ("parallel=ddp", "device=cpu", "saves=1", "retry=0", "keep_checkpoints=all", *SMALL)
    ended = run(Path("sweep"), *cells, "storage.root=root", *few, cwd=place)
    return Finished(ended.status, ended.out, ended.err, place / "sweep")


def test_checkpoints_of_a_cell_that_changes_its_folder_are_where_they_were_asked_for(sweep: Finished) -> None:
    row = sweep.row(scenario="leaves_folder")
    assert row["status"] == "pass", row["reason"]
    assert row["disk_bytes"] > 0
    assert list((sweep.folder.parent / "root" / "sweep" / row["cell"]).glob("step-*"))
    assert (sweep.folder / row["cell"] / "rank0.log").exists()


def test_ranks_meet_where_nobody_else_can_come(sweep: Finished) -> None:
    row = sweep.row(scenario="looks_around")
    assert row["status"] == "pass", row["reason"]


def test_what_a_rank_says_of_others_is_dropped_and_told(sweep: Finished) -> None:
    row = sweep.row(scenario="speaks_for_others")
    assert row["status"] == "pass", row["reason"]
    dropped = "rank 0: dropped a message of another stage: RankReport of rank"
    expected = [f"{dropped} 1, {row['cell']}", f"{dropped} 0, another"]
    assert row["details"]["dropped_messages"] == expected
    for sentence in expected:
        assert f"{row['cell']}: {sentence}" in sweep.err


def test_nothing_that_a_rank_says_reaches_the_terminal_as_more_than_text(sweep: Finished) -> None:
    row = sweep.row(scenario="tells_escapes")
    assert row["status"] == "error"
    assert "\x1b" in row["reason"], "the row has it as it was said"
    for text in (sweep.out, sweep.err):
        assert "owned" in text
        assert not [sign for sign in CONTROLS if sign in text.replace("\n", "")]
        assert not any(line.startswith("[9/9] pass every cell") for line in text.splitlines())


def test_odd_values_are_text_or_null(sweep: Finished) -> None:
    """In values that a rank reports; the row of the cell names them."""
    row = sweep.row(scenario="reports_odd_values")
    assert (row["status"], row["contract_held"]) == ("fail", False)
    assert row["max_abs_diff"] == 2.0, "a number, in a type of NumPy"
    assert row["load_s"] > 0, "the scenario's own, without those that are no numbers"
    (worst,) = row["details"]["checks"]["contract_held"]["worst"]
    assert worst["text"] == "odd"
    assert worst["fits"] == [1, "a"]
    assert worst["value 0"] in ("np.float32(0.5)", "0.5")
    assert worst["value 1"] == "tensor(0.5000)"
    assert worst["value 2"] == "torch.float32"
    assert worst["value 5"] == "{1}"
    assert worst["value 6"] == "b'\\xff'"
    assert worst["mine"].startswith("<Mine instance at")
    names = row["details"]["replaced"]
    for name in (
        "value 0 (numpy.float32)",
        "value 4 (int)",
        "mine (adversary.hostile.Mine)",
    ):
        assert f"rank 1: contract_held: w.{name}" in names
    assert "rank 0: load_s (torch.Tensor)" in names
    assert "rank 0: losses.mine (torch.Tensor)" in names
    replaced = "replaced by text or null, because JSON cannot contain it: rank 0: load_s (numpy.float32),"
    assert replaced in row["reason"]


def test_odd_values_before_an_error_are_text(sweep: Finished) -> None:
    row = sweep.row(scenario="raises_with_odd_values")
    assert row["status"] == "error"
    assert "ValueError: no more (before that contract_held: rank 0: w: {1})" in row["reason"]
    assert "rank 0: contract_held: w.text (set)" in row["details"]["replaced"]


def test_a_report_that_fits_no_row_costs_no_other(sweep: Finished) -> None:
    row = sweep.row(scenario="breaks_its_report")
    assert row["status"] == "error"
    assert row["reason"].startswith("the ranks' reports cannot be put into a row: AttributeError: ")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder that is removed, since pytest cannot remove what is nested too deeply."""
    yield tmp_path
    program("rm", "-rf", tmp_path, check=True)


def test_a_tree_that_is_too_deep_costs_no_row(place: Path) -> None:
    few = ("parallel=none", "world_size=1", "device=cpu", "saves=1", "keep_checkpoints=none", *SMALL)
    ended = run(place / "sweep", "scenario=nests_folders,save_load", *few)
    assert [row["status"] for row in ended.rows] == ["pass", "pass"], ended.err
    (sentence,) = [line for line in ended.err.splitlines() if "could not be removed" in line]
    assert "its folders are nested too deeply" in sentence
    row = ended.row(scenario="nests_folders")
    assert row["disk_bytes"] is None
    rows = ended.folder / "results.jsonl"
    rows.write_text(
        "".join(line for line in rows.read_text().splitlines(keepends=True) if "nests" not in line)
    )
    again = resume(ended.folder)
    assert [row["status"] for row in again.rows] == ["error", "pass"], again.err
    assert "its folders are nested too deeply" in again.err
    assert "Traceback" not in ended.err + again.err
