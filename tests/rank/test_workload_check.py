"""A user's `workload.target` is checked before a cell starts."""

import re
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

from dcpbench.config.schema import Config
from dcpbench.rank.user_errors import user_line
from dcpbench.rank.workload_check import errors_of_cells, why_unusable
from support.alone import config

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

def build(width=1): ...
def build_trainer(setup): ...
def sized(width): ...
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
            "cannot be called as build(setup, width=...): multiple values for argument 'width'; leave out "
            "checkpointer=trainer",
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
    monkeypatch.syspath_prepend(tmp_path)
    assert why_unusable(target, options, own_trainer) == why


BUILDS = """
import torch
import torch.distributed as dist
from torch import nn
from dcpbench.api import Workload

builds = []

def batch(generator):
    return torch.rand(8, 4, generator=generator)

def loss(model, share):
    return model(share).mean()

def build(model=None, batch=batch, **fields):
    builds.append(model)
    return Workload(model or nn.Linear(4, 4), batch, loss, **fields)

def raises(): raise KeyError("data.bin")
def exits(): raise SystemExit(3)
def forgets(): return Workload(nn.Linear(4, 4))
def returns_none(): return None
def no_module(): return build(model=loss)
def lazy(): return build(nn.Sequential(nn.LazyLinear(4)))
def small(): return build(batch=lambda generator: batch(generator)[:2])
def unknown(): return build(batch=lambda generator: {"x": object()})
def raises_in_batch(): return build(batch=lambda generator: batch(generator)[9])

def raises_in_share():
    def share(batch, number, of):
        raise ValueError("cannot")
    return build(share=share)

def asks_for_ranks():
    assert (dist.get_rank(), dist.get_world_size()) == (0, 3)
    return build()

def needs_ranks():
    dist.new_group([0, 7])
    return build()
"""


def of_target(name: str, world_size: int = 3) -> Config:
    return config(workload={"target": f"built.{name}"}, parallel="ddp", world_size=world_size)


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "built.py").write_text(BUILDS)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("built", None)


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("build", None),
        ("asks_for_ranks", None),
        ("needs_ranks", None),
        ("raises", "built.raises: KeyError: 'data.bin' (built.py:19)"),
        ("exits", "built.exits: SystemExit: 3 (built.py:20)"),
        ("forgets", r"built.forgets: TypeError: Workload.__init__() missing .*'batch' (built.py:21)"),
        ("returns_none", "built.returns_none: returned a NoneType; must return a dcpbench.api.Workload"),
        ("no_module", "built.no_module: model is a function; pass a torch.nn.Module"),
        ("lazy", "built.lazy: model: 0.weight has no shape before the first forward pass .*"),
        ("small", "built.small: batch(generator): 2 samples for 3 shares: each needs one; shapes (2, 4)"),
        ("unknown", "built.unknown: batch(generator) contains a object, .*"),
        ("raises_in_batch", "built.raises_in_batch: IndexError: .* (built.py:27)"),
        ("raises_in_share", "built.raises_in_share: ValueError: cannot (built.py:31)"),
    ],
)
def test_workloads_are_built_before_ranks_start(target: str, why: str | None, built: None) -> None:
    (found,) = errors_of_cells([of_target(target)])
    if why is None:
        assert found is None
    else:
        pattern = f"workload.target={re.escape(why)}".replace(re.escape(".*"), ".*")
        assert re.fullmatch(pattern, str(found)), found


def test_each_workload_is_built_once(built: None) -> None:
    several = config(workload={"target": "built.build"}, parallel="fsdp2", world_size=3)
    assert [*errors_of_cells([of_target("build"), several])] == [None, None]
    assert len(sys.modules["built"].builds) == 1


def test_user_line_skips_installed_code() -> None:
    """An error in torch comes from the user's line that calls it; one of dcpbench alone from no line."""
    with pytest.raises(RuntimeError) as raised:
        torch.matmul(torch.zeros(2), torch.zeros(3))
    assert user_line(raised.value) == f"test_workload_check.py:{raised.traceback[0].lineno + 1}"
    error = raised.value.with_traceback(None)
    frames = [traceback.FrameSummary(file, 7, "f") for file in (__file__, torch.__file__, "<string>")]
    assert user_line(error, frames) == "test_workload_check.py:7", "of an exception on another rank"
    assert user_line(error, frames[1:]) is None
