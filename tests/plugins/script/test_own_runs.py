"""Stops that have a run of their own: copies would take too long, or the frozen run fails."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from dcpbench.plugins.script import run, script

pytestmark = pytest.mark.slow

LOOP = """
import os, signal, sys, torch
out, *words = sys.argv[1:]

def fail(*_):
    raise RuntimeError("timed out")

if "impatient" in words:  # as a collective with a short timeout: it fails when it continues
    signal.signal(signal.SIGCONT, fail)
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters(), 0.1)
path, step = f"{out}/last.pt", 0
if os.path.exists(path):
    state = torch.load(path)
    model.load_state_dict(state["model"])
    if "no_optimizer" not in words:
        optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
while step < 12:
    model(torch.randn(3, 4, generator=torch.Generator().manual_seed(step))).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step % 4 == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, f"{path}.tmp")
        os.replace(f"{path}.tmp", path)
"""
STOPS = ("write@last.pt:3", "kill@11")


def checked(folder: Path, stops: tuple[str, ...], *words: str) -> tuple[list[dict[str, Any]], str]:
    """Return the rows of stops of the loop, in forks of this process, and the progress that is printed."""
    Path("loop.py").write_text(LOOP)
    out, progress = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(progress):
        script.main(["python", "loop.py", "{out}", *words], stops, folder=str(folder), as_json=True)
    return json.loads(out.getvalue()), progress.getvalue()


@pytest.fixture(autouse=True)
def forks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run commands in forks of this process, in an empty folder."""
    from .forked import ForkedCommand

    monkeypatch.setattr(script, "ScriptCommand", ForkedCommand)
    monkeypatch.setattr(script, "_LEAST_LIMIT_S", 60.0)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "verdict"), [((), "exact"), (("no_optimizer",), "diverges")], ids=["right", "wrong"]
)
@pytest.mark.parametrize("way", ["large", "impatient"])
def test_stops_with_own_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, words: tuple[str, ...], verdict: str
) -> None:
    """They have the verdicts of copies: from the checkpoint of step 4, and from that of step 8."""
    if way == "large":
        monkeypatch.setattr(run, "_LARGEST_COPY", 0)
    rows, progress = checked(tmp_path / "results", STOPS, way, *words)
    assert [(row["verdict"], row["loaded_step"]) for row in rows] == [(verdict, 4), (verdict, 8)], progress
    assert [f"{stop}: a run of its own" in progress for stop in STOPS] == [True, True]
    assert ("it failed, so each stop has a run of its own" in progress) == (way == "impatient")


def test_frozen_run_fails_after_a_reference(tmp_path: Path) -> None:
    """At default stops, of which the first is reached: none is left out."""
    rows, progress = checked(tmp_path / "results", (), "impatient")
    assert [row["verdict"] for row in rows] == ["exact"] * 4, progress
    assert progress.count(": a run of its own") == 4
