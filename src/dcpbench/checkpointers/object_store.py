"""Checkpoints that lie in no folder, but in a store that fsspec reaches: how their objects are found, read
and removed without DCP."""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Optional

from dcpbench.config.groups import StorageConfig
from dcpbench.records.files import files_below


@dataclass(frozen=True)
class ObjectStore:
    """Objects below a URL, those of a checkpoint under its id; `options` are those of fsspec's file system.

    It has a client of its own, which caches no listing: what is looked at is what lies there now, and nothing
    of what DCP's client has cached changes by that.
    """

    url: str
    options: Mapping[str, Any]

    @classmethod
    def of(cls, config: StorageConfig) -> Optional["ObjectStore"]:
        """The store of a storage; None if its checkpoints lie in folders."""
        return cls(config.url, config.options.get("file_system", {})) if config.url else None

    @cached_property
    def _client(self) -> Any:
        from fsspec.core import url_to_fs

        client, _ = url_to_fs(self.url, skip_instance_cache=True, use_listings_cache=False, **self.options)
        return client

    def place(self, checkpoint_id: str) -> str:
        """The URL of a checkpoint."""
        return f"{self.url}{checkpoint_id}"

    def lengths(self, checkpoint_id: str) -> dict[str, int]:
        """The bytes of each object of a checkpoint by its relative path."""
        found = self._client.find(self.place(checkpoint_id), detail=True)
        return {name.partition(f"{checkpoint_id}/")[2]: held["size"] for name, held in found.items()}

    @contextmanager
    def part(
        self, checkpoint_id: str, name: str, offset: int = 0, length: int | None = None
    ) -> Iterator[Path]:
        """Within, a file that has so many bytes of an object."""
        end = None if length is None else offset + length
        with tempfile.NamedTemporaryFile() as file:
            file.write(self._client.cat_file(f"{self.place(checkpoint_id)}/{name}", start=offset, end=end))
            file.flush()
            yield Path(file.name)

    @contextmanager
    def files(self, checkpoint_id: str) -> Iterator[Path]:
        """Within, a folder with a copy of every object, which has the time at which that was written."""
        with tempfile.TemporaryDirectory() as folder:
            copies = Path(folder) / Path(checkpoint_id).name
            for name in self.lengths(checkpoint_id):
                there, copy = f"{self.place(checkpoint_id)}/{name}", copies / name
                copy.parent.mkdir(parents=True, exist_ok=True)
                self._client.get_file(there, str(copy))
                written = self._client.modified(there).timestamp()
                os.utime(copy, (written, written))
            yield copies

    def put_back(self, checkpoint_id: str, folder: Path) -> None:
        """Replace the objects of a checkpoint by the files in a folder."""
        self.remove(checkpoint_id)
        for path in files_below(folder):
            self._client.put_file(str(path), f"{self.place(checkpoint_id)}/{path.relative_to(folder)}")

    def remove(self, checkpoint_id: str) -> None:
        """Remove every object of a checkpoint, or of all that lie below a path."""
        root = self.place(checkpoint_id)
        if self._client.find(root):
            self._client.rm(root, recursive=True)
