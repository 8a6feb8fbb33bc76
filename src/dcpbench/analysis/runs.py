"""The runs of a cell, which are rows that differ only in `repeat`: their results, and those that failed."""

import re
import shlex
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import pandas as pd

from dcpbench.analysis.causes import causes_of, short_reason
from dcpbench.analysis.cell_identity import add_cell_keys, identity_keys, names_of_cells, override_words
from dcpbench.analysis.frame import as_expected, is_true, plain_rows, row_noun
from dcpbench.config.text import listed, program
from dcpbench.core.checks import CHECKS
from dcpbench.core.metrics import METRICS
from dcpbench.core.plugins import commands_of_plugins
from dcpbench.core.statuses import SEVERITY, STATUSES, UNKNOWN
from dcpbench.records.row import dict_in, list_in, notes_of
from dcpbench.verdict.verdict import KNOWN

_REPEAT = re.compile(r"(^|,)repeat=\d+(?=$|,)")
_WHOLE = re.compile(r"-?\d+, resumed -?\d+")
_DIGITS = re.compile(r"[+-]?\d[\d.]*(?:e[+-]?\d+|x[0-9a-f]+)?")


def status_text(frame: pd.DataFrame) -> "pd.Series[str]":
    """Return the status, and whether a retry had another."""
    return frame["status"].mask(is_true(frame["flaky"]), frame["status"] + " (flaky)")


def severity(frame: pd.DataFrame) -> "pd.Series[int]":
    """Return how bad each row is: the least is the worst, and an unknown status is worse than any."""
    statuses = frame["status"].where(frame["status"].isin([*STATUSES]), UNKNOWN.name)
    rank = statuses.map(SEVERITY).astype(int)
    return rank.mask(is_true(frame["flaky"]), rank.clip(upper=SEVERITY["flaky"]))


def cell_numbers(frame: pd.DataFrame) -> "pd.Series[int]":
    """Return the number of each row's cell, in the order of first runs."""
    names = [name for name in ("sweep", "config_digest") if name in frame]
    return frame.groupby(names, sort=False).ngroup()


def one_per_cell(frame: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each cell, with its number of `runs`, of those that have its status
    (`agreeing_runs`), and of those that were timed (`timed_runs`).

    It is the row of the first of the worst runs. A check passed if it passed in every run that made it;
    metrics are medians. `cell` and `overrides` name no repeat, and `overrides` nothing in which runs differ.
    """
    if frame.empty:
        counts = ("runs", "agreeing_runs", "timed_runs")
        return frame.assign(**{name: pd.Series(dtype=int) for name in counts})
    frame = frame.reset_index(drop=True)
    numbers, ranks = cell_numbers(frame), severity(frame)
    worst = ranks.groupby(numbers).idxmin()
    cells = frame.loc[worst.to_numpy()].set_axis(worst.index)
    cells["cell"] = cells["cell"].str.replace(_REPEAT, "", regex=True).str.strip(" ,")
    runs = frame.groupby(numbers)
    cells[[*CHECKS]] = runs[[*CHECKS]].min()
    cells[[*METRICS]] = runs[[*METRICS]].median()
    cells["flaky"] = runs["flaky"].max()
    cells["runs"] = runs.size()
    cells["timed_runs"] = runs["cell_s"].count()
    cells["overrides"] = frame["overrides"].groupby(numbers).agg(_common).astype("string")
    cells["agreeing_runs"] = (ranks == ranks.groupby(numbers).transform("min")).groupby(numbers).sum()
    return cells.reset_index(drop=True)


def runs_text(cells: pd.DataFrame) -> "pd.Series[str]":
    """Return `5 runs`, or `2 of 5 runs` if only these have the cell's status; nothing for one run."""
    texts = [
        "" if runs == 1 else f"{runs} runs" if agreeing == runs else f"{agreeing} of {runs} runs"
        for agreeing, runs in zip(cells["agreeing_runs"], cells["runs"], strict=True)
    ]
    return pd.Series(texts, index=cells.index, dtype="string")


def failures(frame: pd.DataFrame) -> pd.DataFrame:
    """Return every run that is not a pass or a detected fault: its status, cell by the
    axes that vary, short reason, likely `cause`, one a line (can be empty), and the command to run it again.

    Runs of one cell with the same reason, except for numbers, are one row; its column `runs` counts them if
    any cell has repeats.
    """
    known = frame["fault_seen"].isna() & frame["status"].isin(["skip", "xfail"]).astype(bool)
    chosen = ~as_expected(frame) | known
    numbers, named = cell_numbers(frame), row_names(frame)
    of = numbers.groupby(numbers).transform("size")[chosen]
    numbers, named, frame = numbers[chosen], named[chosen], frame[chosen]
    several = "sweep" in frame and frame["sweep"].nunique() > 1
    listed = pd.DataFrame(
        {
            "status": status_text(frame),
            "cell": frame["sweep"] + ": " + named if several else named,
            "target": user_targets(frame),
            **why_failed(frame),
        }
    )
    if frame.empty or of.max() == 1:
        return listed.reset_index(drop=True)
    kinds = listed.groupby([numbers, listed["status"], listed["reason"].map(without_numbers)], sort=False)
    listed["runs"] = runs_text(pd.DataFrame({"runs": of, "agreeing_runs": kinds["cell"].transform("size")}))
    return listed[~kinds.ngroup().duplicated()].reset_index(drop=True)


def row_names(frame: pd.DataFrame) -> "pd.Series[str]":
    """Return a name of each row's cell: the axes and overrides that distinguish the cells; of a stop its
    own."""
    if frame.empty or row_noun(frame) == "stop":
        return frame["cell"].str.removeprefix("stop=")
    return pd.Series(names_of_cells(add_cell_keys(frame, identity_keys(frame))), frame.index, "string")


def why_failed(frame: pd.DataFrame) -> dict[str, list[str]]:
    """Return the short `reason` of each row, its likely `cause`, one a line, and the command that
    runs it `rerun_command`."""
    rows = plain_rows(frame[["status", "reason", "details", "parallel", "checkpointer", *CHECKS]])
    return {
        "reason": [short_reason(row) for row in rows],
        "cause": ["\n".join(f"likely: {cause}" for cause in causes_of(row)) for row in rows],
        "again": rerun_commands(frame),
    }


def grouped_failures(listed: pd.DataFrame) -> pd.DataFrame:
    """Return one of `failures` for each status, user's target, reason and cause, except for numbers, and how
    many `more` there are.

    Rows with nothing to run again have an empty `rerun_command` and come last.
    """
    if listed.empty:
        return listed.assign(more="")
    listed = listed.assign(again=listed["again"].mask(listed["status"].isin(["skip", "xfail"]), ""))
    texts = [listed[name].map(without_numbers) for name in ("reason", "cause")]
    kinds = listed.groupby([listed["status"], listed["target"], *texts], sort=False)
    sizes = kinds["cell"].transform("size")
    listed["more"] = sizes.map(lambda size: f"and {size - 1} more like it" if size > 1 else "")
    first = listed[~kinds.ngroup().duplicated()]
    return first.sort_values("again", key=lambda words: words.eq(""), kind="stable").reset_index(drop=True)


def remarks(frame: pd.DataFrame) -> list[str]:
    """Say what green rows do not: which numbers that no checkpoint has a pass has lost, what is not exact in
    a user's own model, and which known failures are PyTorch's."""
    rows = plain_rows(
        frame.loc[frame["fault_seen"].isna(), ["status", "resume", "config", "details", *CHECKS]]
    )
    said, of_own_models, others, of_torch = list[str](), Counter[str](), dict[str, None](), 0
    if lost := [numbers for row in rows if row["status"] == "pass" and (numbers := lost_numbers(row))]:
        passes = f"{len(lost)} pass{'es' * (len(lost) > 1)} with values that no checkpoint has"
        names = listed([*dict.fromkeys(chain(*lost))])
        said.append(f"{passes}: {names} (dcpbench show FOLDER CELL)")
    parts = Counter(
        unjudged for row in rows if row["status"] in ("pass", "xfail") for unjudged in _unjudged(row)
    )
    said += [
        f"{number} {'is' if number == 1 else 'are'} ok without {unjudged}"
        for unjudged, number in parts.items()
    ]
    for row in (row for row in rows if row["status"] == "xfail"):
        checks = dict_in(dict_in(row["details"]).get("checks"))
        worst = (dict_in(checks.get(check)).get("worst") for check in CHECKS if row[check] is False)
        differ = listed(
            [*dict.fromkeys(str(dict_in(mismatch).get("name")) for mismatch in list_in(next(worst, None)))]
        )
        known = [(by, reason, link) for by, reason, link in list_in(dict_in(row["details"]).get(KNOWN))]
        own_model = dict_in(row["config"]).get("workload.target")
        for by, reason, link in known:
            page = f" ({link})" if link else ""
            if own_model:
                how = "trained as without the parallelism" if row["resume"] else "resumed exactly"
                of_own_models[f"not {how}: {f'{differ} differ; ' if differ else ''}{by}: {reason}{page}"] += 1
            elif link:  # without a page it is an entry of the user's own list
                others[f"{by}{page}"] = None
        of_torch += not own_model and any(link for *_, link in known)
    said += [f"{number} xfail of your own model, {text}" for text, number in of_own_models.items()]
    by_torch = f"{of_torch} xfail by known failures of PyTorch: {listed([*others])}"
    return [*said, by_torch] if others else said


def _unjudged(row: Mapping[str, Any]) -> set[str]:
    """Return where checks of a row were not made, of those made elsewhere, such as at another checkpoint."""
    return {
        f"{note.check} {note.place}: {note.text}"
        for note in notes_of(row)
        if note.place and not note.name and row.get(note.check) is not None
    }


def lost_numbers(row: Mapping[str, Any]) -> list[str]:
    """Return the names of whole numbers that no state dict has and that differ after a resume."""
    values = (note for note in notes_of(row) if note.kind == "in_no_state_dict")
    return [note.name for note in values if _WHOLE.fullmatch(note.text)]


def user_targets(cells: pd.DataFrame) -> "pd.Series[str]":
    """Return the user's target of each cell, which is its model; empty for dcpbench's own models."""
    models = cells.get("model", pd.Series("", cells.index)).astype("string").fillna("")
    return models.where(models.str.contains(".", regex=False), "")


def rerun_command(row: Mapping[str, Any]) -> str:
    """Return the shell command that runs a row's cell again, from any folder."""
    config_dir, cwd = row["config_dir"], row["cwd"]
    start, *module = program()
    there = ""
    if isinstance(cwd, str):
        there = f"cd {shlex.quote(cwd)} && "
        with suppress(OSError):  # the current folder was removed
            if "/" in start and cwd != str(Path.cwd()):
                start = str(Path(start).absolute())
    folder = ["--config-dir", config_dir] if isinstance(config_dir, str) else []
    words = override_words(row["overrides"])
    run = [] if words[:1] and words[0] in commands_of_plugins() else ["run", *folder]
    return there + shlex.join([start, *module, *run, *words])


def rerun_commands(frame: pd.DataFrame) -> list[str]:
    """Return the command that runs each row's cell `rerun_command`."""
    return [*map(rerun_command, plain_rows(frame[["overrides", "config_dir", "cwd"]]))]


def without_numbers(reason: str) -> str:
    """Return a reason without its numbers, which differ between runs that failed in the same way."""
    return _DIGITS.sub("#", reason)


def failed_checks(row: Mapping[str, Any]) -> list[str]:
    """Return the checks that failed in a row, and `error` if a rank raised."""
    checks = [check for check in CHECKS if row[check] is False]
    return [*checks, *(["error"] if row["status"] == "error" else [])]


def _common(lines: "pd.Series[str]") -> str:
    """Return the words that all of these overrides have, without the repeat."""
    first, *others = map(override_words, lines.unique())
    common = [word for word in first if all(word in words for words in others)]
    return shlex.join(word for word in common if not word.startswith("repeat="))
