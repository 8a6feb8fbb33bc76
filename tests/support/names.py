"""Leaves by the texts of their names."""

from dcpbench.core.state import text_of
from dcpbench.state.snapshot import Leaf, Leaves


def by_text(leaves: Leaves) -> dict[str, Leaf]:
    return {text_of(name): leaf for name, leaf in leaves.items()}
