"""What a run can be asked for, for its help, completion and corrections: read from `AXES` and the fields of
the configuration, without composing anything, which takes Hydra a second."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import Enum, EnumType
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml

from dcpbench.config.groups import HELP
from dcpbench.config.schema import Config, conf_folder, config_class
from dcpbench.config.text import did_you_mean, visible
from dcpbench.core.axes import AXES
from dcpbench.core.metrics import METRICS
from dcpbench.core.plugins import declared_values, plugins
from dcpbench.records.installation import conf_folders

_COMMANDS: dict[str, str] = {
    "run": "run cells: one, or the product of lists",
    "plan": "what a run would do, and how long it would take; starts nothing",
    "resume": "go on with a sweep that was broken off",
    "report": "tables of sweeps, from their rows; report.html and junit.xml again",
    "compare": "what changed between sweeps: statuses, and costs beyond noise",
    "history": "how each cell went over many sweeps",
    "doctor": "whether this machine can run it, and how to mend what it lacks",
}


def commands() -> dict[str, str]:
    """Return each command and what it is for, in the order in which they are shown."""
    added = {name: spec.summary for plugin in plugins() for name, spec in plugin.commands.items()}
    return {**_COMMANDS, **added}


OPTIONS: dict[str, tuple[str | None, str]] = {
    "-m, --multirun": (None, "as before every run; lists make a sweep without it too"),
    "-cd, --config-dir": ("DIR", "a folder with groups of your own, laid out like conf/"),
    "-c, --cfg": ("job|hydra|all", "print the configuration of a cell and start nothing"),
    "--resolve": (None, "with --cfg: with interpolations filled in"),
    "-p, --package": ("KEY", "with --cfg: only this part of it"),
    "-i, --info": ("WHAT", "what Hydra knows: all, config, defaults, defaults-tree, plugins, searchpath"),
    "--hydra-help": (None, "help on Hydra itself"),
    "-cn, --config-name": ("NAME", "another file than config.yaml"),
    "-cp, --config-path": ("DIR", "another folder than conf/"),
    "-r, --run": (None, "refused: dcpbench runs cells with its own launcher"),
    "-sc, --shell-completion": (None, "Hydra's own completion"),
    "--experimental-rerun": ("FILE", "Hydra's; refused"),
}
"""Hydra's options, each with what follows it."""

_MAY_STAND_ALONE = ("-i", "--info")
"""Options that need no value."""

_FLAG = ("true", "false")
_EXPERIMENT = "a sweep that is written down; further overrides choose among its cells"


@dataclass(frozen=True)
class Axis:
    """A group of `conf/`: its values, each with what it is."""

    name: str
    text: str
    default: str
    values: dict[str, str]


@dataclass(frozen=True)
class Key:
    """A key with one value: its default, what it is, and the values that it may have if they are few."""

    name: str
    text: str
    default: str
    values: tuple[str, ...]

    @property
    def help(self) -> str:
        """What it is, and its values where that does not name them."""
        told = self.values == _FLAG or all(value in self.text for value in self.values)
        return self.text if told or self.name == "objective" else f"{self.text} ({', '.join(self.values)})"


@dataclass(frozen=True)
class Described:
    """All that an override may name."""

    axes: dict[str, Axis] = field(default_factory=dict)
    keys: dict[str, Key] = field(default_factory=dict)


def config_dir(words: Sequence[str]) -> Path | None:
    """The folder that `--config-dir` names, if it is there."""
    for word, following in pairwise([*words, ""]):
        name, equals, value = word.partition("=")
        if name in ("--config-dir", "-cd"):
            return Path(value if equals else following)
    return None


def described(words: Sequence[str] = ()) -> Described:
    """What there is, with the groups of `--config-dir` if these words name one."""
    folders = [*conf_folders(), *filter(None, [config_dir(words)])]
    defaults = yaml.safe_load((conf_folder() / "config.yaml").read_text(encoding="utf-8"))["defaults"]
    groups = {name: _shown(value) for one in defaults if isinstance(one, dict) for name, value in one.items()}
    texts = {item.name: str(item.metadata.get(HELP, "")) for item in fields(config_class())}
    texts |= {"experiment": _EXPERIMENT} | {name: spec.help for name, spec in AXES.items()}
    axes = {
        name: Axis(name, texts[name], default, _values(name, folders))
        for name, default in groups.items()
        if name in texts
    }
    return Described(axes, {key.name: key for key in _keys(config_class(), texts) if key.name not in axes})


def known_options() -> list[str]:
    """Every spelling of every option of a run."""
    return ["--help", "-h", *(name for names in OPTIONS for name in names.split(", "))]


def wrong_option(words: Sequence[str]) -> str | None:
    """What is wrong with the first option that is none, if one is not."""
    known = known_options()
    for word in words:
        name = word.partition("=")[0]
        if not name.startswith("-") or name in known:
            continue
        if name.startswith("--") and any(one.startswith(name) for one in known):
            continue
        if not name.startswith("--") and any(name.startswith(one) for one in known if one[1] != "-"):
            continue  # as -cdFOLDER
        return f"{visible(name)}: no such option{did_you_mean(name, known)}"
    return None


def options_first(words: Sequence[str]) -> list[str]:
    """The same, Hydra's options before all overrides: it takes them before or after, and not between."""
    takes = {name for names, (value, _) in OPTIONS.items() if value for name in names.split(", ")}
    options: list[str] = []
    overrides: list[str] = []
    for before, word in pairwise(["", *words]):
        follows = before in takes and ("=" not in word or before not in _MAY_STAND_ALONE)
        (options if word.startswith("-") or follows else overrides).append(word)
    return [*options, *overrides]


def instead_of(word: str, words: Sequence[str] = ()) -> str:
    """What is wrong with a word that stands where `key=value` has to, and what may have been meant."""
    text = f"{visible(word)}: is neither a command nor key=value"
    known = commands()
    if word in known:
        return f"{word}: is a command, and stands first: dcpbench {word} ..."
    there = described(words)
    meant = {name: f"dcpbench {name}" for name in known}
    meant |= {name: f"{name}={key.default}" for name, key in there.keys.items()}
    meant |= {name: f"{name}={axis.default}" for name, axis in there.axes.items()}
    axes = [axis for axis in reversed(there.axes.values()) if axis.name != "load_parallel"]
    meant |= {value: f"{axis.name}={value}" for axis in axes for value in axis.values}
    close = difflib.get_close_matches(word, meant, n=1)
    if close:
        return f"{text}; did you mean {meant[close[0]]}?"
    return f"{text}; dcpbench --help tells what there is"


def _keys(kind: Any, texts: Mapping[str, str], above: str = "") -> Iterator[Key]:
    """The keys of a class and of those within it that describe theirs."""
    hints = get_type_hints(kind)
    for item in fields(kind):
        name, hint = f"{above}{item.name}", hints[item.name]
        if is_dataclass(hint):
            own = {f"{name}.{one.name}": str(one.metadata.get(HELP, "")) for one in fields(hint)}
            yield from _keys(hint, own, f"{name}.") if all(own.values()) else ()
        elif text := texts.get(name):
            default = item.default if item.default_factory is MISSING else item.default_factory()
            values = tuple(METRICS) if name == "objective" else _choices(hint)
            yield Key(name, text, _shown(default), values)


def _shown(value: Any) -> str:
    """A value as the command line has it."""
    plain = value.value if isinstance(value, Enum) else int(value) if isinstance(value, float) else value
    return yaml.safe_dump(plain, default_flow_style=True).splitlines()[0]


def _values(axis: str, folders: Sequence[Path]) -> dict[str, str]:
    group = AXES[axis].values_in if axis in AXES else axis
    found = sorted(
        (path for folder in folders for path in folder.glob(f"{group}/*.yaml")), key=attrgetter("stem")
    )
    return {path.stem: _comment(path) for path in found} | dict.fromkeys(declared_values().get(group, ()), "")


def _comment(path: Path) -> str:
    """What a file says of itself in the comment that it begins with."""
    lines: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("# @package"):
            lines.append(line.strip("# "))
    return " ".join(lines)


def _choices(hint: Any) -> tuple[str, ...]:
    """The values of a switch."""
    kinds: list[Any] = [one for one in (hint, *get_args(hint)) if isinstance(one, EnumType)]
    return _FLAG if hint is bool else tuple(one.value for kind in kinds for one in kind)


def dotted_keys() -> Iterator[str]:
    """The keys of groups, as `parallel.tp`."""
    for name, hint in get_type_hints(Config).items():
        for kind in (hint, *get_args(hint)):
            yield from (f"{name}.{item.name}" for item in (fields(kind) if is_dataclass(kind) else ()))
