"""Checkpointers beside DCP are seen through as it is; their contract is that of any checkpointer."""

from pathlib import Path

import pytest

from conftest import seen_through

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("checkpointer", ["safetensors", "torch_checkpointing"])
def test_they_are_seen_through_by_the_same_faults(tmp_path: Path, checkpointer: str) -> None:
    pytest.importorskip(checkpointer)
    seen_through(tmp_path / "sweep", checkpointer)
