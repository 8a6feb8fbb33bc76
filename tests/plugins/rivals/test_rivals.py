"""Faults in checkpointers other than DCP are detected, too. Contract tests cover all checkpointers."""

from pathlib import Path

import pytest

from conftest import seen_through

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("checkpointer", ["safetensors", "torch_checkpointing"])
def test_faults_are_detected_with_rivals(tmp_path: Path, checkpointer: str) -> None:
    pytest.importorskip(checkpointer)
    seen_through(tmp_path / "sweep", checkpointer)
