"""The code that a process runs: its files, their digests, the commit of its checkout, and the user's modules
in the current folder.

The driver finds such a module without importing it; only ranks import it. A checkout can be anybody's, so git
runs none of the programs that its configuration names: monitors of the file system, hooks, filters of file
contents, and transports that fetch missing objects.
"""

import hashlib
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, distribution, packages_distributions
from importlib.util import find_spec
from pathlib import Path

from dcpbench import SAFE_PATH
from dcpbench.code.sources import DCPBENCH, DIRTY, Source, merged_commits, package_of
from dcpbench.config.schema import conf_folder
from dcpbench.core.cell_key import digest_of
from dcpbench.core.plugins import plugin_names, plugins
from dcpbench.records.files import files_below

_VARIABLE, _VALUE = SAFE_PATH
OURS = ("dcpbench", "hydra_plugins.dcpbench_sweeper")
"""The packages of dcpbench."""

_MOST_FILES = 500
_DIGITS = 16
_LIMIT_S = 10.0
_OF_CHECKOUT = ("local", "worktree")
_KEPT = ("GIT_CONFIG_", "GIT_CEILING_", "GIT_DISCOVERY_")
_INSTALLED = {"site-packages", "dist-packages"}
_NO_PROGRAMS = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")
_EMPTY = "DCPBENCH_EMPTY"
_ENVIRONMENT = {_EMPTY: "", "GIT_ALLOW_PROTOCOL": "none", "GIT_NO_LAZY_FETCH": "1"}


class SweepCode:
    """Looks up the code of the cells of a sweep. The code of a package is looked up once: it is the same for
    all cells, whatever the user edits meanwhile."""

    def __init__(self) -> None:
        """Look up the code of dcpbench; its commit is None in an installed wheel."""
        package, commit = Path(__file__).resolve().parents[1], None
        # An environment can be inside another repository, whose commit is not dcpbench's.
        if (package.parents[1] / ".git").exists():
            commit = checkout_commit(package / "__init__.py", package)
        self.dcpbench = Source(commit, digest_of([*map(package_digest, OURS)]))
        self._commit_of, self._source_of = cache(commit_of), cache(self._source)

    def commits(self, targets: Iterable[str]) -> str | None:
        """Return the commits of targets, sorted, as one text; None if none is known."""
        return merged_commits(map(self._commit_of, targets))

    def sources(self, packages: Mapping[str, Sequence[str]]) -> dict[str, Source]:
        """Return the source of dcpbench and of each of these packages, which have these targets in them."""
        of_packages = {package: self._source_of(package, *targets) for package, targets in packages.items()}
        return {DCPBENCH: self.dcpbench, **of_packages}

    def _source(self, package: str, *targets: str) -> Source:
        return Source(self.commits(targets), package_digest(package)[:_DIGITS], _file_digests(package))


def commit_of(target: str) -> str | None:
    """Return the name and version of the installed distribution that a `target` is in, else the commit of its
    checkout; None if neither is known, and for a part of Python."""
    package, file = package_of(target), Path(file_of(target) or "")
    if not file.is_absolute() or package in sys.stdlib_module_names:
        return None
    for name in filter(None, distributions_of(tuple(sys.path)).get(package, ())):
        installed = distribution(name)
        if file.is_relative_to(str(installed.locate_file(""))):  # else it is a link to a checkout
            return f"{installed.name} {installed.version}"
    root = next((place for place in package_roots(package) if file.is_relative_to(place)), file)
    return checkout_commit(file.resolve(), root.resolve())


@cache
def distributions_of(_: tuple[str, ...]) -> Mapping[str, list[str]]:
    """Return the names of installed distributions by package, for a search path. This takes half a second."""
    return packages_distributions()


def checkout_commit(file: Path, package: Path) -> str | None:
    """Return the commit of the checkout that contains a file: `-dirty` if a tracked file was changed, or a
    source file of its package is not tracked; None if there is no checkout, or git refuses it because another
    user owns it. The paths have no links to folders."""
    # Not `git describe --dirty`, which writes the index of the checkout.
    status = ("status", "--porcelain", "--untracked-files=no", "--ignore-submodules=dirty", "--no-renames")
    try:
        first, commit = _git(file.parent, "rev-parse", "--show-toplevel", "HEAD").rstrip("\n").rsplit("\n", 1)
        top = Path(first)
        changed = _git(top, *_without_filters(top), *status)
        inside = package if package.is_relative_to(top) else file
        untracked = _git(top, "ls-files", "--others", "-z", "--", str(inside)).split("\0")
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    is_dirty = changed or any(name.endswith(".py") for name in untracked)
    return commit + (DIRTY if is_dirty else "")


def _without_filters(folder: Path) -> list[str]:
    """Return options of git that turn off the filters which the checkout's configuration defines; those of
    the user's configuration stay."""
    words = _git(folder, "config", "--list", "-z", "--show-scope", "--name-only").split("\0")
    configured = {name for scope, name in zip(words[::2], words[1::2], strict=False) if scope in _OF_CHECKOUT}
    return [f"--config-env={name}={_EMPTY}" for name in sorted(configured) if name.startswith("filter.")]


def _git(folder: Path, *words: str) -> str:
    """Return the output of a git command that reads the checkout in a folder.

    Variables such as GIT_DIR, which git sets for its hooks, are left out: they name another checkout.

    Raises:
        OSError, ValueError, subprocess.SubprocessError: it fails.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GIT_") or name.startswith(_KEPT)
    }
    command = ["git", "-C", str(folder), "--no-optional-locks", "--literal-pathspecs", *_NO_PROGRAMS, *words]
    ended = subprocess.run(
        command,
        env={**environment, **_ENVIRONMENT},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
        timeout=_LIMIT_S,
    )
    return os.fsdecode(ended.stdout)


def _file_digests(package: str) -> dict[str, str]:
    """Return a digest of each source file of a package by its name; empty if there are too many."""
    paths = [(root, path) for root in package_roots(package) for path in source_files(root)]
    if len(paths) > _MOST_FILES:
        return {}
    return {
        str(Path(root.name, path.relative_to(root))): hashlib.sha256(path.read_bytes()).hexdigest()[:_DIGITS]
        for root, path in paths
    }


def conf_folders() -> list[Path]:
    """Return every folder that is laid out like `conf/`: dcpbench's own, then those of plug-ins."""
    return [conf_folder(), *(plugin.conf for plugin in plugins() if plugin.conf)]


def installation() -> dict[str, str]:
    """Return digests of the dcpbench and the plug-ins that this process imports, for `environment.json`.

    Two hosts whose digests differ can end with different verdicts about the same cell.
    """
    others = [name for name in plugin_names() if not name.startswith("dcpbench.")]
    plugins = {name: digest_of(package_digest(name.partition(".")[0])) for name in others}
    confs = [_files_digest(folder, pattern="*.yaml") for folder in conf_folders()]
    return {
        "dcpbench": digest_of([*map(package_digest, OURS), *confs]),
        "plugins": ", ".join(f"{name} {digest}" for name, digest in sorted(plugins.items())) or "none",
    }


@cache
def package_digest(name: str) -> str:
    """Return a digest of the sources of a package or module; an empty one if it does not exist.

    The package is found without being imported, as the driver has no torch.
    """
    return _files_digest(*package_roots(name))


def package_roots(name: str) -> list[Path]:
    """Return the folders of a package, or the file of a module; none if it does not exist."""
    spec = None
    with suppress(ModuleNotFoundError):  # the package that it would be in
        spec = find_package(name)
    roots = [Path(place) for place in spec.submodule_search_locations or []] if spec else []
    if spec and not roots and spec.origin and spec.has_location:
        roots = [Path(spec.origin)]
    return roots


def source_files(root: Path, pattern: str = "*.py") -> list[Path]:
    """Return the files below a folder whose names match; a file itself."""
    inside = files_below(root) if root.is_dir() else [root]
    return [path for path in inside if path == root or path.match(pattern)]


def _files_digest(*roots: Path, pattern: str = "*.py") -> str:
    """Return a digest of the files below these folders whose names match, and of their names."""
    sources = hashlib.sha256()
    for root in roots:
        for path in source_files(root, pattern):
            sources.update(f"{path.relative_to(root)}\0".encode())
            sources.update(hashlib.sha256(path.read_bytes()).digest())
    return sources.hexdigest()


def owner_of(file: str) -> str:
    """Return whose code a file is: `torch`, `installed`, `library`, `dcpbench` or `user`. Code that the
    compiler has generated is as Python's library."""
    path = Path(os.path.realpath(file))
    compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR")  # the compiler sets it too
    in_cache = compiled is not None and path.is_relative_to(os.path.realpath(compiled))
    if file.startswith("<") or "torchinductor_" in file or in_cache:
        return "library"
    owners = {owner for owner, folders in _owners() if any(map(path.is_relative_to, folders))}
    if "torch" in owners:
        return "torch"
    return "installed" if is_installed(file) else min(owners, default="user")


def is_installed(file: str) -> bool:
    """Return whether a file is of an installed package, also of one that `pip install --target` has put into
    a folder on the path that has a user's modules."""
    path = Path(file)
    return not _INSTALLED.isdisjoint(path.parts) or any(
        path.relative_to(folder).parts[0] in _installed_in(folder)
        for folder in map(Path, sys.path)
        if folder.is_absolute() and path.is_relative_to(folder)
    )


@cache
def _installed_in(folder: Path) -> frozenset[str]:
    """Return the names of files and folders in a folder that packages have brought there; none if it cannot
    be read."""
    try:
        installed = [Distribution.at(metadata).files or () for metadata in folder.glob("*.dist-info")]
    except OSError:
        return frozenset()
    return frozenset(path.parts[0] for paths in installed for path in paths)


@cache
def _owners() -> list[tuple[str, list[Path]]]:
    library = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")]
    our_roots = [root for package in OURS for root in package_roots(package)]
    owners = ("torch", package_roots("torch")), ("dcpbench", our_roots), ("library", library)
    return [(owner, [folder.resolve() for folder in folders]) for owner, folders in owners]


def import_from_current_folder() -> None:
    """Let a rank, and processes that it starts, import modules of the current folder. It is last on the path,
    so that it replaces no installed module, unless the user has forbidden it (PYTHONSAFEPATH)."""
    if os.environ.get(_VARIABLE) == _VALUE:
        del os.environ[_VARIABLE]
        if (folder := str(Path.cwd())) not in sys.path:
            sys.path.append(folder)


def find_package(name: str) -> ModuleSpec | None:
    """Find a package, or a top-level module, as a rank would; do not import it."""
    if spec := find_spec(name):
        return spec
    allowed = os.environ.get(_VARIABLE) == _VALUE
    return PathFinder.find_spec(name, [str(Path.cwd())]) if allowed else None


def file_of(target: str) -> str | None:
    """Return the file that defines a `target`, as far as it is known without an import; None if no file
    does."""
    first, *names = target.replace(":", ".").split(".")
    spec = find_package(first)
    for name in names:
        inside = spec.submodule_search_locations if spec else None
        # Without its parent's name: a folder without __init__.py would be looked up in an imported parent.
        module = PathFinder.find_spec(name, [*inside]) if inside else None
        if module is None:
            break
        spec = module
    return spec.origin if spec else None
