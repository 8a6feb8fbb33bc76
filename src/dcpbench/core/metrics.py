"""Metrics: the quantities that a cell measures.

Each metric is declared once. A rank measures where the work is done (`Cell.measure`, `Cell.phase`, or the
metric's `probe`). The driver aggregates over the saves of a rank, then over the ranks, into a column of the
row. Code that shows, compares or stores a metric iterates over `METRICS`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

PHASE_S = "phase_s"
"""Metric of the seconds that a rank spent in a phase. It is not a column; columns with `whole_phase` are
computed from it."""


@dataclass(frozen=True)
class MetricSpec:
    """Declaration of a metric: a column of the row, and how it is aggregated, shown and compared.

    >>> MetricSpec("load_s", "loading one checkpoint").unit
    's'

    Args:
        name: the column; it ends with its unit (`_s` seconds, `_bytes`).
        help: a noun phrase for help and tables.
        over_saves: how the measurements of one rank become one value; the row has the largest of the ranks.
        better: the direction that is an improvement; None if neither is.
        counted: True if it is counted, not measured: it has no noise, and one run is enough.
        shown: in the results table always, if it was measured, or only on request.
        compared: by `compare` always, or only on request.
        history: True if `history` shows it by default.
        phase: the phase in which it is measured.
        whole_phase: True if it is the complete time of `phase`, which `Cell.phase` measures as `PHASE_S`.
        probe: called with the `Cell` on each rank when `phase` ends; returns the value, or None.
    """

    name: str
    help: str
    over_saves: Literal["median", "max", "last"] = "median"
    better: Literal["lower", "higher"] | None = "lower"
    counted: bool = False
    shown: Literal["always", "measured", "asked"] = "asked"
    compared: Literal["always", "asked"] = "asked"
    history: bool = False
    phase: str | None = None
    whole_phase: bool = False
    probe: Callable[[Any], float | None] | None = None

    def __post_init__(self) -> None:
        if (self.probe or self.whole_phase) and not self.phase:
            raise ValueError(
                f"metric {self.name}: is measured at the end of a phase; pass phase, as phase='load'"
            )

    @property
    def unit(self) -> str:
        """`s`, `bytes`, or empty if the name has no unit."""
        name, _, unit = self.name.rpartition("_")
        return unit if name and unit in ("s", "bytes") else ""

    @property
    def whole(self) -> bool:
        """True if its values are integers."""
        return self.counted or self.unit == "bytes"


@dataclass(frozen=True)
class Measurement:
    """One measured value of a metric.

    >>> Measurement("load_s", 0.21, rank=3, phase="load", save=0).value
    0.21

    Args:
        rank: None for the driver.
        phase: the phase, or a part of one (`verify/twin`).
        save: number of the save or load in the cell, from 0; None if the value belongs to no single one.
    """

    metric: str
    value: float
    rank: int | None
    phase: str | None = None
    save: int | None = None


SHARED_CELL_S = "shared_cell_s"

_HEADLINE: dict[str, Any] = {"shown": "always", "compared": "always", "history": True}
COUNTED: dict[str, Any] = {"over_saves": "last", "better": None, "counted": True}
"""Arguments of a count for which neither fewer nor more is better."""

_OWN = (
    MetricSpec("build_s", "building models, optimizers and meshes", phase="build", whole_phase=True),
    MetricSpec("train_s", "training steps", phase="train", whole_phase=True),
    MetricSpec("save_s", "from the start of a save until the checkpoint is complete", **_HEADLINE),
    MetricSpec("save_stall_s", "from the start of a save until training may continue", **_HEADLINE),
    MetricSpec("load_s", "loading one checkpoint", **_HEADLINE),
    MetricSpec("verify_s", "comparisons, references and controls", phase="verify", whole_phase=True),
    MetricSpec("cell_s", "one attempt at a cell, including the start of its ranks", shown="always"),
    MetricSpec("checkpoint_bytes", "the last checkpoint", "last", counted=True, compared="always"),
    MetricSpec("peak_device_bytes", "peak of a rank's device memory", "max", compared="always"),
    MetricSpec("peak_host_bytes", "peak of a rank's resident memory", "max", compared="always"),
    MetricSpec("twin_bytes", "estimate of the memory of a rank's unsharded twin", "max", counted=True),
    MetricSpec("disk_bytes", "all files of the cell's checkpoints when it ends", "last", counted=True),
    MetricSpec("raw_write_s", "writing as many bytes into plain files, without DCP", shown="measured"),
    MetricSpec("raw_read_s", "reading those plain files", shown="measured"),
    MetricSpec(SHARED_CELL_S, "cell_s if other cells ran on the same devices: for estimates only"),
    MetricSpec("clock_offset_s", "largest difference of a host's clock from the driver's", "max"),
    MetricSpec("gradient_bound_used", "largest difference of a gradient, as a fraction of its bound", "max"),
)

METRICS = {spec.name: spec for spec in _OWN}
"""Every metric by name, in the order of the columns."""
