"""Shell completion: commands, options, and for a run its groups, keys and their values.

Bash breaks words at `=` and replaces only the part after the last break. So its script splits the line at
blanks itself, and cuts candidates at their last `=`. Zsh needs neither.
"""

from pathlib import Path

import click
from click.shell_completion import BashComplete, CompletionItem, ZshComplete, add_completion_class

from dcpbench.cli import keys_help

SHELLS = ("bash", "zsh")
VARIABLE = "_DCPBENCH_COMPLETE"

_BASH = """\
%(complete_func)s() {
    local line="${COMP_LINE:0:COMP_POINT}" kind value
    local -a typed=($line)
    [[ $line == *" " ]] && typed+=("")
    local last="${typed[-1]}"
    COMPREPLY=()
    while IFS=, read -r kind value; do
        if [[ $kind == dir ]]; then
            compopt -o dirnames
        elif [[ $kind == file ]]; then
            compopt -o default
        elif [[ $kind == plain ]]; then
            [[ $value == *= ]] && compopt -o nospace
            [[ $last == *=* ]] && value="${value#"${last%%"${last##*=}"}"}"
            COMPREPLY+=("$value")
        fi
    done < <(COMP_WORDS="$line" COMP_CWORD=$((${#typed[@]}-1)) \\
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
            plain) if [[ $value == *= ]]; then partial+=("$value"); else values+=("$value"); fi ;;
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


@add_completion_class
class _Bash(BashComplete):
    source_template = _BASH

    @staticmethod
    def _check_version() -> None:
        """Skip click's check: this script needs no recent bash."""


@add_completion_class
class _Zsh(ZshComplete):
    source_template = _ZSH


def source(tree: click.Command, shell: str) -> str:
    """Return the script that makes a shell complete: `eval "$(dcpbench --completion bash)"`."""
    made = {"bash": _Bash, "zsh": _Zsh}[shell]
    return made(tree, {}, "dcpbench", VARIABLE).source()


def complete_override(
    context: click.Context, _: click.Parameter | None, typed: str
) -> list[CompletionItem[str]]:
    """Return the overrides that begin as typed."""
    config_dir = context.params.get("config_dir")
    groups, keys = keys_help.groups(config_dir and Path(config_dir)), keys_help.keys()
    name, equals, value = typed.partition("=")
    if not equals:
        nested = keys_help.keys_of_groups() if "." in typed else ()
        names = dict.fromkeys([*groups, *keys, *nested])
        return [CompletionItem(f"{name}=") for name in names if name.startswith(typed)]
    key = name.lstrip("+")
    values = [*(groups[key].values if key in groups else ()), *(keys[key].values if key in keys else ())]
    return [CompletionItem(f"{name}={candidate}") for candidate in values if candidate.startswith(value)]
