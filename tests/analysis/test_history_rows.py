"""The rows of many sweeps, as `history` reads them."""

from pathlib import Path

from analysis.nights import METRICS, night
from dcpbench.analysis.cell_history import history
from dcpbench.analysis.frame import read_sweeps
from dcpbench.records.store import DETAILS_JSONL, RESULTS_JSONL
from report.sweeps import cell, folder_with


def test_sweeps_are_ordered_by_their_start(tmp_path: Path) -> None:
    for folder, started_at in (("a", "2026-11-03"), ("b", "2026-11-01"), ("c", "2026-11-02")):
        folder_with(tmp_path / folder, cell(started_at=started_at))
    assert history(read_sweeps([tmp_path], details=False), METRICS).sweeps["name"].tolist() == ["b", "c", "a"]


def test_damaged_sweeps_are_reported_and_skipped(tmp_path: Path) -> None:
    for number in range(3):
        sweep = night(tmp_path, number, cell("ddp", save_s=0.25), cell("fsdp", save_s=0.25, details={"a": 1}))
        (sweep / DETAILS_JSONL).write_text("damaged, and not read\n")
    with (tmp_path / "night-01" / RESULTS_JSONL).open("a") as rows:
        rows.write("no row\n")
    (tmp_path / "night-02" / RESULTS_JSONL).unlink()
    (tmp_path / "night-02" / RESULTS_JSONL).symlink_to(tmp_path / "night-01" / RESULTS_JSONL)
    rows = read_sweeps([tmp_path], details=False)
    assert [remark.partition(": ")[0] for remark in rows.left_out] == [
        f"{tmp_path / 'night-01' / RESULTS_JSONL}:3",
        f"{tmp_path / 'night-02'}",
    ]
    cells = history(rows, METRICS).cells
    assert [one.costs[0].medians.tolist() for one in cells] == [[0.25, 0.25]] * 2
