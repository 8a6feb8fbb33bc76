"""Known failures: what is listed, and nothing beside it."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from dcpbench.config.errors import ConfigError
from dcpbench.config.schema import conf_folder
from dcpbench.executors.base import Outcome
from dcpbench.records.findings import Finding, Problem, RaisedError
from dcpbench.records.rank_report import CheckReport, RankReport
from dcpbench.records.sentences import short_reason
from dcpbench.sweep.plan.known_failures import KnownError, KnownFailure, KnownMismatch, listed, read
from dcpbench.sweep.run.verdict import verdict_of
from support.jobs import job

LISTED = KnownFailure(
    id="moments",
    cells={"parallel": ["ddp", "fsdp"]},
    torch=">=2.11,<3",
    checks={"optim_equal": [KnownMismatch(r"state\.w\..*", ["missing"])]},
    reason="a test",
)


def after(
    outcome: Outcome, known: KnownFailure = LISTED, torch: str = "2.13.0+cpu", **columns: object
) -> str:
    """The status that a cell ends with."""
    about = {"torch_version": torch, "parallel": "ddp", **columns}
    listed = (known,) if known.covers(about) else ()
    return verdict_of(job(known=listed, **about), [outcome]).status


def powered() -> list[RankReport]:
    """Four ranks, of which each has looked at one name, with a control that has fired."""
    names = {"": {"w": True}}
    checks = ("model_equal", "optim_equal")
    return [
        RankReport(rank, {check: CheckReport(compared=names, control=names) for check in checks})
        for rank in range(4)
    ]


def failing(failed: dict[str, list[str]]) -> Outcome:
    """Ranks whose checks report these names."""
    reports = powered()
    for report in reports:
        for check, names in failed.items():
            report.checks[check].add([Finding(name, Problem.missing) for name in names])
    return Outcome(reports)


def test_one_that_does_not_happen_always_may_pass() -> None:
    assert after(failing({}), replace(LISTED, always=False)) == "pass"
    assert after(failing({"optim_equal": ["state.w.exp_avg"]}), replace(LISTED, always=False)) == "xfail"


def test_cells_are_told_by_keys_of_their_configuration_too() -> None:
    overlapping = replace(LISTED, cells={"overlap_saves": True})
    overlapping.check()
    row = {"torch_version": "2.13.0"}
    assert overlapping.covers({**row, "config": {"overlap_saves": True}})
    assert not overlapping.covers({**row, "config": {"overlap_saves": False}})


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


def test_what_is_beside_a_known_failure_is_told_first() -> None:
    names = ["state.w.exp_avg", "param_groups.0.lr", "param_groups.0.eps"]
    reason = str(verdict_of(job(known=(LISTED,)), [failing({"optim_equal": names})]).reason)
    beside = "optim_equal: param_groups.0.lr: saved, but missing after the load, and 1 more"
    told = f"beside known failure moments: {beside}"
    assert reason.startswith(f"{told}; seen as optim_equal: rank 0: state.w.exp_avg")
    assert short_reason({"status": "fail", "reason": reason}) == told
    alone = verdict_of(job(known=(LISTED,)), [failing({"model_equal": ["w"]})])
    assert str(alone.reason).startswith("model_equal: rank 0: w")


def differing(**about: object) -> Finding:
    """A finding as an entry may ask for it."""
    given = {"name": "state.w.exp_avg", "problem": Problem.differs, "by": "sliced", "where": "at step 2"}
    share = about.pop("share", 0.5)
    facts = dict.fromkeys(("index", "saved", "saved_bits", "restored", "restored_bits"), "0")
    facts |= {"differing": 1, "elements": 1} | ({} if share is None else {"share": share})
    return Finding(**{"max_abs_diff": 1.0, **given, **about}, facts=facts)  # type: ignore[arg-type]


CLOSELY = KnownFailure(
    id="closely",
    torch=">=2",
    checks={
        "optim_equal": [
            KnownMismatch(r"state\.w\..*", ["differs"], by="sliced", within=1.0, where=r"at step \d")
        ]
    },
    reason="a test",
)


@pytest.mark.parametrize(
    ("beside", "expected"),
    [
        ({"name": "state.w.exp_avg_sq"}, "xfail"),
        ({"problem": Problem.nan}, "fail"),
        ({"problem": Problem.missing}, "fail"),
        ({"problem": Problem.dtype}, "fail"),
        ({"by": None}, "fail"),
        ({"by": "another"}, "fail"),
        ({"share": 1.5}, "fail"),
        ({"share": None}, "fail"),
        ({"share": math.nan}, "fail"),
        ({"where": "after the restart"}, "fail"),
    ],
)
@pytest.mark.parametrize("rank", [0, 3])
def test_kind_magnitude_mechanism_and_place_are_what_is_known(
    beside: dict[str, object], expected: str, rank: int
) -> None:
    """Of every rank, and of more names than a report shows."""
    reports = powered()
    many = [differing(name=f"state.w.{number}", share=0.9) for number in range(20)]
    for report in reports:
        report.checks["optim_equal"].add(many)
    reports[rank].checks["optim_equal"].add([differing(**beside)])
    assert after(Outcome(reports), CLOSELY) == expected


def test_the_farthest_of_one_name_counts() -> None:
    reports = powered()
    reports[0].checks["optim_equal"].add([differing(), differing(share=2.0), differing()])
    assert after(Outcome(reports), CLOSELY) == "fail"


def test_what_two_defects_make_of_one_name_is_found_twice() -> None:
    report = CheckReport()
    report.add([differing(by=by) for by in ("one", "other", None)])
    assert [one.by for one in report.distinct.values()] == ["one", "other", None]


def test_a_cell_without_power_is_vacuous_before_it_is_known() -> None:
    outcome = failing({"optim_equal": ["state.w.exp_avg"]})
    for report in outcome.reports:
        report.checks["model_equal"].control = {"": {"w": False}}
    verdict = verdict_of(job(known=(LISTED,)), [outcome])
    assert verdict.status == "vacuous"
    assert str(verdict.reason).startswith("model_equal: its control did not report w (known failure moments")


def test_every_rank_that_raised_is_to_be_known() -> None:
    listed = KnownFailure(id="e", torch=">=2", error=KnownError("KeyError", ["load"]), reason="x")
    known, other = RaisedError(0, "load", "KeyError", "'a'"), RaisedError(1, "load", "ValueError", "no")
    assert after(Outcome([], "error", known, raised=(known, replace(known, rank=1))), listed) == "xfail"
    assert after(Outcome([], "error", known, raised=(known, other)), listed) == "error"


def test_what_two_entries_list_together_is_known() -> None:
    """One of them alone is not enough, and an error is known only where it was raised."""
    names = KnownFailure(id="names", torch=">=2", error=KnownError("KeyError", ["load"]), reason="x")
    raised = RaisedError(0, "load", "KeyError", "'a'")
    seen = failing({"optim_equal": ["state.w.exp_avg"]}).reports
    outcome = Outcome(seen, "error", raised)
    verdict = verdict_of(job(known=(LISTED, names)), [outcome])
    assert verdict.status == "xfail"
    assert str(verdict.reason).startswith("known failure moments, names: a test; x; seen as rank 0 in load")
    assert verdict_of(job(known=(LISTED,)), [outcome]).status == "error"
    assert verdict_of(job(known=(names,)), [outcome]).status == "error"


def test_what_an_earlier_stage_found_counts_where_a_later_one_raised() -> None:
    listed = KnownFailure(id="e", torch=">=2", error=KnownError("KeyError", ["load"]), reason="x")
    raised = Outcome([], "error", RaisedError(0, "load", "KeyError", "'a'"))
    assert verdict_of(job(known=(listed,)), [failing({}), raised]).status == "xfail"
    assert verdict_of(job(known=(listed,)), [failing({"model_equal": ["w"]}), raised]).status == "error"


def test_other_cells_and_other_versions_are_not_covered() -> None:
    failed = {"optim_equal": ["state.w.exp_avg"]}
    assert after(failing(failed), parallel="hsdp") == "fail"
    assert after(failing(failed), torch="2.10.1") == "fail"


def test_a_listed_error_is_expected_and_no_other() -> None:
    listed = KnownFailure(
        id="names",
        cells={"parallel": "ddp"},
        torch=">=2",
        error=KnownError(type="KeyError", phases=["load"], message="'a.*'"),
        checks={"model_equal": [KnownMismatch("w.*", ["missing"])]},
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
        seen = RankReport(1, {check: CheckReport()})
        seen.checks[check].add([Finding(name, Problem.missing)])
        outcome = Outcome([], "error", error, before=[seen])
        assert after(outcome, listed) == expected, "nothing hides beside it"
        assert after(Outcome([seen], "error", error), listed) == expected, "nor on a rank that went on"
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


def test_a_cell_is_known_by_a_key_within_a_group_too() -> None:
    listed = replace(LISTED, cells={"storage.options.overwrite": [None, True]})
    listed.check()
    for config, covered in (({}, True), ({"storage.options.overwrite": False}, False)):
        assert listed.covers({"torch_version": "2.13.0", "config": config}) is covered


def test_a_cell_is_known_by_the_torch_that_loads_too() -> None:
    listed = replace(LISTED, cells={}, load_torch="<2.13")
    listed.check()
    for loads, covered in (("2.12.1", True), ("2.13.0+cpu", False), (None, False)):
        assert listed.covers({"torch_version": "2.13.0", "load_torch_version": loads}) is covered


def test_the_list_of_the_house_is_whole() -> None:
    known = read(conf_folder() / "known_failures.yaml")
    assert {each.id for each in known} == {
        "fsdp1-tp-optimizer-state",
        "fsdp1-tp-unfreezes",
        "tensor-lr-in-defaults",
        "compiled-fsdp1-names",
        "compiled-mutated-buffer",
        "fsdp1-one-shard",
        "stager-used-once",
        "shared-stager",
        "shared-writer",
        "writer-threads",
        "state-of-frozen",
        "state-in-low-precision",
        "unfrozen-in-bf16",
        "load-without-collectives",
        "full-state-dict-tuples",
        "full-state-dict-tp",
        "empty-param-group",
        "state-of-no-gradient",
        "buffers-of-some-rank",
        "integer-keys",
        "grown-object",
        "gradients-at-load",
        "scheduler-after-load",
        "plain-optimizer-fsdp1",
        "several-optimizers-fsdp1",
        "data-loader-generator",
        "metadata-of-newer-torch",
        "local-experts",
        "other-dtype",
        "broadcast-ddp",
        "file-writer-safetensors",
        "safetensors-values",
        "consolidated-integers",
        "consolidated-scalars",
        "pipeline-param-groups",
        "compiled-in-checkpoint-wrapper",
        "gradient-divide-factor",
        "flat-fsdp1-names",
    }
    for each in listed():
        assert each.link is not None
        assert (Path(__file__).parents[2] / each.link).is_file()


def one_listed(mismatch: str) -> str:
    """A list with one entry of one mismatch."""
    return f"- {{id: a, torch: '>=2', checks: {{model_equal: [{mismatch}]}}, reason: b}}"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("- {id: a, torch: '>=2', checks: {nope: []}, reason: b}", "no check 'nope'"),
        ("- {id: a, cells: {nope: 1}, torch: '>=2', checks: {model_equal: []}, reason: b}", "no column"),
        ("- {id: a, torch: new, checks: {model_equal: []}, reason: b}", "new"),
        (one_listed("{name: '(', problems: [differs]}"), "known_failures="),
        (one_listed("{name: a, problems: [wrong]}"), "no problem 'wrong'"),
        (one_listed("{name: a}"), "problems"),
        (one_listed("{name: a, problem: differs}"), "problem"),
        (one_listed(".*"), "known_failures="),
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
