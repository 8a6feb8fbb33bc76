"""The commands. Each names the module whose `main` it calls; that is imported when the command runs."""

import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click

import dcpbench
from dcpbench.cli import completion
from dcpbench.cli.tree import (
    FOLDER,
    PATH,
    PURPOSE,
    Command,
    CommandTree,
    SweepCommand,
    flag_option,
    folders_argument,
    format_options,
    output_options,
    repeatable_option,
)
from dcpbench.config.errors import ConfigError
from dcpbench.core.plugins import PluginError, load_plugins
from dcpbench.records.row import INTERRUPTED, WRONG_CONFIGURATION
from dcpbench.records.store import ResultsError
from dcpbench.report.styles import print_error, standard_output

_HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


def main(words: Sequence[str]) -> int:
    """Run the command that these words name and return the exit status."""
    _open_standard_streams()
    prints_only = not {"-h", "--help", "--version", "--completion"}.isdisjoint(words)
    try:
        load_plugins()
        with standard_output() if prints_only else nullcontext():
            return int(tree.main([*words], "dcpbench", completion.VARIABLE, standalone_mode=False) or 0)
    except click.Abort:
        return INTERRUPTED
    except click.ClickException as error:
        at = getattr(error, "ctx", None)
        print_error(" ".join(error.format_message().split()), at.command_path if at else "dcpbench")
        return WRONG_CONFIGURATION
    except (ConfigError, PluginError, ResultsError) as error:
        print_error(str(error))
        return WRONG_CONFIGURATION


def _open_standard_streams() -> None:
    """Open descriptors 0, 1 and 2 if the process was started without them, before another file, such as a
    pipe to a rank, gets one of these numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            with suppress(OSError):
                os.fstat(number)
                continue
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def _print(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    if not value or ctx.resilient_parsing:
        return
    if param.name == "completion":
        click.echo(completion.source(tree, value), nl=False)
        ctx.exit()
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "is not installed"
    click.echo(f"dcpbench {dcpbench.__version__}\ntorch {torch}")
    ctx.exit()


_FIRST: dict[str, Any] = {"is_eager": True, "expose_value": False, "callback": _print}


@click.group(cls=CommandTree, help=PURPOSE, context_settings=_HELP)
@click.option("--version", is_flag=True, help="Print the versions of dcpbench and torch.", **_FIRST)
@click.option(
    "--completion",
    type=click.Choice(completion.SHELLS),
    help="Print the script for completion in a shell.",
    **_FIRST,
)
def tree() -> None:
    """Collect the commands."""


def _plan_options(format: str | None, as_json: bool, **options: Any) -> dict[str, Any]:
    return {**options, "plan": "json" if as_json else format or "table"}


def _resume_options(resume: Path | None, **options: Any) -> dict[str, Any]:
    if resume is None or ("=" in resume.name and not resume.exists()):
        raise ConfigError("resume: name the folder of the sweep first: dcpbench resume outputs/<sweep>")
    return {**options, "resume": resume}


_HOW_RESUMED = (
    flag_option("--rerun-failed", "Run cells again whose row is not ok."),
    flag_option("--trust", "Accept a folder of another user. Its sweep.json names the code that runs."),
)
_ALL_HOLD = "given several times: all have to hold"
_COMMANDS = (
    SweepCommand(
        "run",
        """Run cells. One value for each axis is one cell; lists are every combination of their values.

        Exits with 0 if every row is pass, xfail or skip, with 1 if any row is not, and with 2 if the
        configuration is wrong and nothing was started.""",
        click.Option(
            ["-c", "--cfg"],
            type=click.Choice(["job", "hydra", "all"]),
            help="Print a cell's configuration, start nothing.",
        ),
    ),
    SweepCommand(
        "plan",
        """Show what a run would do and how long it would take, and start nothing. Above 50 cells, a line
        is a block of the sweep, or the cells of one scenario.

        Exits with 1 if every cell would be skipped.""",
        click.Option(
            ["--resume"], type=FOLDER, metavar="FOLDER", help="Plan the rest of the sweep in FOLDER."
        ),
        *_HOW_RESUMED,
        flag_option(["--all", "every"], "Print every cell, however many there are."),
        *format_options("table", "markdown", "json"),
        options_of=_plan_options,
    ),
    SweepCommand(
        "resume",
        """Resume the sweep in FOLDER: run its cells that have no valid row.

        The overrides of that sweep hold again. More overrides say how the remaining cells run
        (timeouts.cell_s=900 retry=0).""",
        click.Argument(["resume"], type=FOLDER, metavar="FOLDER", required=False),
        *_HOW_RESUMED,
        options_of=_resume_options,
    ),
    Command(
        "report",
        "dcpbench.report.show",
        """Print sweeps: their cells or a pivot, and what did not pass. SWEEP is the folder of a sweep, or a
        folder of sweeps.""",
        folders_argument("sweeps", "SWEEP..."),
        repeatable_option(
            "--where",
            "COND",
            f"Rows to print: status!=pass, save_s>=0.1, model=null, reason~Error ({_ALL_HOLD}).",
        ),
        repeatable_option("--rows", "AXIS,...", "The rows of a pivot."),
        repeatable_option("--columns", "AXIS,...", "The columns of a pivot."),
        repeatable_option("--metric", "NAME,...", "Print a pivot of medians of save_stall_s, load_s, ..."),
        flag_option("--cells", "Print a line for each cell, however many there are."),
        *output_options(
            ["table", "markdown", "csv", "json", "html"], "csv and json: the rows, without details."
        ),
    ),
    Command(
        "show",
        "dcpbench.report.show_cell",
        """Print one cell of the sweep in FOLDER in full: its reason and likely cause, what each check proves,
        the mismatches, losses, times, and how to run it again. Of several runs the worst is printed.

        CELL is its name, its number in the order of the rows, or words that only this cell has, in any order
        (parallel=ddp async). Leave it out if the sweep has one cell.""",
        click.Argument(["folder"], type=PATH),
        click.Argument(["cell"], nargs=-1, metavar="[CELL]..."),
        *format_options("table", "markdown", "json"),
    ),
    Command(
        "compare",
        "dcpbench.report.compare",
        """Show which statuses changed from OLD to NEW, and which costs changed beyond noise. Exits with 1 if
        a change is one of --fail-on.""",
        click.Argument(["old"], type=PATH),
        folders_argument("new", "NEW..."),
        click.Option(
            ["--earlier"],
            type=PATH,
            multiple=True,
            metavar="SWEEP",
            help="""A sweep before OLD (several times): its costs count with OLD's, its statuses do not. With
            five or more sweeps before NEW, the drift between equal sweeps is measured instead of assumed.""",
        ),
        flag_option("--all", "Print every cell and every group of cells, also where nothing changed."),
        repeatable_option("--metric", "NAME,...", "Costs to compare, instead of the usual ones."),
        repeatable_option(
            "--ignore",
            "AXIS,...",
            "Pair cells that differ in these axes or overrides: to compare two models, two storages.",
        ),
        repeatable_option("--fail-on", "KIND,...", "Exit with 1 on such a change."),
        *output_options(
            ["table", "markdown", "csv", "json"], "Default: table, or what the suffix of -o names."
        ),
    ),
    Command(
        "history",
        "dcpbench.report.history",
        """Show the status and costs of each cell over the sweeps in FOLDER, one letter a sweep, the newest
        right.""",
        folders_argument("folders", "FOLDER..."),
        repeatable_option(
            "--where",
            "COND",
            f"Rows to use: parallel=fsdp2, sweep~2026-11 ({_ALL_HOLD}).",
        ),
        repeatable_option("--metric", "NAME,...", "Costs to show, instead of the usual ones."),
        click.Option(["--last"], type=click.IntRange(1), metavar="N", help="Use the newest N sweeps alone."),
        flag_option("--all", "Print cells that are ok and unchanged too."),
        *output_options(["table", "markdown", "json"], "json: always all cells."),
    ),
    Command(
        "doctor",
        "dcpbench.cli.doctor",
        """Check whether this machine can run cells: torch, GPUs and their links, memory, disk,
        compiler. Print how to fix what is missing. Exits with 1 if anything is bad.""",
        *format_options("table", "markdown"),
    ),
)
for _command in _COMMANDS:
    tree.add_command(_command)
