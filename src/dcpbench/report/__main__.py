"""`python -m dcpbench.report ...`: `dcpbench report ...`, or the command that its first word names."""

import dcpbench


def main(arguments: list[str]) -> int:
    """Run the command; its exit status."""
    import importlib

    # By name: the tree of commands is above the report, which it imports.
    return int(importlib.import_module("dcpbench.cli.commands").main(arguments, of_report=True))


if __name__ == "__main__":
    dcpbench.leave_out_current_folder()
    import sys

    sys.exit(main(sys.argv[1:]))
