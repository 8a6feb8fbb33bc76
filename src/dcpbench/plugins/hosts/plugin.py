"""Hosts: ranks on every host of a Ray cluster, `executor=ray`."""

from pathlib import Path

from dcpbench.core.plugins import API, Plugin

plugin = Plugin(
    name="hosts",
    api=API,
    conf=Path(__file__).parent / "conf",
)
