"""`python -m dcpbench`, and the console script `dcpbench`."""

import dcpbench


def main() -> None:
    """Run the command line, without words `--help`, and end the process with its exit status."""
    dcpbench.leave_out_current_folder()
    import os
    import signal
    import sys

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as of a background job of a script
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # during the imports
    from dcpbench.cli.commands import main as commands

    status = commands(sys.argv[1:] or ["--help"])
    # An interrupt while Python executes text, as dataclasses do, makes `python -m` end by SIGINT although it
    # was caught; executing another text resets that.
    exec("")  # noqa: S102
    sys.exit(status)


if __name__ == "__main__":
    main()
