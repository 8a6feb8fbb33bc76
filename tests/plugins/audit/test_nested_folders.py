"""Deeply nested folders among checkpoints do not stop an audit."""

import os
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dcpbench.cli.commands import main
from support.adversary import nest


@pytest.mark.slow
def test_deeply_nested_folders_are_audited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = places = [tmp_path / name for name in ("one", "two")]
    for number, place in enumerate(places):
        checkpoint = place / "cell" / "step-1"
        checkpoint.mkdir(parents=True)
        dcp.save({"w": torch.ones(2)}, checkpoint_id=checkpoint, no_dist=True)
        os.utime(checkpoint / ".metadata", (1e9 + number, 1e9 + number))
    nest(one)
    nest(one / "cell" / "step-1")
    try:
        for words in (["audit", f"{one}/cell/step-1"], ["audit", "--newest", str(one), str(two)]):
            assert main(words) == 0, words
        assert capsys.readouterr().out.endswith(f"{two}/cell/step-1\n")
    finally:
        subprocess.run(["rm", "-rf", one], check=True)  # pytest could not
