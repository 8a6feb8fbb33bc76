"""What belongs to the process and not to a training run, and what neither a save nor a load may change."""

import gc
import os
import random
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch

from dcpbench.verify.snapshot import Leaves, retained, snapshot_nested

_SETTLE_S = 2.0
"""How long threads that have done their work, and what they hold open, may take to go."""


def snapshot_process(device: torch.device) -> Leaves:
    """The default random generators, determinism, gradient mode, default dtype and device."""
    generators = {"cpu": torch.get_rng_state(), "python": f"{hash(random.getstate()):x}"}
    if device.type == "cuda":
        generators["cuda"] = torch.cuda.get_rng_state(device)
    return retained(snapshot_nested({"generator": generators, "process": process_flags(device)}))


def process_flags(device: torch.device) -> dict[str, bool | str]:
    """Determinism, precision, gradient mode, default dtype and device, by name."""
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "float32_precision": torch.get_float32_matmul_precision(),
        "grad_mode": torch.is_grad_enabled(),
        "inference_mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled(device.type),
        "default_dtype": str(torch.get_default_dtype()),
        "default_device": str(torch.get_default_device()),
    }


def snapshot_open(folder: Path, counts: bool) -> Leaves:
    """Which files below `folder` are open, and, with `counts`, how many threads and descriptors there are."""
    opened, inside = [], f"{folder.resolve()}{os.sep}"
    descriptors = os.listdir("/proc/self/fd")  # noqa: PTH208 - it is done often, and this is the fast way
    for one in descriptors:
        with suppress(OSError):  # it is closed by now, as that of the listing is
            opened.append(os.readlink(f"/proc/self/fd/{one}"))  # noqa: PTH115
    files: Leaves = {"process.open_files": ", ".join(sorted(one for one in opened if one.startswith(inside)))}
    if not counts:
        return files
    return files | {"process.threads": threading.active_count(), "process.descriptors": len(descriptors)}


def left_open(folder: Path, before: Leaves) -> Leaves:
    """The same once it has settled; what has become less counts as what it was."""
    until = time.monotonic() + _SETTLE_S
    while True:
        now = snapshot_open(folder, counts=len(before) > 1)
        grown = {name: leaf for name, leaf in now.items() if leaf > before[name]}
        if not grown or time.monotonic() > until:
            return {**before, **grown}
        gc.collect()
        time.sleep(0.01)
