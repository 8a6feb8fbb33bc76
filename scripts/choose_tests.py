"""Record what each test costs and enters, choose those of `make test`, run those that a change touches.

    python scripts/choose_tests.py record build/tests -n 3     # what follows the folder is pytest's
    python scripts/choose_tests.py choose build/tests --killers killers.jsonl
    python scripts/choose_tests.py touched --minutes 40

`record` runs each test alone: hours on two cores. `choose` writes tests/tiers.txt, with a line for each test
that is not cheap: why `make test` has it, or `extended`, its CPU seconds and its name. It writes
tests/entered.txt: of each function of src/ a digest of its source, and the extended tests that enter it.
`touched` runs, the cheapest first, those that enter a function which has another digest now.
"""

import argparse
import ast
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import entered

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
TIERS, ENTERED = TESTS / "tiers.txt", TESTS / "entered.txt"

QUICK_S = 0.4
"""CPU seconds up to which such a test is in `make check` too."""
CHEAP_S = 4.0
"""CPU seconds up to which a test without a sweep or browser is in `make test`: some start ranks, if alone."""
BUDGET_S = 400.0
"""CPU seconds that the others there cost, each alone, if those that are needed cost less."""
KEPT = {
    "report": r"test_restart.py::test_wrong|test_ordinary_workloads.py::test_ordinary|test_unsaved_values.py"
    r"|test_resumebench.*\[(plain.py (no_gen|torn)|extras.py no_sc|habits.py (sigterm|betw)|(ddp|fsdp2).py"
    r"|twins.py (kill@4|swapped)|repeats.py two alternates no|keeps.py replaced)",
    "death": r"test_deaths.py::test_first_cause|test_resume.py::test_killed",
}
"""Of these tests, those of `make test` stay there: public reports, wrong verdicts and deaths brought them."""
PRICE_S = {"value": 9.0, "code": 4.0}
"""CPU seconds that a value of a cell or a block of code may cost which no other test has."""
EXTENDED = 4
"""How many times its cost a test must be worth that is extended so far."""
NO_TESTS = 5
"""Exit status of pytest."""
BATCH_S = 240.0
"""CPU seconds of the touched tests that run together, and share sweeps."""

Digests = dict[str, dict[str, str]]
"""Of each file below src/, the digest of each function, and under `""` that of all other lines."""


@dataclass(frozen=True)
class Recorded:
    """What a test did when it ran alone."""

    test: str
    cpu_s: float
    marks: frozenset[str]
    shares: frozenset[str]
    """Fixtures of its file."""
    blocks: frozenset[int]
    values: frozenset[str]

    @property
    def function(self) -> str:
        return _function(self.test)

    @property
    def is_extended(self) -> bool:
        return "extended" in self.marks

    @property
    def is_cheap(self) -> bool:
        return not self.marks & {"slow", "browser", "extended"} and self.cpu_s <= CHEAP_S


def _function(test: str) -> str:
    """A test without its parameters."""
    return test.partition("[")[0]


@dataclass
class Entered:
    """Which extended tests, without their parameters, enter each function of src/, and its digest then."""

    digests: Digests
    tests: dict[tuple[str, str], set[str]]
    """By file and function."""

    def write(self, file: Path) -> None:
        """Write the tests, their sets in hexadecimal, and of each file's functions digest, set and name."""
        tests = sorted(set().union(*self.tests.values()))
        number = {test: 1 << at for at, test in enumerate(tests)}
        bits = {place: sum(number[test] for test in found) for place, found in self.tests.items()}
        sets = sorted({0, *bits.values()})
        parts = [tests, [f"{one:x}" for one in sets]]
        for path, functions in self.digests.items():
            parts.append([path])
            for name, digest in functions.items():
                parts[-1].append(f"{digest} {sets.index(bits.get((path, name), 0))} {name}")
        file.write_text("\n\n".join("\n".join(part) for part in parts) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, file: Path) -> "Entered":
        """Read what `write` has written.

        Raises:
            OSError, ValueError, IndexError: there is nothing of that.
        """
        text = file.read_text(encoding="utf-8").removesuffix("\n")
        tests, sets, *files = (part.split("\n") for part in text.split("\n\n"))
        found = cls({}, {})
        for path, *rows in files:
            found.digests[path] = {}
            for digest, number, name in (row.split(" ") for row in rows):
                bits = int(sets[int(number)], 16)
                found.digests[path][name] = digest
                found.tests[path, name] = {test for at, test in enumerate(tests) if bits >> at & 1}
        return found

    def touched(self, now: Digests) -> dict[tuple[str, str], set[str]]:
        """Functions with another digest than the recorded one, each with the tests that enter it. If no test
        does, they are those that enter its file."""
        of_file = defaultdict[str, set[str]](set)
        for (path, _), tests in self.tests.items():
            of_file[path] |= tests
        return {
            (path, name): self.tests.get((path, name)) or of_file[path]
            for path, functions in now.items()
            for name, digest in functions.items()
            if self.digests.get(path, {}).get(name) != digest
        }


def record(folder: Path, minutes: float, words: list[str]) -> None:
    """Run the tests that no file in the folder has a line of, each alone, and add a line for each."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **entered.prepare(folder.resolve())}
    environment["PYTHONPATH"] += f"{os.pathsep}{TESTS}{os.pathsep}{Path(__file__).parent}"
    (folder / "digests.json").write_text(json.dumps(digests_of_source()))
    asked = [sys.executable, "-m", "pytest", "-p", "recorded", "-q", "--maxschedchunk=1", *words]
    running = subprocess.Popen(asked, cwd=ROOT, env=environment, start_new_session=True)
    try:
        running.wait(minutes * 60 or None)
    except subprocess.TimeoutExpired:
        print(f"{minutes:g} minutes are over")
    finally:
        if running.poll() is None:
            os.killpg(running.pid, signal.SIGKILL)


def choose(folder: Path, scales: dict[str, float], of_mutants: Path | None) -> None:
    """Write the tiers of the tests, and which functions the extended ones enter. Tests without a record keep
    their tier."""
    tests = recorded(folder, scales)
    costs = {test.test: test.cpu_s for test in tests}
    left_out = {name for tier, _, name in tiers() if tier == "extended"}
    # A mutant that a test of `make test` without a record catches needs no other.
    killing = killers(of_mutants) if of_mutants else []
    killing = [names for names in killing if names <= costs.keys() | left_out]
    kept = chosen(tests, killing)
    for names in killing:
        if not names & kept.keys():
            print(f"only extended tests without a record catch a mutant, such as {min(names)}")
    reasons = dict.fromkeys(costs, "extended") | kept
    for tier, cpu_s, name in tiers():
        if name not in costs:
            reasons[name], costs[name] = tier, float(cpu_s)
    lines = [f"{reason} {costs[name]:.1f} {name}" for name, reason in sorted(reasons.items())]
    TIERS.write_text(
        "\n".join(line for line in lines if not line.startswith("cheap ")) + "\n", encoding="utf-8"
    )
    extended = {_function(name) for name, reason in reasons.items() if reason == "extended"}
    found = Entered(json.loads((folder / "digests.json").read_text()), defaultdict(set))
    blocks = [entered.Block(*block) for block in json.loads((folder / "blocks.json").read_text())]
    places = [(path, outermost(function, found.digests[path])) for path, function, _ in blocks]
    for test in tests:
        for place in {places[block] for block in test.blocks} if test.function in extended else ():
            found.tests[place].add(test.function)
    found.write(ENTERED)
    for reason in sorted({*reasons.values()}):
        seconds = [costs[name] for name, given in reasons.items() if given == reason]
        print(f"{reason:9} {len(seconds):5} tests {sum(seconds):7.0f} CPU s, each alone")


def tiers() -> list[list[str]]:
    """The tier, the CPU seconds and the name of each test in tests/tiers.txt."""
    return [line.split(" ", 2) for line in TIERS.read_text(encoding="utf-8").splitlines()]


def recorded(folder: Path, scales: dict[str, float]) -> list[Recorded]:
    """What the tests did when they last passed; the CPU seconds of a file are multiplied by its scale."""
    found = {}
    for path in sorted(folder.glob("*.jsonl"), key=lambda path: path.stat().st_mtime):
        for line in path.read_text(encoding="utf-8").splitlines():
            said = json.loads(line)
            if said["outcome"] == "passed":
                seen = (frozenset(said[kind]) for kind in ("marks", "shares", "blocks", "values"))
                marks, shares, blocks, values = seen
                values = frozenset() if "browser" in marks else values  # its rows are invented
                cpu_s = said["cpu_s"] * scales.get(path.name, 1)
                found[said["test"]] = Recorded(said["test"], cpu_s, marks, shares, blocks, values)
    return [*found.values()]


def killers(file: Path) -> list[frozenset[str]]:
    """The tests that fail with each mutant: what `bench/mutants.py --killers --output` has written."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return [frozenset(tests) for line in lines if (tests := json.loads(line)["tests"])]


def chosen(tests: list[Recorded], killing: list[frozenset[str]]) -> dict[str, str]:
    """The tests that `make test` has, each with the reason in a word."""
    kept = {test.test: "cheap" if test.cpu_s <= QUICK_S else "second" for test in tests if test.is_cheap}
    for reason, pattern in KEPT.items():
        kept |= {
            test.test: reason for test in tests if re.search(pattern, test.test) and not test.is_extended
        }
    cheapest_first = sorted(tests, key=lambda test: (test.is_extended, test.cpu_s))
    for names in killing:
        killing_ones = [test.test for test in cheapest_first if test.test in names]
        if killing_ones and not names & kept.keys():
            kept[killing_ones[0]] = "mutant"
    cover(tests, kept, "value", lambda test: test.values)
    cover(tests, kept, "code", lambda test: test.blocks)
    drop(tests, kept)
    spent = sum(test.cpu_s for test in tests if kept.get(test.test, "cheap") not in ("cheap", "second"))
    functions = {test.function for test in tests if test.test in kept}
    for test in cheapest_first:
        if test.function not in functions and not test.is_extended and spent + test.cpu_s <= BUDGET_S:
            kept[test.test] = "only"
            functions.add(test.function)
            spent += test.cpu_s
    made = frozenset[str]().union(*(test.shares for test in tests if test.test in kept))
    for test in tests:
        if test.shares & made and test.test == test.function and not test.is_extended:
            kept.setdefault(test.test, "shared")
    return kept


def cover(
    tests: list[Recorded], kept: dict[str, str], reason: str, items: Callable[[Recorded], frozenset[Any]]
) -> None:
    """Keep, for this reason, cheap tests that have together the items which no kept test has. An item that
    costs too much is left to the extended tests."""
    left = {item for test in tests for item in items(test)}
    left -= {item for test in tests if test.test in kept for item in items(test)}
    while left:
        shares = [
            (len(left & items(test)) / (1 + test.cpu_s) / (EXTENDED if test.is_extended else 1), number)
            for number, test in enumerate(tests)
        ]
        share, number = max(shares)
        best = tests[number]
        if share < 1 / PRICE_S[reason]:
            return
        kept[best.test] = reason
        left -= items(best)


def drop(tests: list[Recorded], kept: dict[str, str]) -> None:
    """Drop, the dearest first, what was kept for items that others turned out to have too."""
    having = Counter(item for test in tests if test.test in kept for item in test.blocks | test.values)
    for test in sorted(tests, key=lambda test: -test.cpu_s):
        items = test.blocks | test.values
        if kept.get(test.test) in ("value", "code") and all(having[item] > 1 for item in items):
            having.subtract(items)
            del kept[test.test]


def digests_of_source() -> Digests:
    """Those of the functions of src/ as it is now."""
    paths = sorted(entered.SRC.rglob("*.py"))
    return {
        path.relative_to(entered.SRC).as_posix(): digests(path.read_text(encoding="utf-8")) for path in paths
    }


class _Functions(ast.NodeTransformer):
    """Takes the outermost functions and methods out of a tree."""

    def __init__(self) -> None:
        self.taken = defaultdict[str, list[ast.AST]](list)
        self._class = ""

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self._class, outer = f"{self._class}{node.name}.", self._class
        node = self.generic_visit(node)
        self._class = outer
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._take(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._take(node)

    def _take(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.taken[f"{self._class}{node.name}"].append(node)


class _NoDocstrings(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_text else node


def digests(source: str) -> dict[str, str]:
    """The digest of each function and method without docstrings, comments and layout; a nested one is part of
    its outer."""
    tree, functions = _NoDocstrings().visit(ast.parse(source)), _Functions()
    rest = functions.visit(tree)
    parts = {"": [rest], **functions.taken}
    code = {name: "\n".join(map(ast.unparse, nodes)) for name, nodes in parts.items()}
    return {name: hashlib.sha256(text.encode()).hexdigest()[:8] for name, text in code.items()}


def outermost(function: str, known: Iterable[str]) -> str:
    """The function of a file that has this one inside."""
    parts = function.split(".")
    names = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
    return next((name for name in names if name in known), "")


def touched(minutes: float, keeps: bool) -> int:
    """Run the extended tests that enter a changed function; 1 if a test fails, 0 if none can be chosen."""
    began = time.monotonic()
    try:
        before = Entered.read(ENTERED)
        costs = {test: float(cpu_s) for tier, cpu_s, test in tiers() if tier == "extended"}
    except (OSError, ValueError, IndexError) as error:
        print(f"no extended tests: {TIERS.name} or {ENTERED.name} cannot be read: {error}")
        return 0
    changed = before.touched(digests_of_source())
    functions = set().union(*changed.values())
    left = sorted((test for test in costs if _function(test) in functions), key=costs.__getitem__)
    left = _existing(left) if left else []
    print(f"{len(changed)} functions have changed, which {len(left)} extended tests enter", flush=True)
    number = len(left)
    failed = False
    while left and time.monotonic() - began < 60 * minutes:
        batch, spent = left[:1], costs[left[0]]
        while len(batch) < len(left) and spent + costs[left[len(batch)]] <= BATCH_S:
            spent += costs[left[len(batch)]]
            batch.append(left[len(batch)])
        failed |= _pytest("-n", "3", "--dist", "loadfile", tests=batch).returncode not in (0, NO_TESTS)
        left = left[len(batch) :]
    took = (time.monotonic() - began) / 60
    print(f"{number - len(left)} extended tests ran in {took:.0f} min; {len(left)} are left out")
    if keeps and not failed:
        for (path, name), tests in changed.items():
            if not tests & {_function(test) for test in left}:
                before.digests.setdefault(path, {})[name] = digests_of_source()[path][name]
        before.write(ENTERED)
    return int(failed)


def _existing(tests: list[str]) -> list[str]:
    """Those of the tests that there still are."""
    files = {test.partition("::")[0] for test in tests}
    there = [file for file in sorted(files) if (ROOT / file).exists()]
    listed = _pytest("--collect-only", "-q", tests=there, capture_output=True, text=True).stdout
    found = {*listed.splitlines()}
    return [test for test in tests if test in found]


def _pytest(*words: str, tests: list[str], **how: Any) -> "subprocess.CompletedProcess[str]":
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".txt") as names:
        names.write("\n".join(tests))
        names.flush()
        asked = [sys.executable, "-m", "pytest", *words, f"@{names.name}"]
        return subprocess.run(asked, cwd=ROOT, check=False, **how)


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = asked.add_subparsers(dest="command", required=True)
    for name, summary in (
        ("record", "run tests, each alone, and write what they cost and enter"),
        ("choose", "write tests/tiers.txt and tests/entered.txt from a record"),
    ):
        commands.add_parser(name, help=summary).add_argument("folder", type=Path)
    commands.choices["record"].add_argument(
        "--minutes", type=float, default=0, help="end after these; default: never"
    )
    commands.choices["choose"].add_argument(
        "--killers", type=Path, help="keep a killer of each mutant: a file of bench/mutants.py --killers -o"
    )
    commands.choices["choose"].add_argument(
        "--scale",
        type=lambda word: word.rsplit("=", 1),
        action="append",
        default=[],
        metavar="NAME.jsonl=FACTOR",
        help="multiply the CPU seconds of this file of the record, which was made on another machine",
    )
    running = commands.add_parser("touched", help="run the extended tests that a change touches")
    running.add_argument("--minutes", type=float, default=40, help="begin no tests after these")
    running.add_argument(
        "--keep", action="store_true", help="write the digests of functions whose tests passed"
    )
    given, words = asked.parse_known_args()
    if given.command == "record":
        record(given.folder, given.minutes, words)
    elif given.command == "choose":
        scales = {name: float(factor) for name, factor in given.scale}
        choose(given.folder, scales, given.killers)
    else:
        return touched(given.minutes, given.keep)
    return 0


if __name__ == "__main__":
    sys.exit(main())
