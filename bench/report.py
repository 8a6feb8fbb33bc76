"""Measure reading rows beyond `json.loads`, the report of a sweep, and the opening of its page in Chromium.

python bench/report.py --rows 1000
"""

# ruff: noqa: T201

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from dcpbench.records.store import RESULTS_JSONL, read_rows

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.browser import chromium

SAMPLE = Path(__file__).parents[1] / "docs" / "sample-sweep" / RESULTS_JSONL
DETAILS_BYTES = 20_000
"""About what the details of a cell of the default sweep take up."""
_OPENED = """
return [...performance.getEntriesByType("paint").slice(-1), ...performance.getEntriesByName("drawn")]
  .map((entry) => entry.startTime)
"""


def main() -> None:
    """Print the times of a made-up sweep: the sample's rows, with other seeds and with details."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--rows", type=int, default=1000)
    rows = arguments.parse_args().rows
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        lines = sweep_of(rows)
        (folder / RESULTS_JSONL).write_text("".join(lines))
        loads_s = best_of(3, lambda: [json.loads(line) for line in lines])
        read_s = best_of(3, lambda: read_rows(folder))
        print(f"{rows} rows, {sum(map(len, lines)) / 1e6:.0f} MB")
        print(f"json.loads alone    {loads_s:.3f} s, {loads_s / rows * 1e6:.0f} us a row")
        print(f"read_rows           {read_s:.3f} s, {read_s / rows * 1e6:.0f} us a row")
        page = folder / "report.html"
        for options in ([], ["--cells"], ["-o", str(page)]):
            shown_s = best_of(3, lambda options=options: report(folder, options))
            print(f"{' '.join(['report', '<sweep>', *options]):42} {shown_s:.2f} s")
        with chromium(folder / "profile") as browser:
            for _ in range(2):  # the first one also starts the browser's own processes
                browser.open(page)
            painted, drawn = browser.js(_OPENED)
        print(f"report.html         first paint after {painted:.0f} ms, all drawn after {drawn:.0f} ms")


def sweep_of(rows: int) -> list[str]:
    """Lines of so many rows, no two of the same cell."""
    samples = [json.loads(line) for line in SAMPLE.read_text().splitlines()]
    control = {
        f"state.net{n}.weight.exp_avg in the checkpoint of step 6": True for n in range(DETAILS_BYTES // 60)
    }
    lines = []
    for number in range(rows):
        row = dict(samples[number % len(samples)])
        seed = number // len(samples)
        row |= {
            "seed": seed,
            "cell": f"{row['cell']},seed={seed}",
            "overrides": f"{row['overrides']} seed={seed}",
        }
        row["details"] = {"checks": {"optim_equal": {"held": True, "control": control}}}
        lines.append(json.dumps(row) + "\n")
    return lines


def report(folder: Path, options: list[str]) -> None:
    """The report as a user starts it: a process of its own."""
    words = [sys.executable, "-m", "dcpbench", "report", str(folder), *options]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


def best_of(times: int, do: Callable[[], object]) -> float:
    """The shortest of so many tries, in seconds."""
    taken_s = []
    for _ in range(times):
        began = time.perf_counter()
        do()
        taken_s.append(time.perf_counter() - began)
    return min(taken_s)


if __name__ == "__main__":
    main()
