"""The JSON Schema of `results.jsonl`, made from the registries of columns."""

import json
from pathlib import Path
from typing import Any

from dcpbench.core.axes import AXES
from dcpbench.core.checks import CHECKS
from dcpbench.core.metrics import METRICS
from dcpbench.core.plugins import load_plugins, plugins
from dcpbench.core.statuses import STATUSES
from dcpbench.records.row import REQUIRED, SCHEMA_VERSION, column_types

_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object"}

COLUMN_HELP = {
    "cell": "the cell's name: its differences from the defaults",
    "status": "the outcome",
    "reason": "why it is not a `pass`: the first mismatch or exception, with rank and phase",
    "overrides": "the command line words that run this cell again",
    "resume": "every check of saving and resuming passed and was able to fail; null where none was made",
    "training": "the same for checks of training",
    "gradient_bound": "how gradients were compared with the twin's: `rounding_of_sum` or `measured_noise`",
    "step_bound": "how optimizer steps were compared with the twin's: `bits`, `rounding` or `measured`",
    "powered": "every check has been shown, in this cell, to be able to fail",
    "max_abs_diff": "the largest difference of restored state; 0 where all of it was restored",
    "first_mismatch": "the name of the first piece of state that was not restored",
    "loss_at_save": "the loss of the newest checkpoint's step",
    "loss_resumed": "the last loss of the run that was resumed from the newest checkpoint",
    "loss_continued": "the loss of the same step in the uninterrupted run",
    "loss_twin": "the unwrapped twin's loss of the same step",
    "torch_version": "of the ranks, or of those that save",
    "python_version": "of the ranks, or of those that save",
    "load_torch_version": "of `load_python`; null without",
    "load_python_version": "of `load_python`; null without",
    "ranks_per_gpu": "the most ranks that share a GPU; null on the CPU",
    "backend": "what carries collectives on the device: `nccl` or `gloo`; null without a process group",
    "dcpbench_commit": "the commit of dcpbench's checkout, `-dirty` if it was changed; null for a wheel",
    "target_commit": "the commit of the checkout that holds the user's target, `-dirty` if it was changed; "
    "name and version of an installed one; null without a target",
    "started_at": "the start of the cell's first attempt, UTC",
    "schema_version": "of the row's format",
    "fault_seen": "the injected fault was detected as expected; null without one",
    "flaky": "the retry gave a different status; null if there was no retry",
    "config": "the configuration that identifies the cell, by dotted key",
    "config_digest": "of the cell's identity: rows compare where it is equal",
    "expected_digest": "of the known failures listed for the cell, and of how its fault must be detected",
    "code_digest": "of the sources of dcpbench, of every package that a `target` comes from, and of plug-ins",
    "config_dir": "the folder of `--config-dir`",
    "cwd": "the folder in which the sweep was started",
    "repeat": "which of `repeats` runs this is",
}
"""The columns that are neither axes, checks nor metrics."""


SCHEMA_FILE = Path(__file__).parents[1] / "results.schema.json"
"""The schema in the wheel; `python -m dcpbench.records.json_schema` writes it again."""


def results_schema() -> dict[str, Any]:
    """Return the JSON Schema of a line of `results.jsonl`, with the columns of all plug-ins.

    Later versions can add columns without a new schema version, so unknown columns are allowed.
    """
    load_plugins()
    texts = dict(COLUMN_HELP)
    added_by: dict[str, str] = {}
    for plugin in plugins():
        added_by |= {axis.name: plugin.name for axis in plugin.axes}
        added_by |= {check.name: plugin.name for check in plugin.checks}
        added_by |= {metric.name: plugin.name for metric in plugin.metrics}
    texts |= {name: axis.help for name, axis in AXES.items()}
    texts |= {name: check.help for name, check in CHECKS.items()}
    texts |= {name: metric.help for name, metric in METRICS.items()}
    properties: dict[str, Any] = {}
    for name, kind in column_types().items():
        python = _TYPES[kind.python]
        types = [python, "null"] if kind.optional else python
        properties[name] = {"type": types, "description": texts.get(name, "")}
        if name in added_by:
            properties[name]["$comment"] = f"of the plug-in {added_by[name]}"
    properties["status"]["enum"] = [*STATUSES]
    properties["schema_version"]["const"] = SCHEMA_VERSION
    del properties["details"]  # a file of its own
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A line of results.jsonl: one run of one cell of dcpbench",
        "type": "object",
        "properties": properties,
        "required": [*REQUIRED, "schema_version"],
    }


if __name__ == "__main__":
    SCHEMA_FILE.write_text(json.dumps(results_schema(), indent=1) + "\n")
