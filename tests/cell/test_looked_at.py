"""Everything that a healthy cell compares, on one rank in this process: the names by check and place. Each
name had a control."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dcpbench.checkpointers import base
from dcpbench.checkpointers.dcp import DcpCheckpointer
from dcpbench.core.mismatch import Place
from dcpbench.state import snapshot
from dcpbench.twin import lockstep
from support.alone import TWICE, group_of_one, run_alone, world
from support.looked_at import (
    DAMAGES,
    FILES,
    OPEN,
    SHORT,
    STORED,
    Looked,
    Places,
    absent_key,
    opened,
    passed,
    passing,
    places_of,
    save_load,
)
from support.notes import noted, why_not

pytestmark = pytest.mark.cell

TRAINER: dict[str, Any] = {"checkpointer": "trainer", "workload": {"target": "support.trainers.Trainer"}}


def test_save_load() -> None:
    ran = passing()
    (report,) = ran.reports
    assert places_of(report) == save_load()
    assert ran.left == ["step-0001", "step-0002"], "what was saved again is removed"
    assert ran.announced.count("load") == 4, "each checkpoint, what was saved again, and once what is there"
    phases = [one.phase for one in report.measurements]
    assert phases.count("verify/absent_key") == 1, "what is set again was not loaded again"


def chain(looked: Looked = SHORT) -> Places:
    """Return the places of three runs of a step each; the first and the second train on after their save."""
    places = {
        **looked.saved(1),
        **looked.saved(2, first=False),
        **looked.twin(),
        **looked.restart(1, 2),
    }
    went_on = ", without a load"
    for (check, where), names in looked.resumed(2).items():
        places[check, where.replace("step 2", f"step 2{went_on}")] = names
    return places


def test_chain() -> None:
    ran = passing(scenario="chain")
    (report,) = ran.reports
    assert places_of(report) == chain()
    assert ran.left == ["step-0001", "step-0002"]
    assert ran.announced.count("load") == 2


def test_chain_needs_two_saves() -> None:
    (report,) = run_alone(**{**TWICE, "saves": 1}, scenario="chain").reports
    assert report.skip == "saves=1: a chain has at least two checkpoints"


def test_chain_trains_on_during_its_save() -> None:
    with group_of_one() as group:
        ran = passing(scenario="chain", save="async", seen_by=world(group=group))
    assert places_of(ran.reports[0]) == chain()
    assert ran.uploads == [1, 0, 1, 0]
    began = [number for number, phase in enumerate(ran.announced) if phase == "save"]
    for number in began:
        following = ran.announced[number:]
        assert following.index("train") < following.index("upload")


def test_chain_of_trainers() -> None:
    ran = passed(run_alone(**TWICE, **TRAINER, scenario="chain", restart=True))
    *_, first, second = ran.reports
    assert len(ran.reports) == 4
    for report, step in ((first, 1), (second, 2)):
        assert ("state_resume_equal", f"after the checkpoint of step {step}") in places_of(report)


def test_fault_in_the_third_run_is_reported_there() -> None:
    ran = run_alone("resumed_twice_wrong", **{**TWICE, "resume_steps": 2}, scenario="chain")
    assert ran.verdict.fault_seen is True, ran.verdict.reason
    found = [one for check in ran.reports[0].checks.values() for one in check.distinct.values()]
    assert {str(one.where) for one in found} == {"after the checkpoint of step 2"}


def test_trainer_has_no_audit_and_no_twin() -> None:
    (report,) = passed(run_alone(**TWICE, **TRAINER)).reports
    places = places_of(report)
    not_made = {"checkpoint_whole", "files_equal", "contract_held", *lockstep.TRAINING_CHECKS}
    assert why_not(report).keys() >= not_made
    assert {check for check, _ in places} == {check for check, _ in save_load()} - not_made - {"random_equal"}
    for step in (1, 2):
        files = {f"step-{step}/{name}" if name in STORED else name for name in FILES}
        assert places["files_unchanged", f"in the checkpoint of step {step}"] == files
    assert ("state_resume_equal", "after the checkpoint of step 1") in places
    assert (
        "state_resume_equal",
        "after the checkpoint of step 2",
    ) in places


def test_stages_of_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[Path] = []
    monkeypatch.setattr(base, "drop_pages", dropped.extend)
    ran = passed(run_alone(**TWICE, verify="deep", restart=True))
    assert ran.left == ["handover-rank0.pt", "step-0001", "step-0002"]
    assert {path.parent.name for path in dropped} == {"step-0001", "step-0002"}
    never_saves, saves, loads = map(places_of, ran.reports)
    twin = SHORT.twin()
    harmless = {place: twin.pop(place) for place in [*twin] if place[0] == "save_harmless"}
    assert never_saves == twin
    assert saves.items() >= (SHORT.saved(1, 2) | harmless).items()
    state = SHORT.names["model_equal"] | SHORT.names["optim_equal"]
    assert saves["side_effect_free", "after the load of step 2"] >= state
    for where in ("step 2", "step 1"):
        assert loads.items() >= SHORT.equal(f"in the checkpoint of {where}").items()
    files = {("files_unchanged", f"in the checkpoint of step {step}") for step in (1, 2)}
    assert loads.keys() >= SHORT.resumed(2).keys() | SHORT.resumed(1).keys() | files
    assert not {place for place in loads if place in SHORT.saved(1, 2)} - files
    assert not any(one.metric == "save_stall_s" for one in ran.reports[-1].measurements)


def test_overlapping_saves_are_compared_like_others() -> None:
    ran = passing(save="async", overlap_saves=True)
    (report,) = ran.reports
    uncounted = {place: names - (OPEN - opened(False)) for place, names in save_load().items()}
    beside = {
        ("contract_held", "of a save that cannot be written, beside another"): {"refusal", "beside.value"}
    }
    assert places_of(report) == uncounted | beside
    assert ran.uploads == [1, 2, 1, 0]


def test_no_dist() -> None:
    ran = passing(scenario="no_dist")
    extra = {("contract_held", "saved and loaded"): {"empty state dict"}}
    assert places_of(ran.reports[0]) == save_load() | extra
    assert ran.left == ["empty", "full", "step-0001", "step-0002"]


def test_sub_groups() -> None:
    """One rank is alone in its half."""
    with group_of_one() as group:
        ran = passing(scenario="sub_groups", seen_by=world(group=group))
        assert len(dist.distributed_c10d._world.pg_names) == 1, "the half's group is gone"
    (report,) = ran.reports
    where = "in the checkpoint of this rank's half"
    half = {"extra_equal": set(), "checkpoint_whole": set()}
    for check in half:
        half[check] = report.checks[check].compared[Place(where)].keys()
    assert half["extra_equal"] > {"half.sharded", "half.data", "half.nans"}
    assert DAMAGES - half["checkpoint_whole"] == {"files that were not synced"}
    others = {place: names for place, names in places_of(report).items() if place[1] != where}
    assert others == save_load()
    assert ran.left == ["half-0", "step-0001", "step-0002"]


def test_half_that_loads_nothing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = DcpCheckpointer.load

    def load(self: DcpCheckpointer, state: dict[str, Any], checkpoint_id: str) -> None:
        if "half" not in state:
            honest(self, state, checkpoint_id)

    monkeypatch.setattr(DcpCheckpointer, "load", load)
    with group_of_one() as group:
        ran = run_alone(**TWICE, scenario="sub_groups", seen_by=world(group=group))
    (failed,) = ran.verdict.failed
    assert failed.check == "extra_equal"
    assert "half.sharded" in failed.names
    assert {str(one.where) for one in failed.mismatches} == {"in the checkpoint of this rank's half"}


def test_rank_without_collectives_raises_its_own_error() -> None:
    passing(scenario="overwrite", save="sync_no_collectives")


@pytest.mark.parametrize("same_layout", [True, False])
def test_convert(same_layout: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        snapshot, "BLOCK", 1024
    )  # of a whole there is one digest, of its parts there are several
    # A second stage on one rank of two that it says it has is one of another layout.
    worlds = {} if same_layout else {"world_size": 2}
    ran = run_alone(**TWICE, scenario="convert", **worlds)
    saving, loading = ran.reports
    assert places_of(saving) == SHORT.saved(1, 2) | SHORT.twin()
    expected = SHORT.loaded(2, 1, again=False, source=False) | absent_key(2)
    for step in (1, 2):
        where = f"in the checkpoint of step {step}"
        expected |= SHORT.equal(where) | SHORT.resumed(step, exactly=same_layout)
        expected[("files_unchanged", where)] = FILES
        if not same_layout:  # what its ranks draw next is of no use to others
            del expected["random_equal", where]
    assert places_of(loading) == expected
    assert not ran.verdict.failed
    assert ran.verdict.status == "pass" or not same_layout
    assert ran.left == ["handover.pt", "step-0001", "step-0002"]


@pytest.mark.parametrize("compiled", [False, True])
def test_drawing_ranks_are_compared_with_themselves(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their losses are not compared with those of another layout, nor with those of a twin on other
    kernels."""
    monkeypatch.setattr(lockstep, "runs_other_kernels", lambda *_: compiled)
    with group_of_one() as group:
        ran = run_alone(
            **{**TWICE, "model": "dropout"},
            scenario="convert",
            parallel="ddp",
            world_size=2,
            seen_by=world(group=group),
        )
    assert not ran.verdict.failed
    saving, loading = ran.reports
    apart = {"gradient_close", "batch_loss_close"} if compiled else set()
    assert why_not(saving).keys() == {"replicas_equal", *apart}
    assert why_not(loading).keys() == {"loss_resume_close", "replicas_equal", *apart}
    for report in ran.reports:
        assert not why_not(report).keys() & report.checks.keys()
        assert ("gradient_bound" in noted(report, "column")) is not compiled, "no bound without a comparison"
        assert any(one.metric == "gradient_bound_used" for one in report.measurements) is not compiled
