"""Check the words that a user typed for a run, before Hydra reads them."""

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, OverrideType
from hydra.errors import OverrideParseException

from dcpbench.cli import reference
from dcpbench.config.errors import ConfigError
from dcpbench.config.hydra_errors import malformed, refuse_choice, set_by_dcpbench
from dcpbench.config.schema import is_about_the_sweep, is_how_run
from dcpbench.config.text import as_target, did_you_mean, visible

_OURS = ("hydra/launcher", "hydra/sweeper", "hydra.mode", "hydra.run.dir")
"""Settings of Hydra that dcpbench relies on, or that nothing reads."""


def check(words: Sequence[str], command: str = "run", own: Path | None = None, shows: str = "") -> None:
    """Refuse words that Hydra would report in its own terms, or read otherwise than they were meant.

    Args:
        words: all words that the command passes to Hydra, without options.
        command: the name of the command.
        own: the user's `--config-dir`.
        shows: the option that prints a configuration, if one is given.

    Raises:
        ConfigError: a word is not `key=value`, cannot be parsed, has no value, selects null, a list in
            brackets or code as the value of a group, or sets a key that another word sets.
    """
    parser, groups = OverridesParser.create(), reference.group_names()
    first: dict[tuple[str, str | None, bool], str] = {}
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        bare = "" if _has_key(following) else following
        if word.startswith("="):
            raise ConfigError(malformed(word))
        if not _has_key(word):
            raise ConfigError(reference.correction(word, bare, command, own))
        try:
            (override,) = parser.parse_overrides([word])
        except OverrideParseException:
            raise ConfigError(malformed(word, bare)) from None
        if word.endswith("="):
            write = f"; write {visible(word + bare)}, without a space" if bare else ""
            raise ConfigError(f"{visible(word)}: has no value{write}")
        if shows and override.is_sweep_override():
            raise ConfigError(f"{visible(word)}: {shows} prints one cell; pass one value")
        if override.key_or_group in _OURS:
            raise set_by_dcpbench(word)
        refuse_choice(override, groups)
        _refuse_code(override, groups, own)
        key = override.key_or_group, override.package, override.type is OverrideType.DEL
        if key in first:
            raise ConfigError(_twice(first[key], word, override))
        first[key] = word


def _has_key(word: str) -> bool:
    return "=" in word or word.startswith("~")


def _refuse_code(override: Override, groups: Sequence[str], own: Path | None) -> None:
    """Refuse the name of a function, class or file of the user's as the value of a group."""
    group, value = override.key_or_group, override.value()
    for item in value.list if isinstance(value, ChoiceSweep) else [value]:
        if group not in groups or not isinstance(item, str):
            continue
        if "/" in item and not item.partition("::")[0].partition(":")[0].endswith(".py"):
            name = Path(item).stem
            place = f"DIR/{group}/{name}.yaml, and add --config-dir DIR"
            raise ConfigError(visible(f"{group}={item}: is a path; write {group}={name} for {place}"))
        target, known = as_target(item), reference.groups(own)[group].values
        if target is None or item in known:
            continue
        fix = did_you_mean(target.rpartition(".")[2], known)
        if group == "model":
            fix = f"; your model: workload.target={target}"
        elif group == "checkpointer":
            fix = f"; your trainer: checkpointer=trainer workload.target={target}"
        file = f"; to add it, write target: {target} into DIR/{group}/NAME.yaml, and pass --config-dir DIR"
        raise ConfigError(visible(f"{group}={item}: unknown value{fix or file}"))


def _twice(first: str, word: str, override: Override) -> str:
    """Return the complaint about a second word for the same key."""
    key = override.get_key_element()
    values = ",".join(dict.fromkeys(item.partition("=")[2] for item in (first, word)))
    name = override.key_or_group
    is_swept = not (is_about_the_sweep(name) or is_how_run(name) or override.is_hydra_override())
    both = f", or write {key}={values} for both" if is_swept and "," in values else ""
    return visible(f"{word}: {key.lstrip('+~')} is given twice (first {first}); leave one out{both}")
