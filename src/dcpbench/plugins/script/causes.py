"""Describe a difference in words, and name its likely cause, by the texts and signs of `kinds.yaml`."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dcpbench.config.text import listed
from dcpbench.plugins.script.compare import KINDS, Compared, Difference
from dcpbench.plugins.script.record import Event, Named, number

_AVERAGES = ("ema", "average", "avg_model", "swa", "shadow", "teacher")
"""Parts of the names that averages of weights have."""


def explained(compared: Compared, differences: Sequence[Difference]) -> tuple[str, str]:
    """Return what differs, in one sentence (`step 9, rank 1: the batch is that of step 1`), and its likely
    cause. The differences are the same one, of several ranks."""
    difference, kind = differences[0], differences[0].kind
    names, ranks = difference.names, [str(of_rank.rank) for of_rank in differences]
    expected, actual = (_parts(of, kind) for of in (difference.expected, difference.actual))
    missing = [name for name in names if name not in actual]
    differing = {name: actual[name] for name in names if name in actual}
    same = [] if missing or not names else _steps_with(compared, difference, differing)
    held = _held(compared, differing) if kind == "weights" else []
    pair: list[Any] = [of.get(names[0]) if names else None for of in (actual, expected)]
    ratio = float(pair[0]) / float(pair[1]) if kind == "loss" and all(pair) else math.nan
    generators, total = compared.generators, len({**expected, **actual})
    calls = [len({name.partition(".")[0] for name in _parts(of, "batch")})
             for of in (difference.actual, difference.expected)]  # fmt: skip
    # Words of the texts, and signs, which hold where they are not empty.
    facts: dict[str, Any] = {
        "any": True,
        "first": difference.step == compared.loaded + 1,
        "later": difference.step > compared.loaded + 1,
        "names": listed(names),
        "count": len(names),
        "total": total,
        "all": len(names) == total,
        "differ": "missing" if len(missing) == len(names) else "differ",
        "missing": bool(missing),
        "none": len(missing) == total,
        "actual": pair[0],
        "expected": pair[1],
        "ratio": ratio,
        "scaled": ratio != 1 and math.frexp(abs(ratio))[0] == 0.5,  # by a power of two
        "ranks": listed(ranks),
        "some_ranks": len(ranks) < len(compared.steps),
        "same": f"step {same[0]}" if same else "",
        "batch": f"step {same[0]}" if same else "no step of the reference",
        "start": 1 in same,  # the values of a run that has just begun
        "past": any(step < difference.step for step in same),
        "near": any(abs(step - difference.step) == 1 for step in same),
        "held": listed(held, 2),
        "generators": " and ".join(generators),
        "lr": all(name.endswith((" lr", " initial_lr")) for name in names),
        "fewer_calls": calls[0] < calls[1],
        "average": any(part in name.lower() for name in (difference.text, *names) for part in _AVERAGES),
        "text": difference.text,
        "well": not compared.failed,
        "loaded": compared.loaded,
        "loaded_paths": listed(compared.loaded_paths, 2) or "nothing",
        "newest": compared.newest,
        "read": listed(compared.paths_read, 1),
        "sorted_as_text": str(compared.loaded) > str(compared.newest),
    }
    likely = [
        text for signs, text in KINDS[kind]["likely"].items() if all(facts[sign] for sign in signs.split())
    ]
    text = KINDS[kind]["text"].format(**facts)
    when = {"checkpoint": "", "saved": "after "}.get(kind, "")
    where = "" if kind == "checkpoint" else f"step {difference.step}, rank {difference.rank}: "
    return when + where + text, "".join(likely[:1]).format(**facts)


def _steps_with(compared: Compared, difference: Difference, values: Named) -> list[int]:
    """Return the steps that have these values, the nearest first, the start before all."""
    steps = compared.steps[difference.rank]
    fitting = {number(step) for step in steps if values.items() <= _parts(step, difference.kind).items()}
    if difference.kind == "batch" and not fitting:  # a part of it
        entered = {*values.values()}
        fitting = {number(step) for step in steps if entered & {*_parts(step, "batch").values()}}
    return sorted(fitting, key=lambda step: (step != 1, abs(step - difference.step)))


def _held(compared: Compared, values: Named) -> list[str]:
    """Return the names under which the checkpoint has these values."""
    names = {
        value: name
        for rank in compared.stopped.ranks
        for (done, _), content in compared.stopped.contents(rank).items()
        for name, value in content.items()
        if done == compared.loaded
    }
    return [names[value] for value in values.values() if value in names]


def _parts(step: Event | None, kind: str) -> Mapping[str, Any]:
    return step["parts"].get(kind, {}) if step else {}
