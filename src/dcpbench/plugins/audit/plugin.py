"""Audit: the command that checks whether a checkpoint folder is complete."""

from dcpbench.core.plugins import API, CommandSpec, Plugin

plugin = Plugin(
    name="audit",
    api=API,
    commands={
        "audit": CommandSpec(
            "check whether checkpoint folders are complete",
            "dcpbench.plugins.audit.command:audit",
            ("dcpbench audit checkpoints/step-1000", "is it complete?"),
        )
    },
    public={"audit": "dcpbench.plugins.audit.audit:checkpoints_in"},
)
