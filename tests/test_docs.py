"""Tests of README, docs/, their samples, and the site."""

import ast
import json
import math
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import yaml

from conftest import dcpbench
from dcpbench.core.checks import CHECKS
from dcpbench.core.statuses import STATUSES
from support.commands import python, script

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
NOTEBOOK = DOCS / "notebook.ipynb"


SAMPLES = script("scripts/samples")
PAGES = [page for page in SAMPLES.pages() if "```console" in page.read_text()]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the runner of samples, which runs each once for all pages."""
    return SAMPLES.Samples(tmp_path_factory.mktemp("samples"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    PAGES,
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_samples_match_their_commands(page: Path, running: Any) -> None:
    text = page.read_text()
    if "outputs/fixed" in text:  # a sweep of the first page
        list(running.differing(PAGES[0].read_text()))
    assert list(running.differing(text)) == [], "make samples"


def test_console_blocks_are_samples() -> None:
    for page in PAGES:
        marked = sum(found["kind"] == "console" for found in SAMPLES.MARKED.finditer(page.read_text()))
        assert marked == page.read_text().count("```console\n"), page
    assert {page.name for page in PAGES} >= {"README.md", "report.md", "resume-exact.md"}


@pytest.mark.parametrize(("page", "names"), [("checks", CHECKS), ("statuses", STATUSES)])
def test_every_check_and_status_is_documented(page: str, names: dict[str, object]) -> None:
    text = (DOCS / f"concepts/{page}.md").read_text()
    assert {name for name in names if f"\n| `{name}` | " not in text} == set()


def test_reference_is_up_to_date() -> None:
    pages = script("scripts/site_pages")
    assert pages.REFERENCE.read_text() == pages.reference_page(), "python scripts/site_pages.py"


def test_files_on_the_page_of_the_architecture_exist() -> None:
    """A name without a folder is in that of the one before."""
    sections = re.findall(r"^## The way of .*?(?=^## )", (DOCS / "architecture.md").read_text(), re.M | re.S)
    assert len(sections) == 3
    for section in sections:
        folder = ""
        for name in re.findall(r"`([\w/]+\.py)`", section):
            folder = name.rpartition("/")[0] or folder
            assert (ROOT / "src/dcpbench" / folder / Path(name).name).exists(), name


_FILE = re.compile(r"<!-- file: (\S+) -->\n```(?:yaml|python)\n(.*?)```", re.DOTALL)
EXPERIMENTS = {
    place: page
    for page in sorted(DOCS.rglob("*.md"))
    for place, _ in _FILE.findall(page.read_text())
    if "/experiment/" in place
}
MODEL = DOCS / "tutorials" / "resume-exact.md"


@pytest.mark.slow
@pytest.mark.parametrize("place", EXPERIMENTS)
def test_documented_experiment_is_planned(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (
        file for page in (MODEL, EXPERIMENTS[place]) for file in _FILE.findall(page.read_text())
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    conf, experiment = place.split("/experiment/")
    words = ("--config-dir", conf, f"experiment={experiment.removesuffix('.yaml')}", "device=cpu")
    ended = dcpbench("plan", *words, folder=tmp_path / "sweep", cwd=tmp_path)
    assert ended.status == 0, ended.err
    if place.endswith("gate.yaml"):  # the block with the repeats has the cells of both
        assert "4 cells in 12 runs: 12 would run" in ended.out


def test_workflows_are_valid() -> None:
    """Each is read-only, and uses only pinned actions."""
    paths = sorted((ROOT / ".github/workflows").iterdir())
    done = python("-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", *paths)
    assert done.returncode == 0, done.stdout
    for written in [yaml.safe_load(path.read_text()) for path in paths]:
        steps = [step for job in written["jobs"].values() for step in job["steps"]]
        used = [step["uses"] for step in steps if "uses" in step]
        assert all(re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", one) for one in used), used
        assert written["permissions"] == {"contents": "read"}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(DOCS / "sample-sweep", tmp_path / "docs" / "sample-sweep")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_notebook_runs(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each code cell; its last expression has a value."""
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


def test_recipes_log_each_cell_to_a_tracker(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The packages of the trackers are replaced: none is installed for tests."""
    (root / "outputs").mkdir()
    (root / "docs/sample-sweep").rename(root / "outputs/nightly")
    section = (DOCS / "api.md").read_text().partition("## Log to ")[2].partition("\n## ")[0]
    first, *recipes = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    trackers = {name: MagicMock() for name in ("torch.utils.tensorboard", "mlflow", "wandb")}
    for name, module in trackers.items():
        monkeypatch.setitem(sys.modules, name, module)
    for recipe in recipes:
        exec(first + recipe, known := {})
    params, metrics = known["params"], known["metrics"]
    assert params.keys() >= {"cell", "status", "parallel", "torch_version"}
    assert metrics.keys() >= {"save_s", "world_size", "model_equal"}
    assert {*map(type, params.values())} == {str}
    assert {*map(type, metrics.values())} == {float}
    assert not any(map(math.isnan, metrics.values()))
    tensorboard, mlflow, wandb = trackers.values()
    writer = tensorboard.SummaryWriter.return_value.__enter__.return_value
    for logged in (writer.add_hparams, mlflow.log_params, mlflow.log_metrics, wandb.init):
        assert logged.call_count == 40
