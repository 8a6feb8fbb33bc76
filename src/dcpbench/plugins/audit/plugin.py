"""Audit: the command that tells whether a checkpoint folder is whole."""

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
