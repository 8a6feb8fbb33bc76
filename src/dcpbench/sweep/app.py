"""A sweep from Hydra's overrides to its printed table: begun, resumed, or only planned."""

import importlib
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from hydra.core.config_loader import ConfigLoader
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.text import Text

from dcpbench.config.errors import ConfigError
from dcpbench.config.groups import Rerun
from dcpbench.executors import machine
from dcpbench.records.store import INTERRUPTED, ResultsError, exit_status, stored_rows, write_csv
from dcpbench.sweep.folder import claim as folders
from dcpbench.sweep.folder import manifest, resume
from dcpbench.sweep.plan import cells as composing
from dcpbench.sweep.plan import dry_run, job
from dcpbench.sweep.run import driver


def run_sweep(
    loader: ConfigLoader, base: DictConfig, job_overrides: Sequence[Sequence[str]], conf: Path
) -> int:
    """Run every cell that has no row yet, write the sweep's folder, print its table; the exit status.

    Raises:
        ConfigError, hydra.errors.HydraException, omegaconf.errors.OmegaConfBaseException: the
            configuration is wrong; nothing was started.
    """
    folder = Path(str(base.hydra.sweep.dir)).resolve()
    before = _resumed(base, folder)
    with ExitStack() as stack:
        if before is None:
            folders.refuse_used(folder)
        elif not base.plan:
            stack.enter_context(folders.held(folder))
        if before is not None:
            resume.same_matrix(folder, before, composing.cell_names(job_overrides))
        sweep = _decided(loader, base, job_overrides, conf, folder)
        found = None
        if before is not None:
            found = resume.look(folder, sweep.jobs, base.rerun)
        if base.plan:
            sweep.machine.complete()
            dry_run.print_plan(folder, sweep.jobs, sweep.machine.gpus, found)
            return 0
        if before is None or found is None:
            stack.enter_context(folders.held(folder))
            _begin(base, sweep)
        else:
            _go_on(sweep, before, found)
        return _run(sweep)


def _decided(
    loader: ConfigLoader,
    base: DictConfig,
    job_overrides: Sequence[Sequence[str]],
    conf: Path,
    folder: Path,
) -> driver.Sweep:
    """The sweep with all that is decided before it starts; writes nothing."""
    context = machine.fork_server(compiles=composing.may_compile(base, job_overrides))
    cells = composing.compose(loader, base, job_overrides)
    for cell in cells:
        cell.config.check()
    try:
        here = machine.probe(context)
    except RuntimeError as error:
        raise ConfigError(str(error)) from None
    return driver.Sweep(folder, job.plan(cells, here, conf), here, context, Console(stderr=True))


def _resumed(base: DictConfig, folder: Path) -> manifest.Record | None:
    """The record of the sweep to go on with, if one is.

    Raises:
        ConfigError: `resume` and `rerun` make no sense together, or with the folder.
    """
    if base.resume is None:
        if base.rerun is not Rerun.none:
            raise ConfigError(
                f"rerun={base.rerun.value}: says what to do with resume=<folder>, which is not set"
            )
        return None
    if not str(base.resume):
        raise ConfigError("resume=: names no folder")
    if Path(str(base.resume)).resolve() != folder:
        raise ConfigError(f"resume={base.resume}: hydra.sweep.dir={folder} is another folder")
    return manifest.read(folder)


def _begin(base: DictConfig, sweep: driver.Sweep) -> None:
    """Make the folder this sweep's, and write down what was asked for."""
    folder = sweep.folder
    folders.refuse_used(folder)  # once more, now that nobody else can write there
    roots = _claim_storage(sweep, known=[])
    words = manifest.own_words(sys.argv[1:])
    manifest.Record(words, str(Path.cwd()), [job.cell.name for job in sweep.jobs], roots).write(folder)
    OmegaConf.save(base, folder / "multirun.yaml")  # as Hydra does


def _go_on(sweep: driver.Sweep, before: manifest.Record, found: resume.Found) -> None:
    """Leave of the sweep that was broken off what stands, and tell what does not."""
    folder, jobs = sweep.folder, sweep.jobs
    roots = _claim_storage(sweep, before.storage)
    replace(before, storage=sorted({*before.storage, *roots})).write(folder)
    for sentence in found.sentences(len(jobs)):
        sweep.console.print(Text(sentence), soft_wrap=True)
    resume.take_up(folder, jobs, found)
    sweep.done = {row.cell: row for row in found.rows}
    now = {**sweep.machine.description, "git_commit": jobs[0].begun.git_commit}
    sweep.earlier_machines = resume.earlier_machines(folder, now)


def _claim_storage(sweep: driver.Sweep, known: list[str]) -> list[str]:
    """Make the sweep's folder below each `storage.root`, but those that it has had before."""
    roots = {str(Path(root).resolve()) for job in sweep.jobs if (root := job.config.storage.root)}
    for root in sorted(roots - set(known)):
        folders.claim(Path(root) / sweep.folder.name, "storage.root")
    return sorted(roots)


def _run(sweep: driver.Sweep) -> int:
    started = time.monotonic()
    # pandas takes up to a second to import, which the driver has while the ranks are at work.
    threading.Thread(target=importlib.import_module, args=("dcpbench.report.files",), daemon=True).start()
    status = None
    try:
        try:
            sweep.run()
        except KeyboardInterrupt:
            status = INTERRUPTED
            have = len(sweep.done) + sweep.written
            sweep.console.print(f"interrupted: {have} of {len(sweep.jobs)} cells have a row")
        resume.in_order(sweep.folder, sweep.jobs)
        write_csv(sweep.folder)
    except ResultsError as error:
        told = f"broken off: {error}; make room, and go on with resume={sweep.folder}"
        sweep.console.print(Text(told), soft_wrap=True)
        return 1
    if status is None:
        status = exit_status(stored_rows(sweep.folder))
    _tell(sweep, time.monotonic() - started)
    return status


def _tell(sweep: driver.Sweep, spent_s: float) -> None:
    if not sweep.done and not sweep.written:
        return
    from dcpbench.report.files import print_report, write_reports

    write_reports(sweep.folder)
    print_report(sweep.folder)
    if all(row.status == "skip" for row in stored_rows(sweep.folder)):
        sweep.console.print("every cell was skipped: nothing was measured")
    told = f"{sweep.written} cells in {spent_s:.1f} s, written to {sweep.folder}"
    sweep.console.print(told, soft_wrap=True)
