"""Sentences about mismatches, and names of ranks. They are made last, and nothing matches their text."""

from collections.abc import Mapping
from string import Formatter
from typing import Any

from dcpbench.core.mismatch import SAVED, Mismatch, Problem

_TEMPLATES: dict[Problem, tuple[str, ...]] = {
    Problem.differs: (
        "index {index}: {both}; {differing} of {elements} elements differ, by at most {max_abs_diff:.3g}",
        "differs",
    ),
    Problem.nan: (
        "index {index}: {both}; {differing} of {elements} elements differ",
        "{both}",
        "in step {step}, not a number, unlike the twin's",
    ),
    Problem.digests_differ: (
        "digests differ in {differing} of {blocks} blocks, first between index {first} and {last}",
        "its digests differ",
    ),
    Problem.value: ("{both}",),
    Problem.missing: ("{one_side}, but not {other_side}",),
    Problem.unexpected: ("not {one_side}, but {other_side}",),
    Problem.dtype: ("dtype: {both}",),
    Problem.shape: ("global shape: {both}",),
    Problem.local_shape: ("local shape: {both}",),
    Problem.placements: ("placements: {both}",),
    Problem.extent: ("extent: {both}",),
    Problem.replicas: (
        "replicas differ: index {index}: {both}",
        "replicas differ: rank {one_rank} and rank {other_rank} have different bits for the same part",
    ),
    Problem.ranks_disagree: (
        "rank {one_rank} has {one}, rank {other_rank} has {other}",
        "the ranks do not agree on shape and dtype: {shapes}",
    ),
    Problem.uncovered: (
        "the ranks have {held} of {elements} elements",
        "its chunks have {stored} of {elements} elements",
    ),
    Problem.far: (
        "{both}",
        "in step {step}, {factor:.7g} times the twin's",
        "in step {step}, differs from the twin's by {bounds:.3g} times its bound: by up to "
        "{max_abs_diff:.3g} ({share:.3g} of its largest magnitude)",
    ),
    Problem.only_twin: ("in step {step}, the twin has it, the parallel model does not",),
    Problem.only_parallel: ("in step {step}, the parallel model has it, the twin does not",),
    Problem.not_stored: ("to be saved, but not in the checkpoint",),
    Problem.not_asked_for: ("in the checkpoint, but not to be saved",),
    Problem.chunks: (
        "the chunk at {offsets} of size {sizes} reaches beyond {shape}",
        "the chunks at {one} and {other} overlap",
        "nothing is stored for the chunk at {nowhere}",
    ),
    Problem.files: (
        "is {length} bytes; the metadata says {named}",
        "{found}; the metadata says {named} bytes",
        "{found}; keys listed in it: {keys}",
        "{found}, though files are numbered up to {last}",
        "{error}",
    ),
    Problem.ranges: (
        "bytes {begin} to {end} belong to both {one} and {other}",
        "bytes {begin} to {end} belong to no tensor",
        "{bytes} bytes in {file} for {elements} elements of {dtype}",
    ),
    Problem.stray: ("{found} bytes that belong to no entry",),
    Problem.not_synced: ("no rank synced it, though sync_files is true",),
    Problem.unreadable: (
        "its bytes in {file} are damaged: {error}",
        "its bytes cannot be read: {error}",
    ),
    Problem.unclaimed: ("stored, but not under any key",),
    Problem.file_changed: ("{then} when its save reported success, {now} at the end",),
    Problem.contract: ("{text}",),
}
"""Templates by problem. The first one is used for which the mismatch has all facts. `both` is the expected
and the actual value, each with its side."""

_AFTER = "after step {step}, "
"""Begins the sentence of a mismatch with a step, unless its template has the step elsewhere."""


def describe(mismatch: Mismatch) -> str:
    """Return how a value is wrong, without its name."""
    try:
        text = _filled(mismatch)
    except (AttributeError, StopIteration, TypeError, ValueError):  # a check of a plug-in can give any facts
        listed = (f"{name}: {value}" for name, value in mismatch.facts.items())
        text = ", ".join([mismatch.problem.value, *listed])
    differs = mismatch.facts.get("checkpoint_differs")
    return f"{text}{'; the checkpoint itself differs from the saved state' if differs else ''}"


def described(finding: Mapping[str, Any]) -> str:
    """Return how a value is wrong, of a mismatch as rows have it."""
    try:
        known = Mismatch(
            str(finding.get("name")),
            Problem(str(finding.get("problem"))),
            max_abs_diff=finding.get("max_abs_diff"),
            facts=finding,
            sides=finding.get("sides"),
        )
        return describe(known)
    except (KeyError, StopIteration, TypeError, ValueError):  # written by another version
        return str(finding.get("problem"))


def _filled(mismatch: Mismatch) -> str:
    """Return the first template of the mismatch's problem that it has all facts for, with these facts."""
    facts: dict[str, Any] = {**mismatch.facts, "max_abs_diff": mismatch.max_abs_diff}
    names, sides = ("expected", "actual"), mismatch.sides or SAVED
    facts["one_side"], facts["other_side"] = (side.replace("{}", "").strip() for side in sides)
    if facts.keys() >= {*names}:
        bits = [f" ({facts[f'{name}_bits']})" if f"{name}_bits" in facts else "" for name in names]
        values = [f"{facts[name]}{exactly}" for name, exactly in zip(names, bits, strict=True)]
        both = zip(sides, values, strict=True)
        facts["both"] = ", ".join(side.replace("{}", value) for side, value in both)
    template = next(template for template in _TEMPLATES[mismatch.problem] if _names(template) <= facts.keys())
    if _names(_AFTER) <= facts.keys() and not _names(_AFTER) <= _names(template):
        template = _AFTER + template
    return template.format(**facts)


def _names(template: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(template) if name}


def mismatch_sentence(mismatch: Mismatch) -> str:
    """Return a mismatch as a sentence with its name and place.

    >>> facts, sides = {"expected": True, "actual": False}, ("{} before the save", "{} after it")
    >>> mismatch_sentence(Mismatch("process.grad_mode", Problem.value, facts=facts, sides=sides))
    'process.grad_mode: True before the save, False after it'
    """
    named = f"{mismatch.name} ({mismatch.kind})" if mismatch.kind else mismatch.name
    return f"{' '.join(f'{named} {mismatch.where}'.split())}: {describe(mismatch)}"


def rank_sentence(rank: int, place: str | None) -> str:
    """Return the name of a rank, with its place if there can be several hosts."""
    return f"rank {rank} ({place})" if place else f"rank {rank}"


def place_sentence(local_rank: int | None, host: str | None) -> str:
    """Return the place of a rank."""
    return f"local rank {local_rank} of host {host}"
