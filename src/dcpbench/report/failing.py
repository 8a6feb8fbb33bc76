"""What did not simply pass, and the command that runs just that cell again."""

import re
import shlex

import pandas as pd

from dcpbench.report.reading import is_false, is_true
from dcpbench.report.runs import cell_numbers, runs_text, status_text

_NEXT_OVERRIDE = re.compile(r" (?=[+~]*[\w./@:-]+=)")
_DIGITS = re.compile(r"[+-]?\d[\d.]*(?:e[+-]?\d+|x[0-9a-f]+)?")


def failures(frame: pd.DataFrame) -> pd.DataFrame:
    """What is neither a pass at the first try nor a planted fault that was seen: status, cell, reason
    and the command that runs just that cell.

    Runs of one cell that fail for the same reason, numbers aside, are one row, and its column `runs` says
    how many of all its runs they are; without repeats there is no such column.
    """
    runs_of_cell = (
        frame.groupby(cell_numbers(frame))["cell"].transform("size") if len(frame) else frame["cell"]
    )
    well = frame["status"].eq("pass").astype(bool) & ~is_true(frame["flaky"]) | is_true(frame["fault_seen"])
    chosen = frame.assign(of=runs_of_cell)[~well | is_false(frame["fault_seen"])]
    told = pd.DataFrame(
        {
            "status": status_text(chosen),
            "cell": chosen["cell"],
            "reason": chosen["reason"].fillna(""),
            "again": [again(*asked) for asked in zip(chosen["overrides"], chosen["config_dir"], strict=True)],
        }
    )
    if chosen.empty or chosen["of"].max() == 1:
        return told.reset_index(drop=True)
    same = [cell_numbers(chosen), told["status"], told["reason"].map(lambda said: _DIGITS.sub("#", said))]
    kinds = told.groupby(same, sort=False)
    counted = kinds.ngroup().map(kinds.size().reset_index(drop=True))
    told["runs"] = runs_text(chosen.assign(runs=chosen["of"], so_many=counted))
    return told[~kinds.ngroup().duplicated()].reset_index(drop=True)


def again(overrides: object, config_dir: object) -> str:
    """The command that runs just this cell, ready for a shell; `config_dir` is the user's own folder of
    groups, if any."""
    words = ["python", "-m", "dcpbench"]
    if isinstance(config_dir, str):
        words += ["--config-dir", config_dir]
    asked = _NEXT_OVERRIDE.split(overrides) if isinstance(overrides, str) and overrides else []
    return shlex.join([*words, *asked])
