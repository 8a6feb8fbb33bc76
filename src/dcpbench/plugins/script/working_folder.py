"""The working folder of a command without {out}: the part of it that a run gets a copy of."""

import os
import shutil
from collections.abc import Sequence
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
        size = 0
        for folder, folders, names in os.walk(self._folder):
            left_out = self._left_out(folder, folders)
            folders[:] = [name for name in folders if name not in left_out]
            paths = [path for name in names if not (path := Path(folder, name)).is_symlink()]
            size += sum(path.stat().st_size for path in paths if path.is_file())
        return size

    def copy(self, target: Path, since: float = 0.0) -> None:
        """Copy it, or what was changed since a time, in seconds of the epoch, into an earlier copy. A
        relative link to a place that is not copied becomes an absolute one."""

        def left_out(folder: str, names: Sequence[str]) -> list[str]:
            paths = {name: Path(folder, name) for name in names}
            old = [
                name for name, path in paths.items() if not path.is_dir() and path.lstat().st_ctime <= since
            ]
            return [*old, *self._left_out(folder, names)]

        shutil.copytree(self._folder, target, symlinks=True, ignore=left_out, dirs_exist_ok=True)
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
