"""Script: the command that stops a user's own training script, resumes it and compares the runs."""

from dcpbench.core.metrics import COUNTED, MetricSpec
from dcpbench.core.plugins import API, CommandSpec, Plugin, TextSpec

plugin = Plugin(
    name="script",
    api=API,
    commands={
        "script": CommandSpec(
            "check whether your own training script resumes exactly",
            "dcpbench.plugins.script.command:script",
            ("dcpbench script -- torchrun train.py --out {out}", "does it resume?"),
        )
    },
    columns=(
        MetricSpec("loaded_step", "of a script: step of the loaded checkpoint", shown="measured", **COUNTED),
        MetricSpec(
            "newest_step", "of a script: step of the newest complete one", shown="measured", **COUNTED
        ),
        MetricSpec("first_step", "of a script: the first step that differs", shown="measured", **COUNTED),
        TextSpec("verdict", "of a script: exact, diverges, older, torn, refuses, scratch, hangs, ..."),
        TextSpec("first_kind", "of a script: the kind of state that differs first, in causal order"),
    ),
)
