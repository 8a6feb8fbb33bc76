"""The verdict on a stop, whose texts are those of `kinds.yaml`."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dcpbench.config.text import listed
from dcpbench.plugins.script.compare import KINDS, ORDER, Compared, Difference, noise_of
from dcpbench.plugins.script.record import Named, Run, newest_complete, number

STATUS = {
    "exact": "pass",
    **dict.fromkeys(("diverges", "older", "torn", "refuses", "scratch", "hangs"), "fail"),
    **dict.fromkeys(("not_deterministic", "not_reached"), "skip"),
}
"""The status of a row, by its verdict."""
_INCOMPLETE = "it reads {}, which is not complete: publish a checkpoint last, by renaming it"
_AVERAGES = ("ema", "average", "avg_model", "swa_model", "shadow", "teacher")
"""Parts of the names that averages of weights have."""


@dataclass(frozen=True)
class Verdict:
    """The verdict on a stop: one of `STATUS`, what happened, in a sentence, the likely cause, the steps after
    which the loaded and the newest complete checkpoint were saved, and the first difference."""

    word: str
    reason: str
    cause: str = ""
    loaded: int | None = None
    newest: int | None = None
    first: Difference | None = None


def judge(reference: Run, stopped: Run, resumed: Run | None, second: Callable[[int], Run]) -> Verdict:
    """Judge a stop, after which the run was resumed; it is None if the stop did not happen. `second` returns
    another uninterrupted run, of at least so many steps."""
    if resumed is None:
        ended = f"ended with {stopped.failure if stopped.status else 'exit status 0'}"
        how = "ran too long" if stopped.status is None else ended
        return Verdict("not_reached", f"the run {how} before this stop")
    if resumed.ranks:
        return _of_steps(reference, stopped, resumed, second)
    newest = newest_complete(reference, stopped)
    after = f"; complete: step {newest}" if newest is not None else "; no checkpoint was complete"
    if resumed.status is None:
        return Verdict("hangs", f"makes no step{after}", newest=newest)
    if resumed.status:
        torn = [path for path in resumed.paths_read() if (stopped.disk.step_of(path) or 0) > (newest or 0)]
        cause = _INCOMPLETE.format(stopped.cut if stopped.cut in torn else torn[0]) if torn else ""
        return Verdict("refuses", f"does not start: {resumed.failure}{after}", cause, newest=newest)
    read = resumed.paths_read()
    if reference.length in (newest, *map(stopped.disk.step_of, read)) and stopped.cut not in read:
        return Verdict("not_reached", "nothing was left to do: the last step was saved", newest=newest)
    first = Difference((newest or 0) + 1, 0, "steps")
    return Verdict("diverges", f"ends without a step{after}", newest=newest, first=first)


def _of_steps(reference: Run, stopped: Run, resumed: Run, second: Callable[[int], Run]) -> Verdict:
    """Judge a resumed run that made steps."""
    compared = Compared(reference, stopped, resumed)
    differences = compared.first(noise_of(reference, stopped))
    noise: dict[str, int] = {}
    if differences and differences[0].kind not in ("checkpoint", "steps"):
        noise = noise_of(reference, stopped, second(differences[0].step))
        differences = compared.first(noise)
    loaded, last = compared.loaded, compared.last
    start = f"step {loaded}" if loaded else "the start: no checkpoint was complete"
    reason = f"from {start}; steps {loaded + 1} to {last} are equal"
    verdict = Verdict("exact", reason, loaded=loaded, newest=compared.newest)
    if resumed.status is None and all(difference.kind == "steps" for difference in differences):
        first = Difference(last + 1, 0, "steps")
        return replace(verdict, word="hangs", reason=f"hangs after step {last}", first=first)
    failure = f"; fails after its last step: {resumed.failure}" if resumed.status else ""
    if differences:
        word = "diverges"
        reason, cause = _explained(compared, differences)
        if differences[0].kind == "checkpoint":
            word = "older" if loaded else "scratch"
        elif loaded > (compared.newest or 0) and (torn := stopped.cut or listed(compared.loaded_paths, 2)):
            word, cause = "torn", _INCOMPLETE.format(torn)
            reason = f"takes a checkpoint that is not complete ({torn}): {reason}"
        return replace(verdict, word=word, reason=reason + failure, cause=cause, first=differences[0])
    if kinds := [kind for kind in noise if kind in KINDS]:
        kind = min(kinds, key=lambda kind: (noise[kind], ORDER[kind]))
        reason = f"two uninterrupted runs differ from step {noise[kind]} on ({KINDS[kind]['name']})"
        return replace(verdict, word="not_deterministic", reason=reason)
    return replace(verdict, reason=verdict.reason + failure)


def _explained(compared: Compared, differences: Sequence[Difference]) -> tuple[str, str]:
    """Return the difference, of several ranks, in a sentence, and its likely cause."""
    difference, kind = differences[0], differences[0].kind
    names, ranks = difference.names, [str(of_rank.rank) for of_rank in differences]
    expected, actual = difference.expected, difference.actual
    missing = [name for name in names if name not in actual]
    differing = {name: actual[name] for name in names if name in actual}
    same = [] if missing or not names else _steps_with(compared, difference, differing)
    saves = [save for rank in compared.stopped.ranks for save in compared.stopped.contents(rank).items()]
    contents = [content for (done, _), content in saves if done == compared.loaded and kind == "weights"]
    saved = {value: name for content in contents for name, value in content.items()}
    pair: list[Any] = [of.get(names[0]) if names else None for of in (actual, expected)]
    ratio = float(pair[0]) / float(pair[1]) if kind == "loss" and all(pair) else math.nan
    total = len({**expected, **actual})
    # Words of the texts, and signs, which hold where they are not empty; what was compared has more of them.
    facts: dict[str, Any] = vars(compared) | {
        "any": True,
        "first": difference.step == compared.loaded + 1,
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
        "held": listed([saved[value] for value in differing.values() if value in saved], 2),
        "generators": " and ".join(compared.generators),
        "lr": any(name.endswith((" lr", " initial_lr")) for name in names),
        "fewer": len(actual) < len(expected),
        "average": any(part in name.lower() for name in (difference.text, *names) for part in _AVERAGES),
        "text": difference.text,
        "well": not compared.failed,
        "loaded_paths": listed(compared.loaded_paths, 2) or "nothing",
        "read": listed(compared.paths_read, 1),
        "sorted_as_text": str(compared.loaded) > str(compared.newest),
    }
    causes = KINDS[kind]["likely"].items()
    likely = (text for signs, text in causes if all(facts[sign] for sign in signs.split()))
    where = "" if kind == "checkpoint" else f"step {difference.step}, rank {difference.rank}: "
    when = "after " if kind == "saved" else ""
    return when + where + KINDS[kind]["text"].format(**facts), next(likely, "").format(**facts)


def _steps_with(compared: Compared, difference: Difference, values: Named) -> list[int]:
    """Return the steps that have these values, the nearest first, the start before all."""
    steps = compared.steps[difference.rank]
    fitting = {
        number(step) for step in steps if values.items() <= step["parts"].get(difference.kind, {}).items()
    }
    if difference.kind == "batch" and not fitting:  # a part of it
        entered = {*values.values()}
        fitting = {number(step) for step in steps if entered & {*step["parts"]["batch"].values()}}
    return sorted(fitting, key=lambda step: (step != 1, abs(step - difference.step)))
