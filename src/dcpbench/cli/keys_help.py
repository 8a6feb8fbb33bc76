"""Groups and keys of the command line, for help, completion and corrections.

They are read from `AXES`, the fields of the configuration and the files in `conf/`: composing a configuration
takes Hydra a second.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import Enum, EnumType
from itertools import takewhile
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml

from dcpbench.code.provenance import conf_folders
from dcpbench.config.keys import HELP
from dcpbench.config.schema import Config, conf_folder, schema_class
from dcpbench.core.axes import AXES
from dcpbench.core.plugins import declared_values, plugins

_COMMANDS: dict[str, str] = {
    "run": "run one cell, or every combination of the values in lists",
    "plan": "show what a run would do and how long it would take",
    "resume": "continue an interrupted sweep",
    "report": "print tables of sweeps, or write them to a file",
    "show": "print one cell in full: checks, mismatches, losses, times",
    "compare": "show what changed between sweeps: statuses and costs",
    "history": "show each cell over many sweeps",
    "doctor": "check whether this machine can run cells",
}
_EXPERIMENT = "a sweep that is defined in a file; other overrides select some of its cells"


@dataclass(frozen=True)
class KeyHelp:
    """A group of `conf/`, or a key with one value. `values` has the help of each value; it is empty where any
    value is allowed."""

    name: str
    help: str
    default: str
    values: Mapping[str, str] = field(default_factory=dict)

    @property
    def full_help(self) -> str:
        """The help, with the values that it does not name."""
        named = self.values.keys() <= {"true", "false"} or all(value in self.help for value in self.values)
        return self.help if named else f"{self.help} ({', '.join(self.values)})"


def commands() -> dict[str, str]:
    """Return each command and its purpose, in the order in which they are shown."""
    added = {name: spec.summary for plugin in plugins() for name, spec in plugin.commands.items()}
    return {**_COMMANDS, **added}


def groups(config_dir: Path | None = None) -> dict[str, KeyHelp]:
    """Return every group of `conf/`, with the values that plug-ins and the folder `own` add."""
    folders = [*conf_folders(), *filter(None, [config_dir])]
    defaults = yaml.safe_load((conf_folder() / "config.yaml").read_text(encoding="utf-8"))["defaults"]
    chosen = {
        name: _shown(value)
        for default in defaults
        if isinstance(default, dict)
        for name, value in default.items()
    }
    texts = {**_texts(), "experiment": _EXPERIMENT}
    return {
        name: KeyHelp(name, texts[name], default, _values(name, folders))
        for name, default in chosen.items()
        if name in texts
    }


def keys() -> dict[str, KeyHelp]:
    """Return every key with one value, those below a key too: `timeouts.cell_s`."""
    by_name = {key.name: key for key in _keys(schema_class(), _texts())}
    return {name: key for name, key in by_name.items() if name not in AXES or not AXES[name].group}


def keys_of_groups() -> Iterator[str]:
    """Return the keys of all groups: `parallel.tp`."""
    for name, hint in get_type_hints(Config).items():
        for kind in (hint, *get_args(hint)):
            yield from (
                f"{name}.{config_field.name}" for config_field in (fields(kind) if is_dataclass(kind) else ())
            )


def _texts() -> dict[str, str]:
    texts = {
        config_field.name: str(config_field.metadata.get(HELP, "")) for config_field in fields(schema_class())
    }
    return texts | {name: spec.help for name, spec in AXES.items()}


def _keys(kind: Any, texts: Mapping[str, str], above: str = "") -> Iterator[KeyHelp]:
    """Yield the keys of a class, and those of the classes inside it whose keys all have help."""
    hints = get_type_hints(kind)
    for config_field in fields(kind):
        name, hint = f"{above}{config_field.name}", hints[config_field.name]
        if is_dataclass(hint):
            inside = {
                f"{name}.{inner_field.name}": str(inner_field.metadata.get(HELP, ""))
                for inner_field in fields(hint)
            }
            yield from _keys(hint, inside, f"{name}.") if all(inside.values()) else ()
        elif text := texts.get(name):
            default = (
                config_field.default
                if config_field.default_factory is MISSING
                else config_field.default_factory()
            )
            enums: list[Any] = [
                kind_or_argument
                for kind_or_argument in (hint, *get_args(hint))
                if isinstance(kind_or_argument, EnumType)
            ]
            values = (
                ("true", "false") if hint is bool else [member.value for enum in enums for member in enum]
            )
            yield KeyHelp(name, text, _shown(default), dict.fromkeys(values, ""))


def _shown(value: Any) -> str:
    """Return a value as it is written on the command line."""
    plain = value.value if isinstance(value, Enum) else int(value) if isinstance(value, float) else value
    return yaml.safe_dump(plain, default_flow_style=True).splitlines()[0]


def _values(group: str, folders: Sequence[Path]) -> dict[str, str]:
    """Return the values of a group; the help of each is the comment at the top of its file."""
    place = AXES[group].values_in if group in AXES else group
    paths = (path for folder in folders for path in folder.glob(f"{place}/*.yaml"))
    values = {path.stem: _comment(path) for path in sorted(paths, key=attrgetter("stem"))}
    return values | dict.fromkeys(declared_values(place), "")


def _comment(path: Path) -> str:
    lines = takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    return " ".join(line.strip("# ") for line in lines if not line.startswith("# @package"))
