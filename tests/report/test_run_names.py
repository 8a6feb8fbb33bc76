"""The names of runs on the page: what varies in a sweep, and numbers."""

from typing import Any

import pytest

from dcpbench.report.page.rows import distinguishing, run_names


@pytest.mark.parametrize(
    ("axes", "names", "numbers"),
    [
        (
            {"save": ["sync", "async", "async"], "seed": [1, 2, 2], "parallel": ["ddp", "ddp", "fsdp"]},
            ["ddp \u00b7 sync", "ddp \u00b7 async", "fsdp \u00b7 async"],
            ["", "", ""],
        ),
        ({"parallel": ["ddp", "ddp"], "seed": [1, None]}, ["seed=1", "cell (1)"], ["", ""]),
        ({"parallel": ["ddp", "ddp"], "seed": [1, 1]}, ["ddp", "ddp"], ["repeat 0", "repeat 1"]),
        (
            {"parallel": ["x", None, "x"], "save": [None, "x", "y"]},
            ["x (1)", "x (2)", "x \u00b7 y"],
            [""] * 3,
        ),
    ],
)
def test_names_tell_what_varies(axes: dict[str, list[Any]], names: list[str], numbers: list[str]) -> None:
    named_by = distinguishing(axes, [name for name in ("parallel", "save") if name in axes])
    assert run_names(axes, named_by, [*range(len(names))]) == (names, numbers)
