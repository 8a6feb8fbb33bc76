"""One stage of a cell on one rank: everything that it may inherit is reset, then it runs."""

import ctypes
import gc
import pkgutil
import random
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
import torch._inductor.config
import torch.utils.deterministic
from torch._dynamo.utils import counters

from dcpbench.cell import handover
from dcpbench.cell.cell import Cell, Uploads
from dcpbench.cell.checks import verify_files
from dcpbench.cell.shared_folder import wait_until_seen
from dcpbench.config.groups import Ending, StageWorld
from dcpbench.config.schema import Config
from dcpbench.core.rank_report import RankReport, Skip
from dcpbench.rank import compilation, memory
from dcpbench.rank.messages import CellSpec
from dcpbench.verify.files import recorded_syncs, synced_in
from dcpbench.workloads.world import World


def run_cell(
    spec: CellSpec,
    world: World,
    report: RankReport,
    announce: Callable[[str], None],
    uploads: Callable[[tuple[float, ...]], None],
) -> None:
    """Run a stage of a cell on this rank and fill in its report; `announce` and `uploads` tell the driver how
    far it is.

    Raises:
        Exception: whatever the scenario raised.
    """
    config = spec.config
    _reset(world, config.seed)
    _set_deterministic(config.deterministic)
    stage = config.stages[spec.run.stage]
    alone = stage.world is StageWorld.alone
    if config.compile and not alone:
        _keep_graphs_of(config, world)
    where = Path(spec.checkpoints)
    try:
        with recorded_syncs() as synced, ExitStack() as endings:
            told = Uploads(uploads)
            cell = Cell(
                config,
                world,
                where,
                announce,
                report,
                told,
                synced=partial(synced_in, synced=synced),
                endings=endings,
            )
            if spec.run.stage:
                wait_until_seen(cell, where, "of the stage before")
            pkgutil.resolve_name(stage.target)(cell, **config.scenario.options)
            verify_files(cell)
    except Skip as reason:
        report.skip = str(reason)
        return
    if alone:  # what it uses is no cost of the cell's way to save and load
        return
    handover.leave_newest(cell)
    if spec.run.stage + 1 < len(config.stages) and stage.ends is Ending.report:
        wait_until_seen(cell, where, "of this stage")
    if config.compile:
        report.not_compiled = compilation.why_not_compiled()
        report.graph_breaks = compilation.graph_breaks()
    cell.measure("peak_device_bytes", memory.peak_device_bytes(world.device))
    cell.measure("peak_host_bytes", memory.peak_host_bytes())


def _reset(world: World, seed: int) -> None:
    """No cell may depend on the one before it."""
    torch.manual_seed(seed)
    random.seed(seed)
    free_memory(world.device)
    memory.reset_peaks(world.device)


def free_memory(device: torch.device) -> None:
    """Give back what earlier cells have freed: others may use the same GPU."""
    gc.collect()
    # glibc keeps what cells have freed for each thread that there ever was: ranks that stay up would seem
    # to grow.
    ctypes.CDLL(None).malloc_trim(0)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _keep_graphs_of(config: Config, world: World) -> None:
    """Keep compiled graphs from the last cell only if it had the same models under the same layouts.

    Dynamo gives up on a frame that was compiled too often, whoever did it, and then runs it eagerly
    without a word: graphs of other cells would use up this one's share.
    """
    graphs = f"{config.scenario} {config.model} {config.workload} {config.parallel} {config.loading}"
    graphs += f" {config.deterministic} {config.compile_scope} {config.activation_checkpointing}"
    if graphs != world.compiled_for:
        torch._dynamo.reset()
        counters.clear()
        world.compiled_for = graphs


def _set_deterministic(wanted: bool) -> None:
    """Have equal work give equal bits, on every rank and every time.

    Without it Inductor times several kernels on each rank by itself and takes the fastest: ranks
    that hold replicas of one tensor may then sum in different orders, and the replicas drift apart
    (https://github.com/pytorch/pytorch/issues/99949).
    """
    torch.use_deterministic_algorithms(wanted)
    # Filling what torch.empty returns would be paid for in every save.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch._inductor.config.deterministic = wanted
