"""Counted: what the states that crashes may leave load as, and the simplest of those that should not be."""

import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dcpbench.plugins.crash.disk_states import Crash, DiskState
from dcpbench.plugins.crash.loading import SILENT, Judge, Loaded, Loader, fingerprint

BREAKS: Mapping[str, frozenset[tuple[bool, Loaded]]] = {
    "crash_consistent": frozenset((told, loaded) for told in (False, True) for loaded in SILENT),
    "crash_recoverable": frozenset({(False, Loaded.refused)}),
    "crash_durable": frozenset({(True, Loaded.old), (True, Loaded.refused)}),
}
"""What each check has nothing of: whether the save had reported success, and what a load brings back."""


@dataclass(frozen=True)
class StateKind:
    """Which states are counted together: what crashed, whether the save had told a rank by then that it was
    complete, and what a start from there loads."""

    crash: Crash
    told: bool
    loaded: Loaded

    @property
    def broken(self) -> str | None:
        """The check that such a state breaks."""
        return next((check for check, breaks in BREAKS.items() if (self.told, self.loaded) in breaks), None)

    def __str__(self) -> str:
        return f"{self.crash}{', after success' if self.told else ''}: {self.loaded}"


@dataclass
class Survey:
    """The counts of one save.

    Args:
        enumerated: states, by their kind.
        distinct: those whose files differ from those of any other before and after success each, of each
            thing that crashes.
        simplest: of each kind the state in which the least is lost, after the fewest steps.
        seconds: it took to enumerate and load them.
    """

    enumerated: Counter[StateKind] = field(default_factory=Counter)
    distinct: Counter[StateKind] = field(default_factory=Counter)
    simplest: dict[StateKind, DiskState] = field(default_factory=dict)
    seconds: float = 0.0

    def count(self, loaded: Loaded) -> int:
        """Distinct states that load as this."""
        return sum(count for kind, count in self.distinct.items() if kind.loaded is loaded)

    def total(self, crash: Crash, told: bool) -> int:
        """Distinct states of such crashes."""
        return sum(count for kind, count in self.distinct.items() if (kind.crash, kind.told) == (crash, told))


def survey(states: Iterable[DiskState], loader: Loader, judge: Judge, names: tuple[str, ...]) -> Survey:
    """Load each state as the next start does: the checkpoint in the first of the folders `names` that is not
    refused. What is in the others was there before."""
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)  # DCP logs a traceback for every file that it does not find
    try:
        return _survey(states, loader, judge, names)
    finally:
        logging.disable(disabled)


def _survey(states: Iterable[DiskState], loader: Loader, judge: Judge, names: tuple[str, ...]) -> Survey:
    found, began = Survey(), time.perf_counter()
    seen: dict[tuple[Crash, bool], set[object]] = {}
    for state in states:
        verdicts = (loader.verdict(state.tree, name, judge) for name in names)
        loaded = next((one for one in verdicts if one is not Loaded.refused), Loaded.refused)
        kind = StateKind(state.crash, state.told, loaded)
        found.enumerated[kind] += 1
        tree = fingerprint(state.tree)
        known = seen.setdefault((state.crash, state.told), set())
        found.distinct[kind] += tree not in known
        known.add(tree)
        best = found.simplest.get(kind)
        if best is None or state.simplicity < best.simplicity:
            found.simplest[kind] = state
    found.seconds = time.perf_counter() - began
    return found
