"""Script: the command that stops a user's own training script, resumes it and compares the runs."""

from dcpbench.core.metrics import COUNTED, MetricSpec
from dcpbench.core.plugins import API, CommandSpec, Plugin, TextSpec

_STEPS = {
    "loaded_step": "the step whose checkpoint it loaded",
    "newest_step": "the step of the newest complete checkpoint",
    "first_step": "the first step that differs",
}

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
        *(
            MetricSpec(name, f"of a script: {help}", shown="measured", **COUNTED)
            for name, help in _STEPS.items()
        ),
        TextSpec("verdict", "of a script: exact, diverges, older, torn, refuses, scratch, hangs, ..."),
        TextSpec("first_kind", "of a script: the kind of state that differs first, in causal order"),
    ),
    sections=("dcpbench.plugins.script.timeline:timeline",),
)
