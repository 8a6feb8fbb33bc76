"""Compare the speed of the digest with that of reading the same tensor.  python bench/digest.py [--bytes N]

The comparison is torch.equal on one thread on CPU, and a copy on the device on CUDA. On CUDA it first checks
that the Triton kernel and the torch operations agree, and exits with 1 if they do not.
"""

# ruff: noqa: T201
import argparse
import contextlib
import importlib
import itertools
import math
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from dcpbench.state import digest as module
from dcpbench.state.digest import digest
from dcpbench.state.layout import Extent, whole

RUNS = 15


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--bytes", type=int, help="size of the tensor (default: 256 MiB on CPU, 4 GiB on CUDA)"
    )
    arguments = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    size = arguments.bytes or (2**32 if cuda else 2**28)
    torch.set_num_threads(1)
    if cuda:
        triton = importlib.import_module("triton").__version__ if module._kernel() else "no"
        versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}, triton {triton}"
        print(f"{versions}, {torch.cuda.get_device_name()}")
        wrong = disagreements()
        if wrong:
            print("Triton and torch operations DISAGREE:", *wrong, sep="\n  ")
            return 1
    else:
        print(f"torch {torch.__version__}, {platform.processor() or platform.machine()}, one thread")
    print(f"tensors of {size / 2**20:.0f} MiB, median of {RUNS} runs; GB/s are 10^9 bytes\n")
    print(f"{'what':42}{'ms':>9}{'GB/s':>9}  counted")
    for dtype in (torch.float32, torch.bfloat16):
        tensor = filled(size, dtype, device)
        measure_tensor(tensor, str(dtype).removeprefix("torch."), cuda)
        del tensor
    return 0


def measure_tensor(tensor: torch.Tensor, name: str, cuda: bool) -> None:
    size = tensor.numel() * tensor.element_size()
    other = tensor.clone()
    if cuda:
        took = seconds(lambda: other.copy_(tensor), cuda)
        row(
            f"{name} copy on the device", took, 2 * size, f"read + written; {size / took / 1e9:.0f} one-sided"
        )
    else:
        # NaN is not equal to NaN: the bits are compared, or else it would stop at the first.
        one, two = (
            each.view(module._WORDS[each.element_size()]).view(torch.int16) for each in (tensor, other)
        )
        took = seconds(lambda: torch.equal(one, two), cuda)
        row(
            f"{name} torch.equal (as int16)",
            took,
            size,
            f"one of the two; {2 * size / took / 1e9:.1f} for both",
        )
        if tensor.dtype == torch.float32:
            floats = tensor.nan_to_num_(), other.nan_to_num_()
            took = seconds(lambda: torch.equal(*floats), cuda)
            row(f"{name} torch.equal", took, size, f"one of the two; {2 * size / took / 1e9:.1f} for both")
    columns = 4096
    shape = (tensor.numel() // columns, columns)
    sharded = Extent((shape[0], 4 * columns), (0, columns), shape, 0, math.prod(shape))
    for what, extent in (("whole", whole(tensor)), ("a fourth of the columns", sharded)):
        part = tensor[: extent.numel]
        took = seconds(lambda part=part, extent=extent: digest(part, extent), cuda)
        extra = extra_memory(lambda part=part, extent=extent: digest(part, extent), cuda) / size
        row(
            f"{name} digest, {what}",
            took,
            extent.numel * tensor.element_size(),
            f"read; {extra:.2%} extra memory",
        )


def row(what: str, took: float, counted: int, note: str) -> None:
    print(f"{what:42}{1e3 * took:9.2f}{counted / took / 1e9:9.2f}  {note}", flush=True)


def filled(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Random bits, `size` bytes rounded down to rows of 4096 elements."""
    width = torch.empty(0, dtype=dtype).element_size()
    raw = torch.empty(max(1, size // (4096 * width)) * 4096 * width, dtype=torch.uint8, device=device)
    raw.view(torch.int32).random_(-(2**31), 2**31 - 1)
    return raw.view(dtype)


def seconds(call: Callable[[], object], cuda: bool) -> float:
    """The median of `RUNS` runs after three to warm up."""
    for _ in range(3):
        call()
    taken = []
    for _ in range(RUNS):
        if cuda:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end) / 1e3)
        else:
            clock = time.perf_counter()
            call()
            taken.append(time.perf_counter() - clock)
    return statistics.median(taken)


def extra_memory(call: Callable[[], object], cuda: bool) -> int:
    """Bytes beyond what was allocated before; on CPU by the process's high-water mark, which only rises."""
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    status = Path("/proc/self/clear_refs")
    with contextlib.suppress(OSError):
        status.write_text("5")  # the high-water mark becomes the present resident size (Linux)
    before = resource_kib()
    call()
    return (resource_kib() - before) * 1024


def resource_kib() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def disagreements() -> list[str]:
    """Where the kernel is not equal to the torch operations, over sizes, widths and layouts."""
    if module._kernel() is None:
        return ["there is no Triton"]
    found = []
    generator = torch.Generator("cuda").manual_seed(0)
    counts = (1, 2, 31, 2047, 2048, 2049, 4096, 65536, 1000003, 2**23)
    for width, count in itertools.product((1, 2, 4), counts):
        raw = torch.randint(0, 256, (count * width,), dtype=torch.uint8, device="cuda", generator=generator)
        words = raw.view(module._WORDS[width])
        places = [("row", module._Place(0, (count + 9,), (1,), False))]
        places.append(("wide row", module._Place(2**32 - 9, (count + 9,), (1,), True)))
        for run in (1, 3, 16, 100, 2048, 3584, 4096):
            for base, wide in ((5, False), (2**32 - 99, True)):
                shape = (run, -(-(count + 9) // run))
                places.append((f"runs of {run}", module._Place(base, shape, (1, 2 * run), wide)))
        for (name, place), first in itertools.product(places, (0, 5)):
            if not torch.equal(module._triton(words, first, place), module._eager(words, first, place)):
                found.append(f"{count} words of {width} bytes from {first} on, {name}, wide: {place.wide}")
    for dtype in (
        torch.float64,
        torch.complex64,
        torch.complex128,
        torch.float8_e4m3fn,
        torch.bool,
        torch.bfloat16,
    ):
        top = 2 if dtype == torch.bool else 256
        width = torch.empty(0, dtype=dtype).element_size()
        raw = torch.randint(
            0, top, (512 * 384 * width,), dtype=torch.uint8, device="cuda", generator=generator
        )
        tensor = raw.view(dtype).reshape(512, 384)
        extent = Extent((1024, 512), (512, 128), (512, 384), 0, tensor.numel())
        for part in (tensor, tensor.T.contiguous().T):
            if not torch.equal(digest(part, extent).cpu(), digest(part.cpu(), extent)):
                found.append(f"a box of {dtype}, contiguous: {part.is_contiguous()}")
    return found


if __name__ == "__main__":
    sys.exit(main())
