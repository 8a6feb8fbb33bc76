"""Write a crash state as a script in plain torch: two saves, the files as the crash leaves them, and a
load."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from dcpbench.plugins.crash.disk_states import DiskState, after
from dcpbench.plugins.crash.loading import Values
from dcpbench.plugins.crash.operations import Record, Tree

_SCRIPT = '''"""{title}

{story}
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter

TENSORS = {tensors}
VALUES = {values}
RANKS = {ranks}


def state(step):
    tensors = {{name: torch.full(shape, step, dtype=dtype) for name, (shape, dtype) in TENSORS.items()}}
    return tensors | dict.fromkeys(VALUES, step)


def save(rank, folder):
    if RANKS > 1:
        store = torch.distributed.FileStore(f"{{folder}}/store", RANKS)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    for step, name in enumerate(("old", "new"), 1):
        writer = FileSystemWriter(f"{{folder}}/{{name}}", {options})
        dcp.save(state(step), storage_writer=writer, no_dist=RANKS == 1)
    if RANKS > 1:
        torch.distributed.destroy_process_group()


def main():
    folder = Path(tempfile.mkdtemp())
    if RANKS > 1:
        torch.multiprocessing.spawn(save, (str(folder),), RANKS)
    else:
        save(0, str(folder))
    old, new = (
        {{path.name: path.read_bytes() for path in (folder / name).iterdir()}} for name in ("old", "new")
    )
    crashed = folder / "crashed"
    crashed.mkdir()
{files}
    loaded = state(0)
    try:
        dcp.load(loaded, checkpoint_id=crashed, no_dist=True)
    except BaseException as error:
        print(f"torch {{torch.__version__}}: refused: {{type(error).__name__}}")
        sys.exit(1)
    found = {{name: torch.as_tensor(value).float().unique().tolist() for name, value in loaded.items()}}
    print(f"torch {{torch.__version__}}: loaded values of the steps {{found}}")
    sys.exit(any(steps != [2.0] for steps in found.values()))


if __name__ == "__main__":
    main()
'''


@dataclass(frozen=True)
class Shown:
    """A crash state that a script reproduces.

    Args:
        record: of the save.
        like: the values of the checkpoint; the script uses their names, shapes and dtypes.
    """

    state: DiskState
    record: Record
    like: Values


def plain_script(title: str, shown: Shown, name: str, options: Mapping[str, Any]) -> str:
    """Return the script for a state.

    Args:
        name: the folder of the new checkpoint.
        options: of the `FileSystemWriter`.
    """
    state, like = shown.state, shown.like
    trees = shown.record.before, after(shown.record)
    done = [f"rank {rank}: {step}" for rank, step in state.done if step.changes]
    lost = [f"Lost: {loss}." for loss in state.lost] or ["Nothing is lost."]
    old, new = (_files(tree, name) for tree in trees)
    tensors = {
        key: (tuple(value.shape), value.dtype)
        for key, value in like.items()
        if isinstance(value, torch.Tensor)
    }
    files = []
    for path, content in _files(state.tree, name).items():
        expression = _content(content, old.get(path, b""), new.get(path, b""), path)
        files.append(f'    (crashed / "{path}").write_bytes({expression})')
    return _SCRIPT.format(
        title=title,
        story="\n".join(["Operations before the crash:", *done, *lost]),
        tensors=repr(tensors),
        values=[key for key in like if key not in tensors],
        ranks=len(shown.record.ranks),
        options=", ".join(f"{key}={value!r}" for key, value in options.items()),
        files="\n".join(files),
    )


def _files(tree: Tree, folder: str) -> dict[str, bytes]:
    """Return the files in a folder, by name."""
    inside = f"{folder}/"
    return {
        path.removeprefix(inside): content
        for path, content in tree.items()
        if content is not None and path.startswith(inside)
    }


def _content(content: bytes, old: bytes, new: bytes, path: str) -> str:
    """Return an expression for the content of a file in terms of its content after the two saves."""
    if path.endswith(".tmp"):
        return repr(b"")  # never read
    for source, saved in (("new", new), ("old", old)):
        if content == saved:
            return f'{source}["{path}"]'
    head = _common(zip(content, new, strict=False), min(len(content), len(new)))
    if head == len(content):
        return f'new["{path}"][:-{len(new) - head}]'
    tail = _common(zip(reversed(content), reversed(new), strict=False), min(len(content), len(new)) - head)
    hole = content[head : len(content) - tail]
    lost = (
        f'old["{path}"][{head}:{head + len(hole)}]'
        if hole == old[head : head + len(hole)]
        else f"bytes({len(hole)})"
    )
    return f'new["{path}"][:{head}] + {lost} + new["{path}"][{len(new) - tail}:]'


def _common(pairs: Iterable[tuple[int, int]], most: int) -> int:
    """Return the number of equal bytes at the start, at most `most`."""
    return min(next((at for at, (one, other) in enumerate(pairs) if one != other), most), most)
