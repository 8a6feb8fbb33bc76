"""Verdicts on recorded runs: the first difference in causal order, and its likely cause."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dcpbench.plugins.script.compare import Difference
from dcpbench.plugins.script.judge import STATUS, Verdict, judge
from dcpbench.plugins.script.record import Run
from dcpbench.plugins.script.script import bar

from .runs import Writer, ended, recorded, state

SAVED = ("step-4.pt", "step-8.pt")
Changes = Mapping[int, Mapping[str, Any]]


def verdict(
    folder: Path,
    changed: Changes | None = None,
    loaded: int = 8,
    last: int = 12,
    again: Changes | None = None,
    reads: str | None = None,
    status: int = 0,
    saves_last: bool = True,
) -> Verdict:
    """Judge a run that was killed before step 11 and resumed, with changes of its steps."""
    reference = recorded(folder / "reference", [Writer().train(1, 12)], [*SAVED, "step-12.pt"])
    stopped = Writer().train(1, 11)
    stopped.done -= 1
    stopped.event("stop", change=False, path="")
    resumed = Writer()
    if reads is None and loaded:
        resumed.event("load", path=f"step-{loaded}.pt")
    resumed.train(loaded + 1, last, changed)
    if not saves_last:
        resumed.events = [event for event in resumed.events if event.get("path") != "step-12.pt"]
    runs = [ended(recorded(folder / "stopped", [stopped], SAVED), -9)]
    runs += [ended(recorded(folder / "resumed", [resumed], SAVED), status)]

    def second(steps: int) -> Run:
        return recorded(folder / "again", [Writer().train(1, steps, again)], SAVED)

    return judge(reference, runs[0], runs[1], second)


def test_equal_steps_are_exact(tmp_path: Path) -> None:
    found = verdict(tmp_path)
    assert (found.word, found.loaded, found.newest, found.first) == ("exact", 8, 8, None)
    assert found.reason == "from step 8; steps 9 to 12 are equal"


def test_failure_at_the_end_counts_if_the_last_save_is_missing(tmp_path: Path) -> None:
    for name in ("saved", "lost"):
        (tmp_path / name).mkdir()
    saved = verdict(tmp_path / "saved", status=1)
    assert saved.word == "exact"
    assert "; fails after its last step: exit status 1" in saved.reason
    lost = verdict(tmp_path / "lost", status=1, saves_last=False)
    assert (lost.word, lost.first.kind) == ("diverges", "saved")
    assert "step-12.pt is missing" in lost.reason
    assert "; fails after its last step: exit status 1" in lost.reason


@pytest.mark.parametrize(
    ("changed", "step", "kind", "cause"),
    [
        ({9: {"weights": [101, 201]}}, 9, "weights", "nothing is loaded into the model"),
        ({9: {"weights": [109, 201]}}, 9, "weights", "strict=False"),
        ({9: {"weights": [105, 205]}}, 9, "weights", "weights of step 5"),
        ({9: {"weights": [18, 209]}}, 9, "weights", "the checkpoint holds as ema.a"),
        ({9: {"weights": [1, 2]}}, 9, "weights", "of no step"),
        ({9: {"frozen": [8]}}, 9, "frozen", "initialized again"),
        ({9: {"buffers": [601]}}, 9, "buffers", "buffers are not restored"),
        ({9: {"moments": []}}, 9, "moments", "not saved, or not loaded"),
        ({9: {"hyper": [1.0]}}, 9, "hyper", "schedule starts over"),
        ({9: {"hyper": [1 / 10]}}, 9, "hyper", "off by one"),
        ({9: {"modes": [4]}}, 9, "modes", "train()"),
        ({9: {"batch": [801]}}, 9, "batch", "starts over"),
        ({9: {"batch": [1]}}, 9, "batch", "set_epoch"),
        (
            {9: {"batch": [1], "torch": 0}},
            9,
            "batch",
            "generator that is not restored (torch)",
        ),
        ({10: {"loss": [2]}}, 10, "loss", "script's own"),
        ({10: {"loss": [2]}, 9: {"torch": 0}}, 10, "loss", "dropout"),
        ({12: {"gradients": [1, 512]}}, 12, "gradients", "clipping"),
    ],
)
def test_first_difference(tmp_path: Path, changed: Changes, step: int, kind: str, cause: str) -> None:
    """Later differences, and those of the same step that follow from it, are not reported."""
    later = {number: {**of, "gradients": [0, 0], "loss": [0]} for number, of in changed.items()}
    if kind in ("loss", "gradients"):
        later = dict(changed)
    found = verdict(
        tmp_path, later | {12: {**changed.get(12, {}), "weights": [0, 0]}} if step < 12 else later
    )
    assert (found.word, found.first.step, found.first.kind) == ("diverges", step, kind), found.reason
    assert cause in found.cause


def test_scaled_loss_is_a_scalers(tmp_path: Path) -> None:
    found = verdict(tmp_path, {9: {"loss": ["454.5"]}})
    assert found.first.kind == "loss"
    assert "GradScaler is not restored: the loss is 0.5 times as large" in found.cause


def test_older_checkpoint(tmp_path: Path) -> None:
    found = verdict(tmp_path, loaded=4)
    assert (found.word, found.loaded, found.newest, found.first.kind) == ("older", 4, 8, "checkpoint")
    assert "step-4.pt" in found.reason


def test_start_from_scratch(tmp_path: Path) -> None:
    found = verdict(tmp_path, loaded=0)
    assert (found.word, found.loaded, found.newest) == ("scratch", 0, 8)
    assert "no checkpoint is read" in found.cause


def test_too_few_steps(tmp_path: Path) -> None:
    found = verdict(tmp_path, last=10)
    assert (found.word, found.first.step, found.first.kind) == ("diverges", 11, "steps")


def test_too_many_steps(tmp_path: Path) -> None:
    found = verdict(tmp_path, last=14)
    assert (found.word, found.first.step, found.first.kind) == ("diverges", 13, "steps")


def test_what_equal_runs_differ_in_is_not_blamed(tmp_path: Path) -> None:
    noise = {10: {"gradients": [0, 0]}}
    found = verdict(tmp_path, {10: {"gradients": [1, 1]}}, again=noise)
    assert (found.word, STATUS[found.word]) == ("not_deterministic", "skip")
    assert "from step 10 on (gradients)" in found.reason


def test_restored_state_is_blamed_in_noisy_runs(tmp_path: Path) -> None:
    """The stopped run wrote the checkpoint: noise between runs explains no difference after the load."""
    noise = {step: {"weights": [step, step]} for step in range(2, 12)}
    found = verdict(tmp_path, {9: {"weights": [101, 201]}}, again=noise)
    assert (found.word, found.first.kind) == ("diverges", "weights")


def test_later_saves_are_compared(tmp_path: Path) -> None:
    reference = recorded(tmp_path / "a", [Writer().train(1, 12)], SAVED)
    stopped = Writer().train(1, 10)
    stopped.event("stop", change=False, path="")
    resumed = Writer()
    resumed.train(9, 11)
    resumed.step(12)
    resumed.save("step-12.pt", {"model.a": 113, "ema.a": 1, "step": "=12", "time": "='10:00'", "rng": 5})
    runs = [ended(recorded(tmp_path / "b", [stopped], SAVED))]
    runs += [ended(recorded(tmp_path / "c", [resumed], SAVED))]
    found = judge(reference, *runs, lambda steps: reference)
    assert (found.first.kind, found.first.step, found.first.names[0]) == ("saved", 12, "ema.a")
    assert "EMA" in found.cause


@pytest.mark.parametrize("finished", [True, False])
def test_checkpoints_in_flight_are_not_complete(tmp_path: Path, finished: bool) -> None:
    reference = recorded(tmp_path / "a", [Writer().train(1, 12)], SAVED)
    stopped = Writer().train(1, 7)
    stopped.step(8)
    stopped.save("step-8.pt", {"model.a": 109, "ema.a": 18, "step": "=8"}, finished)
    stopped.event("stop", change=False, path="")
    resumed = Writer().train(5, 12)
    runs = [ended(recorded(tmp_path / "b", [stopped], SAVED))]
    runs += [ended(recorded(tmp_path / "c", [resumed], SAVED))]
    found = judge(reference, *runs, lambda steps: reference)
    assert (found.word, found.newest) == (("older", 8) if finished else ("exact", 4))


def test_half_written_checkpoint_is_torn(tmp_path: Path) -> None:
    reference = recorded(tmp_path / "a", [Writer().train(1, 12)], SAVED)
    stopped = Writer().train(1, 9)
    stopped.event("stop", change=False, path="step-8.pt")
    resumed = Writer()
    resumed.event("load", path="step-8.pt")
    resumed.train(9, 12, {9: {"moments": [1]}})
    runs = [ended(recorded(tmp_path / "b", [stopped], SAVED))]
    runs += [ended(recorded(tmp_path / "c", [resumed], SAVED))]
    found = judge(reference, *runs, lambda steps: reference)
    assert (found.word, found.newest, found.first.kind) == ("torn", 4, "moments")


def test_difference_on_one_rank(tmp_path: Path) -> None:
    def ranks(first: int, last: int, changed: Changes | None = None) -> list[Writer]:
        return [Writer().train(first, last), Writer(1).train(first, last, changed)]

    reference = recorded(tmp_path / "a", ranks(1, 12), SAVED)
    stopped = ranks(1, 10)
    stopped[0].event("stop", change=False, path="")
    runs = [ended(recorded(tmp_path / "b", stopped, SAVED))]
    runs += [ended(recorded(tmp_path / "c", ranks(9, 12, {9: {"weights": [1, 209]}}), SAVED))]
    found = judge(reference, *runs, lambda steps: reference)
    assert (found.word, found.first.rank, found.first.names[0]) == ("diverges", 1, "a")
    assert "step 9, rank 1: weights differ: a (1 of 2)" in found.reason


def test_run_that_does_not_start(tmp_path: Path) -> None:
    reference = recorded(tmp_path / "a", [Writer().train(1, 12)], SAVED)
    stopped = Writer().train(1, 10)
    stopped.event("stop", change=False, path="")
    before = ended(recorded(tmp_path / "b", [stopped], SAVED))
    text = "Traceback\n[rank0]: KeyError: 'model'\nE1128 08:00 1 torch/distributed/elastic/x] failed\n"
    nothing = recorded(tmp_path / "c", [], SAVED)
    runs = [ended(nothing, status, text) for status in (1, None)]
    refused, hung = (judge(reference, before, run, lambda steps: reference) for run in runs)
    assert (refused.word, hung.word) == ("refuses", "hangs")
    assert refused.reason == "does not start: exit status 1: KeyError: 'model'; complete: step 8"


def test_stop_that_is_not_reached(tmp_path: Path) -> None:
    reference = recorded(tmp_path / "a", [Writer().train(1, 12)], SAVED)
    run = ended(reference)
    assert judge(reference, run, None, lambda steps: reference).word == "not_reached"


def test_timeline_shows_the_steps_around_the_first_difference(tmp_path: Path) -> None:
    reference = recorded(tmp_path / "a", [Writer().train(1, 200)], SAVED)
    text = bar(reference, Verdict("diverges", "", loaded=88, first=Difference(150, 0, "loss")))
    assert text.replace("|", "") == "=" * 30 + "X" + "x" * 29
    text = bar(reference, Verdict("exact", "", loaded=88))
    assert text.replace("|", "") == "." * 30 + "=" * 30
    assert text.endswith("=|==")


def test_state_is_what_a_step_depends_on() -> None:
    assert state(9)["weights"] == [109, 209]
