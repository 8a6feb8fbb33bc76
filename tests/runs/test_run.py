"""Runs: who implements them, and who changes them."""

import ast
from pathlib import Path

import dcpbench
from dcpbench.runs.build_run import build
from dcpbench.runs.own_run import OwnRun
from dcpbench.runs.own_trainer import TrainerRun
from dcpbench.runs.run import Run
from support.alone import config, world

SRC = Path(dcpbench.__file__).parent
OWN = ("own_run.py", "own_trainer.py")
NOTED = {"exclusions", "comes_after"}
"""What a cell notes of a run: the generators that its last step has shown, and its last save or load."""


def assigned(file: Path) -> set[str]:
    """The attributes that code in a file sets of other objects than `self`."""
    nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)]
    stored = (node for node in nodes if isinstance(node.ctx, ast.Store))
    return {
        node.attr for node in stored if not (isinstance(node.value, ast.Name) and node.value.id == "self")
    }


def test_a_run_is_complete_when_it_is_built() -> None:
    trainer = config(checkpointer="trainer", workload={"target": "support.trainers.Trainer"})
    runs = build(config(model="short"), world(), 0), TrainerRun(trainer, world(), 0)
    attributes = {name for run in runs for name in vars(run)} | NOTED
    assert attributes >= {"model", "optimizer", "random", "trainer", "pipeline"}
    rooms = ("cell", "scenarios", "workloads", "checkpointers")
    files = [file for room in rooms for file in (SRC / room).glob("*.py") if file.name not in OWN]
    found = {file.name: names for file in files if (names := assigned(file) & attributes)}
    assert set().union(*found.values()) == NOTED, found


def test_a_trainer_inherits_nothing_of_an_own_run() -> None:
    assert (TrainerRun.__bases__, OwnRun.__bases__) == ((Run,), (Run,))
