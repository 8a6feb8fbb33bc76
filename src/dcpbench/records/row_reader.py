"""Read a line of `results.jsonl`, which can be damaged: its row, and a remark for each repair. Nothing in it
is ever evaluated."""

import json
from collections.abc import Mapping
from typing import Any

from dcpbench.core.statuses import UNKNOWN
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


def read_row(
    line: bytes, number: int, types: Mapping[str, ColumnType]
) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the row in line `number`, or None, and a remark for each of its errors.

    `types` are those of all columns. A value that its column cannot hold becomes null (a `status` `unknown`,
    a `cell` the number of its line, `details` empty).
    """
    if not line.strip():
        return None, []
    try:
        row, remarks = parse(line)
    except ValueError as error:
        return None, [_why_no_row(line, str(error))]
    if not isinstance(row, dict):
        return None, [f"{value_text(row)}, expected a row; ignored"]
    if row.get("schema_version") != SCHEMA_VERSION:
        return None, [_why_not_this_version(row)]
    for name, kind in types.items():
        if (name in row or name in REQUIRED) and not kind.fits(row.get(name)):
            remarks.append(_repair(row, name, kind, number))
    return dict.fromkeys(REQUIRED) | row, remarks


def _why_no_row(line: bytes, error: str) -> str:
    if len(line) == files.LONGEST_LINE:
        return f"longer than the {len(line):,} bytes of any row; ignored, with all lines after it"
    if not line.endswith(b"\n"):
        return "a torn row, whose write was interrupted; ignored; resume runs its cell again"
    if b"\0" in line:
        return "a damaged row with NUL bytes (the disk or the machine failed); ignored"
    return f"{error}; ignored"


def _why_not_this_version(row: dict[str, Any]) -> str:
    version, commit = row.get("schema_version"), row.get("dcpbench_commit")
    if version is None:
        return "no schema_version, so not a row of dcpbench; ignored"
    by = f"dcpbench at commit {commit}" if isinstance(commit, str) else "the dcpbench that wrote it"
    if isinstance(version, int) and version > SCHEMA_VERSION:
        by = "a newer dcpbench"
    return (
        f"schema version {value_text(version)}, this dcpbench reads {SCHEMA_VERSION}; ignored; {by} reads it"
    )


def _repair(row: dict[str, Any], name: str, kind: ColumnType, number: int) -> str:
    found = f"{name} is {value_text(row[name])}" if name in row else f"no {name}"
    instead = {"status": UNKNOWN.name, "cell": f"line {number}", "details": {}, "config": {}}
    row[name] = instead.get(name)
    shown = "empty" if row[name] == {} else row[name] or "null"
    return f"{found}, expected {_TYPE_NAMES[kind.python]}; shown as {shown}"


def parse(content: bytes) -> tuple[Any, list[str]]:
    """Return the JSON value in a text, and a remark for each kind of thing in it that is invalid JSON.

    NaN and the infinities become null. Bytes that are not UTF-8 and lone surrogates, which cannot be written
    again, become one replacement character each. `json.loads` accepts all of them but the bytes.

    Raises:
        ValueError: it is not JSON; the message names the line and the problem.
    """
    remarks: list[str] = []
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        text = content.decode(errors="replace")
        byte, at = content[error.start], error.start + 1
        remarks.append(f"byte 0x{byte:02x} at {at:,} is not UTF-8, shown as \ufffd")
    no_numbers: dict[str, None] = {}
    try:
        value = json.loads(text, parse_constant=no_numbers.setdefault)
        if "\\ud" in text.lower():
            escaped = json.dumps(value, ensure_ascii=False)
            fixed = escaped.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            if fixed != escaped:
                value = json.loads(fixed)
                remarks.append("half a surrogate pair is not text, shown as \ufffd")
    except json.JSONDecodeError as error:
        place = min(error.pos + 1, len(text))  # an error at the end is behind the last character
        raise ValueError(f"invalid JSON at character {place:,} of {len(text):,}") from None
    except RecursionError:
        raise ValueError("nested too deeply to be read") from None
    if no_numbers:
        remarks.append(f"{', '.join(no_numbers)} is not JSON, shown as null")
    return value, remarks


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
