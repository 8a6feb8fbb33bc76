"""Known failures: what is listed, and nothing beside it."""

from pathlib import Path

import pytest

from dcpbench.config.errors import ConfigError
from dcpbench.config.schema import conf_folder
from dcpbench.executors.base import Outcome
from dcpbench.records.findings import Finding, Problem, RaisedError
from dcpbench.records.rank_report import CheckReport, RankReport
from dcpbench.sweep.plan.known_failures import KnownError, KnownFailure, read
from dcpbench.sweep.run.verdict import verdict_of
from support.jobs import job

LISTED = KnownFailure(
    id="moments",
    cells={"parallel": ["ddp", "fsdp"]},
    torch=">=2.11,<3",
    checks={"optim_equal": r"state\.w\..*"},
    reason="a test",
)


def after(
    outcome: Outcome, known: KnownFailure = LISTED, torch: str = "2.13.0+cpu", **columns: object
) -> str:
    """The status that a cell ends with."""
    about = {"torch_version": torch, "parallel": "ddp", **columns}
    listed = (known,) if known.covers(about) else ()
    return verdict_of(job(known=listed, **about), [outcome]).status


def failing(failed: dict[str, list[str]]) -> Outcome:
    """A rank whose checks report these names."""
    checks = {
        "model_equal": CheckReport(control={"w": True}),
        "optim_equal": CheckReport(control={"w": True}),
    }
    for check, names in failed.items():
        checks[check].add([Finding(name, Problem.missing) for name in names])
    return Outcome([RankReport(0, checks)])


def test_a_listed_failure_is_expected() -> None:
    assert after(failing({"optim_equal": ["state.w.exp_avg"]})) == "xfail"


@pytest.mark.parametrize(
    "failed",
    [
        {"model_equal": ["w"]},
        {"optim_equal": ["state.w.exp_avg"], "model_equal": ["w"]},
        {"optim_equal": ["state.w.exp_avg", "param_groups.0.lr"]},
    ],
)
def test_anything_beside_it_is_a_failure(failed: dict[str, list[str]]) -> None:
    assert after(failing(failed)) == "fail"


def test_other_cells_and_other_versions_are_not_covered() -> None:
    failed = {"optim_equal": ["state.w.exp_avg"]}
    assert after(failing(failed), parallel="hsdp") == "fail"
    assert after(failing(failed), torch="2.10.1") == "fail"


def test_a_listed_error_is_expected_and_no_other() -> None:
    listed = KnownFailure(
        id="names",
        cells={"parallel": "ddp"},
        torch=">=2",
        error=KnownError(type="KeyError", phase="load", message="'a.*'"),
        checks={"model_equal": "w.*"},
        reason="x",
    )
    for error, expected in (
        (RaisedError(3, "load", "KeyError", "'a'"), "xfail"),
        (RaisedError(3, "save", "KeyError", "'a'"), "error"),
        (RaisedError(3, "load", "ValueError", "'a'"), "error"),
        (RaisedError(3, "load", "KeyError", "'b'"), "error"),
    ):
        assert after(Outcome([], "error", error), listed) == expected
    error = RaisedError(3, "load", "KeyError", "'a'")
    for check, name, expected in (
        ("model_equal", "w", "xfail"),
        ("model_equal", "v", "error"),
        ("optim_equal", "w", "error"),
    ):
        before = {check: CheckReport()}
        before[check].add([Finding(name, Problem.missing)])
        assert after(Outcome([], "error", error, before=before), listed) == expected, (
            "nothing hides beside it"
        )
    assert after(failing({"model_equal": ["w"]}), listed) == "fail", "the error is what is known"


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (failing({}), "xpass"),
        (Outcome([RankReport(0)]), "vacuous"),
        (Outcome([], "error", RaisedError(0, "load", "KeyError", "'a'")), "error"),
        (Outcome([RankReport(0, skip="no")]), "skip"),
    ],
)
def test_what_did_not_fail(outcome: Outcome, expected: str) -> None:
    assert after(outcome) == expected


def test_the_list_of_the_house_is_whole() -> None:
    known = read(conf_folder() / "known_failures.yaml")
    assert {each.id for each in known} == {
        "fsdp1-tp-optimizer-state",
        "fsdp1-tp-unfreezes",
        "compiled-fsdp1-names",
        "compiled-mutated-buffer",
        "fsdp1-one-shard",
    }
    for each in known:
        assert each.link is not None
        assert (Path(__file__).parents[2] / each.link).is_file()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("- {id: a, torch: '>=2', checks: {nope: .*}, reason: b}", "no check 'nope'"),
        ("- {id: a, cells: {nope: 1}, torch: '>=2', checks: {model_equal: .*}, reason: b}", "no column"),
        ("- {id: a, torch: new, checks: {model_equal: .*}, reason: b}", "new"),
        ("- {id: a, torch: '>=2', checks: {model_equal: '('}, reason: b}", "known_failures="),
        ("- {ids: a}", "ids"),
        ("- {id: a, torch: '>=2', reason: b}", "neither checks nor an error"),
        ("- {id: a, torch: '>=2', error: {type: KeyError}, reason: b}", "missing mandatory value: phase"),
        ("- [", "known_failures="),
    ],
)
def test_a_list_that_is_wrong_is_refused(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "known.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=told):
        read(path)
