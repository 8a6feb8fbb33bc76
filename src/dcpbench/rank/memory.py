"""Measure a rank's peak memory in bytes since the last reset."""

import re
from contextlib import suppress
from pathlib import Path

import torch


def reset_peaks(device: torch.device) -> None:
    """Reset the peaks; clear_refs in proc(5) resets the resident set's."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_device_bytes(device: torch.device) -> int | None:
    """Return the peak of memory that torch has allocated; None if the device is the host."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def peak_host_bytes() -> int | None:
    """Return the peak resident set of this process; None if the kernel does not report it."""
    peak = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(peak[1]) * 1024 if peak else None
