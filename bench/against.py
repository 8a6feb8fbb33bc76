"""Compare the speed of this commit with that of an older one.

    python bench/against.py b16eef1
    python bench/against.py b16eef1 --rounds 3 --no-compose

Both run the same commands in turns on this machine: composing 960 cells (`plan`), and a sweep of small cells
on warm ranks, on the GPUs if there are any. Printed are medians, their ratio (new to old), and how many
checks a cell has on each side.
"""

# ruff: noqa: T201
import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from cells import PARALLELISMS, settled

from dcpbench.records.store import read_rows

ROOT = Path(__file__).resolve().parents[1]
COMPOSED = (
    "parallel=none,ddp,fsdp,hsdp,fsdp_tp,fsdp2,hsdp2,fsdp2_tp",
    *("save=sync,async,async_cached", "model=even,uneven", "compile=true,false", "seed=range(0,10)"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("commit", help="the older one, of this repository")
    parser.add_argument("--rounds", type=int, default=2, help="how often each of both runs everything")
    parser.add_argument("--cells", type=int, default=5, help="cells of each parallelism in a sweep")
    parser.add_argument("--world-size", type=int, default=4)
    parser.add_argument("--no-compose", action="store_true", help="cells alone")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        old = Path(folder) / "old"
        git = ("git", "-C", str(ROOT), "worktree")
        subprocess.run([*git, "add", "--quiet", "--detach", str(old), asked.commit], check=True)
        try:
            compare(asked, {asked.commit: old, "now": ROOT}, Path(folder))
        finally:
            subprocess.run([*git, "remove", "--force", str(old)], check=True)
    return 0


def compare(asked: argparse.Namespace, trees: dict[str, Path], folder: Path) -> None:
    """Run and print all of it."""
    composing: dict[str, list[float]] = defaultdict(list)
    cells: dict[str, list[dict[str, Any]]] = defaultdict(list)
    size = f"world_size={asked.world_size}"
    for turn in range(asked.rounds):
        for name, tree in trees.items():
            if not asked.no_compose:
                began = time.perf_counter()
                run(tree, "plan", *COMPOSED, size, f"hydra.sweep.dir={folder / 'planned'}")
                composing[name].append(time.perf_counter() - began)
            place = folder / f"{name}-{turn}"
            lists = (f"parallel={','.join(PARALLELISMS)}", f"seed=range(0,{asked.cells})")
            run(tree, "-m", *lists, size, f"hydra.sweep.dir={place}")
            cells[name] += settled([row.flat() for row in read_rows(place)[0]])
    old, new = trees
    print(f"{'median seconds':28}{old:>12}{new:>12}{'ratio':>8}")
    if composing:
        tell("composing 960 cells", *(composing[name] for name in trees))
    for parallel in PARALLELISMS:
        tell(
            f"a cell, parallel={parallel}",
            *([row["cell_s"] for row in cells[name] if row["parallel"] == parallel] for name in trees),
        )
    tell("a cell", *([row["cell_s"] for row in cells[name]] for name in trees))
    checks = [len(cells[name][0]["details"]["checks"]) for name in trees]
    statuses = [sorted({row["status"] for row in cells[name]}) for name in trees]
    print(f"{'checks':28}{checks[0]:>12}{checks[1]:>12}")
    print(f"{'statuses':28}{','.join(statuses[0]):>12}{','.join(statuses[1]):>12}")


def run(tree: Path, *words: str) -> None:
    """Run `python -m dcpbench` from the sources of a tree; what it prints is shown where it fails."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    program = [sys.executable, "-m", "dcpbench", *words]
    ended = subprocess.run(program, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if ended.returncode:
        sys.exit(ended.stdout + ended.stderr)


def tell(what: str, old: list[float], new: list[float]) -> None:
    """One line: the medians of both, and their ratio."""
    before, now = statistics.median(old), statistics.median(new)
    print(f"{what:28}{before:12.3f}{now:12.3f}{now / before:8.2f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
