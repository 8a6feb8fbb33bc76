"""The row: the record of a cell, the types of its columns, and whether it is ok."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from types import UnionType
from typing import Any, get_args, get_type_hints

from dcpbench.core.axes import AXES
from dcpbench.core.checks import CHECKS
from dcpbench.core.metrics import METRICS, SHARED_CELL_S
from dcpbench.core.statuses import shown
from dcpbench.records.plain_values import ColumnType

SCHEMA_VERSION = 4

WRONG_CONFIGURATION = 2
INTERRUPTED = 130
"""Exit statuses of a sweep other than 0 and 1: nothing was started; the user interrupted."""

_ORDER = tuple(
    """
    cell status reason scenario parallel compile save model optimizer storage world_size device seed overrides
    model_equal optim_equal extra_equal loss_resume_equal gradient_close step_equal powered
    max_abs_diff first_mismatch loss_at_save loss_resumed loss_continued loss_twin build_s train_s save_s
    save_stall_s load_s verify_s cell_s checkpoint_bytes peak_device_bytes peak_host_bytes torch_version
    dcpbench_commit started_at schema_version load_parallel loss_resume_close contract_held checkpoint_whole
    save_harmless fault fault_seen flaky config_digest code_digest config_dir disk_bytes repeat raw_write_s
    raw_read_s shared_cell_s checkpointer load_world_size expected_digest state_resume_equal flags_equal
    side_effect_free files_unchanged files_equal random_equal cwd state_dict scheduler load_into
    optimizer_state activation_checkpointing clock_offset_s component python_version load_torch_version
    load_python_version resume training replicas_equal batch_loss_close gradient_bound step_bound
    gradient_bound_used ranks_per_gpu backend target_commit
    """.split()  # noqa: SIM905
)
"""The order of the columns, which never changes; later ones follow as they are declared."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """The record of one cell. In a file it is flat: `axes`, `checks` and `metrics` are columns, see `flat`.

    >>> Row(cell="parallel=ddp", status="pass", reason=None, axes={"parallel": "ddp"})["parallel"]
    'ddp'

    Times are seconds, sizes bytes. Values that were not measured, or do not apply, are null.

    `resume` is true if all checks of saving and resuming passed and were able to fail, `training` if those of
    training under the parallelism did; null if there were none. `gradient_bound` and `step_bound` name the
    bounds of the comparison of gradients and optimizer steps with the twin's.

    `flaky` is true if a second attempt had another status than the first, null without one; the row describes
    the second, and `details` the first. `overrides` are quoted for a shell. `config_dir` is the user's folder
    of groups; `cwd` is the folder in which the sweep was started, where its modules are found. `config` is
    the identity of the cell (`dcpbench.core.cell_key`) and `config_digest` its digest. `expected_digest` is
    the digest of its known failures, `code_digest` that of the sources that ran. `dcpbench_commit` is the
    commit of dcpbench's checkout, `target_commit` that of the user's. Rows that differ only in `repeat` are
    repeats of one cell.
    """

    cell: str
    status: str
    reason: str | None
    axes: Mapping[str, Any] = field(default_factory=dict)
    overrides: str = ""
    repeat: int | None = None
    checks: Mapping[str, bool | None] = field(default_factory=dict)
    metrics: Mapping[str, float | int | None] = field(default_factory=dict)
    powered: bool | None = None
    resume: bool | None = None
    training: bool | None = None
    gradient_bound: str | None = None
    step_bound: str | None = None
    max_abs_diff: float | None = None
    first_mismatch: str | None = None
    loss_at_save: float | None = None
    loss_resumed: float | None = None
    loss_continued: float | None = None
    loss_twin: float | None = None
    torch_version: str | None = None
    python_version: str | None = None
    load_torch_version: str | None = None
    load_python_version: str | None = None
    ranks_per_gpu: int | None = None
    backend: str | None = None
    dcpbench_commit: str | None = None
    target_commit: str | None = None
    started_at: str | None = None
    fault_seen: bool | None = None
    flaky: bool | None = None
    config_digest: str | None = None
    expected_digest: str | None = None
    code_digest: str | None = None
    config_dir: str | None = None
    cwd: str | None = None
    schema_version: int = SCHEMA_VERSION
    config: Mapping[str, Any] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, column: str) -> Any:
        """Return the value of a column."""
        for registry, values in ((AXES, self.axes), (CHECKS, self.checks), (METRICS, self.metrics)):
            if column in registry:
                return values.get(column)
        return getattr(self, column)

    @property
    def is_ok(self) -> bool:
        """Whether it counts as ok in the exit status."""
        return shown(self.status, self.flaky, self.fault_seen).ok

    def flat(self) -> dict[str, Any]:
        """Return every column and its value, then `config` and `details`."""
        return {name: self[name] for name in (*columns(), *NESTED)}

    @classmethod
    def of(cls, flat: Mapping[str, Any]) -> "Row":
        """Return the row of a flat one; other keys are left out."""
        own = {item.name for item in fields(cls)} - {"axes", "checks", "metrics"}
        return cls(
            **{name: value for name, value in flat.items() if name in own},
            axes={name: flat.get(name) for name in AXES},
            checks={name: flat.get(name) for name in CHECKS},
            metrics={name: flat.get(name) for name in METRICS},
        )


def cell_seconds(row: Row | Mapping[str, Any]) -> float | None:
    """Return the seconds of a row's cell, alone on its devices or not; None if it did not run."""
    seconds: float | None = row[SHARED_CELL_S] if row["cell_s"] is None else row["cell_s"]
    return seconds


NESTED = ("config", "details")
"""The keys of a flat row in addition to the columns; not in `results.csv`."""

REQUIRED = _ORDER[:14]
"""The columns without which a row is damaged."""


def _field_type(hint: Any) -> ColumnType:
    """Return the type of a field: bool, int, float, str or a mapping, or one of them or None."""
    python, *none = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return ColumnType(python if python in (bool, int, float, str) else dict, optional=bool(none))


_FIELD_TYPES = {name: _field_type(hint) for name, hint in get_type_hints(Row).items()}
del _FIELD_TYPES["axes"], _FIELD_TYPES["checks"], _FIELD_TYPES["metrics"]


def column_types() -> dict[str, ColumnType]:
    """Return the type of each column, in their order, then of `NESTED`."""
    axes = {name: ColumnType(spec.type, spec.nullable) for name, spec in AXES.items()}
    checks = dict.fromkeys(CHECKS, ColumnType(bool))
    metrics = {name: ColumnType(int if spec.whole else float) for name, spec in METRICS.items()}
    types = _FIELD_TYPES | axes | checks | metrics
    nested = {name: types.pop(name) for name in NESTED}
    return {name: types[name] for name in (*_ORDER, *types)} | nested


def columns() -> tuple[str, ...]:
    """Return the columns of a row in their order, including those of loaded plug-ins."""
    return tuple(name for name in column_types() if name not in NESTED)


def exit_status(rows: Iterable[Row]) -> int:
    """Return 0 if every row is ok and at least one cell ran, else 1."""
    ended = [(row.is_ok, row.status != "skip") for row in rows]
    return 0 if all(ok for ok, _ in ended) and any(ran for _, ran in ended) else 1
