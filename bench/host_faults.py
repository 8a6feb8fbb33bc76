"""What does a failure cost that takes ranks of a host along?

    python bench/host_faults.py [engine|failure ...]

For each kind of failure a sweep of two cells on two hosts, the first of which has it in its load and is not
tried again. Both have fresh ranks. Printed: the row's status; how long after the failure its row was there;
how long after it the next cell's ranks ran. The line `nothing` has how long that takes between two cells that
pass. Where the driver is killed, its cell runs again: its row and its ranks are what is waited for. A link
that torchrun's hosts need is mended once the row is there. Needs `dcpbench[ray]`, and root for hosts with a
link of their own. Ends with 1 where a row came later than LIMIT_S after a failure.
"""

# ruff: noqa: T201
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from conftest import SMALL, Finished, command, wait_for
from support.drivers import environment
from support.elastic import HERE, driver_of, torchrun
from support.hosts import hosts, ray_in
from support.namespaces import namespaces, up

LIMIT_S = 15.0
ENDS_S = 180.0
_LOOK_EVERY_S = 0.05
ON_RANK_3 = ("scenario=dies", "scenario.options.rank=3", "scenario.options.phase=load")
CELLS = (
    "-m",
    *SMALL,
    "device=cpu",
    "saves=1",
    "parallel=hsdp2",
    "world_size=4",
    "retry=0",
    "isolation=fresh",
)
WAYS = {
    "nothing": "not",
    "rank": "kill",
    "agent": "kills_actor",
    "silent": "stops_actor",
    "host": "kills_host",
    "link": "cuts_link",
    "driver": "not",
}
"""What fails, and what `tests/support/deaths.py` calls it."""
OF_ENGINE = {
    "ray": ("nothing", "rank", "agent", "silent", "host", "link"),
    "torchrun": ("nothing", "rank", "agent", "silent", "link", "driver"),
}


def main(asked: list[str]) -> int:
    """Print the table, or the parts of it that are asked for; 1 if a failure cost too much."""
    wrong = 0
    print(f"{'engine':10}{'failure':10}{'status':8}{'row after':>10}{'next ran':>10}  reason")
    for engine in [one for one in OF_ENGINE if one in asked] or OF_ENGINE:
        for kind in [one for one in WAYS if one in asked] or WAYS:
            if kind in OF_ENGINE[engine]:
                wrong += not measure(engine, kind)
    return 1 if wrong else 0


def measure(engine: str, kind: str) -> bool:
    """Print what a failure costs; whether that is as it should be."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "sweep"
        sweep = Finished(0, "", "", folder)
        with (_on_ray if engine == "ray" else _on_torchrun)(folder, kind) as mend:
            happened = {"nothing": lambda: sweep.rows, "driver": lambda: _ranks(folder)}
            wait_for(lambda: bool(happened.get(kind, lambda: [*folder.glob("*/died")])()), ENDS_S)
            ranks, began = _ranks(folder), time.monotonic()
            if kind == "driver" and (driver := driver_of(folder)):
                driver.kill()
            row_s = next_s = None
            while row_s is None or next_s is None:
                assert time.monotonic() - began < ENDS_S, f"{engine}, {kind}: {row_s}, {next_s}"
                time.sleep(_LOOK_EVERY_S)
                row_s = _first(row_s, began, bool(sweep.rows))
                if row_s is not None:
                    mend()
                next_s = _first(next_s, began, bool(_ranks(folder) - ranks))
            wait_for(lambda: len(sweep.rows) == 2, ENDS_S)
            rows = sweep.rows
    row = rows[0]
    times = f"{row_s:10.1f}{next_s:10.1f}"
    print(f"{engine:10}{kind:10}{row['status']:8}{times}  {(row['reason'] or '')[:130]}", flush=True)
    return row_s <= LIMIT_S


def _first(seen_s: float | None, began: float, happened: bool) -> float | None:
    """After how many seconds it was first seen to have happened."""
    return time.monotonic() - began if seen_s is None and happened else seen_s


def _ranks(folder: Path) -> set[str]:
    """The processes of rank 3 that there have been, by what each begins its log with."""
    logs = "".join(log.read_text(errors="replace") for log in folder.glob("*/rank3.log"))
    return {line for line in logs.splitlines() if ", process " in line}


@contextmanager
def _on_ray(folder: Path, kind: str) -> Iterator[Callable[[], object]]:
    """A sweep on two hosts of Ray; nothing is mended, it goes on with the one that is left."""
    with ExitStack() as opened:
        prefix: tuple[str, ...] = ()
        if kind == "link":
            apart = opened.enter_context(namespaces())
            prefix = apart[0].prefix
            words = opened.enter_context(ray_in(apart, folder.parent))
        else:
            words = opened.enter_context(hosts(2)).words
        line = [*prefix, *command(folder, *_words(kind), *words)]
        with (folder.parent / "log").open("wb") as log:
            driver = subprocess.Popen(line, stdout=log, stderr=log, env=environment(), cwd=folder.parent)
        try:
            yield object
            driver.wait(ENDS_S)
        finally:
            driver.kill()
            driver.wait()


@contextmanager
def _on_torchrun(folder: Path, kind: str) -> Iterator[Callable[[], object]]:
    """A sweep on two hosts of torchrun, without either of which it cannot go on: the link is to be mended."""
    with ExitStack() as opened:
        where, mend = HERE, partial[object](object)
        if kind == "link":
            apart = opened.enter_context(namespaces())
            where, mend = [(one.address, one.prefix) for one in apart], partial(up, apart[1])
        with torchrun(folder, *_words(kind), max_restarts=3, hosts=where) as run:
            yield mend
            wait_for(lambda: "written to" in run.log.read_text(), ENDS_S)
            run.end()
            run.ended()


def _words(kind: str) -> tuple[str, ...]:
    two = "seed=0,1" if WAYS[kind] == "not" else f"scenario.options.how={WAYS[kind]},not"
    return (*CELLS, *ON_RANK_3, two)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
