"""Crashes: disk states after a crash, ranks killed in a save, and failing storage."""

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
    columns=(
        CheckSpec(
            "crash_consistent",
            "no crash leaves what loads as neither checkpoint",
            "the same crash states, compared with other values",
            _CHECKED_IN,
        ),
        CheckSpec(
            "crash_recoverable",
            "a crash in a save leaves the old or the new checkpoint",
            "a folder without files",
            _CHECKED_IN,
        ),
        CheckSpec(
            "crash_durable",
            "after success a crash leaves the new checkpoint",
            "a folder without files, and the files of the old checkpoint",
            _CHECKED_IN,
        ),
        MetricSpec("crash_states_enumerated", "enumerated disk states that a crash can leave", **COUNTED),
        MetricSpec("crash_states", "distinct crash states", **COUNTED),
        MetricSpec("crash_states_s", "time to enumerate and load the crash states"),
        MetricSpec("crash_states_new", "crash states that load as the new checkpoint", **COUNTED),
        MetricSpec("crash_states_old", "crash states that load as the old checkpoint", **COUNTED),
        MetricSpec("crash_states_refused", "crash states that a load refuses", **COUNTED),
        MetricSpec("crash_states_mixture", "crash states that load as a mixture of both", **COUNTED),
        MetricSpec("crash_states_foreign", "crash states that load as values of neither", **COUNTED),
        MetricSpec("ranks_hung", "ranks that hang after a peer died in a save", **COUNTED),
    ),
    preload=tuple(f"{_HERE}.{module}" for module in ("crash", "crash_states", "storage_failure")),
)
