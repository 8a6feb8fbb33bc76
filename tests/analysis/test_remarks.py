"""What the end of a sweep says of green rows, and how reasons and causes of red ones are chosen."""

from pathlib import Path
from typing import Any

import pytest

from conftest import Command
from dcpbench.analysis.causes import causes_of, short_reason
from dcpbench.analysis.frame import read_sweeps
from dcpbench.analysis.runs import failures, grouped_failures, remarks
from dcpbench.core.mismatch import Mismatch, Place, Problem
from dcpbench.core.notes import Note
from dcpbench.core.rank_report import CheckReport, RankReport
from dcpbench.core.stage_end import StageEnd
from dcpbench.report.page import page
from dcpbench.report.show import report_content
from dcpbench.verdict.attempt import Expected, verdict_of
from dcpbench.verdict.known_failures import KnownFailure, KnownMismatch
from report.sweeps import cell, folder_with
from support.ends import reported as ended

LISTED = KnownFailure("torn", torch=">=2", reason="torch tears; way out: none", link="docs/torn.md")
LISTED.checks = {"model_equal": [KnownMismatch("w", ["missing"])]}


def mine(model: str, **values: Any) -> Any:
    config = {"workload.target": model} if "." in model else {}
    return cell(model=model, overrides=f"workload.target={model}", cell=model, config=config, **values)


def test_lost_numbers_of_a_pass_are_named(tmp_path: Path, command: Command) -> None:
    texts = {"model.load": "8, resumed 2", "model.mean": "0.5, resumed 0.25"}
    notes = [Note("in_no_state_dict", text, name=name).plain() for name, text in texts.items()]
    lost = {"ranks": [{"notes": notes}]}
    rows = (
        mine("a.b", details=lost),
        mine("a.c", details={"ranks": [{}]}),
        mine("a.d", status="fail", details=lost),
    )
    old, new = folder_with(tmp_path / "old", rows[1]), folder_with(tmp_path / "new", *rows)
    said = "1 pass with values that no checkpoint has: model.load (dcpbench show FOLDER CELL)"
    assert remarks(read_sweeps([new]).frame) == [said]
    sweeps = read_sweeps([new])
    assert said in report_content(sweeps).more.splitlines()
    assert said in page(sweeps, "x")
    assert said in " ".join(command("compare", old, new).lines)


def test_known_failures_say_whose_they_are(tmp_path: Path) -> None:
    details = {
        "known_failures": [["torn", "torch tears; way out: none", "docs/torn.md"]],
        "checks": {"model_equal": {"worst": [{"name": "norm.mean"}, {"name": "norm.var"}]}},
    }
    values: dict[str, Any] = {"status": "xfail", "model_equal": False, "resume": False, "details": details}
    of_users = {**values, "details": {**details, "known_failures": [["mine", "it rounds", None]]}}
    two = [*details["known_failures"], ["cut", "torch cuts", "docs/cut.md"]]
    both = {**values, "details": {**details, "known_failures": two}}
    rows = mine("a.b", **values), mine("dummy", **values), mine("short", **both), mine("tied", **of_users)
    folder = folder_with(tmp_path / "sweep", *rows)
    assert remarks(read_sweeps([folder]).frame) == [
        "1 xfail of your own model, not resumed exactly: norm.mean, norm.var differ; torn: torch tears; "
        "way out: none (docs/torn.md)",
        "2 xfail by known failures of PyTorch: torn (docs/torn.md), cut (docs/cut.md)",
    ]


def test_checkpoint_without_a_judgement_is_named(tmp_path: Path) -> None:
    note = Note("left_out", "it ended", "loss_resume_equal", place=Place("after step 4"))
    values: dict[str, Any] = {"details": {"ranks": [{"notes": [note.plain()]}]}}
    rows = mine("a.b", loss_resume_equal=True, **values), mine("a.c", loss_resume_equal=None, **values)
    (said,) = remarks(read_sweeps([folder_with(tmp_path / "sweep", *rows)]).frame)
    assert said == "1 is ok without loss_resume_equal after step 4: it ended"


def reported(*failed: tuple[str, str]) -> list[StageEnd]:
    report = RankReport(0)
    for check, name in failed:
        report.checks.setdefault(check, CheckReport()).add([Mismatch(name, Problem.missing)])
    return [ended([report])]


def test_causes_are_of_what_no_known_failure_explains() -> None:
    ends = reported(("model_equal", "w"), ("step_equal", "norm.var"))
    verdict = verdict_of(Expected(worlds=[1], known_failures=(LISTED,)), ends)
    assert str(verdict.reason).startswith("training: in addition to known failure torn: step_equal: norm.var")
    row = {"status": verdict.status, "reason": verdict.reason, "details": verdict.details, **verdict.checks}
    assert short_reason(row).startswith("training: in addition to known failure torn: step_equal: norm.var")
    assert [cause.partition(",")[0] for cause in causes_of(row)] == ["Gradients agree"]
    both = verdict_of(
        Expected(worlds=[1], known_failures=(LISTED,)), reported(("model_equal", "w"), ("optim_equal", "m"))
    )
    assert str(both.reason).startswith("in addition to known failure torn: optim_equal: m")


@pytest.mark.parametrize(("entry", "is_named"), [("missing", True), ("differs", False)])
def test_missing_state_of_an_optimizer_has_its_cause(entry: str, is_named: bool) -> None:
    names = ["state.w.exp_avg", "state.w.step"]
    worst = [{"name": names[0], "problem": "missing"}, {"name": names[1], "problem": entry}]
    control = dict.fromkeys(
        [f"{name} in the checkpoint of step 4" for name in (*names, "param_groups.0.lr")], True
    )
    row = {
        "status": "fail",
        "optim_equal": False,
        "details": {"checks": {"optim_equal": {"worst": worst, "control": control}}},
    }
    assert ("dcp.load fills only what that already has" in causes_of(row)[0]) is is_named


def test_first_step_that_differs_is_named() -> None:
    worst = [
        {"name": f"loss of step {n}", "problem": "value", "max_abs_diff": n / 10, "rank": 0}
        for n in (12, 9, 10)
    ]
    row = {"status": "fail", "reason": "x", "loss_resume_equal": False}
    row["details"] = {"checks": {"loss_resume_equal": {"worst": worst, "mismatch_count": 3}}}
    assert short_reason(row) == "loss_resume_equal: loss of step 9 differs by 0.9, rank 0 (+2 more)"


def test_failures_of_other_targets_are_not_alike(tmp_path: Path) -> None:
    models = ("a.b", "a.b", "a.c")
    rows = [mine(m, status="error", reason="it broke", config_digest=f"{n}") for n, m in enumerate(models)]
    listed = grouped_failures(failures(read_sweeps([folder_with(tmp_path / "sweep", *rows)]).frame))
    assert list(listed["more"]) == ["and 1 more like it", ""]
