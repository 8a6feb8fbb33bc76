"""An engine without ranks, for tests of the driver: every stage ends at once, and a cell's own words declare
how. `PRETENDED` selects it.

A cell passes, except with a fault, which one check reports on rank 0, and in the scenarios of `ENDS`.
"""

import platform
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

from dcpbench.config.groups import ExecutorConfig
from dcpbench.core.checks import CHECKS
from dcpbench.core.mismatch import Mismatch, Problem, RaisedError
from dcpbench.core.rank_report import CheckReport, Compared, RankReport
from dcpbench.core.stage_end import StageEnd
from dcpbench.executors.base import Engine, Executor
from dcpbench.executors.machine import Machine
from dcpbench.rank.messages import CellSpec, WorldSpec
from support.ends import on, raised, reported

PRETENDED = "executor.target=support.pretended_engine.PretendedEngine"


def healthy(kind: WorldSpec, mismatch: Mismatch | None = None) -> StageEnd:
    """Every check passed on every rank, and could have failed; with a mismatch rank 0 reported it."""
    reports = [RankReport(rank, {name: CheckReport() for name in CHECKS}) for rank in range(kind.world_size)]
    for report in reports:
        for check in report.checks.values():
            check.record(Compared((), {"net1.weight": True}, {"net1.weight": True}), "")
    if mismatch:
        reports[0].checks["model_equal"].add([mismatch])
    return reported(reports)


def raises(_: WorldSpec) -> StageEnd:
    """Rank 0 raised."""
    return raised(RaisedError(0, "train", "ValueError", "injected"))


def dies(_: WorldSpec) -> StageEnd:
    """Rank 0 was killed."""
    dead = on(0)
    dead.exited_at, dead.exit_status = 0.0, -9
    return StageEnd((dead,))


ENDS: dict[str, Callable[[WorldSpec], StageEnd]] = {"raises": raises, "kills_itself": dies}
"""The ends of stages, by scenario."""


class PretendedExecutor(Executor):
    """Runs a stage by writing a checkpoint of one empty file."""

    interrupted = False

    def run(self, kind: WorldSpec, spec: CellSpec, *_: object) -> StageEnd:
        (saved := Path(spec.checkpoints, "step-0001")).mkdir(exist_ok=True)
        (saved / ".metadata").touch()
        if spec.config.fault.target:
            return healthy(kind, Mismatch("net1.weight", Problem.differs))
        return ENDS.get(spec.config.scenario.name, healthy)(kind)

    def keep_only(self, kinds: set[WorldSpec]) -> None:
        pass

    def interrupt(self) -> None:
        self.interrupted = True

    def end(self) -> None:
        pass


class PretendedEngine(Engine):
    """A host without GPUs. It imports nothing and starts no process."""

    def __init__(self, config: ExecutorConfig) -> None:
        pass

    def begin(self, modules: Sequence[str]) -> None:
        pass

    def probe(self) -> Machine:
        return Machine(0, {"torch": version("torch"), "python": platform.python_version()})

    def executor(self, gpus: tuple[int, ...]) -> Executor:
        return PretendedExecutor()

    def end(self) -> None:
        pass
