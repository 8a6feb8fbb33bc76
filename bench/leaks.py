"""Check that a leak of one cell does not affect the next one on the same ranks.  python bench/leaks.py

Each cell of a sweep is healthy, and ends by leaking something: a default dtype, a hook, a spinning
thread. The next cell must have the same result as on fresh ranks. Prints a matrix of leaks under
warm and fresh ranks, each with the next cell. Exits with 1 if a next cell was affected.
"""

# ruff: noqa: T201
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
sys.path.insert(0, str(TESTS))

from adversary.leaks import ENDED_WITH_THE_CELL, LEAKS  # noqa: E402
from dcpbench.records.store import read_rows  # noqa: E402
from support.rows import seen  # noqa: E402

CELLS = (
    *("device=cpu", "world_size=2", "parallel=ddp", "model=short", "scenario=leaks"),
    *("saves=1", "train_steps=1", "resume_steps=1", "retry=0"),
)


def rows(isolation: str, whats: list[str]) -> list[dict[str, Any]]:
    """The rows of a sweep in which each of these is left behind, in this order."""
    with tempfile.TemporaryDirectory() as folder:
        what = f"scenario.options.what={','.join(whats)}"
        words = ["--config-dir", str(TESTS / "conf"), "-m", *CELLS, what, f"isolation={isolation}"]
        subprocess.run(
            [sys.executable, "-m", "dcpbench", *words, f"hydra.sweep.dir={folder}/sweep"],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")])),
            },
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )
        return [row.flat() for row in read_rows(Path(folder, "sweep"))[0]]


def main() -> int:
    """Print the matrix; 1 if a cell noticed."""
    (alone,) = rows("fresh", ["path"])
    silent = blamed = untold = 0
    print(f"{'left behind':20} {'ranks':6} {'told':7} the next cell")
    for isolation in ("warm", "fresh"):
        swept = rows(isolation, [*LEAKS, next(iter(LEAKS))])
        for what, culprit, after in zip(LEAKS, swept, swept[1:], strict=False):
            ranks = culprit["details"].get("ranks", [{}])
            is_told = all("left_behind" in {one["kind"] for one in rank.get("notes", ())} for rank in ranks)
            like = seen(after) == seen(alone)
            silent += not like and after["status"] == "pass"
            blamed += after["status"] != "pass"
            says = "yes" if is_told else "cleared" if what in ENDED_WITH_THE_CELL else "NO"
            untold += says == "NO"
            saw = "as alone" if like else f"{after['status']}: {after['reason']}"[:80]
            print(f"{what:20} {isolation:6} {says:7} {saw}")
    print(f"{2 * len(LEAKS)} pairs: {untold} untold, {silent} silent differences, {blamed} wrongly blamed")
    return 1 if silent or blamed or untold else 0


if __name__ == "__main__":
    sys.exit(main())
