"""`python -m dcpbench`, and the console script `dcpbench`."""

import dcpbench


def main() -> None:
    """Run the command line and exit. Without words `dcpbench` prints its help; `python -m dcpbench` runs the
    default cell."""
    import sys

    run(sys.argv[1:] or ["--help"])


def run(words: list[str]) -> None:
    """Run a command line and end the process with its exit status."""
    dcpbench.leave_out_current_folder()
    import os
    import signal
    import sys

    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # during the imports
    from dcpbench.cli.commands import main as commands

    sys.exit(commands(words))


if __name__ == "__main__":
    import sys

    run(sys.argv[1:])
