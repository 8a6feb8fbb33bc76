"""Read and check lists of known failures: `conf/known_failures.yaml`, or one of the user's."""

import re
import sys
from collections import Counter
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import yaml
from omegaconf import MISSING
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from yaml import YAMLError
from yaml.constructor import ConstructorError

from dcpbench.code.provenance import conf_folders
from dcpbench.config.errors import ConfigError
from dcpbench.config.schema import config_class
from dcpbench.config.text import did_you_mean
from dcpbench.core.checks import CHECKS
from dcpbench.core.mismatch import AS_STORED, MOMENTS, SECOND_DERIVATIVES, Problem
from dcpbench.core.plugins import plugins
from dcpbench.records.row import columns
from dcpbench.verdict.known_failures import KnownFailure

_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def default_list() -> list[KnownFailure]:
    """Return the entries of `conf/known_failures.yaml`, then those of plug-ins.

    Raises:
        ConfigError: as `read`.
    """
    paths = (folder / "known_failures.yaml" for folder in conf_folders())
    return [failure for path in paths if path.exists() for failure in read(path)]


@cache
def read(path: Path) -> list[KnownFailure]:
    """Return the list in a YAML file.

    Raises:
        ConfigError: it is missing, is not a list of `KnownFailure`, or names what does not exist.
    """
    try:
        entries: Any = yaml.load(path.read_text(encoding="utf-8"), _Loader) or []  # noqa: S506 - a safe loader
        failures = [_made(KnownFailure, listed_entry) for listed_entry in entries]
    except OSError as error:
        raise ConfigError(f"known_failures={path}: cannot be read: {error.strerror}") from None
    except (YAMLError, TypeError, ValueError) as error:
        raise ConfigError(f"known_failures={path}: {' '.join(str(error).split())}") from None
    for failure in failures:
        try:
            check_entry(failure)
        except (ConfigError, InvalidSpecifier, re.error) as error:
            raise ConfigError(f"known_failures={path}: {failure.id}: {error}") from None
    return _without_idle(path, failures)


class _Loader(_SafeLoader):  # type: ignore[misc]
    """OmegaConf's loader, which refuses a key that is there twice, but twenty times faster."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        counts = Counter(key.value for key, _ in node.value)
        if twice := [key for key, count in counts.items() if count > 1]:
            raise ConstructorError(None, None, f"found duplicate key {twice[0]}", node.start_mark)
        made: dict[Any, Any] = super().construct_mapping(node, deep)
        return made


def _made(hint: Any, plain: Any, at: str = "") -> Any:
    """Return a value of this type, built from plain values of YAML. OmegaConf takes ten times as long.

    Args:
        at: the key that the value is listed under.

    Raises:
        ValueError: a key is unknown or has no value, or a value has another type.
    """
    kinds: Any = get_args(hint)
    kind: Any = get_origin(hint) or hint
    if NoneType in kinds:
        return None if plain is None else _made(kinds[0], plain, at)
    if hint is Any or (kind in (str, float) and type(plain) in (int, float)):
        return plain if hint is Any else kind(plain)
    has_keys = is_dataclass(kind)
    if not isinstance(plain, dict if has_keys else kind):
        raise ValueError(f"{at or 'entry'}={plain}: must be a {'mapping' if has_keys else kind.__name__}")
    if kind is list:
        return [_made(kinds[0], value, at) for value in plain]
    if kind is dict:
        return {key: _made(kinds[1], value, f"{at}.{key}") for key, value in plain.items()}
    if not has_keys:
        return plain
    hints, above = get_type_hints(kind), f"{at}." if at else ""
    if unknown := [key for key in plain if key not in hints]:
        raise ValueError(f"{above}{unknown[0]}: unknown key{did_you_mean(str(unknown[0]), hints)}")
    made = kind(**{key: _made(hints[key], value, f"{above}{key}") for key, value in plain.items()})
    for key, value in vars(made).items():
        if value == MISSING:
            raise ValueError(f"{above}{key}: has no value")
    return made


def _without_idle(path: Path, failures: list[KnownFailure]) -> list[KnownFailure]:
    """Leave out and report the entries whose recomputation no plug-in provides."""
    known = {AS_STORED, SECOND_DERIVATIVES, *(by for plugin in plugins() for by in plugin.defects)}
    idle = [failure for failure in failures if not failure.recomputations <= known]
    if idle:
        ids = ", ".join(dict.fromkeys(failure.id for failure in idle))
        sys.stderr.write(f"dcpbench: {path.name}: {ids}: ignored: no installed plug-in can check it\n")
    return [failure for failure in failures if failure not in idle]


def check_entry(failure: KnownFailure) -> None:
    """Refuse an entry that names something that does not exist, or has an invalid pattern.

    Raises:
        ConfigError, InvalidSpecifier, re.error: the entry is wrong.
    """
    named = {name.partition(".")[0] for name in failure.cells}
    for unknown in named - {*columns(), *(key.name for key in fields(config_class()))}:
        raise ConfigError(f"no column or key {unknown!r}")
    if not failure.checks and not failure.error:
        raise ConfigError("it lists neither checks nor an error")
    for unknown in set(failure.checks) - set(CHECKS):
        raise ConfigError(f"no check {unknown!r} ({', '.join(CHECKS)})")
    SpecifierSet(failure.torch)
    SpecifierSet(failure.load_torch or "")
    for pattern in failure.error.patterns if failure.error else ():
        re.compile(pattern)
    if failure.status not in ("xfail", "skip"):
        raise ConfigError(f"status {failure.status!r}; must be xfail or skip")
    for mismatch in (
        mismatch_pattern for default_list in failure.checks.values() for mismatch_pattern in default_list
    ):
        re.compile(mismatch.name)
        for unknown in set(mismatch.problems) - set(Problem):
            raise ConfigError(f"no problem {unknown!r} ({', '.join(Problem)})")
        for unknown in set(mismatch.moments) - set(MOMENTS):
            raise ConfigError(f"no moment {unknown!r} ({', '.join(MOMENTS)})")
