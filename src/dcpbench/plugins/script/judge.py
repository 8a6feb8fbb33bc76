"""The verdict on a stop: does the resumed run continue as the uninterrupted one?"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from dcpbench.config.text import listed
from dcpbench.plugins.script.causes import explained
from dcpbench.plugins.script.compare import KINDS, ORDER, Compared, Difference, noise_of
from dcpbench.plugins.script.record import Run, newest_complete

STATUS = {
    "exact": "pass",
    **dict.fromkeys(("diverges", "older", "torn", "refuses", "scratch", "hangs"), "fail"),
    **dict.fromkeys(("not_deterministic", "not_reached"), "skip"),
}
"""The status of a row, by its verdict."""
_INCOMPLETE = "it reads {}, which is not complete: publish a checkpoint last, by renaming it"


@dataclass(frozen=True)
class Verdict:
    """The verdict on a stop.

    Args:
        word: one of `STATUS`.
        reason: what happened, in a sentence; of an exact resume too.
        loaded, newest: the steps after which the loaded, and the newest complete checkpoint were saved.
        first: the first difference.
    """

    word: str
    reason: str
    cause: str = ""
    loaded: int | None = None
    newest: int | None = None
    first: Difference | None = None

    @property
    def status(self) -> str:
        """The status of its row."""
        return STATUS[self.word]


def judge(reference: Run, stopped: Run, resumed: Run | None, second: Callable[[int], Run]) -> Verdict:
    """Judge a stop, after which the run was resumed.

    Args:
        resumed: None if the stop did not happen.
        second: returns another uninterrupted run, of at least so many steps.
    """
    if resumed is None:
        how = "ran too long" if stopped.status is None else f"ended with exit status {stopped.status}"
        return Verdict("not_reached", f"the run {how} before this stop")
    if resumed.ranks:
        return _of_steps(reference, stopped, resumed, second)
    newest = newest_complete(reference, stopped)
    after = f"; complete: step {newest}" if newest is not None else "; no checkpoint was complete"
    if resumed.status is None:
        return Verdict("hangs", f"makes no step{after}", newest=newest)
    if resumed.status:
        torn = [path for path in resumed.paths_read() if (stopped.disk.step_of(path) or 0) > (newest or 0)]
        torn.sort(key=lambda path: path != stopped.cut)
        cause = _INCOMPLETE.format(torn[0]) if torn else ""
        return Verdict("refuses", f"does not start: {resumed.failure}{after}", cause, newest=newest)
    if newest == reference.length:
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
        reason, cause = explained(compared, differences)
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
