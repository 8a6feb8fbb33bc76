"""The command `bisect`."""

import click

from dcpbench.cli.tree import PATH, command, several
from dcpbench.core.metrics import METRICS

bisect = command(
    "bisect",
    "dcpbench.plugins.bisect.bisect",
    """Find the first torch, between a good and a bad one, in which a cell has another status or is slower.
    CELL is the overrides of one cell, or a sweep folder and the name of a cell in it; add trust=true to run a
    cell of another user's sweep.

    Each --python names an environment with one version. The exit status is 0 if a first bad version is found,
    1 if none is found, 2 if an argument is invalid.""",
    click.Argument(["cell"], nargs=-1, required=True, metavar="CELL..."),
    click.Option(
        ["--good"], required=True, metavar="VERSION", help="A torch in which the cell is as expected."
    ),
    click.Option(["--bad"], required=True, metavar="VERSION", help="A later torch in which it is not."),
    several("--python", "VERSION=PATH", "Interpreter of an environment with this torch (repeatable)."),
    click.Option(
        ["--metric"],
        type=click.Choice([*METRICS]),
        metavar="NAME",
        help="Also compare this metric with the good version.",
    ),
    click.Option(
        ["--slower"],
        type=click.FloatRange(1, min_open=True),
        default=1.2,
        show_default=True,
        metavar="RATIO",
        help="With --metric: ratio of medians from which a version is bad.",
    ),
    click.Option(
        ["--repeats"], type=click.IntRange(1), default=1, show_default=True, help="Runs with each version."
    ),
    click.Option(
        ["-o", "--output"],
        type=PATH,
        metavar="FOLDER",
        help="Write the sweeps to FOLDER (outputs/bisect-<time>).",
    ),
)
