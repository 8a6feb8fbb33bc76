"""Rows as a test wants them, and what of rows does not depend on the day."""

import shlex
from typing import Any

from dcpbench.core.axes import AXES
from dcpbench.core.cell_key import digest_of
from dcpbench.records.row import Row

_HOW_RUN = ("repeat", "repeats", "sharing", "timeouts.", "experiment")


def row(**values: object) -> Row:
    """A row of these columns; unless they say otherwise its configuration is what its axes and overrides
    say."""
    given: dict[str, Any] = {
        "cell": "a",
        "status": "pass",
        "reason": None,
        "scenario": "save_load",
        "parallel": "ddp",
        "compile": False,
        "save": "sync",
        "model": "dummy",
        "optimizer": "adam",
        "storage": "file",
        "checkpointer": "dcp",
        "world_size": 4,
        "device": "cpu",
        "seed": 0,
        "overrides": "parallel=ddp",
        **values,
    }
    given.setdefault("config", config_of(given))
    given.setdefault("config_digest", digest_of(given["config"]))
    return Row.of(given)


def config_of(values: dict[str, Any]) -> dict[str, Any]:
    """The identity of a cell, as far as its axes and overrides say it."""
    config = {axis: values[axis] for axis in AXES if values.get(axis) is not None}
    for word in shlex.split(str(values.get("overrides") or "")):
        key, _, value = word.partition("=")
        if key not in AXES and not key.startswith(_HOW_RUN):
            config[key.lstrip("+~")] = value
    return config


def measured(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return rows by cell, without times and peaks of memory; each cell once."""
    assert len({item["cell"] for item in rows}) == len(rows)
    return {
        item["cell"]: {
            **{
                name: value
                for name, value in item.items()
                if name not in ("started_at", "cwd", "details")
                and not name.endswith("_s")
                and "peak" not in name
            },
            "checks": item["details"].get("checks"),
            "losses": [rank["losses"] for rank in item["details"].get("ranks", [])],
        }
        for item in rows
    }


def seen(row: dict[str, Any]) -> tuple[dict[str, Any], Any, list[list[Any]]]:
    """Return the results of a cell, without times and how it was requested: columns, checks, and
    the losses of each rank."""
    asked = ("started_at", "config_digest", "cell", "overrides", "config", "details")
    columns = {
        name: it for name, it in row.items() if name not in asked and not name.endswith(("_s", "_bytes"))
    }
    ranks = row["details"].get("ranks", [])
    return columns, row["details"].get("checks"), [[rank["losses"], rank["resumed"]] for rank in ranks]
