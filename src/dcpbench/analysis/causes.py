"""The reason of a row in one line, and the likely causes of its failure: patterns of its checks, and
the cause that each suggests. Both are derived when a row is shown, and never stored."""

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from dcpbench.config.text import listed
from dcpbench.core.checks import CHECKS
from dcpbench.core.mismatch import Problem
from dcpbench.core.sentences import described
from dcpbench.records.row import dict_in, list_in, notes_of
from dcpbench.verdict.sentences import OBSERVED, TRAINING, UNLISTED
from dcpbench.verdict.verdict import UNEXPLAINED

_MOST, _NAMED = 3, 3
"""How many causes are listed at most, and how many names of each."""
_LONGEST = 80
"""The most characters of values that have no distance, such as infinity."""
_LISTED = 20
"""The number of mismatches from which on not all are listed."""
_STEP = re.compile(r"\bstep (\d{1,15})")
_RESUMED = {"loss_resume_equal", "loss_resume_close", "state_resume_equal"}


@cache
def causes_table() -> dict[str, dict[str, Any]]:
    """Return the content of `causes.yaml`: for each check, causes of its failure by their signs."""
    text = files("dcpbench.analysis").joinpath("causes.yaml").read_text(encoding="utf-8")
    table: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return table


def likely_cause(sentences: Mapping[str, str], signs: Mapping[str, Any]) -> str:
    """Return the first sentence whose signs all hold, with their values; empty if there is none.

    >>> likely_cause({"lr start": "it starts over", "lr": "it is {lr}"}, {"start": False, "lr": "1e-3"})
    'it is 1e-3'
    """
    holding = (text for names, text in sentences.items() if all(signs[name] for name in names.split()))
    return next(holding, "").format(**signs)


def signs_of(row: Mapping[str, Any]) -> dict[str, bool]:
    """Return the signs of `causes.yaml` that a row, given by columns, has."""

    def passed(*checks: str) -> bool:
        """None of them failed, and at least one passed; null ones did not apply."""
        outcomes = [row.get(check) for check in checks]
        return True in outcomes and False not in outcomes

    restored, equal = ("model_equal", "optim_equal", "extra_equal"), "loss_resume_equal"
    searches = row.get("parallel") == "ddp_unused"
    return {
        "any": True,
        "trainer": row.get("checkpointer") == "trainer",
        "restored": passed(*restored),
        "losses_equal": passed(*restored, equal),
        "losses_close": passed(*restored, equal, "loss_resume_close"),
        "no_optimizer_state": _has_no_state(_details_of(row, "optim_equal")),
        # A name of PyTorch's in the exception's message, which no field of a row has.
        "unused_parameters": "find_unused_parameters" in str(row.get("reason")) and not searches,
    }


def causes_of(row: Mapping[str, Any]) -> list[str]:
    """Return the likely causes of a row's failure, at most three: values in no state dict that differ, what
    the pattern of checks suggests, and what could not be read.

    >>> lost = {"kind": "in_no_state_dict", "name": "model.calls", "text": "8, resumed 4"}
    >>> loader = {"kind": "unreadable", "name": "loader", "text": "DataLoader"}
    >>> details = {"ranks": [{"notes": [lost, loader]}]}
    >>> row = {"status": "fail", "loss_resume_equal": False, "details": details}
    >>> for cause in causes_of(row):
    ...     print(cause)
    model.calls: 8, resumed 4; in no state dict
    The load may have lost a position that cannot be read: loader (DataLoader)
    """
    failed = {check for check in CHECKS if row.get("status") == "fail" and row.get(check) is False}
    if unexplained := list_in(dict_in(row.get("details")).get(UNEXPLAINED)):
        row = {**row, **dict.fromkeys(failed.difference(unexplained))}  # a known failure is their cause
        failed &= {*unexplained}
    notes = [*notes_of(row)] if failed & _RESUMED else []
    values = {note.name: note.text for note in notes if note.kind == "in_no_state_dict"}
    unreadable = {note.name: note.text for note in notes if note.kind == "unreadable"}
    texts = [f"{name}: {text}" for name, text in values.items()]
    causes = [f"{listed(texts, _NAMED)}; in no state dict"] if values else []
    causes += [str(cause) for cause in list_in(dict_in(row.get("details")).get("likely"))]
    explained = _RESUMED if values else set[str]()
    if values and "save_harmless" in failed:  # the twin changes them too
        explained = explained | {check for check in failed if CHECKS[check].training}
    if any(note.kind == "unrestored_generators" for note in notes):
        causes.append(causes_table()["random_equal"]["likely"]["any"])
    signs = signs_of(row)
    for check, known in causes_table().items():
        is_failed = check in failed or check == row.get("status") == "error"
        cause = likely_cause(known["likely"], signs) if is_failed else ""
        causes += [cause] if cause and check not in explained else []
        if cause and "alone" in known:
            break
    if not unreadable:
        return causes[:_MOST]
    named = listed([f"{name} ({kind})" for name, kind in unreadable.items()], _NAMED)
    return [*causes[: _MOST - 1], f"The load may have lost a position that cannot be read: {named}"]


def _details_of(row: Mapping[str, Any], check: str) -> dict[str, Any]:
    return dict_in(dict_in(dict_in(row.get("details")).get("checks")).get(check))


def _has_no_state(details: Mapping[str, Any]) -> bool:
    """Return whether every entry of the optimizer's state is missing, as far as they are listed."""
    names = {name.partition(" ")[0] for name in dict_in(details.get("control")) if name.startswith("state.")}
    mismatches = [*map(dict_in, list_in(details.get("worst")))]
    missing = {mismatch.get("name") for mismatch in mismatches if mismatch.get("problem") == Problem.missing}
    return bool(names) and (names <= missing or len(missing) == len(mismatches) >= _LISTED)


def short_reason(row: Mapping[str, Any]) -> str:
    """Shorten the reason of a flat row to one line: the first check that failed, its worst mismatch at the
    first step that differs, a number and a rank; for a known failure its id; otherwise the start of the
    reason. The line starts with `training: ` if only checks of training failed.

    >>> worst = {"name": "net1.weight", "problem": "differs", "max_abs_diff": 0.01, "rank": 2}
    >>> details = {"checks": {"model_equal": {"worst": [worst], "mismatch_count": 3}}}
    >>> short_reason({"status": "fail", "model_equal": False, "reason": "…", "details": details})
    'model_equal: net1.weight differs by 0.01, rank 2 (+2 more)'
    """
    reason = str(row.get("reason") or "")
    failed = [check for check in CHECKS if row.get(check) is False and not CHECKS[check].training]
    training = [check for check in CHECKS if row.get(check) is False and CHECKS[check].training]
    if not failed:
        failed, training = training, []
    if row.get("status") == "xfail":
        return reason.partition(":")[0]
    if reason.removeprefix(TRAINING).startswith(UNLISTED):
        return reason.partition(OBSERVED)[0]
    if row.get("status") != "fail" or not failed:
        return reason.partition(" (before that ")[0].partition("; stacks are ")[0]
    details = _details_of(row, failed[0])
    mismatches = [mismatch for mismatch in map(dict_in, list_in(details.get("worst"))) if mismatch]
    if not mismatches:
        return reason
    first = min(map(_step, mismatches))
    worst = max((mismatch for mismatch in mismatches if _step(mismatch) == first), key=_distance)
    problem = str(worst.get("problem", Problem.differs))
    differs = problem in (Problem.differs, Problem.value, Problem.far)
    how = "differs" if differs else problem.replace("_", " ")
    distance, values = _distance(worst), described(worst)
    text = f"{failed[0]}: {worst.get('name')}"
    if math.isfinite(distance) or len(values) > _LONGEST or "actual" not in worst:
        text += f" {how} by {distance:.3g}" if math.isfinite(distance) else f" {how}"
    else:
        text += f": {values}"
    text += f", rank {worst['rank']}" if "rank" in worst else ""
    more = details.get("mismatch_count")
    text += f" (+{more - 1} more)" if isinstance(more, int) and more > 1 else ""
    text += f", also {', '.join(failed[1:])}" if failed[1:] else ""
    text += f"; training: {', '.join(training)}" if training else ""
    return f"training: {text}" if CHECKS[failed[0]].training else text


def _step(mismatch: Mapping[str, Any]) -> list[int]:
    """Return the steps of a mismatch: of its checkpoint, then the one after which it was found."""
    of_step, step = mismatch.get("of_step"), mismatch.get("step")
    return [*map(int, _STEP.findall(f"step {of_step} {mismatch.get('name')} step {step}"))]


def _distance(mismatch: Mapping[str, Any]) -> float:
    """Return the largest difference of a mismatch; anything without one (a missing key) is the worst."""
    distance = mismatch.get("max_abs_diff")
    with suppress(OverflowError):
        return math.inf if not isinstance(distance, int | float) or distance != distance else float(distance)
    return math.inf
