"""Audit: the command that tells whether a checkpoint folder is whole."""

from dcpbench.core.plugins import API, CommandSpec, Plugin

plugin = Plugin(
    name="audit",
    api=API,
    commands={
        "audit": CommandSpec(
            "whether a checkpoint folder is whole, whoever wrote it",
            "dcpbench.plugins.audit.command:audit",
            ("dcpbench audit checkpoints/step-1000", "is it whole?"),
        )
    },
)
