"""Notes: what a rank reports in addition to its checks. Each kind is declared once; code that shows or counts
notes iterates over `NOTES`."""

from dataclasses import asdict, dataclass
from typing import Any

from dcpbench.core.mismatch import Place


@dataclass(frozen=True)
class NoteSpec:
    """Declaration of a kind of notes.

    >>> NOTES["unreadable"].sentence.format("DataLoader")
    'a DataLoader has no state that can be read'

    Args:
        name: the kind.
        title: of its section in `show`; empty for notes that the page and `show` give as the reason why a
            check was not made, and for columns.
        sentence: contains the text of a note as `{}`.
    """

    name: str
    title: str = ""
    sentence: str = "{}"


_OWN = (
    NoteSpec("left_out"),  # why a check, or a part of it, was not made
    NoteSpec("unreadable", sentence="a {} has no state that can be read"),  # the type of an object
    NoteSpec("unrestored_generators"),  # which ones a trainer draws from and does not restore
    NoteSpec("in_no_state_dict", "values in no state dict that differ"),
    NoteSpec("column"),  # of the row: its name, and its value as text
    NoteSpec("late_files", "files that a host saw late"),
    NoteSpec("graph_breaks", "breaks of compiled graphs"),
    NoteSpec("left_behind", "changes of the process that the cell leaked"),
)

NOTES = {spec.name: spec for spec in _OWN}
"""Every kind of notes by name."""


@dataclass(frozen=True)
class Note:
    """Something that a rank reports by the way.

    >>> Note("left_out", "its checkpoints are not files", "files_unchanged").plain()
    {'kind': 'left_out', 'text': 'its checkpoints are not files', 'check': 'files_unchanged'}

    Args:
        kind: one of `NOTES`.
        check: the check that was not made; empty for other notes.
        name: of a piece of state or a column, if the note is about one.
        place: None for every place.
    """

    kind: str
    text: str
    check: str = ""
    name: str = ""
    place: Place | None = None

    @property
    def sentence(self) -> str:
        """The text, after the name of a value."""
        said = NOTES[self.kind].sentence.format(self.text)
        return f"{self.name}: {said}" if self.name and not self.check else said

    def plain(self) -> dict[str, Any]:
        """Return it as a dict for JSON, without what is empty."""
        flat = {**asdict(self), "place": self.place and str(self.place)}
        return {key: value for key, value in flat.items() if value}
