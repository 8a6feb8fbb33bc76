"""Mutation testing of the verification: each mutant is one small defect in the code that verifies cells, and
has to be caught by a test or by a sweep of healthy and planted cells.

    python bench/mutants.py --sample 40 --seed 1
    python bench/mutants.py --only verify/compare.py

A mutant is a copy of src/ with one edit, run in the environment of this process. It is caught when one of the
steps ends with another exit status than 0, which is what it has without the edit, or takes ten times as long.
Mutants that behave as the original does stand in mutants-equivalent.txt with the reason, and are not run; nor
are those of which the file given with `--output` has a line already. Beside the edits that are made
everywhere there are `PLANTED` ones.
"""

# ruff: noqa: T201

import argparse
import ast
import copy
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "dcpbench"
VERIFICATION = ("verify", "scenarios", "records/rank_report.py", "sweep/run/verdict.py")
EQUIVALENT = Path(__file__).with_name("mutants-equivalent.txt")
LEAST_LIMIT_S = 60.0

_CELLS = ("device=cpu", "world_size=2", "retry=0", "timeouts.cell_s=60")
_SWEEP = (sys.executable, "-m", "dcpbench", "-m", *_CELLS)
_PYTEST = ("-q", "-x", "-p", "no:cacheprovider", "-p", "no:logging", "-m", "not slow")
STEPS: dict[str, tuple[str, ...]] = {
    "verdicts": (*_PYTEST, "tests/sweep/test_verdict.py", "tests/sweep/test_known_failures.py"),
    "unit tests": (*_PYTEST, "tests/verify"),
    "cells alone": (*_PYTEST, "tests/scenarios"),
    "healthy cells": (
        *_SWEEP,
        *("parallel=ddp,fsdp2", "scenario=save_load,fine_tune,partial_load,in_place,overwrite", "saves=2"),
        "hydra.sweep.dir={scratch}/healthy",
    ),
    "planted cells": (*_SWEEP, "experiment=faults", "parallel=fsdp2", "hydra.sweep.dir={scratch}/planted"),
    "planted scenarios": (
        *(sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"),
        *("tests/scenarios/test_planted_defects.py", "tests/verify/test_on_ranks.py"),
    ),
}
"""What has to fail, the quickest first; `{scratch}` is a folder of the mutant's own. What
does not begin with a program is arguments of pytest, in a process forked from one that has torch imported."""

_IMPORTED = ("torch", "torch.distributed.checkpoint", "torch.distributed.fsdp", "hypothesis", "hydra")

_CHECKS, _STEPS = "scenarios/checks.py", "scenarios/steps.py"
PLANTED: dict[str, tuple[str, str, str]] = {
    "controls always true": (
        "scenarios/cell.py",
        "{name: name in reported for name in names}",
        "dict.fromkeys(names, True)",
    ),
    "controls of losses always true": (_CHECKS, "means and name in reported for", "True for"),
    "controls of the audit always true": (
        "verify/audit.py",
        "damage: any(found not in clean for found in audit(copy, wanted))",
        "damage: True",
    ),
    "resumed losses with themselves": (
        _CHECKS,
        "continued, twin = losses.continued[",
        "continued, twin = resumed, resumed ##",
    ),
    "twin with itself": (
        _CHECKS,
        "_tensors(oracle.twin), _tensors(trained)",
        "_tensors(trained), _tensors(trained)",
    ),
    "losses of the twin with themselves": (
        _CHECKS,
        "mark(close(losses.twin)",
        "mark(close(losses.continued)",
    ),
    "rank 0 skipped": (
        _CHECKS,
        "        actual = view(target)\n",
        "        actual = view(target)\n        if cell.world.rank == 0:\n            return\n",
    ),
    "last rank skipped": (
        _CHECKS,
        "        actual = view(target)\n",
        "        actual = view(target)\n        if cell.world.size == cell.world.rank + 1: return\n",
    ),
    "oldest checkpoint skipped": (
        "scenarios/save_load.py",
        "reversed(checkpoints)",
        "reversed(checkpoints[1:])",
    ),
    "all hyperparameters but lr skipped": (
        "verify/snapshot.py",
        '            if key == "params":',
        '            if key not in ("params", "lr"): continue\n            if key == "params":',
    ),
    "snapshot after the save": (
        _STEPS,
        '    cell.measure("save_stall_s", pending.released',
        '    saved = retained_state(run)\n    cell.measure("save_stall_s", pending.released',
    ),
    "strangers without noise": (
        "workloads/build_run.py",
        "    stranger.noise = Noise(config.seed)",
        "    stranger.noise = Noise(seed)",
    ),
    "missing reports accepted": ("sweep/run/verdict.py", "powerless += _not_reported", "_not_reported"),
}
"""Edits of a text in a file, by what they do."""

Edit = Callable[[ast.AST], ast.AST | None]
_forks = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Mutant:
    """One edit: in which file, function and line, of which kind, and what the code says before and after."""

    path: str
    function: str
    line: int
    kind: str
    before: str
    after: str
    source: Callable[[], str]
    """The whole file with the edit."""
    alike: int = 0
    """How many mutants of its function that are made later read the same."""

    @property
    def name(self) -> str:
        """The same as long as the code is the same, wherever it moves to in its function."""
        number = f" #{self.alike + 1}" if self.alike else ""
        return f"{self.path}: {self.function}: {self.kind}: {self.before} -> {self.after}{number}"


def planted() -> Iterator[Mutant]:
    """The mutants that are written down.

    Raises:
        ValueError: the code does not say any more what one of them edits.
    """
    for kind, (path, before, after) in PLANTED.items():
        text = (PACKAGE / path).read_text(encoding="utf-8")
        if text.count(before) != 1:
            raise ValueError(f"{kind}: {path} has {before!r} {text.count(before)} times")
        line = text[: text.index(before)].count("\n") + 1
        yield Mutant(path, "", line, kind, before, after, partial(text.replace, before, after))


def _edited(tree: ast.Module, node: ast.AST, replacement: ast.AST) -> str:
    class Replaced(ast.NodeTransformer):
        def visit(self, item: ast.AST) -> ast.AST:
            return replacement if item is node else self.generic_visit(item)

    return ast.unparse(ast.fix_missing_locations(Replaced().visit(copy.deepcopy(tree, {id(node): node}))))


def mutants(path: Path) -> list[Mutant]:
    """Every mutant of a file, each under a name of its own."""
    found: list[Mutant] = []
    alike: Counter[str] = Counter()
    for one in reversed([*_mutants(path)]):
        found.append(replace(one, alike=alike[one.name]))
        alike[one.name] += 1
    return found[::-1]


def _mutants(path: Path) -> Iterator[Mutant]:
    place, tree = str(path.relative_to(PACKAGE)), ast.parse(path.read_text(encoding="utf-8"))
    inside: dict[ast.AST, str] = {}
    for node in ast.walk(tree):  # from the outside in
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            qualified = f"{inside.get(node, '')}{node.name}."
            inside |= dict.fromkeys(ast.walk(node), qualified)
        for kind, edit in _EDITS.items():
            replacement = edit(node)
            if replacement is not None:
                before, after = (" ".join(ast.unparse(one).split())[:120] for one in (node, replacement))
                line = node.lineno if isinstance(node, ast.expr | ast.stmt) else node.iter.lineno  # type: ignore[attr-defined]
                function = inside.get(node, "").rstrip(".")
                yield Mutant(
                    place, function, line, kind, before, after, partial(_edited, tree, node, replacement)
                )


_OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_COMPARES = ("compare", "same", "equal", "clos", "differ")
"""What the name of a function has in it that holds one thing against another."""


def _opposite(node: ast.AST) -> ast.AST | None:
    if not isinstance(node, ast.Compare) or len(node.ops) > 1:
        return None
    return ast.Compare(node.left, [_OPPOSITE[type(node.ops[0])]()], node.comparators)


def _other_junction(node: ast.AST) -> ast.AST | None:
    if not isinstance(node, ast.BoolOp):
        return None
    return ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)


def _condition(value: bool) -> Edit:
    def edit(node: ast.AST) -> ast.AST | None:
        if not isinstance(node, ast.If | ast.IfExp):
            return None
        changed = copy.copy(node)
        changed.test = ast.Constant(value)
        return changed

    return edit


def _other_flag(node: ast.AST) -> ast.AST | None:
    known = isinstance(node, ast.Constant) and isinstance(node.value, bool)
    return ast.Constant(not node.value) if known else None  # type: ignore[attr-defined]


def _hundredfold(node: ast.AST) -> ast.AST | None:
    known = isinstance(node, ast.Constant) and isinstance(node.value, float) and node.value
    return ast.Constant(node.value * 100) if known else None  # type: ignore[attr-defined]


def _with_itself(node: ast.AST) -> ast.AST | None:
    """A comparison of a value with itself."""
    if not isinstance(node, ast.Call) or len(node.args) < 2 or isinstance(node.args[0], ast.Starred):
        return None
    name = ast.unparse(node.func).rpartition(".")[2]
    if not any(part in name for part in _COMPARES) or ast.dump(node.args[0]) == ast.dump(node.args[1]):
        return None
    return ast.Call(node.func, [node.args[0], node.args[0], *node.args[2:]], node.keywords)


def _skips(cut: slice) -> Edit:
    """A loop that leaves out its first or its last item: a rank, a checkpoint, a name."""

    def edit(node: ast.AST) -> ast.AST | None:
        if not isinstance(node, ast.For | ast.comprehension):
            return None
        changed = copy.copy(node)
        bounds = (None if bound is None else ast.Constant(bound) for bound in (cut.start, cut.stop))
        items = ast.Call(ast.Name("list", ast.Load()), [node.iter], [])
        changed.iter = ast.Subscript(items, ast.Slice(*bounds), ast.Load())
        return changed

    return edit


def _not_called(node: ast.AST) -> ast.AST | None:
    known = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    return ast.Pass() if known else None


_NOTHING = {
    "None": "None",
    "bool": "True",
    "list": "[]",
    "dict": "{}",
    "Leaves": "{}",
    "set": "set()",
    "str": "''",
}


def _returns_at_once(node: ast.AST) -> ast.AST | None:
    """A function that does nothing and finds nothing."""
    if not isinstance(node, ast.FunctionDef) or node.returns is None:
        return None
    returns = ast.unparse(node.returns)
    kind = "None" if returns.endswith("| None") else returns.partition("[")[0]
    if kind not in _NOTHING or any(isinstance(item, ast.Yield) for item in ast.walk(node)):
        return None
    changed = copy.copy(node)
    changed.body = [ast.parse(f"return {_NOTHING[kind]}").body[0]]
    return changed


_EDITS: dict[str, Edit] = {
    "opposite comparison": _opposite,
    "and for or": _other_junction,
    "condition always true": _condition(True),
    "condition always false": _condition(False),
    "other flag": _other_flag,
    "tolerance x 100": _hundredfold,
    "compared with itself": _with_itself,
    "skips the first": _skips(slice(1, None)),
    "skips the last": _skips(slice(None, -1)),
    "not called": _not_called,
    "returns at once": _returns_at_once,
}


def caught_by(mutant: Mutant, limits: Mapping[str, float | None]) -> str | None:
    """The first step that does not end as it does without the edit, None if the mutant survives.

    Args:
        limits: the steps, and seconds that each may take.
    """
    with tempfile.TemporaryDirectory(prefix="mutant-") as scratch:
        shutil.copytree(ROOT / "src", Path(scratch) / "src", ignore=shutil.ignore_patterns("__pycache__"))
        for beside in ("conf", "docs", "tests", "pyproject.toml"):
            (Path(scratch) / beside).symlink_to(ROOT / beside)
        (Path(scratch) / "src" / "dcpbench" / mutant.path).write_text(mutant.source(), encoding="utf-8")
        for step, limit_s in limits.items():
            words = [word.format(scratch=scratch) for word in STEPS[step]]
            if words[0] != sys.executable:
                tests = _forks.Process(target=_unit_tests, args=(scratch, words))
                tests.start()
                tests.join(limit_s)
                if tests.is_alive():
                    tests.kill()
                    return f"{step} (did not end)"
                if tests.exitcode:
                    return step
                continue
            places = filter(None, [f"{scratch}/src", os.environ.get("PYTHONPATH")])
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
            try:
                ended = subprocess.run(
                    words, cwd=scratch, env=environment, capture_output=True, timeout=limit_s, check=False
                )
            except subprocess.TimeoutExpired:
                return f"{step} (did not end)"
            if ended.returncode:
                return step
    return None


def _unit_tests(scratch: str, words: list[str]) -> None:
    """Run pytest in this process, on the code of a mutant."""
    import pytest

    os.chdir(scratch)
    sys.path[:0] = [f"{scratch}/src"]
    with Path("unit-tests.txt").open("w", encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        status = pytest.main(words)
        os._exit(int(status))


def main() -> int:
    """Run the mutants that were asked for; 1 if one survived."""
    asked = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else None)
    asked.add_argument("--only", action="append", default=[], help="files below src/dcpbench (several)")
    asked.add_argument("--planted", action="store_true", help="only those that are written down")
    asked.add_argument("--kind", action="append", default=[], choices=list(_EDITS))
    asked.add_argument("--steps", action="append", default=[], choices=list(STEPS))
    asked.add_argument("--sample", type=int, help="so many, drawn with --seed")
    asked.add_argument("--seed", type=int, default=0)
    asked.add_argument("--at-once", type=int, default=1)
    asked.add_argument("--list", action="store_true", help="print the mutants and run none")
    asked.add_argument("-o", "--output", type=Path, help="append a line of JSON for each")
    given = asked.parse_args()
    roots = [PACKAGE / place for place in given.only or VERIFICATION]
    files = [path for root in roots for path in (sorted(root.rglob("*.py")) if root.is_dir() else [root])]
    lines = EQUIVALENT.read_text(encoding="utf-8").splitlines() if EQUIVALENT.exists() else []
    equivalent = {line.partition("  # ")[0] for line in lines}
    made = {one.name: one for one in planted()}
    if not given.planted:
        made |= {one.name: one for path in files for one in mutants(path)}
    if given.only:
        made = {name: one for name, one in made.items() if any(one.path.startswith(it) for it in given.only)}
    found = [one for one in made.values() if one.name not in equivalent]
    found = [one for one in found if not given.kind or one.kind in given.kind]
    if given.sample is not None:
        found = random.Random(given.seed).sample(found, min(given.sample, len(found)))
    if given.list:
        print(*(f"{one.path}:{one.line}: {one.kind}: {one.before} -> {one.after}" for one in found), sep="\n")
        return 0
    if given.output and given.output.exists():
        known = {json.loads(line)["mutant"] for line in given.output.read_text(encoding="utf-8").splitlines()}
        found = [one for one in found if one.name not in known]
    _forks.set_forkserver_preload([*_IMPORTED])
    unedited = PACKAGE / "__init__.py"
    text = unedited.read_text(encoding="utf-8")
    limits: dict[str, float | None] = {}
    for step in given.steps or list(STEPS):
        began = time.monotonic()
        if caught_by(Mutant(unedited.name, "", 0, "unedited", "", "", lambda: text), {step: None}):
            raise SystemExit(f"{step}: the code as it is does not pass")
        limits[step] = max(LEAST_LIMIT_S, 10 * (time.monotonic() - began))
    ends: Counter[str] = Counter()
    with ThreadPoolExecutor(given.at_once) as pool:
        running = {pool.submit(caught_by, one, limits): one for one in found}
        for ended in as_completed(running):
            one, caught = running[ended], ended.result()
            ends[caught or "survived"] += 1
            print(f"{caught or 'SURVIVED':24} {one.path}:{one.line}: {one.kind}: {one.before}", flush=True)
            if given.output:
                record = {"mutant": one.name, "line": one.line, "caught": caught}
                with given.output.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(record) + "\n")
    left_out = len(made.keys() & equivalent)
    print(f"{len(found)} mutants ({left_out} equivalent ones left out): {dict(ends)}")
    return 1 if ends["survived"] else 0


if __name__ == "__main__":
    sys.exit(main())
