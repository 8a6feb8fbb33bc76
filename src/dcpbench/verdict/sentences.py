"""The sentences of a row's `reason`, made last, from mismatches and causes."""

from collections.abc import Iterable, Mapping, Sequence
from signal import Signals

from dcpbench.config.text import listed
from dcpbench.core.mismatch import Gap, GapKind, LimitReached, Mismatch, RaisedError
from dcpbench.core.sentences import mismatch_sentence, rank_sentence
from dcpbench.core.stage_end import Cause, RankEnd

_LISTED = 10
"""Number of names that a sentence lists."""

TRAINING, UNLISTED, OBSERVED = "training: ", "in addition to known failure ", "; observed: "


def check_sentence(check: str, rank: str, first: Mismatch, names: Sequence[str]) -> str:
    """Return why a check failed: the first mismatch, its rank, and the other names."""
    others = f" (differing: {listed(names, _LISTED, ', and')})" if len(names) > 1 else ""
    return f"{check}: {rank}: {mismatch_sentence(first)}{others}"


def failed_sentence(resume: Sequence[str], training: Sequence[str], resumes: bool | None) -> str:
    """Return why checks failed. Those of training are listed apart, because the resume can still be correct.

    Args:
        resume, training: sentences of the failed checks.
        resumes: True if a run was resumed, and all checks of that and of saves passed and could have failed.
    """
    of_resume = ["the resume is correct"] if training and resumes else resume
    of_training = [f"{TRAINING}{'; '.join(training)}"] if training else []
    return "; ".join([*of_resume, *of_training])


def gap_sentence(check: str, gaps: Sequence[Gap]) -> str:
    """Return why a check could not have failed, or did not compare everywhere.

    >>> from dcpbench.core.mismatch import Place
    >>> gap_sentence("model_equal", [Gap(GapKind.not_reported, Place("checkpoint", 4), "net1.weight")])
    'model_equal: its control did not report net1.weight in the checkpoint of step 4'
    """
    first = gaps[0]
    more = f" (and {len(gaps) - 1} more)" if len(gaps) > 1 else ""
    name = first.name or "anything"
    text = {
        GapKind.no_control: "no control ran",
        GapKind.not_reported: f"its control did not report {name}",
        GapKind.not_looked_at: f"rank {first.rank} did not compare {name}",
        GapKind.not_compared: f"no rank compared {name}",
        GapKind.not_controlled: f"rank {first.rank} has no control of {name}",
    }[first.kind]
    return f"{check}: {f'{text} {first.where}'.strip()}{more}"


def known_sentence(known: Sequence[tuple[str, str, str | None]], observed: str) -> str:
    """Return known failures, each given as id, reason and link, and the reason that was observed."""
    ids = ", ".join(dict.fromkeys(failure_id for failure_id, _, _ in known))
    reasons = dict.fromkeys(f"{reason} ({link})" if link else reason for _, reason, link in known)
    return f"known failure {ids}: {'; '.join(reasons)}{OBSERVED}{observed}"


def unlisted_sentence(ids: Sequence[str], unlisted: Sequence[str], observed: str, training: bool) -> str:
    """Return the failures in addition to known failures, of `training` alone or not, and the reason that was
    observed."""
    once = [*dict.fromkeys(unlisted)]  # several ranks can report the same
    known = f"{TRAINING * training}{UNLISTED}{', '.join(dict.fromkeys(ids))}"
    return f"{known}: {listed(once, 1, ', and')}{OBSERVED}{observed}"


def cause_sentence(cause: Cause, before: Iterable[str] = (), place: str | None = None) -> str:
    """Return why not every rank of a stage reported.

    >>> cause_sentence(RaisedError(2, "load", "KeyError", "'net1.weight'"))
    "rank 2 in load: KeyError: 'net1.weight'"
    >>> from dcpbench.core.mismatch import Place
    >>> lost = RaisedError(0, "train", "ValueError", "no", line="mine.py:31", when=Place("loaded", 6))
    >>> cause_sentence(lost)
    'rank 0 in train after the load of step 6: ValueError: no (mine.py:31)'

    Args:
        before: sentences of the checks that had failed before.
        place: the place of the cause's rank, if there can be several hosts.
    """
    if isinstance(cause, RaisedError):
        return f"{rank_sentence(cause.rank, place)} in {_raised(cause, before)}"
    if isinstance(cause, RankEnd):
        at = f" at {cause.frame}" if cause.frame else ""
        return f"{rank_sentence(cause.rank, place)} {_ended(cause)} in {phase_sentence(cause)}{at}"
    return _late(cause)


def replaced_sentence(replaced: Sequence[str]) -> str:
    """Return which reported values could not be stored in the row."""
    names = listed(replaced, _LISTED, ", and")
    return f"replaced by text or null, because JSON cannot contain it: {names}"


def phase_sentence(rank: RankEnd) -> str:
    """Return a rank's phase, and whether an upload was in flight."""
    return f"{rank.phase}, an upload in flight" if rank.uploads and rank.phase != "upload" else rank.phase


def _ended(death: RankEnd) -> str:
    """Return how the process of a rank ended."""
    status = death.exit_status
    if death.lost or status is None:
        return death.lost or "was lost"
    if status == 255:  # executors.agent uses it if the agent that reports it died
        return "exited with status 255, or was lost together with the agent that forked it,"
    return f"was killed by {Signals(-status).name}" if status < 0 else f"exited with status {status}"


def _raised(error: RaisedError, before: Iterable[str]) -> str:
    text = f"{error.type}: {error.message}".rstrip(": ")
    if error.wrapped:
        text = f"{error.wrapped}: on rank {error.origin}: {text}"
    if earlier := "; ".join(before):
        text = f"{text} (before that {earlier})"
    notes = "".join(f" ({note})" for note in (error.line, error.note) if note)
    return f"{' '.join(map(str, filter(None, (error.phase, error.when))))}: {text}{notes}"


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
    """Return ranks by value, the fewest first, because the others wait for them."""
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return dict(sorted(ranks.items(), key=lambda value_and_ranks: len(value_and_ranks[1])))


def _group(ranks: Iterable[int], hosts: Mapping[int, str]) -> str:
    """Return ranks as text, with their host if there are several hosts and all of the ranks are on one."""
    ranks = list(ranks)
    different = {hosts.get(rank) for rank in ranks}
    host = different.pop() if len(different) == 1 else None
    return f"rank {rank_numbers(ranks)}" + (f" of host {host}" if host else "")


def rank_numbers(ranks: Iterable[int]) -> str:
    """Return the numbers of ranks as text, three or more consecutive ones as a range.

    >>> rank_numbers([0, 1, 2, 4, 5])
    '0-2, 4, 5'
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if not runs or rank != runs[-1][-1] + 1:
            runs.append([])
        runs[-1].append(rank)
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
