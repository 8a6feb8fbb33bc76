"""Sentences about the code that changed between sweeps: the user's, and dcpbench's."""

from dcpbench.analysis.frame import Sweeps
from dcpbench.code.sources import DCPBENCH, changed_files, commits_text, recorded
from dcpbench.config.text import listed


def code_changes(old: Sweeps, new: Sweeps) -> list[str]:
    """Return sentences, without a full stop, about the code that changed from some sweeps to others, as their
    `environment.json` records it."""
    before, now = ([recorded(one) for one in side.environments.values()] for side in (old, new))
    packages = {name for one in before for name in one} & {name for one in now for name in one}
    sentences = []
    for package in sorted(packages, key=lambda name: (name == DCPBENCH, name)):
        sides = [[one[package] for one in side if package in one] for side in (before, now)]
        if names := changed_files(package, *sides):
            what = "the code of dcpbench" if package == DCPBENCH else "your code"
            files = "" if package == DCPBENCH else f": {listed(names)}"
            commits = [{source.commit for source in side} for side in sides]
            known = all(len(of_side) == 1 for of_side in commits)
            since = commits_text(*map(set.pop, commits)) if known else ""
            sentences.append(f"{what} changed{files}{since}")
    return sentences
