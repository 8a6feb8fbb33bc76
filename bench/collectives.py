"""How many collectives does a cell call, and who calls them?  python bench/collectives.py [overrides]

Runs `parallel=fsdp2 save=async` on four CPU ranks unless asked for something else, and prints for rank 0 how
often each function of dcpbench, or torch below it, has called each collective, and on which device.
"""

# ruff: noqa: T201
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from functools import wraps
from pathlib import Path
from typing import Any

from dcpbench.core.plugins import API, Plugin

plugin = Plugin(name="collectives", api=API, built=("collectives:count",))

COLLECTIVES = (
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "barrier"),
    *("broadcast", "broadcast_object_list", "gather", "gather_object", "reduce_scatter", "scatter"),
    *("reduce_scatter_tensor", "scatter_object_list", "all_to_all_single"),
)
LINES = "DCPBENCH_COLLECTIVES"
ASKED = ["parallel=fsdp2", "save=async", "device=cpu", "world_size=4"]


def count(cell: Any, run: Any) -> None:
    """Write a line for each collective from now on; called on each rank with each run."""
    from torch.distributed import distributed_c10d as c10d

    if cell.world.rank == 0 and not hasattr(c10d.barrier, "counted"):
        for name in COLLECTIVES:
            replace(c10d, name)


def replace(c10d: Any, name: str) -> None:
    import torch.distributed as dist

    original = getattr(c10d, name)

    @wraps(original)
    def counted(*arguments: Any, **options: Any) -> Any:
        caller, inside = called_by()
        if not inside:
            tensors = [one for one in (*arguments, *options.values()) if hasattr(one, "device")]
            line = json.dumps([caller, name, tensors[0].device.type if tensors else "objects"])
            with Path(os.environ[LINES]).open("a") as lines:
                lines.write(f"{line}\n")
        return original(*arguments, **options)

    counted.counted = True  # type: ignore[attr-defined]
    for module in (c10d, dist):
        setattr(module, name, counted)


def called_by() -> tuple[str, bool]:
    """The innermost function of dcpbench that is running, and whether another collective has called this."""
    frame, inside = sys._getframe(2), False
    while frame:
        if frame.f_code.co_name == "counted":
            inside = True
        module = frame.f_globals.get("__name__", "")
        if module.startswith("dcpbench."):
            return f"{module.removeprefix('dcpbench.')}.{frame.f_code.co_name}", inside
        frame = frame.f_back  # type: ignore[assignment]
    return "torch", inside


def main() -> int:
    with tempfile.TemporaryDirectory() as parent:
        lines, folder = Path(parent) / "lines", Path(parent) / "sweep"
        around = {
            "DCPBENCH_PLUGINS": "collectives",
            LINES: str(lines),
            "PYTHONPATH": str(Path(__file__).parent),
        }
        command = [sys.executable, "-m", "dcpbench", *(sys.argv[1:] or ASKED), f"hydra.sweep.dir={folder}"]
        ended = subprocess.run(command, env=around, capture_output=True, text=True, check=False)
        called = Counter(tuple(json.loads(line)) for line in lines.read_text().splitlines())
        rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    print(f"{len(rows)} cells: {', '.join(row['status'] for row in rows)}; {called.total()} collectives")
    for (caller, name, device), times in called.most_common():
        print(f"{times:6}  {name:24} {device:8} {caller}")
    return ended.returncode


if __name__ == "__main__":
    sys.exit(main())
