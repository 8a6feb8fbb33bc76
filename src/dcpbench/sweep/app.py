"""A sweep from Hydra's overrides to its printed table."""

import importlib
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from hydra.core.config_loader import ConfigLoader
from omegaconf import DictConfig
from rich.console import Console

from dcpbench.config import ConfigError
from dcpbench.results import INTERRUPTED, Row, exit_status
from dcpbench.sweep import cells as composing
from dcpbench.sweep import driver, machine


def run_sweep(
    loader: ConfigLoader, base: DictConfig, job_overrides: Sequence[Sequence[str]], conf: Path
) -> int:
    """Run every cell, write the sweep's folder, print its table; the exit status.

    Raises:
        ConfigError, hydra.errors.HydraException, omegaconf.errors.OmegaConfBaseException: the
            configuration is wrong; nothing was started.
    """
    console = Console(stderr=True)
    context = machine.fork_server(compiles=composing.may_compile(base, job_overrides))
    cells = composing.compose(loader, base, job_overrides)
    for cell in cells:
        cell.config.check()
    try:
        here = machine.probe(context)
    except RuntimeError as error:
        raise ConfigError(str(error)) from None
    folder = Path(str(base.hydra.sweep.dir)).resolve()
    jobs = driver.plan(cells, here, conf, folder)
    sweep = driver.Sweep(folder, jobs, here, context, console)
    started = time.monotonic()
    # pandas takes up to a second to import, which the driver has while the ranks are at work.
    threading.Thread(target=importlib.import_module, args=("dcpbench.report.text",), daemon=True).start()
    try:
        rows = sweep.run()
        status = exit_status(rows)
    except KeyboardInterrupt:
        rows, status = sweep.rows, INTERRUPTED
        console.print(f"interrupted: {len(rows)} of {len(cells)} cells have a row")
    _tell(folder, rows, console, time.monotonic() - started)
    return status


def _tell(folder: Path, rows: list[Row], console: Console, spent_s: float) -> None:
    if not rows:
        return
    from dcpbench.report.text import print_report
    from dcpbench.report.write import write_reports

    write_reports(folder)
    print_report(folder)
    if all(row.status == "skip" for row in rows):
        console.print("every cell was skipped: nothing was measured")
    console.print(f"{len(rows)} cells in {spent_s:.1f} s, written to {folder}", soft_wrap=True)
