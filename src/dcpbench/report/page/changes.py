"""What the page says of a sweep and the one before it."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd

from dcpbench.analysis.cell_identity import cell_names, identity_keys, with_cells
from dcpbench.analysis.comparison import OTHER_CONFIGURATION, SAME, compared, differences
from dcpbench.analysis.costs import CHANGED, TOO_FEW, Rule, is_regression
from dcpbench.analysis.frame import Sweeps, ok, records, short_names
from dcpbench.records import files
from dcpbench.records.row_reader import parse
from dcpbench.records.store import SWEEP_JSON
from dcpbench.report.labels import quantity

_LISTED = 300


def without_row(folder: Path, frame: pd.DataFrame) -> list[str]:
    """The cells of the sweep in `folder` that have not run, by what its `sweep.json` says."""
    with suppress(OSError, ValueError):
        record, _ = parse(files.read(folder / SWEEP_JSON))
        cells = record.get("cells") if isinstance(record, dict) else None
        done = set(frame["cell"])
        return [cell for cell in cells or () if isinstance(cell, str) and cell not in done]
    return []


def changes(before: Sweeps, now: Sweeps) -> dict[str, Any]:
    """What the page says of two sweeps: `statuses` and `costs` that changed, what to look at first before the
    others, each with the text of both sides and `row`, the number of a row of the cell now."""
    frame = now.frame.reset_index(drop=True)
    found = compared("", before.frame, frame, Rule())
    both = pd.concat([before.frame, frame])
    cells = with_cells(frame, identity_keys(both["overrides"], both["config"]))
    worst = cells.assign(ok=ok(frame)).sort_values("ok", kind="stable").drop_duplicates("key")
    rows = {key: int(row) for key, row in zip(worst["key"], worst.index, strict=True)}
    changed = found.statuses[found.statuses["change"] != SAME]
    called = found.costs[found.costs["verdict"].isin(CHANGED)]
    called = called.assign(worse=is_regression(called)).sort_values("worse", ascending=False, kind="stable")
    names = dict(zip(found.cells.index, cell_names(found.cells), strict=True))
    labels = short_names([*before.environments, *now.environments])
    differing = differences({"old": before, "new": now})
    return {
        "name": labels[next(iter(before.environments))],
        "started_at": _text(before.frame["started_at"].dropna().min()),
        "common": int((~found.statuses["change"].isin(["new", "vanished", OTHER_CONFIGURATION])).sum()),
        "apart": found.apart,
        "counts": {
            str(name): int(count) for name, count in changed["change"].value_counts(sort=False).items()
        },
        "statuses": [
            {"change": change, "cell": _named(names[key]), "row": rows.get(key), "old": old, "new": new}
            for change, key, old, new in changed[["change", "key", "old", "new"]].head(_LISTED).to_numpy()
        ],
        "costs": [
            {
                "metric": one["metric"],
                "of": one["name"] if one["level"] != "cell" else _named(names[one["key"]]),
                "row": rows.get(one["key"]),
                "old": quantity(one["metric"], one["old"]),
                "new": quantity(one["metric"], one["new"]),
                **{name: one[name] for name in ("ratio", "verdict", "worse")},
            }
            for one in records(called.head(_LISTED))
        ],
        "too_few_runs": bool(found.costs["verdict"].eq(TOO_FEW).any()),
        "differing": records(differing),
    }


def _named(cell: str) -> str:
    """The name of a cell without the axes that say nothing of it."""
    return " ".join(part for part in cell.split(" ") if not part.endswith("=-"))


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
