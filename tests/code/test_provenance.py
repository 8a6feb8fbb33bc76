"""Which code a sweep ran: the commit of the user's checkout, the version of an installed package, files."""

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dcpbench.code import provenance
from dcpbench.code.provenance import SweepCode, package_digest
from dcpbench.code.sources import Source, changed_files, commits_text, recorded
from dcpbench.config.groups import ModelConfig, ScenarioConfig, WorkloadConfig
from dcpbench.config.schema import Config
from dcpbench.plan.plan import code_digest, own_packages
from dcpbench.runs.unsaved_values import is_user_module
from support.commands import git

A, B = "a" * 40, "b" * 40


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with one commit, in which modules of the user are found, as in the current folder."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "my_gpt.py").write_text("raise RuntimeError('the driver does not import it')\n")
    (folder / "README.md").write_text("mine\n")
    git(folder, "init", "--quiet")
    committed(folder)
    monkeypatch.syspath_prepend(folder)
    return folder


def committed(folder: Path) -> str:
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "change")
    return git(folder, "rev-parse", "HEAD")


def test_commit_is_that_of_the_targets_checkout(mine: Path) -> None:
    commit = git(mine, "rev-parse", "HEAD")
    assert provenance.commit_of("my_gpt.build") == provenance.commit_of("my_gpt:build") == commit
    (mine / "outputs").mkdir()
    (mine / "outputs/rows").write_text("not a source\n")
    assert provenance.commit_of("my_gpt.build") == commit, "files that are not tracked"
    (mine / "README.md").write_text("another\n")
    assert provenance.commit_of("my_gpt.build") == f"{commit}-dirty"
    git(mine, "checkout", "--quiet", ".")
    assert provenance.commit_of("my_gpt.build") == commit
    (mine / "my_new.py").write_text("")
    assert provenance.commit_of("my_new.build") == f"{commit}-dirty", "an untracked target"
    assert provenance.commit_of("my_gpt.build") == commit
    (mine / "my_package").mkdir()
    (mine / "my_package/models.py").write_text("")
    committed(mine)
    commit = git(mine, "rev-parse", "HEAD")
    assert provenance.commit_of("my_package.models.build") == commit
    (mine / "my_package/layers.py").write_text("")
    assert provenance.commit_of("my_package.models.build") == f"{commit}-dirty", "an untracked source"


def test_targets_without_a_checkout_have_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_loose.py").write_text("")
    targets = ("my_loose.build", "absent.build", "math.sqrt", "os.path.join", "collections.OrderedDict")
    assert [provenance.commit_of(target) for target in targets] == [None] * 5
    git(tmp_path, "init", "--quiet")
    assert provenance.commit_of("my_loose.build") is None, "no commit yet"
    committed(tmp_path)
    assert provenance.commit_of("my_loose.build")
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    monkeypatch.setattr(provenance, "_KEPT", ("GIT_TEST_",))
    assert provenance.commit_of("my_loose.build") is None, "another user's"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.commit_of("my_loose.build") is None, "no git"
    assert capfd.readouterr() == ("", "")


def test_git_runs_nothing_that_the_checkout_names(mine: Path, tmp_path: Path) -> None:
    """Its monitor, its hooks, and its filters, also one whose name looks like an assignment."""
    program, ran = tmp_path / "program", tmp_path / "ran"
    program.write_text(f'#!/bin/sh\necho "$0" >> {ran}\ncat\n')
    program.chmod(0o755)
    commit = git(mine, "rev-parse", "HEAD")
    (mine / ".git/info/attributes").write_text("*.py filter=a=b.c\n*.md filter=lasting\n")
    (mine / "hooks").mkdir()
    (mine / "hooks/post-index-change").symlink_to(program)
    settings = {
        "core.fsmonitor": program,
        "core.hooksPath": mine / "hooks",
        "filter.a=b.c.clean": program,
        "filter.a=b.c.required": "true",
        "filter.lasting.process": program,
        "diff.external": program,
        "core.pager": program,
    }
    for name, value in settings.items():
        git(mine, "config", name, str(value))
    index = (mine / ".git/index").read_bytes()
    for name in ("my_gpt.py", "README.md"):  # git has to read them again
        (mine / name).write_text((mine / name).read_text())
    assert provenance.commit_of("my_gpt.build") == commit
    (mine / "my_gpt.py").write_text("changed\n")
    assert provenance.commit_of("my_gpt.build") == f"{commit}-dirty"
    assert not ran.exists(), ran.read_text()
    assert (mine / ".git/index").read_bytes() == index, "nothing is written"
    subprocess.run(["git", "-C", mine, "status"], capture_output=True, check=False)
    assert ran.exists(), "they would have run"


def test_checkout_is_that_of_the_real_file(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = git(mine, "rev-parse", "HEAD")
    inner = mine / "my_nested/inner"
    inner.mkdir(parents=True)
    (inner / "models.py").write_text("")
    git(inner, "init", "--quiet")
    of_inner = committed(inner)
    assert provenance.commit_of("my_nested.inner.models.build") == of_inner != commit
    (mine / "my_link.py").symlink_to(inner / "models.py")
    assert provenance.commit_of("my_link.build") == of_inner
    git(tmp_path, "init", "--quiet")
    committed(tmp_path)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))  # as in a hook of git
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path))
    assert provenance.commit_of("my_gpt.build") == commit


LISTS = {
    "RECORD": "their_models/gpt.py,sha256=x,3\ntheir_module.py,,\n",
    "top_level.txt": "their_models\ntheir_module\n",
}


def install(site: Path, listed: str, text: str) -> None:
    """Write a package and a module with this text, as pip leaves them, listed in this file; and another."""
    content = {
        "their_models/gpt.py": text,
        "their_module.py": text,
        "their_models-1.2.dist-info/METADATA": "Metadata-Version: 2.1\nName: Their-Models\nVersion: 1.2\n",
        f"their_models-1.2.dist-info/{listed}": LISTS[listed],
        "other-3.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: other\nVersion: 3.0\n",
        "other-3.0.dist-info/top_level.txt": "other\n",
    }
    for name, written in content.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(written)


@pytest.mark.parametrize("listed", LISTS)
def test_installed_targets_have_their_version(
    listed: str, mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an environment inside the user's checkout."""
    install(site := mine / ".venv/site-packages", listed, "raise RuntimeError('not imported')\n")
    (site / "unlisted.py").write_text("")
    monkeypatch.syspath_prepend(site)
    commit = git(mine, "rev-parse", "HEAD")
    targets = ("their_models.gpt.build", "their_module.build", "unlisted.build")
    found = [*map(provenance.commit_of, targets)]
    assert found == ["Their-Models 1.2", "Their-Models 1.2", f"{commit}-dirty"]
    committed(mine)
    assert provenance.commit_of("their_models.gpt.build") == "Their-Models 1.2", "also where it is tracked"


def test_packages_beside_a_users_modules_are_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `pip install --target` leaves them; the metadata of a linked checkout are elsewhere."""
    install(tmp_path, "RECORD", "SEEN = 3\n")
    for name, text in (("mine/gpt.py", "SEEN = 3\n"), ("mine.egg-info/SOURCES.txt", "mine/gpt.py\n")):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    modules = ["their_models.gpt", "their_module", "mine.gpt"]
    files = [str(tmp_path / f"{module.replace('.', '/')}.py") for module in modules]
    assert [*map(provenance.owner_of, files)] == ["user"] * 3
    monkeypatch.syspath_prepend(tmp_path)
    assert [*map(provenance.owner_of, files)] == ["installed", "installed", "user"]
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    seen = [is_user_module(importlib.import_module(module).__name__) for module in modules]
    assert seen == [False, False, True]


@pytest.mark.parametrize(
    ("owner", "file"),
    [
        ("torch", torch.nn.__file__),
        ("installed", pytest.__file__),
        ("library", subprocess.__file__),
        ("library", "<string>"),
        ("dcpbench", provenance.__file__),
        ("user", __file__),
    ],
)
def test_files_have_owners(owner: str, file: str) -> None:
    assert provenance.owner_of(file) == owner


def test_compiled_code_is_not_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiled"))
    files = [str(tmp_path / name) for name in ("compiled/cc/kernel.py", "mine.py")]
    assert [*map(provenance.owner_of, files)] == ["library", "user"]


def test_all_targets_of_a_configuration_count(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DCPBENCH_PLUGINS", "my_plugins.plugin")
    (tmp_path / "more/my_plugins").mkdir(parents=True)
    declared = "plugin = Plugin(name='mine', api=1, hooks={'run': 'my_plugins.hook'})"
    hooks = f"from dcpbench.core.plugins import Plugin\n{declared}\n"
    (tmp_path / "more/my_plugins/plugin.py").write_text(hooks)
    (tmp_path / "more/my_scenario.py").write_text("")
    git(tmp_path / "more", "init", "--quiet")
    other, commit = committed(tmp_path / "more"), git(mine, "rev-parse", "HEAD")
    monkeypatch.syspath_prepend(tmp_path / "more")
    config = Config(
        workload=WorkloadConfig(target="my_gpt:build"),
        model=ModelConfig(target="torch.nn.Linear"),
        scenario=ScenarioConfig(name="mine", target="my_scenario.run"),
    )
    code = SweepCode()
    found = code.sources(own_packages(config))
    assert {name: (one.commit, [*one.files]) for name, one in found.items() if name.startswith("my_")} == {
        "my_gpt": (commit, ["my_gpt.py"]),
        "my_plugins": (other, ["my_plugins/plugin.py"]),
        "my_scenario": (other, ["my_scenario.py"]),
    }
    targets = ("my_scenario.run", "my_gpt:build", "my_scenario.other", "math.sqrt")
    assert code.commits(targets) == ", ".join(sorted([commit, other]))
    ours, before = code_digest(Config()), code_digest(config)
    for path in (mine / "my_gpt.py", tmp_path / "more/my_plugins/plugin.py"):
        path.write_text("CHANGED = 1\n")
        package_digest.cache_clear()
        assert code_digest(config) != before, path
        before = code_digest(config)
        assert code_digest(Config()) == ours or "my_plugins" in str(path), "whose targets are dcpbench's"


def test_large_packages_have_a_digest_alone(mine: Path) -> None:
    (mine / "my_large").mkdir()
    for number in range(501):
        (mine / f"my_large/part{number:03}.py").write_text("")
    large = SweepCode().sources({"my_large": ["my_large.part001.build"]})["my_large"]
    assert (large.files, large.commit) == ({}, f"{git(mine, 'rev-parse', 'HEAD')}-dirty")
    assert changed_files("my_large", [large], [Source(None, "1")]) == ["my_large"]
    (mine / "my_large/part000.py").unlink()
    assert len(SweepCode().sources({"my_large": []})["my_large"].files) == 500


def test_changed_files_are_named() -> None:
    old = Source(A, "0", {"m/a.py": "0", "m/b.py": "0", "m/c.py": "0"})
    new = Source(B, "1", {"m/a.py": "0", "m/b.py": "1", "m/d.py": "0"})
    assert changed_files("m", [old], [new]) == ["m/b.py", "m/c.py (removed)", "m/d.py (new)"]
    assert changed_files("m", [old], [Source(B, "0")]) == []
    assert changed_files("m", [old], [Source(B, "2", old.files)]) == ["m"], "not by what was recorded"
    assert changed_files("m", [old, new], [new, old]) == []


@pytest.mark.parametrize(
    ("before", "now", "text"),
    [
        (A, A, ""),
        (A, B, " (commit aaaaaaaaaaaa, now bbbbbbbbbbbb)"),
        (f"{A}-dirty", A, " (commit aaaaaaaaaaaa, now without uncommitted changes)"),
        (f"{A}-dirty", f"{A}-dirty", " (commit aaaaaaaaaaaa with other uncommitted changes)"),
        (f"{A}-dirty", B, " (commit aaaaaaaaaaaa with uncommitted changes, now bbbbbbbbbbbb)"),
        (None, A, " (no commit, now commit aaaaaaaaaaaa)"),
        ("gpt 1.0", "gpt 1.1", " (gpt 1.0, now gpt 1.1)"),
        (f"{A}, gpt 1.0", f"{A}, gpt 1.1", " (gpt 1.0, now gpt 1.1)"),
    ],
)
def test_no_commit_is_named_twice(before: str | None, now: str | None, text: str) -> None:
    assert commits_text(before, now) == text


@pytest.mark.parametrize(
    "environment",
    [{}, {"code": [1]}, {"code": {"a": 3}}, {"code": {"a": {"digest": 1}}}, {"earlier": 3}, {"earlier": [3]}],
)
def test_damaged_code_is_left_out(environment: dict[str, Any]) -> None:
    assert recorded(environment) == {}


def test_code_of_every_part_is_read() -> None:
    code = {"a": {"digest": "1", "commit": 3, "files": []}}
    earlier = [{"code": {"a": {"digest": "0"}, "b": {"digest": "2"}}}]
    assert recorded({"code": code, "earlier": earlier}) == {"a": Source(None, "1"), "b": Source(None, "2")}
