"""Read the notes of ranks from a row's details."""

from collections.abc import Iterator, Mapping
from typing import Any

from dcpbench.core.mismatch import Place
from dcpbench.core.notes import NOTES, Note
from dcpbench.records.row import dict_in, list_in


def notes_of(row: Mapping[str, Any]) -> Iterator[Note]:
    """Yield the notes of all ranks of a row, of known kinds; the phrase of a place is its moment.

    >>> for note in notes_of({"details": {"ranks": [{"notes": [{"kind": "left_out", "text": "no files"}]}]}}):
    ...     print(note.kind, note.text)
    left_out no files
    """
    for rank in map(dict_in, list_in(dict_in(row.get("details")).get("ranks"))):
        plain = map(dict_in, list_in(rank.get("notes"))) if "notes" in rank else _of_older(rank)
        for recorded in plain:
            kind, text, check, name, place = (
                str(recorded.get(key) or "") for key in ("kind", "text", "check", "name", "place")
            )
            if kind in NOTES:
                yield Note(kind, text, check, name, Place(place) if place else None)


def _of_older(rank: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the notes of a rank in a row of an older version, which had a field for each kind."""
    for check, why in dict_in(rank.get("not_applied")).items():
        yield {"kind": "left_out", "text": why, "check": check}
    for part in map(dict_in, list_in(rank.get("left_out"))):
        yield {**part, "kind": "left_out", "text": part.get("why"), "place": part.get("where")}
    for kind in NOTES.keys() - {"left_out"}:
        named, texts = dict_in(rank.get(kind)), list_in(rank.get(kind))
        yield from ({"kind": kind, "text": text, "name": name} for name, text in named.items())
        yield from ({"kind": kind, "text": text} for text in texts)
