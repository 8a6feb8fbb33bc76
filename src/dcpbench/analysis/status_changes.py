"""How the verdict on each cell changed between two sides, each of one run of the cell or of several."""

from dataclasses import dataclass

import pandas as pd

from dcpbench.analysis.failures import again
from dcpbench.analysis.frame import is_false, is_true
from dcpbench.analysis.repeats import status_text
from dcpbench.records.store import PASSING

NEWLY_FAILING = "newly failing"
KINDS = (NEWLY_FAILING, "flaky", "newly skipped", "vanished", "new", "newly passing", "other status")
"""The changes, those to look at first before the others."""
SAME = "same"
_COLUMNS = ["change", "key", "old", "new", "failing", "reason", "again"]


@dataclass(frozen=True)
class _Outcome:
    """How the runs of a cell came out: `state` is absent, well, skipped, failing or flaky; `statuses`, what
    they came to, and `said`, with how many runs came to each."""

    state: str
    statuses: frozenset[str] = frozenset()
    said: str = "-"


_ABSENT = _Outcome("absent")


def changes(old: pd.DataFrame, new: pd.DataFrame) -> pd.DataFrame:
    """One line for each cell of either side, in the order of `KINDS`, those that did not change last.

    `old` and `new` say what the runs came to. A cell is well where all of its runs are: they pass, are
    skipped or fail as is known, and where a fault was planted it was seen. It is flaky where only some of
    them are, or where one needed a second try. `failing` tells whether it is not well in the new side;
    `reason` and `again` are of the first such run.

    Args:
        old, new: rows with `key`, see `matching.with_cells`.
    """
    before, after = _outcomes(old), _outcomes(new)
    bad = {row.key: row for row in new[~_well(new)].fillna({"reason": ""}).iloc[::-1].itertuples(index=False)}
    lines = []
    for key in dict.fromkeys([*new["key"], *old["key"]]):
        was, now, run = before.get(key, _ABSENT), after.get(key, _ABSENT), bad.get(key)
        reason = "" if run is None else str(run.reason or "")
        command = "" if run is None else again(run.overrides, run.config_dir)
        lines.append((_change(was, now), key, was.said, now.said, run is not None, reason, command))
    table = pd.DataFrame(lines, columns=_COLUMNS)
    place = {kind: place for place, kind in enumerate([*KINDS, SAME])}
    return table.sort_values("change", key=lambda kinds: kinds.map(place), kind="stable", ignore_index=True)


def _well(frame: pd.DataFrame) -> "pd.Series[bool]":
    """Whether each row is as it should be, as `dcpbench.records.store.as_it_should_be` has it."""
    planted = frame["fault_seen"].notna()
    as_planned = frame["status"].isin(list(PASSING)).astype(bool).mask(planted, is_true(frame["fault_seen"]))
    return as_planned & ~is_true(frame["flaky"])


def _outcomes(frame: pd.DataFrame) -> dict[str, _Outcome]:
    told = status_text(frame).astype(object)
    told = told.mask(is_true(frame["fault_seen"]), "seen (" + told + ")")
    told = told.mask(is_false(frame["fault_seen"]), "NOT SEEN (" + told + ")")
    runs = pd.DataFrame(
        {
            "key": frame["key"],
            "told": told,
            "well": _well(frame),
            "tried": is_true(frame["flaky"]),
            "skip": frame["status"].eq("skip").astype(bool),
        }
    )
    return {str(key): _outcome(of_cell) for key, of_cell in runs.groupby("key", sort=False)}


def _outcome(runs: pd.DataFrame) -> _Outcome:
    counted = runs["told"].value_counts()
    said = ", ".join(f"{count} {told}" if len(counted) > 1 else str(told) for told, count in counted.items())
    if runs["tried"].any() or runs["well"].nunique() > 1:
        state = "flaky"
    elif not runs["well"].any():
        state = "failing"
    else:
        state = "skipped" if runs["skip"].all() else "well"
    return _Outcome(state, frozenset(counted.index), said)


def _change(was: _Outcome, now: _Outcome) -> str:
    if was.state == "absent" or now.state == "absent":
        return "new" if was.state == "absent" else "vanished"
    if was.state == now.state:
        return SAME if was.state == "flaky" or was.statuses == now.statuses else "other status"
    if now.state != "well":
        return {"failing": NEWLY_FAILING, "flaky": "flaky", "skipped": "newly skipped"}[now.state]
    return "other status" if was.state == "skipped" else "newly passing"
