"""`python -m dcpbench.report <sweep folder>`: the table again, from the rows."""

import argparse
import sys
from pathlib import Path

from dcpbench.report.compare import print_comparison
from dcpbench.report.text import print_report
from dcpbench.report.write import write_reports
from dcpbench.results import ResultsError

_USAGE = """python -m dcpbench.report SWEEP
       python -m dcpbench.report compare OLD NEW"""


def main(arguments: list[str]) -> int:
    """Print and rewrite the report of one sweep, or compare two; 0, or 2 for what cannot be read."""
    try:
        if arguments[:1] == ["compare"]:
            compare = argparse.ArgumentParser(prog="python -m dcpbench.report compare")
            compare.add_argument("old", type=Path, help="folder of the sweep to compare with")
            compare.add_argument("new", type=Path, help="folder of the sweep to judge")
            both = compare.parse_args(arguments[1:])
            print_comparison(both.old, both.new)
        else:
            show = argparse.ArgumentParser(prog="python -m dcpbench.report", usage=_USAGE)
            show.add_argument("sweep", type=Path, help="folder of a sweep, with its results.jsonl")
            folder = show.parse_args(arguments).sweep
            print_report(folder)
            write_reports(folder)
    except ResultsError as error:
        sys.stderr.write(f"dcpbench.report: {error}\n")
        return 2
    except OSError as error:
        sys.stderr.write(f"dcpbench.report: the report files were not written: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
