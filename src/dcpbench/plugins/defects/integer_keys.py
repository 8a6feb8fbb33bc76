"""DCP loads the value of a key that is no string into an additional string key
(docs/findings/integer-keys.md)."""

import re
from collections.abc import Iterator

from dcpbench.cell.cell import Cell
from dcpbench.cell.explained import Differences
from dcpbench.core.defects import Defect, Moment
from dcpbench.plugins.defects._cells import loads_by_dcp
from dcpbench.verify.compare import same_leaves
from dcpbench.workloads.run_state import State

_QUOTED = re.compile(r"""(^|\.)(['"])(.*?)\2(?=\.|$)""")
"""A string key in a name, which is quoted if there is another key of the same text."""


def _expected(cell: Cell, moment: Moment, reference: Differences) -> Iterator[State]:
    state = State()
    for part, names in reference.names.items():
        saved, actual = reference.checkpoint.state.get(part, {}), reference.actual[part]
        keys = {name: _QUOTED.sub(r"\1\3", name) for name in names if _QUOTED.search(name)}
        loaded = {name: saved[key] for name, key in keys.items() if key in saved}
        # The other key has any value that it had before.
        kept = {key: actual[key] for key in map(keys.get, same_leaves(loaded, actual)) if key in actual}
        state[part] = loaded | kept
    yield state


defect = Defect(("restored",), loads_by_dcp, _expected)
