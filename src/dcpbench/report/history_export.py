"""A history as Markdown, for the summary of a CI job, and as JSON, for whatever else is to be made of it."""

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from dcpbench.analysis.cell_history import Story, folded
from dcpbench.analysis.cell_matrix import History
from dcpbench.analysis.frame import records
from dcpbench.analysis.status_codes import KINDS
from dcpbench.report import history_phrases as phrases
from dcpbench.report.history_terminal import blocks

_STRIP = 40
_SPECIAL = re.compile(r"([\\`*\[\]|<>&@#_~])")


def markdown(told: History, cells: Sequence[Story], remarks: Sequence[str], every: bool) -> str:
    """The same as in the terminal, a table with a line for each status and each cost."""
    strip = min(_STRIP, len(told.sweeps))
    fold = folded(cells, strip, every)
    parts = [_escaped(said) for said in phrases.headline(told, cells)]
    if newest := phrases.commonest(cells, told):
        listed = "\n".join(f"- {_escaped(said)}" for said in newest)
        parts.append(f"**What changed, and in how many cells**\n\n{listed}")
    if fold.shown:
        lines = [line for cell in fold.shown for line in _table_lines(cell, told, strip)]
        head = ["| cell | | newest right | now | last change |", "| --- | --- | --- | ---: | --- |"]
        parts.append("\n".join([*head, *lines]))
        parts.append(
            phrases.legend("".join(KINDS[kind].letter for cell in fold.shown for kind in cell.kinds[-strip:]))
        )
    sentences = [phrases.caution(told), *phrases.summed_up(fold, cells, told), *remarks]
    return "\n\n".join([*parts, *(_escaped(said) for said in sentences if said)]) + "\n"


def as_json(told: History, cells: Sequence[Story], remarks: Sequence[str]) -> str:
    """All sweeps and all cells, with every median and every change; sweeps are named by their place."""
    content = {
        "sweeps": records(told.sweeps),
        "cells": [_plain(cell, told) for cell in cells],
        "statuses": {kind.letter: {"label": kind.label, "well": kind.well} for kind in KINDS},
        "remarks": list(remarks),
    }
    return json.dumps(content, allow_nan=False) + "\n"


def _table_lines(cell: Story, told: History, strip: int) -> list[str]:
    letters = "".join(KINDS[kind].letter for kind in cell.kinds[-strip:])
    since = _escaped(phrases.status_change(cell, told.sweeps))
    lines = [f"| {_escaped(cell.name)} | status | `{letters}` | {cell.now.label} | {since} |"]
    for cost in cell.costs:
        if not np.isnan(cost.latest):
            said = [phrases.cost_change(change, cost.metric, told.sweeps) for change in cost.changes[-1:]]
            drawn = blocks(cost.medians[-strip:]).replace(" ", "·")
            now = phrases.amount(cost.metric, cost.latest)
            lines.append(f"| | {_escaped(cost.metric)} | `{drawn}` | {now} | {_escaped(''.join(said))} |")
    return lines


def _plain(cell: Story, told: History) -> dict[str, Any]:
    return {
        "name": cell.name,
        "axes": told.cells.iloc[cell.number].to_dict(),
        "statuses": "".join(KINDS[kind].letter for kind in cell.kinds),
        "well": cell.now.well,
        "last_seen": cell.last_seen,
        "since": cell.since,
        "reason": cell.reason or None,
        "costs": {
            cost.metric: {
                "medians": [None if np.isnan(value) else float(value) for value in cost.medians],
                "changes": [
                    {"at": change.at, "before": change.before, "after": change.after, "p": change.p}
                    for change in cost.changes
                ],
            }
            for cost in cell.costs
        },
    }


def _escaped(text: str) -> str:
    return _SPECIAL.sub(r"\\\1", " ".join(text.split()))
