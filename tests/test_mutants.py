"""`bench/mutants.py` can make the defects that are written down."""

import os
from pathlib import Path

from support.commands import python

MUTANTS = Path(__file__).resolve().parents[1] / "bench" / "mutants.py"


def test_the_planted_defects_are_of_code_that_is_there() -> None:
    # Another test of this process may have set it; then Python does not look beside the script.
    there = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    ended = python(MUTANTS, "--planted", "--list", timeout=60, env=there)
    assert ended.returncode == 0, ended.stderr
    assert "scenarios/save_load.py" in ended.stdout
