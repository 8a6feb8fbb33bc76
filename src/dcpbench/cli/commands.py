"""The commands: what each takes, and the module whose `main` it calls, imported when it is run."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import click

from dcpbench.cli import completion, described
from dcpbench.cli.parameters import PATH, flag, output, places, several
from dcpbench.cli.tree import PURPOSE, Run, Tree, command
from dcpbench.config.errors import ConfigError
from dcpbench.core.metrics import METRICS
from dcpbench.core.plugins import PluginError, load_plugins, plugins
from dcpbench.records.files import open_standard_streams
from dcpbench.records.row import INTERRUPTED, NESTED, WRONG_CONFIGURATION, column_types
from dcpbench.records.store import ResultsError
from dcpbench.report.styles import complain, standard_output

_HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
_AS_TYPED = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
_SHARE = click.FloatRange(0, 1, max_open=True)


def main(words: Sequence[str], of_report: bool = False) -> int:
    """Do what these words ask for, `of_report` what follows `python -m dcpbench.report`; the exit status."""
    open_standard_streams()
    tells = not {"-h", "--help", "--version", "--completion"}.isdisjoint(words)  # and does nothing else
    try:
        load_plugins()
        own = ("compare", "history", *(name for plugin in plugins() for name in plugin.commands))
        if of_report and not {*words[:1]} & {*own}:
            words = ["report", *words]
        with standard_output() if tells else nullcontext():
            return int(tree.main([*words], "dcpbench", "_DCPBENCH_COMPLETE", standalone_mode=False) or 0)
    except click.Abort:
        return INTERRUPTED
    except click.ClickException as error:
        at = getattr(error, "ctx", None)
        complain(" ".join(error.format_message().split()), at.command_path if at else "dcpbench")
        return WRONG_CONFIGURATION
    except (ConfigError, PluginError, ResultsError) as error:
        complain(str(error))
        return WRONG_CONFIGURATION


def _print_version(ctx: click.Context, _: click.Parameter, asked: bool) -> None:
    if asked and not ctx.resilient_parsing:
        from importlib.metadata import PackageNotFoundError, version

        import dcpbench

        try:
            torch = version("torch")
        except PackageNotFoundError:
            torch = "is not installed"
        click.echo(f"dcpbench {dcpbench.__version__}\ntorch {torch}")
        ctx.exit()


def _print_completion(ctx: click.Context, _: click.Parameter, shell: str | None) -> None:
    if shell and not ctx.resilient_parsing:
        click.echo(completion.source(tree, shell), nl=False)
        ctx.exit()


@click.group(cls=Tree, help=PURPOSE, context_settings=_HELP)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version,
    help="The versions of dcpbench and torch.",
)  # fmt: skip
@click.option(
    "--completion", type=click.Choice(completion.SHELLS), is_eager=True, expose_value=False,
    callback=_print_completion, help="Print the script that has a shell complete.",
)  # fmt: skip
def tree() -> None:
    """The commands."""


def _add_run(name: str, help: str, words_of: Callable[..., Sequence[str]], *params: click.Parameter) -> None:
    """Add a command whose words, and these parameters, `words_of` turns into the words of a run."""

    @click.pass_context
    def callback(ctx: click.Context, /, overrides: tuple[str, ...], **options: bool) -> int:
        if {"-h", "--help"} & {*overrides}:
            click.echo(ctx.get_help())
            return 0
        words = words_of(overrides, **options)
        if wrong := described.wrong_option(words):
            raise ConfigError(wrong)
        from dcpbench.cli import run

        return run.main(words)

    typed = click.Argument(
        ["overrides"], nargs=-1, type=click.UNPROCESSED, shell_complete=completion.override
    )
    tree.add_command(
        Run(name, context_settings=_AS_TYPED, callback=callback, params=[typed, *params], help=help)
    )


def _planned(words: Sequence[str], all: bool, as_json: bool) -> Sequence[str]:
    shown = [f"plan_as={'json' if as_json else 'cells'}"] if all or as_json else []
    return [*words, "plan=true", *shown]


def _resumed(words: Sequence[str]) -> Sequence[str]:
    from dcpbench.sweep.manifest import quoted

    if not words or words[0].startswith("-"):
        raise ConfigError("resume: name the folder of the sweep first: dcpbench resume outputs/<sweep>")
    return [*words[1:], f"resume={quoted(words[0])}"]


def _add(name: str, module: str, help: str, *params: click.Parameter) -> None:
    """Add a command that `module.main` does."""
    tree.add_command(command(name, module, help, *params))


def _kinds_of_change() -> Sequence[str]:
    from dcpbench.analysis.comparison import FAIL_ON

    return FAIL_ON


def _columns() -> Sequence[str]:
    return ["sweep", *(name for name in column_types() if name not in NESTED)]


def _conditions() -> Sequence[str]:
    return [f"{name}=" for name in _columns()]


def _numbers() -> Sequence[str]:
    return [name for name, kind in column_types().items() if kind.python in (int, float)]


_WHERE = "Only such rows: status!=pass, save_s>=0.1, model=null, reason~Error (several: all must hold)."

_add_run(
    "run",
    """Run cells: one value for each axis is one cell, lists are their product.

    Ends with 0 when every row is pass, xfail or skip, with 1 when any is not, with 2 when the configuration
    is wrong and nothing was started.""",
    lambda words: words,
)
_add_run(
    "plan",
    """Tell what a run would do and how long it would take, and start nothing. Above 50 cells a line tells of
    a block of the matrix, or of the cells of one scenario or other axis.

    Ends as the run would, as far as that is known: with 1 when every cell would be skipped.""",
    _planned,
    flag("--all", "Every cell, however many there are."),
    click.Option(["--json", "as_json"], is_flag=True, help="All of it as JSON."),
)
_add_run(
    "resume",
    """Go on with the sweep in FOLDER: cells whose row stands do not run again.

    What was asked for there is taken again; rerun=failed runs cells again that did not come out as they
    should.""",
    _resumed,
)
_add(
    "report",
    "dcpbench.report.show",
    """Show sweeps: cells one by one or as a pivot, and what did not pass. SWEEP is a sweep's folder, or one
    that holds several.""",
    places("sweeps", "SWEEP..."),
    several("--where", "COND", _WHERE, _conditions),
    several("--rows", "AXIS,...", "What a pivot has down its side.", _columns),
    several("--columns", "AXIS,...", "What it has along its top.", _columns),
    several("--metric", "NAME,...", "A pivot of medians of save_stall_s, load_s, ...", _numbers),
    flag("--cells", "A line a cell, however many there are."),
    *output(
        ["table", "markdown", "csv", "json", "html", "junit"], "csv and json: the rows, without details."
    ),
)
_add(
    "compare",
    "dcpbench.report.compare",
    """Tell which statuses changed from OLD to NEW, and which costs beyond noise. Ends with 1 where something
    is found that --fail-on names.""",
    click.Argument(["old"], type=PATH),
    places("new", "NEW..."),
    click.Option(
        ["--earlier"],
        type=PATH,
        multiple=True,
        metavar="SWEEP",
        help="""A sweep before OLD (several times): its costs count with OLD's, its statuses do not; with five
        or more sweeps before NEW it is seen, and not assumed, how far equal ones drift apart.""",
    ),
    flag("--all", "Every cell and every group of cells, also where nothing changed."),
    several("--metric", "NAME,...", "Which costs, instead of those always compared.", lambda: list(METRICS)),
    several(
        "--ignore",
        "AXIS,...",
        "Match cells whatever these axes or overrides are: to compare two models, two storages.",
        _columns,
    ),
    several("--fail-on", "KIND,...", "Exit with 1 where there is such a change.", _kinds_of_change),
    click.Option(["--least-effect"], type=_SHARE, metavar="SHARE", help="0.05: less than 5 % is no change."),
    click.Option(
        ["--drift"],
        type=_SHARE,
        metavar="SHARE",
        help="How far equal sweeps may differ as a whole (0.03); with six or more sweeps, that is seen.",
    ),
    click.Option(["--false-alarms"], type=_SHARE, metavar="SHARE", help="Chance of any false call (0.01)."),
    *output(["table", "markdown", "csv", "json"], "Table, or what the suffix of -o says."),
)
_add(
    "history",
    "dcpbench.report.history",
    """Show how the status and the costs of each cell went over the sweeps in FOLDER, one sign a sweep, the
    newest right.""",
    places("folders", "FOLDER..."),
    several(
        "--where",
        "COND",
        "Only such rows: parallel=fsdp2, sweep~2026-11 (several: all must hold).",
        _conditions,
    ),
    several("--metric", "NAME,...", "Which costs, instead of those always shown.", _numbers),
    click.Option(["--last"], type=click.IntRange(1), metavar="N", help="The newest N sweeps alone."),
    flag("--all", "Also the cells that are ok and in which nothing changed."),
    *output(["table", "markdown", "json"], "json: always all cells."),
)
_add(
    "doctor",
    "dcpbench.cli.doctor",
    """Tell whether this machine can run what it should: torch, GPUs and their links, memory, disk, compiler,
    loopback, limits; and how to mend what is missing. Ends with 1 when something is bad.""",
    click.Option(["--folder"], type=PATH, metavar="FOLDER", help="Where checkpoints would go (outputs)."),
    click.Option(["--json", "as_json"], is_flag=True, help="All of it as JSON."),
)
