"""Mismatches and exceptions get the name of a defect only if they are exactly what it predicts."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from dcpbench.cell import known_defects
from dcpbench.cell.cell import Cell
from dcpbench.cell.checkpoint import Checkpoint
from dcpbench.cell.known_defects import LoadReference, RaisedInLoad
from dcpbench.compare.leaves import Comparison, compare
from dcpbench.core.defects import Defect
from dcpbench.core.rank_report import Compared
from dcpbench.core.state import StatePart
from dcpbench.workloads.world import World
from support.alone import bare_cell

MODEL, OPTIMIZER = StatePart.model, StatePart.optimizer
SAVED = Checkpoint(2, "id", {MODEL: {}, OPTIMIZER: {}})
State = Mapping[StatePart, Mapping[Any, Any]]


@pytest.fixture
def cell(tmp_path: Path) -> Cell:
    return bare_cell(tmp_path)


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> dict[str, Defect]:
    """The declared defects: none until a test adds some."""
    defects: dict[str, Defect] = {}
    monkeypatch.setattr(known_defects, "_defects", lambda: defects)
    return defects


@pytest.fixture
def collectives(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What this rank has told the others."""
    told: list[bool] = []
    monkeypatch.setattr(World, "any_rank", lambda world, value: told.append(bool(value)) or bool(value))
    return told


def predicting(*states: Any, moment: str = "restored", applies: bool = True) -> Defect:
    return Defect((moment,), lambda config: applies, lambda *_: states)  # type: ignore[arg-type]


def no_state(*_: Any) -> Any:
    raise AssertionError("nothing differs, or the defect does not apply")


def restored(**numbers: float) -> dict[Any, Any]:
    return {(name,): number for name, number in numbers.items()}


def comparisons(saved: State, actual: State) -> dict[StatePart, Comparison]:
    return {
        part: Comparison(saved[part], actual[part], Compared(compare(saved[part], actual[part]), {}, {}))
        for part in saved
    }


def causes(compared: Mapping[Any, Compared]) -> dict[str, str | None]:
    return {mismatch.name: mismatch.by for each in compared.values() for mismatch in each.found}


def of_ranks(*keys: str) -> CheckpointException:
    """Return what DCP raises on every rank if a rank has raised a KeyError for each of these."""
    return CheckpointException("", {rank: (KeyError(key), None) for rank, key in enumerate(keys)})  # type: ignore[misc]


BOTH = comparisons(
    {MODEL: restored(a=0, b=0, c=0, d=0), OPTIMIZER: restored(e=0, f=0)},
    {MODEL: restored(a=1, b=2, c=3, d=0), OPTIMIZER: restored(e=1, f=2)},
)


def test_a_mismatch_has_the_value_that_its_defect_predicts(cell: Cell, declared: dict[str, Defect]) -> None:
    declared["first"] = predicting(
        {MODEL: restored(a=1, b=1)}, {MODEL: restored(b=7), OPTIMIZER: restored(e=1)}
    )
    declared["middle"] = predicting({MODEL: restored(c=3)}, moment="stored")
    declared["no"] = Defect(("restored",), lambda config: False, no_state)
    declared["last"] = predicting({OPTIMIZER: restored(f=2)}, {MODEL: restored(d=0, x=1)})
    found = causes(known_defects.attribute_in_checkpoint(cell, "restored", SAVED, BOTH, True))
    assert found == {"a": "first", "b": None, "c": None, "e": "first", "f": "last"}
    found = causes(known_defects.attribute_in_checkpoint(cell, "stored", SAVED, BOTH, True))
    assert found == {"a": None, "b": None, "c": "middle", "e": None, "f": None}


def test_a_defect_gets_what_was_compared(cell: Cell, declared: dict[str, Defect]) -> None:
    given: list[LoadReference] = []
    declared["mine"] = Defect(("restored",), lambda config: True, lambda *about: given.append(about[2]) or ())
    cell.unrestored["id"] = before = {MODEL: restored(a=5)}
    known_defects.attribute_in_checkpoint(cell, "restored", SAVED, BOTH, True)
    (about,) = given
    assert (about.checkpoint, about.before) == (SAVED, before)
    assert about.names == {MODEL: {("a",), ("b",), ("c",)}, OPTIMIZER: {("e",), ("f",)}}
    assert about.actual == {MODEL: restored(a=1, b=2, c=3, d=0), OPTIMIZER: restored(e=1, f=2)}


def test_ranks_agree_only_where_a_defect_can_occur(
    cell: Cell, declared: dict[str, Defect], collectives: list[bool]
) -> None:
    nothing = Comparison({}, {}, Compared((), {}, {}))
    declared["other"] = Defect(("stored",), lambda config: True, no_state)
    known_defects.record_restored(cell, SAVED, BOTH, SAVED.place)
    assert collectives == []
    declared["mine"] = Defect(("restored",), lambda config: True, no_state)
    known_defects.record_restored(cell, SAVED, dict.fromkeys(BOTH, nothing), SAVED.place)
    assert collectives == [False]
    declared["mine"] = predicting({OPTIMIZER: restored(e=1)})
    later = replace(SAVED, step=3)
    known_defects.record_restored(cell, later, {**BOTH, MODEL: nothing}, later.place)
    assert collectives == [False, True]
    assert known_defects.names_by_defect(cell, OPTIMIZER, later) == {"e": "mine"}


def test_a_copy_is_made_if_any_defect_of_the_cell_needs_it(cell: Cell, declared: dict[str, Defect]) -> None:
    def needs(copy: bool, applies: bool) -> Defect:
        return Defect(("restored",), lambda config: applies, no_state, copy)

    declared |= {"a": needs(False, True), "b": needs(True, False)}
    assert not known_defects.needs_copy(cell)
    declared["c"] = needs(True, True)
    assert known_defects.needs_copy(cell)
    declared["d"] = declared.pop("b")
    assert known_defects.needs_copy(cell)
    del declared["a"]
    assert known_defects.needs_copy(cell), "the first of two"


def test_a_load_that_is_right_needs_no_repair(
    cell: Cell, declared: dict[str, Defect], collectives: list[bool]
) -> None:
    declared["mine"] = predicting({MODEL: restored(a=1)})
    wrong = comparisons({MODEL: restored(a=0)}, {MODEL: restored(a=1)})
    right = comparisons({MODEL: restored(a=0)}, {MODEL: restored(a=0)})
    known_defects.record_restored(cell, SAVED, right, SAVED.place)
    assert (cell.unexplained, collectives) == ({SAVED.place}, [False])
    assert known_defects.repair(cell, None, SAVED) is None  # type: ignore[arg-type]
    assert collectives == [False], "a repair costs no collective"
    known_defects.record_restored(cell, SAVED, wrong, SAVED.place)
    assert (cell.unexplained, collectives) == (set(), [False, True])
    assert known_defects.names_by_defect(cell, MODEL) == {"a": "mine"}
    assert known_defects.names_by_defect(cell, MODEL, Checkpoint(3, "id", {})) == {}
    assert known_defects.names_by_defect(cell, OPTIMIZER) == {}


@pytest.mark.parametrize(("first", "then"), [(1, 2), (2, 1)])
def test_a_name_that_also_differs_otherwise_has_no_cause(
    cell: Cell, declared: dict[str, Defect], first: int, then: int
) -> None:
    """In two comparisons of one place, of which the defect predicts only one."""
    declared["mine"] = predicting({MODEL: restored(a=1)})
    for number in (first, then):
        made = comparisons({MODEL: restored(a=0, b=number)}, {MODEL: restored(a=number, b=number)})
        known_defects.record_restored(cell, SAVED, made, SAVED.place)
    assert known_defects.names_by_defect(cell, MODEL) == {}


@pytest.mark.parametrize(
    ("error", "by"),
    [
        (KeyError("a"), "one"),
        (KeyError("b"), None),
        (of_ranks("a"), "one"),
        (of_ranks("a", "c"), "both"),
        (of_ranks("c", "b"), None),
    ],
)
def test_a_defect_explains_the_exceptions_of_all_ranks(
    cell: Cell, declared: dict[str, Defect], error: BaseException, by: str | None
) -> None:
    announced: list[Any] = []
    vars(cell)["announce"] = announced.append
    given: list[RaisedInLoad] = []
    declared["none"] = Defect(("raised",), lambda config: True, lambda *about: given.append(about[2]) or ())
    declared["one"] = predicting("'a'", moment="raised")
    declared["after a load"] = Defect(("restored",), lambda config: True, no_state)
    declared["both"] = predicting("'c'", "'a'", moment="raised")
    known_defects.attribute_raised(cell, SAVED, cell, error)  # type: ignore[arg-type]
    assert cell.report.raised_by == by
    assert (given[0].checkpoint, given[0].target) == (SAVED, cell)
    assert announced[-1] == "load", "the phase of the exception"
