"""`python -m dcpbench.bisect ...`: `dcpbench bisect ...`."""

import dcpbench

if __name__ == "__main__":
    dcpbench.leave_out_current_folder()
    import sys

    from dcpbench.cli.commands import main

    sys.exit(main(["bisect", *sys.argv[1:]]))
