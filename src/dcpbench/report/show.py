"""`python -m dcpbench.report <sweep>`: the table again, from the rows."""

import argparse
import sys
from pathlib import Path

from dcpbench.report.text import print_report
from dcpbench.report.write import write_reports


def main(arguments: list[str]) -> int:
    """Print and rewrite the report of one sweep.

    Raises:
        dcpbench.results.ResultsError: the folder holds no results.
    """
    show = argparse.ArgumentParser(prog="python -m dcpbench.report")
    show.add_argument("sweep", type=Path, help="folder of a sweep, with its results.jsonl")
    folder = show.parse_args(arguments).sweep
    print_report(folder)
    try:
        write_reports(folder)
    except OSError as error:
        sys.stderr.write(f"dcpbench.report: the report files were not written: {error}\n")
    return 0
