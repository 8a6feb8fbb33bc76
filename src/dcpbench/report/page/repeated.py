"""Texts that a log and a reason share."""

import re

_REPEATED = 20
"""The fewest characters of a message for which a log refers to the reason."""
_NOTE = "(the message is in the reason)"


def without_message(lines: list[str], reason: str) -> list[str]:
    """Return the lines of a log in which a note replaces the longest block that the reason has too.

    >>> without_message(["load()", "a.LoadError: shard 3 is", "missing"], "LoadError: shard 3 is missing")
    ['load()', '(the message is in the reason)']
    """
    # A trace names an exception with its module, a reason without.
    words = [" ".join(re.sub(r"^(\w+\.)+(?=\w+:)", "", line).split()) for line in lines]
    said, longest = " ".join(reason.split()), (0, 0, 0)
    for first in range(len(words)):
        last = first
        while last < len(words) and (block := " ".join(filter(None, words[first : last + 1]))) in said:
            last += 1
            longest = max(longest, (len(block), first, last))
    length, first, last = longest
    return [*lines[:first], _NOTE, *lines[last:]] if length >= _REPEATED else lines
