"""Modules that have moved.

A `target` in the configuration names a module; it is part of a cell's identity, and is stored in `sweep.json`
and in users' files. So identities use the original name of a module: rows from before and after a move
belong to the same cell. A module can be imported under its old name for one more version, with a
DeprecationWarning.
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
"""Original name of each module or package that has moved: its name today. Plug-ins add theirs."""


def first_names(text: str) -> str:
    """Return a text with the original name of each module that has moved.

    >>> first_names("dcpbench.cell.steps.train")
    'dcpbench.scenarios.steps.train'
    """
    if "." not in text:
        return text
    first = {now: name for name, now in MOVED.items()}
    names = "|".join(map(re.escape, sorted(first, key=len, reverse=True)))
    return re.sub(rf"(?<![\w.])({names})(?!\w)", lambda found: first[found[1]], text)


def spec_of(name: str) -> ModuleSpec | None:
    """Return the import spec for the old name of a module that has moved; None for any other name."""
    for first in sorted(MOVED, key=len, reverse=True):
        if f"{name}.".startswith(f"{first}."):
            now = MOVED[first] + name.removeprefix(first)
            warnings.warn(f"{name} has moved: it is {now}", DeprecationWarning, stacklevel=3)
            return ModuleSpec(name, _Moved(now), is_package=True)
    return None


class _Moved(Loader):
    """Loads a module by its name today. A package gets no path, so that its modules are loaded here too."""

    def __init__(self, now: str) -> None:
        self._now = now

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave the creation of the module to Python."""

    def exec_module(self, module: ModuleType) -> None:
        there = importlib.import_module(self._now)
        if hasattr(there, "__path__"):
            vars(module).update({name: value for name, value in vars(there).items() if name[:2] != "__"})
        else:
            sys.modules[module.__name__] = there
