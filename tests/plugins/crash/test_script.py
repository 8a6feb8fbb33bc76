"""A violation is written as a script in plain torch, which reproduces it."""

import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter

from dcpbench.plugins.crash.disk_states import Crash, disk_states
from dcpbench.plugins.crash.loading import Judge, Loaded
from dcpbench.plugins.crash.script import Shown, plain_script
from dcpbench.plugins.crash.small_saves import smallest
from dcpbench.plugins.crash.survey import StateKind, survey
from plugins.crash.crashes import NEW, OLD, loading, names, recorded, recorded_on_ranks
from support.gloo_ranks import Ask

FILES_OF_TENSORS = {"single_file_per_rank": False}
KILLED_MIXTURE, KILLED_REFUSED = (
    StateKind(Crash.killed, False, to) for to in (Loaded.mixture, Loaded.refused)
)


@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        (KILLED_MIXTURE, "loaded values of the steps {'a': [2.0], 'b': [1.0], 'step': [1.0]}"),
        (KILLED_REFUSED, "refused: CheckpointException"),
    ],
    ids=str,
)
def test_script_reproduces_the_state(
    kind: StateKind, shown: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = recorded(partial(FileSystemWriter, **FILES_OF_TENSORS), same_folder=True)
    with loading() as loader:
        found = survey(disk_states(record, 0, 0), loader, Judge(NEW, OLD), names(same_folder=True))
    state = Shown(found.simplest[kind], record, NEW)
    script = tmp_path / "script.py"
    script.write_text(plain_script(str(kind), state, "checkpoint", FILES_OF_TENSORS))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 1
    assert shown in capsys.readouterr().out


@pytest.mark.slow
def test_script_of_several_ranks_reproduces_the_state(ask: Ask, tmp_path: Path) -> None:
    """One of two ranks has written its part of the values when both are killed."""
    with recorded_on_ranks(ask, FileSystemWriter, same_folder=True) as record, loading() as loader:
        found = survey(disk_states(record, 0, 0), loader, Judge(NEW, OLD), names(same_folder=True))
    text = plain_script("", Shown(found.simplest[KILLED_MIXTURE], record, NEW), "checkpoint", {})
    assert "RANKS = 2" in text
    (script := tmp_path / "script.py").write_text(text)
    words = [sys.executable, "-W", "ignore", script]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1, ended.stderr
    assert "loaded values of the steps" in ended.stdout
    assert "[1.0]" in ended.stdout
    assert "[2.0]" in ended.stdout


@pytest.mark.parametrize(
    ("kind", "options", "values"),
    [
        (KILLED_REFUSED, {}, 1),
        (KILLED_MIXTURE, FILES_OF_TENSORS, 2),
        (KILLED_MIXTURE, {}, None),
    ],
    ids=["refused", "mixture", "mixture of one file"],
)
def test_state_is_reproduced_by_the_smallest_save(
    kind: StateKind, options: dict[str, Any], values: int | None
) -> None:
    """A mixture in one file per rank needs several ranks, so no small save reproduces it."""
    like = NEW | {f"layer.{number}": torch.ones(64, 32) for number in range(20)}
    found = smallest([kind], like, options, names(same_folder=True))
    assert {one: len(shown.like) for one, shown in found.items()} == ({kind: values} if values else {})
