"""Plug-ins: modules that declare metrics, checks and faults of their own when they are imported.

A module is one either through an entry point of an installed package (group `dcpbench`), or by its name in
the environment variable `DCPBENCH_PLUGINS` (names separated by commas). The driver, its ranks and the report
import them; the driver has no torch, so a plug-in should import it inside its functions.
"""

import importlib
import os
from importlib.metadata import entry_points


class PluginError(Exception):
    """A plug-in cannot be imported: one line that names it."""


def plugin_names() -> list[str]:
    """Return the names of the modules that are plug-ins here, each once."""
    named = [name.strip() for name in os.environ.get("DCPBENCH_PLUGINS", "").split(",")]
    modules = [*(entry.module for entry in entry_points(group="dcpbench")), *filter(None, named)]
    return list(dict.fromkeys(modules))


def load_plugins() -> list[str]:
    """Import every plug-in; the names of the modules.

    Raises:
        PluginError: one of them cannot be imported.
    """
    modules = plugin_names()
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            raise PluginError(f"plug-in {name} cannot be imported: {text}") from error
    return modules
