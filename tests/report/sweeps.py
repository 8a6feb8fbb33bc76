"""Folders with rows in them, for the tests of the report."""

import io
import json
from collections.abc import Iterable
from pathlib import Path

from dcpbench.core.axes import AXES
from dcpbench.core.cell_key import digest_of
from dcpbench.records.row import Row
from dcpbench.records.store import RESULTS_JSONL, append_row
from support.rows import row


def folder_with(folder: Path, *rows: Row) -> Path:
    folder.mkdir(parents=True)
    for item in rows:
        append_row(folder, item)
    return folder


def folder_of_lines(folder: Path, lines: Iterable[bytes]) -> Path:
    folder.mkdir(parents=True)
    (folder / RESULTS_JSONL).write_bytes(b"".join(lines))
    return folder


def line(**values: object) -> bytes:
    """A row's line, with values in it that no row has."""
    of_cell = {name: repr(value) for name, value in values.items() if name in AXES}
    own = {"config_digest": digest_of(of_cell)} if of_cell else {}
    return (json.dumps({**row().flat(), **own, **values}) + "\n").encode()


def cell(parallel: str = "ddp", save: str = "sync", repeat: int | None = None, **values: object) -> Row:
    """A row whose name and overrides say which cell it is, as the driver's do."""
    asked = {"parallel": parallel, "save": save, **({} if repeat is None else {"repeat": repeat})}
    items = [f"{name}={value}" for name, value in asked.items()]
    return row(**{"cell": ",".join(items), "overrides": " ".join(items), **asked, **values})


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True
