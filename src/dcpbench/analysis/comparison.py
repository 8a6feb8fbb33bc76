"""Comparison of one side with an old one: statuses, configurations, costs, environments, code."""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from dcpbench.analysis.cell_identity import (
    add_cell_keys,
    config_differences,
    identity_keys,
    refuse_merged,
    why_nothing_in_common,
)
from dcpbench.analysis.costs import CHANGED, compare_costs, is_regression
from dcpbench.analysis.frame import Sweeps, as_expected, is_false, is_true, without_retries
from dcpbench.analysis.runs import status_text, why_failed
from dcpbench.code.sources import COMMITS, DCPBENCH, changed_files, commits_text, recorded, short
from dcpbench.config.text import listed
from dcpbench.core.axes import AXES

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
"""How a status changed, the most important changes first."""
SAME = "same"

FAIL_ON = (*(change.replace(" ", "-") for change in CHANGES), "failing", *CHANGED, "regressions")
"""The kinds of changes as the command line names them. `failing`: a cell of the new side is not ok, whether
it changed or not. `regressions`: a cost that is worse."""

_STATES = ("flaky", "failing", "skipped")
MACHINE = ("host", "hostname", "node", "cpu", "cpu_model", "cpu_cores", "memory_bytes", "gpu_count", "gpus")
"""Properties of the machine, which no other version of a package changes."""
_FIRST = ("torch", "python", "cuda", "nccl", "driver", "gpus", *COMMITS.values(), "cpu", "host")


@dataclass(frozen=True)
class SweepComparison:
    """The differences of one side, `name`, from the old one.

    Args:
        configurations: one line for each cell (`key`) and key of its configuration (`name`) that differs.
        cells: the axes of each cell by its key.
        apart: why no cell is on both sides; empty if there is one.
    """

    name: str
    statuses: pd.DataFrame
    configurations: pd.DataFrame
    costs: pd.DataFrame
    cells: pd.DataFrame
    apart: str

    def kinds(self) -> set[str]:
        """Return the kinds of changes that were found, out of `FAIL_ON`."""
        changed_kinds = {*self.statuses["change"], *self.costs["verdict"]} - {SAME}
        changed_kinds |= {"failing"} if self.statuses["failing"].any() else set()
        changed_kinds |= {"regressions"} if is_regression(self.costs).any() else set()
        return {kind.replace(" ", "-") for kind in changed_kinds} & set(FAIL_ON)

    def flat(self) -> pd.DataFrame:
        """Return one table: lines of the metric `status`, then of `configuration`, then of costs."""
        statuses = self.statuses.drop(columns="before").rename(columns={"change": "verdict"})
        parts = [
            statuses.assign(metric="status", level="cell"),
            self.configurations.assign(metric="configuration", level="cell", verdict=OTHER_CONFIGURATION),
            self.costs.astype({"old": object, "new": object}),
        ]
        lines = pd.concat([table for table in parts if len(table)], ignore_index=True)
        lines = lines.reindex(columns=[*dict.fromkeys(name for table in parts for name in table)])
        axes = self.cells.reindex(lines["key"]).reset_index(drop=True)
        first = ["metric", "level", "name", *axes.columns, "old", "new", "verdict"]
        table = pd.concat([lines.drop(columns="key"), axes], axis=1)
        table = table[[*first, *(name for name in table.columns if name not in first)]]
        table.insert(0, "against", self.name)
        return table


def compare_sweeps(
    name: str,
    old: pd.DataFrame,
    new: pd.DataFrame,
    metrics: Sequence[str],
    ignored: Collection[str] = (),
    earlier: pd.DataFrame | None = None,
) -> SweepComparison:
    """Compare the rows of one side with the old one's, and these costs with those of `earlier` sweeps too.

    Raises:
        dcpbench.analysis.query.QueryError: cells of one sweep differ only in what is ignored.
    """
    sides = {"earlier": earlier, "old": old, "new": new}
    runs = {of: without_retries(side) for of, side in sides.items() if side is not None and len(side)}
    rows = pd.concat([side.assign(side=of) for of, side in runs.items()])
    cells = add_cell_keys(rows.reset_index(drop=True), identity_keys(rows), ignored)
    measured, after = cells[cells["side"] != "new"], cells[cells["side"] == "new"]
    before = cells[cells["side"] == "old"]
    for side in (measured, after):
        refuse_merged(side, ignored)
    statuses = status_changes(before, after)
    once = pd.concat([after, before]).drop_duplicates("key").set_index("key")
    changed = statuses[statuses["change"] == OTHER_CONFIGURATION]
    configs = once["config"].to_dict()
    configurations = [
        (key, keyword, *values)
        for key, place in zip(changed["key"], changed["before"], strict=True)
        for keyword, values in config_differences(configs[place], configs[key], ignored).items()
    ]
    return SweepComparison(
        name,
        statuses,
        pd.DataFrame(configurations, columns=["key", "name", "old", "new"]),
        compare_costs(measured, after, metrics),
        once[[axis for axis in (*AXES, "others") if axis not in ignored]],
        why_nothing_in_common(before, after),
    )


class _Outcome(NamedTuple):
    """The runs of a cell together: absent, ok, skipped, failing or flaky, and how many have which status."""

    state: str = "absent"
    statuses: frozenset[str] = frozenset()
    text: str = "-"


def status_changes(old: pd.DataFrame, new: pd.DataFrame) -> pd.DataFrame:
    """Return one line for each cell of either side, in the order of `CHANGES`, unchanged cells last.

    A cell is flaky if only some of its runs are ok, or if a retry had another status. `failing`: it is not ok
    on the new side; `reason`, `cause` and `again` are of the first such run. A new cell replaces a cell of
    the old side at the same address with another configuration: that one has no line, and its key is
    `before`.

    Args:
        old, new: rows with `key` and `address`, see `cell_identity.add_cell_keys`.
    """
    before, after = _outcomes(old), _outcomes(new)
    failed = new[~as_expected(new)].drop_duplicates("key").set_index("key")
    failed = pd.DataFrame(why_failed(failed), failed.index, dtype="string")
    addresses = pd.concat([old, new]).drop_duplicates("key").set_index("key")["address"].to_dict()
    at_address = {addresses[key]: key for key in before}
    replaced_by = {
        key: at_address[addresses[key]] for key in after if key not in before and addresses[key] in at_address
    }
    replaced = set(replaced_by.values())
    lines = []
    for key in dict.fromkeys([*after, *before]):
        if key not in after and key in replaced:
            continue
        earlier = replaced_by.get(key, key)
        was, now = before.get(earlier, _Outcome()), after.get(key, _Outcome())
        change = OTHER_CONFIGURATION if key in replaced_by else _change(was, now)
        lines.append((change, key, earlier, was.text, now.text))
    table = pd.DataFrame(lines, columns=["change", "key", "before", "old", "new"])
    table["failing"] = table["key"].isin(failed.index)
    table = table.join(failed, on="key").fillna(dict.fromkeys(failed, ""))
    order = [*CHANGES, SAME]
    return table.sort_values(
        "change", key=lambda kinds: kinds.map(order.index), kind="stable", ignore_index=True
    )


def _outcomes(frame: pd.DataFrame) -> dict[str, _Outcome]:
    """Summarize the runs of each cell."""
    text = status_text(frame).astype(object)
    text = text.mask(is_true(frame["fault_seen"]), "detected (" + text + ")")
    text = text.mask(is_false(frame["fault_seen"]), "NOT DETECTED (" + text + ")")
    runs = frame[["key"]].assign(text=text, ok=as_expected(frame), flaky=is_true(frame["flaky"]))
    of_cell = runs.assign(skipped=frame["status"].eq("skip")).groupby("key", sort=False)
    good, flaky, skipped = (of_cell[name].mean() for name in ("ok", "flaky", "skipped"))
    state = np.select([(flaky > 0) | good.between(0, 1, "neither"), good == 0, skipped == 1], _STATES, "ok")
    outcomes = {}
    for (key, texts), of in zip(of_cell["text"].agg(Counter).items(), state, strict=True):
        named = [f"{count} {text}" if len(texts) > 1 else text for text, count in texts.most_common()]
        outcomes[str(key)] = _Outcome(of, frozenset(texts), ", ".join(named))
    return outcomes


def _change(was: _Outcome, now: _Outcome) -> str:
    if was.state == "absent" or now.state == "absent":
        return "new" if was.state == "absent" else "vanished"
    if was.state == now.state:
        return SAME if was.state == "flaky" or was.statuses == now.statuses else "other status"
    if now.state != "ok":
        return {"failing": NEWLY_FAILING, "flaky": "flaky", "skipped": "newly skipped"}[now.state]
    return "other status" if was.state == "skipped" else "newly passing"


def environment_differences(sides: Mapping[str, Sweeps]) -> pd.DataFrame:
    """Return what differs in the environments, with one column per side; the sweeps of a side are
    combined."""
    values = {name: _values(sweeps) for name, sweeps in sides.items()}
    order = {key: place for place, key in enumerate(_FIRST)}
    keys = sorted({key for side in values.values() for key in side} - {"earlier", "code"})
    lines = [
        {"what": key, **{name: _joined(side.get(key)) for name, side in values.items()}}
        for key in sorted(keys, key=lambda key: order.get(key, len(order)))
    ]
    apart = [line for line in lines if len({line[name] for name in sides}) > 1]
    return pd.DataFrame(apart, columns=["what", *sides])


def code_changes(old: Sweeps, new: Sweeps) -> list[str]:
    """Return sentences, without a full stop, about the code that changed from some sweeps to others, as their
    `environment.json` records it."""
    before, now = (
        [recorded(environment) for environment in side.environments.values()] for side in (old, new)
    )
    packages = {name for sources in before for name in sources} & {
        name for sources in now for name in sources
    }
    sentences = []
    for package in sorted(packages, key=lambda name: (name == DCPBENCH, name)):
        sides = [[sources[package] for sources in side if package in sources] for side in (before, now)]
        if names := changed_files(package, *sides):
            what = "the code of dcpbench" if package == DCPBENCH else "your code"
            files = "" if package == DCPBENCH else f": {listed(names)}"
            commits = [{source.commit for source in side} for side in sides]
            known = all(len(of_side) == 1 for of_side in commits)
            since = commits_text(*map(set.pop, commits)) if known else ""
            sentences.append(f"{what} changed{files}{since}")
    return sentences


def _values(sweeps: Sweeps) -> dict[str, list[str]]:
    """Return the values of each property, in the order of the sweeps; from rows if nothing else has them."""
    seen: dict[str, dict[str, None]] = {}
    for folder, environment in sweeps.environments.items():
        rows = sweeps.frame[sweeps.frame["sweep"] == folder]
        of_rows = {"torch": "torch_version", "device": "device", **{name: name for name in COMMITS}}
        given: dict[str, Iterable[Any]] = {key: list(rows[name].dropna()) for key, name in of_rows.items()}
        given |= {key: [fact] for key, fact in environment.items() if fact not in (None, [])}
        given = {COMMITS.get(key, key): values for key, values in given.items()}
        for key, values in given.items():
            seen.setdefault(key, {}).update(dict.fromkeys(_plain(key, fact) for fact in values))
    return {key: list(values) for key, values in seen.items()}


def _plain(key: str, value: object) -> str:
    if key.endswith("_bytes") and isinstance(value, int | float):
        return f"{value / 2**30:.0f} GiB"
    if key in COMMITS.values():
        return short(str(value))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(f"{count} × {text}" for text, count in Counter(map(str, value)).items())
    return json.dumps(value) if isinstance(value, Mapping | bool) else str(value)


def _joined(values: list[str] | None) -> str:
    if not values:
        return "-"
    return ", ".join(values) if len(values) <= 3 else f"{values[0]} … {values[-1]} ({len(values)} values)"
