"""What the docs show of the report is what it does."""

import ast
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from dcpbench.analysis.frame import read_sweeps
from dcpbench.report.__main__ import main

DOCS = Path(__file__).parents[2] / "docs"
CONSOLE = re.compile(r"```console\n\$ python -m dcpbench\.report ([^\n]*)\n(.*?)```", re.DOTALL)
EXAMPLES = CONSOLE.findall((DOCS / "report.md").read_text())
NOTEBOOK = DOCS / "notebook.ipynb"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(DOCS / "sample-sweep", tmp_path / "docs" / "sample-sweep")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("arguments", "output"), EXAMPLES)
def test_the_examples_print_what_they_show(
    arguments: str, output: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(shlex.split(arguments)) == 0
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == output.splitlines()


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 4


def test_the_notebook_runs(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each code cell; the value of its last expression is something to look at."""
    monkeypatch.chdir("docs")
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert cells[0]["source"][0] == "from dcpbench.report import read_sweeps\n"
    known: dict[str, object] = {}
    for cell in cells:
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop()
        assert isinstance(last, ast.Expr), "a cell ends with what it shows"
        exec(compile(tree, "notebook", "exec"), known)
        shown = eval(compile(ast.Expression(last.value), "notebook", "eval"), known)
        assert len(shown) > 0
        (output,) = [item for item in cell["outputs"] if item["output_type"] == "execute_result"]
        assert output["data"]["text/plain"], (
            "jupyter nbconvert --to notebook --execute --inplace docs/notebook.ipynb"
        )


def test_the_notebook_is_small_and_of_the_sample() -> None:
    assert NOTEBOOK.stat().st_size < 200_000
    sample = read_sweeps([DOCS / "sample-sweep"])
    assert (len(sample.frame), sample.left_out) == (40, [])
