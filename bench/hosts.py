"""What do many hosts cost, and what do failures on them?  Needs dcpbench[ray].

    python bench/hosts.py scale [--ranks 8,16,32,64] [--hosts 1,2,4,8] [--cells N] [--device cuda]
    python bench/hosts.py failures [--ranks N] [--hosts N] [--cells N] [--failures N] [--folder F] [--limit S]
    python bench/hosts.py failures --engine ray-links --failures 1 [--cells N] [--folder F]

The hosts are nodes that Ray simulates on this machine, each with a loopback address of its own. `scale` runs
the same cells on one host without Ray and on more with it. `failures` ends ranks, agents, hosts and the
driver of one long sweep from outside: every cell must have one row, and pass, in its second try where the
first was hit. A sweep that `--limit` seconds have ended goes on where it is, in `--folder`, the next time.
Both end with 1 where something is not so.

The hosts of `ray-links` are two network namespaces (as root) with two ranks each. The link between them
fails, and the sweep goes on with one host.
"""

# ruff: noqa: T201
import argparse
import itertools
import json
import math
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
from host_engines import Hosts, driver, hosts, on_engine

CELL = ("parallel=fsdp2", "saves=1", "train_steps=1", "resume_steps=1", "keep_checkpoints=none")
LOOK_S = 0.02


def of(ranks: int) -> tuple[str, str]:
    """The words for a cell of so many ranks, each with some of the batch."""
    return f"world_size={ranks}", f"model.batch_size={ranks * math.ceil(24 / ranks)}"


def rows_in(folder: Path) -> list[dict[str, Any]]:
    """The rows so far; the last line may be on its way."""
    path = folder / "results.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def scale(arguments: argparse.Namespace) -> int:
    """A line for each number of ranks and of hosts."""
    print("ranks hosts  start s  first s  cell s beyond s  rows/s", flush=True)
    as_they_should = True
    gpus = 0 if arguments.device == "cpu" else max(arguments.ranks)
    for ranks, count in itertools.product(arguments.ranks, [0, *arguments.hosts]):
        if count > ranks:
            continue
        with tempfile.TemporaryDirectory() as parent, ExitStack() as stack:
            words = stack.enter_context(hosts(count, gpus)).words if count else ()
            folder = Path(parent) / "sweep"
            asked = (*of(ranks), f"device={arguments.device}", f"seed=range(0,{arguments.cells})")
            limits = (f"timeouts.cell_s={arguments.cell_limit}", f"hydra.sweep.dir={folder}")
            started = time.monotonic()
            status = driver(folder, *CELL, *asked, *limits, *words).wait()
            took_s = time.monotonic() - started
            rows = rows_in(folder)
            if status or len(rows) != arguments.cells or any(row["status"] != "pass" for row in rows):
                as_they_should = False
                print(f"{ranks:>5} {count:>5} exit status {status}: {[row['reason'] for row in rows][:2]}")
                print(folder.with_suffix(".log").read_text()[-500:])
                continue
            tell(ranks, count, took_s, rows, folder)
    return 0 if as_they_should else 1


def tell(ranks: int, count: int, took_s: float, rows: list[dict[str, Any]], folder: Path) -> None:
    """A line of `scale`. `beyond` is what a cell takes beyond the phases of its slowest rank."""
    measured = pd.read_json(folder / "measurements.jsonl", lines=True)
    phases = measured[measured["metric"] == "phase_s"].groupby(["cell", "rank"])["value"].sum()
    slowest = phases.groupby("cell").max()
    first, *later = rows
    cell_s = statistics.median(row["cell_s"] for row in later)
    beyond_s = statistics.median(row["cell_s"] - slowest[row["cell"]] for row in later)
    start_s = took_s - sum(row["cell_s"] for row in rows)
    per_s = len(later) / sum(row["cell_s"] for row in later)
    figures = f"{start_s:8.1f} {first['cell_s']:8.2f} {cell_s:7.2f} {beyond_s:8.2f} {per_s:7.2f}"
    print(f"{ranks:>5} {count or 'local':>5} {figures}", flush=True)


@dataclass(frozen=True)
class Failure:
    """What was done, after how many rows, and when (`time.monotonic`)."""

    kind: str
    about: str
    rows: int
    at: float


@dataclass
class Sweep:
    """A long sweep of which something fails now and then."""

    folder: Path
    hosts: Hosts
    ranks: int
    words: tuple[str, ...]
    moments: dict[int, str]
    """After how many rows what fails."""
    ended_by: float
    seen: list[float] = field(default_factory=list)
    """When each row was (`time.monotonic`)."""
    failures: list[Failure] = field(default_factory=list)
    before: int = 0
    """How many rows there were at the start."""
    read: int = 0
    """How many bytes of rows have been seen."""
    driver: Any = None

    def run(self) -> int | None:
        """Run it to its end; its exit status, or None where the time was over before."""
        self.before = self.new_rows()
        self.start()
        while (status := self.driver.poll()) is None or self.restarts(status):
            self.look()
            if time.monotonic() > self.ended_by:
                self.driver.send_signal(signal.SIGINT)
                self.driver.wait()
                self.look()
                return None
            time.sleep(LOOK_S)
        self.look()
        return status

    def start(self) -> None:
        resumes = (self.folder / "sweep.json").exists()
        words = (f"resume={self.folder}",) if resumes else self.words
        self.driver = self.hosts.start(self.folder, *words)

    def restarts(self, status: int) -> bool:
        """Start another driver where this one was killed, as a batch system does."""
        if status != -signal.SIGKILL:
            return False
        self.start()
        return True

    def look(self) -> None:
        """Take note of new rows, and have something fail where it is time."""
        self.seen += [time.monotonic()] * self.new_rows()
        count = self.before + len(self.seen)
        if count in self.moments and (about := self.fail(self.moments[count])):
            self.failures.append(Failure(self.moments.pop(count), about, count, time.monotonic()))

    def new_rows(self) -> int:
        """How many rows there are more than when this was last asked; the last line may be on its way."""
        try:
            with (self.folder / "results.jsonl").open("rb") as rows:
                rows.seek(self.read)
                whole, newline, _ = rows.read().rpartition(b"\n")
        except FileNotFoundError:
            return 0
        self.read += len(whole + newline)
        return (whole + newline).count(b"\n")

    def fail(self, kind: str) -> str | None:
        """Have something fail; about what, or None where it is not there yet."""
        if kind == "driver":
            self.driver.kill()
            return "driver"
        if kind in ("host", "link"):
            return self.hosts.fail_host()
        ours = psutil.Process().children(recursive=True)
        if kind.startswith("rank"):
            ranks = [(process, log) for process in ours if (log := self.log_of(process))]
            if len(ranks) < self.ranks:
                return None
            process, log = ranks[-1]
            return self.hit(process, kind, log.stem)
        agents = [process for process in ours if self.hosts.is_agent(process)]
        return self.hit(agents[-1], kind, str(agents[-1].pid)) if agents else None

    def hit(self, process: psutil.Process, kind: str, about: str) -> str | None:
        try:
            process.send_signal(signal.SIGSTOP if kind.endswith("stopped") else signal.SIGKILL)
        except psutil.Error:
            return None
        return about

    def log_of(self, process: psutil.Process) -> Path | None:
        with suppress(OSError, psutil.Error):
            log = Path(f"/proc/{process.pid}/fd/1").readlink()
            return log if log.is_relative_to(self.folder) and log.stem.startswith("rank") else None
        return None


def failures(arguments: argparse.Namespace) -> int:
    """Run the sweep, or go on with it, and judge it."""
    every = arguments.cells / (arguments.failures + 1)
    ranks = arguments.ranks[0] if arguments.engine == "ray" else 4
    arguments.folder.parent.mkdir(parents=True, exist_ok=True)
    with on_engine(arguments.engine, arguments.hosts[0], arguments.folder) as made:
        kinds = itertools.cycle(arguments.kinds.split(",") if arguments.kinds else made.kinds)
        moments = {round(every * (number + 1)): next(kinds) for number in range(arguments.failures)}
        asked = (f"seed=range(0,{arguments.cells})", "device=cpu")
        limits = (f"timeouts.cell_s={arguments.cell_limit}", *of(ranks))
        done = len(rows_in(arguments.folder))
        later = {count: kind for count, kind in moments.items() if count >= done}
        ended_by = time.monotonic() + arguments.limit
        sweep = Sweep(arguments.folder, made, ranks, (*CELL, *asked, *limits), later, ended_by)
        started = time.monotonic()
        status = sweep.run()
        took_s = time.monotonic() - started
    rows = rows_in(arguments.folder)
    if len(sweep.seen) < 2:
        print(f"exit status {status}:", arguments.folder.with_suffix(".log").read_text()[-500:])
        return 1
    wrong = [*judge(rows, sweep), *costs(sweep, arguments.cell_limit)]
    if status is None:
        print(f"ended after {took_s:.0f} s with {len(rows)} of {arguments.cells} rows")
    elif len({row["cell"] for row in rows}) != arguments.cells:
        wrong.append(f"{len(rows)} rows of {arguments.cells} cells; exit status {status}")
    counts = Counter(f"{row['status']}{' (flaky)' if row['flaky'] else ''}" for row in rows)
    print(f"{len(rows)} rows, of which {len(sweep.seen)} in {took_s:.0f} s: {dict(counts)}")
    print(*(f"WRONG: {one}" for one in wrong), sep="\n")
    return 1 if wrong else 0


def judge(rows: list[dict[str, Any]], sweep: Sweep) -> Iterator[str]:
    """What is not as it must be of the rows of this run."""
    twice = [cell for cell, number in Counter(row["cell"] for row in rows).items() if number > 1]
    yield from (f"{cell} has more than one row" for cell in twice)
    here = rows[sweep.before :]
    failed = [row for row in here if row["status"] != "pass" or row["flaky"]]
    lost = [row for row in failed if row["status"] != "pass"]
    yield from (f"{row['cell']}: {row['status']}: {row['reason']}" for row in lost)
    if len(failed) > len(sweep.failures):
        yield f"{len(failed)} cells were not as they should be after {len(sweep.failures)} failures"
    for row in failed:
        print(f"  row {rows.index(row)}: {row['reason'][:220]}")


def costs(sweep: Sweep, cell_limit_s: float) -> Iterator[str]:
    """Print what each failure cost, over what a cell takes; what took too long. A rank that was stopped is
    seen by its cell's limit of time alone."""
    gaps = [later - earlier for earlier, later in itertools.pairwise(sweep.seen)]
    usual_s = statistics.median(gaps)
    print(f"a row each {usual_s:.2f} s; what a failure cost beyond it:")
    for failure in sweep.failures:
        number = failure.rows - sweep.before
        around = gaps[max(0, number - 1) : number + 1]
        cost_s = sum(gap - usual_s for gap in around)
        print(f"  {failure.kind:>13} ({failure.about}) after row {failure.rows}: {cost_s:5.1f} s", flush=True)
        if cost_s > sweep.hosts.most_s + (cell_limit_s if failure.kind == "rank stopped" else 0):
            yield f"{failure.kind} after row {failure.rows} cost {cost_s:.1f} s"


def main() -> int:
    def numbers(text: str) -> list[int]:
        return [int(one) for one in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("scale", "failures"))
    parser.add_argument("--ranks", type=numbers, default=[8, 16, 32, 64])
    parser.add_argument("--hosts", type=numbers, default=[1, 2, 4, 8])
    parser.add_argument("--cells", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--cell-limit", type=float, default=120.0, help="timeouts.cell_s, in seconds")
    parser.add_argument("--failures", type=int, default=20)
    parser.add_argument("--engine", choices=("ray", "ray-links"), default="ray")
    parser.add_argument(
        "--kinds", help="what fails, in turn, of what may on this engine (default: all of it)"
    )
    parser.add_argument("--folder", type=Path, default=Path("outputs/failures").resolve())
    parser.add_argument("--limit", type=float, default=86400.0, help="seconds after which the sweep is ended")
    arguments = parser.parse_args()
    return {"scale": scale, "failures": failures}[arguments.what](arguments)


if __name__ == "__main__":
    sys.exit(main())
