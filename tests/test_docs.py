"""Tests of README, docs/, their samples, and the site."""

import ast
import json
import math
import re
import shlex
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import yaml

from conftest import tiered
from dcpbench.cli import reference
from dcpbench.code.provenance import conf_folders
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


OF_EACH_COMMAND = ("report.md", "audit.md")


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    tiered(PAGES, *(page for page in PAGES if page.name in OF_EACH_COMMAND)),
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


@pytest.mark.parametrize(
    ("marked", "was", "now"),
    [
        ("sample", "printf 'save_s 0.1\\n'", "printf 'save_s 0.2\\n'"),
        ("timed sample", "echo pass 0.1", "echo fail 0.1"),
        ("timed sample at 100", "echo 2 cells", "echo 3 cells"),
    ],
)
def test_stale_sample_is_detected(marked: str, was: str, now: str, tmp_path: Path) -> None:
    samples = SAMPLES.Samples(tmp_path)
    made = samples.made(f"<!-- {marked} -->\n```console\n$ {was}\n```\n")
    assert list(samples.differing(made)) == []
    assert len(list(samples.differing(made.replace(was, now)))) == 1


def test_timed_sample_ignores_only_times(tmp_path: Path) -> None:
    samples, block = SAMPLES.Samples(tmp_path), "<!-- timed sample{} -->\n```console\n$ {}\n{}```\n"
    assert list(samples.differing(block.format("", "echo took 0.25 s", "took 11.5  s\n"))) == []
    assert list(samples.differing(block.format(", ends with 1", "exit 1", ""))) == []
    with pytest.raises(SAMPLES.StaleError, match="ended with 1"):
        list(samples.differing(block.format("", "exit 1", "")))


def test_undescribed_column_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = script("scripts/site_pages")
    assert "| `flaky` | true or false |" in pages._columns()
    texts = pages.column_help() | {"flaky": ""}
    monkeypatch.setattr(pages, "column_help", lambda: texts)
    with pytest.raises(ValueError, match="flaky"):
        pages._columns()


@pytest.mark.parametrize(("page", "names"), [("checks", CHECKS), ("statuses", STATUSES)])
def test_every_check_and_status_is_documented(page: str, names: dict[str, object]) -> None:
    text = (DOCS / f"concepts/{page}.md").read_text()
    assert {name for name in names if f"\n| `{name}` | " not in text} == set()


def test_reference_is_up_to_date() -> None:
    pages = script("scripts/site_pages")
    assert pages.REFERENCE.read_text() == pages.reference_page(), "python scripts/site_pages.py"


def test_pages_of_plugins_name_their_values() -> None:
    axes = {name for name in reference.groups() if name not in ("load_parallel", "fault", "experiment")}
    _, *added = conf_folders()
    for folder in added:
        page = (DOCS / "plugins" / f"{folder.parent.name}.md").read_text()
        there = {path.stem for name in axes for path in folder.glob(f"{name}/*.yaml")}
        assert {value for value in there if not re.search(rf"\b{value}\b", page)} == set()


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("page.md", "It is\ntold once.\n", 1),
        ("page.md", "| a | Held against b |\n", 1),
        ("page.md", "[mended](a.md) `told`\n", 1),
        ("module.py", "told = held = 1\n", 0),
        ("module.py", '"""It goes on."""\nmended = 1  # anew\n', 2),
    ],
)
def test_avoided_phrases_are_found(name: str, text: str, found: int, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    assert len([*script("scripts/words").avoided(tmp_path / name)]) == found


@pytest.mark.parametrize("page", [ROOT / "README.md", DOCS / "report.md"])
def test_pictures_fit_the_theme(page: Path) -> None:
    text = page.read_text()
    on_site = script("scripts/site_pages").on_page_markdown(text)
    assert "<picture" not in on_site
    shown = [*re.findall(r'^<img src="\S*-(light|dark)\.png#only-(light|dark)" ', on_site, re.MULTILINE)]
    assert shown == [("light", "light"), ("dark", "dark")] * text.count("<picture>") != []


def test_links_lead_somewhere_on_github(tmp_path: Path) -> None:
    links = script("scripts/links")
    assert [*links.broken(ROOT)] == []
    (tmp_path / "docs/plugins").mkdir(parents=True)
    (tmp_path / "src/dcpbench/plugins/kept").mkdir(parents=True)
    (tmp_path / "README.md").write_text(
        "# One `two`: three\n\n## A\n\n## A\n[it](docs/a.md#b-c) ![](no.png)\n"
    )
    lines = (
        "# B: c",
        "[up](../README.md#one-two-three) [again](../README.md#a-1) [lost](../README.md#a-2) [here](#b-c)",
        '[web](https://example.com/no) <img src="no.svg"> <source srcset="no-dark.svg"> `[code](no.md)`',
        "```\n[block](no.md)\n```",
        "[no plug-in](plugins/deleted.md#x) [no page](plugins/kept.md)",
    )
    (tmp_path / "docs/a.md").write_text("\n".join(lines))
    assert [line.split(": ")[:2] for line in links.broken(tmp_path)] == [
        ["README.md", "no.png"],
        ["docs/a.md", "../README.md#a-2"],
        ["docs/a.md", "no.svg"],
        ["docs/a.md", "no-dark.svg"],
        ["docs/a.md", "plugins/kept.md"],
    ]


@pytest.mark.slow
def test_broken_link_fails_the_build(tmp_path: Path) -> None:
    """Build with the options of `make docs`: with --quiet, mkdocs would count no warnings."""
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "mkdocs.yml"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("docs", "scripts"):
        shutil.copytree(ROOT / name, tmp_path / name)
    with (tmp_path / "docs/faq.md").open("a") as page:
        page.write("\n[Nowhere](nowhere.md)\n")
    found = re.search(r"\$\(BIN\)/mkdocs (.*)", (ROOT / "Makefile").read_text())
    assert found
    done = python("-m", "mkdocs", *shlex.split(found[1]), cwd=tmp_path)
    assert done.returncode == 1
    assert "nowhere.md" in done.stderr


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


def test_tests_that_are_left_out_have_a_target() -> None:
    """And a workflow runs it."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    hosts = yaml.safe_load((ROOT / ".github/workflows/hosts.yml").read_text())
    (job,), made = hosts["jobs"].values(), (ROOT / "Makefile").read_text()
    targets = [f"test-{marker}" for marker in re.findall(r"not (\w+)", settings["addopts"])]
    assert job["strategy"]["matrix"]["target"] == targets
    assert [target for target in targets if f"\n{target}:" not in made] == []


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
