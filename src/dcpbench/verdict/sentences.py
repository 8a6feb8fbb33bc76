"""Makes every sentence of a row's `reason`, last, from mismatches and causes."""

from collections.abc import Iterable, Mapping, Sequence
from signal import Signals
from typing import Any

from dcpbench.core.checks import CHECKS
from dcpbench.core.mismatch import (
    Gap,
    GapKind,
    LimitReached,
    Mismatch,
    Problem,
    RaisedError,
)
from dcpbench.core.sentences import mismatch_sentence, rank_sentence
from dcpbench.core.stage_end import Cause, RankEnd

_LISTED = 10
"""How many names of mismatches a sentence has."""

_BESIDE, _SEEN = "beside known failure ", "; seen as "


def check_sentence(check: str, rank: str, first: Mismatch, names: Sequence[str]) -> str:
    """Return why a check did not hold: its first mismatch, the rank in words, and the other names."""
    more = f", and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    others = f" (differing: {', '.join(names[:_LISTED])}{more})" if len(names) > 1 else ""
    return f"{check}: {rank}: {mismatch_sentence(first)}{others}"


def failed_sentence(resume: Sequence[str], training: Sequence[str], resumes: bool | None) -> str:
    """Return why checks did not hold, those of training apart: they say nothing against the resume.

    Args:
        resumes: whether all checks of saving and resuming held and were able to fail.
    """
    of_resume = ["the resume is right"] if training and resumes else resume
    of_training = [f"training: {'; '.join(training)}"] if training else []
    return "; ".join([*of_resume, *of_training])


def short_reason(row: Mapping[str, Any]) -> str:
    """Return one line of a flat row's reason: the first check that did not hold, what differs most, one
    number and a rank; of a known failure its id; else what the reason begins with. It begins with
    `training: ` where no check of the resume failed."""
    reason = str(row.get("reason") or "")
    failed = [check for check in CHECKS if row.get(check) is False and not CHECKS[check].training]
    training = [check for check in CHECKS if row.get(check) is False and CHECKS[check].training]
    if not failed:
        failed, training = training, []
    if row.get("status") == "xfail":
        return reason.partition(":")[0]
    if reason.startswith(_BESIDE):
        return reason.partition(_SEEN)[0]
    if row.get("status") != "fail" or not failed:
        return reason.partition(" (before that ")[0].partition("; stacks are ")[0]
    seen = _mapping(_mapping(_mapping(row.get("details")).get("checks")).get(failed[0]))
    listed = seen.get("worst")
    worst = _mapping(listed[0] if isinstance(listed, list) and listed else None)
    if not worst:
        return reason
    problem = str(worst.get("problem", Problem.differs))
    text = f"{failed[0]}: {worst.get('name')} "
    text += (
        "differs" if problem in (Problem.differs, Problem.value, Problem.far) else problem.replace("_", " ")
    )
    text += f" by {distance:.3g}" if isinstance(distance := worst.get("max_abs_diff"), int | float) else ""
    text += f", rank {worst['rank']}" if "rank" in worst else ""
    more = seen.get("mismatch_count")
    text += f" (+{more - 1} more)" if isinstance(more, int) and more > 1 else ""
    text += f", also {', '.join(failed[1:])}" if failed[1:] else ""
    text += f"; training: {', '.join(training)}" if training else ""
    return f"training: {text}" if CHECKS[failed[0]].training else text


def _mapping(value: object) -> Mapping[str, Any]:
    """Return the value, or an empty mapping if it is not one: a row may come from anywhere."""
    return value if isinstance(value, Mapping) else {}


def powerless_sentence(check: str, gaps: Sequence[Gap]) -> str:
    """Return why a check was not able to fail, or did not compare everywhere."""
    first = gaps[0]
    more = f" (and {len(gaps) - 1} more)" if len(gaps) > 1 else ""
    what = first.name or "anything"
    text = {
        GapKind.no_control: "no control ran",
        GapKind.not_reported: f"its control did not report {what}",
        GapKind.not_looked_at: f"rank {first.rank} did not compare {what}",
        GapKind.not_compared: f"no rank compared {what}",
        GapKind.not_controlled: f"rank {first.rank} has no control of {what}",
    }[first.kind]
    return f"{check}: {f'{text} {first.where}'.strip()}{more}"


def known_sentence(listed: Sequence[tuple[str, str, str | None]], seen: str) -> str:
    """Return known failures, each given as id, reason and link, and how they were seen."""
    ids = ", ".join(dict.fromkeys(one for one, _, _ in listed))
    reasons = dict.fromkeys(f"{reason} ({link})" if link else reason for _, reason, link in listed)
    return f"known failure {ids}: {'; '.join(reasons)}{_SEEN}{seen}"


def beside_known_sentence(ids: Sequence[str], beside: Sequence[str], seen: str) -> str:
    """Return what was found in addition to known failures, and how all of it was seen."""
    first, *others = dict.fromkeys(beside)  # several ranks find the same
    more = f", and {len(others)} more" if others else ""
    return f"{_BESIDE}{', '.join(dict.fromkeys(ids))}: {first}{more}{_SEEN}{seen}"


def cause_sentence(cause: Cause, before: Iterable[str] = (), place: str | None = None) -> str:
    """Return why not every rank of a stage reported.

    Args:
        before: sentences of the checks that had failed until then.
        place: where the rank of the cause is, where there may be several hosts.
    """
    if isinstance(cause, RaisedError):
        return f"{rank_sentence(cause.rank, place)} in {_raised(cause, before)}"
    if isinstance(cause, RankEnd):
        at = f" at {cause.frame}" if cause.frame else ""
        return f"{rank_sentence(cause.rank, place)} {_ended(cause)} in {phase_sentence(cause)}{at}"
    return _late(cause)


def replaced_sentence(replaced: Sequence[str]) -> str:
    """Return which reported values a row cannot contain."""
    more = f", and {len(replaced) - _LISTED} more" if len(replaced) > _LISTED else ""
    return f"replaced by text or null, since JSON cannot hold it: {', '.join(replaced[:_LISTED])}{more}"


def phase_sentence(rank: RankEnd) -> str:
    """Return a rank's phase, and that an upload is in flight during it."""
    return f"{rank.phase}, an upload under way" if rank.uploads and rank.phase != "upload" else rank.phase


def _ended(death: RankEnd) -> str:
    """Return how the process of a rank ended."""
    status = death.exit_status
    if death.lost or status is None:
        return death.lost or "was lost"
    if status == 255:  # what multiprocessing takes for it if the server died that would have told it
        return "exited with status 255, or was lost with the server that it was forked from,"
    return f"was killed by {Signals(-status).name}" if status < 0 else f"exited with status {status}"


def _raised(error: RaisedError, before: Iterable[str]) -> str:
    text = f"{error.type}: {error.message}".rstrip(": ")
    if error.wrapped:
        text = f"{error.wrapped}: on rank {error.origin}: {text}"
    if found := "; ".join(before):
        text = f"{text} (before that {found})"
    note = f" ({error.note})" if error.note else ""
    return f"{error.phase}: {text}{note}"


def _late(limit: LimitReached) -> str:
    text = f"after {limit.limit_s:g} s ({limit.key}={limit.limit_s:g}) still in "
    if limit.phase:
        text += f"{limit.phase} ({_group(limit.late, limit.hosts)})"
    else:
        text += _phases(limit.late, limit.hosts)
    if limit.others:
        text += f", others in {_phases(limit.others, {})}"
    if limit.doing:
        places = [
            f"{_group(ranks, limit.hosts)} {frame}" for frame, ranks in _fewest_first(limit.doing).items()
        ]
        text += f"; {', '.join(places)}"
    return f"{text}; stacks are in the ranks' logs"


def _phases(phases: Mapping[int, str], hosts: Mapping[int, str]) -> str:
    return "; ".join(f"{phase} ({_group(ranks, hosts)})" for phase, ranks in _fewest_first(phases).items())


def _fewest_first(values: Mapping[int, str]) -> dict[str, list[int]]:
    """Return ranks by value, the fewest first: the others wait for them."""
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return dict(sorted(ranks.items(), key=lambda one: len(one[1])))


def _group(ranks: Iterable[int], hosts: Mapping[int, str]) -> str:
    """Return ranks in words, and their host if there are several hosts and all of them are on one."""
    ranks = list(ranks)
    of_ranks = {hosts.get(rank) for rank in ranks}
    host = next(iter(of_ranks)) if len(of_ranks) == 1 else None
    return f"rank {rank_numbers(ranks)}" + (f" of host {host}" if host else "")


def rank_numbers(ranks: Iterable[int]) -> str:
    """Return the numbers of ranks, three or more consecutive ones as a range: `0-22, 24, 25`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if not runs or rank != runs[-1][-1] + 1:
            runs.append([])
        runs[-1].append(rank)
    told = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ", ".join(told)
