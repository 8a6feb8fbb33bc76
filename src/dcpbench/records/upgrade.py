"""Rows of schema version 1, as rows of today: the one place that knows what they lacked.

They have no `config`, and their overrides are joined by blanks, so that a value with blanks in it cannot be
told from two overrides. What is known of the identity of their cells is made of their axes and overrides;
their digests were made otherwise and compare with no others.
"""

import re
import shlex
from collections.abc import Mapping
from typing import Any

_NEXT_OVERRIDE = re.compile(r"\s+(?=[+~]*[\w./@:-]+=)")
_GROUPS = ("scenario", "parallel", "save", "model", "optimizer", "storage", "load_parallel", "fault")
_SINGLE = ("compile", "world_size", "device", "seed")
_HOW_RUN = (
    "repeat",
    "repeats",
    "experiment",
    "retry",
    "sharing",
    "isolation",
    "raw",
    "known_failures",
    "keep_checkpoints",
    "storage.root",
    "storage.keep_free_bytes",
    "storage.needs_bytes",
)


def upgraded(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of version 1, which is left as it is, with what version 2 adds."""
    text = row.get("overrides")
    words = _NEXT_OVERRIDE.split(text.strip()) if isinstance(text, str) and text.strip() else []
    config: dict[str, Any] = {f"{group}.name": row.get(group) for group in _GROUPS}
    config |= {key: row.get(key) for key in _SINGLE} | {"checkpointer.name": "dcp"}
    for word in words:
        key, equals, value = word.partition("=")
        key = key.lstrip("+~")
        how_run = key in _HOW_RUN or key.startswith(("timeouts.", "hydra."))
        if equals and not how_run and key not in (*_GROUPS, *_SINGLE):
            config[key] = value
    return {
        **row,
        "overrides": shlex.join(words),
        "checkpointer": "dcp",
        "config": {key: value for key, value in config.items() if value is not None},
        "config_digest": None,
    }
