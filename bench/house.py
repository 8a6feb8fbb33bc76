"""Measure the size of the code: lines, files, import cycles, imports of higher packages.

python bench/house.py --list     # names what is counted
"""

# ruff: noqa: T201
import argparse
import ast
import io
import sys
import tokenize
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src"
HOUSE = SRC / "dcpbench"
PLUGINS = HOUSE / "plugins"
MIDDLE = ("core", "verdict", "cell")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name what is counted")
    arguments = parser.parse_args()
    everything = sorted(SRC.rglob("*.py"))
    middle = [file for file in everything if file.relative_to(HOUSE.parent).parts[1] in MIDDLE]
    cell = sorted((HOUSE / "cell").rglob("*.py"))
    counted = {
        "lines of src without plug-ins": lines(file for file in everything if PLUGINS not in file.parents),
        "lines of src": lines(everything),
        "lines of code in src, without blank lines, comments and docstrings": code_lines(everything),
        "lines of YAML, JavaScript, CSS and HTML": lines(others()),
        f"lines of {' + '.join(MIDDLE)}": lines(middle),
        "names that cell takes from compare and state": sum(
            names_from(f"dcpbench.{room}", cell) for room in ("compare", "state")
        ),
        "files of src": len(everything),
    }
    for what, number in counted.items():
        print(f"{number:7,}  {what}")
    graph = imports()
    for what, found in (("circles of files", circles(graph)), ("upward arrows", upward(graph, layers()))):
        print(f"{len(found):7,}  {what}")
        show(found, arguments.list)
    return 0


def show(found: Iterable[str], wanted: bool) -> None:
    for one in found if wanted else ():
        print(f"           {one}")


def lines(files: Iterable[Path]) -> int:
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def others() -> Iterator[Path]:
    """What is part of the house and no Python."""
    for folder in (SRC, ROOT / "conf"):
        yield from (file for file in folder.rglob("*") if file.suffix in (".yaml", ".js", ".css", ".html"))


def code_lines(files: Iterable[Path]) -> int:
    """Lines that have a token other than a comment, and are not part of a docstring."""
    return sum(len(_code_lines(file.read_text(encoding="utf-8"))) for file in files)


def _code_lines(text: str) -> set[int]:
    blank = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    blank |= {tokenize.ENDMARKER, tokenize.ENCODING}
    strings = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr))
    docs = {
        line
        for node in strings
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    found = {line for one in tokens if one.type not in blank for line in range(one.start[0], one.end[0] + 1)}
    return found - docs


def names_from(package: str, files: Iterable[Path]) -> int:
    """How many names of a package some files use, whether they import them or the modules that have them."""
    found: set[str] = set()
    for file in files:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        modules: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"{package}."):
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    is_module = (SRC / f"{whole.replace('.', '/')}.py").exists()
                    modules |= {alias.asname or alias.name: whole} if is_module else {}
                    found |= set() if is_module else {whole}
        used = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
        of = ((node.value.id, node.attr) for node in used if isinstance(node.value, ast.Name))
        found |= {f"{modules[name]}.{attribute}" for name, attribute in of if name in modules}
    return len(found)


def imports() -> dict[str, set[str]]:
    """The files that each file imports, also within a function, and those that it needs for types alone."""
    graph = grimp.build_graph("dcpbench", "hydra_plugins", cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def circles(graph: dict[str, set[str]]) -> list[str]:
    """Each set of files of which every one imports the others, directly or not."""

    def reached(module: str) -> set[str]:
        found: set[str] = set()
        pending = [*graph[module]]
        while pending:
            one = pending.pop()
            if one not in found:
                found.add(one)
                pending += graph[one]
        return found

    below = {module: reached(module) for module in graph}
    rings = {tuple(sorted(o for o in below[m] if m in below[o])) for m in graph if m in below[m]}
    return [" <-> ".join(ring) for ring in sorted(rings)]


def layers() -> list[list[str]]:
    """The rooms from the top down, as import-linter has them; those of one list are side by side."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (found,) = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [[name.strip(" ()") for name in layer.replace(":", "|").split("|")] for layer in found]


def upward(graph: dict[str, set[str]], rooms: list[list[str]]) -> list[str]:
    """Imports of a room by one that is below it, whatever import-linter is told to ignore."""
    depth = {room: number for number, layer in enumerate(rooms) for room in layer}

    def of(module: str) -> int | None:
        return next((number for room, number in depth.items() if f"{module}.".startswith(f"{room}.")), None)

    pairs = ((one, other, of(one), of(other)) for one, below in graph.items() for other in below)
    return sorted(f"{a} -> {b}" for a, b, of_a, of_b in pairs if None not in (of_a, of_b) and of_a > of_b)


if __name__ == "__main__":
    sys.exit(main())
