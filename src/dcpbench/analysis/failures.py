"""What did not simply pass, and the command that runs just that cell again."""

import re
import shlex

import pandas as pd

from dcpbench.analysis.frame import is_false, is_true
from dcpbench.analysis.repeats import cell_numbers, runs_text, status_text

_NEXT_OVERRIDE = re.compile(r" (?=[+~]*[\w./@:-]+=)")
_DIGITS = re.compile(r"[+-]?\d[\d.]*(?:e[+-]?\d+|x[0-9a-f]+)?")


def failures(frame: pd.DataFrame) -> pd.DataFrame:
    """What is neither a pass at the first try nor a planted fault that was seen: status, cell, reason
    and the command that runs just that cell.

    Runs of one cell that fail for the same reason, numbers aside, are one row, and its column `runs` says
    how many of all its runs they are; without repeats there is no such column.
    """
    runs_of_cell = frame.groupby(cell_numbers(frame))["cell"].transform("size")
    well = frame["status"].eq("pass").astype(bool) & ~is_true(frame["flaky"]) | is_true(frame["fault_seen"])
    chosen = frame.assign(of=runs_of_cell)[~well | is_false(frame["fault_seen"])]
    told = pd.DataFrame(
        {
            "status": status_text(chosen),
            "cell": _with_sweep(chosen),
            "reason": chosen["reason"].fillna(""),
            "again": [again(*asked) for asked in zip(chosen["overrides"], chosen["config_dir"], strict=True)],
        }
    )
    if chosen.empty or chosen["of"].max() == 1:
        return told.reset_index(drop=True)
    same = [cell_numbers(chosen), told["status"], _without_numbers(told["reason"])]
    kinds = told.groupby(same, sort=False)
    counted = kinds.ngroup().map(kinds.size().reset_index(drop=True))
    told["runs"] = runs_text(chosen.assign(runs=chosen["of"], so_many=counted))
    return told[~kinds.ngroup().duplicated()].reset_index(drop=True)


def _with_sweep(frame: pd.DataFrame) -> "pd.Series[str]":
    several = "sweep" in frame and frame["sweep"].nunique() > 1
    return frame["sweep"] + ": " + frame["cell"] if several else frame["cell"]


def of_a_kind(told: pd.DataFrame, each: bool) -> pd.DataFrame:
    """Of `failures` one row for those alike: the same status and, numbers aside, the same reason. What has to
    be looked at keeps a row of its own if `each` is asked for; a skip or a known failure does not.

    `more` says how many others are like it; `again` is empty where nothing has to be run again, and these
    come first.
    """
    harmless = told["status"].isin(["skip", "xfail"])
    told = told.assign(again=told["again"].mask(harmless, ""))
    alone = pd.Series(range(len(told)), index=told.index).mask(harmless | (not each), -1)
    kinds = told.groupby([told["status"], _without_numbers(told["reason"]), alone], sort=False)
    sizes = kinds["cell"].transform("size") if len(told) else alone
    told["more"] = sizes.map(lambda size: f"and {size - 1} more like it" if size > 1 else "")
    first = told[~kinds.ngroup().duplicated()] if len(told) else told
    return first.sort_values("again", key=lambda asked: asked.ne(""), kind="stable").reset_index(drop=True)


def _without_numbers(reasons: "pd.Series[str]") -> "pd.Series[str]":
    return reasons.map(lambda said: _DIGITS.sub("#", said))


def again(overrides: object, config_dir: object) -> str:
    """The command that runs just this cell, ready for a shell; `config_dir` is the user's own folder of
    groups, if any."""
    words = ["python", "-m", "dcpbench"]
    if isinstance(config_dir, str):
        words += ["--config-dir", config_dir]
    asked = _NEXT_OVERRIDE.split(overrides) if isinstance(overrides, str) and overrides else []
    return shlex.join([*words, *asked])
