"""Stops that signal processes, that have a run of their own, and files that a power loss cannot cut."""

import contextlib
import io
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from conftest import dcpbench
from dcpbench.plugins.script import run, script
from plugins.script.runs import Writer, run_of

LOOP = """
import os, signal, sys, torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
out, *words = sys.argv[1:]
if "RANK" in os.environ:
    dist.init_process_group("gloo")
is_ending = []

def fail(*_):
    raise RuntimeError("timed out")

if "impatient" in words:  # as a collective with a short timeout: it fails when it continues
    signal.signal(signal.SIGCONT, fail)
if "unhandled" not in words:
    signal.signal(signal.SIGTERM, lambda *_: is_ending.append(1))
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters(), 0.1)
path, start = f"{out}/last.pt", 0
if os.path.exists(path):
    state = torch.load(path)
    model.load_state_dict(state["model"])
    if "no_optimizer" not in words:
        optimizer.load_state_dict(state["optimizer"])
    start = state["step"]
data = TensorDataset(torch.randn(12, 4, generator=torch.Generator().manual_seed(1)))
ignore = (lambda _: signal.signal(signal.SIGTERM, signal.SIG_IGN)) if "ignore" in words else None
workers = int("workers" in words)
loader = DataLoader(data, num_workers=workers, worker_init_fn=ignore, generator=torch.Generator())
for step, (batch,) in enumerate(loader, 1):
    if step <= start:
        continue
    model(batch).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.is_initialized():
        dist.barrier()
    if (step % 4 == 0 or is_ending) and int(os.environ.get("RANK", 0)) == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        if is_ending and "full" in words:
            raise OSError("no space left")
        with open(f"{path}.tmp", "wb") as file:
            torch.save(state, file)
            if "sync" in words:
                file.flush()
                os.fsync(file.fileno())
        os.replace(f"{path}.tmp", path)
    if is_ending:
        break
"""


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return the rows of stops of the loop, in forks of this process, and the progress that is printed."""
    from .forked import ForkedCommand

    monkeypatch.setattr(script, "ScriptCommand", ForkedCommand)
    monkeypatch.setattr(script, "_LEAST_LIMIT_S", 60.0)
    monkeypatch.chdir(tmp_path)
    Path("loop.py").write_text(LOOP)

    def rows(stops: Sequence[str], *words: str) -> tuple[list[dict[str, Any]], str]:
        out, progress = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(progress):
            script.main(["python", "loop.py", "{out}", *words], stops, grace=20, folder="x", as_json=True)
        return json.loads(out.getvalue()), progress.getvalue()

    return rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stop", "words", "verdict", "reason"),
    [
        ("term@7", "workers ignore", "exact", ""),
        ("term@7", "workers", "older", "no save followed: RuntimeError('DataLoader worker"),
        ("term@7", "full", "older", "no save followed: OSError"),
        ("term@7", "workers unhandled", "exact", "from step 4"),
        ("rank1@7", "", "not_reached", "there is no such rank: 1 rank, from 0"),
        ("torn@last.pt:4", "sync", "not_reached", "last.pt was synced before it was published"),
        ("torn@last.pt:4", "", "refuses", "not a zip archive: cut"),
    ],
)
def test_stop(stop: str, words: str, verdict: str, reason: str, checked: Callable[..., Any]) -> None:
    ((row,), _) = checked([stop], *words.split())
    assert (row["verdict"], reason in str(row["reason"])) == (verdict, True), row["reason"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "verdict"), [("", "exact"), ("no_optimizer", "diverges")], ids=["right", "wrong"]
)
@pytest.mark.parametrize("way", ["large", "impatient"])
def test_stops_with_own_runs(
    way: str, words: str, verdict: str, checked: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies would take too long, or the frozen run fails: they have the verdicts of copies."""
    stops = ("write@last.pt:3", "kill@11")
    if way == "large":
        monkeypatch.setattr(run, "_LARGEST_COPY", 0)
    rows, progress = checked(stops, way, *words.split())
    assert [(row["verdict"], row["loaded_step"]) for row in rows] == [(verdict, 4), (verdict, 8)], progress
    assert [f"{stop}: a run of its own" in progress for stop in stops] == [True, True]
    assert ("it failed, so each stop has a run of its own" in progress) == (way == "impatient")


@pytest.mark.slow
def test_frozen_run_fails_after_a_reference(checked: Callable[..., Any]) -> None:
    """At default stops, of which the first is reached: none is left out."""
    rows, progress = checked((), "impatient")
    assert [row["verdict"] for row in rows] == ["exact"] * 4, progress
    assert progress.count(": a run of its own") == 4


@pytest.mark.slow
def test_resume_by_the_launcher(tmp_path: Path) -> None:
    """It is judged, and no other resume is made of a run that its launcher has resumed."""
    (tmp_path / "loop.py").write_text(LOOP)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "--max-restarts=1"]
    ended = dcpbench(
        "script", "--dir=x", "--json", "--stop=rank0@7",
        "--", sys.executable, *launch, "loop.py", "{out}", "no_optimizer",
        folder=tmp_path / "x", own_process=True,
    )  # fmt: skip
    (row,) = json.loads(ended.out)
    assert (row["verdict"], row["loaded_step"]) == ("diverges", 4), row["reason"]
    assert "its launcher resumed it" in ended.err
    assert list((tmp_path / "x").rglob("resumed.log")) == []


@pytest.mark.parametrize(
    ("changes", "synced"),
    [
        ("open:a sync:a rename:a>b", True),
        ("open:a rename:a>b sync:b", False),
        ("open:a rename:a>b", False),
        ("open:b sync:b", False),
        ("open:b sync:b open:latest", True),
        ("open:b sync: open:latest", True),
        ("open:b sync:b open:b rename:c>d", False),
        ("open:t/x sync:t/x rename:t>b", True),
    ],
)
def test_synced_before_it_was_published(changes: str, synced: bool) -> None:
    writer = Writer()
    for change in changes.split():
        kind, _, names = change.partition(":")
        path, _, to = names.partition(">")
        writer.event(kind, path=path, to=to or None)
    writer.event("stop", path="b/x" if "/" in changes else "b")
    stopped = run_of(writer)
    assert stopped.synced(stopped.events[-1]) is synced
