"""Whatever asks a sweep to end, at whichever moment: a true last line, the rows and reports that there are,
and nobody left."""

import itertools
import signal
from pathlib import Path

import pytest

from conftest import tiered
from support.interruptions import SIGNALS, problems

pytestmark = pytest.mark.slow

# Each of them, so often, at each of 16 moments: bench/signals.py.
MOMENTS = ("planning", "row written", "report", "save", "upload")
HERE = [*zip(MOMENTS, itertools.cycle(SIGNALS), itertools.cycle((5, 1, 2)), strict=False)]


@pytest.mark.parametrize(("moment", "number", "times"), tiered(HERE, HERE[3]))
def test_it_ends_as_it_should(moment: str, number: signal.Signals, times: int, tmp_path: Path) -> None:
    assert problems(tmp_path, moment, number, times) == []
