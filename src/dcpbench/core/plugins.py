"""The door: the contract between dcpbench and its plug-ins, and the list of plug-ins that are installed.

A plug-in is a module with a value `plugin = Plugin(...)`: `plugin.py` in a folder of `dcpbench/plugins/`, or
a module of another package, named by an entry point (group `dcpbench`) or in `DCPBENCH_PLUGINS` (separated by
commas). All have the same rights. The module is imported whenever dcpbench starts, by the driver, its ranks
and the report. It imports `dcpbench.core` alone, and names everything else as `package.module:name`, which is
imported where it is used: the driver has no torch.
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
from typing import Any

from dcpbench.core.axes import AxisSpec, register_axis
from dcpbench.core.checks import CheckSpec, register_check
from dcpbench.core.metrics import MetricSpec, register_metric
from dcpbench.core.moved import MOVED

API = 1
"""The version of this contract. It is raised when plug-ins written for the previous one may not work."""


class PluginError(Exception):
    """A plug-in cannot be used: one line that names it."""


@dataclass(frozen=True)
class CommandSpec:
    """A command of the command line.

    Args:
        summary: a phrase for the list of commands.
        target: `package.module:name` of a `click.Command`, imported when the command is run or its help is
            shown.
        example: a line for the examples of the help, and what it is for.
    """

    summary: str
    target: str
    example: tuple[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class Plugin:
    """Everything that a plug-in adds. What it names as `package.module:name` is imported where it is used.

    Args:
        name: how experiments, known failures and messages call it; in the tree, the name of its folder.
        api: the version of this contract that it was written for.
        conf: a folder laid out like `conf/`. Values of groups (scenario, executor, …) name their code as
            `target`. Files in `experiment/<name>/` are added to `experiment=<name>`.
        axes: axes, each a key, null unless it is set, and a column.
        checks: checks, each a column.
        metrics: metrics, each a column.
        values: values of groups that are declared in Python: by group, a function without arguments that
            returns the configuration of each value by its name.
        resolvers: OmegaConf's resolvers, by name: functions.
        faults: modules that declare faults when they are imported.
        known_failures: a YAML file whose entries are added to those of `conf/known_failures.yaml`.
        defects: recomputations, by the name that a known failure has in `by`: a `Defect` each.
        commands: commands, by name.
        sections: sections of the page: functions of a frame of rows that return a heading and a table, or
            None where there is nothing to show.
        trackers: trackers for `dcpbench log`, by name: modules.
        built: functions `(cell, run)`, called on each rank with each run that was built.
        checkpointers: functions `(cell, checkpointer)`, called on each rank with what saves and loads there.
        preload: modules that ranks use, imported before they are forked.
        moved: its modules that were elsewhere, by the names that they had first: their names now.
    """

    name: str
    api: int
    conf: Path | None = None
    axes: tuple[AxisSpec, ...] = ()
    checks: tuple[CheckSpec, ...] = ()
    metrics: tuple[MetricSpec, ...] = ()
    values: Mapping[str, str] = field(default_factory=dict)
    resolvers: Mapping[str, str] = field(default_factory=dict)
    faults: tuple[str, ...] = ()
    known_failures: Path | None = None
    defects: Mapping[str, str] = field(default_factory=dict)
    commands: Mapping[str, CommandSpec] = field(default_factory=dict)
    sections: tuple[str, ...] = ()
    trackers: Mapping[str, str] = field(default_factory=dict)
    built: tuple[str, ...] = ()
    checkpointers: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()
    moved: Mapping[str, str] = field(default_factory=dict)


def plugin_names() -> list[str]:
    """Return the names of the modules that are plug-ins here, each once: those of this tree first."""
    named = [name.strip() for name in os.environ.get("DCPBENCH_PLUGINS", "").split(",")]
    return list(dict.fromkeys([*_installed(), *filter(None, named)]))


@cache
def _installed() -> list[str]:
    folder = Path(__file__).resolve().parents[1] / "plugins"
    here = [f"dcpbench.plugins.{path.parent.name}.plugin" for path in sorted(folder.glob("*/plugin.py"))]
    return [*here, *(entry.module for entry in entry_points(group="dcpbench"))]


@cache
def _plugin(module: str) -> Plugin | None:
    """Return the plug-in of a module; None for a module that only registers by being imported."""
    try:
        plugin = getattr(importlib.import_module(module), "plugin", None)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        raise PluginError(f"plug-in {module} cannot be imported: {text}") from error
    if plugin is not None and not isinstance(plugin, Plugin):
        raise PluginError(f"plug-in {module}: its `plugin` must be a dcpbench.core.plugins.Plugin")
    if plugin is not None and plugin.api != API:
        raise PluginError(f"plug-in {module}: it is for version {plugin.api} of the contract, not for {API}")
    MOVED.update(plugin.moved if plugin else {})
    return plugin


def plugins() -> list[Plugin]:
    """Return every plug-in.

    Raises:
        PluginError: one of them cannot be imported, or is for another version of the contract.
    """
    return [plugin for module in plugin_names() if (plugin := _plugin(module))]


def declared_values() -> dict[str, Mapping[str, Any]]:
    """Return the values of groups that plug-ins declare in Python: by group, the configurations by name."""
    found: dict[str, Mapping[str, Any]] = {}
    for plugin in plugins():
        for group, target in plugin.values.items():
            found[group] = {**found.get(group, {}), **pkgutil.resolve_name(target)()}
    return found


def load_plugins() -> None:
    """Import every plug-in, and register the axes, checks and metrics that they declare.

    Raises:
        PluginError: as `plugins`.
    """
    for plugin in plugins():
        for axis in plugin.axes:
            register_axis(axis)
        for check in plugin.checks:
            register_check(check)
        for metric in plugin.metrics:
            register_metric(metric)


def all_of(named: Callable[[Plugin], tuple[str, ...]]) -> Iterator[Any]:
    """Import and return what the plug-ins name in a field: `all_of(lambda plugin: plugin.built)`."""
    return (pkgutil.resolve_name(target) for plugin in plugins() for target in named(plugin))


@cache
def report_absent(plugin: str, asked_by: str) -> None:
    """Report on stderr, once, that something asks for a plug-in that is not here."""
    sys.stderr.write(f"dcpbench: plug-in {plugin} is absent: {asked_by}\n")
