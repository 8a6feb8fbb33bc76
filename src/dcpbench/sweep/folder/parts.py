"""The folder of a sweep that several drivers run, each a part of it (`dcpbench.sweep.plan.part`).

A part is a sweep of its own, in a folder below that of the whole one, whose `sweep.json` has the cells of all
parts from when the first one begins. A part that ends puts the rows of all of them together there: what
lies there is read, compared and resumed as that of any sweep. What a part still owes are cells without a row.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from dcpbench.config.errors import ConfigError
from dcpbench.records import files, store
from dcpbench.records.row_reader import parse
from dcpbench.sweep.folder import manifest, resume

WAIT_S = 60.0
"""How long another part may take over the folder of the whole sweep, which it has for a moment."""


def folders(whole: Path) -> list[Path]:
    """Those of the parts that have begun."""
    return sorted(path.parent for path in whole.glob(f"*-part-*-of-*/{store.SWEEP_JSON}"))


def begin(folder: Path, record: manifest.Record) -> None:
    """Have the whole sweep's folder ready for a part, which begins in `folder`.

    Args:
        record: of the whole sweep.

    Raises:
        ConfigError: it is another sweep's, or was divided into another number of parts.
    """
    whole = folder.parent
    with manifest.held(whole, WAIT_S):
        others = folders(whole)
        begun = (whole / store.SWEEP_JSON).exists()
        if not begun or ((whole / store.RESULTS_JSONL).exists() and not others):
            manifest.refuse_used(whole)
        else:
            there = manifest.read(whole, "hydra.sweep.dir=")
            resume.same_matrix(whole, there, {*record.cells}, "hydra.sweep.dir")
        counts = {path.name.rpartition("-")[2] for path in (*others, folder)}
        if len(counts) > 1:
            raise ConfigError(f"part: {whole} has {' and '.join(sorted(counts))} parts; choose one number")
        if not begun:
            record.write(whole)


def take_in(whole: Path) -> None:
    """Put the rows of all parts together before somebody goes on with the whole sweep, which he has alone.

    Raises:
        ConfigError: a part is at work.
    """
    parts = folders(whole)
    for folder in parts:
        manifest.refuse_unusable(folder, "resume", begun=True)
    if parts:
        merge(whole)


def merge(whole: Path) -> tuple[int, int]:
    """Have the whole sweep's files hold the newest row of each cell, of any part or its own, what was
    measured for that row, and what the machines were. Whoever calls it has the folder alone.

    Returns:
        how many cells have a row, and how many there are.

    Raises:
        ConfigError, ResultsError: one of them cannot be read or written.
    """
    found, cells = _read(whole), manifest.read(whole, "").cells
    rows = _newest(found, cells)
    kept = {line.content for line, _ in rows.values()}
    measured = (
        store.measured_in(place, {cell for cell, (_, at) in rows.items() if at == place}) for place in found
    )
    store.write_whole(whole / store.MEASUREMENTS_JSONL, chain.from_iterable(measured))
    store.write_json(whole / store.ENVIRONMENT_JSON, _machines([*found]))
    gone = [line for line in found[whole] if line.content not in kept and not line.torn]
    store.keep_lines(whole, [line for line, _ in rows.values()], gone)
    return len(rows), len(cells)


def lines(folder: Path) -> Iterator[store.Line]:
    """The rows that a sweep has; of one in parts, those that `merge` would leave.

    Raises:
        ConfigError, ResultsError: one of its files cannot be read.
    """
    if folders(folder):
        cells = manifest.read(folder, "").cells
        yield from (line for line, _ in _newest(_read(folder), cells).values())
    else:
        yield from store.read_lines(folder)


def _read(whole: Path) -> dict[Path, list[store.Line]]:
    """The lines of each part, and then those of the whole sweep's own."""
    return {place: [*store.read_lines(place)] for place in (*folders(whole), whole)}


def _newest(
    found: Mapping[Path, Sequence[store.Line]], cells: Iterable[str]
) -> dict[str, tuple[store.Line, Path]]:
    """The newest row of each of the cells that has one, and where it lies."""
    *parts, _ = found
    replaced = {line.content for part in parts for line in store.read_lines(part, store.SUPERSEDED_JSONL)}
    newest: dict[str, tuple[store.Line, Path]] = {}
    for line, place in ((line, place) for place, lines_there in found.items() for line in lines_there):
        if line.row and line.content not in replaced:
            before = newest.get(line.row.cell)
            if not before or _began(line) > _began(before[0]):
                newest[line.row.cell] = line, place
    return {cell: newest[cell] for cell in cells if cell in newest}


def _began(line: store.Line) -> str:
    return (line.row and line.row.started_at) or ""


def _machines(places: Sequence[Path]) -> dict[str, Any]:
    """The environment of the first of these that has one, and as `earlier` in what those of others differ."""
    found = []
    for place in places:
        with suppress(OSError, ValueError, TypeError):
            found.append(dict(parse(files.read(place / store.ENVIRONMENT_JSON))[0]))
    earlier: list[Any] = []
    for one in found:
        before = one.pop("earlier", [])
        other = {key: value for key, value in one.items() if value != found[0].get(key)}
        earlier += [different for different in (*before, other) if different and different not in earlier]
    known = found[0] if found else {}
    return {**known, "earlier": earlier} if earlier else known
