"""Sentences about mismatches, and names of ranks. They are made last, and nothing matches their text."""

from collections.abc import Iterator
from string import Formatter

from dcpbench.core.mismatch import Mismatch, Problem

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
        "not a number, unlike the twin's",
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
    Problem.unexpected: ("present after the load, but not saved",),
    Problem.dtype: (
        "dtype: saved {saved}, restored {restored}",
        "dtype: to be saved {expected}, stored {stored}",
    ),
    Problem.shape: (
        "global shape: saved {saved}, restored {restored}",
        "shape: to be saved {expected}, stored {stored}",
        "shape: twin {twin}, here {here}",
    ),
    Problem.local_shape: ("local shape: saved {saved}, restored {restored}",),
    Problem.placements: ("placements: saved {saved}, restored {restored}",),
    Problem.extent: ("extent: saved {saved}, restored {restored}",),
    Problem.replicas: (
        "replicas differ: index {index}: saved {saved} ({saved_bits}), restored {restored} ({restored_bits})",
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
        "{reference} {expected}, here {actual}",
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
        "{named} bytes by the metadata, on disk: {found}",
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
"""Templates by problem. The first one is used for which the mismatch has all facts."""


def describe(mismatch: Mismatch) -> str:
    """Return how a value is wrong, without its name."""
    facts = {**mismatch.facts, "max_abs_diff": mismatch.max_abs_diff}
    templates = (
        template
        for template in _templates(mismatch.problem)
        if all(name in facts for _, name, _, _ in Formatter().parse(template) if name)
    )
    try:
        text = next(templates).format(**facts)
    except (StopIteration, TypeError, ValueError):  # a check of a plug-in can give any facts
        listed = (f"{name}: {value}" for name, value in mismatch.facts.items())
        text = ", ".join([mismatch.problem.value, *listed])
    wrong = "; the checkpoint itself differs from the saved state" if facts.get("checkpoint_differs") else ""
    return f"{text}{wrong}"


def _templates(problem: Problem) -> Iterator[str]:
    """Yield the templates of a problem; those about a load also about training on after it."""
    for template in _TEMPLATES[problem]:
        yield template
        if "{restored}" in template:
            yield template.replace("saved", "uninterrupted").replace("restored", "resumed")


def mismatch_sentence(mismatch: Mismatch) -> str:
    """Return a mismatch as a sentence with its name and place.

    >>> facts = {"saved": "0.1", "restored": "0.2"}
    >>> mismatch_sentence(Mismatch("lr", Problem.value, facts=facts, where="in the checkpoint of step 4"))
    'lr in the checkpoint of step 4: saved 0.1, restored 0.2'
    """
    named = f"{mismatch.name} ({mismatch.kind})" if mismatch.kind else mismatch.name
    return f"{' '.join(f'{named} {mismatch.where}'.split())}: {describe(mismatch)}"


def rank_sentence(rank: int, place: str | None) -> str:
    """Return the name of a rank, with its place if there can be several hosts."""
    return f"rank {rank} ({place})" if place else f"rank {rank}"


def place_sentence(local_rank: int | None, host: str | None) -> str:
    """Return the place of a rank."""
    return f"local rank {local_rank} of host {host}"
