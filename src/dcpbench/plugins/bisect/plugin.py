"""Bisect: the command that finds the first torch in which a cell breaks or is slower."""

from dcpbench.core.plugins import API, CommandSpec, Plugin

plugin = Plugin(
    name="bisect",
    api=API,
    commands={
        "bisect": CommandSpec(
            "find the first torch in which a cell breaks or gets slower",
            "dcpbench.plugins.bisect.command:bisect",
        )
    },
)
