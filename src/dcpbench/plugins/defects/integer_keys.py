"""DCP loads the value of a key that is no string into an additional string key
(docs/findings/integer-keys.md)."""

from collections.abc import Iterator

from dcpbench.cell.cell import Cell
from dcpbench.cell.explained import Differences
from dcpbench.core.defects import Defect, Moment
from dcpbench.core.state import text_of
from dcpbench.plugins.defects._cells import loads_by_dcp
from dcpbench.verify.compare import same_leaves
from dcpbench.workloads.run_state import State


def _expected(cell: Cell, moment: Moment, reference: Differences) -> Iterator[State]:
    state = State()
    for part, names in reference.names.items():
        saved, actual = reference.checkpoint.state.get(part, {}), reference.actual[part]
        by_text = {text_of(name): name for name in saved}
        same_text = {name: by_text.get(text_of(tuple(map(_unquoted, name)))) for name in names}
        keys = {name: key for name, key in same_text.items() if key is not None and key != name}
        loaded = {name: saved[key] for name, key in keys.items()}
        # The other key has any value that it had before.
        others = (keys[name] for name in same_leaves(loaded, actual))
        kept = {key: actual[key] for key in others if key in actual}
        state[part] = loaded | kept
    yield state


def _unquoted(element: str | int) -> str | int:
    """Return an element of a name without the quotes of a text whose digits another key has as a number."""
    if isinstance(element, str) and element.startswith(("'", '"')):
        return element[1:-1]
    return element


defect = Defect(("restored",), loads_by_dcp, _expected)
