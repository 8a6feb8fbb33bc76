"""Known failures: what `conf/known_failures.yaml` lists is expected, and nothing beside it."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from yaml import YAMLError

from dcpbench.config.errors import ConfigError
from dcpbench.records.store import CHECKS, Row


@dataclass
class KnownFailure:
    """One finding: in which cells, under which torch, what fails, and where it is explained.

    `cells` maps columns of the row to the value or values they must have; `torch` is a version
    specifier such as `>=2.11,<2.15`; `checks` maps each check that may fail to a regular expression
    which every name that differs must match. Not all of the checks need fail, but one must. `error` is
    a regular expression for the whole reason of a cell in which a rank raises.
    """

    id: str = MISSING
    cells: dict[str, Any] = field(default_factory=dict)
    torch: str = MISSING
    checks: dict[str, str] = field(default_factory=dict)
    error: str | None = None
    reason: str = MISSING
    link: str | None = None

    def covers(self, row: Row) -> bool:
        """Whether the row is of a cell, on a torch, that this failure is known for."""
        for column, wanted in self.cells.items():
            values = wanted if isinstance(wanted, list) else [wanted]
            if getattr(row, column) not in values:
                return False
        return SpecifierSet(self.torch).contains(row.torch_version or "0", prereleases=True)

    def explains(self, row: Row, failed: dict[str, list[str]]) -> bool:
        """Whether the cell failed, or a rank raised, in no way but what is listed."""
        if row.status == "error":
            return self.error is not None and re.fullmatch(self.error, row.reason or "") is not None
        return row.status == "fail" and all(
            check in self.checks and re.fullmatch(self.checks[check], name)
            for check, names in failed.items()
            for name in names
        )


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
    columns = Row.__dataclass_fields__
    for failure in known:
        assert isinstance(failure, KnownFailure)
        for unknown in set(failure.cells) - set(columns):
            raise ConfigError(f"known_failures={path}: {failure.id}: no column {unknown!r}")
        if not failure.checks and not failure.error:
            raise ConfigError(f"known_failures={path}: {failure.id}: it lists neither checks nor an error")
        for unknown in set(failure.checks) - set(CHECKS):
            known_checks = ", ".join(CHECKS)
            raise ConfigError(f"known_failures={path}: {failure.id}: no check {unknown!r} ({known_checks})")
        try:
            SpecifierSet(failure.torch)
            for pattern in (*failure.checks.values(), failure.error or ""):
                re.compile(pattern)
        except (InvalidSpecifier, re.error) as error:
            raise ConfigError(f"known_failures={path}: {failure.id}: {error}") from None
    return [failure for failure in known if isinstance(failure, KnownFailure)]


def apply(row: Row, failed: dict[str, list[str]], known: list[KnownFailure]) -> None:
    """Make an `xfail` of a listed failure or error, an `xpass` of a cell that passed though it is listed.

    A cell that fails a check, or differs in a name, which is not listed for it stays a `fail`; one
    that is vacuous, or did not come as far as a verdict, stays what it is.
    """
    for failure in known:
        if not failure.covers(row):
            continue
        if failure.explains(row, failed):
            row.status = "xfail"
            row.reason = f"known failure {failure.id}: {row.reason}"
            return
        if row.status == "pass":
            row.status = "xpass"
            row.reason = f"known failure {failure.id} did not happen ({failure.reason})"
            return
