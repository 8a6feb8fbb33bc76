"""What did not simply pass, and the command that runs just that cell again."""

import re
import shlex

import pandas as pd

from dcpbench.analysis.cell_identity import override_words
from dcpbench.analysis.frame import ok
from dcpbench.analysis.repeats import cell_numbers, runs_text, status_text

_DIGITS = re.compile(r"[+-]?\d[\d.]*(?:e[+-]?\d+|x[0-9a-f]+)?")


def failures(frame: pd.DataFrame) -> pd.DataFrame:
    """What is neither a pass at the first try nor a planted fault that was seen: status, cell, reason
    and the command that runs just that cell.

    Runs of one cell that fail for the same reason, numbers aside, are one row, and its column `runs` says
    how many of all its runs they are; without repeats there is no such column.
    """
    runs_of_cell = frame.groupby(cell_numbers(frame))["cell"].transform("size")
    known = frame["fault_seen"].isna() & frame["status"].isin(["skip", "xfail"]).astype(bool)
    chosen = frame.assign(of=runs_of_cell)[~ok(frame) | known]
    listed = pd.DataFrame(
        {
            "status": status_text(chosen),
            "cell": _with_sweep(chosen),
            "reason": chosen["reason"].fillna(""),
            "again": [again(*asked) for asked in zip(chosen["overrides"], chosen["config_dir"], strict=True)],
        }
    )
    if chosen.empty or chosen["of"].max() == 1:
        return listed.reset_index(drop=True)
    kinds = listed.groupby(
        [cell_numbers(chosen), listed["status"], _without_numbers(listed["reason"])], sort=False
    )
    agreeing = kinds.ngroup().map(kinds.size().reset_index(drop=True))
    listed["runs"] = runs_text(chosen.assign(runs=chosen["of"], agreeing_runs=agreeing))
    return listed[~kinds.ngroup().duplicated()].reset_index(drop=True)


def of_a_kind(listed: pd.DataFrame, each: bool) -> pd.DataFrame:
    """Of `failures` one row for those alike: the same status and, numbers aside, the same reason. What has to
    be looked at keeps a row of its own if `each` is asked for; a skip or a known failure does not.

    `more` says how many others are like it; `again` is empty where nothing has to be run again, and these
    come first.
    """
    if listed.empty:
        return listed.assign(more="")
    harmless = listed["status"].isin(["skip", "xfail"])
    listed = listed.assign(again=listed["again"].mask(harmless, ""))
    alone = pd.Series(range(len(listed)), index=listed.index).mask(harmless | (not each), -1)
    kinds = listed.groupby([listed["status"], _without_numbers(listed["reason"]), alone], sort=False)
    sizes = kinds["cell"].transform("size")
    listed["more"] = sizes.map(lambda size: f"and {size - 1} more like it" if size > 1 else "")
    first = listed[~kinds.ngroup().duplicated()]
    return first.sort_values("again", key=lambda asked: asked.ne(""), kind="stable").reset_index(drop=True)


def again(overrides: object, config_dir: object) -> str:
    """The command that runs just this cell, ready for a shell; `config_dir` is the user's own folder of
    groups, if any."""
    folder = ["--config-dir", config_dir] if isinstance(config_dir, str) else []
    return shlex.join(["python", "-m", "dcpbench", *folder, *override_words(overrides)])


def _with_sweep(frame: pd.DataFrame) -> "pd.Series[str]":
    several = "sweep" in frame and frame["sweep"].nunique() > 1
    return frame["sweep"] + ": " + frame["cell"] if several else frame["cell"]


def _without_numbers(reasons: "pd.Series[str]") -> "pd.Series[str]":
    return reasons.map(lambda reason: _DIGITS.sub("#", reason))
