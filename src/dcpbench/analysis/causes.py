"""The reason of a row in one line, and the likely causes of its failure: patterns of its checks, and
the cause that each suggests. Both are derived when a row is shown, and never stored."""

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from dcpbench.config.text import listed
from dcpbench.core.checks import CHECKS
from dcpbench.core.mismatch import Problem
from dcpbench.core.sentences import described
from dcpbench.records.row import dict_in, list_in
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


@dataclass(frozen=True)
class Explanation:
    """The likely cause of a failure that has a certain pattern.

    >>> EXPLANATIONS[0].fits({"status": "pass"})
    False

    Args:
        sentence: the cause, and what to do about it.
        failed: the check that failed; others can have failed with it.
        passed: checks of which none failed, and at least one passed; null ones did not apply.
        alone: other checks fail as its consequence.
        checkpointer: it holds for this one alone; empty: for all.
        raised: for an `error`: a name of PyTorch's in the exception's message, which no field of a row has.
        instead: for an `error`: the override that helps, which the cell does not have yet.
        state_missing: no state of the optimizer was restored.
    """

    sentence: str
    failed: str = ""
    passed: tuple[str, ...] = ()
    alone: bool = False
    checkpointer: str = ""
    raised: str = ""
    instead: str = ""
    state_missing: bool = False

    def fits(self, row: Mapping[str, Any]) -> bool:
        """Return whether a row, given by columns, has this pattern."""
        if self.raised:
            axis, _, value = self.instead.partition("=")
            says = row.get("status") == "error" and self.raised in str(row.get("reason"))
            return says and row.get(axis) != value
        passed = [row.get(check) for check in self.passed]
        return (
            row.get("status") == "fail"
            and row.get(self.failed) is False
            and self.checkpointer in ("", row.get("checkpointer"))
            and (not passed or (True in passed and False not in passed))
            and (not self.state_missing or _has_no_state(_details_of(row, self.failed)))
        )


_RESTORED = ("model_equal", "optim_equal", "extra_equal")
_SEARCHES = "parallel=ddp_unused"
_WRONG_CHECKPOINT = (
    "The checkpoint itself is wrong, so look at the save and the storage: no load can restore the state "
    "from it"
)

EXPLANATIONS = (
    Explanation(
        "A parameter got no gradient, which DistributedDataParallel allows only if it searches for such "
        f"parameters: use {_SEARCHES}",
        raised="find_unused_parameters",
        instead=_SEARCHES,
    ),
    Explanation(
        "Copies of the same values have drifted apart in training, and a checkpoint contains one of them: "
        "look for a missing reduction, or for settings or random draws of one rank",
        failed="replicas_equal",
        alone=True,
    ),
    Explanation(
        "Files changed after their save reported success: the save reports it too early, or something else "
        "writes to the folder",
        failed="files_unchanged",
        alone=True,
    ),
    Explanation(_WRONG_CHECKPOINT, failed="checkpoint_whole", alone=True),
    Explanation(_WRONG_CHECKPOINT, failed="files_equal", alone=True),
    Explanation(
        "The save changes the run, or two runs of this code differ anyway: by a global that a run and its "
        "unwrapped twin share, an unseeded draw, a time",
        failed="save_harmless",
    ),
    Explanation(
        "The model was restored wrongly, though no check of its files failed: look at code that changes "
        "parameters in or after the load",
        failed="model_equal",
    ),
    Explanation(
        "Flags, modes, gradients or hooks differ after the load, and no checkpoint contains them: the code "
        "that builds or loads the run has to set them",
        failed="flags_equal",
    ),
    Explanation(
        "The optimizer has none of its saved state: perhaps dcp.load got the state dict of a new optimizer, "
        "and dcp.load fills only what that already has: pass the result of get_optimizer_state_dict",
        failed="optim_equal",
        state_missing=True,
    ),
    Explanation(
        "The optimizer was restored wrongly: look for a scheduler created after the load, other parameter "
        "groups, or state under other keys",
        failed="optim_equal",
    ),
    Explanation(
        "Random generators were not restored, and PyTorch never saves them: save and load on every rank the "
        "states of torch's, the device's, Python's and NumPy's, and of those of the model",
        failed="random_equal",
    ),
    Explanation(
        "Attributes of the trainer were not restored: save and load them, or list in its not_saved those "
        "that no checkpoint has to restore",
        failed="extra_equal",
        checkpointer="trainer",
    ),
    Explanation(
        "Other state was not restored: it is not in the checkpoint, its load_state_dict does not set all of "
        "it, or something changed it after the load",
        failed="extra_equal",
    ),
    Explanation(
        "A save or load changes something outside its own state, such as a thread, an open file, a generator "
        "or another run; the mismatch names it",
        failed="side_effect_free",
    ),
    Explanation(
        "State that no checkpoint contains was lost: a plain attribute, a global, a loader's position",
        failed="loss_resume_equal",
        passed=_RESTORED,
    ),
    Explanation(
        "The resumed losses are equal, but attributes that training changes are not: save and load what the "
        "mismatch names, or list it in not_saved of the trainer",
        failed="state_resume_equal",
        passed=(*_RESTORED, "loss_resume_equal"),
        checkpointer="trainer",
    ),
    Explanation(
        "The resumed losses are equal, so a later step of the optimizer or scheduler depends on state that "
        "no checkpoint contains",
        failed="state_resume_equal",
        passed=(*_RESTORED, "loss_resume_equal", "loss_resume_close"),
    ),
    Explanation(
        "The ranks do not train on the batch that was drawn: a share of it is missing, doubled or weighted "
        "wrongly, or the loss is averaged wrongly",
        failed="batch_loss_close",
    ),
    Explanation(
        "The parallelism computes other gradients than the unwrapped model: look for a missing, repeated or "
        "wrongly scaled reduction between ranks",
        failed="gradient_close",
    ),
    Explanation(
        "Gradients agree, but the optimizer's step differs from one on the unwrapped model: compare its "
        "hyperparameters and parameter groups on each rank",
        failed="step_equal",
    ),
)
"""Explanations by their patterns; the first that fits counts. Causes come before their consequences: replicas
that drift, files, what the save did, what was restored, how training continued, how each step compares."""


def causes_of(row: Mapping[str, Any]) -> list[str]:
    """Return the likely causes of a row's failure, at most three: values in no state dict that differ, what
    the pattern of checks suggests, and what could not be read.

    >>> values = {"in_no_state_dict": {"model.calls": "8, resumed 4"}, "unreadable": {"loader": "DataLoader"}}
    >>> row = {"status": "fail", "loss_resume_equal": False, "details": {"ranks": [values]}}
    >>> for cause in causes_of(row):
    ...     print(cause)
    model.calls: 8, resumed 4; in no state dict
    The load may have lost a position that cannot be read: loader (DataLoader)
    """
    failed = {check for check in CHECKS if row.get("status") == "fail" and row.get(check) is False}
    if unexplained := list_in(dict_in(row.get("details")).get(UNEXPLAINED)):
        row = {
            **row,
            **dict.fromkeys(failed.difference(unexplained)),
        }  # of these a known failure is the cause
        failed &= {*unexplained}
    values, unreadable = dict[str, object](), dict[str, object]()
    for rank in _ranks(row) if failed & _RESUMED else ():
        values |= dict_in(rank.get("in_no_state_dict"))
        unreadable |= dict_in(rank.get("unreadable"))
    texts = [f"{name}: {value}" for name, value in values.items()]
    causes = [f"{listed(texts, _NAMED)}; in no state dict"] if values else []
    causes += [str(cause) for cause in list_in(dict_in(row.get("details")).get("likely"))]
    explained = _RESUMED if values else set[str]()
    if values and "save_harmless" in failed:  # the twin changes them too
        explained = explained | {check for check in failed if CHECKS[check].training}
    if failed & _RESUMED and any(rank.get("unrestored_generators") for rank in _ranks(row)):
        causes += [one.sentence for one in EXPLANATIONS if one.failed == "random_equal"][:1]
    for check, explanations in groupby(EXPLANATIONS, key=lambda explanation: explanation.failed):
        fitting = [explanation for explanation in explanations if explanation.fits(row)]
        causes += [explanation.sentence for explanation in fitting[:1] if check not in explained]
        if fitting and fitting[0].alone:
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
    found = [*map(dict_in, list_in(details.get("worst")))]
    missing = {one.get("name") for one in found if one.get("problem") == Problem.missing}
    return bool(names) and (names <= missing or len(missing) == len(found) >= _LISTED)


def _ranks(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [*map(dict_in, list_in(dict_in(row.get("details")).get("ranks")))]


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
    found = [one for one in map(dict_in, list_in(details.get("worst"))) if one]
    if not found:
        return reason
    first = min(map(_step, found))
    worst = max((one for one in found if _step(one) == first), key=_distance)
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
    texts = f"{mismatch.get('where')} {mismatch.get('name')} step {mismatch.get('step')}"
    return [*map(int, _STEP.findall(texts))]


def _distance(mismatch: Mapping[str, Any]) -> float:
    """Return the largest difference of a mismatch; anything without one (a missing key) is the worst."""
    distance = mismatch.get("max_abs_diff")
    with suppress(OverflowError):
        return math.inf if not isinstance(distance, int | float) or distance != distance else float(distance)
    return math.inf
