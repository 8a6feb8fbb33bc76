"""What a driver is started in, or writes to, makes no verdict: one true line where something is wrong."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from conftest import ONE_STEP, dcpbench, run
from dcpbench.sweep.folder import manifest
from support.adversary import close_descriptors, fill_output, remove_folder

pytestmark = pytest.mark.slow

ONE = ("parallel=none", "world_size=1", "device=cpu", "saves=1", *ONE_STEP)
BRACKETS = "[red]a[/blue][b"
FULL = "standard output cannot be written to: No space left on device"


@pytest.mark.parametrize(
    ("prepare", "told"),
    [
        (close_descriptors, ""),
        (partial(fill_output, 1), FULL),
        (partial(fill_output, 2), ""),
    ],
    ids=["closed", "stdout full", "stderr full"],
)
def test_where_output_goes_makes_no_verdict(prepare: Callable[[], Any], told: str, tmp_path: Path) -> None:
    folder = tmp_path / BRACKETS
    ended = dcpbench(*ONE, f"hydra.sweep.dir='{folder}'", folder=folder, cwd=tmp_path, prepare=prepare)
    assert ended.status == 0, ended.err
    assert [row["status"] for row in ended.rows] == ["pass"]
    assert {"results.csv", "report.html", "junit.xml"} <= {path.name for path in folder.iterdir()}
    assert told in ended.err.splitlines() or not told
    assert "Traceback" not in ended.err


def test_a_folder_that_is_gone_is_told_in_a_line(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    ended = run(tmp_path / "sweep", *ONE, cwd=gone, prepare=remove_folder)
    assert (ended.status, ended.out) == (2, "")
    assert ended.err == "dcpbench: the folder that this was started in is gone: change to another\n"


def test_going_on_with_what_somebody_else_made_is_refused_and_imports_nothing(tmp_path: Path) -> None:
    """Neither what the record names nor what lies in its folder by the name of a module."""
    there, sweep, ran = tmp_path / "there", tmp_path / "sweep", tmp_path / "ran"
    there.mkdir()
    sweep.mkdir()
    for module in ("selectors", "torch", "evil"):
        (there / f"{module}.py").write_text(f"open({str(ran)!r}, 'w')\n")
    words = [*ONE, "model.target=evil.Model"]
    record = manifest.Record(words, str(there), [",".join(ONE)], [])
    (sweep / "sweep.json").write_text(json.dumps({**vars(record), "signature": "0" * 64}))
    for more in ([], ["plan=true"], [*ONE]):
        ended = dcpbench(*more, f"resume={sweep}", folder=sweep, cwd=tmp_path)
        assert (ended.status, ended.out) == (2, "")
        assert "is not signed with this user's key" in ended.err
        assert f"model.target=evil.Model` in {there}; if you want that, add trust=true" in ended.err
        assert ended.err.count("\n") == 1
    planned = dcpbench("plan=true", "trust=true", f"resume={sweep}", folder=sweep, own_process=True)
    assert "is another matrix" in planned.err, "it was composed"
    assert not ran.exists(), "and the fork server has imported nothing from there"
    alone = run(tmp_path / "new", *ONE, "trust=true")
    assert alone.status == 2
    assert "trust=true: says what to do with resume=<folder>" in alone.err
