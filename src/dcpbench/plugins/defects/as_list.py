"""An optimizer set from a full state dict has lists instead of tuples
(docs/findings/full-state-dict-tuples.md)."""

from collections.abc import Iterator

from dcpbench.cell.cell import Cell
from dcpbench.cell.explained import Restored, Resumed
from dcpbench.config.schema import Config
from dcpbench.core.defects import Defect, Moment
from dcpbench.plugins.defects._other_run import as_resumed
from dcpbench.workloads.run_state import State

_CHECK = "optim_equal"


def _applies(config: Config) -> bool:
    return bool(config.state_dict.full_state_dict)


def _expected(cell: Cell, moment: Moment, reference: Restored | Resumed) -> Iterator[State]:
    others = reference.expected if isinstance(reference, Resumed) else {}
    saved = (others or reference.checkpoint.state).get(_CHECK, {})
    state = {**others, _CHECK: {name: [*leaf] for name, leaf in saved.items() if isinstance(leaf, tuple)}}
    if isinstance(reference, Resumed) and others:
        state = as_resumed(cell, reference, state)
    yield state


defect = Defect(("restored", "resumed"), _applies, _expected, from_before=False)
