"""The rows of many sweeps, with the columns that a history needs and no others."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from dcpbench.analysis.flat_rows import read_flat
from dcpbench.analysis.frame import AXES, read_frame, short_names, sweeps_in
from dcpbench.records.store import RESULTS_JSONL, ResultsError

_OF_CELL = (*AXES, "overrides", "status", "reason", "flaky", "fault_seen")
_OF_SWEEP = ("torch_version", "git_commit", "started_at")


@dataclass(frozen=True)
class Rows:
    """The rows of sweeps; `at` in the frame is the place of its sweep in `folders` and in `names`, which
    just tell them apart. `remarks` are sentences on what could not be read, or not in the quick way."""

    frame: pd.DataFrame
    folders: list[Path]
    names: list[str]
    remarks: list[str]


def read_history(places: Sequence[Path], columns: Sequence[str] = ()) -> Rows:
    """The rows of all sweeps in these places, with the columns of a history and these.

    Raises:
        ResultsError: one of the places holds no results, or none of those in it can be read.
    """
    folders = list({sweep.resolve(): sweep for place in places for sweep in sweeps_in(place)})
    wanted = list(dict.fromkeys([*_OF_CELL, *_OF_SWEEP, *columns]))
    frames, refused = read_flat(folders, wanted)
    told: list[str] = []
    for number in refused:
        try:
            frame, damaged = read_frame(folders[number])
        except ResultsError as error:
            damaged = [str(error)]
        else:
            frames.append(frame[wanted].assign(at=number))
        told += damaged
    names = short_names(map(str, folders))
    empty = [pd.DataFrame(columns=[*wanted, "at"])]
    together = pd.concat([frame for frame in frames if len(frame)] or empty, ignore_index=True)
    if together.empty:
        which = ", ".join(map(str, places))
        raise ResultsError(
            f"{which}: no rows in {len(folders)} sweeps{''.join(f'; {said}' for said in told[:1])}"
        )
    return Rows(
        together, folders, [names[str(folder)] for folder in folders], _said_of(refused, folders) + told
    )


def _said_of(refused: dict[int, str], folders: Sequence[Path]) -> list[str]:
    """A sentence for each reason why sweeps are read from `results.jsonl`."""
    for_reason: dict[str, list[Path]] = {}
    for number, why in refused.items():
        for_reason.setdefault(why, []).append(folders[number])
    return [
        f"{which[0]}{f' and {len(which) - 1} more' if len(which) > 1 else ''}: {why}; "
        f"read from {RESULTS_JSONL}, which takes longer"
        for why, which in for_reason.items()
    ]
