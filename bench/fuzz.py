"""Compare sequences of saves, loads and failures, which hypothesis draws, with a model: `make fuzz`.

Four real ranks run the steps of `fuzz_steps` in plain torch. The model is a dictionary of each checkpoint's
contents, whose values a load must restore. Some saves of one process are killed, at any point. A sequence
that fails is made as short as it can be, and printed as a script. Exits with 1 if one fails.
"""

# ruff: noqa: T201
import inspect
import multiprocessing
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import fuzz_steps
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    precondition,
    rule,
    run_state_machine_as_test,
)

from dcpbench.plugins.crash.disk_states import Crash, disk_states
from dcpbench.plugins.crash.recording import read_record, recording

RANKS, STEPS = 4, 36
Ask = Callable[[str, Mapping[str, Any]], list[Any]]
"""Run a step on every rank, and return the result of each."""
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
    return inspect.getsource(fuzz_steps) + _TAIL.format(calls=calls)


KEYS = sorted(fuzz_steps.SHAPES)
SIZES = st.sampled_from(fuzz_steps.SIZES)
LAYOUTS = st.fixed_dictionaries(
    {
        key: st.sampled_from(["plain", "replicate", "shard0", "shard1"][: 2 + min(len(shape), 2)])
        for key, shape in fuzz_steps.SHAPES.items()
    }
)
STAGED = {"scalar": "plain"}
"""A DTensor without dimensions is not staged: docs/findings/scalar-dtensor-not-staged.md."""
OPTIONS = st.fixed_dictionaries(
    {"single_file_per_rank": st.booleans(), "thread_count": st.integers(1, 3), "sync_files": st.just(False)}
)


class Checkpoints(RuleBasedStateMachine):
    """Its steps are those of `fuzz_steps`."""

    whole = Bundle("whole")
    """Names of checkpoints that exist."""
    broken = Bundle("broken")
    """Names of checkpoints that an unfinished save left."""

    def __init__(self, ask: Ask) -> None:
        super().__init__()
        self._ask = ask
        self._folder = tempfile.TemporaryDirectory(dir="/dev/shm")
        self._step, self._names = 0, 0
        self.held: dict[str, int] = {}
        """The model: the step of each checkpoint."""
        self._pending: dict[str, int] = {}
        self._done: list[Step] = []

    def teardown(self) -> None:
        for name in [*self._pending]:
            self._call("finish", folder=name)
        self._folder.cleanup()

    def _call(self, name: str, **arguments: Any) -> list[Any]:
        """Run a step on all ranks; return the result of each."""
        self._done.append((name, arguments))
        places = {
            key: f"{self._folder.name}/{arguments[key]}" for key in ("folder", "to") if key in arguments
        }
        try:
            return self._ask(name, arguments | places)
        except RuntimeError:
            note(plain_script(self._done))
            raise

    def _expect(self, holds: bool) -> None:
        if not holds:
            note(plain_script(self._done))
        assert holds

    def _new(self) -> str:
        self._names += 1
        return f"checkpoint-{self._names}"

    def _loads(self, name: str, ranks: int, layout: Mapping[str, str], step: int) -> None:
        wanted = {key: fuzz_steps.values(step, key).flatten().tolist() for key in layout} | {"step": step}
        loaded = self._call("load", folder=name, ranks=ranks, layout=layout)
        self._expect(loaded[:ranks] == [wanted] * ranks)

    @rule()
    def train(self) -> None:
        self._step += 1

    @rule(target=whole, ranks=SIZES, layout=LAYOUTS, seed=st.integers(0, 3), options=OPTIONS)
    def save(self, ranks: int, layout: dict[str, str], seed: int, options: dict[str, Any]) -> str:
        given = {"ranks": ranks, "layout": layout, "seed": seed, "options": options}
        self._call("save", folder=(name := self._new()), step=self._step, way="sync", **given)
        self.held[name] = self._step
        return name

    @rule(name=whole, layout=LAYOUTS, options=OPTIONS, ranks=SIZES)
    def overwrite(self, name: str, layout: dict[str, str], options: dict[str, Any], ranks: int) -> None:
        given = {"ranks": ranks, "layout": layout, "seed": 0, "options": options}
        self._call("save", folder=name, step=self._step, way="sync", **given)
        self.held[name] = self._step

    @precondition(lambda self: not self._pending)
    @rule(ranks=SIZES, layout=LAYOUTS.map(lambda one: one | STAGED), options=OPTIONS)
    def begin(self, ranks: int, layout: dict[str, str], options: dict[str, Any]) -> None:
        """An asynchronous save, during which everything else continues."""
        given = {"ranks": ranks, "layout": layout, "seed": 0, "options": options}
        self._call("save", folder=(name := self._new()), step=self._step, way="async", **given)
        self._pending[name] = self._step

    @precondition(lambda self: self._pending)
    @rule(target=whole)
    def finish(self) -> str:
        name, step = self._pending.popitem()
        self._call("finish", folder=name)
        self.held[name] = step
        return name

    @rule(target=broken, ranks=SIZES, full=st.integers(0, 3), layout=LAYOUTS)
    def fail(self, ranks: int, full: int, layout: dict[str, str]) -> str:
        """The storage of one rank is full: every rank raises."""
        given = {"ranks": ranks, "layout": layout, "full": full % ranks}
        told = self._call("fail", folder=(name := self._new()), step=self._step, **given)
        self._expect(told[:ranks] == ["CheckpointException"] * ranks)
        return name

    @rule(name=broken, ranks=SIZES, layout=LAYOUTS)
    def load_what_is_broken(self, name: str, ranks: int, layout: dict[str, str]) -> None:
        loaded = self._call("load", folder=name, ranks=ranks, layout=layout)
        self._expect(loaded[:ranks] == ["CheckpointException"] * ranks)

    @rule(name=whole, ranks=SIZES, layout=LAYOUTS)
    def load(self, name: str, ranks: int, layout: dict[str, str]) -> None:
        self._loads(name, ranks, layout, self.held[name])

    @rule(name=whole, ranks=SIZES, layout=LAYOUTS, keys=st.sets(st.sampled_from(KEYS), min_size=1))
    def load_a_part(self, name: str, ranks: int, layout: dict[str, str], keys: set[str]) -> None:
        self._loads(name, ranks, {key: layout[key] for key in sorted(keys)}, self.held[name])

    @rule(target=whole, name=whole, ranks=SIZES, layout=LAYOUTS, options=OPTIONS)
    def save_again(self, name: str, ranks: int, layout: dict[str, str], options: dict[str, Any]) -> str:
        """Convert to another layout and back, or continue there; the result is the same as without."""
        to = self._new()
        self._call("again", folder=name, to=to, ranks=ranks, layout=layout, options=options)
        self.held[to] = self.held[name]
        return to

    @rule(name=consumes(whole))
    def delete(self, name: str) -> None:
        self._call("delete", folder=name)
        del self.held[name]


class KilledCheckpoints(Checkpoints):
    @rule(target=Checkpoints.broken, which=st.integers(0, 50))
    def kill(self, which: int) -> Any:
        """Kill a save at some point before its metadata exists."""
        states = [one for one in _killed_saves(self._step) if ".metadata" not in one]
        files = states[which % len(states)]
        self._call("lay_out", folder=(name := self._new()), files=files)
        return name


@cache
def _killed_saves(step: int) -> list[dict[str, bytes]]:
    """Return the files after each point at which a save of one process can be killed."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(action="ignore"):
        saved, logs, before = (Path(folder) / name for name in ("saved", "logs", "before"))
        for path in (saved, logs, before):
            path.mkdir()
        state = {"model": {key: fuzz_steps.values(step, key) for key in KEYS}, "step": step}
        with recording(saved, logs, 0):
            dcp.save(state, checkpoint_id=saved / "new", no_dist=True)
        states = disk_states(read_record(before, logs, 1), 0, 0)
        trees = [one.tree for one in states if one.crash is Crash.killed and "new" in one.tree]
    return [
        {path.removeprefix("new/"): content for path, content in tree.items() if content is not None}
        for tree in trees
    ]


@contextmanager
def ranks() -> Iterator[Ask]:
    """Context manager: four ranks with gloo."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        here, there = zip(*(spawn.Pipe() for _ in range(RANKS)), strict=True)
        processes = [spawn.Process(target=serve, args=(there[rank], rank, folder)) for rank in range(RANKS)]
        for process in processes:
            process.start()

        def ask(name: str, arguments: Mapping[str, Any]) -> list[Any]:
            for connection in here:
                connection.send((name, arguments))
            answers = [connection.recv() if connection.poll(120) else "no answer" for connection in here]
            if wrong := [text for text, _ in answers if text]:
                raise RuntimeError(wrong[0])
            return [answer for _, answer in answers]

        try:
            yield ask
        finally:
            for process in processes:
                process.kill()
                process.join()


def serve(connection: Connection, rank: int, folder: str) -> None:
    """Run the steps that the connection brings; send the error and the result of each."""
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    fuzz_steps.prepare()
    while True:
        name, arguments = connection.recv()
        try:
            connection.send(("", fuzz_steps.call(name, arguments)))
        except Exception:  # noqa: BLE001 - whatever it is, the sequence is printed
            connection.send((traceback.format_exc(), None))


def main(examples: int) -> int:
    """Return 1 if a sequence failed."""
    given = settings(
        max_examples=examples,
        stateful_step_count=STEPS,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=[*HealthCheck],
    )
    with ranks() as ask:
        for machine in (Checkpoints, KilledCheckpoints):
            try:
                run_state_machine_as_test(lambda machine=machine: machine(ask), settings=given)
            except Exception:  # noqa: BLE001 - also what torch raises
                traceback.print_exc()
                return 1
            print(f"{machine.__name__}: {examples} sequences as the model predicts")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 400))
