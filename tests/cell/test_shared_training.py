"""Cells on the same ranks that differ only in how they save share the run that never saves, and its verdict:
who shares, and that no cell is judged by what another one has left."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from conftest import run
from dcpbench.cell import uninterrupted
from dcpbench.checkpointers.dcp import DcpCheckpointer
from dcpbench.config.keys import OF_SAVING
from dcpbench.config.schema import Config, config_class
from dcpbench.core.rank_report import RankReport
from dcpbench.core.state import StatePart
from dcpbench.rank.messages import CellSpec, RunId
from dcpbench.rank.run_cell import run_cell
from dcpbench.runs import build_run
from dcpbench.runs.own_run import OwnRun
from dcpbench.state.snapshot import DigestedLeaf, TensorLeaf
from dcpbench.twin.lockstep import TRAINING_CHECKS
from dcpbench.workloads.world import World, new_group
from support.alone import ONCE, Ran, config, run_alone, world
from support.gloo_ranks import Ask
from support.notes import noted, texts

pytestmark = pytest.mark.cell


def cell_in(here: World, **values: Any) -> Ran:
    """Run a cell on the ranks of this world."""
    return run_alone(**{**ONCE, **values}, seen_by=here)


def training(report: RankReport) -> dict[str, Any]:
    """What a report says of training: names and controls of each check, losses, bounds, metrics."""
    made = {check: vars(report.checks[check]) for check in TRAINING_CHECKS if check in report.checks}
    metrics = [one for one in report.measurements if one.metric in ("twin_bytes", "gradient_bound_used")]
    return {"checks": made, "losses": report.losses, "bounds": noted(report, "column"), "metrics": metrics}


def test_cells_that_save_otherwise_share_the_training() -> None:
    here = world()
    first = cell_in(here)
    assert first.reports[0].training_from is None
    for values in ({"save": "async"}, {"storage": "file_threads"}, {"load_into": "gradients"}):
        later = cell_in(here, **values)
        (report,) = later.reports
        assert report.training_from == "cell"
        assert later.verdict.status == "pass", later.verdict.reason
        assert training(report) == training(first.reports[0])
        assert later.verdict.checks == first.verdict.checks
        assert later.announced.count("train") < first.announced.count("train")
    assert not report.texts("left_behind")


def test_fault_is_injected_into_a_run_of_its_own() -> None:
    here = world()
    cell_in(here)
    ran = run_alone("file_bit", seen_by=here, **ONCE)
    assert ran.reports[0].training_from is None
    assert here.kept_run is not None


OF_SAVES = {
    *("checkpointer", "save", "storage", "state_dict", "overlap_saves", "raw"),
    *("load_into", "load_parallel", "load_world_size", "load_python", "tolerance", "keep_checkpoints"),
}
"""The keys that concern saving or loading alone."""


def test_every_key_decides_unless_it_is_declared_to_concern_saves() -> None:
    base = config()
    assert {item.name for item in fields(config_class()) if item.metadata.get(OF_SAVING)} == OF_SAVES
    decides = set[str]()
    for item in fields(base):
        value: Any = getattr(base, item.name)
        inner = {fields(value)[0].name: "another"} if is_dataclass(value) else {}
        other = replace(value, **inner) if inner else "another"
        if replace(base, **{item.name: other}).training_digest != base.training_digest:
            decides.add(item.name)
    assert decides == {item.name for item in fields(base)} - OF_SAVES


@pytest.mark.parametrize("part", [StatePart.model, StatePart.optimizer, StatePart.extra])
@pytest.mark.parametrize("digests", [False, True])
def test_wrong_kept_run_judges_no_cell(
    part: StatePart, digests: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uninterrupted, "_KEPT_BYTES", 0 if digests else 2**28)
    here = world()
    first = cell_in(here)
    kept = here.kept_run
    damage(kept, part)
    second = cell_in(here, save="async")
    (report,) = second.reports
    assert second.verdict.status == "pass", second.verdict.reason
    assert report.training_from is None
    assert training(report) == training(first.reports[0])
    (told,) = report.texts("left_behind")
    assert told.startswith("the run that never saves of cell has another ")
    assert here.kept_run is None, "no later cell gets it"
    (third,) = cell_in(here).reports
    assert third.training_from is None
    assert here.kept_run is not None


def damage(kept: uninterrupted.KeptRun, part: StatePart) -> None:
    """Change one value of a part of the kept state."""
    (state,) = kept.unsaved.states.values()
    name, leaf = next(
        (name, leaf)
        for name, leaf in state[part].items()
        if hasattr(leaf, "local") or hasattr(leaf, "blocks")
    )
    if isinstance(leaf, DigestedLeaf):
        (low, high), *rest = leaf.blocks
        state[part][name] = replace(leaf, blocks=((low ^ 1, high), *rest))
    else:
        leaf.local.reshape(-1).view(torch.uint8)[0] ^= 1


def test_kept_state_of_much_memory_is_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uninterrupted, "_KEPT_BYTES", 0)
    here = world()
    cell_in(here)
    (state,) = here.kept_run.unsaved.states.values()
    assert any(isinstance(leaf, DigestedLeaf) for leaf in state[StatePart.model].values())
    assert not any(isinstance(leaf, TensorLeaf) for part in state.values() for leaf in part.values())
    ran = cell_in(here, save="async")
    assert ran.reports[0].training_from == "cell"
    assert ran.verdict.status == "pass", ran.verdict.reason


@contextmanager
def harmful_saves() -> Iterator[None]:
    """A save changes the lowest bit of a trained weight."""
    honest = DcpCheckpointer.save

    def save(self: DcpCheckpointer, state: dict[str, Any], checkpoint_id: str, slot: int = 0) -> Any:
        pending = honest(self, state, checkpoint_id, slot)
        if "model" in state:
            next(state["model"].model.parameters()).data.view(torch.int32)[0, 0] ^= 1
        return pending

    with mock.patch.object(DcpCheckpointer, "save", save):
        yield


def test_harmful_save_is_judged_by_a_run_of_its_own() -> None:
    here = world()
    cell_in(here)
    kept = here.kept_run
    with harmful_saves():
        ran = cell_in(here, save="async")
    (report,) = ran.reports
    assert report.training_from is None
    assert "save_harmless" in {one.check for one in ran.verdict.failed}
    assert ran.verdict.checks["gradient_close"] is True
    assert report.texts("left_behind") == [], "both runs that never save are equal"
    assert here.kept_run is kept


@contextmanager
def mistrained(rank: int | None = None) -> Iterator[None]:
    """Parallel runs halve a gradient, on one rank or on all."""
    honest = build_run.build

    def build(given: Config, here: World, *rest: Any, **options: Any) -> OwnRun:
        made = honest(given, here, *rest, **options)
        if rank in (None, here.rank):
            *_, value = made.model.parameters()
            value.register_hook(lambda gradient: gradient * 0.5)
        return made

    with mock.patch.object(build_run, "build", build):
        yield


def test_wrong_training_is_found_in_every_cell() -> None:
    here = world()
    with mistrained():
        for save in ("sync", "async", "sync"):
            ran = cell_in(here, save=save)
            assert {one.check for one in ran.verdict.failed} == {"gradient_close"}
            assert ran.reports[0].training_from is None
            assert here.kept_run is None


def on_ranks(given: list[Config], wrong: str, victim: int) -> list[RankReport]:
    """Run cells one after another on this rank of several, and return its reports. Before the second one the
    kept run of the `victim` is `damaged` or `dropped`, or all train wrongly on it (`mistrained`)."""
    rank, size, reports = dist.get_rank(), dist.get_world_size(), list[RankReport]()
    here = World(rank, size, torch.device("cpu"), *(new_group() for _ in range(3)))
    folder = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folder)
    for number, one in enumerate(given):
        if number == 1 and rank == victim and wrong == "damaged":
            damage(here.kept_run, StatePart.model)
        if number == 1 and rank == victim and wrong == "dropped":
            here.kept_run = None
        checkpoints = Path(folder[0]) / str(number)
        checkpoints.mkdir(exist_ok=True)
        spec = CellSpec(RunId("tests", f"cell {number}", 0), one, folder[0], str(checkpoints))
        reports.append(RankReport(rank))
        with mistrained(victim if wrong == "mistrained" else -1):
            run_cell(spec, here, reports[-1], lambda *_: None, lambda since: None)
    return reports


def parallel(name: str, save: str) -> Config:
    made = config(**ONCE, parallel=name, world_size=4, save=save)
    return replace(made, parallel=made.parallel.planned_by(made.model))


@pytest.mark.parametrize(
    ("wrong", "sources"),
    {
        "none": [None, "cell 0", "cell 0"],
        "damaged": [None, None, None],
        "dropped": [None, None, "cell 1"],
        "mistrained": [None, None, None],
    }.items(),
)
def test_ranks_decide_together(ask: Ask, wrong: str, sources: list[str | None]) -> None:
    name = "ddp" if wrong == "mistrained" else "fsdp2"
    cells = [parallel(name, save) for save in ("sync", "async", "sync")]
    reports = ask(on_ranks, cells, wrong, 2)
    assert [[one.training_from for one in of_rank] for of_rank in reports] == [sources] * 4
    left = [[bool(one.texts("left_behind")) for one in of_rank] for of_rank in reports]
    assert left == [[False, wrong == "damaged" and rank == 2, False] for rank in range(4)]
    for number in range(3):
        found = sum(of_rank[number].checks["gradient_close"].count for of_rank in reports)
        assert bool(found) is (wrong == "mistrained"), "seen in every cell of the group"
        assert not any(of_rank[number].checks["save_harmless"].count for of_rank in reports)


@pytest.mark.slow
def test_rows_of_a_sweep_name_the_run(tmp_path: Path) -> None:
    lists = ("parallel=ddp", "save=sync,async", "seed=0,1", "world_size=2", "saves=1")
    ended = run(tmp_path / "sweep", "-m", "device=cpu", "model=short", *lists)
    assert [row["status"] for row in ended.rows] == ["pass"] * 4
    first, third, second, fourth = ended.rows  # of two seeds saved by sync, then by async
    assert (first["training_from"], third["training_from"]) == (None, None)
    assert (second["training_from"], fourth["training_from"]) == (first["cell"], third["cell"])
    for one, other in ((first, second), (third, fourth)):
        assert other["training"] is True
        assert {check: one[check] for check in TRAINING_CHECKS} == {
            check: other[check] for check in TRAINING_CHECKS
        }
        assert one["loss_twin"] == other["loss_twin"]
        assert not any(texts(rank, "left_behind") for rank in other["details"]["ranks"])
