"""A sequence of steps with checkpoints, as a script in plain torch."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from support import plain_steps

Step = tuple[str, Mapping[str, Any]]

_TAIL = """

RANKS = 4
CALLS = [
{calls}
]


def run(rank, folder):
    store = dist.FileStore(f"{{folder}}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    prepare()
    for name, arguments in CALLS:
        places = {{key: f"{{folder}}/{{arguments[key]}}" for key in ("folder", "to") if key in arguments}}
        result = call(name, arguments | places)
        if rank == 0:
            print(name, arguments.get("folder", ""), "" if result is None else result, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    import tempfile

    torch.multiprocessing.spawn(run, (tempfile.mkdtemp(),), RANKS)
"""


def plain_script(steps: Sequence[Step]) -> str:
    """The script: what the steps do, and the steps, each with its arguments; folders are names."""
    calls = "\n".join(f"    ({name!r}, {dict(arguments)!r})," for name, arguments in steps)
    return inspect.getsource(plain_steps) + _TAIL.format(calls=calls)
