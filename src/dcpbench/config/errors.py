"""Errors of the configuration, each reported in one line: the key, the problem, how to fix it."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

from hydra.errors import MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from dcpbench.config.text import choices, did_you_mean, names_shown, visible

_ONE_OF = re.compile(
    r"(?:Error merging override )?(\S+): Invalid value '([^']*)', expected one of \[([^]]*)\]"
)
_NOISE = (
    ("^Error merging override ", ""),
    (r"\n?To append to your config use \S+", ""),
    (r"\s*\n\s*(full_key|object_type|reference_type)[:=].*", ""),
    (r"To override a value use 'override (\S+): (\S+)'", r"It is chosen without +: \1=\2"),
    (r"\nConfig search path:(.|\n)*", ""),
)
"""Parts of Hydra's and OmegaConf's messages that are left out or replaced."""


class ConfigError(Exception):
    """The configuration is wrong: one line for the terminal, exit status 2."""


def other_launcher(choice: str) -> ConfigError:
    """Return the error for another launcher than dcpbench's own."""
    why = "dcpbench runs cells with its own launcher only, on ranks that are reused across cells"
    instead = "in jobs of Slurm use scripts/ray.sbatch, on several machines part=1/4 or another executor"
    return ConfigError(f"{choice}: {why}; {instead}")


@contextmanager
def named_null_choices(overrides: Sequence[str]) -> Iterator[None]:
    """Context manager for a composition: name the group that is set to null, which Hydra does not name.

    Raises:
        ConfigError: a group is set to null.
    """
    try:
        yield
    except ValueError as error:
        if type(error) is not ValueError or "Config group override" not in str(error):
            raise
        named = next((line for line in overrides if line.endswith("=null")), "null")
        raise ConfigError(f"{named}: a group has no value null; leave it out") from None


def one_line(error: BaseException) -> str:
    """Return the message of an error of Hydra, OmegaConf or dcpbench as one line."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, value = error.missing_cfg_file.rpartition("/")
        return visible(f"{group}={value}: unknown value{choices(value, error.options)}")
    cause = error.__cause__ or error.__context__
    for unknown in (cause, error):
        if isinstance(unknown, ConfigKeyError | ConfigAttributeError) and unknown.full_key:
            return visible(f"{unknown.full_key}: unknown key{_keys_beside(unknown)}")
    line = _sentence(str(error))
    if isinstance(cause, OmegaConfBaseException):
        if str(cause) not in str(error):
            line = f"{line.rstrip('.')}: {_sentence(str(cause))}"
        if cause.full_key and cause.full_key not in line:
            line = f"{cause.full_key}: {line}"
    if found := _ONE_OF.match(line):
        line = f"{found[1]}: invalid value{choices(found[2], found[3].split(', '))}"
    return visible(line)


def refuse_unknown(config: Any, path: str = "") -> None:
    """Refuse keys that were added to a configuration (`+foo=1`) though no code reads them.

    Raises:
        ConfigError: it names the first such key.
    """
    known = [field.name for field in fields(config)]
    for name in vars(config).keys() - known:
        raise ConfigError(f"+{path}{name}: unknown key{did_you_mean(name, known)}")
    for name in known:
        if is_dataclass(value := getattr(config, name)):
            refuse_unknown(value, f"{path}{name}.")


def _sentence(text: str) -> str:
    for pattern, replacement in _NOISE:
        text = re.sub(pattern, replacement, text)
    return " ".join(text.split())


def _keys_beside(error: OmegaConfBaseException) -> str:
    """Return the end of a complaint about an unknown key: the key that is close, or all keys there."""
    parent = error.parent_node
    if not isinstance(parent, DictConfig):
        return ""
    names = [str(name) for name in parent if name != "hydra"]
    known = f"; the keys are {names_shown(names)}" if names else "; a + before it adds it"
    return did_you_mean(str(error.key), names) or known
