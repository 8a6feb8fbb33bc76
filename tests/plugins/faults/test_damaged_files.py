"""Damage to the files of each storage is detected."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from dcpbench.checkpointers.dcp import DcpCheckpointer
from dcpbench.plugins.faults.expected import NothingToInjectError
from support.alone import ONCE, alone

SCENARIOS = {
    "fsspec": "save_load",
    "fsspec_memory": "save_load",
    "hf": "save_load",
    "hf_sharded": "save_load",
    "hf_consolidated": "model_only",
}
"""For each storage, the scenario in which the damage is the only error."""


@pytest.mark.cell
@pytest.mark.parametrize("storage", SCENARIOS)
def test_damaged_file_is_detected(storage: str) -> None:
    verdict, _ = alone("file_bit", storage=storage, scenario=SCENARIOS[storage], **ONCE)
    assert (verdict.status, verdict.fault_seen) == ("fail", True), verdict.reason


@pytest.mark.cell
def test_checkpoint_without_files_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DcpCheckpointer, "files", lambda *_: nullcontext(tmp_path / "none"))
    with pytest.raises(NothingToInjectError, match="has no files"):
        alone("file_stray", storage="file", **ONCE)
