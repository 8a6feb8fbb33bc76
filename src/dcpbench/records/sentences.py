"""Every sentence of a row's `reason`, made from findings and outcomes, last and in this one place."""

from collections.abc import Iterable, Mapping, Sequence
from string import Formatter

from dcpbench.records.findings import Finding, Problem, RaisedError

_LISTED = 10
"""So many names of what differs stand in a sentence."""

_TEMPLATES: dict[Problem, tuple[str, ...]] = {
    Problem.differs: (
        "index {index}: saved {saved} ({saved_bits}), restored {restored} ({restored_bits}); "
        "{differing} of {elements} elements differ, by at most {max_abs_diff:.3g}",
    ),
    Problem.digests_differ: (
        "digests differ in {differing} of {blocks} blocks, first between index {first} and {last}",
        "its digests differ",
    ),
    Problem.value: (
        "saved {saved}, restored {restored}",
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
        "replicas differ: index {index} is {one} on rank {one_rank} and {other} on a later one",
        "replicas differ: rank {one_rank} and rank {other_rank} have other bits in one part",
    ),
    Problem.ranks_disagree: (
        "rank {one_rank} has {one}, rank {other_rank} {other}",
        "rank {one_rank} and rank {other_rank} have other values",
        "the ranks do not agree on shape and dtype: {shapes}",
    ),
    Problem.uncovered: (
        "no rank holds {uncovered} of {elements} elements, the first at {index}",
        "the ranks' parts hold {held} of {elements} elements",
        "its chunks hold {stored} of {elements} elements",
    ),
    Problem.far: (
        "{reference} {expected}, here {actual}",
        "differs from the twin by up to {max_abs_diff:.3g} ({share:.3g} of its largest magnitude)",
    ),
    Problem.only_twin: ("the twin has it, the parallel model does not",),
    Problem.only_parallel: ("the parallel model has it, the twin does not",),
    Problem.not_stored: ("to be saved, but not in the checkpoint",),
    Problem.not_asked_for: ("in the checkpoint, but not to be saved",),
    Problem.chunks: (
        "the chunk at {offsets} of size {sizes} reaches beyond {shape}",
        "the chunks at {one} and {other} overlap",
        "nothing is stored for the chunk at {nowhere}",
    ),
    Problem.files: ("{named} bytes by .metadata, {found}",),
    Problem.contract: ("{text}",),
}
"""How a problem reads: the first template of which every field is among the finding's facts."""


def describe(finding: Finding) -> str:
    """What is wrong with one piece of state, without its name."""
    known = {**finding.facts, "max_abs_diff": finding.max_abs_diff}
    template = next(one for one in _TEMPLATES[finding.problem] if _fields(one) <= known.keys())
    corrupt = "; what the checkpoint holds is not what was saved" if known.get("checkpoint_differs") else ""
    return f"{template.format(**known)}{corrupt}"


def _fields(template: str) -> set[str]:
    return {field for _, field, _, _ in Formatter().parse(template) if field}


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
