"""The head of the page: what ran, its result, when and on what, and what changed since the sweep before."""

import html
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import chain
from typing import Any

import pandas as pd

from dcpbench.analysis.cell_identity import add_cell_keys, identity_keys, names_of_cells
from dcpbench.analysis.comparison import CHANGES, SAME, code_changes, compare_sweeps, environment_differences
from dcpbench.analysis.costs import CHANGED, TOO_FEW, always_compared, is_regression
from dcpbench.analysis.frame import (
    Sweeps,
    as_expected,
    as_text,
    outcomes,
    plain_rows,
    row_noun,
    short_names,
    without_retries,
)
from dcpbench.analysis.runs import cell_numbers, remarks
from dcpbench.code.sources import COMMITS, short
from dcpbench.config.text import counted, duration_text, listed, visible
from dcpbench.core.axes import AXES
from dcpbench.core.statuses import SHOWN, StatusSpec
from dcpbench.records.row import WRONG_CONFIGURATION, cell_seconds, dict_in, list_in
from dcpbench.report.document import quantity_text

_LISTED = 300
_NAMED = 20
_BAD_CHANGES = CHANGES[:4]


def page_head(sweeps: Sweeps, changes: dict[str, Any]) -> str:
    """Return the head of the page as HTML.

    Args:
        changes: what `changes_since` returned; empty if there is no sweep to compare with.
    """
    frame, missing = sweeps.frame, [*chain.from_iterable(sweeps.not_run().values())]
    bad = not as_expected(frame).all() or missing or frame["status"].eq("skip").all()
    parts = [f'<p id="verdict" class="verdict{" bad" if bad else ""}">{_text(_verdict(frame, not missing))}']
    parts += [f" {_text(remark)}." for remark in remarks(frame)]
    if missing:
        names = _text(listed(missing, _NAMED, ", and"))
        parts.append(
            f' <span class="named" title="{names}">{counted(len(missing), "cell")} did not run.</span>'
        )
    parts.append(f'</p>\n<p id="origin" class="constants">{_spans(_origin(sweeps))}</p>\n')
    words = ["run", *known] if (known := sweeps.words()) else []
    if row_noun(frame) == "stop":
        words = ["script", "--", str(dict_in(frame["config"].iloc[0]).get("script.command"))]
    if words:
        parts.append(f'<p id="ran">Ran <code>dcpbench {_text(" ".join(words))}</code></p>\n')
    same = [(axis, frame[axis][0]) for axis in AXES if len(frame) and frame[axis].nunique(dropna=False) == 1]
    constants = [f"{axis}={as_text(value)}" for axis, value in same if pd.notna(value) and value != "script"]
    parts.append(f'<p id="constants" class="constants">{_spans(constants)}</p>\n')
    if changes:
        parts.append(f'<p id="against">{_text(changes["summary"])}</p>')
    return "".join(parts)


def changes_since(before: Sweeps, now: Sweeps) -> dict[str, Any]:
    """Compare two sweeps: a `summary`, and as `lines` what changed, the worst first, each with `row`, the
    number of a row of the cell now."""
    frame = now.frame.reset_index(drop=True)
    comparison = compare_sweeps("", before.frame, frame, always_compared())
    both = pd.concat([before.frame, frame])
    cells = add_cell_keys(frame, identity_keys(both))
    worst = cells.assign(ok=as_expected(frame)).sort_values("ok", kind="stable").drop_duplicates("key")
    rows = {key: int(row) for key, row in zip(worst["key"], worst.index, strict=True)}
    names = dict(zip(comparison.cells.index, names_of_cells(comparison.cells), strict=True))
    changed = comparison.statuses[comparison.statuses["change"] != SAME]
    statuses = [
        {
            "what": change,
            "worse": change in _BAD_CHANGES,
            "cell": names[key],
            "row": rows.get(key),
            "text": f"{old} \u2192 {new}",
        }
        for change, key, old, new in changed[["change", "key", "old", "new"]].head(_LISTED).to_numpy()
    ]
    called = comparison.costs[comparison.costs["verdict"].isin(CHANGED)]
    called = called.assign(worse=is_regression(called)).sort_values("worse", ascending=False, kind="stable")
    costs = []
    for cost in plain_rows(called.head(_LISTED)):
        then, later = (quantity_text(cost["metric"], cost[side]) for side in ("old", "new"))
        costs.append(
            {
                "what": f"{cost['metric']} {cost['verdict']}",
                "worse": cost["worse"],
                "cell": names[cost["key"]] if cost["level"] == "cell" else cost["name"],
                "row": rows.get(cost["key"]),
                "text": f"{cost['ratio']:.3g}\u00d7" if then == later else f"{then} \u2192 {later}",
            }
        )
    worse = int(called["worse"].sum())
    counts = [f"{count} {name}" for name, count in changed["change"].value_counts(sort=False).items()]
    counts += [f"{counted(worse, 'cost')} worse"] if worse else []
    counts += [f"{counted(len(called) - worse, 'cost')} better"] if len(called) > worse else []
    differing = environment_differences({"old": before, "new": now})
    torch = differing[differing["what"].eq("torch")]
    others = [what for what in differing["what"] if what not in ("torch", *COMMITS.values())]
    began = before.frame["started_at"].dropna().min()
    name = short_names([*before.environments, *now.environments])[next(iter(before.environments))]
    day = began[:10] if isinstance(began, str) else ""
    run_on = f" (run on {day})" if day not in name else ""
    sentence = [
        f"Compared with {name}{run_on}: "
        f"{comparison.apart or ', '.join(counts) or 'no status changed, and no cost beyond noise'}",
        *(f"torch {old} \u2192 {new}" for old, new in zip(torch["old"], torch["new"], strict=True)),
        *([f"other {', '.join(others)}"] if others else []),
        *code_changes(before, now),
    ]
    if comparison.costs["verdict"].eq(TOO_FEW).any():
        sentence.append("costs of single cells need 3 runs of each to be compared (repeats=5)")
    return {
        "summary": "; ".join(sentence) + ".",
        "lines": [
            *(change for change in statuses if change["worse"]),
            *costs,
            *(change for change in statuses if not change["worse"]),
        ],
    }


def _verdict(frame: pd.DataFrame, complete: bool) -> str:
    frame = without_retries(frame)
    if frame.empty:
        return "This sweep has no rows yet."
    cells = cell_numbers(frame).nunique()
    size = counted(cells, row_noun(frame))
    size = size if cells == len(frame) else f"{counted(len(frame), 'run')} of {size}"
    specs = outcomes(frame)
    bad, good = ([spec for spec in specs if spec.ok is wanted] for wanted in (False, True))
    skipped = all(spec.name == "skip" for spec in specs)
    if skipped:
        text = f"{size}, all skipped."
    elif bad:
        others = f"; as expected: {_counts(good)}" if good else ""
        text = f"{size}, {len(bad)} not as expected: {_counts(bad)}{others}."
    else:
        text = f"{size}, all as expected: {_counts(good)}."
    status = int(bool(bad) or skipped)
    if row_noun(frame) == "stop" and not bad and any(spec.name == "skip" for spec in specs):
        status = WRONG_CONFIGURATION
    return f"{text} Exit status {status}." if complete else text


def _counts(specs: Sequence[StatusSpec]) -> str:
    """Count statuses, the worst first."""
    numbers = Counter(specs)
    return ", ".join(f"{numbers[spec]} {spec.label}" for spec in SHOWN.values() if spec in numbers)


def _origin(sweeps: Sweeps) -> Iterator[str]:
    """Say with which torch, when, how long, on what and at which commits rows were measured, where known."""
    frame, known = sweeps.frame, [*sweeps.environments.values()]
    yield _all_of("torch ", frame["torch_version"].dropna()) or _all_of(
        "torch ", (environment.get("torch") for environment in known)
    )
    began = frame["started_at"].dropna()
    yield (
        began.min()[:16].replace("T", " ") + (" UTC" if began.min().endswith("+00:00") else "")
        if len(began)
        else ""
    )
    with suppress(ValueError, OverflowError):  # not a time, or not one of this calendar
        times = plain_rows(frame.loc[began.index, ["cell_s", "shared_cell_s"]])
        took = [cell_seconds(row) or 0 for row in times]
        starts = [datetime.fromisoformat(text).timestamp() for text in began]
        spent_s = max((start + of for start, of in zip(starts, took, strict=True)), default=0) - min(
            starts, default=0
        )
        yield duration_text(spent_s) if spent_s > 0 and row_noun(frame) == "cell" else ""
    yield _all_of("", map(_machine, known))
    yield from sweeps.shared_gpus(frame)
    for column, name in COMMITS.items():
        yield _all_of(f"{name} ", map(short, frame[column].dropna()))


def _machine(known: dict[str, Any]) -> str:
    numbers = Counter(map(str, list_in(known.get("gpus"))))
    cores = f"{known['cpu_cores']} CPU cores" if known.get("cpu_cores") else ""
    return ", ".join(f"{count} \u00d7 {gpu}" if count > 1 else gpu for gpu, count in numbers.items()) or cores


def _all_of(name: str, values: Iterable[object]) -> str:
    texts = ", ".join(dict.fromkeys(str(value) for value in values if value))
    return name + texts if texts else ""


def _spans(texts: Iterable[str]) -> str:
    return "".join(f"<span>{_text(text)}</span>" for text in texts if text)


def _text(text: str) -> str:
    return html.escape(visible(text))
