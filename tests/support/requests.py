"""Requests as a test wants them."""

from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser

from dcpbench.sweep.request import Request
from dcpbench.sweep.signals import Signals


def request(words: Sequence[str], config_dir: Path | None = None) -> Request:
    """The request of these words."""
    return Request.of(OverridesParser.create().parse_overrides([*words]), config_dir, Signals(), 0.0)
