"""Load disk states in this process, from real files in memory, and classify the result as the old checkpoint,
the new one, or neither."""

import hashlib
import io
import logging
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

from dcpbench.compare.leaves import bits, same_value
from dcpbench.plugins.crash.operations import Tree

Values = Mapping[str, Any]
"""Loaded values by flattened key, with full tensors."""

_IN_MEMORY = Path("/dev/shm")  # noqa: S108 - a separate folder is created in it


class Loaded(StrEnum):
    """The result of a load."""

    new = "new"
    old = "old"
    refused = "refused"  # the load raised
    mixture = "mixture"  # each value or tensor element is from the old or the new one, but not all from one
    foreign = "foreign"  # a value is from neither


def plain(values: Values) -> Values:
    """Replace streams of bytes by their bytes, so that values can be compared."""
    return {
        key: value.getvalue() if isinstance(value, io.BytesIO) else value for key, value in values.items()
    }


@dataclass(frozen=True)
class Judge:
    """The `plain` values of the two checkpoints; `old` is None if there was none."""

    new: Values
    old: Values | None

    def verdict(self, values: Values) -> Loaded:
        """Return the checkpoint that these values are from."""
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
    """Return whether each element of a tensor is from one of the sources; ranks may have saved parts of
    it."""
    if not isinstance(value, torch.Tensor):
        return False
    equal = [
        bits(value) == bits(source)
        for source in sources
        if isinstance(source, torch.Tensor) and (source.shape, source.dtype) == (value.shape, value.dtype)
    ]
    return bool(equal) and bool(torch.stack(equal).any(dim=0).all())


@dataclass
class Loader:
    """Writes trees of files and loads checkpoints from them; equal files are loaded only once.

    Args:
        folder: an empty folder, preferably in memory.
        load: fills values from the checkpoint in a folder, or raises.
        template: returns the values to be filled; no checkpoint contains them.
    """

    folder: Path
    load: Callable[[dict[str, Any], str], None]
    template: Callable[[], dict[str, Any]]
    _verdicts: dict[tuple[tuple[str, bytes], ...], Loaded] = field(default_factory=dict)

    def verdict(self, tree: Tree, name: str, judge: Judge) -> Loaded:
        """Return the result of a load of the checkpoint in the folder `name` of a tree."""
        key = fingerprint(tree, f"{name}/")
        if key not in self._verdicts:
            self._verdicts[key] = self._load(tree, name, judge)
        return self._verdicts[key]

    def _load(self, tree: Tree, name: str, judge: Judge) -> Loaded:
        root, disabled = self.folder / "state", logging.root.manager.disable
        logging.disable(logging.ERROR)  # DCP logs a traceback for every file that it does not find
        try:
            self._write(tree, root)
            values = self.template()
            try:
                self.load(values, str(root / name))
            except (Exception, CheckpointException):  # noqa: BLE001 - any error is a refusal
                return Loaded.refused
            return judge.verdict(values)
        finally:
            shutil.rmtree(root)
            logging.disable(disabled)

    def _write(self, tree: Tree, root: Path) -> None:
        """Write the files of a tree. Contents that were written before are linked, because nothing changes
        them."""
        root.mkdir()
        for path, content in tree.items():
            if content is None:
                (root / path).mkdir()
                continue
            stored = self.folder / _digest(content).hex()
            if not stored.exists():
                stored.write_bytes(content)
            os.link(stored, root / path)


def fingerprint(tree: Tree, prefix: str = "") -> tuple[tuple[str, bytes], ...]:
    """Return a key that is equal for trees with equal files below a path."""
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
    """Context manager: create a folder, in memory if possible."""
    with tempfile.TemporaryDirectory(dir=_IN_MEMORY if _IN_MEMORY.is_dir() else None) as folder:
        yield Path(folder)


def sentinel(value: Any) -> Any:
    """Return a value of the same kind that no checkpoint contains, so that values which a load skips show."""
    if not isinstance(value, torch.Tensor):
        return "not loaded"
    odd = torch.empty_like(value)
    odd.view(-1).view(torch.uint8).fill_(0x5A) if value.numel() else None
    return odd
