"""The contract between dcpbench and its plug-ins, and the search for installed plug-ins.

A plug-in is a module that defines `plugin = Plugin(...)`. It is `plugin.py` in a folder of
`dcpbench/plugins/`, or a module of another package that is named by an entry point (group `dcpbench`) or in
`DCPBENCH_PLUGINS` (comma-separated). All have the same rights. The module is imported whenever dcpbench
starts, by the driver, the ranks and the report. It imports only `dcpbench.core` or `dcpbench.api`, and names
everything else as `package.module:name`, which is imported on first use, because the driver must not import
torch.
"""

import importlib
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, get_args

from dcpbench.core.axes import AXES, AxisSpec
from dcpbench.core.checks import CHECKS, CheckSpec
from dcpbench.core.metrics import METRICS, MetricSpec


@dataclass(frozen=True)
class TextSpec:
    """Declaration of a column of text, which no cell is identified by.

    >>> TextSpec("verdict", "the outcome, in one word").name
    'verdict'
    """

    name: str
    help: str


TEXTS: dict[str, TextSpec] = {}
"""Every column of text of a plug-in by name."""

ColumnSpec = AxisSpec | CheckSpec | MetricSpec | TextSpec
REGISTRIES: dict[str, dict[str, Any]] = {"axes": AXES, "checks": CHECKS, "metrics": METRICS, "texts": TEXTS}
"""The fields of a row that stand for a column of each name in a registry."""
_REGISTRY_OF = dict(zip(get_args(ColumnSpec), REGISTRIES.values(), strict=True))

API = 1
"""Version of this contract. It is increased when plug-ins for the previous version might not work."""


class PluginError(Exception):
    """A plug-in cannot be used. The message is one line that names it."""


@dataclass(frozen=True)
class CommandSpec:
    """Declaration of a command.

    >>> CommandSpec("Count rows.", "mine.commands:count").target
    'mine.commands:count'

    Args:
        summary: a sentence for the list of commands.
        target: `package.module:name` of a `click.Command`, imported to run the command or show its help.
        example: a command line for the help, and its purpose.
    """

    summary: str
    target: str
    example: tuple[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """Everything that a plug-in adds. Strings are `package.module:name`, imported on first use.

    >>> Plugin(name="mine", api=API, hooks={"run": "mine.hooks:log_parameters"}).commands
    {}

    Args:
        name: its name in experiments, known failures and messages; in the tree, the name of its folder.
        api: the version of this contract that it was written for.
        conf: a folder laid out like `conf/`. Values of groups (scenario, executor, …) name their code as
            `target`. Files in `experiment/<name>/` are added to `experiment=<name>`, the entries of
            `known_failures.yaml` to those of dcpbench.
        columns: axes, which are keys too (null by default), checks, metrics and texts.
        values: by group, a function without arguments that returns further values of the group: their
            configurations by name.
        defects: a `Defect` by the name that `by` of a known failure has.
        commands: commands by name.
        sections: sections of the page: functions that take a frame of rows and return a heading and a table,
            or None.
        hooks: `run` and `checkpointer`: a function `(cell, run)` or `(cell, checkpointer)`, called on each
            rank with each one that was built. `verdict`: a function `(config, verdict)` that returns the
            verdict on a cell, called by the driver.
        preload: modules that ranks use, imported before ranks are forked.
        public: what it adds to `dcpbench.api`, by name.
    """

    name: str
    api: int
    conf: Path | None = None
    columns: tuple[ColumnSpec, ...] = ()
    values: Mapping[str, str] = field(default_factory=dict)
    defects: Mapping[str, str] = field(default_factory=dict)
    commands: Mapping[str, CommandSpec] = field(default_factory=dict)
    sections: tuple[str, ...] = ()
    hooks: Mapping[str, str] = field(default_factory=dict)
    preload: tuple[str, ...] = ()
    public: Mapping[str, str] = field(default_factory=dict)


def plugin_names() -> list[str]:
    """Return the names of the modules of all plug-ins, those of this tree first."""
    named = [name.strip() for name in os.environ.get("DCPBENCH_PLUGINS", "").split(",")]
    return list(dict.fromkeys([*_installed(), *filter(None, named)]))


@cache
def _installed() -> list[str]:
    folder = Path(__file__).resolve().parents[1] / "plugins"
    here = [f"dcpbench.plugins.{path.parent.name}.plugin" for path in sorted(folder.glob("*/plugin.py"))]
    return [*here, *(entry_point.module for entry_point in entry_points(group="dcpbench"))]


@cache
def _plugin(module: str) -> Plugin:
    try:
        plugin = getattr(importlib.import_module(module), "plugin", None)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]:
            text += "; add its folder to PYTHONPATH"
        raise PluginError(f"plug-in {module} cannot be imported: {text}") from error
    if not isinstance(plugin, Plugin):
        raise PluginError(f"plug-in {module}: its `plugin` must be a dcpbench.core.plugins.Plugin")
    if plugin.api != API:
        raise PluginError(f"plug-in {module}: it is for version {plugin.api} of the contract, not for {API}")
    return plugin


def plugins() -> list[Plugin]:
    """Import and return every plug-in.

    Raises:
        PluginError: a plug-in cannot be imported, or is for another version of the contract.
    """
    return [_plugin(module) for module in plugin_names()]


def declared_values(group: str) -> dict[str, Any]:
    """Return the configurations of a group by name that plug-ins declare in Python (`Plugin.values`)."""
    values: dict[str, Any] = {}
    for plugin in plugins():
        if target := plugin.values.get(group):
            try:
                values |= pkgutil.resolve_name(target)()
            except ImportError as error:  # what it needs can be of a plug-in that is absent
                raise PluginError(f"plug-in {plugin.name}: {target} cannot be imported: {error}") from None
    return values


def commands_of_plugins() -> set[str]:
    """Return the names of all commands that plug-ins add."""
    return {name for plugin in plugins() for name in plugin.commands}


def load_plugins() -> None:
    """Import every plug-in and register its columns.

    Raises:
        PluginError: see `plugins`; or a name is declared twice.
    """
    for plugin in plugins():
        for spec in plugin.columns:
            if _REGISTRY_OF[type(spec)].setdefault(spec.name, spec) != spec:
                raise PluginError(f"plug-in {plugin.name}: {spec.name} is declared already")


def hooks(name: str) -> Iterator[Callable[..., Any]]:
    """Import and yield what plug-ins call with each `run`, `checkpointer` or `verdict`."""
    return (pkgutil.resolve_name(plugin.hooks[name]) for plugin in plugins() if name in plugin.hooks)


@cache
def report_absent(plugin: str, needed_by: str) -> None:
    """Report on stderr, once, that something needs a plug-in that is not installed."""
    sys.stderr.write(f"dcpbench: plug-in {plugin} is absent: {needed_by}\n")
