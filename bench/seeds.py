"""How long do the cells that stand for PyTorch's own checkpoint tests take?  python bench/seeds.py

`experiment=seeds`, start and report included, twice: cold, with nothing compiled before, and warm.
"""

# ruff: noqa: T201
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        graphs = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        return max(run(Path(folder), start, graphs) for start in ("cold", "warm"))


def run(folder: Path, start: str, graphs: dict[str, str]) -> int:
    command = [sys.executable, "-m", "dcpbench", "experiment=seeds", f"hydra.sweep.dir={folder / start}"]
    began = time.perf_counter()
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **graphs})
    took = time.perf_counter() - began
    counted = [line for line in ended.stdout.splitlines() if " cells: " in line]
    print(f"{start}: {took:.1f} s, {counted[-1] if counted else ended.stderr}", flush=True)
    return ended.returncode


if __name__ == "__main__":
    sys.exit(main())
