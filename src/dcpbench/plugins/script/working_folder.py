"""The working folder of a command without {out}: the part of it that a run gets a copy of."""

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

_LEFT_OUT = {".git", ".hg", ".svn", "__pycache__", ".cache", ".tox", ".nox", "node_modules"}


class WorkingFolder:
    """The folder in which the command was typed, without version control, virtual environments, caches and
    results: its `outputs`, and the folder `results` of this check."""

    def __init__(self, folder: Path, results: Path) -> None:
        self._folder, self._results = folder, {folder / "outputs", results}

    @property
    def size(self) -> int:
        """The bytes that are copied."""
        return sum(path.stat().st_size for path in self._files())

    def _files(self) -> Iterator[Path]:
        """Yield the files that are copied."""
        for folder, folders, names in os.walk(self._folder):
            left_out = self._left_out(folder, folders)
            folders[:] = [name for name in folders if name not in left_out]
            paths = [Path(folder, name) for name in names]
            yield from (path for path in paths if path.is_file() and not path.is_symlink())

    def update(self, target: Path, since: float) -> None:
        """Copy the files that were changed since a time, in seconds of the epoch, into an earlier copy."""
        for path in [path for path in self._files() if path.stat().st_ctime > since]:
            place = target / path.relative_to(self._folder)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, place)

    def copy(self, target: Path) -> None:
        """Copy it. A relative link to a place that is not copied becomes an absolute one."""
        shutil.copytree(self._folder, target, symlinks=True, ignore=self._left_out)
        for folder, folders, names in os.walk(target):
            for link in (path for name in folders + names if (path := Path(folder, name)).is_symlink()):
                source = (self._folder / link.relative_to(target)).parent / link.readlink()
                if source.exists() and not link.exists():
                    link.unlink()
                    link.symlink_to(source)

    def words(self, words: Sequence[str], copied: Path) -> list[str]:
        """Return words in which a file that was not copied has its whole path: `.venv/bin/python`."""
        path = os.path  # for a word that is too long for a path it is false, where pathlib raises
        return [
            str(self._folder / word)
            if word and path.isfile(self._folder / word) and not path.exists(copied / word)
            else word
            for word in words
        ]

    def _left_out(self, folder: str, names: Sequence[str]) -> list[str]:
        return [name for name in names if self._is_left_out(Path(folder, name))]

    def _is_left_out(self, path: Path) -> bool:
        is_cache = path.name in _LEFT_OUT or (path.name[:1] == "." and path.name.endswith("_cache"))
        return path in self._results or (path.is_dir() and (is_cache or (path / "pyvenv.cfg").is_file()))
