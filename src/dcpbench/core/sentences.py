"""Every sentence of a row's `reason`, made from findings and outcomes, last and in this one place."""

from collections.abc import Iterable, Mapping, Sequence
from signal import Signals
from string import Formatter
from typing import Any

from dcpbench.core.checks import CHECKS
from dcpbench.core.mismatch import (
    Cause,
    Gap,
    GapKind,
    LimitReached,
    Mismatch,
    Problem,
    RaisedError,
    RankDeath,
)

_LISTED = 10
"""So many names of what differs stand in a sentence."""

_BESIDE, _SEEN = "beside known failure ", "; seen as "

_TEMPLATES: dict[Problem, tuple[str, ...]] = {
    Problem.differs: (
        "index {index}: saved {saved} ({saved_bits}), restored {restored} ({restored_bits}); "
        "{differing} of {elements} elements differ, by at most {max_abs_diff:.3g}",
        "after step {step}, index {index}: twin {twin}, here {here}; {differing} of {elements} elements "
        "differ, by at most {max_abs_diff:.3g}",
        "differs",
    ),
    Problem.nan: (
        "index {index}: saved {saved} ({saved_bits}), restored {restored} ({restored_bits}); "
        "{differing} of {elements} elements differ",
        "uninterrupted {uninterrupted}, resumed {resumed}",
        "{reference} {expected}, here {actual}",
        "it is not a number, the twin's is",
    ),
    Problem.digests_differ: (
        "digests differ in {differing} of {blocks} blocks, first between index {first} and {last}",
        "its digests differ",
    ),
    Problem.value: (
        "saved {saved}, restored {restored}",
        "after step {step}: twin {twin}, here {here}",
        "uninterrupted {uninterrupted}, resumed {resumed}",
    ),
    Problem.missing: ("saved, but missing after the load",),
    Problem.unexpected: ("there after the load, but never saved",),
    Problem.dtype: (
        "dtype: saved {saved}, restored {restored}",
        "dtype: to be saved {expected}, in the checkpoint {stored}",
    ),
    Problem.shape: (
        "global shape: saved {saved}, restored {restored}",
        "shape: to be saved {expected}, in the checkpoint {stored}",
        "shape: twin {twin}, here {here}",
    ),
    Problem.local_shape: ("local shape: saved {saved}, restored {restored}",),
    Problem.placements: ("placements: saved {saved}, restored {restored}",),
    Problem.extent: ("extent: saved {saved}, restored {restored}",),
    Problem.replicas: (
        "replicas differ: index {index}: saved {saved} ({saved_bits}), restored {restored} ({restored_bits})",
        "replicas differ: rank {one_rank} and rank {other_rank} have other bits in one part",
    ),
    Problem.ranks_disagree: (
        "rank {one_rank} has {one}, rank {other_rank} {other}",
        "the ranks do not agree on shape and dtype: {shapes}",
    ),
    Problem.uncovered: (
        "the ranks' parts hold {held} of {elements} elements",
        "its chunks hold {stored} of {elements} elements",
    ),
    Problem.far: (
        "{reference} {expected}, here {actual}",
        "in step {step}, {factor:.7g} times the twin's",
        "in step {step}, {bounds:.3g} times its bound away from the twin's: by up to {max_abs_diff:.3g} "
        "({share:.3g} of its largest magnitude)",
        "differs from the twin by up to {max_abs_diff:.3g} ({share:.3g} of its largest magnitude)",
    ),
    Problem.only_twin: (
        "in step {step}, the twin has it, the parallel model does not",
        "the twin has it, the parallel model does not",
    ),
    Problem.only_parallel: (
        "in step {step}, the parallel model has it, the twin does not",
        "the parallel model has it, the twin does not",
    ),
    Problem.not_stored: ("to be saved, but not in the checkpoint",),
    Problem.not_asked_for: ("in the checkpoint, but not to be saved",),
    Problem.chunks: (
        "the chunk at {offsets} of size {sizes} reaches beyond {shape}",
        "the chunks at {one} and {other} overlap",
        "nothing is stored for the chunk at {nowhere}",
    ),
    Problem.files: (
        "{named} bytes by the metadata, {found}",
        "{found}; keys listed in it: {keys}",
        "{found}, though files are numbered up to {last}",
        "{error}",
    ),
    Problem.ranges: (
        "bytes {begin} to {end} are of both {one} and {other}",
        "bytes {begin} to {end} are of no tensor",
        "{bytes} bytes in {file} for {elements} elements of {dtype}",
    ),
    Problem.stray: ("{found} bytes, of which no entry knows",),
    Problem.not_synced: ("no rank synced it, though sync_files is true",),
    Problem.unreadable: (
        "its bytes in {file} are damaged: {error}",
        "its bytes cannot be read: {error}",
    ),
    Problem.unclaimed: ("it is stored, but no key has it",),
    Problem.file_changed: ("when its save reported success {then}, at the end {now}",),
    Problem.contract: ("{text}",),
}
"""How a problem reads: the first template of which every field is among the finding's facts."""


def describe(finding: Mismatch) -> str:
    """What is wrong with one piece of state, without its name."""
    known = {**finding.facts, "max_abs_diff": finding.max_abs_diff}
    fitting = (
        one
        for one in _TEMPLATES[finding.problem]
        if all(name in known for _, name, _, _ in Formatter().parse(one) if name)
    )
    try:
        text = next(fitting).format(**known)
    except (StopIteration, TypeError, ValueError):  # a check of a plug-in may give any facts
        text = ", ".join([finding.problem.value, *(f"{name}: {one}" for name, one in finding.facts.items())])
    corrupt = "; what the checkpoint holds is not what was saved" if known.get("checkpoint_differs") else ""
    return f"{text}{corrupt}"


def finding_sentence(finding: Mismatch) -> str:
    """`net1.weight (param) in the checkpoint of step 4: index [0, 1]: saved …`."""
    named = f"{finding.name} ({finding.kind})" if finding.kind else finding.name
    return f"{' '.join(f'{named} {finding.where}'.split())}: {describe(finding)}"


def check_sentence(check: str, rank: str, first: Mismatch, names: Sequence[str]) -> str:
    """Why a check did not hold: its first finding, on which rank, in words, and what else differs."""
    more = f", and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    others = f" (differing: {', '.join(names[:_LISTED])}{more})" if len(names) > 1 else ""
    return f"{check}: {rank}: {finding_sentence(first)}{others}"


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
    """A row may come from anybody: what is no mapping says nothing."""
    return value if isinstance(value, Mapping) else {}


def powerless_sentence(check: str, gaps: Sequence[Gap]) -> str:
    """Why a check could not have failed, or did not look everywhere."""
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
    """What is known of a failure, each by its id, reason and link, and then how it was seen."""
    ids = ", ".join(dict.fromkeys(one for one, _, _ in listed))
    reasons = dict.fromkeys(f"{reason} ({link})" if link else reason for _, reason, link in listed)
    return f"known failure {ids}: {'; '.join(reasons)}{_SEEN}{seen}"


def beside_known_sentence(ids: Sequence[str], beside: Sequence[str], seen: str) -> str:
    """What is not known of a failure of which other things are, and then how all of it was seen."""
    first, *others = dict.fromkeys(beside)  # several ranks find the same
    more = f", and {len(others)} more" if others else ""
    return f"{_BESIDE}{', '.join(dict.fromkeys(ids))}: {first}{more}{_SEEN}{seen}"


def cause_sentence(cause: Cause, before: Iterable[str] = ()) -> str:
    """Why a stage did not end with a report of every rank; `before` is what the checks had found until
    then."""
    if isinstance(cause, RaisedError):
        return _raised(cause, before)
    if isinstance(cause, RankDeath):
        at = f" at {cause.frame}" if cause.frame else ""
        phase = phase_sentence(cause.phase, cause.uploading)
        return f"{rank_sentence(cause.rank, cause.place)} {_ended(cause)} in {phase}{at}"
    return _late(cause)


def replaced_sentence(replaced: Sequence[str]) -> str:
    """Which reported values a row cannot hold."""
    more = f", and {len(replaced) - _LISTED} more" if len(replaced) > _LISTED else ""
    return f"replaced by text or null, since JSON cannot hold it: {', '.join(replaced[:_LISTED])}{more}"


def rank_sentence(rank: int, place: str | None) -> str:
    """A rank, and where it is, if there are several hosts."""
    return f"rank {rank} ({place})" if place else f"rank {rank}"


def place_sentence(local_rank: int | None, host: str | None) -> str:
    """Where a rank is."""
    return f"local rank {local_rank} of host {host}"


def phase_sentence(phase: str, uploading: bool) -> str:
    """A rank's phase, and whether an upload is in flight during it."""
    return f"{phase}, an upload under way" if uploading and phase != "upload" else phase


def _ended(death: RankDeath) -> str:
    """How the process of a rank ended."""
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
    return f"{rank_sentence(error.rank, error.place)} in {error.phase}: {text}{note}"


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
    """The ranks that have the same value. Where a few are elsewhere than all others, they come first: the
    others wait for them."""
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    return dict(sorted(ranks.items(), key=lambda one: len(one[1])))


def _group(ranks: Iterable[int], hosts: Mapping[int, str]) -> str:
    """Some ranks, and the host on which all of them are, if there are several and they are on one."""
    ranks = list(ranks)
    of_ranks = {hosts.get(rank) for rank in ranks}
    host = next(iter(of_ranks)) if len(of_ranks) == 1 else None
    return f"rank {rank_numbers(ranks)}" + (f" of host {host}" if host else "")


def rank_numbers(ranks: Iterable[int]) -> str:
    """The numbers of ranks, three or more that follow each other as one: `0-22, 24, 25`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if not runs or rank != runs[-1][-1] + 1:
            runs.append([])
        runs[-1].append(rank)
    told = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ", ".join(told)
