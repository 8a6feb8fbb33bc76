"""`python -m dcpbench.report ...`: `dcpbench report ...`, or the command that its first word names."""

import importlib
import sys

_COMMANDS = ("compare", "history", "log")


def main(arguments: list[str]) -> int:
    """Run the command; its exit status."""
    words = arguments if arguments[:1] and arguments[0] in _COMMANDS else ["report", *arguments]
    # By name: the tree of commands is above the report, which it imports.
    return int(importlib.import_module("dcpbench.cli.commands").main(words))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
