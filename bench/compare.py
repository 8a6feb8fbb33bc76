"""Check that `compare` finds an injected slowdown of 10 %, and no change between equal sweeps.

    python bench/compare.py                # both of the following, in a temporary folder
    python bench/compare.py run FOLDER     # seven equal sweeps, and one whose saves take a tenth longer
    python bench/compare.py judge FOLDER   # each pair of the equal ones, and the slower one against each

Exits with 1 if equal sweeps are called slower or faster, or if the slowdown is not found.

On a CPU, whose few cores ranks and driver share, such a checkpoint is written in 40 ms, give or take 10 %.
There every save takes 0.5 s more, as if its storage were far away, and the slower one a tenth more of it all.
"""

# ruff: noqa: T201
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parent
EQUAL = [f"equal{number}" for number in range(1, 8)]
SLOWER = "slower"
MEMORY = "/dev/shm"  # noqa: S108
"""Checkpoints lie in memory: a disk may drift by more than what is planted."""
SHARE = 0.1
COMMON = ("repeats=5", "saves=1", "train_steps=1", "resume_steps=1", "sharing=none")
ON_GPUS = ("model=medium", "parallel=fsdp2,fsdp2_tp", "save=sync,async_cached", "storage.options.wait_s=0")
ON_CPU = (
    "model.options.sizes=[1024,1024,1024,1024,1024]",
    "parallel=ddp,fsdp2",
    "save=sync,async",
    "world_size=2",
    "storage.options.wait_s=0.5",
)


def main() -> int:
    words = sys.argv[1:]
    if not words:
        with tempfile.TemporaryDirectory() as folder:
            run(Path(folder))
            return judge(Path(folder))
    todo, folder = words[0], Path(words[1])
    if todo == "run":
        run(folder)
        return 0
    return judge(folder)


def run(folder: Path) -> None:
    """The equal sweeps, the slower one in their midst."""
    import torch

    cells = ON_GPUS if torch.cuda.is_available() else ON_CPU
    with tempfile.TemporaryDirectory(dir=MEMORY) as memory:
        sweeps(folder, cells, memory)


def sweeps(folder: Path, cells: tuple[str, ...], memory: str) -> None:
    for name in (*EQUAL[:4], SLOWER, *EQUAL[4:]):
        program = [sys.executable, "-m", "dcpbench", "--config-dir", str(BENCH / "conf"), "-m"]
        share = f"storage.options.share={SHARE if name == SLOWER else 0}"
        where = (f"hydra.sweep.dir={folder / name}", "storage=waiting", share, f"storage.root={memory}")
        path = os.pathsep.join([str(BENCH), os.environ.get("PYTHONPATH", "")])
        ended = subprocess.run(
            [*program, *cells, *COMMON, *where],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": path},
        )
        print(f"{name}: {(ended.stderr.splitlines() or [''])[-1]}", flush=True)
        if ended.returncode:
            sys.exit(ended.stdout + ended.stderr)


def judge(folder: Path) -> int:
    """Compare, and count what is called."""
    wrong = 0
    pairs = list(itertools.combinations(EQUAL, 2))
    for old, new in pairs:
        called = changed(compared(folder / old, folder / new))
        wrong += bool(called)
        print(*(f"{old} {new}: {line}" for line in called), sep="\n", end="\n" if called else "")
    print(f"{wrong} of {len(pairs)} comparisons of equal sweeps called anything slower or faster")
    missed = 0
    for old in EQUAL:
        lines = compared(folder / old, folder / SLOWER)
        (whole,) = (line for line in lines if line["metric"] == "save_s" and line["level"] == "all")
        single = sum(line["verdict"] == "slower" and line["level"] == "cell" for line in lines)
        others = [line for line in changed(lines) if not line.startswith("save_s")]
        missed += whole["verdict"] != "slower"
        wrong += bool(others)
        print(
            f"{old} {SLOWER}: save_s of all cells {whole['ratio']:.3f} ({whole['ratio_low']:.3f} to "
            f"{whole['ratio_high']:.3f}) {whole['verdict']}; {single} single cells slower {others or ''}"
        )
    print(f"{len(EQUAL) - missed} of {len(EQUAL)} comparisons with the slower sweep called it slower")
    return 1 if wrong or missed else 0


def compared(old: Path, new: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "dcpbench", "compare", str(old), str(new)]
    command += [
        "--ignore",
        "storage.options.share",
        "--metric",
        "save_s,load_s,save_stall_s",
        "--format",
        "json",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        sys.exit(ended.stderr)
    lines: list[dict[str, Any]] = json.loads(ended.stdout)
    return lines


def changed(lines: list[dict[str, Any]]) -> list[str]:
    return [
        f"{line['metric']} of {line['name'] or 'a cell'}: {line['ratio']:.3f} {line['verdict']}"
        for line in lines
        if line["verdict"] in ("slower", "faster")
    ]


if __name__ == "__main__":
    sys.exit(main())
