"""Does a sweep end as it should, whatever asks it to, whenever?  python bench/signals.py [moment ...] [stops]

A driver of two cells on two ranks is sent SIGINT, SIGTERM, SIGHUP and SIGQUIT, once, twice and five times, at
each moment of its life. Right is: exit status 128 and the signal's number, no traceback, a last line that is
true, the table and reports of the rows that there are, and no process left. Then (`stops`) each of its
processes in turn is stopped for good: the sweep has to end all the same, with a row for each cell. Ends with
1 where anything else was seen.
"""

# ruff: noqa: T201
import itertools
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.interruptions import IN_DRIVER, IN_RANK, SIGNALS, problems, stopped

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
