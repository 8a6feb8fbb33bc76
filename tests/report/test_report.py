"""Tables are made from rows alone."""

from pathlib import Path

from dcpbench.analysis.frame import read_sweep
from dcpbench.analysis.runs import failures
from dcpbench.report.document import has_failed
from dcpbench.report.show import write_reports
from dcpbench.report.tables import counts, detection, pivot_axes, status_pivot, summary
from report.sweeps import folder_with
from support.rows import row

SEVERAL = ("model_equal", "optim_equal", "loss_resume_equal", "gradient_close")


def test_table_has_the_axes_that_vary(tmp_path: Path) -> None:
    sweep = folder_with(
        tmp_path / "s",
        row(model="even", model_equal=True, save_s=0.25),
        row(model="uneven", status="fail", model_equal=False),
        row(model="large", status="fail", model_equal=True, gradient_close=False, step_equal=False),
        row(model="both", status="fail", **dict.fromkeys(SEVERAL, False)),
    )
    table = summary(read_sweep(sweep).frame).table
    assert list(table["model"]) == ["uneven", "large", "both", "even"], "failed cells first"
    assert list(table["checks"]) == [
        "failed: model_equal",
        "training failed: gradient_close, +1",
        "failed: model_equal, +2; training failed: gradient_close",
        "1 passed",
    ]
    assert [has_failed(text) for text in table["checks"]] == [True, True, True, False]
    assert list(table["save_s"]) == ["-", "-", "-", "0.250"]
    assert "optimizer" not in table


def test_integers_of_an_axis_with_a_null_stay_integers(tmp_path: Path) -> None:
    """Under pandas 2 they became 2.0, and a pivot had no cell of that number."""
    frame = read_sweep(
        folder_with(tmp_path / "s", row(load_world_size=2, save_s=1.0), row(load_world_size=None, save_s=3.0))
    ).frame
    assert set(summary(frame).table["load_world_size"]) == {"2", "-"}
    pivot = status_pivot(frame, pivot_axes(frame, ["load_world_size"])).table
    assert list(pivot["load_world_size"]) == ["2", "-"]


def test_injected_faults_have_a_separate_table(tmp_path: Path) -> None:
    def planted(fault: str, parallel: str, seen: bool | None, status: str, **more: bool) -> object:
        return row(fault=fault, parallel=parallel, fault_seen=seen, status=status, **more)

    sweep = folder_with(
        tmp_path / "s",
        planted("lr", "ddp", True, "fail", optim_equal=False),
        planted("lr", "fsdp", False, "pass", optim_equal=True),
        planted("file", "ddp", True, "error"),
        planted("file", "fsdp", None, "skip"),
        row(parallel="ddp"),
    )
    frame = read_sweep(sweep).frame
    table = detection(frame).set_index("fault")
    assert list(table.loc["lr", ["ddp", "fsdp", "detected", "detected by"]]) == [
        "fail",
        "NO",
        "1 of 2",
        "optim_equal",
    ]
    assert list(table.loc["file", ["ddp", "fsdp", "detected", "detected by"]]) == [
        "error",
        "-",
        "1 of 1",
        "error",
    ]
    assert list(table.loc["all of them", ["ddp", "fsdp", "detected"]]) == ["2 of 2", "0 of 1", "2 of 3"]
    assert list(failures(frame)["status"]) == ["pass", "skip"]
    assert counts(frame).endswith("2 of 3 faults detected")
    write_reports(sweep, None)
    assert "all of them" in (sweep / "report.html").read_text()
    assert detection(frame[frame["fault"].isna()]).empty
