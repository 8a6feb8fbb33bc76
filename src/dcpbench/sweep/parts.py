"""The folder of a sweep that several drivers run, each one part of it (`dcpbench.sweep.part`).

A part is a sweep with a folder of its own below that of the whole sweep, where `sweep.json` names the cells
of all parts. `dcpbench.records.store` reads such a folder as one sweep. Each part is resumed separately.
"""

from pathlib import Path

from dcpbench.config.errors import ConfigError
from dcpbench.config.text import counted
from dcpbench.records import store
from dcpbench.sweep import manifest, next_steps, resume


def begin(folder: Path, record: manifest.Record) -> None:
    """Prepare the folder of the whole sweep for the part that begins in `folder`.

    Args:
        record: of the whole sweep.

    Raises:
        ConfigError: it is another sweep's, or is divided into another number of parts.
    """
    whole = folder.parent
    try:
        manifest.claim(whole, "hydra.sweep.dir")
        record.write(whole)
    except ConfigError:  # another part may have begun, just now too
        if not (whole / store.SWEEP_JSON).exists() or (whole / store.RESULTS_JSONL).exists():
            raise
    there = manifest.read(whole, "hydra.sweep.dir=")
    resume.same_matrix(whole, there, {*record.cells}, "hydra.sweep.dir")
    counts = {path.name.rpartition("-")[2] for path in (*whole.glob(store.PARTS), folder)}
    if len(counts) > 1:
        raise ConfigError(f"part: {whole} has {' and '.join(sorted(counts))} parts; choose one number")


def refuse_whole(whole: Path) -> None:
    """Refuse to resume a sweep in parts as one: its parts are resumed, by these commands.

    Raises:
        ConfigError: it is in parts.
    """
    begun = {path.name.rpartition("-part-")[2]: path for path in whole.glob(store.PARTS)}
    if not begun:
        return
    count = int(next(iter(begun)).rpartition("-")[2])
    owing = []
    for number in range(1, count + 1):
        part = begun.get(f"{number}-of-{count}")
        try:
            rows = {row.cell for row in store.stored_rows(part)} if part else set()
            owes = part is None or not rows.issuperset(manifest.read(part).cells)
        except (ConfigError, store.ResultsError):
            owes = True
        owing += [f"{next_steps.command('resume', whole)} part={number}/{count}"] if owes else []
    told = f"is in {count} parts, each resumed by itself"
    which = f": {', '.join(owing)}" if owing else "; all of them have their rows (rerun=failed with part=…)"
    raise ConfigError(f"resume={whole}: {told}{which}")


def progress(whole: Path) -> str:
    """Say how many cells of the whole sweep have a row.

    Raises:
        ConfigError, ResultsError: a file of it cannot be read.
    """
    rows, cells = sum(1 for _ in store.stored_rows(whole)), manifest.read(whole, "").cells
    return f"{rows} of {counted(len(cells), 'cell')} of {whole} have a row"
