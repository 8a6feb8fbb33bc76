"""Commands: their words, their help, and what wrong words are answered."""

import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.types import Override

import dcpbench
from conftest import TESTS, Command
from dcpbench.cli import keys_help, run
from dcpbench.cli.commands import main, tree
from dcpbench.config.schema import Config, conf_folder
from dcpbench.core.axes import AXES
from support.commands import python


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Words that Hydra would be given, and the options of the command."""
    handed: list[list[str]] = []

    def noted(overrides: Sequence[Override], config_dir: Path | None, cfg: str | None, **options: Any) -> int:
        own = [f"--config-dir={config_dir}"] if config_dir else []
        chosen = [f"{name}:{value}" for name, value in options.items() if value]
        words = [str(one.input_line) for one in overrides]
        handed.append([*own, *words, *([cfg] if cfg else []), *sorted(chosen)])
        return 0

    monkeypatch.setattr(run, "main", noted)
    return handed


@pytest.mark.parametrize(
    ("words", "handed"),
    [
        ("-m parallel=fsdp,hsdp", ["parallel=fsdp,hsdp"]),
        ("--cfg job", ["job"]),
        (
            "parallel=ddp --config-dir=own -m seed=1",
            ["--config-dir=own", "parallel=ddp", "seed=1"],
        ),
        ("parallel=ddp -cd a=b seed=1", ["--config-dir=a=b", "parallel=ddp", "seed=1"]),
        ("run", []),
        ("run -m +model.options.x=1 ~a", ["+model.options.x=1", "~a"]),
        ("run --config-dir=own seed=-1 -c job", ["--config-dir=own", "seed=-1", "job"]),
        ("plan", ["plan:table"]),
        ("plan --all seed=1 --format markdown", ["seed=1", "every:True", "plan:markdown"]),
        ("plan seed=1 --json", ["seed=1", "plan:json"]),
        ("plan --resume out --trust", ["plan:table", "resume:out", "trust:True"]),
        ("resume out retry=0 -m", ["retry=0", "resume:out"]),
        ("resume --rerun-failed a/b", ["rerun_failed:True", "resume:a/b"]),
    ],
)
def test_words_for_hydra(words: str, handed: list[str], ran: list[list[str]]) -> None:
    assert main(words.split()) == 0
    assert ran == [handed]


INTERRUPTED_IN_TEXT = """
import dcpbench.__main__
from contextlib import suppress
from dcpbench.cli import commands

def interrupted(words):
    with suppress(KeyboardInterrupt):
        exec("raise KeyboardInterrupt")
    return 130

commands.main = interrupted
dcpbench.__main__.main()
"""


def test_an_interrupt_within_executed_text_is_a_status(tmp_path: Path) -> None:
    (tmp_path / "interrupted.py").write_text(INTERRUPTED_IN_TEXT)
    ended = python("-m", "interrupted", cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (130, "")


def test_help_lines_are_short(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert {*tree.commands} <= {*keys_help.commands()}
    whole = command("--help").out
    for name, text in keys_help.commands().items():
        assert re.search(rf"^  {name} +{re.escape(text[:30])}", whole, re.MULTILINE)
        own = command(name, "--help").out
        assert own.startswith(f"Usage: dcpbench {name} ")
        assert max(map(len, own.splitlines())) <= 100
    assert max(map(len, whole.splitlines())) <= 100


@pytest.mark.parametrize("columns", ["80", "120"])
def test_run_help_is_one_screen(columns: str, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    lines = command("run", "--help").out.splitlines()
    assert len(lines) <= 48
    known = keys_help.keys() | keys_help.groups()
    for name in AXES:
        (line,) = [line for line in lines if line.startswith(f"  {name}={known[name].default} ")]
        assert line.split(maxsplit=1)[1][:10] == known[name].help[:10]


def test_every_axis_and_key_has_help(command: Command) -> None:
    groups, keys = keys_help.groups(), keys_help.keys()
    folders = {path.name for path in conf_folder().iterdir() if path.is_dir()}
    assert {*groups} == {*folders, "fault", "load_parallel"}
    assert {*groups, *(name.split(".")[0] for name in keys)} >= {*Config.__dataclass_fields__}
    assert {*AXES} <= {*groups, *keys}
    assert {name: groups[name].help for name in AXES if name in groups} == {
        name: spec.help for name, spec in AXES.items() if spec.group
    }
    assert {name for name, key in keys.items() if not key.help} == set()
    assert keys["timeouts.cell_s"].default == "300"
    assert [*keys["matrix"].values] == ["product", "pairwise"]
    for name, group in groups.items():
        shown_lines = command("run", "--config-dir", TESTS / "conf", "--help", name).out
        shown = "".join(shown_lines.split())
        assert "".join(f"{name}={group.default}: {group.help}.".split()) in shown
        for value, text in group.values.items() if name != "load_parallel" else ():
            assert "".join(f"{value}{text}".split()) in shown
            assert text or name == "fault", f"{name}={value} has no help"
        words = re.findall(r"\w+", shown_lines)
        assert (name == "model") is ("mine" in words)
    assert "Train, save, train on" in command("run", "--help", "scenario=convert").out
    shown = "".join(command("run", "--help", "keys").out.split())
    for key in keys.values():
        assert "".join(f"{key.name}={key.default}{key.full_help}".split()) in shown


def test_version_names_torch(command: Command) -> None:
    assert command("--version").out == f"dcpbench {dcpbench.__version__}\ntorch {version('torch')}\n"


@pytest.mark.slow
@pytest.mark.parametrize("words", ["--help", "run --help", "--version", "report -h"])
def test_a_full_disk_is_one_line(words: str) -> None:
    program = [sys.executable, "-m", "dcpbench", *words.split()]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(program, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr == "dcpbench: standard output cannot be written to: No space left on device\n"


def test_ctrl_c_prints_no_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from dcpbench.report import show

    def interrupted(**_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(show, "main", interrupted)
    assert main(["report", str(tmp_path)]) == 130


def test_agent_of_a_refused_sweep_is_ended(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    """It would go on importing torch, with the pipes of the driver open."""
    calls: list[str] = []
    monkeypatch.setattr(run, "own_agent", lambda _: calls.append("began"))
    monkeypatch.setattr(run, "end_own_agent", lambda: calls.append("ended"))
    command("seed=1", "sead=1", status=2)
    assert calls == ["began", "ended"]
