"""The rooms of the house: what they may name."""

import ast
from pathlib import Path

import dcpbench
from dcpbench.config.schema import conf_folder

SRC = Path(dcpbench.__file__).parent
ROOMS = ("core", "verdict", "cell", "config")
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
    assert len(names) > 80, "there are such values"
    files = [file for room in ROOMS for file in sorted((SRC / room).rglob("*.py"))]
    assert files
    named = {str(file.relative_to(SRC)): literals(file) & names for file in files}
    assert {file: found for file, found in named.items() if found} == {}
