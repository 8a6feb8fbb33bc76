"""What a user asked for that cannot be run, told in one clear line: which key, and what it may be."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

from hydra.errors import MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from dcpbench.config.text import did_you_mean, instead, names_shown, visible

_EXPECTED = re.compile(r"Invalid value '([^']*)', expected one of \[([^]]*)\]")


class ConfigError(Exception):
    """What the user asked for cannot be run as it stands: one line for the terminal, exit status 2."""


def other_launcher(choice: str) -> ConfigError:
    """What to say to who has another launcher chosen, or none."""
    why = "dcpbench runs cells with its own launcher only, on ranks that stay up from cell to cell"
    instead = (
        "in jobs of Slurm with scripts/ray.sbatch, on several machines with part=1/4 or another executor"
    )
    return ConfigError(f"{choice}: {why}; {instead}")


@contextmanager
def told_null_choices(overrides: Sequence[str]) -> Iterator[None]:
    """Have Hydra compose these overrides, which refuses null as a value of a group without saying of which.

    Raises:
        ConfigError: that was it.
    """
    try:
        yield
    except ValueError as error:
        if type(error) is not ValueError or "Config group override" not in str(error):
            raise
        named = next((line for line in overrides if line.endswith("=null")), "null")
        raise ConfigError(f"{named}: a group has no value null; leave it out") from None


def one_line(error: BaseException) -> str:
    """What Hydra, OmegaConf or dcpbench have to say, without their line breaks and indentation."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file and error.options:
        group, _, value = error.missing_cfg_file.rpartition("/")
        return visible(f"{group}={value}: there is no such {group}{instead(value, error.options)}")
    cause = error.__cause__ or error.__context__
    for unknown in (cause, error):
        if isinstance(unknown, ConfigKeyError | ConfigAttributeError) and unknown.full_key:
            return visible(f"{unknown.full_key}: there is no such key{_what_it_may_be(unknown)}")
    line = _sentence(str(error))
    if isinstance(cause, OmegaConfBaseException) and str(cause) not in str(error):
        line = f"{line.rstrip('.')}: {_sentence(str(cause))}"
    if isinstance(cause, OmegaConfBaseException) and cause.full_key and cause.full_key not in line:
        line = f"{cause.full_key}: {line}"
    if expected := _EXPECTED.search(line):
        line += did_you_mean(expected[1], expected[2].split(", "))
    return visible(line)


def refuse_unknown(config: Any, path: str = "") -> None:
    """Refuse keys that were added to a configuration (`+foo=1`) though nothing reads them.

    Raises:
        ConfigError: naming the first.
    """
    known = [field.name for field in fields(config)]
    for name in vars(config).keys() - known:
        raise ConfigError(f"+{path}{name}: there is no such key{did_you_mean(name, known)}")
    for name in known:
        if is_dataclass(value := getattr(config, name)):
            refuse_unknown(value, f"{path}{name}.")


def _sentence(text: str) -> str:
    text = re.sub(r"\n?To append to your config use \S+", "", text)
    text = re.sub(r"\s*\n\s*(full_key|object_type|reference_type)[:=].*", "", text)
    text = re.sub(r"To override a value use 'override (\S+): (\S+)'", r"It is chosen without +: \1=\2", text)
    text = re.split(r"\nConfig search path:", text, maxsplit=1)[0]
    return " ".join(text.split())


def _what_it_may_be(error: OmegaConfBaseException) -> str:
    parent, key = error.parent_node, str(error.key)
    if not isinstance(parent, DictConfig):
        return ""
    names = [str(name) for name in parent if name != "hydra"]
    there_are = f"; there are {names_shown(names)}" if names else "; a + before it adds it"
    return did_you_mean(key, names) or there_are
