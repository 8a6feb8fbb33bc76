"""File operations of a process according to `strace`, in the terms of the recording layer."""

import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from dcpbench.plugins.crash.operations import Kind, Step

STRACE = shutil.which("strace")
_CALLS = {
    "mkdir": Kind.mkdir,
    "open": Kind.open,
    "openat": Kind.open,
    "write": Kind.write,
    "pwrite64": Kind.write,
    "writev": Kind.write,
    "pwritev": Kind.write,
    "sendfile": Kind.write,
    "copy_file_range": Kind.write,
    "truncate": Kind.truncate,
    "ftruncate": Kind.truncate,
    "fallocate": Kind.truncate,
    "fsync": Kind.fsync,
    "fdatasync": Kind.fsync,
    "sync_file_range": Kind.fsync,
    "msync": Kind.fsync,
    "rename": Kind.rename,
    "renameat": Kind.rename,
    "renameat2": Kind.rename,
    "link": Kind.rename,
    "linkat": Kind.rename,
    "unlink": Kind.unlink,
    "unlinkat": Kind.unlink,
    "rmdir": Kind.rmdir,
    "mkdirat": Kind.mkdir,
}
_CALL = re.compile(r"^(?:\d+ +)?(\w+)\((.*)\) += (-?\d+)")
_PATH = re.compile(r'"(/[^"]*)"|<(/[^>]*)>')

Calls = dict[str, list[str]]
"""The operations on each path, in order: the kind, and the size of a write."""


def traced(script: str, folder: Path, *arguments: str) -> Calls:
    """Run a Python script under `strace`. Return the changes below a folder by it, its threads and its
    children."""
    assert STRACE
    logs = folder.parent / "strace"
    logs.mkdir()
    options = [
        "-ff",
        "-y",
        "-s",
        "0",
        "-qq",
        "--seccomp-bpf",
        "-e",
        f"trace={','.join(f'?{one}' for one in _CALLS)}",
    ]
    command = [STRACE, *options, "-o", str(logs / "calls"), sys.executable, "-c", script, *arguments]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    calls: defaultdict[str, list[str]] = defaultdict(list)
    for log in sorted(logs.iterdir()):
        for line in log.read_text().splitlines():
            _read(line, str(folder), calls)
    return dict(calls)


def _read(line: str, folder: str, calls: Calls) -> None:
    match = _CALL.match(line)
    if match is None or int(match[3]) < 0:
        return
    kind, arguments = _CALLS[match[1]], match[2]
    paths = [one or other for one, other in _PATH.findall(arguments)]
    inside = [path for path in paths if path.startswith(f"{folder}/")]
    if not inside or (kind is Kind.open and not re.search("O_WRONLY|O_RDWR", arguments)):
        return
    size = f" {match[3]}" if kind is Kind.write else ""
    calls[str(Path(inside[0]).relative_to(folder))].append(f"{kind}{size}")


def recorded_calls(steps: Iterable[Step]) -> Calls:
    """Return the operations that the layer has recorded."""
    calls: defaultdict[str, list[str]] = defaultdict(list)
    for step in steps:
        if step.changes:
            calls[step.path].append(
                f"{step.kind} {len(step.data)}" if step.kind is Kind.write else str(step.kind)
            )
    return dict(calls)
