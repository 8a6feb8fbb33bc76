"""Sentences about the code that changed between sweeps: the user's, and dcpbench's."""

import pandas as pd

from dcpbench.analysis.frame import Sweeps
from dcpbench.code.sources import DCPBENCH, changed_files, commits_text, is_own, recorded
from dcpbench.config.text import listed
from dcpbench.records.row_reader import dict_in

_YOURS, _OURS = "your code changed", "the code of dcpbench changed"
_BY_DIGEST = "(code_digest differs; the files were not recorded)"


def code_changes(old: Sweeps, new: Sweeps) -> list[str]:
    """Return sentences, without a full stop, about the code that changed from some sweeps to others: by
    `environment.json`, or else by the rows of the cells that both have."""
    before, now = ([recorded(one) for one in side.environments.values()] for side in (old, new))
    packages = {name for one in before for name in one} & {name for one in now for name in one}
    sentences = []
    for package in sorted(packages, key=lambda name: (name == DCPBENCH, name)):
        sides = [[one[package] for one in side if package in one] for side in (before, now)]
        if names := changed_files(package, *sides):
            what = _OURS if package == DCPBENCH else f"{_YOURS}: {listed(names)}"
            commits = [{source.commit for source in side} for side in sides]
            known = all(len(of_side) == 1 for of_side in commits)
            sentences.append(what + (commits_text(*map(set.pop, commits)) if known else ""))
    return sentences or _by_rows(old.frame, new.frame)


def _by_rows(old: pd.DataFrame, new: pd.DataFrame) -> list[str]:
    """Say whose code changed, as far as the digests and dcpbench's commits tell."""
    rows = [side.dropna(subset=["code_digest"]) for side in (old, new)]
    digests = [side.groupby("config_digest")["code_digest"].agg(frozenset) for side in rows]
    common = digests[0].index.intersection(digests[1].index)
    changed = common[(digests[0][common] != digests[1][common]).to_numpy()]
    if not len(changed):
        return []
    configs = pd.concat(rows).drop_duplicates("config_digest").set_index("config_digest")["config"]
    if not all(_has_own_code(configs[digest]) for digest in changed):
        return [f"{_OURS}, or that of a plug-in {_BY_DIGEST}"]
    commits = {commit for side in rows for commit in side["dcpbench_commit"].fillna("")}
    same = len(commits) == 1 and not commits & {""} and not any("-" in commit for commit in commits)
    whose = _YOURS if same else f"{_YOURS}, or that of dcpbench"
    return [f"{whose} {_BY_DIGEST}"]


def _has_own_code(config: object) -> bool:
    """Return whether a cell with this configuration runs code of the user."""
    return any(key.endswith("target") and is_own(str(value)) for key, value in dict_in(config).items())
