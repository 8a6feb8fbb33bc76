"""The notes of a rank, of its report or as its row has them."""

from typing import Any

from dcpbench.core.rank_report import RankReport
from dcpbench.records.row import notes_of


def why_not(rank: RankReport | dict[str, Any]) -> dict[str, str]:
    """Why checks are not made on this rank, by check; of parts of checks nothing."""
    return {note.check: note.sentence for note in _notes(rank) if note.check and not note.name}


def noted(rank: RankReport | dict[str, Any], kind: str) -> dict[str, str]:
    """The texts of notes of a kind by their names."""
    return {note.name: note.text for note in _notes(rank) if note.kind == kind}


def texts(rank: dict[str, Any], kind: str) -> list[str]:
    """The texts of notes of a kind in a row."""
    return [note.text for note in _notes(rank) if note.kind == kind]


def _notes(rank: RankReport | dict[str, Any]) -> Any:
    return rank.notes if isinstance(rank, RankReport) else notes_of({"details": {"ranks": [rank]}})
