"""Crashes: the states that a disk may be in after a crash, ranks that are killed in a save, and storage that
fails."""

from pathlib import Path

from dcpbench.core.checks import CheckSpec
from dcpbench.core.metrics import COUNTED, MetricSpec
from dcpbench.core.plugins import API, Plugin

_HERE = "dcpbench.plugins.crash"
_CHECKED_IN = "scenarios that enumerate crash states"

plugin = Plugin(
    name="crash",
    api=API,
    conf=Path(__file__).parent / "conf",
    known_failures=Path(__file__).parent / "known_failures.yaml",
    checks=(
        CheckSpec(
            "crash_consistent",
            "crash consistent",
            "no crash leaves what loads as neither checkpoint",
            "the same crash states, compared with other values",
            _CHECKED_IN,
        ),
        CheckSpec(
            "crash_recoverable",
            "crash recoverable",
            "a crash in a save leaves the old or the new checkpoint",
            "a folder without files",
            _CHECKED_IN,
        ),
        CheckSpec(
            "crash_durable",
            "crash durable",
            "after success a crash leaves the new checkpoint",
            "a folder without files, and the files of the old checkpoint",
            _CHECKED_IN,
        ),
    ),
    metrics=(
        MetricSpec(
            "crash_states_enumerated", "states that crashes may leave, as they were enumerated", **COUNTED
        ),
        MetricSpec("crash_states", "those of them whose files differ", **COUNTED),
        MetricSpec("crash_states_s", "enumerating and loading them"),
        MetricSpec("crash_states_new", "those that load as the new checkpoint", **COUNTED),
        MetricSpec("crash_states_old", "those that load as the old checkpoint", **COUNTED),
        MetricSpec("crash_states_refused", "those that are refused", **COUNTED),
        MetricSpec("crash_states_mixture", "those that load as a mixture of both", **COUNTED),
        MetricSpec("crash_states_foreign", "those that load as values of neither", **COUNTED),
        MetricSpec("ranks_hung", "ranks that hang after a peer died in a save", **COUNTED),
    ),
    preload=tuple(f"{_HERE}.{module}" for module in ("crash", "crash_states", "storage_failure")),
    moved={
        "dcpbench.crash_states": _HERE,
        "dcpbench.scenarios.crash": f"{_HERE}.crash",
        "dcpbench.scenarios.crash_states": f"{_HERE}.crash_states",
        "dcpbench.scenarios.storage_failure": f"{_HERE}.storage_failure",
    },
)
