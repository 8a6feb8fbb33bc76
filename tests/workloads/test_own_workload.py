"""A user's model, data, loss and optimizer, with `workload.target`."""

import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from conftest import run
from dcpbench.config.groups import WorkloadConfig
from dcpbench.workloads.workload import Workload, adam, batches_of, workload_of
from support.alone import config, run_alone


def test_data_drawn_by_the_workload_is_the_same_after_a_restart() -> None:
    given = config(workload=WorkloadConfig("support.ordinary_workloads.drawn_when_built"))
    drawn = []
    for seed in (1, 2):  # of what was built before
        torch.manual_seed(seed)
        drawn.append(batches_of(given, torch.device("cpu")).at(3))
    assert torch.equal(*drawn)


@pytest.mark.slow
def test_target_whose_import_ends_the_process_is_refused_before_a_cell(tmp_path: Path) -> None:
    """Other wrong targets: rank/test_workload_check.py."""
    (tmp_path / "ends.py").write_text("print('here')\nimport os\nos._exit(0)\n")
    words = ("workload.target=ends.build", "device=cpu", "world_size=1", "parallel=none", "saves=1")
    ended = run(tmp_path / "sweep", *words, cwd=tmp_path)
    line = "dcpbench: workload.target=ends.build: cannot be imported: the process that imports it ends\n"
    assert (ended.status, ended.out, ended.err) == (2, "", line)
    assert not ended.folder.exists()


def test_wrong_return_value_is_refused() -> None:
    given = config()
    given.workload = WorkloadConfig("builtins.dict")
    with pytest.raises(
        TypeError,
        match=r"workload.target=builtins.dict: returned a dict; must return a dcpbench.api.Workload",
    ):
        workload_of(given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate": 0}, "build: accumulate=0; pass a whole number, at least 1"),
        ({"clip_grad_norm": "1"}, "build: clip_grad_norm='1'; pass a number above 0, or None"),
        ({"accumulate": 25}, "24 samples for 25 shares: each needs one"),
    ],
)
def test_wrong_accumulation_or_clipping_is_refused(options: dict[str, Any], message: str) -> None:
    target = {"target": "support.own_workload.build", "options": options}
    with pytest.raises(ValueError, match=re.escape(message)):
        run_alone(workload=target, saves=1, train_steps=1, resume_steps=1)


class Keeping(nn.Linear):
    """A module with an extra state."""

    def __init__(self, kept: object) -> None:
        super().__init__(3, 2)
        self.kept = kept

    def get_extra_state(self) -> Any:
        return {"kept": self.kept}

    def set_extra_state(self, state: Any) -> None:
        pass


class Iterating(torch.optim.SGD):
    """An optimizer with an iterator as a hyperparameter."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), 0.1)
        self.param_groups[0]["schedule"] = iter([1.0])


KEPT = "'_extra_state.kept' in the state cannot be saved:"
OF_A_LAMBDA = "pickle" if sys.version_info < (3, 13) else "get local object"
INSTEAD = "keep a number, text, list or dictionary that it can be built from"


def drawn(generator: torch.Generator) -> torch.Tensor:
    return torch.rand(4, 3, generator=generator)


def wrong(kind: str) -> Workload:
    """Build a workload with something in it that cannot be repeated or saved."""
    kept = {
        "lock": threading.Lock(),
        "open file": sys.stdout,
        "lambda": lambda: 1,
        "yields": (n for n in "ab"),
    }
    model: nn.Module = Keeping(kept[kind]) if kind in kept else nn.Linear(3, 2)
    left = iter([torch.full((4, 3), float(n)) for n in range(1 if kind == "runs out" else 99)])
    batches: dict[str, Any] = {
        "iterator": left,
        "generator": lambda generator: (drawn(generator) for _ in range(9)),
        "next": lambda generator: next(left),
        "runs out": lambda generator: next(left),
    }
    optimizer = Iterating if kind == "hyperparameter" else adam
    return Workload(model, batches.get(kind, drawn), lambda model, x: model(x).square().mean(), optimizer)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("iterator", "batch is a list_iterator; pass a function"),
        ("generator", r"batch\(generator\) returned a generator; return one batch"),
        ("runs out", r"batch\(generator\) has no more data: draw each batch with the generator alone"),
        ("next", r"batch\(generator\) returned two different batches for the same generator"),
        ("lock", f"{KEPT} cannot pickle '_thread.lock' object; {INSTEAD}"),
        ("open file", f"{KEPT} cannot pickle .*; {INSTEAD}"),
        ("lambda", f"{KEPT} Can't {OF_A_LAMBDA} .*<lambda>.*; {INSTEAD}"),
        ("yields", f"{KEPT} cannot pickle 'generator' object; {INSTEAD}"),
    ],
)
def test_unrepeatable_or_unsavable_value_is_named(kind: str, message: str) -> None:
    target = {"target": "workloads.test_own_workload.wrong", "options": {"kind": kind}}
    with pytest.raises((TypeError, ValueError), match=message):
        run_alone(workload=target, saves=1, train_steps=1, resume_steps=1)


def test_hyperparameter_that_is_an_iterator_is_named() -> None:
    target = {"target": "workloads.test_own_workload.wrong", "options": {"kind": "hyperparameter"}}
    verdict = run_alone(workload=target, saves=1, train_steps=1, resume_steps=1).verdict
    named = "the hyperparameter 'param_groups.0.schedule' of type list_iterator cannot be compared"
    assert str(verdict.reason).startswith(f"{named} with a copy of it; {INSTEAD}")
