"""A sweep whose stages end at once, without ranks: for tests of the driver."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from unittest import mock

from rich.console import Console

from dcpbench.code.sources import Source
from dcpbench.config.groups import Device, ScenarioConfig
from dcpbench.config.schema import Config
from dcpbench.core.rank_report import RankReport
from dcpbench.core.stage_end import StageEnd
from dcpbench.executors.base import Engine, Executor
from dcpbench.executors.machine import Machine
from dcpbench.plan.plan import Plan, PlannedCell
from dcpbench.rank.messages import CellSpec
from dcpbench.sweep.driver import SweepDriver
from support.ends import reported
from support.jobs import job


def jobs_in(folder: Path, *names: str, **keys: object) -> list[PlannedCell]:
    """Planned cells with these names, in a sweep in `folder`, with these keys of their configurations."""
    given = {"world_size": 1, "device": Device.cpu, "retry": 0, **keys}
    config = Config(scenario=ScenarioConfig(name="a", target="x.y"), **given)  # type: ignore[arg-type]
    made = []
    for name in names:
        one = job(config, dcpbench_commit=None, target_commit=None)
        named = {"name": name, "folder": folder / name, "columns": {**one.columns, "cell": name}}
        made.append(replace(one, **named, code={"dcpbench": Source(None, "digest")}))  # type: ignore[arg-type]
    return made


def sweep_of(
    folder: Path, jobs: Sequence[PlannedCell], run: Callable[[CellSpec], StageEnd] | None = None
) -> tuple[SweepDriver, StringIO]:
    """A driver of these cells, and what it prints; `run` makes the end of a stage."""
    folder.mkdir(exist_ok=True)

    def ended(kind: object, spec: CellSpec, *_: object) -> StageEnd:
        return run(spec) if run else reported([RankReport(0)])

    executor = mock.Mock(Executor, run=ended, interrupted=False)
    engine = mock.Mock(Engine, **{"executor.return_value": executor, "details.return_value": {}})
    printed = StringIO()
    console = Console(file=printed, width=1000)
    return SweepDriver(folder, Plan(list(jobs), Machine(0, {})), engine, console, {}), printed
