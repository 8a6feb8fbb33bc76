"""A plug-in of pytest: the fixture `resume_check`, for a training script or a workload of yours.

Pytest imports this module whenever it starts, so nothing else of dcpbench is imported before a test needs it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from dcpbench.api import Result


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for the folder of results."""
    parser.getgroup("dcpbench").addoption(
        "--dcpbench-dir",
        metavar="FOLDER",
        type=Path,
        help="Folder of the results of `resume_check`, one below it for each check. Default: pytest's own.",
    )


@pytest.fixture
def resume_check(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Result]:
    """A function that checks that training resumes exactly, and fails the test if not.

    It takes a sequence of words and the arguments of `api.script`, or the arguments of `api.check`. Its
    result, whose rows are in the test's report, is returned.
    """
    name = re.sub(r"[^\w.-]+", "-", request.node.nodeid)[-80:].strip("-")
    folder = request.config.getoption("--dcpbench-dir") or tmp_path
    places = (Path(folder, f"{name}-{number}" if number else name) for number in itertools.count())

    def check(what: Any = None, **keys: Any) -> Result:
        __tracebackhide__ = True
        from dcpbench import api

        place = next(place for place in places if not place.exists())
        is_script = isinstance(what, Sequence) and not isinstance(what, str)
        result = (
            api.script(what, folder=place, **keys) if is_script else api.check(what, folder=place, **keys)
        )
        request.node.add_report_section("call", "dcpbench", str(result))
        result.raise_if_failed()
        return result

    return check
