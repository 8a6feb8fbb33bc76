"""Rivals: checkpointers other than DCP, for comparison."""

from pathlib import Path

from dcpbench.core.plugins import API, Plugin

plugin = Plugin(
    name="rivals",
    api=API,
    conf=Path(__file__).parent / "conf",
    preload=("dcpbench.plugins.rivals.safetensors_file",),
)
