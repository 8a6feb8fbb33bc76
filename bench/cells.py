"""What does a cell cost beyond its own phases, and how long do PyTorch's tests take for the same?

    python bench/cells.py [--cells N] [--harness N] [--fresh]

Runs the same uncompiled cells in two ways, on the GPUs if there are any, else on four CPU ranks: as a sweep,
and as tests of PyTorch's own harness (`bench/harness.py`), which spawns four processes for each. What the
cell does is the same code.
"""

# ruff: noqa: T201
import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

PARALLELISMS = ("ddp", "fsdp", "fsdp2", "fsdp2_tp")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cells", type=int, default=10, help="cells of each parallelism in a sweep")
    parser.add_argument("--harness", type=int, default=2, help="of these, how many are tests too")
    parser.add_argument("--fresh", action="store_true", help="a sweep with fresh ranks for every cell too")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        warm = sweep(Path(folder) / "warm", arguments.cells, "warm")
        tell("warm ranks", warm)
        if arguments.fresh:
            tell("fresh ranks", sweep(Path(folder) / "fresh", arguments.cells, "fresh"))
        if arguments.harness:
            ours = statistics.median(row["cell_s"] for row in settled(warm))
            chosen = [row for row in settled(warm) if row["seed"] < arguments.harness]
            tell_harness("PyTorch's harness as it is", chosen, ours, None)
            tell_harness("PyTorch's harness with OMP_NUM_THREADS=1, as our ranks have", chosen, ours, 1)
    return 0


def sweep(folder: Path, cells: int, isolation: str) -> list[dict[str, Any]]:
    """The rows of a sweep over the parallelisms, each with seeds from 0 on."""
    lists = (f"parallel={','.join(PARALLELISMS)}", f"seed=range(0,{cells})", f"isolation={isolation}")
    command = (sys.executable, "-m", "dcpbench", "-m", *lists, f"hydra.sweep.dir={folder}")
    started = time.perf_counter()
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        sys.exit(ended.stdout + ended.stderr)
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    phases_s = slowest_rank_s(folder)
    rows = [{**row, "phases_s": phases_s[row["cell"]]} for row in rows]
    spent = time.perf_counter() - started
    print(f"{len(rows)} cells on {isolation} ranks: {spent:.1f} s, start and report included")
    return rows


def slowest_rank_s(folder: Path) -> dict[str, float]:
    """Seconds that the slowest rank spent in phases, by cell."""
    measured = pd.read_json(folder / "measurements.jsonl", lines=True)
    phases = measured[measured["metric"] == "phase_s"]
    by_cell = phases.groupby(["cell", "rank"])["value"].sum().groupby("cell").max()
    return {str(cell): float(seconds) for cell, seconds in by_cell.items()}


def settled(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the first cell, which has the start of the first ranks in it."""
    return rows[1:]


def tell(what: str, rows: list[dict[str, Any]]) -> None:
    beyond = sorted(row["cell_s"] - row["phases_s"] for row in settled(rows))
    p95 = beyond[int(0.95 * (len(beyond) - 1))]
    whole = statistics.median(row["cell_s"] for row in settled(rows))
    print(
        f"{what}: a cell takes {whole:.3f} s, of which beyond its phases "
        f"{statistics.median(beyond):.3f} s (p50), {p95:.3f} s (p95)"
    )


def tell_harness(what: str, rows: list[dict[str, Any]], ours: float, threads: int | None) -> None:
    from harness import seconds

    theirs = statistics.median(seconds(composed(row), threads) for row in rows)
    print(
        f"{what}: {theirs:.2f} s a cell (median of {len(rows)}); "
        f"in a sweep {ours:.2f} s: {theirs / ours:.1f} times as long",
        flush=True,
    )


def composed(row: dict[str, Any]) -> Any:
    """The configuration that a row's cell ran with."""
    from hydra import compose, initialize_config_dir

    from dcpbench.cli.by_hydra import register_groups
    from dcpbench.config.groups import Device
    from dcpbench.config.schema import conf_folder
    from dcpbench.sweep.composer import typed

    register_groups()
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        config = typed(compose("config", overrides=shlex.split(row["overrides"]), return_hydra_config=True))
    parallel = config.parallel.planned_by(config.model)
    return replace(config, parallel=parallel, world_size=row["world_size"], device=Device(row["device"]))


if __name__ == "__main__":
    sys.exit(main())
