"""Options and arguments that several commands have, those of plug-ins too."""

from collections.abc import Sequence
from pathlib import Path

import click

from dcpbench.cli import completion, described
from dcpbench.config.text import did_you_mean, visible

PATH = click.Path(path_type=Path)


def several(option: str, metavar: str, help: str, known: completion.Names | None = None) -> click.Option:
    """An option that may be given several times; `known` is what a shell completes."""
    complete = None if known is None else completion.listed(known)
    return click.Option([option], multiple=True, metavar=metavar, help=help, shell_complete=complete)


def flag(option: str, help: str) -> click.Option:
    return click.Option([option], is_flag=True, help=help)


def output(formats: Sequence[str], help: str) -> list[click.Parameter]:
    """Where text goes and as what, for `dcpbench.report.output`."""
    raw = "csv: leave texts as they are that a spreadsheet would run (=, +, -, @)."
    return [
        click.Option(["--format"], type=click.Choice(formats), help=help),
        *([flag("--raw", raw)] if "csv" in formats else []),
        click.Option(
            ["-o", "--output"],
            type=PATH,
            metavar="FILE",
            help="Write there, whole or not at all; its suffix tells the format.",
        ),
    ]


def _no_command(_: click.Context, __: click.Parameter, places: tuple[Path, ...]) -> tuple[Path, ...]:
    """A command's name that stands where a sweep does is told as such."""
    for place in places:
        meant = did_you_mean(str(place), [*described.commands()])
        if meant and not place.exists():
            raise click.UsageError(
                f"{visible(str(place))}: no such folder{meant.replace('mean ', 'mean dcpbench ')}"
            )
    return places


def places(name: str, metavar: str) -> click.Argument:
    return click.Argument([name], type=PATH, nargs=-1, required=True, callback=_no_command, metavar=metavar)
