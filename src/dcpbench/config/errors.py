"""What a user asked for that cannot be run, told in one clear line: which key, and what it may be."""

import difflib
import re

from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from dcpbench.config.text import visible

_SHOWN = 12


class ConfigError(Exception):
    """What the user asked for cannot be run as it stands: one line for the terminal, exit status 2."""


def one_line(error: BaseException) -> str:
    """What Hydra, OmegaConf or dcpbench have to say, without their line breaks and indentation."""
    line = _sentence(str(error))
    cause = error.__cause__ or error.__context__
    if isinstance(cause, OmegaConfBaseException) and str(cause) not in str(error):
        line = f"{line.rstrip('.')}: {_sentence(str(cause))}"
    unknown = cause if isinstance(cause, ConfigKeyError | ConfigAttributeError) else error
    if isinstance(unknown, ConfigKeyError | ConfigAttributeError):
        line += _what_it_may_be(unknown)
    return visible(line)


def _sentence(text: str) -> str:
    text = re.sub(r"\n?To append to your config use \S+", "", text)
    text = re.sub(r"\n\s*(full_key|object_type|reference_type):", r"; \1:", text)
    text = re.sub(r"; (object_type|reference_type): *[^;\n]*", "", text)
    text = re.split(r"\nConfig search path:", text, maxsplit=1)[0]
    head, *options = re.split(r"\n+Available options in '[^']*':\s*", text, maxsplit=1)
    return "; it may be ".join([" ".join(head.split()), *(", ".join(names.split()) for names in options)])


def _what_it_may_be(error: OmegaConfBaseException) -> str:
    parent, key = error.parent_node, str(error.key)
    if not isinstance(parent, DictConfig):
        return ""
    names = [str(name) for name in parent if name != "hydra"]
    close = difflib.get_close_matches(key, names, n=3)
    shown = close or names[:_SHOWN]
    lead = "did you mean" if close else "there are"
    return f"; {lead} {', '.join(shown)}" if shown else ""
