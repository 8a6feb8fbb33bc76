"""What a shell completes: commands, options, and for a run its groups, keys and their values.

Bash breaks words at `=` and replaces only what follows the last break, so its script hands over the whole
line, and candidates are cut at the last break of theirs. Zsh does neither.
"""

import os
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    ZshComplete,
    add_completion_class,
    get_completion_class,
)

from dcpbench.cli import described

SHELLS = ("bash", "zsh")
Names = Sequence[str] | Callable[[], Sequence[str]]
"""Names, or what finds them out, which may take a moment."""
_VARIABLE = "_DCPBENCH_COMPLETE"

_BASH = """\
%(complete_func)s() {
    local IFS=$'\\n' kind value
    COMPREPLY=()
    while IFS=, read -r kind value; do
        if [[ $kind == dir ]]; then
            compopt -o dirnames
        elif [[ $kind == file ]]; then
            compopt -o default
        elif [[ $kind == plain ]]; then
            [[ $value == *[=.,/] ]] && compopt -o nospace
            COMPREPLY+=("$value")
        fi
    done < <(COMP_LINE="$COMP_LINE" COMP_POINT="$COMP_POINT" DCPBENCH_WORDBREAKS="$COMP_WORDBREAKS" \\
        %(complete_var)s=bash_complete "$1" 2>/dev/null)
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""

_ZSH = """\
#compdef %(prog_name)s
%(complete_func)s() {
    local kind value help
    local -a values partial
    (( ! $+commands[%(prog_name)s] )) && return 1
    while read -r kind && read -r value && read -r help; do
        case $kind in
            dir) _path_files -/ ;;
            file) _path_files -f ;;
            plain) if [[ $value == *[=.,/] ]]; then partial+=("$value"); else values+=("$value"); fi ;;
        esac
    done < <(COMP_WORDS="${words[*]}" COMP_CWORD=$((CURRENT-1)) \\
        %(complete_var)s=zsh_complete %(prog_name)s 2>/dev/null)
    (( $#values )) && compadd -U -V plain -a values
    (( $#partial )) && compadd -U -S '' -V partial -a partial
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    %(complete_func)s "$@"
else
    compdef %(complete_func)s %(prog_name)s
fi
"""


class _Bash(BashComplete):
    source_template = _BASH

    @staticmethod
    def _check_version() -> None:
        """Which bash it is, its script need not know."""

    def get_completion_args(self) -> tuple[list[str], str]:
        line = os.fsencode(os.environ["COMP_LINE"])[: int(os.environ["COMP_POINT"])].decode(errors="replace")
        words, self._is_open = _words(line)
        self._typed = words[-1] if (self._is_open or line[-1:].strip()) and len(words) > 1 else ""
        return words[1:-1] if self._typed else words[1:], self._typed

    def format_completion(self, item: CompletionItem[Any]) -> str:
        breaks = "" if self._is_open else os.environ.get("DCPBENCH_WORDBREAKS", "")
        kept = max((self._typed.rfind(sign) for sign in breaks), default=-1) + 1
        return f"{item.type},{str(item.value)[kept:]}"


class _Zsh(ZshComplete):
    source_template = _ZSH


def _words(line: str) -> tuple[list[str], bool]:
    """The words of a line, and whether the last lacks its closing quote, in which nothing breaks a word."""
    for end in ("", '"', "'"):
        with suppress(ValueError):
            return shlex.split(line + end), bool(end)
    return line.split(), False


def source(tree: click.Command, shell: str) -> str:
    """The script that has a shell complete: `eval "$(dcpbench --completion bash)"`."""
    made = get_completion_class(shell)
    assert made is not None
    return made(tree, {}, "dcpbench", _VARIABLE).source()


def override(context: click.Context, _: click.Parameter | None, typed: str) -> list[CompletionItem[str]]:
    """What may stand for an override of which this has been typed."""
    words = [*context.params.get("overrides", ()), *context.args]
    if context.info_name == "resume" and not words:
        return [CompletionItem(typed, type="dir")]
    there = described.described(words)
    name, equals, value = typed.partition("=")
    if not equals:
        nested = described.dotted_keys() if "." in typed else ()
        names = [*there.axes, *there.keys, *nested]
        return [CompletionItem(f"{one}=") for one in dict.fromkeys(names) if one.startswith(typed)]
    plain = name.lstrip("+")
    if plain in ("resume", "hydra.sweep.dir", "storage.root"):
        return _folders(name, value)
    values = [*there.axes[plain].values] if plain in there.axes else []
    values += there.keys[plain].values if plain in there.keys else ()
    return [CompletionItem(f"{name}={one}") for one in _lists(values, value)]


def _folders(name: str, typed: str) -> list[CompletionItem[str]]:
    """Folders, which a shell would not look for within a word."""
    place = Path(typed)
    parent = place if typed.endswith("/") or not typed else place.parent
    lead = typed[: len(typed) - len(typed.rpartition("/")[2])]
    with suppress(OSError):
        found = sorted(one.name for one in parent.iterdir() if one.is_dir())
        start = typed.rpartition("/")[2]
        return [CompletionItem(f"{name}={lead}{one}/") for one in found if one.startswith(start)]
    return []


def options(typed: str) -> list[CompletionItem[str]]:
    """The options of a run that begin so."""
    return [CompletionItem(one) for one in described.known_options() if one.startswith(typed)]


def listed(known: Names) -> Any:
    """A completion of names between commas."""

    def complete(_: click.Context, __: click.Parameter, typed: str) -> list[CompletionItem[str]]:
        return [CompletionItem(one) for one in _lists(known() if callable(known) else known, typed)]

    return complete


def _lists(names: Sequence[str], typed: str) -> list[str]:
    """Lists of names between commas of which this has been typed, each with one name more."""
    before, comma, last = typed.rpartition(",")
    taken = before.split(",")
    return [f"{before}{comma}{one}" for one in names if one.startswith(last) and one not in taken]


add_completion_class(_Bash, "bash")
add_completion_class(_Zsh, "zsh")
