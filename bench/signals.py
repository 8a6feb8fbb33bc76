"""Check that a sweep ends as expected after any signal at any moment.

    python bench/signals.py [moment ...] [stops]

A driver of two cells on two ranks gets SIGINT, SIGTERM, SIGHUP and SIGQUIT, once, twice and five times, at
each moment. Expected: exit status 128 plus the signal's number, no traceback, a correct last line, the table
and reports of the finished rows, and no remaining process. With `stops`, each process in turn is stopped for
good: the sweep still has to end with a row for each cell. Exits with 1 otherwise.
"""

# ruff: noqa: T201
import itertools
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from adversary.interruptions import IN_DRIVER, IN_RANK, SIGNALS, problems, stopped

TIMES = (1, 2, 5)
STOPS = "stops"


def main(asked: list[str]) -> int:
    """Print the matrix, or the parts of it that are asked for; 1 if something was not as it should be."""
    wrong = interruptions([one for one in asked or [*IN_DRIVER, *IN_RANK] if one != STOPS])
    if not asked or STOPS in asked:
        wrong += stops()
    return 1 if wrong else 0


def interruptions(moments: list[str]) -> int:
    """Print how sweeps end that are interrupted at these moments; how many did not end as they should."""
    tried, wrong, began = 0, 0, time.monotonic()
    if not moments:
        return 0
    print(f"{'moment':14}", *(f"{number.name:24}" for number in SIGNALS), sep="")
    for moment in moments:
        cells = []
        for number in SIGNALS:
            ends = []
            for times in TIMES:
                with tempfile.TemporaryDirectory() as folder:
                    found = problems(Path(folder), moment, number, times)
                tried, wrong = tried + 1, wrong + bool(found)
                ends.append("; ".join(found) or str(128 + number))
            cells.append(f"{' '.join(ends):24}")
        print(f"{moment:14}", *cells, sep="", flush=True)
    print(f"{tried} interruptions in {time.monotonic() - began:.0f} s: {wrong} did not end as they should")
    return wrong


def stops() -> int:
    """Print what becomes of a sweep each of whose processes is stopped in turn; how many did not end well."""
    wrong = 0
    for which in itertools.count():
        with tempfile.TemporaryDirectory() as folder:
            ended = stopped(Path(folder), which)
        if ended is None:
            print(f"{which} processes stopped: {wrong} sweeps did not end as they should")
            return wrong
        process, found = ended
        wrong += bool(found)
        print(f"stopped {process:18} {'; '.join(found) or 'both cells have a row'}", flush=True)
    raise AssertionError


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
