"""torch's private names: each exists in the installed version, and one file has all of them."""

import ast
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dcpbench
from dcpbench import torch_private
from dcpbench.core.plugins import plugins
from dcpbench.torch_private import Private

SRC = Path(dcpbench.__file__).parent
NAMES = [
    name
    for value in vars(torch_private).values()
    for name in (value if isinstance(value, tuple) else [value])
    if isinstance(name, Private)
]
RECORDER = "plugins/script/recorder/"
"""It runs in a script's process without dcpbench, and on the script's torch."""
IN_FILES = ("formats/dcp_metadata.py", "compare/stored.py")
"""Names that torch writes into checkpoints, as old as these are, which are read without torch's code."""
OF_OTHERS = {
    *("_replace", "_make"),  # Python's named tuples
    *("_exit", "_getframe", "_config", "_exit_function", "_SHM_NAME_PREFIX"),  # Python's modules
    "_metadata",  # OmegaConf
    *("_blksize", "_door", "_every", "_name"),  # dcpbench's own
}
"""Private attributes that are not torch's."""


def is_there(name: Private[Any]) -> bool:
    """A value, or an attribute of instances: declared by their class, or assigned in one of its methods."""
    owner = name.owner
    try:
        return pkgutil.resolve_name(name.path) is not None or hasattr(owner, name.name)
    except (AttributeError, ImportError):
        pass
    assert isinstance(owner, type), name.path
    functions = (getattr(value, "__func__", value) for kind in owner.__mro__ for value in vars(kind).values())
    codes = (inspect.unwrap(function).__code__ for function in functions if inspect.isfunction(function))
    declared = {*inspect.get_annotations(owner)}
    return name.name in declared or any(name.name in (*code.co_names, *code.co_consts) for code in codes)


def test_private_names_exist() -> None:
    assert len(NAMES) > 50
    assert [name.path for name in NAMES if not is_there(name)] == []
    assert [name.path for name in NAMES if not name.why] == []


def private_names(tree: ast.AST) -> Iterator[str]:
    """Private names of torch in a file's code: imports, attributes of other objects, and names in texts."""
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names if re.match(r"torch\b.*\._", name.name))
            case ast.ImportFrom(module=str(module), names=names) if module.partition(".")[0] == "torch":
                yield from (f"{module}.{name.name}" for name in names if "._" in f"{module}.{name.name}")
            case ast.Attribute(value=holder, attr=attribute) if re.match(r"_[^_]", attribute):
                if ast.unparse(holder) not in ("self", "cls") and attribute not in OF_OTHERS:
                    yield attribute
            case ast.Constant(value=str(text)) if id(node) not in documentation:
                if re.fullmatch(r"torch(\.\w+)*\._[\w.]*", text):
                    yield text
            case ast.Call(args=[_, ast.Constant(value=str(text)), *_], func=function):
                if re.match(r"_[^_]", text) and re.search(r"(attr|patch\.object)$", ast.unparse(function)):
                    yield from {text} - OF_OTHERS


def test_private_names_of_torch_are_in_one_file() -> None:
    found = {}
    for file in sorted(SRC.rglob("*.py")):
        path = str(file.relative_to(SRC))
        if path == "torch_private.py" or path.startswith(RECORDER) or path in IN_FILES:
            continue
        tree = ast.parse(file.read_text())
        if names := {*private_names(tree)}:
            found[path] = names
    assert found == {}


@pytest.mark.skipif(
    not {"defects", "faults"} <= {plugin.name for plugin in plugins()},
    reason="a plug-in that uses some is absent",
)
def test_private_names_are_used() -> None:
    files = (file for file in SRC.rglob("*.py") if file.name != "torch_private.py")
    used = {word for file in files for word in re.findall(r"\w+", file.read_text())}
    declared = [name for name in vars(torch_private) if name.isupper() and name[0] != "_"]
    assert {*declared} - used == set()
