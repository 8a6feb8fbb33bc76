"""Verdicts on cells with an injected fault: whether it was detected as it is expected to be."""

from dataclasses import replace

import pytest

from dcpbench.config.groups import Expect, FaultConfig, ScenarioConfig
from dcpbench.config.schema import Config
from dcpbench.core.mismatch import Problem, RaisedError
from dcpbench.core.rank_report import RankReport
from dcpbench.core.stage_end import StageEnd
from support.ends import finding, raised, reported, reports
from support.jobs import job

PLANTED = FaultConfig(
    name="lr",
    target="x.y",
    expects=[
        Expect(check="optim_equal", name=r"param_groups\.0\.lr", rank=-1),
        Expect(phases=["load"], error="KeyError", message="initial_lr"),
    ],
)


CONFIG = Config(scenario=ScenarioConfig(name="a", target="x"), world_size=2, fault=PLANTED)


def with_fault(end: StageEnd) -> bool | None:
    return job(CONFIG).verdict([end]).fault_seen


@pytest.mark.parametrize(
    ("rank", "check", "name", "seen"),
    [
        (1, "optim_equal", "param_groups.0.lr", True),
        (0, "optim_equal", "param_groups.0.lr", False),
        (1, "model_equal", "param_groups.0.lr", False),
        (1, "optim_equal", "param_groups.0.lr_other", False),
    ],
)
def test_fault_matches_check_rank_and_name(rank: int, check: str, name: str, seen: bool) -> None:
    found = reports()
    found[rank].checks[check].add([finding(name, "differs")])
    assert with_fault(reported(found)) is seen


@pytest.mark.parametrize(
    ("phase", "error", "message", "seen"),
    [
        ("load", "KeyError", "'initial_lr'", True),
        ("save", "KeyError", "'initial_lr'", False),
        ("load", "ValueError", "'initial_lr'", False),
        ("load", "KeyError", "'lr'", False),
    ],
)
def test_error_in_a_load_can_detect_a_fault(phase: str, error: str, message: str, seen: bool) -> None:
    assert with_fault(raised(RaisedError(1, phase, error, message))) is seen


def test_fault_without_a_target_is_a_skip() -> None:
    error = RaisedError(1, "load", "NothingToInjectError", "it would change nothing there")
    verdict = job(CONFIG).verdict([raised(error)])
    assert (verdict.status, verdict.reason) == ("skip", "fault=lr: it would change nothing there")
    found = reports()
    found[1].checks["optim_equal"].add([finding("param_groups.0.lr", "differs")])
    assert job(CONFIG).verdict([raised(error, before=found)]).fault_seen
    other = Config(scenario=CONFIG.scenario, world_size=2)
    assert job(other).verdict([raised(error)]).status == "error"


def test_missed_fault_names_what_was_expected() -> None:
    verdict = job(CONFIG).verdict([reported(reports())])
    assert verdict.status == "pass"
    assert verdict.fault_seen is False
    assert verdict.reason is not None
    assert verdict.reason.startswith("fault=lr was not detected as optim_equal on rank 1 of ")
    assert verdict.reason.endswith("KeyError in load (initial_lr): nothing failed")


def test_expectation_lists_only_its_fields() -> None:
    asked = replace(PLANTED, expects=[Expect(check="optim_equal")])
    config = replace(CONFIG, fault=asked)
    verdict = job(config).verdict([reported(reports())])
    assert verdict.reason == "fault=lr was not detected as optim_equal: nothing failed"
    asked = [Expect(phases=["load"], error="KeyError"), Expect(check="optim_equal", problem=Problem.differs)]
    config = replace(config, fault=replace(PLANTED, expects=asked))
    verdict = job(config).verdict([reported(reports())])
    assert verdict.reason == (
        "fault=lr was not detected as KeyError in load or optim_equal (differs): nothing failed"
    )
    skipped = job(config).verdict([reported([RankReport(rank, skip="no") for rank in range(2)])])
    assert (skipped.status, skipped.reason, skipped.fault_seen) == ("skip", "no", None)
