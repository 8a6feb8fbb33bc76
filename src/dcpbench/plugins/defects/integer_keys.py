"""DCP loads the value of a key that is no string into an additional string key
(docs/findings/integer-keys.md)."""

from collections.abc import Iterator

from dcpbench.cell.cell import Cell
from dcpbench.cell.known_defects import LoadReference
from dcpbench.compare.leaves import same_leaves
from dcpbench.core.defects import Defect, Moment
from dcpbench.core.state import text_of
from dcpbench.plugins.defects._cells import loads_by_dcp
from dcpbench.state.snapshot import State


def _expected(cell: Cell, moment: Moment, reference: LoadReference) -> Iterator[State]:
    state = State()
    for part, names in reference.names.items():
        saved, actual = reference.checkpoint.state.get(part, {}), reference.actual[part]
        by_text = {text_of(name): name for name in saved}
        unquoted = {name: text_of(tuple(str(key).strip("'\"") for key in name)) for name in names}
        keys = {name: by_text[text] for name, text in unquoted.items() if by_text.get(text, name) != name}
        loaded = {name: saved[key] for name, key in keys.items()}
        # The other key has any value that it had before.
        others = {keys[name] for name in same_leaves(loaded, actual)}
        kept = {key: actual[key] for key in others & actual.keys()}
        state[part] = loaded | kept
    yield state


defect = Defect(("restored",), loads_by_dcp, _expected)
