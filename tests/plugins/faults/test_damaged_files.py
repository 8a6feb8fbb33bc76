"""What is damaged in the files of each storage is seen."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from dcpbench.checkpointers.dcp import DcpCheckpointer
from dcpbench.core.rank_report import NothingToInjectError
from support.alone import alone

ONE: dict[str, Any] = {"model": "short", "train_steps": 1, "resume_steps": 1, "saves": 1}
SEEN = {
    ("fsspec", "save_load"): "file_bit",
    ("fsspec_memory", "save_load"): "file_bit",
    ("hf", "save_load"): "safetensors_bit",
    ("hf_sharded", "save_load"): "safetensors_bit",
    ("hf_consolidated", "model_only"): "safetensors_bit",
}
"""A defect for each storage, and the scenario in which nothing else is wrong."""


@pytest.mark.cell
@pytest.mark.parametrize(("storage", "scenario"), SEEN)
def test_a_defect_is_seen(storage: str, scenario: str) -> None:
    verdict, _ = alone(SEEN[storage, scenario], storage=storage, scenario=scenario, **ONE)
    assert (verdict.status, verdict.fault_seen) == ("fail", True), verdict.reason


@pytest.mark.cell
def test_where_there_are_no_files_none_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DcpCheckpointer, "files", lambda *_: nullcontext(tmp_path / "none"))
    with pytest.raises(NothingToInjectError, match="has no files"):
        alone("file_stray", storage="file", **ONE)
