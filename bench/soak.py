"""Kill ranks and drivers of a sweep at random moments, and check its rows.

    python bench/soak.py [--cells N] [--seed N]

A sweep of many small cells on CPU ranks. A rank is killed or stopped again and again; now and then the
driver is killed and the sweep resumed. Exits with 1 unless every cell has exactly one complete row besides
that of a retry, the row of each run that was hit says so, all other runs passed, and no process or file is
leaked.
"""

# ruff: noqa: T201
import argparse
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP)
CELL_LIMIT_S = 8
GONE_S = 15
SWEEP = (
    *("device=cpu", "world_size=3", "parallel=ddp,fsdp2", "save=sync,async", "model=even"),
    *("saves=2", "train_steps=1", "resume_steps=1", f"timeouts.cell_s={CELL_LIMIT_S}"),
)


@dataclass(frozen=True)
class Hit:
    """A signal that was sent to a rank which logged to `cell`'s folder."""

    cell: str
    rank: int
    name: str


@dataclass
class Soak:
    """A sweep under fire, in `folder`."""

    folder: Path
    cells: int
    every_s: float
    driver_every_s: float
    chance: random.Random
    hits: list[Hit] = field(default_factory=list)
    drivers: int = 0

    def run(self) -> int:
        """Run the sweep to its end, with as many drivers as it takes; its exit status."""
        while (status := self.drive()) is None:
            self.wait_until_left()
        return status

    def drive(self) -> int | None:
        """Run one driver; its exit status, or None if it was killed."""
        self.drivers += 1
        driver = self.start()
        end = math.inf
        try:
            while driver.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    driver.wait(self.chance.expovariate(1 / self.every_s))
                if (self.folder / "results.jsonl").exists() and time.monotonic() > end:
                    return None
                if end == math.inf and list(self.ranks(driver)) and self.driver_every_s:
                    end = time.monotonic() + self.chance.expovariate(1 / self.driver_every_s)
                self.hit_a_rank(driver)
        finally:
            driver.kill()
            driver.wait()
        return driver.returncode

    def start(self) -> "subprocess.Popen[bytes]":
        """A driver of the sweep, or of what is left of it."""
        seeds = ",".join(str(number) for number in range(-(-self.cells // 4)))
        asked = ["-m", *SWEEP, f"seed={seeds}", f"hydra.sweep.dir={self.folder}"]
        if self.drivers > 1:
            asked = ["resume", str(self.folder)]
        return subprocess.Popen(
            [sys.executable, "-m", "dcpbench", *asked],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=(self.folder.parent / "soak.err").open("ab"),
        )

    def wait_until_left(self) -> None:
        """Wait until the ranks of a driver that was killed are gone, as they must be soon."""
        deadline = time.monotonic() + GONE_S
        while list(alive_in(self.folder)) and time.monotonic() < deadline:
            time.sleep(0.1)

    def hit_a_rank(self, driver: "subprocess.Popen[bytes]") -> None:
        """Send one of the signals to one of the ranks, if there are any."""
        if not (ranks := list(self.ranks(driver))):
            return
        pid, log = self.chance.choice(ranks)
        chosen = self.chance.choice(SIGNALS)
        with suppress(ProcessLookupError):
            os.kill(pid, chosen)
            self.hits.append(Hit(log.parent.name, int(log.stem.removeprefix("rank")), chosen.name))

    def ranks(self, driver: "subprocess.Popen[bytes]") -> Iterator[tuple[int, Path]]:
        """The rank processes and their logs."""
        with suppress(psutil.Error):
            for process in psutil.Process(driver.pid).children(recursive=True):
                with suppress(OSError):
                    log = Path(f"/proc/{process.pid}/fd/1").readlink()
                    if log.is_relative_to(self.folder):
                        yield process.pid, log


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", type=int, default=200, help="at least so many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments, ranks and signals")
    parser.add_argument("--every", type=float, default=4.0, help="seconds between hits, on average")
    parser.add_argument(
        "--driver-every", type=float, default=30.0, help="seconds between ends of a driver; 0: never"
    )
    arguments = parser.parse_args()
    shared = shared_memory()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        chance = random.Random(arguments.seed)
        every_s = (arguments.every, arguments.driver_every)
        soak = Soak(Path(folder) / "sweep", arguments.cells, *every_s, chance)
        status = soak.run()
        spent_s = time.monotonic() - started
        rows, broken = read(soak.folder)
        wrong = [*broken, *judge(rows, soak.hits, -(-arguments.cells // 4) * 4, status)]
        wrong += [f"left behind: {line}" for line in alive_in(soak.folder)]
        wrong += [f"left behind: {SHARED_MEMORY / name}" for name in shared_memory() - shared]
        if wrong:
            print((Path(folder) / "soak.err").read_text(errors="replace"))
    report(rows, soak, spent_s)
    for sentence in wrong:
        print(f"WRONG: {sentence}")
    return 1 if wrong else 0


def read(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows, and a sentence for each line that is none."""
    rows, broken = [], []
    for line in (folder / "results.jsonl").read_text().splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            broken.append(f"not a whole row: {line[:80]}")
    return rows, broken


def judge(rows: list[dict[str, Any]], hits: list[Hit], cells: int, status: int) -> Iterator[str]:
    """What is not as it must be."""
    counted = Counter(row["cell"] for row in rows if row["retry_of"] is None)
    if len(counted) != cells:
        yield f"{len(counted)} of {cells} cells have a row"
    yield from (f"{number} rows of {cell}" for cell, number in counted.items() if number > 1)
    before = ""
    for row in rows:
        if row["status"] != "pass":
            # A rank that was hit before it began the cell still wrote to the log of the one before.
            here = [hit for hit in hits if hit.cell in (row["cell"], before)]
            if not any(explains(hit, row) for hit in here):
                yield f"{row['cell']}: {row['status']} without a cause: {row['reason']}; {here}"
        before = row["cell"]
    if status != int(any(row["status"] != "pass" for row in rows)):
        yield f"exit status {status}"


def explains(hit: Hit, row: dict[str, Any]) -> bool:
    """Whether a row says what was done to a rank."""
    reason = row["reason"]
    if hit.name == "SIGSTOP":
        stopped = re.search(rf"rank [\d, ]*\b{hit.rank}\b[\d, ]* stopped by a signal", reason)
        return row["status"] == "timeout" and stopped is not None
    return row["status"] == "crash" and reason.startswith(f"rank {hit.rank} was killed by {hit.name} in ")


def report(rows: list[dict[str, Any]], soak: Soak, spent_s: float) -> None:
    """What happened, in figures."""
    sent = ", ".join(f"{number} {name}" for name, number in Counter(hit.name for hit in soak.hits).items())
    came_to = Counter(f"{row['status']}{' (flaky)' if row['flaky'] else ''}" for row in rows)
    print(f"{len(rows)} runs in {spent_s:.0f} s, {soak.drivers} drivers, {len(soak.hits)} hits ({sent})")
    print(", ".join(f"{number} {status}" for status, number in came_to.most_common()))
    first = Counter(row["status"] for row in rows if row["status"] != "pass")
    print("runs that failed: " + (", ".join(f"{number} {status}" for status, number in first.items()) or "0"))


def shared_memory() -> set[str]:
    return {path.name for path in SHARED_MEMORY.iterdir()} if SHARED_MEMORY.is_dir() else set()


def alive_in(folder: Path) -> Iterator[str]:
    """Processes that have a file below `folder` open."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any(item.path.startswith(str(folder)) for item in process.open_files()):
                yield f"{process.pid}: {' '.join(process.cmdline())}"


if __name__ == "__main__":
    sys.exit(main())
