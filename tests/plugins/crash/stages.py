"""Variants of the stages of `scenario=crash`."""

import threading
from typing import Any
from unittest import mock

from dcpbench.cell.cell import Cell
from dcpbench.checkpointers.dcp import DcpCheckpointer
from dcpbench.plugins.crash import crash


def save_and_wait(cell: Cell, **options: Any) -> None:
    """Like `save_and_die`, with a save that is never notified that a peer has died."""
    original = DcpCheckpointer.save

    def save(self: DcpCheckpointer, *args: Any) -> Any:
        try:
            return original(self, *args)
        except BaseException:  # noqa: BLE001
            threading.Event().wait()

    with mock.patch.object(DcpCheckpointer, "save", save):
        crash.save_and_die(cell, **options)
