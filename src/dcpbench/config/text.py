"""Text from anywhere, as it may be shown."""

import re

_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def visible(text: str, but: str = "") -> str:
    """A text without what a terminal would obey: control characters, and those that turn the direction of
    writing, are written as escapes, `but` for some."""
    return _CONTROL.sub(lambda found: found[0] if found[0] in but else _escape(found[0]), text)


def _escape(sign: str) -> str:
    return sign.encode("unicode_escape").decode()
