"""The code of a sweep, as `environment.json` and rows record it, and its changes since."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dcpbench.records.row import dict_in, list_in

DCPBENCH = "dcpbench"
DIRTY = "-dirty"
"""The end of the commit of a checkout that was changed."""
COMMITS = {"target_commit": "target commit", "dcpbench_commit": "dcpbench commit"}
"""The columns with commits, and how they are called where a person reads them."""

_PROVIDED = ("torch", DCPBENCH, "hydra_plugins")
_COMMIT_WORD = "commit "
_COMMIT = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{28,}\b")


@dataclass(frozen=True)
class Source:
    """The source of a package or module.

    Args:
        commit: of its checkout, `-dirty` if that was changed; the name and version of an installed one; None
            if neither is known.
        digest: of all its source files.
        files: a digest of each file by its name; empty if there are too many.
    """

    commit: str | None
    digest: str
    files: Mapping[str, str] = field(default_factory=dict)


def package_of(target: str) -> str:
    """Return the package, or top-level module, that a `target` is in.

    >>> package_of("my_models.gpt:build")
    'my_models'
    """
    return re.split("[.:]", target, maxsplit=1)[0]


def is_own(target: str) -> bool:
    """Return whether a `target` is the user's: neither in dcpbench nor in torch."""
    return package_of(target) not in _PROVIDED


def merged_commits(commits: Iterable[str | None]) -> str | None:
    """Return commits, and those of texts with several, as one text, sorted; None if there are none."""
    return ", ".join(sorted({text for commit in commits if commit for text in commit.split(", ")})) or None


def recorded(environment: Mapping[str, Any]) -> dict[str, Source]:
    """Return the code in the content of an `environment.json` by package; what is damaged is left out."""
    sources: dict[str, Source] = {}
    for described in (*list_in(environment.get("earlier")), environment):
        for package, source in dict_in(dict_in(described).get("code")).items():
            if isinstance(digest := dict_in(source).get("digest"), str):
                commit = source.get("commit") if isinstance(source.get("commit"), str) else None
                sources[package] = Source(commit, digest, dict_in(source.get("files")))
    return sources


def changed_files(package: str, before: Sequence[Source], now: Sequence[Source]) -> list[str]:
    """Return the files in which the sources of a package differ, or the package if files are not known; none
    if it is the same."""
    if {source.digest for source in before} == {source.digest for source in now}:
        return []
    changed = []
    for name in sorted({name for source in (*before, *now) for name in source.files}):
        was, is_now = ({source.files.get(name) for source in side} for side in (before, now))
        note = " (new)" if was == {None} else " (removed)" if is_now == {None} else ""
        changed += [f"{name}{note}"] if was != is_now else []
    known = all(source.files for source in (*before, *now))
    return changed if known and changed else [package]


def short(commits: str, digits: int = 12) -> str:
    """Return commits with fewer digits.

    >>> short("744f26633ae2b1d0d5d1c2e3f4a5b6c7d8e9f0a1-dirty")
    '744f26633ae2-dirty'
    """
    return _COMMIT.sub(lambda match: match[1][:digits], commits)


def commits_text(before: str | None, now: str | None) -> str:
    """Return two commits in brackets for the end of a sentence; nothing if there is nothing to say. The same
    commit is never named twice.

    >>> commits_text("a" * 40, "b" * 40 + "-dirty")
    ' (commit aaaaaaaaaaaa, now bbbbbbbbbbbb with uncommitted changes)'
    """
    was, is_now = before or "", now or ""
    unchanged = was.replace(DIRTY, "")
    if was == is_now:
        return f" ({_words(unchanged)} with other uncommitted changes)" if DIRTY in was else ""
    if unchanged == is_now.replace(DIRTY, ""):
        return f" ({_words(unchanged)}, now {'with' if DIRTY in is_now else 'without'} uncommitted changes)"
    both = ({*was.split(", ")}, {*is_now.split(", ")})
    first, second = (_words(", ".join(sorted(side - (both[0] & both[1])))) for side in both)
    if first.startswith(_COMMIT_WORD):
        second = second.removeprefix(_COMMIT_WORD)
    return f" ({first}, now {second})"


def _words(commits: str) -> str:
    """Return commits, or names and versions, as words."""
    words = short(commits).replace(DIRTY, " with uncommitted changes")
    return f"{_COMMIT_WORD}{words}" if _COMMIT.match(commits) else words or "no commit"
