"""The data of the page, by columns: equal values next to each other compress about four times as well."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from dcpbench.analysis.causes import causes_of, short_reason
from dcpbench.analysis.cell_identity import identity_keys, override_values
from dcpbench.analysis.differing import axes_that_differ, cell_names, matrices
from dcpbench.analysis.frame import Sweeps, outcomes, plain_rows, row_noun
from dcpbench.analysis.runs import failed_checks, rerun_commands, row_names, without_numbers
from dcpbench.code.sources import recorded
from dcpbench.config.text import clipped
from dcpbench.core.axes import AXES
from dcpbench.core.checks import CHECKS, CheckSpec
from dcpbench.core.metrics import METRICS
from dcpbench.core.sentences import described
from dcpbench.core.statuses import SHOWN
from dcpbench.records.row import columns, dict_in, list_in, notes_of
from dcpbench.records.store import DETAILS_JSONL, RESULTS_JSONL
from dcpbench.verdict.sentences import rank_numbers

_POINTS = 200
_DIGITS = 10
_MISSED = 20
_SHORT = 300
_REPEATED = 20
"""The fewest characters of a message for which a log refers to the reason."""
_NOTE = "(the message is in the reason)"
_OF_ENDING = ("rank", "doing", "phases", "log", "issue", "differs", "marks", "after_repair")
_NOT_KEPT = ("schema_version", "config_dir", "cwd")


@dataclass(frozen=True)
class PageData:
    """The data of a page. Its scripts read these fields, and `columns`, by their names.

    Args:
        rows: the number of runs.
        columns: the values of each run: columns of a row; `sweep`, if there are several; overrides that vary
            and are no axes; and what is derived from the row: what it is `shown` as and whether that is `ok`,
            its `key`, the `name` of its configuration, its `number` among the runs of that; the command that
            runs it `again`; its `short` reason, the `reason_group` of those that differ only in numbers,
            likely `causes`, the checks it was `seen_by`, `losses`, `ending`, `check_details`, and why checks
            are null (`nulls`).
        axes: the columns in which configurations can differ.
        varying: the axes with several values.
        matrices: the axes of the rows and columns of each matrix, and the runs that it shows.
        statuses: what runs can be shown as, the worst first.
        environments: a column of the environment for each sweep, and each machine it ran on `earlier`: its
            `title` and `known` values; one that is `partial` has only those that differed then.
        left_out: sentences about what could not be read.
        changes: what changed since the sweep before, the worst first.
        complete: whether every cell has a row.
    """

    rows: int
    columns: dict[str, list[Any]]
    axes: list[str]
    varying: list[str]
    matrices: list[dict[str, Any]]
    statuses: list[dict[str, Any]]
    checks: list[dict[str, Any]]
    metrics: list[dict[str, Any]]
    environments: list[dict[str, Any]]
    left_out: list[str]
    changes: list[dict[str, Any]]
    complete: bool


def page_data(sweeps: Sweeps, changes: list[dict[str, Any]], characters: int) -> PageData:
    """Return the data of the page of some sweeps, ready for JSON: longer texts are cut, and so are lists."""
    frame, several = sweeps.frame, len(sweeps.environments) > 1
    kept = ["sweep"] * several + [column for column in columns() if column not in _NOT_KEPT]
    rows = [row | {"details": dict_in(row["details"])} for row in plain_rows(frame[[*kept, "details"]])]
    shown, short = outcomes(frame), [clipped(short_reason(row), _SHORT) for row in rows]
    # Overrides that vary, and are part of a cell's identity, are axes too.
    keys, words = identity_keys(frame), [override_values(line) for line in frame["overrides"]]
    given = dict.fromkeys(name for of in words for name in of if name in keys and name not in kept)
    varied = {name: [values_of_row.get(name) for values_of_row in words] for name in given}
    others = {name: of for name, of in varied.items() if len({*of}) > 1}
    values: dict[str, list[Any]] = others | {column: [row[column] for row in rows] for column in kept}
    axes = {name: values[name] for name in (*["sweep"] * several, *AXES, *others)}
    labels = [
        f"repeat {row['repeat']}" if row["retry_of"] is None else f"retry of repeat {row['retry_of']}"
        for row in rows
    ]
    places = pd.factorize(pd.Series([*zip(*axes.values(), strict=True)], dtype=object))[0]
    values |= {
        "key": [f"{row['sweep']}/{row['cell']}" if several else str(row["cell"]) for row in rows],
        "name": row_names(frame).tolist() if row_noun(frame) == "stop" else cell_names(axes),
        "number": run_numbers(places.tolist(), labels),
        "shown": [spec.name for spec in shown],
        "ok": [spec.ok for spec in shown],
        "short": short,
        "reason_group": pd.factorize(pd.Series(short).map(without_numbers))[0].tolist(),
        "causes": [*map(causes_of, rows)],
        "seen_by": [*map(failed_checks, rows)],
        "losses": [_losses(row["details"]) for row in rows],
        "ending": [_ending(row, characters) for row in rows],
        "check_details": [_checks(row["details"], characters) for row in rows],
        "nulls": [*map(why_null, rows)],
    }
    return PageData(
        rows=len(frame),
        columns=_clean(values, characters) | {"again": rerun_commands(frame)},
        axes=[*axes],
        varying=axes_that_differ(axes),
        matrices=matrices(axes),
        statuses=[
            {"name": spec.name, "letter": spec.letter, "label": spec.label, "means": spec.help}
            for spec in SHOWN.values()
        ],
        checks=[
            {"name": spec.name, "training": spec.training, "explained": _explained(spec)}
            for spec in CHECKS.values()
        ],
        metrics=[
            {"name": spec.name, "unit": spec.unit, "help": spec.help, "headline": spec.history}
            for spec in METRICS.values()
        ],
        environments=_clean([*_environments(sweeps.environments)], characters),
        left_out=_clean(sweeps.left_out[:_MISSED], characters),
        changes=changes,
        complete=not any(sweeps.not_run().values()),
    )


def _environments(environments: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the columns of the environment, with a line for the source of each package."""
    for sweep, known in environments.items():
        machines = [known, *map(dict_in, list_in(known.get("earlier")))]
        for number, machine in enumerate(machines):
            sources = {f"source of {name}": of.digest for name, of in sorted(recorded(machine).items())}
            shown = {name: value for name, value in machine.items() if name not in ("code", "earlier")}
            title = [sweep] * (len(environments) > 1) + [f"earlier ({number})"] * (number > 0)
            known_then = {"known": shown | sources, "partial": number > 0}
            yield {"title": ", ".join(title) or "now", **known_then}


def run_numbers(places: Sequence[int], labels: Sequence[str]) -> list[str]:
    """Return the name of each run among those of its configuration, which has a place: its label, or a number
    if labels are equal; empty if it is the only one.

    >>> run_numbers([0, 0, 1, 2, 2], ["repeat 0", "repeat 1", "repeat 0", "repeat 0", "repeat 0"])
    ['repeat 0', 'repeat 1', '', 'run 1', 'run 2']
    """
    runs = pd.DataFrame({"place": [*places], "label": [*labels]})
    by_place = runs.groupby("place")
    size, number = by_place["label"].transform("size"), by_place.cumcount() + 1
    distinct = by_place["label"].transform("nunique") == size
    return runs["label"].where(distinct, "run " + number.astype(str)).where(size > 1, "").tolist()


def _explained(spec: CheckSpec) -> list[str]:
    """Describe what a check proves, its negative control, and where it applies."""
    control = spec.control or "defined by its plug-in; an opened cell shows how many names it caught"
    return [
        f"Proves: {spec.help}.",
        f"Negative control: {control}.",
        f"Applies to {spec.where}; elsewhere it is null." if spec.where else "",
    ]


def shortened(text: str, characters: int) -> str:
    """Return a text, shortened if it is longer."""
    more = len(text) - characters
    files = f"{RESULTS_JSONL} or {DETAILS_JSONL}"
    return text if more <= 0 else f"{text[:characters]} ... ({more} more characters in {files})"


def _clean(value: Any, characters: int) -> Any:
    """Return a JSON value with long texts cut, and null for numbers that are not finite."""
    if isinstance(value, str):
        return shortened(value, characters)
    if isinstance(value, dict):
        return {key: _clean(inner, characters) for key, inner in value.items()}
    if isinstance(value, list):
        return [_clean(inner, characters) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def why_null(row: dict[str, Any]) -> list[list[str]]:
    """Return pairs of a check that the row does not have, or of a part that no check compared, and why."""
    reasons: dict[str, str] = {}
    parts: dict[str, str] = {}
    for note in notes_of(row):
        if note.check:
            part = " ".join(filter(None, (note.name and f"of {note.name}", str(note.place or ""))))
            if not note.name:
                reasons[note.check] = note.sentence
            if part or note.check not in CHECKS:
                parts[f"{note.check} {part}".strip()] = note.sentence
    ended = {"skip": "the cell was skipped"} | {
        status: f"the cell ended as {status} before, or the check does not apply"
        for status in ("crash", "timeout", "error")
    }
    return [
        [name, reasons.get(name) or ended.get(row["status"]) or f"applies to {spec.where or 'other cells'}"]
        for name, spec in CHECKS.items()
        if row[name] is None
    ] + [[part, why] for part, why in [*parts.items()][:_MISSED]]


def _checks(details: dict[str, Any], characters: int) -> dict[str, Any]:
    """Return for each check how many names its control compared, which it missed, and its mismatches."""
    return {
        name: {
            "names": len(dict_in(seen.get("control"))),
            "missed_count": len(missed := list_in(seen.get("control_missed"))),
            "missed": _some(missed),
            "mismatches": seen.get("mismatch_count"),
            "worst": mismatches(seen, characters // 200),
        }
        for name, seen in dict_in(details.get("checks")).items()
        if isinstance(seen, dict)
    }


def _some(names: Sequence[object]) -> str:
    more = f" and {len(names) - _MISSED} more in {DETAILS_JSONL}" if len(names) > _MISSED else ""
    return ", ".join(map(str, names[:_MISSED])) + more


def mismatches(seen: dict[str, Any], most: int) -> list[str]:
    """Return the listed mismatches of a check, and how many more there are."""
    listed = [dict_in(mismatch) for mismatch in list_in(seen.get("worst"))[:most]]
    count = seen.get("mismatch_count")
    more = (count if isinstance(count, int) else 0) - sum(len(_ranks(mismatch)) for mismatch in listed)
    rest = [f"... and {more:,} more, counted on each rank"] if listed and more > 0 else []
    return [*(clipped(_mismatch_text(mismatch), _SHORT) for mismatch in listed), *rest]


def _mismatch_text(finding: dict[str, Any]) -> str:
    """Return a mismatch in one line."""
    what, ranks = described(finding), _ranks(finding)
    named = [text for text in (finding.get("name"), finding.get("where")) if text and isinstance(text, str)]
    apart = finding.get("max_abs_diff")
    parts = [" ".join(named), what, f"rank {rank_numbers(ranks)}" if ranks else ""]
    if isinstance(apart, int | float) and "at most" not in what:
        parts.append(f"at most {apart:.3g} apart")
    return "; ".join(filter(None, parts))


def _ranks(finding: dict[str, Any]) -> list[int]:
    ranks = list_in(finding.get("ranks")) or [finding.get("rank")]
    return [rank for rank in ranks if isinstance(rank, int)]


def _losses(details: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the losses of the first rank, few enough to draw: the uninterrupted run, its twin, and each
    resumed run. Each curve has every n-th (`every`) from step `first` on."""
    rank = dict_in(next(iter(list_in(details.get("ranks"))), None))
    runs = [(name, 1, list_in(values)) for name, values in dict_in(rank.get("losses")).items()]
    for step, values in dict_in(rank.get("resumed")).items():
        runs += [("resumed", int(step) + 1, list_in(values))] if str(step).isdigit() else []
    curves = []
    for name, first, values in runs:
        every = max(1, math.ceil(len(values) / _POINTS))
        losses = [float(f"{it:.{_DIGITS}g}") if type(it) is float else None for it in values[::every]]
        curves += [{"name": name, "first": first, "every": every, "losses": losses}] if losses else []
    return curves


def _ending(row: dict[str, Any], characters: int) -> dict[str, Any]:
    """Return where and how the run ended, and the end of its log."""
    details = row["details"]
    lines = _without_message([*map(str, list_in(details.get("log_tail")))], str(row["reason"] or ""))
    log = [shortened(line, characters // 10) for line in lines[-(characters // 130) :]]
    return {key: details[key] for key in _OF_ENDING if key in details} | {"log_tail": log}


def _without_message(lines: list[str], reason: str) -> list[str]:
    """Return the lines of a log in which a note replaces the longest block that the reason has too.

    >>> _without_message(["load()", "a.LoadError: shard 3 is", "missing"], "LoadError: shard 3 is missing")
    ['load()', '(the message is in the reason)']
    """
    # A trace names an exception with its module, a reason without.
    words = [" ".join(re.sub(r"^(\w+\.)+(?=\w+:)", "", line).split()) for line in lines]
    said, longest = " ".join(reason.split()), (0, 0, 0)
    for first in range(len(words)):
        last = first
        while last < len(words) and (block := " ".join(filter(None, words[first : last + 1]))) in said:
            last += 1
            longest = max(longest, (len(block), first, last))
    length, first, last = longest
    return [*lines[:first], _NOTE, *lines[last:]] if length >= _REPEATED else lines
