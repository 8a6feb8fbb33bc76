"""The tree of commands: what each is called with, its help, and what is said of words that are none."""

import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import pytest

import dcpbench
from conftest import SMALL, TESTS
from conftest import dcpbench as run_dcpbench
from dcpbench.cli import described, run
from dcpbench.cli.commands import main, tree
from dcpbench.config.schema import Config, conf_folder
from dcpbench.core.axes import AXES


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What Hydra would be handed over."""
    handed: list[list[str]] = []

    def noted(words: Sequence[str]) -> int:
        handed.append([*words])
        return 0

    monkeypatch.setattr(run, "main", noted)
    return handed


@pytest.mark.parametrize(
    ("words", "handed"),
    [
        ("", []),
        ("parallel=fsdp", ["parallel=fsdp"]),
        ("-m parallel=fsdp,hsdp", ["-m", "parallel=fsdp,hsdp"]),
        ("--cfg job", ["--cfg", "job"]),
        ("-cd own parallel=ddp", ["-cd", "own", "parallel=ddp"]),
        ("run", []),
        ("run -m +model.options.x=1 ~a", ["-m", "+model.options.x=1", "~a"]),
        ("run --config-dir=own seed=1 -c job", ["--config-dir=own", "seed=1", "-c", "job"]),
        ("plan", ["plan=true"]),
        ("plan --all seed=1", ["seed=1", "plan=true", "plan_as=cells"]),
        ("plan seed=1 --json", ["seed=1", "plan=true", "plan_as=json"]),
        ("plan -m seed=1 --config-dir own", ["-m", "seed=1", "--config-dir", "own", "plan=true"]),
        ("resume a=b", ['resume="a=b"']),
        ("resume out rerun=failed -m", ["rerun=failed", "-m", 'resume="out"']),
    ],
)
def test_what_hydra_is_handed_over(words: str, handed: list[str], ran: list[list[str]]) -> None:
    assert main(words.split()) == 0
    assert ran == [handed]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("compre a b", "compre: is neither a command nor key=value; did you mean dcpbench compare?"),
        ("fsdp", "fsdp: is neither a command nor key=value; did you mean parallel=fsdp?"),
        ("seeds", "did you mean experiment=seeds?"),
        ("train_step", "did you mean train_steps=2?"),
        ("xyzzy", "dcpbench --help tells what there is"),
        ("run --multrun", "--multrun: no such option; did you mean --multirun?"),
        ("resume", "name the folder of the sweep first"),
        ("resume --cfg", "name the folder of the sweep first"),
        ("report", "Missing argument 'SWEEP...'"),
        ("report compare", "compare: no such folder; did you mean dcpbench compare?"),
        ("report /nowhere", "/nowhere: no sweep here"),
        ("report . --metrc save_s", "No such option '--metrc'"),
        ("report . --format jsn", "'jsn' is not one of 'table', 'markdown'"),
        ("history . --last 0", "0 is not in the range x>=1"),
        ("\x1b[31mfsdp\x1b[0m", r"\x1b[31mfsdp\x1b[0m: is neither"),
    ],
)
def test_what_is_wrong_is_one_line(
    words: str, told: str, ran: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n"), ran) == ("", 1, [])
    assert re.match(r"dcpbench( \w+)?: ", said.err)
    assert told in said.err


def helped(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main([*words, "--help"]) == 0
    return capsys.readouterr().out


def test_every_command_has_help_of_short_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert {*tree.commands} <= {*described.commands()}
    whole = helped([], capsys)
    for name, text in described.commands().items():
        assert re.search(rf"^  {name} +{re.escape(text[:30])}", whole, re.MULTILINE)
        own = helped([name], capsys)
        assert own.startswith(f"Usage: dcpbench {name} ")
        assert max(map(len, own.splitlines())) <= 100
    assert max(map(len, whole.splitlines())) <= 100


def test_run_help_describes_every_axis_and_key(capsys: pytest.CaptureFixture[str]) -> None:
    shown = "".join(helped(["run", "--config-dir", str(TESTS / "conf")], capsys).split())

    def is_told(text: str) -> bool:
        return "".join(text.split()) in shown

    there = described.described()
    assert {*there.axes} == {
        *(path.name for path in conf_folder().iterdir() if path.is_dir()),
        "fault",
        "load_parallel",
    }
    assert {*there.axes, *(name.split(".")[0] for name in there.keys)} >= {*Config.__dataclass_fields__}
    assert {*AXES} <= {*there.axes, *there.keys}
    assert {name: there.axes[name].text for name, spec in AXES.items() if spec.group} == {
        name: spec.help for name, spec in AXES.items() if spec.group
    }
    assert {name for name, key in there.keys.items() if not key.text} == set()
    assert there.keys["timeouts.cell_s"].default == "300"
    assert there.keys["matrix"].values == ("product", "pairwise")
    assert is_told("matrix=product pairwise: not every combination of the lists")
    for axis in there.axes.values():
        assert is_told(f"{axis.name}={axis.default}: {axis.text}")
        assert axis.text
        for value, text in axis.values.items():
            assert is_told(value if axis.name == "load_parallel" else value + text)
            assert text or axis.name == "fault", f"{axis.name}={value} says nothing of itself"
    for key in there.keys.values():
        assert is_told(f"{key.name}={key.default} {key.text}")
    assert "mine" in shown.partition("model=dummy")[2].partition("optimizer=")[0]


def test_the_versions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"dcpbench {dcpbench.__version__}\ntorch {version('torch')}\n"


@pytest.mark.parametrize("words", ["--help", "run --help", "--version", "--completion bash", "report -h"])
def test_a_full_disk_is_one_line(words: str) -> None:
    program = [sys.executable, "-m", "dcpbench", *words.split()]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(program, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr == "dcpbench: standard output cannot be written to: No space left on device\n"


def test_ctrl_c_is_no_traceback(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from dcpbench.report import show

    def interrupted(**_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(show, "main", interrupted)
    assert main(["report", str(tmp_path)]) == 130


@pytest.mark.slow
def test_run_plan_and_resume_are_what_they_were(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    own = ["--config-dir", str(TESTS / "conf")]
    asked = [
        *own,
        "parallel=none",
        "world_size=1",
        "device=cpu",
        "saves=1",
        *SMALL,
        f"hydra.sweep.dir={folder}",
    ]
    planned = run_dcpbench("plan", *asked, folder=folder)
    assert (planned.status, "1 cell: 1 would run" in planned.out, folder.exists()) == (0, True, False)
    ended = run_dcpbench("run", *asked, folder=folder)
    assert (ended.status, len(ended.rows)) == (0, 1), ended.err
    again = run_dcpbench("resume", str(folder), folder=folder)
    assert (again.status, len(again.rows)) == (0, 1), again.err
    assert "0 cells in" in again.err
    assert sys.modules["dcpbench.cli.run"] is run


def test_a_terminal_is_told_something_before_all_of_the_configuration_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sead=1"]) == 2
    assert capsys.readouterr().err.startswith("dcpbench: ")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["sead=1"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert (first, second[:10]) == ("reading the configuration ...", "dcpbench: ")
    assert main(["sead=1", "--cfg", "job"]) == 2
    assert "reading" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["parallel=ddp", "--config-dir=mine", "seed=1"], ["--config-dir=mine"]),
        (["parallel=ddp", "--config-dir", "mine", "-m", "seed=1"], ["--config-dir", "mine", "-m"]),
        (["parallel=ddp", "-cd", "a=b", "seed=1"], ["-cd", "a=b"]),
        (["parallel=ddp", "--info", "seed=1"], ["--info"]),
        (["parallel=ddp", "--info", "config", "seed=1"], ["--info", "config"]),
    ],
)
def test_options_may_stand_between_overrides(words: list[str], options: list[str]) -> None:
    assert described.options_first(words) == [*options, "parallel=ddp", "seed=1"]
