"""Run a command in this process."""

from collections.abc import Sequence

from dcpbench.cli import commands, reference


def main(words: Sequence[str]) -> int:
    """Return the exit status of a command; words without a command are those of `report`."""
    is_command = {*words[:1]} & {*reference.commands()}
    return commands.main([*words] if is_command else ["report", *words])
