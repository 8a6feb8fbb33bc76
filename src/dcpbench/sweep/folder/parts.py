"""The folder of a sweep that several drivers run, each a part of it (`dcpbench.sweep.plan.part`).

A part is a sweep of its own, in a folder below that of the whole one, whose `sweep.json` has the cells of all
parts from when the first one begins. A part that ends puts the rows of all of them together there: what
lies there is read, compared and resumed as that of any sweep. What a part still owes are cells without a row.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from dcpbench.config.errors import ConfigError
from dcpbench.records import files, lock, store
from dcpbench.records.row_reader import parse
from dcpbench.sweep.folder import manifest, resume

_WAIT_S = 60.0
"""How long another part may take over the folder of the whole sweep, which it has for a moment."""


def folders(whole: Path) -> list[Path]:
    """Those of the parts that have begun."""
    return sorted(path for path in whole.glob(f"{whole.name}-part-*-of-*") if path.is_dir())


@contextmanager
def alone_in(whole: Path) -> Iterator[None]:
    """Have the folder of the whole sweep to oneself; a ConfigError if another driver keeps it."""
    deadline = time.monotonic() + _WAIT_S
    while lock.is_held(whole) and time.monotonic() < deadline:
        time.sleep(0.1)
    with manifest.held(whole):
        yield


def begin(folder: Path, record: manifest.Record) -> None:
    """Make the folder of a part, and the whole sweep's around it if it is the first.

    Args:
        record: of the whole sweep.

    Raises:
        ConfigError: the folder is another sweep's, or was divided into another number of parts.
    """
    whole = folder.parent
    with alone_in(whole):
        others = folders(whole)
        if not (whole / store.SWEEP_JSON).exists() or ((whole / store.RESULTS_JSONL).exists() and not others):
            manifest.refuse_used(whole)
        else:
            resume.same_matrix(
                whole, manifest.read(whole, "hydra.sweep.dir="), {*record.cells}, "hydra.sweep.dir"
            )
        counts = {path.name.rpartition("-")[2] for path in (*others, folder)}
        if len(counts) > 1:
            raise ConfigError(f"part: {whole} has {' and '.join(sorted(counts))} parts; choose one number")
        folder.mkdir(exist_ok=True)
        if not (whole / store.SWEEP_JSON).exists():
            record.write(whole)


def take_in(whole: Path) -> None:
    """Put the rows of all parts together before somebody goes on with the whole sweep, which he has alone.

    Raises:
        ConfigError: a part is at work.
    """
    for folder in folders(whole):
        manifest.refuse_unusable(folder, "resume", begun=True)
    merge(whole)


def merge(whole: Path) -> tuple[int, int]:
    """Have the whole sweep's files hold the newest row of each cell, of any part or its own, what was
    measured for that row, and what the machines were. Whoever calls it has the folder alone.

    Returns:
        how many cells have a row, and how many there are.

    Raises:
        ResultsError: one of them cannot be read or written.
    """
    parts = folders(whole)
    replaced = {line.content for part in parts for line in store.read_lines(part, store.SUPERSEDED_JSONL)}
    newest: dict[str, tuple[store.Line, Path]] = {}
    for place in (*parts, whole):
        for line in store.read_lines(place):
            if line.row and line.content not in replaced:
                before = newest.get(line.row.cell)
                if not before or _began(line) > _began(before[0]):
                    newest[line.row.cell] = line, place
    cells = manifest.read(whole, "").cells
    rows = {cell: newest[cell] for cell in cells if cell in newest}
    if not parts or not rows:
        return len(rows), len(cells)
    measured = {
        place: [*store.measured_in(place, {cell for cell, (_, at) in rows.items() if at == place})]
        for place in (*parts, whole)
    }
    store.write_whole(whole / store.MEASUREMENTS_JSONL, chain(*measured.values()))
    store.write_json(whole / store.ENVIRONMENT_JSON, _machines(parts))
    store.keep_lines(whole, [line for line, _ in rows.values()])
    return len(rows), len(cells)


def _began(line: store.Line) -> str:
    return (line.row and line.row.started_at) or ""


def _machines(parts: Sequence[Path]) -> dict[str, Any]:
    """The environment of the first part, and as `earlier` in what those of the others differ."""
    found = []
    for part in parts:
        with suppress(OSError, ValueError):
            found.append(parse(files.read(part / store.ENVIRONMENT_JSON))[0])
    known = [one for one in found if isinstance(one, dict)]
    if not known:
        return {}
    first = known[0]
    others = [{key: value for key, value in one.items() if first.get(key) != value} for one in known[1:]]
    return {**first, "earlier": [*first.get("earlier", []), *(other for other in others if other)]}
