"""Note which blocks of dcpbench's code a process enters, and those that it forks or starts.

`prepare(folder)` compiles each file of src/ with one more line at the start of each block, which sets a byte
of a file that all processes map: neither a thread, nor a killed process, nor `os._exit` loses anything. It
returns the variables of the environment with which a Python loads that code.
"""

import ast
import builtins
import json
import marshal
import mmap
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

FOLDER = "ENTERED"
"""The variable of the environment with the folder that `prepare` has written."""
MAP = "ENTERED_MAP"
"""That with the file which processes map, if it is another than `<folder>/map`."""
SRC = Path(__file__).parents[1] / "src"
_LOADS = f"""from importlib.util import module_from_spec, spec_from_file_location

spec = spec_from_file_location("entered", {__file__!r})
entered = module_from_spec(spec)
spec.loader.exec_module(entered)
entered.install()
"""
_LEAVE = (ast.If, ast.For, ast.While, ast.Try, ast.With, ast.Match)
"""Statements after which a block can end."""
_COMPILED = "forward"
"""What torch.compile may read in a class that has it, where it would not read the line."""


class Block(NamedTuple):
    """A run of statements that are entered together."""

    path: str
    function: str
    line: int


def prepare(folder: Path) -> dict[str, str]:
    """Write the code and the empty map; the variables of the environment with which a Python uses them."""
    blocks: list[Block] = []
    for path in sorted(SRC.rglob("*.py")):
        source, place = path.read_text(encoding="utf-8"), path.relative_to(SRC).as_posix()
        code = folder / "code" / place
        code.parent.mkdir(parents=True, exist_ok=True)
        code.write_bytes(marshal.dumps(compile(_noting(source, place, blocks), path, "exec")))
    (folder / "blocks.json").write_text(json.dumps(blocks))
    (folder / "sitecustomize.py").write_text(_LOADS)
    (folder / "map").write_bytes(bytes(len(blocks)))
    path_before = os.environ.get("PYTHONPATH", "")
    return {FOLDER: str(folder), "PYTHONPATH": os.pathsep.join(filter(None, [str(folder), path_before]))}


def _noting(source: str, place: str, blocks: list[Block]) -> ast.Module:
    """The tree of a file, in which each block of each function notes that it is entered."""
    tree = ast.parse(source)

    def marked(statements: list[ast.stmt], function: str) -> list[ast.stmt]:
        after: list[ast.stmt] = []
        starts = True
        for number, statement in enumerate(statements):
            is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            if starts and not (is_text and number == 0):
                mark = ast.parse(f"__entered__[{len(blocks)}] = 1").body[0]
                blocks.append(Block(place, function, statement.lineno))
                for node in ast.walk(mark):
                    ast.copy_location(node, statement)
                after.append(mark)
                starts = False
            descend(statement, function, True)
            after.append(statement)
            starts = starts or isinstance(statement, _LEAVE)
        return after

    def descend(node: ast.AST, inside: str, mark: bool) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside = f"{inside}.{node.name}" if inside else node.name
            methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            mark = not isinstance(node, ast.ClassDef)
            if not mark and _COMPILED in methods:
                return
        for name, value in ast.iter_fields(node):
            items = value if isinstance(value, list) else [value]
            if mark and items and isinstance(items[0], ast.stmt):
                setattr(node, name, marked(items, inside))
            else:
                for item in items:
                    if isinstance(item, ast.AST):
                        descend(item, inside, mark)

    descend(tree, "", False)
    return tree


class _Loader(SourceFileLoader):
    """Loads the code that notes the entered blocks."""

    def get_code(self, fullname: str) -> CodeType | None:
        code = Path(os.environ[FOLDER], "code", Path(self.path).relative_to(SRC))
        if not code.exists():
            return super().get_code(fullname)
        return marshal.loads(code.read_bytes())  # noqa: S302 - written by `prepare`


class _Finder:
    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name.partition(".")[0] not in ("dcpbench", "hydra_plugins") or FOLDER not in os.environ:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec and spec.origin and spec.origin.startswith(f"{SRC}{os.sep}") and spec.origin.endswith(".py"):
            spec.loader = _Loader(name, spec.origin)
        return spec


def install() -> None:
    """From now on this process notes what it enters."""
    if FOLDER in os.environ:
        sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]
        use(Path(os.environ.get(MAP) or Path(os.environ[FOLDER], "map")))


def use(file: Path) -> memoryview:
    """Map a file: this process and those that it forks note there."""
    with file.open("r+b") as opened:
        entered = memoryview(mmap.mmap(opened.fileno(), 0))
    vars(builtins)["__entered__"] = entered
    return entered
