"""Each state of a disk is loaded, in this process and from real files in memory, and judged: is what comes
back the old checkpoint, the new one, or neither?"""

import hashlib
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from dcpbench.plugins.crash.operations import Tree
from dcpbench.verify.compare import bits, same_value

Values = Mapping[str, Any]
"""What was loaded by its flattened keys, tensors whole."""

_IN_MEMORY = Path("/dev/shm")  # noqa: S108 - a folder of its own is made in it


class Loaded(StrEnum):
    """What came back."""

    new = "new"
    old = "old"
    refused = "refused"  # the load raised
    mixture = (
        "mixture"  # each value, or element of a tensor, is the old or the new one, but not all are of one
    )
    foreign = "foreign"  # one is neither


SILENT = frozenset({Loaded.mixture, Loaded.foreign})
"""What nobody is told of."""


def plain(values: Values) -> Values:
    """Values that can be compared: of a stream of bytes the bytes."""
    return {
        key: value.getvalue() if isinstance(value, io.BytesIO) else value for key, value in values.items()
    }


@dataclass(frozen=True)
class Judge:
    """What the `plain` values of the two checkpoints are; `old` is None where there was none."""

    new: Values
    old: Values | None

    def verdict(self, values: Values) -> Loaded:
        """Which of them these values are."""
        values = plain(values)
        as_new = {key: same_value(value, values.get(key)) for key, value in self.new.items()}
        if all(as_new.values()) and values.keys() == self.new.keys():
            return Loaded.new
        if self.old is None or values.keys() != self.old.keys():
            return Loaded.foreign
        as_old = {key: same_value(value, values[key]) for key, value in self.old.items()}
        if all(as_old.values()):
            return Loaded.old
        others = (key for key, same in as_old.items() if not same and not as_new.get(key))
        mixed = all(_is_mixed(values[key], self.old[key], self.new.get(key)) for key in others)
        return Loaded.mixture if mixed else Loaded.foreign


def _is_mixed(value: Any, *sources: Any) -> bool:
    """Whether each element of a tensor is that of one of these, as where ranks have saved parts of it."""
    if not isinstance(value, torch.Tensor):
        return False
    alike = [
        bits(value) == bits(one)
        for one in sources
        if isinstance(one, torch.Tensor) and (one.shape, one.dtype) == (value.shape, value.dtype)
    ]
    return bool(alike) and bool(torch.stack(alike).any(dim=0).all())


@dataclass
class Loader:
    """Lays out trees of files and loads checkpoints from them; what it has loaded once it does not again.

    Args:
        folder: an empty folder, best in memory.
        load: fills values from the checkpoint in a folder, or raises.
        template: makes the values to be filled, which no checkpoint has.
    """

    folder: Path
    load: Callable[[dict[str, Any], str], None]
    template: Callable[[], dict[str, Any]]
    loads: int = 0
    _verdicts: dict[tuple[tuple[str, bytes], ...], Loaded] = field(default_factory=dict)

    def verdict(self, tree: Tree, name: str, judge: Judge) -> Loaded:
        """What a load of the checkpoint in the folder `name` of a tree brings back."""
        key = fingerprint(tree, f"{name}/")
        if key not in self._verdicts:
            self._verdicts[key] = self._load(tree, name, judge)
        return self._verdicts[key]

    def _load(self, tree: Tree, name: str, judge: Judge) -> Loaded:
        self.loads += 1
        root = self.folder / "state"
        try:
            self._lay_out(tree, root)
            values = self.template()
            try:
                self.load(values, str(root / name))
            except (Exception, CheckpointException):  # noqa: BLE001 - whatever it is, it is a refusal
                return Loaded.refused
            return judge.verdict(values)
        finally:
            shutil.rmtree(root)

    def _lay_out(self, tree: Tree, root: Path) -> None:
        """Files that were there before are linked and not written again: nobody writes to them."""
        root.mkdir()
        for path, content in tree.items():
            if content is None:
                (root / path).mkdir()
                continue
            held = self.folder / _digest(content).hex()
            if not held.exists():
                held.write_bytes(content)
            os.link(held, root / path)


def fingerprint(tree: Tree, prefix: str = "") -> tuple[tuple[str, bytes], ...]:
    """The same for trees that are the same below a path."""
    return tuple(
        (path, b"" if content is None else _digest(content))
        for path, content in sorted(tree.items())
        if f"{path}/".startswith(prefix)
    )


@lru_cache(maxsize=4096)
def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()


@contextmanager
def folder_in_memory() -> Iterator[Path]:
    """A folder in memory where there is such a place."""
    with tempfile.TemporaryDirectory(dir=_IN_MEMORY if _IN_MEMORY.is_dir() else None) as folder:
        yield Path(folder)


def sentinel(value: Any) -> Any:
    """A value of the same kind that no checkpoint has: what a load leaves as it was shows."""
    if not isinstance(value, torch.Tensor):
        return "not loaded"
    odd = torch.empty_like(value)
    odd.view(-1).view(torch.uint8).fill_(0x5A) if value.numel() else None
    return odd
