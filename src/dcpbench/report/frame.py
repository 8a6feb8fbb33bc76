"""The rows of a sweep as a tidy pandas DataFrame: where every table, and a notebook, starts."""

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from dcpbench.results import CHECKS, COLUMNS, ENVIRONMENT_JSON, RESULTS_JSONL, ResultsError, read_rows

AXES = (
    "scenario",
    "parallel",
    "compile",
    "save",
    "model",
    "optimizer",
    "storage",
    "world_size",
    "device",
    "seed",
    "load_parallel",
    "fault",
)
_ALWAYS = ("parallel", "compile", "save")
_COSTS = ("save_s", "save_stall_s", "load_s", "cell_s")
_SHORT = {
    "model_equal": "model=",
    "optim_equal": "optim=",
    "extra_equal": "extra=",
    "loss_resume_equal": "resume=",
    "loss_twin_close": "twin loss~",
    "state_twin_close": "twin state~",
    "loss_resume_close": "resume~",
    "contract_held": "contract",
    "checkpoint_whole": "whole",
    "save_harmless": "harmless",
}


@dataclass(frozen=True)
class Sweeps:
    """The rows of one sweep or of several, as one tidy frame.

    `frame` has one row for each run of a cell: `sweep`, the folder that it is in, then
    `dcpbench.results.COLUMNS` and `details`. `environments` has what each sweep's `environment.json`
    says, nothing where it cannot be read. `left_out` is a sentence for each line that is no row.
    """

    frame: pd.DataFrame
    environments: dict[str, dict[str, Any]]
    left_out: list[str]


def read_sweeps(places: Sequence[Path]) -> Sweeps:
    """The rows of all these sweeps; a folder that is none itself stands for the sweeps in it.

    Raises:
        dcpbench.results.ResultsError: one of the folders holds no results.
    """
    frames, environments, left_out = [], {}, []
    for folder in dict.fromkeys(sweep for place in places for sweep in _sweeps_in(place)):
        frame, sentences = read_frame(folder)
        frame.insert(0, "sweep", str(folder))
        frames.append(frame)
        environments[str(folder)] = read_environment(folder)
        left_out += sentences
    return Sweeps(pd.concat(frames, ignore_index=True), environments, left_out)


def _sweeps_in(place: Path) -> Iterator[Path]:
    if (place / RESULTS_JSONL).exists():
        yield place
        return
    found = sorted(path.parent for path in place.glob(f"*/{RESULTS_JSONL}"))
    if not found:
        raise ResultsError(f"{place}: no sweep here, nor in a folder of it (no {RESULTS_JSONL})")
    yield from found


def read_environment(folder: Path) -> dict[str, Any]:
    """What a sweep's `environment.json` says; nothing if it cannot be read."""
    try:
        known = json.loads((folder / ENVIRONMENT_JSON).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def read_frame(folder: Path) -> tuple[pd.DataFrame, list[str]]:
    """One row for each cell, one column for each of `dcpbench.results.COLUMNS` and `details`.

    Returns:
        the frame, and a sentence for each line of the file that had to be left out.

    Raises:
        dcpbench.results.ResultsError: the folder holds no results.
    """
    rows, left_out = read_rows(folder)
    return pd.DataFrame(rows, columns=[*COLUMNS, "details"]), left_out


def tables(frame: pd.DataFrame) -> list[pd.DataFrame]:
    """What a report shows of a sweep: the cells in which no fault was planted, or none could be, and how
    the planted faults were seen; what would be empty is left out."""
    without_faults = frame[frame["fault_seen"].isna()]
    return [shown for shown in (summary(without_faults), detection(frame)) if len(shown)]


def summary(frame: pd.DataFrame) -> pd.DataFrame:
    """The results table as text: the axes that vary, the verdict, the checks, the costs in seconds."""
    axes = [axis for axis in AXES if axis in _ALWAYS or frame[axis].nunique(dropna=False) > 1]
    table = pd.DataFrame({axis: frame[axis].map(_plain) for axis in axes})
    others = frame["overrides"].map(_beside_axes)
    if others.nunique() > 1:
        table["overrides"] = others
    table["status"] = frame["status"].where(frame["flaky"].ne(True), frame["status"] + " (flaky)")
    for check in CHECKS:
        if frame[check].notna().any():
            table[_SHORT[check]] = frame[check].map(_mark)
    for cost in _COSTS:
        table[cost] = frame[cost].map(_seconds)
    return table


def detection(frame: pd.DataFrame) -> pd.DataFrame:
    """Of each planted fault how it was seen under each parallelism, and of all of them how many were.

    A status where it was seen, NO where it was not in some cell, `-` where it does not apply; `seen by`
    has the checks that told of it. Empty where no fault was planted.
    """
    planted = frame[frame["fault"].notna() & frame["fault_seen"].notna()]
    if planted.empty:
        return pd.DataFrame()
    seen = planted["fault_seen"].astype(bool)
    told = planted["status"].where(seen, "NO").groupby([planted["fault"], planted["parallel"]])
    table = told.agg(lambda all_: "NO" if "NO" in set(all_) else " ".join(sorted(set(all_)))).unstack()
    table = table[list(dict.fromkeys(planted["parallel"]))].fillna("-")
    rate = seen.groupby(planted["parallel"]).agg(["sum", "count"])
    table.loc["all of them"] = [f"{rate['sum'][name]} of {rate['count'][name]}" for name in table.columns]
    by_fault = seen.groupby(planted["fault"]).agg(["sum", "count"])
    table["seen"] = [
        f"{by_fault['sum'][name]} of {by_fault['count'][name]}" if name in by_fault.index else detected(frame)
        for name in table.index
    ]
    table["seen by"] = [_seen_by(planted[planted["fault"] == name]) for name in table.index]
    return table.rename_axis(None, axis="columns").reset_index()


def detected(frame: pd.DataFrame) -> str:
    """How many of the planted faults were seen."""
    seen = frame["fault_seen"].dropna().astype(bool)
    return f"{seen.sum()} of {len(seen)}"


def _seen_by(planted: pd.DataFrame) -> str:
    checks = [_SHORT[check] for check in CHECKS if planted[check].eq(False).any()]
    return ", ".join([*checks, *(["error"] if planted["status"].eq("error").any() else [])])


def failures(frame: pd.DataFrame) -> pd.DataFrame:
    """What is neither a pass at the first try nor a planted fault that was seen: status, cell, reason
    and the command that runs just that cell."""
    well = frame["status"].eq("pass") & frame["flaky"].ne(True) | frame["fault_seen"].eq(True)
    chosen = frame[~well | frame["fault_seen"].eq(False)]
    return pd.DataFrame(
        {
            "status": chosen["status"],
            "cell": chosen["cell"],
            "reason": chosen["reason"].fillna(""),
            "again": [again(*asked) for asked in zip(chosen["overrides"], chosen["config_dir"], strict=True)],
        }
    )


def again(overrides: str, config_dir: object) -> str:
    """The command that runs just this cell; `config_dir` is the user's own folder of groups, if any."""
    own = f"--config-dir {shlex.quote(config_dir)} " if isinstance(config_dir, str) else ""
    return f"python -m dcpbench {own}{overrides}".strip()


def counts(frame: pd.DataFrame) -> str:
    """How many cells have which status, as one phrase."""
    phrases = [f"{number} {status}" for status, number in frame["status"].value_counts().items()]
    if flaky := frame["flaky"].eq(True).sum():
        phrases.append(f"{flaky} flaky")
    if frame["fault_seen"].notna().any():
        phrases.append(f"{detected(frame)} faults seen")
    return ", ".join(phrases)


def _beside_axes(overrides: str) -> str:
    """The overrides that no axis column shows."""
    return " ".join(item for item in overrides.split() if item.partition("=")[0] not in AXES)


def _plain(value: object) -> str:
    if value is None or value is pd.NA or value != value:
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _mark(value: object) -> str:
    return {True: "yes", False: "NO"}.get(value, "-") if isinstance(value, bool) else "-"


def _seconds(value: float | None) -> str:
    return "-" if value is None or pd.isna(value) else f"{value:.3f}"
