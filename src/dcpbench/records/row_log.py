"""The rows of a sweep as its driver knows them, whatever becomes of `results.jsonl` meanwhile."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from dcpbench.config.text import counted
from dcpbench.records.row import Row
from dcpbench.records.store import RESULTS_JSONL, Line, ResultsError, append_row, keep_lines, read_lines


class RowLog:
    """Writes the rows of a sweep, and remembers each with its line, without its `details`: `rows` by cell."""

    def __init__(self, folder: Path, standing: Iterable[Line] = ()) -> None:
        """The log of a folder in which these lines stand already."""
        self._folder = folder
        self.rows: dict[str, Row] = {}
        self._lines: dict[str, Line] = {}
        for line in standing:
            self._remember(line)

    def append(self, row: Row) -> None:
        """Write a row; ResultsError if it cannot be written, and nothing of it is left."""
        self._remember(append_row(self._folder, row))

    def settle(self, cells: Sequence[str]) -> str | None:
        """Have `results.jsonl` hold just the rows of these cells, in this order, and `superseded.jsonl` what
        somebody else has put there.

        Returns:
            a sentence, if rows were missing or had been changed.

        Raises:
            ResultsError: it cannot be written.
        """
        known = [self._lines[cell] for cell in cells if cell in self._lines]
        there: list[Line] = []
        with suppress(ResultsError):  # a link, say, that is replaced
            there = list(read_lines(self._folder))
        if [line.content for line in known] == [line.content for line in there]:
            return None
        contents, found = {line.content for line in known}, {line.content for line in there}
        foreign = [line for line in there if line.content not in contents and not line.torn]
        keep_lines(self._folder, known, foreign)
        lost = len(contents - found)
        rows = counted(lost, "row")
        told = f"{rows} of this sweep had vanished from {RESULTS_JSONL}, or been changed: written again"
        return told if lost else None

    def _remember(self, line: Line) -> None:
        if line.row:
            self.rows[line.row.cell], self._lines[line.row.cell] = line.row, line
