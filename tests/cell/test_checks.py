"""The checks: their references, their controls, and the calls that they make."""

import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dcpbench.cell import checkpoint_files, checks, known_defects, steps
from dcpbench.cell.cell import Cell, KnownFiles
from dcpbench.cell.checkpoint import Checkpoint
from dcpbench.checkpointers.dcp import DcpCheckpointer
from dcpbench.checkpointers.torch_save import TorchSaveCheckpointer
from dcpbench.compare.losses import compare_resumed
from dcpbench.config.groups import WorkloadConfig
from dcpbench.core.checks import CheckSpec
from dcpbench.core.defects import Defect
from dcpbench.core.mismatch import Place, Problem
from dcpbench.core.state import StatePart
from dcpbench.runs import build_run
from dcpbench.runs.build_run import build, build_twin
from dcpbench.runs.own_run import OwnRun
from dcpbench.runs.run import Exclusions
from dcpbench.twin.lockstep import TwinGradients
from support.alone import ONCE, TWICE, alone, bare_cell, config, group_of_one, run_alone, world
from support.notes import noted, why_not


def test_gradient_mismatch_names_its_known_defect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another mismatch of the gradients names none, also one of a parameter that is frozen in the twin."""

    def expected(cell: Cell, moment: str, reference: TwinGradients) -> Iterator[Any]:
        halves = {name: replace(twin, mean=twin.mean / 2) for name, twin in reference.twins.items()}
        yield {reference.check: {name: halves[name] for name in ("net2.weight", "net2.bias")}}

    defect = Defect(("twin",), lambda config: True, expected)
    monkeypatch.setattr(known_defects, "_defects", lambda: {"mine": defect})
    build_twin = build_run.build_twin

    def build_frozen(*given: Any) -> OwnRun:
        run = build_twin(*given)
        for name in ("net1.weight", "net1.bias"):
            run.model.get_parameter(name).requires_grad_(False)
        return run

    monkeypatch.setattr(build_run, "build_twin", build_frozen)
    honest = build_run.build

    def build_wrong(*given: Any, **options: Any) -> OwnRun:
        run = honest(*given, **options)
        for name, factor in (("net1.bias", 0.5), ("net2.weight", 0.5), ("net2.bias", 0.25)):
            run.model.get_parameter(name).register_hook(lambda gradient, factor=factor: gradient * factor)
        return run

    monkeypatch.setattr(build_run, "build", build_wrong)
    verdict, report = alone(**ONCE)
    found = {(one.name, one.problem, one.by) for one in report.checks["gradient_close"].distinct.values()}
    assert found == {
        ("net1.weight", Problem.only_parallel, None),
        ("net1.bias", Problem.far, None),
        ("net2.weight", Problem.far, "mine"),
        ("net2.bias", Problem.far, None),
    }
    assert [one.check for one in verdict.failed] == ["gradient_close"], "the twin steps on these gradients"


def test_plug_in_checks_follow_each_full_load(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str, bool]] = []

    def probe(name: str, cell: Cell, target: OwnRun, loaded: Checkpoint) -> None:
        equal = not loaded.compare(loaded.state[StatePart.model], target.live_state()[StatePart.model], None)
        asked.append((name, f"{Path(loaded.checkpoint_id).name} {cell.times_measured('load_s')}", equal))

    mine = {name: CheckSpec(name, "", probe=partial(probe, name)) for name in ("first", "last")}
    without = CheckSpec("without", "")
    monkeypatch.setattr(checks, "CHECKS", {"first": mine["first"], "no": without, "last": mine["last"]})
    alone(**ONCE)
    places = ["step-0001 1", "step-0001 1", "again-step-0002 2"]  # loaded, set once more, saved again
    assert asked == [(name, place, True) for place in places for name in mine]
    asked.clear()
    alone(**ONCE, scenario="fine_tune")
    assert asked == [(name, "step-0001 3", True) for name in mine], "of the frozen part alone it is not"


@pytest.mark.parametrize("loss", [0.5, 0.0, math.inf, math.nan])
@pytest.mark.parametrize("alive", [True, False])
def test_loss_is_usable_if_the_model_is_alive(loss: float, alive: bool) -> None:
    seen = [loss, 1.0]
    compared = compare_resumed(seen, seen, 1, None, [alive, True], [2.0, 3.0])
    means = loss == 0.5 and alive
    assert compared.detected == {
        "loss of step 1": means,
        "loss of step 2": True,
    }


@pytest.mark.parametrize(
    ("unrestored", "detected"),
    [
        ([5.0, 2.0, 3.0], [True, True]),
        ([5.0, 1.0, 3.0], [True, True]),  # step 2 is equal by coincidence: the loss of step 1 is another
        ([5.0, 1.0, 1.0], [True, False]),
        ([1.0, 1.0, 1.0], [False, False]),
        ([1.0, 2.0], [True, True]),
        ([1.0], [False, False]),
    ],
)
def test_losses_of_an_unrestored_run_must_be_reported(unrestored: list[float], detected: list[bool]) -> None:
    compared = compare_resumed([1.0, 1.0], [1.0, 1.0], 2, None, [True] * 2, unrestored)
    assert [*compared.detected.values()] == detected


@pytest.mark.cell
@pytest.mark.parametrize("options", [{}, {"lr": 0.0}])
def test_each_loss_has_a_control(options: dict[str, float]) -> None:
    workload = {"target": "support.ordinary_workloads.zero_head", "options": options}
    _, report = alone(workload=workload, save_at=0, train_steps=1, saves=1, resume_steps=1)
    for check in ("batch_loss_close", "loss_resume_equal"):
        controls = report.checks[check].control.values()
        assert all(detected for of_place in controls for detected in of_place.values()), check


@pytest.mark.parametrize("rank", [0, 1])
def test_files_are_verified_by_rank_0_only(rank: int, tmp_path: Path) -> None:
    cell = bare_cell(tmp_path, seen_by=world(rank, 2))
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
        checkpointer = DcpCheckpointer(tmp_path, cell.config, cell.world)
        place = str(tmp_path / name)
        cell.files[place] = KnownFiles(Place(name), checkpointer.digests(place), checkpointer)
        (tmp_path / name / "file").write_text("something else")
    checkpoint_files.verify_files(cell)
    report = cell.report.checks["files_unchanged"]
    names = {"file", "a file that went", "a file that came"}
    assert {where: set(seen) for where, seen in report.compared.items()} == {
        where: set() if rank else names for where in (Place("one"), Place("other"))
    }
    found = [(one.name, one.where) for one in report.distinct.values()]
    assert found == ([] if rank else [("file", Place("one")), ("file", Place("other"))])


def test_value_in_no_state_dict_is_told_after_a_resume() -> None:
    workload = WorkloadConfig("support.forgotten.build", options={"where": "attribute"})
    (report,) = run_alone(workload=workload, train_steps=1, resume_steps=1, saves=1).reports
    assert noted(report, "in_no_state_dict") == {"model.0.calls": "2, resumed 1"}


@pytest.mark.parametrize("comes", [False, True])
def test_checkpoint_without_files_is_not_loaded(
    comes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its save reported success; if its files come soon, they differ from those of then."""
    monkeypatch.setattr(DcpCheckpointer, "unreadable", "nothing but its own load reads it")
    cell, folder = bare_cell(tmp_path), tmp_path / "step-1"
    folder.mkdir()
    if comes:
        (folder / "file").write_text("late")
    checkpoint = Checkpoint(1, str(folder), {})
    checkpoint_files.watch_files(cell, checkpoint, {})
    assert checkpoint_files.not_removed(cell, [checkpoint]) == [checkpoint] * comes
    checkpoint_files.verify_files(cell)
    names = [one.name for one in cell.report.checks["files_unchanged"].distinct.values()]
    assert names == ["file" if comes else "step-1"]


@pytest.mark.parametrize("name", ["model", "scheduler", "train_state"])
def test_loading_its_own_state_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first, a middle or the last object is changed by its second load."""
    honest = OwnRun.state
    times: dict[int, int] = {}

    def state(run: OwnRun) -> dict[str, Any]:
        given = honest(run)
        load, held = given[name].load_state_dict, given[name]

        def load_state_dict(loaded: dict[str, Any]) -> None:
            load(loaded)
            times[id(run)] = times.get(id(run), 0) + 1
            if times[id(run)] == 2:
                damage(run)

        class Fragile:
            state_dict = staticmethod(held.state_dict)

        Fragile.load_state_dict = staticmethod(load_state_dict)  # type: ignore[attr-defined]
        return {**given, name: Fragile()}

    def damage(run: OwnRun) -> None:
        run.train_state.losses.append(1.0)
        run.scheduler.last_epoch += 1
        next(run.model.parameters()).data.add_(1)

    monkeypatch.setattr(OwnRun, "state", state)
    _, report = alone(**ONCE)
    for check in ("model_equal", "extra_equal"):
        found = report.checks[check].distinct.values()
        assert Place("checkpoint", 1) in {one.where for one in found}, "at once"


@pytest.mark.parametrize("checkpointer", ["dcp", "torch_save"])
def test_control_of_an_absent_key_loads_one_that_is_there(
    checkpointer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If every load of a part is refused as absent, nothing shows that the absent key was the reason."""
    ran = run_alone(**ONCE, checkpointer=checkpointer)
    assert ran.verdict.status == "pass", ran.verdict.reason
    kind = DcpCheckpointer if checkpointer == "dcp" else TorchSaveCheckpointer
    honest, parts = kind.load, list[dict[str, Any]]()

    def load(self: Any, state: dict[str, Any], checkpoint_id: str) -> None:
        if "model" not in state:
            parts.append(state)
            raise RuntimeError("absent")
        honest(self, state, checkpoint_id)

    monkeypatch.setattr(kind, "load", load)
    ran = run_alone(**ONCE, checkpointer=checkpointer)
    assert ran.verdict.status == "vacuous"
    assert "refusal" in str(ran.verdict.reason)
    assert ["absent" in state for state in parts] == [True, False] * (len(parts) // 2)


def test_load_into_the_saved_run_may_change_it(tmp_path: Path) -> None:
    cell = bare_cell(tmp_path, config(**ONCE))
    reference = steps.build_reference(cell)
    steps.train_reference(cell, reference, 1)
    saved = steps.finish(cell, steps.save(cell, reference.live_run))
    steps.train_reference(cell, reference, 2)
    steps.load(cell, reference.live_run, saved)
    assert cell.report.checks["side_effect_free"].count == 0
    live = reference.live_run.live_state()[StatePart.model]
    found = saved.compare(saved.state[StatePart.model], live, None)
    assert found == []
    steps.load(cell, build(cell.config, cell.world, 1), saved)
    compared = cell.report.checks["side_effect_free"].compared[Place("loaded", 1)]
    assert "net1.weight" in compared, "a load into another run may not"


@pytest.mark.parametrize(
    ("draws", "sizes", "compiled", "why"),
    [
        (True, {"dp_shard": 2}, False, "ranks draw others than one process"),
        (True, {"dp_shard": 2}, True, "ranks draw others than one process"),
        (True, {}, True, "compiled code draws others than eager code"),
        (True, {}, False, None),
        (False, {"dp_shard": 2}, True, None),
    ],
)
def test_drawing_run_is_bound_to_its_layout(
    draws: bool, sizes: dict[str, int], compiled: bool, why: str | None, tmp_path: Path
) -> None:
    cell = bare_cell(tmp_path, config(**{**ONCE, "compile": compiled}))
    run = build_twin(cell.config, cell.world, 0)
    run.random.drawn, run.sizes = {"cpu"} if draws else set(), sizes
    assert checks._layout_matters(cell, run, Exclusions(), Place("")) is (why is not None)
    text = f"the model draws random numbers in training, and {why}"
    assert why_not(cell.report) == ({"loss_resume_close": text} if why else {})


@pytest.mark.parametrize(("parallel", "sees"), [("none", False), ("fsdp2", True)])
def test_batch_norm_depends_on_the_batch_share(parallel: str, sees: bool) -> None:
    given = config(**{**ONCE, "model": "batch_norm"}, parallel=parallel)
    size = 2 if sees else 1
    dist.init_process_group("fake", rank=0, world_size=size)  # its collectives do nothing
    try:
        run = build_run.build(given, world(0, size, dist.group.WORLD), 0)
    finally:
        dist.destroy_process_group()
    assert (run.exclusions.why_layout_bound is not None) is sees
    assert run.exclusions.why_no_twin is None, "a twin sees the same share"


@pytest.mark.parametrize("free", [0, 2**40])
def test_twin_without_room_is_not_built(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An estimate is compared with the free memory; small models are not worth a question to all ranks."""
    verdict, report = alone(**TWICE)
    estimated = {one.value for one in report.measurements if one.metric == "twin_bytes"}
    monkeypatch.setattr(build_run.psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
    assert why_not(alone(**TWICE)[1]) == why_not(report)
    monkeypatch.setattr(build_run, "LARGE_MODEL_BYTES", 0)
    verdict, report = alone(**TWICE)
    why = "an unsharded copy of the model on each rank takes about 0.0 GiB, and 0.0 GiB are free"
    of_twin = set[str]() if free else {"gradient_close", "step_equal", "batch_loss_close"}
    assert {check for check, reason in why_not(report).items() if reason == why} == of_twin
    assert (verdict.status, bool({"twin"} & report.losses.keys())) == ("pass", bool(free))
    sizes = [value.numel() for value in build(config(**TWICE), world(), 0).model.parameters()]
    assert estimated == {sum(sizes) * (4 * 4 + 16)}


def test_cost_of_a_cell_in_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks exchange at once what a moment has shown, and small tensors are compared together: each
    collective waits for the slowest rank, and each comparison for the device."""
    counts = Counter[str]()

    def count(module: Any, name: str, key: str) -> None:
        honest = getattr(module, name)

        def counting(*args: Any, **options: Any) -> Any:
            counts[key] += str(sys._getframe(1).f_globals["__name__"]).startswith("dcpbench.")
            return honest(*args, **options)

        monkeypatch.setattr(module, name, counting)

    for name in ("all_reduce", "all_gather", "all_gather_object", "barrier"):
        count(dist, name, "collectives")
    count(torch, "equal", "comparisons")
    with group_of_one() as group:
        ran = run_alone(model="short", saves=3, seen_by=world(0, 1, group))
    assert ran.verdict.status == "pass"
    assert counts["collectives"] <= 44
    assert counts["comparisons"] <= 125


def test_a_load_of_a_resumed_run_is_compared_with_no_other_run() -> None:
    """The run that was saved again is the one that it is loaded into."""
    _, report = alone(**TWICE | {"train_steps": 2, "saves": 1})
    places = report.checks["side_effect_free"].compared
    first, again = (set(places[Place("loaded", step)]) for step in (2, 3))
    assert "net1.weight" in first
    assert "process.grad_mode" in again
    assert "net1.weight" not in again


@pytest.mark.parametrize("own", ["own", None])
@pytest.mark.parametrize("before", ["before", None])
def test_layout_bound_run_reports_why(own: str | None, before: str | None, tmp_path: Path) -> None:
    cell = bare_cell(tmp_path, config(**ONCE))
    run = build_twin(cell.config, cell.world, 0)
    run.exclusions = Exclusions(why_layout_bound=own)
    assert checks._layout_matters(cell, run, Exclusions(why_layout_bound=before), Place("")) is bool(
        own or before
    )
    told = own or before
    assert why_not(cell.report) == ({"loss_resume_close": told} if told else {})
