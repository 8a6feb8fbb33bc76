"""Read a line of `results.jsonl`, which can be damaged: its row, or why it is ignored. Nothing in it is ever
evaluated."""

import json
from collections.abc import Mapping
from typing import Any

from dcpbench.records import files
from dcpbench.records.plain_values import ColumnType
from dcpbench.records.row import REQUIRED, SCHEMA_VERSION

_TYPE_NAMES = {
    bool: "true or false",
    int: "an integer of 64 bits",
    float: "a finite number",
    str: "a text",
    dict: "an object",
}


def read_row(line: bytes, types: Mapping[str, ColumnType]) -> dict[str, Any]:
    """Return the row in a line, given the `types` of all columns.

    Raises:
        ValueError: the line is not a row of this version; the message says why.
    """
    if len(line) == files.LONGEST_LINE:
        raise ValueError(f"longer than the {len(line):,} bytes of any row, and hides all lines after it")
    if not line.endswith(b"\n"):
        raise ValueError("a torn row, whose write was interrupted")
    row = parse(line)
    if not isinstance(row, dict):
        raise ValueError(f"{value_text(row)}, expected a row")
    if row.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(_why_not_this_version(row))
    for name, kind in types.items():
        if (name in row or name in REQUIRED) and not kind.fits(row.get(name)):
            value = f"{name} is {value_text(row[name])}" if name in row else f"no {name}"
            raise ValueError(f"{value}, expected {_TYPE_NAMES[kind.python]}")
    return dict.fromkeys(REQUIRED) | row


def _why_not_this_version(row: dict[str, Any]) -> str:
    version, commit = row.get("schema_version"), row.get("dcpbench_commit")
    if version is None:
        return "no schema_version, so not a row of dcpbench"
    by = f"dcpbench at commit {commit}" if isinstance(commit, str) else "the dcpbench that wrote it"
    if isinstance(version, int) and version > SCHEMA_VERSION:
        by = "a newer dcpbench"
    return f"schema version {value_text(version)}, this dcpbench reads {SCHEMA_VERSION}; {by} reads it"


def parse(content: bytes) -> Any:
    """Return the JSON value in a text. Unlike `json.loads`, refuse NaN, infinities and lone surrogates.

    Raises:
        ValueError: it is not JSON; the message names the place and the problem.
    """
    try:
        value = json.loads(content.decode(), parse_constant=_refuse)
        if b"\\ud" in content.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    return value


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number")


def dict_in(value: object) -> dict[str, Any]:
    """Return a dict that a row may hold; an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def list_in(value: object) -> list[Any]:
    """Return a list that a row may hold; an empty one for anything else."""
    return value if isinstance(value, list) else []


def value_text(value: object) -> str:
    """Return a short text for any value."""
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:50]}... ({len(text):,} characters)"
