"""Axes: what a sweep varies, each declared once. Each is a column of the row. Everything that decides,
stores, shows or compares an axis iterates over `AXES`. Its default is that of its field in
`dcpbench.config.schema.Config`, or stands in `conf/config.yaml` for a group."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class AxisSpec:
    """One axis.

    Args:
        name: the column, and the group of `conf/` or the key on the command line.
        help: what it is, as a noun phrase.
        type: what the column contains; a group's value is shown by its name.
        group: whether it is a group of `conf/`.
        nullable: whether the column can be null.
        values_of: the group whose values it has, if that is another one.
        likeness: cells are alike at three levels when times are estimated, 1 is the closest; up to this level
            they have to agree in the axis.
        writes: whether cells have to agree in it to write as many bytes.
        always: whether the results table shows it where all cells agree in it too.
        pivot: where it is in a pivot, if nobody asked.
        place: how early it is chosen for the matrix of report.html; 0: last.
        down: whether it is along the side of that matrix, if it can be.
        grouped: whether costs are compared for each of its values.
    """

    name: str
    help: str
    type: type = str
    group: bool = False
    nullable: bool = True
    values_of: str = ""
    likeness: int = 0
    writes: bool = False
    always: bool = False
    pivot: Literal["rows", "columns"] | None = None
    place: int = 0
    down: bool = False
    grouped: bool = True

    @property
    def key(self) -> str:
        """Where its value is in the identity of a cell."""
        return f"{self.name}.name" if self.group else self.name

    @property
    def values_in(self) -> str:
        """The folder of `conf/` that has its values."""
        return self.values_of or self.name


AXES: dict[str, AxisSpec] = {}
"""Every axis by its name, in the order of the columns."""


def register_axis(spec: AxisSpec) -> AxisSpec:
    """Declare an axis; a ValueError if its name is taken."""
    if AXES.setdefault(spec.name, spec) != spec:
        raise ValueError(f"axis {spec.name}: declared twice")
    return spec


for _spec in (
    AxisSpec(
        "scenario", "what a cell does",
        group=True, nullable=False, likeness=3, writes=True, pivot="rows", place=2, down=True,
    ),
    AxisSpec(
        "parallel", "how the model is spread over the ranks",
        group=True, nullable=False, likeness=2, writes=True, always=True, pivot="rows", place=3, down=True,
    ),
    AxisSpec(
        "compile", "torch.compile the model",
        type=bool, nullable=False, likeness=3, always=True, pivot="columns", place=7,
    ),
    AxisSpec(
        "save", "how the checkpointer is called to save",
        group=True, nullable=False, always=True, pivot="columns", place=6,
    ),
    AxisSpec(
        "model", "the model, and the shape of its batches",
        group=True, nullable=False, likeness=1, writes=True, place=4, down=True,
    ),
    AxisSpec("optimizer", "the optimizer and its hyperparameters", group=True, writes=True, place=9),
    AxisSpec("storage", "where checkpoints are stored", group=True, nullable=False, place=8),
    AxisSpec("world_size", "4 ranks; on two or three GPUs, one on each", type=int, likeness=3, writes=True),
    AxisSpec("device", "auto (the GPUs if there are any), cpu, cuda", likeness=3),
    AxisSpec("seed", "of weights, batches and other random values", type=int, nullable=False, grouped=False),
    AxisSpec(
        "load_parallel",
        "the parallelism that a checkpoint is loaded under, in a scenario that converts; "
        "null: the one it is saved under",
        group=True, values_of="parallel", likeness=1, writes=True, place=5,
    ),
    AxisSpec(
        "fault", "a defect that is planted on purpose, and has to be detected",
        group=True, place=1, down=True, grouped=False,
    ),
    AxisSpec("checkpointer", "what writes and reads checkpoints", group=True, writes=True),
    AxisSpec(
        "load_world_size", "ranks that load, in a scenario that converts; null: as many as save", type=int
    ),
    AxisSpec("state_dict", "the form in which state is saved and loaded", group=True, writes=True),
    AxisSpec(
        "scheduler", "how the learning rate changes with the steps; a custom workload has its own", group=True
    ),
    AxisSpec("load_into", "what a checkpoint is loaded into", group=True),
    AxisSpec(
        "optimizer_state",
        "plain: the optimizer's own state dict is saved, by the numbers of its parameters; "
        "null: what DCP's functions make of it, by their names",
    ),
    AxisSpec(
        "activation_checkpointing",
        "which activations are computed again in the backward pass: of each layer, or with each layer "
        "compiled by itself around that (layer, compiled_layer); null: none",
    ),
    AxisSpec(
        "component",
        "what is trained and saved in addition to model, optimizer and scheduler",
        group=True,
    ),
):  # fmt: skip
    register_axis(_spec)
