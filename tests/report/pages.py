"""Rows as sweeps leave them, for pages: every status, repeats, long details."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

from dcpbench.analysis.frame import read_sweeps
from dcpbench.records.row import Row
from dcpbench.records.store import DETAILS_JSONL, RESULTS_JSONL
from dcpbench.report.page import page
from report import sweeps
from support.rows import row

STATUSES = ("pass", "fail", "vacuous", "error", "crash", "timeout", "skip", "xfail", "xpass")
HELD = {"model_equal": True, "optim_equal": True}
SIZES = {"peak_device_bytes": 1280, "peak_host_bytes": 25276502016, "disk_bytes": 2**20 - 1}
COSTS = {"save_s": 0.2, "save_stall_s": 0.05, "load_s": 0.1, "checkpoint_bytes": 4_000_000_000}


def cell(parallel: str, save: str = "sync", repeat: int = 0, **values: Any) -> Row:
    """A row that has been measured, one repeat of a cell."""
    return sweeps.cell(parallel, save, repeat, **{**HELD, **COSTS, "details": details(), **values})


def details() -> dict[str, Any]:
    """The details that a driver writes about a cell's checks and ranks."""
    chance = random.Random(0)
    control = {f"layer.weight{i} in the checkpoint of step 6": True for i in range(3)} | {"layer.bias": False}
    check = {
        "held": True,
        "control": control,
        "control_missed": ["layer.bias"],
        "worst": [],
        "mismatch_count": 0,
    }
    losses = [chance.uniform(2, 3) for _ in range(8)]
    rank = {
        "rank": 0,
        "losses": {"continued": losses, "twin": losses},
        "resumed": {"6": losses[6:], "2": losses[2:4]},
    }
    return {"checks": {"model_equal": check, "optim_equal": check}, "ranks": [rank]}


def all_statuses() -> list[Row]:
    """One cell of each status, and those that are no status of a row: flaky, fault detected, fault missed."""
    rows = [cell(f"p{i}", status=status, reason=f"it was {status}") for i, status in enumerate(STATUSES)]
    rows.append(cell("flaky", flaky=True, reason="flaky: the first attempt ended as crash"))
    rows.append(cell("seen", status="fail", fault="lr", fault_seen=True))
    rows.append(cell("missed", fault="lr", fault_seen=False, reason="fault=lr was not seen"))
    return rows


def write_page(
    folder: Path,
    rows: list[Row],
    title: str = "sweep",
    before: list[Row] | None = None,
    environment: dict[str, Any] | None = None,
) -> Path:
    """The page of a sweep of these rows, and perhaps of one before it."""
    earlier = read_sweeps([_sweep(folder / "before", before)]) if before is not None else None
    sweep = _sweep(folder / "sweep", rows)
    if environment:
        (sweep / "environment.json").write_text(json.dumps(environment))
    written = folder / "report.html"
    written.write_text(page(read_sweeps([sweep]), title, earlier), encoding="utf-8")
    return written


def _sweep(folder: Path, rows: list[Row]) -> Path:
    folder.mkdir()
    # As `append_row` writes them, all at once.
    plain = [json.loads(json.dumps(one.flat()), parse_constant=lambda _: None) for one in rows]
    attempts = [{name: one[name] for name in ("cell", "repeat", "started_at", "details")} for one in plain]
    rows_and_details = ((RESULTS_JSONL, plain), (DETAILS_JSONL, attempts))
    for name, contents in rows_and_details:
        lines = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in contents)
        (folder / name).write_bytes(lines.encode(errors="replace"))
    return folder


def four_cells() -> list[Row]:
    """Two parallelisms, two ways to save, two runs each; one run of one cell failed."""
    cells = [
        cell(parallel, save, repeat)
        for repeat in (0, 1)
        for parallel in ("ddp", "fsdp")
        for save in ("sync", "async")
    ]
    failed = cell(
        "fsdp",
        "async",
        1,
        status="fail",
        reason="optim_equal: rank 0: it differs",
        optim_equal=False,
        **SIZES,
    )
    return [*cells[:-1], failed]


def many_axes() -> list[Row]:
    """A sweep of seven axes with one failure in it, some repeats, and injected faults."""
    names = ("parallel", "save", "model", "optimizer", "compile", "world_size")
    values = [("ddp", "fsdp", "hsdp"), ("sync", "async"), ("even", "nested"), ("adam", "sgd")]
    rows = []
    for chosen in itertools.product(*values, (True, False), (2, 4)):
        one = dict(zip(names, chosen, strict=True))
        fails = chosen == ("hsdp", "async", "nested", "sgd", False, 2)
        told = {"status": "fail", "reason": "optim_equal: it differs"} if fails else {}
        rows.append(_named(one | told))
    for parallel, fault in itertools.product(("ddp", "fsdp"), ("lr", "bias", "shard")):
        planted = {"parallel": parallel, "fault": fault, "model": "even", "world_size": 4}
        rows.append(_named(planted | {"status": "fail", "fault_seen": True}))
    return rows


def many_scenarios() -> list[Row]:
    """A night: scenarios that differ along axes of their own, twelve axes and some hundred cells in all."""
    parallel = ("none", "ddp", "fsdp", "hsdp", "fsdp_tp", "fsdp2", "hsdp2", "fsdp2_tp")
    alone = [
        {"scenario": name, "model": "nested"} for name in ("partial_load", "in_place", "fine_tune_submodules")
    ]
    axes = {
        "save_load": itertools.product(
            ("even", "uneven", "dummy", "medium"), ("sync", "async", "async_cached"), (False, True)
        ),
        "overwrite": itertools.product(("dummy",), ("sync",), (False, True)),
    }
    kinds = [
        {"scenario": scenario, "model": model, "save": save, "compile": compiled}
        for scenario, chosen in axes.items()
        for model, save, compiled in chosen
    ]
    kinds += [{"scenario": "convert", "load_parallel": name} for name in parallel]
    kinds += [
        {"scenario": "save_load", "optimizer": "sgd", "storage": "memory", "checkpointer": "torch_save"}
    ]
    kinds += [
        {"scenario": "save_load", "saves": 1, "overlap_saves": True},
        {"scenario": "no_dist", "world_size": 1},
    ]
    return [_named({"parallel": name, **kind}) for name in parallel for kind in (*kinds, *alone)]


def _named(values: dict[str, Any]) -> Row:
    asked = {name: value for name, value in values.items() if name not in ("status", "reason", "fault_seen")}
    overrides = [f"{name}={str(value).lower()}" for name, value in asked.items()]
    # How a cell is run is not what it is.
    how = f"sharing={'correctness' if 'fault' in asked else 'none'} timeouts.cell_s={len(overrides)}"
    said = {"cell": ",".join(overrides), "overrides": f"{how} {' '.join(overrides)}"}
    return row(**{**COSTS, **values, **said})
