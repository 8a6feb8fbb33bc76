"""The wheel: built, installed where the checkout cannot be seen, run from another folder."""

import json
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from conftest import ONE_STEP
from support.commands import git, program, python

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    python("-m", "build", "--wheel", "--outdir", out, ROOT, check=True)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def elsewhere(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The python of an environment that holds the wheel, and what it needs from this one's: not the
    checkout, since an editable install is a `.pth` file, and those are read in a site folder alone."""
    folder = tmp_path_factory.mktemp("venv")
    # Somebody else's repository around it: its commit must not pass for the wheel's.
    for words in (["init", "--quiet"], ["commit", "--quiet", "--allow-empty", "--message", "theirs"]):
        git(folder, *words)
    venv.create(folder)
    installed = folder / "bin" / "python"
    python(*("-m", "pip", "--python", installed, "install", "--no-deps", "--no-index", wheel), check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "needs.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return installed


def test_wheel_contains_conf_and_sweeper(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "dcpbench/conf/config.yaml" in names
    assert "dcpbench/conf/known_failures.yaml" in names
    assert {"dcpbench/py.typed", "dcpbench/results.schema.json"} <= {*names}
    assert "dcpbench/conf/experiment/seeds.yaml" in names
    assert "hydra_plugins/dcpbench_sweeper/sweeper.py" in names
    assert {f"dcpbench/report/page/{name}" for name in ("page.html", "page.css", "main.js")} <= set(names)
    assert "hydra_plugins/__init__.py" not in names
    assert not [name for name in names if name.startswith(("tests", "conf/"))]


def test_wheel_runs_elsewhere_with_custom_groups(elsewhere: Path, tmp_path: Path) -> None:
    own = tmp_path / "own" / "model"
    own.mkdir(parents=True)
    (own / "tiny.yaml").write_text(
        "name: tiny\ntarget: dcpbench.workloads.models.Mlp\noptions: {sizes: [3, 4, 2]}\n"
    )
    parallelism = tmp_path / "own" / "parallel" / "mine.yaml"
    parallelism.parent.mkdir()
    parallelism.write_text(
        "name: mine\ntarget: dcpbench.workloads.parallelisms.fsdp2\nmesh: [dp_shard]\ndp_shard: -1\n"
    )
    words = ["model=tiny", "device=cpu", "world_size=2", "scenario=convert", "load_parallel=mine"]
    words += ["saves=1", *ONE_STEP]
    ended = program(elsewhere, "-m", "dcpbench", "--config-dir", "own", *words, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "1 cell: 1 pass" in ended.stdout
    (sweep,) = (tmp_path / "outputs").iterdir()
    assert json.loads((sweep / "environment.json").read_text())["dcpbench_commit"] is None
    where = program(elsewhere, "-c", "import dcpbench; print(dcpbench.__file__)", cwd=tmp_path, check=True)
    assert str(ROOT) not in where.stdout
    command = elsewhere.with_name("dcpbench")
    assert program(command, "--version", cwd=tmp_path, check=True).stdout.startswith("dcpbench ")
    assert f"page: outputs/{sweep.name}/report.html" in ended.stderr
    none = program(command, "audit", "--newest", sweep, cwd=tmp_path)
    assert (none.returncode, none.stdout) == (2, "")  # keep_checkpoints=failed
    assert program(command, "report", sweep, cwd=tmp_path, check=True).stdout == ended.stdout
