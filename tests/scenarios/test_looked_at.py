"""What a healthy cell has looked at, on one rank that is this process: by each check, at which places, and of
what there each name. That each of them could have been seen to differ is what makes a cell pass."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import _wrap_exception

from dcpbench.checkpointers.dcp import DcpCheckpointer
from dcpbench.config.schema import Config
from dcpbench.records.rank_report import RankReport
from dcpbench.scenarios import fine_tune, in_place
from dcpbench.scenarios import fresh_process as stage
from dcpbench.scenarios.checkpoint import FLAGS, live_state
from dcpbench.scenarios.stateful_objects import plain_values
from dcpbench.verify import snapshot
from dcpbench.verify.audit import Chunk, Entry, Manifest, controls
from dcpbench.verify.perturb import controllable
from dcpbench.verify.process_state import snapshot_process
from dcpbench.verify.snapshot import snapshot_nested
from dcpbench.workloads.batches import batches_of
from dcpbench.workloads.build_run import build
from dcpbench.workloads.training_run import TrainingRun
from support.alone import Ran, bare_cell, config, group_of_one, run_alone, unexplained, world

Places = dict[tuple[str, str], set[str]]
"""The names that are compared, by check and place."""

SMALL: dict[str, Any] = {"model": "short", "train_steps": 1, "resume_steps": 1, "saves": 2}
RESTORED = ("model_equal", "optim_equal", "extra_equal", "random_equal")
OPEN = {"process.open_files", "process.threads", "process.descriptors"}
STORED = {".metadata", "__0_0.distcp"}
FILES = {*STORED, "a file that went", "a file that came"}
EVERY_GENERATOR = {f"random.rank0.{name}" for name in ("cpu", "python", "numpy")}
ONE = Manifest({"key": Entry((2,), "float32", (Chunk((0,), (2,), "file"),))}, {"file": 1}, {"file": 1})
DAMAGES = {*controls(ONE, {}), "bytes of two entries", "files that were not synced"}
PROCESS = set(snapshot_process(world().device))


def trained(given: Config) -> TrainingRun:
    run = build(given, world(), given.seed)
    run.train(batches_of(given, world().device), 1)
    if run.needs_random is not None:
        run.keeps_random = run.needs_random
    return run


class Looked:
    """What is looked at in a cell with this configuration."""

    def __init__(self, given: Config) -> None:
        self.names = {
            check: set(controllable(leaves)) for check, leaves in live_state(trained(given)).items()
        }
        self.all = set.union(*self.names.values())
        self.restored = self.all - self.names[FLAGS]
        self.state = {name for name in self.names["optim_equal"] if name.startswith("state.")}
        self.keys = {f"model.{name}" for name in self.names["model_equal"] if not self._is_frozen(name)}
        self.keys |= {f"optimizer.{name}" for name in self.state}
        self.keys |= {
            name for name in self.names["extra_equal"] if name.startswith(("noise.", "tensor_object."))
        }
        self.keys |= self.names["random_equal"]

    def _is_frozen(self, name: str) -> bool:
        return name.startswith(fine_tune.FROZEN)

    def saved(self, *steps: int, first: bool = True) -> Places:
        """In saves of these steps; with the first one of a cell nothing is counted."""
        places: Places = {}
        for number, step in enumerate(steps):
            where = f"in the checkpoint of step {step}"
            places |= {
                ("side_effect_free", f"after the save of step {step}"): self.all | PROCESS,
                ("side_effect_free", f"once the save of step {step} had ended"): opened(number or not first),
                ("checkpoint_whole", where): DAMAGES,
                ("files_equal", where): self.keys,
                ("files_unchanged", where): FILES,
            }
        return places

    def loaded(self, *steps: int, again: bool, source: bool = True) -> Places:
        """In loads of these steps, whose run is in this process; the first one of the cell, or `again`."""
        return {
            ("side_effect_free", f"after the load of step {step}"): opened(again or number)
            | PROCESS
            | (self.all if source else set())
            for number, step in enumerate(steps)
        }

    def equal(self, where: str) -> Places:
        return {(check, where): names for check, names in self.names.items()}

    def resumed(self, step: int, exactly: bool = True) -> Places:
        where = f"after the checkpoint of step {step}"
        loss = {f"loss of step {step + 1}"}
        places = {("loss_twin_close", where): loss, (FLAGS, f"{where}, resumed"): self.names[FLAGS]}
        if exactly:
            exact = {("loss_resume_equal", where): loss, ("state_resume_equal", where): self.restored}
            return places | exact
        return places | {("loss_resume_close", where): loss}

    def twin(self) -> Places:
        return {
            ("loss_twin_close", "in the uninterrupted run"): {f"loss of step {step}" for step in (1, 2, 3)},
            ("state_twin_close", "after the uninterrupted run"): self.names["model_equal"] | self.state,
        }

    def restart(self, *steps: int) -> Places:
        """Loads of these steps, the first in the cell, each with all that follows."""
        places = self.loaded(*steps, again=False) | absent_key(steps[0])
        for step in steps:
            places |= self.equal(f"in the checkpoint of step {step}") | self.resumed(step)
        return places


def opened(counted: object) -> set[str]:
    return OPEN if counted else {"process.open_files"}


def absent_key(step: int) -> Places:
    where = f"of a load of an absent key in the checkpoint of step {step}"
    return {("contract_held", where): {"refusal"}}


def places_of(report: RankReport) -> Places:
    """What was compared on this rank."""
    return {
        (check, where): set(names)
        for check, seen in report.checks.items()
        for where, names in seen.compared.items()
    }


SHORT = Looked(config(**SMALL))


def save_load(looked: Looked = SHORT) -> Places:
    again = "in the checkpoint of step 2, saved again"
    return {
        **looked.saved(1, 2),
        **looked.twin(),
        ("save_harmless", "in the run that saved"): looked.all,
        **looked.restart(2, 1),
        **looked.equal(again),
        **looked.loaded(2, again=True),
    }


def passed(ran: Ran) -> Ran:
    assert ran.verdict.status == "pass", ran.verdict.reason
    return ran


def test_save_load() -> None:
    ran = passed(run_alone(**SMALL))
    (report,) = ran.reports
    assert places_of(report) == save_load()
    assert ran.left == ["step-0001", "step-0002"], "what was saved again is removed"
    assert ran.announced.count("load") == 4, "each checkpoint, what was saved again, and once what is there"
    phases = [one.phase for one in report.measurements]
    assert phases.count("verify/absent_key") == 1, "what is set again was not loaded again"


def chain(looked: Looked = SHORT) -> Places:
    """Three runs of a step each, of which the second goes on after its save, as the first has done."""
    places = {
        **looked.saved(1),
        **looked.saved(2, first=False),
        **looked.twin(),
        ("save_harmless", "in the run that saved"): looked.all,
        **looked.restart(1, 2),
    }
    went_on = ", without a load"
    for (check, where), names in looked.resumed(2).items():
        places[check, where.replace("step 2", f"step 2{went_on}")] = names
    return places


def test_chain() -> None:
    ran = passed(run_alone(**SMALL, scenario="chain"))
    (report,) = ran.reports
    assert places_of(report) == chain()
    assert ran.left == ["step-0001", "step-0002"]
    assert ran.announced.count("load") == 2


def test_a_chain_has_more_than_one_link() -> None:
    (report,) = run_alone(**{**SMALL, "saves": 1}, scenario="chain").reports
    assert report.skip == "saves=1: a chain has at least two checkpoints"


def test_a_run_of_a_chain_goes_on_while_its_save_does() -> None:
    with group_of_one() as group:
        ran = passed(
            run_alone(**SMALL, scenario="chain", save="async", verify="deep", seen_by=world(group=group))
        )
    assert places_of(ran.reports[0]) == chain()
    assert ran.uploads == [1, 0, 1, 0]
    began = [number for number, phase in enumerate(ran.announced) if phase == "save"]
    for number in began:
        following = ran.announced[number:]
        assert following.index("train") < following.index("upload")
    fresh_process(ran.reports[-1])


def test_a_chain_of_trainers() -> None:
    values = {"checkpointer": "trainer", "workload": {"target": "support.own_trainer.Trainer"}}
    ran = passed(run_alone(**SMALL, **values, scenario="chain", verify="deep"))
    where = "after the checkpoint of step 2"
    for report, how in zip(ran.reports, ("", ", loaded by a fresh process"), strict=True):
        assert ("state_resume_equal", f"{where}{how}") in places_of(report)


def test_what_goes_wrong_in_the_third_run_is_seen_there() -> None:
    ran = run_alone("resumed_twice_wrong", **{**SMALL, "resume_steps": 2}, scenario="chain")
    assert ran.verdict.fault_seen is True, ran.verdict.reason
    found = [one for check in ran.reports[0].checks.values() for one in check.distinct.values()]
    assert {one.where for one in found} == {"after the checkpoint of step 2"}


def test_a_trainer_is_looked_at_but_for_its_files_and_a_twin() -> None:
    values = {"checkpointer": "trainer", "workload": {"target": "support.own_trainer.Trainer"}}
    looked = Looked(config(**SMALL, **values))
    expected = save_load(looked)
    not_made = {"checkpoint_whole", "files_equal", "contract_held", "loss_twin_close", "state_twin_close"}
    expected = {place: names for place, names in expected.items() if place[0] not in not_made}
    for step in (1, 2):  # what its ranks draw is known once it has taken all its steps
        expected["side_effect_free", f"after the save of step {step}"] |= EVERY_GENERATOR
        files = {f"checkpoint/{name}" if name in STORED else name for name in FILES}
        expected["files_unchanged", f"in the checkpoint of step {step}"] = files
    (report,) = passed(run_alone(**SMALL, **values)).reports
    assert places_of(report) == expected
    assert report.not_applied.keys() == not_made


def test_a_trainer_is_built_by_a_fresh_process_too(monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[Path] = []
    monkeypatch.setattr(stage, "drop_pages", dropped.append)
    values = {"checkpointer": "trainer", "workload": {"target": "support.own_trainer.Trainer"}}
    looked = Looked(config(**SMALL, **values))
    ran = passed(run_alone(**SMALL, **values, verify="deep"))
    assert ran.left == ["newest-rank0.pt", "step-0001", "step-0002"]
    assert [path.name for path in dropped] == ["step-0002"]
    fresh = ran.reports[-1]
    how = ", loaded by a fresh process"
    expected = looked.loaded(2, again=False, source=False)
    for place, names in {**looked.equal("in the checkpoint of step 2"), **looked.resumed(2)}.items():
        check, where = place
        if check != "loss_twin_close":
            expected[check, where.replace("of step 2", f"of step 2{how}")] = names
    assert places_of(fresh) == expected
    phases = [one.phase for one in fresh.measurements if one.phase]
    assert "verify/resumed" in phases
    assert all(phase.startswith("verify") for phase in phases), "it is no cost of a save or a load"
    assert {one.metric for one in fresh.measurements if not one.phase} == {"peak_host_bytes"}


def test_overlapping_saves_are_looked_at_as_others_are_but_for_what_is_counted() -> None:
    ran = passed(run_alone(**SMALL, save="async", overlap_saves=True))
    (report,) = ran.reports
    uncounted = {place: names - (OPEN - opened(False)) for place, names in save_load().items()}
    beside = {
        ("contract_held", "of a save that cannot be written, beside another"): {"refusal", "beside.value"}
    }
    assert places_of(report) == uncounted | beside
    assert ran.uploads == [1, 2, 1, 0]


def test_no_dist() -> None:
    ran = passed(run_alone(**SMALL, scenario="no_dist"))
    extra = {("contract_held", "saved and loaded"): {"empty state dict"}}
    assert places_of(ran.reports[0]) == save_load() | extra
    assert ran.left == ["empty", "full", "step-0001", "step-0002"]


def test_sub_groups() -> None:
    """One rank is the only one of its half."""
    with group_of_one() as group:
        ran = passed(run_alone(**SMALL, scenario="sub_groups", seen_by=world(group=group)))
        assert len(dist.distributed_c10d._world.pg_names) == 1, "the half's group is gone"
    (report,) = ran.reports
    where = "in the checkpoint of this rank's half"
    half = {"extra_equal": set(), "checkpoint_whole": set()}
    for check in half:
        half[check] = report.checks[check].compared[where].keys()
    assert half["extra_equal"] > {"half.sharded", "half.data", "half.nans"}
    assert DAMAGES - half["checkpoint_whole"] == {"files that were not synced"}
    others = {place: names for place, names in places_of(report).items() if place[1] != where}
    assert others == {place: names for place, names in save_load().items() if place[0] != "save_harmless"}
    assert ran.left == ["half-0", "step-0001", "step-0002"]


def test_what_a_half_has_not_loaded_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = DcpCheckpointer.load

    def load(self: DcpCheckpointer, state: dict[str, Any], checkpoint_id: str) -> None:
        if "half" not in state:
            honest(self, state, checkpoint_id)

    monkeypatch.setattr(DcpCheckpointer, "load", load)
    with group_of_one() as group:
        ran = run_alone(**SMALL, scenario="sub_groups", seen_by=world(group=group))
    (failed,) = ran.verdict.failed
    assert failed.check == "extra_equal"
    assert "half.sharded" in failed.names
    assert {one.where for one in failed.findings} == {"in the checkpoint of this rank's half"}


def test_a_rank_that_plans_for_itself_is_refused_by_its_own_exception() -> None:
    passed(run_alone(**SMALL, scenario="overwrite", save="sync_no_collectives"))


def fresh_process(report: RankReport) -> None:
    where = "in the checkpoint of step 2, loaded by a fresh process"
    expected: Places = {(check, where): SHORT.names[check] for check in RESTORED}
    bytes_in_tensors = {"train_state.step", "train_state.current_loss"}
    assert places_of(report) == expected | {("files_equal", where): SHORT.keys | bytes_in_tensors}


def test_a_fresh_process_looks_at_all_that_was_saved() -> None:
    ran = passed(run_alone(**SMALL, verify="deep"))
    saving, fresh = ran.reports
    assert places_of(saving) == save_load()
    fresh_process(fresh)
    assert ran.left == ["newest.pt", "step-0001", "step-0002"]


@pytest.mark.parametrize("same_layout", [True, False])
def test_convert(same_layout: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        snapshot, "BLOCK", 1024
    )  # of a whole there is one digest, of its parts there are several
    # A second stage on one rank of two that it says it has is one of another layout.
    worlds = {} if same_layout else {"world_size": 2}
    ran = run_alone(**SMALL, scenario="convert", verify="deep", **worlds)
    saving, loading, fresh = ran.reports
    assert places_of(saving) == SHORT.saved(1, 2) | SHORT.twin()
    expected = SHORT.loaded(2, 1, again=False, source=False) | absent_key(2)
    for step in (1, 2):
        where = f"in the checkpoint of step {step}"
        expected |= SHORT.equal(where) | SHORT.resumed(step, exactly=same_layout)
        expected[("files_unchanged", where)] = FILES
        if not same_layout:  # what its ranks draw next is of no use to others
            del expected["random_equal", where]
    assert places_of(loading) == expected
    fresh_process(fresh)
    assert not ran.verdict.failed
    assert ran.verdict.status == "pass" or not same_layout
    assert ran.left == ["handover.pt", "newest.pt", "step-0001", "step-0002"]


def test_losses_of_ranks_that_draw_otherwise_are_held_against_none_but_their_own() -> None:
    """Neither against the twin's, nor against those of another layout."""
    with group_of_one() as group:
        ran = run_alone(
            **{**SMALL, "model": "dropout"},
            scenario="convert",
            parallel="ddp",
            world_size=2,
            seen_by=world(group=group),
        )
    assert not ran.verdict.failed
    saving, loading = ran.reports
    assert saving.not_applied.keys() == {"loss_twin_close", "state_twin_close"}
    assert loading.not_applied.keys() == {"loss_twin_close", "loss_resume_close"}
    for report in ran.reports:
        assert not report.not_applied.keys() & report.checks.keys()


def once(step: int, looked: Looked = SHORT) -> Places:
    """A scenario that saves twice and loads once."""
    return looked.saved(1, 2) | looked.twin() | looked.restart(step)


def test_partial_load() -> None:
    where = "in the checkpoint of step 2"
    ran = passed(run_alone(**SMALL, scenario="partial_load"))
    assert places_of(ran.reports[0]) == {
        **once(2),
        **SHORT.loaded(2, again=True),
        ("model_equal", f"read by the key model {where}"): SHORT.names["model_equal"],
        ("optim_equal", f"read by the key optimizer.state {where}"): {
            name.removeprefix("state.") for name in SHORT.state
        },
        ("contract_held", f"read by the key model {where}"): {"model"},
        ("contract_held", f"read by the key optimizer.state {where}"): {"optimizer.state"},
        ("contract_held", f"not loaded {where}"): SHORT.restored - SHORT.names["model_equal"],
    }


def test_in_place() -> None:
    target = trained(config(**SMALL))
    paths = set(in_place._places({name: each.state_dict() for name, each in target.state().items()}))
    ran = passed(run_alone(**SMALL, scenario="in_place"))
    where = "after the load in the checkpoint of step 2"
    assert places_of(ran.reports[0]) == once(2) | {("contract_held", where): paths}


def test_overwrite() -> None:
    ran = passed(run_alone(**SMALL, scenario="overwrite"))
    # What was in the one place is gone, and what was elsewhere was the control.
    expected = once(2) | SHORT.saved(3, first=False) | {("contract_held", "of the save"): {"refusal"}}
    del expected["files_unchanged", "in the checkpoint of step 1"]
    assert places_of(ran.reports[0]) == expected


def test_stateful_or_not() -> None:
    where = "in the checkpoint of step 2"
    ran = passed(run_alone(**SMALL, scenario="stateful_or_not"))
    plain = controllable(snapshot_nested(plain_values(world().device, 1)))
    beside = {f"plain.{name}" for name in plain} | {"stateful.data"}
    expected = once(2) | {("contract_held", where): {"plain", "stateful"}}
    expected["extra_equal", where] = SHORT.names["extra_equal"] | beside
    assert places_of(ran.reports[0]) == expected


def keyed(*keys: object) -> set[str]:
    return {f"keyed.{each}.{key}" for each in ("values", "tensors") for key in keys}


def test_an_object_that_has_shrunk() -> None:
    where = "in the checkpoint of step 2"
    ran = passed(run_alone(**SMALL, scenario="shrunk_object"))
    expected = once(2) | {("contract_held", f"of a load with more keys {where}"): {"refusal"}}
    expected["extra_equal", where] = SHORT.names["extra_equal"] | keyed("one")
    assert places_of(ran.reports[0]) == expected


@pytest.mark.parametrize(("scenario", "keys"), [("grown_object", ("one", "two")), ("integer_keys", (1, 2))])
def test_an_object_that_does_not_come_back(scenario: str, keys: tuple[object, ...]) -> None:
    where = "in the checkpoint of step 2"
    ran = run_alone(**SMALL, scenario=scenario)
    expected = once(2)
    expected["extra_equal", where] = SHORT.names["extra_equal"] | keyed(*keys)
    assert places_of(ran.reports[0]) == expected
    assert [one.check for one in ran.verdict.failed] == ["extra_equal"]
    assert unexplained(ran, scenario.replace("_", "-")) == set()


def test_a_load_into_another_dtype_has_to_be_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    where = "of a load into bfloat16 in the checkpoint of step 2"
    ran = run_alone(**SMALL, scenario="other_dtype")
    assert places_of(ran.reports[0]) == once(2) | {("contract_held", where): {"refusal"}}
    assert [one.check for one in ran.verdict.failed] == ["contract_held"]
    assert unexplained(ran, "other-dtype") == set()
    load = dcp.load

    def refusing(state_dict: dict[str, Any], **given: Any) -> None:
        if state_dict.get("typed", {"tensor": torch.zeros(1)})["tensor"].dtype == torch.bfloat16:
            raise dcp.CheckpointException("load", {0: _wrap_exception(ValueError("another dtype"))})
        load(state_dict, **given)

    monkeypatch.setattr(dcp, "load", refusing)
    passed(run_alone(**SMALL, scenario="other_dtype"))


def test_key_order() -> None:
    where = "in the checkpoint of step 2"
    with group_of_one() as group:
        ran = passed(run_alone(**SMALL, scenario="key_order", seen_by=world(group=group)))
    beside = {f"{each}.{name}" for each in ("gathering", "summing") for name in ("data", "seen")}
    expected = once(2)
    expected["extra_equal", where] = SHORT.names["extra_equal"] | beside
    assert places_of(ran.reports[0]) == expected


@pytest.mark.parametrize("scenario", ["fine_tune", "fine_tune_submodules"])
def test_fine_tune(scenario: str, tmp_path: Path) -> None:
    given = config(**SMALL, scenario=scenario)
    tuning = Looked(fine_tune._tuning(bare_cell(tmp_path, given), 3).config)
    parameters, pretrained = tuning.names["model_equal"], SHORT.names["model_equal"]
    expected = SHORT.saved(1) | tuning.saved(1, 2, first=False) | tuning.twin() | tuning.restart(2, 1)
    for step in (1, 2):
        expected[("contract_held", f"in the checkpoint of step {step}")] = parameters
        expected[("model_equal", f"after the restart from step {step}")] = pretrained
    del expected["contract_held", "of a load of an absent key in the checkpoint of step 2"]
    expected |= absent_key(1) | tuning.loaded(2, 1, again=True)
    # What both runs have looked at under one name.
    both = ("side_effect_free", "files_equal", "state_twin_close")
    own = SHORT.saved(1) | SHORT.twin()
    expected |= {place: names | expected[place] for place, names in own.items() if place[0] in both}
    expected[("side_effect_free", "after the load of step 1")] |= SHORT.all
    for where in ("before the fine-tuning", "after the fine-tuning"):
        expected[("model_equal", where)] = pretrained
    ran = passed(run_alone(**SMALL, scenario=scenario))
    assert places_of(ran.reports[0]) == expected
