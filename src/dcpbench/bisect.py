"""`python -m dcpbench.bisect ...`: `dcpbench bisect ...`."""

import sys

from dcpbench.cli.commands import main

if __name__ == "__main__":
    sys.exit(main(["bisect", *sys.argv[1:]]))
