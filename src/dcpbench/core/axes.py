"""Axes: the settings that a sweep varies. Each is declared once, and is a column of the row. Code that
decides, stores, shows or compares an axis iterates over `AXES`. The default of an axis is that of its field
in `dcpbench.config.schema.Config`; for a group of `conf/` it is in `conf/config.yaml`."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class AxisSpec:
    """Declaration of an axis.

    >>> AxisSpec("parallel", "how the model is spread over the ranks", group=True).key
    'parallel.name'

    Args:
        name: the column, and the group of `conf/` or the key on the command line.
        help: a noun phrase for help and tables.
        type: type of the column; the value of a group is shown as its name.
        group: True for a group of `conf/`.
        nullable: True if the column can be null.
        values_of: the group that its values come from, if it has a different name.
        always: True to show it in the results table even if it is constant.
        pivot: side of a pivot table that shows it by default.
        place: rank in the choice of axes for the matrix of report.html; 0: last.
        down: True to prefer the side of that matrix to its top.
        grouped: True to compare costs for each of its values.
    """

    name: str
    help: str
    type: type = str
    group: bool = False
    nullable: bool = True
    values_of: str = ""
    always: bool = False
    pivot: Literal["rows", "columns"] | None = None
    place: int = 0
    down: bool = False
    grouped: bool = True

    @property
    def key(self) -> str:
        """Key of the axis in `CellKey.values`."""
        return f"{self.name}.name" if self.group else self.name

    @property
    def values_in(self) -> str:
        """Folder of `conf/` that defines its values."""
        return self.values_of or self.name


_OWN = (
    AxisSpec(
        "scenario", "what a cell does",
        group=True, nullable=False, pivot="rows", place=2, down=True,
    ),
    AxisSpec(
        "parallel", "how the model is spread over the ranks",
        group=True, nullable=False, always=True, pivot="rows", place=3, down=True,
    ),
    AxisSpec(
        "compile", "torch.compile the model",
        type=bool, nullable=False, always=True, pivot="columns", place=7,
    ),
    AxisSpec(
        "save", "how the checkpointer is called to save",
        group=True, nullable=False, always=True, pivot="columns", place=6,
    ),
    AxisSpec(
        "model", "the model, and the shape of its batches",
        group=True, nullable=False, place=4, down=True,
    ),
    AxisSpec("optimizer", "the optimizer and its hyperparameters", group=True, place=9),
    AxisSpec("storage", "where checkpoints are stored", group=True, nullable=False, place=8),
    AxisSpec("world_size", "ranks of a cell; auto: 4, or one on each of two or three GPUs",
        type=int),
    AxisSpec("device", "where ranks compute: auto, cpu, cuda; auto: on GPUs if there are any"),
    AxisSpec("seed", "seed of all random values", type=int, nullable=False, grouped=False),
    AxisSpec(
        "load_parallel",
        "the parallelism to load under; null: the one to save under. Needs a scenario that converts",
        group=True, values_of="parallel", place=5,
    ),
    AxisSpec(
        "fault", "an injected bug that a check must detect",
        group=True, place=1, down=True, grouped=False,
    ),
    AxisSpec("checkpointer", "what writes and reads checkpoints", group=True),
    AxisSpec(
        "load_world_size", "ranks that load; null: those that save. Needs a scenario that converts", type=int
    ),
    AxisSpec("state_dict", "the form in which state is saved and loaded", group=True),
    AxisSpec(
        "scheduler", "the learning rate schedule; a custom workload has its own", group=True
    ),
    AxisSpec("load_into", "what a checkpoint is loaded into", group=True),
    AxisSpec(
        "activation_checkpointing",
        "activations to recompute in backward; layer: those of each layer; compiled_layer: also "
        "compile each layer separately; null: keep all",
    ),
    AxisSpec(
        "component",
        "a further object that is trained and saved",
        group=True,
    ),
)  # fmt: skip

AXES = {spec.name: spec for spec in _OWN}
"""Every axis by name, in the order of the columns."""
