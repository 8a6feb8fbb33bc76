"""Sequences of saves, loads and failures that hypothesis draws, on real ranks, compared with a model: a
dictionary of each checkpoint's contents. A load must restore the model's values. A sequence that fails is
made as short as it can be, and printed as a script in plain torch."""

import os
import tempfile
from collections.abc import Mapping
from typing import Any

import pytest
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

from support import plain_steps
from support.gloo_ranks import Ask
from support.plain_script import Step, plain_script

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
"""So many sequences are drawn, at random; without it a few, the same where the same modules are."""

KEYS = sorted(plain_steps.SHAPES)
SIZES = st.sampled_from(plain_steps.SIZES)
LAYOUTS = st.fixed_dictionaries(
    {
        key: st.sampled_from(["plain", "replicate", "shard0", "shard1"][: 2 + min(len(shape), 2)])
        for key, shape in plain_steps.SHAPES.items()
    }
)
STAGED = {"scalar": "plain"}
"""A DTensor without dimensions is not staged: docs/findings/scalar-dtensor-not-staged.md."""
OPTIONS = st.fixed_dictionaries(
    {"single_file_per_rank": st.booleans(), "thread_count": st.integers(1, 3), "sync_files": st.just(False)}
)


class Checkpoints(RuleBasedStateMachine):
    """Its steps are those of `support.plain_steps`."""

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
            return self._ask(plain_steps.call, name, arguments | places)
        except AssertionError:
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
        wanted = {key: plain_steps.values(step, key).flatten().tolist() for key in layout} | {"step": step}
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


@pytest.fixture(scope="module")
def prepared(ask: Ask) -> Ask:
    ask(plain_steps.prepare)
    return ask


def settings_of(few: int, steps: int) -> settings:
    return settings(
        max_examples=EXAMPLES or few,
        stateful_step_count=3 * steps if EXAMPLES else steps,
        derandomize=not EXAMPLES,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=[*HealthCheck],
    )


def test_load_restores_what_the_model_predicts(prepared: Ask) -> None:
    run_state_machine_as_test(lambda: Checkpoints(prepared), settings=settings_of(10, 12))
