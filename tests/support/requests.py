"""Requests as a test wants them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from dcpbench.sweep.request import Options, Request
from dcpbench.sweep.signals import Signals


def request(words: Sequence[str], config_dir: Path | None = None, **options: Any) -> Request:
    """The request of these words and options."""
    overrides = OverridesParser.create().parse_overrides([*words])
    return Request.of(overrides, config_dir, Options(**options), Signals(), 0.0)
