"""A line of `results.jsonl`, which may be damaged or of an older version: its row, and a sentence for each
thing that had to be repaired. Nothing in it is ever evaluated."""

import json
from collections.abc import Mapping
from typing import Any

from dcpbench.core.statuses import UNKNOWN
from dcpbench.records import files
from dcpbench.records.plain_values import ColumnType
from dcpbench.records.row import REQUIRED, SCHEMA_VERSION

READABLE = range(2, SCHEMA_VERSION + 1)
"""The schema versions of rows that can be read. A column that is gone since is kept, and nothing looks at
it: the checks of training by version 2 (`loss_twin_close`, `state_twin_close`) are none of today's."""

_DEEPEST = 200
"""So deep may what is read be nested: whoever walks through it has a stack of 1,000 frames."""
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
    """The row that line `number` holds, None if it is none, and a remark for each thing wrong with it.

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
        return None, [f"{value_text(row)}, where a row was expected; left out"]
    if row.get("schema_version") not in READABLE:
        return None, [_why_not_this_version(row)]
    for name, kind in types.items():
        if (name in row or name in REQUIRED) and not kind.fits(row.get(name)):
            remarks.append(_put_right(row, name, kind, number))
    return dict.fromkeys(REQUIRED) | row, remarks


def _why_no_row(line: bytes, error: str) -> str:
    if len(line) == files.LONGEST_LINE:
        return f"longer than the {len(line):,} bytes of any row, left out, as is all that follows"
    if not line.endswith(b"\n"):
        return "not a whole row, broken off in the middle of a write, left out; resume= runs its cell again"
    if b"\0" in line:
        return "not a whole row, NUL bytes in it (the disk or the machine went down), left out"
    return f"not a whole row, left out: {error}"


def _why_not_this_version(row: dict[str, Any]) -> str:
    version, commit = row.get("schema_version"), row.get("git_commit")
    if version is None:
        return "no schema_version in it, so no row of dcpbench; left out"
    by = f"dcpbench at commit {commit}" if isinstance(commit, str) else "the dcpbench that wrote it"
    if isinstance(version, int) and version > SCHEMA_VERSION:
        by = "a newer dcpbench"
    readable = f"{READABLE[0]} and {READABLE[-1]}"
    told = f"a row of schema version {value_text(version)}, this dcpbench reads {readable}"
    return f"{told}; left out; {by} reads it"


def _put_right(row: dict[str, Any], name: str, kind: ColumnType, number: int) -> str:
    found = f"{name} is {value_text(row[name])}" if name in row else f"no {name}"
    instead = {"status": UNKNOWN.name, "cell": f"line {number}", "details": {}, "config": {}}
    row[name] = instead.get(name)
    shown = "empty" if row[name] == {} else row[name] or "null"
    return f"{found}, where {_TYPE_NAMES[kind.python]} was expected; shown as {shown}"


def parse(content: bytes) -> tuple[Any, list[str]]:
    """The value that a text says, and a remark for each kind of thing in it that is no JSON.

    NaN and the infinities become null; bytes that are no UTF-8 and lone surrogates, whose text cannot be
    written again, become one replacement character each. `json.loads` takes all of them but the bytes.

    Raises:
        ValueError: it is no JSON; the message says what was found where.
    """
    remarks: list[str] = []
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        text = content.decode(errors="replace")
        byte, at = content[error.start], error.start + 1
        remarks.append(f"byte 0x{byte:02x} at {at:,} is no UTF-8, shown as \ufffd")
    no_numbers: dict[str, None] = {}
    try:
        value = json.loads(text, parse_constant=no_numbers.setdefault)
        if "\\ud" in text.lower():
            escaped = json.dumps(value, ensure_ascii=False)
            mended = escaped.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            if mended != escaped:
                value = json.loads(mended)
                remarks.append("half a surrogate pair is no text, shown as \ufffd")
        if text.count("{") + text.count("[") > _DEEPEST and _is_deeper(value, _DEEPEST):
            raise RecursionError
    except RecursionError:
        raise ValueError("nested too deeply to be read") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos + 1} of {len(text):,}") from None
    except ValueError:
        raise ValueError("a number of more digits than any that is measured") from None
    if no_numbers:
        remarks.append(f"{', '.join(no_numbers)} is no JSON, shown as null")
    return value, remarks


def _is_deeper(value: Any, deepest: int) -> bool:
    inside = [value]
    for _ in range(deepest):
        nested = (item for item in inside if isinstance(item, dict | list))
        inside = [one for item in nested for one in (item.values() if isinstance(item, dict) else item)]
    return any(isinstance(item, dict | list) for item in inside)


def value_text(value: object) -> str:
    """A value in a sentence, whatever and however long it is."""
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    if isinstance(value, int) and abs(value) >= 10**20:
        return "a huge number"
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:50]}... ({len(text):,} characters)"
