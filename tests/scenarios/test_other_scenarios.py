"""Scenarios other than `save_load` with injected defects, on one rank in this process; and their parts."""

import threading
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dcpbench.cell import handover
from dcpbench.cell.steps import ReferenceRun
from dcpbench.checkpointers.dcp import DcpCheckpointer
from dcpbench.compare.controls import names_of_control
from dcpbench.compare.leaves import compare
from dcpbench.core.mismatch import Place
from dcpbench.core.rank_report import CheckReport, Skip
from dcpbench.runs.build_run import build
from dcpbench.runs.own_run import OwnRun
from dcpbench.scenarios import fine_tune
from dcpbench.scenarios.dcp_api import in_place, stateful_objects, sub_groups
from dcpbench.state.snapshot import snapshot_nested
from dcpbench.torch_private import LOAD_KEYS
from support.alone import ONCE, Ran, alone, bare_cell, config, group_of_one, run_alone, world
from support.looked_at import SHORT
from support.names import by_text
from support.planted import DEFECTS

pytestmark = pytest.mark.cell


@pytest.mark.parametrize(
    ("size", "halves"), [(1, [(0, 0, 1)]), (3, [(0, 0, 1), (1, 0, 2), (1, 1, 2)])], ids=["1", "3"]
)
def test_every_rank_is_in_one_half(
    size: int, halves: list[tuple[int, int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sub_groups, "new_group", tuple)
    for rank, half in enumerate(halves):
        number, of_half = sub_groups._half(bare_cell(tmp_path, seen_by=world(rank, size)))
        assert (number, of_half.rank, of_half.size) == half


def load_adds_a_key() -> AbstractContextManager[Any]:
    honest = DcpCheckpointer.load

    def load(self: DcpCheckpointer, state: dict[str, Any], checkpoint_id: str) -> None:
        honest(self, state, checkpoint_id)
        if not state:
            state["sentinel"] = 1

    return mock.patch.object(DcpCheckpointer, "load", load)


def keys_come_with_a_sentinel() -> AbstractContextManager[Any]:
    honest = LOAD_KEYS.value

    def load(*arguments: Any, **options: Any) -> dict[str, Any]:
        return {"sentinel": 1, **honest(*arguments, **options)}

    return mock.patch.object(LOAD_KEYS.owner, LOAD_KEYS.name, load)


def key_read_wrong() -> AbstractContextManager[Any]:
    """Flip the lowest bit of the last moment that is read by its key."""
    honest = LOAD_KEYS.value

    def load(*arguments: Any, **options: Any) -> dict[str, Any]:
        nested: dict[str, Any] = honest(*arguments, **options)
        if "optimizer" in nested:
            nested["optimizer"]["state"]["net2.bias"]["exp_avg"].view(torch.int32)[0] ^= 1
        return nested

    return mock.patch.object(LOAD_KEYS.owner, LOAD_KEYS.name, load)


PLANTED: dict[str, tuple[AbstractContextManager[Any], str, str, str]] = {
    "an empty state gets a key": (load_adds_a_key(), "no_dist", "contract_held", "empty state dict"),
    "a sentinel among keys": (keys_come_with_a_sentinel(), "partial_load", "contract_held", "model"),
    "a moment read wrong": (key_read_wrong(), "partial_load", "optim_equal", "net2.bias.exp_avg"),
    "more than was asked for": (
        DEFECTS["touching_the_optimizer"](),
        "partial_load",
        "contract_held",
        "param_groups.0.lr",
    ),
    "not in place": (DEFECTS["into_copies"](), "in_place", "contract_held", "state.model.net1.weight"),
    "another object": (DEFECTS["replacing_the_stateful"](), "stateful_or_not", "contract_held", "stateful"),
    "another type": (DEFECTS["list_to_tuple"](), "stateful_or_not", "extra_equal", "plain.list"),
    "exchanged": (DEFECTS["swapped"](), "key_order", "extra_equal", "gathering.data"),
}


def names_in(report: CheckReport) -> list[str]:
    """Return the names of all mismatches, in the order in which they were found."""
    return list(dict.fromkeys(finding.name for finding in report.distinct.values()))


@pytest.mark.parametrize("name", PLANTED)
def test_injected_defect_is_reported(name: str) -> None:
    defect, scenario, check, seen = PLANTED[name]
    with defect, group_of_one() if scenario == "key_order" else nullcontext() as group:
        (report,) = run_alone(**ONCE, scenario=scenario, seen_by=world(group=group)).reports
    assert seen in names_in(report.checks[check])


def test_no_dist_must_not_have_a_process_group() -> None:
    with group_of_one():
        verdict, _ = alone(**ONCE, scenario="no_dist")
    assert {one.check: one.names for one in verdict.failed} == {"contract_held": ["empty state dict"]}


def refused(defect: AbstractContextManager[Any]) -> Ran:
    """Run the scenario of a save without a CPU backend on a machine without a GPU: the accelerator's backend
    is gloo, for tensors of a GPU only."""
    backend = mock.patch.object(dist, "get_default_backend_for_device", return_value="cuda:gloo")
    with backend, defect, group_of_one() as group:
        ran = run_alone(**ONCE, scenario="no_cpu_backend", save="async", seen_by=world(group=group))
        assert len(dist.distributed_c10d._world.pg_names) == 1, "the group without a backend is gone"
    return ran


def test_save_without_cpu_backend_is_refused() -> None:
    ran = refused(nullcontext())
    assert ran.verdict.status == "pass", ran.verdict.reason
    (report,) = ran.reports
    places = {
        (check, str(where)): set(names)
        for check, seen in report.checks.items()
        for where, names in seen.compared.items()
    }
    assert places == {
        ("contract_held", "of the save"): {"refusal"},
        ("contract_held", "after the refusal"): {"files", "threads"},
        **SHORT.twin(),
        ("batch_loss_close", "in the uninterrupted run"): {"loss of step 1", "loss of step 2"},
    }
    assert ran.announced.count("train") == 4, "twice before and after the refusal, and twice without"
    assert ran.left == ["accepted"]


def test_accepted_save_without_cpu_backend_is_reported() -> None:
    assert {one.check for one in refused(DEFECTS["accepting"]()).verdict.failed} == {"contract_held"}


def test_leftovers_of_a_refused_save_are_reported() -> None:
    honest = DcpCheckpointer.save

    def save(self: DcpCheckpointer, state: Any, checkpoint_id: str, slot: int = 0) -> Any:
        Path(checkpoint_id).mkdir(parents=True)
        (Path(checkpoint_id) / "half").touch()
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        return honest(self, state, checkpoint_id, slot)

    (report,) = refused(mock.patch.object(DcpCheckpointer, "save", save)).reports
    assert names_in(report.checks["contract_held"]) == ["files", "threads"]


def test_fine_tuned_checkpoint_has_trained_keys_only(tmp_path: Path) -> None:
    tuning = fine_tune._tuning(bare_cell(tmp_path, config(**ONCE, scenario="fine_tune")), 2)
    run = build(tuning.config, tuning.world, 0)
    names = dict(run.model.named_parameters())
    trained = {f"model.{name}" for name, value in names.items() if value.requires_grad}
    assert len(trained) == 4
    assert len(names) == 8

    def found(keys: set[str]) -> list[str]:
        cell = bare_cell(tmp_path, tuning.config)
        fine_tune._verify_keys(cell, run, keys, Place("here"))
        report = cell.report.checks["contract_held"]
        assert report.control == {Place("here"): dict.fromkeys(names, True)}
        return names_in(report)

    assert found(trained) == []
    for key in trained:
        assert found(trained - {key}) == [key.removeprefix("model.")]
    for name, value in names.items():
        if not value.requires_grad:
            assert found(trained | {f"optimizer.state.{name}.exp_avg"}) == [name]


def test_inner_model_keeps_its_sharding(tmp_path: Path) -> None:
    given = config(**ONCE, scenario="fine_tune")
    given.parallel = replace(given.parallel, tp_plan={"net1": "colwise", "net2": "rowwise"})
    parallel = fine_tune._tuning(bare_cell(tmp_path, given), 2).config.parallel
    assert parallel.tp_plan == {"pretrain.net1": "colwise", "pretrain.net2": "rowwise"}


def test_part_is_loaded_by_the_requested_function(tmp_path: Path) -> None:
    cell = bare_cell(tmp_path, config(**ONCE))
    run = build(cell.config, cell.world, 0)
    run.model = nn.ModuleDict({"pretrain": run.model})
    assert isinstance(fine_tune._part(cell, run, submodules=True)["model"], fine_tune._SubmoduleState)
    assert isinstance(fine_tune._part(cell, run, submodules=False)["model"], fine_tune._PartState)


def test_own_model_is_not_fine_tuned(tmp_path: Path) -> None:
    given = config(**ONCE, scenario="fine_tune", workload={"target": "support.own_workload.build"})
    with pytest.raises(Skip, match=r"workload\.target has its own"):
        fine_tune.fine_tune(bare_cell(tmp_path, given), 2, submodules=False)


@pytest.mark.parametrize("order", [("scheduler", "train_state"), ("train_state", "scheduler")])
def test_each_object_is_set_from_the_filled_state(
    order: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the first and the last, whose filled values are not in their own memory."""
    honest = OwnRun.state

    def state(run: OwnRun) -> dict[str, Any]:
        held = honest(run)
        first, last = (held.pop(name) for name in order)
        return {order[0]: first, **held, order[1]: last}

    monkeypatch.setattr(OwnRun, "state", state)
    verdict, _ = alone(**ONCE, scenario="in_place")
    assert verdict.status == "pass", verdict.reason


def test_every_dictionary_and_tensor_has_a_place() -> None:
    first, last = torch.zeros(1), torch.zeros(2)
    nested = {"model": {"first": first, "inner": {"last": last}}, "value": 1, "last": last[1:]}
    places = in_place._places(nested)
    assert places == {
        "state": (nested, 0),
        "state.model": (nested["model"], 0),
        "state.model.first": (first, first.data_ptr()),
        "state.model.inner": (nested["model"]["inner"], 0),  # type: ignore[index]
        "state.model.inner.last": (last, last.data_ptr()),
        "state.last": (nested["last"], last.data_ptr() + 4),
    }
    assert in_place._moved(places, places) == []
    for path, (given, address) in places.items():
        for other in ({}, {path: (object(), address)}, {path: (given, address + 4)}):
            after = {**{name: place for name, place in places.items() if name != path}, **other}
            assert [one.name for one in in_place._moved(places, after)] == [path]


def test_plain_values_cover_every_kind() -> None:
    one, other = (stateful_objects.plain_values(torch.device("cpu"), which) for which in (1, 2))
    leaves, others = snapshot_nested(one), snapshot_nested(other)
    kinds = {type(leaf).__name__ for leaf in leaves.values()}
    assert kinds == {"int", "float", "bool", "str", "bytes", "NoneType", "list", "TensorLeaf"}
    found = compare(leaves, others)
    assert {one.name for one in found} == set(names_of_control(leaves)) == by_text(leaves).keys() - {"empty"}


def wrong(given: dict[str, Any], was_set: list[str], stateful: Any) -> list[str]:
    recording = stateful_objects.Recording(given)
    recording.was_set = was_set
    return [one.name for one in stateful_objects._wrong(recording, stateful)]


def test_wrong_changes_of_a_state_dict_are_found() -> None:
    def counting(loads: int) -> Any:
        made = stateful_objects.Counting(0, torch.device("cpu"))
        made.loads = loads
        return made

    mine, other = counting(1), counting(1)
    assert wrong({"stateful": mine}, ["plain"], mine) == []
    assert wrong({"stateful": other}, ["plain"], mine) == ["stateful"]
    assert wrong({"stateful": mine}, ["plain", "stateful"], mine) == ["stateful"]
    assert wrong({"stateful": mine}, [], mine) == ["plain"]
    for loads in (0, 2):
        again = counting(loads)
        assert wrong({"stateful": again}, ["plain"], again) == ["stateful"]


@pytest.mark.parametrize("rank", range(5))
def test_each_rank_starts_at_another_key(rank: int, tmp_path: Path) -> None:
    cell = bare_cell(tmp_path, seen_by=world(rank, 5))
    state = {"c": 3, "a": 1, "b": 2}
    turned = stateful_objects._turned(cell, state)
    assert turned == state
    assert list(turned) == [*"abcabc"[rank % 3 :][:3]]


@pytest.mark.parametrize("rank", [0, 1])
def test_only_rank_0_hands_over(rank: int, tmp_path: Path) -> None:
    cell = bare_cell(tmp_path, config(**ONCE), seen_by=world(rank, 2))
    handover.write_reference(cell, ReferenceRun(), any_layout=True)
    assert (tmp_path / "handover.pt").exists() is (rank == 0)
