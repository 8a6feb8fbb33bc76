"""`python -m dcpbench`, and the console script `dcpbench`: what is typed in, an exit status out."""

import dcpbench


def main() -> None:
    """Run the command line; ends the process with its exit status."""
    dcpbench.leave_out_current_folder()
    import os
    import signal
    import sys

    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # while everything is imported
    from dcpbench.cli.commands import main as commands

    sys.exit(commands(sys.argv[1:]))


if __name__ == "__main__":
    main()
