"""Checks of complete cells, on one rank in this process: what they compare, and that each could have failed.
`test_looked_at` has the places."""

import copy
import re
from typing import Any

import pytest
import torch

from dcpbench.analysis.causes import causes_of, causes_table
from dcpbench.cell import checkpoint, steps
from dcpbench.compare import controls, losses
from dcpbench.core.mismatch import Place
from dcpbench.formats import audit
from dcpbench.runs import build_run
from dcpbench.runs.build_run import build_twin, build_unrestored
from dcpbench.runs.own_run import OwnRun
from dcpbench.scenarios.dcp_api import partial_load
from dcpbench.twin import lockstep, twin
from dcpbench.workloads.models import Mlp
from dcpbench.workloads.workload import batches_of
from dcpbench.workloads.world import World
from support.alone import alone, config
from support.notes import noted

RESTORED = ("model_equal", "optim_equal", "extra_equal")


def test_every_piece_of_state_is_compared() -> None:
    _, report = alone(saves=1, optimizer="adamw_groups", model="buffered")
    compared = {check: set(report.checks[check].compared[Place("checkpoint", 2)]) for check in RESTORED}
    parameters = {f"net{number}.{kind}" for number in (1, 2, 3, 4) for kind in ("weight", "bias")}
    assert compared["model_equal"] == parameters | {"seen", "gain"}
    state = {f"state.{name}.{entry}" for name in parameters for entry in ("exp_avg", "exp_avg_sq", "step")}
    keys = torch.optim.AdamW([torch.zeros(1, requires_grad=True)]).param_groups[0].keys() | {"initial_lr"}
    assert compared["optim_equal"] == state | {f"param_groups.{n}.{key}" for n in (0, 1) for key in keys}
    for name in ("noise.generator", "tensor_object.data", "train_state.step", "scheduler.last_epoch"):
        assert name in compared["extra_equal"]
    never = set(report.checks["save_harmless"].compared[Place("in the run that saved")])
    assert never >= set.union(*compared.values())
    uninterrupted = Place("uninterrupted")
    assert set(report.checks["gradient_close"].compared[uninterrupted]) == parameters
    groups = {name for name in compared["optim_equal"] if name.startswith("param_groups.")}
    stepped = set(report.checks["step_equal"].compared[uninterrupted])
    assert stepped == parameters | {"seen", "gain"} | state | {
        name for name in groups if not name.endswith(".params")
    }
    assert report.losses["continued"] == pytest.approx(report.losses["twin"])
    assert set(report.checks["loss_resume_equal"].compared[Place("resumed", 2)]) == {
        "loss of step 3",
        "loss of step 4",
    }


LOSSES = {"loss_resume_equal"}
FAULTS: dict[str, tuple[set[str], str]] = {
    "weight_lowest_bit": ({"model_equal", *LOSSES}, "model_equal"),
    "keys_exchanged": ({"model_equal", "files_equal"}, "files_equal"),
    "exp_avg_zeroed": ({"optim_equal", *LOSSES}, "optim_equal"),
    "step_off_by_one": ({"optim_equal", *LOSSES}, "optim_equal"),
    "lr_not_restored": ({"optim_equal", *LOSSES}, "optim_equal"),
    "lr_next_float": ({"optim_equal"}, "optim_equal"),
    "restored_run_saved_wrong": ({"optim_equal"}, "optim_equal"),
    "moment_staged_as_zeros": ({"optim_equal", "files_equal", *LOSSES}, "files_equal"),
    "generator_seeded_again": ({"random_equal", "state_resume_equal"}, "random_equal"),
    "noise_one_draw_ahead": ({"extra_equal", *LOSSES}, "extra_equal"),
    "train_step_off_by_one": ({"extra_equal"}, "extra_equal"),
    "object_dtype": ({"extra_equal"}, "extra_equal"),
    "save_nudges_weight": ({"save_harmless"}, "save_harmless"),
    "save_leaves_thread": ({"side_effect_free"}, "side_effect_free"),
    "load_leaves_file_open": ({"side_effect_free"}, "side_effect_free"),
    "load_changes_other_run": ({"side_effect_free"}, "side_effect_free"),
    "key_added": ({"checkpoint_whole"}, "checkpoint_whole"),
    "file_stray": ({"checkpoint_whole"}, "checkpoint_whole"),
    "fsync_left_out": ({"checkpoint_whole"}, "checkpoint_whole"),
    "weight_staged_as_bf16": ({"checkpoint_whole", "model_equal"}, "checkpoint_whole"),
    "values_negated_twice": ({"files_equal"}, "files_equal"),
    "bytes_after_success": ({"files_unchanged"}, "files_unchanged"),
    "file_overwritten_later": ({"files_unchanged"}, "files_unchanged"),
    "missing_keys_ignored": ({"contract_held"}, ""),
    "second_step_wrong": ({"state_resume_equal"}, "state_resume_equal"),
    "scheduler_stuck": ({"state_resume_equal", *LOSSES}, "loss_resume_equal"),
    "training_mode_lost": ({"flags_equal"}, "flags_equal"),
    "hook_lost": ({"flags_equal"}, "flags_equal"),
    "requires_grad_lost": ({"flags_equal", "optim_equal"}, "flags_equal"),
    "layer_gradient_scaled": ({"gradient_close"}, "gradient_close"),
    "eps_tenfold": ({"step_equal"}, "step_equal"),
}
"""Checks that must report a fault, while those of equality that are not named must not, and the check whose
failure explains the row. Faults of several ranks are in plugins/faults/test_mistrained.py."""


SENTENCES = {
    "weight_lowest_bit": r": index \[.*\]: saved -?[\de.-]+ \(0x\w+\), restored ",
    "save_nudges_weight": r" \(0x\w+\) without saves, -?[\de.-]+ \(0x\w+\) with them; ",
    "load_changes_other_run": r" after the load of step \d: .* before the load, .* after it; ",
    "second_step_wrong": r" \(0x\w+\) in the uninterrupted run, .* in the resumed run; ",
    "values_negated_twice": r": saved -?[\de.-]+ \(0x\w+\), -?[\de.-]+ \(0x\w+\) in the files; ",
}
"""What the sentence of the fault's first check says that it compared."""


@pytest.mark.cell
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_fails_the_checks_that_it_breaks(fault: str) -> None:
    steps = {"train_steps": 1, "resume_steps": 3 if fault == "scheduler_stuck" else 2}
    verdict, _ = alone(fault, saves=2, model="buffered", optimizer="adamw_groups", **steps)
    assert verdict.fault_seen is True, verdict.reason
    failed, (checks, cause) = {one.check for one in verdict.failed}, FAULTS[fault]
    assert checks <= failed | LOSSES
    telling = {*RESTORED, "random_equal", "save_harmless", "checkpoint_whole", "contract_held"}
    assert failed & telling <= checks, "the snapshot is too late"
    (first, *_) = (one for one in verdict.failed if one.check in checks)
    assert re.search(SENTENCES.get(fault, ""), first.sentence)
    told = causes_of({"status": verdict.status, "reason": verdict.reason, **verdict.checks})
    assert told[:1] == ([sentence_of(cause)] if cause else [])


def sentence_of(check: str) -> str:
    """Return the likely cause of a failed check, for any checkpointer."""
    *_, sentence = causes_table()[check]["likely"].values()
    return str(sentence)


def test_hooks_are_compared_after_the_first_resumed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook that the first forward pass installs is no mismatch; a hook is that a load has removed."""
    lazy = {"workload": {"target": "support.ordinary_workloads.hook_of_the_first_forward"}}
    verdict, report = alone(saves=1, **lazy)
    assert verdict.status == "pass", verdict.reason
    compared = report.checks["flags_equal"].compared
    assert "hooks.model" not in compared[Place("checkpoint", 2)]
    assert "hooks.model" in compared[Place("resumed", 2, ", resumed")]
    honest = steps.load

    def load(cell: Any, target: OwnRun, *others: Any, **options: Any) -> None:
        honest(cell, target, *others, **options)
        target.model.get_submodule("net.0")._forward_hooks.clear()

    monkeypatch.setattr(steps, "load", load)
    kept = {"workload": {"target": "support.ordinary_workloads.hook_of_the_first_forward"}}
    kept["workload"]["options"] = {"in_first_forward": False}  # type: ignore[assignment]
    verdict, _ = alone(saves=1, **kept)
    assert "flags_equal" in {one.check for one in verdict.failed}, verdict.reason
    assert "hooks.model" in str(verdict.reason), "the check names it"


def wrong_gradient(run: OwnRun) -> None:
    run.model.get_parameter("net1.weight").register_hook(lambda gradient: gradient * 1.001)


def wrong_step(run: OwnRun) -> None:
    parameter = run.model.get_parameter("net1.weight")

    def nudge(*_: Any) -> None:
        parameter.data.view(torch.int32)[0, 0] += 1

    run.optimizer.register_step_post_hook(nudge)


def wrong_loss(run: OwnRun) -> None:
    honest = run.loss_of
    run.loss_of = lambda samples: honest(samples) + 1e-4  # type: ignore[method-assign]


@pytest.mark.cell
@pytest.mark.parametrize(
    ("wrong", "check", "name"),
    [
        (wrong_gradient, "gradient_close", "net1.weight"),
        (wrong_step, "step_equal", "net1.weight"),
        (wrong_loss, "batch_loss_close", "loss of step 1"),
    ],
)
def test_wrong_training_does_not_blame_the_resume(
    wrong: Any, check: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under a wrong parallelism, the run that is trained, saved, restored and resumed has the same
    error."""
    honest = build_run.build

    def build(*given: Any, **options: Any) -> OwnRun:
        run = honest(*given, **options)
        wrong(run)
        return run

    monkeypatch.setattr(build_run, "build", build)
    verdict, report = alone(saves=1)
    assert (verdict.status, verdict.resume, verdict.training) == ("fail", True, False), verdict.reason
    assert [one.check for one in verdict.failed] == [check]
    first = next(iter(report.checks[check].distinct.values()))
    assert (first.name, first.where) == (name, Place("uninterrupted"))
    assert str(verdict.reason).startswith(f"the resume is correct; training: {check}: rank 0: {name} ")


@pytest.mark.parametrize("model", ["short", "bf16"])
def test_measured_step_uses_the_ranks_gradients(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If part of an optimizer does not repeat exactly, the rest is compared bit for bit; the tolerance is not
    zero in bfloat16 either."""
    names, measured = frozenset(["net1.weight", "net2.weight"]), list[float]()
    honest = twin.measured_tolerances

    def tolerances(state: Any, others: Any, times: float = 1.0) -> Any:
        found = honest(state, others, times)
        measured.extend(
            float(found[name].max()) for name in found if name == ("state", "net1.weight", "exp_avg")
        )
        return found

    monkeypatch.setattr(lockstep, "tolerance_of_steps", lambda *_, **__: twin.StepTolerance(measured=names))
    monkeypatch.setattr(twin, "measured_tolerances", tolerances)
    verdict, report = alone(saves=1, model=model)
    assert verdict.status == "pass", verdict.reason
    assert noted(report, "column")["step_bound"] == "measured"
    assert measured
    assert all(measured)


@pytest.mark.parametrize("other_kernels", [False, True])
def test_plain_step_counter_does_not_break_training(
    other_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint does not restore the counter; the twin's additional passes do not count."""
    honest = Mlp.forward

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.count = getattr(self, "count", 0) + 1
        return honest(self, x) * self.count

    monkeypatch.setattr(Mlp, "forward", forward)
    monkeypatch.setattr(lockstep, "runs_other_kernels", lambda *_: other_kernels)
    verdict, _ = alone(saves=1)
    assert (verdict.resume, verdict.training) == (False, True), verdict.reason
    assert {one.check for one in verdict.failed} == {"loss_resume_equal", "state_resume_equal"}


def nothing(*_: Any, **__: Any) -> list[Any]:
    return []


def no_gradient(*_: Any) -> tuple[None, float]:
    return None, 0.0


BLIND = [
    ("save_load", "model_equal", checkpoint, "compare"),
    ("save_load", "optim_equal", checkpoint, "compare"),
    ("save_load", "extra_equal", checkpoint, "compare"),
    ("save_load", "save_harmless", controls, "compare"),
    ("save_load", "state_resume_equal", controls, "compare"),
    ("save_load", "gradient_close", lockstep, "compare_gradient"),
    ("save_load", "step_equal", lockstep, "compare_step"),
    ("save_load", "batch_loss_close", lockstep, "compare_losses"),
    ("save_load", "loss_resume_equal", losses, "compare_losses"),
    ("save_load", "checkpoint_whole", audit, "audit"),
    ("partial_load", "optim_equal", partial_load, "compare_across"),
    ("partial_load", "contract_held", controls, "compare"),
    ("fine_tune", "model_equal", checkpoint, "compare_across"),
]


@pytest.mark.cell
@pytest.mark.parametrize(
    ("scenario", "check", "module", "comparison"),
    BLIND,
)
def test_blind_comparison_is_vacuous(
    scenario: str, check: str, module: Any, comparison: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, comparison, no_gradient if comparison == "compare_gradient" else nothing)
    verdict, _ = alone(scenario=scenario, saves=1)
    assert verdict.status == "vacuous"
    seen = verdict.details["checks"][check]
    assert seen["control_missed"]
    assert f"{check}: its control did not report " in str(verdict.reason)


def test_load_that_restores_nothing_fails_every_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loads: list[int] = []

    def load(*_: Any, **__: Any) -> None:
        loads.append(1)

    monkeypatch.setattr(steps, "load", load)
    verdict, report = alone(saves=1)
    assert loads
    assert verdict.status == "fail"
    for check in RESTORED:
        seen = report.checks[check]
        names = {finding.name for finding in seen.distinct.values()}
        assert names >= set(seen.compared[Place("checkpoint", 2)]) - {"param_groups.0.params"}
    assert {one.check for one in verdict.failed} >= {*RESTORED, "loss_resume_equal", "state_resume_equal"}


def test_unrestored_run_differs_in_restored_state_only() -> None:
    """With the weights, moments and scheduler of the reference run it has the next loss of that."""
    given, world, after = config(), World(0, 1, torch.device("cpu"), None, None), 3
    data = batches_of(given, world.device)
    run = build_twin(given, world, given.seed)
    run.train(data, after)

    def unrestored() -> OwnRun:
        unrestored = build_unrestored(given, world, given.seed + 1000)
        unrestored.compute_losses(data, after)
        return unrestored

    def restore(other: OwnRun) -> None:
        other.model.load_state_dict(run.model.state_dict())
        other.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))  # it does not copy
        other.scheduler.load_state_dict(run.scheduler.state_dict())

    other, same = unrestored(), unrestored()
    restore(same)
    untouched, restored = [], []
    for taken, each in (untouched, other), (restored, same):
        each.compute_losses(data, after + 2)
        taken += each.train_state.losses[after:]
    uninterrupted = run.train(data, after + 2)
    assert restored[0] == uninterrupted[0]
    assert restored[1] != uninterrupted[1], "it takes no step"
    assert all(one != other for one, other in zip(untouched, uninterrupted, strict=True))
