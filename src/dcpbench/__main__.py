"""`python -m dcpbench`, and the console script `dcpbench`: what is typed in, an exit status out."""

import os
import signal
import sys
from contextlib import suppress


def main() -> None:
    """Run the command line; ends the process with its exit status."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # while everything is imported
    from dcpbench.cli.commands import main as commands

    # As with `python -m`, ranks find the user's modules in the folder in which this is started; last, so that
    # nothing there stands in for what is installed.
    with suppress(OSError):  # it was removed
        if not sys.flags.safe_path and (folder := os.getcwd()) not in sys.path:  # noqa: PTH109 - it is quick
            sys.path.append(folder)
    sys.exit(commands(sys.argv[1:]))


if __name__ == "__main__":
    main()
