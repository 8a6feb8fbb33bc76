"""Access, without DCP, to checkpoints in a store of fsspec instead of a folder."""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from dcpbench.records.files import files_below


@dataclass(frozen=True)
class ObjectStore:
    """Objects below a URL, those of a checkpoint below its id. `options` are for fsspec's file system.

    It has a separate client that caches no listing, so that it sees the current objects, and does not change
    the cache of DCP's client.
    """

    url: str
    options: Mapping[str, Any]

    @cached_property
    def _client(self) -> Any:
        from fsspec.core import url_to_fs

        client, _ = url_to_fs(self.url, skip_instance_cache=True, use_listings_cache=False, **self.options)
        return client

    def place(self, checkpoint_id: str) -> str:
        """Return the URL of a checkpoint."""
        return f"{self.url}{checkpoint_id}"

    def lengths(self, checkpoint_id: str) -> dict[str, int]:
        """Return the length of each object of a checkpoint by its relative path."""
        infos = self._client.find(self.place(checkpoint_id), detail=True)
        return {name.partition(f"{checkpoint_id}/")[2]: info["size"] for name, info in infos.items()}

    @contextmanager
    def part(
        self, checkpoint_id: str, name: str, offset: int = 0, length: int | None = None
    ) -> Iterator[Path]:
        """Context manager: a file with a range of an object's bytes."""
        end = None if length is None else offset + length
        with tempfile.NamedTemporaryFile() as file:
            file.write(self._client.cat_file(f"{self.place(checkpoint_id)}/{name}", start=offset, end=end))
            file.flush()
            yield Path(file.name)

    @contextmanager
    def files(self, checkpoint_id: str) -> Iterator[Path]:
        """Context manager: a folder with copies of all objects, which have the objects' times."""
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
        """Replace the objects of a checkpoint by the files of a folder."""
        self.remove(checkpoint_id)
        for path in files_below(folder):
            self._client.put_file(str(path), f"{self.place(checkpoint_id)}/{path.relative_to(folder)}")

    def remove(self, checkpoint_id: str) -> None:
        """Remove every object of a checkpoint, or below a path."""
        root = self.place(checkpoint_id)
        if self._client.find(root):
            self._client.rm(root, recursive=True)
