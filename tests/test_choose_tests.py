"""`scripts/choose_tests.py` runs the extended tests of changed code, and of nothing else."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))

import choose_tests

SOURCE = '''
"""A module."""

LIMIT = 3
"""A bound."""


class Counter:
    """A counter."""

    def more(self, by: int) -> int:
        """Add."""
        return self.count + by


def outer() -> int:
    def inner() -> int:
        """Return one."""
        return 1

    return inner()
'''


@pytest.mark.parametrize(
    ("before", "after", "changed"),
    [
        ('"""Add."""', '"""Add, and return the sum."""', []),
        ('"""Add."""\n', "# Adds.\n", []),
        ('        """Return one."""\n', "", []),
        ('"""A bound."""', "", []),
        ("self.count + by", "(\n            self.count + by  # the sum\n        )", []),
        ("self.count + by", "self.count - by", ["Counter.more"]),
        ("return 1", "return 2", ["outer"]),
        ("LIMIT = 3", "LIMIT = 4", [""]),
        ("class Counter:", "class Counter(dict):", [""]),
    ],
)
def test_only_changed_code_has_another_digest(before: str, after: str, changed: list[str]) -> None:
    old, new = (choose_tests.digests(text) for text in (SOURCE, SOURCE.replace(before, after)))
    assert old.keys() == new.keys() == {"", "Counter.more", "outer"}
    assert [name for name in old if old[name] != new[name]] == changed
