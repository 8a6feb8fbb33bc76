"""Declare a key of the configuration: a field with its help, its least value, and whether it is part of a
cell's identity."""

from dataclasses import field
from typing import Any

from dcpbench.core.cell_key import HOW_RUN

MISSING: Any = "???"
"""The default of a key that needs a value: that of OmegaConf, which takes long to import."""
HELP, LEAST = "help", "least"
"""In the metadata of a field: its help; its least value."""


def key(default: Any, help: str = "", least: int | None = None, *, how_run: bool = False) -> Any:
    """Return a field with its help and its least value. A default that is a class is called.

    A field that is `how_run` only affects how a cell runs; it is not part of the cell's identity.
    """
    metadata = {HELP: help, LEAST: least, HOW_RUN: how_run}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def how_run(default: Any, help: str = "", least: int | None = None) -> Any:
    """Return a field that only affects how a cell runs; it is not part of the cell's identity."""
    return key(default, help, least, how_run=True)
