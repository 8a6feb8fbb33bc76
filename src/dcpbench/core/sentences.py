"""Sentences about mismatches, and names of ranks. They are made last; nothing is matched against them."""

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
"""Templates of sentences by problem; the first is used whose fields are all among the mismatch's facts."""


def describe(mismatch: Mismatch) -> str:
    """Return how a value is wrong, without its name."""
    known = {**mismatch.facts, "max_abs_diff": mismatch.max_abs_diff}
    fitting = (
        one
        for one in _TEMPLATES[mismatch.problem]
        if all(name in known for _, name, _, _ in Formatter().parse(one) if name)
    )
    try:
        text = next(fitting).format(**known)
    except (StopIteration, TypeError, ValueError):  # a check of a plug-in may give any facts
        text = ", ".join(
            [mismatch.problem.value, *(f"{name}: {one}" for name, one in mismatch.facts.items())]
        )
    corrupt = "; what the checkpoint holds is not what was saved" if known.get("checkpoint_differs") else ""
    return f"{text}{corrupt}"


def mismatch_sentence(mismatch: Mismatch) -> str:
    """Return a whole sentence: `net1.weight (param) in the checkpoint of step 4: index [0, 1]: saved …`."""
    named = f"{mismatch.name} ({mismatch.kind})" if mismatch.kind else mismatch.name
    return f"{' '.join(f'{named} {mismatch.where}'.split())}: {describe(mismatch)}"


def rank_sentence(rank: int, place: str | None) -> str:
    """Return the name of a rank, with its place where there may be several hosts."""
    return f"rank {rank} ({place})" if place else f"rank {rank}"


def place_sentence(local_rank: int | None, host: str | None) -> str:
    """Return the place of a rank."""
    return f"local rank {local_rank} of host {host}"
