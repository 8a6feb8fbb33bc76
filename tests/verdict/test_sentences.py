"""Sentences of a row's reason, and its short form, which is made from values."""

import math
from typing import Any

import pytest

from dcpbench.analysis.causes import short_reason
from dcpbench.core.mismatch import (
    RESUMED,
    TWIN,
    Gap,
    GapKind,
    LimitReached,
    Mismatch,
    Place,
    Problem,
    RaisedError,
    Sides,
)
from dcpbench.core.rank_report import CheckReport, RankReport
from dcpbench.core.sentences import describe
from dcpbench.verdict.judge import failed_check
from dcpbench.verdict.sentences import (
    cause_sentence,
    check_sentence,
    gap_sentence,
    known_sentence,
    rank_numbers,
)

WORST = {"name": "net.weight", "problem": "differs", "max_abs_diff": 0.01234, "rank": 2}

BEST = {"name": "best", "problem": "value", "expected": "2.41", "actual": "inf", "rank": 2}


def failed(worst: object = (WORST,), count: object = 12, **more: Any) -> dict[str, Any]:
    listed = list(worst) if isinstance(worst, tuple) else worst
    details = {"checks": {"optim_equal": {"worst": listed, "mismatch_count": count}}}
    return {"status": "fail", "reason": "the whole of it", "optim_equal": False, "details": details, **more}


FAR = {"gradient_close": {"worst": [{**WORST, "problem": "far"}], "mismatch_count": 1}}


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (
            {**failed(optim_equal=None, gradient_close=False, step_equal=False), "details": {"checks": FAR}},
            "training: gradient_close: net.weight differs by 0.0123, rank 2, also step_equal",
        ),
        (
            failed(count=1, loss_resume_equal=False, step_equal=False),
            "optim_equal: net.weight differs by 0.0123, rank 2, also loss_resume_equal; training: step_equal",
        ),
        (failed(), "optim_equal: net.weight differs by 0.0123, rank 2 (+11 more)"),
        (
            failed(count=1, loss_resume_equal=False),
            "optim_equal: net.weight differs by 0.0123, rank 2, also loss_resume_equal",
        ),
        (failed(({"name": "net.bias", "problem": "not_stored"},), 1), "optim_equal: net.bias not stored"),
        (
            failed(({**WORST, "name": "a", "max_abs_diff": 1e-9}, WORST), 2),
            "optim_equal: net.weight differs by 0.0123, rank 2 (+1 more)",
        ),
        (failed(({**WORST, "max_abs_diff": math.inf},), 1), "optim_equal: net.weight differs, rank 2"),
        (failed(({**WORST, "max_abs_diff": 10**400},), 1), "optim_equal: net.weight differs, rank 2"),
        (failed(({"name": "lr", "problem": "value", "rank": 0},), 1), "optim_equal: lr differs, rank 0"),
        (failed((BEST,), 1), "optim_equal: best: saved 2.41, restored inf, rank 2"),
        (failed(status="xfail", reason="known failure a-b: of torch: more"), "known failure a-b"),
        ({"status": "error", "reason": "rank 0 in load: E: no (before that x: y)"}, "rank 0 in load: E: no"),
        ({"status": "timeout", "reason": "after 2 s; stacks are in the ranks' logs"}, "after 2 s"),
        ({"status": "pass", "reason": None}, ""),
        *((failed(worst), "the whole of it") for worst in ((), None, "x", ("x",), {"a": 1})),
        (failed(details=[1]), "the whole of it"),
    ],
)
def test_short_reason_is_one_line(row: dict[str, Any], told: str) -> None:
    assert short_reason(row) == told


def test_ranks_that_others_wait_for_come_first() -> None:
    phases = dict.fromkeys(range(64), "train") | {23: "build"}
    doing = dict.fromkeys(phases, "at all_gather (d.py:4)") | {23: "stopped by a signal at f (a.py:1)"}
    hosts = {rank: f"10.0.0.{rank // 8}" for rank in phases}
    limit = LimitReached("timeouts.cell_s", 15, None, phases, {}, doing, hosts)
    assert cause_sentence(limit) == (
        "after 15 s (timeouts.cell_s=15) still in build (rank 23 of host 10.0.0.2); "
        "train (rank 0-22, 24-63); rank 23 of host 10.0.0.2 stopped by a signal at f (a.py:1), "
        "rank 0-22, 24-63 at all_gather (d.py:4); stacks are in the ranks' logs"
    )


def test_an_exception_has_its_line_and_its_circumstances() -> None:
    error = RaisedError(0, "save", "OSError", "no", line="mine.py:3", note="the disk is full")
    assert cause_sentence(error) == "rank 0 in save: OSError: no (mine.py:3) (the disk is full)"


def test_known_failures_are_listed_once_each_with_its_link() -> None:
    known = [
        ("a", "torch drops it", "docs/a.md"),
        ("b", "another", None),
        ("a", "torch drops it", "docs/a.md"),
    ]
    told = "known failure a, b: torch drops it (docs/a.md); another; observed: w differs"
    assert known_sentence(known, "w differs") == told


@pytest.mark.parametrize(
    ("ranks", "told"),
    [([], ""), ([3], "3"), ([1, 0], "0, 1"), ([0, 1, 2, 4, 5, 7], "0-2, 4, 5, 7"), (range(64), "0-63")],
)
def test_rank_numbers_are_joined(ranks: list[int], told: str) -> None:
    assert rank_numbers(ranks) == told


@pytest.mark.parametrize(("count", "told"), [(1, None), (10, "n0, n1"), (12, "n9, and 2 more")])
def test_a_sentence_lists_ten_names(count: int, told: str | None) -> None:
    names = [f"n{number}" for number in range(count)]
    sentence = check_sentence("model_equal", "rank 0", Mismatch("n0", Problem.differs), names)
    assert ("differing: n0, n1" in sentence) is (count > 1)
    assert ("more" in sentence) is (count > 10)
    assert told is None or told in sentence


@pytest.mark.parametrize(
    ("hosts", "rank", "name"),
    [
        (("one", "other"), 0, "rank 0 (local rank 0 of host one)"),
        (("one", "other"), 1, "rank 1 (local rank 0 of host other)"),
        (("one", "one"), 0, "rank 0"),
    ],
)
def test_mismatch_on_several_hosts_names_the_place(hosts: tuple[str, str], rank: int, name: str) -> None:
    seen = [RankReport(each, host=host, local_rank=0) for each, host in enumerate(hosts)]
    seen[rank].checks["model_equal"] = CheckReport()
    seen[rank].checks["model_equal"].add([Mismatch("w", Problem.missing)])
    found = failed_check("model_equal", seen)
    assert found is not None
    assert found.on_rank == name


VALUES = {"expected": 5, "actual": 6}
ELEMENT = {
    "index": [3],
    "expected": "1.0",
    "expected_bits": "0x3f800000",
    "actual": "2.0",
    "actual_bits": "0x40000000",
    "differing": 1,
    "elements": 6,
}
SAVE: Sides = ("{} before the save", "{} after it")


@pytest.mark.parametrize(
    ("problem", "facts", "sides", "told"),
    [
        (Problem.value, VALUES, None, "saved 5, restored 6"),
        (Problem.value, VALUES, SAVE, "5 before the save, 6 after it"),
        (Problem.value, VALUES, RESUMED, "5 in the uninterrupted run, 6 in the resumed run"),
        (Problem.value, {"step": 2, **VALUES}, TWIN, "after step 2, twin 5, here 6"),
        (Problem.far, VALUES, TWIN, "twin 5, here 6"),
        (Problem.nan, VALUES, RESUMED, "5 in the uninterrupted run, 6 in the resumed run"),
        (Problem.dtype, {"step": 2, **VALUES}, TWIN, "after step 2, dtype: twin 5, here 6"),
        (Problem.missing, {}, None, "saved, but not restored"),
        (Problem.missing, {}, SAVE, "before the save, but not after it"),
        (Problem.missing, {}, RESUMED, "in the uninterrupted run, but not in the resumed run"),
        (Problem.unexpected, {}, RESUMED, "not in the uninterrupted run, but in the resumed run"),
        (
            Problem.differs,
            ELEMENT,
            SAVE,
            "index [3]: 1.0 (0x3f800000) before the save, 2.0 (0x40000000) after it; 1 of 6 elements differ, "
            "by at most 1",
        ),
        (Problem.files, {"named": 21055, "length": 100}, None, "is 100 bytes; the metadata says 21055"),
    ],
)
def test_sentence_says_what_was_compared(
    problem: Problem, facts: dict[str, Any], sides: Sides | None, told: str
) -> None:
    assert describe(Mismatch("w", problem, max_abs_diff=1.0, facts=facts, sides=sides)) == told


@pytest.mark.parametrize("sides", [("only one",), (1, 2), "ab{}", 3, {"{0.__class__}": 1}])
def test_odd_sides_do_not_break_a_sentence(sides: Any) -> None:
    assert "5" in describe(Mismatch("w", Problem.value, facts=VALUES, sides=sides))


@pytest.mark.parametrize(("count", "others"), [(1, ""), (2, " (and 1 more)")])
def test_first_gap_is_told_and_others_are_counted(count: int, others: str) -> None:
    gaps = [Gap(GapKind.no_control, Place("checkpoint", step)) for step in range(count)]
    first = "model_equal: no control ran in the checkpoint of step 0"
    assert gap_sentence("model_equal", gaps) == first + others
