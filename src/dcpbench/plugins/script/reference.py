"""Explain why an uninterrupted run of the command is of no use."""

import shlex
from dataclasses import replace
from pathlib import Path

from dcpbench.config.text import path_text
from dcpbench.plugins.script.record import RecordedRun
from dcpbench.plugins.script.run import OUT, ScriptCommand
from dcpbench.plugins.script.words import leads_to

_EARLY_S = 120.0
_SHORT_S, _FACTOR = 30.0, 3.0
_NOT_RECORDED = {
    "process": "none of its Python processes was recorded: python -I, -E and -S, containers and other hosts "
    "leave out the recorder",
    "torch": "it did not import torch",
    "optimizer": "it has no optimizer of torch.optim",
}
"""Why no step was recorded, by the first kind of event that is missing."""


def problem_of(run: RecordedRun, command: ScriptCommand, place: Path, limit_s: float, seconds: float) -> str:
    """Return why a run of the command, which took `seconds`, has no steps to compare; empty if it has.

    A command that fails early is run once more without the recorder, in the folder `place`.
    """
    if harm := run.of_kind("harm"):
        word = leads_to(harm[0]["path"], command.words, command.cwd)
        why = f"the command names it by {word!r}" if word else "no word of the command names it"
        return f"was {run.failure}: {why}; write {OUT} for the folder of its output"
    if run.status is None:
        return f"hangs, or takes longer than {limit_s:g} s (--timeout)"
    if run.status and not run.ranks and seconds < _EARLY_S:
        # For as long as it needs to fail again.
        alone = replace(command, is_recorded=False).run(place, "unrecorded", _SHORT_S + _FACTOR * seconds)
        if not alone.status:
            text = f"runs without the recorder ({path_text(alone.log)}), but not with it: a fault of dcpbench"
            return f"{text}: {run.failure}"
        where = "" if command.has_out else ", in a copy of the working folder"
        return f"does not run, with or without dcpbench's recorder{where}: {alone.failure}"
    if run.status:
        words = shlex.join(word.replace(OUT, "NEW_FOLDER") for word in command.words)
        return f"does not run: {run.failure}; try it without dcpbench: {words}"
    if not run.ranks:
        broken = [event["error"] for event in run.of_kind("broken")]
        seen = {event["e"] for event in run.events}
        missing = (text for kind, text in _NOT_RECORDED.items() if kind not in seen)
        why = [*broken, *missing, "it ended before a step of its optimizer"][0]
        return f"made no optimizer step: {why}; the last line of its log: {run.said}"
    return ""
