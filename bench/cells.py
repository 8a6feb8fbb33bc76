"""What does a cell cost beyond its own phases, and how long do PyTorch's tests take for the same?

    python bench/cells.py [--cells N] [--harness N] [--fresh]
    python bench/cells.py --floor [--ranks N] [--device cuda] [--most-ratio R] [--most-calls N]

The second form compares a cell with three saves with its floor: the same ranks build, train, save and load
the same run without any check. It also counts the cell's Python calls, its collectives other
than DCP's and torch's, and its calls of `torch.equal`, which have no noise. It ends with 1 if a layout is
above a limit.

The first form runs the same uncompiled cells in two ways, on the GPUs if there are any, else on four CPU
ranks: as a sweep, and as tests of PyTorch's own harness (`bench/harness.py`), which spawns four processes for
each. What the cell does is the same code.
"""

# ruff: noqa: T201
import argparse
import cProfile
import gc
import itertools
import json
import math
import multiprocessing
import os
import pstats
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pandas as pd

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

PARALLELISMS = ("ddp", "fsdp", "fsdp2", "fsdp2_tp")
FLOORS = ("none", "ddp", "fsdp2")
COLLECTIVES = ("all_reduce", "all_gather", "all_gather_object", "barrier", "broadcast", "gather_object")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cells", type=int, default=10, help="cells of each parallelism in a sweep")
    parser.add_argument("--harness", type=int, default=2, help="of these, how many are tests too")
    parser.add_argument("--fresh", action="store_true", help="a sweep with fresh ranks for every cell too")
    parser.add_argument("--floor", action="store_true", help="compare a cell with its floor")
    parser.add_argument("--ranks", type=int, default=2, help="for --floor")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="for --floor")
    parser.add_argument("--most-ratio", type=float, default=math.inf, help="of a cell and its floor")
    parser.add_argument("--most-calls", type=float, default=math.inf, help="Python calls of a cell")
    arguments = parser.parse_args()
    if arguments.floor:
        return floors(arguments)
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


def floors(arguments: argparse.Namespace) -> int:
    """Print the costs of a cell of each layout; return 1 if one is above a limit."""
    context, above = multiprocessing.get_context("spawn"), 0
    print("layout    cell s floor s  ratio     calls collectives  equal")
    for layout in FLOORS:
        with tempfile.TemporaryDirectory() as folder:
            here, there = context.Pipe()
            started = [
                context.Process(
                    target=measure, args=(layout, rank, arguments.ranks, arguments.device, folder, there)
                )
                for rank in range(arguments.ranks)
            ]
            for one in started:
                one.start()
            cell_s, floor_s, counted = here.recv()
            for one in started:
                one.join()
        ratio = cell_s / floor_s
        above += ratio > arguments.most_ratio or counted["calls"] > arguments.most_calls
        print(
            f"{layout:8} {cell_s:7.3f} {floor_s:7.3f} {ratio:6.2f} {counted['calls']:9,} "
            f"{counted['collectives']:11} {counted['equal']:6}",
            flush=True,
        )
    return int(above > 0)


def measure(layout: str, rank: int, ranks: int, device: str, folder: str, results: Any) -> None:
    """Run cells and floors in turn on one of several ranks; rank 0 sends the medians and the counts."""
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    else:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # for deterministic algorithms
    import torch
    import torch.distributed as dist

    from dcpbench.core.rank_report import RankReport
    from dcpbench.rank.messages import CellSpec, RunId
    from dcpbench.rank.run_cell import run_cell
    from dcpbench.workloads.world import World, new_group

    torch.set_num_threads(1)
    own, backend = torch.device("cpu"), "gloo"
    if device == "cuda":
        own, backend = torch.device("cuda", rank), "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(own)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    world = World(rank, ranks, own, *(new_group() for _ in range(3)))
    config = composed({"overrides": f"parallel={layout} saves=3", "world_size": ranks, "device": device})
    numbers = itertools.count()

    def timed(do: Callable[[Path], object]) -> float:
        checkpoints = Path(folder) / str(next(numbers)) / "checkpoints"
        checkpoints.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        began = time.perf_counter()
        do(checkpoints)
        dist.barrier()
        return time.perf_counter() - began

    def cell(checkpoints: Path) -> None:
        spec = CellSpec(RunId("bench", "cell", 0), config, str(checkpoints.parent), str(checkpoints))
        run_cell(spec, world, RankReport(rank), lambda phase: None, lambda since: None)

    for _ in range(2):
        timed(cell)
    gc.freeze()  # ranks do it after their imports
    both = [(timed(cell), timed(partial(floor, config, world))) for _ in range(5)]
    counted = {"calls": 0, "collectives": 0, "equal": 0}
    profile = cProfile.Profile()
    timed(lambda checkpoints: profile.runcall(cell, checkpoints))
    counted["calls"] = pstats.Stats(profile).total_calls
    with ExitStack() as patches:
        for name in COLLECTIVES:
            count_calls(patches, dist, name, counted, "collectives", of="dcpbench")
        count_calls(patches, torch, "equal", counted, "equal")
        timed(cell)
    if rank == 0:
        results.send((*(statistics.median(times) for times in zip(*both, strict=True)), counted))
    dist.barrier()
    os._exit(0)  # see `dcpbench.rank.main`


def count_calls(
    patches: ExitStack, module: Any, name: str, counted: dict[str, int], key: str, of: str = ""
) -> None:
    """Count the calls of a function of a module from modules whose names begin with `of`."""
    honest = getattr(module, name)

    def counting(*args: Any, **options: Any) -> Any:
        counted[key] += str(sys._getframe(1).f_globals.get("__name__")).startswith(of)
        return honest(*args, **options)

    patches.enter_context(mock.patch.object(module, name, counting))


def floor(config: Any, world: Any, checkpoints: Path) -> None:
    """Build, train, save and load the run of a cell, and resume it after each checkpoint."""
    from dcpbench.checkpointers.dcp import DcpCheckpointer
    from dcpbench.runs.build_run import build
    from dcpbench.workloads.workload import batches_of

    checkpointer, batches = DcpCheckpointer(checkpoints, config, world), batches_of(config, world.device)
    run = build(config, world, config.seed)
    for step in config.save_steps:
        run.train(batches, step)
        checkpointer.save(run.state(), str(checkpoints / str(step))).wait()
    run.train(batches, config.last_step)
    target = build(config, world, config.seed + 1)
    for step in reversed(config.save_steps):
        checkpointer.load(target.state(), str(checkpoints / str(step)))
        target.train(batches, min(step + config.steps_after_load, config.last_step))
    checkpointer.close()


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
    from dcpbench.compose.composer import typed
    from dcpbench.config.groups import Device
    from dcpbench.config.schema import conf_folder

    register_groups()
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        config = typed(compose("config", overrides=shlex.split(row["overrides"]), return_hydra_config=True))
    parallel = config.parallel.planned_by(config.model)
    return replace(config, parallel=parallel, world_size=row["world_size"], device=Device(row["device"]))


if __name__ == "__main__":
    sys.exit(main())
