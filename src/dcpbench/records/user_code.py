"""Find the code that a sweep runs, without importing it, as the driver has no torch."""

import hashlib
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

from dcpbench.core.cell_key import digest_of
from dcpbench.records.checkout import checkout_of
from dcpbench.records.installation import OURS, file_of, package_digest, package_roots, source_files
from dcpbench.records.source import DCPBENCH, Source, joined, package_of

_MOST_FILES = 500
_DIGITS = 16
_LIBRARY = ("stdlib", "platstdlib")


class SweepCode:
    """Looks up the code of the cells of a sweep. The code of a package is looked up once: it is the same for
    all cells, whatever the user edits meanwhile."""

    def __init__(self) -> None:
        """Look up the code of dcpbench; its commit is None in an installed wheel."""
        file, commit = Path(__file__).resolve(), None
        # An environment can be inside another repository, whose commit is not dcpbench's.
        if (file.parents[3] / ".git").exists():
            commit, _ = checkout_of(file, source_files(file.parents[1]))
        self.dcpbench = Source(commit, digest_of([*map(package_digest, OURS)]))
        self._commit_of, self._source_of = cache(commit_of), cache(self._source)

    def commits(self, targets: Iterable[str]) -> str | None:
        """Return the commits of targets, sorted, as one text; None if none is known."""
        return joined(map(self._commit_of, targets))

    def sources(self, packages: Mapping[str, Sequence[str]]) -> dict[str, Source]:
        """Return the source of dcpbench and of each of these packages, which have these targets in them."""
        found = {package: self._source_of(package, *targets) for package, targets in packages.items()}
        return {DCPBENCH: self.dcpbench, **found}

    def _source(self, package: str, *targets: str) -> Source:
        return Source(self.commits(targets), package_digest(package)[:_DIGITS], _file_digests(package))


def commit_of(target: str) -> str | None:
    """Return the commit of the checkout that contains a `target`, `-dirty` if it was changed; the name and
    version of an installed one; None if neither is known."""
    file = Path(file_of(target) or "")
    if not file.is_absolute():  # no file, or a part of the interpreter
        return None
    roots = package_roots(package_of(target))
    root = next((place for place in roots if file.is_relative_to(place)), file)
    commit, is_tracked = checkout_of(file.resolve(), source_files(root.resolve()))
    if not is_tracked:
        # Python and its packages can be inside a checkout that does not track them.
        version = _installed_version(file, root.parent)
        if version or any(file.is_relative_to(sysconfig.get_path(name)) for name in _LIBRARY):
            return version
    return commit


def _installed_version(file: Path, folder: Path) -> str | None:
    """Return the name and version of the distribution in this folder that a file belongs to, if any."""
    name = file.relative_to(folder).as_posix()
    for one in distributions(path=[str(folder)]):
        record = one.read_text("RECORD")
        names = (one.read_text("top_level.txt") or "").split() if record is None else ()
        if f"\n{name}," in f"\n{record or ''}" or name.partition("/")[0].removesuffix(".py") in names:
            return f"{one.name} {one.version}"
    return None


def _file_digests(package: str) -> dict[str, str]:
    """Return a digest of each source file of a package by its name; empty if there are too many."""
    paths = [(root, path) for root in package_roots(package) for path in source_files(root)]
    if len(paths) > _MOST_FILES:
        return {}
    return {
        str(Path(root.name, path.relative_to(root))): hashlib.sha256(path.read_bytes()).hexdigest()[:_DIGITS]
        for root, path in paths
    }
