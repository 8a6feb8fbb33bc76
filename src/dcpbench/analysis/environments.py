"""How the machines and their software differed between sweeps."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from dcpbench.analysis.frame import Sweeps

_MACHINE = ("host", "hostname", "node", "cpu", "cpu_model", "cpu_cores", "memory_bytes", "gpu_count", "gpus")
"""What no other version of a package changes. A driver or a kernel is software that a machine gets anew."""
_FIRST = ("torch", "python", "cuda", "nccl", "driver", "gpus", "git_commit", "cpu", "host")
_NOT_SHOWN = {"earlier"}
_COMMIT_LENGTH = 12


def differences(sides: Mapping[str, Sweeps]) -> pd.DataFrame:
    """What is not the same in all: a line for each thing, a column for each side, as text.

    A side of several sweeps has all that was seen in it.
    """
    seen = {name: _seen(sweeps) for name, sweeps in sides.items()}
    keys = sorted({key for side in seen.values() for key in side} - _NOT_SHOWN, key=_place)
    lines = [{"what": key, **{name: _joined(side.get(key)) for name, side in seen.items()}} for key in keys]
    apart = [line for line in lines if len({line[name] for name in sides}) > 1]
    return pd.DataFrame(apart, columns=["what", *sides])


def warning(differing: pd.DataFrame) -> str | None:
    """A sentence if the machines were not the same."""
    machine = [what for what in differing["what"] if what in _MACHINE]
    if not machine:
        return None
    return f"The machines differ ({', '.join(machine)}): another cost may be the machine's and nothing else."


def _seen(sweeps: Sweeps) -> dict[str, list[str]]:
    """Of each thing what was seen, in the order of the sweeps; from the rows where nothing else is there."""
    seen: dict[str, dict[str, None]] = {}
    for folder, environment in sweeps.environments.items():
        rows = sweeps.frame[sweeps.frame["sweep"] == folder]
        of_rows = {"torch": rows["torch_version"], "git_commit": rows["git_commit"], "device": rows["device"]}
        given: dict[str, Iterable[Any]] = {key: list(column.dropna()) for key, column in of_rows.items()}
        given |= {key: [value] for key, value in environment.items() if value not in (None, [])}
        for key, values in given.items():
            seen.setdefault(key, {}).update(dict.fromkeys(_plain(key, value) for value in values))
    return {key: list(values) for key, values in seen.items()}


def _plain(key: str, value: object) -> str:
    if key.endswith("_bytes") and isinstance(value, int | float):
        return f"{value / 2**30:.0f} GiB"
    if key == "git_commit":
        commit, _, dirty = str(value).partition("-")
        return commit[:_COMMIT_LENGTH] + (f"-{dirty}" if dirty else "")
    if isinstance(value, Sequence) and not isinstance(value, str):
        counted = {str(item): sum(str(other) == str(item) for other in value) for item in value}
        return ", ".join(f"{count} × {item}" for item, count in counted.items())
    return json.dumps(value) if isinstance(value, Mapping | bool) else str(value)


def _joined(values: list[str] | None) -> str:
    if not values:
        return "-"
    return ", ".join(values) if len(values) <= 3 else f"{values[0]} … {values[-1]} ({len(values)} values)"


def _place(key: str) -> tuple[int, str]:
    return (_FIRST.index(key) if key in _FIRST else len(_FIRST), key)
