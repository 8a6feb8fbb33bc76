"""How the planted faults were seen: under which parallelism, and by which check."""

import pandas as pd

from dcpbench.analysis.frame import is_false
from dcpbench.records.store import CHECKS
from dcpbench.report.labels import SHORT


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
    table = table[list(dict.fromkeys(planted["parallel"].dropna()))].fillna("-")
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
    checks = [SHORT[check] for check in CHECKS if is_false(planted[check]).any()]
    return ", ".join([*checks, *(["error"] if planted["status"].eq("error").any() else [])])
