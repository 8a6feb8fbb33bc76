"""Each value of `save` passes the configured arguments to DCP, in consecutive saves."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from omegaconf import OmegaConf
from test_contract import Alone
from torch.distributed.checkpoint import _async_process_executor
from torch.distributed.checkpoint.staging import DefaultStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from conftest import SMALL, run
from dcpbench.checkpointers import dcp as dcp_module
from dcpbench.checkpointers.dcp import DcpCheckpointer, forget_kept_by_dcp
from dcpbench.config.groups import Kept, PlannerConfig, SaveConfig, StorageConfig
from dcpbench.config.schema import Config, conf_folder
from dcpbench.state.process_state import kept_by_dcp
from support.alone import STAGES_ONCE
from support.notes import texts

WAYS = (
    "no_collectives",
    "own_writer",
    "new_writer",
    "stager",
    "stager_kept",
    "stager_shared",
    "stager_async",
    "process",
)
ASYNC = [f"async_{way}" for way in WAYS]
SYNC = ["sync_no_collectives", "sync_planner_kept", "sync_plan_caching", "sync_dedup_lowest"]
Given = list[dict[str, Any]]


def config_of(save: str) -> Config:
    typed = OmegaConf.merge(
        OmegaConf.structured(SaveConfig), OmegaConf.load(conf_folder() / f"save/{save}.yaml")
    )
    made = OmegaConf.to_object(typed)
    assert isinstance(made, SaveConfig)
    return Config(save=made, storage=StorageConfig("file", "dcpbench.checkpointers.storage.file"))


def skip_if_saved_once(save: str) -> None:
    stager = config_of(save).save.stager
    if STAGES_ONCE and stager and stager.instance != "new":
        pytest.skip(STAGES_ONCE)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Iterator[Given]:
    """Return the arguments of each save; all run in this process, because others need process groups."""
    calls: Given = []
    for name in ("save", "async_save"):
        honest = getattr(dcp, name)

        def called(state: dict[str, Any], honest: Any = honest, **arguments: Any) -> Any:
            calls.append(dict(arguments))
            arguments.pop("async_checkpointer_type", None)
            return honest(state, **arguments)

        monkeypatch.setattr(dcp, name, called)
    yield calls
    forget_kept_by_dcp()


def two_saves(save: str, folder: Path, given: Given) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of two consecutive saves; each checkpoint has the state of its moment."""
    skip_if_saved_once(save)
    checkpointer = DcpCheckpointer(folder, config_of(save), Alone())
    weight = torch.arange(6.0)
    for step in (1, 2):
        weight.mul_(2)
        pending = checkpointer.save({"model": {"w": weight}}, str(folder / f"{step}"))
        pending.wait()
    weight.zero_()
    for step in (1, 2):
        held = checkpointer.read_tensor(str(folder / f"{step}"), "model.w")
        assert held is not None
        assert torch.equal(held, torch.arange(6.0) * 2**step)
    checkpointer.close()
    first, second = given
    return first, second


@pytest.mark.parametrize("save", ASYNC + SYNC)
def test_kept_objects_are_reused(save: str, tmp_path: Path, given: Given) -> None:
    first, second = two_saves(save, tmp_path, given)
    config = config_of(save).save
    writers = first["storage_writer"], second["storage_writer"]
    assert (writers == (None, None)) == (save == "async_own_writer")
    assert (writers[0] is writers[1]) == (config.writer != "new")
    for name, asked in (("async_stager", config.stager), ("planner", config.planner)):
        assert (name in first) == (asked is not None)
        if asked is not None:
            assert (first[name] is second[name]) == (asked.instance != "new")
    in_a_process = AsyncCheckpointerType.PROCESS if save == "async_process" else None
    assert {call.get("async_checkpointer_type") for call in given} == {in_a_process}


@pytest.mark.parametrize("save", ["async", "async_own_writer", "async_new_writer"])
def test_overlapping_saves_have_their_own_files(save: str, tmp_path: Path, given: Given) -> None:
    checkpointer = DcpCheckpointer(tmp_path, config_of(save), Alone())
    pending = [
        checkpointer.save({"model": {"w": torch.full((2,), float(slot))}}, str(tmp_path / f"{slot}"), slot)
        for slot in (1, 2)
    ]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()], (
        "each is held back until it is waited for"
    )
    for one in pending:
        one.wait()
    first, second = (call["storage_writer"] for call in given)
    assert (first is second) == (save == "async_own_writer")
    held = [checkpointer.manifest(str(tmp_path / f"{slot}")).entries.keys() for slot in (1, 2)]
    assert held == [{"model.w"}] * 2
    checkpointer.close()


@pytest.mark.parametrize("slot", [0, 1])
@pytest.mark.parametrize("raised_by", ["async_save", "planner"])
def test_stager_of_a_save_that_raises_is_closed(
    slot: int, raised_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, closed = list[DefaultStager](), list[DefaultStager]()
    for name, noted in (("__init__", made), ("close", closed)):
        honest = getattr(DefaultStager, name)

        def note(stager: DefaultStager, *of: Any, honest: Any = honest, noted: Any = noted) -> None:
            noted.append(stager)
            honest(stager, *of)

        monkeypatch.setattr(DefaultStager, name, note)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no such device")

    config = config_of("async_stager")
    if raised_by == "planner":
        config.save.planner = PlannerConfig(Kept.new)
        monkeypatch.setattr(dcp_module, "DefaultSavePlanner", fail)
    monkeypatch.setattr(dcp, "async_save", fail)
    checkpointer = DcpCheckpointer(tmp_path, config, Alone())
    with pytest.raises(RuntimeError, match="no such device"):
        checkpointer.save({"model": {"w": torch.ones(1)}}, str(tmp_path / "one"), slot)
    assert closed == made
    assert len(made) == (raised_by == "async_save")


@pytest.mark.parametrize("save", [save for save in ASYNC if config_of(save).save.stager])
def test_stager_has_its_options_and_is_closed(
    save: str, tmp_path: Path, given: Given, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[DefaultStager] = []
    close = DefaultStager.close
    monkeypatch.setattr(DefaultStager, "close", lambda self: (closed.append(self), close(self))[1])
    first, second = two_saves(save, tmp_path, given)
    asked = config_of(save).save.stager
    assert asked is not None
    options = {name: value for name, value in vars(asked).items() if name != "instance"}
    assert vars(first["async_stager"]._config) == options
    assert {id(one) for one in closed} == {id(first["async_stager"]), id(second["async_stager"])}


def test_planner_has_its_options(tmp_path: Path, given: Given) -> None:
    first, _ = two_saves("sync_dedup_lowest", tmp_path / "lowest", given)
    assert first["planner"].dedup_save_to_lowest_rank
    given.clear()
    first, _ = two_saves("sync_plan_caching", tmp_path / "caching", given)
    assert first["planner"]._enable_plan_caching


def test_close_clears_what_dcp_keeps(tmp_path: Path) -> None:
    checkpointer = DcpCheckpointer(tmp_path, config_of("sync_plan_caching"), Alone())
    checkpointer.save({"model": {"w": torch.ones(2)}}, str(tmp_path / "1"))
    assert kept_by_dcp()
    checkpointer.close()
    assert kept_by_dcp() == {}
    assert _async_process_executor._CHECKPOINT_PROCESS is None


@pytest.mark.slow
@pytest.mark.parametrize("way", ["async_stager_kept", "async_process", "sync_plan_caching"])
def test_stale_stage_is_detected_on_ranks(tmp_path: Path, way: str) -> None:
    skip_if_saved_once(way)
    words = ("-m", f"save={way}", "parallel=fsdp2", "fault=none,stale_stage", "saves=2")
    ended = run(tmp_path / "sweep", *words, "device=cpu", "world_size=2", *SMALL)
    verdicts = {(row["save"], row["fault"]): row["status"] for row in ended.rows}
    assert len(verdicts) == 2, (ended.out, ended.err)
    for (save, fault), status in verdicts.items():
        assert status == ("pass" if fault in (None, "none") else "fail"), (save, fault, ended.out)
    assert [texts(rank, "left_behind") for row in ended.rows for rank in row["details"]["ranks"]] == [[]] * 4
