"""The defects that `mutants.py` plants: which edits are made everywhere, and which are written down."""

import ast
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "dcpbench"

_CHECKS, _STEPS, _LOCKSTEP = "cell/checks.py", "cell/steps.py", "twin/lockstep.py"
_TRAINING, _TWIN = "twin/gradients.py", "twin/twin.py"
PLANTED: dict[str, tuple[str, str, str]] = {
    "controls always true": (
        "core/rank_report.py",
        "{name: name in reported for name, here in compared.items() if here}",
        "{name: True for name, here in compared.items() if here}",
    ),
    "training shared by all cells": (
        "cell/uninterrupted.py",
        "cell.world.any_rank(kept is None or kept.digest != digest)",
        "cell.world.any_rank(kept is None)",
    ),
    "every key concerns saving": (
        "config/schema.py",
        " if not config_field.metadata.get(OF_SAVING)\n",
        " if False\n",
    ),
    "wrong training shared": (
        "cell/uninterrupted.py",
        "    if any(of_check.count for of_check in verdict.values()):\n",
        "    if False:\n",
    ),
    "failures judged by another cell's run": (
        "cell/uninterrupted.py",
        "    if differs:\n",
        "    if False:\n",
    ),
    "wrong shared run stays": (
        "cell/uninterrupted.py",
        "        if cell.world.any_rank(names):\n",
        "        if False:\n",
    ),
    "a rank decides alone": (
        "cell/uninterrupted.py",
        "shared and cell.world.any_rank(any(comparison.found for comparison in compared))",
        "shared and any(comparison.found for comparison in compared)",
    ),
    "controls of losses always true": (
        "compare/losses.py",
        "is_usable and name in reported for",
        "True for",
    ),
    "controls of the audit always true": (
        "formats/audit.py",
        "damage: any(mismatch not in clean for mismatch in audit(copy, wanted))",
        "damage: True",
    ),
    "resumed losses with themselves": (
        _CHECKS,
        "losses = reference.losses[taken.start - 1 : last]",
        "losses = resumed",
    ),
    "mending of what no defect explains": (
        "cell/known_defects.py",
        "        mismatch.name: mismatch.by\n        for mismatch in mismatches\n"
        "        if mismatch.by and mismatch.name not in unexplained\n",
        "        mismatch.name: str(mismatch.by)\n        for mismatch in mismatches\n",
    ),
    "resumes of what cannot be mended": (
        "cell/known_defects.py",
        "    return first and f",
        "    return None and f",
    ),
    "gradients with themselves": (
        _TRAINING,
        "here = torch.zeros_like(expected) if part.local is None else",
        "here = expected if True else",
    ),
    "small tensors always the same": (
        "compare/leaves.py",
        "        if not torch.equal(expected_bytes, actual_bytes):\n",
        "        if False:\n",
    ),
    "gradients within no bound": (_TRAINING, "    if not used <= 1:\n", "    if False:\n"),
    "factors within no bound": (_TRAINING, "    if not by_factor <= 1:\n", "    if False:\n"),
    "gradients of parts not divided": (_TRAINING, "mean = total / parts", "mean = total"),
    "controls of gradients always true": (_LOCKSTEP, "= control[0] is not None", "= True"),
    "controls of steps always true": (_LOCKSTEP, "{name: name in reported for", "{name: True for"),
    "controls of batch losses always true": (
        _LOCKSTEP,
        "usable and any(self._far(step, other) for other in others)",
        "True",
    ),
    "controls of dead gradients": (_LOCKSTEP, "if not self._had_gradient:", "if False:"),
    "steps with themselves": (
        _LOCKSTEP,
        "mismatches = compare_step(step, twin, actual,",
        "mismatches = compare_step(step, actual, actual,",
    ),
    "the twin steps on its own gradients": (
        _TWIN,
        "                    _replace_gradient(value, name, uses[number])\n",
        "",
    ),
    "jittered steps begin where the twin's own ended": (
        _TWIN,
        "self._copy(beginning, run)",
        "self._copy(self.run, run)",
    ),
    "batch losses with themselves": (
        _LOCKSTEP,
        "compare_losses([twin], [loss]",
        "compare_losses([twin], [twin]",
    ),
    "replicas not compared": (
        _LOCKSTEP,
        "return compare_replicas(leaves, self._world.group)",
        "return Compared([], (made := compare_replicas(leaves, self._world.group)).names, made.detected)",
    ),
    "rank 0 skipped": (
        _CHECKS,
        "live_state()), cell.world.group\n",
        "live_state()), cell.world.group\n        if cell.world.rank == 0:\n            return\n",
    ),
    "last rank skipped": (
        _CHECKS,
        "live_state()), cell.world.group\n",
        "live_state()), cell.world.group\n        if cell.world.size == cell.world.rank + 1: return\n",
    ),
    "oldest checkpoint skipped": (
        "scenarios/save_load.py",
        "reversed(checkpoints)",
        "reversed(checkpoints[1:])",
    ),
    "all hyperparameters but lr skipped": (
        "state/snapshot.py",
        '{**group, "params": names}',
        '{"lr": group["lr"], "params": names}',
    ),
    "snapshot after the save": (
        _STEPS,
        '    cell.measure("save_stall_s", pending.released',
        '    saved = run.retained_state()\n    cell.measure("save_stall_s", pending.released',
    ),
    "unrestored runs without noise": (
        "runs/build_run.py",
        "Noise(config.seed).state_dict()",
        "Noise(seed).state_dict()",
    ),
    "missing reports accepted": ("verdict/judge.py", "gaps += _not_reported", "_not_reported"),
}
"""Edits of a text in a file, by what they do."""

Edit = Callable[[ast.AST], ast.AST | None]


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
        for kind, edit in EDITS.items():
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


EDITS: dict[str, Edit] = {
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
