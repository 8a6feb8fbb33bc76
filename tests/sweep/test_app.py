"""The end of a sweep that did not begin."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from dcpbench.executors import fork_server
from dcpbench.sweep.app import SweepRun


@pytest.mark.parametrize(("begun", "ended"), [(False, 1), (True, 0)])
def test_fork_server_of_a_refused_sweep_is_ended(
    begun: bool, ended: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would go on importing torch, with the pipes of the driver open."""
    calls: list[Any] = []
    monkeypatch.setattr(fork_server, "end_server", lambda: calls.append("ended"))
    monkeypatch.setattr("dcpbench.sweep.app.close", lambda *_: 0)
    run = SweepRun.__new__(SweepRun)
    run._planned, run._driver = 0, SimpleNamespace() if begun else None  # type: ignore[assignment]
    run.folder = SimpleNamespace(release=nullcontext)  # type: ignore[assignment]
    run.end(2, began=0.0)
    assert len(calls) == ended
