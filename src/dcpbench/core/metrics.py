"""Metrics: what is measured in a cell, each declared once, and how measurements become a row's columns.

A rank measures where the work is done (`Cell.measure`, `Cell.phase`, or a metric's own `probe`). The driver
aggregates: over the saves of a rank, then over the ranks. Everything that shows, compares or stores a metric
iterates over `METRICS`.
"""

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

PHASE_S = "phase_s"
"""Seconds that a rank spent in a phase; no column, but what those of whole phases are made of."""

_OVER_SAVES: dict[str, Callable[[list[float]], float]] = {
    "median": statistics.median,
    "sum": sum,
    "max": max,
    "last": lambda values: values[-1],
}
_OVER_RANKS: dict[str, Callable[[Iterable[float]], float]] = {"max": max, "min": min, "sum": sum}


@dataclass(frozen=True)
class MetricSpec:
    """One metric, which is a column of the row, and how it is aggregated, shown and compared.

    Args:
        name: the column; it ends with its unit (`_s` seconds, `_bytes`).
        help: what it is, in one sentence.
        over_saves: how one rank's measurements become one value.
        over_ranks: how the ranks' values become one; the slowest or largest is the headline.
        better: which direction is an improvement; None if neither is.
        counted: counted and not measured, so that it has no noise and one run says what it is.
        shown: in the results table always, where it was measured, or only when asked for.
        compared: by `compare` always, or only when asked for.
        history: in `history` without being asked for.
        probe: called with the `Cell` on each rank whenever `phase` ends; returns the value, None for none.
        phase: the phase in which it is measured.
        whole_phase: it is all the time spent in `phase`, which `Cell.phase` measures as `PHASE_S`.
    """

    name: str
    help: str
    over_saves: Literal["median", "sum", "max", "last"] = "median"
    over_ranks: Literal["max", "min", "sum"] = "max"
    better: Literal["lower", "higher"] | None = "lower"
    counted: bool = False
    shown: Literal["always", "measured", "asked"] = "asked"
    compared: Literal["always", "asked"] = "asked"
    history: bool = False
    phase: str | None = None
    whole_phase: bool = False
    probe: Callable[[Any], float | None] | None = None

    @property
    def unit(self) -> str:
        """`s`, `bytes`, or empty where the name tells none."""
        name, _, unit = self.name.rpartition("_")
        return unit if name and unit in ("s", "bytes") else ""

    @property
    def whole(self) -> bool:
        """Whether its values are integers."""
        return self.counted or self.unit == "bytes"


@dataclass(frozen=True)
class Measurement:
    """One value of a metric: on which rank (None: the driver), in which phase (`verify/twin` is a part of
    one), of which save.

    `save` counts the saves, or the loads, of the cell from 0; None where a value is of no single one.
    """

    metric: str
    value: float
    rank: int | None
    phase: str | None = None
    save: int | None = None


METRICS: dict[str, MetricSpec] = {}
"""Every metric by its name, in the order of the columns."""


def register_metric(spec: MetricSpec) -> MetricSpec:
    """Declare a metric; a ValueError if its name is taken."""
    if METRICS.setdefault(spec.name, spec) != spec:
        raise ValueError(f"metric {spec.name}: declared twice")
    return spec


def aggregated(measurements: Iterable[Measurement]) -> dict[str, float | int | None]:
    """The row's value of every metric; None for one that was not measured."""
    by_rank: dict[tuple[str, str | None], dict[int | None, list[float]]] = {}
    for one in measurements:
        # Time in a part of a phase (`verify/twin`) is time in the phase.
        phase = (one.phase or "").partition("/")[0] if one.metric == PHASE_S else None
        by_rank.setdefault((one.metric, phase), {}).setdefault(one.rank, []).append(one.value)
    values: dict[str, float | int | None] = dict.fromkeys(METRICS)
    for name, spec in METRICS.items():
        over_saves = sum if spec.whole_phase else _OVER_SAVES[spec.over_saves]
        if ranks := by_rank.get((PHASE_S, spec.phase) if spec.whole_phase else (name, None)):
            value = _OVER_RANKS[spec.over_ranks](map(over_saves, ranks.values()))
            values[name] = int(value) if spec.whole else value
    return values


SHARED_CELL_S = "shared_cell_s"

_HEADLINE: dict[str, Any] = {"shown": "always", "compared": "always", "history": True}
COUNTED: dict[str, Any] = {"over_saves": "last", "better": None, "counted": True}
"""Arguments of a metric that counts what neither fewer nor more of is better."""

for _spec in (
    MetricSpec("build_s", "building models, optimizers and meshes", phase="build", whole_phase=True),
    MetricSpec("train_s", "training steps", phase="train", whole_phase=True),
    MetricSpec("save_s", "from the start of a save until the checkpoint is complete", **_HEADLINE),
    MetricSpec("save_stall_s", "from the start of a save until training may go on", **_HEADLINE),
    MetricSpec("load_s", "loading one checkpoint", **_HEADLINE),
    MetricSpec("verify_s", "comparisons, references and controls", phase="verify", whole_phase=True),
    MetricSpec("cell_s", "one try of a cell, with ranks that had to be started", shown="always"),
    MetricSpec("checkpoint_bytes", "the last checkpoint", "last", counted=True, compared="always"),
    MetricSpec("peak_device_bytes", "peak of a rank's device memory", "max", compared="always"),
    MetricSpec("peak_host_bytes", "peak of a rank's resident memory", "max", compared="always"),
    MetricSpec("disk_bytes", "all files among the cell's checkpoints at its end", "last", counted=True),
    MetricSpec("raw_write_s", "writing as many bytes into plain files, without DCP", shown="measured"),
    MetricSpec("raw_read_s", "reading those plain files", shown="measured"),
    MetricSpec(SHARED_CELL_S, "cell_s where other cells ran on the same devices: for estimates only"),
    MetricSpec("clock_offset_s", "how far the clock of a host is from the driver's, the farthest", "max"),
    MetricSpec(
        "gradient_bound_used", "the largest part of its bound that a gradient's difference took", "max"
    ),
):
    register_metric(_spec)
