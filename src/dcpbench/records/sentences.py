"""Every sentence of a row's `reason`, made from findings and outcomes, last and in this one place."""

from collections.abc import Iterable, Mapping, Sequence

from dcpbench.records.findings import Finding, Problem, RaisedError

_LISTED = 10
"""So many names of what differs stand in a sentence."""

_TEMPLATES: dict[Problem, str] = {
    Problem.differs: "index {index}: saved {saved} ({saved_bits}), restored {restored} ({restored_bits}); "
    "{differing} of {elements} elements differ, by at most {max_abs_diff:.3g}",
    Problem.digests_differ: "its digests differ",
    Problem.value: "saved {saved}, restored {restored}",
    Problem.missing: "saved, but missing after the load",
    Problem.unexpected: "there after the load, but never saved",
    Problem.dtype: "dtype: saved {saved}, restored {restored}",
    Problem.shape: "global shape: saved {saved}, restored {restored}",
    Problem.local_shape: "local shape: saved {saved}, restored {restored}",
    Problem.placements: "placements: saved {saved}, restored {restored}",
    Problem.extent: "extent: saved {saved}, restored {restored}",
}
"""How a finding reads that brings no `text` of its own among its facts."""


def describe(finding: Finding) -> str:
    """What is wrong with one piece of state, without its name."""
    if text := finding.facts.get("text"):
        return str(text)
    known = {**finding.facts, "max_abs_diff": finding.max_abs_diff}
    return _TEMPLATES[finding.problem].format(**known)


def finding_sentence(finding: Finding) -> str:
    """`net1.weight (param) in the checkpoint of step 4: index [0, 1]: saved …`."""
    named = f"{finding.name} ({finding.kind})" if finding.kind else finding.name
    return f"{' '.join(f'{named} {finding.where}'.split())}: {describe(finding)}"


def check_sentence(check: str, rank: int, first: Finding, names: Sequence[str]) -> str:
    """Why a check did not hold: its first finding, and what else differs."""
    more = f", and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    others = f" (differing: {', '.join(names[:_LISTED])}{more})" if len(names) > 1 else ""
    return f"{check}: rank {rank}: {finding_sentence(first)}{others}"


def powerless_sentence(check: str, missed: Sequence[str]) -> str:
    """Why a check could not have failed."""
    if not missed:
        return f"{check}: no control ran"
    more = f" (and {len(missed) - 1} more)" if len(missed) > 1 else ""
    return f"{check}: its control did not report {missed[0]}{more}"


def error_sentence(error: RaisedError, before: Iterable[str] = ()) -> str:
    """What a rank raised, after what its checks had found."""
    text = f"{error.type}: {error.message}".rstrip(": ")
    if error.wrapped:
        text = f"{error.wrapped}: on rank {error.origin}: {text}"
    if found := "; ".join(before):
        text = f"{text} (before that {found})"
    return f"rank {error.rank} in {error.phase}: {text}{f' ({error.note})' if error.note else ''}"


def summary_of(values: Mapping[int, str]) -> str:
    """`rank 0, 1 at …, rank 2 at …`: ranks that say the same are named together."""
    by_text: dict[str, list[int]] = {}
    for rank, text in values.items():
        by_text.setdefault(text, []).append(rank)
    return ", ".join(f"rank {', '.join(map(str, ranks))} {text}" for text, ranks in by_text.items())
