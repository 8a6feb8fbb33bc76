"""JSON from a file that may be damaged: its value, and a sentence for each thing that had to be repaired.

`json.loads` takes more than JSON (NaN, lone surrogates, whose text cannot be written again) and raises more
than ValueError (RecursionError). Whoever reads a file of results wants neither.
"""

import json
from typing import Any

_SURROGATES = ("\\ud", "\\uD")


def parse(content: bytes) -> tuple[Any, list[str]]:
    """The value that a text says, and a remark for each kind of thing in it that is no JSON.

    NaN and the infinities become null; bytes that are no UTF-8 and lone surrogates become one
    replacement character each.

    Raises:
        ValueError: it is no JSON; the message says what was found where.
    """
    text, remarks = _decoded(content)
    no_numbers: dict[str, None] = {}
    try:
        value = json.JSONDecoder(parse_constant=no_numbers.setdefault).decode(text)
        if "\\" in text and any(half in text for half in _SURROGATES):
            value = _without_surrogates(value, remarks)
    except RecursionError:
        raise ValueError("nested too deeply to be read") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos + 1} of {len(text):,}") from None
    except ValueError:
        raise ValueError("a number of more digits than any that is measured") from None
    if no_numbers:
        remarks.append(f"{', '.join(no_numbers)} is no JSON, shown as null")
    return value, remarks


def _decoded(content: bytes) -> tuple[str, list[str]]:
    try:
        return content.decode("utf-8"), []
    except UnicodeDecodeError as error:
        remark = f"byte 0x{content[error.start]:02x} at {error.start + 1:,} is no UTF-8, shown as \ufffd"
        return content.decode("utf-8", errors="replace"), [remark]


def _without_surrogates(value: Any, remarks: list[str]) -> Any:
    text = json.dumps(value, ensure_ascii=False)
    mended = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if mended == text:
        return value
    remarks.append("half a surrogate pair is no text, shown as \ufffd")
    return json.loads(mended)
