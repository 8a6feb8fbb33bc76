"""A row's reason in one line, made of what was found and of no sentence."""

from typing import Any

import pytest

from dcpbench.records.sentences import short_reason

WORST = {"name": "net.weight", "problem": "differs", "max_abs_diff": 0.01234, "rank": 2}


def failed(worst: object = (WORST,), count: object = 12, **more: Any) -> dict[str, Any]:
    listed = list(worst) if isinstance(worst, tuple) else worst
    details = {"checks": {"optim_equal": {"worst": listed, "mismatch_count": count}}}
    return {"status": "fail", "reason": "the whole of it", "optim_equal": False, "details": details, **more}


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (failed(), "optim_equal: net.weight differs by 0.0123, rank 2 (+11 more)"),
        (
            failed(count=1, loss_resume_equal=False),
            "optim_equal: net.weight differs by 0.0123, rank 2, also loss_resume_equal",
        ),
        (failed(({"name": "net.bias", "problem": "not_stored"},), 1), "optim_equal: net.bias not stored"),
        (failed(({"name": "lr", "problem": "value", "rank": 0},), 1), "optim_equal: lr differs, rank 0"),
        (failed(status="xfail", reason="known failure a-b: of torch: more"), "known failure a-b"),
        ({"status": "error", "reason": "rank 0 in load: E: no (before that x: y)"}, "rank 0 in load: E: no"),
        ({"status": "timeout", "reason": "after 2 s; stacks are in the ranks' logs"}, "after 2 s"),
        ({"status": "pass", "reason": None}, ""),
        *((failed(worst), "the whole of it") for worst in ((), None, "x", ("x",), {"a": 1})),
        (failed(details=[1]), "the whole of it"),
    ],
)
def test_a_reason_in_one_line(row: dict[str, Any], told: str) -> None:
    assert short_reason(row) == told
