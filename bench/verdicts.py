"""Does another commit judge every cell as this one does?

    python bench/verdicts.py write old.jsonl --src ../older    # a checkout of the older commit
    python bench/verdicts.py write new.jsonl
    python bench/verdicts.py compare old.jsonl new.jsonl       # prints the differences; 1 if there are any

`write` runs experiment=seeds, faults and crash and the pairs of experiment=nightly on CPU ranks, and writes
a line for each cell: its overrides, axes, status and checks. `--small` runs seeds, one cell of each fault, 30
of crash and some 60 pairs, always the same ones, in under ten minutes on 2 cores. The sweeps are kept next to
the table, in a folder named after it; the same command again resumes them. dcpbench is used by its command
line alone, and of its files only columns of `results.jsonl` are read.
"""

# ruff: noqa: T201
import argparse
import hashlib
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
AXES = tuple(
    """
    scenario parallel load_parallel compile save model optimizer state_dict scheduler component load_into
    checkpointer storage fault optimizer_state activation_checkpointing world_size load_world_size device seed
    """.split()  # noqa: SIM905
)
COMMON = ("device=cpu", "sharing=correctness", "timeouts.cell_s=900")
PAIRS = "pairs"
SMALL_CRASH = 30
SMALL_LIST = 7
"""A list of the pairs keeps this number of values; the two longest decide how many cells there are."""
SLOW = ("files_of_tensors", "threads_of_ranks")
"""Blocks of experiment=crash whose cells take minutes each."""

_MATRIX = """
import sys
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from dcpbench.config.schema import conf_folder
from dcpbench.core.plugins import load_plugins
try:
    from dcpbench.cli.by_hydra import register_groups
except ImportError:  # an older checkout
    from dcpbench.cli.run import register_groups
load_plugins()
register_groups([])
with initialize_config_dir(str(conf_folder()), version_base="1.3"):
    composed = compose("config", [f"experiment={sys.argv[1]}"], return_hydra_config=True)
print(OmegaConf.to_yaml(composed.hydra.sweeper.matrix, resolve=True))
"""
"""Prints the blocks of an experiment."""

Block = Mapping[str, Any]
Cell = dict[str, str]


class Checkout:
    """A checkout of dcpbench, run as a command."""

    def __init__(self, src: Path, python: Path | None) -> None:
        own = src / ".venv/bin/python"
        self._python = str(python or (own if own.exists() else sys.executable))
        self._environment = {**os.environ, "PYTHONPATH": str(src / "src")}

    def run(self, folder: Path, *words: str) -> None:
        """Run a sweep in `folder`, or resume it."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        begun = (folder / "sweep.json").exists()
        words = ("resume", str(folder)) if begun else ("-m", *words, f"hydra.sweep.dir={folder}")
        print(f"{folder.name}: dcpbench {shlex.join(words)}", flush=True)
        self._dcpbench(words, folder.parent, stdout=subprocess.DEVNULL)

    def blocks(self, experiment: str, folder: Path) -> dict[str, dict[str, Any]]:
        """The blocks of an experiment."""
        program = [self._python, "-c", _MATRIX, experiment]
        printed = subprocess.run(
            program, cwd=folder, env=self._environment, stdout=subprocess.PIPE, text=True, check=True
        )
        found = yaml.safe_load(printed.stdout)
        assert isinstance(found, dict)
        return found

    def _dcpbench(self, words: Iterable[str], cwd: Path, stdout: int) -> "subprocess.CompletedProcess[str]":
        program = [self._python, "-m", "dcpbench", *words]
        ended = subprocess.run(program, cwd=cwd, env=self._environment, stdout=stdout, text=True, check=False)
        if ended.returncode not in (0, 1):  # 1: some cell is not ok
            sys.exit(f"dcpbench {shlex.join(words)} ended with {ended.returncode}")
        return ended


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    write = commands.add_parser("write", help="run the sweeps and write their table")
    write.add_argument("table", type=Path)
    write.add_argument("--small", action="store_true", help="some cells of each sweep")
    write.add_argument("--src", type=Path, default=ROOT, help="the checkout to run; this one by default")
    write.add_argument("--python", type=Path, help="its interpreter; by default its .venv's, or this one")
    compare = commands.add_parser("compare", help="print the differences of two tables")
    compare.add_argument("old", type=Path)
    compare.add_argument("new", type=Path)
    asked = parser.parse_args()
    if asked.command == "compare":
        return compared(read(asked.old), read(asked.new))
    table = asked.table.resolve()
    sweeps = table.with_name(f"{table.stem}-sweeps")
    sweeps.mkdir(parents=True, exist_ok=True)
    lines: list[dict[str, Any]] = []
    checkout = Checkout(asked.src.resolve(), asked.python)
    for name, words in words_of_sweeps(checkout, sweeps, asked.small):
        checkout.run(sweeps / name, *COMMON, *words)
        lines += lines_of(name, sweeps / name)
    with_all_checks(lines)
    table.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    counts = Counter(line["status"] for line in lines)
    print(f"{table}: {len(lines)} cells: {', '.join(f'{n} {status}' for status, n in counts.most_common())}")
    return 0


def words_of_sweeps(checkout: Checkout, folder: Path, small: bool) -> Iterator[tuple[str, list[str]]]:
    """The name of each sweep, and its words on the command line."""
    block = checkout.blocks("nightly", folder)[PAIRS]
    pairs = {key: _drawn(values(value), SMALL_LIST if small else None) for key, value in block.items()}
    yield "seeds", ["experiment=seeds"]
    if not small:
        yield "faults", ["experiment=faults"]
        yield "crash", ["experiment=crash"]
    else:
        yield (
            "faults",
            _experiment(folder, "some_faults", one_of_each_fault(checkout.blocks("faults", folder))),
        )
        yield (
            "crash",
            _experiment(folder, "some_crashes", some_of_each_block(checkout.blocks("crash", folder))),
        )
    yield PAIRS, ["verify=deep", *(f"{key}={','.join(drawn)}" for key, drawn in pairs.items())]


def one_of_each_fault(blocks: Mapping[str, Block]) -> list[Cell]:
    cells = _drawn([cell for block in blocks.values() for cell in product(block)])
    return [*{cell["fault"]: cell for cell in cells}.values()]


def some_of_each_block(blocks: Mapping[str, Block]) -> list[Cell]:
    """The first cell of each block, then the second of each, and so on."""
    drawn = [_drawn(product(block)) for name, block in blocks.items() if name not in SLOW]
    dealt = (cell for cells in itertools.zip_longest(*drawn) for cell in cells if cell is not None)
    return [*itertools.islice(dealt, SMALL_CRASH)]


def product(block: Block) -> list[Cell]:
    lists = [[(key, value) for value in values(listed)] for key, listed in block.items()]
    return [dict(pairs) for pairs in itertools.product(*lists)]


def values(listed: Any) -> list[str]:
    """The values of a list of a block, as words: `one,all`, `[1,2]`, false."""
    text = str(listed).lower() if isinstance(listed, bool) else str(listed)
    return [value.strip() for value in re.split(r",(?![^\[]*\])", text)]


def _drawn(items: list[Any], count: int | None = None) -> list[Any]:
    """So many of these, in an order that depends on nothing but each of them."""
    return sorted(items, key=lambda item: hashlib.sha256(json.dumps(item).encode()).digest())[:count]


def _experiment(folder: Path, name: str, cells: list[Cell]) -> list[str]:
    """The words that run these cells, each a block of an experiment that is written here."""
    blocks = {f"cell_{number}": cell for number, cell in enumerate(cells)}
    path = folder / "conf/experiment" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"# @package _global_\n{yaml.safe_dump({'hydra': {'sweeper': {'matrix': blocks}}})}")
    return ["--config-dir", str(folder / "conf"), f"experiment={name}"]


def lines_of(sweep: str, folder: Path) -> list[dict[str, Any]]:
    """A line for each row of a sweep, in the order of the cells' overrides."""
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    lines = [
        {
            "sweep": sweep,
            "cell": identity(row["overrides"]),
            "axes": {axis: row.get(axis) for axis in AXES},
            "status": row["status"],
            "checks": {name: value for name, value in row.items() if is_check(name, value)},
        }
        for row in rows
    ]
    return sorted(lines, key=lambda line: line["cell"])


def identity(overrides: str) -> str:
    """The overrides of a cell in one order, without those that choose no cell."""
    beside = ("experiment=", "sharing=", "timeouts.", "device=")
    words = (word for word in shlex.split(overrides) if not word.startswith(beside))
    return " ".join(sorted(re.sub(r"=(True|False)$", lambda found: found[0].lower(), word) for word in words))


def is_check(column: str, value: Any) -> bool:
    """Whether this is a verdict; `flaky` is about a retry."""
    return isinstance(value, bool) and column not in (*AXES, "flaky")


def with_all_checks(lines: list[dict[str, Any]]) -> None:
    """Give each line all checks of the table: null where one was not made."""
    names = sorted({name for line in lines for name in line["checks"]})
    for line in lines:
        line["checks"] = {name: line["checks"].get(name) for name in names}


def read(table: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The lines of a table, by sweep and cell."""
    lines = [json.loads(line) for line in table.read_text().splitlines()]
    return {(line["sweep"], line["cell"]): line for line in lines}


def compared(
    old: Mapping[tuple[str, str], dict[str, Any]], new: Mapping[tuple[str, str], dict[str, Any]]
) -> int:
    """Print what differs; 1 if anything does."""
    different = 0
    for key in sorted({*old, *new}):
        before, now = old.get(key), new.get(key)
        if before is None or now is None:
            told = [f"only in the {'old' if before else 'new'} table"]
        else:
            told = differences(before, now)
        different += bool(told)
        print(*(f"{key[0]}: {key[1]}\n    {line}" for line in told), sep="\n", end="\n" if told else "")
    print(f"{len(old)} cells and {len(new)} cells: {different} differ")
    return 1 if different or not old else 0


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    told = [] if old["status"] == new["status"] else [f"status: {old['status']} -> {new['status']}"]
    for part in ("axes", "checks"):
        for name in sorted({*old[part], *new[part]}):
            before, now = old[part].get(name), new[part].get(name)
            if before != now:
                told.append(f"{name}: {json.dumps(before)} -> {json.dumps(now)}")
    return told


if __name__ == "__main__":
    sys.exit(main())
