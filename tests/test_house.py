"""The rooms that are read first: narrow towards those below, and without the names of what is replaceable."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from dcpbench.records.installation import conf_folders

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "dcpbench"
GROUPS = ["model", "optimizer", "parallel", "storage", "scheduler", "component", "checkpointer", "executor"]
KEPT = {"none", "file", "trainer", "local"}


def trees(room: str) -> Iterator[ast.Module]:
    for path in sorted((PACKAGE / room).rglob("*.py")):
        yield ast.parse(path.read_text(encoding="utf-8"))


def test_cells_take_few_names_from_verify() -> None:
    imports = [one for tree in trees("cell") for one in ast.walk(tree) if isinstance(one, ast.ImportFrom)]
    of_verify = [one for one in imports if (one.module or "").startswith("dcpbench.verify")]
    names = {(one.module, alias.name) for one in of_verify for alias in one.names}
    assert 0 < len(names) <= 15, sorted(names)
    plain = [one for tree in trees("cell") for one in ast.walk(tree) if isinstance(one, ast.Import)]
    assert not [alias.name for one in plain for alias in one.names if alias.name.startswith("dcpbench")]


@pytest.mark.parametrize("room", ["cell", "core", "verdict"])
def test_no_room_names_what_can_be_replaced(room: str) -> None:
    folders = [folder / group for folder in conf_folders() for group in GROUPS]
    values = {path.stem for folder in folders for path in folder.glob("*.yaml")}
    assert {"fsdp2", "adam", "dcp", "multi_step"} <= values
    texts = {
        one.value
        for tree in trees(room)
        for one in ast.walk(tree)
        if isinstance(one, ast.Constant) and isinstance(one.value, str)
    }
    assert texts & values <= KEPT
