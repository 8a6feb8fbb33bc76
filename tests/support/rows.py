"""A row as a test wants it."""

from dcpbench.records.store import Row


def row(**values: object) -> Row:
    given = {
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
        "world_size": 4,
        "device": "cpu",
        "seed": 0,
        "overrides": "parallel=ddp",
    }
    return Row(**{**given, **values})  # type: ignore[arg-type]
