"""What all commands have in common: how they are found, what their help looks like, how they are run."""

import importlib
import pkgutil
import signal
from typing import Any, cast

import click
from click.shell_completion import CompletionItem

from dcpbench.cli import completion, described
from dcpbench.core.plugins import plugins

PURPOSE = """\
Does a checkpoint resume exactly, what does it cost, and what changed since last night? dcpbench runs a
matrix of cells: each trains a model under a parallelism on real ranks, saves with PyTorch Distributed
Checkpoint, loads, verifies bit for bit, trains on, and writes one row.

Overrides without a command (dcpbench -m parallel=fsdp,hsdp) are a run.
"""
_EXAMPLES = (
    ("dcpbench run parallel=fsdp2 device=cpu", "one cell"),
    ("dcpbench run parallel=fsdp,hsdp compile=true,false", "four cells"),
    ("dcpbench plan experiment=nightly", "what it would do"),
    ("dcpbench resume outputs/<sweep>", "go on with it"),
    ("dcpbench report outputs/<sweep> --where status!=pass", "what did not pass"),
    ("dcpbench compare outputs/<old> outputs/<new>", "what changed"),
    ("dcpbench doctor", "can it run here?"),
)
_RUN_EXAMPLES = (
    ("dcpbench run parallel=fsdp save=async", "one cell"),
    ("dcpbench run parallel=fsdp,hsdp save=sync,async", "four: the product of lists"),
    ("dcpbench run experiment=seeds", "a sweep, written down"),
    ("dcpbench run parallel=fsdp_tp parallel.tp=4", "a key of a group"),
    ("dcpbench run model=mine --config-dir my_conf", "my_conf/model/mine.yaml"),
    ("dcpbench run parallel=fsdp --cfg job", "print the configuration"),
)


class Tree(click.Group):
    """The commands; overrides without one are a run."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        asks = args and args[0] in (*described.commands(), "-h", "--help", "--version", "--completion")
        if args and not asks and not args[0].startswith("-") and "=" not in args[0]:
            raise click.UsageError(described.instead_of(args[0], args))
        if not asks and (args or not ctx.resilient_parsing):
            args = ["run", *args]
        return super().parse_args(ctx, args)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        found = super().shell_complete(ctx, incomplete)
        return found or completion.override(ctx, None, incomplete)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*described.commands()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        added = {name: spec.target for plugin in plugins() for name, spec in plugin.commands.items()}
        if cmd_name in added and cmd_name not in self.commands:
            return cast("click.Command", pkgutil.resolve_name(added[cmd_name]))
        return super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([*described.commands().items()])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Examples"):
            added = (spec.example for plugin in plugins() for spec in plugin.commands.values())
            formatter.write_dl([*_EXAMPLES, *filter(None, added)], col_max=60)
        with formatter.section("More"):
            formatter.write_dl(
                [
                    ("dcpbench run --help", "every axis, its values, every key"),
                    ("dcpbench COMMAND --help", "the options of a command"),
                    ('eval "$(dcpbench --completion bash)"', "completion, in ~/.bashrc; zsh likewise"),
                ],
                col_max=60,
            )


class Command(click.Command):
    """A command that `module.main` does with what was asked for; `module.epilog()` ends its help, if there
    is one."""

    module = ""

    def invoke(self, ctx: click.Context) -> Any:
        module = importlib.import_module(self.module)
        # Until here Ctrl-C just ended the process; from here on what is under way is cleaned up.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return module.main(**ctx.params)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        epilog = getattr(importlib.import_module(self.module), "epilog", None)
        if epilog:
            formatter.write("\n")
            for paragraph in epilog().split("\n\n"):
                formatter.write_text(" ".join(paragraph.split()))
                formatter.write("\n")


def command(name: str, module: str, help: str, *params: click.Parameter) -> Command:
    """Make a command that `module.main` does with these parameters."""
    made = Command(name, params=[*params], help=help)
    made.module = module
    return made


class Run(click.Command):
    """A command whose overrides Hydra reads."""

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        folder = "FOLDER " if self.name == "resume" else ""
        formatter.write_usage(ctx.command_path, f"{folder}[KEY=VALUE[,VALUE...]]... [OPTIONS]")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write("\n")
        if self.name != "run":
            formatter.write_text(
                "dcpbench run --help tells every axis, its values, every key and the options."
            )
            own = [one.get_help_record(ctx) for one in self.params if isinstance(one, click.Option)]
            if own:
                with formatter.section("Options"):
                    formatter.write_dl([*filter(None, own)])
            return
        there = described.described(ctx.params["overrides"])
        with formatter.section("Examples"):
            formatter.write_dl(_RUN_EXAMPLES, col_max=60)
        formatter.write("\n")
        formatter.write_text("Axes, with their defaults and their values, of which a list has one cell each:")
        for axis in there.axes.values():
            formatter.write("\n")
            formatter.write_text(f"{axis.name}={axis.default}: {axis.text}")
            with formatter.indentation():
                told = (
                    {} if axis.name == "load_parallel" else {one: it for one, it in axis.values.items() if it}
                )
                if told:
                    formatter.write_dl([*told.items()], col_max=24)
                if others := [one for one in axis.values if one not in told]:
                    formatter.write_text(", ".join(others))
        with formatter.section("Keys, with their defaults"):
            formatter.write_dl(
                [(f"{key.name}={key.default}", key.help) for key in there.keys.values()], col_max=26
            )
        options = described.OPTIONS.items()
        named = ((f"{names} {value or ''}".strip(), text) for names, (value, text) in options)
        with formatter.section("Options"):
            formatter.write_dl([*named, ("-h, --help", "this")], col_max=28)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        return [*super().shell_complete(ctx, incomplete), *completion.options(incomplete)]
