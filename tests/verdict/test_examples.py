"""The examples in the docstrings of core, verdict, rows and names of runs."""

import doctest
import importlib
import pkgutil

import pytest

import dcpbench.core
import dcpbench.verdict

MODULES = [
    module.name
    for package in (dcpbench.core, dcpbench.verdict)
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
] + [
    "dcpbench.records.row",
    "dcpbench.analysis.causes",
    "dcpbench.analysis.differing",
    "dcpbench.report.page.data",
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_print_what_they_show(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_every_value_has_an_example() -> None:
    finder = doctest.DocTestFinder()
    modules = [importlib.import_module(name) for name in MODULES]
    tests = [test for module in modules for test in finder.find(module) if test.examples]
    shown = {test.name.rpartition(".")[2] for test in tests}
    values = "AxisSpec CellKey CheckSpec CheckReport CommandSpec Compared Defect Expected FailedCheck Gap"
    values += " KnownFailure Measurement MetricSpec Mismatch Plugin RaisedError RankReport Row StageEnd"
    assert {*f"{values} StatusSpec Verdict".split()} <= shown
