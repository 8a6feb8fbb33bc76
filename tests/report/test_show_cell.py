"""`dcpbench show FOLDER CELL`: which cell it chooses, and what it prints of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from conftest import ONE_STEP, Command, run
from dcpbench.core.checks import CHECKS
from dcpbench.core.mismatch import RESUMED, Mismatch, Place, Problem
from dcpbench.core.notes import Note
from dcpbench.core.rank_report import RankReport
from dcpbench.records.plain_values import plain_report
from dcpbench.report.page.data import why_null
from report.sweeps import cell, folder_with

STEPS = [
    {
        **Mismatch(
            f"loss of step {step}",
            Problem.value,
            max_abs_diff=0.5,
            facts={"expected": 1.0, "actual": 1.5},
            sides=RESUMED,
            where=Place("resumed", 4),
        ).plain(),
        "ranks": [0, 1],
    }
    for step in (5, 6)
]
DETAILS: dict[str, Any] = {
    "checks": {
        "model_equal": {"held": True, "control": {"a": True, "b": True}, "mismatch_count": 0, "worst": []},
        "loss_resume_equal": {"control": {"l": True}, "mismatch_count": 4, "worst": STEPS},
        "files_equal": {"control": {"f": True, "g": False}, "control_missed": ["g"], "mismatch_count": 0},
    },
    "ranks": [
        {
            "losses": {"continued": [4.0, 3.0, 2.5, 2.25, 2.125, 2.0625]},
            "resumed": {"4": [2.5, 2.0625]},
            "notes": [{"kind": "left_out", "check": "loss_resume_close", "text": "it has one layout"}],
        }
    ],
    "phases": {"train": 0.25, "load": 0.5},
    "rank": 1,
    "log_tail": ["Traceback", "  Bang"],
}
FAILED: dict[str, Any] = {
    "status": "fail",
    "reason": "loss_resume_equal: rank 0: loss of step 5",
    "model_equal": True,
    "loss_resume_equal": False,
    "files_equal": True,
    "resume": False,
    "load_s": 0.5,
    "checkpoint_bytes": 3 * 2**20,
    "details": DETAILS,
}


def test_left_out_parts_are_listed_with_their_reasons() -> None:
    report = RankReport(0, notes=[Note("left_out", "no files", "files_equal")])
    report.note("unreadable", "DataLoader", "extra_equal", "loader")
    report.note("left_out", "the save of step 4 removed it", "files_unchanged", place=Place("checkpoint", 2))
    stored = json.loads(json.dumps({"ranks": [plain_report(report).plain()]}))
    told = dict(why_null({**dict.fromkeys(CHECKS), "status": "pass", "details": stored}))
    assert told.pop("files_equal") == "no files"
    assert {name: why for name, why in told.items() if name not in CHECKS} == {
        "extra_equal of loader": "a DataLoader has no state that can be read",
        "files_unchanged in the checkpoint of step 2": "the save of step 4 removed it",
    }


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Four cells; one of them ran twice, and failed once."""
    rows = [
        cell("ddp"),
        cell("ddp", "async"),
        cell("fsdp", "async", 0),
        cell("fsdp", "async", 1, **FAILED),
        cell("fsdp2", save_s=1.0),
    ]
    folder = folder_with(tmp_path / "s", *rows)
    log = folder / rows[3].cell / "rank1.log"
    log.parent.mkdir()
    log.write_text("Bang")
    return folder


def test_cells_are_printed_in_full(sweep: Path, command: Command) -> None:
    before = sorted(sweep.rglob("*"))
    said = command("show", sweep, "fsdp").out
    sections: dict[str, list[str]] = {}
    for one in said.splitlines():
        if not one.startswith(" "):
            title = one
        sections.setdefault(title, []).append(" ".join(one.split()))
    assert said.startswith("fail parallel=fsdp save=async: a check failed\n")
    assert sections["reason"][1:2] == [FAILED["reason"]]
    assert sections["likely cause"][1].startswith("State that no checkpoint contains was lost")
    assert sections["checks (resume failed)"][2:5] == [
        "model_equal passed 2 of 2 parameters and persistent buffers were restored bit for bit",
        "loss_resume_equal failed 1 of 1 resumed losses equal the uninterrupted run's, bit for bit",
        "files_equal passed 1 of 2 the files contain the saved state, read without DCP",
    ]
    assert [one.partition(";")[0] for one in sections["mismatches of loss_resume_equal (4)"]][1:3] == [
        "loss of step 5 after the checkpoint of step 4",
        "loss of step 6 after the checkpoint of step 4",
    ]
    assert "loss_resume_close: it has one layout" in sections["checks that do not apply"]
    assert sections["losses of rank 0"][1:4] == [
        "step continued resumed from 4",
        "5 2.125 2.5",
        "6 2.0625 2.0625",
    ]
    assert sections["phases of the slowest rank"][1] == "train 0.250 s, load 0.500 s"
    assert sections["measured"][1] == "load_s 0.500 s, checkpoint_bytes 3.0 MiB"
    assert sections["end of the log of rank 1"][1:3] == ["Traceback", "Bang"]
    assert said.splitlines()[-3:] == [
        "the worst of 2 runs: repeat=0 pass, repeat=1 fail",
        f"log: {sweep}/parallel=fsdp,save=async,repeat=1/rank1.log",
        "again: dcpbench run parallel=fsdp save=async repeat=1",
    ]
    assert sorted(sweep.rglob("*")) == before, "it writes nothing"


@pytest.mark.parametrize(
    ("words", "chosen"),
    [
        (["parallel=ddp,save=sync"], "pass parallel=ddp save=sync"),
        (["parallel=ddp", "save=sync"], "pass parallel=ddp save=sync"),
        (["save=async", "parallel=ddp"], "pass parallel=ddp save=async"),
        (["async ddp"], "pass parallel=ddp save=async"),
        (["DDP,Sync"], "pass parallel=ddp save=sync"),
        (["2"], "pass parallel=ddp save=async"),
        (["fsdp"], "fail parallel=fsdp save=async"),
        (["fsdp", "repeat=0"], "pass parallel=fsdp save=async"),
        (["sdp2"], "pass parallel=fsdp2 save=sync"),
        (["4"], "pass parallel=fsdp2 save=sync"),
    ],
)
def test_any_part_of_a_cell_chooses_it(sweep: Path, words: list[str], chosen: str, command: Command) -> None:
    assert command("show", sweep, *words).out.startswith(f"{chosen}: ")


def test_only_cells_need_no_name(tmp_path: Path, command: Command) -> None:
    assert command("show", folder_with(tmp_path / "s", cell("ddp"))).out.startswith("pass parallel=ddp: ")
    assert command("show", tmp_path / "nowhere", "ddp", status=2).refusal()


def test_a_cell_in_markdown_has_titles_and_tables(sweep: Path, command: Command) -> None:
    said = command("show", sweep, "fsdp", "--format", "markdown").out.splitlines()
    assert said[0] == "- fail parallel=fsdp save=async: a check failed"
    assert "**checks (resume failed)**" in said
    assert "| check | result | control caught | proves, if it passed |" in said
    assert said[-1] == "- `again: dcpbench run parallel=fsdp save=async repeat=1`"


def test_json_is_the_row_with_its_cause(sweep: Path, command: Command) -> None:
    row = command("show", sweep, "fsdp", "--json").json()
    assert (row["repeat"], row["details"]["phases"], row["load_s"]) == (1, DETAILS["phases"], 0.5)
    assert row["causes"][0].startswith("State that no checkpoint contains")


def test_texts_of_others_stay_text(tmp_path: Path, command: Command) -> None:
    nasty = "\x1b[2J[bold]\x00../../x"
    ranks = [{"losses": {nasty: [1.0]}, "resumed": {"9" * 5000: [1.0], "1": [nasty, None]}}, 7]
    seen = {"worst": [{"name": nasty}, 3], "control": [nasty], "mismatch_count": {nasty: nasty}}
    details = {
        "checks": {"model_equal": seen, nasty: 3},
        "ranks": ranks,
        "phases": {nasty: 1.0},
        "rank": nasty,
    }
    details["log_tail"] = [nasty, 3]
    bad = cell(cell=nasty, status="fail", model_equal=False, reason=nasty, details=details, overrides=nasty)
    said = command("show", folder_with(tmp_path / "s", bad)).out
    assert "\x1b" not in said
    assert "\\x1b[2J[bold]\\x00../../x" in said


UNUSED = """
import torch
from torch import nn
from dcpbench.api import Workload

class Skipping(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.one(x)

def build():
    batch = lambda generator: torch.randn(8, 4, generator=generator)
    return Workload(Skipping(), batch, lambda model, x: model(x).square().mean())
"""


@pytest.mark.slow
def test_unused_parameters_name_their_parallelism(tmp_path: Path, command: Command) -> None:
    """The message of torch that recognises them, in a real cell."""
    (tmp_path / "unused.py").write_text(UNUSED)
    asked = ("workload.target=unused.build", "parallel=ddp,ddp_unused", "saves=1", *ONE_STEP)
    ended = run(tmp_path / "sweep", *asked, "device=cpu", "world_size=2", "retry=0", reports=True)
    row = ended.row(parallel="ddp")
    assert row["status"] == "error", row["reason"]
    assert "Expected to have finished reduction" in row["reason"]
    assert "use parallel=ddp_unused" in " ".join(command("show", tmp_path / "sweep", "ddp").lines)
    assert "use parallel=ddp_unused" in (tmp_path / "sweep" / "junit.xml").read_text()
    fixed = ended.row(parallel="ddp_unused")
    assert "find_unused_parameters" not in str(fixed["reason"])
