"""Count crash states by what they load as, and keep the simplest of each kind."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product

from dcpbench.plugins.crash.disk_states import Crash, DiskState
from dcpbench.plugins.crash.loading import Judge, Loaded, Loader, fingerprint

BREAKS: Mapping[str, frozenset[tuple[bool, Loaded]]] = {
    "crash_consistent": frozenset(product((False, True), (Loaded.mixture, Loaded.foreign))),
    "crash_recoverable": frozenset({(False, Loaded.refused)}),
    "crash_durable": frozenset({(True, Loaded.old), (True, Loaded.refused)}),
}
"""The states that violate each check: whether the save had reported success, and the result of a load."""


@dataclass(frozen=True)
class StateKind:
    """States that are counted together, by what crashed, whether the save had reported success to a rank, and
    what the next start loads."""

    crash: Crash
    after_success: bool
    loaded: Loaded

    @property
    def broken(self) -> str | None:
        """The check that these states violate."""
        state = self.after_success, self.loaded
        return next((check for check, breaks in BREAKS.items() if state in breaks), None)

    def __str__(self) -> str:
        return f"{self.crash}{', after success' if self.after_success else ''}: {self.loaded}"


@dataclass
class Survey:
    """The counts of one save.

    Args:
        enumerated: number of states.
        distinct: number of states with different files, by kind. They are counted separately for each thing
            that crashes, and before and after success.
        simplest: for each kind the state with the fewest losses, and then the fewest steps.
        seconds: time to enumerate and load the states.
    """

    enumerated: int = 0
    distinct: Counter[StateKind] = field(default_factory=Counter)
    simplest: dict[StateKind, DiskState] = field(default_factory=dict)
    seconds: float = 0.0

    def count(self, loaded: Loaded) -> int:
        """Return the number of distinct states with this result of a load."""
        return sum(count for kind, count in self.distinct.items() if kind.loaded is loaded)

    def total(self, crash: Crash, after_success: bool) -> int:
        """Return the number of distinct states of a crash before or after success."""
        kinds = self.distinct.items()
        return sum(
            count for kind, count in kinds if (kind.crash, kind.after_success) == (crash, after_success)
        )


def survey(states: Iterable[DiskState], loader: Loader, judge: Judge, names: tuple[str, ...]) -> Survey:
    """Load each state as the next start does: the first of the folders `names` that a load does not refuse.
    The other folders existed before the save."""
    surveyed, began = Survey(), time.perf_counter()
    trees: dict[tuple[Crash, bool], set[object]] = {}
    for state in states:
        verdicts = (loader.verdict(state.tree, name, judge) for name in names)
        loaded = next((verdict for verdict in verdicts if verdict is not Loaded.refused), Loaded.refused)
        kind = StateKind(state.crash, state.after_success, loaded)
        surveyed.enumerated += 1
        tree = fingerprint(state.tree)
        known = trees.setdefault((state.crash, state.after_success), set())
        surveyed.distinct[kind] += tree not in known
        known.add(tree)
        best = surveyed.simplest.get(kind)
        if best is None or state.simplicity < best.simplicity:
            surveyed.simplest[kind] = state
    surveyed.seconds = time.perf_counter() - began
    return surveyed
