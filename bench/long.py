"""How do throughput and memory develop over a long sweep?  python bench/long.py [dcpbench's overrides]

Runs `experiment=soak`, 1,050 cells, if nothing else is asked for, and prints every hundred cells how long
they took and what the driver and its largest rank hold in memory.
"""

# ruff: noqa: T201
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

EVERY = 100
NOT_WELL = ("fail", "error", "crash", "timeout", "vacuous", "xpass", "    again")


def main() -> int:
    asked = sys.argv[1:] or ["experiment=soak"]
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "sweep"
        said = Path(parent) / "said"
        command = [sys.executable, "-m", "dcpbench", *asked, f"hydra.sweep.dir={folder}"]
        with said.open("w") as out:
            sweep = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        watch(sweep, folder / "results.jsonl")
        print(said.read_text().splitlines()[-1])
        rows = (folder / "results.jsonl").stat().st_size
        print(f"{rows / 1e6:.1f} MB of rows, exit status {sweep.returncode}")
        told = said.read_text().splitlines()
        print(*(line for line in told if line.startswith(NOT_WELL) or " cells: " in line), sep="\n")
    return sweep.returncode


def watch(sweep: subprocess.Popen[bytes], results: Path) -> None:
    """Look once a second; a line at 50 cells and at every hundred."""
    driver = psutil.Process(sweep.pid)
    started = before = time.monotonic()
    wanted, seen_before = 50, 0
    print(f"{'cells':>6}{'s':>8}{'cells/s':>9}{'driver MB':>11}{'largest rank MB':>17}")
    while sweep.poll() is None:
        time.sleep(1)
        cells = results.read_bytes().count(b"\n") if results.exists() else 0
        if cells < wanted:
            continue
        now = time.monotonic()
        held, largest = memory(driver)
        rate = (cells - seen_before) / (now - before)
        print(f"{cells:6}{now - started:8.0f}{rate:9.2f}{held:11.1f}{largest:17.1f}", flush=True)
        before, seen_before = now, cells
        wanted = (cells // EVERY + 1) * EVERY


def memory(driver: psutil.Process) -> tuple[float, float]:
    """Resident megabytes of the driver, and of the largest process below it."""
    try:
        below = [process.memory_info().rss for process in driver.children(recursive=True)]
        return driver.memory_info().rss / 1e6, max(below, default=0) / 1e6
    except psutil.Error:
        return 0.0, 0.0


if __name__ == "__main__":
    sys.exit(main())
