"""The command `log`."""

import click

from dcpbench.cli.tree import PATH, Command, places
from dcpbench.core.plugins import plugins

log = Command(
    "log",
    "dcpbench.plugins.trackers.log",
    "Write the rows of sweeps as runs of a tracker, on this machine. No data is sent.",
    places("sweeps", "SWEEP..."),
    click.Option(
        ["--to"],
        type=click.Choice([name for plugin in plugins() for name in plugin.trackers]),
        required=True,
        help="The tracker.",
    ),
    click.Option(["--dir"], type=PATH, metavar="FOLDER", help="Write to FOLDER (outputs/<tracker>)."),
    click.Option(
        ["--project"],
        default="dcpbench",
        show_default=True,
        help="The project (wandb), experiment (mlflow) or folder (tensorboard) of the runs.",
    ),
)
