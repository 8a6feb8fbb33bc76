"""Verdicts on recorded runs: the first difference in causal order, and its likely cause."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dcpbench.plugins.script.compare import Stopped
from dcpbench.plugins.script.copies import Copy
from dcpbench.plugins.script.judge import STATUS, StopVerdict, judge
from dcpbench.plugins.script.record import RecordedRun

from .runs import Writer, ended, recorded, runs, stopped_at

Changes = Mapping[int, Mapping[str, Any]]


def verdict(
    folder: Path,
    changed: Changes | None = None,
    loaded: int = 8,
    last: int = 12,
    again: Changes | None = None,
    second: Changes | None = None,
    status: int = 0,
    saves_last: bool = True,
    whole: Changes | None = None,
) -> StopVerdict:
    """Judge a run that was killed before step 11 and resumed, with changes of its steps, of those of the
    reference (`again`), of a second resume and of the run that was killed (`whole`)."""
    frozen = recorded(folder / "frozen", [Writer().train(1, 12, whole)])
    reference = recorded(folder / "reference", [Writer().train(1, 12, again)])

    def resume(name: str, changes: Changes | None) -> RecordedRun:
        resumed = resuming(f"step-{loaded}.pt", loaded, changes, last)
        if not saves_last:
            resumed.events = [event for event in resumed.events if event.get("path") != "step-12.pt"]
        return ended(recorded(folder / name, [resumed]), status)

    further = runs(reference, resume("second", second) if second else None)
    return judge(stopped_at(frozen, 11), resume("resumed", changed), *further)


def resuming(path: str, loaded: int, changed: Changes | None = None, last: int = 12) -> Writer:
    """A process that opens a file, and trains on."""
    writer = Writer()
    writer.event("load", path=path)
    return writer.train(loaded + 1, last, changed)


def judged(folder: Path, whole: Writer, resumed: Writer, step: int = 11, **cut: str) -> StopVerdict:
    """Judge the resume of a run that was stopped before a step, or at a change of a file."""
    frozen = recorded(folder / "whole", [whole])
    run = recorded(folder / "resumed", [resumed])
    return judge(stopped_at(frozen, step, **cut), run, *runs(frozen))


def test_equal_steps_are_exact(tmp_path: Path) -> None:
    found = verdict(tmp_path)
    assert (found.word, found.loaded, found.newest, found.first) == ("exact", 8, 8, None)
    assert found.reason == (
        "from step 8; steps 9 to 12 are equal: weights 2, optimizer state 1, buffers, batch, loss"
    )
    assert found.compared["weights"] == 2


def test_failure_at_the_end_counts_if_the_last_save_is_missing(tmp_path: Path) -> None:
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
        ({12: {"gradients": [412]}}, 12, "gradients", "requires_grad"),
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


def test_weights_that_are_drawn_later(tmp_path: Path) -> None:
    """As those of a layer that is added in a later step."""
    found = verdict(tmp_path, {9: {"torch": 0}, 11: {"weights": [1, 211]}})
    assert (found.word, found.first.step, found.first.kind) == ("diverges", 11, "weights")
    assert "drawn from a generator that is not restored (torch)" in found.cause


def test_generator_that_a_step_does_not_draw_from_is_no_cause(tmp_path: Path) -> None:
    """It changes between epochs alone, as that of a loader without workers."""
    whole = {step: {"torch": 9} for step in range(9, 13)}
    found = verdict(tmp_path, {9: {"loss": [2], "torch": 0}}, again=whole, whole=whole)
    assert (found.first.kind, "script's own" in found.cause) == ("loss", True), found.cause


def test_older_checkpoint(tmp_path: Path) -> None:
    found = verdict(tmp_path, {9: {"batch": [1]}}, loaded=4)
    assert (found.word, found.loaded, found.newest, found.first.kind) == ("older", 4, 8, "checkpoint")
    assert found.reason == (
        "takes step 4 (step-4.pt), though step 8 was complete; then step 9, rank 0: the batch is that of no "
        "step of the reference"
    )


@pytest.mark.parametrize(("last", "step"), [(10, 11), (14, 13)])
def test_other_number_of_steps(tmp_path: Path, last: int, step: int) -> None:
    found = verdict(tmp_path, last=last)
    assert (found.word, found.first.step, found.first.kind) == ("diverges", step, "steps")


NOISE = {10: {"gradients": [0, 0]}, 11: {"weights": [0, 0], "loss": ["911.0000001"]}}
OTHER = {10: {"gradients": [1, 1]}, 11: {"weights": [1, 1], "loss": ["911.0000002"]}}


def test_computation_that_does_not_repeat_is_restored(tmp_path: Path) -> None:
    found = verdict(tmp_path, NOISE, second=OTHER, again={3: {"gradients": [7, 7]}})
    assert (found.word, STATUS[found.word]) == ("restored", "pass"), found.reason
    assert "from step 10 on two resumes differ (gradients), as two uninterrupted runs do" in found.reason


def test_noise_that_two_uninterrupted_runs_do_not_have_is_the_resumes(tmp_path: Path) -> None:
    found = verdict(tmp_path, NOISE)
    assert (found.word, found.first.kind) == ("diverges", "gradients")


@pytest.mark.parametrize("kind", ["batch", "hyper", "modes"])
def test_what_repeats_is_compared_after_the_noise_too(tmp_path: Path, kind: str) -> None:
    wrong = {12: {kind: [1]}}
    found = verdict(tmp_path, NOISE | wrong, second=OTHER | wrong, again={3: {"gradients": [7, 7]}})
    assert (found.word, found.first.step, found.first.kind) == ("diverges", 12, kind)


def test_what_two_resumes_compute_alike_by_chance_is_not_blamed(tmp_path: Path) -> None:
    alike = {12: {"weights": [5, 5]}}
    found = verdict(tmp_path, NOISE | alike, second=OTHER | alike, again={3: {"gradients": [7, 7]}})
    assert found.word == "restored", found.reason


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({9: {"batch": [1]}}, {9: {"batch": [2]}}),
        ({9: {"loss": ["1.0"], "torch": 1}}, {9: {"loss": ["2.0"], "torch": 2}}),
        ({9: {"loss": ["1.0"]}}, {9: {"loss": ["1.1"]}}),
    ],
)
def test_what_is_drawn_anew_in_each_resume_is_not_restored(
    tmp_path: Path, first: Changes, second: Changes
) -> None:
    found = verdict(tmp_path, first, second=second, again={1: {"weights": [7, 7]}})
    assert (found.word, found.first.step) == ("diverges", 9)
    assert "is another one in each resume" in found.reason
    assert "neither restored nor seeded" in found.cause


OWN = [900 + step for step in range(1, 13)]


@pytest.mark.parametrize(
    ("masks", "wrong", "text", "cause"),
    [
        (OWN, {"call 0.0.0": 77}, "step 9 in 1 of its 2 tensors", "a hidden state, a temperature"),
        (OWN, {"call 0.0.1": 77}, "step 9 in 1 of its 2 tensors", "a hidden state, a temperature"),
        (OWN, {"call 0.0.1": 901}, "step 9 in 1 of its 2 tensors", "and another is that of step 1: a second"),
        (OWN, {"call 2.0.0": 77}, "step 9 in 3 of its 4 tensors", "a hidden state, a temperature"),
        ([7] * 12, {"call 0.0.0": 77}, "no step of the reference", "the order of the data"),
        (
            [900 + step // 2 for step in range(12)],
            {"call 0.0.0": 77},
            "no step of the reference",
            "the order",
        ),
    ],
)
def test_an_input_beside_the_right_data_is_no_lost_position(
    tmp_path: Path, masks: list[int], wrong: Mapping[str, int], text: str, cause: str
) -> None:
    """A mask that other steps have, too, does not say that the data is right."""
    whole, resumed = Writer().train(1, 12), resuming("step-8.pt", 8)
    for writer in (whole, resumed):
        for event in writer.events:
            if event["e"] == "step":
                step = event["parts"]["loss"]["0"] - 900
                inputs = {
                    "call 0.0.0": step,
                    "call 0.0.1": masks[step - 1],
                    "call 1.0.0": 3,
                    "call 2.0.0": -step,
                }
                event["parts"]["batch"] = inputs
    resumed.events[2]["parts"]["batch"] |= wrong | {"call 10.0.0": 78}
    found = judged(tmp_path, whole, resumed)
    assert found.reason.startswith(f"step 9, rank 0: the batch is that of {text}")
    assert cause in found.cause


@pytest.mark.parametrize(
    ("calls", "losses", "gradients", "word", "kind"),
    [
        ([5], 1, [409, 509], "exact", None),
        ([5], 1, [1, 2], "diverges", "gradients"),  # a validation is called before the step
        ([4], 1, [1, 2], "diverges", "batch"),
        ([5], 0, [1, 2], "diverges", "batch"),  # half of an accumulation is lost
        ([5], 0, [409, 509], "exact", None),  # it was saved
    ],
)
def test_calls_that_the_first_step_after_a_start_has_not(
    tmp_path: Path, calls: list[int], losses: int, gradients: list[int], word: str, kind: str | None
) -> None:
    whole, resumed = Writer().train(1, 12), resuming("step-8.pt", 8, {9: {"gradients": gradients}})
    for writer, of_step, count in ((whole, [4, 5], 1), (resumed, calls, losses)):
        step = next(
            event for event in writer.events if event["e"] == "step" and event["parts"]["loss"] == {"0": 909}
        )
        step["parts"]["batch"] = {f"call {place}.0": call for place, call in enumerate(of_step)}
        step["parts"]["loss"] = dict.fromkeys(map(str, range(count)), 909)
    found = judged(tmp_path, whole, resumed)
    assert (found.word, found.first and found.first.kind) == (word, kind), found.reason


def test_failure_of_the_recorder_is_no_fault_of_the_script(tmp_path: Path) -> None:
    resumed = Writer()
    resumed.event("broken", error="KeyError('x')")
    found = judged(tmp_path, Writer().train(1, 12), resumed.train(9, 12, {9: {"batch": [1]}}))
    assert (found.word, "the recorder failed: KeyError('x')" in found.reason) == ("vacuous", True)


def test_restored_state_is_blamed_in_noisy_runs(tmp_path: Path) -> None:
    noise = {step: {"weights": [step, step]} for step in range(2, 12)}
    found = verdict(tmp_path, {9: {"weights": [101, 201]}}, again=noise)
    assert (found.word, found.first.kind) == ("diverges", "weights")


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("generator_ema.a", "diverges"),
        ("generator.0.weight", "diverges"),
        ("sampler.generator", "exact"),
        ("generator_state.0", "exact"),
        ("rng.torch", "exact"),
        ("best./out/step-12.pt", "exact"),
    ],
)
def test_saved_states_of_generators_and_paths_are_not_compared(tmp_path: Path, name: str, word: str) -> None:
    """A GAN has a generator, too."""
    whole, resumed = Writer().train(1, 11), resuming("step-8.pt", 8, last=11)
    for writer, value in ((whole, 1), (resumed, 2)):
        writer.step(12)
        writer.save("step-12.pt", {"model.a": 113, name: value, "step": "=12"})
    found = judged(tmp_path, whole, resumed)
    assert found.word == word, found.reason


@pytest.mark.parametrize(("other", "word"), [("=2.5", "exact"), ("=1.5", "diverges")])
def test_saved_value_that_does_not_repeat_is_left_out(tmp_path: Path, other: str, word: str) -> None:
    """Such as the seconds that a run took; one that two uninterrupted runs have counts."""

    def trained(seconds: str, first: int = 1) -> Writer:
        writer = Writer()
        writer.event("load", path="step-8.pt")
        for step in range(first, 13):
            writer.step(step)
            if step % 4 == 0:
                writer.save(f"step-{step}.pt", {"model.a": 101 + step, "seconds": seconds})
        return writer

    names = {"frozen": "=1.5", "reference": other}
    frozen, reference = (recorded(tmp_path / name, [trained(of)]) for name, of in names.items())
    run = recorded(tmp_path / "resumed", [trained("=3.5", 9)])
    found = judge(stopped_at(frozen, 11), run, *runs(reference))
    assert (found.word, found.loaded) == (word, 8), found.reason


@pytest.mark.parametrize("in_flight", [True, False])
def test_what_an_incomplete_checkpoint_lacks_is_named(tmp_path: Path, in_flight: bool) -> None:
    """A file that is there, and whose save has not ended, or one that only the frozen run writes, later."""
    writer = Writer()
    for step in range(1, 13):
        writer.step(step)
        for number in (1, 2) if step % 4 == 0 else ():
            content = {"model.a": 101 + step, "step": f"={step}"}
            writer.save(f"step-{step}/{number}.pt", content, not in_flight or step < 8)
            writer.event("open", path=f"log-{step}-{number}")
    resumed = resuming("step-8/1.pt", 8, {9: {"moments": [1]}})
    found = judged(tmp_path, writer, resumed, change="log-8-1")
    lack = "step-8/1.pt was being written" if in_flight else "step-8/2.pt is missing"
    assert (found.word, lack in found.cause) == ("torn", True), found


def test_a_cut_file_is_not_taken_where_another_has_the_same(tmp_path: Path) -> None:
    """`last.pt` is written after `step-8.pt`, with the same content."""
    writer = Writer()
    for step in range(1, 13):
        writer.train(step, step)
        if step % 4 == 0:
            content = {"model.a": 101 + step, "ema.a": 10 + step, "step": f"={step}"}
            writer.save("last.pt", content)
    resumed = Writer()
    for path in ("last.pt", "step-8.pt"):  # it refuses the first
        resumed.event("load", path=path)
    resumed.train(9, 12, {9: {"batch": [1]}})
    found = judged(tmp_path, writer, resumed, path="last.pt")
    assert (found.word, found.newest, found.first.kind) == ("diverges", 8, "batch")


@pytest.mark.parametrize(("pid", "word"), [(0, "torn"), (7, "diverges")])
def test_file_that_a_forked_process_has_open_is_not_cut(tmp_path: Path, pid: int, word: str) -> None:
    """Workers of a loader are forked while a thread writes a checkpoint, and have it open until they end."""
    frozen = recorded(tmp_path / "a", [Writer().train(1, 12)])  # process 0
    run = recorded(tmp_path / "c", [resuming("step-8.pt", 8, {9: {"moments": [1]}})])
    stopped = stopped_at(frozen, 11)
    stopped = replace(stopped, copy=replace(stopped.copy, writing={"step-8.pt": [pid]}))
    assert judge(stopped, run, *runs(frozen)).word == word


@pytest.mark.parametrize(("uploads_last", "word"), [(True, "exact"), (False, "older")])
def test_a_stage_of_an_upload_is_no_checkpoint(tmp_path: Path, uploads_last: bool, word: str) -> None:
    """Only files that were copied to `remote` are found. A backup is a copy too, but not of the last save."""
    writer = Writer()
    for step in range(1, 13):
        writer.train(step, step)
        if step % 4 == 0 and (step < 12 or uploads_last):
            writer.event("copy", path=f"step-{step}.pt", to=f"remote/{step}.pt")
            writer.event("open", path=f"remote/{step}.pt")
    found = judged(tmp_path, writer, resuming("remote/4.pt", 4), path="remote/8.pt", change="remote/8.pt")
    assert (found.word, found.loaded) == (word, 4), found.reason


@pytest.mark.parametrize(("thread", "word"), [({"thread": 1}, "exact"), ({}, "older")])
def test_pointer_to_an_upload(tmp_path: Path, thread: dict[str, int], word: str) -> None:
    """It is written when the upload is known to have ended: at the next save. One to a save that has ended
    when it returns is late."""
    writer = Writer()
    for step in range(1, 13):
        writer.step(step)
        if step % 4 == 0:
            if step > 4:
                writer.event("open", path="latest")
            content = {"model.a": 101 + step, "ema.a": 10 + step, "step": f"={step}"}
            writer.event("save", path=f"step-{step}", content=content)
            writer.event("open", path=f"step-{step}/0")
            writer.event("saved", path=f"step-{step}", **thread)
    writer.event("open", path="latest")
    resumed = Writer()
    resumed.event("read", path="latest")
    resumed.event("load", path="step-4")
    for step in range(5, 13):
        resumed.step(step)
    found = judged(tmp_path, writer, resumed)
    assert (found.word, found.loaded) == (word, 4), found.reason


@pytest.mark.parametrize("late", [0, 1])
def test_save_of_a_thread_is_of_the_step_whose_weights_it_has(tmp_path: Path, late: int) -> None:
    """A thread saves while the next step is made. A resume of it that makes that step again is right."""
    writer = Writer()
    for step in range(1, 13):
        writer.step(step)
        if step % 4 == 1 and step > 1:
            content = {"model.a": 101 + step - late, "model.b": 201 + step - late}
            writer.event("save", path=f"at-{step}.pt", content=content, thread=1)
            writer.event("open", path=f"at-{step}.pt", thread=1)
            writer.event("saved", path=f"at-{step}.pt", thread=1)
    resumed = Writer()
    resumed.event("load", path="at-9.pt")
    for step in range(10 - late, 13):
        resumed.step(step)
    found = judged(tmp_path, writer, resumed)
    assert (found.word, found.loaded, found.newest) == ("exact", 9 - late, 9 - late), found.reason


@pytest.mark.parametrize("saves", [True, False])
def test_a_start_proves_nothing_where_no_save_is_known(tmp_path: Path, saves: bool) -> None:
    writer = Writer()
    for step in range(1, 13):
        writer.step(step)
        if step % 4 == 0:
            writer.event("open", path=f"step-{step}.npz")
        if step == 11 and saves:  # after the stop
            writer.save("step-11.pt", {"model.a": 112})
    resumed = Writer()
    for step in range(1, 13):
        resumed.step(step)
    found = judged(tmp_path, writer, resumed)
    assert (found.word, "no save" in found.reason) == (("exact", False) if saves else ("vacuous", True))


def test_difference_of_a_later_optimizer_comes_later(tmp_path: Path) -> None:
    """Of a GAN: the weights that its second optimizer does not change are those that the first one did."""

    def trained(first: int, last: int, changed: Mapping[str, Any], frozen: int = 7) -> Writer:
        writer = Writer()
        for step in range(first, last + 1):
            writer.train(step, step, {9: changed})
            parts = {"frozen": {"c": frozen}, "batch": {"0x": 1}, "loss": {"0": 1}}
            writer.event("step", rank=0, optimizer=1, parts=parts)
        return writer

    resumed = trained(9, 12, {"moments": []}, frozen=8)
    resumed.events.insert(0, {"e": "load", "path": "step-8.pt", "k": 0, "t": 0})
    found = judged(tmp_path, trained(1, 12, {}), resumed)
    assert (found.word, found.first.kind) == ("diverges", "moments")
    assert "step 9, rank 0, optimizer 1: optimizer state missing" in found.reason
    assert "frozen weights" not in found.reason, "they follow from the first optimizer's step"


def test_values_of_all_optimizers_of_the_first_step_are_counted(tmp_path: Path) -> None:
    whole, resumed = Writer().train(1, 12), resuming("step-8.pt", 8)
    second = {"weights": {"d": 1, "e": 2, "f": 3}, "moments": {"d.exp_avg": 1}, "batch": {}}
    for writer in (whole, resumed):
        for at, event in reversed([*enumerate(writer.events)]):
            if event["e"] == "step":
                writer.events.insert(at + 1, {**event, "k": event["k"] + 1, "optimizer": 1, "parts": second})
    found = judged(tmp_path, whole, resumed)
    assert (found.word, found.compared["weights"], found.compared["moments"]) == ("exact", 5, 2)
    assert "equal: weights 5, optimizer state 2, buffers, batch, loss" in found.reason


def test_state_that_an_inner_optimizer_has_is_not_the_outer_ones(tmp_path: Path) -> None:
    """Loaded into both, as by ZeroRedundancyOptimizer, whose own state is empty in training."""
    none = {step: {"moments": []} for step in range(1, 13)}
    assert verdict(tmp_path, {step: {} for step in none}, whole=none, again=none).word == "exact"


def test_one_step_of_each_rank_is_compared(tmp_path: Path) -> None:
    """Their weights change between steps, of which there is one."""

    def ranks(first: int, last: int) -> list[Writer]:
        return [Writer().train(first, last), Writer(1).train(first, last)]

    frozen, resumed = recorded(tmp_path / "a", ranks(1, 9)), ranks(9, 9)
    resumed[0].events.insert(0, {"e": "load", "k": 0, "t": 0, "path": "step-8.pt"})
    found = judge(stopped_at(frozen, 9), recorded(tmp_path / "c", resumed), *runs(frozen))
    assert (found.word, found.loaded) == ("exact", 8), found.reason


def test_buffers_of_another_rank(tmp_path: Path) -> None:
    """Each rank has its own, and a save has one of them."""

    def ranks(first: int, last: int, own: Changes) -> list[Writer]:
        return [Writer().train(first, last), Writer(1).train(first, last, own)]

    buffers = {step: {"buffers": [700 + step]} for step in range(1, 13)}
    frozen = recorded(tmp_path / "a", ranks(1, 12, buffers))
    resumed = ranks(9, 12, buffers | {9: {"buffers": [608]}})
    resumed[0].events.insert(0, {"e": "load", "k": 0, "t": 0, "path": "step-8.pt"})
    found = judge(stopped_at(frozen, 11), recorded(tmp_path / "c", resumed), *runs(frozen))
    assert (found.word, found.first.rank, found.first.kind) == ("diverges", 1, "buffers")
    assert "those of rank 0" in found.cause


@pytest.mark.parametrize(("lost", "word"), [(False, "restored"), (True, "diverges")])
def test_last_save_of_a_run_that_does_not_repeat(tmp_path: Path, lost: bool, word: str) -> None:
    """As after SIGTERM: no run has made the step after it. The resume is compared with what was saved."""
    frozen = recorded(tmp_path / "frozen", [Writer().train(1, 12, {1: {"weights": [5, 5]}})])
    writer = Writer().train(1, 7)
    writer.save("step-7.pt", {"model.a": 108, "model.b": 208, "optimizer": 308, "rest": 309})
    run = recorded(tmp_path / "own", [writer])
    stopped = Stopped(run, Copy(tmp_path, math.inf, {"t": 100.0}), frozen, repeats=False)
    changes = {8: {"weights": [108, 9]}} if lost else {}
    resumed = recorded(tmp_path / "resumed", [resuming("step-7.pt", 7, changes)])
    found = judge(stopped, resumed, *runs(frozen, resumed))
    assert (found.word, found.loaded) == (word, 7), found.reason
    assert ("as saved: optimizer state, weights" in found.reason) is not lost


def test_run_that_does_not_start(tmp_path: Path) -> None:
    frozen = recorded(tmp_path / "a", [Writer().train(1, 12)])
    text = "Traceback\n[rank0]: KeyError: 'model'\nE1128 08:00 1 torch/distributed/elastic/x] failed\n"
    nothing = recorded(tmp_path / "c", [])
    refused, hung = (
        judge(stopped_at(frozen, 11), ended(nothing, status, text), *runs(frozen)) for status in (1, None)
    )
    assert (refused.word, hung.word) == ("refuses", "hangs")
    assert refused.reason == "does not start: exit status 1: KeyError: 'model'; complete: step 8"


def test_torn_temporary_file_is_named_where_the_script_refuses_it(tmp_path: Path) -> None:
    writer = Writer()
    for step in range(1, 13):
        writer.step(step)
        if step % 4 == 0:
            writer.save(f"new-{step}.tmp", {"model.a": 101 + step})
            writer.event("rename", path=f"new-{step}.tmp", to=f"step-{step}.pt")
    frozen, resumed = recorded(tmp_path / "a", [writer]), Writer()
    resumed.event("load", path="new-8.tmp")
    failed = ended(recorded(tmp_path / "c", [resumed]), 1, "EOFError: Ran out of input")
    found = judge(stopped_at(frozen, 0, "new-8.tmp", "new-8.tmp"), failed, *runs(frozen))
    assert (found.word, found.newest, "(new-8.tmp is cut)" in found.cause) == ("refuses", 4, True), found


def test_resume_that_would_change_a_file_of_the_user_is_not_judged(tmp_path: Path) -> None:
    frozen = recorded(tmp_path / "frozen", [Writer().train(1, 12)])
    writer = Writer()
    writer.event("harm", path="/home/me/last.pt", change="os.remove")
    resumed = recorded(tmp_path / "resumed", [writer])
    found = judge(stopped_at(frozen, 11), ended(resumed, -9), *runs(frozen))
    assert (found.word, "the resume was ended before it changes /home/me/last.pt" in found.reason) == (
        "vacuous",
        True,
    )


@pytest.mark.parametrize(
    ("order", "cost"),
    [
        ([1, 2, 3, 4], "; 4 of 12 samples of this epoch are seen twice, 4 never"),
        ([1, 2, 91, 92], "; 4 of 12 samples of this epoch are seen twice, 8 never"),
        ([11, 9, 12, 10], "; each sample of this epoch is seen once: only their order differs"),
        ([11, 9, 12, 10, 11, 9], "; each sample of this epoch is seen once, but 2 steps more are made"),
        ([91, 92, 93, 94], ""),
        ([1, 92, 93, 94], ""),
    ],
)
def test_lost_position_says_what_it_costs(tmp_path: Path, order: list[int], cost: str) -> None:
    """Epochs have six steps of two samples; the run loads step 8, the second of an epoch."""
    changes = {step: {"batch": [800 + of % 6]} for step, of in enumerate(order, 9)}
    whole, resumed = Writer().train(1, 12), resuming("step-8.pt", 8, changes, 8 + len(order))
    for writer, numbers in ((whole, range(1, 13)), (resumed, order)):
        steps = [event for event in writer.events if event["e"] == "step"]
        for step, number in zip(steps, numbers, strict=True):
            first = 2 * ((number - 1) % 6) if number < 90 else number
            step["parts"]["rows"] = {"0 0": first, "0 1": first + 1}
    reason = judged(tmp_path, whole, resumed).reason
    assert reason.startswith("step 9, rank 0: the batch is that of ")
    assert reason.partition(";")[2] == cost.partition(";")[2]


@pytest.mark.parametrize(
    ("repeats", "cost"), [(True, ""), (False, " 2 of 24 samples are seen twice, 8 never")], ids=str
)
def test_samples_that_are_drawn_have_no_epoch(tmp_path: Path, repeats: bool, cost: str) -> None:
    """Each step draws two of many samples, and perhaps one of step 3 again in step 5."""
    whole, resumed = Writer().train(1, 12), resuming("step-8.pt", 8, {9: {"batch": [802]}}, 9)
    for writer in (whole, resumed):
        for step in [event for event in writer.events if event["e"] == "step"]:
            place = step["k"] if writer is whole else 1
            step["parts"]["rows"] = {"0 0": 2 * place, "0 1": 5 if repeats and place == 4 else 2 * place + 1}
    reason = judged(tmp_path, whole, resumed).reason
    assert reason.startswith("step 9, rank 0: the batch is that of ")
    assert reason.partition(";")[2] == cost
