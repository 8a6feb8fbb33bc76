"""Declare a key of the configuration: a field with its help, its least value, and whether it is part of a
cell's identity."""

from dataclasses import field
from typing import Any

from dcpbench.core.cell_key import HOW_RUN

MISSING: Any = "???"
"""The default of a key that needs a value: that of OmegaConf, which takes long to import."""
HELP, LEAST, OF_SAVING = "help", "least", "of_saving"
"""In the metadata of a field: its help; its least value; whether it concerns saving or loading alone."""


def key(
    default: Any, help: str = "", least: int | None = None, *, how_run: bool = False, of_saving: bool = False
) -> Any:
    """Return a field with its help and its least value. A default that is a class is called.

    A field that is `how_run` only affects how a cell runs; it is not part of the cell's identity.
    """
    metadata = {HELP: help, LEAST: least, HOW_RUN: how_run, OF_SAVING: of_saving}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def how_run(default: Any, help: str = "", least: int | None = None) -> Any:
    """Return a field that only affects how a cell runs; it is not part of the cell's identity."""
    return key(default, help, least, how_run=True)


def of_saving(default: Any, help: str = "", least: int | None = None, *, how_run: bool = False) -> Any:
    """Return a field that concerns saving or loading alone: cells that differ only in such fields train the
    same run."""
    return key(default, help, least, how_run=how_run, of_saving=True)
