"""What a resumed run is held against."""

from dataclasses import dataclass
from functools import cached_property

from dcpbench.scenarios.cell import Cell
from dcpbench.workloads import training_run
from dcpbench.workloads.batches import Batches
from dcpbench.workloads.training_run import TrainingRun


@dataclass(frozen=True)
class Losses:
    """The losses, from step 1 on, of the uninterrupted run and of its unwrapped twin, and the batches that
    they are of."""

    continued: list[float]
    twin: list[float]
    data: Batches


@dataclass(frozen=True)
class Oracle:
    """The uninterrupted run; its unwrapped twin is built when a check asks for it."""

    cell: Cell
    trained: TrainingRun
    data: Batches

    @cached_property
    def twin(self) -> TrainingRun:
        """The same model from the same seed, unwrapped, all of it on every rank, and not yet trained."""
        with self.cell.phase("build"):
            return training_run.build_plain(self.cell.config, self.cell.world, self.cell.config.seed)

    @property
    def losses(self) -> Losses:
        """Of both runs up to the step at which the uninterrupted one is."""
        self.twin.train(self.data, self.trained.train_state.step)
        return Losses(self.trained.train_state.losses, self.twin.train_state.losses, self.data)


def other_seed(cell: Cell, number: int) -> int:
    """A seed that no training run of the cell was built from, another one for each `number`."""
    return cell.config.seed + 1000 * (number + 1)
