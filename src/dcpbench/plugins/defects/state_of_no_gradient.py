"""A load requests optimizer state of a parameter that never had a gradient, and so has none
(docs/findings/state-of-no-gradient.md)."""

from collections.abc import Iterator

from dcpbench.cell.cell import Cell
from dcpbench.cell.known_defects import RaisedInLoad
from dcpbench.core.defects import Defect, Moment
from dcpbench.core.state import StatePart
from dcpbench.plugins.defects._cells import loads_by_dcp
from dcpbench.runs import build_run
from dcpbench.state.snapshot import named_parameters
from dcpbench.workloads.optimizers import each_optimizer

_MISSING = "Missing key in checkpoint state_dict: "


def _expected(cell: Cell, moment: Moment, reference: RaisedInLoad) -> Iterator[str]:
    """Train up to the save once more, to see which parameters have a gradient in a step of the optimizer."""
    checkpoint, texts = reference.checkpoint, reference.texts
    if not all(text.startswith(f"{_MISSING}optimizer.state.") for text in texts):
        return
    run = build_run.build(cell.config, cell.world, cell.config.seed)
    parameters, had = named_parameters(run.model), set[str]()

    def note(*_: object) -> None:
        had.update(name for name, parameter in parameters.items() if parameter.grad is not None)

    for optimizer in each_optimizer(run.optimizer):
        optimizer.register_step_pre_hook(note)
    run.train(cell.batches, checkpoint.step)
    names = checkpoint.state.get(StatePart.optimizer, {})
    saved = {str(name[1]) for name in names if name[0] == "state"}
    everywhere = cell.world.gathered((had, saved))
    had, saved = (set().union(*of_ranks) for of_ranks in zip(*everywhere, strict=True))
    for name in parameters.keys() - had - saved:
        yield from (text for text in texts if text.startswith(f"{_MISSING}optimizer.state.{name}."))


defect = Defect(("raised",), loads_by_dcp, _expected)
