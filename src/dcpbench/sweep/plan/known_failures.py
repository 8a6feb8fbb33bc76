"""Known failures: what `conf/known_failures.yaml` lists is expected, and nothing beside it."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from yaml import YAMLError

from dcpbench.config.errors import ConfigError
from dcpbench.records.checks import CHECKS
from dcpbench.records.findings import RaisedError
from dcpbench.records.row import columns


@dataclass
class KnownError:
    """An exception that a rank raises: in which phase, of which class, and a regular expression for its whole
    text, which is torch's own."""

    type: str = MISSING
    phase: str = MISSING
    message: str = ".*"


@dataclass
class KnownFailure:
    """One finding: in which cells, under which torch, what fails, and where it is explained.

    `cells` maps columns of the row to the value or values they must have; `torch` is a version
    specifier such as `>=2.11,<2.15`; `checks` maps each check that may fail to a regular expression
    which every name that differs must match whole. Not all of the checks need fail, but one must. With an
    `error`, a rank raises it, after nothing but what `checks` lists was found.
    """

    id: str = MISSING
    cells: dict[str, Any] = field(default_factory=dict)
    torch: str = MISSING
    checks: dict[str, str] = field(default_factory=dict)
    error: KnownError | None = None
    reason: str = MISSING
    link: str | None = None

    def check(self) -> None:
        """Refuse what names something that does not exist, or a pattern that is none."""
        for unknown in set(self.cells) - set(columns()):
            raise ConfigError(f"no column {unknown!r}")
        if not self.checks and not self.error:
            raise ConfigError("it lists neither checks nor an error")
        for unknown in set(self.checks) - set(CHECKS):
            raise ConfigError(f"no check {unknown!r} ({', '.join(CHECKS)})")
        SpecifierSet(self.torch)
        for pattern in (*self.checks.values(), self.error.message if self.error else ""):
            re.compile(pattern)

    def covers(self, cell: Mapping[str, Any]) -> bool:
        """Whether the columns of a row are of a cell, on a torch, that this failure is known for."""
        for column, wanted in self.cells.items():
            if cell[column] not in (wanted if isinstance(wanted, list) else [wanted]):
                return False
        return SpecifierSet(self.torch).contains(cell["torch_version"] or "0", prereleases=True)

    def explains(self, failed: Mapping[str, Iterable[str]], error: RaisedError | None) -> bool:
        """Whether the cell failed, or a rank raised, in no way but what is listed.

        Args:
            failed: the names that differ, by the check that did not hold.
            error: what a rank raised, if one did.
        """
        known = self.error
        if error and known:
            alike = (error.type, error.phase) == (known.type, known.phase)
            if not (alike and re.fullmatch(known.message, error.message)):
                return False
        elif error or known or not failed:
            return False
        return all(
            check in self.checks and re.fullmatch(self.checks[check], name)
            for check, names in failed.items()
            for name in names
        )


@cache
def read(path: Path) -> list[KnownFailure]:
    """The list in a YAML file.

    Raises:
        ConfigError: it is not there, not a list of `KnownFailure`, or names what does not exist.
    """
    try:
        entries = OmegaConf.load(path)
        schema = OmegaConf.structured(KnownFailure)
        known = [OmegaConf.to_object(OmegaConf.merge(schema, entry)) for entry in entries]
    except (OSError, YAMLError, OmegaConfBaseException, TypeError, ValueError) as error:
        raise ConfigError(f"known_failures={path}: {' '.join(str(error).split())}") from None
    listed = [failure for failure in known if isinstance(failure, KnownFailure)]
    for failure in listed:
        try:
            failure.check()
        except (ConfigError, InvalidSpecifier, re.error) as error:
            raise ConfigError(f"known_failures={path}: {failure.id}: {error}") from None
    return listed
