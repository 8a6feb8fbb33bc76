"""Run one stage of a cell on a rank, after resetting the state that earlier cells have changed."""

import ctypes
import gc
import pkgutil
import re
from collections.abc import Callable, Set
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.utils.deterministic

from dcpbench.cell import handover
from dcpbench.cell.cell import Cell, Uploads
from dcpbench.cell.checkpoint_files import verify_files, wait_until_seen
from dcpbench.config.groups import Ending, StageWorld
from dcpbench.config.schema import Config
from dcpbench.core.rank_report import RankReport, Skip
from dcpbench.formats.files import recorded_syncs, synced_in
from dcpbench.rank.messages import CellSpec
from dcpbench.state.process_state import ProcessState
from dcpbench.torch_private import DYNAMO_COUNTERS, GRAPH_BREAKS, INDUCTOR_CONFIG
from dcpbench.workloads.generators import seed_generators
from dcpbench.workloads.world import World

_RECOMPILED_TOO_OFTEN = "Dynamo recompile limit exceeded"


def run_cell(
    spec: CellSpec,
    world: World,
    report: RankReport,
    announce: Callable[..., None],
    uploads: Callable[[tuple[float, ...]], None],
) -> None:
    """Run a stage of a cell on this rank and fill in its report. `announce` and `uploads` report its progress
    to the driver.

    Raises:
        Exception: any exception of the scenario.
    """
    config = spec.config
    _reset(world, config.seed)
    _set_deterministic(config.deterministic)
    before, stages, after = [[], *config.processes, []][spec.run.stage : spec.run.stage + 3]
    first, last = stages[0], stages[-1]
    alone = first.world is StageWorld.alone
    if config.compile and not alone:
        _reset_graphs(config, world)
    folder = Path(spec.checkpoints)
    try:
        with recorded_syncs() as synced, ExitStack() as endings:
            cell = Cell(
                config,
                world,
                folder,
                announce,
                report,
                Uploads(uploads),
                name=spec.run.cell,
                synced=partial(synced_in, synced=synced),
                endings=endings,
            )
            if spec.run.stage:
                wait_until_seen(cell, folder, "of the stage before")
            passed: tuple[Any, ...] = (cell,)
            if first.continues:
                passed = handover.read_reference(cell, any_layout=first.world is not before[0].world)
            for stage in stages:
                returned = pkgutil.resolve_name(stage.target)(*passed, **config.scenario.options)
                passed = returned if isinstance(returned, tuple) else (cell,)
            if after and after[0].continues:
                cell, reference = passed
                handover.write_reference(cell, reference, any_layout=after[0].world is not first.world)
            verify_files(cell)
    except Skip as reason:
        report.skip = str(reason)
        return
    if alone:  # its memory is not a cost of saving or loading
        return
    if after and last.ends is Ending.report:
        wait_until_seen(cell, folder, "of this stage")
    if config.compile:
        report.not_compiled = why_not_compiled(cell.trained_packages)
        for text in graph_breaks():
            report.note("graph_breaks", text)
    if world.device.type == "cuda":
        cell.measure("peak_device_bytes", torch.cuda.max_memory_allocated(world.device))
    cell.measure("peak_host_bytes", _peak_host_bytes())


def left_behind(before: ProcessState, device: torch.device) -> list[str]:
    """Return a sentence for each setting changed by stages since the state `before` them, each process group
    they destroyed, and each kind of resource that has grown, after a wait for threads and processes to end.
    Settings that each stage sets are left out, and so are sockets, pipes and new process groups, which are
    kept for the next cell with the same mesh."""

    left = before.left_open(("threads", "processes", "open_files"))
    now = ProcessState.now(device)
    return [
        *(
            f"{name}: {_short(before.settings.get(name))} is now {_short(value)}"
            for name, value in now.minus(before).settings.items()
            if "deterministic" not in name
        ),
        *(f"process group {name} was destroyed" for name in before.minus(now).resources.get("groups", ())),
        *(f"{kind} leaked: {', '.join(names)}" for kind, names in left.items()),
    ]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]} …"


def _reset(world: World, seed: int) -> None:
    """Make the cell independent of earlier cells."""
    seed_generators(seed, world.device)
    free_memory(world.device)
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(world.device)
    with suppress(OSError):  # resets the peak of the resident set: proc(5)
        Path("/proc/self/clear_refs").write_text("5")


def _peak_host_bytes() -> int | None:
    """Return the peak resident set of this process; None if the kernel does not report it."""
    peak = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(peak[1]) * 1024 if peak else None


def free_memory(device: torch.device) -> None:
    """Return memory that cells have freed to the system and the GPU, which other processes can use."""
    gc.collect()
    # glibc keeps freed memory for each thread that has ever existed: the memory of reused ranks would seem
    # to grow.
    ctypes.CDLL(None).malloc_trim(0)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _reset_graphs(config: Config, world: World) -> None:
    """Discard compiled graphs of the last cell, unless it had the same models under the same layouts.

    Dynamo silently runs a frame as eager code after compiling it too often. Graphs of other cells would
    count towards that limit.
    """
    graphs = f"{config.scenario} {config.model} {config.workload} {config.parallel} {config.loading}"
    graphs += f" {config.deterministic} {config.compile_scope} {config.activation_checkpointing}"
    if graphs != world.compiled_for:
        torch.compiler.reset()
        DYNAMO_COUNTERS.value.clear()
        world.compiled_for = graphs


def graph_breaks() -> list[str]:
    """Return where and why Dynamo broke a graph in two, in the order of the breaks."""
    breaks = []
    for graph_break in GRAPH_BREAKS.value:
        places = [f" ({_of_library(frame.filename)}:{frame.lineno})" for frame in graph_break.user_stack[-1:]]
        breaks.append(f"{_first_line(graph_break.reason)}{''.join(places)}")
    return list(dict.fromkeys(breaks))


def why_not_compiled(trained: Set[str]) -> str | None:
    """Return why some or all of the model ran as eager code; None if none did, or no module was trained. The
    forwards of those that were `trained` are defined in these packages."""
    counters = DYNAMO_COUNTERS.value
    abandoned = [*counters["unimplemented"], *counters["recompile_limit"]]
    if any(reason.startswith(_RECOMPILED_TOO_OFTEN) for reason in abandoned) or counters["recompile_limit"]:
        return "Dynamo's recompile limit was reached: part of the model ran as eager code"
    if counters["stats"]["unique_graphs"] or not trained:
        return None
    reasons = [*graph_breaks(), *map(_first_line, abandoned)]
    if trained == {"torch"}:
        reasons = ["torch.compile skips torch's own forwards; give the model a forward of its own"]
    return f"nothing was compiled{f': {reasons[0]}' if reasons else ''}"


def _of_library(path: str) -> str:
    """Return a library's path relative to site-packages; other paths are unchanged."""
    return path.rpartition("site-packages/")[2]


def _first_line(reason: str) -> str:
    return reason.strip().partition("\n")[0]


def _set_deterministic(wanted: bool) -> None:
    """Make equal computations return equal bits, on every rank and every time.

    Otherwise Inductor times several kernels on each rank separately and uses the fastest. Ranks with
    replicas of a tensor can then sum in different orders, and the replicas diverge
    (https://github.com/pytorch/pytorch/issues/99949).
    """
    torch.use_deterministic_algorithms(wanted)
    # Filling the tensors of torch.empty would slow down every save.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    INDUCTOR_CONFIG.value.deterministic = wanted
