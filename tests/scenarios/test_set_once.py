"""Healthy workloads that controls or the twin could blame."""

import pytest

from dcpbench.cell import checks
from dcpbench.cell.cell import Cell
from dcpbench.cell.checkpoint import Checkpoint
from dcpbench.config.groups import WorkloadConfig
from dcpbench.runs.run import Run
from support.alone import run_alone
from support.notes import why_not


def test_controls_differ_from_saved_values() -> None:
    assert run_alone(workload=WorkloadConfig("support.set_once.build")).verdict.status == "pass"


@pytest.mark.parametrize(
    ("options", "applies"),
    [({}, False), ({"by": "optimizer"}, False), ({"steps": True}, True)],
)
def test_moved_parameters_leave_no_twin(options: dict[str, object], applies: bool) -> None:
    ran = run_alone(workload=WorkloadConfig("support.set_once.perturbed_step", options=options))
    assert ran.verdict.status == "pass"
    why = why_not(ran.reports[0]).get("gradient_close", "")
    assert why.startswith("step moves parameters between two backward passes") is not applies
    assert ran.verdict.checks["gradient_close"] is (True if applies else None)


def test_compiled_statistics_have_a_bound() -> None:
    ran = run_alone(workload=WorkloadConfig("support.set_once.norm"), compile=True)
    assert (ran.verdict.status, ran.verdict.training) == ("pass", True)


@pytest.mark.parametrize(
    ("returns", "kind"), [("dict", "an empty dict"), ("none", "a NoneType"), ("list", "a list")]
)
def test_loss_of_nothing_is_named(returns: str, kind: str) -> None:
    with pytest.raises(TypeError, match=rf"loss returned {kind}; return a scalar .*\(set_once.py:\d+\)"):
        run_alone(workload=WorkloadConfig("support.set_once.nothing", options={"returns": returns}))


def test_checkpoint_that_cannot_be_judged_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def mended(cell: Cell, target: Run, checkpoint: Checkpoint) -> str | None:
        return "it cannot be set" if checkpoint.step == 1 else None

    monkeypatch.setattr(checks, "repair", mended)
    ran = run_alone(model="short", saves=2, train_steps=1, resume_steps=1)
    assert ran.verdict.checks["loss_resume_equal"] is True
    notes = (note for report in ran.reports for note in report.notes)
    places = {str(note.place) for note in notes if note.check == "loss_resume_equal"}
    assert any(where.startswith("after the checkpoint of step 1") for where in places)
    assert not any("step 2" in where for where in places)
