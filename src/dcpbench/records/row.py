"""The row: the record of a cell, the types of its columns, whether it is ok, and the notes in its details."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, get_type_hints

from dcpbench.config.keys import HELP, key
from dcpbench.core.axes import AxisSpec
from dcpbench.core.checks import CheckSpec
from dcpbench.core.metrics import SHARED_CELL_S
from dcpbench.core.mismatch import Place
from dcpbench.core.notes import NOTES, Note
from dcpbench.core.plugins import REGISTRIES, ColumnSpec, TextSpec
from dcpbench.core.statuses import shown
from dcpbench.records.plain_values import ColumnType

SCHEMA_VERSION = 5

RunKey = tuple[str, int]
"""The identity of a run of a cell, in any sweep: the digest of the cell's `CellKey`, and the repeat."""

WRONG_CONFIGURATION = 2
INTERRUPTED = 130
"""Exit statuses of a sweep other than 0 and 1: nothing was started; the user interrupted."""


def _column(help: str, default: Any = None) -> Any:
    """Return the field of a column: as the key of a configuration, but null by default."""
    return key(default, help)


@dataclass(frozen=True, kw_only=True)
class Row:
    """The record of one cell. In a file it is flat: `axes`, `checks`, `metrics` and `texts` are columns, see
    `flat`.

    >>> Row(cell="parallel=ddp", status="pass", reason=None, axes={"parallel": "ddp"})["parallel"]
    'ddp'

    Times are seconds, sizes bytes. Values that were not measured, or do not apply, are null.

    Rows that differ only in `repeat` are repeats of one cell, and so are a run that was not ok and its retry.
    """

    cell: str = _column("the cell's name: its differences from the defaults", MISSING)
    status: str = _column("the outcome", MISSING)
    reason: str | None = _column(
        "why it is not a `pass`: the first mismatch or exception, with rank and phase", MISSING
    )
    axes: Mapping[str, Any] = field(default_factory=dict)
    overrides: str = _column("the command line words that run this cell again", "")
    repeat: int = _column("which run of its cell this is, from 0", 0)
    retry_of: int | None = _column("of a retry: the `repeat` of the run that failed")
    checks: Mapping[str, bool | None] = field(default_factory=dict)
    resume: bool | None = _column(
        "every check of saving and resuming passed and was able to fail; null where none was made"
    )
    training: bool | None = _column("the same for checks of training")
    training_from: str | None = _column(
        "the cell whose run that never saves it shares, with the verdict on training; null: its own"
    )
    powered: bool | None = _column("every check has been shown, in this cell, to be able to fail")
    fault_seen: bool | None = _column("the injected fault was detected as expected; null without one")
    flaky: bool | None = _column("its retry had another status; null if it was not retried")
    gradient_bound: str | None = _column(
        "how gradients were compared with the twin's: `rounding_of_sum` or `measured_noise`"
    )
    step_bound: str | None = _column(
        "how optimizer steps were compared with the twin's: `bits`, `rounding` or `measured`"
    )
    max_abs_diff: float | None = _column(
        "the largest difference of restored state; 0 where all of it was restored"
    )
    first_mismatch: str | None = _column("the name of the first piece of state that was not restored")
    loss_at_save: float | None = _column("the loss of the newest checkpoint's step")
    loss_resumed: float | None = _column(
        "the last loss of the run that was resumed from the newest checkpoint"
    )
    loss_continued: float | None = _column("the loss of the same step in the uninterrupted run")
    loss_twin: float | None = _column("the unwrapped twin's loss of the same step")
    metrics: Mapping[str, float | int | None] = field(default_factory=dict)
    texts: Mapping[str, str | None] = field(default_factory=dict)
    torch_version: str | None = _column("of the ranks, or of those that save")
    python_version: str | None = _column("of the ranks, or of those that save")
    load_torch_version: str | None = _column("of `load_python`; null without")
    load_python_version: str | None = _column("of `load_python`; null without")
    train_steps: int | None = _column("steps before each save")
    save_steps: str | None = _column("of a trainer, the steps after which it saved")
    resume_steps: int | None = _column("steps after each load, of a trainer at most")
    restart: str | None = _column(
        "what loads: a process of another `interpreter`, with another hash seed; on several hosts a new "
        "`process` of the same one; null: the process that saved"
    )
    ranks_per_gpu: int | None = _column("the most ranks that share a GPU; null on the CPU")
    backend: str | None = _column(
        "what carries collectives on the device: `nccl` or `gloo`; null without a process group"
    )
    dcpbench_commit: str | None = _column(
        "the commit of dcpbench's checkout, `-dirty` if it was changed; null for a wheel"
    )
    target_commit: str | None = _column(
        "the commit of the checkout that holds the user's target, `-dirty` if it was changed; "
        "name and version of an installed one; null without a target"
    )
    started_at: str | None = _column("the start of the run, UTC")
    config_digest: str = _column("of the cell's identity: rows compare where it is equal", "")
    expected_digest: str | None = _column(
        "of the known failures listed for the cell, and of how its fault must be detected"
    )
    code_digest: str | None = _column(
        "of the sources of dcpbench, of every package that a `target` comes from, and of plug-ins"
    )
    config_dir: str | None = _column("the folder of `--config-dir`")
    cwd: str | None = _column("the folder in which the sweep was started")
    schema_version: int = _column("of the row's format", SCHEMA_VERSION)
    config: Mapping[str, Any] = _column("the configuration that identifies the cell, by dotted key", dict)
    details: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, column: str) -> Any:
        """Return the value of a column."""
        registry_name = next((name for name, registry in REGISTRIES.items() if column in registry), None)
        return getattr(self, registry_name).get(column) if registry_name else getattr(self, column)

    @property
    def run(self) -> RunKey:
        """The run of a cell that it is the record of."""
        return self.config_digest, self.repeat

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
        by_field: dict[str, Any] = {
            row_field.name: flat[row_field.name] for row_field in fields(cls) if row_field.name in flat
        }
        by_field |= {
            registry_name: {name: flat.get(name) for name in names}
            for registry_name, names in REGISTRIES.items()
        }
        return cls(**by_field)


def cell_seconds(row: Row | Mapping[str, Any]) -> float | None:
    """Return the seconds of a row's cell, alone on its devices or not; None if it did not run."""
    seconds: float | None = row[SHARED_CELL_S] if row["cell_s"] is None else row["cell_s"]
    return seconds


def shared_gpu_sentences(rows: Iterable[Mapping[str, Any]], nccl: Iterable[object]) -> list[str]:
    """Say how ranks share GPUs in some rows, and what that does not test.

    Args:
        nccl: the version of NCCL on each machine, if it is known.
    """
    versions = ", ".join(dict.fromkeys(str(version) for version in nccl if version))
    texts = {
        "gloo": f"(gloo; NCCL is {versions or 'missing'}): NCCL, NVLink",
        "nccl": f"(NCCL {versions}): NVLink",
    }
    how = {(ranks, row["backend"]) for row in rows if (ranks := row.get("ranks_per_gpu") or 0) > 1}
    return [
        f"{ranks} ranks per GPU {texts.get(backend, texts['nccl'])} and peer copies are not tested"
        for ranks, backend in sorted(how)
    ]


NESTED = ("config", "details")
"""The keys of a flat row in addition to the columns; not in `results.csv`."""

_FIRST_AXES = "scenario parallel compile save model optimizer storage world_size device seed"
REQUIRED = ("cell", "status", "reason", *_FIRST_AXES.split(), "overrides", "repeat", "config_digest")
"""The columns without which a row is damaged."""


def _type_of(spec: ColumnSpec) -> ColumnType:
    if isinstance(spec, TextSpec):
        return ColumnType(str)
    if isinstance(spec, AxisSpec):
        return ColumnType(spec.type, spec.nullable)
    return ColumnType(bool if isinstance(spec, CheckSpec) else int if spec.whole else float)


_FIELD_TYPES = {
    name: ColumnType.of(hint) or ColumnType(dict, optional=False)
    for name, hint in get_type_hints(Row).items()
}
_FIELD_HELP = {item.name: item.metadata.get(HELP, "") for item in fields(Row)}


def column_types() -> dict[str, ColumnType]:
    """Return the type of each column, in the order of their declarations, then of `NESTED`."""
    types: dict[str, ColumnType] = {}
    for name, kind in _FIELD_TYPES.items():
        registry = REGISTRIES.get(name)
        types |= (
            {name: kind} if registry is None else {column: _type_of(registry[column]) for column in registry}
        )
    return types


def column_help() -> dict[str, str]:
    """Return the help of each column and of `NESTED`."""
    declared = {name: spec.help for registry in REGISTRIES.values() for name, spec in registry.items()}
    return {name: declared.get(name) or _FIELD_HELP[name] for name in column_types()}


def columns() -> tuple[str, ...]:
    """Return the columns of a row in their order, including those of loaded plug-ins."""
    return tuple(name for name in column_types() if name not in NESTED)


def exit_status(rows: Iterable[Row]) -> int:
    """Return 0 if every row is ok and at least one cell ran, else 1."""
    ended = [(row.is_ok, row.status != "skip") for row in rows]
    return 0 if all(ok for ok, _ in ended) and any(ran for _, ran in ended) else 1


def dict_in(value: object) -> dict[str, Any]:
    """Return a dict that a row may hold; an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def list_in(value: object) -> list[Any]:
    """Return a list that a row may hold; an empty one for anything else."""
    return value if isinstance(value, list) else []


def notes_of(row: Mapping[str, Any]) -> Iterator[Note]:
    """Yield the notes of all ranks of a row, of known kinds; the phrase of a place is its moment.

    >>> for note in notes_of({"details": {"ranks": [{"notes": [{"kind": "left_out", "text": "no files"}]}]}}):
    ...     print(note.kind, note.text)
    left_out no files
    """
    for rank in map(dict_in, list_in(dict_in(row.get("details")).get("ranks"))):
        for recorded in map(dict_in, list_in(rank.get("notes"))):
            kind, text, check, name, place = (
                str(recorded.get(key) or "") for key in ("kind", "text", "check", "name", "place")
            )
            if kind in NOTES:
                yield Note(kind, text, check, name, Place(place) if place else None)
