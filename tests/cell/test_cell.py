"""The cell that a scenario gets, and its checkpoints: phases, measurements, comparisons."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

from dcpbench.cell.cell import Uploads
from dcpbench.cell.checkpoint import Checkpoint
from dcpbench.checkpointers.base import PendingSave
from dcpbench.core.metrics import PHASE_S, MetricSpec
from dcpbench.core.mismatch import Mismatch, Place, Problem
from dcpbench.core.rank_report import Compared
from dcpbench.core.state import StatePart, text_of
from dcpbench.runs.build_run import build
from dcpbench.state import snapshot
from dcpbench.state.layout import whole
from dcpbench.state.snapshot import TensorLeaf, snapshot_nested
from dcpbench.twin import lockstep
from dcpbench.workloads.world import World
from support.alone import ONCE, TWICE, bare_cell, config, run_alone, world


def upload() -> tuple[Future[None], PendingSave]:
    future: Future[None] = Future()
    return future, PendingSave(0.0, 0.0, upload=future)


def test_uploads_report_their_starts_until_they_end() -> None:
    told: list[tuple[float, ...]] = []
    uploads = Uploads(told.append)
    (well, one), (badly, other) = upload(), upload()
    uploads.follow(one)
    uploads.follow(other)
    (first,), (again, second) = told
    assert first == again <= second
    well.set_result(None)
    assert told[2:] == [(second,)]
    badly.set_exception(RuntimeError())
    assert told[3:] == [()]


@pytest.mark.parametrize("before", [True, False])
def test_cancelled_upload_ends_at_once(before: bool) -> None:
    """Also one that was cancelled before the save returned it."""
    future: Future[None] = Future()
    if before:
        future.cancel()
    pending = PendingSave(0.0, 0.0, upload=future)
    ended: list[bool] = []
    pending.when_ended(lambda: ended.append(True))
    files = pending.then(list)
    future.cancel()
    assert ended == [True]
    for wait in (pending._completed.result, files.result):
        with pytest.raises(RuntimeError, match="the upload was cancelled"):
            wait(timeout=0)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
def test_upload_that_ends_its_thread_is_an_error(error: BaseException) -> None:
    future, pending = upload()
    future.set_exception(error)
    with pytest.raises(RuntimeError if isinstance(error, asyncio.CancelledError) else type(error)):
        pending.wait()


@dataclass
class Waiting(World):
    """A world that records when its device is waited for."""

    told: list[str] = field(default_factory=list)

    def synchronize(self) -> None:
        self.told.append("synchronized")


def test_phase_is_announced_timed_and_probed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = Waiting(3, 4, torch.device("cpu"), None, None)
    cell = bare_cell(tmp_path, seen_by=here)
    object.__setattr__(cell, "announce", lambda name: here.told.append(f"announced {name}"))
    probed = {
        name: MetricSpec(name, "", phase=phase, probe=probe)
        for name, phase, probe in (
            ("first", "load", lambda _: 1.0),
            ("part", "load/part", lambda _: 2.0),
            ("nothing", "load", lambda _: None),
            ("elsewhere", "save", lambda _: 4.0),
            ("no_probe", "load", None),
            ("last", "load", lambda given: 5.0 if given is cell else None),
        )
    }
    monkeypatch.setattr("dcpbench.cell.cell.METRICS", probed)

    with cell.phase("load", "part"):
        here.told.append("worked")
    with cell.phase("load"):
        pass
    announced, waited = "announced load", "synchronized"
    assert here.told == [announced, waited, "worked", waited, announced, waited, waited]
    seen = [(one.metric, one.phase, one.rank, one.save) for one in cell.report.measurements]
    assert seen == [
        *((name, "load/part", 3, None) for name in (PHASE_S, "first", "part", "last")),
        *((name, "load", 3, None) for name in (PHASE_S, "first", "last")),
    ]
    assert all(one.value > 0 for one in cell.report.measurements)
    assert cell.times_measured("first") == 2
    assert cell.times_measured(PHASE_S) == 2
    assert cell.times_measured("nothing") == 0


def test_check_report_has_names_and_places(tmp_path: Path) -> None:
    cell = bare_cell(tmp_path)
    wrong = [Mismatch("weight", Problem.differs)]
    cell.record("model_equal", Compared.of(wrong, wrong, {"weight": True, "bias": False}), "here")
    cell.record("model_equal", Compared.of([], wrong, ["more"]), "here")
    report = cell.report.checks["model_equal"]
    assert report.control == {Place("here"): {"weight": True, "more": False}}
    assert report.compared == {Place("here"): {"weight": True, "bias": False, "more": True}}
    assert [(one.name, one.where) for one in report.distinct.values()] == [("weight", Place("here"))]


@pytest.mark.parametrize("detected", [(True, True), (True, False), (False, True), (False, False)])
def test_missed_control_stays_missed_at_its_place(detected: tuple[bool, bool], tmp_path: Path) -> None:
    cell = bare_cell(tmp_path)
    for did in detected:
        names = {"weight": True, "bias": True}
        cell.record("model_equal", Compared([], names, {"weight": did, "bias": True}), "here")
    assert cell.report.checks["model_equal"].control == {
        Place("here"): {"weight": all(detected), "bias": True}
    }


MEASURED: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "sync": ({}, "save", ["save_stall_s", "save_s", "checkpoint_bytes"]),
    "async": ({"save": "async"}, "upload", ["save_stall_s", "save_s", "checkpoint_bytes"]),
    "raw": (
        {"raw": True},
        "save",
        ["save_stall_s", "save_s", "checkpoint_bytes", "raw_write_s", "raw_read_s"],
    ),
    "overlapping": (
        {"save": "async", "overlap_saves": True, "raw": True},
        "upload",
        ["save_stall_s", "checkpoint_bytes"],
    ),
}


@pytest.mark.cell
@pytest.mark.parametrize("name", MEASURED)
def test_each_save_and_load_is_measured(name: str) -> None:
    values, phase, metrics = MEASURED[name]
    (report,) = run_alone(**TWICE, scenario="stateful_or_not", **values).reports
    phases = {"save_stall_s": "save", "raw_write_s": "raw", "raw_read_s": "raw"}
    expected = {(metric, phases.get(metric, phase), save) for metric in metrics for save in (0, 1)}
    by_rank = ("peak_host_bytes", "gradient_bound_used", "twin_bytes")
    expected |= {("load_s", "load", 0), *((metric, None, None) for metric in by_rank)}
    seen = [(one.metric, one.phase, one.save) for one in report.measurements if one.metric != PHASE_S]
    assert set(seen) == expected
    assert len(seen) == len(expected)
    used = {one.value for one in report.measurements if one.metric == "gradient_bound_used"}
    assert used == {0.0}, "on one rank nothing is rounded otherwise"
    assert all(one.value > 0 for one in report.measurements if one.metric != "gradient_bound_used")


def large(*names: str) -> Callable[[str], torch.Tensor]:
    return lambda name: torch.zeros(9 if name in names else 8, dtype=torch.uint8)


@pytest.mark.parametrize("names", [(), ("first",), ("middle",), ("last",)])
def test_small_model_has_no_large_tensor(names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "LARGE_BYTES", 8)
    tensor = large(*names)
    leaves = snapshot_nested({name: tensor(name) for name in ("first", "middle", "last")})
    assert Checkpoint(1, "", {StatePart.model: leaves}).is_small is (not names)


def test_large_model_is_not_saved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "LARGE_BYTES", 100)
    ran = run_alone(**TWICE)
    assert ran.verdict.status == "pass", ran.verdict.reason
    assert not [where for where in ran.reports[0].checks["model_equal"].compared if "again" in str(where)]


def test_shared_memory_is_found_across_the_state(tmp_path: Path) -> None:
    """Within the model, the optimizer, the objects and the generators, and between them."""
    run = build(config(model="short"), world(), 0)
    run.train_state.record(1.0)
    first, *_, last = run.model.parameters()
    for parameter in (first, last):
        run.optimizer.state[parameter] = {"exp_avg": parameter.data}
    run.tensor_object.tensors["fp8"] = run.tensor_object.tensors["flags"]
    run.tensor_object.data = last.data
    run.random.states["cpu"] = run.tensor_object.tensors["integers"]
    shared = run.live_state()[StatePart.flags]["shared_memory",]
    assert [set(names.split(", ")) for names in shared.split("; ")] == [
        {"net1.weight", "state.net1.weight.exp_avg"},
        {"net2.bias", "state.net2.bias.exp_avg", "tensor_object.data"},
        {"tensor_object.flags", "tensor_object.fp8"},
        {"tensor_object.integers", "random.rank0.cpu"},
    ]


@pytest.mark.parametrize("frozen", [["net1.weight"], ["net2.bias"], ["net1.weight", "net1.bias"]])
def test_frozen_parameters_are_not_promised(frozen: list[str]) -> None:
    run = build(config(model="short"), world(), 0)
    parameters: dict[str, nn.Parameter] = dict(run.model.named_parameters())
    for name in frozen:
        parameters[name].requires_grad_(False)
    run.options = StateDictOptions(ignore_frozen_params=True)
    leaves = run.live_state()
    beside = {("beside",): TensorLeaf(torch.zeros(1), leaves[StatePart.model]["net1.bias",].extent, None)}
    promised = Checkpoint(1, "", leaves, run.as_saved(leaves)).expected_entries(beside)
    expected = {f"model.{name}" for name in parameters.keys() - set(frozen)}
    assert {key for key in promised if key.startswith("model.")} == expected
    others = {key for key in promised if not key.startswith("model.")}
    assert {"beside", "noise.generator", "train_state.losses", "optimizer.param_groups.0.lr"} <= others
    assert not {name for name in leaves[StatePart.flags] if text_of(name) in promised}


def test_other_ranks_audit_and_remove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep.Lockstep, "_counts", True)  # there is no rank whose samples count
    ran = run_alone(**TWICE, seen_by=world(1, 2))
    (report,) = ran.reports
    audited = report.checks["checkpoint_whole"]
    assert audited.compared == {Place("checkpoint", step): {} for step in (1, 2)}
    assert not any(audited.control.values())
    assert ran.left == ["again-step-0002", "step-0001", "step-0002"]


def test_parts_are_compared_by_place_by_default() -> None:
    tensor = torch.ones(2)
    saved, elsewhere = (
        {"w": TensorLeaf(tensor, whole(tensor), placements)} for placements in ("[Replicate()]", None)
    )
    checkpoint = Checkpoint(1, "", {StatePart.model: saved})
    assert str(checkpoint) == "in the checkpoint of step 1"
    (found,) = checkpoint.compare(saved, elsewhere, None)
    assert found.problem is Problem.placements
    by_content = replace(checkpoint, by_content=True, how=", saved again")
    assert by_content.compare(saved, elsewhere, None) == []
    assert str(by_content) == "in the checkpoint of step 1, saved again"
    read: list[Any] = []
    changed = {"w": replace(elsewhere["w"], local=-tensor)}
    for closely in (False, True):  # a control needs no place, which another rank may have
        (found,) = by_content.compare(saved, changed, None, read.append, closely)
        assert found.problem is Problem.digests_differ
        assert read == ["w"] * closely


def test_names_are_proven_by_their_controls(tmp_path: Path) -> None:
    cell = bare_cell(tmp_path)
    assert cell.proven("side_effect_free") == set()
    both = {"a": True, "b": True}
    cell.record("side_effect_free", Compared((), both, {"a": True, "b": False}), "after the save")
    cell.record("model_equal", Compared((), both, both), "after the save")
    assert cell.proven("side_effect_free") == {"a"}
    cell.record("side_effect_free", Compared((), {"c": True}, {"c": True}), "after the load")
    assert cell.proven("side_effect_free") == {"a", "c"}


def test_random_state_is_compared_if_restorable() -> None:
    run = build(config(**TWICE), world(), 0)
    assert StatePart.random in run.live_state()
    run.exclusions = replace(run.exclusions, generators=frozenset())
    assert StatePart.random not in run.live_state()


def test_metric_that_is_never_measured_is_refused() -> None:
    with pytest.raises(ValueError, match="metric mine: is measured at the end of a phase"):
        MetricSpec("mine", "never measured", probe=lambda cell: 1.0)


def test_fault_in_a_digested_tensor_is_located(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint was asked what the element had been: its digests are those that were kept."""
    monkeypatch.setattr(snapshot, "LARGE_BYTES", 100)
    (report,) = run_alone("weight_lowest_bit", **ONCE).reports
    (worst,) = report.checks["model_equal"].distinct.values()
    assert (worst.problem, worst.facts["differing"]) == (Problem.differs, 1)
    assert int(worst.facts["expected_bits"], 16) ^ int(worst.facts["actual_bits"], 16) == 1
