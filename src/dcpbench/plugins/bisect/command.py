"""The command `bisect`."""

import click

from dcpbench.cli.tree import PATH, command, several
from dcpbench.core.metrics import METRICS

bisect = command(
    "bisect",
    "dcpbench.plugins.bisect.bisect",
    """Find the first torch, from a good one to a bad one, in which a cell comes to another status, or is
    slower. CELL is the overrides of one cell, or the folder of a sweep and the name of a cell in it; add
    trust=true to run what another user's sweep names.

    The versions that are tried are those of the environments that --python names. Ends with 0 when the first
    bad one is found, with 1 when none is, with 2 when what was asked for is wrong.""",
    click.Argument(["cell"], nargs=-1, required=True, metavar="CELL..."),
    click.Option(
        ["--good"], required=True, metavar="VERSION", help="A torch in which it is as it should be."
    ),
    click.Option(["--bad"], required=True, metavar="VERSION", help="A later one in which it is not."),
    several(
        "--python", "VERSION=PATH", "The interpreter of an environment that has this torch (several times)."
    ),
    click.Option(
        ["--metric"],
        type=click.Choice([*METRICS]),
        metavar="NAME",
        help="A cost that is held against the good one's too.",
    ),
    click.Option(
        ["--slower"],
        type=click.FloatRange(1, min_open=True),
        default=1.2,
        show_default=True,
        metavar="RATIO",
        help="With --metric: from which ratio of medians on a version is bad.",
    ),
    click.Option(
        ["--repeats"], type=click.IntRange(1), default=1, show_default=True, help="Runs under each version."
    ),
    click.Option(
        ["-o", "--output"], type=PATH, metavar="FOLDER", help="For the sweeps (outputs/bisect-<time>)."
    ),
)
