"""The sequences of `checkpointers/test_model_of_checkpoints.py`, with saves that are killed."""

import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test

from checkpointers.test_model_of_checkpoints import KEYS, Checkpoints, settings_of
from dcpbench.plugins.crash.disk_states import Crash, disk_states
from dcpbench.plugins.crash.recording import read_record, recording
from support import plain_steps
from support.gloo_ranks import Ask


class KilledCheckpoints(Checkpoints):
    @rule(target=Checkpoints.broken, which=st.integers(0, 50))
    def kill(self, which: int) -> Any:
        """Kill a save at some point before its metadata exists."""
        states = [one for one in _killed_saves(self._step) if ".metadata" not in one]
        files = states[which % len(states)]
        self._call("lay_out", folder=(name := self._new()), files=files)
        return name


@cache
def _killed_saves(step: int) -> list[dict[str, bytes]]:
    """Return the files after each point at which a save of one process can be killed."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
        saved, logs, before = (Path(folder) / name for name in ("saved", "logs", "before"))
        for path in (saved, logs, before):
            path.mkdir()
        state = {"model": {key: plain_steps.values(step, key) for key in KEYS}, "step": step}
        with recording(saved, logs, 0):
            dcp.save(state, checkpoint_id=saved / "new", no_dist=True)
        states = disk_states(read_record(before, logs, 1), 0, 0)
        trees = [one.tree for one in states if one.crash is Crash.killed and "new" in one.tree]
    return [
        {path.removeprefix("new/"): content for path, content in tree.items() if content is not None}
        for tree in trees
    ]


def test_files_of_a_killed_save_are_not_loaded(ask: Ask) -> None:
    ask(plain_steps.prepare)
    run_state_machine_as_test(lambda: KilledCheckpoints(ask), settings=settings_of(5, 12))
