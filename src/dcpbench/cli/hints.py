"""Hints: the problem with a wrong word, and what was meant by it.

A table for each kind of word yields conditions, each with its answer. The first one that holds is printed.
"""

import re
from collections.abc import Container, Iterable, Iterator
from pathlib import Path

from dcpbench.cli import keys_help
from dcpbench.config.text import as_target, choices, did_you_mean, near_name, visible
from dcpbench.records.store import SWEEP_JSON

Hints = Iterator[tuple[object, str]]


def first_answer(hints: Hints) -> str:
    """Return the first answer whose condition holds, an empty text if none does."""
    return next((visible(answer) for holds, answer in hints if holds), "")


def of_word(word: str, following: str = "", command: str = "run", config_dir: Path | None = None) -> Hints:
    """Yield hints for a word that is neither a command nor `key=value`. `following` is the next word, if it
    is not `key=value` either; `own` is the user's `--config-dir`."""
    commands, groups = keys_help.commands(), keys_help.groups(config_dir)
    keys = keys_help.keys() | groups
    defaults = {name: key.default for name, key in keys.items()}
    of_groups = {
        value: name for name in reversed(groups) if name != "load_parallel" for value in groups[name].values
    }
    meant = {name: f"{name}={default}" for name, default in defaults.items()}
    meant |= {name: f"dcpbench {name}" for name in commands}
    meant |= {value: f"{name}={value}" for value, name in of_groups.items()}
    near = near_name(word, meant, 0.75)
    target = None if Path(word).is_dir() else as_target(word)
    is_folder = "/" in word or word in (path.parent.name for path in Path().glob(f"*/{SWEEP_JSON}"))
    is_plan = command == "plan"
    wrong = f"{word.strip() or repr(word)}: not a command and not key=value"
    plan = "to plan a resume: dcpbench plan --resume"
    yield is_plan and word == "resume", f"{word}: {plan} {following or 'FOLDER'}"
    yield word in commands, f"{word}: a command has to come first: dcpbench {word} ..."
    yield target, f"{wrong}; your model: workload.target={target}"
    yield word in defaults, f"{wrong}; write {word}={following or defaults.get(word)}"
    yield is_folder and is_plan, f"{wrong}; {plan} {word}"
    yield is_folder, f"{wrong}; to resume a sweep: dcpbench resume {word}"
    yield near, f"{wrong}; did you mean {meant.get(str(near))}?"
    yield True, f"{wrong}; see dcpbench --help"


def of_option(option: str, following: str, keys: Container[str]) -> Hints:
    """Yield hints for an option that its command lacks: one of these keys, or another command."""
    name, _, value = option.partition("=")
    key = name.lstrip("-").replace("-", "_")
    write = _command_for(key, value or following)
    yield key in keys, f"{name}: write {key}={value or following or 'VALUE'}"
    yield name[:2] == "--" and write, f"{name}: not an option of this command; write {write}"


def of_key(key: str, value: str) -> Hints:
    """Yield hints for a key that is a command, or an option of one."""
    write = _command_for(key, value.strip("'\""))
    yield write, f"{key}={value}: not a key; write {write}"


def _command_for(key: str, value: str) -> str | None:
    """Return the command that is meant by a key or an option with a value."""
    folder = value if value and "=" not in value and value[0] != "-" else "FOLDER"
    rerun = "dcpbench resume FOLDER --rerun-failed"
    return {
        "resume": f"dcpbench resume {folder}",
        "rerun": rerun,
        "rerun_failed": rerun,
        "trust": "dcpbench resume FOLDER --trust",
        "plan": "dcpbench plan",
        "plan_as": "dcpbench plan --format",
    }.get(key)


def of_place(place: str) -> Hints:
    """Yield hints for the path of a sweep that does not exist."""
    near = near_name(place, keys_help.commands())
    wrong = f"{place}: no such folder"
    condition = f"a condition is written after --where: --where '{place}'"
    yield re.match(r"\w+ *[!<>=~]", place), f"{wrong}; {condition}"
    yield near, f"{wrong}; did you mean dcpbench {near}?"


def of_override(word: str, following: str = "") -> Hints:
    """Yield hints for a word with a `=` that Hydra cannot parse, or that has no value. `following` is the
    next word, if it has no key: a list with spaces comes as several words."""
    key, _, value = word.partition("=")
    items = [word_part.strip() for word_part in (value + following).split(",") if word_part.strip()]
    write = f"; write {key}={','.join(items)}" if items else ""
    yield not key.strip("+~"), f"{word}: has no key in front of the ="
    yield not items, f"{word}: has no value"
    yield not value, f"{word}: has no value{write}, without a space"
    for opening, closing in ("()", "[]", "{}", '""', "''"):
        times = value.count(opening) - value.count(closing)
        is_open = times > 0 or (opening == closing and value.count(opening) % 2)
        yield is_open, f"{word}: has a {opening} without a closing {closing}"
        yield times < 0, f"{word}: has a {closing} without a {opening}"
    yield value.endswith(","), f"{word}: ends with a comma{write}"
    yield len(items) <= value.count(","), f"{word}: lacks a value next to a comma{write}"
    functions = "the functions for lists are choice, range, glob"
    yield re.fullmatch(r"\w+\(.*\)", value), f"{word}: is not a call of one of Hydra's functions; {functions}"
    yield True, f"{word}: has characters that need quotes; write '{key}=\"{value}\"'"


def of_value(group: str, value: str, known: Iterable[str]) -> Hints:
    """Yield hints for an unknown value of a group: a name, or the user's code or file."""
    target = as_target(value)
    wrong = f"{group}={value}: unknown value"
    is_code = target and group in ("model", "checkpointer")
    near = did_you_mean(str(target).rpartition(".")[2], known)
    trainer = "checkpointer=trainer " if group == "checkpointer" else ""
    yield is_code, f"{wrong}; your {'trainer' if trainer else 'model'}: {trainer}workload.target={target}"
    name = Path(value).stem
    where = f"write {group}={name} for DIR/{group}/{name}.yaml, and add --config-dir DIR"
    yield "/" in value and not target, f"{group}={value}: is a path; {where}"
    file = f"; to add it, write target: {target} into DIR/{group}/NAME.yaml, and pass --config-dir DIR"
    yield target, f"{wrong}{near or file}"
    yield True, f"{wrong}{choices(value, known)}"
