"""A user's trainer, which saves and loads itself, with `checkpointer=trainer`."""

import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import ONE_STEP, Finished, blocks, run, selected
from dcpbench.analysis.causes import causes_of, short_reason
from dcpbench.compose import limits
from dcpbench.config.errors import ConfigError
from dcpbench.config.groups import WorkloadConfig
from dcpbench.core.checks import CHECKS
from dcpbench.report.page.data import why_null
from dcpbench.runs.own_trainer import TrainerRun
from dcpbench.twin import lockstep
from dcpbench.verdict.verdict import Verdict
from dcpbench.workloads.generators import ALL, RandomState
from support.alone import config, group_of_one, run_alone, world
from support.notes import noted, why_not

NOT_MADE = {
    "checkpoint_whole": "only the trainer can read its files",
    "files_equal": "only the trainer can read its files",
    "contract_held": "only the trainer can read its files",
    **dict.fromkeys(lockstep.TRAINING_CHECKS, "the trainer draws its batches itself"),
    "replicas_equal": "it is compared under ddp",
}


def judged(trainer: str, resume_steps: int = 1) -> Verdict:
    """Return the verdict on a trainer on one rank."""
    workload = {"target": f"support.trainers.{trainer}"}
    steps = {"saves": 1, "train_steps": 4, "resume_steps": resume_steps}
    return run_alone(checkpointer="trainer", workload=workload, **steps).verdict


def failing(verdict: Verdict) -> dict[str, str]:
    """Return the name of the first mismatch of each failed check."""
    return {one.check: one.first.name for one in verdict.failed}


def test_complete_trainer_passes_and_explains_nulls() -> None:
    verdict = judged("Trainer")
    assert verdict.status == "pass", verdict.reason
    held = {check for check, one in verdict.checks.items() if one}
    restored = {"model_equal", "optim_equal", "extra_equal", "flags_equal"}
    after = {
        "loss_resume_equal",
        "state_resume_equal",
        "save_harmless",
        "side_effect_free",
        "files_unchanged",
    }
    assert held == restored | after
    (rank,) = verdict.details["ranks"]
    assert why_not(rank).keys() == NOT_MADE.keys()
    for check, why in NOT_MADE.items():
        assert why_not(rank)[check].startswith(why)
    compared = verdict.details["checks"]
    loaded = "in the checkpoint of step 4"
    ended = "after the checkpoint of step 4"
    for check, name in (
        ("extra_equal", f"order.state {loaded}"),
        ("optim_equal", f"state.3.weight.exp_avg {loaded}"),
        ("state_resume_equal", f"scheduler.last_epoch {ended}"),
        ("state_resume_equal", f"progress.step {ended}"),
    ):
        assert compared[check]["control"][name], name
    names = {name.partition(" ")[0] for name in compared["extra_equal"]["control"]}
    assert names == {"order.state"}, "nothing is compared that training does not change"


SEEN = {
    "ForgetsTheScheduler": {"state_resume_equal": "scheduler.last_epoch"},
    "ForgetsTheGenerators": {"loss_resume_equal": ""},
    "ForgetsTheOrder": {"extra_equal": "order.state", "loss_resume_equal": ""},
    "OneStepOff": {"state_resume_equal": "progress.step"},
    "LosesItsAverage": {"state_resume_equal": "average.mean"},
    "DrawsByAClosure": {"loss_resume_equal": ""},
    "SavesViews": {"model_equal": "0.weight", "loss_resume_equal": ""},
    "ForgetsTheSecond": {"optim_equal": "state.3.weight.momentum_buffer"},
    "RoundsItsMainWeights": {"optim_equal": "params.group0.0", "extra_equal": ""},
    "ForgetsItsDefault": {"state_resume_equal": "last"},
    "ForgetsAPair": {"extra_equal": ""},
    "ForgetsAWord": {"extra_equal": "words"},
    "ForgetsAReader": {},
    "ForgetsItsFirstBest": {},
    "ForgetsItsCount": {"state_resume_equal": "optimizer.0.steps"},
}


@pytest.mark.cell
@pytest.mark.parametrize("trainer", SEEN)
def test_trainer_mistakes_are_reported(trainer: str) -> None:
    seen = SEEN[trainer]
    verdict = judged(trainer)
    assert verdict.status == "fail", verdict.reason
    found = failing(verdict)
    assert found.keys() == {*seen, "state_resume_equal"}, verdict.reason
    for check, name in seen.items():
        assert name in ("", found[check])


@pytest.mark.cell
@pytest.mark.parametrize(
    "trainer",
    [
        *("SavesInTheBackground", "Two", "SaysWhatIsNone", "DrawsNothing", "BeginsLate"),
        *("Collects", "SavesNoOptimizer", "LeavesOutTheSecond", "TrainsMainWeights"),
    ],
)
def test_correct_trainer_passes(trainer: str) -> None:
    verdict = judged(trainer)
    assert verdict.status == "pass", verdict.reason


@pytest.mark.cell
def test_forgotten_generators_are_told_and_fail_nothing() -> None:
    alone, needed = judged("DrawsInVain"), judged("ForgetsTheGenerators")
    assert (alone.status, alone.checks["random_equal"]) == ("pass", None), alone.reason
    told = [why_not(one.details["ranks"][0])["random_equal"] for one in (alone, needed)]
    drawn = "cpu: drawn from and not restored"
    assert told == [f"{drawn}; no step of the window depended on it", drawn]


@pytest.mark.cell
def test_state_that_is_saved_too_early_after_a_resume_is_lost() -> None:
    verdict, right = judged("SavesTooEarly", 3), judged("Collects", 3)
    assert (verdict.status, right.status) == ("fail", "pass"), right.reason
    assert "after the checkpoint of step 5, saved again" in verdict.reason


@pytest.mark.cell
def test_lost_average_is_explained() -> None:
    verdict = judged("LosesItsAverage")
    row = {"status": verdict.status, "checkpointer": "trainer", **verdict.checks}
    assert causes_of(row)[0].startswith("The resumed losses are equal, but")


@pytest.mark.cell
def test_value_beside_infinity_is_printed() -> None:
    verdict = judged("ForgetsItsBest")
    row = {"status": verdict.status, "details": verdict.details, **verdict.checks}
    best = r"extra_equal: best: saved 0\.\d+, restored inf, rank 0"
    assert re.match(best, short_reason(row)), short_reason(row)
    told = dict(why_null({**dict.fromkeys(CHECKS), **row}))
    assert told["random_equal"].startswith("applies to cells without a trainer")


@pytest.mark.cell
def test_lost_attribute_that_a_step_makes_again_is_reported() -> None:
    verdict = judged("LosesADictionary")
    assert (verdict.status, failing(verdict)) == ("fail", {"extra_equal": "seen.first"})


@pytest.mark.cell
def test_values_of_modules_are_listed_and_fail_nothing() -> None:
    alone, beside = judged("CountsInAModule"), judged("CountsAndForgets")
    assert (alone.status, beside.status) == ("pass", "fail"), alone.reason
    for verdict in alone, beside:
        assert noted(verdict.details["ranks"][0], "in_no_state_dict")["model.0.calls"] == "5, resumed 1"


@pytest.mark.cell
def test_value_that_is_lost_in_an_object_is_shown_with_a_pass() -> None:
    verdict = judged("MeasuresItsBest")
    assert verdict.status == "pass", verdict.reason
    assert noted(verdict.details["ranks"][0], "in_no_state_dict") == {
        "progress.best": "5.0, after the load inf"
    }


@pytest.mark.cell
def test_unreadable_attribute_is_reported() -> None:
    verdict = judged("Unlucky")
    assert verdict.status == "pass", verdict.reason
    row = {"status": verdict.status, **verdict.checks, "details": verdict.details}
    assert ["extra_equal of batches", "a range_iterator has no state that can be read"] in why_null(row)


@pytest.mark.cell
def test_rate_that_each_step_sets_need_not_be_loaded() -> None:
    with group_of_one() as group:
        right, wrong = (
            run_alone(
                checkpointer="trainer",
                workload={"target": f"support.trainers.{name}"},
                saves=1,
                train_steps=2,
                resume_steps=2,
                seen_by=world(group=group),
            ).verdict
            for name in ("SavesWithinZero", "ForgetsItsRate")
        )
    assert (right.status, wrong.status) == ("pass", "fail"), right.reason


@pytest.mark.cell
@pytest.mark.parametrize(
    ("name", "raised", "text"),
    [("MakesAWrongSchedule", ValueError, "total_steps"), ("HasNoData", StopIteration, "")],
)
def test_mistake_in_a_first_step_is_no_end(name: str, raised: type[Exception], text: str) -> None:
    with pytest.raises(raised, match=text or None):
        run_alone(checkpointer="trainer", workload={"target": f"support.trainers.{name}"})


def test_wrong_trainer_is_refused() -> None:
    given = config(checkpointer="trainer")
    with pytest.raises(ConfigError, match=r"checkpointer=trainer: workload.target=null"):
        limits.refuse_impossible(given)
    given.workload = WorkloadConfig("support.trainers.no_trainer")
    limits.refuse_impossible(given)
    lacks = (
        r"target=support.trainers.no_trainer: returned a object without model, step, save, load, optimizer"
    )
    with pytest.raises(TypeError, match=lacks):
        TrainerRun(given, world(), 0)


def test_each_trainer_has_its_own_generators() -> None:
    generators = RandomState(1, 0, torch.device("cpu"), ALL)
    before = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())

    def drawn() -> tuple[float, float, float]:
        with generators.drawn_from():
            return float(torch.rand(1)), random.random(), float(np.random.rand())

    first, second = drawn(), drawn()
    generators.seed(1)
    assert (drawn(), drawn()) == (first, second)
    assert all(one != other for one, other in zip(first, second, strict=True))
    after = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


AROUND = "GoesAroundDDP", "MeansToGoAround"


@pytest.fixture(scope="module")
def sweep(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    alone = {"parallel": "none", "world_size": 1, "saves": 1}
    cells = [
        {"workload.target": "support.trainers.KeepsItInMemory", **alone},
        {"workload.target": "support.trainers.KeepsItInMemory", "restart": False, "seed": 1, **alone},
        {
            "workload.target": "support.trainers.Trainer",
            "parallel": ",".join(selected(request, "parallel") or ["fsdp2"]),
            "world_size": 2,
            "saves": 1,
        },
    ]
    around = ",".join(f"support.trainers.{name}" for name in AROUND)
    cells.append({"workload.target": around, "parallel": "ddp", "world_size": 2, "saves": 1})
    words = ("checkpointer=trainer", "device=cpu", "retry=0", *ONE_STEP)
    return run(tmp_path_factory.mktemp("own") / "sweep", *blocks(cells), *words)


@pytest.mark.slow
def test_state_in_memory_is_missed_by_a_restart(sweep: Finished) -> None:
    restarted, same_process = sweep.rows[:2]
    assert (restarted["status"], same_process["status"]) == ("fail", "pass"), same_process["reason"]
    assert (restarted["restart"], same_process["restart"]) == ("interpreter", None)
    assert "progress.step (progress) after the checkpoint of step 1" in restarted["first_mismatch"]


@pytest.mark.slow
def test_what_loads_has_another_hash_seed_than_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    words = ("workload.target=support.trainers.KnowsItsProcess", "checkpointer=trainer", "device=cpu")
    row = run(tmp_path / "sweep", *words, "world_size=2", "parallel=ddp", "scenario=chain").rows[0]
    assert (row["status"], row["restart"]) == ("pass", "interpreter"), row["reason"]


@pytest.mark.slow
def test_replicas_stay_equal_unless_declared(sweep: Finished) -> None:
    around, declared = (sweep.row(model=f"support.trainers.{name}") for name in AROUND)
    assert (around["status"], around["resume"], around["replicas_equal"]) == ("fail", True, False)
    assert "replicas differ: rank 0 and rank 1" in around["first_mismatch"]
    assert (declared["status"], declared["replicas_equal"]) == ("pass", None)
    told = {why_not(rank).get("replicas_equal") for rank in declared["details"]["ranks"]}
    assert told == {None, "replicas_differ of the trainer is true"}, "of one stage of three"


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["none", "ddp", "fsdp2"])
def test_trainer_passes_on_ranks(sweep: Finished, parallel: str) -> None:
    row = sweep.row(model="support.trainers.Trainer", parallel=parallel, world_size=2)
    assert row["status"] == "pass", row["reason"]
    assert row["checkpointer"] == "trainer"
    assert row["checkpoint_bytes"] > 0
    assert (row["loss_twin"], row["gradient_bound"]) == (None, None)
    assert row["training"] is row["replicas_equal"] is (True if parallel == "ddp" else None)
    assert row["resume"] is True
