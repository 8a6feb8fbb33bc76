"""Run a sweep by Hydra's overrides.

Exit status 0: every row is pass, xfail or skip. 1: a row is not, or all were skipped. 2: the configuration is
wrong, which one line reports, and nothing was started. 128 + the number of a signal that ended it (130:
Ctrl-C).
"""

import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from dcpbench.cli.words import one_line
from dcpbench.config.errors import ConfigError
from dcpbench.executors.agent import end_own_agent, own_agent
from dcpbench.executors.machine import rank_imports
from dcpbench.records.row import INTERRUPTED, WRONG_CONFIGURATION
from dcpbench.records.store import ResultsError
from dcpbench.sweep.signals import Signals, interrupted

_WRONG = (ConfigError, ResultsError, HydraException, OmegaConfBaseException, YAMLError)
"""Errors whose text explains a mistake in the configuration."""
_DECIDE_LATER = {"experiment", "executor", "nccl"}
"""Keys with which only the configuration tells where ranks run."""


def main(
    overrides: Sequence[Override], config_dir: Path | None = None, cfg: str | None = None, **options: Any
) -> int:
    """Run the cells that these words select, or print this part of their configuration. Return the exit
    status.

    Args:
        options: the `Options` of the command.
    """
    sys.stderr = _SafeStream(sys.stderr)
    signals, began = Signals(), time.monotonic()
    status = 0
    try:
        _refuse_surroundings()
        if sys.stderr.isatty() and not cfg:
            sys.stderr.write("reading the configuration ...\n")
        if not cfg and not options.get("resume"):
            _start_agent(overrides, bool(options.get("plan")))
        from dcpbench.cli.by_hydra import start  # while the agent imports torch
        from dcpbench.sweep.request import Options, Request

        signals.obey()
        start(Request.of(overrides, config_dir, Options(**options), signals, began), cfg)
    except SystemExit as ended:  # by the sweeper, or by Hydra, which has reported why it cannot print
        status = WRONG_CONFIGURATION if cfg and ended.code else int(ended.code or 0)
    except KeyboardInterrupt:
        status = INTERRUPTED
        sys.stderr.write(interrupted())
    except Exception as error:
        if signals.received is not None:  # a library's cleanup, as OmegaConf's, can replace the interrupt
            sys.stderr.write(interrupted())
        elif isinstance(error, _WRONG):
            status = WRONG_CONFIGURATION
            sys.stderr.write(
                f"dcpbench: {one_line(error, [str(override.input_line) for override in overrides])}\n"
            )
        else:
            raise
    finally:
        end_own_agent()  # of a refused sweep it would still import torch
    return signals.status(status)


def _refuse_surroundings() -> None:
    """Refuse to start where no sweep can run.

    Raises:
        ConfigError: torchrun has started this process, or its folder was removed.
    """
    if {"RANK", "WORLD_SIZE"} <= os.environ.keys():
        instead = "unset them and start dcpbench once; it starts its ranks, on many hosts too"
        raise ConfigError(f"RANK and WORLD_SIZE are set, as by torchrun: {instead}")
    try:
        Path.cwd()
    except FileNotFoundError:
        raise ConfigError("the current folder was removed; change to another one") from None


def _start_agent(overrides: Sequence[Override], is_plan: bool) -> None:
    """Start the agent of ranks on this host, as far as the words tell that it is needed. What it imports
    meanwhile is a guess, which costs time if it is wrong."""
    words = {
        override.key_or_group: str(override.input_line).partition("=")[2].lower() for override in overrides
    }
    if {key.partition(".")[0] for key in words}.isdisjoint(_DECIDE_LATER):
        compiles = words.get("compile", "false") != "false"
        own_agent([] if is_plan else rank_imports(compiles))


class _SafeStream:
    """A text stream to which writes never fail, even if it is full, closed or broken."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
