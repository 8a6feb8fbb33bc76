"""Mutation testing of the verification: each mutant is one small defect in the code that verifies cells, and
has to be caught by a test or by a sweep of healthy and planted cells.

    python bench/mutants.py --sample 40 --seed 1
    python bench/mutants.py --only compare/leaves.py --killers

A mutant is a copy of src/ with one edit, run in the environment of this process. It is caught when one of the
steps ends with another exit status than 0, which is what it has without the edit, or takes ten times as long.
Mutants that behave as the original does stand in mutants-equivalent.txt with the reason, and are not run; nor
are those with a line already in the file of `--output`. With `--killers` a step goes on after a failure,
and the line names all tests that fail; `scripts/choose_tests.py` reads them. Beside the edits that are made
everywhere there are those of `mutations.PLANTED`.
"""

# ruff: noqa: T201

import argparse
import json
import multiprocessing
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from mutations import EDITS, PACKAGE, Mutant, mutants, planted

ROOT = Path(__file__).resolve().parents[1]
VERIFICATION = (
    *("formats", "state", "compare", "cell", "scenarios", "twin"),
    *("core/rank_report.py", "core/stage_end.py", "verdict"),
)
EQUIVALENT = Path(__file__).with_name("mutants-equivalent.txt")
LEAST_LIMIT_S = 60.0

_CELLS = ("device=cpu", "world_size=2", "retry=0", "timeouts.cell_s=60")
_SWEEP = (sys.executable, "-m", "dcpbench", "-m", *_CELLS)
_PYTEST = ("-q", "-x", "-p", "no:cacheprovider", "-p", "no:logging", "-m", "not slow")
_KILLERS = ("--maxfail=1000",)
"""What overrides `-x`."""
STEPS: dict[str, tuple[str, ...]] = {
    "verdicts": (*_PYTEST, "tests/verdict"),
    "unit tests": (*_PYTEST, *(f"tests/{room}" for room in ("formats", "state", "compare"))),
    "cells alone": (*_PYTEST, "tests/cell", "tests/scenarios", "tests/twin", "tests/runs/test_mend.py"),
    "healthy cells": (
        *_SWEEP,
        *("parallel=ddp,fsdp2", "scenario=save_load,fine_tune,partial_load,in_place,overwrite", "saves=2"),
        "hydra.sweep.dir={scratch}/healthy",
    ),
    "planted cells": (*_SWEEP, "experiment=faults", "parallel=fsdp2", "hydra.sweep.dir={scratch}/planted"),
    "planted scenarios": (
        *(sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"),
        *("tests/scenarios/test_planted_defects.py", "tests/plugins/faults/test_mistrained.py"),
        *("tests/compare/test_on_ranks.py", "tests/plugins/defects/test_defects_alone.py"),
    ),
}
"""What has to fail, the quickest first; `{scratch}` is a folder of the mutant's own. What
does not begin with a program is arguments of pytest, in a process forked from one that has torch imported."""

_IMPORTED = ("torch", "torch.distributed.checkpoint", "torch.distributed.fsdp", "hypothesis", "hydra")

_forks = multiprocessing.get_context("forkserver")


def caught_by(
    mutant: Mutant, limits: Mapping[str, float | None], more: Sequence[str] = ()
) -> tuple[str, list[str]] | None:
    """The first step that does not end as it does without the edit, and which of its tests fail; None if the
    mutant survives.

    Args:
        limits: the steps, and seconds that each may take.
        more: words for pytest.
    """
    with tempfile.TemporaryDirectory(prefix="mutant-") as scratch:
        shutil.copytree(ROOT / "src", Path(scratch) / "src", ignore=shutil.ignore_patterns("__pycache__"))
        for beside in ("conf", "docs", "tests", "pyproject.toml"):
            (Path(scratch) / beside).symlink_to(ROOT / beside)
        (Path(scratch) / "src" / "dcpbench" / mutant.path).write_text(mutant.source(), encoding="utf-8")
        for step, limit_s in limits.items():
            words = [word.format(scratch=scratch) for word in STEPS[step]]
            if words[0] != sys.executable:
                tests = _forks.Process(target=_unit_tests, args=(scratch, [*words, *more]))
                tests.start()
                tests.join(limit_s)
                if tests.is_alive():
                    tests.kill()
                    return f"{step} (did not end)", []
                if tests.exitcode:
                    return step, _failed((Path(scratch) / "unit-tests.txt").read_text(encoding="utf-8"))
                continue
            environment = {**os.environ, "PYTHONPATH": _first_on_path(scratch)}
            try:
                ended = subprocess.run(
                    words, cwd=scratch, env=environment, capture_output=True, timeout=limit_s, check=False
                )
            except subprocess.TimeoutExpired:
                return f"{step} (did not end)", []
            if ended.returncode:
                return step, _failed(ended.stdout.decode())
    return None


def _failed(log: str) -> list[str]:
    return re.findall(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", log, re.MULTILINE)


def _first_on_path(scratch: str) -> str:
    return os.pathsep.join(filter(None, [f"{scratch}/src", os.environ.get("PYTHONPATH")]))


def _unit_tests(scratch: str, words: list[str]) -> None:
    """Run pytest in this process, on the code of a mutant."""
    import pytest

    os.chdir(scratch)
    beside = str(Path(__file__).parent)  # where `compare` is another module than tests/compare
    sys.path[:] = [f"{scratch}/src", *(folder for folder in sys.path if folder != beside)]
    os.environ["PYTHONPATH"] = _first_on_path(scratch)  # of the processes that tests start
    with Path("unit-tests.txt").open("w", encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        status = pytest.main(words)
        sys.stdout.flush()
        os._exit(int(status))


def main() -> int:
    """Run the mutants that were asked for; 1 if one survived."""
    asked = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else None)
    asked.add_argument("--only", action="append", default=[], help="files below src/dcpbench (several)")
    asked.add_argument("--planted", action="store_true", help="only those that are written down")
    asked.add_argument("--kind", action="append", default=[], choices=list(EDITS))
    asked.add_argument("--steps", action="append", default=[], choices=list(STEPS))
    asked.add_argument("--killers", action="store_true", help="name each test that fails")
    asked.add_argument("--sample", type=int, help="so many, drawn with --seed")
    asked.add_argument("--seed", type=int, default=0)
    asked.add_argument("--at-once", type=int, default=1)
    asked.add_argument("--list", action="store_true", help="print the mutants and run none")
    asked.add_argument("-o", "--output", type=Path, help="append a line of JSON for each")
    given = asked.parse_args()
    roots = [PACKAGE / place for place in given.only or VERIFICATION]
    if missing := [str(root.relative_to(PACKAGE)) for root in roots if not root.exists()]:
        asked.error(f"not in src/dcpbench: {', '.join(missing)}")
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
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads it once: before a test could set it
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
        more = _KILLERS if given.killers else ()
        running = {pool.submit(caught_by, one, limits, more): one for one in found}
        for ended in as_completed(running):
            one, (caught, tests) = running[ended], ended.result() or (None, [])
            ends[caught or "survived"] += 1
            print(f"{caught or 'SURVIVED':24} {one.path}:{one.line}: {one.kind}: {one.before}", flush=True)
            if given.output:
                record = {"mutant": one.name, "line": one.line, "caught": caught, "tests": tests}
                with given.output.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(record) + "\n")
    left_out = len(made.keys() & equivalent)
    print(f"{len(found)} mutants ({left_out} equivalent ones left out): {dict(ends)}")
    return 1 if ends["survived"] else 0


if __name__ == "__main__":
    sys.exit(main())
