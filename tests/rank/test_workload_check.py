"""A user's `workload.target` is checked before a cell starts."""

import traceback
from pathlib import Path

import pytest
import torch

from dcpbench.rank.user_errors import user_line
from dcpbench.rank.workload_check import why_unusable

MODULE = """
import torch
from dcpbench.api import Workload
number = 3

class Model(torch.nn.Linear): ...

class Trainer:
    def __init__(self, setup, lr=1): ...
    def step(self): ...
    def save(self, path): ...
    def load(self, path): ...

class Small(Workload): ...

def build(width=1): raise RuntimeError("it was called")
def build_trainer(setup): raise RuntimeError("it was called")
"""

PARSING = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--lr", required=True)
parser.parse_args([])
"""


@pytest.mark.parametrize(
    ("target", "options", "own_trainer", "why"),
    [
        ("checked.build", {}, False, None),
        ("checked.build", {"width": 2}, False, None),
        ("checked.Trainer", {"lr": 2}, True, None),
        ("checked.build_trainer", {}, True, None),
        ("checked.Small", {"model": 1, "batch": 2, "loss": 3}, False, None),
        ("checked", {}, False, "is a module; name a function in it, such as checked.build"),
        ("checked.number", {}, False, "is of type int; name a function"),
        ("checked.Model", {}, False, "returns a Model; must return a dcpbench.api.Workload"),
        ("checked.Trainer", {}, False, "is a trainer; add checkpointer=trainer"),
        (
            "checked.build_trainer",
            {},
            False,
            "cannot be called as build_trainer(): missing a required argument: 'setup'; if it is a trainer, "
            "add checkpointer=trainer",
        ),
        (
            "checked.build",
            {"widht": 2},
            False,
            "cannot be called as build(widht=...): got an unexpected keyword argument 'widht'; set its "
            "arguments in workload.options",
        ),
        (
            "checked.build",
            {"width": 2},
            True,
            "cannot be called as build(setup, width=...): multiple values for argument 'width'; if it "
            "returns a Workload, leave out checkpointer=trainer; a trainer is a class with step, save and "
            "load (docs/tutorials/own-trainer.md, also from a train.py)",
        ),
        (
            "parsing.main",
            {},
            False,
            "cannot be imported: SystemExit: 2: your code ended the process; it has no command line to "
            "parse, so pass workload.options",
        ),
        (
            "checked.biuld",
            {},
            False,
            "cannot be imported: AttributeError: module 'checked' has no attribute 'biuld'; did you mean "
            "build?",
        ),
        ("nowhere.build", {}, False, "cannot be imported: ModuleNotFoundError: No module named 'nowhere'"),
    ],
)
def test_unusable_targets_are_explained(
    target: str,
    options: dict[str, object],
    own_trainer: bool,
    why: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "checked.py").write_text(MODULE)
    (tmp_path / "parsing.py").write_text(PARSING)
    monkeypatch.syspath_prepend(tmp_path)
    assert why_unusable(target, options, own_trainer) == why


def test_user_line_skips_installed_code() -> None:
    """An error in torch comes from the user's line that calls it; one of dcpbench alone from no line."""
    with pytest.raises(RuntimeError) as raised:
        torch.matmul(torch.zeros(2), torch.zeros(3))
    assert user_line(raised.value) == f"test_workload_check.py:{raised.traceback[0].lineno + 1}"
    error = raised.value.with_traceback(None)
    frames = [traceback.FrameSummary(file, 7, "f") for file in (__file__, torch.__file__, "<string>")]
    assert user_line(error, frames) == "test_workload_check.py:7", "of an exception on another rank"
    assert user_line(error, frames[1:]) is None
