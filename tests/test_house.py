"""The rooms of the house: what they may name and import."""

import ast
from pathlib import Path
from types import ModuleType

import pytest

import dcpbench
from dcpbench.config.schema import conf_folder
from support.commands import script

SRC = Path(dcpbench.__file__).parent
ROOMS = ("core", "verdict", "cell", "config")
BELOW = ("compare", "state", "runs", "workloads")
GROUPS = ("model", "optimizer", "parallel", "storage", "scheduler", "component", "checkpointer", "executor")
ALLOWED = {"none", "file", "trainer", "local"}


def literals(file: Path) -> set[str]:
    """Every string in a file, without docstrings."""
    tree = ast.parse(file.read_text())
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in bare)
    return {node.value for node in found if isinstance(node.value, str)}


def test_the_middle_names_no_value_of_a_group() -> None:
    folders = [conf_folder(), *SRC.glob("plugins/*/conf")]
    found = (path.stem for folder in folders for group in GROUPS for path in folder.glob(f"{group}/*.yaml"))
    names = {*found} - ALLOWED
    assert {"fsdp2", "adam"} <= names
    files = [file for room in ROOMS for file in sorted((SRC / room).rglob("*.py"))]
    assert files
    named = {str(file.relative_to(SRC)): literals(file) & names for file in files}
    assert {file: found for file, found in named.items() if found} == {}


@pytest.fixture(scope="module")
def house() -> ModuleType:
    """What counts how large the house is."""
    return script("bench/house")


def test_every_room_is_a_layer(house: ModuleType) -> None:
    rooms = {path.parent.name for path in SRC.glob("*/__init__.py")}
    layers = {room for layer in house.layers() for room in layer}
    assert layers >= {f"dcpbench.{room}" for room in rooms}
    there = {*rooms, "__main__", "api", "pytest_plugin", "torch_private"}
    assert layers - {f"dcpbench.{room}" for room in there} == {"hydra_plugins.dcpbench_sweeper"}


def test_no_files_import_each_other(house: ModuleType) -> None:
    graph = house.imports()
    assert "dcpbench.cell.steps" in graph
    assert house.circles(graph) == []
    assert house.upward(graph, house.layers()) == []


def test_cells_take_few_names_from_the_rooms_below(house: ModuleType) -> None:
    cell = sorted((SRC / "cell").glob("*.py"))
    taken = {room: house.names_from(f"dcpbench.{room}", cell) for room in BELOW}
    assert all(taken.values())
    assert taken["runs"] + taken["workloads"] <= 20
    assert sum(taken.values()) <= 45
