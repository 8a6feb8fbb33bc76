"""The kinds of commands, their options and their help; plug-ins build theirs from these too."""

import importlib
import pkgutil
import signal
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import click
from click.shell_completion import CompletionItem

from dcpbench.cli import completion, hints, keys_help
from dcpbench.config.errors import ConfigError
from dcpbench.config.schema import ALMOST_AXES, group_names
from dcpbench.config.text import choices, visible
from dcpbench.core.axes import AXES
from dcpbench.core.plugins import commands_of_plugins, plugins

PURPOSE = """\
Check that training resumed from a PyTorch Distributed Checkpoint continues exactly as if it had never
stopped, and measure what saving and loading cost.

Overrides without a command (dcpbench parallel=fsdp,hsdp) are a run.
"""
PATH = click.Path(path_type=Path)
FOLDER = click.Path(path_type=Path, file_okay=False)
_EXAMPLES = (
    ("dcpbench run parallel=fsdp2 device=cpu", "run one cell"),
    ("dcpbench run parallel=fsdp,hsdp compile=true,false", "run four cells"),
    ("dcpbench plan experiment=nightly", "see what it would run"),
    ("dcpbench resume outputs/<sweep>", "continue it"),
    ("dcpbench report outputs/<sweep> --where status!=pass", "see what did not pass"),
    ("dcpbench show outputs/<sweep> parallel=fsdp2", "see one cell in full"),
    ("dcpbench compare outputs/<old> outputs/<new>", "see what changed"),
    ("dcpbench doctor", "check this machine"),
)
_MORE = (
    ("dcpbench run --help", "axes and options of a run"),
    ("dcpbench run --help AXIS", "the values of an axis"),
    ("dcpbench COMMAND --help", "the options of a command"),
    ('eval "$(dcpbench --completion bash)"', "completion, in ~/.bashrc; zsh likewise"),
)
_RUN_EXAMPLES = (
    ("dcpbench run parallel=fsdp save=async", "one cell"),
    ("dcpbench run parallel=fsdp,hsdp save=sync,async", "four: the product of lists"),
    ("dcpbench run parallel=fsdp_tp parallel.tp=4", "set a key of a group"),
    ("dcpbench run model=mine --config-dir my_conf", "use my_conf/model/mine.yaml"),
)
_RUN_MORE = (
    ("dcpbench run --help AXIS", "the values of an axis"),
    ("dcpbench run --help keys", "other keys: saves, train_steps, timeouts, ..."),
)


def repeatable_option(option: str, metavar: str, help: str) -> click.Option:
    """Return an option that can be given several times."""
    return click.Option([option], multiple=True, metavar=metavar, help=help)


def flag_option(option: str | Sequence[str], help: str) -> click.Option:
    """Return an option without a value."""
    return click.Option([option] if isinstance(option, str) else option, is_flag=True, help=help)


def output_options(formats: Sequence[str], help: str) -> list[click.Parameter]:
    """Return the options of `dcpbench.report.document`."""
    file = "Write to FILE, atomically; its suffix selects the format."
    return [
        click.Option(["--format"], type=click.Choice(formats), help=help),
        click.Option(["-o", "--output"], type=PATH, metavar="FILE", help=file),
    ]


def format_options(*names: str) -> list[click.Parameter]:
    """Return the option that selects how a command prints; with `json`, also a flag for that."""
    flags = [click.Option(["--json", "as_json"], is_flag=True, help="Print everything as JSON.")]
    return [click.Option(["--format"], type=click.Choice(names)), *flags * ("json" in names)]


def folders_argument(name: str, metavar: str) -> click.Argument:
    """Return an argument of one or more folders."""

    def refuse_command(_: click.Context, __: click.Parameter, given: tuple[Path, ...]) -> tuple[Path, ...]:
        for place in given:
            hint = hints.first_answer(hints.of_place(str(place)))
            if hint and not place.exists():  # the name of another path can be too long to ask
                raise click.UsageError(hint)
        return given

    return click.Argument(
        [name], type=PATH, nargs=-1, required=True, callback=refuse_command, metavar=metavar
    )


class CommandTree(click.Group):
    """The commands; overrides without a command are a run."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        first = args[0] if args else ""
        added = commands_of_plugins()
        known = first in {*self.commands, *added, "-h", "--help", "--version", "--completion"}
        if first == "--" or (first and not known and first[0] not in "-~" and "=" not in first):
            following = args[1] if len(args) > 1 and "=" not in args[1] else ""
            raise click.UsageError(hints.first_answer(hints.of_word(first, following)))
        if not known and (args or not ctx.resilient_parsing):
            args = ["run", *args]
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        return super().shell_complete(ctx, incomplete) or completion.complete_override(ctx, None, incomplete)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*keys_help.commands()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        added = {name: spec.target for plugin in plugins() for name, spec in plugin.commands.items()}
        if cmd_name in added and cmd_name not in self.commands:
            return cast("click.Command", pkgutil.resolve_name(added[cmd_name]))
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([*keys_help.commands().items()])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        added = (spec.example for plugin in plugins() for spec in plugin.commands.values())
        for title, lines in (("Examples", (*_EXAMPLES, *filter(None, added))), ("More", _MORE)):
            with formatter.section(title):
                formatter.write_dl(lines, col_max=60)


class Once(click.Command):
    """A command whose options with one value are given once."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            _, _, order = self.make_parser(ctx).parse_args(args=[*args])
            for param, times in Counter(order).items():
                takes_one = isinstance(param, click.Option) and not param.is_flag and not param.multiple
                if takes_one and times > 1:
                    raise click.UsageError(f"{param.opts[-1]} is given {times} times; leave one out")
        return super().parse_args(ctx, args)


class Command(Once):
    """A command that `module.main` does with its options; `module.epilog()`, if it exists, ends the help."""

    def __init__(self, name: str, module: str, help: str, *params: click.Parameter) -> None:
        super().__init__(name, help=help, params=[*params])
        self._module = module

    def invoke(self, ctx: click.Context) -> Any:
        module = importlib.import_module(self._module)
        # Until here Ctrl-C just ended the process; from here on there may be something to clean up.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return module.main(**ctx.params)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        epilog = getattr(importlib.import_module(self._module), "epilog", None)
        if epilog:
            formatter.write("\n")
            for paragraph in epilog().split("\n\n"):
                formatter.write_text(" ".join(paragraph.split()))
                formatter.write("\n")


class SweepCommand(Once):
    """A command whose overrides Hydra reads. Its own options are those of a run, or those that `options_of`
    makes of them. Its own arguments come first."""

    def __init__(
        self,
        name: str,
        help: str,
        *params: click.Parameter,
        options_of: Callable[..., dict[str, Any]] = dict,
    ) -> None:
        overrides = click.Argument(
            ["overrides"],
            nargs=-1,
            type=click.UNPROCESSED,
            metavar="[KEY=VALUE[,VALUE...]]...",
            shell_complete=completion.complete_override,
        )
        folder = click.Path(file_okay=False)
        config_dir = click.Option(
            ["-cd", "--config-dir"], type=folder, metavar="DIR", help="Add a folder laid out like conf/."
        )
        multirun = flag_option(["-m", "--multirun"], "Accepted; lists make a sweep without it too.")
        topic = click.Option(
            ["-h", "--help"], is_flag=False, flag_value="", metavar="[AXIS]", help="This, or help on an axis."
        )
        all_params = [*params, overrides, config_dir, multirun, topic]
        super().__init__(name, help=help, params=all_params, add_help_option=False)
        self._options_of = options_of

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the options; one that is a key, or of another command, is reported with the words to write
        instead."""
        its_options = {name for param in self.params for name in param.opts}
        named = [pair for pair in pairwise([*args, ""]) if pair[0].startswith("-")]
        options = [pair for pair in named if pair[0].partition("=")[0] not in its_options]
        if options and not ctx.resilient_parsing:
            known = {*keys_help.keys(), *group_names(), *keys_help.keys_of_groups()}
            for option in options:
                if hint := hints.first_answer(hints.of_option(*option, known)):
                    raise click.UsageError(hint)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> int:
        options = {name: value for name, value in ctx.params.items() if name != "multirun"}
        overrides, topic = options.pop("overrides"), options.pop("help")
        config_dir, cfg = options.pop("config_dir"), options.pop("cfg", None)
        extra_folder = config_dir and Path(config_dir)
        if topic is not None:
            if not topic and overrides and "=" not in overrides[-1]:
                topic = overrides[-1]
            click.echo(_help_on(topic.partition("=")[0], extra_folder, ctx) if topic else ctx.get_help())
            return 0
        from dcpbench.cli import run, words

        options = self._options_of(**options)
        return run.main(
            words.parse_words(overrides, str(self.name), extra_folder, cfg), extra_folder, cfg, **options
        )

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        pieces = [piece for param in self.params for piece in param.get_usage_pieces(ctx)]
        formatter.write_usage(ctx.command_path, " ".join([*pieces, "[OPTIONS]"]))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if self.name == "run":
            with formatter.section("Examples"):
                formatter.write_dl(_RUN_EXAMPLES, col_max=60)
            extra_folder = ctx.params.get("config_dir")
            known = keys_help.keys() | keys_help.groups(extra_folder and Path(extra_folder))
            with formatter.section("Axes, with their defaults"):
                axes = [known[name] for name in (*AXES, *ALMOST_AXES)]
                lines = [(f"{key.name}={key.default}", _in_one_line(key.help, formatter)) for key in axes]
                formatter.write_dl(lines, col_max=30)
            with formatter.section("More"):
                formatter.write_dl(_RUN_MORE, col_max=60)
        else:
            formatter.write("\n")
            formatter.write_text("Axes and keys: dcpbench run --help")
        with formatter.section("Options"):
            options = (param for param in self.params if isinstance(param, click.Option))
            records = (option.get_help_record(ctx) for option in options)
            formatter.write_dl([*filter(None, records)], col_max=30)


def _in_one_line(text: str, formatter: click.HelpFormatter) -> str:
    """Return the beginning of a text that fits next to a name."""
    first = text.partition("; ")[0].partition(" (")[0]
    return textwrap.shorten(first, formatter.width - 34, placeholder=" ...")


def _help_on(topic: str, config_dir: Path | None, ctx: click.Context) -> str:
    """Return the help on a group, on a key and those below it, or on all `keys`.

    Raises:
        ConfigError: there is no such group or key.
    """
    formatter = ctx.make_formatter()
    groups, keys = keys_help.groups(config_dir), keys_help.keys()
    below = [key for name, key in keys.items() if topic in ("keys", name) or name.startswith(f"{topic}.")]
    if topic in groups:
        group = groups[topic]
        formatter.write_text(f"{topic}={group.default}: {group.help}.")
        if topic == "load_parallel":
            formatter.write_text("Its values are those of parallel.")
        elif described := [(name, text) for name, text in group.values.items() if text]:
            with formatter.section("Values"):
                formatter.write_dl(described, col_max=30)
        if undescribed := [name for name, text in group.values.items() if not text]:
            with formatter.section("Values"):
                formatter.write_text(", ".join(undescribed))
        if inside := [name for name in keys_help.keys_of_groups() if name.startswith(f"{topic}.")]:
            with formatter.section("Keys of each value"):
                formatter.write_text(", ".join(inside))
    if below:
        with formatter.section("Keys, with their defaults"):
            formatter.write_dl([(f"{key.name}={key.default}", key.full_help) for key in below], col_max=30)
    if not formatter.getvalue():
        known = choices(topic, [*groups, *keys])
        raise ConfigError(visible(f"--help {topic}: no such axis or key{known}"))
    return formatter.getvalue().strip("\n")
