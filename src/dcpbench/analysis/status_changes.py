"""How the status of each cell changed between two sides, each of one run of the cell or of several."""

from dataclasses import dataclass

import pandas as pd

from dcpbench.analysis.failures import again
from dcpbench.analysis.frame import is_false, is_true, ok
from dcpbench.analysis.repeats import status_text

NEWLY_FAILING = "newly failing"
OTHER_CONFIGURATION = "other configuration"
CHANGES = (
    NEWLY_FAILING,
    "flaky",
    "newly skipped",
    "vanished",
    "new",
    "newly passing",
    "other status",
    OTHER_CONFIGURATION,
)
"""The changes, those to look at first before the others."""
SAME = "same"
_COLUMNS = ["change", "key", "before", "old", "new", "failing", "reason", "again"]


@dataclass(frozen=True)
class _Outcome:
    """The runs of a cell together: `state` is absent, ok, skipped, failing or flaky; `statuses` are theirs,
    and `text` says how many of them have which."""

    state: str
    statuses: frozenset[str] = frozenset()
    text: str = "-"


_ABSENT = _Outcome("absent")


def changes(old: pd.DataFrame, new: pd.DataFrame) -> pd.DataFrame:
    """One line for each cell of either side, in the order of `CHANGES`, those that did not change last.

    `old` and `new` say which statuses the runs have. A cell is ok where all of its runs are. It is flaky
    where only some of them are, or where one needed a second try. `failing` tells whether it is not ok in
    the new side; `reason` and `again` are of the first such run. A cell of the new side alone whose address
    the old side has with another configuration is no new cell: `before` is the key of that one, which then
    has no line of its own.

    Args:
        old, new: rows with `key` and `address`, see `cell_identity.with_cells`.
    """
    before, after = _outcomes(old), _outcomes(new)
    bad = {row.key: row for row in new[~ok(new)].fillna({"reason": ""}).iloc[::-1].itertuples(index=False)}
    addresses = {
        **dict(zip(old["key"], old["address"], strict=True)),
        **dict(zip(new["key"], new["address"], strict=True)),
    }
    at_address = {addresses[key]: key for key in before}
    replaced_by = {
        key: at_address[addresses[key]] for key in after if key not in before and addresses[key] in at_address
    }
    lines = []
    for key in dict.fromkeys([*after, *before]):
        if key not in after and key in replaced_by.values():
            continue
        earlier = replaced_by.get(key, key)
        was, now, run = before.get(earlier, _ABSENT), after.get(key, _ABSENT), bad.get(key)
        change = OTHER_CONFIGURATION if key in replaced_by else _change(was, now)
        reason = "" if run is None else str(run.reason or "")
        command = "" if run is None else again(run.overrides, run.config_dir)
        lines.append((change, key, earlier, was.text, now.text, run is not None, reason, command))
    table = pd.DataFrame(lines, columns=_COLUMNS)
    place = {kind: place for place, kind in enumerate([*CHANGES, SAME])}
    return table.sort_values("change", key=lambda kinds: kinds.map(place), kind="stable", ignore_index=True)


def _outcomes(frame: pd.DataFrame) -> dict[str, _Outcome]:
    text = status_text(frame).astype(object)
    text = text.mask(is_true(frame["fault_seen"]), "seen (" + text + ")")
    text = text.mask(is_false(frame["fault_seen"]), "NOT SEEN (" + text + ")")
    runs = pd.DataFrame(
        {
            "key": frame["key"],
            "text": text,
            "ok": ok(frame),
            "flaky": is_true(frame["flaky"]),
            "skip": frame["status"].eq("skip").astype(bool),
        }
    )
    return {str(key): _outcome(of_cell) for key, of_cell in runs.groupby("key", sort=False)}


def _outcome(runs: pd.DataFrame) -> _Outcome:
    counted = runs["text"].value_counts()
    text = ", ".join(
        f"{count} {status}" if len(counted) > 1 else str(status) for status, count in counted.items()
    )
    if runs["flaky"].any() or runs["ok"].nunique() > 1:
        state = "flaky"
    elif not runs["ok"].any():
        state = "failing"
    else:
        state = "skipped" if runs["skip"].all() else "ok"
    return _Outcome(state, frozenset(counted.index), text)


def _change(was: _Outcome, now: _Outcome) -> str:
    if was.state == "absent" or now.state == "absent":
        return "new" if was.state == "absent" else "vanished"
    if was.state == now.state:
        return SAME if was.state == "flaky" or was.statuses == now.statuses else "other status"
    if now.state != "ok":
        return {"failing": NEWLY_FAILING, "flaky": "flaky", "skipped": "newly skipped"}[now.state]
    return "other status" if was.state == "skipped" else "newly passing"
