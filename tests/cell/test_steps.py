"""The steps of scenarios: which state of a run is kept and must be restored, the calls to a checkpointer,
what a save records, what one stage leaves for the next."""

import io
import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from unittest import mock

import pytest
import torch

from dcpbench.cell import handover, steps
from dcpbench.cell.cell import Cell
from dcpbench.cell.checkpoint import Checkpoint
from dcpbench.compare import across_layouts, stored
from dcpbench.core.mismatch import Mismatch, Place, Problem
from dcpbench.core.rank_report import RankReport
from dcpbench.core.state import Name, StatePart
from dcpbench.formats.files import recorded_syncs, synced_in
from dcpbench.runs.build_run import build
from dcpbench.runs.run import Exclusions
from dcpbench.state.snapshot import Leaves, State
from dcpbench.workloads.generators import RandomState
from dcpbench.workloads.world import World
from support.alone import TWICE, bare_cell, config
from support.notes import why_not

NAMES = ("first", "middle", "last")


def test_saves_of_a_trainer_follow_each_other(tmp_path: Path) -> None:
    target = {"target": "support.trainers.Trainer"}
    cell = bare_cell(
        tmp_path, config(checkpointer="trainer", workload=target, **{**TWICE, "resume_steps": 3})
    )
    reference = steps.build_reference(cell)
    checkpoints = steps.train_and_save(cell, reference)
    assert [checkpoint.step for checkpoint in checkpoints] == [1, 2]
    assert (len(reference.losses), sorted(reference.states)) == (5, [4, 5])
    assert reference.after_first_step.keys() >= {2, 3}, "a step after each save"
    assert reference.exclusions.why_layout_bound == reference.live_run.exclusions.why_no_twin is not None
    unreadable = {"checkpoint_whole", "files_equal", "contract_held"}
    assert why_not(cell.report).keys() == unreadable
    assert cell.report.checks.keys() == {"side_effect_free"}, "an unreadable checkpoint is not audited"


def leaves(*of: str) -> Leaves:
    return {("random", "rank0", name): name for name in of}


@pytest.mark.parametrize("needed", [(), ("first",), ("last",), ("first", "last"), NAMES])
def test_only_needed_generators_are_kept(needed: tuple[str, ...], tmp_path: Path) -> None:
    """Also in a state that a checkpoint shares with the reference run."""
    cell = bare_cell(tmp_path)
    reference = steps.build_reference(cell)
    own: list[State] = [{StatePart.model: {}, StatePart.random: leaves(*NAMES)} for _ in range(6)]
    reference.states.update(enumerate(own[:4]))
    checkpoints = [Checkpoint(1, "", state) for state in (*own[4:], own[0])]
    with mock.patch.object(RandomState, "needed", frozenset(needed)):
        steps.decide_compared_state(cell, reference, checkpoints)
    assert own == [{StatePart.model: {}, **({StatePart.random: leaves(*needed)} if needed else {})}] * 6
    assert reference.live_run.exclusions.generators == frozenset(needed)
    assert ("random_equal" in why_not(cell.report)) is not bool(needed)


def test_state_is_retained_where_resumes_end(tmp_path: Path) -> None:
    """Each is a copy of all small values."""
    cell = bare_cell(tmp_path, config(**{**TWICE, "resume_steps": 3}))
    reference = steps.build_reference(cell)
    for until, retained in ((1, []), (2, []), (4, [4]), (5, [4, 5])):
        steps.train_reference(cell, reference, until)
        assert reference.live_run.train_state.step == until
        assert [*reference.states] == retained


def test_files_that_nothing_else_reads_say_so(tmp_path: Path) -> None:
    cell = bare_cell(tmp_path)
    with mock.patch.object(type(cell.checkpointer), "stored", return_value={}):
        steps.finish(cell, steps.save(cell, build(cell.config, cell.world, 0)))
    assert why_not(cell.report) == {"files_equal": "nothing else reads files of this format"}
    assert "files_equal" not in cell.report.checks


@pytest.mark.parametrize("asked_for", [True, False])
def test_unsynced_files_may_be_allowed(asked_for: bool, tmp_path: Path) -> None:
    given = config(**TWICE)
    given.storage = replace(given.storage, sync_files=asked_for)
    with recorded_syncs() as synced:
        cell = replace(bare_cell(tmp_path, given), synced=partial(synced_in, synced=synced))
        reference = steps.build_reference(cell)
        steps.train_reference(cell, reference, 1)
        steps.finish(cell, steps.save(cell, reference.live_run))
    assert bool(synced) is asked_for
    seen = cell.report.checks["checkpoint_whole"]
    (control,) = seen.control.values()
    assert seen.count == 0
    assert all(control.values())
    assert ("files that were not synced" in control) is asked_for


@dataclass
class Late(World):
    """A world whose device is behind, and whose clock advances when it is waited for."""

    behind: float = 0.0
    now: float = 0.0
    met: list[str] = field(default_factory=list)

    def perf_counter(self) -> float:
        return self.now

    def synchronize(self) -> None:
        self.now, self.behind = self.now + self.behind, 0.0

    def meet(self) -> None:
        self.met.append("met")


def late(monkeypatch: pytest.MonkeyPatch, rank: int = 0, size: int = 1) -> Late:
    here = Late(rank, size, torch.device("cpu"), None, None)
    monkeypatch.setattr(steps, "time", here)
    return here


def test_load_waits_for_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = late(monkeypatch)
    cell = bare_cell(tmp_path, seen_by=here)
    run = build(cell.config, here, 0)

    def behind(by: float) -> None:
        here.behind += by

    vars(cell)["checkpointer"] = mock.Mock(load=lambda *_: behind(1.0))
    steps.load(cell, run, Checkpoint(1, "", {}), {}, install=lambda: behind(2.0))
    assert [one.value for one in cell.report.measurements if one.metric == "load_s"] == [3.0]


def test_ranks_write_and_read_plain_files_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []
    for rank in (0, 1):
        here = late(monkeypatch, rank, 2)
        cell = bare_cell(tmp_path, seen_by=here)

        def do(what: str, here: Late = here) -> Any:
            def record(folder: Path, lengths: Sequence[int]) -> None:
                here.met.append(what)
                here.now += sum(lengths)
                done.extend(lengths)

            return record

        checkpointer = vars(cell)["checkpointer"] = mock.Mock()
        checkpointer.raw = mock.Mock(write=do("written"), read=do("read"))
        checkpointer.manifest.return_value.found = {"d": 1, "a": 2, "c": 4, "b": 8, "e": 16}
        steps._measure_raw(cell, Checkpoint(1, "", {}), 0)
        assert here.met == ["met", "written", "met", "read"]
        taken = {one.metric: one.value for one in cell.report.measurements if one.metric.startswith("raw_")}
        assert taken == dict.fromkeys(("raw_write_s", "raw_read_s"), 9.0 if rank else 22.0)
    assert sorted(done) == [1, 1, 2, 2, 4, 4, 8, 8, 16, 16]


EMPTY = mock.Mock(read_tensor=lambda *_: None)
"""A checkpointer whose checkpoints have no tensors."""


def handed_over(cell: Cell) -> None:
    """Hand over three checkpoints with different states, and three states at the ends of resumes."""
    extra, random = StatePart.extra, {StatePart.random: leaves("cpu")}
    vars(cell)["checkpointer"] = EMPTY
    kept = [{extra: dict.fromkeys(NAMES, number), **random} for number in range(6)]
    saved: Any = [Checkpoint(step, str(cell.folder / f"step-{step}"), kept[step]) for step in range(3)]
    states = {step: kept[step] for step in range(3, 6)}
    exclusions = Exclusions(why_layout_bound="why", compute_dtypes=(torch.bfloat16,))
    handover.write_reference(
        cell, steps.ReferenceRun(saved, [1.0], states, exclusions=exclusions), any_layout=True
    )


@pytest.mark.parametrize("seen", [True, False])
def test_control_of_disagreeing_ranks_is_run(
    seen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It compares another value on the last rank, which counts only if it is reported."""
    wrong, given = Mismatch("lr", Problem.ranks_disagree), list[Leaves]()

    def digests(state: Leaves, group: None) -> tuple[Leaves, dict[Name, Mismatch]]:
        given.append(state)
        return state, {("lr",): wrong} if seen or len(given) == 1 else {}

    monkeypatch.setattr(across_layouts, "digests_of_full", digests)
    cell = bare_cell(tmp_path)
    vars(cell)["checkpointer"] = EMPTY
    saved = Checkpoint(1, str(tmp_path / "step-1"), {StatePart.optimizer: {("lr",): 0.1, ("eps",): 1e-8}})
    handover.write_reference(cell, steps.ReferenceRun([saved]), any_layout=True)
    assert given[1].keys() == {("lr",)}
    assert given[1]["lr",] != 0.1
    assert cell.report.checks["optim_equal"].control == {saved.place: {"lr": seen}}


@pytest.mark.parametrize("same_layout", [True, False])
def test_random_state_is_taken_over_in_the_same_layout(same_layout: bool, tmp_path: Path) -> None:
    given = config(**TWICE, scenario="convert", world_size=1 if same_layout else 2)
    cell = bare_cell(tmp_path, given)
    handed_over(cell)
    loading, reference = handover.read_reference(cell, any_layout=True)
    assert (reference.exactly, loading.config.world_size) == (same_layout, 1)
    taken = [*(one.state for one in reference.checkpoints), *reference.states.values()]
    random = {StatePart.random: leaves("cpu")} if same_layout else {}
    assert taken == [{StatePart.extra: dict.fromkeys(NAMES, number), **random} for number in range(6)]
    assert all(one.by_content for one in reference.checkpoints), "it may lie otherwise"
    assert reference.losses == [1.0]
    assert (reference.exclusions.why_layout_bound, reference.exclusions.compute_dtypes) == (
        "why",
        (torch.bfloat16,),
    )
    assert cell.report.checks == {}


@pytest.mark.parametrize("differing", [{"first"}, {"last"}, {*NAMES}])
def test_disagreeing_ranks_are_reported(
    differing: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gathered(mine: Leaves, group: object) -> list[Leaves]:
        return [mine, {name: leaf if name not in differing else "other" for name, leaf in mine.items()}]

    monkeypatch.setattr(across_layouts, "gathered_values", gathered)
    cell = bare_cell(tmp_path)
    handed_over(cell)
    assert cell.report.checks.keys() == {"extra_equal"}
    seen = cell.report.checks["extra_equal"]
    told = {Place("checkpoint", step): dict.fromkeys(differing, True) for step in range(3)}
    assert (seen.compared, seen.control) == (told, told)
    found = {(one.name, one.where, one.problem) for one in seen.distinct.values()}
    assert found == {(name, where, Problem.ranks_disagree) for name in differing for where in told}


def test_files_in_a_folder_run_no_code(tmp_path: Path) -> None:
    """The folder may come from another user."""
    cell = bare_cell(tmp_path, config(**TWICE, verify="deep"))
    for name in ("handover.pt", "value"):
        torch.save(RankReport(0), tmp_path / name)
    value = io.BytesIO((tmp_path / "value").read_bytes())
    for read in (
        partial(handover.read_reference, cell, any_layout=True),
        partial(stored._plain, value),
    ):
        with pytest.raises(UnpicklingError, match="Unsupported global"):
            read()


def test_child_process_may_have_synced_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = bare_cell(tmp_path)
    before, started = mock.Mock(), mock.Mock()
    cell.children_before.add(before)
    children = [before]
    monkeypatch.setattr(multiprocessing, "active_children", lambda: children)
    saved, checkpointer = Checkpoint(1, str(tmp_path), {}), mock.Mock()
    vars(cell)["checkpointer"] = checkpointer
    assert steps._synced(cell, saved) == set()
    children.append(started)
    assert steps._synced(cell, saved) is None
    checkpointer.raw = None
    assert steps._synced(cell, saved) is None
