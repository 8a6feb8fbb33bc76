"""Modules that have moved, and what goes on under their earlier names.

A `target` names a module. It is part of what a cell is, and stands in `sweep.json` and in users' files. So
digests are taken of the names that modules had first: rows from before and after a move are of the same cell.
Under its earlier name a module can still be imported for one version, with a DeprecationWarning.
"""

import importlib
import re
import sys
import warnings
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "dcpbench.records.checks": "dcpbench.core.checks",
    "dcpbench.records.findings": "dcpbench.core.mismatch",
    "dcpbench.records.metrics": "dcpbench.core.metrics",
    "dcpbench.records.plugins": "dcpbench.core.plugins",
    "dcpbench.records.rank_report": "dcpbench.core.rank_report",
    "dcpbench.scenarios.cell": "dcpbench.cell.cell",
    "dcpbench.scenarios.checkpoint": "dcpbench.cell.checkpoint",
    "dcpbench.scenarios.checks": "dcpbench.cell.checks",
    "dcpbench.scenarios.contract": "dcpbench.cell.contract",
    "dcpbench.scenarios.handover": "dcpbench.cell.handover",
    "dcpbench.scenarios.lockstep": "dcpbench.workloads.lockstep",
    "dcpbench.scenarios.shared_folder": "dcpbench.cell.shared_folder",
    "dcpbench.scenarios.side_effects": "dcpbench.cell.side_effects",
    "dcpbench.scenarios.steps": "dcpbench.cell.steps",
    "dcpbench.scenarios.twin": "dcpbench.workloads.twin",
}
"""Modules and packages by the names that they had first, and their names now. Plug-ins add their own."""


def first_names(text: str) -> str:
    """Return a text in which each module that has moved has the name that it had first."""
    if "." not in text:
        return text
    first = {now: name for name, now in MOVED.items()}
    names = "|".join(map(re.escape, sorted(first, key=len, reverse=True)))
    return re.sub(rf"(?<![\w.])({names})(?!\w)", lambda found: first[found[1]], text)


def spec_of(name: str) -> ModuleSpec | None:
    """Find a module by a name that it had earlier, or a module of a package that has moved."""
    for first in sorted(MOVED, key=len, reverse=True):
        if f"{name}.".startswith(f"{first}."):
            now = MOVED[first] + name.removeprefix(first)
            warnings.warn(f"{name} has moved: it is {now}", DeprecationWarning, stacklevel=3)
            return ModuleSpec(name, _Moved(now), is_package=True)
    return None


class _Moved(Loader):
    """Loads the module that has this name now; a package has no path, so that its modules come here too."""

    def __init__(self, now: str) -> None:
        self._now = now

    def create_module(self, spec: ModuleSpec) -> None:
        """Python makes the module itself."""

    def exec_module(self, module: ModuleType) -> None:
        there = importlib.import_module(self._now)
        if hasattr(there, "__path__"):
            vars(module).update({name: value for name, value in vars(there).items() if name[:2] != "__"})
        else:
            sys.modules[module.__name__] = there
