"""Known failures: what `conf/known_failures.yaml` lists is expected, and nothing beside it."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from yaml import YAMLError

from dcpbench.config.errors import ConfigError
from dcpbench.config.schema import Config, conf_folder
from dcpbench.core.plugins import plugins
from dcpbench.records.checks import CHECKS
from dcpbench.records.findings import Finding, Problem, RaisedError
from dcpbench.records.row import columns


@dataclass
class KnownError:
    """An exception that a rank raises: in which phases, of which class, and a regular expression for its
    whole text, which is torch's own."""

    type: str = MISSING
    phases: list[str] = MISSING
    message: str = ".*"

    def matches(self, error: RaisedError) -> bool:
        """Whether this is what a rank raised."""
        alike = error.type == self.type and error.phase in self.phases
        return alike and re.fullmatch(self.message, error.message) is not None


@dataclass
class KnownMismatch:
    """What of a check is known to be wrong.

    Args:
        name: a regular expression for the whole name of what differs.
        problems: the kinds of mismatch that are known of it.
        by: the defect of `dcpbench.verify.known_defects` which must make exactly this of the state, or
            `checkpoint`, which must hold it.
        within: the largest distance, as a part of the largest magnitude in the tensor, or of the loss.
        where: a regular expression for the whole of where it is seen (`in the checkpoint of step 4`).
    """

    name: str = MISSING
    problems: list[str] = MISSING
    by: str | None = None
    within: float | None = None
    where: str = ".*"

    def check(self) -> None:
        """Refuse what names something that does not exist, or a pattern that is none."""
        re.compile(self.name)
        re.compile(self.where)
        for unknown in set(self.problems) - set(Problem):
            raise ConfigError(f"no problem {unknown!r} ({', '.join(Problem)})")

    def matches(self, finding: Finding) -> bool:
        """Whether this is what is wrong with a piece of state, in kind and in magnitude."""
        share = finding.facts.get("share")
        return (
            re.fullmatch(self.name, finding.name) is not None
            and finding.problem in self.problems
            and re.fullmatch(self.where, finding.where) is not None
            and self.by in (None, finding.by)
            and (self.within is None or (share is not None and share <= self.within))
        )


@dataclass
class KnownFailure:
    """One finding: in which cells, under which torch, what fails, and where it is explained.

    `cells` maps columns of the row, or keys of its configuration, to the value or values they must have;
    `load_world_size` is there how many ranks load, also where the cell leaves it to `world_size`. `torch` is
    a version specifier such as `>=2.11,<2.15`, `load_torch` one of the torch of `load_python`. `checks` lists
    for each check that may fail what of it is known to be wrong. Not all of it need be, but something must.
    With an `error`, ranks raise it, after nothing but what `checks` lists, here or of another entry for the
    cell, was found. One that does not happen `always`, as it depends on which thread comes first, may also
    pass.
    """

    id: str = MISSING
    cells: dict[str, Any] = field(default_factory=dict)
    torch: str = MISSING
    load_torch: str | None = None
    checks: dict[str, list[KnownMismatch]] = field(default_factory=dict)
    error: KnownError | None = None
    always: bool = True
    reason: str = MISSING
    link: str | None = None

    def check(self) -> None:
        """Refuse what names something that does not exist, or a pattern that is none."""
        named = {name.partition(".")[0] for name in self.cells}
        for unknown in named - {*columns(), *(key.name for key in fields(Config))}:
            raise ConfigError(f"no column or key {unknown!r}")
        if not self.checks and not self.error:
            raise ConfigError("it lists neither checks nor an error")
        for unknown in set(self.checks) - set(CHECKS):
            raise ConfigError(f"no check {unknown!r} ({', '.join(CHECKS)})")
        SpecifierSet(self.torch)
        SpecifierSet(self.load_torch or "")
        re.compile(self.error.message if self.error else "")
        for mismatch in (one for listed in self.checks.values() for one in listed):
            mismatch.check()

    def covers(self, cell: Mapping[str, Any]) -> bool:
        """Whether the columns of a row are of a cell, on a torch, that this failure is known for."""
        for column, wanted in self.cells.items():
            value = cell[column] if column in cell else cell["config"].get(column)
            if value not in (wanted if isinstance(wanted, list) else [wanted]):
                return False
        needed = [(self.torch, cell["torch_version"] or "0")]
        if self.load_torch:
            if cell.get("load_torch_version") is None:
                return False
            needed.append((self.load_torch, cell["load_torch_version"]))
        return all(SpecifierSet(of).contains(version, prereleases=True) for of, version in needed)

    def explains(self, check: str, finding: Finding) -> bool:
        """Whether it lists what a check found."""
        return any(mismatch.matches(finding) for mismatch in self.checks.get(check, ()))


class Explanation(NamedTuple):
    """By which known failures a cell failed, and what it found (by which check) or raised beside them."""

    by: list[KnownFailure]
    found: list[tuple[str, Finding]]
    raised: list[RaisedError]

    @property
    def whole(self) -> bool:
        """Whether it failed in no way but what they list together."""
        return bool(self.by) and not self.found and not self.raised


def explaining(
    known: Sequence[KnownFailure], failed: Mapping[str, Iterable[Finding]], raised: Sequence[RaisedError]
) -> Explanation:
    """How much of why a cell failed is known.

    Args:
        known: what is listed for the cell; with an error only where a rank raised that.
        failed: what every rank found, by the check that did not hold.
        raised: what every rank raised, of which each must be listed.
    """
    errors = [
        (one, failure) for one in raised for failure in known if failure.error and failure.error.matches(one)
    ]
    may = [failure for failure in known if not failure.error or any(failure is one for _, one in errors)]
    found = [(check, finding) for check, findings in failed.items() for finding in findings]
    of_found = [next((one for one in may if one.explains(*each)), None) for each in found]
    of_raised = [next((failure for one, failure in errors if one is error), None) for error in raised]
    return Explanation(
        [failure for failure in known if any(failure is one for one in (*of_found, *of_raised))],
        [each for each, one in zip(found, of_found, strict=True) if one is None],
        [error for error, one in zip(raised, of_raised, strict=True) if one is None],
    )


def listed() -> list[KnownFailure]:
    """Return what `conf/known_failures.yaml` lists, and then the lists of plug-ins.

    Raises:
        ConfigError: as `read`.
    """
    added = [plugin.known_failures for plugin in plugins() if plugin.known_failures]
    return [failure for path in (conf_folder() / "known_failures.yaml", *added) for failure in read(path)]


@cache
def read(path: Path) -> list[KnownFailure]:
    """The list in a YAML file.

    Raises:
        ConfigError: it is not there, not a list of `KnownFailure`, or names what does not exist.
    """
    try:
        entries: Any = OmegaConf.load(path)
        schema = OmegaConf.structured(KnownFailure)
        mismatch = OmegaConf.structured(KnownMismatch)  # OmegaConf does not look into lists in a dictionary
        for entry in entries:
            for check, listed in entry.get("checks", {}).items():
                entry.checks[check] = [OmegaConf.merge(mismatch, one) for one in listed]
        known = [OmegaConf.to_object(OmegaConf.merge(schema, entry)) for entry in entries]
    except (OSError, YAMLError, OmegaConfBaseException, TypeError, ValueError) as error:
        raise ConfigError(f"known_failures={path}: {' '.join(str(error).split())}") from None
    found = [failure for failure in known if isinstance(failure, KnownFailure)]
    for failure in found:
        try:
            failure.check()
        except (ConfigError, InvalidSpecifier, re.error) as error:
            raise ConfigError(f"known_failures={path}: {failure.id}: {error}") from None
    return found
